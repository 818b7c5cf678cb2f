"""A bare echo of a service: it takes a body, and gives back the bytes that the service answered to the same one.

It runs in a process of its own and does nothing else, so what a client reaches against it is the client's own ceiling.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, cast

import grpc

from service.load.processes import prepare_process

_BUFFER_BYTES = 2**20
_HEAD_END = b"\r\n\r\n"
_NUMBER = re.compile(rb"/echo/(\d+)")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def serve_echo(connection: Connection, answers: Sequence[bytes], over_grpc: bool) -> None:
    """What the process runs, until ``connection`` closes: its port goes there. ``answers`` are whole, by number."""
    prepare_process()
    serve = _serve_grpc if over_grpc else _serve_http
    with asyncio.Runner(loop_factory=_fastest_loop) as runner:
        runner.run(serve(connection, answers))


def _fastest_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _serve_http(connection: Connection, answers: Sequence[bytes]) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _HttpEcho(answers), "127.0.0.1", 0, backlog=2048)
    connection.send(server.sockets[0].getsockname()[1])
    await _closed(connection)
    server.close()


async def _serve_grpc(connection: Connection, answers: Sequence[bytes]) -> None:
    class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            answer = answers[int(details.method.removeprefix("/echo/"))]

            async def give(message: bytes, rpc_context: Any) -> bytes:
                return answer

            return grpc.unary_unary_rpc_method_handler(give)

    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(handlers=[Echo()], options=options)
    connection.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await _closed(connection)
    await server.stop(None)


async def _closed(connection: Connection) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(connection.fileno(), over.set)
    await over.wait()
    with suppress(EOFError, OSError):
        connection.recv()


class _HttpEcho(asyncio.BufferedProtocol):
    """Reads one request after another: heads as this package's own client writes them, bodies by their length."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self._answers = answers
        self._buffer = bytearray(_BUFFER_BYTES)
        self._head = b""
        self._left = 0
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        # Bodies are of no use here: each piece lies over the one before.
        return self._buffer

    def buffer_updated(self, num_bytes: int) -> None:
        if self._left == 0:
            self._head += self._buffer[:num_bytes]
            head, end, body = self._head.partition(_HEAD_END)
            if not end:
                return
            number, length = _NUMBER.search(head), _LENGTH.search(head)
            assert number is not None and length is not None
            self._answer, self._left, self._head = self._answers[int(number[1])], int(length[1]), b""
            num_bytes = len(body)
        self._left -= num_bytes
        if self._left <= 0:
            self._left = 0
            self._transport.write(self._answer)
