"""What metadata alone decides about a checked problem: its kernel, why that one, what it costs.

Made once, used by whoever admits the problem and by the engine that computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem, canonicalize
from attn_core.cost import Cost, attention_cost, weighted_sum_cost
from attn_core.kernels import choose_path, fused
from attn_core.numerics import safe_operand, safe_square_sum, safe_value
from attn_core.placement import ALIGNMENT_BYTES
from attn_core.problem import (
    AttentionProblem,
    GradientsProblem,
    LayerGradientsProblem,
    LayerProblem,
    Problem,
    WeightedSumProblem,
)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A checked problem, the kernel that will serve it, and what that takes.

    ``canonical`` is the form kernels read, None where it was not needed so far. ``plain`` is there for the simplest
    problems; ``numbers`` are then all of their numbers, flat, where they lie together.
    """

    problem: Problem
    path: str
    why: str
    cost: Cost
    canonical: CanonicalProblem | None = None
    plain: PlainForm | None = None
    numbers: tuple[Tensor, ...] | None = None

    @property
    def tokens(self) -> int:
        """Queries of all items, padding counted."""
        if self.plain is not None:
            return self.plain.query_shape[0] * self.plain.query_shape[2]
        if self.canonical is not None:
            return self.canonical.dims.batch * self.canonical.dims.seq_len_q
        assert isinstance(self.problem, WeightedSumProblem)
        weights = self.problem.weights
        return weights.shape[-2] * (weights.shape[0] if weights.ndim == 4 else 1)


@dataclass(frozen=True, slots=True, eq=False)
class PlainForm:
    """The attention of query, key and value alone by one call of the fused kernel, context the only output.

    Holds everything but the numbers, so that problems of one form share it. Shapes are of rank 4,
    ``[batch, heads, tokens, width]``; ``result_shape`` is the context in the caller's rank. Where the sum of the
    squares of all numbers is at most ``safe_square_sum``, none of them is hazardous.
    """

    dtype: torch.dtype
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    result_shape: tuple[int, ...]
    is_self_attention: bool
    is_causal: bool
    scale: float
    shares_heads: bool
    safe_square_sum: float
    safe_number: float
    path: str
    why: str
    cost: Cost


def prepare(problem: Problem, *, device_type: str) -> Prepared:
    """Decide what metadata decides. Raises: InvalidProblem when the asked path cannot serve the problem."""
    if isinstance(problem, WeightedSumProblem):
        return Prepared(problem, "manual", "weights given", weighted_sum_cost(problem))
    if isinstance(problem, GradientsProblem):
        return _prepare_gradients(problem, device_type)
    if isinstance(problem, LayerProblem | LayerGradientsProblem):
        return _prepare_layer(problem, device_type)
    canonical = canonicalize(problem)
    path, why = choose_path(canonical, problem.options.path, device_type=device_type)
    cost = attention_cost(canonical, path, device_type=device_type)
    plain = _plain_form(problem, canonical, path, why, cost) if device_type == "cpu" else None
    return Prepared(problem, path, why, cost, canonical, plain)


def _prepare_gradients(problem: GradientsProblem, device_type: str) -> Prepared:
    raise NotImplementedError


def _prepare_layer(problem: LayerProblem | LayerGradientsProblem, device_type: str) -> Prepared:
    raise NotImplementedError


def _plain_form(
    problem: AttentionProblem, canonical: CanonicalProblem, path: str, why: str, cost: Cost
) -> PlainForm | None:
    """The form of a problem that one call of SDPA answers; None for any other."""
    dims, dtype = canonical.dims, problem.query.dtype
    tensors = [problem.query, problem.key, problem.value]
    if (
        path != "fused"
        or problem.options.outputs != ("context",)
        or problem.options.layout != "bhtd"
        or fused.needs_mask(canonical)
        or fused.is_cut(canonical)
        or dims.num_pairs == 0
        or problem.alibi_slopes is not None
        or any(t is not None and (not t.is_contiguous() or t.data_ptr() % ALIGNMENT_BYTES) for t in tensors)
    ):
        return None
    safe_number = min(
        safe_operand(dtype, head_dim=dims.head_dim, scale=canonical.scale),
        safe_value(dtype, seq_len_kv=dims.seq_len_kv),
    )
    return PlainForm(
        dtype=dtype,
        query_shape=tuple(canonical.query.shape),
        key_shape=tuple(canonical.key.shape),
        value_shape=tuple(canonical.value.shape),
        result_shape=(*problem.query.shape[:-1], dims.head_dim_v),
        is_self_attention=problem.key is None,
        is_causal=fused.is_square_causal(canonical),
        scale=canonical.scale,
        shares_heads=dims.group_size > 1,
        safe_square_sum=safe_square_sum(safe_number),
        safe_number=safe_number,
        path=path,
        why=why,
        cost=cost,
    )
