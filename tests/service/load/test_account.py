"""What a step comes to, from what its client processes said of each request."""

from __future__ import annotations

from array import array

import pytest

from service.load.account import Account
from service.load.arrivals import ClosedLoop, OpenLoop
from service.load.results import Ceiling, Distribution
from service.load.worker import BEHIND, TOO_MANY, Part, Step

OPEN, CLOSED = OpenLoop(rate_s=100.0, arrivals="even"), ClosedLoop(concurrency=2)
REFUSED = "429 overloaded"


def step(loop: OpenLoop | ClosedLoop = OPEN, *, ramp_s: float = 1.0, warm_up_s: float = 1.0) -> Step:
    return Step(form="json", loop=loop, begin=0.0, ramp_s=ramp_s, warm_up_s=warm_up_s, duration_s=4.0)


def part(
    *requests: tuple[float, float, float, str], number: int = 0, stages: dict[str, list[float]] | None = None
) -> Part:
    """``requests``: planned, sent, done, what went wrong."""
    kinds = list(dict.fromkeys(["", *(kind for *_, kind in requests)]))
    return Part(
        planned=array("d", [planned for planned, *_ in requests]),
        sent=array("d", [sent for _, sent, _, _ in requests]),
        done=array("d", [done for _, _, done, _ in requests]),
        number=array("H", [number] * len(requests)),
        kind=array("H", [kinds.index(kind) for *_, kind in requests]),
        received=array("L", [0 if kind else 1000 for *_, kind in requests]),
        stages={name: array("d", found) for name, found in (stages or {}).items()},
        kinds=kinds,
    )


def account(*parts: Part, of: Step | None = None, names: tuple[str, ...] = ("a",)) -> Account:
    made = Account(of or step(), names, [500] * len(names))
    for worker, each in enumerate(parts):
        made.add(worker, each)
    return made


def ceiling(requests_s: float) -> Ceiling:
    import numpy as np

    return Ceiling(form="json", concurrency=2, requests_s=requests_s, latency=Distribution.of(np.array([0.001])))


def test_latency_runs_from_the_planned_send_and_service_time_from_the_real_one() -> None:
    result = account(part((3.0, 3.1, 3.15, ""))).result(ceiling=None, checked=None)
    assert result is not None
    assert result.latency.max_ms == pytest.approx(150)
    assert result.service_time.max_ms == pytest.approx(50)
    assert result.lateness.max_ms == pytest.approx(100)


def test_only_requests_planned_behind_ramp_and_warm_up_count_wherever_they_end() -> None:
    requests = part((0.5, 0.5, 0.6, ""), (1.5, 1.5, 2.5, ""), (2.5, 2.5, 2.6, ""), (5.9, 5.9, 7.0, ""))
    result = account(requests).result(ceiling=None, checked=None)
    assert result is not None
    assert (result.planned, result.answered, result.latency.count) == (2, 2, 2)
    assert result.latency.max_ms == pytest.approx(1100)
    # What came in the measured 4 seconds, whenever it was planned.
    assert result.requests_s == pytest.approx(2 / 4)
    assert [moment.phase for moment in result.timeline][:: int(1 / result.bin_s)] == [
        "ramp",
        "warm-up",
        *["measured"] * 4,
        "tail",
    ]


def test_a_stall_meets_every_send_that_was_planned_in_it() -> None:
    # Even sends of 100 a second; from 3.0 to 3.2 s nothing is answered, then all at once.
    requests = [(at / 100, at / 100, 3.2 if 300 <= at < 320 else at / 100 + 0.001, "") for at in range(200, 600)]
    result = account(part(*requests)).result(ceiling=None, checked=None)
    assert result is not None
    assert result.latency.percentiles_ms["50"] == pytest.approx(1, rel=0.01)
    assert result.latency.p99_ms == pytest.approx(170, rel=0.1)
    assert max(moment.max_ms or 0 for moment in result.timeline) == pytest.approx(200, rel=0.01)


