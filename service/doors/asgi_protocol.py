"""The road through ASGI: uvicorn's HTTP protocol with what it leaves open.

Heads have a limit in size and time; a client that has said all and closed its side still gets its answer; an upgrade
that is not served is passed over; what cannot be read as HTTP is refused in the form of all other refusals, and not
before the answers that are still due; a lost connection is known to every request on it. When it has answered and
nothing else was asked, the connection is given back to the road for binary bodies.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from attn_core.errors import Fault
from service.doors.exchange import (
    ABORT_EXTENSION,
    LOST_EXTENSION,
    PEER_EXTENSION,
    ClientLost,
    server_timing,
)
from service.doors.peer import PROBE, WATCH_S, has_closed_its_side, is_gone
from service.doors.refusals import refusal_of
from service.errors import Malformed

MAX_HEAD_BYTES = 64 * 1024
"""Names and values of all headers and trailers of one request."""
MAX_FRAMING_BYTES = 512 * 1024
FRAMING_PER_BODY_BYTE = 8
"""What one request may take besides its body: this and so much for each byte, since a chunk may be a byte long."""


class HeadTooLarge(Exception):
    """Raised in the parser's callback, which makes the parser fail."""


class AsgiProtocol(HttpToolsProtocol):
    """One connection, for as long as it is on this road; ``give_back`` is called when it leaves it in good order."""

    def __init__(
        self,
        *args: Any,
        head_timeout_s: float,
        count_unreadable: Callable[[str, int], None],
        give_back: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._count_unreadable = count_unreadable
        self.head_timeout_s = head_timeout_s
        self._give_back = give_back
        self._is_between = True
        self._is_probed = False
        self._watcher: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._fed_bytes = 0
        self._body_bytes = 0
        self._is_upgrade = self._is_head_whole = False
        self._is_deaf = False
        self._active: RequestResponseCycle | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def _is_serving(self) -> bool:
        return self._active is not None and not self._active.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        # uvicorn tells the request that was read last; with pipelining the one being served is another.
        for cycle in (self._active, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                lost: Any = cycle.scope["extensions"][LOST_EXTENSION]
                lost.tell()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                # A tunnel is no wish that could be passed over: it is all that was asked for.
                self._refuse("CONNECT, which asks for a tunnel")
            else:
                self._pass_over_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            too_large = isinstance(error.__context__, HeadTooLarge)
            self._refuse(f"a head of over {MAX_HEAD_BYTES} bytes" if too_large else str(error) or "something else")
            return
        self._fed_bytes += len(data)
        if self._fed_bytes - FRAMING_PER_BODY_BYTE * self._body_bytes - self._body_bytes > MAX_FRAMING_BYTES:
            self._refuse("too many bytes that are no body")
        elif not self._is_serving:
            # Whoever is not waiting for us keeps us waiting: that has an end.
            self._start_timer()
            if self._active is not None:
                self._leave()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answer of a client that has sent all of a request and closed its side."""
        active = self._active
        if active is None or active.response_complete or active.more_body:
            return False
        self._is_deaf = True
        while self.pipeline and self.pipeline[0][0].more_body:
            # The rest of this one will never come.
            self.pipeline.popleft()
        last = self.pipeline[0][0] if self.pipeline else active
        last.keep_alive = False
        self._watch()
        return True

    def _watch(self) -> None:
        """Whether the client still waits: if it is gone, so is its request; if it closed its side, ask it once.

        uvicorn does not read while a request is worked on, and so does not hear of it.
        """
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        active = self._active
        if active is None or active.response_started or self.transport.is_closing():
            return
        if is_gone(self.transport):
            self.transport.abort()
            return
        if not self._is_probed and (self._is_deaf or has_closed_its_side(self.transport)) and not active.more_body:
            self._is_probed = True
            if active.scope["http_version"] == "1.1":
                self.transport.write(PROBE)
        self._watcher = self.loop.call_later(WATCH_S, self._watch)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._fed_bytes = self._body_bytes = 0
        self._is_upgrade = self._is_between = self._is_head_whole = False
        extensions: Any = {
            ABORT_EXTENSION: self.transport.abort,
            LOST_EXTENSION: ClientLost(),
            PEER_EXTENSION: self.client,
        }
        self.scope["extensions"] = extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge
        if not self._is_head_whole:
            # What comes behind the body could pass for a key that was looked for before it, or for what a proxy said.
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._is_head_whole = True
        if self.parser.should_upgrade():
            # The parser ends the message here; it is read once more without the wish.
            self._is_upgrade = True
            return
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_upgrade:
            self._is_between = True
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_serving and not self._is_between and not self.transport.is_closing():
            # The rest of a body that was refused.
            self._start_timer()
        self._leave()

    def _leave(self) -> None:
        """Give the connection back, if nothing is due and nothing has begun."""
        if (
            self._give_back is None
            or not self._is_between
            or self._is_serving
            or self._is_deaf
            or self.transport.is_closing()
            or self.transport.get_write_buffer_size()
        ):
            return
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        self._give_back()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)
        if self._watcher is None:
            self._watcher = self.loop.call_later(WATCH_S, self._watch)

    def _pass_over_upgrade(self, rest: bytes) -> None:
        """HTTP lets a server ignore the wish for another protocol: the same request again, without it."""
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", self.parser.get_http_version().encode(), b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join(head) + b"\r\n")
        if rest and not self.transport.is_closing():
            self.data_received(rest)

    def _refuse(self, received: str) -> None:
        """What came is not HTTP: refuse it, or, where an answer is due first, give that one and close."""
        if self._is_serving and self._active is not None and not self._active.more_body:
            self._is_deaf = True
            self.pipeline.clear()
            self._active.keep_alive = False
        elif not self.transport.is_closing():
            self._is_deaf = True
            self.send_400_response(received)

    def send_400_response(self, msg: str) -> None:
        """Answer and close. A request that is not HTTP has no id yet, and gets one."""
        request_id = uuid.uuid4().hex
        error = Malformed("not HTTP/1.1", faults=[Fault("", "an HTTP/1.1 request", msg.rstrip(". "))])
        # The target is known where something behind it cannot be read.
        target = getattr(self, "url", b"").decode("latin-1").partition("?")[0]
        refused = refusal_of(error, request_id, path=target)
        head = (
            f"HTTP/1.1 {refused.status} Bad Request\r\ncontent-type: {refused.media_type}\r\n"
            f"content-length: {len(refused.body)}\r\nx-request-id: {request_id}\r\n"
            f"server-timing: {server_timing({}).decode()}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + refused.body)
        self.transport.close()
        self._count_unreadable(refused.failure.name, len(refused.body))

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout_s, self._client_is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _client_is_late(self) -> None:
        self._timer = None
        if not self._is_serving and not self.transport.is_closing():
            self.transport.close()
