"""Gradients of one attention, from the problem as its caller states it to the answer in the caller's form."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem, canonicalize, refuse_empty_rows, to_callers_form
from attn_core.errors import Checkpoint
from attn_core.kernels import backward
from attn_core.kernels.backward import BackwardProblem
from attn_core.maths.heads import split_heads
from attn_core.placement import bring_back, place
from attn_core.prepared import Prepared
from attn_core.problem import AttentionProblem, AttentionResult, GradientsProblem


def run_gradients(
    problem: GradientsProblem, prepared: Prepared, *, device: torch.device, checkpoint: Checkpoint
) -> AttentionResult:
    """The asked gradients. Raises: InvalidProblem for an empty row where these are an error, Abandoned."""
    attention = problem.attention
    tensors = problem.tensors()
    placed = place(tensors, device)
    canonical = prepared.canonical
    if canonical is None or any(placed[name] is not tensor for name, tensor in tensors.items()):
        canonical = canonicalize(replace(attention, **{name: placed[name] for name in attention.tensors()}))  # type: ignore[arg-type]
    if attention.options.empty_rows == "error":
        refuse_empty_rows(canonical, checkpoint)
    output = backward.differentiate(
        BackwardProblem(
            attention=canonical,
            grad_context=_of_rows(placed.get("grad_context"), attention, canonical),
            grad_logsumexp=_of_each_row(placed.get("grad_logsumexp"), canonical),
            asked=frozenset(problem.asked),
            is_self_attention=attention.key is None,
        ),
        checkpoint,
    )
    empty = output.empty
    if empty is not None and canonical.query_lengths is not None:
        empty = empty & canonical.counted_rows()
    outputs = {name: _in_callers_form(name, output.outputs[name], attention) for name in problem.asked}
    return AttentionResult(
        outputs=bring_back(outputs, attention.query.device),
        path=prepared.path,
        why=prepared.why,
        device=str(device),
        dtype=attention.query.dtype,
        empty_rows=0 if empty is None else int(torch.count_nonzero(empty).item()),
        nonfinite_rows=0 if output.nonfinite is None else int(torch.count_nonzero(output.nonfinite).item()),
        peak_bytes=prepared.cost.peak_bytes,
        flops=prepared.cost.flops,
    )


def _of_rows(tensor: Tensor | None, attention: AttentionProblem, canonical: CanonicalProblem) -> Tensor | None:
    """A tensor that lies as the context does, as ``[batch, num_heads, seq_len_q, head_dim_v]``."""
    if tensor is None:
        return None
    if attention.options.layout == "btd":
        return split_heads(tensor.contiguous(), canonical.dims.num_heads)
    if attention.options.layout == "bthd":
        return tensor.transpose(1, 2)
    return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))


def _of_each_row(tensor: Tensor | None, canonical: CanonicalProblem) -> Tensor | None:
    dims = canonical.dims
    return None if tensor is None else tensor.reshape(dims.batch, dims.num_heads, dims.seq_len_q)


def _in_callers_form(name: str, gradient: Tensor, attention: AttentionProblem) -> Tensor:
    """A gradient in shape, layout and dtype of its tensor; of pairs, in the caller's rank."""
    if name in ("grad_query", "grad_key", "grad_value"):
        # These lie as the context does.
        return to_callers_form("context", gradient, attention)
    if name in ("grad_bias", "grad_sinks"):
        tensor = getattr(attention, name.removeprefix("grad_"))
        return gradient.to(tensor.dtype).reshape(tensor.shape)
    return to_callers_form(name, gradient, attention)
