"""One server for all tests that do not need one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.server import RunningServer, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60.0) as connected:
        yield connected
