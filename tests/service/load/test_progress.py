"""How a load test goes, on a terminal and where nobody looks on."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from service.load.account import Glance
from service.load.progress import ShownProgress, ended, said
from tests.support.load_results import make_results

GLANCE: dict[str, Any] = {
    "at_s": 2.5,
    "answered": 100,
    "failed": 0,
    "in_flight": 3,
    "answered_s": 40.0,
    "p50_ms": 1.5,
    "p99_ms": 9.25,
    "late_ms": 0.1,
}


def shown(*, is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, color_system=None)
    (step,) = make_results(rates=(100,), late=("too late",)).steps
    with ShownProgress(console) as progress:
        progress.say("asking each request once")
        progress.begin("json, open", 10.0)
        progress.glance(Glance(**GLANCE))
        progress.end(step)
        progress.warn("a process is gone")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_sees_what_goes_on_and_a_file_only_what_came_of_it() -> None:
    drawn, written = shown(is_terminal=True), shown(is_terminal=False)
    for ongoing in ("asking each request once", "100 answered, 40/s, 3 under way", "2 of 10 s"):
        assert ongoing in drawn and ongoing not in written
    for outcome in ("json, open: ", "(not the service's alone)", "a process is gone"):
        assert outcome in drawn and outcome in written
    assert "\x1b" not in written and len(written.splitlines()) == 2


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "100 answered, 40/s, 3 under way, p50 1.50 ms, p99 9.25 ms, client late p99 0.10 ms"),
        ({"failed": 2, "late_ms": None}, "100 answered, 40/s, 3 under way, 2 failed, p50 1.50 ms, p99 9.25 ms"),
        ({"p50_ms": None, "p99_ms": None, "late_ms": None}, "100 answered, 40/s, 3 under way"),
    ],
)
def test_a_glance_is_one_line(changed: dict[str, Any], expected: str) -> None:
    assert said(Glance(**GLANCE | changed)) == expected


def test_percentiles_of_a_few_answers_are_not_told() -> None:
    few, many = (make_results(rates=(50,), num_answers=number).steps[0] for number in (13, 400))
    assert "p99" not in ended(few) and "p50" in ended(few) and "p99" in ended(many)
    assert ended(None) == "nothing was measured"
