"""What every kernel hands back, and what it hands back when there is nothing to compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem
from attn_core.numerics import EMPTY_CONTEXT, EMPTY_LOGSUMEXP, EMPTY_WEIGHT
from attn_core.placement import in_huge_pages
from attn_core.problem import SELECTABLE_BY_HEAD, SELECTABLE_BY_ROW


@dataclass(frozen=True, slots=True, eq=False)
class KernelOutput:
    """Outputs ``[batch, num_heads, ...]`` by name, and bool ``[batch, num_heads, seq_len_q]`` marks.

    ``empty`` None: no row is empty, or, without ``covers_all_rows``, it was not looked at. ``nonfinite`` None: none is.
    """

    outputs: dict[str, Tensor]
    empty: Tensor | None = None
    nonfinite: Tensor | None = None
    covers_all_rows: bool = True


def output_shape(problem: CanonicalProblem, name: str) -> tuple[int, ...]:
    """The shape of an output with its selection, ``[batch, num_heads, ...]``; ``top_keys`` too."""
    dims = problem.dims
    heads, rows = dims.num_heads, dims.seq_len_q
    if problem.select_heads is not None and (name in SELECTABLE_BY_HEAD or name == "top_keys"):
        heads = len(problem.select_heads)
    if problem.select_rows is not None and (name in SELECTABLE_BY_ROW or name == "top_keys"):
        rows = len(problem.select_rows)
    match name:
        case "context":
            return dims.batch, heads, rows, dims.head_dim_v
        case "logsumexp" | "entropy":
            return dims.batch, heads, rows
        case "weight_totals":
            return dims.batch, heads, dims.seq_len_kv
        case "top_weights" | "top_keys":
            assert problem.top_k is not None
            return dims.batch, heads, rows, min(problem.top_k, dims.seq_len_kv)
        case _:
            return dims.batch, heads, rows, dims.seq_len_kv


def output_dtype(problem: CanonicalProblem, name: str) -> torch.dtype:
    if name == "top_keys":
        return torch.int64
    if name in ("context", "weights", "top_weights"):
        return problem.query.dtype
    return problem.compute_dtype


def named_outputs(problem: CanonicalProblem) -> tuple[str, ...]:
    """The asked outputs, ``top_keys`` beside ``top_weights``."""
    if "top_weights" in problem.outputs:
        return (*problem.outputs, "top_keys")
    return problem.outputs


def new_output(problem: CanonicalProblem, name: str) -> Tensor:
    """An output to be filled in block by block; context lies in memory as query does, so that it leaves uncopied."""
    shape, dtype = output_shape(problem, name), output_dtype(problem, name)
    if name == "context" and not problem.query.is_contiguous() and problem.query.transpose(1, 2).is_contiguous():
        batch, heads, rows, width = shape
        return torch.empty(batch, rows, heads, width, dtype=dtype, device=problem.device).transpose(1, 2)
    return in_huge_pages(torch.empty(shape, dtype=dtype, device=problem.device))


def without_pairs(problem: CanonicalProblem) -> KernelOutput:
    """The answer of a problem with no query or no key: every row is empty, and no kernel is asked."""
    fill = {"logsumexp": EMPTY_LOGSUMEXP, "context": EMPTY_CONTEXT, "top_keys": -1}
    outputs = {}
    for name in named_outputs(problem):
        outputs[name] = torch.full(
            output_shape(problem, name),
            fill.get(name, EMPTY_WEIGHT),
            dtype=output_dtype(problem, name),
            device=problem.device,
        )
        if name == "logsumexp" and problem.sinks is not None:
            outputs[name] = problem.sinks.view(1, -1, 1).expand_as(outputs[name]).contiguous()
    return KernelOutput(outputs=outputs, empty=problem.empty_rows())
