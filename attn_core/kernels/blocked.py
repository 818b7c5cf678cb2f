"""The blocked kernel: a few rows against all their keys at a time, and never a matrix of all pairs.

Gives everything but whole weights, scores and logits. The weights of a block serve all that is asked of its rows.
It is only handed finite numbers that cannot overflow, or told which rows attend others and shall be left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem
from attn_core.cut import Cut, cut_heads_first, even, even_runs, pieces, runs
from attn_core.errors import Checkpoint, never_abandoned
from attn_core.hazards import Hazards, without_hazards
from attn_core.kernels.output import KernelOutput, named_outputs, new_output
from attn_core.maths.masks import rows_of
from attn_core.numerics import EMPTY_LOGSUMEXP, EMPTY_WEIGHT, SIGNLESS_ZERO
from attn_core.placement import ALIGNMENT_BYTES
from attn_core.problem import SELECTABLE_BY_HEAD, SELECTABLE_BY_ROW, Dims

BLOCK_PAIRS = 2**20
"""Logits and weights of a block: 8 MiB of float32, which the caches hold in part."""
FEW_ROWS = 64
MOST_PAIRS = 2**22
"""BLAS takes half as long again for each of fewer rows. So where keys are many a block may have so many pairs."""
BLOCK_FLOPS = {torch.float32: 2**31, torch.float64: 2**30}
"""And no block takes more, where heads are wide: 20 to 45 ms of one core."""
BLOCK_VALUE_NUMBERS = 2**19
"""And a block of several heads has no more, where these are more than its pairs: without hazards they are copied."""
TILE_PAIRS = 2**19
"""So many logits are made at once, and bias, distances and masks for them."""
CLEANED_AT_ONCE = 2**15
"""So many numbers of values are looked at for hazards."""
RANKED_AT_ONCE = 2**18
GROUP_SIZES = (16, 32, 64, 128)
"""How many keys may stand together behind the largest weight among them."""
NO_HAZARDS = Hazards()


@dataclass(frozen=True, slots=True)
class Sweep:
    """Outputs that are asked of the same rows and heads, None for all: one pass over blocks gives them."""

    names: tuple[str, ...]
    rows: tuple[int, ...] | None
    heads: tuple[int, ...] | None

    def cut(self, problem: CanonicalProblem) -> Cut:
        """How much is computed at once: a matter of shape, dtype and options alone."""
        dims = problem.dims
        num_rows = dims.seq_len_q if self.rows is None else len(self.rows)
        most = BLOCK_FLOPS[problem.compute_dtype] // max(1, 2 * (dims.head_dim + dims.head_dim_v))
        pairs = max(1, min(BLOCK_PAIRS, most))
        dims = replace(dims, seq_len_q=num_rows)
        if self.heads is not None:
            dims = replace(dims, num_heads=1, num_kv_heads=1)
        num_keys = max(1, dims.seq_len_kv)
        rows = max(pairs // num_keys, min(FEW_ROWS, MOST_PAIRS // num_keys), 1)
        if "context" in self.names and num_rows * dims.group_size < dims.head_dim_v:
            # Few rows have many values for each pair.
            pairs = min(pairs, max(1, BLOCK_VALUE_NUMBERS * dims.group_size * num_rows // dims.head_dim_v))
        return replace(cut_heads_first(dims, pairs), rows=even(num_rows, rows))

    def parts(self, dims: Dims, size: Cut) -> Iterator[tuple[slice, slice, slice]]:
        """Items and heads of each block, and where these heads stand in the outputs."""
        if self.heads is None:
            for items, heads in size.parts(dims):
                yield items, heads, heads
            return
        for place, head in enumerate(self.heads):
            for items in even_runs(dims.batch, size.items):
                yield items, slice(head, head + 1), slice(place, place + 1)


def sweeps(problem: CanonicalProblem) -> tuple[Sweep, ...]:
    """The passes that give all asked outputs."""
    found: dict[tuple[tuple[int, ...] | None, tuple[int, ...] | None], list[str]] = {}
    for name in problem.outputs:
        rows = problem.select_rows if name in SELECTABLE_BY_ROW else None
        heads = problem.select_heads if name in SELECTABLE_BY_HEAD else None
        found.setdefault((rows, heads), []).append(name)
    return tuple(Sweep(tuple(names), rows, heads) for (rows, heads), names in found.items())


def copies(problem: CanonicalProblem, keys: Tensor) -> bool:
    """Whether keys, or values, are read from copies: of another dtype, or lying otherwise than a block of their own."""
    begins_apart = keys.shape[2] * keys.shape[3] * keys.dtype.itemsize % ALIGNMENT_BYTES
    return bool(begins_apart) or keys.dtype != problem.compute_dtype or not keys.is_contiguous()


def attend(
    problem: CanonicalProblem,
    hazards: Hazards = NO_HAZARDS,
    touched: Tensor | None = None,
    checkpoint: Checkpoint = never_abandoned,
) -> KernelOutput:
    """Every asked output, rounded once from the arithmetic.

    Of rows that are ``touched``, bool ``[batch, num_heads, seq_len_q]``, the outputs are left to whoever computes them
    otherwise, and ``weight_totals`` has nothing of them. The others have the bits that they have without hazards.
    """
    outputs = {name: new_output(problem, name) for name in named_outputs(problem)}
    if "weight_totals" in outputs:
        outputs["weight_totals"].zero_()
    empty: Tensor | None = None
    for sweep in sweeps(problem):
        empty = _Blocks(problem, sweep, outputs, hazards, touched).compute(checkpoint, empty)
    covers_all_rows = empty is not None or problem.forbids_nothing
    return KernelOutput(outputs=outputs, empty=empty, covers_all_rows=covers_all_rows)


class _Blocks:
    """One sweep over a problem, in buffers that all its blocks use."""

    def __init__(
        self,
        problem: CanonicalProblem,
        sweep: Sweep,
        outputs: dict[str, Tensor],
        hazards: Hazards,
        touched: Tensor | None,
    ) -> None:
        self._problem, self._sweep, self._outputs = problem, sweep, outputs
        self._hazards, self._touched = hazards, touched
        self._names = frozenset(sweep.names)
        self._size = size = sweep.cut(problem)
        pairs = size.items * size.heads * size.rows * problem.dims.seq_len_kv
        self._logits = torch.empty(pairs, dtype=problem.compute_dtype, device=problem.device)
        self._weights = torch.empty_like(self._logits)
        self._forbidden: Tensor | None = None
        if not problem.forbids_nothing:
            self._forbidden = torch.empty(pairs, dtype=torch.bool, device=problem.device)

    def compute(self, checkpoint: Checkpoint, empty: Tensor | None) -> Tensor | None:
        """Fill in the outputs; gives which rows are empty if it sees them all, else ``empty``."""
        problem, sweep = self._problem, self._sweep
        dims = problem.dims
        every = problem.all_rows()
        listed = every if sweep.rows is None else torch.tensor(sweep.rows, device=problem.device)
        numbers = range(dims.seq_len_q) if sweep.rows is None else sweep.rows
        marks = None
        if self._forbidden is not None and empty is None and sweep.rows is None and sweep.heads is None:
            marks = torch.empty(dims.batch, dims.num_heads, dims.seq_len_q, dtype=torch.bool, device=problem.device)
        for items, heads, target in sweep.parts(dims, self._size):
            part = problem.part(items, heads)
            key = _by_itself(part.key, problem.compute_dtype)
            value = _by_itself(part.value, problem.compute_dtype) if "context" in self._names else None
            for places in even_runs(listed.numel(), self._size.rows):
                checkpoint()
                rows, at = listed[places], places if sweep.rows is None else listed[places]
                if self._touched is not None and bool(self._touched[items, heads][:, :, at].all()):
                    # Nothing of it is kept. Whoever attends a hazard attends something.
                    if marks is not None:
                        marks[items, heads, places] = False
                    continue
                block = _Block(items, heads, target, places, rows, at, _seen(part, numbers[places]))
                found = self._compute(part, block, key, value, checkpoint)
                if marks is not None and found is not None:
                    marks[items, heads, places] = found
            # The old copies go before new ones come.
            del part, key, value
        return empty if marks is None else marks

    def _compute(
        self, part: CanonicalProblem, block: _Block, key: Tensor, value: Tensor | None, checkpoint: Checkpoint
    ) -> Tensor | None:
        """The asked outputs of one block; gives which of its rows are empty."""
        problem, names = self._problem, self._names
        shape = (part.dims.batch, part.dims.num_heads, block.rows.numel(), block.keys.stop - block.keys.start)
        pairs = math.prod(shape)
        logits, weights = self._logits[:pairs].view(shape), self._weights[:pairs].view(shape)
        forbidden = None if self._forbidden is None else self._forbidden[:pairs].view(shape)
        self._fill(part, block, key, logits, forbidden)
        empty = None if forbidden is None else forbidden.all(dim=-1)
        top = None
        if part.sinks is not None or not names.isdisjoint(("entropy", "logsumexp")):
            top = logits.amax(dim=-1)
            if empty is not None:
                top.masked_fill_(empty, 0.0)
            if "entropy" in names:
                logits.sub_(top.unsqueeze(-1))
        torch.softmax(logits, dim=-1, out=weights)
        if empty is not None:
            weights.masked_fill_(empty.unsqueeze(-1), EMPTY_WEIGHT)
        if top is not None:
            # Of the largest logit the exponential is 1, and so its weight is one part of their sum.
            largest = weights.amax(dim=-1)
            log_sum = largest.log().neg_()
            share = beside_sink = None
            if part.sinks is not None:
                sink = part.sinks.view(1, -1, 1)
                # The sink beside all keys, by exponentials: a difference of logarithms is off as far as they are large.
                beside = torch.exp(sink - top).clamp_(max=torch.finfo(top.dtype).max).mul_(largest)
                beside_sink, share = torch.log1p(beside), beside.add_(1.0).reciprocal_()
                if empty is not None:
                    share.masked_fill_(empty, EMPTY_WEIGHT)
            if "entropy" in names:
                entropy = self._entropy(part, logits, weights, log_sum)
                if share is not None and beside_sink is not None:
                    # Of weights that are a share of these: share * (entropy - ln share).
                    entropy.add_(beside_sink).mul_(share)
                self._put("entropy", block, entropy if empty is None else entropy.masked_fill_(empty, 0.0))
            if share is not None:
                weights.mul_(share.unsqueeze(-1))
                log_sum = torch.logaddexp(log_sum, sink - top)
            if "logsumexp" in names:
                lse = top + log_sum
                if empty is not None and part.sinks is None:
                    lse.masked_fill_(empty, EMPTY_LOGSUMEXP)
                elif empty is not None:
                    lse = torch.where(empty, sink, lse)
                self._put("logsumexp", block, lse)
        if "context" in names:
            assert value is not None
            if self._hazards.value:
                value = _without_hazards(part, block.keys, value, self._logits, checkpoint)
            context = _product(weights, value[:, :, block.keys])
            self._put("context", block, context if forbidden is None else context.add_(SIGNLESS_ZERO))
            # Copies of both go before the rest comes.
            del context, value
        if "weights" in names:
            self._put_weights(block, weights)
        if "weight_totals" in names:
            if self._touched is not None:
                own = self._touched[block.items, block.heads][:, :, block.at]
                weights.masked_fill_(own.unsqueeze(-1), 0.0)
            self._outputs["weight_totals"][block.items, block.target, block.keys] += weights.sum(dim=2)
        if "top_weights" in names:
            assert problem.top_k is not None
            if forbidden is not None:
                # Under every weight, 0 too: a forbidden key is never named.
                weights.masked_fill_(forbidden, -1.0)
            self._put_top(block, weights, checkpoint)
        return empty

    def _fill(
        self, part: CanonicalProblem, block: _Block, key: Tensor, logits: Tensor, forbidden: Tensor | None
    ) -> None:
        """The logits of a block, -inf where a pair is forbidden, made for a run of keys at a time.

        A hazard among them stays in its row or at its key, and so where a row is touched or a pair is forbidden.
        """
        query, rows_at = _by_itself(part.query[:, :, block.at], logits.dtype), block.rows
        if isinstance(block.at, slice):
            # Of a part the masks are views.
            part = part.part(slice(0, part.dims.batch), slice(0, part.dims.num_heads), block.at)
            part, rows_at = replace(part, select_rows=None), part.all_rows()
        rows = logits.shape[0] * logits.shape[1] * logits.shape[2]
        for run in even_runs(logits.shape[-1], max(1, TILE_PAIRS // rows)):
            keys = slice(block.keys.start + run.start, block.keys.start + run.stop)
            tile, of_keys = logits[..., run], _with_keys(part, keys)
            _scaled_scores(query, key[:, :, keys], part.scale, tile)
            if part.softcap is not None:
                tile.div_(part.softcap).tanh_().mul_(part.softcap)
            _add_to_logits(tile, of_keys, rows_at)
            if forbidden is not None:
                allowed = of_keys.allowed(rows_at)
                assert allowed is not None
                forbidden[..., run] = ~allowed
                del allowed
                tile.masked_fill_(forbidden[..., run], -math.inf)

    def _entropy(self, part: CanonicalProblem, logits: Tensor, weights: Tensor, log_sum: Tensor) -> Tensor:
        """-sum(w ln w) of weights that add up to 1 and their logits below the largest; the logits are lost.

        ln w = logit - log_sum. No term is large where the entropy is small: the largest logit is 0 here.
        """
        if self._forbidden is not None or part.bias is not None:
            # 0 times infinity is NaN.
            logits.clamp_(min=torch.finfo(logits.dtype).min)
        return logits.mul_(weights).sum(dim=-1).neg_().add_(log_sum).add_(0.0)

    def _put(self, name: str, block: _Block, found: Tensor) -> None:
        self._outputs[name][block.items, block.target, block.places] = found

    def _put_weights(self, block: _Block, weights: Tensor) -> None:
        whole = self._outputs["weights"][block.items, block.target, block.places]
        whole[..., : block.keys.start] = EMPTY_WEIGHT
        whole[..., block.keys] = weights
        whole[..., block.keys.stop :] = EMPTY_WEIGHT

    def _put_top(self, block: _Block, weights: Tensor, checkpoint: Checkpoint) -> None:
        top_weights, top_keys = (
            self._outputs[name][block.items, block.target, block.places] for name in ("top_weights", "top_keys")
        )
        count = min(top_keys.shape[-1], weights.shape[-1])
        shape = (*top_keys.shape[:-1], count)
        found, keys = top_of(weights.view(-1, weights.shape[-1]), count, top_weights.dtype, checkpoint)
        beyond = found < 0
        top_weights[..., :count] = found.masked_fill_(beyond, EMPTY_WEIGHT).view(shape)
        top_keys[..., :count] = keys.add_(block.keys.start).masked_fill_(beyond, -1).view(shape)
        top_weights[..., count:] = EMPTY_WEIGHT
        top_keys[..., count:] = -1


@dataclass(frozen=True, slots=True)
class _Block:
    """Where a block lies: ``target`` and ``places`` in the outputs, ``rows`` and ``at`` (by slice if all are computed)
    in the problem, ``keys`` those that any of its rows may see."""

    items: slice
    heads: slice
    target: slice
    places: slice
    rows: Tensor
    at: slice | Tensor
    keys: slice


def _seen(problem: CanonicalProblem, rows: range | tuple[int, ...]) -> slice:
    """The keys that causal and window let any of the rows see, as far as it is told without reading a tensor."""
    seq_len_kv, offset = problem.dims.seq_len_kv, problem.query_offset
    if isinstance(offset, Tensor):
        return slice(0, seq_len_kv)
    first, end = 0, seq_len_kv
    if problem.window_left is not None:
        first = min(rows) + offset - problem.window_left
    if problem.window_right is not None:
        end = max(rows) + offset + problem.window_right + 1
    if problem.causal:
        end = min(end, max(rows) + offset + 1)
    first = min(max(first, 0), seq_len_kv - 1)
    return slice(first, max(first + 1, min(end, seq_len_kv)))


def _with_keys(problem: CanonicalProblem, keys: slice) -> CanonicalProblem:
    """The same rules for a run of the keys alone."""

    def of(per_pair: Tensor | None) -> Tensor | None:
        return per_pair if per_pair is None or per_pair.shape[-1] == 1 else per_pair[..., keys]

    return replace(
        problem,
        dims=replace(problem.dims, seq_len_kv=keys.stop - keys.start),
        query_offset=problem.query_offset - keys.start,
        key_lengths=None if problem.key_lengths is None else problem.key_lengths - keys.start,
        allow_mask=of(problem.allow_mask),
        block_mask=of(problem.block_mask),
        bias=of(problem.bias),
    )


def _by_itself(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as it lies in a copy of its own, since BLAS picks its instructions by the address."""
    lying = tensor.contiguous() if tensor.dtype == dtype else tensor.to(dtype, memory_format=torch.contiguous_format)
    return lying.clone() if lying.data_ptr() % ALIGNMENT_BYTES else lying


