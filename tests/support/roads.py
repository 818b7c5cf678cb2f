"""Both roads that an HTTP request may take, walked by hand: requests as bytes, answers read one after the other."""

from __future__ import annotations

import enum
import itertools
import re
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest
import torch
from torch import Tensor

from tests.support.bodies import JSON, SAFETENSORS, safetensors_body
from tests.support.factory import make_tensor
from tests.support.in_process import InProcess

WAIT_S = 20.0
NEVER_THE_SAME = ("x-request-id", "server-timing", "date", "content-length")
"""Headers of an answer that differ from one to the next; their names do not. Nor does the length of info's times."""


class Road(enum.Enum):
    """How a request is taken: without ASGI, or through it."""

    BINARY = "binary"
    ASGI = "asgi"

    @property
    def content_type(self) -> str:
        """The parameter means nothing, and only the road through ASGI reads parameters."""
        return SAFETENSORS if self is Road.BINARY else f"{SAFETENSORS};road=asgi"

    @property
    def other(self) -> Road:
        return Road.ASGI if self is Road.BINARY else Road.BINARY


BOTH = pytest.mark.parametrize("road", list(Road), ids=lambda road: road.value)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: headers by lower-case name, in order; no name comes twice."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"

    @property
    def timing(self) -> dict[str, float]:
        stages = re.findall(r"(\w+);dur=([0-9.]+)", self.headers["server-timing"])
        return {name: float(duration) for name, duration in stages}

    @property
    def data(self) -> bytes:
        """What follows the header of a safetensors answer: the numbers of its outputs."""
        assert self.status == 200, self.body[:300]
        return self.body[8 + int.from_bytes(self.body[:8], "little") :]

    def alike(self) -> tuple[int, dict[str, str], bytes]:
        """What must not differ between the roads: all but ids, times, and the times inside ``info``."""
        headers = {name: "" if name in NEVER_THE_SAME else value for name, value in self.headers.items()}
        return self.status, dict(sorted(headers.items())), self.data if self.status == 200 else self.body


class Caller:
    """A connection that says what it is told to, byte for byte."""

    def __init__(self, port: int, *, receive_buffer: int | None = None, timeout_s: float = WAIT_S) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout_s)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        """Each part in a segment of its own, as far as the system allows."""
        for part in parts:
            self.socket.sendall(part)

    def reply(self) -> Reply:
        """The next final answer; interim ones are passed over."""
        while True:
            while b"\r\n\r\n" not in self._received:
                self._more()
            head, _, _ = bytes(self._received).partition(b"\r\n\r\n")
            del self._received[: len(head) + 4]
            status_line, *lines = head.decode("latin-1").split("\r\n")
            match = re.fullmatch(r"HTTP/1\.1 (\d{3}) .*", status_line)
            assert match is not None, status_line
            status = int(match[1])
            if status >= 200:
                break
        pairs = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in pairs}
        assert len(headers) == len(pairs), lines
        length = int(headers["content-length"])
        while len(self._received) < length:
            self._more()
        body = bytes(self._received[:length])
        del self._received[:length]
        return Reply(status, headers, body)

    def replies(self, count: int) -> list[Reply]:
        return [self.reply() for _ in range(count)]

    def _more(self) -> None:
        part = self.socket.recv(2**20)
        assert part, f"closed after {bytes(self._received)[:300]!r}"
        self._received += part

    def until_closed(self) -> bytes:
        """What still comes; the connection must be closed in order."""
        while part := self.socket.recv(2**20):
            self._received += part
        return bytes(self._received)

    def until_gone(self) -> bytes:
        """What still comes; the connection may be reset, since it may have been closed while bytes were on the way."""
        try:
            return self.until_closed()
        except ConnectionResetError:
            return bytes(self._received)

    def end(self) -> None:
        """Say that nothing more will come."""
        self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Go away without a word."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def head_of(
    road: Road,
    length: int,
    *headers: str,
    path: str = "/v1/attention",
    content_type: str | None = None,
    version: str = "1.1",
) -> bytes:
    """A head up to its empty line, that makes its request take ``road`` unless what else it says prevents that."""
    lines = [
        f"POST {path} HTTP/{version}",
        "Host: x",
        f"Content-Type: {content_type or road.content_type}",
        f"Content-Length: {length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def request(road: Road, body: bytes, *headers: str, path: str = "/v1/attention") -> bytes:
    return head_of(road, len(body), *headers, path=path) + body


def chunked(body: bytes, *headers: str, size: int = 1000) -> bytes:
    """The same by the road of those who do not know the length before."""
    head = "\r\n".join(
        ["POST /v1/attention HTTP/1.1", f"Content-Type: {SAFETENSORS}", "Transfer-Encoding: chunked", *headers]
    )
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return head.encode() + b"\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


def json_request(text: bytes, *headers: str) -> bytes:
    return head_of(Road.ASGI, len(text), *headers, content_type=JSON) + text


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def tensors_of(
    tokens: int = 3, head_dim: int = 8, *, num_heads: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    names = ("query", "key", "value")
    return {
        name: make_tensor(1, num_heads, tokens, head_dim, seed=3 * seed + number, dtype=dtype)
        for number, name in enumerate(names)
    }


def body_of(
    tokens: int = 3,
    head_dim: int = 8,
    *,
    num_heads: int = 2,
    seed: int = 0,
    padding: int | None = None,
    **options: object,
) -> bytes:
    """A body of random query, key and value. ``padding`` spaces make its header, and so its data, lie elsewhere."""
    body = safetensors_body(tensors_of(tokens, head_dim, num_heads=num_heads, seed=seed), options)
    if padding is None:
        return body
    length = int.from_bytes(body[:8], "little")
    text = body[8 : 8 + length].rstrip(b" ") + b" " * padding
    return len(text).to_bytes(8, "little") + text + body[8 + length :]


def sized_body(num_bytes: int) -> bytes:
    """A body of exactly so many bytes, cheap to compute and with a short answer: one query, many keys."""
    num_keys = (num_bytes - 700) // 512
    assert num_keys > 0
    rows = make_tensor(1, 1, num_keys, 64)
    body = safetensors_body({"query": rows[:, :, :1], "key": rows, "value": rows}, {})
    length = int.from_bytes(body[:8], "little")
    text = body[8 : 8 + length].rstrip(b" ")
    text += b" " * (num_bytes - (len(body) - length) - len(text))
    return len(text).to_bytes(8, "little") + text + body[8 + length :]


def cuts(data: bytes, places: Iterable[int]) -> list[bytes]:
    """The parts between the places."""
    ends = sorted({0, len(data), *places})
    return [data[begin:end] for begin, end in itertools.pairwise(ends)]


def port_of(service: InProcess) -> int:
    return int(service.url.rsplit(":", 1)[1])


@contextmanager
def calls_to(service: InProcess) -> Iterator[httpx.Client]:
    """A client of a service that is ready."""
    with httpx.Client(base_url=service.url, timeout=WAIT_S) as client:
        while client.get("/readyz").status_code != 200:
            pass
        yield client


def figure(client: httpx.Client, series: str) -> float:
    """The value of one series of /metrics, 0 where it is not there yet."""
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(series + " "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0
