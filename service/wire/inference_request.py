"""A request of the Open Inference Protocol, taken apart: what REST and gRPC readers make, and text workers too, so
that torch is not imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from attn_core.errors import Fault
from service.wire.arrays import Buffer, FlatTensor

ParameterValue = bool | int | float | str
MAX_NAMED = 1000
"""More inputs, outputs or parameters than any request has."""


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """A part of a registered region of shared memory. Nothing is checked."""

    region: str
    offset: int
    byte_size: int


@dataclass(slots=True)
class InferenceInput:
    """An input as it was sent. ``content`` is None where it could not be read, which is a fault already.

    A ``Buffer`` holds the elements little endian and row major, in memory that ``is_shared`` with the client or not; a
    ``FlatTensor`` holds what came as numbers, of the datatype's dtype and of whatever length.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: Buffer | FlatTensor | MemoryPlace | None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output and the form of its elements: ``is_binary``, or numbers in JSON; or ``place``, in shared memory."""

    name: str
    is_binary: bool
    place: MemoryPlace | None = None


@dataclass(slots=True)
class InferenceRequest:
    """A request taken apart; ``faults`` are those found on the way. ``outputs`` empty: all that the model has, in the
    form that ``is_binary`` says."""

    id: str | None
    parameters: dict[str, ParameterValue]
    inputs: list[InferenceInput]
    outputs: list[RequestedOutput]
    is_binary: bool
    faults: list[Fault] = field(default_factory=list)
