"""One attention as a model called it, and the same as a problem of the core: rank 4, masks by their meaning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from attn_core.problem import AttentionOptions, AttentionProblem


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SeenCall:
    """The arguments of one attention, as ``scaled_dot_product_attention`` takes them.

    ``lengths`` [batch]: so many tokens of each item are not padding, of queries and keys alike (a nested batch).
    ``own_weights``: what the model itself computed, per head, without dropout. ``owner`` is the parameter by which a
    module can be told that has no frame of its own. ``unreadable`` says why the numbers cannot be looked at.
    """

    function: str
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    lengths: Tensor | None = None
    own_weights: Tensor | None = None
    owner: Tensor | None = None
    unreadable: str | None = None

    def detached(self) -> SeenCall:
        """The same without a graph behind any tensor."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        detached: dict[str, Any] = {name: t.detach() for name, t in own.items() if isinstance(t, Tensor)}
        return replace(self, **detached)


def why_unreadable(*tensors: Tensor | None) -> str | None:
    """Why the numbers of these cannot be read beside the model; None where they can."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "inside a transform of torch.func"
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.is_nested:
            return "a nested tensor"
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"a tensor of type {type(tensor).__name__}"
        if tensor.device.type == "meta":
            return "tensors on device meta have no numbers"
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return "inside the recording of a CUDA graph"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Posed:
    """A seen call as a problem, and the axes before the last of what comes back, as the model's own call has them."""

    problem: AttentionProblem
    lead: tuple[int, ...]

    def in_callers_rank(self, output: Tensor) -> Tensor:
        """An output ``[batch, num_heads, ...]`` with the axes of the call in place of these two."""
        return output.reshape(*self.lead, *output.shape[2:])

    def count_empty_rows(self) -> int:
        """Rows, of one head each, that may attend no key: by mask, -inf in the bias, and is_causal."""
        problem = self.problem
        batch, num_heads, seq_len_q, _ = problem.query.shape
        assert problem.key is not None
        seq_len_kv = problem.key.shape[2]
        allowed = torch.ones(1, 1, 1, seq_len_kv, dtype=torch.bool, device=problem.query.device)
        if problem.allow_mask is not None:
            allowed = allowed & problem.allow_mask
        if problem.bias is not None:
            allowed = allowed & (problem.bias != -math.inf)
        if problem.options.causal is not False:
            allowed = allowed & torch.ones(seq_len_q, seq_len_kv, dtype=torch.bool, device=allowed.device).tril()
        empty = ~allowed.any(dim=-1)
        return int(empty.expand(batch, num_heads, seq_len_q).sum().item())


def pose(seen: SeenCall, outputs: Sequence[str], *, top_k: int | None = None) -> Posed:
    """The problem of a seen call. What torch broadcasts is broadcast: batch axes of any number become one.

    Key and value heads stay as few as they are where the core shares them. ``is_causal`` starts upper left, as torch
    has it. Raises: RuntimeError from torch where shapes do not broadcast (heads of key and value under ``enable_gqa``).
    """
    given = (seen.query, seen.key, seen.value)
    rank = max(4, *(tensor.ndim for tensor in given), 0 if seen.attn_mask is None else seen.attn_mask.ndim)
    query, key, value = (_with_rank(tensor, rank) for tensor in given)
    mask = None if seen.attn_mask is None else _with_rank(seen.attn_mask, rank)
    operands = (query, key, value) if mask is None else (query, key, value, mask)
    batch = _broadcast(*(tensor.shape[:-3] for tensor in operands))
    heads_of = query.shape[-3:-2] if seen.enable_gqa else _broadcast(*(tensor.shape[-3:-2] for tensor in operands))
    heads_kv = _broadcast(key.shape[-3:-2], value.shape[-3:-2])
    if mask is not None:
        # Of rank 4 it is broadcast by the core, without memory.
        mask_batch = mask.shape[:-3] if set(mask.shape[:-3]) <= {1} else batch
        mask = mask if rank == 4 else _merged(mask, mask_batch, mask.shape[-3:-2])
    is_boolean = mask is not None and mask.dtype == torch.bool
    problem = AttentionProblem(
        query=_merged(query, batch, heads_of),
        key=_merged(key, batch, heads_kv),
        value=_merged(value, batch, heads_kv),
        allow_mask=mask if is_boolean else None,
        bias=None if is_boolean else mask,
        key_lengths=seen.lengths,
        query_lengths=seen.lengths,
        options=AttentionOptions(
            causal="upper_left" if seen.is_causal else False,
            scale=None if seen.scale is None else float(seen.scale),
            outputs=tuple(outputs),
            top_k=top_k,
        ),
    )
    num_lead = max(tensor.ndim for tensor in given) - 2
    return Posed(problem, (*batch, *heads_of)[rank - 2 - num_lead :])


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape of shapes of one rank; where there is none, expanding to it fails.

    Not torch's function of this name, whose first call imports a computer algebra system for most of a second.
    """
    return tuple(next((axis for axis in axes if axis != 1), 1) for axes in zip(*shapes, strict=True))


def _with_rank(tensor: Tensor, rank: int) -> Tensor:
    return tensor.reshape((1,) * (rank - tensor.ndim) + tuple(tensor.shape))


def _merged(tensor: Tensor, batch: Sequence[int], heads: Sequence[int]) -> Tensor:
    """Broadcast to these axes, and those of the batch in one."""
    wide = tensor.expand(*batch, *heads, *tensor.shape[-2:])
    return wide.reshape(math.prod(batch), *wide.shape[-3:])
