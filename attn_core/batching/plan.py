"""Who rides together. A pure function of what waits: no clock, no tensors, nothing remembered but the last lane.

Small problems ride together in the order of their arrival, as many as the budget lets; a large one rides alone. A
worker that serves both kinds takes them in turn, so that neither starves the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attn_core.prepared import Prepared

LARGE_FROM_FLOPS = 1_000_000_000
"""From here on a problem rides alone: what rides beside it would wait for it."""
FLOPS_PER_PASS = 25
"""What one exponential of a pair takes, in floating point operations of a product."""


@dataclass(frozen=True, slots=True)
class Ride:
    """What the plan knows of one waiting problem; ``flops`` has all work in it."""

    tokens: int
    num_bytes: int
    flops: int

    @classmethod
    def of(cls, prepared: Prepared) -> Ride:
        cost = prepared.cost
        flops = cost.flops + round(FLOPS_PER_PASS * cost.pair_passes)
        return cls(tokens=prepared.tokens, num_bytes=cost.peak_bytes, flops=flops)

    @property
    def is_large(self) -> bool:
        return self.flops >= LARGE_FROM_FLOPS


@dataclass(frozen=True, slots=True)
class Budget:
    """What one batch may hold. A single problem rides even if it is over it."""

    max_requests: int = 64
    max_tokens: int = 2**16
    max_bytes: int = 256 * 2**20
    max_flops: int = 4 * LARGE_FROM_FLOPS


def share_of(waiting: int, num_workers: int, budget: Budget) -> int:
    """How many requests one of several workers takes, so that the others have their part of what piled up."""
    return max(1, min(budget.max_requests, -(-waiting // num_workers)))


def plan(small: Iterable[Ride], large: Sequence[Ride], budget: Budget, *, after_small: bool) -> tuple[int, bool]:
    """The next batch: how many of the first small ones, or the first large one alone.

    ``small`` and ``large`` stand in the order of arrival; ``after_small`` says that the last batch was one of small
    ones, so that it is the turn of a large one. Gives the number that rides, and whether it is the large lane's; 0
    where nothing waits.
    """
    num_rides = 0 if large and after_small else _fitting(small, budget)
    if num_rides:
        return num_rides, False
    return (1, True) if large else (0, False)


def _fitting(rides: Iterable[Ride], budget: Budget) -> int:
    requests = tokens = num_bytes = flops = 0
    for ride in rides:
        tokens += ride.tokens
        num_bytes += ride.num_bytes
        flops += ride.flops
        over = tokens > budget.max_tokens or num_bytes > budget.max_bytes or flops > budget.max_flops
        if requests == budget.max_requests or (over and requests):
            break
        requests += 1
    return requests
