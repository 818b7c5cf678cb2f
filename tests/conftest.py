"""What every test stands on: one hypothesis profile, and the devices that are there."""

import os

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
# The machine is shared, and the problems are small.
torch.set_num_threads(1)
