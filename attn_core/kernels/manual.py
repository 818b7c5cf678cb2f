"""The manual kernel: scores, mask, softmax, weighted sum. Gives every output from one pass over blocks.

A block is computed from its scores to its weights in one place, which stays near the processor while all steps go over
it. So whole weights cost little more than a fused kernel that returns none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem
from attn_core.cut import Cut, cut_heads_first, even, even_runs, runs
from attn_core.errors import Checkpoint, never_abandoned
from attn_core.hazards import Hazards
from attn_core.kernels.output import KernelOutput, named_outputs, new_output, output_dtype
from attn_core.maths.context import weighted_context, weighted_context_of_allowed
from attn_core.maths.masks import attends_any, bits_of, fill_forbidden_, rows_of
from attn_core.maths.scores import logits_from_scores, score_matrix
from attn_core.maths.softmax import masked_softmax, row_entropy, row_logsumexp
from attn_core.numerics import SIGNLESS_ZERO, is_within, largest
from attn_core.placement import empty_in_step
from attn_core.problem import SELECTABLE_BY_HEAD, SELECTABLE_BY_ROW, Dims

BLOCK_PAIRS = 2**20
"""So many query-key pairs make a block, of float32 four mebibytes: a whole head of 1024 queries and keys."""
MIN_BLOCK_ROWS = 16
BLOCK_FLOPS = 2**31
"""And no block takes more, where heads are wide: 20 to 45 ms of one core."""
KEY_NUMBERS = 2**17
"""So many numbers of keys, or of values, are multiplied at once: what is copied of them, to the dtype of the arithmetic
or without numbers that are not finite, takes no more."""
BLOCK_KEY_NUMBERS = 2**19
"""And a block of several heads has no more."""
SUM_PAIRS = 2**25
"""And so many weights of a weighted sum, which is as fast as they are read."""
SORTED_PAIRS = 2**18
"""So many weights are ranked between two checkpoints: 15 ms."""


def cut(dims: Dims, num_rows: int, *, pairs: int | None = None) -> Cut:
    """How much is computed at once: a matter of the problem's shape alone, never of load.

    ``pairs`` at most where that is given, one row of one head at least.
    """
    rows = max(1, num_rows)
    axes = replace(dims, seq_len_q=rows)
    by_flops = BLOCK_FLOPS // max(1, 2 * (dims.head_dim + dims.head_dim_v))
    # Few rows have many keys for each pair.
    by_keys = BLOCK_KEY_NUMBERS * dims.group_size * rows // max(1, dims.head_dim, dims.head_dim_v)
    most = max(1, min(BLOCK_PAIRS if pairs is None else pairs, by_flops))
    found = cut_heads_first(axes, max(1, min(most, by_keys)))
    if rows * dims.seq_len_kv > most:
        rows = even(rows, max(MIN_BLOCK_ROWS if pairs is None else 1, most // dims.seq_len_kv))
    return replace(found, rows=rows)


def cut_sum(dims: Dims) -> Cut:
    """How much of a weighted sum is computed at once; only its ``head_dim_v`` counts."""
    pairs = min(SUM_PAIRS, BLOCK_FLOPS // max(1, 2 * dims.head_dim_v))
    found = cut_heads_first(dims, pairs)
    most = max(MIN_BLOCK_ROWS, pairs // max(1, dims.seq_len_kv))
    return replace(found, rows=even(dims.seq_len_q, most) if found.heads == 1 else dims.seq_len_q)


def computed_rows(problem: CanonicalProblem) -> tuple[int, ...] | None:
    """The rows that must be computed: the selected ones where no asked output needs them all, else None for all."""
    if problem.select_rows is not None and set(problem.outputs) <= SELECTABLE_BY_ROW:
        return problem.select_rows
    return None


def computes_in_place(problem: CanonicalProblem) -> bool:
    """Whether blocks are computed where the weights are to stand: all of them are asked for, in this arithmetic."""
    selects = problem.select_heads is not None or (problem.select_rows is not None and computed_rows(problem) is None)
    return "weights" in problem.outputs and not selects and problem.query.dtype == problem.compute_dtype


def attend(problem: CanonicalProblem, hazards: Hazards, checkpoint: Checkpoint = never_abandoned) -> KernelOutput:
    """Every asked output, ``[batch, num_heads, ...]``, rounded once from float32 (float64 for float64)."""
    dims, arithmetic = problem.dims, problem.compute_dtype
    only = computed_rows(problem)
    num_rows = dims.seq_len_q if only is None else len(only)
    size = cut(dims, num_rows)
    answer = _Answer(problem, size, num_rows=num_rows)
    marks = (dims.batch, dims.num_heads, num_rows)
    empty = nonfinite = None
    if not problem.forbids_nothing:
        empty = torch.empty(marks, dtype=torch.bool, device=problem.device)
    if hazards.any:
        nonfinite = torch.empty(marks, dtype=torch.bool, device=problem.device)
    # In another dtype they are copied once, and rows below each other then.
    half = problem.query.dtype != arithmetic
    memory_format = torch.contiguous_format if half else torch.preserve_format
    buffer: Tensor | None = None
    masks = _Masks(problem)
    for items, heads, places, part in _blocks(problem, size, num_rows):
        checkpoint()
        answer.turn_to(items, heads, places)
        at: Tensor | slice = places if only is None else torch.tensor(only[places], device=problem.device)
        shape = (part.dims.batch, part.dims.num_heads, places.stop - places.start, dims.seq_len_kv)
        block = answer.place_of_weights()
        if block is None:
            if buffer is None:
                largest = size.items * size.heads * size.rows * dims.seq_len_kv
                buffer = torch.empty(largest, dtype=arithmetic, device=problem.device)
            block = buffer[: math.prod(shape)].view(shape)
        _scores(part.query[:, :, at].to(arithmetic, memory_format=memory_format), part.key, out=block)
        answer.take("scores", block)
        none_allowed, unsound = _answer_block(
            part, at, block, masks.of(part, at, (items.start, heads.start, places.start)), hazards, answer, checkpoint
        )
        if empty is not None and none_allowed is not None:
            empty[items, heads, places] = none_allowed
        if nonfinite is not None and unsound is not None:
            nonfinite[items, heads, places] = unsound
    return KernelOutput(
        outputs=answer.outputs(),
        empty=empty if only is None else None,
        covers_all_rows=only is None,
        nonfinite=nonfinite,
    )


def _answer_block(
    problem: CanonicalProblem,
    at: Tensor | slice,
    block: Tensor,
    mask: _Mask,
    hazards: Hazards,
    answer: _Answer,
    checkpoint: Checkpoint,
) -> tuple[Tensor | None, Tensor | None]:
    """Everything that follows from the scores of a block, which become its weights; nothing else of it stays.

    Gives which of its rows may attend no key, and which are not finite, each None where it was not looked at.
    """
    logits = logits_from_scores(
        block,
        scale=problem.scale,
        softcap=problem.softcap,
        alibi=None if problem.alibi_slopes is None else problem.alibi(problem.all_rows()[at]),
        bias=rows_of(problem.bias, at),
        allowed=mask.bits,
        out=block,
    )
    answer.take("logits", logits)
    none_allowed = None if mask.none_allowed is None else mask.none_allowed.expand(block.shape[:3])
    if answer.wants("logsumexp"):
        answer.take("logsumexp", row_logsumexp(logits, none_allowed, problem.sinks))
    weights = masked_softmax(logits, mask.bits, problem.sinks, out=block)
    unsound = torch.isnan(weights.sum(dim=-1)) if hazards.any else None
    if answer.wants("entropy"):
        answer.take("entropy", row_entropy(weights))
    if answer.wants("context"):
        context = _context(weights, problem.value, mask.allowed, hazards).to(problem.query.dtype)
        if mask.allowed is not None:
            context += SIGNLESS_ZERO
        if unsound is not None:
            # Both are NaN where any number of the row is.
            unsound = unsound | ~(context.amax(dim=-1).isfinite() & context.amin(dim=-1).isfinite())
        answer.take("context", context)
        del context
    if answer.wants("weight_totals"):
        answer.add("weight_totals", weights.sum(dim=2))
    if answer.wants("top_weights"):
        assert problem.top_k is not None
        top_weights, top_keys = _top(weights, mask.bits, problem.top_k, problem.query.dtype, checkpoint)
        answer.take("top_weights", top_weights)
        answer.take("top_keys", top_keys)
    answer.take("weights", weights)
    return none_allowed, unsound


def _blocks(
    problem: CanonicalProblem, size: Cut, num_rows: int
) -> Iterator[tuple[slice, slice, slice, CanonicalProblem]]:
    """Items, heads and computed rows of each block, and the part of the problem that has these items and heads.

    The rows of a head follow each other, for its keys lie near then; but those of one mask do where heads share it.
    """
    if size.leaves_whole(problem.dims):
        yield slice(0, size.items), slice(0, size.heads), slice(0, num_rows), problem
        return
    parts = ((items, heads, problem.part(items, heads)) for items, heads in size.parts(problem.dims))
    places = list(even_runs(num_rows, size.rows))
    if problem.forbids_nothing or all(problem.masks_apart):
        yield from ((items, heads, rows, part) for items, heads, part in parts for rows in places)
    else:
        every = list(parts)
        yield from ((items, heads, rows, part) for rows in places for items, heads, part in every)


def _scores(query: Tensor, key: Tensor, *, out: Tensor) -> None:
    """query @ key^T in the dtype of the query."""
    if key.numel() <= KEY_NUMBERS:
        score_matrix(query, _in_a_row(key, query.dtype), out=out)
        return
    for keys in _key_runs(key):
        score_matrix(query, _in_a_row(key[:, :, keys], query.dtype), out=out[..., keys])


def _context(weights: Tensor, value: Tensor, allowed: Tensor | None, hazards: Hazards) -> Tensor:
    """weights @ value over allowed pairs only, in the dtype of the weights."""
    if value.numel() <= KEY_NUMBERS:
        return _context_of_run(weights, value, allowed, hazards)
    context = None
    for keys in _key_runs(value):
        pairs = None if allowed is None else allowed.expand(weights.shape)[..., keys]
        found = _context_of_run(weights[..., keys], value[:, :, keys], pairs, hazards)
        context = found if context is None else context.add_(found)
        # The old sum goes before a new one comes.
        del found
    assert context is not None
    return context


def _context_of_run(weights: Tensor, value: Tensor, allowed: Tensor | None, hazards: Hazards) -> Tensor:
    # Lying alike whatever they hold: where something is not finite, a copy of them in step with them is multiplied.
    value = _in_a_row(value, weights.dtype)
    if not hazards.value or is_within(value, math.inf) or largest(value) < math.inf:
        return weighted_context(weights, value)
    return weighted_context_of_allowed(weights, value, allowed, room=empty_in_step(value))


def _in_a_row(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor contiguous in a dtype, copied once at most."""
    return tensor.contiguous() if tensor.dtype == dtype else tensor.to(dtype, memory_format=torch.contiguous_format)


