"""What a layer is made of, told from metadata: its axes, the attention inside, and what the whole costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem, canonicalize
from attn_core.cost import FIXED_BYTES, Cost
from attn_core.cut import Cut, cut_heads_first, even
from attn_core.gradients_cost import gradients_cost
from attn_core.kernels.output import named_outputs, output_dtype, output_shape
from attn_core.numerics import compute_dtype
from attn_core.problem import (
    OUTPUTS,
    RULE_NAMES,
    WEIGHT_NAMES,
    AttentionProblem,
    Dims,
    GradientsProblem,
    LayerGradientsProblem,
    LayerProblem,
)
from attn_core.projections import add_scratch, project_scratch, row_sum_scratch, sum_scratch

OPERANDS = ("query", "key", "value")
STORED = frozenset({"context", "weights", "top_weights"})
"""Outputs of the attention that have the dtype of the layer, and are rounded to it."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One of the four products ``[rows, width_in] @ [width_in, width_out]``."""

    name: str
    rows: int
    width_in: int
    width_out: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.width_in * self.width_out

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, self.width_in, self.width_out

    @property
    def numbers(self) -> int:
        """Of the result."""
        return self.rows * self.width_out

    @property
    def matrix_numbers(self) -> int:
        return self.width_in * self.width_out


@dataclass(frozen=True, slots=True)
class LayerDims:
    """The axes of a checked layer."""

    batch: int
    seq_len_q: int
    seq_len_kv: int
    num_heads: int
    num_kv_heads: int
    query: Projection
    key: Projection
    value: Projection
    output: Projection

    @property
    def head_dim(self) -> int:
        return self.query.width_out // self.num_heads

    @property
    def head_dim_v(self) -> int:
        return self.output.width_in // self.num_heads

    @property
    def operands(self) -> tuple[Projection, Projection, Projection]:
        return self.query, self.key, self.value

    def heads_of(self, name: str) -> int:
        return self.num_heads if name == "query" else self.num_kv_heads


def layer_dims(problem: LayerProblem) -> LayerDims:
    options = problem.options.attention
    assert options.num_heads is not None
    batch, seq_len_q, _ = _of_rank_3(problem.input.shape)
    seq_len_kv = seq_len_q if problem.memory is None else problem.memory.shape[-2]
    rows = {"query": batch * seq_len_q, "output": batch * seq_len_q}

    def projection(name: str) -> Projection:
        matrix = matrix_of(problem, name)
        return Projection(name, rows.get(name, batch * seq_len_kv), matrix.shape[0], matrix.shape[1])

    return LayerDims(
        batch=batch,
        seq_len_q=seq_len_q,
        seq_len_kv=seq_len_kv,
        num_heads=options.num_heads,
        num_kv_heads=options.num_heads if options.num_kv_heads is None else options.num_kv_heads,
        query=projection("query"),
        key=projection("key"),
        value=projection("value"),
        output=projection("output"),
    )


def matrix_of(problem: LayerProblem, name: str) -> Tensor:
    """The matrix of one projection, ``[width_in, width_out]`` however it lies: a view."""
    matrix: Tensor = getattr(problem, f"w_{name}")
    return matrix.t() if problem.options.weight_layout == "out_in" else matrix


def token_source(problem: LayerProblem, name: str) -> str:
    """The tensor that query, key or value is projected from."""
    return "input" if name == "query" or problem.memory is None else "memory"


def _of_rank_3(shape: Sequence[int]) -> tuple[int, ...]:
    return (1,) * (3 - len(shape)) + tuple(shape)


def attention_outputs(outputs: Sequence[str]) -> tuple[str, ...]:
    """What the attention inside a layer is asked for: the context wherever nothing else of it is wanted."""
    inside = tuple(name for name in outputs if name in OUTPUTS)
    if "context" not in inside and ("output" in outputs or not inside):
        return ("context", *inside)
    return inside


def attention_inside(
    problem: LayerProblem, operands: Mapping[str, Tensor], outputs: tuple[str, ...]
) -> AttentionProblem:
    """The attention of a layer, between projected ``operands`` ``[batch, tokens, heads * width]``."""
    rules = {name: getattr(problem, name) for name in RULE_NAMES}
    options = replace(problem.options.attention, layout="btd", outputs=outputs, verify=False)
    return AttentionProblem(**operands, **rules, options=options)


