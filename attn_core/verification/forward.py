"""Every output of an attention once more in float64, compared as it comes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.errors import Checkpoint
from attn_core.problem import SELECTABLE_BY_HEAD, SELECTABLE_BY_ROW, AttentionOptions
from attn_core.verification.comparison import Comparison, RowErrors
from attn_core.verification.pairs import Pairs, Part, Rows, Sizes, sizes_of, sum_over_allowed, taken

MATRICES = ("weights", "scores", "logits")


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which indices of a block are in the answer: where they stand in it, and where in the block."""

    places: Sequence[int]
    local: Sequence[int]


class Selection:
    """One axis of ``select``: everything, or the listed indices in their order."""

    def __init__(self, listed: Sequence[int] | None) -> None:
        self._places = None if listed is None else {index: place for place, index in enumerate(listed)}

    def of(self, block: Sequence[int]) -> Chosen:
        if self._places is None:
            return Chosen(block, range(len(block)))
        found = [(self._places[index], local) for local, index in enumerate(block) if index in self._places]
        return Chosen([place for place, _ in found], [local for _, local in found])


def computed_rows(pairs: Pairs, names: Sequence[str], options: AttentionOptions) -> Sequence[int]:
    """The rows that must be computed: all, or the selected ones where nothing asked needs the others."""
    if options.select_rows is not None and set(names) - {"top_keys"} <= SELECTABLE_BY_ROW:
        return options.select_rows
    return range(pairs.dims.seq_len_q)


def forward_sizes(pairs: Pairs, names: Sequence[str], options: AttentionOptions) -> Sizes:
    per_row = min(options.top_k or 0, pairs.dims.seq_len_kv) if "top_weights" in names else 0
    return sizes_of(pairs.dims, len(computed_rows(pairs, names, options)), per_row=per_row)


class Forward:
    """Compares ``outputs``, in the order ``[batch, num_heads, ...]``. A ``context`` to be filled in is float64."""

    def __init__(
        self,
        pairs: Pairs,
        outputs: Mapping[str, Tensor],
        options: AttentionOptions,
        comparison: Comparison,
        checkpoint: Checkpoint,
        *,
        context: Tensor | None = None,
    ) -> None:
        self._pairs = pairs
        self._outputs = outputs
        self._comparison = comparison
        self._checkpoint = checkpoint
        self._context = context
        names = [*outputs, *(["context"] if context is not None else [])]
        self._rows = computed_rows(pairs, names, options)
        self._size = forward_sizes(pairs, names, options)
        self._heads, self._selected = Selection(options.select_heads), Selection(options.select_rows)
        self._everything = Selection(None)
        self._needs_context = context is not None or "context" in outputs

    def run(self) -> None:
        for part in self._pairs.parts(self._size):
            by_name: dict[str, RowErrors] = {}
            totals: Tensor | None = None
            for start in range(0, len(self._rows), self._size.rows):
                block = Rows(
                    self._pairs, part, self._rows[start : start + self._size.rows], self._size, self._checkpoint
                )
                totals = self._block(block, by_name, totals)
                # The old block goes before a new one comes.
                del block
            for errors in by_name.values():
                self._comparison.settle(errors)
            if totals is not None:
                self._comparison.settle(self._see("weight_totals", part, None, totals, self._keys()))

    def _block(self, rows: Rows, by_name: dict[str, RowErrors], totals: Tensor | None) -> Tensor | None:
        """Compare some rows; ``by_name`` and ``totals`` collect what goes over several of them."""
        part, outputs, dims = rows.part, self._outputs, self._pairs.dims
        context = torch.zeros(*rows.shape, dims.head_dim_v, dtype=torch.float64, device=self._pairs.device)
        entropy = torch.zeros(rows.shape, dtype=torch.float64, device=self._pairs.device)
        ranking = _Ranking(rows, outputs["top_keys"].shape[-1]) if "top_keys" in outputs else None
        matrices: dict[str, RowErrors] = {}
        if totals is None and "weight_totals" in outputs:
            shape = (*rows.shape[:2], dims.seq_len_kv)
            totals = torch.zeros(shape, dtype=torch.float64, device=self._pairs.device)
        if ranking is not None:
            ranking.named = self._own("top_keys", part, rows.rows)
        for keys in rows.key_blocks:
            scores, logits, allowed = rows.logits(keys)
            weights = rows.weights(logits, allowed)
            for name, found in zip(MATRICES, (weights, scores, logits), strict=True):
                if name in outputs:
                    matrices[name] = self._see(name, part, rows.rows, found, keys).joined(matrices.get(name))
            if self._needs_context:
                found = sum_over_allowed(rows.grouped(weights), rows.grouped(allowed), rows.values(keys))
                context += rows.ungrouped(found)
            if "entropy" in outputs:
                entropy -= torch.xlogy(weights, weights).sum(dim=-1)
            if totals is not None:
                totals[..., keys.start : keys.stop] += weights.sum(dim=-2)
            if ranking is not None:
                ranking.add(weights, allowed, keys, self._chosen("top_keys", part, rows.rows))
        for errors in matrices.values():
            self._comparison.settle(errors)
        if self._context is not None:
            items, heads = part.items, part.heads
            own = self._context[items.start : items.stop, heads.start : heads.stop]
            own[:, :, rows.rows[0] : rows.rows[-1] + 1] = context
        if "context" in outputs:
            self._comparison.settle(self._see("context", part, rows.rows, context, range(dims.head_dim_v)))
        for name, per_row in (("logsumexp", rows.logsumexp), ("entropy", entropy)):
            if name in outputs:
                by_name[name] = self._see(name, part, rows.rows, per_row, None).joined(by_name.get(name))
        if ranking is not None:
            self._compare_ranking(ranking, part, rows.rows)
        return totals

    def _compare_ranking(self, ranking: _Ranking, part: Part, rows: Sequence[int]) -> None:
        heads, own = self._chosen("top_keys", part, rows)
        best = taken(taken(ranking.weights, 1, heads.local), 2, own.local)
        at = (part.items, heads.places, own.places, range(best.shape[-1]))
        if "top_weights" in self._outputs:
            got = self._own("top_weights", part, rows).to(best.device, torch.float64)
            self._comparison.settle(self._comparison.see("top_weights", got, best, at))
        num_allowed = taken(taken(ranking.num_allowed, 1, heads.local), 2, own.local)
        apart = ranking.apart(best, num_allowed)
        self._comparison.settle(self._comparison.note("top_keys", apart, best, at))

    def _keys(self) -> range:
        return range(self._pairs.dims.seq_len_kv)

    def _chosen(self, name: str, part: Part, rows: Sequence[int] | None) -> tuple[Chosen, Chosen]:
        selects_heads = name in SELECTABLE_BY_HEAD or name == "top_keys"
        selects_rows = name in SELECTABLE_BY_ROW or name == "top_keys"
        heads = (self._heads if selects_heads else self._everything).of(part.heads)
        return heads, (self._selected if selects_rows else self._everything).of(rows or range(0))

    def _own(self, name: str, part: Part, rows: Sequence[int] | None) -> Tensor:
        """The answer's piece for the block, on its own device and in its own dtype."""
        heads, own = self._chosen(name, part, rows)
        piece = taken(self._outputs[name][part.items.start : part.items.stop], 1, heads.places)
        return piece if rows is None else taken(piece, 2, own.places)

    def _see(self, name: str, part: Part, rows: Sequence[int] | None, want: Tensor, last: range | None) -> RowErrors:
        """Compare a block's piece of an output: ``[items, heads, rows, last]`` without the axes that are None."""
        heads, own = self._chosen(name, part, rows)
        got, at = self._own(name, part, rows), [part.items, heads.places]
        want = taken(want, 1, heads.local)
        if rows is not None:
            want = taken(want, 2, own.local)
            at.append(own.places)
        if last is not None:
            got = got[..., last.start : last.stop]
            at.append(last)
        return self._comparison.see(name, got.to(want.device, torch.float64), want, at)


