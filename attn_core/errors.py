"""What the core refuses, and how it says so. The errors know no HTTP and no gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
