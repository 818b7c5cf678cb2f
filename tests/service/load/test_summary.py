"""A load test in the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from service.load.comparison import compare
from service.load.digits import milliseconds, percentile_ms, scaled
from service.load.results import Results
from service.load.summary import show, show_comparison
from tests.support.load_results import make_results


def printed(print_to: Callable[[Console], Any], width: int, **given: Any) -> str:
    console = Console(file=io.StringIO(), width=width, **given)
    print_to(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(results: Results, width: int = 80, **given: Any) -> str:
    return printed(lambda console: show(results, console), width, **given)


@pytest.mark.parametrize("width", [80, 120])
def test_each_step_is_a_line_with_its_percentiles(width: int) -> None:
    results = make_results(forms=("safetensors", "json"), rates=(50, 1200), concurrencies=(8,), num_failed=1)
    text = shown(results, width)
    assert max(map(len, text.splitlines())) <= width
    lines = [line.split() for line in text.partition("own times")[0].splitlines()]
    for step in results.steps:
        numbers = [milliseconds(percentile_ms(step.latency, at)) for at in (50, 99, 99.9)]
        expected = {step.form, scaled(step.requests_s), *numbers, milliseconds(step.latency.max_ms)}
        assert any(expected <= set(line) for line in lines), step.name


def test_a_wide_terminal_shows_more_columns() -> None:
    narrow, wide = (shown(make_results(), width) for width in (80, 120))
    for heading in ("p90", "planned", "MB/s", "ceiling "):
        assert heading in wide.partition("own times")[0] and heading not in narrow.partition("own times")[0]


def test_stages_errors_and_ceilings_are_shown_where_there_are_any() -> None:
    text = shown(make_results(num_failed=5))
    assert "compute" in text and "429 overloaded" in text and "The client's ceiling" in text
    bare = shown(make_results(ceilings=()))
    assert "Failed requests" not in bare and "ceiling" not in bare


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"late": ("sends came 9 ms late",)}, "sends came 9 ms late. These figures are not the service's alone"),
        ({"wrong": ("context[0, 1] is [red]off[/red]",)}, "context[0, 1] is [red]off[/red]. Wrong answers"),
        ({"same_bits": False}, "differ in their bits"),
        ({"was_cut": True}, "The run was cut short"),
    ],
)
def test_what_spoils_the_figures_is_said_in_bold_red(given: dict[str, Any], said: str) -> None:
    text = shown(make_results(rates=(100,), **given), 400, force_terminal=True, color_system="standard")
    line = next(line for line in text.splitlines() if said in line)
    assert line.startswith("\x1b[1;31m")
    assert said not in shown(make_results(rates=(100,)), 400)


def test_a_closed_loop_is_said_to_hide_stalls() -> None:
    assert "In a closed loop" in shown(make_results(rates=(), concurrencies=(2,)))
    assert "In a closed loop" not in shown(make_results())


def test_a_run_without_a_step_says_so() -> None:
    text = shown(make_results(rates=(), was_cut=True))
    assert "No step has figures" in text and "cut short" in text


def test_a_comparison_shows_both_numbers_their_ratio_and_the_verdict() -> None:
    new, old = make_results(rates=(400,), slowness=2.0), make_results(rates=(400,), url="http://[::1]:1")
    comparison = compare(new, old)
    text = printed(lambda console: show_comparison(comparison, console), 80)
    assert "they differ in url" in " ".join(text.split()) and "http://[::1]:1" in text
    p50 = comparison.pairs[0].changes[1]
    assert p50.ratio is not None
    line = next(line for line in text.splitlines() if line.strip().startswith("p50 ms"))
    assert line.split()[2:] == [milliseconds(p50.old), milliseconds(p50.new), f"{p50.ratio:.2f}", "worse"]


def test_a_comparison_names_steps_without_a_partner() -> None:
    text = printed(
        lambda console: show_comparison(compare(make_results(rates=(7,)), make_results(rates=(9,))), console), 80
    )
    assert "Only in this run: safetensors, open, 7/s, poisson" in text
    assert "Only in the earlier run: safetensors, open, 9/s, poisson" in text


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_no_number_loses_a_digit_in_a_narrow_terminal(width: int) -> None:
    results = make_results(rates=(12_346,), slowness=100_000.0, num_answers=2000)
    (step,) = results.steps
    text = shown(results, width)
    numbers = {scaled(step.requests_s), *(milliseconds(percentile_ms(step.latency, at)) for at in (50, 99, 99.9))}
    assert numbers <= set(text.split()) and "safetensors" in text


@pytest.mark.parametrize(("num_failed", "is_said"), [(0, False), (1, False), (100, True)])
def test_percentiles_that_failures_spoil_are_said_to_be_so_in_red(num_failed: int, is_said: bool) -> None:
    results = make_results(rates=(400,), num_failed=num_failed)
    text = shown(results, 400, force_terminal=True, color_system="standard")
    line = next((line for line in text.splitlines() if "requests failed," in line), "")
    assert bool(line) == is_said and (not is_said or line.startswith("\x1b[1;31m"))


def test_what_failures_said_first_is_shown() -> None:
    assert "429 overloaded: no more than that" in shown(make_results(num_failed=5)).replace("\n", " ")
