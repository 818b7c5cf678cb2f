"""The kernels, interchangeable, and the table of what each supports."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_core.canonical import CanonicalProblem
from attn_core.errors import Fault, InvalidProblem
from attn_core.kernels.output import KernelOutput
from attn_core.support import SUPPORTED_OUTPUTS, path_expectation, why_not_by_options

__all__ = [
    "SUPPORTED_OUTPUTS",
    "KernelOutput",
    "asks_manual_besides",
    "choose_path",
    "logsumexp_by_operator",
    "outputs_by_fused",
    "why_not",
]

FEW_PAIRS = 2**22
"""From more query-key pairs on the blocked kernel answers what neither needs whole matrices nor is the fused one's."""


def why_not(path: str, problem: CanonicalProblem, *, device_type: str | None = None) -> str | None:
    """Why a kernel cannot serve a problem, in a few words; None when it can. Only metadata is looked at."""
    reason = why_not_by_options(
        path,
        problem.outputs,
        softcap=problem.softcap is not None,
        sinks=problem.sinks is not None,
        alibi_slopes=problem.alibi_slopes is not None,
        selects=problem.select_heads is not None or problem.select_rows is not None,
    )
    if reason is None and path == "fused":
        return _why_not_fused(problem, device_type or problem.device.type)
    return reason


def _why_not_fused(problem: CanonicalProblem, device_type: str) -> str | None:
    on_cpu = device_type == "cpu"
    if on_cpu and problem.dims.head_dim != problem.dims.head_dim_v:
        return "head dims of query and value differ"
    if not on_cpu:
        # SDPA would fall back to whole matrices in silence, which no estimate counts.
        dtype = problem.query.dtype
        if dtype == torch.float64:
            return f"float64 on {device_type}"
        if any(width * dtype.itemsize % 16 for width in (problem.dims.head_dim, problem.dims.head_dim_v)):
            return f"a head dim of no multiple of 16 bytes on {device_type}"
    half = problem.query.dtype != problem.compute_dtype
    if problem.bias is not None and half and problem.bias.dtype != problem.query.dtype:
        return "bias is wider than query"
    if problem.outputs == ("logsumexp",) and not logsumexp_by_operator(problem, device_type=device_type):
        return _where_logsumexp(problem, device_type)
    return None


def _where_logsumexp(problem: CanonicalProblem, device_type: str) -> str:
    where = "in half precision" if problem.query.dtype != problem.compute_dtype else f"on {device_type}"
    return f"logsumexp asked for {where}"


def logsumexp_by_operator(problem: CanonicalProblem, *, device_type: str | None = None) -> bool:
    """Whether torch's own operator gives the fused kernel a logsumexp that keeps the promise.

    It is the CPU's; and it sums the exponentials of half numbers with fewer digits than float32 has.
    """
    on_cpu = (device_type or problem.device.type) == "cpu"
    return on_cpu and problem.query.dtype == problem.compute_dtype


def asks_manual_besides(problem: CanonicalProblem, *, device_type: str | None = None) -> bool:
    """Whether the fused path would have to ask the manual kernel for the logsumexp."""
    return "logsumexp" in problem.outputs and not logsumexp_by_operator(problem, device_type=device_type)


def outputs_by_fused(problem: CanonicalProblem, *, device_type: str | None = None) -> tuple[str, ...]:
    """What the fused kernel gives to the blocked one's answer: the context, and the logsumexp beside it."""
    names = [name for name in problem.outputs if name == "context"]
    if names and "logsumexp" in problem.outputs and logsumexp_by_operator(problem, device_type=device_type):
        names.append("logsumexp")
    of_fused = replace(problem, outputs=tuple(names), select_heads=None, select_rows=None)
    return tuple(names) if names and why_not("fused", of_fused, device_type=device_type) is None else ()


def choose_path(problem: CanonicalProblem, asked: str | None, *, device_type: str | None = None) -> tuple[str, str]:
    """The kernel that serves a problem, and why, in a few words.

    Raises: InvalidProblem when the asked one cannot.
    """
    reason = why_not("fused" if asked is None else asked, problem, device_type=device_type)
    if asked is not None:
        if reason is not None:
            raise InvalidProblem([Fault("path", path_expectation(asked, reason), asked)])
        if asked == "fused" and problem.dims.num_pairs and asks_manual_besides(problem, device_type=device_type):
            return asked, "asked for; logsumexp by the manual kernel"
        return asked, "asked for"
    if reason is None and asks_manual_besides(problem, device_type=device_type):
        reason = _where_logsumexp(problem, device_type or problem.device.type)
    if reason is None:
        return "fused", "context and logsumexp only"
    if problem.dims.num_pairs > FEW_PAIRS and why_not("blocked", problem, device_type=device_type) is None:
        return "blocked", f"{reason}, of many pairs"
    return "manual", reason
