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


@pytest.fixture(scope="module", autouse=True)
def forgotten(client: httpx.Client) -> Iterator[None]:
    """For a module that imports it: other tests on the same server find no layers that were put there."""
    yield
    for layer in client.get("/v1/layers").json()["layers"]:
        assert client.delete(f"/v1/layers/{layer['name']}").status_code == 204
