"""One client of each kind for all contract tests, all of the same server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.triton import KINDS, Client, client_of
from tests.support.server import RunningServer


@pytest.fixture(scope="session", params=KINDS)
def triton(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Client]:
    with client_of(request.param, port=server.port, grpc_port=server.grpc_port) as client:
        yield client


@pytest.fixture(scope="session", params=["http", "http.aio"])
def triton_http(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Client]:
    with client_of(request.param, port=server.port, grpc_port=server.grpc_port) as client:
        yield client


@pytest.fixture(scope="session", params=["grpc", "grpc.aio"])
def triton_grpc(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Client]:
    with client_of(request.param, port=server.port, grpc_port=server.grpc_port) as client:
        yield client