def _without_hazards(
    problem: CanonicalProblem, keys: slice, value: Tensor, spare: Tensor, checkpoint: Checkpoint
) -> Tensor:
    """The values that are read, with every hazardous number in a run of keys as 0.

    They are overwritten if they are a copy; else they are copied to a buffer that is not in use, if it is large enough.
    """
    given, clean = problem.value, value
    if value.data_ptr() == given.data_ptr():
        fits = spare.numel() >= given.numel()
        clean = spare[: given.numel()].view(given.shape) if fits else torch.empty_like(given)
    given = given[:, :, keys]
    for piece in pieces(given.shape, CLEANED_AT_ONCE):
        own = replace(problem, value=given[piece])
        clean[:, :, keys][piece] = without_hazards(own, replace(NO_HAZARDS, value=True), checkpoint).value
    return clean


def _add_to_logits(tile: Tensor, problem: CanonicalProblem, rows: Tensor) -> None:
    """Take distances off the logits of listed rows against some keys, and add the bias."""
    alibi = problem.alibi(rows)
    if alibi is not None:
        tile.sub_(alibi)
    # It goes before a bias of another dtype comes.
    del alibi
    is_whole = rows.numel() == problem.dims.seq_len_q and problem.select_rows is None
    bias = rows_of(problem.bias, slice(None) if is_whole else rows)
    if bias is not None:
        tile.add_(bias.to(tile.dtype))


