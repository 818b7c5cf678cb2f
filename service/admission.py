"""Who may come in: permits by request and by bytes of body, and a budget of memory for what a problem needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attn_core.errors import TooLarge
from service.errors import Overloaded

UNASKED_BYTES = 16 * 2**20
"""A problem that needs no more than this is let in without asking the system for its free memory."""


class Admission:
    """Counts what is inside. Used from the event loop alone.

    ``allowed_bytes`` gives the memory that one problem may need, now.
    """

    def __init__(self, *, max_requests: int, max_body_bytes_inside: int, allowed_bytes: Callable[[], int]) -> None:
        self.max_requests = max_requests
        self.max_body_bytes_inside = max_body_bytes_inside
        self.requests_inside = 0
        self.body_bytes_inside = 0
        self._allowed_bytes = allowed_bytes

    @contextmanager
    def request(self) -> Iterator[BytePermit]:
        """A place for one request, from its head to its answer. Raises: Overloaded."""
        if self.requests_inside >= self.max_requests:
            raise Overloaded(f"{self.max_requests} requests are inside already", reason="requests")
        self.requests_inside += 1
        permit = BytePermit(self)
        try:
            yield permit
        finally:
            permit.release()
            self.requests_inside -= 1

    def check_memory(self, needed_bytes: int) -> None:
        """Refuse a problem that cannot be held. Raises: TooLarge."""
        if needed_bytes <= UNASKED_BYTES:
            return
        allowed = self._allowed_bytes()
        if needed_bytes > allowed:
            raise TooLarge(needed_bytes=needed_bytes, allowed_bytes=allowed)

    def check_integrity(self) -> None:
        """Nothing is counted below zero, and nothing stays counted when nobody is inside."""
        assert self.requests_inside >= 0 and self.body_bytes_inside >= 0
        assert self.requests_inside or not self.body_bytes_inside


class BytePermit:
    """The bytes that one request holds: its body, what reading text takes, its answer until that is sent."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.held_bytes = 0

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
