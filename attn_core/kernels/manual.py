"""The manual kernel: scores, mask, softmax, weighted sum. Gives every output from one pass over blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem
from attn_core.cut import Cut, cut_heads_first, even, even_runs, runs
from attn_core.errors import Checkpoint, never_abandoned
from attn_core.hazards import Hazards
from attn_core.kernels.output import KernelOutput, named_outputs, new_output
from attn_core.maths.context import weighted_context, weighted_context_of_allowed
from attn_core.maths.masks import rows_of
from attn_core.maths.scores import logits_from_scores, score_matrix
from attn_core.maths.softmax import masked_softmax, row_entropy, row_logsumexp
from attn_core.numerics import SIGNLESS_ZERO
from attn_core.problem import SELECTABLE_BY_HEAD, SELECTABLE_BY_ROW, Dims

WHOLE_PAIRS = 2**22
"""Up to this many query-key pairs the matrices are made in one piece."""
BLOCK_PAIRS = 2**20
MIN_BLOCK_ROWS = 16
BLOCK_FLOPS = 2**31
"""And no block takes more, where heads are wide: 20 to 45 ms of one core."""
SUM_PAIRS = 2**25
"""And so many weights of a weighted sum, which is as fast as they are read."""
SORTED_PAIRS = 2**20
"""So many weights are ranked between two checkpoints: 60 ms."""


def cut(dims: Dims, num_rows: int) -> Cut:
    """How much is computed at once: a matter of the problem's shape alone, never of load."""
    whole = _most_pairs(dims, WHOLE_PAIRS)
    per_row = max(1, dims.batch * dims.num_heads * dims.seq_len_kv)
    if num_rows * per_row <= whole:
        return Cut(dims.batch, dims.num_heads, max(1, num_rows))
    rows = min(num_rows, max(MIN_BLOCK_ROWS, _most_pairs(dims, BLOCK_PAIRS) // per_row))
    return cut_again(dims, Cut(dims.batch, dims.num_heads, rows))


def cut_again(dims: Dims, block: Cut) -> Cut:
    """Fewer items and heads where even a block of few rows is much."""
    whole = _most_pairs(dims, WHOLE_PAIRS)
    if block.items * block.heads * block.rows * dims.seq_len_kv <= whole:
        return block
    num_kv_heads = max(1, block.heads // dims.group_size)
    axes = replace(dims, batch=block.items, num_heads=block.heads, num_kv_heads=num_kv_heads, seq_len_q=block.rows)
    return cut_heads_first(axes, whole)


def _most_pairs(dims: Dims, pairs: int) -> int:
    return max(1, min(pairs, BLOCK_FLOPS // max(1, 2 * (dims.head_dim + dims.head_dim_v))))


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


def attend(problem: CanonicalProblem, hazards: Hazards, checkpoint: Checkpoint = never_abandoned) -> KernelOutput:
    """Every asked output, ``[batch, num_heads, ...]``, rounded once from float32 (float64 for float64)."""
    dims, arithmetic = problem.dims, problem.compute_dtype
    only = computed_rows(problem)
    listed = problem.all_rows() if only is None else torch.tensor(only, device=problem.device)
    size = cut(dims, listed.numel())
    answer = _Answer(problem, size, num_rows=listed.numel())
    marks = (dims.batch, dims.num_heads, listed.numel())
    empty = nonfinite = None
    if not problem.forbids_nothing:
        empty = torch.empty(marks, dtype=torch.bool, device=problem.device)
    if hazards.any:
        nonfinite = torch.empty(marks, dtype=torch.bool, device=problem.device)
    for items, heads in size.parts(dims):
        part = problem.part(items, heads)
        # Lying alike whatever they hold: where something is not finite, a copy of them is multiplied.
        key, value = part.key.to(arithmetic).contiguous(), part.value.to(arithmetic).contiguous()
        value_is_finite = not hazards.value or bool(torch.isfinite(value).all())
        for places in even_runs(listed.numel(), size.rows):
            rows = listed[places]
            at = places if only is None else rows
            answer.turn_to(items, heads, places)
            checkpoint()
            scores = score_matrix(part.query[:, :, at].to(arithmetic), key)
            answer.take("scores", scores)
            allowed = part.allowed(rows)
            checkpoint()
            logits = logits_from_scores(
                scores,
                scale=problem.scale,
                softcap=problem.softcap,
                alibi=part.alibi(rows),
                bias=rows_of(part.bias, at),
                allowed=allowed,
            )
            del scores
            answer.take("logits", logits)
            none_allowed = None if allowed is None else (~allowed.any(dim=-1)).expand(logits.shape[:3])
            checkpoint()
            weights = masked_softmax(logits, allowed, part.sinks)
            if answer.wants("logsumexp"):
                answer.take("logsumexp", row_logsumexp(logits, none_allowed, part.sinks))
            del logits
            unsound = torch.isnan(weights.sum(dim=-1)) if hazards.any else None
            if answer.wants("entropy"):
                answer.take("entropy", row_entropy(weights))
            checkpoint()
            if answer.wants("context"):
                context = (
                    weighted_context(weights, value)
                    if value_is_finite
                    else weighted_context_of_allowed(weights, value, allowed)
                ).to(problem.query.dtype)
                if allowed is not None:
                    context = context + SIGNLESS_ZERO
                if unsound is not None:
                    unsound = unsound | ~torch.isfinite(context).all(dim=-1)
                answer.take("context", context)
                checkpoint()
            if answer.wants("weight_totals"):
                answer.add("weight_totals", weights.sum(dim=2))
            if answer.wants("weights") or answer.wants("top_weights"):
                weights = weights.to(problem.query.dtype)
                answer.take("weights", weights)
                if answer.wants("top_weights"):
                    assert problem.top_k is not None
                    top_weights, top_keys = _top(weights, allowed, problem.top_k, checkpoint)
                    answer.take("top_weights", top_weights)
                    answer.take("top_keys", top_keys)
            del weights
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


def _top(weights: Tensor, allowed: Tensor | None, top_k: int, checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    """The top_k of each row, ties by the lower key, ranked as stored; 0 and -1 where fewer keys are allowed."""
    seq_len_kv = weights.shape[-1]
    if allowed is not None:
        # Under every weight, 0 too: a forbidden key is never named.
        weights = weights.masked_fill(~allowed, -1.0)
    shape = (*weights.shape[:-1], min(top_k, seq_len_kv))
    ranked = weights.reshape(-1, seq_len_kv)
    top_weights = torch.empty(ranked.shape[0], shape[-1], dtype=weights.dtype, device=weights.device)
    top_keys = torch.empty(top_weights.shape, dtype=torch.int64, device=weights.device)
    for rows in runs(ranked.shape[0], max(1, SORTED_PAIRS // seq_len_kv)):
        checkpoint()
        found, keys = torch.sort(ranked[rows], dim=-1, descending=True, stable=True)
        top_weights[rows], top_keys[rows] = found[:, : shape[-1]], keys[:, : shape[-1]]
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
        self._found: dict[str, Tensor] = {}
        self._at: tuple[slice, slice, slice] | None = None

    def wants(self, name: str) -> bool:
        return name in self._names

    def turn_to(self, items: slice, heads: slice, rows: slice) -> None:
        """The items, heads and computed rows of the blocks that follow."""
        self._at = items, heads, rows

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
        if name not in self._names:
            return
        assert self._at is not None
        items, heads, rows = self._at
        by_row, by_head = (name in names or name == "top_keys" for names in (SELECTABLE_BY_ROW, SELECTABLE_BY_HEAD))
        to_heads, of_heads = _chosen(self._problem.select_heads if by_head else None, heads)
        to_rows, of_rows = _chosen(self._select_rows if by_row else None, rows)
        if of_heads is not None:
            block = block[:, of_heads]
        if of_rows is not None:
            block = block[:, :, of_rows]
        if self._is_one_block:
            self._found[name] = block
            return
        if name not in self._found:
            self._found[name] = new_output(self._problem, name)
        found = self._found[name][items]
        # One head after the other, as a list of heads beside a list of rows would mean pairs of them.
        lines: Sequence[int | slice] = [to_heads] if isinstance(to_heads, slice) else to_heads
        for place, head in enumerate(lines):
            own = block if isinstance(head, slice) else block[:, place]
            if name == "weight_totals":
                found[:, head] = found[:, head] + own if adds else own
            else:
                found[:, head, to_rows] = own


def _chosen(selected: tuple[int, ...] | None, run: slice) -> tuple[slice | list[int], list[int] | None]:
    """Where in an output the lines of one run of an axis go, and which lines of the run these are; None for all."""
    if selected is None:
        return run, None
    pairs = [(place, line - run.start) for place, line in enumerate(selected) if run.start <= line < run.stop]
    return [place for place, _ in pairs], [line for _, line in pairs]
