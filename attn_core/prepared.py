"""What metadata alone decides about a checked problem: its kernel, why that one, what it costs.

Made once, used by whoever admits the problem and by the engine that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem, canonicalize
from attn_core.cost import FIXED_BYTES, Cost, attention_cost, weighted_sum_cost
from attn_core.errors import Fault, InvalidProblem
from attn_core.gradients_cost import gradients_cost
from attn_core.kernels import choose_path, fused
from attn_core.layer_cost import (
    attention_inside,
    attention_outputs,
    gradients_inside,
    layer_cost,
    layer_gradients_cost,
    needs_context,
    operand_gradients,
    without_numbers,
)
from attn_core.numerics import safe_operand, safe_square_sum, safe_value
from attn_core.placement import ALIGNMENT_BYTES
from attn_core.problem import (
    PAIR_GRADIENTS,
    RULE_NAMES,
    AttentionProblem,
    GradientsProblem,
    LayerGradientsProblem,
    LayerProblem,
    Problem,
    WeightedSumProblem,
)
from attn_core.validate.gradients import gradients_path_expectation, why_not_gradients
from attn_core.verification import VerifiedProblem, verification_cost

GRADIENTS = "gradients"
"""The pace of the backward pass, whichever path it is called."""


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
    def with_spare(self) -> Prepared:
        """The same with the memory admitted that huge or non-finite numbers take."""
        return replace(self, cost=self.cost.with_spare) if self.cost.spare_bytes else self

    @property
    def tokens(self) -> int:
        """Queries of all items, padding counted."""
        if self.plain is not None:
            return self.plain.query_shape[0] * self.plain.query_shape[2]
        if self.canonical is not None:
            return self.canonical.dims.batch * self.canonical.dims.seq_len_q
        if isinstance(self.problem, LayerProblem | LayerGradientsProblem):
            tokens = self.problem if isinstance(self.problem, LayerProblem) else self.problem.layer
            return math.prod(tokens.input.shape[:-1])
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


MOST_LISTED = 64
"""So many selected rows or heads may be part of a form that is kept."""


class KnownForms:
    """What was decided about attentions of forms seen before: kernel, why, cost. Without their numbers, and bounded.

    For use from one thread.
    """

    def __init__(self, *, max_forms: int = 4096) -> None:
        self._max_forms = max_forms
        self._found: dict[tuple[object, ...], tuple[str, str, Cost]] = {}

    def of(
        self, problem: CanonicalProblem, decide: Callable[[], tuple[str, str, Cost]], *asked: object
    ) -> tuple[str, str, Cost]:
        """What ``decide`` gives, which depends on the problem's metadata and on ``asked`` alone."""
        if any(
            listed is not None and len(listed) > MOST_LISTED for listed in (problem.select_heads, problem.select_rows)
        ):
            # A long list would be held as long as the form is known.
            return decide()
        form = (problem.key is problem.query, *asked, *(_metadata(getattr(problem, name)) for name in _FIELDS))
        if (found := self._found.get(form)) is None:
            if len(self._found) >= self._max_forms:
                self._found.clear()
            found = self._found[form] = decide()
        return found


_FIELDS = tuple(field.name for field in fields(CanonicalProblem))


def _metadata(value: object) -> object:
    return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else value


def prepare(problem: Problem, *, device_type: str, known: KnownForms | None = None) -> Prepared:
    """Decide what metadata and addresses decide, or look it up among the ``known``.

    Raises: InvalidProblem when the asked path cannot serve it.
    """
    found = _prepare(problem, device_type, known)
    copied = _bytes_copied_first(problem) if device_type == "cpu" else 0
    if copied <= FIXED_BYTES // 16:
        return found
    return replace(found, cost=replace(found.cost, peak_bytes=found.cost.peak_bytes + copied))


def _bytes_copied_first(problem: Problem) -> int:
    """Copies that stand beside what came: of tensors at other addresses than kernels read, and of masks that lie in
    another order, which layers count themselves."""
    counts_order = not isinstance(problem, LayerProblem | LayerGradientsProblem)
    return sum(
        tensor.nbytes
        for name, tensor in problem.tensors().items()
        if (tensor.data_ptr() % ALIGNMENT_BYTES and tensor.device.type == "cpu")
        or (counts_order and name in RULE_NAMES and not tensor.is_contiguous())
    )


