"""Layers for tests, and what they must give: the formula in float64, with torch's autograd for the gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_core.problem import (
    PARAMETER_NAMES,
    SELECTABLE_BY_HEAD,
    SELECTABLE_BY_ROW,
    WEIGHT_NAMES,
    AttentionOptions,
    LayerGradientsProblem,
    LayerOptions,
    LayerProblem,
    WeightLayout,
)
from tests.support.factory import make_tensor
from tests.support.golden import GoldenCase

ATTENTION_OUTPUTS = ("context", "weights", "scores", "logits", "logsumexp", "entropy", "weight_totals")
LAYER_WITHOUT_TOP = ("output", "query", "key", "value", *ATTENTION_OUTPUTS)


def make_layer(
    *,
    seed: int = 0,
    batch: int = 2,
    seq_len_q: int = 5,
    seq_len_kv: int | None = None,
    width: int = 12,
    memory_width: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    head_dim: int = 6,
    head_dim_v: int | None = None,
    output_width: int = 10,
    weight_layout: WeightLayout = "in_out",
    biases: bool = True,
    rank: int = 3,
    dtype: torch.dtype = torch.float32,
    tensors: dict[str, Tensor] | None = None,
    outputs: tuple[str, ...] = ("output",),
    **options: Any,
) -> LayerProblem:
    """A layer with random numbers, with memory where ``seq_len_kv`` is given; ``tensors`` are masks and the like."""
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    memory_width = width if seq_len_kv is None or memory_width is None else memory_width
    columns = {
        "query": (width, num_heads * head_dim),
        "key": (memory_width, kv_heads * head_dim),
        "value": (memory_width, kv_heads * head_dim_v),
        "output": (num_heads * head_dim_v, output_width),
    }
    made: dict[str, Tensor] = {"input": make_tensor(batch, seq_len_q, width, seed=seed, dtype=dtype)}
    if seq_len_kv is not None:
        made["memory"] = make_tensor(batch, seq_len_kv, memory_width, seed=seed + 1, dtype=dtype)
    if rank == 2:
        made = {name: tensor[0] for name, tensor in made.items()}
    for number, (name, (rows, cols)) in enumerate(columns.items()):
        matrix = make_tensor(rows, cols, seed=seed + 2 + number, dtype=dtype, std=1 / math.sqrt(rows))
        made[f"w_{name}"] = matrix if weight_layout == "in_out" else matrix.t().contiguous()
        if biases:
            made[f"b_{name}"] = make_tensor(cols, seed=seed + 6 + number, dtype=dtype, std=0.5)
    attention = AttentionOptions(layout="btd", num_heads=num_heads, num_kv_heads=num_kv_heads, **options)
    return LayerProblem(
        **made,
        **(tensors or {}),
        options=LayerOptions(attention=attention, weight_layout=weight_layout, outputs=outputs),
    )


def make_layer_gradients(
    *, outputs: tuple[str, ...] | None = None, seed: int = 0, **form: Any
) -> LayerGradientsProblem:
    layer = make_layer(seed=seed, **form)
    return LayerGradientsProblem(layer, grad_output_of(layer, seed=seed + 50), outputs=outputs)


def grad_output_of(layer: LayerProblem, *, seed: int = 50) -> Tensor:
    width = layer.w_output.shape[1 if layer.options.weight_layout == "in_out" else 0]
    return make_tensor(*layer.input.shape[:-1], width, seed=seed, dtype=layer.input.dtype)


def moved(tensor: Tensor) -> Tensor:
    """The same numbers from an address on that is no multiple of 64 bytes."""
    room = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
    room[3:] = tensor.flatten()
    found = room[3:].view(tensor.shape)
    assert found.data_ptr() % 64
    return found


def layer_case(case: GoldenCase, *, outputs: tuple[str, ...], path: str | None = None) -> LayerProblem:
    """A golden case of ``op`` layer as the core takes it."""
    options = dict(case.options)
    weight_layout = options.pop("weight_layout")
    tensors = {name: tensor for name, tensor in case.tensors.items() if not name.startswith("grad_")}
    attention = AttentionOptions(layout="btd", path=path, **options)
    return LayerProblem(
        **tensors, options=LayerOptions(attention=attention, weight_layout=weight_layout, outputs=outputs)
    )


def with_layer_options(
    problem: LayerProblem, *, outputs: tuple[str, ...] | None = None, **options: Any
) -> LayerProblem:
    """The layer with other options of its attention, and other outputs."""
    attention = replace(problem.options.attention, **options)
    asked = problem.options.outputs if outputs is None else outputs
    return replace(problem, options=replace(problem.options, attention=attention, outputs=asked))


def in_other_layout(problem: LayerProblem) -> LayerProblem:
    """The same layer with its matrices turned."""
    layout: WeightLayout = "out_in" if problem.options.weight_layout == "in_out" else "in_out"
    turned: dict[str, Any] = {name: getattr(problem, name).t().contiguous() for name in WEIGHT_NAMES}
    return replace(problem, **turned, options=replace(problem.options, weight_layout=layout))


def layer_reference(problem: LayerProblem) -> dict[str, Tensor]:
    """Every output but top_weights in float64, in the caller's rank; what is selected is selected."""
    with torch.no_grad():
        found = _formula(problem, _widened(problem))
    attention = problem.options.attention
    for name, tensor in found.items():
        if attention.select_heads is not None and name in SELECTABLE_BY_HEAD:
            tensor = tensor[:, list(attention.select_heads)]
        if attention.select_rows is not None and name in SELECTABLE_BY_ROW:
            tensor = tensor[:, :, list(attention.select_rows)]
        found[name] = tensor[0] if problem.input.ndim == 2 else tensor
    return found


