"""The backward pass of attention, each step a pure function of tensors.

Written out by hand from ``context = weights @ value`` back to query and key, in the order in which the chain rule meets
them. ``out`` is memory for the result; with ``adds`` the result is added to what is there. Tensors of pairs are
``[batch, num_heads, rows, keys]``, of queries ``[batch, num_heads, rows, width]``, of keys
``[batch, num_kv_heads, keys, width]``, in one dtype: float32 or float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attn_core.cut import even_runs
from attn_core.numerics import largest

PAIRS_AT_ONCE = 2**16
"""The products of so many pairs are held at once."""
LEAST_ROWS = 3
"""Runs of at most so many rows have two at least."""
MARKED_AT_ONCE = 2**15
"""Of so many pairs, and of so many numbers, is told together which products are not finite."""


def scaled_scores(query: Tensor, key: Tensor, scale: float, *, out: Tensor | None = None) -> Tensor:
    """scale * query @ key^T, with which a block of weights is computed anew; a scale of 0 leaves NaN in place."""
    # Not by BLAS, which multiplies a factor first: a huge one would overflow where the product does not.
    return _with_shared(query, key.transpose(-1, -2), out=out).mul_(scale)


def softmax_with_sinks(logits: Tensor, sinks: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The weights of the keys and those of the sinks, ``[batch, num_heads, rows, 1]``; sinks ``[num_heads]``."""
    sink = sinks.view(1, -1, 1, 1)
    top = torch.maximum(logits.amax(dim=-1, keepdim=True), sink)
    weights = torch.sub(logits, top, out=out).exp_()
    of_sink = torch.exp(sink - top)
    total = weights.sum(dim=-1, keepdim=True) + of_sink
    return weights.div_(total), of_sink / total


def grad_weights(grad_context: Tensor, value: Tensor, *, out: Tensor | None = None) -> Tensor:
    """grad_context @ value^T."""
    return _with_shared(grad_context, value.transpose(-1, -2), out=out)


def grad_value(
    weights: Tensor, grad_context: Tensor, num_kv_heads: int, *, out: Tensor | None = None, adds: bool = False
) -> Tensor:
    """weights^T @ grad_context, over all query heads that share a value head."""
    return _onto_shared(weights, grad_context, num_kv_heads, out=out, adds=adds)


def row_shift(weights: Tensor, grad_weights: Tensor | None, grad_logsumexp: Tensor | None = None) -> Tensor:
    """sum_j weights * grad_weights - grad_logsumexp, ``[batch, num_heads, rows, 1]``: what softmax takes off each row.

    ``grad_weights`` None is 0.
    """
    if grad_weights is None:
        assert grad_logsumexp is not None
        return -grad_logsumexp.unsqueeze(-1)
    if weights.numel() <= PAIRS_AT_ONCE:
        dots = (weights * grad_weights).sum(dim=-1, keepdim=True)
    else:
        dots = weights.new_empty(*weights.shape[:-1], 1)
        own, others, sums = weights.flatten(0, -2), grad_weights.flatten(0, -2), dots.view(-1)
        for rows in _row_runs(own):
            torch.sum(own[rows] * others[rows], dim=-1, out=sums[rows])
    return dots if grad_logsumexp is None else dots - grad_logsumexp.unsqueeze(-1)


def grad_logits(weights: Tensor, grad_weights: Tensor | None, shift: Tensor, *, out: Tensor | None = None) -> Tensor:
    """weights * (grad_weights - shift), with the ``row_shift`` of the row; ``grad_weights`` None is 0."""
    if grad_weights is None:
        return torch.mul(weights, -shift, out=out)
    return torch.sub(grad_weights, shift, out=out).mul_(weights)


def grad_sinks(sink_weights: Tensor, shift: Tensor) -> Tensor:
    """-sum(sink_weights * shift) over items and rows, ``[num_heads]``: a sink is a logit whose grad_weight is 0.

    ``sink_weights`` and ``shift`` are ``[batch, num_heads, rows, 1]``.
    """
    return -(sink_weights * shift).sum(dim=(0, 2, 3))


def grad_through_softcap(grad_capped: Tensor, tanh: Tensor, *, out: Tensor | None = None) -> Tensor:
    """grad_capped * (1 - tanh^2), where ``tanh`` is that of the softcap: the capped logit over the cap.

    What ``tanh`` held is used up.
    """
    return torch.mul(grad_capped, tanh.square_().neg_().add_(1.0), out=out)


def grad_scores(grad_scaled: Tensor, scale: float, *, out: Tensor | None = None) -> Tensor:
    """scale * grad_scaled, where ``grad_scaled`` is that of scale * scores.

    By itself and not in the products that follow: these multiply a factor of 0 by what may be huge, and scale times
    that may overflow.
    """
    return torch.mul(grad_scaled, scale, out=out)


def grad_query(grad_scores: Tensor, key: Tensor, *, out: Tensor | None = None, adds: bool = False) -> Tensor:
    """grad_scores @ key."""
    return _with_shared(grad_scores, key, out=out, adds=adds)


def grad_key(
    grad_scores: Tensor, query: Tensor, num_kv_heads: int, *, out: Tensor | None = None, adds: bool = False
) -> Tensor:
    """grad_scores^T @ query, over all query heads that share a key head."""
    return _onto_shared(grad_scores, query, num_kv_heads, out=out, adds=adds)


