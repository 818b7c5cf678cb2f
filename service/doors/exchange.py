"""What surrounds every HTTP request: its id, its stages, its metrics and log line, and an answer whatever happens.

An ASGI layer around the app. Where the answer leaves before the body has been read, it lets the client finish
sending for a moment before the connection closes, or the reset would destroy the answer on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.authentication import Authentication
from service.doors.playground_files import PATHS as PLAYGROUND_PATHS
from service.doors.refusals import refusal_of
from service.errors import Draining
from service.lifecycle import Lifecycle, State
from service.telemetry import OTHER_ROUTE, STAGES, Metrics

log = logging.getLogger("attn.request")

GOOD_ID = re.compile(rb"[\x21-\x7e]{1,128}")
PROBES = frozenset({"/livez", "/readyz", "/v2/health/live", "/v2/health/ready"})
OPEN_PATHS = PROBES | PLAYGROUND_PATHS
"""What anyone may ask, with or without a key: exactly these, as the router sees them."""
ABORT_EXTENSION = "attn.abort"
"""The ASGI extension that ends a connection at once, whatever is still to be sent."""
LOST_EXTENSION = "attn.lost"
"""The ASGI extension that tells of a connection that is lost while its request is inside."""
PEER_EXTENSION = "attn.peer"
"""The ASGI extension that says who is at the other end of the connection, whomever that one speaks for."""
LINGER_S = 2.0
LINGER_BYTES = 32 * 2**20
"""So much of an unread body is read and dropped; where the fault is the client's, with the connection kept."""
SMALL_REST_BYTES = 64 * 1024
"""So much whosever fault it is: what a server without room refuses it would have to read first."""
CLIENT_FAULTS = frozenset({400, 404, 405, 415, 422})


class NotRead(Exception):
    """The client does not read its answer."""


class ClientLost:
    """Told once that the client is gone; whoever asked for it is called."""

    def __init__(self) -> None:
        self.is_told = False
        self._call: Callable[[], object] | None = None

    def on_lost(self, call: Callable[[], object] | None) -> None:
        self._call = call

    def tell(self) -> None:
        self.is_told = True
        if self._call is not None:
            self._call()


class Exchange:
    """One request and its answer, as far as they have come."""

    def __init__(self, headers: Mapping[bytes, bytes]) -> None:
        sent = headers.get(b"x-request-id", b"")
        self.request_id = sent.decode() if GOOD_ID.fullmatch(sent) else uuid.uuid4().hex
        self.began = time.monotonic()
        self.stages: dict[str, float] = {}
        self.outcome = "ok"
        self.status = 0
        self.received_bytes = 0
        self.sent_bytes = 0
        length = headers.get(b"content-length", b"0")
        self.unread_bytes = int(length) if length.isdigit() else 0
        if b"transfer-encoding" in headers:
            self.unread_bytes = 2**63
        self.body_is_read = self.unread_bytes == 0

    @property
    def must_close(self) -> bool:
        limit = LINGER_BYTES if self.status in CLIENT_FAULTS else SMALL_REST_BYTES
        return not self.body_is_read and self.unread_bytes > limit

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.stages[name] = time.monotonic() - began


def check_key(authentication: Authentication, headers: Mapping[bytes, bytes]) -> None:
    """Let whoever brings a key in these headers pass. Raises: Unauthenticated."""
    if authentication.is_required:
        sent = (headers.get(name) for name in (b"authorization", b"x-api-key"))
        authentication.check(*(None if value is None else value.decode("latin-1") for value in sent))


def server_timing(stages: Mapping[str, float]) -> bytes:
    """The header: every stage in milliseconds, 0 for those that were not reached."""
    return ", ".join(f"{name};dur={stages.get(name, 0.0) * 1e3:.3f}" for name in STAGES).encode()


