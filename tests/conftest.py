"""What every test stands on: one hypothesis profile, the devices that are there, and which files begin first."""

import os
from pathlib import Path

# Two workers and their servers share the cores: a thread of OpenMP that waits for another sleeps, and leaves it its
# core. Read when torch is imported, in servers too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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

TESTS = Path(__file__).parent
LONG_FILES = (
    "e2e/test_soak.py",
    "e2e/test_schema.py",
    "e2e/test_grpc.py",
    "e2e/test_signals.py",
    "e2e/test_playground.py",
    "e2e/test_playground_breakers.py",
    "e2e/test_load.py",
    "e2e/test_reports.py",
    "docs/test_readme.py",
    "e2e/test_two_roads.py",
    "attn_core/test_blocks.py",
    "attn_core/kernels/test_kernels.py",
    "attn_core/test_accuracy.py",
    "e2e/test_tls.py",
    "e2e/test_v2_breakers.py",
    "e2e/test_cli.py",
    "e2e/test_benchmarks.py",
    "e2e/test_cli_calls.py",
    "e2e/test_keys.py",
    "e2e/test_named_layers.py",
    "e2e/test_load_page.py",
    "service/test_text_workers.py",
    "service/client/test_hugging_face.py",
    "attn_core/test_hazards.py",
    "attn_core/test_gradients.py",
    "attn_core/test_peaks.py",
    "attn_core/test_layer_cost.py",
    "attn_core/test_cost.py",
)
"""Those that take longest, the longest first: one that began last would keep one worker busy and the other idle."""


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their argument and place: gzip writes the time into them, and workers must agree on names."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files begin first; what needs a GPU is skipped where there is none."""
    place = {TESTS / name: index for index, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no GPU here"))


# The machine is shared, and the problems are small.
torch.set_num_threads(1)
