"""The gRPC server around its door: what it listens with, and how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from service.doors.rpc import RpcDoor

KEEPALIVE_MS = 60_000
MAX_PENDING_CALLS = 100_000
MAX_LENGTH = 2**31 - 1


class RpcServer:
    """A gRPC server around a door. Used from the loop in which it is made."""

    def __init__(self, door: RpcDoor, *, max_message_bytes: int, max_answer_bytes: int, max_calls: int) -> None:
        self.door = door
        self._server = grpc.aio.server(
            handlers=[door],
            maximum_concurrent_rpcs=max_calls,
            options=[
                # Or calls of a burst would be dropped by chance, as if their callers had cancelled them.
                ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
                ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
                # Or a port that another gRPC server holds would be shared with it, in silence.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", min(max_message_bytes, MAX_LENGTH)),
                ("grpc.max_send_message_length", min(max_answer_bytes, MAX_LENGTH)),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
                # Clients may ask as often as they like whether the server is there.
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )

    async def start(self, address: str, credentials: Any = None) -> int:
        """Listen on ``address``, under TLS with ``credentials``; gives the port. Raises: RuntimeError."""
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        await self._server.start()
        return int(port)

    async def stop(self, grace_s: float) -> int:
        """Take no more calls, finish those inside; gives how many were not, within ``grace_s``."""
        self.door.end_streams()
        stopping = asyncio.create_task(self._server.stop(grace_s + 1.0))
        unsent = 0
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.shield(stopping)
        except TimeoutError:
            unsent = self.door.num_calls + self.door.num_streams
            await self._server.stop(None)
        await stopping
        return unsent
