"""Splitting and merging heads, and grouping query heads over the key/value heads they share."""

from __future__ import annotations

from torch import Tensor


def split_heads(packed: Tensor, num_heads: int) -> Tensor:
    """``[batch, tokens, num_heads * head_dim]`` as ``[batch, num_heads, tokens, head_dim]``, a view.

    Head h owns columns h * head_dim to (h + 1) * head_dim. A reshape straight to the target shape would mix
    heads and tokens.
    """
    batch, tokens, columns = packed.shape
    return packed.view(batch, tokens, num_heads, columns // num_heads).transpose(1, 2)


def merge_heads(split: Tensor) -> Tensor:
    """``[batch, num_heads, tokens, head_dim]`` as ``[batch, tokens, num_heads * head_dim]``; undoes ``split_heads``."""
    batch, num_heads, tokens, head_dim = split.shape
    return split.transpose(1, 2).reshape(batch, tokens, num_heads * head_dim)


def group_heads(per_query_head: Tensor, num_kv_heads: int) -> Tensor:
    """``[batch, num_heads, rows, width]`` as ``[batch, num_kv_heads, group_size * rows, width]``.

    The rows of the query heads that share one key head stand one below the other, so that one product with
    the shared head serves them all and no key is copied.
    """
    batch, num_heads, rows, width = per_query_head.shape
    return per_query_head.reshape(batch, num_kv_heads, num_heads // num_kv_heads * rows, width)


def flat_groups(per_query_head: Tensor, num_kv_heads: int) -> Tensor:
    """The same with all items and heads on one axis: ``[batch * num_kv_heads, group_size * rows, width]``."""
    batch, num_heads, rows, width = per_query_head.shape
    return per_query_head.reshape(batch * num_kv_heads, num_heads // num_kv_heads * rows, width)


def ungroup_heads(grouped: Tensor, num_heads: int) -> Tensor:
    """Undoes ``group_heads``: ``[batch, num_heads, rows, width]``."""
    batch, num_kv_heads, rows, width = grouped.shape
    return grouped.reshape(batch, num_heads, rows * num_kv_heads // num_heads, width)
