"""The kernels, interchangeable, and the table of what each supports."""

from __future__ import annotations

import torch

from attn_core.canonical import CanonicalProblem
from attn_core.errors import Fault, InvalidProblem
from attn_core.kernels.output import KernelOutput
from attn_core.problem import OUTPUTS

__all__ = ["SUPPORTED_OUTPUTS", "KernelOutput", "choose_path", "logsumexp_by_operator", "why_not"]

SUPPORTED_OUTPUTS: dict[str, frozenset[str]] = {
    "fused": frozenset({"context", "logsumexp"}),
    "manual": frozenset(OUTPUTS),
}


def why_not(path: str, problem: CanonicalProblem, *, device_type: str | None = None) -> str | None:
    """Why a kernel cannot serve a problem, in a few words; None when it can. Only metadata is looked at."""
    missing = [name for name in problem.outputs if name not in SUPPORTED_OUTPUTS[path]]
    if missing:
        return f"{missing[0]} asked for"
    return _why_not_fused(problem, device_type or problem.device.type) if path == "fused" else None


def _why_not_fused(problem: CanonicalProblem, device_type: str) -> str | None:
    if problem.softcap is not None:
        return "softcap given"
    if problem.sinks is not None:
        return "sinks given"
    if problem.alibi_slopes is not None:
        return "alibi_slopes given"
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
    return None


def logsumexp_by_operator(problem: CanonicalProblem, *, device_type: str | None = None) -> bool:
    """Whether torch's own operator gives the fused kernel a logsumexp that keeps the promise.

    It is the CPU's; and it sums the exponentials of half numbers with fewer digits than float32 has.
    """
    on_cpu = (device_type or problem.device.type) == "cpu"
    return on_cpu and problem.query.dtype == problem.compute_dtype


def choose_path(problem: CanonicalProblem, asked: str | None, *, device_type: str | None = None) -> tuple[str, str]:
    """The kernel that serves a problem, and why, in a few words.

    Raises: InvalidProblem when the asked one cannot.
    """
    reason = why_not("fused" if asked is None else asked, problem, device_type=device_type)
    if asked is not None:
        if reason is not None:
            others = [path for path in SUPPORTED_OUTPUTS if path != asked]
            expected = f"{' or '.join(others)}, or nothing, since {reason}"
            raise InvalidProblem([Fault("path", expected, asked)])
        return asked, "asked for"
    if (
        reason is None
        and "logsumexp" in problem.outputs
        and not logsumexp_by_operator(problem, device_type=device_type)
    ):
        # The fused path would have to ask the manual kernel for it besides.
        where = "in half precision" if problem.query.dtype != problem.compute_dtype else f"on {device_type}"
        reason = f"logsumexp asked for {where}"
    if reason is None:
        return "fused", "context and logsumexp only"
    return "manual", reason
