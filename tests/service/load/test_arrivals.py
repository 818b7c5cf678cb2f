"""The plan of sends: fixed before the first, one plan for however many processes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from service.load.arrivals import ClosedLoop, OpenLoop, planned_sends, starts


def sends(
    arrivals: str, *, rate_s: float = 200.0, ramp_s: float = 0.0, end_s: float = 10.0, num: int = 1
) -> list[float]:
    """Of all workers, in order."""
    loop = OpenLoop(rate_s=rate_s, arrivals=arrivals)
    return sorted(
        at
        for worker in range(num)
        for at in planned_sends(loop, ramp_s=ramp_s, end_s=end_s, worker=worker, num_workers=num, seed=7)
    )


@pytest.mark.parametrize("num", [1, 2, 3])
def test_even_arrivals_are_equally_far_apart_however_many_processes_send_them(num: int) -> None:
    found = sends("even", num=num)
    assert found == pytest.approx([place / 200 for place in range(2000)])


@pytest.mark.parametrize("num", [1, 3])
def test_poisson_arrivals_have_the_rate_and_the_spread_of_poisson(num: int) -> None:
    found = sends("poisson", end_s=100.0, num=num)
    gaps = [after - before for before, after in pairwise(found)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    # 20,000 gaps: a hundredth is more than the standard error of both, seven tenths of one.
    assert mean == pytest.approx(1 / 200, rel=0.03)
    assert spread == pytest.approx(1 / 200, rel=0.03)


def test_the_same_seed_gives_the_same_plan() -> None:
    assert sends("poisson") == sends("poisson")


@pytest.mark.parametrize("arrivals", ["even", "poisson"])
def test_a_ramp_rises_evenly_to_the_rate(arrivals: str) -> None:
    found = sends(arrivals, rate_s=1000.0, ramp_s=4.0, end_s=8.0)
    counts = [sum(place <= at < place + 1 for at in found) for place in range(8)]
    assert counts == pytest.approx(
        [125, 375, 625, 875, 1000, 1000, 1000, 1000], rel=0.3 if arrivals == "poisson" else 0.01
    )


@pytest.mark.parametrize("arrivals", ["even", "poisson"])
def test_nothing_is_planned_behind_the_end(arrivals: str) -> None:
    assert max(sends(arrivals, end_s=0.5)) < 0.5


def test_callers_of_a_closed_loop_are_shared_out_and_begin_along_the_ramp() -> None:
    loop = ClosedLoop(concurrency=5)
    parts = [starts(loop, ramp_s=1.0, worker=worker, num_workers=2) for worker in range(2)]
    assert sorted(parts[0] + parts[1]) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    assert starts(loop, ramp_s=0.0, worker=0, num_workers=1) == [0.0] * 5