def _scaled_scores(query: Tensor, key: Tensor, scale: float, out: Tensor) -> None:
    """scale * query @ key^T into ``out``, the rows of the heads that share a key below each other."""
    items, kv_heads, num_keys, width = key.shape
    batch, rows = items * kv_heads, query.shape[1] // kv_heads * query.shape[2]
    queries, keys = query.view(batch, rows, width), key.flatten(0, 1).transpose(1, 2)
    target = out.flatten(0, 2).view(batch, rows, num_keys)
    if target.is_contiguous():
        torch.baddbmm(target, queries, keys, beta=0, alpha=scale, out=target)
        return
    for own, left, right in zip(target, queries, keys, strict=True):
        torch.addmm(own, left, right, beta=0, alpha=scale, out=own)


def _product(weights: Tensor, value: Tensor) -> Tensor:
    """weights @ value, the rows of the heads that share a value below each other."""
    items, heads, rows, num_keys = weights.shape
    batch = items * value.shape[1]
    found = torch.bmm(weights.view(batch, -1, num_keys), value.flatten(0, 1))
    return found.view(items, heads, rows, value.shape[-1])


def top_of(
    weights: Tensor, count: int, dtype: torch.dtype, checkpoint: Checkpoint = never_abandoned
) -> tuple[Tensor, Tensor]:
    """The largest of each row of ``[rows, keys]`` as rounded to ``dtype``, ties by the lower key; values and keys.

    Behind the largest of a group of neighbours stand all of its keys: whatever is among the first ``count`` stands in
    one of the first ``count`` groups, since each group before its own has a key that comes before it.
    """
    num_rows, num_keys = weights.shape
    top_weights = torch.empty(num_rows, count, dtype=dtype, device=weights.device)
    top_keys = torch.empty(num_rows, count, dtype=torch.int64, device=weights.device)
    group = group_size(num_keys, count)
    width = num_keys if group is None else count * group + num_keys % group
    for rows in runs(num_rows, max(1, RANKED_AT_ONCE // width)):
        checkpoint()
        found, keys = _candidates(weights[rows], count, group, dtype)
        places = _first(found, count)
        top_weights[rows] = found.gather(1, places)
        top_keys[rows] = places if keys is None else keys.gather(1, places)
        # The old candidates go before new ones come.
        del found, keys, places
    return top_weights, top_keys


def group_size(num_keys: int, count: int) -> int | None:
    """How many neighbouring keys make a group; None where all keys are ranked at once.

    To find the largest of a group takes about as long as to rank four keys.
    """
    fitting = [size for size in GROUP_SIZES if 4 * count * size <= num_keys]
    return min(fitting, key=lambda size: 4 * num_keys // size + count * size) if fitting else None


def _candidates(weights: Tensor, count: int, group: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Those weights among which the largest are, rounded, and their keys, rising; None for keys from 0 on."""
    num_rows, num_keys = weights.shape
    if group is None:
        return weights.to(dtype), None
    grouped = weights[:, : num_keys // group * group].view(num_rows, -1, group)
    groups = _first(grouped.amax(dim=-1).to(dtype), count).sort(dim=-1).values
    found = grouped[torch.arange(num_rows, device=weights.device).unsqueeze(1), groups].flatten(1)
    keys = (groups.unsqueeze(-1) * group + torch.arange(group, device=weights.device)).flatten(1)
    if num_keys % group:
        last = torch.arange(num_keys // group * group, num_keys, device=weights.device)
        found = torch.cat((found, weights[:, last[0] :]), dim=1)
        keys = torch.cat((keys, last.expand(num_rows, -1)), dim=1)
    return found.to(dtype), keys


def _first(numbers: Tensor, count: int) -> Tensor:
    """Where the largest of each row stand, from the largest on, ties by the lower place. 0 has no sign here."""
    if numbers.dtype == torch.float64:
        return torch.sort(numbers, dim=-1, descending=True, stable=True).indices[:, :count]
    # One whole number from the bits of each, which rise as it does, and its place: no two are equal.
    bits = numbers.to(torch.float32).view(torch.int32).to(torch.int64)
    bits.mul_(2**32).sub_(torch.arange(numbers.shape[1], device=numbers.device))
    return torch.topk(bits, count, dim=-1).values.neg_().bitwise_and_(2**32 - 1)