def grad_bias(grad_logits: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """grad_logits summed over the axes that a bias of ``shape``, of rank 4, was broadcast over."""
    over = [axis for axis, size in enumerate(shape) if size == 1 and grad_logits.shape[axis] != 1]
    return grad_logits.sum(dim=over, keepdim=True) if over else grad_logits


def nonfinite_rows(numbers: Tensor) -> Tensor:
    """Which rows hold a number that is not finite: bool, without the last axis."""
    if numbers.numel() <= PAIRS_AT_ONCE:
        return torch.isnan((numbers * 0.0).sum(dim=-1))
    rows_of_numbers = numbers.flatten(0, -2)
    marks = torch.empty(rows_of_numbers.shape[0], dtype=torch.bool, device=numbers.device)
    for rows in _row_runs(rows_of_numbers):
        marks[rows] = torch.isnan((rows_of_numbers[rows] * 0.0).sum(dim=-1))
    return marks.view(numbers.shape[:-1])


def infinite_part(coefficients: Tensor, factors: Tensor, allowed: Tensor | None) -> Tensor:
    """What NaN and infinities among ``factors`` add to coefficients @ factors over allowed pairs alone.

    coefficients ``[n, rows, keys]``, 0 at forbidden pairs; factors ``[n, keys, width]``; allowed as coefficients.
    Gives 0, an infinity or NaN for each sum ``[n, rows, width]``, to be added to the product with the finite factors:
    NaN for any NaN and for 0 * inf, as the sum itself has it.
    """
    shape = (*coefficients.shape[:2], factors.shape[2])
    up, down, undefined = (torch.zeros(shape, dtype=torch.bool, device=factors.device) for _ in range(3))
    per_key = max(1, math.prod(coefficients.shape[:2]), factors.shape[0] * factors.shape[2])
    size = max(1, MARKED_AT_ONCE // per_key)
    for start in range(0, factors.shape[1], size):
        keys = slice(start, start + size)
        few = factors[:, keys]
        if largest(few) < math.inf:
            continue
        numbers = coefficients[:, :, keys]
        pairs = torch.ones_like(numbers, dtype=torch.bool) if allowed is None else allowed[:, :, keys]

        def any_of(by: Tensor, where: Tensor, dtype: torch.dtype = factors.dtype) -> Tensor:
            return torch.bmm(by.to(dtype), where.to(dtype)) > 0

        above, below = torch.isposinf(few), torch.isneginf(few)
        up |= any_of(pairs & (numbers > 0), above) | any_of(pairs & (numbers < 0), below)
        down |= any_of(pairs & (numbers > 0), below) | any_of(pairs & (numbers < 0), above)
        undefined |= any_of(pairs, torch.isnan(few)) | any_of(pairs & (numbers == 0), above | below)
    part = torch.zeros(shape, dtype=factors.dtype, device=factors.device).masked_fill_(up, math.inf)
    return part.masked_fill_(down, -math.inf).masked_fill_(undefined | (up & down), math.nan)


def stack_rows(per_query_head: Tensor, num_kv_heads: int) -> Tensor:
    """``[batch, num_heads, rows, width]`` as ``[batch * num_kv_heads, group_size * rows, width]``.

    The rows of the query heads that share a key head stand one below the other.
    """
    batch, num_heads, rows, width = per_query_head.shape
    return per_query_head.reshape(batch * num_kv_heads, num_heads // num_kv_heads * rows, width)


def _row_runs(rows: Tensor) -> Iterator[slice]:
    """The rows of a matrix in runs of about PAIRS_AT_ONCE numbers, none of one row where there are more.

    A single sum would be parted among threads, and have other bits on another number of them.
    """
    return even_runs(rows.shape[0], max(LEAST_ROWS, PAIRS_AT_ONCE // max(1, rows.shape[1])))


def _with_shared(left: Tensor, shared: Tensor, *, out: Tensor | None, adds: bool = False) -> Tensor:
    """left @ shared: a matrix of each query head times that of the key head it shares."""
    batch, num_heads, rows, _ = left.shape
    num_kv_heads, width = shared.shape[1], shared.shape[3]
    if out is None:
        assert not adds
        out = left.new_empty(batch, num_heads, rows, width)
    stacked = stack_rows(left, num_kv_heads)
    # What out holds before is not read where beta is 0.
    out.view(*stacked.shape[:2], width).baddbmm_(stacked, shared.flatten(0, 1), beta=1 if adds else 0)
    return out


def _onto_shared(pairs: Tensor, of_rows: Tensor, num_kv_heads: int, *, out: Tensor | None, adds: bool) -> Tensor:
    """pairs^T @ of_rows, summed over the query heads that share a key head."""
    batch, keys, width = pairs.shape[0], pairs.shape[3], of_rows.shape[3]
    if out is None:
        assert not adds
        out = pairs.new_empty(batch, num_kv_heads, keys, width)
    stacked = stack_rows(pairs, num_kv_heads)
    out.view(batch * num_kv_heads, keys, width).baddbmm_(
        stacked.transpose(1, 2), stack_rows(of_rows, num_kv_heads), beta=1 if adds else 0
    )
    return out
