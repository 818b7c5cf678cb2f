"""Pending problems of every door, in two lanes, each with its deadline and with whom to tell; bounded."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attn_core.batching.plan import Budget, Ride, plan, share_of
from attn_core.prepared import Prepared
from attn_core.problem import AttentionResult
from service.deadline import Deadline
from service.errors import Draining, Overloaded


@dataclass(frozen=True, slots=True)
class Answer:
    """A result, how long its problem waited and computed, and what memory admission counted for it."""

    result: AttentionResult
    needed_bytes: int
    queue_s: float
    compute_s: float
    batch_requests: int


Outcome = Answer | BaseException


# deque.remove writes out what it does not find: a repr of tensors and buffers would hold up the loop for seconds.
@dataclass(slots=True, eq=False, repr=False)
class Pending:
    """A problem on its way. ``deliver`` is called once, in the event loop; ``is_abandoned`` is read by the engine.

    ``held`` keeps alive what the tensors lie in.
    """

    prepared: Prepared
    deadline: Deadline
    deliver: Callable[[Outcome], None]
    enqueued_at: float
    needed_bytes: int
    estimated_s: float = 0.0
    held: Any = None
    is_abandoned: bool = False
    is_computed: bool = False
    has_failed: bool = False
    ride: Ride = field(init=False)

    def __post_init__(self) -> None:
        self.ride = Ride.of(self.prepared)


class RequestQueue:
    """Holds at most ``max_requests`` waiting problems; those being computed are not among them.

    Put and discard in the event loop, take in the engine's threads. ``num_small_workers`` share the small lane; the
    large one has a worker of its own, or is served by the only worker there is. The event loop itself may help with
    short ones.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        budget: Budget | None = None,
        num_small_workers: int = 1,
        has_large_worker: bool = False,
        loop_helps: bool = False,
    ) -> None:
        self.max_requests = max_requests
        self._budget = budget or Budget()
        self._num_small_workers = num_small_workers
        self._num_sharing = num_small_workers + loop_helps
        self._small: deque[Pending] = deque()
        self._large: deque[Pending] = deque()
        self._lock = threading.Lock()
        # Who serves small ones only must not be woken for a large one in another's stead.
        self._small_came = threading.Condition(self._lock)
        self._large_came = threading.Condition(self._lock) if has_large_worker else self._small_came
        self._closed = False
        self._waiting_s = {True: 0.0, False: 0.0}
        self._running_s = {True: 0.0, False: 0.0}
        self._num_running = {True: 0, False: 0}

    def __len__(self) -> int:
        return len(self._small) + len(self._large)

    @property
    def is_empty(self) -> bool:
        return not self._small and not self._large

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing small is computed."""
        return self.is_empty and not self._num_running[False]

    @property
    def has_small(self) -> bool:
        return bool(self._small)

    @property
    def has_idle_small_worker(self) -> bool:
        """Whether a worker is about to take the one small problem that waits."""
        return len(self._small) <= 1 and self._num_running[False] < self._num_small_workers

    def wait_s(self, *, is_large: bool) -> float:
        """The estimated time until one more of its lane would begin: what waits and runs there, over its workers."""
        workers = 1 if is_large else self._num_small_workers
        return (self._waiting_s[is_large] + self._running_s[is_large]) / workers

    def check_room(self) -> None:
        """Refuse at the head what ``put`` would refuse once it has been read. Raises: Overloaded."""
        if len(self) >= self.max_requests:
            raise Overloaded(f"{self.max_requests} requests are waiting already", reason="queue_full")

    def put(self, pending: Pending) -> None:
        """Add one. Raises: Overloaded when the queue is full, Draining when it is closed."""
        is_large = pending.ride.is_large
        with self._lock:
            if self._closed:
                raise Draining("the server stops and takes no new work")
            self.check_room()
            (self._large if is_large else self._small).append(pending)
            self._waiting_s[is_large] += pending.estimated_s
            (self._large_came if is_large else self._small_came).notify()

    def discard(self, pending: Pending) -> bool:
        """Give up the place of one that nobody waits for any more; whether it was still waiting."""
        lane = self._large if pending.ride.is_large else self._small
        with self._lock:
            try:
                lane.remove(pending)
            except ValueError:
                return False
            self._count(lane is self._large, waiting_s=-pending.estimated_s)
            return True

    def take(self, *, small: bool = True, large: bool = True, after_small: bool = False) -> list[Pending] | None:
        """The next batch of the lanes that a worker serves; waits for one. None once these are closed and empty."""
        came = self._small_came if small else self._large_came
        with self._lock:
            while True:
                rides = [one.ride for one in itertools.islice(self._small, self._share)] if small else []
                larges = [self._large[0].ride] if large and self._large else []
                count, is_large = plan(rides, larges, self._budget, after_small=after_small)
                if count:
                    return self._taken(self._large if is_large else self._small, count)
                if self._closed:
                    return None
                came.wait()

    def take_short(self, longest_s: float) -> Pending | None:
        """The first of the small lane for the event loop to compute, if it takes no longer than that; does not wait."""
        with self._lock:
            if not self._small or self._small[0].estimated_s > longest_s or self._small[0].has_failed:
                return None
            (pending,) = self._taken(self._small, 1)
            return pending

    def put_back(self, pending: Pending) -> None:
        """What the loop took and failed at becomes the first again, for the engine's threads alone."""
        pending.has_failed = True
        with self._lock:
            self._num_running[False] -= 1
            self._small.appendleft(pending)
            self._count(False, waiting_s=pending.estimated_s, running_s=-pending.estimated_s)
            self._small_came.notify()

    def done(self, batch: Sequence[Pending]) -> None:
        """What was taken is computed, or given up."""
        with self._lock:
            for pending in batch:
                self._num_running[pending.ride.is_large] -= 1
                self._count(pending.ride.is_large, running_s=-pending.estimated_s)

    def close(self) -> None:
        """Take nothing new to wait for; those waiting are still handed out."""
        with self._lock:
            self._closed = True
            self._small_came.notify_all()
            self._large_came.notify_all()

    def check_integrity(self) -> None:
        """Nobody waits beyond the bound, and the estimates add up to what waits and runs."""
        with self._lock:
            assert len(self) <= self.max_requests
            for is_large, lane in ((False, self._small), (True, self._large)):
                expected_s = sum(pending.estimated_s for pending in lane)
                assert math.isclose(self._waiting_s[is_large], expected_s, rel_tol=1e-6, abs_tol=1e-6)
                assert self._num_running[is_large] > 0 or self._num_running[is_large] == self._running_s[is_large] == 0

    @property
    def _share(self) -> int:
        return share_of(len(self._small), self._num_sharing, self._budget)

    def _taken(self, lane: deque[Pending], count: int) -> list[Pending]:
        batch = [lane.popleft() for _ in range(count)]
        estimated_s = sum(pending.estimated_s for pending in batch)
        self._num_running[lane is self._large] += count
        self._count(lane is self._large, waiting_s=-estimated_s, running_s=estimated_s)
        return batch

    def _count(self, is_large: bool, *, waiting_s: float = 0.0, running_s: float = 0.0) -> None:
        # Sums of floats drift: an empty lane waits for nothing.
        waiting_s += self._waiting_s[is_large]
        running_s += self._running_s[is_large]
        self._waiting_s[is_large] = max(0.0, waiting_s) if (self._large if is_large else self._small) else 0.0
        self._running_s[is_large] = max(0.0, running_s) if self._num_running[is_large] else 0.0
