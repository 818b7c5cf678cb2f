"""A layer once more in float64: projections around the attention inside, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attn_core.errors import Checkpoint
from attn_core.problem import RULE_NAMES, AttentionProblem, LayerGradientsProblem, LayerProblem
from attn_core.verification.backward import Backward
from attn_core.verification.comparison import Comparison
from attn_core.verification.forward import Forward
from attn_core.verification.pairs import Pairs, Part, by_heads, sum_over_allowed

ROWS, INNER, COLUMNS = 512, 2048, 256
"""One step of a product: 2**29 flops, 14 MiB."""
PROJECTED = ("query", "key", "value")


def product(left: Tensor, right: Tensor, checkpoint: Checkpoint, *, isolates: bool = False) -> Tensor:
    """``left @ right`` of matrices in any dtype, float64, step by step.

    ``isolates``: what a number of ``left`` is multiplied by 0 for is not there, NaN too: a token that reaches nothing
    has no gradient.
    """
    (height, inner), width = left.shape, right.shape[1]
    total = torch.zeros(height, width, dtype=torch.float64, device=left.device)
    for rows in _runs(height, ROWS):
        for between in _runs(inner, INNER):
            own = left[rows, between].double()
            for columns in _runs(width, COLUMNS):
                checkpoint()
                other = right[between, columns].double()
                if isolates:
                    turned = sum_over_allowed(other.T, other.T != 0, own.T)
                    total[rows, columns] += turned.T
                else:
                    total[rows, columns] += own @ other
    return total


def _runs(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, total, size)]


class Layer:
    """The projections of a layer in float64, and the attention between them."""

    def __init__(self, problem: LayerProblem, device: torch.device, checkpoint: Checkpoint) -> None:
        self._problem = problem
        self._device = device
        self._checkpoint = checkpoint
        self._tensors = problem.tensors()
        self._turns = problem.options.weight_layout == "out_in"
        source = problem.input if problem.memory is None else problem.memory
        self.sources = {"query": problem.input, "key": source, "value": source}
        options = problem.options.attention
        assert options.num_heads is not None
        kv_heads = options.num_heads if options.num_kv_heads is None else options.num_kv_heads
        self.heads = {"query": options.num_heads, "key": kv_heads, "value": kv_heads}
        self.projected = {name: self._project(name, tensor) for name, tensor in self.sources.items()}
        rules = {name: self._tensors[name] for name in RULE_NAMES if name in self._tensors}
        inside = AttentionProblem(
            **self.projected, **rules, options=replace(options, layout="btd", num_kv_heads=kv_heads)
        )
        self.pairs = Pairs.of(inside, device)

    def weight(self, name: str) -> Tensor:
        """A projection's matrix as ``[in, out]``."""
        matrix = self._tensors[f"w_{name}"].to(self._device)
        return matrix.T if self._turns else matrix

    def as_given(self, gradient: Tensor) -> Tensor:
        """The gradient of a matrix ``[in, out]`` as the layer's weights lie."""
        return gradient.T if self._turns else gradient

    def _project(self, name: str, tensor: Tensor) -> Tensor:
        """``[batch, tokens, columns]``."""
        batched = tensor if tensor.ndim == 3 else tensor.unsqueeze(0)
        return self.through(name, flat(batched).to(self._device)).view(*batched.shape[:-1], self.weight(name).shape[1])

    def through(self, name: str, rows: Tensor) -> Tensor:
        found = product(rows, self.weight(name), self._checkpoint)
        bias = self._tensors.get(f"b_{name}")
        return found if bias is None else found.add_(bias.to(self._device, torch.float64))

    def new_context(self) -> Tensor:
        """Room for the context in float64, ``[batch, seq_len_q, num_heads * head_dim_v]``."""
        dims = self.pairs.dims
        width = dims.num_heads * dims.head_dim_v
        return torch.zeros(dims.batch, dims.seq_len_q, width, dtype=torch.float64, device=self._device)


