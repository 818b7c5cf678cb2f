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
from attn_core.cut import pieces
from attn_core.errors import Checkpoint, never_abandoned
from attn_core.numerics import is_within, largest, safe_operand, safe_value
from attn_core.placement import empty_in_step

PAIRS_PER_BLOCK = 2**18
READ_AT_ONCE = 2**24
COPIED_AT_ONCE = 2**17
MARKED_AT_ONCE = 2**16
"""And so many numbers of a bias: about sixteen bytes of marks and copies for each."""


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


def find_hazards(problem: CanonicalProblem, checkpoint: Checkpoint = never_abandoned) -> Hazards:
    """Look at every number once. Nothing found means that every row has a finite softmax and context.

    On a GPU this waits for the stream.
    """
    dims = problem.dims
    operand, bound = _limits(problem)
    alibi = False
    if problem.alibi_slopes is not None:
        offset = problem.query_offset
        shift = largest(offset) if isinstance(offset, Tensor) else abs(offset)
        farthest = shift + dims.seq_len_q + dims.seq_len_kv
        alibi = not largest(problem.alibi_slopes) * farthest <= 1e30

    def exceeds(tensor: Tensor, limit: float) -> bool:
        tensor = _as_it_lies(tensor)
        # torch copies what is not contiguous.
        at_once = READ_AT_ONCE if tensor.is_contiguous() else COPIED_AT_ONCE
        for piece in pieces(tensor.shape, at_once) if tensor.numel() > at_once else (...,):
            checkpoint()
            # Written so that NaN, which compares as False, counts as a hazard.
            if not is_within(tensor[piece], limit) and not largest(tensor[piece]) <= limit:
                return True
        return False

    return Hazards(
        query=exceeds(problem.query, operand),
        key=exceeds(problem.key, operand),
        value=exceeds(problem.value, bound),
        bias=problem.bias is not None and _is_hazardous(problem.bias, problem.compute_dtype, checkpoint),
        alibi=alibi,
    )


def _as_it_lies(tensor: Tensor) -> Tensor:
    """``[batch, heads, tokens, width]`` with tokens before heads where that is the order in memory."""
    by_token = tensor.transpose(1, 2)
    return by_token if by_token.is_contiguous() else tensor


def _limits(problem: CanonicalProblem) -> tuple[float, float]:
    """The largest |number| that is no hazard, in query and key and in value."""
    dims, dtype = problem.dims, problem.query.dtype
    return (
        safe_operand(dtype, head_dim=dims.head_dim, scale=problem.scale),
        safe_value(dtype, seq_len_kv=dims.seq_len_kv),
    )


def _is_hazardous(bias: Tensor, arithmetic: torch.dtype, checkpoint: Checkpoint) -> bool:
    """Whether a bias holds NaN, +inf or a number beyond the arithmetic; -inf is a mask."""
    is_wider = bias.dtype == torch.float64 != arithmetic
    # torch copies what is not contiguous, and a wider bias may have to be marked.
    at_once = READ_AT_ONCE if bias.is_contiguous() and not is_wider else MARKED_AT_ONCE
    for piece in pieces(bias.shape, at_once) if bias.numel() else ():
        checkpoint()
        part = bias[piece]
        if is_wider:
            if not largest(part) <= torch.finfo(arithmetic).max and bool(_unsound(part, arithmetic).any()):
                return True
        elif not part.max().item() < math.inf:
            # Nothing is rounded away, so the largest tells both.
            return True
    return False


def _unsound(bias: Tensor, arithmetic: torch.dtype) -> Tensor:
    """Where a bias is not a number that the arithmetic can hold; a finite one that becomes -inf there is no mask."""
    return ~(torch.isfinite(bias.to(arithmetic)) | torch.isneginf(bias))


