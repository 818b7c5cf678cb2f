"""Which query may attend which key. One boolean convention inside the core: True = may attend."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def query_positions(rows: Tensor, query_offset: Tensor | int = 0) -> Tensor:
    """p(i), the place of each query among the keys: ``[1 or batch, 1, rows, 1]``, int64.

    ``rows`` are the indices of the queries, ``query_offset`` the place of query 0, a number or ``[batch]``.
    """
    if isinstance(query_offset, Tensor):
        query_offset = query_offset.view(-1, 1, 1, 1)
    return rows.view(1, 1, -1, 1) + query_offset


def key_positions(seq_len_kv: int, device: torch.device | None = None) -> Tensor:
    """0 to seq_len_kv - 1, ``[1, 1, 1, seq_len_kv]``, int64."""
    return torch.arange(seq_len_kv, device=device).view(1, 1, 1, -1)


def causal_mask(positions: Tensor, keys: Tensor) -> Tensor:
    """True where key j <= p(i)."""
    return keys <= positions


def window_mask(positions: Tensor, keys: Tensor, left: int | None, right: int | None) -> Tensor | None:
    """True where p(i) - left <= j <= p(i) + right; a side that is None is open."""
    # Wider than any distance changes nothing, and a Python integer beyond int64 would not fit the comparison.
    widest = 2**54
    mask: Tensor | None = None
    if left is not None:
        mask = keys >= positions - min(left, widest)
    if right is not None:
        mask = combine_masks(mask, keys <= positions + min(right, widest))
    return mask


def length_mask(lengths: Tensor, indices: Tensor) -> Tensor:
    """True where an index lies before its item's length: ``[batch, 1, ...]`` against ``indices`` of rank 4."""
    return indices < lengths.view(-1, 1, 1, 1)


def combine_masks(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The pairs that both allow; None allows everything."""
    if first is None:
        return second
    return first if second is None else first & second


def attends_any(allowed: Tensor) -> Tensor:
    """Whether a row may attend any key: bool, without the last axis, which has one key at least."""
    # Of bytes the largest is found in a thirtieth of the time that any() takes.
    return allowed.view(torch.uint8).amax(dim=-1).view(torch.bool)


def bits_of(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """All bits set where True and none where False, in whole numbers as wide as ``dtype``, for ``fill_forbidden_``."""
    return allowed.to(_WHOLE_NUMBERS[dtype.itemsize]).neg_()


def fill_forbidden_(matrix: Tensor, allowed: Tensor, number: float) -> Tensor:
    """Have ``number`` in place of whatever stands where ``allowed`` is False, NaN too. In place; gives the matrix.

    ``allowed`` are booleans, or ``bits_of`` them where one mask is used more than once. Bits are combined, for
    masked_fill_ takes 15 times as long.
    """
    bits = bits_of(allowed, matrix.dtype) if allowed.dtype == torch.bool else allowed
    stored = matrix.view(bits.dtype)
    stored.bitwise_and_(bits)
    if number:
        stored.bitwise_or_(bits.bitwise_not().bitwise_and_(_bits_of_number(number, matrix.dtype)))
    return matrix


@functools.cache
def _bits_of_number(number: float, dtype: torch.dtype) -> int:
    return int(torch.tensor(number, dtype=dtype).view(_WHOLE_NUMBERS[dtype.itemsize]).item())


def rows_of(per_pair: Tensor | None, rows: Tensor | slice) -> Tensor | None:
    """The listed query rows of a ``[.., seq_len_q or 1, ..]`` mask or bias."""
    return per_pair if per_pair is None or per_pair.shape[-2] == 1 else per_pair[..., rows, :]


def allowed_pairs(
    *,
    rows: Tensor,
    seq_len_kv: int,
    query_offset: Tensor | int = 0,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    allow_mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | None:
    """The pairs that every rule allows, for the listed rows: broadcastable to ``[batch, heads, rows, keys]``.

    ``allow_mask``, ``block_mask`` and ``bias`` hold the listed rows only (or one row for all); of ``bias``
    only -inf counts. Queries at and after their length may attend nothing. None when nothing is forbidden.
    """
    mask: Tensor | None = None
    if causal or window_left is not None or window_right is not None:
        positions = query_positions(rows, query_offset)
        keys = key_positions(seq_len_kv, rows.device)
        if causal:
            mask = causal_mask(positions, keys)
        mask = combine_masks(mask, window_mask(positions, keys, window_left, window_right))
    if key_lengths is not None:
        mask = combine_masks(mask, length_mask(key_lengths, key_positions(seq_len_kv, rows.device)))
    if query_lengths is not None:
        mask = combine_masks(mask, length_mask(query_lengths, rows.view(1, 1, -1, 1)))
    mask = combine_masks(mask, allow_mask)
    if block_mask is not None:
        mask = combine_masks(mask, ~block_mask)
    if bias is not None:
        mask = combine_masks(mask, ~torch.isneginf(bias))
    return mask
