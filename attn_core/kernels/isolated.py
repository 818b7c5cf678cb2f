"""The fused kernel on the numbers that it answers right, the manual one for the rows that attend others.

Both work on a few heads at a time, so that little memory is taken however many numbers are huge or not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem
from attn_core.cut import Cut, even, even_runs
from attn_core.errors import Checkpoint, never_abandoned
from attn_core.hazards import Hazards, without_hazards
from attn_core.kernels import fused, manual
from attn_core.kernels.output import KernelOutput, new_output
from attn_core.placement import ALIGNMENT_BYTES

PART_BYTES = 2**20
"""So much of query, key and value is copied at once; one group of heads at least."""
FEW_ROWS = 32
"""On several threads the bits of so few float32 rows may tell which heads were computed beside them."""


def part_size(problem: CanonicalProblem, *, device_type: str | None = None) -> Cut:
    """How many items and heads are answered at once, all their rows."""
    dims = problem.dims
    if (device_type or problem.device.type) != "cpu" or dims.seq_len_q <= FEW_ROWS:
        # A head keeps its bits in the company that it has without any hazard. So it is on a GPU, too.
        own = fused.cut(problem, device_type=device_type)
        return Cut(own.items, own.heads, dims.seq_len_q)
    if not _heads_are_aligned(problem):
        # In a copy of its own a head would begin elsewhere, and BLAS picks its instructions by the address.
        return Cut(dims.batch, dims.num_heads, dims.seq_len_q)
    numbers = dims.group_size * dims.seq_len_q * dims.head_dim + dims.seq_len_kv * (dims.head_dim + dims.head_dim_v)
    groups = max(1, PART_BYTES // max(1, numbers * problem.query.dtype.itemsize))
    if groups >= dims.num_kv_heads:
        return Cut(even(dims.batch, groups // dims.num_kv_heads), dims.num_heads, dims.seq_len_q)
    return Cut(1, dims.group_size * even(dims.num_kv_heads, groups), dims.seq_len_q)


def _heads_are_aligned(problem: CanonicalProblem) -> bool:
    """Whether every head of query, key and value lies by itself, and begins on a multiple of 64 bytes."""
    operands = (problem.query, problem.key, problem.value)
    return all(
        t.is_contiguous() and t.shape[2] * t.shape[3] * t.dtype.itemsize % ALIGNMENT_BYTES == 0 for t in operands
    )


def attend(
    problem: CanonicalProblem,
    hazards: Hazards,
    touched: Tensor,
    checkpoint: Checkpoint = never_abandoned,
    *,
    fused_attend: Callable[..., KernelOutput] = fused.attend,
) -> KernelOutput:
    """context and, where asked, logsumexp of a problem of which the marked rows attend hazardous numbers.

    ``fused_attend`` stands for the fused kernel where another one answers in its place.
    """
    dims = problem.dims
    size = part_size(problem)
    outputs: dict[str, Tensor] = {}
    empty: Tensor | None = None
    nonfinite: Tensor | None = None
    for items, heads in size.parts(dims):
        part, own = problem.part(items, heads), touched[items, heads]
        if own.all():
            output = KernelOutput(outputs={name: new_output(part, name) for name in problem.outputs})
        else:
            output = fused_attend(without_hazards(part, hazards, checkpoint), checkpoint, like=problem)
        if own.any():
            nonfinite = torch.zeros_like(touched) if nonfinite is None else nonfinite
            nonfinite[items, heads] = _put_exact(output.outputs, part, hazards, own, checkpoint, like=problem)
        if size.leaves_whole(dims):
            return replace(output, nonfinite=nonfinite)
        for name, found in output.outputs.items():
            if name not in outputs:
                outputs[name] = new_output(problem, name)
            outputs[name][items, heads] = found
        if output.empty is not None:
            empty = torch.zeros_like(touched) if empty is None else empty
            empty[items, heads] = output.empty
    return KernelOutput(outputs=outputs, empty=empty, nonfinite=nonfinite)


def _put_exact(
    outputs: dict[str, Tensor],
    problem: CanonicalProblem,
    hazards: Hazards,
    touched: Tensor,
    checkpoint: Checkpoint,
    *,
    like: CanonicalProblem,
) -> Tensor:
    """Have the marked rows of the outputs by the manual kernel, and tell which of them are not finite.

    A row has the bits of the block that it stands in when ``like`` is computed whole, whichever rows are marked beside
    it: which these are may be told by keys that it may not attend.
    """
    dims = problem.dims
    nonfinite = torch.zeros_like(touched)
    for rows in even_runs(dims.seq_len_q, manual.cut(like.dims, dims.seq_len_q).rows):
        own = touched[:, :, rows]
        if not own.any():
            continue
        checkpoint()
        part = problem.part(slice(0, dims.batch), slice(0, dims.num_heads), rows)
        exact = manual.attend(part, hazards, checkpoint)
        assert exact.nonfinite is not None
        nonfinite[:, :, rows] = exact.nonfinite & own
        for name, found in outputs.items():
            target = found[:, :, rows]
            target.copy_(torch.where(own if name == "logsumexp" else own.unsqueeze(-1), exact.outputs[name], target))
    return nonfinite
