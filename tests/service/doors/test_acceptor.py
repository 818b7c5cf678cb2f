"""The listening socket: everyone who waits is taken in, at once and at the end."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from service.doors import acceptor
from service.doors.acceptor import Acceptor

WAIT_S = 30.0


class Greeter(asyncio.Protocol):
    """Says hello to whoever comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport) or hasattr(transport, "write")
        transport.write(b"hello")
        transport.close()


class Unwilling(socket.socket):
    """A listener that has no descriptors left, for so many times."""

    failures = 0

    def __init__(self) -> None:
        super().__init__()
        self.has_failed = threading.Event()

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            self.has_failed.set()
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


def run(law: Callable[[Unwilling], Awaitable[None]]) -> None:
    async def inside() -> None:
        with Unwilling() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(100)
            await asyncio.wait_for(law(listener), WAIT_S)

    uvloop.run(inside())


def callers(listener: socket.socket, count: int) -> list[socket.socket]:
    """Connected as far as the system is concerned; nobody has taken them in yet."""
    return [socket.create_connection(listener.getsockname(), timeout=WAIT_S) for _ in range(count)]


def greetings(waiting: list[socket.socket]) -> list[bytes]:
    found = []
    for one in waiting:
        with one:
            found.append(one.recv(100))
    return found


def test_whoever_waits_is_taken_in_within_one_turn() -> None:
    async def law(listener: Unwilling) -> None:
        waiting = callers(listener, 50)
        taken = Acceptor(listener, Greeter)
        assert await asyncio.to_thread(greetings, waiting) == [b"hello"] * 50
        taken.close()

    run(law)


def test_whoever_waits_when_the_port_closes_is_still_served() -> None:
    async def law(listener: Unwilling) -> None:
        taken = Acceptor(listener, Greeter)
        waiting = callers(listener, 50)
        taken.close()
        taken.close()
        await taken.wait_closed()
        assert await asyncio.to_thread(greetings, waiting) == [b"hello"] * 50

    run(law)


def test_without_descriptors_it_asks_again_later_and_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.01)

    async def law(listener: Unwilling) -> None:
        listener.failures = 3
        taken = Acceptor(listener, Greeter)
        assert await asyncio.to_thread(greetings, callers(listener, 5)) == [b"hello"] * 5
        assert not listener.failures
        taken.close()

    run(law)


def test_it_can_be_closed_while_it_has_no_descriptors() -> None:
    async def law(listener: Unwilling) -> None:
        listener.failures = 2
        taken = Acceptor(listener, Greeter)
        waiting = callers(listener, 1)
        assert await asyncio.to_thread(listener.has_failed.wait, WAIT_S)
        taken.close()
        assert listener.fileno() == -1
        for one in waiting:
            one.close()

    run(law)
