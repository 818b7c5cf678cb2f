"""What a connection does whose client is slow to read, told by a transport that sends nothing until it is asked to."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from uvicorn.server import ServerState

from attn_core import Engine
from service.doors.http_protocol import HttpProtocol
from service.doors.receive_buffers import LANDING_BYTES, ReceiveBuffer
from service.wire.plain_recipes import PlainRecipes
from tests.support.bodies import safetensors_body
from tests.support.in_process import GatedEngine, InProcess, service_in_process
from tests.support.roads import Road, body_of, calls_to, head_of, request

PLAIN = body_of()


class StuckTransport:
    """Keeps what is written; ``stuck`` is how much of it the client has not taken."""

    def __init__(self) -> None:
        self.written = b""
        self.is_stuck = False
        self.is_closed = False
        self.reads = True

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, pieces: Any) -> None:
        self.written += b"".join(pieces)

    def get_write_buffer_size(self) -> int:
        return len(self.written) if self.is_stuck else 0

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        """All is told by ``stuck``."""

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def answers(self) -> list[tuple[int, str]]:
        """Status and id of each."""
        found = []
        rest = self.written
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
            found.append((int(head[9:12]), fields["x-request-id"]))
            rest = rest[int(fields["content-length"]) :]
        return found


class Connection:
    """A protocol on such a transport; everything happens in the service's loop."""

    def __init__(self, service: InProcess) -> None:
        self.transport = StuckTransport()
        self._service = service
        self.protocol: HttpProtocol = service.call(self._make)

    def _make(self) -> HttpProtocol:
        def no_other_road(protocol: HttpProtocol) -> Any:
            raise AssertionError("handed over")

        protocol = HttpProtocol(
            self._service.parts.door,
            landing=ReceiveBuffer(LANDING_BYTES),
            make_asgi=no_other_road,
            server_state=ServerState(),
            loop=asyncio.get_running_loop(),
            head_timeout_s=30,
            keep_alive_s=30,
        )
        protocol.connection_made(self.transport)  # type: ignore[arg-type]
        return protocol

    def receive(self, *parts: bytes) -> None:
        """Each part by reads of its own, with other work of the loop between two parts."""
        for part in parts:
            self._service.call(functools.partial(self._read, part))

    def _read(self, data: bytes) -> None:
        while data:
            assert self.transport.reads and not self.transport.is_closed
            view = self.protocol.get_buffer(-1)
            count = min(len(view), len(data))
            view[:count] = data[:count]
            self.protocol.buffer_updated(count)
            data = data[count:]

    def take_all(self) -> None:
        """The client reads everything."""

        def take() -> None:
            self.transport.is_stuck = False
            self.protocol.resume_writing()

        self._service.call(take)

    def end(self) -> None:
        self._service.call(lambda: self.protocol.connection_lost(None))

    def until(self, is_so: Callable[[], bool]) -> None:
        while not self._service.call(is_so):
            pass


@contextmanager
def full(service: InProcess) -> Iterator[None]:
    """No place left."""
    admission = service.parts.admission
    permits = service.call(lambda: [admission.enter() for _ in range(admission.max_requests)])
    try:
        yield
    finally:
        service.call(lambda: [permit.leave() for permit in permits])


@pytest.fixture(scope="module")
def service() -> Iterator[InProcess]:
    engines = [Engine(device="cpu", max_threads=1) for _ in range(2)]
    with service_in_process(engines[0], loop_engine=engines[1], max_requests_inside=4) as running, calls_to(running):
        yield running


@pytest.fixture
def connection(service: InProcess) -> Iterator[Connection]:
    made = Connection(service)
    yield made
    made.end()
    admission = service.parts.admission
    assert service.call(lambda: (admission.requests_inside, service.parts.door.buffers.leased)) == (0, 0)


def marker(number: int) -> bytes:
    return request(Road.BINARY, PLAIN, f"X-Request-Id: {number}")


