"""Who rides together: order, budgets, and turns in which nobody starves."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core.batching.plan import FLOPS_PER_PASS, LARGE_FROM_FLOPS, Budget, Ride, plan, share_of
from attn_core.prepared import prepare
from tests.support.factory import make_problem

ROOMY = {"max_requests": 100, "max_tokens": 10**9, "max_bytes": 10**12, "max_flops": 10**15}
MEASURES = {"max_tokens": "tokens", "max_bytes": "num_bytes", "max_flops": "flops"}
LARGE = Ride(tokens=1, num_bytes=1, flops=LARGE_FROM_FLOPS)

rides = st.builds(Ride, tokens=st.integers(0, 9), num_bytes=st.integers(0, 9), flops=st.integers(0, 9))
budgets = st.builds(
    Budget,
    max_requests=st.integers(1, 6),
    max_tokens=st.integers(1, 20),
    max_bytes=st.integers(1, 20),
    max_flops=st.integers(1, 20),
)


def make_ride(**figures: int) -> Ride:
    return Ride(**{"tokens": 1, "num_bytes": 1, "flops": 1, **figures})


def num_small(small: list[Ride], budget: Budget) -> int:
    count, is_large = plan(small, [], budget, after_small=False)
    assert not is_large
    return count


def fits(together: list[Ride], budget: Budget) -> bool:
    return len(together) <= budget.max_requests and all(
        sum(getattr(ride, figure) for ride in together) <= getattr(budget, limit) for limit, figure in MEASURES.items()
    )


@pytest.mark.parametrize("after_small", [False, True])
def test_nothing_rides_where_nothing_waits(after_small: bool) -> None:
    assert plan([], [], Budget(), after_small=after_small) == (0, False)


def test_all_that_wait_ride_together_within_the_budget() -> None:
    assert num_small([make_ride()] * 50, Budget(**ROOMY)) == 50


@pytest.mark.parametrize("limit", [*MEASURES, "max_requests"])
def test_each_budget_binds_at_its_figure(limit: str) -> None:
    each = {MEASURES[limit]: 5} if limit in MEASURES else {}
    size = 5 if each else 1
    for allowed, count in ((3 * size, 3), (4 * size - 1, 3), (4 * size, 4)):
        assert num_small([make_ride(**each)] * 6, Budget(**{**ROOMY, limit: allowed})) == count


@pytest.mark.parametrize("limit", list(MEASURES))
def test_one_over_a_budget_rides_and_rides_alone(limit: str) -> None:
    budget = Budget(**{**ROOMY, limit: 10})
    over, fitting = make_ride(**{MEASURES[limit]: 11}), make_ride(**{MEASURES[limit]: 0})
    assert num_small([over], budget) == 1
    assert num_small([over, fitting, fitting], budget) == 1
    assert num_small([fitting, over, fitting], budget) == 1


def test_nobody_overtakes_one_that_does_not_fit_any_more() -> None:
    wide, narrow = make_ride(tokens=6), make_ride(tokens=1)
    assert num_small([wide, wide, narrow, narrow], Budget(**{**ROOMY, "max_tokens": 10})) == 1


@given(st.lists(rides, max_size=10), budgets)
def test_a_batch_is_the_longest_beginning_that_fits(small: list[Ride], budget: Budget) -> None:
    count = num_small(small, budget)
    assert count == num_small(list(small), budget)
    assert bool(count) is bool(small)
    assert count <= 1 or fits(small[:count], budget)
    assert count == len(small) or not fits(small[: count + 1], budget)


@pytest.mark.parametrize("num_waiting", [1, 3])
def test_a_large_one_rides_alone(num_waiting: int) -> None:
    assert plan([], [LARGE] * num_waiting, Budget(**ROOMY), after_small=False) == (1, True)


@pytest.mark.parametrize(
    ("after_small", "num_small", "num_large", "batch"),
    [
        (False, 3, 1, (3, False)),
        (True, 3, 1, (1, True)),
        (True, 3, 0, (3, False)),
        (False, 0, 2, (1, True)),
        (True, 0, 2, (1, True)),
    ],
)
def test_small_and_large_take_turns_where_both_wait(
    after_small: bool, num_small: int, num_large: int, batch: tuple[int, bool]
) -> None:
    assert plan([make_ride()] * num_small, [LARGE] * num_large, Budget(), after_small=after_small) == batch


arrivals = st.lists(st.lists(rides | st.just(LARGE), max_size=4), max_size=25)


@given(arrivals, budgets)
def test_neither_lane_starves_the_other(by_turn: list[list[Ride]], budget: Budget) -> None:
    """With n before it in its lane, a problem rides by the 2(n + 1)th turn, whatever comes later."""
    lanes: dict[bool, deque[int]] = {False: deque(), True: deque()}
    due: dict[int, int] = {}
    known: list[Ride] = []
    after_small, turn = False, 0
    while turn < len(by_turn) or any(lanes.values()):
        for ride in by_turn[turn] if turn < len(by_turn) else []:
            lane = lanes[ride.is_large]
            due[len(known)] = turn + 2 * (len(lane) + 1)
            lane.append(len(known))
            known.append(ride)
        small, large = ([known[index] for index in lanes[is_large]] for is_large in (False, True))
        count, is_large = plan(small, large, budget, after_small=after_small)
        assert bool(count) is bool(small or large)
        turn += 1
        for _ in range(count):
            assert turn <= due.pop(lanes[is_large].popleft())
        after_small = not is_large if count else after_small
    assert not due


@given(st.integers(0, 500), st.integers(1, 8), st.integers(1, 64))
def test_a_share_leaves_the_other_workers_their_part(waiting: int, num_workers: int, max_requests: int) -> None:
    budget, left = Budget(max_requests=max_requests), waiting
    for others in reversed(range(num_workers)):
        share = share_of(left, num_workers, budget)
        assert 1 <= share <= max_requests
        assert share <= max(1, -(-left // num_workers))
        left = max(0, left - share)
        assert left >= min(others, waiting - (num_workers - others)), "a worker is left without a request"


def test_an_only_worker_takes_all_that_the_budget_lets() -> None:
    assert share_of(50, 1, Budget(max_requests=64)) == 50
    assert share_of(500, 1, Budget(max_requests=64)) == 64


@pytest.mark.parametrize(("flops", "is_large"), [(LARGE_FROM_FLOPS - 1, False), (LARGE_FROM_FLOPS, True)])
def test_flops_alone_make_a_problem_large(flops: int, is_large: bool) -> None:
    assert Ride(tokens=10**9, num_bytes=10**12, flops=flops).is_large is is_large


def test_a_ride_counts_the_queries_of_all_items_and_the_cost_of_the_kernel() -> None:
    prepared = prepare(make_problem(batch=3, seq_len_q=5), device_type="cpu")
    assert asdict(Ride.of(prepared)) == {
        "tokens": 15,
        "num_bytes": prepared.cost.peak_bytes,
        "flops": prepared.cost.flops + round(FLOPS_PER_PASS * prepared.cost.pair_passes),
    }
