"""The estimate beside the measured peak of plain data: never below it, and not far above."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.peaks import Peak, measure_peaks

MIB = 2**20
LEAST = 0.7
"""Of the estimate the peak takes at least so much, in problems above 16 MiB."""


def case(
    *axes: int, outputs: tuple[str, ...] = ("context",), num_kv_heads: int | None = None, **rest: Any
) -> dict[str, Any]:
    """``axes`` are batch, query heads, queries, keys and head dim."""
    names = ("batch", "num_heads", "seq_len_q", "seq_len_kv", "head_dim")
    return {**dict(zip(names, axes, strict=True)), "num_kv_heads": num_kv_heads, "outputs": outputs, **rest}


MASK = {"allow_mask": (1, 1, 1024, 1024)}
WHOLE = ("context", "weights")
SUMMARIES = ("context", "logsumexp", "entropy", "top_weights", "weight_totals")
WINDOW: dict[str, Any] = {"causal": "lower_right", "window_left": 256}
MASK_AND_BIAS = {"allow_mask": (1, 1, 2048, 2048), "bias": (1, 1, 2048, 2048)}
CASES = {
    "fused": case(2, 8, 1024, 1024, 64),
    "fused, many items": case(32, 8, 128, 128, 64),
    "fused, a mask": case(1, 8, 1024, 1024, 64, shapes=MASK),
    "fused, bfloat16": case(4, 8, 1024, 1024, 64, dtype="bfloat16"),
    "fused, keys shared": case(2, 8, 2048, 1500, 64, num_kv_heads=2, causal="lower_right"),
    "fused, tokens first": case(4, 8, 1024, 1024, 64, layout="bthd"),
    "fused, decoding": case(8, 16, 1, 1024, 64, num_kv_heads=4),
    "fused, decoding, tokens first": case(8, 16, 1, 1024, 64, num_kv_heads=4, layout="btd"),
    "manual": case(1, 8, 1024, 1024, 64, outputs=WHOLE),
    "manual, a mask": case(1, 8, 1024, 1024, 64, outputs=WHOLE, shapes=MASK),
    "manual, bfloat16": case(2, 8, 1024, 1024, 64, outputs=WHOLE, dtype="bfloat16"),
    "manual, causal": case(4, 8, 512, 512, 64, outputs=("weights", "logsumexp"), causal="lower_right"),
    "manual, many items": case(32, 8, 128, 128, 64, outputs=WHOLE),
    "manual, every matrix": case(1, 8, 512, 512, 64, outputs=("context", "weights", "scores", "logits")),
    "manual, decoding, tokens first": case(8, 16, 1, 1024, 64, num_kv_heads=4, layout="btd", outputs=WHOLE),
    "blocked": case(1, 8, 2048, 2048, 64, outputs=SUMMARIES, top_k=16),
    "blocked, mask and bias": case(1, 8, 2048, 2048, 64, outputs=SUMMARIES, top_k=16, shapes=MASK_AND_BIAS),
    "blocked, bfloat16, a window": case(1, 8, 2048, 2048, 64, outputs=SUMMARIES, top_k=16, dtype="bfloat16", **WINDOW),
    "blocked, bfloat16, many items": case(
        8, 2, 32, 4096, 64, outputs=SUMMARIES, top_k=16, dtype="bfloat16", path="blocked"
    ),
    "gradients": case(2, 8, 1024, 1024, 64, gradients=True),
    "gradients, keys shared": case(2, 8, 1024, 1024, 64, num_kv_heads=2, causal="lower_right", gradients=True),
    "gradients, bfloat16, a mask": case(2, 8, 1024, 1024, 64, dtype="bfloat16", shapes=MASK, gradients=True),
}


@pytest.fixture(scope="module")
def peaks() -> dict[str, Peak]:
    return dict(zip(CASES, measure_peaks(CASES.values()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_peak_of_a_fresh_process_is_within_the_estimate_and_near_it(name: str, peaks: dict[str, Peak]) -> None:
    found = peaks[name]
    assert found.estimate > 16 * MIB
    assert LEAST <= found.ratio <= 1.0, found
