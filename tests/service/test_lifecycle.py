"""Where the process stands: which moves there are, who is let in, and how a drain ends."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from service.errors import Draining, Unavailable
from service.lifecycle import Lifecycle, State
from tests.support.clock import FakeClock, next_turn, run_still

WAIT_S = 30.0


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(coroutine, WAIT_S)

    asyncio.run(limited())


def ready() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.mark_ready()
    return lifecycle


def state_of(lifecycle: Lifecycle) -> State:
    """The state now; mypy would take it for what it was at the last assertion."""
    assert lifecycle.is_ready is (lifecycle.state is State.READY)
    return lifecycle.state


class Guest:
    """A request that stays inside until it may go; ``error`` is what came of it."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._has_come, self._may_go = asyncio.Event(), asyncio.Event()
        self.error: BaseException | None = None
        self.task = asyncio.create_task(self._stay())

    async def _stay(self) -> None:
        try:
            with self._lifecycle.work():
                self._has_come.set()
                await self._may_go.wait()
        except Draining as error:
            self.error = error

    async def come_in(self) -> Guest:
        await self._has_come.wait()
        return self

    async def leave(self) -> None:
        self._may_go.set()
        await self.task


def test_only_a_ready_service_takes_work() -> None:
    async def check() -> None:
        lifecycle = Lifecycle()
        with pytest.raises(Unavailable, match="starting"), lifecycle.work():
            raise AssertionError("came in")
        lifecycle.mark_ready()
        assert state_of(lifecycle) is State.READY
        with lifecycle.work():
            assert lifecycle.inside == 1
        lifecycle.mark_lost(RuntimeError("gone"))
        assert state_of(lifecycle) is State.LOST
        with pytest.raises(Unavailable, match="device lost"), lifecycle.work():
            raise AssertionError("came in")
        assert lifecycle.inside == 0

    run(check())


def test_a_lost_device_does_not_come_back() -> None:
    lifecycle = Lifecycle()
    lifecycle.mark_lost(RuntimeError("gone"))
    lifecycle.mark_ready()
    assert state_of(lifecycle) is State.LOST


@pytest.mark.parametrize("move", ["mark_ready", "mark_lost"])
def test_what_the_engine_says_during_a_drain_changes_nothing(move: str) -> None:
    async def check() -> None:
        lifecycle = Lifecycle()
        assert await lifecycle.drain(notice_s=0.0, timeout_s=1.0) == 0
        if move == "mark_ready":
            lifecycle.mark_ready()
        else:
            lifecycle.mark_lost(RuntimeError("gone"))
        assert state_of(lifecycle) is State.DRAINING
        with pytest.raises(Draining), lifecycle.work():
            raise AssertionError("came in")
        lifecycle.mark_stopped()
        lifecycle.mark_ready()
        assert state_of(lifecycle) is State.STOPPED
        with pytest.raises(Draining), lifecycle.work():
            raise AssertionError("came in")

    run(check())


def test_who_watches_is_told_of_each_move_and_of_nothing_else() -> None:
    async def check() -> None:
        lifecycle, seen = Lifecycle(), list[State]()
        lifecycle.watch(lambda: seen.append(lifecycle.state))
        lifecycle.mark_ready()
        lifecycle.mark_ready()
        lifecycle.mark_lost(RuntimeError("gone"))
        await lifecycle.drain(notice_s=0.0, timeout_s=1.0)
        lifecycle.mark_stopped()
        assert seen == [State.READY, State.LOST, State.DRAINING, State.STOPPED]

    run(check())


def test_ready_from_the_engines_thread_never_undoes_a_drain() -> None:
    async def race() -> None:
        lifecycle, start = Lifecycle(), threading.Barrier(2)

        def warm_up() -> None:
            start.wait(WAIT_S)
            lifecycle.mark_ready()

        engine = threading.Thread(target=warm_up)
        engine.start()
        start.wait(WAIT_S)
        await lifecycle.drain(notice_s=0.0, timeout_s=1.0)
        engine.join()
        assert state_of(lifecycle) is State.DRAINING

    async def check() -> None:
        for _ in range(50):
            await race()

    run(check())


def test_a_drain_waits_for_the_last_one_inside() -> None:
    async def check() -> None:
        lifecycle = ready()
        guests = [await Guest(lifecycle).come_in() for _ in range(3)]
        draining = asyncio.create_task(lifecycle.drain(notice_s=0.0, timeout_s=WAIT_S))
        for number, guest in enumerate(guests):
            assert lifecycle.inside == 3 - number and not draining.done()
            await guest.leave()
        assert await draining == 0
        assert [guest.error for guest in guests] == [None] * 3

    run(check())


