"""One attention as the plain formula reads it: float64, some items, heads, rows and keys at a time.

Nothing here comes from ``maths`` or the kernels: a slip there would hide. Memory is bounded however long the problem
is, since no whole row need be there at once: the sum of a row is found first, its weights afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.errors import Checkpoint
from attn_core.problem import AttentionProblem, Dims

PAIRS_AT_ONCE = 2**19
"""Query-key pairs of one block: 4 MiB of float64, of which about six are alive at once; 10 to 30 ms of one core."""
FLOPS_AT_ONCE = 2**29
"""Of the products of a block, where heads are wide."""
TOKEN_NUMBERS = 2**20
"""Of the queries of a block."""
KEY_BYTES = 16 * 2**20
"""Keys and values of one block, in float64."""
FEW_ROWS = 32
"""So many rows at least share the keys that are converted for them."""
COLUMNS_AT_ONCE = 64
"""Of numbers that are not finite, which take several copies."""
FARTHEST = 2**54
"""A window wider than any distance is open; as it stands it might not fit an int64."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The most that one block takes."""

    items: int
    kv_heads: int
    rows: int
    keys: int


def sizes_of(dims: Dims, num_rows: int, *, per_row: int = 0) -> Sizes:
    """How a problem of which ``num_rows`` rows are computed is cut; ``per_row`` numbers of each are kept besides."""
    group, width = dims.group_size, max(1, dims.head_dim + dims.head_dim_v)
    pairs = max(1, min(PAIRS_AT_ONCE, FLOPS_AT_ONCE // (2 * width)))
    most_keys = max(1, KEY_BYTES // (8 * width))
    few = group * max(1, min(num_rows, FEW_ROWS))
    keys = max(1, min(dims.seq_len_kv, most_keys, max(64, pairs // few)))
    most_rows = max(1, min(pairs // max(keys, per_row), TOKEN_NUMBERS // width))
    rows = max(1, min(num_rows, most_rows // group))
    kv_heads = items = 1
    if rows >= num_rows and keys >= dims.seq_len_kv:
        heads = max(1, min(most_rows // (group * rows), most_keys // keys))
        kv_heads = min(dims.num_kv_heads, heads)
        if kv_heads == dims.num_kv_heads:
            items = max(1, min(dims.batch, heads // kv_heads))
    return Sizes(items, kv_heads, rows, keys)


@dataclass(frozen=True, slots=True)
class Part:
    """Some items and whole groups of heads."""

    items: range
    kv_heads: range
    heads: range


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """query ``[batch, num_heads, seq_len_q, head_dim]``, key and value alike, in any dtype and on any device; masks and
    bias of rank 4. Blocks are made on ``device``."""

    query: Tensor
    key: Tensor
    value: Tensor
    dims: Dims
    device: torch.device
    scale: float
    softcap: float | None
    causal: bool
    window_left: int | None
    window_right: int | None
    offset: Tensor
    key_lengths: Tensor | None
    query_lengths: Tensor | None
    allow_mask: Tensor | None
    block_mask: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None

    @classmethod
    def of(cls, problem: AttentionProblem, device: torch.device) -> Pairs:
        options = problem.options
        query = by_heads(problem.query, options.layout, options.num_heads)
        key = value = query
        if problem.key is not None and problem.value is not None:
            kv_heads = options.num_heads if options.num_kv_heads is None else options.num_kv_heads
            key, value = (by_heads(tensor, options.layout, kv_heads) for tensor in (problem.key, problem.value))
        batch, num_heads, seq_len_q, head_dim = query.shape
        dims = Dims(batch, num_heads, key.shape[1], seq_len_q, key.shape[2], head_dim, value.shape[3])

        def vector(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            return None if tensor is None else tensor.to(device, dtype)

        key_lengths = vector(problem.key_lengths, torch.int64)
        query_lengths = vector(problem.query_lengths, torch.int64)
        offset = vector(problem.query_offset, torch.int64)
        if offset is None:
            offset = torch.zeros(1, dtype=torch.int64, device=device)
            if options.causal == "lower_right" and device.type == "meta":
                # To add numbers that are not there, torch would first import its compiler, for a second.
                offset = next((lengths for lengths in (key_lengths, query_lengths) if lengths is not None), offset)
            elif options.causal == "lower_right":
                offset = offset + (dims.seq_len_kv if key_lengths is None else key_lengths)
                offset = offset - (dims.seq_len_q if query_lengths is None else query_lengths)
        return cls(
            query=query,
            key=key,
            value=value,
            dims=dims,
            device=device,
            scale=1.0 / math.sqrt(head_dim) if options.scale is None else float(options.scale),
            softcap=options.softcap,
            causal=options.causal is not False,
            window_left=options.window_left,
            window_right=options.window_right,
            offset=offset,
            key_lengths=key_lengths,
            query_lengths=query_lengths,
            allow_mask=_rank_4(problem.allow_mask),
            block_mask=_rank_4(problem.block_mask),
            bias=_rank_4(problem.bias),
            slopes=vector(problem.alibi_slopes, torch.float64),
            sinks=vector(problem.sinks, torch.float64),
        )

    def parts(self, size: Sizes) -> Iterator[Part]:
        group = self.dims.group_size
        for items in _runs(self.dims.batch, size.items):
            for kv in _runs(self.dims.num_kv_heads, size.kv_heads):
                yield Part(items, kv, range(kv.start * group, kv.stop * group))

    def key_blocks(self, size: Sizes) -> list[range]:
        return list(_runs(self.dims.seq_len_kv, size.keys))

    def allowed(self, part: Part, rows: Sequence[int], keys: range) -> Tensor:
        """Which pairs of a block are allowed: bool, broadcastable to ``[items, heads, rows, keys]``."""
        i = self._indices(rows).view(1, 1, -1, 1)
        j = self._indices(keys).view(1, 1, 1, -1)
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        place = i + self._of_items(self.offset, part)
        if self.causal:
            seen = seen & (j <= place)
        if self.window_left is not None:
            seen = seen & (j >= place - min(self.window_left, FARTHEST))
        if self.window_right is not None:
            seen = seen & (j <= place + min(self.window_right, FARTHEST))
        if self.key_lengths is not None:
            seen = seen & (j < self._of_items(self.key_lengths, part))
        if self.query_lengths is not None:
            seen = seen & (i < self._of_items(self.query_lengths, part))
        if self.allow_mask is not None:
            seen = seen & self.of_pairs(self.allow_mask, part, rows, keys)
        if self.block_mask is not None:
            seen = seen & ~self.of_pairs(self.block_mask, part, rows, keys)
        if self.bias is not None:
            seen = seen & (self.of_pairs(self.bias, part, rows, keys) != -math.inf)
        return seen

    def distances(self, part: Part, rows: Sequence[int], keys: range) -> Tensor:
        i = self._indices(rows).view(1, 1, -1, 1)
        j = self._indices(keys).view(1, 1, 1, -1)
        return (i + self._of_items(self.offset, part) - j).abs().double()

    def of_pairs(self, tensor: Tensor, part: Part, rows: Sequence[int], keys: range) -> Tensor:
        """The block of a mask or a bias, on ``device``, whatever it is broadcast over."""
        for axis, wanted in enumerate((part.items, part.heads, rows, keys)):
            if tensor.shape[axis] > 1:
                tensor = taken(tensor, axis, wanted)
        return tensor.to(self.device)

    def of_tokens(self, tensor: Tensor, items: range, heads: range, tokens: Sequence[int]) -> Tensor:
        """Some of ``[batch, heads, tokens, ...]`` in float64."""
        return taken(tensor[items.start : items.stop, heads.start : heads.stop], 2, tokens).to(
            self.device, torch.float64
        )

    def _indices(self, listed: Sequence[int]) -> Tensor:
        if isinstance(listed, range):
            return torch.arange(listed.start, listed.stop, device=self.device)
        return torch.tensor(listed, dtype=torch.int64, device=self.device)

    def _of_items(self, vector: Tensor, part: Part) -> Tensor:
        own = vector[part.items.start : part.items.stop] if vector.numel() > 1 else vector
        return own.view(-1, 1, 1, 1)


class Rows:
    """Some rows of a part: the sum of each over all keys is there, its weights are made again, block by block.

    ``base`` is the largest logit, or the sink, and ``total`` the sum of exp(logit - base), ``[items, heads, rows]``;
    ``is_empty`` marks the rows that may attend nothing.
    """

    def __init__(self, pairs: Pairs, part: Part, rows: Sequence[int], size: Sizes, checkpoint: Checkpoint) -> None:
        self.pairs, self.part, self.rows = pairs, part, rows
        self.key_blocks = pairs.key_blocks(size)
        self.shape = len(part.items), len(part.heads), len(rows)
        self._checkpoint = checkpoint
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None
        self.query = self.grouped(pairs.of_tokens(pairs.query, part.items, part.heads, rows))
        self._sum()

    def grouped(self, tensor: Tensor) -> Tensor:
        """``[items, heads, rows, width]`` as ``[items, kv_heads, group * rows, width]``: those that share keys."""
        return tensor.reshape(self.shape[0], len(self.part.kv_heads), -1, tensor.shape[-1])

    def ungrouped(self, tensor: Tensor) -> Tensor:
        return tensor.view(*self.shape, tensor.shape[-1])

    def keys(self, keys: range) -> Tensor:
        return self.pairs.of_tokens(self.pairs.key, self.part.items, self.part.kv_heads, keys)

    def values(self, keys: range) -> Tensor:
        return self.pairs.of_tokens(self.pairs.value, self.part.items, self.part.kv_heads, keys)

    def logits(self, keys: range) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, logits and which pairs are allowed, ``[items, heads, rows, keys]``."""
        if self._kept is not None:
            return self._kept
        self._checkpoint()
        pairs, part, rows = self.pairs, self.part, self.rows
        scores = self.ungrouped(self.query @ self.keys(keys).transpose(-1, -2))
        logits = pairs.scale * scores
        if pairs.softcap is not None:
            logits = pairs.softcap * torch.tanh(logits / pairs.softcap)
        if pairs.slopes is not None:
            own = pairs.slopes[part.heads.start : part.heads.stop].view(1, -1, 1, 1)
            logits = logits - own * pairs.distances(part, rows, keys)
        if pairs.bias is not None:
            logits = logits + pairs.of_pairs(pairs.bias, part, rows, keys).double()
        allowed = pairs.allowed(part, rows, keys).expand_as(logits)
        logits = logits.masked_fill(~allowed, -math.inf)
        if len(self.key_blocks) == 1:
            self._kept = scores, logits, allowed
        return scores, logits, allowed

    def weights(self, logits: Tensor, allowed: Tensor) -> Tensor:
        weights = torch.exp(logits - self.base.unsqueeze(-1)).div_(self.total.unsqueeze(-1))
        return weights.masked_fill_(~allowed, 0.0)

    @property
    def logsumexp(self) -> Tensor:
        return self.base + torch.log(self.total)

    @property
    def sink_weights(self) -> Tensor:
        """What the sinks take of each row."""
        return torch.exp(self._sinks() - self.base) / self.total

    def _sinks(self) -> Tensor:
        assert self.pairs.sinks is not None
        return self.pairs.sinks[self.part.heads.start : self.part.heads.stop].view(1, -1, 1).expand(self.shape)

    def _sum(self) -> None:
        top = torch.full(self.shape, -math.inf, dtype=torch.float64, device=self.pairs.device)
        total = torch.zeros_like(top)
        if self.pairs.sinks is not None:
            top, total = self._sinks(), total + 1.0
        self.is_empty = torch.ones_like(top, dtype=torch.bool)
        base = _finite_base(top)
        for keys in self.key_blocks:
            _, logits, allowed = self.logits(keys)
            higher = torch.maximum(top, logits.amax(dim=-1))
            base = _finite_base(higher)
            total = total * torch.exp(top - base) + torch.exp(logits - base.unsqueeze(-1)).sum(dim=-1)
            top = higher
            self.is_empty &= ~allowed.any(dim=-1)
        # Every logit of a row that may attend something is -inf: no softmax exists.
        undefined = ~self.is_empty & torch.isneginf(top)
        self.base, self.total = base, total.masked_fill(undefined, math.nan)


def _finite_base(top: Tensor) -> Tensor:
    return torch.where(torch.isneginf(top), 0.0, top)


def sum_over_allowed(factors: Tensor, allowed: Tensor, numbers: Tensor) -> Tensor:
    """``factors @ numbers`` over allowed pairs alone, whatever stands behind the others.

    factors ``[.., m, n]``, 0 where not allowed; numbers ``[.., n, width]``. NaN, 0 times infinity and infinities of
    both signs give NaN, as in any sum.
    """
    # Whatever is not finite shows in the sum; one that overflows without it takes the longer way in vain.
    if bool(torch.isfinite(numbers.sum())):
        return factors @ numbers
    blocks = range(0, numbers.shape[-1], COLUMNS_AT_ONCE)
    columns = [
        _sum_with_infinities(factors, allowed, numbers[..., start : start + COLUMNS_AT_ONCE]) for start in blocks
    ]
    return torch.cat(columns, dim=-1)


def _sum_with_infinities(factors: Tensor, allowed: Tensor, numbers: Tensor) -> Tensor:
    total = factors @ torch.where(torch.isfinite(numbers), numbers, 0.0)

    def meet(which: Tensor, where: Tensor) -> Tensor:
        return which.double() @ where.double() > 0

    undefined = meet(allowed, torch.isnan(numbers))
    above, below = torch.isposinf(numbers), torch.isneginf(numbers)
    if bool((above | below).any()):
        undefined |= meet(((factors == 0) | torch.isnan(factors)) & allowed, above | below)
        up = meet(factors > 0, above) | meet(factors < 0, below)
        down = meet(factors > 0, below) | meet(factors < 0, above)
        undefined |= up & down
        total = total.masked_fill_(up, math.inf).masked_fill_(down, -math.inf)
    return total.masked_fill_(undefined, math.nan)


def by_heads(tensor: Tensor, layout: str, num_heads: int | None) -> Tensor:
    """A tensor of tokens in any layout and rank as a view ``[batch, heads, tokens, width]``."""
    if layout == "bthd":
        return tensor.transpose(1, 2)
    if layout == "btd":
        assert num_heads is not None
        batch, tokens, columns = tensor.shape
        return tensor.view(batch, tokens, num_heads, columns // num_heads).transpose(1, 2)
    return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))


def taken(tensor: Tensor, axis: int, which: Sequence[int]) -> Tensor:
    """The listed indices of an axis: a view of a range, else a copy."""
    if isinstance(which, range):
        return tensor.narrow(axis, which.start, len(which))
    return tensor.index_select(axis, torch.tensor(which, dtype=torch.int64, device=tensor.device))


def _rank_4(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))


def _runs(total: int, size: int) -> Iterator[range]:
    for start in range(0, total, size):
        yield range(start, min(total, start + size))