def gradients_inside(
    problem: LayerProblem, operands: Mapping[str, Tensor], outputs: tuple[str, ...], grad_context: Tensor
) -> GradientsProblem:
    """The backward pass of the attention of a layer; ``grad_context`` lies as its context does."""
    attention = attention_inside(problem, operands, ("context",))
    return GradientsProblem(attention, grad_context=grad_context, outputs=outputs)


def operand_gradients(problem: LayerGradientsProblem) -> tuple[str, ...]:
    """The gradients of the attention inside from which the asked ones follow."""
    asked = set(problem.asked)

    def is_needed(name: str) -> bool:
        return not asked.isdisjoint({f"grad_w_{name}", f"grad_b_{name}", f"grad_{token_source(problem.layer, name)}"})

    found = tuple(f"grad_{name}" for name in OPERANDS if is_needed(name))
    return (*found, *(name for name in ("grad_bias", "grad_sinks") if name in asked))


def needs_context(problem: LayerGradientsProblem) -> bool:
    """Whether the forward pass runs to its end: for the output's matrix, or where nothing else counts empty rows."""
    return "grad_w_output" in problem.asked or not operand_gradients(problem)


def without_numbers(problem: LayerProblem) -> dict[str, Tensor]:
    """query, key and value, and ``context`` as it comes out, ``[batch, tokens, heads * width]`` on device meta."""
    dims = layer_dims(problem)
    arithmetic = compute_dtype(problem.input.dtype)
    widths = {one.name: one.width_out for one in dims.operands} | {"context": dims.output.width_in}
    tokens = {"key": dims.seq_len_kv, "value": dims.seq_len_kv}
    return {
        name: torch.empty(dims.batch, tokens.get(name, dims.seq_len_q), width, dtype=arithmetic, device="meta")
        for name, width in widths.items()
    }


def layer_cost(problem: LayerProblem, canonical: CanonicalProblem, inside: Cost) -> Cost:
    """The cost of a layer, from that of its attention ``canonical``, step by step as ``layer.run_layer`` goes."""
    dims, asked, storage = layer_dims(problem), problem.options.outputs, problem.input.dtype
    arithmetic = compute_dtype(storage)
    inputs = sum(tensor.nbytes for tensor in problem.tensors().values())
    held = _Held(inputs + _strided_bytes(problem.tensors()))
    flops = _project_operands(problem, dims, held) + inside.flops
    operands = {one.name: one.numbers for one in dims.operands}
    numbers = {name: math.prod(output_shape(canonical, name)) for name in named_outputs(canonical)}
    wide = {name: count * output_dtype(canonical, name).itemsize for name, count in numbers.items()}
    held.pass_through(_beside(problem, inside, sum(operands.values()) * arithmetic.itemsize))
    held.take(sum(wide.values()))
    held.give_back(sum(count * arithmetic.itemsize for name, count in operands.items() if name not in asked))
    for name in OPERANDS:
        if name in asked:
            held.take(operands[name] * storage.itemsize)
            held.give_back(operands[name] * arithmetic.itemsize)
    outputs = sum(operands[name] * storage.itemsize for name in OPERANDS if name in asked)
    if "output" in asked:
        flops += dims.output.flops
        outputs += dims.output.numbers * storage.itemsize
        held.take(dims.output.numbers * storage.itemsize)
        held.pass_through(project_scratch(dims.output.shape, tokens=arithmetic, matrix=storage, result=storage))
    if "context" not in asked:
        held.give_back(wide.pop("context", 0))
    for name, count in wide.items():
        if storage != arithmetic and name in STORED:
            held.take(numbers[name] * storage.itemsize)
            held.give_back(count)
            count = numbers[name] * storage.itemsize
        outputs += count
    if storage != arithmetic and "top_keys" in numbers:
        # Places by key and by weight, the keys compared with or gathered, and sorted; weights gathered and sorted.
        held.pass_through(numbers["top_keys"] * (4 * torch.int64.itemsize + 3 * storage.itemsize))
    between = sum(operands.values()) + dims.output.rows * dims.output.width_in
    return Cost(
        flops=flops,
        bytes_moved=inputs + outputs + 2 * between * arithmetic.itemsize,
        peak_bytes=held.most + FIXED_BYTES,
        output_bytes=outputs,
        pair_passes=inside.pair_passes,
    )


