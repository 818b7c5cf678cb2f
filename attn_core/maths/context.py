"""Weights times values, plainly and with NaN and infinity kept behind the mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_core.maths.heads import group_heads, ungroup_heads


def weighted_context(weights: Tensor, value: Tensor) -> Tensor:
    """weights @ value, the plain product: 0 * NaN is NaN.

    weights ``[batch, num_heads, seq_len_q, seq_len_kv]``, value ``[batch, num_kv_heads, seq_len_kv, head_dim_v]``, one
    dtype; gives ``[batch, num_heads, seq_len_q, head_dim_v]``. The weights are taken as they are.
    """
    return ungroup_heads(torch.matmul(group_heads(weights, value.shape[1]), value), weights.shape[1])


def weighted_context_of_allowed(weights: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
    """weights @ value over allowed pairs only, for a value that holds NaN or infinities.

    The finite part is multiplied as usual; what is not finite is counted per row among the allowed keys and
    selected in, by the rules of the sum: any NaN, 0 * inf, or infinities of both signs give NaN.
    """
    finite = torch.isfinite(value)
    context = weighted_context(weights, torch.where(finite, value, 0.0))
    pairs = torch.ones_like(weights) if allowed is None else allowed.expand_as(weights).to(weights.dtype)

    def touched(by: Tensor, where: Tensor) -> Tensor:
        return weighted_context(by, where.to(by.dtype)) > 0

    # One after the other: each matrix of pairs is as large as the weights.
    undefined = touched(pairs, torch.isnan(value)) | touched(pairs * (weights == 0), torch.isinf(value))
    carried = pairs.mul_(weights > 0)
    up = touched(carried, torch.isposinf(value))
    down = touched(carried, torch.isneginf(value))
    undefined = undefined | (up & down)
    context = context.masked_fill(up, math.inf).masked_fill(down, -math.inf)
    return context.masked_fill(undefined, math.nan)
