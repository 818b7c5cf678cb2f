"""What gradients must be: autograd through the formula, in float64, and how far from it a backward pass may be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_core import AttentionProblem, AttentionResult
from attn_core.kernels import reference
from attn_core.numerics import compute_dtype
from attn_core.problem import PAIR_GRADIENTS, GradientsProblem
from tests.support.factory import make_tensor

_SOURCES = ("query", "key", "value", "bias", "sinks")


def make_gradients(
    attention: AttentionProblem,
    *,
    seed: int = 50,
    context: bool = True,
    logsumexp: bool = True,
    outputs: tuple[str, ...] | None = None,
    std: float = 1.0,
) -> GradientsProblem:
    """The gradients of an attention for a random gradient of its context, its logsumexp or both."""
    attention = replace(attention, options=replace(attention.options, outputs=("context", "logsumexp"), path=None))
    problem = GradientsProblem(attention, outputs=outputs)
    shapes = result_shapes(attention)
    dtype = attention.query.dtype
    if context:
        problem = replace(problem, grad_context=make_tensor(*shapes["context"], seed=seed, dtype=dtype, std=std))
    if logsumexp:
        own = make_tensor(*shapes["logsumexp"], seed=seed + 1, dtype=compute_dtype(dtype), std=std)
        problem = replace(problem, grad_logsumexp=own)
    return problem


def result_shapes(attention: AttentionProblem) -> dict[str, tuple[int, ...]]:
    """The shapes of context and logsumexp in the caller's layout and rank."""
    query, _, value = _operands(attention, {name: t for name, t in attention.tensors().items() if name in _SOURCES})
    batch, heads, rows, _ = query.shape
    width = value.shape[3]
    missing = 4 - attention.query.ndim if attention.options.layout == "bhtd" else 0
    context = {"bhtd": (batch, heads, rows, width), "bthd": (batch, rows, heads, width)}.get(
        attention.options.layout, (batch, rows, heads * width)
    )
    return {"context": context[missing:], "logsumexp": (batch, heads, rows)[missing:]}


def all_outputs(problem: GradientsProblem) -> tuple[str, ...]:
    """Every gradient that is defined, those of pairs too."""
    return (*replace(problem, outputs=None).asked, "grad_weights", "grad_logits")


def by_autograd(problem: GradientsProblem, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The asked gradients in the caller's form, float64: torch's own backward pass of the formula in ``dtype``.

    Every number of the problem must be finite, -inf in bias apart.
    """
    attention = problem.attention
    given = {name: tensor for name, tensor in attention.tensors().items() if name in _SOURCES}
    if problem.attention.bias is not None:
        given["bias"] = given["bias"].masked_fill(given["bias"].isneginf(), 0.0)
    leaves = {name: tensor.to(dtype).detach().clone().requires_grad_() for name, tensor in given.items()}
    with torch.enable_grad():
        weights, logits, context, lse = _forward(attention, leaves)
        loss = torch.zeros((), dtype=dtype)
        if problem.grad_context is not None:
            loss = loss + (problem.grad_context.to(dtype).reshape(context.shape) * context).sum()
        if problem.grad_logsumexp is not None:
            loss = loss + (problem.grad_logsumexp.to(dtype).reshape(lse.shape) * lse).sum()
        inner = {"grad_weights": weights, "grad_logits": logits}
        wanted = {f"grad_{name}": leaf for name, leaf in leaves.items()} | inner
        names = problem.asked
        found = torch.autograd.grad(loss + 0.0 * lse.sum(), [wanted[name] for name in names], allow_unused=True)
    answers = {}
    for name, gradient in zip(names, found, strict=True):
        one = torch.zeros_like(wanted[name]) if gradient is None else gradient
        if name in PAIR_GRADIENTS:
            one = one.masked_fill(_forbidden(attention), 0.0)
            missing = 4 - attention.query.ndim if attention.options.layout == "bhtd" else 0
            one = one.reshape(one.shape[missing:])
        answers[name] = one.detach().double()
    return answers


def _forward(attention: AttentionProblem, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weights and logits ``[B,H,T,S]``, context and logsumexp in the caller's form; empty rows are constants."""
    options = attention.options
    query, key, value = _operands(attention, leaves)
    group_size = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group_size, dim=1) for tensor in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if options.scale is None else options.scale
    logits = query @ key.transpose(-1, -2) * scale
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    if attention.alibi_slopes is not None:
        slopes = attention.alibi_slopes.double().view(1, -1, 1, 1)
        logits = logits - (slopes * _distances(attention, logits.shape)).to(logits.dtype)
    if "bias" in leaves:
        logits = logits + leaves["bias"]
    forbidden = _forbidden(attention)
    empty = forbidden.all(dim=-1, keepdim=True)
    allowed_logits = torch.where(forbidden, 0.0, logits)
    top = logits.detach().masked_fill(forbidden, -math.inf)
    top = top.amax(dim=-1, keepdim=True) if top.shape[-1] else top.new_full((*top.shape[:-1], 1), -math.inf)
    top = torch.where(top.isneginf(), 0.0, top)
    if "sinks" in leaves:
        top = torch.maximum(top, leaves["sinks"].detach().view(1, -1, 1, 1))
    terms = torch.where(forbidden, 0.0, torch.exp(torch.where(forbidden, 0.0, allowed_logits - top)))
    total = terms.sum(dim=-1, keepdim=True)
    if "sinks" in leaves:
        total = total + torch.exp(leaves["sinks"].view(1, -1, 1, 1) - top)
    total = torch.where(empty, 1.0, total)
    weights = terms / total
    lse = torch.where(empty, 0.0, top + torch.log(total)).squeeze(-1)
    return weights, logits, _as_context(weights @ value, attention), lse


