"""What calls give: frozen, typed, and no more than the contract says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """How an answer came about. Times are the service's own, in milliseconds.

    ``empty_rows`` and ``nonfinite_rows`` count rows of one head each; ``peak_bytes`` is what admission counted. The
    errors are there with ``verify``: ``max_rel_error`` over the largest float64 value of the row, ``worst`` such as
    "context[0,3,17]".
    """

    path: str
    why: str
    device: str
    dtype: str
    queue_ms: float
    compute_ms: float
    batch_requests: int
    empty_rows: int
    nonfinite_rows: int
    peak_bytes: int
    flops: int
    max_abs_error: float | None = None
    max_rel_error: float | None = None
    worst: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Answer:
    """The outputs that were asked for, each an attribute by its name: ``answer.context``, ``answer.weights``.

    ``outputs`` has the same by name, ``info`` says how they came about, ``server_timing`` how many milliseconds each
    stage in the service took. Arrays of one answer share one piece of memory: who keeps a small one of a large answer
    for long keeps a copy.
    """

    outputs: Mapping[str, Any]
    info: Info
    request_id: str
    server_timing: Mapping[str, float]

    def __getattr__(self, name: str) -> Any:
        # While an answer is unpickled it has not even its own members.
        if name.startswith("_") or name in _OWN:
            raise AttributeError(name)
        try:
            return self.outputs[name]
        except KeyError:
            there = ", ".join(self.outputs)
            raise AttributeError(f"this answer has no {name}: it has {there}; outputs=[...] asks for more") from None

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self.outputs]

    def __repr__(self) -> str:
        shapes = {
            name: list(value.shape) if hasattr(value, "shape") else "list" for name, value in self.outputs.items()
        }
        said = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        return f"Answer({said}; path {self.info.path}, request {self.request_id})"


_OWN = frozenset(field.name for field in fields(Answer))


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPlan:
    """How one path would do; the figures are None where it cannot serve the problem."""

    supported: bool
    why: str
    flops: int | None = None
    bytes_moved: int | None = None
    peak_bytes: int | None = None
    estimated_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a problem would take. ``why`` of the path or the refusal; ``max_seq_len``: the largest T = S that fits."""

    admitted: bool
    why: str
    path: str
    answer_bytes: int
    needed_bytes: int
    allowed_bytes: int
    max_seq_len: int
    paths: Mapping[str, PathPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDescription:
    """What the service says of a layer that it keeps. ``is_new``, of ``put_layer`` alone: its name was free before."""

    name: str
    num_heads: int
    num_kv_heads: int
    weight_layout: str
    dtype: str
    shapes: Mapping[str, tuple[int, ...]]
    parameters: int
    is_new: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """What the service says of itself; ``limits`` by name, bytes and milliseconds as the names say."""

    version: str
    torch: str
    device: str
    state: str
    dtypes: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    layer_outputs: tuple[str, ...]
    layer_gradients: tuple[str, ...]
    paths: tuple[str, ...]
    limits: Mapping[str, float]
