"""The way back to the event loop: nothing is lost on it, nothing comes twice, and many share one hop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from service.deliveries import Deliveries
from service.request_queue import Outcome, Pending
from tests.support.clock import next_turn
from tests.support.pending import make_answer, make_pending

WAIT_S = 30.0


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the hops that other threads ask for."""

    num_hops = 0

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:  # type: ignore[override]
        self.num_hops += 1
        return super().call_soon_threadsafe(*args, **kwargs)


class Inbox:
    """What was delivered, in its order; ``pending`` makes one whose outcome comes here under its name."""

    def __init__(self) -> None:
        self.names: list[Any] = []
        self.outcomes: list[Outcome] = []
        self.threads: set[int] = set()

    def pending(self, name: object, then: Callable[[], None] | None = None) -> Pending:
        def deliver(outcome: Outcome) -> None:
            self.names.append(name)
            self.outcomes.append(outcome)
            self.threads.add(threading.get_ident())
            if then is not None:
                then()

        return make_pending(deliver=deliver)


def run(check: Callable[[CountingLoop, Deliveries, Inbox], Any]) -> None:
    async def whole() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        await check(loop, Deliveries(loop), Inbox())

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(whole())


def test_many_outcomes_take_one_hop_and_keep_their_order() -> None:
    async def check(loop: CountingLoop, deliveries: Deliveries, inbox: Inbox) -> None:
        for times in (1, 2):
            for name in range(100):
                deliveries.post(inbox.pending(name), make_answer())
            assert loop.num_hops == times
            await next_turn()
            assert inbox.names == [*range(100)] * times

    run(check)


@pytest.mark.parametrize("outcome", [make_answer(), RuntimeError("no")], ids=["answer", "error"])
def test_an_outcome_is_handed_on_as_it_is_and_counts_as_computed(outcome: Outcome) -> None:
    async def check(loop: CountingLoop, deliveries: Deliveries, inbox: Inbox) -> None:
        one = inbox.pending("one")
        deliveries.post(one, outcome)
        assert inbox.outcomes == [] and not one.is_computed
        await next_turn()
        assert inbox.outcomes == [outcome] and one.is_computed

    run(check)


def test_one_that_nobody_waits_for_is_dropped_and_counts_as_computed() -> None:
    async def check(loop: CountingLoop, deliveries: Deliveries, inbox: Inbox) -> None:
        gone, leaving = inbox.pending("gone"), inbox.pending("leaving")
        gone.is_abandoned = True
        for one in (gone, leaving, inbox.pending("patient")):
            deliveries.post(one, make_answer())
        leaving.is_abandoned = True
        await next_turn()
        assert inbox.names == ["patient"]
        assert gone.is_computed and leaving.is_computed

    run(check)


def test_a_second_outcome_of_one_problem_is_dropped() -> None:
    async def check(loop: CountingLoop, deliveries: Deliveries, inbox: Inbox) -> None:
        one = inbox.pending("one")
        first = make_answer()
        deliveries.post(one, first)
        deliveries.post(one, RuntimeError("the device is lost"))
        await next_turn()
        deliveries.post(one, RuntimeError("again"))
        await next_turn()
        assert inbox.outcomes == [first]

    run(check)


def test_what_is_posted_while_others_are_delivered_is_not_lost() -> None:
    async def check(loop: CountingLoop, deliveries: Deliveries, inbox: Inbox) -> None:
        def post_more() -> None:
            deliveries.post(inbox.pending("third"), make_answer())

        deliveries.post(inbox.pending("first", post_more), make_answer())
        deliveries.post(inbox.pending("second"), make_answer())
        await next_turn(2)
        assert inbox.names == ["first", "second", "third"]

    run(check)


def test_a_delivery_that_fails_is_reported_and_cannot_hold_up_its_neighbours() -> None:
    async def check(loop: CountingLoop, deliveries: Deliveries, inbox: Inbox) -> None:
        mistakes: list[object] = []
        loop.set_exception_handler(lambda _, context: mistakes.append(context["exception"]))
        mistake = ValueError("the door's")

        def fail() -> None:
            raise mistake

        for name, then in (("first", None), ("failing", fail), ("next", None), ("failing too", fail), ("last", None)):
            deliveries.post(inbox.pending(name, then), make_answer())
        await next_turn(4)
        assert inbox.names == ["first", "failing", "next", "failing too", "last"]
        assert mistakes == [mistake, mistake]

    run(check)


def test_nothing_is_lost_when_threads_post_while_the_loop_delivers() -> None:
    num_threads, each = 4, 500

    async def check(loop: CountingLoop, deliveries: Deliveries, inbox: Inbox) -> None:
        start = threading.Barrier(num_threads)
        all_came = asyncio.Event()

        def came() -> None:
            if len(inbox.names) == num_threads * each:
                all_came.set()

        def post(thread: int) -> None:
            start.wait(WAIT_S)
            for number in range(each):
                deliveries.post(inbox.pending((thread, number), came), make_answer())

        async with asyncio.TaskGroup() as group:
            for thread in range(num_threads):
                group.create_task(asyncio.to_thread(post, thread))
        await asyncio.wait_for(all_came.wait(), WAIT_S)
        for thread in range(num_threads):
            assert [number for own, number in inbox.names if own == thread] == [*range(each)]
        assert inbox.threads == {threading.get_ident()}

    run(check)


def test_an_outcome_after_the_loop_has_closed_is_dropped() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    deliveries, inbox = Deliveries(loop), Inbox()
    for _ in range(2):
        deliveries.post(inbox.pending("nobody is there"), RuntimeError("late"))
    assert inbox.names == []
