"""The queue between the event loop and the engine's thread: order, bounds, wake-ups, answers."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attn_core import AttentionProblem
from service.deadline import Deadline
from service.errors import Draining, Overloaded
from service.request_queue import Answer, Pending, RequestQueue

WAIT_S = 30.0
PROBLEM = AttentionProblem(query=torch.ones(1, 1, 1, 1))


def make_pending(loop: asyncio.AbstractEventLoop) -> Pending:
    future: asyncio.Future[Answer] = loop.create_future()
    return Pending(PROBLEM, Deadline.after(WAIT_S), future, 0.0, 1)


@pytest.fixture
def pending() -> list[Pending]:
    loop = asyncio.new_event_loop()
    loop.close()
    return [make_pending(loop) for _ in range(5)]


def test_first_come_is_first_served(pending: list[Pending]) -> None:
    queue = RequestQueue(max_requests=5)
    for one in pending:
        queue.put(one)
    assert [queue.take() for _ in pending] == pending and len(queue) == 0


def test_one_more_than_the_bound_is_refused_until_one_is_taken(pending: list[Pending]) -> None:
    queue = RequestQueue(max_requests=2)
    queue.put(pending[0])
    queue.put(pending[1])
    with pytest.raises(Overloaded) as caught:
        queue.put(pending[2])
    assert caught.value.reason == "queue_full" and len(queue) == 2
    queue.take()
    queue.put(pending[2])
    assert [queue.take(), queue.take()] == [pending[1], pending[2]]


def test_a_discarded_place_is_free_and_never_handed_out(pending: list[Pending]) -> None:
    queue = RequestQueue(max_requests=2)
    queue.put(pending[0])
    queue.put(pending[1])
    queue.discard(pending[0])
    queue.discard(pending[0])
    queue.put(pending[2])
    queue.discard(pending[4])
    assert [queue.take(), queue.take()] == [pending[1], pending[2]]


def test_closing_hands_out_what_waits_and_then_none(pending: list[Pending]) -> None:
    queue = RequestQueue(max_requests=5)
    queue.put(pending[0])
    queue.close()
    with pytest.raises(Draining):
        queue.put(pending[1])
    assert queue.take() is pending[0]
    assert queue.take() is None and queue.take() is None


@pytest.mark.parametrize("num_takers", [1, 3])
def test_takers_that_wait_are_woken_by_closing(num_takers: int) -> None:
    queue = RequestQueue(max_requests=1)
    with ThreadPoolExecutor(num_takers) as pool:
        takers = [pool.submit(queue.take) for _ in range(num_takers)]
        queue.close()
        assert [taker.result(WAIT_S) for taker in takers] == [None] * num_takers


def test_no_wake_up_is_lost_between_many_threads() -> None:
    num_putters, each = 4, 250
    queue = RequestQueue(max_requests=num_putters * each)
    loop = asyncio.new_event_loop()
    loop.close()
    offered = [[make_pending(loop) for _ in range(each)] for _ in range(num_putters)]
    start = threading.Barrier(num_putters + 2)
    taken: list[list[Pending]] = [[], []]

    def put(mine: list[Pending]) -> None:
        start.wait(WAIT_S)
        for one in mine:
            queue.put(one)

    def take(mine: list[Pending]) -> None:
        start.wait(WAIT_S)
        while (one := queue.take()) is not None:
            mine.append(one)

    with ThreadPoolExecutor(num_putters + 2) as pool:
        takers = [pool.submit(take, mine) for mine in taken]
        for putter in [pool.submit(put, mine) for mine in offered]:
            putter.result(WAIT_S)
        queue.close()
        for taker in takers:
            taker.result(WAIT_S)
    assert len(taken[0]) + len(taken[1]) == num_putters * each
    assert {*taken[0], *taken[1]} == {one for mine in offered for one in mine}


@pytest.mark.parametrize("outcome", [RuntimeError("no"), Overloaded("x", reason="queue_full")])
def test_an_error_delivered_from_a_thread_is_raised_to_the_caller(outcome: Exception) -> None:
    async def run() -> None:
        one = make_pending(asyncio.get_running_loop())
        await asyncio.to_thread(one.deliver, outcome)
        await asyncio.wait_for(one.future, WAIT_S)

    with pytest.raises(type(outcome)) as caught:
        asyncio.run(run())
    assert caught.value is outcome


def test_an_answer_to_one_who_has_gone_is_dropped() -> None:
    async def run() -> None:
        failures: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        one = make_pending(loop)
        one.future.cancel()
        await asyncio.to_thread(one.deliver, RuntimeError("late"))
        two = make_pending(loop)
        two.deliver(RuntimeError("first"))
        two.deliver(RuntimeError("second"))
        with pytest.raises(RuntimeError, match="first"):
            await two.future
        assert one.future.cancelled() and failures == []

    asyncio.run(run())


def test_an_answer_after_the_loop_has_closed_is_dropped(pending: list[Pending]) -> None:
    pending[0].deliver(RuntimeError("nobody is there"))
    assert not pending[0].future.done()
