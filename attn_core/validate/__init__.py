"""Whether a problem can be computed: every fault at once, in the order of the contract's tables.

``check_problem`` looks at shape, dtype and device alone; ``check_values`` reads the few tensors whose numbers are part
of the shape of the problem. One file for each kind of problem.
"""

from __future__ import annotations

from attn_core.errors import Fault, InvalidProblem
from attn_core.problem import (
    PARAMETER_NAMES,
    AttentionProblem,
    GradientsProblem,
    LayerGradientsProblem,
    LayerProblem,
    Problem,
    WeightedSumProblem,
)
from attn_core.validate.attention import (
    MAX_OFFSET,
    dims_of,
    dtype_text,
    faults_where,
    find_faults,
    find_value_faults,
    find_weighted_sum_faults,
    known_lengths,
    number_text,
    spec_of,
)
from attn_core.validate.gradients import find_gradients_faults
from attn_core.validate.layer import (
    find_layer_faults,
    find_layer_gradients_faults,
    find_parameters_faults,
    layer_lengths,
)

__all__ = [
    "MAX_OFFSET",
    "check_problem",
    "check_values",
    "dims_of",
    "dtype_text",
    "faults_where",
    "find_faults",
    "find_gradients_faults",
    "find_layer_faults",
    "find_layer_gradients_faults",
    "find_parameters_faults",
    "find_value_faults",
    "find_weighted_sum_faults",
    "known_lengths",
    "layer_lengths",
    "number_text",
    "spec_of",
]


OPERANDS = frozenset({"key", "value", "grad_context", "grad_logsumexp", "memory", *PARAMETER_NAMES, "grad_output"})
"""Tensors that must lie where the first one does."""


def check_problem(problem: Problem) -> None:
    """Refuse what cannot be computed, from shape, dtype and device only.

    Raises: InvalidProblem with every fault found.
    """
    tensors = problem.tensors()
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    match problem:
        case AttentionProblem():
            faults = find_faults(specs, problem.options)
        case WeightedSumProblem():
            faults = find_weighted_sum_faults(specs)
        case GradientsProblem():
            faults = find_gradients_faults(specs, problem.options, problem.outputs)
        case LayerProblem():
            faults = find_layer_faults(specs, problem.options)
        case LayerGradientsProblem():
            faults = find_layer_gradients_faults(specs, problem.options, problem.outputs)
    first, *others = tensors
    device = tensors[first].device
    for name in others:
        # Masks and the like may lie elsewhere: they are small, and are brought over.
        if tensors[name].device != device and name in OPERANDS:
            faults.append(Fault(name, f"device {device}, as {first} has", str(tensors[name].device)))
    if faults:
        raise InvalidProblem(faults)


def check_values(problem: Problem) -> None:
    """Refuse lengths, offsets, slopes and sinks out of range. Raises: InvalidProblem."""
    match problem:
        case WeightedSumProblem():
            return
        case AttentionProblem() | GradientsProblem():
            dims = dims_of(problem if isinstance(problem, AttentionProblem) else problem.attention)
            lengths: tuple[int | None, int | None] = dims.seq_len_q, dims.seq_len_kv
        case LayerProblem() | LayerGradientsProblem():
            specs = {name: spec_of(tensor) for name, tensor in problem.tensors().items()}
            lengths = layer_lengths(specs)
    tensors = problem.tensors()
    if "input" in tensors:
        # It says which numbers the arithmetic can hold, as query does.
        tensors["query"] = tensors["input"]
    faults = find_value_faults(tensors, seq_len_q=lengths[0], seq_len_kv=lengths[1])
    if faults:
        raise InvalidProblem(faults)
