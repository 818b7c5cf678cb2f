"""The one form in which kernels read a problem, and the way back to the caller's layout and rank.

Everything a caller may say in several ways (layout, rank, alignment, masks of either sense) is said here in one
way: tensors ``[batch, heads, tokens, width]``, masks of rank 4 on the device of the query, positions as an offset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_core.cut import runs
from attn_core.errors import Checkpoint, Fault, InvalidProblem, never_abandoned
from attn_core.maths.heads import merge_heads, split_heads
from attn_core.maths.masks import allowed_pairs, key_positions, query_positions, rows_of
from attn_core.maths.scores import alibi_distances
from attn_core.numerics import compute_dtype
from attn_core.problem import AttentionOptions, AttentionProblem, Dims
from attn_core.validate import dims_of

MASK_BLOCK_PAIRS = 2**18


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalProblem:
    """A checked problem as kernels read it.

    query ``[batch, num_heads, seq_len_q, head_dim]``, key and value with ``num_kv_heads`` and ``seq_len_kv``; masks
    and bias of rank 4, broadcastable to ``[batch, num_heads, seq_len_q, seq_len_kv]``; ``query_offset`` a number or
    ``[batch or 1]``; slopes and sinks ``[num_heads]`` in the compute dtype.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    dims: Dims
    outputs: tuple[str, ...]
    scale: float
    softcap: float | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    query_offset: Tensor | int = 0
    key_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    allow_mask: Tensor | None = None
    block_mask: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    select_heads: tuple[int, ...] | None = None
    select_rows: tuple[int, ...] | None = None
    top_k: int | None = None

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.query.dtype)

    @property
    def has_pair_masks(self) -> bool:
        """Whether a tensor of the caller decides about single pairs."""
        return self.allow_mask is not None or self.block_mask is not None or self.bias is not None

    @property
    def forbids_by_distance(self) -> bool:
        """Whether some pairs are forbidden for where the query stands among the keys."""
        return self.causal or self.window_left is not None or self.window_right is not None

    @property
    def is_ragged(self) -> bool:
        """Whether the items may differ in their lengths or offsets."""
        return self.key_lengths is not None or self.query_lengths is not None or isinstance(self.query_offset, Tensor)

    @property
    def forbids_nothing(self) -> bool:
        """Whether every query may attend every key, told from metadata."""
        return not (
            self.forbids_by_distance
            or self.key_lengths is not None
            or self.query_lengths is not None
            or self.has_pair_masks
        )

    @property
    def masks_apart(self) -> tuple[bool, bool]:
        """Whether what is forbidden differs between items, and between heads."""
        masks = [mask for mask in (self.allow_mask, self.block_mask, self.bias) if mask is not None]
        has_lengths = self.key_lengths is not None or self.query_lengths is not None
        is_apart = has_lengths or (isinstance(self.query_offset, Tensor) and self.query_offset.numel() > 1)
        return is_apart or any(mask.shape[0] > 1 for mask in masks), any(mask.shape[1] > 1 for mask in masks)

    @property
    def is_square_causal(self) -> bool:
        """Whether the lower triangle from the first corner is the only mask."""
        return (
            self.causal
            and isinstance(self.query_offset, int)
            and self.query_offset == 0
            and self.dims.seq_len_q == self.dims.seq_len_kv
            and self.window_left is None
            and self.window_right is None
            and self.key_lengths is None
            and self.query_lengths is None
            and not self.has_pair_masks
        )

    def all_rows(self) -> Tensor:
        return torch.arange(self.dims.seq_len_q, device=self.device)

    def positions(self, rows: Tensor) -> Tensor:
        """p(i) of the listed queries, ``[1 or batch, 1, rows, 1]``."""
        return query_positions(rows, self.query_offset)

    def allowed(self, rows: Tensor | slice) -> Tensor | None:
        """Which keys the listed queries, or a run of them, may attend; None when all."""
        at = rows
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=self.device)
        elif rows.numel() == self.dims.seq_len_q and self.select_rows is None:
            at = slice(None)
        return allowed_pairs(
            rows=rows,
            seq_len_kv=self.dims.seq_len_kv,
            query_offset=self.query_offset,
            causal=self.causal,
            window_left=self.window_left,
            window_right=self.window_right,
            key_lengths=self.key_lengths,
            query_lengths=self.query_lengths,
            allow_mask=rows_of(self.allow_mask, at),
            block_mask=rows_of(self.block_mask, at),
            bias=rows_of(self.bias, at),
        )

    def part(self, items: slice, heads: slice, rows: slice | None = None) -> CanonicalProblem:
        """The same attention for some items, heads and queries alone: a problem of its own, on views of this one.

        ``heads`` are query heads: whole groups of them, or some of one group. A part with ``rows`` selects nothing.
        """
        dims = self.dims
        first, last = heads.start // dims.group_size, (heads.stop - 1) // dims.group_size
        rows = slice(0, dims.seq_len_q) if rows is None else rows
        keys = slice(first, last + 1)
        offset = self.query_offset
        if isinstance(offset, Tensor) and offset.numel() > 1:
            offset = offset[items]

        def of(per_pair: Tensor | None) -> Tensor | None:
            if per_pair is None:
                return None
            sizes = per_pair.shape
            return per_pair[
                tuple(
                    wanted if size > 1 else slice(None)
                    for wanted, size in zip((items, heads, rows), sizes, strict=False)
                )
            ]

        return replace(
            self,
            query=self.query[items, heads, rows],
            key=self.key[items, keys],
            value=self.value[items, keys],
            dims=replace(
                dims,
                batch=items.stop - items.start,
                num_heads=heads.stop - heads.start,
                num_kv_heads=last + 1 - first,
                seq_len_q=rows.stop - rows.start,
            ),
            query_offset=offset + rows.start,
            key_lengths=None if self.key_lengths is None else self.key_lengths[items],
            query_lengths=None if self.query_lengths is None else self.query_lengths[items] - rows.start,
            allow_mask=of(self.allow_mask),
            block_mask=of(self.block_mask),
            bias=of(self.bias),
            alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes[heads],
            sinks=None if self.sinks is None else self.sinks[heads],
            select_heads=None,
            select_rows=self.select_rows if dims.seq_len_q == rows.stop - rows.start else None,
        )

    def row_blocks(self, pairs_per_block: int) -> list[slice]:
        """All rows, cut so that a block has about ``pairs_per_block`` pairs; depends on the problem alone."""
        dims = self.dims
        per_row = max(1, dims.batch * dims.num_heads * dims.seq_len_kv)
        return list(runs(dims.seq_len_q, max(1, pairs_per_block // per_row)))

    def empty_rows(self, checkpoint: Checkpoint = never_abandoned) -> Tensor:
        """Which rows may attend no key, padded queries not counted: bool ``[batch, num_heads, seq_len_q]``.

        Decided by masks, lengths, causal, window and -inf in bias alone.
        """
        dims = self.dims
        shape = (dims.batch, dims.num_heads, dims.seq_len_q)
        rows = self.all_rows()
        if self.has_pair_masks and dims.seq_len_q and dims.seq_len_kv:
            parts = []
            for block in self.row_blocks(MASK_BLOCK_PAIRS):
                checkpoint()
                allowed = self.allowed(block)
                assert allowed is not None
                part = ~allowed.any(dim=-1)
                parts.append(part.expand(dims.batch, dims.num_heads, block.stop - block.start))
            empty = torch.cat(parts, dim=-1)
        else:
            # The keys of a row are one run: it is empty when it ends before it begins.
            positions = self.positions(rows)
            first = torch.zeros_like(positions)
            end = torch.full_like(positions, dims.seq_len_kv)
            if self.key_lengths is not None:
                end = torch.minimum(end, self.key_lengths.view(-1, 1, 1, 1))
            if self.causal:
                end = torch.minimum(end, positions + 1)
            if self.window_left is not None:
                first = torch.maximum(first, positions - min(self.window_left, 2**54))
            if self.window_right is not None:
                end = torch.minimum(end, positions + min(self.window_right, 2**54) + 1)
            empty = (first >= end).squeeze(-1).expand(shape)
        return empty if self.query_lengths is None else empty & self.counted_rows()

    def counted_rows(self) -> Tensor:
        """Which queries are not padding: bool ``[batch or 1, 1, seq_len_q]``."""
        rows = self.all_rows().view(1, 1, -1)
        if self.query_lengths is None:
            return torch.ones_like(rows, dtype=torch.bool)
        return rows < self.query_lengths.view(-1, 1, 1)

    def alibi(self, rows: Tensor) -> Tensor | None:
        if self.alibi_slopes is None:
            return None
        keys = key_positions(self.dims.seq_len_kv, self.device)
        return alibi_distances(self.alibi_slopes, self.positions(rows), keys)


def canonicalize(problem: AttentionProblem) -> CanonicalProblem:
    """The problem in canonical form; query, key and value stay views of the caller's memory where strides allow."""
    options, dims = problem.options, dims_of(problem)
    device = problem.query.device
    query = _to_bhtd(problem.query, options, dims.num_heads)
    if problem.key is None or problem.value is None:
        key = value = query
    else:
        key = _to_bhtd(problem.key, options, dims.num_kv_heads)
        value = _to_bhtd(problem.value, options, dims.num_kv_heads)
    arithmetic = compute_dtype(query.dtype)
    key_lengths = _to_index(problem.key_lengths, device)
    query_lengths = _to_index(problem.query_lengths, device)
    offset: Tensor | int = 0
    if problem.query_offset is not None:
        offset = _to_index(problem.query_offset, device)  # type: ignore[assignment]
    elif options.causal == "lower_right":
        offset = _difference(
            dims.seq_len_kv if key_lengths is None else key_lengths,
            dims.seq_len_q if query_lengths is None else query_lengths,
        )
    causal = options.causal is not False
    if causal and isinstance(offset, int) and offset >= dims.seq_len_kv - 1:
        # One query at the end of its keys sees them all: the case of decoding needs no mask.
        causal = False
    return CanonicalProblem(
        query=query,
        key=key,
        value=value,
        dims=dims,
        outputs=options.outputs,
        scale=1.0 / math.sqrt(dims.head_dim) if options.scale is None else float(options.scale),
        softcap=None if options.softcap is None else float(options.softcap),
        causal=causal,
        window_left=options.window_left,
        window_right=options.window_right,
        query_offset=offset,
        key_lengths=key_lengths,
        query_lengths=query_lengths,
        allow_mask=_to_rank_4(problem.allow_mask, device),
        block_mask=_to_rank_4(problem.block_mask, device),
        bias=_to_rank_4(problem.bias, device),
        alibi_slopes=None if problem.alibi_slopes is None else problem.alibi_slopes.to(device, arithmetic),
        sinks=None if problem.sinks is None else problem.sinks.to(device, arithmetic),
        select_heads=options.select_heads,
        select_rows=options.select_rows,
        top_k=options.top_k,
    )


def refuse_empty_rows(problem: CanonicalProblem, checkpoint: Checkpoint) -> None:
    """Raises: InvalidProblem, naming the first query that may attend no key."""
    empty = problem.empty_rows(checkpoint)
    if empty.any():
        first = ",".join(str(index) for index in empty.nonzero()[0].tolist())
        expected = "at least one key that every query may attend"
        raise InvalidProblem([Fault("empty_rows", expected, f"none for query [{first}]")])


def to_callers_form(name: str, tensor: Tensor, problem: AttentionProblem) -> Tensor:
    """An output of a kernel in the caller's layout and rank, contiguous."""
    if problem.options.layout == "bhtd":
        for _ in range(4 - problem.query.ndim):
            tensor = tensor.squeeze(0)
    elif name == "context":
        tensor = merge_heads(tensor) if problem.options.layout == "btd" else tensor.transpose(1, 2)
    return tensor.contiguous()


def _to_bhtd(tensor: Tensor, options: AttentionOptions, num_heads: int) -> Tensor:
    if options.layout == "btd":
        return split_heads(tensor.contiguous(), num_heads)
    if options.layout == "bthd":
        return tensor.transpose(1, 2)
    return tensor.view((1,) * (4 - tensor.ndim) + tuple(tensor.shape)) if tensor.ndim < 4 else tensor


def _to_index(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device, torch.int64)


def _difference(end: Tensor | int, length: Tensor | int) -> Tensor | int:
    """Of tensors without numbers one of them: to subtract such, torch would first import its compiler, for a second."""
    for tensor in (end, length):
        if isinstance(tensor, Tensor) and tensor.is_meta:
            return tensor
    return end - length


def _to_rank_4(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.to(device).contiguous().view((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
