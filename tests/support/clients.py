"""Both clients behind one face, and what stands between them and a service: prepared answers, or a cut connection."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from service.client import AsyncAttentionClient, AttentionClient
from tests.support.clock import FakeClock

KINDS = ("sync", "async")
WAIT_S = 30.0
Handler = Callable[[httpx.Request], httpx.Response]


class Either:
    """A client whose methods give what they give, whether it waits or awaits."""

    def __init__(self, client: AttentionClient | AsyncAttentionClient, runner: asyncio.Runner) -> None:
        self.client = client
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        def call(*args: Any, **keywords: Any) -> Any:
            given = method(*args, **keywords)
            return self._runner.run(given) if inspect.iscoroutine(given) else given

        return call


@contextmanager
def client_of(kind: str, url: str, **options: Any) -> Iterator[Either]:
    """A client of either kind, closed at the end."""
    with asyncio.Runner() as runner:
        client = AttentionClient(url, **options) if kind == "sync" else AsyncAttentionClient(url, **options)
        either = Either(client, runner)
        try:
            yield either
        finally:
            either.close() if isinstance(client, AttentionClient) else either.aclose()


class Times:
    """A clock that only sleeping moves, and every sleep; ``draw`` is what chance gives."""

    def __init__(self, draw: float = 0.5) -> None:
        self.clock = FakeClock()
        self.slept: list[float] = []
        self.draw = draw

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.now += seconds

    async def _asleep(self, seconds: float) -> None:
        self._sleep(seconds)

    def options(self, kind: str) -> dict[str, Any]:
        sleep = self._sleep if kind == "sync" else self._asleep
        return {"clock": self.clock, "sleep": sleep, "random": lambda: self.draw}


def prepared(answers: Sequence[httpx.Response | Exception | Handler], asked: list[httpx.Request]) -> Handler:
    """Gives one after the other, the last for ever; ``asked`` keeps the requests, read."""

    def handle(request: httpx.Request) -> httpx.Response:
        answer = answers[min(len(asked), len(answers) - 1)]
        asked.append(request)
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            return answer(request)
        # A response can be read once.
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    return handle


class Cutting:
    """Stands before a service and passes everything on, of the first answers only so many bytes: then it hangs up.

    ``budgets`` has the bytes for each connection in turn, None for all of them, which holds for every later one too.
    """

    def __init__(self, port: int, budgets: Sequence[int | None]) -> None:
        self._port = port
        self._budgets = list(budgets)
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            budget = self._budgets[self.connections] if self.connections < len(self._budgets) else None
            self.connections += 1
            there = socket.create_connection(("127.0.0.1", self._port), timeout=WAIT_S)
            self._open += [caller, there]
            for source, target, limit in ((caller, there, None), (there, caller, budget)):
                thread = threading.Thread(target=self._pass_on, args=(source, target, limit))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                part = data if limit is None else data[: limit - passed]
                target.sendall(part)
                passed += len(part)
                if limit is not None and passed >= limit:
                    break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        for one in self._open:
            one.close()


@contextmanager
def cutting(port: int, *budgets: int | None) -> Iterator[Cutting]:
    between = Cutting(port, budgets)
    try:
        yield between
    finally:
        between.end()
