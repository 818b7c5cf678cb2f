"""Numbers that a fused kernel would answer wrongly, and how to keep them from it.

SDPA multiplies forbidden values by a weight of 0, so one NaN behind a mask poisons every row; with fewer than 16
keys it answers a NaN row with zeros; and where every score overflows to -inf it takes the row for a masked one.
So numbers that are not finite, or large enough to overflow, never reach it: they are zeroed in a copy, and the rows
that attend one of them are computed by the manual kernel from the originals. A row that attends none of them gets
the same bits as if they were any other number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem
from attn_core.numerics import largest, safe_operand, safe_value

_PAIRS_PER_BLOCK = 2**22


@dataclass(frozen=True, slots=True)
class Hazards:
    """Which tensors hold numbers that could make a row non-finite."""

    query: bool = False
    key: bool = False
    value: bool = False
    bias: bool = False
    alibi: bool = False

    @property
    def any(self) -> bool:
        return self.query or self.key or self.value or self.bias or self.alibi


def find_hazards(problem: CanonicalProblem) -> Hazards:
    """Look at every number once. Nothing found means that every row has a finite softmax and context.

    On a GPU this waits for the stream.
    """
    dims = problem.dims
    operand = safe_operand(problem.query.dtype, head_dim=dims.head_dim, scale=problem.scale)
    bound = safe_value(problem.query.dtype, seq_len_kv=dims.seq_len_kv)
    alibi = False
    if problem.alibi_slopes is not None:
        offset = problem.query_offset
        shift = largest(offset) if isinstance(offset, Tensor) else abs(offset)
        farthest = shift + dims.seq_len_q + dims.seq_len_kv
        alibi = not largest(problem.alibi_slopes) * farthest <= 1e30
    return Hazards(
        # Written so that NaN, which compares as False, counts as a hazard.
        query=not largest(problem.query) <= operand,
        key=not largest(problem.key) <= operand,
        value=not largest(problem.value) <= bound,
        bias=problem.bias is not None and _is_hazardous(problem.bias, problem.compute_dtype),
        alibi=alibi,
    )


def _is_hazardous(bias: Tensor, arithmetic: torch.dtype) -> bool:
    """Whether a bias holds NaN, +inf or a number beyond the arithmetic; -inf is a mask."""
    if bias.dtype == torch.float64 != arithmetic:
        return bool(_unsound(bias, arithmetic).any())
    # Nothing is rounded away, so the largest tells both.
    return bias.numel() > 0 and not bias.max().item() < math.inf


def _unsound(bias: Tensor, arithmetic: torch.dtype) -> Tensor:
    """Where a bias is not a number that the arithmetic can hold; a finite one that becomes -inf there is no mask."""
    return ~(torch.isfinite(bias.to(arithmetic)) | torch.isneginf(bias))


def isolate(problem: CanonicalProblem, hazards: Hazards) -> tuple[CanonicalProblem, Tensor]:
    """The problem with hazardous numbers zeroed, and which rows attend one: ``[batch, num_heads, seq_len_q]``."""
    dims = problem.dims
    operand = safe_operand(problem.query.dtype, head_dim=dims.head_dim, scale=problem.scale)
    bound = safe_value(problem.query.dtype, seq_len_kv=dims.seq_len_kv)
    clean = problem
    bad_row = torch.zeros((1, 1, dims.seq_len_q), dtype=torch.bool, device=problem.device)
    bad_key = torch.zeros((1, 1, dims.seq_len_kv), dtype=torch.bool, device=problem.device)
    if hazards.query:
        good = problem.query.abs() <= operand
        clean = replace(clean, query=torch.where(good, problem.query, 0.0))
        bad_row = ~good.all(dim=-1)
    if hazards.key:
        key, bad_key = _zero_beyond(problem.key, operand)
        clean = replace(clean, key=key)
    if hazards.value:
        value, bad_value = _zero_beyond(problem.value, bound)
        clean = replace(clean, value=value)
        bad_key = bad_key | bad_value
    # A key of a shared head is attended by every query head of its group.
    bad_key = bad_key.repeat_interleave(dims.num_heads // bad_key.shape[1], dim=1).unsqueeze(-2)
    bad_pair: Tensor | None = None
    if hazards.bias:
        assert problem.bias is not None
        bad_pair = _unsound(problem.bias, problem.compute_dtype)
        clean = replace(clean, bias=torch.where(bad_pair, 0.0, problem.bias))
    touched = []
    for rows in problem.row_blocks(_PAIRS_PER_BLOCK):
        hit = bad_key
        if bad_pair is not None:
            hit = hit | (bad_pair if bad_pair.shape[-2] == 1 else bad_pair[..., rows, :])
        allowed = problem.allowed(rows)
        if allowed is not None:
            hit = hit & allowed
        hit_row = hit.any(dim=-1)
        own = bad_row[..., rows]
        if allowed is not None:
            # An empty row attends nothing, itself included: its answer is defined.
            own = own & allowed.any(dim=-1)
        touched.append((hit_row | own).expand(dims.batch, dims.num_heads, rows.numel()))
    return clean, torch.cat(touched, dim=-1)


def _zero_beyond(tensor: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """The tensor with every |number| over ``limit``, and every NaN, as 0, and the tokens that had one."""
    good = tensor.abs() <= limit
    return torch.where(good, tensor, 0.0), ~good.all(dim=-1)
