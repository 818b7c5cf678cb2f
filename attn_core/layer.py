"""A layer: attention between learned projections, forward and backward.

Everything between the projections is held in the dtype of the arithmetic, and a result is rounded once, at its end.
Each problem is projected at its own shape, so its bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attn_core.canonical import canonicalize
from attn_core.cut import runs
from attn_core.errors import Checkpoint
from attn_core.hazards import find_hazards
from attn_core.kernels import backward
from attn_core.layer_cost import (
    OPERANDS,
    STORED,
    LayerDims,
    attention_inside,
    attention_outputs,
    cut_marks,
    gradients_inside,
    layer_dims,
    matrix_of,
    needs_context,
    operand_gradients,
    token_source,
)
from attn_core.maths.heads import split_heads
from attn_core.numerics import compute_dtype, largest
from attn_core.placement import bring_back, place
from attn_core.prepared import Prepared
from attn_core.problem import (
    AttentionProblem,
    AttentionResult,
    GradientsProblem,
    LayerGradientsProblem,
    LayerProblem,
    WeightLayout,
)
from attn_core.projections import (
    NUMBERS_AT_ONCE,
    WIDENED_AT_ONCE,
    add_product,
    project,
    rounded,
    rows_with_gradient,
    sum_of_products,
    sum_of_rows,
)

RunAttention = Callable[[AttentionProblem], AttentionResult]
RunGradients = Callable[[GradientsProblem], AttentionResult]


def run_layer(
    problem: LayerProblem,
    prepared: Prepared,
    *,
    device: torch.device,
    attend: RunAttention,
    checkpoint: Checkpoint,
) -> AttentionResult:
    """The asked outputs of a layer; ``attend`` runs the attention inside.

    Raises: InvalidProblem for an empty row where these are an error, Abandoned.
    """
    asked, storage, dims = problem.options.outputs, problem.input.dtype, layer_dims(problem)
    placed = _on(device, problem)
    operands = _projected(placed, dims, checkpoint)
    inside = attend(attention_inside(placed, operands, attention_outputs(asked)))
    found = _split_where_asked(operands, asked, dims, storage, checkpoint)
    inner = inside.outputs
    if "output" in asked:
        context = inner["context"].view(-1, dims.output.width_in)
        output = project(context, matrix_of(placed, "output"), placed.b_output, checkpoint, dtype=storage)
        found["output"] = output.view(dims.batch, dims.seq_len_q, dims.output.width_out)
        del context
    if "context" not in asked:
        inner.pop("context", None)
    for name in tuple(inner):
        found[name] = rounded(inner.pop(name), storage, checkpoint) if name in STORED else inner.pop(name)
    if "top_weights" in found and storage != compute_dtype(storage):
        found["top_weights"], found["top_keys"] = _in_order(found["top_weights"], found["top_keys"])
    order = [name for one in asked for name in ((one, "top_keys") if one == "top_weights" else (one,))]
    return _result(problem, prepared, inside, {name: found[name] for name in order}, device)


def run_layer_gradients(
    problem: LayerGradientsProblem,
    prepared: Prepared,
    *,
    device: torch.device,
    attend: RunAttention,
    differentiate: RunGradients,
    checkpoint: Checkpoint,
) -> AttentionResult:
    """The asked gradients of a layer; ``differentiate`` runs the backward pass of the attention inside.

    ``nonfinite_rows`` of the result counts queries of one head each for which the gradient of a logit is not finite, or
    which attend a key that is not, whatever is asked.
    Raises: InvalidProblem for an empty row where these are an error, Abandoned.
    """
    storage, dims, asked = problem.layer.input.dtype, layer_dims(problem.layer), problem.asked
    layer = _on(device, problem.layer)
    (grad_output,) = place({"grad_output": problem.grad_output}, device).values()
    grad_output = grad_output.reshape(-1, dims.output.width_out)
    operands, wanted = _projected(layer, dims, checkpoint), operand_gradients(problem)
    found: dict[str, Tensor] = {}
    if needs_context(problem):
        attention = attention_inside(layer, operands, ("context",))
        inside = attend(attention)
        if "grad_w_output" in asked:
            context = inside.outputs.pop("context").view(-1, dims.output.width_in)
            gradient = _grad_w_output(layer, attention, context, grad_output, checkpoint)
            del context
            found["grad_w_output"] = rounded(gradient, storage, checkpoint)
            del gradient
        inside.outputs.clear()
        if not wanted:
            nonfinite_rows = _nonfinite_rows(layer, dims, attention, grad_output, checkpoint)
            inside = replace(inside, nonfinite_rows=nonfinite_rows)
        del attention
    if "grad_b_output" in asked:
        found["grad_b_output"] = sum_of_rows(grad_output, checkpoint).to(storage)
    if wanted:
        grad_context = project(grad_output, matrix_of(layer, "output").t(), None, checkpoint)
        grad_context = grad_context.view(dims.batch, dims.seq_len_q, dims.output.width_in)
        inside = differentiate(gradients_inside(layer, operands, wanted, grad_context))
        del grad_context
        operands.clear()
        found |= _to_sources(layer, dims, inside.outputs, asked, checkpoint)
    return _result(problem, prepared, inside, {name: found[name] for name in asked}, device)


def _grad_w_output(
    layer: LayerProblem, attention: AttentionProblem, context: Tensor, grad_output: Tensor, checkpoint: Checkpoint
) -> Tensor:
    """context^T @ grad_output, lying as w_output does. Where a row is empty its context is 0, whatever it got back."""
    num_heads = attention.options.num_heads
    assert num_heads is not None

    def live_rows(rows: slice) -> Tensor:
        canonical = canonicalize(attention)
        live = ~canonical.empty_rows(checkpoint) & canonical.counted_rows()
        return live.transpose(1, 2).reshape(-1, num_heads)[rows]

    return sum_of_products(
        grad_output,
        context,
        checkpoint,
        num_heads=num_heads,
        live_rows=live_rows,
        is_transposed=layer.options.weight_layout == "in_out",
    )


def _nonfinite_rows(
    layer: LayerProblem, dims: LayerDims, attention: AttentionProblem, grad_output: Tensor, checkpoint: Checkpoint
) -> int:
    """How many rows the backward pass of the attention would mark, which nothing that is asked has run.

    On a GPU this waits for the stream.
    """
    canonical, w_output = canonicalize(attention), matrix_of(layer, "output")
    assert attention.value is not None
    size = dims.output.width_out * _size(grad_output, checkpoint) * _size(layer.w_output, checkpoint)
    product = size * max(1.0, dims.head_dim_v * largest(attention.value))
    # Written so that NaN, which compares as False, does not count as small.
    if product <= backward.SAFE_PRODUCT[canonical.compute_dtype] and not find_hazards(canonical, checkpoint).any:
        return 0
    of_items = grad_output.view(dims.batch, dims.seq_len_q, dims.output.width_out)
    count = 0
    for items, heads, rows in cut_marks(canonical.dims).blocks(canonical.dims):
        columns = slice(heads.start * dims.head_dim_v, heads.stop * dims.head_dim_v)
        few = of_items[items, rows]
        grad_context = project(few.flatten(0, 1), w_output[columns].t(), None, checkpoint)
        part = backward.BackwardProblem(
            attention=canonical.part(items, heads, rows),
            grad_context=split_heads(grad_context.view(*few.shape[:2], -1), heads.stop - heads.start),
            grad_logsumexp=None,
            asked=frozenset(),
            is_self_attention=False,
        )
        marks = backward.differentiate(part, checkpoint).nonfinite
        assert marks is not None
        count += int(torch.count_nonzero(marks).item())
    return count


def _size(tensor: Tensor, checkpoint: Checkpoint) -> float:
    """No less than the largest |number| of a matrix, NaN if any is NaN."""
    total = 0.0
    for rows in runs(tensor.shape[0], max(1, WIDENED_AT_ONCE // max(1, tensor.shape[1]))):
        checkpoint()
        # Some rows at once, since torch copies what is not contiguous.
        total += largest(tensor[rows])
    return total


def _to_sources(
    layer: LayerProblem,
    dims: LayerDims,
    gradients: dict[str, Tensor],
    asked: tuple[str, ...],
    checkpoint: Checkpoint,
) -> dict[str, Tensor]:
    """From the ``gradients`` of query, key and value, which it takes away, to the asked ones of what they came from."""
    storage = layer.input.dtype
    found: dict[str, Tensor] = {}
    for name in ("grad_bias", "grad_sinks"):
        if name in gradients:
            found[name] = gradients.pop(name)
    totals: dict[str, Tensor] = {}
    for one in dims.operands:
        if f"grad_{one.name}" not in gradients:
            continue
        gradient = gradients.pop(f"grad_{one.name}").view(one.rows, one.width_out)
        source = token_source(layer, one.name)
        tokens = getattr(layer, source).reshape(one.rows, one.width_in)
        if (name := f"grad_w_{one.name}") in asked:
            summed = _grad_w(tokens, gradient, dims.heads_of(one.name), layer.options.weight_layout, checkpoint)
            found[name] = rounded(summed, storage, checkpoint)
            del summed
        if (name := f"grad_b_{one.name}") in asked:
            found[name] = sum_of_rows(gradient, checkpoint).to(storage)
        if (name := f"grad_{source}") in asked:
            if name not in totals:
                totals[name] = torch.zeros(tokens.shape, dtype=gradient.dtype, device=gradient.device)
            add_product(totals[name], gradient, matrix_of(layer, one.name).t(), checkpoint)
        del gradient
    for name in tuple(totals):
        shape = getattr(layer, name.removeprefix("grad_")).shape
        found[name] = rounded(totals.pop(name), storage, checkpoint).view(shape)
    return found


def _grad_w(
    tokens: Tensor, gradient: Tensor, num_heads: int, weight_layout: WeightLayout, checkpoint: Checkpoint
) -> Tensor:
    """tokens^T @ gradient, lying as the matrix does. A token whose gradient is 0 in a head adds nothing there."""
    return sum_of_products(
        tokens,
        gradient,
        checkpoint,
        num_heads=num_heads,
        live_rows=lambda rows: rows_with_gradient(gradient[rows], num_heads),
        is_transposed=weight_layout == "out_in",
    )


def _on(device: torch.device, problem: LayerProblem) -> LayerProblem:
    return replace(problem, **place(problem.tensors(), device))  # type: ignore[arg-type]


def _projected(problem: LayerProblem, dims: LayerDims, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """query, key and value ``[batch, tokens, heads * width]`` in the dtype of the arithmetic."""
    found = {}
    for one in dims.operands:
        tokens: Tensor = getattr(problem, token_source(problem, one.name))
        bias: Tensor | None = getattr(problem, f"b_{one.name}")
        flat = project(tokens.reshape(-1, one.width_in), matrix_of(problem, one.name), bias, checkpoint)
        found[one.name] = flat.view(dims.batch, tokens.shape[-2], one.width_out)
    return found


def _split_where_asked(
    operands: dict[str, Tensor],
    asked: tuple[str, ...],
    dims: LayerDims,
    storage: torch.dtype,
    checkpoint: Checkpoint,
) -> dict[str, Tensor]:
    """The asked ones as ``[batch, heads, tokens, width]`` in the layer's dtype; takes them from ``operands``."""
    found = {}
    for name in OPERANDS:
        if name not in asked:
            del operands[name]
    for name in tuple(operands):
        split = split_heads(operands.pop(name), dims.heads_of(name))
        found[name] = torch.empty(split.shape, dtype=storage, device=split.device)
        numbers_of_one = split.shape[0] * split.shape[2] * split.shape[3]
        for heads in runs(split.shape[1], max(1, NUMBERS_AT_ONCE // max(1, numbers_of_one))):
            checkpoint()
            found[name][:, heads] = split[:, heads]
    return found


def _result(
    problem: LayerProblem | LayerGradientsProblem,
    prepared: Prepared,
    inside: AttentionResult,
    outputs: dict[str, Tensor],
    device: torch.device,
) -> AttentionResult:
    """What was found, in the caller's rank and place; path and counts are those of the attention inside."""
    tokens = problem.input if isinstance(problem, LayerProblem) else problem.layer.input
    if tokens.ndim == 2 and isinstance(problem, LayerProblem):
        outputs = {name: tensor.squeeze(0) for name, tensor in outputs.items()}
    return AttentionResult(
        outputs=bring_back(outputs, tokens.device),
        path=inside.path,
        why=inside.why,
        device=str(device),
        dtype=tokens.dtype,
        empty_rows=inside.empty_rows,
        nonfinite_rows=inside.nonfinite_rows,
        peak_bytes=prepared.cost.peak_bytes,
        flops=prepared.cost.flops,
    )


def _in_order(top_weights: Tensor, top_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Largest first, ties by the lower key, of weights that rounding may have made equal; -1 stays behind all keys."""
    last = torch.iinfo(top_keys.dtype).max
    by_key = torch.where(top_keys < 0, last, top_keys).sort(dim=-1).indices
    weights, keys = top_weights.gather(-1, by_key), top_keys.gather(-1, by_key)
    by_weight = weights.sort(dim=-1, descending=True, stable=True).indices
    return weights.gather(-1, by_weight), keys.gather(-1, by_weight)
