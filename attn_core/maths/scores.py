"""From query and key to logits: product, scale, softcap, ALiBi, bias, mask, in this order and no other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_core.maths.heads import group_heads, ungroup_heads


def score_matrix(query: Tensor, key: Tensor) -> Tensor:
    """query @ key^T, unscaled, for every pair: ``[batch, num_heads, seq_len_q, seq_len_kv]``.

    query ``[batch, num_heads, seq_len_q, head_dim]``, key ``[batch, num_kv_heads, seq_len_kv, head_dim]``; query
    head h reads key head h // group_size. One dtype in, the same out.
    """
    grouped = torch.matmul(group_heads(query, key.shape[1]), key.transpose(-1, -2))
    return ungroup_heads(grouped, query.shape[1])


def softcap_scores(scaled: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(scaled / softcap). Source: Gemma 2, arXiv:2408.00118."""
    return torch.tanh(scaled / softcap) * softcap


def alibi_distances(slopes: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
    """slope * |p(i) - j| per head, to be subtracted. Source: Press et al. 2021, arXiv:2108.12409.

    slopes ``[num_heads]`` give the dtype of the result, ``[1 or batch, num_heads, rows, keys]``.
    """
    return slopes.view(1, -1, 1, 1) * (positions - keys).abs().to(slopes.dtype)


def logits_from_scores(
    scores: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """softcap(scale * scores) - alibi + bias, and -inf wherever ``allowed`` is False.

    A forbidden pair is selected away, not added to, so what stands there cannot matter. The dtype is that of scores.
    """
    logits = scores * scale
    if softcap is not None:
        logits = softcap_scores(logits, softcap)
    if alibi is not None:
        logits = logits - alibi
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    return logits