def test_a_failure_inside_counts_as_leaving() -> None:
    async def check() -> None:
        lifecycle = ready()
        with pytest.raises(ValueError), lifecycle.work():
            raise ValueError
        assert await lifecycle.drain(notice_s=0.0, timeout_s=WAIT_S) == 0

    run(check())


@pytest.mark.parametrize("early_s", [0.001, 0.0])
def test_a_drain_whose_limit_is_over_gives_up_and_answers_those_inside(early_s: float) -> None:
    clock = FakeClock()

    async def check() -> None:
        lifecycle = ready()
        guests = [await Guest(lifecycle).come_in() for _ in range(2)]
        draining = asyncio.create_task(lifecycle.drain(notice_s=60.0, timeout_s=5.0))
        await next_turn(3)
        clock.now += 5.0 - early_s
        await next_turn(3)
        assert draining.done() is (early_s == 0)
        clock.now += early_s
        assert await draining == 2
        await asyncio.gather(*(guest.task for guest in guests))
        assert all(isinstance(guest.error, Draining) for guest in guests)
        assert lifecycle.inside == 0

    run_still(clock, check())


def test_those_who_left_are_not_given_up_and_the_others_are_once() -> None:
    clock, given_up = FakeClock(), []

    async def check() -> None:
        lifecycle = ready()
        for name in ("first", "second", "third"):
            lifecycle.enter(name, lambda name=name: given_up.append(name))  # type: ignore[misc]
        for _ in range(2):
            lifecycle.leave("second")
            assert lifecycle.inside == 2
        draining = asyncio.create_task(lifecycle.drain(notice_s=0.0, timeout_s=5.0))
        await next_turn()
        clock.now += 5.0
        assert await draining == 2
        assert given_up == ["first", "third"]
        lifecycle.leave("first")
        lifecycle.leave("third")
        assert lifecycle.inside == 0

    run_still(clock, check())


def test_one_who_leaves_as_it_is_given_up_keeps_nobody_from_being_told() -> None:
    clock, given_up = FakeClock(), []

    async def check() -> None:
        lifecycle = ready()

        def give_up(name: str) -> None:
            given_up.append(name)
            lifecycle.leave(name)

        for name in ("first", "second"):
            lifecycle.enter(name, functools.partial(give_up, name))
        draining = asyncio.create_task(lifecycle.drain(notice_s=0.0, timeout_s=5.0))
        await next_turn()
        clock.now += 5.0
        assert await draining == 2
        assert given_up == ["first", "second"] and lifecycle.inside == 0

    run_still(clock, check())


def test_a_request_without_a_task_of_its_own_is_waited_for_and_let_in_as_any_other() -> None:
    async def check() -> None:
        with pytest.raises(Unavailable, match="starting"):
            Lifecycle().enter("early", lambda: None)
        lifecycle = ready()
        lifecycle.enter("inside", lambda: None)
        draining = asyncio.create_task(lifecycle.drain(notice_s=0.0, timeout_s=WAIT_S))
        await next_turn(3)
        assert not draining.done()
        with pytest.raises(Draining):
            lifecycle.enter("late", lambda: None)
        lifecycle.leave("inside")
        assert await draining == 0

    run(check())


def test_one_cancelled_for_another_reason_is_not_told_that_it_was_the_drain() -> None:
    async def check() -> None:
        lifecycle = ready()
        guest = await Guest(lifecycle).come_in()
        guest.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await guest.task
        assert guest.error is None and lifecycle.inside == 0

    run(check())


def test_the_notice_is_kept_when_nobody_is_inside() -> None:
    clock = FakeClock()

    async def check() -> None:
        draining = asyncio.create_task(ready().drain(notice_s=2.0, timeout_s=60.0))
        await next_turn(3)
        clock.now += 1.999
        await next_turn(3)
        assert not draining.done()
        clock.now += 0.001
        assert await draining == 0

    run_still(clock, check())


def test_asking_to_stop_before_or_after_waiting_is_heard() -> None:
    async def check() -> None:
        early, late = Lifecycle(), Lifecycle()
        early.ask_to_stop()
        early.ask_to_stop()
        await early.wait_until_asked_to_stop()
        waiting = asyncio.create_task(late.wait_until_asked_to_stop())
        asyncio.get_running_loop().call_soon(late.ask_to_stop)
        await waiting

    run(check())
