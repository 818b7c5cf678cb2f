"""What a problem costs on a kernel: flops, bytes moved, peak bytes. Metadata only; an estimate too low is a bug."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attn_core.canonical import CanonicalProblem
from attn_core.cut import Cut
from attn_core.hazards import COPIED_AT_ONCE, PAIRS_PER_BLOCK
from attn_core.kernels import fused, isolated, manual
from attn_core.kernels.output import named_outputs, output_dtype, output_shape
from attn_core.problem import WeightedSumProblem

MANUAL_PASSES, MASK_PASSES = 8, 4
OUTPUT_PASSES = {"top_weights": 60, "entropy": 12, "logsumexp": 2, "weight_totals": 2}
"""About how often each kind of work goes over the pairs, against one exponential of the fused kernel."""
FIXED_BYTES = 2**20
"""What any call takes besides: the scratch of the kernel's threads, small tensors, rounding of the allocator."""


@dataclass(frozen=True, slots=True)
class Cost:
    """``peak_bytes`` counts inputs, outputs and everything alive between them at once."""

    flops: int
    bytes_moved: int
    peak_bytes: int
    output_bytes: int
    pair_passes: float = 0.0
    """Passes over the query-key pairs besides the products: what narrow heads are bound by."""


def attention_flops(problem: CanonicalProblem) -> int:
    """2 B H T S (D + V): whole products, nothing off for masks."""
    dims = problem.dims
    return 2 * dims.num_pairs * (dims.head_dim + dims.head_dim_v)


def attention_cost(problem: CanonicalProblem, path: str, *, device_type: str | None = None) -> Cost:
    """The cost of a canonical problem on one of the kernels, on a device that its tensors may still travel to."""
    inputs = _input_bytes(problem)
    sizes = {name: _output_bytes(problem, name) for name in named_outputs(problem)}
    outputs = sum(sizes.values())
    if path == "fused":
        device_type = device_type or problem.device.type
        # Where huge or non-finite numbers are attended, the problem is answered in parts.
        size = fused.cut(problem, device_type=device_type)
        scratch = max(_fused_scratch(problem, size, device_type), _isolated_scratch(problem, size, device_type))
        if "logsumexp" in sizes and problem.query.dtype != problem.compute_dtype:
            scratch = max(scratch, _manual_scratch(problem))
    else:
        scratch = _manual_scratch(problem)
        if not problem.query.is_contiguous():
            # The caller's layout is made in the end.
            scratch = max(scratch, sizes.get("context", 0))
    scratch += _vector_bytes(problem)
    return Cost(
        flops=attention_flops(problem),
        bytes_moved=inputs + outputs,
        peak_bytes=inputs + outputs + scratch + FIXED_BYTES,
        output_bytes=outputs,
        pair_passes=_pair_passes(problem, path),
    )


def _pair_passes(problem: CanonicalProblem, path: str) -> float:
    """What is done for each pair besides the products, as so many exponentials of the fused kernel."""
    passes = MASK_PASSES * (not problem.forbids_nothing) + (path == "fused" or MANUAL_PASSES)
    passes += sum(count for name, count in OUTPUT_PASSES.items() if name in problem.outputs)
    passes += MASK_PASSES * ((problem.softcap is not None) + (problem.alibi_slopes is not None))
    # Exponentials in float64 have no short form.
    passes *= 4 if problem.compute_dtype == torch.float64 else 1
    return passes * problem.dims.num_pairs


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


def _output_bytes(problem: CanonicalProblem, name: str) -> int:
    return math.prod(output_shape(problem, name)) * output_dtype(problem, name).itemsize


def _fused_scratch(problem: CanonicalProblem, size: Cut, device_type: str) -> int:
    dims = problem.dims
    strided = sum(t.nbytes for t in (problem.query, problem.key, problem.value) if t.stride(-1) != 1)
    return strided + _fused_block(problem, size, device_type, is_part=not size.leaves_whole(dims))


def _fused_block(problem: CanonicalProblem, size: Cut, device_type: str, *, is_part: bool) -> int:
    """What one call takes, and the making of its mask."""
    dims, itemsize, wide = problem.dims, problem.query.dtype.itemsize, problem.compute_dtype.itemsize
    # One tile of queries against a run of keys.
    tile = min(size.rows, 256) * (min(dims.seq_len_kv, 512) * (wide + itemsize) + (2 + dims.head_dim_v) * wide)
    if itemsize < 4:
        # Where the processor multiplies half numbers by tiles, keys and values are laid out for it first.
        tile += size.items * size.heads * (dims.seq_len_kv + 64) * (dims.head_dim + dims.head_dim_v + 2) * itemsize
    rows = size.items * size.heads * size.rows
    # Its answer before it is put in its place.
    answer = rows * (dims.head_dim_v * itemsize + 2 * wide) if is_part else 0
    if not fused.needs_mask(problem):
        return tile + answer
    if fused.is_band(problem) and size.rows < dims.seq_len_q and device_type == "cpu":
        # The queries turned round, and the answer too; the distances along one row.
        turned = rows * (dims.head_dim + dims.head_dim_v) * itemsize + rows * wide
        return tile + answer + turned + (size.rows + dims.seq_len_kv) * (3 * torch.int64.itemsize + itemsize)
    by_item, by_head = fused.masks_apart(problem)
    pairs = (
        (size.items if by_item else 1)
        * (size.heads if by_head else 1)
        * (size.rows if _masks_by_row(problem) else 1)
        * dims.seq_len_kv
    )
    # Two masks of booleans being combined, the mask as numbers, and SDPA's own float copy of it.
    return tile + answer + pairs * (2 + itemsize + 4)