class _Ranking:
    """The largest weights of some rows, found block by block, and those of the keys that the answer names."""

    named: Tensor

    def __init__(self, rows: Rows, width: int) -> None:
        device = rows.query.device
        self._width = width
        self._best = torch.empty(*rows.shape, 0, dtype=torch.float64, device=device)
        self._found: Tensor | None = None
        self.num_allowed = torch.zeros(rows.shape, dtype=torch.int64, device=device)

    @property
    def weights(self) -> Tensor:
        """The float64 weight of each rank, 0 beyond the allowed keys."""
        best = self._best
        if best.shape[-1] < self._width:
            best = torch.nn.functional.pad(best, (0, self._width - best.shape[-1]), value=-1.0)
        return torch.where(best == -1.0, 0.0, best)

    def add(self, weights: Tensor, allowed: Tensor, keys: range, chosen: tuple[Chosen, Chosen]) -> None:
        ranked = torch.cat([self._best, weights.masked_fill(~allowed, -1.0)], dim=-1)
        self._best = torch.topk(ranked, min(self._width, ranked.shape[-1]), dim=-1).values
        self.num_allowed += allowed.sum(dim=-1)
        heads, rows = chosen
        own = taken(taken(ranked[..., -len(keys) :], 1, heads.local), 2, rows.local)
        named = self.named.to(own.device, torch.int64) - keys.start
        here = (named >= 0) & (named < len(keys))
        if self._found is None:
            # A key that is none, or forbidden, has no weight at all.
            self._found = torch.full(named.shape, -1.0, dtype=torch.float64, device=own.device)
        self._found = torch.where(here, own.gather(-1, named.clamp(0, len(keys) - 1)), self._found)

    def apart(self, best: Tensor, num_allowed: Tensor) -> Tensor:
        """How far the named keys' weights are from those of their ranks: ties are no matter, a key twice is."""
        named = self.named.to(best.device, torch.int64)
        ranks = torch.arange(named.shape[-1], device=best.device)
        beyond = ranks >= num_allowed.unsqueeze(-1)
        if self._found is None:
            return torch.where(named == -1, 0.0, math.inf)
        apart = (self._found - best).abs().nan_to_num_(nan=math.inf)
        apart.masked_fill_(torch.isnan(self._found) & torch.isnan(best), 0.0)
        apart.masked_fill_(self._found == -1.0, math.inf)
        order = named.sort(dim=-1)
        again = torch.zeros_like(named, dtype=torch.bool)
        again[..., 1:] = order.values[..., 1:] == order.values[..., :-1]
        apart.masked_fill_(torch.zeros_like(again).scatter_(-1, order.indices, again), math.inf)
        return torch.where(beyond, torch.where(named == -1, 0.0, math.inf), apart)