def assert_matches_autograd(
    problem: GradientsProblem, result: AttentionResult, *, relative: float | None = None
) -> None:
    """Every asked gradient is there, in shape, dtype and layout of its tensor, and as near to float64 as promised.

    ``relative`` to the largest number of the gradient where given; else twice the error of autograd in the dtype of the
    problem, or one unit in the last place.
    """
    exact = by_autograd(problem)
    plain = by_autograd(problem, problem.attention.query.dtype) if relative is None else exact
    assert set(result.outputs) == set(problem.asked) == set(exact)
    terms = _size_of_terms(problem)
    for name, truth in exact.items():
        own = result.outputs[name]
        dtype = _dtype_of(name, problem.attention)
        assert own.dtype == dtype, name
        assert own.is_contiguous(), name
        assert own.shape == truth.shape, (name, own.shape, truth.shape)
        size = truth.abs().max().item() if truth.numel() else 0.0
        if relative is not None:
            allowed = max(relative, torch.finfo(dtype).eps) * size + 1e-14 * terms
        else:
            error = (plain[name] - truth).abs().max().item() if truth.numel() else 0.0
            least = torch.finfo(compute_dtype(dtype)).eps * terms
            allowed = max(2 * error, least, size * torch.finfo(dtype).eps)
        off = (own.double() - truth).abs().max().item() if truth.numel() else 0.0
        assert off <= allowed, f"{name}: off by {off}, allowed {allowed}"


def _size_of_terms(problem: GradientsProblem) -> float:
    """How large the numbers are that are added up and may cancel: a few roundings of them are always allowed."""
    attention = problem.attention
    options = attention.options
    query, key, value = _operands(attention, {name: t.double() for name, t in attention.tensors().items()})
    scale = 1 / math.sqrt(query.shape[-1]) if options.scale is None else abs(options.scale)
    of_weights = value.shape[-1] * _largest(problem.grad_context) * _largest(value) + _largest(problem.grad_logsumexp)
    rows = max(1, query.shape[2]) * query.shape[1] * query.shape[0]
    logit = 1 + scale * query.shape[-1] * _largest(query) * _largest(key)
    return (
        rows
        * max(1.0, scale * max(_largest(query), _largest(key)))
        * (of_weights + _largest(problem.grad_context))
        * (logit)
    )