def touched_rows(problem: CanonicalProblem, hazards: Hazards, checkpoint: Checkpoint = never_abandoned) -> Tensor:
    """Which rows attend a hazardous number, of their own or of a key's: bool ``[batch, num_heads, seq_len_q]``."""
    dims = problem.dims
    operand, bound = _limits(problem)
    bad_row = torch.zeros((1, 1, dims.seq_len_q), dtype=torch.bool, device=problem.device)
    bad_key = torch.zeros((1, 1, dims.seq_len_kv), dtype=torch.bool, device=problem.device)
    if hazards.query:
        bad_row = _tokens_beyond(problem.query, operand, checkpoint)
    if hazards.key:
        bad_key = _tokens_beyond(problem.key, operand, checkpoint)
    if hazards.value:
        bad_key = bad_key | _tokens_beyond(problem.value, bound, checkpoint)
    # A key of a shared head is attended by every query head of its group.
    bad_key = bad_key.repeat_interleave(dims.num_heads // bad_key.shape[1], dim=1).unsqueeze(-2)
    touched = torch.empty(dims.batch, dims.num_heads, dims.seq_len_q, dtype=torch.bool, device=problem.device)
    if problem.forbids_nothing:
        return touched.copy_(bad_row | bad_key.any(dim=-1))
    for rows in problem.row_blocks(PAIRS_PER_BLOCK):
        checkpoint()
        hit = bad_key
        if hazards.bias:
            assert problem.bias is not None
            bias = problem.bias if problem.bias.shape[-2] == 1 else problem.bias[..., rows, :]
            hit = hit | _unsound(bias, problem.compute_dtype)
        allowed = problem.allowed(rows)
        if allowed is not None:
            hit = hit & allowed
        hit_row = hit.any(dim=-1)
        own = bad_row[..., rows]
        if allowed is not None:
            # An empty row attends nothing, itself included: its answer is defined.
            own = own & allowed.any(dim=-1)
        touched[:, :, rows] = hit_row | own
    return touched


def without_hazards(
    problem: CanonicalProblem, hazards: Hazards, checkpoint: Checkpoint = never_abandoned
) -> CanonicalProblem:
    """The problem with every hazardous number as 0, in copies."""
    operand, bound = _limits(problem)
    clean = problem
    if hazards.query:
        clean = replace(clean, query=_zero_beyond(problem.query, operand, checkpoint))
    if hazards.key:
        clean = replace(clean, key=_zero_beyond(problem.key, operand, checkpoint))
    if hazards.value:
        clean = replace(clean, value=_zero_beyond(problem.value, bound, checkpoint))
    if hazards.bias:
        assert problem.bias is not None
        bias = torch.empty_like(problem.bias)
        for piece in pieces(bias.shape, MARKED_AT_ONCE):
            checkpoint()
            own = problem.bias[piece]
            bias[piece] = torch.where(_unsound(own, problem.compute_dtype), 0.0, own)
        clean = replace(clean, bias=bias)
    return clean


def _zero_beyond(tensor: Tensor, limit: float, checkpoint: Checkpoint) -> Tensor:
    """The tensor with every |number| over ``limit``, and every NaN, as 0."""
    clean = empty_in_step(tensor)
    for piece in pieces(tensor.shape, COPIED_AT_ONCE):
        checkpoint()
        own = tensor[piece]
        clean[piece] = torch.where(own.abs() <= limit, own, 0.0)
    return clean


def _tokens_beyond(tensor: Tensor, limit: float, checkpoint: Checkpoint) -> Tensor:
    """The tokens that have a |number| over ``limit``, or NaN: bool ``[batch, heads, tokens]``."""
    beyond = torch.empty(tensor.shape[:-1], dtype=torch.bool, device=tensor.device)
    for piece in pieces(tensor.shape[:-1], max(1, COPIED_AT_ONCE // tensor.shape[-1])):
        checkpoint()
        beyond[piece] = ~(tensor[piece].abs() <= limit).all(dim=-1)
    return beyond
