"""What Python can reach: one reused buffer a connection, SDPA on views of it, and none of what makes a service.

No routing, no checks, no limits; it takes what ``cells`` writes as safetensors and answers the bare context.
Run as ``python -m tests.benchmarks.bound PORT``.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import cast

import torch
import uvloop

from tests.benchmarks.headers import SHAPE

_SHAPE = f"\n{SHAPE}:".encode()
_LENGTH = b"\ncontent-length:"
_FIRST_BYTES = 1 << 18


class Bound(asyncio.BufferedProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do all of this and derive from none of it.
        self.transport = cast(asyncio.WriteTransport, transport)
        self.buffer = bytearray(_FIRST_BYTES)
        self.view = memoryview(self.buffer)
        self.shape: tuple[int, ...] = ()
        self.received = self.whole = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.view[self.received :]

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        if not self.whole and not self.read_head():
            return
        if self.received >= self.whole:
            self.answer()
            self.received = self.whole = 0

    def read_head(self) -> bool:
        end = self.buffer.find(b"\r\n\r\n", 0, self.received)
        if end < 0:
            return False
        head = bytes(self.view[: end + 2])
        self.whole = end + 4 + int(_value(head, _LENGTH))
        self.shape = (3, *(int(size) for size in _value(head, _SHAPE).split(b",")))
        if self.whole >= len(self.buffer):
            grown = bytearray(self.whole + 1)
            grown[: self.received] = self.view[: self.received]
            self.buffer, self.view = grown, memoryview(grown)
        return True

    def answer(self) -> None:
        count = torch.Size(self.shape).numel()
        tensors = torch.frombuffer(self.buffer, dtype=torch.float32, offset=self.whole - 4 * count, count=count)
        query, key, value = tensors.view(self.shape)
        context = torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.0).contiguous()
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % context.nbytes)
        self.transport.write(context.numpy().data.cast("B"))


def _value(head: bytes, name: bytes) -> bytes:
    begin = head.index(name) + len(name)
    return head[begin : head.index(b"\r", begin)]


async def serve(port: int) -> None:
    """Until SIGTERM."""
    torch.set_num_threads(1)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = await loop.create_server(Bound, "127.0.0.1", port, backlog=2048)
    await stop.wait()
    server.close()


if __name__ == "__main__":
    with torch.inference_mode():
        uvloop.run(serve(int(sys.argv[1])))
