"""Weights times values, plainly and with NaN and infinity kept behind the mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_core.maths.heads import flat_groups, ungroup_heads

PAIRS_AT_ONCE = 2**15
"""So many pairs, or numbers of the context, are looked at for what is not finite."""


def weighted_context(weights: Tensor, value: Tensor) -> Tensor:
    """weights @ value, the plain product: 0 * NaN is NaN.

    weights ``[batch, num_heads, seq_len_q, seq_len_kv]``, value ``[batch, num_kv_heads, seq_len_kv, head_dim_v]``, one
    dtype; gives ``[batch, num_heads, seq_len_q, head_dim_v]``. The weights are taken as they are.
    """
    grouped = torch.bmm(flat_groups(weights, value.shape[1]), value.flatten(0, 1))
    return ungroup_heads(grouped.view(*value.shape[:2], *grouped.shape[1:]), weights.shape[1])


def weighted_context_of_allowed(
    weights: Tensor, value: Tensor, allowed: Tensor | None, *, room: Tensor | None = None
) -> Tensor:
    """weights @ value over allowed pairs only, for a value that holds NaN or infinities.

    The finite part is multiplied as usual; what is not finite is counted per row among the allowed keys and
    selected in, by the rules of the sum: any NaN, 0 * inf, or infinities of both signs give NaN. The finite part is put
    into ``room``, where that is given.
    """
    batch, num_heads, seq_len_q, seq_len_kv = weights.shape
    # Both are NaN where any number of the key is.
    finite = value.amax(dim=-1).isfinite() & value.amin(dim=-1).isfinite()
    keys = (~finite).flatten(0, 1).any(dim=0).nonzero().squeeze(-1)
    context = weighted_context(weights, torch.nan_to_num(value, 0.0, 0.0, 0.0, out=room))
    # As a rule these are few. If they are not, copies would only take memory.
    picks = 2 * keys.numel() <= seq_len_kv
    value = value[:, :, keys] if picks else value
    size = max(1, PAIRS_AT_ONCE // (batch * num_heads * max(1, value.shape[2], value.shape[3])))
    for start in range(0, seq_len_q, size):
        rows = slice(start, start + size)
        own = allowed if allowed is None or allowed.shape[-2] == 1 else allowed[..., rows, :]
        pairs = weights[:, :, rows]
        if picks:
            pairs = pairs[..., keys]
            own = own if own is None or own.shape[-1] == 1 else own[..., keys]
        _carry_infinities_(context[:, :, rows], pairs, value, own)
    return context


def _carry_infinities_(context: Tensor, weights: Tensor, value: Tensor, allowed: Tensor | None) -> None:
    """Put into a context of finite values what the others bring."""
    pairs = torch.ones_like(weights) if allowed is None else allowed.expand_as(weights).to(weights.dtype)

    def touched(by: Tensor, where: Tensor) -> Tensor:
        return weighted_context(by, where.to(by.dtype)) > 0

    # One after the other: each matrix of pairs is as large as the weights.
    undefined = touched(pairs, torch.isnan(value)) | touched(pairs * (weights == 0), torch.isinf(value))
    carried = pairs.mul_(weights > 0)
    up = touched(carried, torch.isposinf(value))
    down = touched(carried, torch.isneginf(value))
    undefined |= up & down
    context.masked_fill_(up, math.inf).masked_fill_(down, -math.inf).masked_fill_(undefined, math.nan)
