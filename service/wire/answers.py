"""``info``: how an answer came about, as callers read it in every form."""

from __future__ import annotations

import math
from typing import Any

import torch

from attn_core.problem import Verification
from attn_core.validate import dtype_text, number_text


def answer_info(
    *,
    path: str,
    why: str,
    device: str,
    dtype: torch.dtype,
    queue_ms: float,
    compute_ms: float,
    batch_requests: int,
    empty_rows: int,
    nonfinite_rows: int,
    peak_bytes: int,
    flops: int,
    verification: Verification | None = None,
) -> dict[str, Any]:
    """The fields in the order of the contract; times rounded to microseconds."""
    info: dict[str, Any] = {
        "path": path,
        "why": why,
        "device": device,
        "dtype": dtype_text(dtype),
        "queue_ms": round(queue_ms, 3),
        "compute_ms": round(compute_ms, 3),
        "batch_requests": batch_requests,
        "empty_rows": empty_rows,
        "nonfinite_rows": nonfinite_rows,
        "peak_bytes": peak_bytes,
        "flops": flops,
    }
    if verification is not None:
        info |= {
            "max_abs_error": _error(verification.max_abs_error),
            "max_rel_error": _error(verification.max_rel_error),
            "worst": verification.worst,
        }
    return info


def _error(error: float) -> float | str:
    # JSON has no infinity: it travels as in a tensor.
    return error if math.isfinite(error) else number_text(error)
