"""The client that awaits."""

from __future__ import annotations

import asyncio
import random as chance
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from service.client.answers import Answer, LayerDescription, Plan, ServiceInfo
from service.client.calls import Call, Pieces, Reply
from service.client.methods import Methods
from service.client.plot import plot
from service.client.retries import DEFAULT_MAX_RETRIES, Retries
from service.client.tries import (
    DEFAULT_MAX_CONNECTIONS,
    DEFAULT_TIMEOUT_S,
    Answered,
    Receiving,
    Terms,
    Tries,
    limits,
    slices,
)

T = TypeVar("T")
_Coming = Coroutine[Any, Any, T]
_NO_TIMEOUTS = dict.fromkeys(("connect", "read", "write", "pool"))


class AsyncAttentionClient(
    Methods[
        _Coming[Answer],
        _Coming[Plan],
        _Coming[LayerDescription],
        _Coming[list[LayerDescription]],
        _Coming[ServiceInfo],
        _Coming[bool],
        _Coming[None],
    ]
):
    """The attention service at ``base_url``, for asyncio; used in one event loop.

    Everything is as in ``AttentionClient``, each call to be awaited. A call that is cancelled lets go of its
    connection, and the service stops computing for it. Reading and writing arrays happens in the event loop. Close it
    with ``aclose``, or use it in ``async with``.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        tls: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        random: Callable[[], float] = chance.random,
    ) -> None:
        self._terms = Terms(base_url, api_key, timeout_s, Retries(max_retries), clock, random)
        self._sleep = sleep
        self._http = httpx.AsyncClient(
            headers=self._terms.headers(), limits=limits(max_connections), verify=tls, transport=transport
        )

    plot = staticmethod(plot)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of every connection."""
        await self._http.aclose()

    def __repr__(self) -> str:
        return f"AsyncAttentionClient({self._terms.base_url!r})"

    async def _perform(self, make: Callable[[], Call[Any]]) -> Any:
        tries = Tries(make, self._terms)
        while True:
            try:
                outcome: Reply | Exception = await self._send(tries)
            except (httpx.HTTPError, TimeoutError) as error:
                outcome = error
            step = tries.after(outcome)
            if isinstance(step, Answered):
                return step.value
            await self._sleep(step.seconds)

    async def _send(self, tries: Tries[Any]) -> Reply:
        headers, pieces = tries.begin()
        request = self._http.build_request(
            tries.method,
            tries.url,
            headers=headers,
            content=_sliced(pieces) if pieces else None,  # type: ignore[arg-type]  # memoryviews are as good as bytes
            extensions={"timeout": _NO_TIMEOUTS},
        )
        async with asyncio.timeout(tries.left_s()):
            response = await self._http.send(request, stream=True)
            try:
                received = Receiving(response.headers)
                async for chunk in response.aiter_bytes():
                    received.add(chunk)
            finally:
                await response.aclose()
        return Reply(response.status_code, response.headers, received.content())


async def _sliced(pieces: Pieces) -> AsyncIterator[memoryview]:
    for part in slices(pieces):
        yield part