MARKED_NUMBERS, MARKED_PAIRS = 2**18, 2**16
"""So many numbers of query, key, value and context, and so many pairs, are looked at together to mark rows."""


def cut_marks(dims: Dims) -> Cut:
    """How much of an attention is differentiated at once only to mark its rows; one head and one row at least."""
    of_a_head = (dims.seq_len_q + dims.seq_len_kv) * (dims.head_dim + dims.head_dim_v)
    found = cut_heads_first(replace(dims, seq_len_q=1, seq_len_kv=of_a_head), MARKED_NUMBERS)
    per_row = max(1, found.items * found.heads * dims.seq_len_kv)
    return replace(found, rows=even(dims.seq_len_q, max(1, MARKED_PAIRS // per_row)))


def _marks_scratch(problem: LayerProblem, dims: LayerDims) -> int:
    """What the marks of rows take, one part after the other, where numbers are not finite."""
    operands = without_numbers(problem)
    del operands["context"]
    canonical = canonicalize(attention_inside(problem, operands, ("context",)))
    size, storage = cut_marks(canonical.dims), problem.input.dtype
    if canonical.dims.num_pairs == 0:
        return 0
    part = canonical.part(*(slice(0, most) for most in (size.items, size.heads, size.rows)))
    inside = gradients_cost(part, (), grad_bytes=0, sinks_bytes=0, is_self_attention=False)
    rows, width = size.items * size.rows, size.heads * dims.head_dim_v
    projected = project_scratch(
        (rows, dims.output.width_out, width), tokens=storage, matrix=storage, result=compute_dtype(storage)
    )
    grad_output = rows * dims.output.width_out * storage.itemsize
    grad_context = rows * width * compute_dtype(storage).itemsize
    return grad_output + grad_context + max(projected, inside.peak_bytes - inside.bytes_moved - FIXED_BYTES)


def layer_gradients_cost(problem: LayerGradientsProblem, forward: Cost | None, backward: Cost | None) -> Cost:
    """The cost of a layer's gradients, step by step as ``layer.run_layer_gradients`` goes.

    ``forward`` is that of the context of the attention inside, where it is needed, ``backward`` that of its gradients.
    """
    layer, asked = problem.layer, problem.asked
    dims, storage = layer_dims(layer), layer.input.dtype
    arithmetic = compute_dtype(storage)
    rounds, wide = storage != arithmetic, arithmetic.itemsize
    inputs = sum(tensor.nbytes for tensor in problem.tensors().values())
    held = _Held(inputs + _strided_bytes(problem.tensors()))
    outputs, flops, between = 0, _project_operands(layer, dims, held), 0
    operands = sum(one.numbers for one in dims.operands) * wide

    def keep(numbers: int) -> None:
        """A gradient that was found in the dtype of the arithmetic, already taken, and is rounded."""
        nonlocal outputs
        outputs += numbers * storage.itemsize
        if rounds:
            held.take(numbers * storage.itemsize)
            held.give_back(numbers * wide)

    if forward is not None:
        flops += forward.flops
        held.pass_through(_beside(layer, forward, operands))
        held.take(forward.output_bytes)
        between += forward.output_bytes
        if "grad_w_output" in asked:
            flops += dims.output.flops
            held.take(dims.output.matrix_numbers * wide)
            turned = (dims.output.rows, dims.output.width_out, dims.output.width_in)
            held.pass_through(sum_scratch(turned, tokens=storage))
        held.give_back(forward.output_bytes)
        if "grad_w_output" in asked:
            keep(dims.output.matrix_numbers)
        if backward is None:
            held.pass_through(_marks_scratch(layer, dims))
    if "grad_b_output" in asked:
        held.take(dims.output.width_out * wide)
        held.pass_through(row_sum_scratch(dims.output.rows, dims.output.width_out, storage))
        keep(dims.output.width_out)
    if backward is None:
        held.give_back(operands)
    else:
        flops += backward.flops + dims.output.flops
        grad_context = dims.output.rows * dims.output.width_in * wide
        held.take(grad_context)
        turned = (dims.output.rows, dims.output.width_out, dims.output.width_in)
        held.pass_through(project_scratch(turned, tokens=storage, matrix=storage, result=arithmetic))
        held.pass_through(_beside(layer, backward, operands + grad_context))
        held.take(backward.output_bytes)
        held.give_back(operands + grad_context)
        between += operands + 2 * grad_context + backward.output_bytes
        wanted = operand_gradients(problem)
        outputs += sum(
            tensor.nbytes
            for name, tensor in (("grad_bias", layer.bias), ("grad_sinks", layer.sinks))
            if name in wanted and tensor is not None
        )
        flops += _differentiate_operands(problem, dims, wanted, held, keep)
    return Cost(
        flops=flops,
        bytes_moved=inputs + outputs + operands + between,
        peak_bytes=held.most + FIXED_BYTES,
        output_bytes=outputs,
        pair_passes=sum(cost.pair_passes for cost in (forward, backward) if cost is not None),
    )


def _differentiate_operands(
    problem: LayerGradientsProblem,
    dims: LayerDims,
    wanted: tuple[str, ...],
    held: _Held,
    keep: Callable[[int], None],
) -> int:
    """From the gradients of query, key and value, which are held, to those of what they came from: the flops."""
    layer, asked, flops = problem.layer, problem.asked, 0
    storage = layer.input.dtype
    wide = compute_dtype(storage).itemsize
    waiting: dict[str, int] = {}
    for one in dims.operands:
        if f"grad_{one.name}" not in wanted:
            continue
        if f"grad_w_{one.name}" in asked:
            flops += one.flops
            held.take(one.matrix_numbers * wide)
            held.pass_through(sum_scratch(one.shape, tokens=storage))
            keep(one.matrix_numbers)
        if f"grad_b_{one.name}" in asked:
            held.take(one.width_out * wide)
            held.pass_through(row_sum_scratch(one.rows, one.width_out, compute_dtype(storage)))
            keep(one.width_out)
        source = token_source(layer, one.name)
        if f"grad_{source}" in asked:
            flops += one.flops
            if source not in waiting:
                waiting[source] = one.rows * one.width_in
                held.take(waiting[source] * wide)
            held.pass_through(add_scratch((one.rows, one.width_out, one.width_in), matrix=storage))
        held.give_back(one.numbers * wide)
    for numbers in waiting.values():
        keep(numbers)
    return flops


@dataclass(slots=True)
class _Held:
    """Bytes that are held, and the most there were at once."""

    now: int
    most: int = 0

    def __post_init__(self) -> None:
        self.most = max(self.most, self.now)

    def take(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def give_back(self, num_bytes: int) -> None:
        self.now -= num_bytes

    def pass_through(self, num_bytes: int) -> None:
        """Bytes that are taken and given back at once."""
        self.most = max(self.most, self.now + num_bytes)


def _strided_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Copies of what does not lie as it is read; those of tokens and of matrices one at a time."""
    strided = {name: tensor.nbytes for name, tensor in tensors.items() if not tensor.is_contiguous()}
    of_tokens = max(strided.pop(name, 0) for name in ("input", "memory"))
    of_matrices = 0
    for name in WEIGHT_NAMES:
        copied, matrix = strided.pop(name, 0), tensors[name]
        if not (_lies_by_rows(matrix) or _lies_by_rows(matrix.t())):
            of_matrices = max(of_matrices, copied)
    return of_tokens + of_matrices + sum(strided.values())


def _lies_by_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


def _project_operands(problem: LayerProblem, dims: LayerDims, held: _Held) -> int:
    """Takes query, key and value, and gives the flops."""
    storage = problem.input.dtype
    arithmetic = compute_dtype(storage)
    for one in dims.operands:
        held.take(one.numbers * arithmetic.itemsize)
        held.pass_through(project_scratch(one.shape, tokens=storage, matrix=storage, result=arithmetic))
    return sum(one.flops for one in dims.operands)


def _beside(problem: LayerProblem, inside: Cost, counted: int) -> int:
    """What the attention inside takes besides what is held already: masks, bias and the ``counted`` bytes."""
    shared = (problem.allow_mask, problem.block_mask, problem.bias)
    masks = sum(tensor.nbytes for tensor in shared if tensor is not None)
    return inside.peak_bytes - FIXED_BYTES - masks - counted
