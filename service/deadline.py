"""An end on the monotonic clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from service.errors import DeadlinePassed

T = TypeVar("T")
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at`` is a point on ``clock``, in seconds."""

    at: float
    clock: Clock = field(default=time.monotonic)

    @classmethod
    def after(cls, timeout_s: float, clock: Clock = time.monotonic) -> Deadline:
        return cls(clock() + timeout_s, clock)

    @property
    def remaining_s(self) -> float:
        return self.at - self.clock()

    @property
    def has_passed(self) -> bool:
        return self.remaining_s <= 0

    async def wait_for(self, future: asyncio.Future[T]) -> T:
        """The future's result. Raises: DeadlinePassed, and the future is cancelled."""
        try:
            async with asyncio.timeout(max(0.0, self.remaining_s)) as limit:
                return await future
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlinePassed("the deadline passed before the answer was there") from None
