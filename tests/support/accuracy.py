"""How far a kernel is from the float64 formula beside what is promised, over numbers that are hard to get right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attn_core import AttentionProblem, Engine
from attn_core.kernels import reference
from tests.support.factory import features, make_problem, make_tensor, with_tensors
from tests.support.oracle import allowed_error, expected_outputs

OUTPUTS_OF: dict[str, tuple[str, ...]] = {
    "fused": ("context", "logsumexp"),
    "manual": ("context", "weights", "scores", "logits", "logsumexp", "entropy", "weight_totals"),
    "blocked": ("context", "logsumexp", "entropy", "weight_totals"),
}
MASKS = ("nothing", "lower_right", "mask and bias", "both lengths", "window", "causal alibi", "softcap", "sinks")
FUSED_MASKS = ("nothing", "lower_right", "mask and bias", "both lengths", "window")
NUM_HEADS, HEAD_DIM = 2, 16


def _numbers(seq_len: int, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """query, key and value by what is hard about them."""

    def make(seed: int, std: float = 1.0) -> Tensor:
        return make_tensor(1, NUM_HEADS, seq_len, HEAD_DIM, seed=seed, std=std, dtype=torch.float64)

    query, key, value = make(0), make(1), make(2)
    axes = torch.eye(HEAD_DIM, dtype=torch.float64)[torch.arange(seq_len) % HEAD_DIM].expand(1, NUM_HEADS, -1, -1)
    one, tiny = torch.ones_like(query), torch.finfo(dtype).tiny
    signs = torch.sign(make(3))
    cancelling = value.abs() * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(seq_len)[:seq_len].view(-1, 1)
    every = {
        "normal": (query, key, value),
        "one-hot rows": (40 * axes, axes, value),
        "all equal": (one, one, value),
        # Scores of about 1e4, scaled.
        "scores of 1e4": (100 * signs, 100 * torch.sign(make(4)) * 4 / HEAD_DIM, value),
        # The oracle is float64 too, where sums of denormals are rounded in it as well: values stay normal there.
        "denormals": (query * tiny, key, value if dtype == torch.float64 else value * tiny),
        "offset in the keys": (query, key + 30, value),
        "values that cancel": (query, key, 1000 * cancelling),
    }
    for name, (q, k, v) in every.items():
        yield name, {part: tensor.to(dtype) for part, tensor in (("query", q), ("key", k), ("value", v))}


def hard_problems(
    kernel: str, dtype: torch.dtype, seq_len: int, masks: tuple[str, ...]
) -> Iterator[tuple[str, AttentionProblem]]:
    """Problems of one length that a kernel serves, each with what it is called."""
    for mask in masks:
        if kernel == "fused" and mask not in FUSED_MASKS:
            continue
        tensors, options = features(batch=1, num_heads=NUM_HEADS, seq_len_q=seq_len, seq_len_kv=seq_len)[mask]
        if "bias" in tensors and kernel != "manual":
            tensors = {**tensors, "bias": tensors["bias"].to(dtype)}
        axes: dict[str, Any] = {"batch": 1, "num_heads": NUM_HEADS, "seq_len_q": seq_len, "seq_len_kv": seq_len}
        problem = make_problem(
            head_dim=HEAD_DIM, dtype=dtype, tensors=tensors, path=kernel, outputs=OUTPUTS_OF[kernel], **axes, **options
        )
        for name, numbers in _numbers(seq_len, dtype):
            yield f"{name}, {mask}, T {seq_len}", with_tensors(problem, **numbers)


def worst_ratio(problem: AttentionProblem) -> tuple[float, str]:
    """The error of an output over the allowed one, the largest of all asked, and whose it is."""
    exact = reference.attend(problem)
    limits, truths = allowed_error(problem, exact), expected_outputs(problem, exact)
    found = Engine().attend(problem).outputs
    worst = (0.0, "")
    for name, limit in limits.items():
        own, truth = found[name].double(), truths[name]
        if not torch.equal(own.isnan(), truth.isnan()):
            return float("inf"), f"{name}: NaN stands elsewhere"
        finite = truth.isfinite()
        if not torch.equal(own[~finite], truth[~finite]) or not bool(own[finite].isfinite().all()):
            return float("inf"), f"{name}: infinities differ"
        if finite.any():
            worst = max(worst, ((own - truth)[finite].abs().max().item() / limit, name))
    return worst
