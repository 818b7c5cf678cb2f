"""Pending problems, first come first served, each with its future and deadline; bounded."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass

from attn_core.problem import AttentionProblem, AttentionResult, WeightedSumProblem
from service.deadline import Deadline
from service.errors import Draining, Overloaded

Problem = AttentionProblem | WeightedSumProblem


@dataclass(frozen=True, slots=True)
class Answer:
    """A result, how long its problem waited and computed, and what memory admission counted for it."""

    result: AttentionResult
    needed_bytes: int
    queue_s: float
    compute_s: float
    batch_requests: int


@dataclass(slots=True, eq=False)
class Pending:
    """A problem on its way. The future belongs to the event loop; the engine's thread only reports to it."""

    problem: Problem
    deadline: Deadline
    future: asyncio.Future[Answer]
    enqueued_at: float
    needed_bytes: int

    def deliver(self, outcome: Answer | BaseException) -> None:
        """Answer from any thread. An answer that nobody waits for any more is dropped."""
        try:
            self.future.get_loop().call_soon_threadsafe(self._set, outcome)
        except RuntimeError:
            # The loop has closed: the process is at its end and the caller is gone.
            return

    def _set(self, outcome: Answer | BaseException) -> None:
        if self.future.done():
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class RequestQueue:
    """Holds at most ``max_requests`` waiting problems; the one being computed is not among them."""

    def __init__(self, *, max_requests: int) -> None:
        self.max_requests = max_requests
        self._waiting: deque[Pending] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, pending: Pending) -> None:
        """Add one. Raises: Overloaded when the queue is full, Draining when it is closed."""
        with self._changed:
            if self._closed:
                raise Draining("the server stops and takes no new work")
            if len(self._waiting) >= self.max_requests:
                raise Overloaded(f"{self.max_requests} requests are waiting already", reason="queue_full")
            self._waiting.append(pending)
            self._changed.notify()

    def discard(self, pending: Pending) -> None:
        """Give up the place of one that nobody waits for any more, if it is still waiting."""
        with self._changed:
            if pending in self._waiting:
                self._waiting.remove(pending)

    def take(self) -> Pending | None:
        """The first one; waits for one. None once the queue is closed and empty."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            return self._waiting.popleft()

    def close(self) -> None:
        """Take nothing new to wait for; those waiting are still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
