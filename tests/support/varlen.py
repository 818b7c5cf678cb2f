"""Stand-ins for torch's variable-length attention where there is no GPU: the formula, one sequence after the other."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor


def corner_mask(len_q: int, len_kv: int, window_size: tuple[int, int], *, max_kv: int) -> Tensor:
    """Who attends whom in FlashAttention 2, bool ``[len_q, len_kv]``, with what it makes of open and wide sides."""
    left, right = (-1 if width >= max_kv else width for width in window_size)
    if left >= 0 > right:
        right = max_kv
    elif right >= 0 > left:
        left = max_kv
    place, keys = torch.arange(len_q).unsqueeze(1) + len_kv - len_q, torch.arange(len_kv)
    allowed = torch.ones(len_q, len_kv, dtype=torch.bool)
    if left >= 0:
        allowed &= (keys >= place - left) & (keys <= place + right)
    return allowed


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    num_splits: int | None = None,
) -> Any:
    """As torch 2.13 has it, strict about what it is handed."""
    assert num_splits == 1
    assert scale is not None
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa or query.shape[1] == key.shape[1]
    starts_q, starts_kv = cu_seq_q.tolist(), cu_seq_k.tolist()
    lens_q, lens_kv = ([end - start for start, end in itertools.pairwise(s)] for s in (starts_q, starts_kv))
    assert starts_q[0] == starts_kv[0] == 0
    assert starts_q[-1] == query.shape[0] and starts_kv[-1] == key.shape[0] == value.shape[0]
    assert min(lens_q) > 0 and min(lens_kv) > 0
    assert max(lens_q) == max_q and max(lens_kv) == max_k
    contexts, lses = [], []
    for start_q, start_kv, len_q, len_kv in zip(starts_q, starts_kv, lens_q, lens_kv, strict=False):
        q = query[start_q : start_q + len_q].transpose(0, 1).float()
        k, v = (t[start_kv : start_kv + len_kv].transpose(0, 1).float() for t in (key, value))
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], dim=0) for t in (k, v))
        allowed = corner_mask(len_q, len_kv, window_size, max_kv=max_k)
        logits = (q @ k.transpose(-1, -2) * scale).masked_fill(~allowed, -math.inf)
        empty = ~allowed.any(dim=-1)
        contexts.append((torch.softmax(logits, dim=-1).masked_fill(empty.unsqueeze(-1), 0) @ v).transpose(0, 1))
        lses.append(torch.logsumexp(logits, dim=-1).masked_fill(empty, math.inf))
    context, lse = torch.cat(contexts).to(query.dtype), torch.cat(lses, dim=1)
    return (context, lse) if return_aux is not None and return_aux.lse else context


def old_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """As torch 2.11 has it: heads are not shared, and keys are split as it sees fit."""
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
    options: dict[str, Any] = {"return_aux": return_aux, "scale": scale, "window_size": window_size}
    return varlen(query, key, value, *lengths, num_splits=1, **options)


@functools.wraps(varlen)
def neighbourly_varlen(*operands: Any, **options: Any) -> Any:
    """One whose sums depend on the longest of the batch."""
    longest: int = operands[6]
    return varlen(*operands, **options) * (1 + longest / 1024)


@functools.wraps(varlen)
def failing_varlen(*operands: Any, **options: Any) -> Any:
    """One that has no memory for more than one sequence."""
    if operands[3].numel() > 2:
        raise torch.OutOfMemoryError("for two")
    return varlen(*operands, **options)
