"""Every gradient of an attention once more in float64, by the explicit formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from attn_core.errors import Checkpoint
from attn_core.problem import PAIR_GRADIENTS
from attn_core.verification.comparison import Comparison, RowErrors
from attn_core.verification.pairs import Pairs, Part, Rows, sizes_of, sum_over_allowed

Take = Callable[[str, Part, Tensor], None]
"""Gets a gradient of query, key or value of one part, float64, ``[items, heads, tokens, width]``."""


class Backward:
    """The gradients of sum(grad_context * context) + sum(grad_logsumexp * logsumexp).

    ``grad_context`` ``[batch, num_heads, seq_len_q, head_dim_v]`` and ``grad_logsumexp`` in any dtype. Those of pairs
    are compared with ``outputs`` as they come; those of query, key and value go to ``take``, part by part.

    dV = W^T dC; dW = dC V^T; dL = W (dW - sum of W dW over the row + dlse), from which the others follow.
    """

    def __init__(
        self,
        pairs: Pairs,
        grad_context: Tensor | None,
        grad_logsumexp: Tensor | None,
        outputs: Mapping[str, Tensor],
        comparison: Comparison,
        checkpoint: Checkpoint,
        *,
        take: Take,
    ) -> None:
        self._pairs = pairs
        self._grad_context = grad_context
        self._grad_logsumexp = grad_logsumexp
        self._outputs = outputs
        self._comparison = comparison
        self._checkpoint = checkpoint
        self._take = take
        self._size = sizes_of(pairs.dims, pairs.dims.seq_len_q)

    def run(self) -> None:
        pairs, dims, size = self._pairs, self._pairs.dims, self._size
        self._grad_bias = (
            self._zeros(pairs.bias.shape) if "grad_bias" in self._outputs and pairs.bias is not None else None
        )
        self._grad_sinks = self._zeros((dims.num_heads,))
        for part in pairs.parts(size):
            items, kv_heads = len(part.items), len(part.kv_heads)
            grad_query = self._zeros((items, len(part.heads), dims.seq_len_q, dims.head_dim))
            grad_key = self._zeros((items, kv_heads, dims.seq_len_kv, dims.head_dim))
            grad_value = self._zeros((items, kv_heads, dims.seq_len_kv, dims.head_dim_v))
            for start in range(0, dims.seq_len_q, size.rows):
                listed = range(start, min(dims.seq_len_q, start + size.rows))
                rows = Rows(pairs, part, listed, size, self._checkpoint)
                self._block(rows, listed, grad_query, grad_key, grad_value)
                del rows
            self._take("grad_query", part, grad_query)
            self._take("grad_key", part, grad_key)
            self._take("grad_value", part, grad_value)
        if self._grad_bias is not None:
            self._comparison.see_whole("grad_bias", self._outputs["grad_bias"], self._grad_bias, self._checkpoint)
        if "grad_sinks" in self._outputs:
            self._comparison.see_whole("grad_sinks", self._outputs["grad_sinks"], self._grad_sinks)

    def _zeros(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(tuple(shape), dtype=torch.float64, device=self._pairs.device)

    def _block(self, rows: Rows, listed: range, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        pairs, part = self._pairs, rows.part
        grad_context, grad_lse = self._of_rows(self._grad_context, rows), self._of_rows(self._grad_logsumexp, rows)

        def weight_gradients(keys: range, allowed: Tensor) -> Tensor:
            if grad_context is None:
                return torch.zeros(allowed.shape, dtype=torch.float64, device=pairs.device)
            found = rows.ungrouped(rows.grouped(grad_context) @ rows.values(keys).transpose(-1, -2))
            return found.masked_fill_(~allowed, 0.0)

        through = self._zeros(rows.shape)
        for keys in rows.key_blocks:
            _, logits, allowed = rows.logits(keys)
            through += (rows.weights(logits, allowed) * weight_gradients(keys, allowed)).sum(dim=-1)
        upstream = -through if grad_lse is None else grad_lse - through
        if pairs.sinks is not None:
            # An empty row has no gradient, whatever its sink takes.
            of_sinks = (rows.sink_weights * upstream).masked_fill(rows.is_empty, 0.0).sum(dim=(0, 2))
            self._grad_sinks[part.heads.start : part.heads.stop] += of_sinks
        seen: dict[str, RowErrors] = {}
        for keys in rows.key_blocks:
            scores, logits, allowed = rows.logits(keys)
            weights = rows.weights(logits, allowed)
            grad_weights = weight_gradients(keys, allowed)
            grad_logits = weights * (grad_weights + upstream.unsqueeze(-1))
            grad_logits.masked_fill_(~allowed, 0.0)
            for name, found in (("grad_weights", grad_weights), ("grad_logits", grad_logits)):
                if name in self._outputs:
                    seen[name] = self._see(name, part, listed, keys, found).joined(seen.get(name))
            self._add_to_bias(part, listed, keys, grad_logits)
            grad_scores = grad_logits * pairs.scale
            if pairs.softcap is not None:
                grad_scores *= 1.0 - torch.tanh(pairs.scale * scores / pairs.softcap).square()
                grad_scores.masked_fill_(~allowed, 0.0)
            by_row, may = rows.grouped(grad_scores), rows.grouped(allowed)
            own = slice(keys.start, keys.stop)
            found = sum_over_allowed(by_row, may, rows.keys(keys))
            grad_query[:, :, listed.start : listed.stop] += rows.ungrouped(found)
            grad_key[:, :, own] += sum_over_allowed(by_row.transpose(-1, -2), may.transpose(-1, -2), rows.query)
            if grad_context is not None:
                by_key = rows.grouped(weights).transpose(-1, -2)
                grad_value[:, :, own] += sum_over_allowed(by_key, may.transpose(-1, -2), rows.grouped(grad_context))
        for errors in seen.values():
            self._comparison.settle(errors)

    def _of_rows(self, tensor: Tensor | None, rows: Rows) -> Tensor | None:
        if tensor is None:
            return None
        return self._pairs.of_tokens(tensor, rows.part.items, rows.part.heads, rows.rows)

    def _see(self, name: str, part: Part, rows: range, keys: range, want: Tensor) -> RowErrors:
        assert name in PAIR_GRADIENTS
        got = self._pairs.of_pairs(self._outputs[name], part, rows, keys).double()
        return self._comparison.see(name, got.expand_as(want), want, (part.items, part.heads, rows, keys))

    def _add_to_bias(self, part: Part, rows: range, keys: range, grad_logits: Tensor) -> None:
        if self._grad_bias is None:
            return
        target = self._grad_bias
        for axis, which in enumerate((part.items, part.heads, rows, keys)):
            if target.shape[axis] > 1:
                target = target.narrow(axis, which.start, len(which))
            else:
                grad_logits = grad_logits.sum(dim=axis, keepdim=True)
        target += grad_logits
