"""What every test stands on: one hypothesis profile, and the devices that are there."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.fixtures import client, server

__all__ = ["client", "server"]

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("TESTS_MAX_EXAMPLES", "100")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("repeatable")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their argument and place: gzip writes the time into them, and workers must agree on names."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a GPU is skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no GPU here"))


# The machine is shared, and the problems are small.
torch.set_num_threads(1)
