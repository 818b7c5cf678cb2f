"""The figures as a table to read and as a JSON file to keep, with the machine they come from."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from tests.benchmarks.figures import Figures
from tests.benchmarks.goals import outcomes
from tests.benchmarks.processes import ROOT

RESULTS = Path(__file__).parent / "results"
MIN_COLUMNS = 130
_SIGNIFICANT = 3
_MARKS = {True: "yes", False: "no", None: "not measured"}


def default_file(now: datetime) -> Path:
    return RESULTS / f"serving-{now:%Y%m%dT%H%M%SZ}.json"


def machine_facts() -> dict[str, Any]:
    """What the figures depend on. ``load_average`` is of the minute before: above 0.5, others were at work."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        **{name: version(name) for name in ("torch", "uvicorn", "uvloop", "httptools", "fastapi", "orjson", "grpcio")},
    }


def write(
    path: Path,
    *,
    machine: dict[str, Any],
    settings: dict[str, Any],
    figures: Sequence[Figures],
    failures: Sequence[str],
) -> None:
    content = {
        "machine": machine,
        "settings": settings,
        "cells": [one.as_json() for one in figures],
        "goals": [outcome.as_json() for outcome in outcomes(figures)],
        "left_out": failures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")


def show(figures: Sequence[Figures], machine: dict[str, Any], failures: Sequence[str]) -> None:
    """The service; its limits and the peers in the same rounds; its goals."""
    # In fewer columns rich would cut figures off.
    console = Console(width=max(MIN_COLUMNS, Console().width))
    names = ("cpu", "cores", "load_average", "torch", "python", "commit", "date")
    console.print(", ".join(f"{name} {machine[name]}" for name in names), highlight=False)
    console.print(_service_table(figures))
    console.print(_limits_table(figures))
    if any(one.peers for one in figures):
        console.print(_peers_table(figures))
    console.print(_goals_table(figures))
    for failure in failures:
        console.print(failure, highlight=False, markup=False)
    error = max(one.max_abs_error for one in figures)
    console.print(f"greatest difference of an answer from torch in process: {error:g}", highlight=False)


def _service_table(figures: Sequence[Figures]) -> Table:
    table = new_table(
        "service",
        "req/s",
        "p50 ms",
        "p99 ms",
        "p99 / p50",
        "CPU ms",
        "peak MB",
        "over idle",
        "/ echo",
        "/ bound",
        "p50 / torch",
    )
    for one in figures:
        ours, ratios = one.service, one.ratios
        table.add_row(
            one.cell.name,
            *number_texts(ours.requests_per_s, ours.p50_ms, ours.p99_ms, ratios["p99_over_p50"]),
            *number_texts(ours.cpu_ms, ours.peak_rss_mb, ours.rss_over_idle_mb),
            *number_texts(ratios["requests_over_echo"], ratios["requests_over_bound"], ratios["p50_over_torch"]),
        )
    return table


def _limits_table(figures: Sequence[Figures]) -> Table:
    table = new_table(
        "limits",
        "echo req/s",
        "p50 ms",
        "CPU ms",
        "bound req/s",
        "p50 ms",
        "CPU ms",
        "torch calls/s",
        "p50 ms",
        "drift",
    )
    for one in figures:
        echo, bound = one.echo, one.bound
        table.add_row(
            one.cell.name,
            *number_texts(echo.requests_per_s, echo.p50_ms, echo.cpu_ms),
            *number_texts(bound.requests_per_s, bound.p50_ms, bound.cpu_ms),
            *number_texts(one.torch.requests_per_s, one.torch.p50_ms, one.drift),
        )
    return table


def _peers_table(figures: Sequence[Figures]) -> Table:
    table = new_table(
        "peers", "", "req/s", "p50 ms", "p99 ms", "CPU ms", "peak MB", "over idle", "ours / it", num_words=2
    )
    for one in figures:
        for name, peer in one.peers.items():
            table.add_row(
                one.cell.name,
                name,
                *number_texts(peer.requests_per_s, peer.p50_ms, peer.p99_ms, peer.cpu_ms),
                *number_texts(peer.peak_rss_mb, peer.rss_over_idle_mb, one.over_peers[name]),
            )
    return table


def _goals_table(figures: Sequence[Figures]) -> Table:
    table = new_table("goals", "", "", "reached", "", num_words=2)
    for outcome in outcomes(figures):
        goal = outcome.goal
        table.add_row(
            goal.cell,
            goal.what,
            f"{'<=' if goal.is_ceiling else '>='} {goal.limit:g}",
            *number_texts(outcome.reached),
            _MARKS[outcome.is_met],
        )
    return table


def new_table(*columns: str, num_words: int = 1) -> Table:
    """``num_words`` columns hold words, the others numbers."""
    table = Table(box=box.SIMPLE)
    for column in columns[:num_words]:
        table.add_column(column, no_wrap=True)
    for column in columns[num_words:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def number_texts(*numbers: float | None) -> list[str]:
    return ["" if number is None else _text(number) for number in numbers]


def _text(number: float) -> str:
    """Three digits that mean something, never an exponent."""
    whole_digits = len(str(int(abs(number)))) if abs(number) >= 1 else 0
    return f"{number:,.{max(0, _SIGNIFICANT - whole_digits)}f}"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The short commit, with a + where the tree has other changes; empty outside a repository."""
    asked = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
