"""Estimates: they grow with the work, follow what is seen, and never run away."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core.cost import Cost
from service.pace import MAX_CORRECTION, MEMORY_BYTES_PER_S, Pace

RATES = {"fused": 1e9, "manual": 1e8}
paths = st.sampled_from(sorted(RATES))
seconds = st.floats(0, 1e4)


def make_cost(flops: int = 10**6, bytes_moved: int = 0) -> Cost:
    return Cost(flops=flops, bytes_moved=bytes_moved, peak_bytes=0, output_bytes=0)


costs = st.builds(make_cost, st.integers(0, 10**15), st.integers(0, 10**12))


def make_pace(*, overhead_s: float = 1e-4) -> Pace:
    return Pace(overhead_s=overhead_s, flops_per_s=RATES)


def test_an_estimate_is_the_overhead_and_the_flops_at_the_rate_of_the_kernel() -> None:
    pace = make_pace()
    assert pace.estimate_s(make_cost(10**6), "fused") == pytest.approx(1e-4 + 1e-3)
    assert pace.estimate_s(make_cost(10**6), "manual") == pytest.approx(1e-4 + 1e-2)
    assert pace.estimate_s(make_cost(0), "manual") == pytest.approx(1e-4)


def test_a_kernel_that_was_not_measured_counts_as_the_slowest_until_it_is_seen() -> None:
    pace, cost = make_pace(), make_cost(10**6)
    assert pace.estimate_s(cost, "blocked") == pace.estimate_s(cost, "manual")
    for _ in range(200):
        pace.observe(cost, "blocked", pace.least_s(cost, "blocked"))
    assert pace.estimate_s(cost, "blocked") < 0.3 * pace.estimate_s(cost, "manual")
    pace.set_rates(overhead_s=1e-4, flops_per_s={"fused": 1e9, "blocked": 2e9})
    assert pace.estimate_s(cost, "manual") == pace.estimate_s(cost, "fused") > pace.estimate_s(cost, "blocked")


def test_a_kernel_that_is_not_called_as_its_path_has_a_pace_of_its_own() -> None:
    pace = Pace(overhead_s=0.0, flops_per_s={"manual": 1e8, "gradients": 1e9})
    cost = make_cost(10**6)
    backward = replace(cost, kernel="gradients")
    assert pace.estimate_s(backward, "manual") == pytest.approx(1e-3)
    pace.observe(backward, "manual", 1.0)
    assert pace.estimate_s(backward, "blocked") > 1e-3
    assert pace.estimate_s(cost, "manual") == pytest.approx(1e-2)


def test_what_computes_little_is_bound_by_the_bytes_it_moves() -> None:
    moved = int(2 * MEMORY_BYTES_PER_S)
    assert make_pace().estimate_s(make_cost(1, moved), "fused") == pytest.approx(2.0 + 1e-4)


@given(costs, paths, st.integers(0, 10**15), st.integers(0, 10**12), st.lists(seconds, max_size=5))
def test_more_work_is_never_estimated_shorter(
    cost: Cost, path: str, more_flops: int, more_bytes: int, seen: list[float]
) -> None:
    pace = make_pace()
    for took_s in seen:
        pace.observe(cost, path, took_s)
    more = make_cost(cost.flops + more_flops, cost.bytes_moved + more_bytes)
    assert 0 < pace.estimate_s(cost, path) <= pace.estimate_s(more, path)


@given(costs, paths, st.floats(1 / MAX_CORRECTION, MAX_CORRECTION), st.lists(seconds, max_size=5))
def test_each_observation_brings_the_estimate_nearer_to_it(
    cost: Cost, path: str, slowness: float, before: list[float]
) -> None:
    pace = make_pace()
    truth = slowness * pace.estimate_s(cost, path)
    for took_s in before:
        pace.observe(cost, path, took_s)
    first_off = off = abs(pace.estimate_s(cost, path) - truth)
    for _ in range(100):
        pace.observe(cost, path, truth)
        nearer = abs(pace.estimate_s(cost, path) - truth)
        assert nearer <= off * 0.99 + 1e-9 * truth
        off = nearer
    assert off <= first_off / 100 + 1e-9 * truth


@given(costs, paths, st.lists(st.sampled_from([0.0, 1e-9, 1e9]), max_size=300))
def test_no_observation_moves_an_estimate_beyond_the_bound(cost: Cost, path: str, seen: list[float]) -> None:
    pace = make_pace()
    first_s = pace.estimate_s(cost, path)
    for took_s in seen:
        pace.observe(cost, path, took_s)
        assert 0.999 / MAX_CORRECTION <= pace.estimate_s(cost, path) / first_s <= 1.001 * MAX_CORRECTION


def test_one_outlier_changes_little() -> None:
    pace, cost = make_pace(), make_cost()
    first_s = pace.estimate_s(cost, "fused")
    pace.observe(cost, "fused", 1e6)
    assert pace.estimate_s(cost, "fused") <= 2 * first_s


def test_a_problem_is_tiny_while_computing_takes_no_longer_than_the_overhead() -> None:
    pace = make_pace(overhead_s=1e-3)
    assert pace.is_tiny(make_cost(10**6), "fused") and not pace.is_tiny(make_cost(10**6 + 10**4), "fused")
    assert pace.is_tiny(make_cost(10**5), "manual") and not pace.is_tiny(make_cost(10**6), "manual")
    assert not pace.is_tiny(make_cost(0, int(MEMORY_BYTES_PER_S)), "fused")
    for _ in range(100):
        pace.observe(make_cost(), "fused", 1e3)
    assert pace.is_tiny(make_cost(10**5), "fused"), "a loaded machine makes no problem larger"


def test_what_is_seen_of_one_kernel_says_nothing_of_another() -> None:
    pace, cost = make_pace(), make_cost()
    manual_s = pace.estimate_s(cost, "manual")
    pace.observe(cost, "fused", 1.0)
    assert pace.estimate_s(cost, "manual") == manual_s


def test_rates_that_were_measured_take_the_place_of_all_before() -> None:
    pace = make_pace()
    pace.observe(make_cost(), "fused", 1.0)
    pace.set_rates(overhead_s=1e-3, flops_per_s={"fused": 1e6, "manual": 1e5})
    assert pace.estimate_s(make_cost(10**6), "fused") == pytest.approx(1.001)
    assert pace.estimate_s(make_cost(10**6), "manual") == pytest.approx(10.001)


def test_work_for_each_pair_counts_beside_the_products() -> None:
    pace = Pace(overhead_s=0.0, flops_per_s={"fused": 1e9, "manual": 1e9})
    narrow = make_cost()
    worked = replace(narrow, pair_passes=4e9)
    assert pace.estimate_s(worked, "fused") > 1 > pace.estimate_s(narrow, "fused")


def test_the_least_a_problem_takes_is_far_below_its_estimate_and_shared_by_all_threads() -> None:
    cost = replace(make_cost(), flops=10**12)
    alone, many = (Pace(overhead_s=0.0, flops_per_s={"fused": 1e9}, num_threads=count) for count in (1, 8))
    assert alone.least_s(cost, "fused") <= alone.estimate_s(cost, "fused") / 2
    assert many.least_s(cost, "fused") == alone.least_s(cost, "fused") / 8
