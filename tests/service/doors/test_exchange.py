"""What surrounds every request: without a key only what is exactly an open path gets through to the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.authentication import Authentication
from service.doors.exchange import OPEN_PATHS, Exchange, ExchangeLayer, record
from service.lifecycle import Lifecycle
from service.telemetry import Metrics

KEY = "the-key"
METRICS = Metrics()


def asked(path: str, headers: Mapping[bytes, bytes], *, method: str = "GET") -> tuple[list[str], dict[str, Any]]:
    """The paths that reached the app, and the beginning of the answer. To read the body is a fault."""
    reached: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        layer = ExchangeLayer(
            app,
            metrics=METRICS,
            lifecycle=Lifecycle(),
            authentication=Authentication([KEY]),
            routes=frozenset(),
            write_timeout_s=10.0,
        )
        scope = {"type": "http", "method": method, "path": path, "headers": list(headers.items())}
        await layer(scope, receive, send)

    asyncio.run(run())
    return reached, sent[0]


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
@pytest.mark.parametrize("headers", [{}, {b"authorization": b"Bearer wrong"}, {b"x-api-key": b"\xff\xfe"}])
def test_an_open_path_asks_nobody_for_a_key(path: str, headers: dict[bytes, bytes]) -> None:
    reached, start = asked(path, headers)
    assert (reached, start["status"]) == ([path], 200)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "TRACE", "WHATEVER"])
def test_no_method_gets_round_the_key(method: str) -> None:
    reached, start = asked("/v1/attention", {}, method=method)
    assert (reached, start["status"]) == ([], 401)


TRICKS = st.one_of(
    st.text(),
    st.builds(
        lambda path, before, after: before + path + after,
        st.sampled_from(sorted(OPEN_PATHS)),
        st.sampled_from(["", "/", "/.", "/v1/..", "http://x", "\0", " ", "%2f"]),
        st.sampled_from(["", "/", "/.", "/../v1", "?", ";", "%00", "\0", " ", "#", "//", "x"]),
    ),
    st.sampled_from(sorted(OPEN_PATHS)).map(str.upper),
)


@given(TRICKS)
@example("//livez")
@example("/livez/")
@example("/LIVEZ")
@example("/livez/../v1")
@example("/%6civez")
@example("/livez\u0000")
def test_nothing_that_only_looks_like_an_open_path_is_one(path: str) -> None:
    reached, start = asked(path, {})
    assert reached == ([path] if path in OPEN_PATHS else [])
    assert start["status"] == (200 if path in OPEN_PATHS else 401)
    assert asked(path, {b"x-api-key": KEY.encode()})[0] == [path]


@pytest.mark.parametrize(
    ("route", "status", "level"),
    [
        ("/readyz", 503, logging.INFO),
        ("/v2/health/ready", 503, logging.INFO),
        ("/readyz", 500, logging.WARNING),
        ("/v1/attention", 503, logging.WARNING),
        ("/v1/attention", 422, logging.INFO),
    ],
)
def test_a_probe_that_is_told_no_is_no_fault(
    route: str, status: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    exchange = Exchange({})
    exchange.status = status
    with caplog.at_level(logging.DEBUG, logger="attn.request"):
        record(METRICS, "GET", route, exchange)
    assert [entry.levelno for entry in caplog.records] == [level]