def test_failures_are_counted_by_kind_and_have_no_part_in_latencies() -> None:
    requests = part((3.0, 3.0, 3.1, ""), (3.1, 3.1, 3.9, REFUSED), (3.2, 3.2, 3.9, REFUSED), (3.3, 3.3, 3.9, "broken"))
    result = account(requests).result(ceiling=None, checked=None)
    assert result is not None
    assert (result.planned, result.answered, result.failed) == (4, 1, 3)
    assert result.errors == {REFUSED: 2, "broken": 1}
    assert result.latency.max_ms == pytest.approx(100)


def test_parts_of_several_processes_are_one_step() -> None:
    # Each counts kinds of its own.
    result = account(part((3.0, 3.0, 3.1, "broken")), part((3.0, 3.0, 3.1, REFUSED), (3.0, 3.0, 3.1, ""))).result(
        ceiling=None, checked=None
    )
    assert result is not None
    assert result.errors == {"broken": 1, REFUSED: 1} and result.answered == 1


def test_latencies_are_told_by_shape_where_there_are_several() -> None:
    made = account(part((3.0, 3.0, 3.1, "")), part((3.0, 3.0, 3.3, ""), number=2), names=("a", "a", "b"))
    result = made.result(ceiling=None, checked=None)
    assert result is not None
    assert {name: found.max_ms for name, found in result.shapes.items()} == pytest.approx({"a": 100, "b": 300})
    alone = account(part((3.0, 3.0, 3.1, ""))).result(ceiling=None, checked=None)
    assert alone is not None and alone.shapes == {}


def test_the_services_own_stages_are_told_in_milliseconds() -> None:
    result = account(part((3.0, 3.0, 3.1, ""), stages={"queue": [2.0], "compute": [5.0]})).result(
        ceiling=None, checked=None
    )
    assert result is not None
    assert {name: found.max_ms for name, found in result.stages.items()} == pytest.approx({"queue": 2, "compute": 5})


@pytest.mark.parametrize(("late_s", "is_late"), [(0.0005, False), (0.005, False), (0.012, True)])
def test_a_client_that_sends_late_beside_the_latency_is_told_of(late_s: float, is_late: bool) -> None:
    requests = [(at / 100, at / 100 + late_s, at / 100 + 0.1, "") for at in range(200, 600)]
    result = account(part(*requests)).result(ceiling=None, checked=None)
    assert result is not None
    assert bool(result.late) == is_late
    assert not is_late or "late for its planned sends" in result.late[0]


@pytest.mark.parametrize(
    ("every", "late_s", "spoiled"),
    [(50, 0.05, "p99, p99.9, max"), (8, 0.02, "p90, p95, p99, p99.9"), (700, 0.05, "p99.9, max")],
)
def test_late_sends_are_told_of_at_each_percentile_that_they_spoil(every: int, late_s: float, spoiled: str) -> None:
    requests = [
        (at / 1000, at / 1000 + (late_s if at % every == 0 else 0), at / 1000 + 0.06, "") for at in range(2000, 6000)
    ]
    result = account(part(*requests)).result(ceiling=None, checked=None)
    assert result is not None and result.late[0].endswith(f"which spoils {spoiled}")


def test_one_late_send_of_few_spoils_no_percentile_that_is_shown() -> None:
    requests = [(at / 100, at / 100 + (0.02 if at == 300 else 0), at / 100 + 0.06, "") for at in range(200, 600)]
    result = account(part(*requests)).result(ceiling=None, checked=None)
    assert result is not None and not result.late


@pytest.mark.parametrize(("longest_s", "stood_still"), [(0.002, False), (0.3, True)])
def test_a_client_that_stood_still_in_a_closed_loop_is_told_of(longest_s: float, stood_still: bool) -> None:
    made = part(*[(at / 100, at / 100, at / 100 + 0.05, "") for at in range(200, 600)])
    made.ticks = array("d", [0.0001] * 300 + [longest_s])
    result = account(made, of=step(CLOSED)).result(ceiling=None, checked=None)
    assert result is not None and result.ticks.max_ms == pytest.approx(longest_s * 1e3)
    assert result.lateness.count == 0
    assert bool(result.late) == stood_still and (not stood_still or "stood still" in result.late[0])


