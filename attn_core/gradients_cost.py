"""What a backward pass costs: flops, bytes moved, peak bytes. Metadata only; an estimate too low is a bug."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from attn_core.canonical import CanonicalProblem
from attn_core.cost import FIXED_BYTES, MASK_PASSES, Cost, input_bytes, masked_pairs, numbers_of_block, search_scratch
from attn_core.cut import Cut
from attn_core.kernels import backward
from attn_core.maths import gradients as backward_maths

GRADIENT_PASSES = 16
"""About how often a backward pass goes over the pairs besides its five products."""


def gradients_cost(
    problem: CanonicalProblem,
    asked: Collection[str],
    *,
    grad_bytes: int,
    sinks_bytes: int,
    is_self_attention: bool,
    refuses_empty_rows: bool = False,
    device_type: str | None = None,
) -> Cost:
    """The cost of a backward pass; ``grad_bytes`` are those of the gradients that came in, ``sinks_bytes`` those of
    the sinks as they came, in whose dtype their gradient leaves. Both paths are one kernel.

    flops 2 B H T S (3 D + 2 V): five whole products, nothing off for masks or for what is not asked.
    """
    dims = problem.dims
    inputs = input_bytes(problem) + grad_bytes
    outputs = sum(sinks_bytes if name == "grad_sinks" else _gradient_bytes(problem, name) for name in asked)
    device_type = device_type or problem.device.type
    size = backward.cut(dims, skips_keys=problem.forbids_by_distance, device_type=device_type)
    scratch = outputs + _backward_block(problem, size, asked, is_self_attention=is_self_attention)
    if "grad_bias" in asked and backward.sums_bias_apart(problem):
        assert problem.bias is not None
        scratch += problem.bias.numel() * backward.bias_sum_dtype(problem).itemsize
    # Marks of rows, and which of them are padding.
    scratch += 3 * dims.num_rows + (0 if problem.query_lengths is None else torch.int64.itemsize * dims.seq_len_q)
    if refuses_empty_rows:
        scratch = max(scratch, search_scratch(problem))
    passes = GRADIENT_PASSES + MASK_PASSES * (not problem.forbids_nothing)
    passes += MASK_PASSES * ((problem.softcap is not None) + (problem.alibi_slopes is not None))
    passes *= 4 if problem.compute_dtype == torch.float64 else 1
    return Cost(
        flops=2 * dims.num_pairs * (3 * dims.head_dim + 2 * dims.head_dim_v),
        bytes_moved=inputs + outputs,
        peak_bytes=inputs + scratch + FIXED_BYTES,
        output_bytes=outputs,
        pair_passes=passes * dims.num_pairs,
    )


def _gradient_bytes(problem: CanonicalProblem, name: str) -> int:
    dims, wide = problem.dims, problem.compute_dtype.itemsize
    match name:
        case "grad_query":
            return problem.query.nbytes
        case "grad_key":
            return problem.key.nbytes
        case "grad_value":
            return problem.value.nbytes
        case "grad_bias":
            return 0 if problem.bias is None else problem.bias.nbytes
        case _:
            return dims.num_pairs * wide


def _backward_block(problem: CanonicalProblem, size: Cut, asked: Collection[str], *, is_self_attention: bool) -> int:
    """What the backward kernel takes for one block, and for the keys that it adds to."""
    dims, wide = problem.dims, problem.compute_dtype.itemsize
    rows = size.items * size.heads * size.rows
    seen = backward.most_seen(problem, size)
    pairs = rows * seen
    keys = size.items * -(-size.heads // dims.group_size) * dims.seq_len_kv
    widths, widest = dims.head_dim + dims.head_dim_v, max(dims.head_dim, dims.head_dim_v)
    # Of keys: what they get, summed; copies in another form; which are not finite.
    summed = {"grad_key": dims.head_dim, "grad_value": dims.head_dim_v}
    if is_self_attention:
        summed = {"grad_query": dims.head_dim}
    operands = [problem.key] if is_self_attention else [problem.key, problem.value]
    copied = sum(tensor.shape[3] for tensor in operands if backward.is_copied(tensor, problem, size))
    held = keys * ((sum(width for name, width in summed.items() if name in asked) + copied) * wide + 1)
    # Logits, which gradients take the place of, and weights; tanh.
    held += pairs * wide * (2 + (problem.softcap is not None))
    # Of rows: copies in another form, copies without what is not finite, and the query's gradient.
    forms = 1 + backward.is_copied(problem.query, problem, size)
    held += rows * (forms * widths + ("grad_query" in asked) * dims.head_dim) * wide
    if "grad_query" in asked:
        # A copy of some keys without what is not finite.
        of_a_key = dims.head_dim * wide
        held += min(keys * of_a_key, max(backward.KEY_BYTES_AT_ONCE, backward.KEY_MULTIPLE * of_a_key))
    # One after the other. Products of pairs that are summed by rows; what infinite numbers add to some sums.
    few = max(backward_maths.MARKED_AT_ONCE, backward.SUMS_AT_ONCE, widest)
    of_infinite = min(pairs, few) * (wide + 4) + min(keys * widest, few) * (wide + 3)
    of_infinite += max(backward.SUMS_AT_ONCE, widest) * (2 * wide + 5)
    steps = [max(backward_maths.PAIRS_AT_ONCE, backward_maths.LEAST_ROWS * seen) * wide]
    runs = backward.shifted_runs(size.items, size.heads, size.rows, seen)
    shifted = replace(size, rows=max((run.stop - run.start for run in runs), default=0))
    if not problem.forbids_nothing:
        # Booleans, as bits too.
        masked = masked_pairs(problem, size, seen)
        held += masked * (1 + wide)
        of_infinite += pairs
        steps.append(masked_pairs(problem, shifted, seen) * wide + 3 * seen * torch.int64.itemsize)
    if problem.alibi_slopes is not None:
        # Distances are whole numbers first, one for all heads.
        places = (size.items if problem.is_ragged else 1) * shifted.rows * seen
        steps.append(places * max(2 * torch.int64.itemsize, wide * (1 + size.heads)) + 3 * seen * torch.int64.itemsize)
    if (bias := problem.bias) is not None:
        if bias.dtype != problem.compute_dtype:
            steps.append(numbers_of_block(bias, shifted, seen) * wide)
        if "grad_bias" in asked:
            # The sums of a block, and these in the dtype of all.
            exact = backward.bias_sum_dtype(problem)
            of_number = wide + (exact != problem.compute_dtype and backward.adds_to_bias(problem)) * exact.itemsize
            steps.append(numbers_of_block(bias, size, seen) * of_number)
    return held + max(*steps, of_infinite)
