"""What an attention or its gradients would take, by metadata alone: kernels, reasons, costs as when it is computed.

Problems here are without numbers, on torch's device ``meta``: whatever is said of them is said from dtypes and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from attn_core.cost import Cost
from attn_core.errors import InvalidProblem
from attn_core.kernels import why_not
from attn_core.prepared import Prepared, prepare
from attn_core.problem import AttentionProblem, GradientsProblem, TensorSpec
from attn_core.support import PATHS
from attn_core.validate.gradients import why_not_gradients

PlannedProblem = AttentionProblem | GradientsProblem
ON_REQUEST = "if asked for"

_TOKEN_AXES = {"bhtd": -2, "bthd": 1, "btd": 1}
_PER_PAIR = frozenset({"allow_mask", "block_mask", "bias"})


@dataclass(frozen=True, slots=True)
class PathOutlook:
    """Why a path would serve a problem, or cannot, and what it takes; no cost where it cannot."""

    why: str
    cost: Cost | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """What the service's choice is, and how every path would do."""

    chosen: Prepared
    paths: Mapping[str, PathOutlook]


def outlook(problem: PlannedProblem, *, device_type: str) -> Outlook:
    """Of a checked problem without numbers. Raises: InvalidProblem when the asked path cannot serve it."""
    chosen = prepare(problem, device_type=device_type)
    paths = {}
    for path in PATHS:
        reason = _why_not(path, problem, chosen, device_type)
        if reason is not None:
            paths[path] = PathOutlook(reason)
        elif path == chosen.path:
            paths[path] = PathOutlook(chosen.why, chosen.cost)
        else:
            paths[path] = PathOutlook(ON_REQUEST, prepare(on_path(problem, path), device_type=device_type).cost)
    return Outlook(chosen, paths)


def _why_not(path: str, problem: PlannedProblem, chosen: Prepared, device_type: str) -> str | None:
    if isinstance(problem, GradientsProblem):
        return why_not_gradients(path, problem.asked)
    assert chosen.canonical is not None
    return why_not(path, chosen.canonical, device_type=device_type)


def on_path(problem: PlannedProblem, path: str) -> PlannedProblem:
    if isinstance(problem, GradientsProblem):
        return replace(problem, attention=_on_path(problem.attention, path))
    return _on_path(problem, path)


def _on_path(problem: AttentionProblem, path: str) -> AttentionProblem:
    return replace(problem, options=replace(problem.options, path=path))


def at_length(problem: PlannedProblem, seq_len: int) -> dict[str, TensorSpec]:
    """The tensors of a problem with so many queries and as many keys; what is broadcast along them stays so."""
    layout = problem.options.layout
    return {name: _at_length(name, tensor, layout, seq_len) for name, tensor in problem.tensors().items()}


def _at_length(name: str, tensor: Tensor, layout: str, seq_len: int) -> TensorSpec:
    shape = list(tensor.shape)
    if name in ("query", "key", "value", "grad_context"):
        shape[_TOKEN_AXES[layout]] = seq_len
    elif name == "grad_logsumexp":
        shape[-1] = seq_len
    elif name in _PER_PAIR:
        shape[-2:] = [axis if axis == 1 else seq_len for axis in shape[-2:]]
    return TensorSpec(tensor.dtype, tuple(shape))


def with_specs(problem: PlannedProblem, specs: Mapping[str, TensorSpec]) -> PlannedProblem:
    """The problem with other tensors, without numbers, of the same names."""
    tensors = {name: spec.hollow() for name, spec in specs.items()}
    if isinstance(problem, AttentionProblem):
        return replace(problem, **tensors)  # type: ignore[arg-type]
    grads = {name: tensors.pop(name) for name in ("grad_context", "grad_logsumexp") if name in tensors}
    return replace(problem, attention=replace(problem.attention, **tensors), **grads)  # type: ignore[arg-type]


def max_seq_len(
    problem: PlannedProblem,
    *,
    device_type: str,
    allowed_bytes: int,
    longest: int,
    max_elements: int,
    max_input_bytes: int,
) -> int:
    """The largest number of queries and of as many keys whose cost is within ``allowed_bytes``, 0 for none.

    Everything else stays as it is. No longer than ``longest``; no tensor has more elements than ``max_elements``, nor
    all of them more bytes than ``max_input_bytes``.
    """

    def fits(seq_len: int) -> bool:
        specs = at_length(problem, seq_len)
        if any(_num_elements(spec) > max_elements for spec in specs.values()):
            return False
        if sum(_num_elements(spec) * spec.dtype.itemsize for spec in specs.values()) > max_input_bytes:
            return False
        try:
            prepared = prepare(with_specs(problem, specs), device_type=device_type)
        except InvalidProblem:
            # The asked path cannot serve that length.
            return False
        return prepared.cost.peak_bytes <= allowed_bytes

    return _largest(fits, longest)


def _num_elements(spec: TensorSpec) -> int:
    count = 1
    for axis in spec.shape:
        count *= axis
    return count


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, where all smaller ones do; 0 where none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