def layer_gradients_reference(problem: LayerGradientsProblem) -> dict[str, Tensor]:
    """Every gradient that is defined, by autograd in float64."""
    layer = problem.layer
    wide = _widened(layer)
    sources = [name for name in ("input", "memory", *PARAMETER_NAMES, "bias", "sinks") if name in wide]
    for name in sources:
        wide[name].requires_grad_()
    with torch.enable_grad():
        output = _formula(layer, wide)["output"]
        total = (output * problem.grad_output.double().reshape(output.shape)).sum()
    gradients = torch.autograd.grad(total, [wide[name] for name in sources], allow_unused=True, materialize_grads=True)
    return {f"grad_{name}": gradient for name, gradient in zip(sources, gradients, strict=True)}


def layer_in_its_dtype(problem: LayerProblem) -> dict[str, Tensor]:
    """The formula without care, in the dtype of the layer throughout."""
    dtype = problem.input.dtype
    wide = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in problem.tensors().items()
    }
    with torch.no_grad():
        found = _formula(problem, wide)
    return {name: tensor[0] if problem.input.ndim == 2 else tensor for name, tensor in found.items()}


def _widened(problem: LayerProblem) -> dict[str, Tensor]:
    return {
        name: tensor.detach().double().clone() if tensor.is_floating_point() else tensor
        for name, tensor in problem.tensors().items()
    }


