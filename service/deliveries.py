"""The way back from the engine's threads to the event loop: one hop for all that was computed meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque

from service.request_queue import Outcome, Pending


class Deliveries:
    """``post`` from any thread; ``Pending.deliver`` is called in the loop, once for each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
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
        try:
            while self._posted:
                pending, outcome = self._posted.popleft()
                # A batch that is lost is refused whole, whatever of it was answered already.
                is_first, pending.is_computed = not pending.is_computed, True
                if is_first and not pending.is_abandoned:
                    pending.deliver(outcome)
        finally:
            if self._posted and not self._is_scheduled:
                # One of them failed, which the loop reports: the others still get theirs.
                self._schedule()
