"""Joining attentions of the same queries over different keys."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_partials(context_a: Tensor, lse_a: Tensor, context_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join two attentions of the same queries over disjoint keys.

    Shapes: contexts ``[..., seq_len_q, head_dim_v]``, lse ``[..., seq_len_q]``; one dtype, float32 or float64.
    A row masked on both sides stays 0, with lse -inf.
    Source: Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # Masked on both sides: lse is -inf, and -inf - (-inf) would be nan. Measure from 0 there.
    base = torch.where(torch.isneginf(lse), 0.0, lse)
    weight_a = torch.exp(lse_a - base).unsqueeze(-1)
    weight_b = torch.exp(lse_b - base).unsqueeze(-1)
    return weight_a * context_a + weight_b * context_b, lse
