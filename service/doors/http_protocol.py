"""uvicorn's HTTP protocol with what it leaves open: heads have a limit in size and time, a client that has said all
and closed its side still gets its answer, upgrades nobody asked us for are passed over, and what cannot be read as
HTTP is refused in the form of all other refusals.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from attn_core.errors import Fault
from service.doors.exchange import ABORT_EXTENSION, ExchangeLayer, server_timing
from service.doors.problem_details import MEDIA_TYPE, describe
from service.errors import Malformed

MAX_HEAD_BYTES = 64 * 1024
_UPGRADE = re.compile(rb"\r\n(upgrade[ \t]*:)", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """Given to ``uvicorn.Config(http=...)`` by ``http_protocol``."""

    head_timeout_s: ClassVar[float] = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._has_ended_message = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._start_head_timer()
            if b"pgrade" in data or b"PGRADE" in data:
                # HTTP lets a server ignore the wish; the parser would take the body for the other protocol's.
                head, end, rest = data.partition(b"\r\n\r\n")
                data = _UPGRADE.sub(rb"\r\nx-\1", head) + end + rest
        is_all_head = self._in_head
        self._has_ended_message = False
        super().data_received(data)
        if is_all_head and self._in_head and not self._has_ended_message:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"A head of over {MAX_HEAD_BYTES} bytes.")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answer of a client that has sent all of its request and closed its side."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        return True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._has_ended_message = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """Answer and close. A request that is not HTTP has no id yet, and gets one."""
        request_id = uuid.uuid4().hex
        error = Malformed("not HTTP/1.1", faults=[Fault("", "an HTTP/1.1 request", msg.rstrip(". "))])
        failure, body, _ = describe(error, request_id)
        head = (
            f"HTTP/1.1 {failure.http} Bad Request\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {request_id}\r\nserver-timing: {server_timing({}).decode()}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        if isinstance(self.app, ExchangeLayer):
            self.app.count_unreadable(failure.name, len(body))

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        waits_for_answer = self.cycle is not None and not self.cycle.response_complete
        if self._in_head and not waits_for_answer and not self.transport.is_closing():
            self.transport.close()


def http_protocol(*, head_timeout_s: float) -> type[HttpProtocol]:
    """The protocol with its time for heads, which uvicorn has no way to hand in."""
    return type("HttpProtocol", (HttpProtocol,), {"head_timeout_s": head_timeout_s})