class ExchangeLayer:
    """Wraps the app; ``routes`` are the paths that may be named in metrics."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        lifecycle: Lifecycle,
        authentication: Authentication,
        routes: frozenset[str],
        write_timeout_s: float,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._authentication = authentication
        self._routes = routes
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"])
        exchange = Exchange(sent)
        scope["attn.exchange"] = exchange
        started = False

        async def send_measured(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                exchange.status = message["status"]
                extra = [
                    (b"x-request-id", exchange.request_id.encode()),
                    (b"server-timing", server_timing(exchange.stages)),
                ]
                if exchange.must_close or self._lifecycle.state in (State.DRAINING, State.STOPPED):
                    extra.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *extra]
            elif message["type"] == "http.response.body":
                exchange.sent_bytes += len(message.get("body", b""))
                if exchange.must_close and not message.get("more_body", False):
                    await self._write(send, {**message, "more_body": True})
                    await _linger(receive)
                    message = {"type": "http.response.body", "body": b"", "more_body": False}
            await self._write(send, message)

        try:
            if scope["path"] not in OPEN_PATHS:
                check_key(self._authentication, sent)
            await self._app(scope, receive, send_measured)
        except asyncio.CancelledError:
            exchange.outcome = "cancelled"
            raise
        except NotRead:
            exchange.outcome = "not_read"
            await _abort(scope)
        except Exception as error:
            refused = refusal_of(error, exchange.request_id, path=scope["path"])
            exchange.outcome = refused.failure.name
            if isinstance(error, Draining) and started:
                # The drain's limit is over and the answer has not been read.
                await _abort(scope)
                return
            if started:
                raise
            raw = [(name.encode(), value.encode()) for name, value in refused.headers.items()]
            raw.append((b"content-type", refused.media_type.encode()))
            raw.append((b"content-length", str(len(refused.body)).encode()))
            await send_measured({"type": "http.response.start", "status": refused.status, "headers": raw})
            await send_measured({"type": "http.response.body", "body": refused.body})
        finally:
            self._record(scope, exchange)

    async def _write(self, send: Send, message: Message) -> None:
        """Hand on one message; the reader must have taken what was written before. Raises: NotRead."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await send(message)
        except TimeoutError:
            raise NotRead from None

    def count_unreadable(self, outcome: str, sent_bytes: int) -> None:
        """Count a request that never became one: it could not be read as HTTP."""
        self._metrics.requests.labels(OTHER_ROUTE, outcome).inc()
        self._metrics.bytes_out.inc(sent_bytes)
        log.info("not HTTP", extra={"fields": {"route": OTHER_ROUTE, "outcome": outcome}})

    def _record(self, scope: Scope, exchange: Exchange) -> None:
        # A route's own path has names where the caller's has what he likes.
        own: str | None = getattr(scope.get("route"), "path", None)
        route = own or (scope["path"] if scope["path"] in self._routes else OTHER_ROUTE)
        record(self._metrics, scope["method"], route, exchange)


def record(metrics: Metrics, method: str, route: str, exchange: Exchange) -> None:
    """Count a request that is over, and log it."""
    elapsed = time.monotonic() - exchange.began
    metrics.requests.labels(route, exchange.outcome).inc()
    metrics.request_seconds.labels(route).observe(elapsed)
    metrics.observe_stages(exchange.stages)
    metrics.bytes_in.inc(exchange.received_bytes)
    metrics.bytes_out.inc(exchange.sent_bytes)
    if exchange.status < 400 or exchange.status == 429:
        # A line for each that is refused would be a load of its own, just when there is too much of it.
        level = logging.DEBUG
    else:
        # A probe that hears that the service is not ready has done what it is for.
        is_fault = exchange.status >= 500 and not (exchange.status == 503 and route in PROBES)
        level = logging.WARNING if is_fault else logging.INFO
    if log.isEnabledFor(level):
        fields = {
            "request_id": exchange.request_id,
            "method": method,
            "route": route,
            "status": exchange.status,
            "outcome": exchange.outcome,
            "elapsed_ms": round(elapsed * 1e3, 3),
            "received_bytes": exchange.received_bytes,
            "sent_bytes": exchange.sent_bytes,
        }
        log.log(level, "%s %s %d", method, route, exchange.status, extra={"fields": fields})


async def _abort(scope: Scope) -> None:
    """End the connection at once: to close it would wait for the reader once more."""
    abort = scope.get("extensions", {}).get(ABORT_EXTENSION)
    if abort is not None:
        abort()
        for _ in range(3):
            # So that the server knows of it before this request is seen to end without an answer.
            await asyncio.sleep(0)


async def _linger(receive: Receive) -> None:
    """Read and drop what the client is still sending, for a moment."""
    dropped = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while dropped < LINGER_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                dropped += len(message.get("body", b""))
