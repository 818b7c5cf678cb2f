"""The ragged kernel: torch's variable-length attention over sequences laid end to end. Gives context and logsumexp.

On CUDA it is FlashAttention, half dtypes alone. It is only handed what it answers right: finite numbers that cannot
overflow, a scale above 0, sequences with a query and a key, and windows as ``window_bounds`` of the packing makes them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from attn_core.numerics import EMPTY_LOGSUMEXP, SIGNLESS_ZERO

VarlenAttention = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBatch:
    """Sequences end to end, each query attending its own sequence's keys alone.

    query ``[total_tokens, num_heads, head_dim]``, key and value with their own total and ``num_kv_heads``;
    ``cu_seqlens_q`` and ``cu_seqlens_kv`` int32 ``[batch + 1]``. Query i of a sequence stands at key
    i + seq_len_kv - seq_len_q and attends from ``window_left`` keys before it to ``window_right`` behind it; None is
    open, and a right side of 0 is causal.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seq_len_q: int
    max_seq_len_kv: int
    scale: float
    window_left: int | None = None
    window_right: int | None = None
    wants_logsumexp: bool = False


class _Aux(NamedTuple):
    """What varlen_attn reads of an AuxRequest."""

    lse: bool


class RaggedKernel:
    """``varlen_attn`` with what this version of torch has of it. ``varlen`` stands in for it where there is no GPU."""

    def __init__(self, varlen: VarlenAttention | None = None) -> None:
        self._varlen = _varlen_of_torch() if varlen is None else varlen
        parameters = inspect.signature(self._varlen).parameters
        self._has_gqa = "enable_gqa" in parameters
        self.has_num_splits = "num_splits" in parameters
        """Whether it can be told not to split the keys of a sequence by the longest of the batch (torch from 2.12 on).

        Without it the bits of a sequence depend on its neighbours, so that one problem alone may make a batch.
        """

    def attend(self, batch: RaggedBatch) -> tuple[Tensor, Tensor | None]:
        """context ``[total_tokens, num_heads, head_dim]`` and, where asked, logsumexp ``[num_heads, total_tokens]``."""
        key, value = batch.key, batch.value
        group_size = batch.query.shape[1] // key.shape[1]
        given: dict[str, Any] = {}
        if self.has_num_splits:
            given["num_splits"] = 1
        if group_size > 1 and self._has_gqa:
            given["enable_gqa"] = True
        elif group_size > 1:
            key, value = (tensor.repeat_interleave(group_size, dim=1) for tensor in (key, value))
        is_open = batch.window_left is None and batch.window_right is None
        found = self._varlen(
            batch.query,
            key,
            value,
            batch.cu_seqlens_q,
            batch.cu_seqlens_kv,
            batch.max_seq_len_q,
            batch.max_seq_len_kv,
            scale=batch.scale,
            window_size=(_or_open(batch.window_left), _or_open(batch.window_right)),
            return_aux=_Aux(lse=True) if batch.wants_logsumexp else None,
            **given,
        )
        context, lse = found if batch.wants_logsumexp else (found, None)
        if not is_open:
            context = context.add_(SIGNLESS_ZERO)
        if lse is not None:
            # An empty row has +inf there, and nothing else has: logits are finite.
            lse = lse.masked_fill(lse == math.inf, EMPTY_LOGSUMEXP)
        return context, lse


def _varlen_of_torch() -> VarlenAttention:
    # Here and not above: it takes torch._dynamo with it, a second that only a GPU is worth.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _or_open(bound: int | None) -> int:
    return -1 if bound is None else bound
