"""The queue between the event loop and the engine's threads: order, lanes, bounds, wake-ups, the estimated wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core.batching.plan import Budget
from service.errors import Draining, Overloaded
from service.request_queue import Pending, RequestQueue
from tests.support.pending import make_pending

WAIT_S = 10.0
ONE_BY_ONE = Budget(max_requests=1)
T = TypeVar("T")


def in_thread(call: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    """The call's result to be; a thread that waits for ever must not keep the tests from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def filled(queue: RequestQueue, count: int, **figures: Any) -> list[Pending]:
    pending = [make_pending(**figures) for _ in range(count)]
    for one in pending:
        queue.put(one)
    return pending


@pytest.mark.parametrize("is_large", [False, True])
def test_first_come_is_first_served(is_large: bool) -> None:
    queue = RequestQueue(max_requests=5, budget=ONE_BY_ONE)
    pending = filled(queue, 5, is_large=is_large)
    assert [queue.take() for _ in pending] == [[one] for one in pending]
    assert queue.is_empty and len(queue) == 0


def test_what_waits_is_taken_together_up_to_the_budget() -> None:
    queue = RequestQueue(max_requests=9, budget=Budget(max_requests=4))
    pending = filled(queue, 6)
    assert queue.take() == pending[:4]
    assert queue.take() == pending[4:]


def test_several_workers_share_what_waits() -> None:
    queue = RequestQueue(max_requests=9, num_small_workers=3, has_large_worker=True)
    pending = filled(queue, 7)
    assert [queue.take(large=False) for _ in range(3)] == [pending[:3], pending[3:5], pending[5:6]]


def test_a_large_one_is_taken_alone_and_in_turn() -> None:
    queue = RequestQueue(max_requests=9)
    large, small = filled(queue, 2, is_large=True), filled(queue, 3)
    assert queue.take(after_small=True) == large[:1]
    assert queue.take(after_small=False) == small
    assert queue.take(after_small=False) == large[1:]


def test_a_worker_of_one_lane_never_takes_of_the_other() -> None:
    queue = RequestQueue(max_requests=9, has_large_worker=True)
    large, small = filled(queue, 1, is_large=True), filled(queue, 1)
    queue.close()
    assert queue.take(large=False, after_small=True) == small
    assert queue.take(large=False, after_small=True) is None
    assert queue.take(small=False) == large
    assert queue.take(small=False) is None


@pytest.mark.parametrize("is_large", [False, True])
def test_one_that_comes_wakes_the_worker_of_its_lane(is_large: bool) -> None:
    """Whoever waits for the other lane is not woken in its stead, however often."""
    queue = RequestQueue(max_requests=9, has_large_worker=True)
    others = in_thread(queue.take, small=is_large, large=not is_large)
    for _ in range(100):
        taker = in_thread(queue.take, small=not is_large, large=is_large)
        (one,) = filled(queue, 1, is_large=is_large)
        assert taker.result(WAIT_S) == [one]
    assert not others.done()
    queue.close()
    assert others.result(WAIT_S) is None


@pytest.mark.parametrize("lanes", [(False, False), (False, True), (True, True)])
def test_one_more_than_the_bound_of_both_lanes_is_refused_until_one_is_taken(lanes: tuple[bool, bool]) -> None:
    queue = RequestQueue(max_requests=2, budget=ONE_BY_ONE)
    first, second = (filled(queue, 1, is_large=is_large)[0] for is_large in lanes)
    third = make_pending()
    with pytest.raises(Overloaded) as caught:
        queue.put(third)
    assert caught.value.reason == "queue_full" and len(queue) == 2
    with pytest.raises(Overloaded):
        queue.check_room()
    assert queue.take() == [first]
    queue.check_room()
    queue.put(third)
    assert [queue.take(after_small=True), queue.take()] == [[second], [third]]


@pytest.mark.parametrize("is_large", [False, True])
def test_a_discarded_place_is_free_and_never_handed_out(is_large: bool) -> None:
    queue = RequestQueue(max_requests=2, budget=ONE_BY_ONE)
    first, second = filled(queue, 2, is_large=is_large)
    assert queue.discard(first) and not queue.discard(first)
    (third,) = filled(queue, 1, is_large=is_large)
    assert not queue.discard(make_pending(is_large=is_large))
    assert [queue.take(), queue.take()] == [[second], [third]]
    assert not queue.discard(second), "it is with the engine"


def test_closing_hands_out_what_waits_and_then_none() -> None:
    queue = RequestQueue(max_requests=5, budget=ONE_BY_ONE)
    pending = filled(queue, 2)
    queue.close()
    with pytest.raises(Draining):
        queue.put(make_pending())
    assert [queue.take(), queue.take()] == [[one] for one in pending]
    assert queue.take() is None and queue.take() is None


@pytest.mark.parametrize("num_takers", [1, 3])
@pytest.mark.parametrize("has_large_worker", [False, True])
def test_takers_that_wait_are_woken_by_closing(has_large_worker: bool, num_takers: int) -> None:
    queue = RequestQueue(max_requests=1, num_small_workers=num_takers, has_large_worker=has_large_worker)
    takers = [in_thread(queue.take, large=not has_large_worker) for _ in range(num_takers)]
    takers += [in_thread(queue.take, small=False) for _ in range(has_large_worker)]
    queue.close()
    assert [taker.result(WAIT_S) for taker in takers] == [None] * len(takers)


