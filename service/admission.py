"""Who may come in: permits by request, by bytes of body and by memory needed, and a limit on the estimated wait."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attn_core.errors import TooLarge
from service.deadline import Clock, Deadline
from service.errors import DeadlinePassed, Overloaded

log = logging.getLogger("attn.admission")

UNASKED_BYTES = 16 * 2**20
"""A problem that needs no more than this is let in without asking the system for its free memory."""


MEMORY_IS_FRESH_S = 0.1
"""How long what the system said about its free memory is believed."""
SURE_SHARE = 0.5
"""Of an estimate: what is refused for its deadline's sake must miss it even if it is twice as fast as estimated."""
SHORT_WAIT_S = 0.05
"""A wait of this length is never refused for the sake of a deadline: no estimate is that exact."""


class Admission:
    """Counts what is inside. Used from the event loop alone.

    ``allowed_bytes`` gives the memory that one problem may need, now, and is not asked for what needs at most
    ``unasked_bytes``; ``max_wait_s`` is the longest estimated wait for the engine.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_body_bytes_inside: int,
        allowed_bytes: Callable[[], int],
        max_wait_s: float = math.inf,
        unasked_bytes: int = UNASKED_BYTES,
        clock: Clock = time.monotonic,
    ) -> None:
        self.max_requests = max_requests
        self.max_body_bytes_inside = max_body_bytes_inside
        self.max_wait_s = max_wait_s
        self.requests_inside = 0
        self.body_bytes_inside = 0
        self.memory_inside = 0
        self._allowed_bytes = allowed_bytes
        self._unasked_bytes = unasked_bytes
        self._clock = clock
        self._allowed: tuple[float, int] = (-math.inf, 0)

    @contextmanager
    def request(self) -> Iterator[BytePermit]:
        """A place for one request, from its head to its answer. Raises: Overloaded."""
        permit = self.enter()
        try:
            yield permit
        finally:
            permit.leave()

    def enter(self) -> BytePermit:
        """A place for one request, until ``BytePermit.leave``. Raises: Overloaded."""
        if self.requests_inside >= self.max_requests:
            raise Overloaded(f"{self.max_requests} requests are inside already", reason="requests")
        self.requests_inside += 1
        return BytePermit(self)

    def enter_anyway(self) -> BytePermit:
        """A place for what is inside already: the count may pass the limit, and nobody else is let in meanwhile."""
        self.requests_inside += 1
        return BytePermit(self)

    def check_memory(self, needed_bytes: int) -> None:
        """Refuse a problem that cannot be held. Raises: TooLarge."""
        if needed_bytes <= self._unasked_bytes:
            return
        allowed = self.allowed_bytes()
        if needed_bytes > allowed:
            raise TooLarge(needed_bytes=needed_bytes, allowed_bytes=allowed)

    def hold_memory(self, needed_bytes: int) -> None:
        """Count the memory of a problem that waits or is computed. Raises: TooLarge alone, Overloaded beside others."""
        self.check_memory(needed_bytes)
        inside = self.memory_inside
        if inside and inside + needed_bytes > self._unasked_bytes and inside + needed_bytes > self.allowed_bytes():
            raise Overloaded(f"problems that need {inside} bytes are inside already", reason="memory_in_use")
        self.memory_inside += needed_bytes

    def release_memory(self, needed_bytes: int) -> None:
        self.memory_inside -= needed_bytes

    def check_wait(self, wait_s: float) -> None:
        """Refuse at once what would wait too long. Raises: Overloaded."""
        if wait_s > self.max_wait_s:
            raise Overloaded(
                f"the wait is about {wait_s:.1f} s, the limit {self.max_wait_s:g} s",
                reason="wait",
                retry_after_s=max(1, math.ceil(wait_s - self.max_wait_s / 2)),
            )

    def check_deadline(self, wait_s: float, compute_s: float, deadline: Deadline) -> None:
        """Refuse what cannot be done in time. Raises: DeadlinePassed."""
        remaining_s = deadline.remaining_s
        surely_s = SURE_SHARE * (wait_s + compute_s)
        if remaining_s <= 0 or (surely_s > SHORT_WAIT_S and surely_s > remaining_s):
            raise DeadlinePassed(
                f"the answer would take about {wait_s + compute_s:.3g} s, {max(0.0, remaining_s):.3g} s are left",
                at_once=True,
            )

    def allowed_bytes(self) -> int:
        """The memory that one problem may need; what the system says is believed for a moment."""
        now = self._clock()
        if now - self._allowed[0] > MEMORY_IS_FRESH_S:
            try:
                self._allowed = now, self._allowed_bytes()
            except OSError as error:
                if self._allowed[0] == -math.inf:
                    raise Overloaded(f"the system does not say what memory is free: {error}", reason="memory") from None
                # No descriptors left, say: what it said last is better than nothing.
                log.warning("the system does not say what memory is free: %s", error)
                self._allowed = now, self._allowed[1]
        return self._allowed[1]

    def check_integrity(self) -> None:
        """Nothing is counted below zero, and nothing stays counted when nobody is inside."""
        assert self.requests_inside >= 0 and self.body_bytes_inside >= 0 and self.memory_inside >= 0
        assert self.requests_inside or not (self.body_bytes_inside or self.memory_inside)


class BytePermit:
    """The bytes that one request holds: its body, what reading text takes, its answer until that is sent."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.held_bytes = 0
        self._is_inside = True

    def hold(self, more_bytes: int) -> None:
        """Take more. A single request is never refused while it is alone. Raises: Overloaded."""
        inside = self._admission.body_bytes_inside
        others = inside - self.held_bytes
        if others and inside + more_bytes > self._admission.max_body_bytes_inside:
            raise Overloaded(f"{inside} bytes of bodies are inside already", reason="bytes")
        self._admission.body_bytes_inside += more_bytes
        self.held_bytes += more_bytes

    def count(self, more_bytes: int) -> None:
        """Count what is held without asking, since the work is done: others are refused while it is there."""
        self._admission.body_bytes_inside += more_bytes
        self.held_bytes += more_bytes

    def release(self) -> None:
        self._admission.body_bytes_inside -= self.held_bytes
        self.held_bytes = 0

    def leave(self) -> None:
        """Give up the place too; a second time changes nothing."""
        self.release()
        if self._is_inside:
            self._is_inside = False
            self._admission.requests_inside -= 1
