"""A client that does what it is told to the byte: raw HTTP/1.1 over asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass

from tests.benchmarks.processes import HOST

READ_BYTES = 1 << 20
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class NoAnswer(Exception):
    """The connection ended before the answer was whole."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Header names are small letters."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def must_close(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"


def request_bytes(
    body: bytes, media_type: str, *, path: str = "/v1/attention", is_chunked: bool = False, more: str = ""
) -> bytes:
    """A whole request; ``more`` are header lines, each with its end."""
    length = "transfer-encoding: chunked" if is_chunked else f"content-length: {len(body)}"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {media_type}\r\n{more}{length}\r\n\r\n".encode()
    if not is_chunked:
        return head + body
    half = len(body) // 2 or len(body)
    parts = [part for part in (body[:half], body[half:]) if part]
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def get_bytes(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


class Connection:
    """One connection, kept until the server or the caller closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int, *, receive_bytes: int | None = None) -> Connection:
        """Raises: OSError. ``receive_bytes`` is what the system takes in before anybody reads."""
        loop = asyncio.get_running_loop()
        own = socket.socket()
        try:
            own.setblocking(False)
            if receive_bytes is not None:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            await loop.sock_connect(own, (HOST, port))
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            own.close()
            raise
        limit = READ_BYTES if receive_bytes is None else receive_bytes
        return cls(*await asyncio.open_connection(sock=own, limit=limit))

    async def ask(self, request: bytes) -> Reply:
        """Raises: NoAnswer."""
        await self.send(request)
        return await self.read()

    async def send(self, data: bytes) -> None:
        """Given back once the system has nearly all of it. Raises: NoAnswer."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError as error:
            raise NoAnswer(repr(error)) from None

    async def read(self) -> Reply:
        """The next answer that is none on the way (100). Raises: NoAnswer."""
        try:
            while True:
                head = await self._reader.readuntil(b"\r\n\r\n")
                status = int(head[9:12])
                if status >= 200:
                    break
            lines = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
            headers = {name.lower(): value.strip() for name, _, value in lines if name}
            body = await self._reader.readexactly(int(headers["content-length"]))
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise NoAnswer(repr(error)) from None
        return Reply(status, headers, body)

    async def read_some(self) -> bytes:
        """What comes first, empty at the end. Raises: NoAnswer."""
        try:
            return await self._reader.read(1024)
        except ConnectionError as error:
            raise NoAnswer(repr(error)) from None

    async def close(self) -> None:
        """With a FIN, or with a reset where something was not read."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def reset(self) -> None:
        """With a RST, whatever is still on its way."""
        own = self._writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
