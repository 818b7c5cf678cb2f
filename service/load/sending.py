"""One request there and its answer back, over HTTP or gRPC. Nothing is tried again, and what fails is an outcome.

httpx's transport is used without its client around it: a load test wants no cookies, no redirects and no proxies, which
would take a fifth of the time of a small request.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import grpc
import httpx

from service.client import calls
from service.client.calls import Reply
from service.client.tries import SLICE_BYTES, slices
from service.credentials import CommandError, Credentials
from service.load.payloads import Payload, server_times

NO_ANSWER = "no answer in time"
CLIENT = "client: "
"""How kinds of failures begin that are the client's own."""
_HEADERS = {"accept-encoding": "identity", "user-agent": "attn-load"}
_ONE_CONNECTION = httpx.Limits(max_connections=1, max_keepalive_connections=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go: ``url`` is http(s)://host:port, over gRPC too, where the scheme says whether TLS is spoken."""

    url: str
    credentials: Credentials
    timeout_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """``error`` is what kind of failure it was, such as "429 overloaded"; empty where there is an answer.

    ``stages``: the service's own times in milliseconds; ``headers`` in lower case; ``detail`` a refusal in its words.
    """

    error: str = ""
    content: bytes = b""
    stages: Mapping[str, float] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    detail: str = ""


class Sender(Protocol):
    async def send(self, payload: Payload) -> Outcome: ...

    async def close(self) -> None: ...


def make_sender(target: Target, *, grpc: bool) -> Sender:
    """To be called, used and closed in one event loop."""
    return GrpcSender(target) if grpc else HttpSender(target)


class HttpSender:
    """HTTP/1.1 with connections kept alive, one for each request under way."""

    def __init__(self, target: Target) -> None:
        self._target = target
        tls = target.credentials.tls()
        # Made once: to read the authorities of a machine takes longer than most requests.
        self._connections = Connections(tls if isinstance(tls, ssl.SSLContext) else httpx.create_ssl_context())
        address = urlsplit(target.url)
        self._headers = {"host": address.netloc} | _HEADERS | target.credentials.headers()
        self._urls: dict[str, httpx.URL] = {}
        # The one deadline is ours, over all of it.
        self._extensions = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"))}

    async def send(self, payload: Payload) -> Outcome:
        connection = self._connections.take()
        try:
            async with asyncio.timeout(self._target.timeout_s):
                outcome = await self._exchange(connection, payload)
        except TimeoutError:
            outcome = Outcome(NO_ANSWER)
        except httpx.RequestError as error:
            kind = _broken(error)
            outcome = Outcome(kind, detail=f"{kind}: {error}")
        else:
            self._connections.give_back(connection)
            return outcome
        await self._connections.drop(connection)
        return outcome

    async def close(self) -> None:
        await self._connections.close()

    async def _exchange(self, transport: httpx.AsyncHTTPTransport, payload: Payload) -> Outcome:
        url = self._urls.get(payload.path)
        if url is None:
            url = self._urls[payload.path] = httpx.URL(self._target.url + payload.path)
        size = len(payload.body)
        request = httpx.Request(
            "POST",
            url,
            headers=self._headers
            | {"content-type": payload.media_type, "accept": payload.media_type, "content-length": str(size)},
            content=payload.body if size <= SLICE_BYTES else _sliced(payload.body),  # type: ignore[arg-type]
            extensions=self._extensions,
        )
        response = await transport.handle_async_request(request)
        try:
            content = await response.aread()
        finally:
            await response.aclose()
        headers = response.headers
        if response.status_code != httpx.codes.OK:
            return _refused(response.status_code, headers, content)
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != payload.media_type:
            return Outcome(f"{media_type or 'nothing'} instead of {payload.media_type}")
        return Outcome(content=content, stages=calls.read_timing(headers.get("server-timing", "")), headers=headers)


class Connections:
    """Transports of one connection each; the one used last is used next.

    A pool of httpx looks at every connection for every request, which after a stall of the service is more than a
    client can do, so that it would never recover.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._all: set[httpx.AsyncHTTPTransport] = set()
        self._free: list[httpx.AsyncHTTPTransport] = []

    def take(self) -> httpx.AsyncHTTPTransport:
        if self._free:
            return self._free.pop()
        transport = httpx.AsyncHTTPTransport(verify=self._tls, limits=_ONE_CONNECTION)
        self._all.add(transport)
        return transport

    def give_back(self, transport: httpx.AsyncHTTPTransport) -> None:
        """After a whole answer, and nothing else."""
        self._free.append(transport)

    async def drop(self, transport: httpx.AsyncHTTPTransport) -> None:
        """In whatever state its connection is by now, nobody will meet it again."""
        self._all.discard(transport)
        with suppress(httpx.RequestError, RuntimeError):
            await transport.aclose()

    async def close(self) -> None:
        for transport in tuple(self._all):
            await self.drop(transport)


class GrpcSender:
    """One channel, whose HTTP/2 connection carries every request under way."""

    def __init__(self, target: Target) -> None:
        self._target = target
        address = urlsplit(target.url)
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_http_proxy", 0),
            # A service that is back is found soon: how long a client waits before it looks again is not its time.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
        ]
        if address.scheme == "https":
            channel = grpc.aio.secure_channel(address.netloc, _grpc_credentials(target.credentials), options)
        else:
            channel = grpc.aio.insecure_channel(address.netloc, options)
        self._channel = channel
        self._metadata = tuple(target.credentials.headers().items())
        self._methods: dict[str, grpc.aio.UnaryUnaryMultiCallable] = {}

    async def send(self, payload: Payload) -> Outcome:
        method = self._methods.get(payload.path)
        if method is None:
            # Bytes as they are: messages were written before the load began.
            method = self._methods[payload.path] = self._channel.unary_unary(payload.path)
        try:
            content: bytes = await method(payload.body, timeout=self._target.timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            code = error.code()
            late = code is grpc.StatusCode.DEADLINE_EXCEEDED
            return Outcome(NO_ANSWER if late else code.name, detail=f"{code.name}: {error.details()}")
        try:
            return Outcome(content=content, stages=server_times(content))
        except ValueError as error:
            return Outcome("an answer that is none", detail=str(error))

    async def close(self) -> None:
        await self._channel.close()


def _refused(status: int, headers: Mapping[str, str], content: bytes) -> Outcome:
    error = calls.refusal_of(calls.info(), Reply(status, headers, memoryview(content)))
    if error is None:
        return Outcome(f"{status} instead of 200")
    return Outcome(f"{status} {error.name}".strip(), detail=str(error), headers=headers)


def _broken(error: httpx.RequestError) -> str:
    if any(isinstance(cause, OSError) and cause.errno == errno.EMFILE for cause in _causes(error)):
        return f"{CLIENT}too many open files"
    if isinstance(error, httpx.ConnectError):
        return "no connection"
    return "an answer that is none" if isinstance(error, httpx.DecodingError) else "connection broken"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """All that lies behind an error: libraries wrap what the system said, each in its own way."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _causes(each)
        error = error.__cause__ or error.__context__


async def _sliced(body: bytes) -> AsyncIterator[memoryview]:
    for part in slices([body]):
        yield part


def _grpc_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    """Raises: CommandError naming the file."""
    # gRPC ends the whole process over files that this one refuses in a sentence.
    credentials.tls()
    parts = []
    for path in (credentials.ca, credentials.certificate_key or credentials.certificate, credentials.certificate):
        try:
            parts.append(None if path is None else path.read_bytes())
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror or error}") from None
    return grpc.ssl_channel_credentials(*parts)
