"""When requests are to be sent: planned before the first, and by nothing that a service does.

An open loop sends at its planned times, whatever became of what it sent before: so a stall meets all who would have
come in it, and not one. Several client processes share one plan: even arrivals take turns, and Poisson streams of a
share each are together one of the whole.
"""

from __future__ import annotations

import math
import random as chance
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """``rate_s`` requests a second; ``arrivals`` "poisson" or "even"."""

    rate_s: float
    arrivals: str

    @property
    def level(self) -> str:
        """Such as "open, 200/s, poisson"."""
        return f"open, {self.rate_s:g}/s, {self.arrivals}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """``concurrency`` requests under way: the next is sent as one is answered."""

    concurrency: int

    @property
    def level(self) -> str:
        """Such as "closed, 8 at once"."""
        return f"closed, {self.concurrency} at once"


def planned_sends(
    loop: OpenLoop, *, ramp_s: float, end_s: float, worker: int, num_workers: int, seed: int
) -> Iterator[float]:
    """Seconds from the begin of the step, rising, below ``end_s``: what this worker of all sends.

    Through ``ramp_s`` the rate rises evenly from 0: n sends have come by ``rate * t * t / (2 * ramp_s)`` there.
    """
    ramped = loop.rate_s * ramp_s / 2
    for count in _counts(loop.arrivals, worker, num_workers, seed):
        sooner = math.sqrt(2 * ramp_s * count / loop.rate_s)
        at = sooner if count < ramped else ramp_s + (count - ramped) / loop.rate_s
        if at >= end_s:
            return
        yield at


def starts(loop: ClosedLoop, *, ramp_s: float, worker: int, num_workers: int) -> list[float]:
    """When each caller of this worker begins: spread over the ramp, seconds from the begin of the step."""
    return [ramp_s * number / loop.concurrency for number in range(worker, loop.concurrency, num_workers)]


def _counts(arrivals: str, worker: int, num_workers: int, seed: int) -> Iterator[float]:
    """How many sends of all workers should have come by the next of this one."""
    if arrivals == "even":
        count = float(worker)
        while True:
            yield count
            count += num_workers
    random = chance.Random(f"{seed} {worker}")
    count = 0.0
    while True:
        count += random.expovariate(1.0) * num_workers
        yield count