def _largest(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else tensor.double().abs().max().item()


def _dtype_of(name: str, attention: AttentionProblem) -> torch.dtype:
    if name in PAIR_GRADIENTS:
        return compute_dtype(attention.query.dtype)
    source: Tensor = getattr(attention, name.removeprefix("grad_"))
    return source.dtype


def _operands(attention: AttentionProblem, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value as ``[batch, heads, tokens, width]``, differentiable, heads not repeated."""
    options = attention.options
    kv_heads = options.num_heads if options.num_kv_heads is None else options.num_kv_heads

    def bhtd(tensor: Tensor, num_heads: int | None) -> Tensor:
        if options.layout == "bthd":
            return tensor.transpose(1, 2)
        if options.layout == "btd":
            assert num_heads is not None
            batch, tokens, columns = tensor.shape
            return tensor.reshape(batch, tokens, num_heads, columns // num_heads).transpose(1, 2)
        return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))

    query = bhtd(tensors["query"], options.num_heads)
    if "key" not in tensors:
        return query, query, query
    return query, bhtd(tensors["key"], kv_heads), bhtd(tensors["value"], kv_heads)


def _as_context(context: Tensor, attention: AttentionProblem) -> Tensor:
    if attention.options.layout == "bhtd":
        return context
    context = context.transpose(1, 2)
    return context if attention.options.layout == "bthd" else context.flatten(2)


def _forbidden(attention: AttentionProblem) -> Tensor:
    """The forbidden pairs, by the second hand that wrote the reference; every number is finite."""
    finite: dict[str, Any] = {
        name: torch.zeros_like(tensor)
        for name, tensor in attention.tensors().items()
        if name in ("query", "key", "value")
    }
    return reference.attend(replace(attention, **finite))["logits"].isneginf()


def _distances(attention: AttentionProblem, shape: torch.Size) -> Tensor:
    """|p(i) - j|, from the tensors of the problem."""
    place = torch.arange(shape[2]).view(1, 1, -1, 1)
    if attention.query_offset is not None:
        place = place + attention.query_offset.long().view(-1, 1, 1, 1)
    elif attention.options.causal == "lower_right":
        keys = torch.tensor([shape[3]]) if attention.key_lengths is None else attention.key_lengths.long()
        queries = torch.tensor([shape[2]]) if attention.query_lengths is None else attention.query_lengths.long()
        place = place + (keys - queries).view(-1, 1, 1, 1)
    return (place - torch.arange(shape[3])).abs().double()


def by_hand(problem: GradientsProblem) -> dict[str, Tensor]:
    """The usual gradients of a problem of layout bhtd and rank 4, float64, row by row over allowed keys alone.

    What is not finite goes where the sums themselves take it.
    """
    attention = problem.attention
    options = attention.options
    tensors = {name: tensor.double() for name, tensor in attention.tensors().items() if name in _SOURCES}
    query, key, value = _operands(attention, tensors)
    group_size = query.shape[1] // key.shape[1]
    scale = 1 / math.sqrt(query.shape[-1]) if options.scale is None else options.scale
    grads = {f"grad_{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    forbidden = _forbidden(attention)
    shape = forbidden.shape
    alibi = torch.zeros(shape, dtype=torch.float64)
    if attention.alibi_slopes is not None:
        alibi = attention.alibi_slopes.double().view(1, -1, 1, 1) * _distances(attention, shape)
    bias = None if "bias" not in tensors else tensors["bias"].expand(shape)
    of_bias = torch.zeros(shape, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*(torch.arange(size) for size in shape[:3])).tolist():
        seen, shared = (~forbidden[b, h, i]).nonzero().flatten(), h // group_size
        if not seen.numel():
            continue
        q, k, v = query[b, h, i], key[b, shared, seen], value[b, shared, seen]
        logits = (k * q).sum(-1) * scale
        slope = torch.ones_like(logits)
        if options.softcap is not None:
            slope = 1 - torch.tanh(logits / options.softcap) ** 2
            logits = options.softcap * torch.tanh(logits / options.softcap)
        logits = logits - alibi[b, h, i, seen]
        if bias is not None:
            logits = logits + bias[b, h, i, seen]
        column = logits if attention.sinks is None else torch.cat([logits, tensors["sinks"][h : h + 1]])
        weights = torch.softmax(column, dim=-1)
        own, of_sink = weights[: seen.numel()], weights[seen.numel() :]
        of_weights, shift = torch.zeros_like(own), torch.zeros((), dtype=torch.float64)
        if problem.grad_context is not None:
            of_context = problem.grad_context[b, h, i].double()
            grads["grad_value"][b, shared, seen] += own.unsqueeze(1) * of_context
            of_weights = (v * of_context).sum(-1)
            shift = (own * of_weights).sum()
        if problem.grad_logsumexp is not None:
            shift = shift - problem.grad_logsumexp[b, h, i].double()
        of_logits = own * (of_weights - shift)
        of_bias[b, h, i, seen] = of_logits
        if attention.sinks is not None:
            grads["grad_sinks"][h] -= of_sink[0] * shift
        of_scores = (of_logits * slope * scale).unsqueeze(1)
        grads["grad_query"][b, h, i] = (of_scores * k).sum(0)
        grads["grad_key"][b, shared, seen] += of_scores * q
    if bias is not None:
        over = [axis for axis, size in enumerate(tensors["bias"].shape) if size == 1]
        grads["grad_bias"] = of_bias.sum(dim=over, keepdim=True) if over else of_bias
    return grads
