"""Whether and when a call is tried again."""

from __future__ import annotations

import pytest

from service.client.retries import BASE_WAIT_S, MAX_WAIT_S, Broken, Retries, read_retry_after

RETRIES = Retries(max_retries=3)


@pytest.mark.parametrize("outcome", [429, 503, Broken.BEFORE_SENDING, Broken.SOMEWHERE])
def test_a_full_or_starting_service_and_a_broken_connection_are_tried_again(outcome: int | Broken) -> None:
    assert RETRIES.wait_s(outcome, tries=1, left_s=60, draw=0.5) == pytest.approx(0.5 * BASE_WAIT_S)


@pytest.mark.parametrize(
    "outcome", [200, 307, 400, 401, 403, 404, 405, 406, 408, 409, 413, 415, 422, 500, 501, 502, 504, Broken.FOR_GOOD]
)
def test_nothing_else_is_tried_again(outcome: int | Broken) -> None:
    assert RETRIES.wait_s(outcome, tries=1, left_s=None, draw=0.0, retry_after_s=1) is None


@pytest.mark.parametrize("outcome", [429, Broken.SOMEWHERE])
def test_there_are_as_many_retries_as_were_asked_for(outcome: int | Broken) -> None:
    assert RETRIES.wait_s(outcome, tries=3, left_s=60, draw=0.5) is not None
    assert RETRIES.wait_s(outcome, tries=4, left_s=60, draw=0.5) is None
    assert Retries(max_retries=0).wait_s(outcome, tries=1, left_s=60, draw=0.5) is None


def test_the_bound_of_the_wait_doubles_up_to_a_limit() -> None:
    patient = Retries(max_retries=10**6)
    bounds = [patient.wait_s(503, tries=tries, left_s=None, draw=1.0) for tries in (1, 2, 3, 4, 50, 10**6)]
    assert bounds == pytest.approx(
        [BASE_WAIT_S, 2 * BASE_WAIT_S, 4 * BASE_WAIT_S, 8 * BASE_WAIT_S, MAX_WAIT_S, MAX_WAIT_S]
    )


def test_the_wait_is_drawn_from_nothing_to_the_bound() -> None:
    waits = [RETRIES.wait_s(503, tries=2, left_s=60, draw=draw) for draw in (0.0, 0.25, 1.0)]
    assert waits == pytest.approx([0.0, 0.25 * 2 * BASE_WAIT_S, 2 * BASE_WAIT_S])


@pytest.mark.parametrize("draw", [0.0, 0.5, 1.0])
def test_it_is_never_tried_again_before_the_service_asked_for_it(draw: float) -> None:
    wait_s = RETRIES.wait_s(429, tries=1, left_s=60, draw=draw, retry_after_s=7)
    assert wait_s == pytest.approx(7 + draw * BASE_WAIT_S)


@pytest.mark.parametrize("retry_after_s", [0, 1.5, None])
def test_no_wait_ends_behind_the_deadline(retry_after_s: float | None) -> None:
    wait_s = RETRIES.wait_s(503, tries=3, left_s=1.6, draw=1.0, retry_after_s=retry_after_s)
    assert wait_s is not None and wait_s <= 1.6
    assert RETRIES.wait_s(503, tries=1, left_s=1.0, draw=0.0, retry_after_s=1) is None
    assert RETRIES.wait_s(Broken.SOMEWHERE, tries=1, left_s=0.0, draw=0.0) is None


def test_what_may_not_be_done_twice_is_tried_again_only_where_it_was_not_done() -> None:
    for outcome in (429, 503, Broken.BEFORE_SENDING):
        assert RETRIES.wait_s(outcome, tries=1, left_s=60, draw=0.5, may_repeat=False) is not None
    assert RETRIES.wait_s(Broken.SOMEWHERE, tries=1, left_s=60, draw=0.5, may_repeat=False) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 2.0),
        ("0", 0.0),
        (None, None),
        ("soon", None),
        ("-1", None),
        ("inf", None),
        ("nan", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None),
    ],
)
def test_retry_after_is_read_in_seconds(text: str | None, seconds: float | None) -> None:
    assert read_retry_after(text) == seconds