def _key_runs(keys: Tensor) -> Iterator[slice]:
    """Of ``[items, heads, seq_len_kv, width]`` the runs of keys that are multiplied at once."""
    return even_runs(keys.shape[2], max(1, KEY_NUMBERS // (keys.shape[0] * keys.shape[1] * keys.shape[3])))


class _Mask:
    """Which pairs of a block are allowed, in the forms that its steps read; nothing where all of them are."""

    __slots__ = ("allowed", "bits", "none_allowed")

    def __init__(self, allowed: Tensor | None, arithmetic: torch.dtype) -> None:
        self.allowed = allowed
        self.bits = None if allowed is None else bits_of(allowed, arithmetic)
        self.none_allowed = None if allowed is None else ~attends_any(allowed)


class _Masks:
    """The masks of the blocks, each made once for all that it serves: heads, as a rule."""

    def __init__(self, problem: CanonicalProblem) -> None:
        self._by_item, self._by_head = problem.masks_apart
        self._arithmetic = problem.compute_dtype
        self._made_for: object = None
        self._mask = _Mask(None, self._arithmetic)

    def of(self, part: CanonicalProblem, at: Tensor | slice, place: tuple[int, int, int]) -> _Mask:
        """The mask of some rows of a part, whose first item, head and row are the ``place``."""
        if part.forbids_nothing:
            return self._mask
        item, head, row = place
        own = (item if self._by_item else None, head if self._by_head else None, row)
        if own != self._made_for:
            # The old mask goes before a new one comes.
            self._mask = _Mask(None, self._arithmetic)
            if isinstance(at, slice):
                # Of a part the masks are views.
                part = part.part(slice(0, part.dims.batch), slice(0, part.dims.num_heads), at)
                part = replace(part, select_rows=None)
            allowed = part.allowed(part.all_rows() if isinstance(at, slice) else at)
            self._mask, self._made_for = _Mask(allowed, self._arithmetic), own
        return self._mask


def _top(
    weights: Tensor, allowed_bits: Tensor | None, top_k: int, dtype: torch.dtype, checkpoint: Checkpoint
) -> tuple[Tensor, Tensor]:
    """The top_k of each row, ties by the lower key, ranked as stored; 0 and -1 where fewer keys are allowed."""
    seq_len_kv = weights.shape[-1]
    if allowed_bits is not None:
        # Under every weight, 0 too: a forbidden key is never named.
        fill_forbidden_(weights, allowed_bits, -1.0)
    shape = (*weights.shape[:-1], min(top_k, seq_len_kv))
    ranked = weights.view(-1, seq_len_kv)
    top_weights = torch.empty(ranked.shape[0], shape[-1], dtype=dtype, device=weights.device)
    top_keys = torch.empty(top_weights.shape, dtype=torch.int64, device=weights.device)
    for rows in runs(ranked.shape[0], max(1, SORTED_PAIRS // seq_len_kv)):
        checkpoint()
        found, keys = torch.sort(ranked[rows].to(dtype), dim=-1, descending=True, stable=True)
        top_weights[rows], top_keys[rows] = found[:, : shape[-1]], keys[:, : shape[-1]]
        # The old ranks go before new ones come.
        del found, keys
    if allowed_bits is not None:
        fill_forbidden_(weights, allowed_bits, 0.0)
    beyond = top_weights < 0
    return top_weights.masked_fill_(beyond, 0.0).view(shape), top_keys.masked_fill_(beyond, -1).view(shape)


class _Answer:
    """Collects blocks into the asked outputs, keeping the selected heads and rows only."""

    def __init__(self, problem: CanonicalProblem, size: Cut, *, num_rows: int) -> None:
        dims = problem.dims
        self._problem = problem
        self._names = named_outputs(problem)
        self._is_one_block = (size.items, size.heads, size.rows) == (dims.batch, dims.num_heads, num_rows)
        # Where only the selected rows are computed, they come as asked for.
        self._select_rows = problem.select_rows if computed_rows(problem) is None else None
        by_head = {*SELECTABLE_BY_HEAD, "top_keys"} if problem.select_heads is not None else set()
        by_row = {*SELECTABLE_BY_ROW, "top_keys"} if self._select_rows is not None else set()
        self._whole = {name for name in self._names if name not in by_head | by_row}
        self._computes_in_place = computes_in_place(problem)
        self._found: dict[str, Tensor] = {}
        self._at: tuple[slice, slice, slice] | None = None

    def wants(self, name: str) -> bool:
        return name in self._names

    def turn_to(self, items: slice, heads: slice, rows: slice) -> None:
        """The items, heads and computed rows of the blocks that follow."""
        self._at = items, heads, rows

    def place_of_weights(self) -> Tensor | None:
        """Where the weights of the block are to stand, if it may be computed there from its scores on."""
        if not self._computes_in_place:
            return None
        assert self._at is not None
        if "weights" not in self._found:
            self._found["weights"] = new_output(self._problem, "weights")
        return self._found["weights"][self._at]

    def take(self, name: str, block: Tensor) -> None:
        """A block of an output, if it is asked for."""
        self._put(name, block, adds=False)

    def add(self, name: str, block: Tensor) -> None:
        """A block of an output that is a sum over rows, ``[items, heads, ...]``."""
        assert self._at is not None
        self._put(name, block, adds=self._at[2].start > 0)

    def outputs(self) -> dict[str, Tensor]:
        return {name: self._found[name] for name in self._names}

    def _put(self, name: str, block: Tensor, *, adds: bool) -> None:
        if name not in self._names or (name == "weights" and self._computes_in_place):
            return
        assert self._at is not None
        items, heads, rows = self._at
        if name in self._whole and self._is_one_block:
            self._found[name] = self._kept(name, block)
            return
        if name not in self._found:
            self._found[name] = new_output(self._problem, name)
        by_row, by_head = (name in names or name == "top_keys" for names in (SELECTABLE_BY_ROW, SELECTABLE_BY_HEAD))
        to_rows, of_rows = _chosen(self._select_rows if by_row else None, rows)
        for to_heads, of_heads in _lines(self._problem.select_heads if by_head else None, heads):
            found, own = self._found[name][items, to_heads], block[:, of_heads]
            if adds:
                found.add_(own)
            elif name == "weight_totals":
                found.copy_(own)
            else:
                found[:, :, to_rows] = own if of_rows is None else own[:, :, of_rows].to(found.dtype)

    def _kept(self, name: str, block: Tensor) -> Tensor:
        # The next steps write over these.
        return block.clone() if name in ("scores", "logits") else block.to(output_dtype(self._problem, name))


def _chosen(selected: tuple[int, ...] | None, run: slice) -> tuple[slice | list[int], list[int] | None]:
    """Where in an output the lines of one run of an axis go, and which lines of the run these are; None for all."""
    if selected is None:
        return run, None
    pairs = [(place, line - run.start) for place, line in enumerate(selected) if run.start <= line < run.stop]
    return [place for place, _ in pairs], [line for _, line in pairs]


def _lines(selected: tuple[int, ...] | None, run: slice) -> Iterator[tuple[slice, slice]]:
    """The same one after the other, as a list of heads beside a list of rows would mean pairs of them."""
    if selected is None:
        yield run, slice(None)
        return
    for place, line in enumerate(selected):
        if run.start <= line < run.stop:
            yield slice(place, place + 1), slice(line - run.start, line - run.start + 1)
