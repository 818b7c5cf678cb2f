"""Services for the tests of the gRPC door that leave them as they find them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from attn_core import Engine
from tests.support.in_process import InProcess
from tests.support.rpc import (
    Caller,
)
from tests.support.rpc_service import (
    running,
)

KEYS: dict[str, Any] = {"api_keys": "first-key,second-key", "max_body_bytes": 1024}


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[InProcess, Caller]]:
    """A service that computes at once what it may, for tests that leave it as they find it."""
    with running(loop_engine=Engine(device="cpu", max_threads=1)) as both:
        yield both


@pytest.fixture
def caller(plain: tuple[InProcess, Caller]) -> Caller:
    return plain[1]


@pytest.fixture(scope="module")
def keyed() -> Iterator[Caller]:
    with running(**KEYS) as (_, caller):
        yield caller