def compare_layer(
    problem: LayerProblem,
    outputs: Mapping[str, Tensor],
    inside: Mapping[str, Tensor],
    device: torch.device,
    comparison: Comparison,
    checkpoint: Checkpoint,
) -> None:
    """``outputs`` as the caller has them; ``inside`` those of the attention, ``[batch, num_heads, ...]``."""
    layer = Layer(problem, device, checkpoint)
    for name in PROJECTED:
        if name in outputs:
            want = by_heads(layer.projected[name], "btd", layer.heads[name])
            comparison.see_whole(name, outputs[name], want if outputs[name].ndim == 4 else want[0], checkpoint)
    needs_output = "output" in outputs
    if not inside and not needs_output:
        return
    context = layer.new_context() if needs_output else None
    split = None if context is None else by_heads(context, "btd", layer.heads["query"])
    options = problem.options.attention
    Forward(layer.pairs, inside, options, comparison, checkpoint, context=split).run()
    if context is not None:
        want = layer.through("output", flat(context))
        comparison.see_whole("output", outputs["output"], want.view(outputs["output"].shape), checkpoint)


def compare_layer_gradients(
    problem: LayerGradientsProblem,
    outputs: Mapping[str, Tensor],
    device: torch.device,
    comparison: Comparison,
    checkpoint: Checkpoint,
) -> None:
    """``outputs`` as the caller has them, but ``grad_bias`` of rank 4."""
    layer = Layer(problem.layer, device, checkpoint)
    pairs, num_heads = layer.pairs, layer.heads["query"]
    grad_output = flat(problem.grad_output).to(device)
    found: dict[str, Tensor] = {}
    if "grad_w_output" in outputs:
        context = layer.new_context()
        split = by_heads(context, "btd", num_heads)
        Forward(pairs, {}, problem.options.attention, comparison, checkpoint, context=split).run()
        found["grad_w_output"] = layer.as_given(product(flat(context).T, grad_output, checkpoint))
        del context, split
    if "grad_b_output" in outputs:
        found["grad_b_output"] = grad_output.double().sum(dim=0)
    grad_context = product(grad_output, layer.weight("output").T, checkpoint)
    grad_context = grad_context.view(pairs.dims.batch, pairs.dims.seq_len_q, num_heads * pairs.dims.head_dim_v)
    gradients = {name: torch.zeros_like(tensor) for name, tensor in layer.projected.items()}

    def take(name: str, part: Part, gradient: Tensor) -> None:
        name = name.removeprefix("grad_")
        heads = part.heads if name == "query" else part.kv_heads
        split = by_heads(gradients[name], "btd", layer.heads[name])
        split[part.items.start : part.items.stop, heads.start : heads.stop] = gradient

    Backward(
        pairs,
        by_heads(grad_context, "btd", num_heads),
        None,
        {name: outputs[name] for name in ("grad_bias", "grad_sinks") if name in outputs},
        comparison,
        checkpoint,
        take=take,
    ).run()
    for name, gradient in gradients.items():
        rows, source = flat(gradient), flat(layer.sources[name]).to(device)
        if f"grad_w_{name}" in outputs:
            found[f"grad_w_{name}"] = layer.as_given(product(source.T, rows, checkpoint, isolates=True))
        if f"grad_b_{name}" in outputs:
            found[f"grad_b_{name}"] = rows.sum(dim=0)
        target = "grad_input" if name == "query" or problem.layer.memory is None else "grad_memory"
        if target in outputs:
            share = product(rows, layer.weight(name).T, checkpoint)
            found[target] = share if target not in found else found[target].add_(share)
    for name, want in found.items():
        comparison.see_whole(name, outputs[name], want.reshape(outputs[name].shape), checkpoint)


def flat(tensor: Tensor) -> Tensor:
    """Tokens of all items as rows."""
    return tensor.reshape(-1, tensor.shape[-1])
