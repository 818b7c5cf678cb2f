"""How far an answer is from the same in float64, by the plain formula.

A second hand on purpose: nothing here comes from ``maths``, the kernels or what cuts their blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.errors import Checkpoint
from attn_core.problem import (
    AttentionProblem,
    AttentionResult,
    GradientsProblem,
    LayerGradientsProblem,
    LayerProblem,
    Verification,
)
from attn_core.verification.backward import Backward
from attn_core.verification.comparison import COMPARED_AT_ONCE, Comparison
from attn_core.verification.cost import VerificationCost, VerifiedProblem, verification_cost
from attn_core.verification.forward import Forward
from attn_core.verification.layers import PROJECTED, compare_layer, compare_layer_gradients
from attn_core.verification.pairs import Pairs, Part, by_heads

__all__ = ["VerificationCost", "VerifiedProblem", "verification_cost", "verify"]


def verify(problem: VerifiedProblem, result: AttentionResult, checkpoint: Checkpoint) -> Verification:
    """Compute the outputs of an answer in float64, block by block, and compare. Raises: Abandoned.

    Works on the device that the answer was computed on, wherever its tensors lie. ``top_keys`` are not compared as
    numbers: the float64 weight of the key that is named counts against that of its rank.
    """
    outputs, device, comparison = result.outputs, torch.device(result.device), Comparison()
    form = _Form(problem, outputs)
    match problem:
        case AttentionProblem():
            canonical = {name: form.by_heads(name, tensor) for name, tensor in outputs.items()}
            Forward(Pairs.of(problem, device), canonical, problem.options, comparison, checkpoint).run()
        case GradientsProblem():
            _compare_gradients(problem, outputs, form, device, comparison, checkpoint)
        case LayerProblem():
            own = {"output", *PROJECTED}
            inside = {name: form.by_heads(name, tensor) for name, tensor in outputs.items() if name not in own}
            compare_layer(problem, outputs, inside, device, comparison, checkpoint)
        case LayerGradientsProblem():
            canonical = dict(outputs)
            if "grad_bias" in outputs:
                canonical["grad_bias"] = form.by_heads("grad_bias", outputs["grad_bias"])
            compare_layer_gradients(problem, canonical, device, comparison, checkpoint)
    return comparison.verification(form.place)


def _compare_gradients(
    problem: GradientsProblem,
    outputs: dict[str, Tensor],
    form: _Form,
    device: torch.device,
    comparison: Comparison,
    checkpoint: Checkpoint,
) -> None:
    pairs = Pairs.of(problem.attention, device)
    canonical = {name: form.by_heads(name, tensor) for name, tensor in outputs.items()}
    is_self_attention = problem.attention.key is None
    three_uses: dict[Part, Tensor] = {}

    def take(name: str, part: Part, gradient: Tensor) -> None:
        if is_self_attention:
            so_far = three_uses.pop(part, None)
            gradient = gradient if so_far is None else so_far + gradient
            if name != "grad_value":
                three_uses[part] = gradient
                return
            name = "grad_query"
        if name not in canonical:
            return
        heads = part.heads if name == "grad_query" else part.kv_heads
        num_tokens, width = gradient.shape[2:]
        step = max(1, COMPARED_AT_ONCE // (len(part.items) * len(heads) * width))
        for start in range(0, num_tokens, step):
            checkpoint()
            tokens = range(start, min(num_tokens, start + step))
            got = pairs.of_tokens(canonical[name], part.items, heads, tokens)
            want = gradient[:, :, tokens.start : tokens.stop]
            comparison.settle(comparison.see(name, got, want, (part.items, heads, tokens, range(width))))

    Backward(
        pairs,
        None if problem.grad_context is None else form.by_heads("grad_context", problem.grad_context),
        None if problem.grad_logsumexp is None else form.by_heads("grad_logsumexp", problem.grad_logsumexp),
        canonical,
        comparison,
        checkpoint,
        take=take,
    ).run()


class _Form:
    """The caller's layout and rank, there and back."""

    def __init__(self, problem: VerifiedProblem, outputs: dict[str, Tensor]) -> None:
        self._outputs = outputs
        self._layout, self._lacks = "bhtd", 0
        self._heads: dict[str, int | None] = {}
        match problem:
            case AttentionProblem():
                attention, options = problem, problem.options
            case GradientsProblem():
                attention, options = problem.attention, problem.options
            case LayerProblem():
                self._layout, self._lacks = "btd", 3 - problem.input.ndim
                self._heads = {"context": problem.options.attention.num_heads}
                return
            case _:
                return
        self._layout = options.layout
        if options.layout == "bhtd":
            self._lacks = 4 - attention.query.ndim
            return
        kv_heads = options.num_heads if options.num_kv_heads is None else options.num_kv_heads
        self._heads = dict.fromkeys(("context", "grad_context", "grad_query"), options.num_heads)
        self._heads |= dict.fromkeys(("grad_key", "grad_value"), kv_heads)

    def by_heads(self, name: str, tensor: Tensor) -> Tensor:
        """``[batch, heads, ...]``; a bias of rank 4, sinks as they are."""
        if name == "grad_sinks":
            return tensor
        lacks = 4 - tensor.ndim if name == "grad_bias" else self._lacks
        tensor = tensor.reshape((1,) * lacks + tuple(tensor.shape))
        return by_heads(tensor, self._layout, self._heads[name]) if name in self._heads else tensor

    def place(self, name: str, index: tuple[int, ...]) -> tuple[int, ...]:
        """Where an element that ``by_heads`` put at ``index`` stands in the answer."""
        shape = self._outputs[name].shape
        if name in self._heads:
            batch, head, token, column = index
            index = batch, token, head, column
            heads = self._heads[name]
            if self._layout == "btd" and heads is not None:
                index = batch, token, head * (shape[-1] // heads) + column
        return index[len(index) - len(shape) :]
