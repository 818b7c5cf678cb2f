"""The way back from the engine's threads to the event loop: one hop for all that was computed meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from service.deadline import Clock
from service.request_queue import Outcome, Pending

TURN_S = 5e-3
"""So long answers are written before the sockets are looked at again."""


class Deliveries:
    """``post`` from any thread; ``Pending.deliver`` is called in the loop, once for each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, clock: Clock = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._posted: deque[tuple[Pending, Outcome]] = deque()
        self._is_scheduled = False

    def post(self, pending: Pending, outcome: Outcome) -> None:
        """Hand over an outcome. One that nobody waits for any more is dropped."""
        self._posted.append((pending, outcome))
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop has closed: the process is at its end and the callers are gone.
            return

    def _deliver(self) -> None:
        # First: what is posted from here on schedules another turn.
        self._is_scheduled = False
        ends = self._clock() + TURN_S
        try:
            while self._posted and self._clock() < ends:
                pending, outcome = self._posted.popleft()
                # A batch that is lost is refused whole, whatever of it was answered already.
                is_first, pending.is_computed = not pending.is_computed, True
                if is_first and not pending.is_abandoned:
                    pending.deliver(outcome)
        finally:
            if self._posted and not self._is_scheduled:
                # The sockets have their turn first; or one of them failed, which the loop reports.
                self._schedule()
