"""What a verification takes, from shapes alone. Measured on one core of a Xeon with AVX-512, torch 2.13."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attn_core.problem import (
    RULE_NAMES,
    AttentionOptions,
    AttentionProblem,
    Dims,
    GradientsProblem,
    LayerGradientsProblem,
    LayerProblem,
)
from attn_core.verification.comparison import COMPARED_AT_ONCE
from attn_core.verification.forward import computed_rows, forward_sizes
from attn_core.verification.layers import COLUMNS, INNER, ROWS
from attn_core.verification.pairs import Pairs, Sizes, sizes_of

VerifiedProblem = AttentionProblem | GradientsProblem | LayerProblem | LayerGradientsProblem

FORWARD_PASSES, BACKWARD_PASSES = 22.0, 45.0
"""Of a block's pairs, against one exponential of the fused kernel in float32."""
RULE_PASSES = {"mask": 20.0, "softcap": 32.0, "alibi": 20.0}
OUTPUT_PASSES = {"weights": 20.0, "scores": 20.0, "logits": 20.0, "entropy": 10.0, "top_weights": 25.0}
PASSES_PER_FLOP = 0.06
"""Products in float64: 2 flops of one pass's time in fifteen."""
PASSES_PER_NUMBER = 5.0
"""A number brought to float64 or compared."""
COMPARED_BYTES = 5 * 8
"""Of one number that is compared."""
PAIR_BYTES = 52
"""Of one pair of a block: scores, logits, weights and what is made on the way to them, in float64; marks."""
RANK_BYTES = 64
"""Of one of the largest weights of a row: the largest so far and now, and of the key that is named its weight, its
place in order and marks."""
PASSES_PER_BLOCK = 6e5
"""Calls of a few dozen operators."""


@dataclass(frozen=True, slots=True)
class VerificationCost:
    """``pair_passes`` as in ``cost.Cost``, products counted in; ``scratch_bytes`` beside inputs and outputs."""

    pair_passes: float
    scratch_bytes: int


def verification_cost(problem: VerifiedProblem) -> VerificationCost:
    """Of a checked problem, whose tensors may be without numbers."""
    match problem:
        case AttentionProblem():
            return _forward(Pairs.of(problem, problem.query.device), problem.options.outputs, problem.options)
        case GradientsProblem():
            pairs = Pairs.of(problem.attention, problem.attention.query.device)
            return _backward(pairs, problem.asked)
        case LayerProblem():
            return _layer(problem, problem.options.outputs, ())
        case LayerGradientsProblem():
            return _layer(problem.layer, (), problem.asked)


def _forward(pairs: Pairs, names: tuple[str, ...], options: AttentionOptions) -> VerificationCost:
    num_rows, size, dims = len(computed_rows(pairs, names, options)), forward_sizes(pairs, names, options), pairs.dims
    again = 2 if size.keys < dims.seq_len_kv else 1
    passes = FORWARD_PASSES + _rule_passes(pairs) + sum(OUTPUT_PASSES.get(name, 0.0) for name in names)
    flops = 2 * (again * dims.head_dim + dims.head_dim_v)
    heads = size.items * size.kv_heads * dims.group_size
    totals = heads * dims.seq_len_kv if "weight_totals" in names else 0
    ranks = heads * size.rows * min(options.top_k or 0, dims.seq_len_kv) if "top_weights" in names else 0
    return VerificationCost(
        pair_passes=_passes(dims, size, num_rows, again * passes + PASSES_PER_FLOP * flops),
        scratch_bytes=_block_bytes(pairs, size) + 8 * 4 * totals + RANK_BYTES * ranks,
    )