def test_a_client_that_stood_still_often_spoils_more_than_the_largest() -> None:
    made = part(*[(at / 100, at / 100, at / 100 + 0.012, "") for at in range(200, 600)])
    made.ticks = array("d", [0.0001] * 385 + [0.027] * 15)
    result = account(made, of=step(CLOSED)).result(ceiling=None, checked=None)
    assert result is not None and "spoils p99, max" in result.late[0]


def test_what_failures_said_first_is_kept() -> None:
    made = part((3.0, 3.0, 3.1, REFUSED))
    made.details = {REFUSED: "the queue is full"}
    result = account(made).result(ceiling=None, checked=None)
    assert result is not None and result.details == {REFUSED: "the queue is full"}


def test_sends_that_did_not_happen_are_failures_and_told_of() -> None:
    result = account(part((3.0, 3.0, 3.1, ""), (3.1, 3.1, 3.1, TOO_MANY))).result(ceiling=None, checked=None)
    assert result is not None
    assert result.errors == {TOO_MANY: 1} and "did not happen" in result.late[0]
    # Nothing of it was sent: no bytes, no lateness.
    assert result.sent_mb_s == pytest.approx(500 / 4 / 1e6) and result.lateness.count == 1


@pytest.mark.parametrize("requests", [((3.0, 3.0, 3.1, ""),), ()])
def test_sends_that_a_client_never_came_to_are_counted_without_a_row_each(
    requests: tuple[tuple[float, float, float, str], ...],
) -> None:
    behind = part(*requests)
    behind.num_behind = 10**9
    result = account(behind).result(ceiling=None, checked=None)
    assert result is not None
    assert result.errors == {BEHIND: 10**9} and result.failed == 10**9
    assert result.planned == 10**9 + len(requests) and "still behind" in result.late[0]


@pytest.mark.parametrize(("loop", "reached"), [(OPEN, 100.0), (CLOSED, 1.0)])
def test_a_client_near_its_ceiling_is_told_of(loop: OpenLoop | ClosedLoop, reached: float) -> None:
    requests = part(*[(at, at, at + 0.01, "") for at in (2.0, 3.0, 4.0, 5.0)])
    for share, is_near in ((0.79, False), (0.81, True)):
        result = account(requests, of=step(loop)).result(ceiling=ceiling(reached / share), checked=None)
        assert result is not None and result.ceiling_share == pytest.approx(share)
        assert any("ceiling" in reason for reason in result.late) == is_near


def test_a_step_that_was_cut_counts_what_it_had() -> None:
    made = account(part((2.5, 2.5, 2.6, ""), (3.5, 3.5, 3.6, "")))
    made.stopped_s = 3.0
    result = made.result(ceiling=None, checked=None)
    assert result is not None
    assert (result.duration_s, result.planned) == (1.0, 1)
    made.stopped_s = 1.5
    assert made.result(ceiling=None, checked=None) is None


def test_a_glance_is_of_the_last_second() -> None:
    made = account(part((0.1, 0.1, 0.2, "")), part((2.9, 2.9, 2.95, ""), (2.9, 2.9, 2.99, REFUSED)))
    glance = made.glance(3.0)
    assert (glance.answered, glance.failed) == (2, 1)
    assert glance.p50_ms == pytest.approx(50) and glance.answered_s == pytest.approx(1.0)


@pytest.mark.parametrize("duration_s", [0.5, 30.0, 3600.0])
def test_a_timeline_has_bins_that_can_be_looked_at(duration_s: float) -> None:
    of = Step(form="json", loop=OPEN, begin=0.0, ramp_s=0.0, warm_up_s=0.0, duration_s=duration_s)
    result = account(part((0.0, 0.0, 0.01, "")), of=of).result(ceiling=None, checked=None)
    assert result is not None and 5 <= len(result.timeline) <= 61
