"""Softmax over the keys with its rules: forbidden pairs and empty rows give 0, sinks only join the denominator."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def masked_softmax(logits: Tensor, allowed: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    """exp(logits - logsumexp) over the last axis, in the dtype of logits.

    ``logits`` are -inf at forbidden pairs. Where ``allowed`` is False the weight is exactly 0, in rows without
    any allowed key too. A row whose allowed logits have no softmax (NaN, +inf, or all of them overflowed to
    -inf) is NaN at its allowed pairs. ``sinks`` ``[num_heads]`` join the denominator of their head.
    """
    if sinks is None:
        weights = torch.softmax(logits, dim=-1)
    else:
        sink = sinks.to(logits.dtype).view(1, -1, 1, 1)
        top = torch.maximum(logits.amax(dim=-1, keepdim=True), sink)
        weights = torch.exp(logits - top)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + torch.exp(sink - top))
    if allowed is not None:
        # Empty rows come out of softmax as NaN, and so do the forbidden pairs of a NaN row.
        weights = weights.masked_fill(~allowed, 0.0)
    return weights


def row_logsumexp(logits: Tensor, empty: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    """ln(sum(exp(logits))) over the last axis, the sink's exp in the sum: ``[batch, num_heads, rows]``.

    ``empty`` ``[.., rows]`` marks the rows without an allowed key: -inf there, or the sink. Any other row whose
    sum is 0 or infinite had numbers that overflowed and has no softmax: NaN.
    """
    lse = torch.logsumexp(logits, dim=-1)
    if sinks is not None:
        sink = sinks.to(logits.dtype).view(1, -1, 1)
        lse = torch.logaddexp(lse, sink.expand_as(lse))
    unsound = torch.isinf(lse)
    if empty is not None:
        unsound = unsound & ~empty
    return lse.masked_fill(unsound, math.nan)


def row_entropy(weights: Tensor) -> Tensor:
    """-sum(w ln w) over the last axis, 0 ln 0 = 0, nats: ``[batch, num_heads, rows]``."""
    terms: Tensor = torch.special.entr(weights)
    # Of a weight of 1 the term is -0.
    return terms.sum(dim=-1) + 0.0
