"""Time that only the test moves: a clock, and an event loop whose timers follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class FakeClock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class StillLoop(asyncio.SelectorEventLoop):
    """Its timers are due when the clock says so; it wakes for nothing else than work and other threads."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def time(self) -> float:
        return self._clock.now


def run_still(clock: FakeClock, coroutine: Coroutine[Any, Any, None]) -> None:
    """Run to the end in a ``StillLoop``; what waits for ever is ended by the test's own limit."""
    with asyncio.Runner(loop_factory=lambda: StillLoop(clock)) as runner:
        runner.run(coroutine)


async def next_turn(count: int = 1) -> None:
    """Let the loop look at its timers and sockets, and call what is due."""
    for _ in range(count):
        await asyncio.sleep(0)
