"""What the core refuses, and how it says so. The errors know no HTTP and no gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_FAULTS = 50
"""So many wrong numbers of one tensor are named."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: the field, what must hold there, what came."""

    field: str
    expected: str
    received: str

    def __str__(self) -> str:
        return f"{self.field or 'body'}: expected {self.expected}, received {self.received}"


class AttentionError(Exception):
    """Base of everything the core raises on purpose."""


class InvalidProblem(AttentionError):
    """The problem is readable and cannot be computed; ``faults`` has every reason."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(str(fault) for fault in self.faults))


class TooLarge(AttentionError):
    """The problem needs more memory than it may have. Both figures are bytes."""

    def __init__(self, *, needed_bytes: int, allowed_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        self.allowed_bytes = allowed_bytes
        super().__init__(f"needs {needed_bytes} bytes, {allowed_bytes} bytes are allowed")


class NeedsSpare(AttentionError):
    """Huge or non-finite numbers are attended, and the ``spare_bytes`` that these take were not admitted."""

    def __init__(self, spare_bytes: int) -> None:
        self.spare_bytes = spare_bytes
        super().__init__(f"needs {spare_bytes} bytes more, since huge or non-finite numbers are attended")


class Abandoned(AttentionError):
    """Nobody waits for the answer any more."""


Checkpoint = Callable[[], None]
"""Called before each block of a large problem; raises ``Abandoned`` to stop it there."""


def never_abandoned() -> None:
    """The checkpoint of a problem whose answer is waited for whatever it takes."""


def shape_text(shape: Sequence[int]) -> str:
    """A shape as callers write it: ``[1,4,16,32]``."""
    return "[" + ",".join(str(axis) for axis in shape) + "]"


def names_text(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0]
