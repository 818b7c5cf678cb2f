"""Which arithmetic each storage dtype gets, what an empty row gives, and from which size numbers overflow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EMPTY_CONTEXT = 0.0
EMPTY_WEIGHT = 0.0
EMPTY_LOGSUMEXP = -math.inf
SIGNLESS_ZERO = 0.0
"""Added to a context beside forbidden pairs: a weight of 0 times a negative number is -0, and that sign would tell
what a forbidden key holds. -0 + 0 is 0."""

ROUNDING_ROOM = 4.0
"""A sum of squares in float32 is a little off: so far below its limit it must stay."""
_SAFE_LOGIT = {torch.float32: 1e30, torch.float64: 1e290}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of products, softmax and sums for tensors stored as ``dtype``; results are rounded once from it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def safe_operand(dtype: torch.dtype, *, head_dim: int, scale: float) -> float:
    """The largest |number| of query and key with which no logit can overflow, whatever finite bias is added.

    A product of ``head_dim`` such pairs times ``scale`` stays under 1e30 (1e290 in float64), and adding that
    to the largest finite number rounds back to it.
    """
    limit = math.sqrt(_SAFE_LOGIT[compute_dtype(dtype)] / (max(head_dim, 1) * max(abs(scale), 1.0)))
    return _finite_in(dtype, limit)


def safe_value(dtype: torch.dtype, *, seq_len_kv: int) -> float:
    """The largest |number| of value of which ``seq_len_kv`` can be added before the sum is normalised."""
    return _finite_in(dtype, float(torch.finfo(compute_dtype(dtype)).max) / (2.0 * max(seq_len_kv, 1)))


def _finite_in(dtype: torch.dtype, limit: float) -> float:
    # A comparison rounds the limit to the dtype of the tensor: one above its largest number would let infinity pass.
    return min(limit, float(torch.finfo(dtype).max))


def safe_square_sum(limit: float) -> float:
    """The sum of squares in float32 up to which no |number| is over ``limit``, rounding counted in."""
    return min(limit, math.sqrt(torch.finfo(torch.float32).max)) ** 2 / ROUNDING_ROOM


def is_within(tensor: Tensor, limit: float) -> bool:
    """Whether no |number| can be over ``limit``, told by one product, in half the time of two comparisons.

    False where it does not tell: NaN, infinity, huge numbers, other dtypes than float32, other places than the host.
    """
    if tensor.dtype != torch.float32 or tensor.is_cuda or not tensor.is_contiguous():
        return False
    flat = tensor.view(-1)
    return torch.dot(flat, flat).item() <= safe_square_sum(limit)


def largest(tensor: Tensor) -> float:
    """max |x|, NaN if any is NaN, 0 for no element. On a GPU this waits for the stream."""
    if tensor.numel() == 0:
        return 0.0
    low, high = torch.aminmax(tensor)
    if tensor.is_cuda:
        # One transfer instead of two.
        low_f, high_f = torch.stack((low, high)).tolist()
    else:
        low_f, high_f = low.item(), high.item()
    return float("nan") if math.isnan(low_f) or math.isnan(high_f) else max(-low_f, high_f)
