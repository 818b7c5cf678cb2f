"""Softmax over the keys with its rules: forbidden pairs and empty rows give 0, sinks only join the denominator."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_core.maths.masks import fill_forbidden_


def masked_softmax(
    logits: Tensor, allowed: Tensor | None = None, sinks: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """exp(logits - logsumexp) over the last axis, in the dtype of logits.

    ``logits`` are -inf at forbidden pairs. Where ``allowed`` (booleans, or ``bits_of`` them) is False the weight is
    exactly 0, in rows without any allowed key too. A row whose allowed logits have no softmax (NaN, +inf, or all of
    them overflowed to -inf) is NaN at its allowed pairs. ``sinks`` ``[num_heads]`` join the denominator of their head.
    ``out`` is written where it is given, and may be logits itself.
    """
    if sinks is None:
        weights = torch.softmax(logits, dim=-1, out=out)
    else:
        sink = sinks.to(logits.dtype).view(1, -1, 1, 1)
        top = torch.maximum(logits.amax(dim=-1, keepdim=True), sink)
        weights = torch.sub(logits, top, out=out).exp_()
        weights.div_(weights.sum(dim=-1, keepdim=True) + torch.exp(sink - top))
    if allowed is not None:
        # Empty rows come out of softmax as NaN, and so do the forbidden pairs of a NaN row.
        fill_forbidden_(weights, allowed, 0.0)
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
    # A weight too small for a normal number adds nothing that could be told from 0.
    terms = weights.clamp_min(torch.finfo(weights.dtype).tiny).log_().mul_(weights)
    # Of a weight of 1 the term is -0.
    return 0.0 - terms.sum(dim=-1)