def test_the_wait_is_what_waits_and_runs_in_a_lane_over_its_workers() -> None:
    queue = RequestQueue(max_requests=9, num_small_workers=2, has_large_worker=True)
    assert queue.wait_s(is_large=False) == queue.wait_s(is_large=True) == 0
    filled(queue, 4, estimated_s=0.5)
    filled(queue, 3, estimated_s=4.0, is_large=True)
    assert (queue.wait_s(is_large=False), queue.wait_s(is_large=True)) == (1.0, 12.0)
    batch, large = queue.take(large=False), queue.take(small=False)
    assert batch is not None and len(batch) == 2 and large is not None
    assert (queue.wait_s(is_large=False), queue.wait_s(is_large=True)) == (1.0, 12.0), "it runs, and is waited for"
    queue.done(batch)
    queue.done(large)
    assert (queue.wait_s(is_large=False), queue.wait_s(is_large=True)) == (0.5, 8.0)


def test_the_wait_for_one_discarded_is_over() -> None:
    queue = RequestQueue(max_requests=9)
    first, _ = filled(queue, 2, estimated_s=0.5)
    queue.discard(first)
    assert queue.wait_s(is_large=False) == 0.5


def test_the_wait_is_never_negative_however_sums_are_rounded() -> None:
    queue = RequestQueue(max_requests=9)
    first, second, _ = (filled(queue, 1, estimated_s=estimated_s)[0] for estimated_s in (0.1, 0.7, 0.0))
    for one in (second, first):
        queue.discard(one)
    assert queue.wait_s(is_large=False) >= 0


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "take", "take", "discard", "done"]),
        st.booleans(),
        st.integers(0, 9),
        st.sampled_from([0.0, 0.1, 0.7, 1e-9, 1e6]),
    ),
    max_size=60,
)


@given(steps, st.booleans(), st.integers(1, 3))
def test_what_is_counted_is_what_waits_and_runs(
    steps: list[tuple[str, bool, int, float]], has_large_worker: bool, num_workers: int
) -> None:
    queue = RequestQueue(max_requests=6, num_small_workers=num_workers, has_large_worker=has_large_worker)
    waiting: dict[bool, list[Pending]] = {False: [], True: []}
    running: list[list[Pending]] = []

    def expect(is_large: bool) -> float:
        inside = waiting[is_large] + [one for batch in running for one in batch if one.ride.is_large is is_large]
        return sum(one.estimated_s for one in inside) / (1 if is_large else num_workers)

    for step, flag, which, estimated_s in steps:
        num_waiting = len(waiting[False]) + len(waiting[True])
        if step == "put" and num_waiting < 6:
            (one,) = filled(queue, 1, is_large=flag, estimated_s=estimated_s)
            waiting[flag].append(one)
        elif step == "put":
            with pytest.raises(Overloaded):
                filled(queue, 1, is_large=flag)
        elif step == "take" and (waiting[flag] if has_large_worker else num_waiting):
            lanes = {"small": not flag, "large": flag} if has_large_worker else {}
            batch = queue.take(after_small=flag, **lanes)
            assert batch
            lane = waiting[batch[0].ride.is_large]
            assert batch == lane[: len(batch)]
            del lane[: len(batch)]
            running.append(batch)
        elif step == "discard" and which < len(waiting[flag]):
            assert queue.discard(waiting[flag].pop(which))
        elif step == "done" and which < len(running):
            queue.done(running.pop(which))
        queue.check_integrity()
        assert len(queue) == len(waiting[False]) + len(waiting[True]) and queue.is_empty is (len(queue) == 0)
        for is_large in (False, True):
            assert queue.wait_s(is_large=is_large) >= 0
            assert queue.wait_s(is_large=is_large) == pytest.approx(expect(is_large), abs=1e-6)
    for batch in running:
        queue.done(batch)
    for one in waiting[False] + waiting[True]:
        assert queue.discard(one)
    assert queue.wait_s(is_large=False) == queue.wait_s(is_large=True) == 0


@pytest.mark.parametrize("num_takers", [1, 3])
def test_none_is_lost_or_handed_out_twice_between_many_threads(num_takers: int) -> None:
    num_putters, each = 3, 200
    has_large_worker = num_takers > 1
    queue = RequestQueue(
        max_requests=num_putters * each,
        budget=Budget(max_requests=7),
        num_small_workers=max(1, num_takers - 1),
        has_large_worker=has_large_worker,
    )
    offered = [
        [make_pending(is_large=number % 5 == 0, estimated_s=0.1) for number in range(each)] for _ in range(num_putters)
    ]
    start = threading.Barrier(num_putters + num_takers)
    taken: list[list[Pending]] = [[] for _ in range(num_takers)]
    given_up: list[Pending] = []

    def put(mine: list[Pending]) -> None:
        start.wait(WAIT_S)
        for number, one in enumerate(mine):
            queue.put(one)
            if number % 3 == 0 and queue.discard(one):
                given_up.append(one)

    def take(index: int) -> None:
        lanes = {"small": index > 0, "large": index == 0} if has_large_worker else {}
        start.wait(WAIT_S)
        while (batch := queue.take(after_small=len(taken[index]) % 2 == 0, **lanes)) is not None:
            taken[index].extend(batch)
            queue.done(batch)

    takers = [in_thread(take, index) for index in range(num_takers)]
    for putter in [in_thread(put, mine) for mine in offered]:
        putter.result(WAIT_S)
    queue.close()
    for taker in takers:
        taker.result(WAIT_S)
    out = [one for mine in taken for one in mine] + given_up
    assert len(out) == num_putters * each
    assert set(out) == {one for mine in offered for one in mine}
    queue.check_integrity()
    assert queue.wait_s(is_large=False) == queue.wait_s(is_large=True) == 0
