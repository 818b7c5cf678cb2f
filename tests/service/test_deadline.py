"""Deadlines, on a clock that only the test moves."""

from __future__ import annotations

import asyncio

import pytest

from service.deadline import Deadline
from service.errors import DeadlinePassed


class FakeClock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_what_remains_falls_with_the_clock() -> None:
    clock = FakeClock()
    deadline = Deadline.after(2.0, clock)
    assert (deadline.at, deadline.remaining_s, deadline.has_passed) == (102.0, 2.0, False)
    clock.now = 101.5
    assert (deadline.remaining_s, deadline.has_passed) == (0.5, False)


@pytest.mark.parametrize(("now", "has_passed"), [(101.999, False), (102.0, True), (102.001, True), (1e9, True)])
def test_it_has_passed_from_its_point_on(now: float, has_passed: bool) -> None:
    clock = FakeClock()
    deadline = Deadline.after(2.0, clock)
    clock.now = now
    assert deadline.has_passed is has_passed


def test_the_answer_in_time_is_handed_on() -> None:
    async def run() -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, "answer")
        return await Deadline.after(60.0).wait_for(future)

    assert asyncio.run(run()) == "answer"


@pytest.mark.parametrize("late_s", [0.0, 5.0])
def test_a_deadline_that_has_passed_is_told_at_once_and_cancels_the_future(late_s: float) -> None:
    clock = FakeClock()
    deadline = Deadline.after(1.0, clock)
    clock.now += 1.0 + late_s

    async def run() -> bool:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with pytest.raises(DeadlinePassed):
            await deadline.wait_for(future)
        return future.cancelled()

    assert asyncio.run(run())


@pytest.mark.parametrize("error", [RuntimeError("no"), TimeoutError("of something else"), DeadlinePassed("queued")])
def test_the_futures_own_error_is_handed_on_as_it_is(error: Exception) -> None:
    async def run() -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        future.set_exception(error)
        await Deadline.after(60.0).wait_for(future)

    with pytest.raises(type(error)) as caught:
        asyncio.run(run())
    assert caught.value is error


def test_a_cancelled_caller_is_cancelled_and_not_late() -> None:
    async def run() -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(Deadline.after(60.0).wait_for(future))
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert future.cancelled()

    asyncio.run(run())
