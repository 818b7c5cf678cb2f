"""Permits: who is inside is counted, in whatever order they come, go and fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core.errors import TooLarge
from service.admission import UNASKED_BYTES, Admission
from service.errors import Overloaded


def make_admission(
    *, max_requests: int = 3, max_bytes: int = 100, allowed_bytes: Callable[[], int] = lambda: 2**40
) -> Admission:
    return Admission(max_requests=max_requests, max_body_bytes_inside=max_bytes, allowed_bytes=allowed_bytes)


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


def test_the_system_is_asked_for_large_problems_alone_and_each_time() -> None:
    figures = iter([2**30, 0])
    admission = make_admission(allowed_bytes=lambda: next(figures))
    admission.check_memory(UNASKED_BYTES)
    admission.check_memory(UNASKED_BYTES + 1)
    with pytest.raises(TooLarge):
        admission.check_memory(UNASKED_BYTES + 1)