def _formula(problem: LayerProblem, given: dict[str, Tensor]) -> dict[str, Tensor]:
    options = problem.options.attention
    num_heads = options.num_heads
    assert num_heads is not None
    kv_heads = options.num_kv_heads or num_heads
    tokens = given["input"].reshape((1,) * (3 - problem.input.ndim) + tuple(problem.input.shape))
    memory = tokens
    if problem.memory is not None:
        memory = given["memory"].reshape((1,) * (3 - problem.memory.ndim) + tuple(problem.memory.shape))

    def projected(name: str, source: Tensor) -> Tensor:
        matrix = given[f"w_{name}"]
        found = source @ (matrix if problem.options.weight_layout == "in_out" else matrix.transpose(0, 1))
        return found + given[f"b_{name}"] if f"b_{name}" in given else found

    def heads_of(packed: Tensor, count: int) -> Tensor:
        return torch.stack(packed.chunk(count, dim=2), dim=1)

    query = heads_of(projected("query", tokens), num_heads)
    key, value = (heads_of(projected(name, memory), kv_heads) for name in ("key", "value"))
    shared = [head * kv_heads // num_heads for head in range(num_heads)]
    every_key, every_value = key[:, shared], value[:, shared]
    scale = 1 / math.sqrt(query.shape[-1]) if options.scale is None else options.scale
    scores = query @ every_key.transpose(2, 3)
    logits = scores * scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    place = _places(problem, query.shape[2], key.shape[2])
    j = torch.arange(key.shape[2])
    if problem.alibi_slopes is not None:
        logits = logits - given["alibi_slopes"].view(1, -1, 1, 1) * (place - j).abs().to(logits.dtype)
    if problem.bias is not None:
        logits = logits + given["bias"]
    allowed = _allowed(problem, place, scores.shape)
    logits = logits.masked_fill(~allowed, -math.inf)
    if logits.shape[-1]:
        top = logits.detach().amax(dim=-1, keepdim=True)
    else:
        top = torch.full((*logits.shape[:-1], 1), -math.inf, dtype=logits.dtype)
    sink = None
    if problem.sinks is not None:
        sink = given["sinks"].view(1, -1, 1, 1).expand_as(top)
        top = torch.maximum(top, sink.detach())
    top = torch.where(torch.isneginf(top), 0.0, top)
    parts = torch.exp(logits - top)
    total = parts.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    weights = parts / torch.where(total == 0, 1.0, total)
    context = weights @ every_value
    merged = torch.cat(list(context.unbind(1)), dim=2)
    return {
        "output": projected("output", merged),
        "query": query,
        "key": key,
        "value": value,
        "context": merged,
        "weights": weights,
        "scores": scores,
        "logits": logits,
        "logsumexp": (top + torch.log(total)).squeeze(-1),
        "entropy": torch.special.entr(weights).sum(dim=-1),
        "weight_totals": weights.sum(dim=2),
    }


def _places(problem: LayerProblem, seq_len_q: int, seq_len_kv: int) -> Tensor:
    """p(i), ``[1 or batch, 1, seq_len_q, 1]``."""
    i = torch.arange(seq_len_q).view(1, 1, -1, 1)
    if problem.query_offset is not None:
        return i + problem.query_offset.long().view(-1, 1, 1, 1)
    if problem.options.attention.causal == "lower_right":
        keys = torch.tensor([seq_len_kv]) if problem.key_lengths is None else problem.key_lengths.long()
        queries = torch.tensor([seq_len_q]) if problem.query_lengths is None else problem.query_lengths.long()
        return i + (keys - queries).view(-1, 1, 1, 1)
    return i


def _allowed(problem: LayerProblem, place: Tensor, shape: torch.Size) -> Tensor:
    options = problem.options.attention
    i, j = torch.arange(shape[2]).view(1, 1, -1, 1), torch.arange(shape[3])
    allowed = torch.ones(shape, dtype=torch.bool)
    if options.causal is not False:
        allowed = allowed & (j <= place)
    if options.window_left is not None:
        allowed = allowed & (j >= place - min(options.window_left, 2**40))
    if options.window_right is not None:
        allowed = allowed & (j <= place + min(options.window_right, 2**40))
    if problem.key_lengths is not None:
        allowed = allowed & (j < problem.key_lengths.view(-1, 1, 1, 1))
    if problem.query_lengths is not None:
        allowed = allowed & (i < problem.query_lengths.view(-1, 1, 1, 1))
    if problem.allow_mask is not None:
        allowed = allowed & problem.allow_mask
    if problem.block_mask is not None:
        allowed = allowed & ~problem.block_mask
    if problem.bias is not None:
        allowed = allowed & ~torch.isneginf(problem.bias)
    return allowed
