"""Permits: who is inside is counted, in whatever order they come, go and fail; and what would wait too long."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core.errors import TooLarge
from service.admission import MEMORY_IS_FRESH_S, SHORT_WAIT_S, SURE_SHARE, UNASKED_BYTES, Admission
from service.deadline import Deadline
from service.errors import REFUSAL_REASONS, DeadlinePassed, Overloaded
from tests.support.clock import FakeClock

UNIT = UNASKED_BYTES


def make_admission(
    *,
    max_requests: int = 3,
    max_bytes: int = 100,
    allowed_bytes: Callable[[], int] = lambda: 2**40,
    max_wait_s: float = math.inf,
    unasked_bytes: int = UNASKED_BYTES,
    clock: FakeClock | None = None,
) -> Admission:
    return Admission(
        max_requests=max_requests,
        max_body_bytes_inside=max_bytes,
        allowed_bytes=allowed_bytes,
        max_wait_s=max_wait_s,
        unasked_bytes=unasked_bytes,
        clock=clock or FakeClock(),
    )


def test_the_place_after_the_last_is_refused_and_free_again_when_one_leaves() -> None:
    admission = make_admission(max_requests=2)
    with admission.request():
        with admission.request(), pytest.raises(Overloaded) as caught, admission.request():
            raise AssertionError("a third one came in")
        assert caught.value.reason == "requests"
        with admission.request():
            assert admission.requests_inside == 2
    assert admission.requests_inside == 0
    admission.check_integrity()


def test_bytes_over_the_limit_are_refused_and_nothing_of_them_is_counted() -> None:
    admission = make_admission(max_bytes=100)
    with admission.request() as first, admission.request() as second:
        first.hold(60)
        second.hold(40)
        with pytest.raises(Overloaded) as caught:
            second.hold(1)
        assert caught.value.reason == "bytes"
        assert (second.held_bytes, admission.body_bytes_inside) == (40, 100)
    assert admission.body_bytes_inside == 0


def test_one_alone_is_never_refused_for_its_bytes() -> None:
    admission = make_admission(max_bytes=100)
    with admission.request() as alone:
        alone.hold(1000)
        alone.hold(1000)
        with admission.request() as second, pytest.raises(Overloaded):
            second.hold(1)
    with admission.request() as second:
        second.hold(100)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_error_inside_gives_everything_back(error: type[BaseException]) -> None:
    admission = make_admission()

    def fail() -> None:
        with admission.request() as permit:
            permit.hold(50)
            raise error

    with pytest.raises(error):
        fail()
    assert (admission.requests_inside, admission.body_bytes_inside) == (0, 0)


def test_bytes_given_back_early_are_given_back_once() -> None:
    admission = make_admission()
    with admission.request() as permit:
        permit.hold(70)
        permit.release()
        assert admission.body_bytes_inside == 0
        permit.hold(30)
        assert admission.body_bytes_inside == 30
    admission.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["enter", "hold", "leave"]), st.integers(0, 3), st.integers(0, 80))))
def test_what_is_counted_is_what_is_held(steps: list[tuple[str, int, int]]) -> None:
    admission = make_admission(max_requests=3, max_bytes=100)
    inside = []
    for step, which, num_bytes in steps:
        try:
            if step == "enter":
                stack = ExitStack()
                inside.append((stack, stack.enter_context(admission.request())))
            elif step == "hold" and which < len(inside):
                inside[which][1].hold(num_bytes)
            elif step == "leave" and which < len(inside):
                inside.pop(which)[0].close()
        except Overloaded:
            assert step == "hold" or len(inside) == 3
        admission.check_integrity()
        assert admission.requests_inside == len(inside) <= 3
        assert admission.body_bytes_inside == sum(permit.held_bytes for _, permit in inside)
        holding = [permit for _, permit in inside if permit.held_bytes]
        assert admission.body_bytes_inside <= 100 or len(holding) == 1 or max(p.held_bytes for p in holding) > 100
    for stack, _ in inside:
        stack.close()
    assert (admission.requests_inside, admission.body_bytes_inside) == (0, 0)


def test_drift_is_noticed() -> None:
    admission = make_admission()
    admission.body_bytes_inside = 1
    with pytest.raises(AssertionError):
        admission.check_integrity()


def test_memory_is_refused_above_what_is_allowed_with_both_figures() -> None:
    admission = make_admission(allowed_bytes=lambda: 2 * UNASKED_BYTES)
    admission.check_memory(2 * UNASKED_BYTES)
    with pytest.raises(TooLarge) as caught:
        admission.check_memory(2 * UNASKED_BYTES + 1)
    assert (caught.value.needed_bytes, caught.value.allowed_bytes) == (2 * UNASKED_BYTES + 1, 2 * UNASKED_BYTES)


def test_the_system_is_asked_for_large_problems_alone_and_believed_for_a_moment() -> None:
    clock, figures = FakeClock(), iter([2**30, 0])
    admission = make_admission(allowed_bytes=lambda: next(figures), clock=clock)
    admission.check_memory(UNASKED_BYTES)
    admission.check_memory(UNASKED_BYTES + 1)
    clock.now += MEMORY_IS_FRESH_S / 2
    admission.check_memory(UNASKED_BYTES + 1)
    clock.now += MEMORY_IS_FRESH_S
    with pytest.raises(TooLarge):
        admission.check_memory(UNASKED_BYTES + 1)


def test_problems_that_fit_alone_and_not_together_come_one_after_the_other() -> None:
    admission = make_admission(allowed_bytes=lambda: 10 * UNIT)
    with admission.request():
        admission.hold_memory(6 * UNIT)
        with pytest.raises(Overloaded) as caught:
            admission.hold_memory(5 * UNIT)
        assert caught.value.reason == "memory_in_use" and admission.memory_inside == 6 * UNIT
        admission.hold_memory(4 * UNIT)
        admission.release_memory(6 * UNIT)
        admission.hold_memory(5 * UNIT)
        for held in (4, 5):
            admission.release_memory(held * UNIT)
    assert admission.memory_inside == 0
    admission.check_integrity()


def test_one_that_never_fits_is_too_large_and_no_matter_of_load() -> None:
    admission = make_admission(allowed_bytes=lambda: 10 * UNIT)
    admission.hold_memory(6 * UNIT)
    with pytest.raises(TooLarge):
        admission.hold_memory(11 * UNIT)
    assert admission.memory_inside == 6 * UNIT


def test_many_small_ones_together_are_counted_too() -> None:
    admission = make_admission(allowed_bytes=lambda: 2 * UNIT)
    for _ in range(4):
        admission.hold_memory(UNIT // 2)
    with pytest.raises(Overloaded):
        admission.hold_memory(1)


@pytest.mark.parametrize("wait_s", [0.0, 1.9, 2.0])
def test_a_wait_up_to_the_limit_is_let_in(wait_s: float) -> None:
    make_admission(max_wait_s=2.0).check_wait(wait_s)
    make_admission().check_wait(1e9 * wait_s)


@pytest.mark.parametrize(("wait_s", "retry_after_s"), [(2.001, 2), (4.5, 4), (61.0, 60)])
def test_a_longer_wait_is_refused_and_told_when_half_the_limit_will_be_left(wait_s: float, retry_after_s: int) -> None:
    with pytest.raises(Overloaded) as caught:
        make_admission(max_wait_s=2.0).check_wait(wait_s)
    assert (caught.value.reason, caught.value.retry_after_s) == ("wait", retry_after_s)
    assert caught.value.reason in REFUSAL_REASONS


def test_nobody_is_told_to_come_back_at_once() -> None:
    with pytest.raises(Overloaded) as caught:
        make_admission(max_wait_s=0.01).check_wait(0.02)
    assert caught.value.retry_after_s == 1


@pytest.mark.parametrize(
    ("wait_s", "compute_s", "remaining_s", "is_met"),
    [
        (0.0, 0.0, 1.0, True),
        (0.5, 0.5, 1.0, True),
        (0.5, 0.6, 1.0, True),
        (1.0, 1.0, 1.0, True),
        (1.0, 1.1, 1.0, False),
        (2.1, 0.0, 1.0, False),
        (0.0, 2.1, 1.0, False),
        (0.0, 0.0, 0.0, False),
        (0.0, 0.0, -1.0, False),
        (SHORT_WAIT_S / 2, SHORT_WAIT_S / 2, SHORT_WAIT_S / 100, True),
        (SHORT_WAIT_S / SURE_SHARE, 0.01, SHORT_WAIT_S / 100, False),
    ],
)
def test_a_deadline_that_cannot_be_met_is_refused_at_once(
    wait_s: float, compute_s: float, remaining_s: float, is_met: bool
) -> None:
    clock = FakeClock(0.0)
    admission, deadline = make_admission(clock=clock), Deadline(remaining_s, clock)
    if is_met:
        admission.check_deadline(wait_s, compute_s, deadline)
        return
    with pytest.raises(DeadlinePassed) as caught:
        admission.check_deadline(wait_s, compute_s, deadline)
    assert caught.value.at_once


def test_a_permit_is_given_back_once_however_often_it_leaves() -> None:
    admission = make_admission(max_requests=2)
    first, second = admission.enter(), admission.enter()
    first.hold(60)
    for _ in range(2):
        first.leave()
        assert (admission.requests_inside, admission.body_bytes_inside) == (1, 0)
    second.leave()
    assert admission.requests_inside == 0
    admission.check_integrity()


def test_what_is_inside_already_counts_beyond_the_limit_and_keeps_others_out() -> None:
    admission = make_admission(max_requests=1)
    permit = admission.enter()
    more = admission.enter_anyway()
    more.count(1000)
    assert (admission.requests_inside, admission.body_bytes_inside) == (2, 1000)
    permit.leave()
    with pytest.raises(Overloaded):
        admission.enter()
    more.leave()
    admission.enter().leave()
    assert (admission.requests_inside, admission.body_bytes_inside) == (0, 0)


def test_bytes_that_are_counted_unasked_are_refused_to_others() -> None:
    admission = make_admission(max_bytes=100)
    with admission.request() as first, admission.request() as second:
        first.count(150)
        with pytest.raises(Overloaded):
            second.hold(1)
        first.release()
        second.hold(100)
    admission.check_integrity()


def test_a_budget_that_was_set_is_asked_for_the_smallest_problem_too() -> None:
    admission = make_admission(allowed_bytes=lambda: 1000, unasked_bytes=0)
    admission.check_memory(1000)
    with pytest.raises(TooLarge):
        admission.check_memory(1001)


def test_a_system_that_does_not_say_what_is_free_is_believed_what_it_said_last() -> None:
    answers: list[int | OSError] = [OSError("no descriptors left"), 3 * UNIT, OSError("no descriptors left")]

    def allowed_bytes() -> int:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    clock = FakeClock()
    admission = make_admission(allowed_bytes=allowed_bytes, clock=clock)
    with pytest.raises(Overloaded):
        admission.check_memory(2 * UNIT)
    admission.check_memory(2 * UNIT)
    clock.now += 2 * MEMORY_IS_FRESH_S
    admission.check_memory(2 * UNIT)
    with pytest.raises(TooLarge):
        admission.check_memory(4 * UNIT)