def _masks_by_row(problem: CanonicalProblem) -> bool:
    """Whether the mask differs between queries."""
    masks = (m for m in (problem.allow_mask, problem.block_mask, problem.bias) if m is not None)
    return (
        problem.causal
        or problem.window_left is not None
        or problem.window_right is not None
        or problem.query_lengths is not None
        or any(mask.shape[2] > 1 for mask in masks)
    )


def _isolated_scratch(problem: CanonicalProblem, own: Cut, device_type: str) -> int:
    """What is taken where numbers are huge or not finite: marks, copies without them, the manual kernel beside."""
    dims, itemsize, wide = problem.dims, problem.query.dtype.itemsize, problem.compute_dtype.itemsize
    size = isolated.part_size(problem, device_type=device_type)
    kv_heads = -(-size.heads // dims.group_size)
    keys = size.items * kv_heads * dims.seq_len_kv * (dims.head_dim + dims.head_dim_v)
    copies = (size.items * size.heads * dims.seq_len_q * dims.head_dim + keys) * itemsize
    # Of a piece: |number|, whether it is sound, and what stands for it.
    at_once = min(COPIED_AT_ONCE, max(t.numel() for t in (problem.query, problem.key, problem.value)))
    piece = at_once * (2 * itemsize + 4)
    marked = max(PAIRS_PER_BLOCK, dims.batch * dims.num_heads * dims.seq_len_kv)
    marks = min(dims.num_pairs, marked) * 5
    if (bias := problem.bias) is not None:
        one_part = min(size.items, bias.shape[0]) * min(size.heads, bias.shape[1]) * bias.shape[2] * bias.shape[3]
        copies += one_part * bias.dtype.itemsize
        marks += min(bias.numel(), marked) * (bias.dtype.itemsize + wide + 4)
        piece += min(COPIED_AT_ONCE, bias.numel()) * (2 * wide + 4)
    call = Cut(min(own.items, size.items), min(own.heads, size.heads), own.rows)
    by_fused = copies + max(piece, _fused_block(problem, call, device_type, is_part=True))
    rows = manual.cut(dims, dims.seq_len_q).rows
    by_manual = _manual_block(problem, manual.cut_again(dims, Cut(size.items, size.heads, rows)))
    # The rows of the block as they were, as they are, and both chosen from.
    by_manual += size.items * size.heads * rows * 2 * (dims.head_dim_v * itemsize + 2 * wide)
    answer = 0
    if not size.leaves_whole(dims):
        answer = size.items * size.heads * dims.seq_len_q * (dims.head_dim_v * itemsize + 2 * wide + 2)
    return max(marks, piece, answer + max(by_fused, by_manual))


def _manual_scratch(problem: CanonicalProblem) -> int:
    only = manual.computed_rows(problem)
    return _manual_block(problem, manual.cut(problem.dims, problem.dims.seq_len_q if only is None else len(only)))


def _manual_block(problem: CanonicalProblem, size: Cut) -> int:
    """What the manual kernel takes for one block."""
    dims = problem.dims
    itemsize, wide = problem.query.dtype.itemsize, problem.compute_dtype.itemsize
    items, heads, rows = size.items, size.heads, size.rows
    pairs = items * heads * rows * dims.seq_len_kv
    half = problem.query.dtype != problem.compute_dtype
    keys = items * -(-heads // dims.group_size) * dims.seq_len_kv
    # Of a value that is not finite: its finite part, and whether and how each number is none.
    scratch = keys * dims.head_dim_v * (2 * wide + 3)
    if half or not problem.key.is_contiguous() or not problem.value.is_contiguous():
        scratch += keys * (dims.head_dim + dims.head_dim_v) * wide
    scratch += items * heads * rows * (2 * dims.head_dim + 2 * dims.head_dim_v) * wide
    # Scores, logits before and after the mask, weights; two masks of booleans.
    per_pair = 4 * wide + (0 if problem.forbids_nothing else 2)
    if problem.softcap is not None:
        per_pair += wide
    if problem.alibi_slopes is not None:
        per_pair += wide
        # Distances are whole numbers first, one for all heads.
        places = items if problem.is_ragged else 1
        scratch += places * rows * dims.seq_len_kv * (2 * torch.int64.itemsize + wide)
    if "top_weights" in problem.outputs:
        # The ranked copy; of the rows ranked at once their sorted values and indices.
        per_pair += itemsize
        scratch += min(pairs, max(manual.SORTED_PAIRS, dims.seq_len_kv)) * (itemsize + torch.int64.itemsize)
        scratch += items * heads * rows * min(problem.top_k or 0, dims.seq_len_kv) * (itemsize + 9)
    if half:
        per_pair += itemsize
    return scratch + pairs * per_pair
