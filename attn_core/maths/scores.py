"""From query and key to logits: product, scale, softcap, ALiBi, bias, mask, in this order and no other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_core.maths.heads import flat_groups, ungroup_heads
from attn_core.maths.masks import fill_forbidden_


def score_matrix(query: Tensor, key: Tensor, *, out: Tensor | None = None) -> Tensor:
    """query @ key^T, unscaled, for every pair: ``[batch, num_heads, seq_len_q, seq_len_kv]``.

    query ``[batch, num_heads, seq_len_q, head_dim]``, key ``[batch, num_kv_heads, seq_len_kv, head_dim]``; query
    head h reads key head h // group_size. One dtype in, the same out, into ``out`` where that is given.
    """
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    queries, keys = flat_groups(query, num_kv_heads), key.flatten(0, 1).transpose(1, 2)
    if out is None:
        scores = torch.bmm(queries, keys)
        return ungroup_heads(scores.view(*key.shape[:2], *scores.shape[1:]), num_heads)
    torch.bmm(queries, keys, out=out.view(*queries.shape[:2], keys.shape[2]))
    return out


def softcap_scores(scaled: Tensor, softcap: float, *, out: Tensor | None = None) -> Tensor:
    """softcap * tanh(scaled / softcap), into ``out`` where that is given. Source: Gemma 2, arXiv:2408.00118."""
    capped = torch.div(scaled, softcap, out=out)
    return torch.mul(torch.tanh(capped, out=out), softcap, out=out)


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
    out: Tensor | None = None,
) -> Tensor:
    """softcap(scale * scores) - alibi + bias, and -inf wherever ``allowed`` is False.

    A forbidden pair is selected away, not added to, so what stands there cannot matter. The dtype is that of scores.
    ``allowed`` are booleans or ``bits_of`` them; ``out`` is written where it is given, and may be scores itself.
    """
    logits = torch.mul(scores, scale, out=out)
    if softcap is not None:
        softcap_scores(logits, softcap, out=logits)
    if alibi is not None:
        logits.sub_(alibi)
    if bias is not None:
        logits.add_(bias.to(logits.dtype))
    if allowed is not None:
        fill_forbidden_(logits, allowed, -math.inf)
    return logits
