"""The road for binary bodies: HTTP/1.1 without ASGI, each body received once into memory that it is computed from.

A connection begins here. What is a well-formed POST of safetensors, or of the Open Inference Protocol with a JSON part
that is known, with one Content-Length, a key where keys are set, and nothing that asks for more than that, is framed,
checked and answered by this class; for anything else it makes the protocol that uvicorn uses (``asgi_protocol``), hands
it the bytes so far and leaves the connection to it, until that has answered and gives it back. Both roads have the same
limits, errors and figures; this one saves the half of a millisecond that ASGI, FastAPI and two copies of the body cost.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.server import ServerState

from service.admission import BytePermit
from service.attend import Waiting
from service.authentication import Authentication
from service.doors.answers import gzipped, is_worth_gzip
from service.doors.asgi_protocol import AsgiProtocol
from service.doors.binary import CALLS, INFERENCE_MEDIA_TYPE, BinaryDoor, Head, Known, Reply
from service.doors.body import accepts_gzip, answer_form
from service.doors.exchange import GOOD_ID, LINGER_BYTES, SMALL_REST_BYTES, Exchange, check_key, server_timing
from service.doors.peer import PROBE, WATCH_S, has_closed_its_side, is_gone
from service.doors.receive_buffers import LANDING_BYTES, SPARE_BYTES, ReceiveBuffer
from service.errors import DeadlinePassed, Draining, NotAcceptable, Unauthenticated
from service.failures import FAILURES, INTERNAL
from service.lifecycle import State
from service.request_queue import Outcome
from service.wire.plain_recipes import MAX_HEADER_BYTES
from service.wire.safetensors_format import MEDIA_TYPE

log = logging.getLogger("attn.door")

HEAD_GLANCE_BYTES = 2048
"""Heads are looked for in so many bytes; a longer one takes the other road."""
AHEAD_BYTES = 64 * 1024
"""So much of later requests is read while one is computed; then the connection is not read for a while."""
SLICE_BYTES = 2**20
PIECE_BYTES = 64 * 1024
ALIGNMENT = 64
LONG_BYTES = 32 * 1024

_MEDIA_TYPE = MEDIA_TYPE.encode()
_INFER_TARGET = re.compile(rb"/v2/models/sdpa(_fp16|_bf16|_fp64)?(/versions/1)?/infer")
_MAX_DIGITS = 9
_PLAIN_ENCODINGS = frozenset({b"", b"identity", b"gzip, deflate", b"gzip, deflate, br", b"gzip, deflate, br, zstd"})
"""What libraries send by themselves; whoever names one coding wants it, and is answered on the other road."""
MAX_MISSES = 2
"""So often requests with one head may turn out to belong on the other road, until they are sent there at once."""
_STATUS = {
    status: b"HTTP/1.1 %d %b\r\n" % (status, HTTPStatus(status).phrase.encode())
    for status in {200, INTERNAL.http, *(s for row in FAILURES.values() for s in (row.http, row.inference))}
}
_VARY = b"vary: Accept, Accept-Encoding\r\n"
# Whoever sends one of these wants more than this road does.
_OTHER_ROAD = frozenset({b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"trailer", b"te"})


class Phase(enum.Enum):
    """Where a connection stands with its current request."""

    IDLE = "between two requests"
    BODY = "reading a body"
    COMPUTING = "waiting for an outcome"
    FLUSHING = "waiting for the client to read"
    DROPPING = "reading what was refused"
    GOING_ON = "about to go on with what was read ahead"


class HeadReader:
    """Reads one whole head by httptools; None for whatever belongs on the other road, as all without a key do."""

    def __init__(self, authentication: Authentication) -> None:
        self._authentication = authentication
        self._latest: tuple[bytes, Head | None] = b"", None

    def read(self, head: bytes) -> Head | None:
        """The head of a request that this road serves, from its first byte to the empty line."""
        text, latest = self._latest
        if head != text:
            # Most clients send the same head with each request.
            latest = self._parse(head)
            self._latest = head, latest
        return latest

    def _parse(self, head: bytes) -> Head | None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._is_ours = True
        self._is_complete = False
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        headers, length = self._headers, self._headers.get(b"content-length")
        if (
            not self._is_ours
            or not self._is_complete
            or length is None
            or not length.isdigit()
            or length == b"0"
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or not self._has_key()
        ):
            return None
        sent_id = headers.get(b"x-request-id")
        read = Head(
            target=self._url,
            content_length=int(length),
            keep_alive=parser.should_keep_alive(),
            sent_id=sent_id if sent_id is not None and GOOD_ID.fullmatch(sent_id) else None,
            accepts_gzip=False,
        )
        if self._url in CALLS:
            return self._native(read)
        return self._inference(read) if _INFER_TARGET.fullmatch(self._url) else None

    def _has_key(self) -> bool:
        try:
            check_key(self._authentication, self._headers)
        except Unauthenticated:
            return False
        return True

    def _native(self, head: Head) -> Head | None:
        headers = self._headers
        if headers.get(b"content-type") != _MEDIA_TYPE:
            return None
        accept = headers.get(b"accept")
        if accept is not None and accept != b"*/*" and not _wants_safetensors(accept):
            return None
        encodings = headers.get(b"accept-encoding")
        head.accepts_gzip = encodings is not None and accepts_gzip(encodings.decode("latin-1"))
        return head

    def _inference(self, head: Head) -> Head | None:
        json_bytes = self._headers.get(b"inference-header-content-length", b"")
        if (
            not json_bytes.isdigit()
            or len(json_bytes) > _MAX_DIGITS
            or not 0 < int(json_bytes) <= min(head.content_length, MAX_HEADER_BYTES)
            or self._headers.get(b"accept-encoding", b"") not in _PLAIN_ENCODINGS
        ):
            return None
        head.json_bytes = int(json_bytes)
        return head

    def forget(self) -> None:
        """What has this head belongs on the other road after all."""
        self._latest = self._latest[0], None

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in self._headers or name in _OTHER_ROAD:
            # A header sent twice is a list, or an attack; the other road tells which.
            self._is_ours = False
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        self._is_complete = True


def _wants_safetensors(accept: bytes) -> bool:
    try:
        return answer_form(accept.decode("latin-1"), MEDIA_TYPE) == MEDIA_TYPE
    except NotAcceptable:
        return False


class HttpProtocol(asyncio.BufferedProtocol):
    """One connection. ``landing`` is shared by all of them: what lies in it is used or moved before the next read."""

    def __init__(
        self,
        door: BinaryDoor,
        *,
        landing: ReceiveBuffer,
        make_asgi: Callable[[HttpProtocol], AsgiProtocol],
        server_state: ServerState,
        loop: asyncio.AbstractEventLoop,
        head_timeout_s: float,
        keep_alive_s: float,
    ) -> None:
        self._door = door
        self._landing = landing
        self._make_asgi = make_asgi
        self._server_state = server_state
        # uvicorn asks of its protocols only that they have ``shutdown``.
        self._connections: set[Any] = server_state.connections
        self._loop = loop
        self._head_timeout_s = head_timeout_s
        self._keep_alive_s = keep_alive_s
        self._heads = HeadReader(door.authentication)
        self._phase = Phase.IDLE
        self._transport: Any = None
        self._default_headers: object = None
        self._default_texts = b"", b""
        self._misses = 0
        self._head_text = b""
        # Of the latest request: where its numbers began, so that those of the next one can land aligned; and its size.
        self._skew = 0
        self._expected = 0
        self._lease: ReceiveBuffer | None = None
        self._at = 0
        self._filled = 0
        self._wanted = 0
        self._ahead = b""
        self._head: Head | None = None
        self._exchange: Exchange | None = None
        self._permit: BytePermit | None = None
        self._waiting: Waiting | None = None
        self._to_drop = 0
        self._is_counted = False
        self._must_close = False
        self._is_deaf = False
        self._is_probed = False
        self._is_lost = False
        self._has_served = False
        self._since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    # What the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.add(self)
        # Everything that the system does not take at once counts as unsent.
        self._transport.set_write_buffer_limits(high=0)
        self._since = time.monotonic()
        self._watch_idle(min(self._head_timeout_s, self._keep_alive_s))

    def take_back(self) -> None:
        """The connection comes back from the other road, between two requests."""
        self._connections.add(self)
        self._transport.set_write_buffer_limits(high=0)
        self._has_served = True
        self._since = time.monotonic()
        if self._idle_timer is None:
            self._watch_idle(self._keep_alive_s)
        self._listen(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._connections.discard(self)
        for timer in (self._idle_timer, self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._idle_timer = self._timer = self._write_timer = None
        exchange = self._exchange
        if exchange is not None and exchange.outcome == "ok":
            exchange.outcome = "not_read" if self._phase is Phase.FLUSHING else "disconnected"
        self._end_request()

    def eof_received(self) -> bool:
        """Keep the connection for the answer of a client that has sent all of a request and closed its side."""
        if self._phase not in (Phase.COMPUTING, Phase.FLUSHING, Phase.GOING_ON):
            return False
        self._is_deaf = True
        if not self._ahead:
            self._must_close = True
        self._watch()
        return True

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._phase is Phase.BODY:
            assert self._lease is not None
            return self._lease.view[self._at + self._filled : self._at + self._wanted + SPARE_BYTES]
        if self._phase is Phase.DROPPING:
            return self._landing.view
        if self._phase is Phase.IDLE:
            self._at = -self._skew % ALIGNMENT
            if self._expected > LANDING_BYTES // 2:
                if self._lease is None:
                    self._lease = self._door.buffers.lease(self._expected + 4 * SPARE_BYTES)
                return self._lease.view[self._at : self._at + self._expected + SPARE_BYTES]
            return self._landing.view[self._at :]
        return self._landing.view[:AHEAD_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._phase is Phase.IDLE:
            self._feed(self._lease or self._landing, self._at, nbytes)
        elif self._phase is Phase.BODY:
            self._filled += nbytes
            if self._filled >= self._wanted:
                assert self._lease is not None and self._head is not None
                self._body_is_there(self._lease, self._at, self._filled - self._wanted)
        elif self._phase is Phase.DROPPING:
            self._drop(nbytes)
        elif not self._is_deaf:
            # First comes the rest of what was refused, where the refusal is still to be read.
            dropped = min(self._to_drop, nbytes)
            self._to_drop -= dropped
            self._ahead += bytes(self._landing.view[dropped:nbytes])
            if len(self._ahead) >= AHEAD_BYTES:
                self._transport.pause_reading()

    def pause_writing(self) -> None:
        """Something of an answer is still to be sent."""

    def resume_writing(self) -> None:
        if self._phase is Phase.FLUSHING and not self._transport.get_write_buffer_size():
            self._answered()

    def shutdown(self) -> None:
        """The server stops: close when nothing is due, or after what is."""
        if self._phase in (Phase.IDLE, Phase.DROPPING):
            self._transport.close()
        else:
            self._must_close = True

    # Reading

    def _feed(self, buffer: ReceiveBuffer, start: int, count: int) -> None:
        """Requests as they lie in a buffer, one after the other."""
        while True:
            began = time.monotonic()
            view = buffer.view
            glance = bytes(view[start : start + min(count, HEAD_GLANCE_BYTES)])
            end = glance.find(b"\r\n\r\n") + 4
            head = self._heads.read(glance[:end]) if end > 3 else None
            if head is None or not self._door.takes(head):
                self._hand_over(bytes(view[start : start + count]))
                return
            length = head.content_length
            if head.json_bytes and self._is_miss(head, view[start + end : start + count]):
                self._hand_over(bytes(view[start : start + count]))
                return
            start += end
            count -= end
            self._expected = end + length
            if count < length:
                self._head_text = glance[:end]
                self._await_body(head, buffer, start, count, end, began)
                return
            rest = count - length
            self._take_body(head, buffer, start, end, began)
            if not rest or self._transport.is_closing() or self._is_lost:
                return
            start += length
            count = rest
            if self._phase is not Phase.IDLE:
                self._ahead = bytes(view[start : start + count])
                return
            if buffer is not self._landing:
                # It was given back with the answer, and may be somebody else's soon.
                self._feed_copy(bytes(view[start : start + count]))
                return

    def _is_miss(self, head: Head, begun: memoryview) -> bool:
        """Whether a body of which so much has come is one for the other road, as far as that can be told."""
        if len(begun) < head.json_bytes:
            return False
        if self._door.knows(head, begun):
            self._misses = 0
            return False
        self._misses += 1
        if self._misses >= MAX_MISSES:
            self._heads.forget()
        return True

    def _take_body(self, head: Head, buffer: ReceiveBuffer, body_at: int, head_bytes: int, began: float) -> None:
        """A request that came whole, its body still where it landed."""
        self._head = head
        body_at = self._aligned(buffer, body_at, head, head_bytes)
        door = self._door
        if door.lifecycle.state is State.READY and not self._is_deaf:
            try:
                at_once = door.answer_at_once(head, buffer, body_at, began)
            except Exception:
                # A mistake of ours: the longer way answers, or says so.
                log.exception("not answered at once")
                at_once = None
            if at_once is not None:
                self._write_at_once(*at_once)
                return
        if not self._enter(head, began, 0):
            return
        if buffer is self._landing:
            # It may have to wait, and the landing place cannot.
            self._lease = door.buffers.lease(head.content_length + 2 * SPARE_BYTES)
            to = _place(head, buffer, body_at)
            self._lease.view[to : to + head.content_length] = buffer.view[body_at : body_at + head.content_length]
            buffer, body_at = self._lease, to
        self._compute(buffer, body_at)

    def _await_body(
        self, head: Head, buffer: ReceiveBuffer, body_at: int, count: int, head_bytes: int, began: float
    ) -> None:
        """A request whose head is there and whose body is not, or in part."""
        if not self._enter(head, began, head.content_length - count):
            return
        length = head.content_length
        if buffer is self._landing or body_at + length + 2 * SPARE_BYTES > buffer.size:
            if self._lease is not None:
                self._door.buffers.give_back(self._lease)
            lease = self._door.buffers.lease(length + 2 * SPARE_BYTES)
            to = _place(head, buffer, body_at) if count >= 8 else 0
            lease.view[to : to + count] = buffer.view[body_at : body_at + count]
            self._lease, body_at = lease, to
        self._phase = Phase.BODY
        self._at, self._filled, self._wanted = body_at, count, length
        self._skew = head_bytes % ALIGNMENT
        self._timer = self._loop.call_later(self._door.limits.default_timeout_s, self._body_is_late)

    def _body_is_there(self, buffer: ReceiveBuffer, body_at: int, surplus: int) -> None:
        assert self._head is not None and self._exchange is not None
        if surplus:
            end = body_at + self._wanted
            self._ahead = bytes(buffer.view[end : end + surplus])
        self._cancel_timer()
        head, exchange = self._head, self._exchange
        if head.json_bytes and self._is_miss(head, buffer.view[body_at : body_at + self._wanted]):
            self._hand_over_request(buffer, body_at)
            return
        exchange.stages["read"] = time.monotonic() - exchange.began
        body_at = self._aligned(buffer, body_at, head, self._skew)
        self._compute(buffer, body_at)

    def _aligned(self, buffer: ReceiveBuffer, body_at: int, head: Head, head_bytes: int) -> int:
        """Where the body lies once its numbers begin on a multiple of 64; moved there if they did not land so."""
        view, length = buffer.view, head.content_length
        before = _bytes_before(head, view[body_at : body_at + 8]) if length >= 8 else 0
        self._skew = (head_bytes + before) % ALIGNMENT
        off = (body_at + before) % ALIGNMENT
        if not off:
            return body_at
        # Down to where the head was, or up into the spare room.
        to = body_at - off if body_at >= off else body_at + ALIGNMENT - off
        if to + length > buffer.size:
            return body_at
        view[to : to + length] = view[body_at : body_at + length]
        return to

    def _enter(self, head: Head, began: float, unread: int) -> bool:
        """Be let in, or refuse and drop what is still coming; whether it was let in."""
        headers = {b"x-request-id": self._door.id_of(head)}
        self._head = head
        self._exchange = exchange = Exchange(headers)
        exchange.began = began
        try:
            self._permit = self._door.enter(head, exchange, self._give_up)
        except Exception as error:
            self._refuse(error, unread=unread)
            return False
        exchange.received_bytes = head.content_length
        return True

    def _drop(self, nbytes: int) -> None:
        self._to_drop -= nbytes
        if self._to_drop > 0:
            return
        surplus, self._to_drop = -self._to_drop, 0
        self._cancel_timer()
        self._phase = Phase.IDLE
        if self._must_close:
            self._transport.close()
        elif surplus:
            self._feed_copy(bytes(self._landing.view[nbytes - surplus : nbytes]))

    def _feed_copy(self, data: bytes) -> None:
        """Requests that were read ahead, as if they came now."""
        self._at = -self._skew % ALIGNMENT
        if len(data) > self._landing.size - self._at:
            self._hand_over(data)
            return
        self._landing.view[self._at : self._at + len(data)] = data
        self._release_lease()
        self._feed(self._landing, self._at, len(data))

    # Computing

    def _compute(self, buffer: ReceiveBuffer, body_at: int) -> None:
        head, exchange = self._head, self._exchange
        assert head is not None and exchange is not None
        self._phase = Phase.COMPUTING
        try:
            if self._door.lifecycle.state is State.READY:
                at_once = self._door.answer_at_once(
                    head, buffer, body_at, exchange.began, exchange.stages.get("read", 0.0)
                )
                if at_once is not None:
                    self._is_counted = True
                    self._write_at_once(*at_once)
                    return
            self._waiting = self._door.begin(head, exchange, buffer, body_at, self._deliver)
        except Exception as error:
            self._refuse(error)
            return
        if self._waiting is not None:
            self._timer = self._loop.call_later(WATCH_S, self._watch)

    def _deliver(self, known: Known | None, outcome: Outcome) -> None:
        exchange, head = self._exchange, self._head
        if exchange is None or head is None or self._is_lost or self._phase is not Phase.COMPUTING:
            return
        if isinstance(outcome, BaseException):
            self._refuse(outcome)
            return
        try:
            reply = self._door.reply(known, outcome, exchange)
        except Exception as error:
            self._refuse(error)
            return
        if self._permit is not None:
            self._permit.count(reply.size)
        if head.accepts_gzip and is_worth_gzip(reply.pieces):
            if reply.size >= LONG_BYTES:
                squeezing = self._loop.run_in_executor(None, gzipped, reply.pieces)
                squeezing.add_done_callback(lambda done: self._send_squeezed(reply, done))
                return
            reply.pieces = [gzipped(reply.pieces)]
            reply.headers.append((b"content-encoding", b"gzip"))
        self._write(reply)

    def _send_squeezed(self, reply: Reply, done: asyncio.Future[bytes]) -> None:
        if self._exchange is None or self._is_lost or self._phase is not Phase.COMPUTING:
            return
        error = done.exception()
        if error is not None:
            self._refuse(error)
            return
        reply.pieces = [done.result()]
        reply.headers.append((b"content-encoding", b"gzip"))
        self._write(reply)

    def _refuse(self, error: BaseException, *, unread: int = 0) -> None:
        assert self._exchange is not None and self._head is not None
        reply = self._door.refusal(self._head, error, self._exchange)
        if unread > SMALL_REST_BYTES:
            self._must_close = True
        self._to_drop = min(unread, LINGER_BYTES)
        self._cancel_timer()
        self._write(reply)

    # Writing

    def _write_at_once(self, text: bytes, data: memoryview) -> None:
        """The answer of the shortest way: figures are counted already."""
        head = self._head
        assert head is not None
        self._has_served = True
        closing = self._must_close or not head.keep_alive
        start = self._start_of_head(is_inference=head.json_bytes > 0) + (b"connection: close\r\n" if closing else b"")
        if data.nbytes <= LONG_BYTES:
            self._transport.write(b"".join((start, text, data)))
        else:
            self._transport.writelines((start + text, data))
        self._must_close = closing
        if self._transport.get_write_buffer_size():
            self._flush()
        else:
            self._answered()

    def _start_of_head(self, *, is_inference: bool) -> bytes:
        defaults = self._server_state.default_headers
        if defaults is not self._default_headers:
            self._default_headers = defaults
            text = b"".join(b"%b: %b\r\n" % header for header in defaults)
            self._default_texts = (
                b"%b%b%bcontent-type: %b\r\n" % (_STATUS[200], text, _VARY, _MEDIA_TYPE),
                b"%b%bcontent-type: %b\r\n" % (_STATUS[200], text, INFERENCE_MEDIA_TYPE),
            )
        return self._default_texts[is_inference]

    def _write(self, reply: Reply) -> None:
        head, exchange = self._head, self._exchange
        assert head is not None and exchange is not None
        if self._transport.is_closing():
            self._end_request()
            return
        self._has_served = True
        if not head.keep_alive or self._door.lifecycle.state in (State.DRAINING, State.STOPPED):
            self._must_close = True
        size = reply.size
        lines = [_STATUS[reply.status]]
        lines += [b"%b: %b\r\n" % header for header in self._server_state.default_headers]
        if reply.status == 200 and not head.json_bytes:
            lines.append(_VARY)
        lines += [b"%b: %b\r\n" % header for header in reply.headers]
        if self._must_close:
            lines.append(b"connection: close\r\n")
        lines.append(
            b"content-type: %b\r\ncontent-length: %d\r\nx-request-id: %b\r\nserver-timing: %b\r\n\r\n"
            % (reply.content_type, size, exchange.request_id.encode(), server_timing(exchange.stages))
        )
        exchange.sent_bytes = size
        self._transport.writelines((b"".join(lines), *reply.pieces))
        if self._transport.get_write_buffer_size():
            self._flush()
        else:
            self._answered()

    def _flush(self) -> None:
        self._phase = Phase.FLUSHING
        self._unsent = self._transport.get_write_buffer_size()
        if self._permit is None:
            self._permit = self._door.enter_anyway(self._unsent)
        self._write_timer = self._loop.call_later(self._door.limits.write_timeout_s, self._check_flush)

    def _check_flush(self) -> None:
        """A client must take a mebibyte within the time for writing."""
        left = self._transport.get_write_buffer_size()
        if self._unsent - left < min(SLICE_BYTES, self._unsent):
            self._transport.abort()
            return
        self._unsent = left
        self._write_timer = self._loop.call_later(self._door.limits.write_timeout_s, self._check_flush)

    def _answered(self) -> None:
        """The answer has left: be idle again, or close, or go on with what was read ahead."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._end_request()
        self._phase = Phase.IDLE
        self._since = time.monotonic()
        if self._to_drop and not self._is_deaf:
            # Closed now, the connection would be reset, and the answer with it.
            self._phase = Phase.DROPPING
            self._timer = self._loop.call_later(self._head_timeout_s, self._transport.close)
        elif self._must_close:
            self._transport.close()
        elif self._ahead:
            self._phase = Phase.GOING_ON
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        data, self._ahead = self._ahead, b""
        if self._phase is not Phase.GOING_ON or self._transport.is_closing():
            return
        self._phase = Phase.IDLE
        if self._is_deaf:
            # The other road hears of the end again, and knows how several requests are answered behind it.
            self._hand_over(data)
        else:
            self._transport.resume_reading()
            self._feed_copy(data)

    # Ending

    def _end_request(self) -> None:
        """Give up everything that the current request holds, and record it."""
        waiting, self._waiting = self._waiting, None
        engine_reads = False
        if waiting is not None:
            waiting.end()
            engine_reads = waiting.is_computing
        if self._lease is not None:
            if engine_reads:
                self._door.buffers.lose()
            else:
                self._door.buffers.give_back(self._lease)
            self._lease = None
        self._cancel_timer()
        head, exchange, permit = self._head, self._exchange, self._permit
        self._head = self._exchange = self._permit = None
        if permit is not None:
            self._door.leave(exchange, permit)
        if exchange is None or head is None:
            return
        if self._is_counted:
            self._is_counted = False
        else:
            self._door.record(head, exchange)

    def _release_lease(self) -> None:
        if self._lease is not None:
            self._door.buffers.give_back(self._lease)
            self._lease = None

    def _give_up(self) -> None:
        """The drain's limit is over."""
        if self._phase is Phase.FLUSHING:
            self._transport.abort()
        elif self._exchange is not None:
            self._must_close = True
            unread = self._wanted - self._filled if self._phase is Phase.BODY else 0
            self._refuse(Draining("the server stops and its drain's limit is over"), unread=unread)

    def _body_is_late(self) -> None:
        unread = self._wanted - self._filled
        self._refuse(DeadlinePassed("the deadline passed before the body was there"), unread=unread)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        """Whether the client still waits: if it is gone, so is its request; if it closed its side, ask it once."""
        self._cancel_timer()
        if self._is_lost or self._phase is not Phase.COMPUTING:
            return
        if is_gone(self._transport):
            self._transport.abort()
            return
        if not self._is_probed and (self._is_deaf or has_closed_its_side(self._transport)):
            self._is_probed = True
            self._transport.write(PROBE)
        self._timer = self._loop.call_later(WATCH_S, self._watch)

    def _watch_idle(self, after_s: float) -> None:
        self._idle_timer = self._loop.call_later(after_s, self._check_idle)

    def _check_idle(self) -> None:
        """Close a connection that says nothing: a new one soon, one that has been served after the time for idling."""
        self._idle_timer = None
        limit_s = self._keep_alive_s if self._has_served else self._head_timeout_s
        left_s = limit_s - (time.monotonic() - self._since)
        if self._phase is Phase.IDLE and left_s <= 0:
            self._transport.close()
        else:
            self._watch_idle(max(left_s, 1.0))

    # The other road

    def _hand_over(self, data: bytes) -> None:
        """What came is not for this road."""
        self._release_lease()
        self._expected = 0
        self._connections.discard(self)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._transport.set_write_buffer_limits()
        asgi = self._make_asgi(self)
        asgi.connection_made(self._transport)
        self._listen(asgi)
        # In pieces of the length that sockets give: it counts what is no body piece by piece.
        for start in range(0, len(data), PIECE_BYTES):
            asgi.data_received(data[start : start + PIECE_BYTES])

    def _hand_over_request(self, buffer: ReceiveBuffer, body_at: int) -> None:
        """A request that was let in and read, and belongs on the other road, which lets it in and counts it anew."""
        data = self._head_text + bytes(buffer.view[body_at : body_at + self._wanted]) + self._ahead
        exchange, self._ahead = self._exchange, b""
        if self._permit is not None:
            self._door.leave(exchange, self._permit)
        self._head = self._exchange = self._permit = None
        self._phase = Phase.IDLE
        self._hand_over(data)

    def _listen(self, protocol: asyncio.BaseProtocol) -> None:
        """From now on ``protocol`` is told what comes. Reading begins anew, in the way that this one reads."""
        self._transport.set_protocol(protocol)
        self._transport.pause_reading()
        self._transport.resume_reading()


def _place(head: Head, buffer: ReceiveBuffer, body_at: int) -> int:
    """Where a body has to begin in another buffer, for its numbers to begin on a multiple of 64."""
    return -_bytes_before(head, buffer.view[body_at : body_at + 8]) % ALIGNMENT


def _bytes_before(head: Head, begun: memoryview) -> int:
    """What stands before the numbers in a body."""
    return head.json_bytes or 8 + int.from_bytes(begun, "little")