def _prepare(problem: Problem, device_type: str, known: KnownForms | None = None) -> Prepared:
    if isinstance(problem, WeightedSumProblem):
        return Prepared(problem, "manual", "weights given", weighted_sum_cost(problem))
    if isinstance(problem, GradientsProblem):
        return _prepare_gradients(problem, device_type)
    if isinstance(problem, LayerProblem | LayerGradientsProblem):
        found = _prepare_layer(problem, device_type)
        return replace(found, cost=with_verification(found.cost, problem))
    canonical = canonicalize(problem)
    asked, refuses_empty_rows = problem.options.path, problem.options.empty_rows == "error"
    lies_by_heads = problem.options.layout == "bhtd"

    def decide() -> tuple[str, str, Cost]:
        path, why = choose_path(canonical, asked, device_type=device_type)
        cost = attention_cost(
            canonical,
            path,
            refuses_empty_rows=refuses_empty_rows,
            lies_by_heads=lies_by_heads,
            device_type=device_type,
        )
        return path, why, cost

    if known is None:
        path, why, cost = decide()
    else:
        path, why, cost = known.of(canonical, decide, asked, refuses_empty_rows, lies_by_heads, device_type)
    cost = with_verification(cost, problem)
    plain = _plain_form(problem, canonical, path, why, cost) if device_type == "cpu" else None
    return Prepared(problem, path, why, cost, canonical, plain)


def _prepare_gradients(problem: GradientsProblem, device_type: str) -> Prepared:
    asked, wanted = problem.asked, problem.options.path
    pairs = [name for name in asked if name in PAIR_GRADIENTS]
    path, why = ("manual", f"{pairs[0]} asked for") if pairs else ("blocked", "no matrix of pairs asked for")
    if wanted is not None:
        if (reason := why_not_gradients(wanted, asked)) is not None:
            raise InvalidProblem([Fault("path", gradients_path_expectation(reason, asked), wanted)])
        path, why = wanted, "asked for"
    canonical = canonicalize(problem.attention)
    grads = tuple(grad for grad in (problem.grad_context, problem.grad_logsumexp) if grad is not None)
    cost = gradients_cost(
        canonical,
        asked,
        grad_bytes=sum(grad.nbytes for grad in grads),
        sinks_bytes=0 if problem.attention.sinks is None else problem.attention.sinks.nbytes,
        is_self_attention=problem.attention.key is None,
        refuses_empty_rows=problem.options.empty_rows == "error",
        device_type=device_type,
    )
    cost = replace(with_verification(cost, problem), kernel=GRADIENTS)
    return Prepared(problem, path, why, cost, canonical)


def with_verification(cost: Cost, problem: VerifiedProblem) -> Cost:
    """The cost of a problem with what its verification takes, where it asks for one; ``flops`` stay the formula's."""
    if not asks_verification(problem):
        return cost
    more, inputs = verification_cost(problem), sum(tensor.nbytes for tensor in problem.tensors().values())
    # One after the other: what the kernel took besides is free again.
    verified_bytes = inputs + cost.output_bytes + more.scratch_bytes + FIXED_BYTES
    peak_bytes = max(cost.peak_bytes, verified_bytes)
    return replace(
        cost,
        pair_passes=cost.pair_passes + more.pair_passes,
        peak_bytes=peak_bytes,
        spare_bytes=max(0, cost.with_spare.peak_bytes - peak_bytes),
    )


def asks_verification(problem: Problem) -> bool:
    match problem:
        case WeightedSumProblem():
            return False
        case LayerProblem() | LayerGradientsProblem():
            return problem.options.attention.verify
    return problem.options.verify


def _prepare_layer(problem: LayerProblem | LayerGradientsProblem, device_type: str) -> Prepared:
    """Kernel and cost from the attention inside, whose operands have shapes only."""
    layer = problem if isinstance(problem, LayerProblem) else problem.layer
    operands = without_numbers(layer)
    context = operands.pop("context")
    if isinstance(problem, LayerProblem):
        inside = attention_inside(layer, operands, attention_outputs(layer.options.outputs))
        found = _prepare(inside, device_type)
        assert found.canonical is not None
        costs = [layer_cost(layer, found.canonical, one) for one in (found.cost, found.cost.with_spare)]
        cost = _with_spare_inside(*costs)
        return Prepared(problem, found.path, found.why, cost)
    forward = backward = None
    if needs_context(problem):
        forward = _prepare(attention_inside(layer, operands, ("context",)), device_type)
    if wanted := operand_gradients(problem):
        backward = _prepare(gradients_inside(layer, operands, wanted, context), device_type)
    chosen = backward or forward
    assert chosen is not None
    costs = [
        layer_gradients_cost(
            problem,
            None if forward is None else forward.cost,
            None if backward is None else backward.cost,
        )
        for forward, backward in (
            (forward, backward),
            (forward and forward.with_spare, backward and backward.with_spare),
        )
    ]
    return Prepared(problem, chosen.path, chosen.why, _with_spare_inside(*costs))


def _with_spare_inside(plain: Cost, spared: Cost) -> Cost:
    """The cost of what has an attention inside, from that without and with the spare bytes of this among its peak."""
    return replace(plain, spare_bytes=spared.peak_bytes - plain.peak_bytes)


def _plain_form(
    problem: AttentionProblem, canonical: CanonicalProblem, path: str, why: str, cost: Cost
) -> PlainForm | None:
    """The form of a problem that one call of SDPA answers; None for any other."""
    dims, dtype = canonical.dims, problem.query.dtype
    tensors = [problem.query, problem.key, problem.value]
    if (
        path != "fused"
        or problem.options.outputs != ("context",)
        or problem.options.verify
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
