"""Problems of one shape joined along the batch: who may be, in and out.

Of use where the kernel gives every item of a batch to blocks of its own: torch's memory-efficient kernel on CUDA does,
whose grid is (blocks of rows, heads, batch) and which never splits keys, so that an item's sums have one order whatever
the batch. Products of matrices do not (cuBLAS chooses by the batch), so nothing is joined that could fall back on them.
That is a reason and no proof: it is off until a self-test on the device itself has found equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_core.batching.packing import MAX_SEQUENCES, Empty
from attn_core.canonical import CanonicalProblem
from attn_core.kernels import fused
from attn_core.kernels.output import KernelOutput
from attn_core.problem import Dims


@dataclass(frozen=True, slots=True)
class GroupKey:
    """What problems joined along the batch have in common; ``one_item`` are their axes with a batch of 1."""

    device: torch.device
    one_item: Dims
    scale: float
    causal: bool


def group_key(problem: CanonicalProblem) -> GroupKey | None:
    """With whom a problem may be joined; None: with nobody. Only metadata is looked at."""
    dims = problem.dims
    if (
        problem.query.dtype != torch.float32
        or problem.outputs != ("context",)
        or problem.softcap is not None
        or problem.alibi_slopes is not None
        or problem.sinks is not None
        or fused.needs_mask(problem)
        # With shared heads, and widths that are no multiple of 16 bytes, SDPA may fall back on products of matrices.
        or dims.group_size > 1
        or dims.head_dim % 4
        or dims.head_dim_v % 4
        or dims.batch > MAX_SEQUENCES
        or dims.num_pairs == 0
    ):
        return None
    return GroupKey(
        device=problem.device, one_item=replace(dims, batch=1), scale=problem.scale, causal=problem.is_square_causal
    )


def join(problems: Sequence[CanonicalProblem], *, empty: Empty | None = None) -> CanonicalProblem:
    """Problems of one key as one problem, their items in their order. ``empty`` makes what they are written into."""
    batch = sum(problem.dims.batch for problem in problems)
    query, key, value = (
        _joined([getattr(problem, name) for problem in problems], empty) for name in ("query", "key", "value")
    )
    return replace(problems[0], query=query, key=key, value=value, dims=replace(problems[0].dims, batch=batch))


def split(problems: Sequence[CanonicalProblem], context: Tensor) -> list[KernelOutput]:
    """The answers of joined problems, in memory of their own."""
    parts = torch.split(context, [problem.dims.batch for problem in problems])
    return [
        # No row is empty: what is joined forbids nothing, or is causal with as many queries as keys.
        KernelOutput(outputs={"context": part.clone()})
        for part in parts
    ]


def _joined(tensors: Sequence[Tensor], empty: Empty | None) -> Tensor:
    if empty is None:
        return torch.cat(list(tensors))
    batch = sum(tensor.shape[0] for tensor in tensors)
    return torch.cat(list(tensors), out=empty((batch, *tensors[0].shape[1:]), tensors[0].dtype))