@pytest.mark.parametrize("part", [1, 100, 700, 1000])
def test_the_rest_of_what_was_refused_is_no_request_even_if_the_refusal_waits(
    service: InProcess, connection: Connection, part: int
) -> None:
    """The rest is a request itself, byte for byte: whoever forgot what is due would answer it."""
    rest = marker(666)
    text = head_of(Road.BINARY, len(rest), "X-Request-Id: 0") + rest
    with full(service):
        connection.transport.is_stuck = True
        connection.receive(text[: -len(rest)])
        connection.receive(*(rest[start : start + part] for start in range(0, len(rest), part)))
        connection.receive(marker(1)[:50], marker(1)[50:])
        connection.take_all()
    connection.receive(marker(2))
    connection.until(lambda: len(connection.transport.answers()) == 3)
    (refused, _), _, (last, _) = connection.transport.answers()
    assert [own for _, own in connection.transport.answers()] == ["0", "1", "2"]
    assert (refused, last) == (429, 200)


def test_part_of_the_rest_may_come_after_the_refusal_was_read(service: InProcess, connection: Connection) -> None:
    rest = marker(666)
    text = head_of(Road.BINARY, len(rest), "X-Request-Id: 0") + rest
    with full(service):
        connection.transport.is_stuck = True
        connection.receive(text[: -len(rest)], rest[:200])
        connection.take_all()
    connection.receive(rest[200:500], rest[500:] + marker(1))
    connection.until(lambda: len(connection.transport.answers()) == 2)
    assert connection.transport.answers() == [(429, "0"), (200, "1")]


@pytest.mark.parametrize("body", [PLAIN, body_of(outputs=["weights"]), b"xy"], ids=["at once", "manual", "malformed"])
def test_requests_behind_an_answer_that_waits_are_answered_in_order(
    service: InProcess, connection: Connection, body: bytes
) -> None:
    connection.receive(marker(0))
    connection.transport.is_stuck = True
    connection.receive(request(Road.BINARY, body, "X-Request-Id: 1") + marker(2)[:70], marker(2)[70:] + marker(3))
    connection.until(lambda: len(connection.transport.answers()) == 2)
    assert service.call(lambda: service.parts.admission.requests_inside) == 1
    connection.take_all()
    connection.until(lambda: len(connection.transport.answers()) == 4)
    assert [own for _, own in connection.transport.answers()] == ["0", "1", "2", "3"]


def test_a_client_that_ends_while_its_answer_waits_gets_the_rest_and_the_end(
    service: InProcess, connection: Connection
) -> None:
    connection.transport.is_stuck = True
    connection.receive(marker(0))
    assert service.call(connection.protocol.eof_received)
    assert not connection.transport.is_closed
    connection.take_all()
    assert connection.transport.is_closed


def test_a_client_that_ends_between_two_requests_is_closed(service: InProcess, connection: Connection) -> None:
    assert not service.call(connection.protocol.eof_received)
    connection.receive(marker(0))
    assert not service.call(connection.protocol.eof_received)


@pytest.mark.parametrize("is_squeezed", [False, True], ids=["plain", "gzipped"])
def test_a_request_that_was_given_up_is_answered_once(is_squeezed: bool) -> None:
    """The engine's answer comes while the refusal still waits for its reader."""
    engine = GatedEngine()
    zeros = safetensors_body({"query": torch.zeros(1, 2, 300, 32)}, {})
    encoding = "gzip" if is_squeezed else "identity"
    with service_in_process(engine) as running, calls_to(running):
        connection = Connection(running)
        connection.receive(request(Road.BINARY, zeros, "X-Request-Id: 0", f"Accept-Encoding: {encoding}"))
        engine.wait_until_entered()
        connection.transport.is_stuck = True
        drain = running.parts.lifecycle.drain
        running.call(lambda: asyncio.ensure_future(drain(notice_s=0, timeout_s=0.01)))
        connection.until(lambda: len(connection.transport.answers()) == 1)
        engine.open()
        # Whatever the engine has to say is said when this ends.
    assert connection.transport.answers() == [(503, "0")]


def test_a_header_that_claims_a_whole_body_is_not_looked_up(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    get = PlainRecipes.get

    def noted(self: PlainRecipes, header: bytes) -> Any:
        asked.append(len(header))
        return get(self, header)

    monkeypatch.setattr(PlainRecipes, "get", noted)
    for length in (2**40, 10**6, 4000):
        body = length.to_bytes(8, "little") + bytes(2 * 10**6)
        connection.receive(request(Road.BINARY, body, "X-Request-Id: 0"))
    connection.receive(marker(1))
    assert [status for status, _ in connection.transport.answers()] == [400, 400, 400, 200]
    assert max(asked) <= 2048
