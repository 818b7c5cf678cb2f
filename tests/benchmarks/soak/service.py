"""The service as every form starts it, and what its metrics say."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.benchmarks.processes import HOST, Server, free_ports, running

GAUGES = ("attn_in_flight_requests", "attn_queue_requests")


@contextlib.contextmanager
def serving(folder: Path, settings: Mapping[str, str], *, ends_itself: bool = False) -> Iterator[Server]:
    """A ready server with these settings, in a process of its own; ended by SIGTERM, with exit code 0.

    ``ends_itself``: the caller ends it, and looks at its exit code.

    Raises: ServerFailed.
    """
    (port,) = free_ports(1)
    with running(
        "service",
        ["-m", "service", "serve", "--host", HOST, "--port", str(port)],
        port=port,
        folder=folder,
        # Of no use here, and its usual port may be taken.
        environment={"ATTN_GRPC_PORT": "0", **settings},
        ready_path="/readyz",
        exit_codes=None if ends_itself else frozenset({0}),
    ) as server:
        yield server


def metrics_of(port: int) -> dict[str, float]:
    """Every series, by its name and labels as they are written."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def total(metrics: dict[str, float], name: str, label: str = "") -> float:
    """Over all series of a name whose labels hold ``label``."""
    return sum(value for series, value in metrics.items() if series.partition("{")[0] == name and label in series)


def refusals_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """How many were refused from one look at the metrics to the other, by the reason, those that there were."""
    name = "attn_refused_requests_total"
    grown = {series: value - before.get(series, 0.0) for series, value in after.items() if series.startswith(name)}
    reasons = {series: series.split('"')[1] for series in grown}
    return {f"refused: {reasons[series]}": value for series, value in grown.items() if value}
