"""Two load tests against each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.load.comparison import Change, Comparison, compare
from service.load.results import Distribution, Results
from tests.support.load_results import make_results


def change(comparison: Comparison, measure: str) -> Change:
    (pair,) = comparison.pairs
    return next(change for change in pair.changes if change.measure == measure)


def one_step(**given: Any) -> Results:
    """A step of 8,000 answers, as many as p99.9 needs and more."""
    return make_results(**{"rates": (100,), "num_answers": 8000, **given})


def with_latency(results: Results, milliseconds: list[float]) -> Results:
    durations = Distribution.of(np.array(milliseconds) / 1e3)
    return replace(results, steps=tuple(replace(step, latency=durations) for step in results.steps))


def test_a_run_against_itself_is_the_same_everywhere() -> None:
    run = one_step(num_failed=20)
    comparison = compare(run, run)
    (pair,) = comparison.pairs
    assert [one.verdict for one in pair.changes] == ["same"] * 5
    assert [one.ratio for one in pair.changes] == [1.0] * 5
    assert comparison.caution == "" and comparison.differences == ()
    assert comparison.only_new == comparison.only_old == ()


def test_two_runs_of_one_service_with_other_answers_are_the_same() -> None:
    for seed in range(1, 6):
        comparison = compare(one_step(seed=seed), one_step(seed=0))
        verdicts = {one.measure: one.verdict for one in comparison.pairs[0].changes}
        assert verdicts.pop("p99_9_ms") in ("same", "too few")
        assert set(verdicts.values()) == {"same"}


@pytest.mark.parametrize(("slowness", "forward", "back"), [(1.5, "worse", "better"), (1 / 1.5, "better", "worse")])
def test_slower_is_worse_and_faster_is_better_whichever_came_first(slowness: float, forward: str, back: str) -> None:
    usual, other = one_step(), one_step(slowness=slowness)
    for measure in ("p50_ms", "p99_ms"):
        there, again = change(compare(other, usual), measure), change(compare(usual, other), measure)
        assert (there.verdict, again.verdict) == (forward, back)
        assert there.old == again.new and there.new == again.old
        assert there.ratio is not None and again.ratio is not None
        assert there.ratio * again.ratio == pytest.approx(1.0)


def test_more_requests_a_second_are_better() -> None:
    assert change(compare(one_step(num_answers=9000), one_step(num_answers=8000)), "requests_s").verdict == "better"
    assert change(compare(one_step(num_answers=8000), one_step(num_answers=9000)), "requests_s").verdict == "worse"


@pytest.mark.parametrize(("factor", "verdict"), [(1.09, "same"), (1.12, "worse")])
def test_a_median_must_change_by_a_tenth(factor: float, verdict: str) -> None:
    even = [float(at) for at in np.linspace(10, 11, 4000)]
    old, new = (with_latency(one_step(), [at * scale for at in even]) for scale in (1, factor))
    assert change(compare(new, old), "p50_ms").verdict == verdict


@pytest.mark.parametrize(("factor", "verdict"), [(1.18, "same"), (1.25, "worse")])
def test_a_tail_must_change_by_a_fifth(factor: float, verdict: str) -> None:
    even = [float(at) for at in np.linspace(10, 11, 8000)]
    old, new = (with_latency(one_step(), [at * scale for at in even]) for scale in (1, factor))
    assert change(compare(new, old), "p99_ms").verdict == verdict
    assert change(compare(new, old), "p99_9_ms").verdict == verdict


@pytest.mark.parametrize(
    ("num_answers", "told"),
    [(99, set()), (390, {"p50_ms"}), (3900, {"p50_ms", "p99_ms"}), (4100, {"p50_ms", "p99_ms", "p99_9_ms"})],
)
def test_a_percentile_is_judged_only_where_the_answers_carry_it(num_answers: int, told: set[str]) -> None:
    old, new = (one_step(num_answers=num_answers, slowness=slowness) for slowness in (1, 30))
    changes = compare(new, old).pairs[0].changes
    assert {one.measure for one in changes if one.measure.endswith("_ms") and one.verdict != "too few"} == told


def test_a_few_slow_answers_are_no_worse_tail() -> None:
    # p99 of 500 answers rests on 5 of them: 2 stalls more move it far, and say nothing.
    usual = [float(at) for at in np.linspace(10, 11, 500)]
    stalled = [*usual[:-6], *[90.0] * 6]
    p99 = change(compare(with_latency(one_step(), stalled), with_latency(one_step(), usual)), "p99_ms")
    assert p99.ratio is not None and p99.ratio > 5
    assert p99.verdict == "too few"


@pytest.mark.parametrize(
    ("old_failed", "new_failed", "verdict"),
    [(0, 0, "same"), (0, 2, "same"), (0, 40, "worse"), (40, 0, "better"), (40, 44, "same")],
)
def test_failures_beyond_chance_are_told_however_few(old_failed: int, new_failed: int, verdict: str) -> None:
    old, new = one_step(num_failed=old_failed), one_step(num_failed=new_failed)
    share = change(compare(new, old), "failed_share")
    assert share.verdict == verdict
    assert share.new == new_failed / (8000 + new_failed)
    assert (share.ratio is None) is (old_failed == 0)


def test_steps_without_a_partner_are_named_and_not_compared() -> None:
    new = make_results(forms=("json",), rates=(50, 100), concurrencies=(4,))
    old = make_results(forms=("json", "grpc"), rates=(100,))
    comparison = compare(new, old)
    assert [pair.name for pair in comparison.pairs] == ["json, open, 100/s, poisson"]
    assert comparison.only_new == ("json, open, 50/s, poisson", "json, closed, 4 at once")
    assert comparison.only_old == ("grpc, open, 100/s, poisson",)


def test_of_steps_alike_the_first_meets_the_first() -> None:
    twice, once = make_results(rates=(100, 100)), make_results(rates=(100,))
    comparison = compare(twice, once)
    assert [pair.name for pair in comparison.pairs] == ["json, open, 100/s, poisson".replace("json", "safetensors")]
    assert comparison.only_new == ("safetensors, open, 100/s, poisson (2)",)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"service": {"version": "0.2.0", "device": "cpu", "torch": "2.13.0"}}, "service version"),
        ({"service": {"version": "0.1.0", "device": "cuda:0", "torch": "2.13.0"}}, "service device"),
        ({"client": {"processes": "4", "cores": "8"}}, "client processes"),
        ({"client": {"processes": "2"}}, "client cores"),
        ({"options": {"causal": False}}, "option causal"),
        ({"options": {"causal": True, "scale": 0.5}}, "option scale"),
        ({"url": "http://127.0.0.1:9000"}, "url"),
        ({"shapes": ("1x8x256x64",)}, "shapes"),
        ({"seed": 7}, "seed"),
        ({"was_cut": True}, "being cut short"),
    ],
)
def test_what_is_unlike_in_two_runs_is_said(given: dict[str, Any], what: str) -> None:
    comparison = compare(one_step(**given), one_step())
    assert [one.what for one in comparison.differences] == [what]
    assert comparison.caution.endswith(f"they differ in {what}.")


def test_a_pair_says_which_of_its_steps_is_not_the_service_alone() -> None:
    late, fair = one_step(late=("slow client",)), one_step()
    assert compare(late, fair).pairs[0].late == ("new",)
    assert compare(fair, late).pairs[0].late == ("old",)
    assert compare(late, late).pairs[0].late == ("old", "new")


def test_a_run_without_answers_is_compared_without_a_word_on_its_times() -> None:
    comparison = compare(one_step(num_answers=0, num_failed=200), one_step())
    p50 = change(comparison, "p50_ms")
    assert (p50.new, p50.ratio, p50.verdict) == (None, None, "too few")
    assert change(comparison, "failed_share").verdict == "worse"
    assert change(comparison, "requests_s").verdict == "worse"
