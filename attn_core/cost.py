"""What a problem costs on a kernel: flops, bytes moved, peak bytes. Metadata only; an estimate too low is a bug."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attn_core.canonical import CanonicalProblem
from attn_core.kernels import fused, manual
from attn_core.kernels.output import named_outputs, output_dtype, output_shape
from attn_core.problem import WeightedSumProblem

FIXED_BYTES = 2**20
"""What any call takes besides: the scratch of the kernel's threads, small tensors, rounding of the allocator."""


@dataclass(frozen=True, slots=True)
class Cost:
    """``peak_bytes`` counts inputs, outputs and everything alive between them at once."""

    flops: int
    bytes_moved: int
    peak_bytes: int
    output_bytes: int


def attention_flops(problem: CanonicalProblem) -> int:
    """2 B H T S (D + V): whole products, nothing off for masks."""
    dims = problem.dims
    return 2 * dims.num_pairs * (dims.head_dim + dims.head_dim_v)


def attention_cost(problem: CanonicalProblem, path: str) -> Cost:
    """The cost of a canonical problem on one of the kernels."""
    inputs = _input_bytes(problem)
    outputs = sum(
        math.prod(output_shape(problem, name)) * output_dtype(problem, name).itemsize for name in named_outputs(problem)
    )
    if path == "fused":
        # Where huge or non-finite numbers are attended, copies without them are made, and the manual kernel runs too.
        own = _operand_bytes(problem)
        scratch = own + max(_fused_scratch(problem), _manual_scratch(problem) + 2 * outputs)
    else:
        scratch = _manual_scratch(problem)
    scratch += _vector_bytes(problem)
    return Cost(
        flops=attention_flops(problem),
        bytes_moved=inputs + outputs,
        peak_bytes=inputs + outputs + scratch + FIXED_BYTES,
        output_bytes=outputs,
    )


def weighted_sum_cost(problem: WeightedSumProblem) -> Cost:
    weights, value = problem.weights, problem.value
    numbers = math.prod(weights.shape[:-1]) * value.shape[-1]
    inputs = weights.nbytes + value.nbytes
    output_bytes = numbers * weights.dtype.itemsize
    # The check for finite numbers makes |context| and three marks of each.
    scratch = numbers * (weights.dtype.itemsize + 3)
    if weights.dtype in (torch.float16, torch.bfloat16):
        scratch += 4 * (weights.numel() + value.numel() + numbers)
    elif not (weights.is_contiguous() and value.is_contiguous()):
        scratch += inputs
    return Cost(
        flops=2 * weights.numel() * value.shape[-1],
        bytes_moved=inputs + output_bytes,
        peak_bytes=inputs + output_bytes + scratch + FIXED_BYTES,
        output_bytes=output_bytes,
    )


def _input_bytes(problem: CanonicalProblem) -> int:
    masks = (m for m in (problem.allow_mask, problem.block_mask, problem.bias) if m is not None)
    return _operand_bytes(problem) + sum(mask.nbytes for mask in masks)


def _operand_bytes(problem: CanonicalProblem) -> int:
    operands = [problem.query] if problem.key is problem.query else [problem.query, problem.key, problem.value]
    return sum(tensor.nbytes for tensor in operands)


def _vector_bytes(problem: CanonicalProblem) -> int:
    """Places of queries and keys, a few versions of each at once, and marks and sums of each row."""
    dims = problem.dims
    items = dims.batch if problem.is_ragged else 1
    places = torch.int64.itemsize * (4 * items * dims.seq_len_q + 2 * dims.seq_len_kv)
    return places + dims.num_rows * (problem.compute_dtype.itemsize + 6)


def _fused_scratch(problem: CanonicalProblem) -> int:
    dims = problem.dims
    itemsize = problem.query.dtype.itemsize
    strided = sum(t.nbytes for t in (problem.query, problem.key, problem.value) if t.stride(-1) != 1)
    if not fused.needs_mask(problem):
        return strided
    rows = fused.mask_block_rows(problem)
    masks = [m for m in (problem.allow_mask, problem.block_mask, problem.bias) if m is not None]
    heads = dims.num_heads if any(m.shape[1] > 1 for m in masks) else 1
    by_row = (
        problem.causal
        or problem.window_left is not None
        or problem.window_right is not None
        or problem.query_lengths is not None
        or any(m.shape[2] > 1 for m in masks)
    )
    pairs = dims.batch * heads * (rows if by_row else 1) * dims.seq_len_kv
    # Two masks of booleans being combined, the mask as numbers, and SDPA's own float copy of it.
    per_pair = 2 + itemsize + 4
    blocks = math.ceil(dims.seq_len_q / max(1, rows))
    rejoined = dims.num_rows * dims.head_dim_v * itemsize if blocks > 1 else 0
    return strided + pairs * per_pair + rejoined


def _manual_scratch(problem: CanonicalProblem) -> int:
    dims, wide = problem.dims, problem.compute_dtype.itemsize
    only = manual.computed_rows(problem)
    num_rows = dims.seq_len_q if only is None else len(only)
    rows = manual.block_rows(dims, num_rows)
    pairs = dims.batch * dims.num_heads * rows * dims.seq_len_kv
    half = problem.query.dtype != problem.compute_dtype
    scratch = 0
    if half or not problem.key.is_contiguous() or not problem.value.is_contiguous():
        scratch += dims.batch * dims.num_kv_heads * dims.seq_len_kv * (dims.head_dim + dims.head_dim_v) * wide
    scratch += dims.batch * dims.num_heads * rows * (2 * dims.head_dim + 2 * dims.head_dim_v) * wide
    # Scores, logits before and after the mask, weights; two masks of booleans.
    per_pair = 4 * wide + (0 if problem.forbids_nothing else 2)
    if problem.softcap is not None:
        per_pair += wide
    if problem.alibi_slopes is not None:
        per_pair += wide
        # Distances are whole numbers first, one for all heads.
        items = dims.batch if problem.is_ragged else 1
        scratch += items * rows * dims.seq_len_kv * (2 * torch.int64.itemsize + wide)
    if "top_weights" in problem.outputs:
        # The ranked copy, its sorted values, and their indices.
        per_pair += 2 * wide + 8
    if half:
        per_pair += problem.query.dtype.itemsize
    scratch += pairs * per_pair
    if rows < num_rows:
        # Blocks are joined at the end: for a moment the largest output stands twice.
        sizes = [
            math.prod(output_shape(problem, name)) * output_dtype(problem, name).itemsize
            for name in named_outputs(problem)
        ]
        scratch += max(sizes)
    return scratch