def _backward(pairs: Pairs, names: tuple[str, ...]) -> VerificationCost:
    dims, size = pairs.dims, sizes_of(pairs.dims, pairs.dims.seq_len_q)
    again = 3 if size.keys < dims.seq_len_kv else 1
    passes = BACKWARD_PASSES + again * _rule_passes(pairs) + (again > 1) * FORWARD_PASSES
    flops = 2 * ((again + 2) * dims.head_dim + 3 * dims.head_dim_v)
    bias = pairs.bias.numel() if pairs.bias is not None and "grad_bias" in names else 0
    sums = _passes(dims, size, dims.seq_len_q, passes + PASSES_PER_FLOP * flops)
    keys = dims.batch * dims.num_kv_heads * dims.seq_len_kv
    compared = (dims.num_rows * dims.head_dim, keys * dims.head_dim, keys * dims.head_dim_v, bias)
    return VerificationCost(
        pair_passes=sums + PASSES_PER_NUMBER * (dims.num_pairs * (bias > 0) + _numbers(dims)),
        scratch_bytes=_sum_bytes(dims, size) + 8 * bias + max(_block_bytes(pairs, size), _compared_bytes(*compared)),
    )


def _layer(problem: LayerProblem, outputs: tuple[str, ...], gradients: tuple[str, ...]) -> VerificationCost:
    """The projections in float64 are there as a whole, those of their gradients too."""
    pairs, widths, tokens = _inside(problem)
    dims, options = pairs.dims, problem.options.attention
    inside = tuple(name for name in outputs if name not in ("output", "query", "key", "value"))
    needs_context = "output" in outputs or "grad_w_output" in gradients
    found = []
    if inside or needs_context:
        found.append(_forward(pairs, (*inside, "context") if needs_context else inside, options))
    if gradients:
        found.append(_backward(pairs, gradients))
    projections = sum(tokens[name] * widths[name][0] * widths[name][1] for name in widths)
    projected = sum(tokens[name] * widths[name][1] for name in ("query", "key", "value"))
    context = tokens["query"] * dims.num_heads * dims.head_dim_v
    whole = projected + context + tokens["output"] * widths["output"][1]
    of_gradients = [_gradient_numbers(problem, name) for name in gradients]
    if gradients:
        # A gradient of each, of the context, and of what is asked.
        whole += projected + context + sum(of_gradients)
    longest = max(*tokens.values(), *(axis for pair in widths.values() for axis in pair))
    rows, inner, columns = (min(axis, longest) for axis in (ROWS, INNER, COLUMNS))
    steps = 8 * (rows * inner + inner * columns + 2 * rows * columns)
    steps += _compared_bytes(context, *(tokens[name] * widths[name][1] for name in widths), *of_gradients)
    return VerificationCost(
        pair_passes=sum(one.pair_passes for one in found)
        + PASSES_PER_FLOP * 2 * projections * (3 if gradients else 1)
        + PASSES_PER_NUMBER * whole
        + PASSES_PER_BLOCK,
        scratch_bytes=8 * whole + steps + max((one.scratch_bytes for one in found), default=0),
    )


def _inside(problem: LayerProblem) -> tuple[Pairs, dict[str, tuple[int, int]], dict[str, int]]:
    """The attention inside, without numbers; of each projection its width in and out, and its tokens."""
    source = problem.input if problem.memory is None else problem.memory
    batch, seq_len_q = (1, *problem.input.shape[:-1])[-2:]
    seq_len_kv = source.shape[-2]
    weights = {
        "query": problem.w_query,
        "key": problem.w_key,
        "value": problem.w_value,
        "output": problem.w_output,
    }
    turned = problem.options.weight_layout == "out_in"
    widths = {name: (w.shape[1], w.shape[0]) if turned else (w.shape[0], w.shape[1]) for name, w in weights.items()}
    tokens = {"query": batch * seq_len_q, "key": batch * seq_len_kv, "value": batch * seq_len_kv}
    tokens["output"] = tokens["query"]
    shapes = {
        name: (batch, seq_len_q if name == "query" else seq_len_kv, widths[name][1])
        for name in ("query", "key", "value")
    }
    operands = {name: torch.empty(shape, dtype=torch.float64, device="meta") for name, shape in shapes.items()}
    rules = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in problem.tensors().items()
        if name in RULE_NAMES
    }
    options = problem.options.attention
    kv_heads = options.num_heads if options.num_kv_heads is None else options.num_kv_heads
    inside = AttentionProblem(**operands, **rules, options=replace(options, layout="btd", num_kv_heads=kv_heads))
    return Pairs.of(inside, torch.device("meta")), widths, tokens


