"""How a large problem is cut into blocks: a block is some items, some heads and some query rows of it.

The sizes follow from shape, dtype and options alone, never from load or threads, so that a problem has one answer.
Cutting between items or heads changes no bit of it; cutting between rows may, so that comes last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attn_core.problem import Dims

THREADS_FROM_FLOPS = 500_000_000
"""From this size on a problem is worth a team of threads; below it the team costs more than it brings."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The most that one block takes. ``heads`` are query heads: whole groups of them, or some of one group."""

    items: int
    heads: int
    rows: int

    def leaves_whole(self, dims: Dims) -> bool:
        return self.items >= dims.batch and self.heads >= dims.num_heads and self.rows >= dims.seq_len_q

    def blocks(self, dims: Dims, *, row_multiple: int = 1) -> Iterator[tuple[slice, slice, slice]]:
        """Items, heads and rows of each block; all blocks of the same rows follow each other."""
        for rows in even_runs(dims.seq_len_q, self.rows, multiple=row_multiple):
            for items, heads in self.parts(dims):
                yield items, heads, rows

    def parts(self, dims: Dims) -> Iterator[tuple[slice, slice]]:
        """Items and heads of each block, whatever its rows."""
        group = dims.group_size
        for items in even_runs(dims.batch, self.items):
            if self.heads >= group:
                for heads in even_runs(dims.num_heads, self.heads, multiple=group):
                    yield items, heads
                continue
            for first in range(0, dims.num_heads, group):
                for heads in even_runs(group, self.heads):
                    yield items, slice(first + heads.start, first + heads.stop)


def cut_heads_first(dims: Dims, pairs: int) -> Cut:
    """Blocks of at most ``pairs`` query-key pairs; where one head has more, one head whole."""
    one_head = max(1, dims.seq_len_q * dims.seq_len_kv)
    group, every = dims.group_size, dims.num_heads
    if one_head * every <= pairs:
        return Cut(even(dims.batch, pairs // (one_head * every)), every, dims.seq_len_q)
    if one_head * group <= pairs:
        return Cut(1, group * even(dims.num_kv_heads, pairs // (one_head * group)), dims.seq_len_q)
    return Cut(1, even(group, max(1, pairs // one_head)), dims.seq_len_q)


def even(total: int, most: int, *, multiple: int = 1) -> int:
    """The longest of ``even_runs``."""
    if total <= most:
        return max(1, total)
    size = -(-total // -(-total // most))
    return -(-size // multiple) * multiple


def even_runs(total: int, most: int, *, multiple: int = 1) -> Iterator[slice]:
    """0 to ``total`` in as few runs of at most ``most`` as there can be, all of about one length.

    Each but the last is a multiple of ``multiple`` long, and so is ``most`` where it is less than ``total``. None is
    much shorter than the others: few rows alone would have other bits on another number of threads.
    """
    num_runs, units = -(-total // most), -(-total // multiple)
    for run in range(num_runs):
        yield slice(run * units // num_runs * multiple, min(total, (run + 1) * units // num_runs * multiple))


def runs(total: int, size: int) -> Iterator[slice]:
    """0 to ``total`` in runs of ``size``, the last one shorter."""
    for start in range(0, total, size):
        yield slice(start, min(total, start + size))


def pieces(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """A tensor in pieces of at most so many numbers, cut along its first axes, in the order of its numbers."""
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    numbers, every = math.prod(shape), (slice(None),) * len(shape)
    if numbers <= most or axis is None:
        yield every
        return
    size = most * shape[axis] // numbers
    for own in runs(shape[axis], max(1, size)):
        for inner in [every[axis + 1 :]] if size else pieces(shape[axis + 1 :], most):
            yield (*every[:axis], own, *inner)
