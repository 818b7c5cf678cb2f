"""The client that waits."""

from __future__ import annotations

import random as chance
import ssl
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import httpx

from service.client.answers import Answer, LayerDescription, Plan, ServiceInfo
from service.client.calls import Call, Reply
from service.client.methods import Methods
from service.client.plot import plot
from service.client.retries import DEFAULT_MAX_RETRIES, Retries
from service.client.tries import (
    DEFAULT_MAX_CONNECTIONS,
    DEFAULT_TIMEOUT_S,
    Answered,
    Receiving,
    Terms,
    TimeLeft,
    Tries,
    limits,
    slices,
)


class AttentionClient(Methods[Answer, Plan, LayerDescription, list[LayerDescription], ServiceInfo, bool, None]):
    """The attention service at ``base_url``; threads may share one.

    Connections are kept and used again, at most ``max_connections`` at once. A call that is refused with 429 or 503, or
    whose connection breaks, is tried again up to ``max_retries`` times, after random and growing waits and not before
    the service's Retry-After, and all of it within ``timeout_s`` (None: without end; a call may have its own). Nothing
    else is tried again. The deadline is looked at between the parts of an answer: one that stops coming in its middle
    may be waited for up to twice as long, and one whose head comes in drips for longer. ``tls`` is as httpx takes
    ``verify``: a context of one's own, for authorities and certificates. ``transport``, ``clock``, ``sleep`` and
    ``random`` are for tests. Close it, or use it in ``with``; a call after that is a RuntimeError.
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
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        random: Callable[[], float] = chance.random,
    ) -> None:
        self._terms = Terms(base_url, api_key, timeout_s, Retries(max_retries), clock, random)
        self._sleep = sleep
        self._http = httpx.Client(
            headers=self._terms.headers(), limits=limits(max_connections), verify=tls, transport=transport
        )

    plot = staticmethod(plot)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of every connection."""
        self._http.close()

    def __repr__(self) -> str:
        return f"AttentionClient({self._terms.base_url!r})"

    def _perform(self, make: Callable[[], Call[Any]]) -> Any:
        tries = Tries(make, self._terms)
        while True:
            try:
                outcome: Reply | Exception = self._send(tries)
            except httpx.HTTPError as error:
                outcome = error
            step = tries.after(outcome)
            if isinstance(step, Answered):
                return step.value
            self._sleep(step.seconds)

    def _send(self, tries: Tries[Any]) -> Reply:
        headers, pieces = tries.begin()
        content = slices(pieces) if pieces else None
        request = self._http.build_request(
            tries.method,
            tries.url,
            headers=headers,
            content=content,  # type: ignore[arg-type]  # memoryviews are as good as bytes
            extensions={"timeout": TimeLeft(tries.left_s)},
        )
        response = self._http.send(request, stream=True)
        try:
            received = Receiving(response.headers)
            for chunk in response.iter_bytes():
                received.add(chunk)
                if tries.is_over:
                    raise httpx.ReadTimeout("the answer was not whole in time", request=request)
        finally:
            response.close()
        return Reply(response.status_code, response.headers, received.content())