def _gradient_numbers(problem: LayerProblem, name: str) -> int:
    tensor: torch.Tensor | None = getattr(problem, name.removeprefix("grad_"))
    return 0 if tensor is None else tensor.numel()


def _compared_bytes(*numbers: int) -> int:
    """What comparing takes of tensors of so many numbers, one after the other."""
    return COMPARED_BYTES * min(COMPARED_AT_ONCE, max(numbers))


def _rule_passes(pairs: Pairs) -> float:
    masks = (pairs.allow_mask, pairs.block_mask, pairs.bias, pairs.key_lengths, pairs.query_lengths)
    has_window = pairs.window_left is not None or pairs.window_right is not None
    num_masks = sum(mask is not None for mask in masks) + pairs.causal + has_window
    passes = RULE_PASSES["mask"] * min(num_masks, 1) + RULE_PASSES["mask"] / 2 * max(0, num_masks - 1)
    passes += RULE_PASSES["softcap"] * (pairs.softcap is not None)
    return passes + RULE_PASSES["alibi"] * (pairs.slopes is not None)


def _passes(dims: Dims, size: Sizes, num_rows: int, per_pair: float) -> float:
    row_blocks = -(-num_rows // size.rows)
    parts = -(-dims.batch // size.items) * -(-dims.num_kv_heads // size.kv_heads)
    blocks = parts * row_blocks * -(-dims.seq_len_kv // size.keys)
    pairs = dims.batch * dims.num_heads * num_rows * dims.seq_len_kv
    keys = dims.batch * dims.num_kv_heads * dims.seq_len_kv * (dims.head_dim + dims.head_dim_v)
    rows = dims.batch * dims.num_heads * num_rows * (dims.head_dim + dims.head_dim_v)
    return per_pair * pairs + PASSES_PER_NUMBER * (keys * row_blocks + rows) + PASSES_PER_BLOCK * (1 + blocks)


def _numbers(dims: Dims) -> int:
    """Of query, key and value."""
    keys = dims.batch * dims.num_kv_heads * dims.seq_len_kv * (dims.head_dim + dims.head_dim_v)
    return keys + dims.num_rows * dims.head_dim


def _block_bytes(pairs: Pairs, size: Sizes) -> int:
    """What one block takes: matrices of its pairs, its queries, its keys or its values."""
    dims = pairs.dims
    heads = size.items * size.kv_heads
    block = heads * dims.group_size * size.rows * size.keys
    per_pair = PAIR_BYTES + 8 * (pairs.bias is not None) + 8 * (pairs.slopes is not None)
    # Below each other, too; of the context what is found and its sum, what was got, their difference, and the size of
    # each number.
    queries = heads * dims.group_size * size.rows * (2 * dims.head_dim + 6 * dims.head_dim_v)
    # Values that are not finite are there a second time without these.
    keys = heads * size.keys * max(dims.head_dim, 2.4 * dims.head_dim_v)
    return int(block * per_pair + 8 * (queries + keys))


def _sum_bytes(dims: Dims, size: Sizes) -> int:
    """Of a part the sums of its gradients, and of one block what is added to them."""
    heads = size.items * size.kv_heads
    width = dims.head_dim + dims.head_dim_v
    queries, keys = heads * dims.group_size * dims.seq_len_q * dims.head_dim, heads * dims.seq_len_kv * width
    return 8 * (queries + keys + 2 * heads * (size.keys + dims.group_size * size.rows) * width)
