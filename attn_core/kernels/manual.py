"""The manual kernel: scores, mask, softmax, weighted sum. Gives every output from one pass over blocks of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem
from attn_core.hazards import Hazards
from attn_core.kernels.output import KernelOutput
from attn_core.maths.context import weighted_context, weighted_context_of_allowed
from attn_core.maths.masks import rows_of
from attn_core.maths.scores import logits_from_scores, score_matrix
from attn_core.maths.softmax import masked_softmax, row_entropy, row_logsumexp
from attn_core.numerics import SIGNLESS_ZERO
from attn_core.problem import SELECTABLE_BY_ROW, Dims

WHOLE_PAIRS = 2**22
"""Up to this many query-key pairs the matrices are made in one piece."""
BLOCK_PAIRS = 2**20
MIN_BLOCK_ROWS = 16


def block_rows(dims: Dims, num_rows: int) -> int:
    """How many query rows are computed at once: a matter of the problem's shape alone, never of load."""
    per_row = max(1, dims.batch * dims.num_heads * dims.seq_len_kv)
    if num_rows * per_row <= WHOLE_PAIRS:
        return max(1, num_rows)
    return min(num_rows, max(MIN_BLOCK_ROWS, BLOCK_PAIRS // per_row))


def computed_rows(problem: CanonicalProblem) -> tuple[int, ...] | None:
    """The rows that must be computed: the selected ones where no asked output needs them all, else None for all."""
    if problem.select_rows is not None and set(problem.outputs) <= SELECTABLE_BY_ROW:
        return problem.select_rows
    return None


def attend(problem: CanonicalProblem, hazards: Hazards) -> KernelOutput:
    """Every asked output, ``[batch, num_heads, ...]``, rounded once from float32 (float64 for float64)."""
    dims, arithmetic, storage = problem.dims, problem.compute_dtype, problem.query.dtype
    key, value = problem.key.to(arithmetic), problem.value.to(arithmetic)
    value_is_finite = not hazards.value or bool(torch.isfinite(value).all())
    only = computed_rows(problem)
    listed = problem.all_rows() if only is None else torch.tensor(only, device=problem.device)
    gather = _Gather(problem, whole_rows=only is None)
    empty_parts, nonfinite_parts = [], []
    size = block_rows(dims, listed.numel())
    for start in range(0, listed.numel(), size):
        rows = listed[start : start + size]
        at: Tensor | slice = slice(start, start + rows.numel()) if only is None else rows
        query = problem.query[:, :, at].to(arithmetic)
        scores = score_matrix(query, key)
        gather.rows("scores", scores, at)
        allowed = problem.allowed(rows)
        logits = logits_from_scores(
            scores,
            scale=problem.scale,
            softcap=problem.softcap,
            alibi=problem.alibi(rows),
            bias=rows_of(problem.bias, at),
            allowed=allowed,
        )
        del scores
        gather.rows("logits", logits, at)
        shape = (dims.batch, dims.num_heads, rows.numel())
        empty = None if allowed is None else (~allowed.any(dim=-1)).expand(shape)
        weights = masked_softmax(logits, allowed, problem.sinks)
        if gather.wants("logsumexp"):
            gather.rows("logsumexp", row_logsumexp(logits, empty, problem.sinks), at)
        del logits
        nonfinite = torch.isnan(weights.sum(dim=-1)) if hazards.any else None
        if gather.wants("entropy"):
            gather.rows("entropy", row_entropy(weights), at)
        if gather.wants("context"):
            context = (
                weighted_context(weights, value)
                if value_is_finite
                else weighted_context_of_allowed(weights, value, allowed)
            ).to(storage)
            if allowed is not None:
                context = context + SIGNLESS_ZERO
            if nonfinite is not None:
                nonfinite = nonfinite | ~torch.isfinite(context).all(dim=-1)
            gather.rows("context", context, at)
        if gather.wants("weight_totals"):
            gather.add_totals(weights)
        if gather.wants("weights") or gather.wants("top_weights"):
            stored = weights.to(storage)
            gather.rows("weights", stored, at)
            if gather.wants("top_weights"):
                gather.top(stored, allowed, at)
        if empty is not None:
            empty_parts.append(empty)
        if nonfinite is not None:
            nonfinite_parts.append(nonfinite)
    return KernelOutput(
        outputs=gather.outputs(),
        empty=torch.cat(empty_parts, dim=-1) if empty_parts and only is None else None,
        covers_all_rows=only is None,
        nonfinite=torch.cat(nonfinite_parts, dim=-1) if nonfinite_parts else None,
    )


class _Gather:
    """Collects blocks of rows into the asked outputs, keeping the selected heads and rows only."""

    def __init__(self, problem: CanonicalProblem, *, whole_rows: bool) -> None:
        self._problem = problem
        self._asked = set(problem.outputs)
        self._whole_rows = whole_rows
        self._parts: dict[str, list[Tensor]] = {}
        self._totals: Tensor | None = None
        device = problem.device
        self._heads = None if problem.select_heads is None else torch.tensor(problem.select_heads, device=device)

    def wants(self, name: str) -> bool:
        return name in self._asked

    def rows(self, name: str, block: Tensor, at: Tensor | slice) -> None:
        """Take rows ``at`` of an output, if it is asked for."""
        if name not in self._asked and name != "top_keys":
            return
        if name in SELECTABLE_BY_ROW or name == "top_keys":
            if self._heads is not None:
                block = block.index_select(1, self._heads)
            if self._problem.select_rows is not None and self._whole_rows:
                assert isinstance(at, slice)
                inside = sorted(row - at.start for row in self._problem.select_rows if at.start <= row < at.stop)
                if not inside:
                    return
                block = block[:, :, inside]
        self._parts.setdefault(name, []).append(block)

    def add_totals(self, weights: Tensor) -> None:
        totals = weights.sum(dim=2)
        if self._heads is not None:
            totals = totals.index_select(1, self._heads)
        self._totals = totals if self._totals is None else self._totals + totals

    def top(self, weights: Tensor, allowed: Tensor | None, at: Tensor | slice) -> None:
        """The top_k of each row, ties by the lower key, ranked as stored; 0 and -1 where fewer keys are allowed."""
        top_k = self._problem.top_k
        assert top_k is not None
        width = min(top_k, weights.shape[-1])
        if allowed is not None:
            # Under every weight, 0 too: a forbidden key is never named.
            weights = weights.masked_fill(~allowed, -1.0)
        top_weights, top_keys = torch.sort(weights, dim=-1, descending=True, stable=True)
        top_weights, top_keys = top_weights[..., :width], top_keys[..., :width]
        beyond = top_weights < 0
        self.rows("top_weights", top_weights.masked_fill(beyond, 0.0), at)
        self.rows("top_keys", top_keys.masked_fill(beyond, -1), at)

    def outputs(self) -> dict[str, Tensor]:
        order = None
        if self._problem.select_rows is not None and self._whole_rows:
            # Blocks come in rising order; give the rows in the order in which they were asked.
            rising = sorted(range(len(self._problem.select_rows)), key=self._problem.select_rows.__getitem__)
            place = {index: position for position, index in enumerate(rising)}
            order = torch.tensor([place[i] for i in range(len(rising))], device=self._problem.device)
        result = {}
        for name in (*self._problem.outputs, "top_keys"):
            if name == "weight_totals":
                assert self._totals is not None
                result[name] = self._totals
            elif name in self._parts:
                parts = self._parts.pop(name)
                whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
                if order is not None and (name in SELECTABLE_BY_ROW or name == "top_keys"):
                    whole = whole.index_select(2, order)
                result[name] = whole
        return result
