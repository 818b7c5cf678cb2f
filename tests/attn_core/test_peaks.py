"""The estimate beside the measured peak of plain data: never below it, and not far above."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.peaks import Peak, measure_peaks

MIB = 2**20
LEAST = 0.7
"""Of the estimate the peak takes at least so much, in problems above 16 MiB."""
Shapes = dict[str, tuple[int, ...]]


def case(
    *axes: int,
    outputs: tuple[str, ...] = ("context",),
    num_kv_heads: int | None = None,
    dtype: str = "float32",
    layout: str = "bhtd",
    rules: Shapes | None = None,
    **options: Any,
) -> dict[str, Any]:
    """An attention. ``axes`` are batch, query heads, queries, keys and head dim, ``rules`` shapes of masks and bias."""
    batch, heads, rows, keys, width = axes
    kv_heads = num_kv_heads or heads
    given = {name: _placed(batch, kv_heads, keys, width, layout) for name in ("key", "value")}
    tensors = _tensors({"query": _placed(batch, heads, rows, width, layout), **given, **(rules or {})}, dtype)
    options["layout"] = layout
    if layout == "btd":
        options |= {"num_heads": heads, "num_kv_heads": kv_heads}
    return {"kind": "attention", "tensors": tensors, "options": options, "outputs": outputs}


def backward(*axes: int, asked: tuple[str, ...] = (), **form: Any) -> dict[str, Any]:
    """The gradients of an attention, of all that is given where none are asked."""
    found = case(*axes, **form)
    dtype, shape = found["tensors"]["query"]
    batch, heads, rows, _, _ = axes
    found["tensors"]["grad_context"] = (dtype, shape)
    found["tensors"]["grad_logsumexp"] = ("float32", (batch, heads, rows))
    return {**found, "kind": "gradients", "outputs": asked}


def layer(
    *axes: int,
    outputs: tuple[str, ...] = ("output",),
    keys: int | None = None,
    num_kv_heads: int | None = None,
    dtype: str = "float32",
    biases: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """``axes`` are batch, tokens, width, heads and head dim; with a memory where there are ``keys``."""
    batch, rows, width, heads, head_dim = axes
    columns, shared = heads * head_dim, (num_kv_heads or heads) * head_dim
    shapes: Shapes = {"input": (batch, rows, width)}
    if keys is not None:
        shapes["memory"] = (batch, keys, width)
    for name, out_of in (("query", columns), ("key", shared), ("value", shared), ("output", width)):
        into = columns if name == "output" else width
        shapes[f"w_{name}"] = (into, out_of) if options.get("weight_layout") != "out_in" else (out_of, into)
        if biases:
            shapes[f"b_{name}"] = (out_of,)
    options |= {"num_heads": heads, "num_kv_heads": num_kv_heads or heads}
    return {"kind": "layer", "tensors": _tensors(shapes, dtype), "options": options, "outputs": outputs}


def layer_backward(*axes: int, asked: tuple[str, ...] = (), **form: Any) -> dict[str, Any]:
    found = layer(*axes, **form)
    found["tensors"]["grad_output"] = found["tensors"]["input"]
    return {**found, "kind": "layer_gradients", "outputs": asked}


def _placed(batch: int, heads: int, tokens: int, width: int, layout: str) -> tuple[int, ...]:
    by_token = (batch, tokens, heads, width) if layout == "bthd" else (batch, tokens, heads * width)
    return (batch, heads, tokens, width) if layout == "bhtd" else by_token


def _tensors(shapes: Shapes, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: ("bool" if name.endswith("_mask") else dtype, shape) for name, shape in shapes.items()}


MASK: Shapes = {"allow_mask": (1, 1, 1024, 1024)}
WHOLE = ("context", "weights")
SUMMARIES = ("context", "logsumexp", "entropy", "top_weights", "weight_totals")
WINDOW: dict[str, Any] = {"causal": "lower_right", "window_left": 256}
MASK_AND_BIAS: Shapes = {"allow_mask": (1, 1, 2048, 2048), "bias": (1, 1, 2048, 2048)}
CASES = {
    "fused": case(2, 8, 1024, 1024, 64),
    "fused, many items": case(32, 8, 128, 128, 64),
    "fused, a mask": case(1, 8, 1024, 1024, 64, rules=MASK),
    "fused, bfloat16": case(4, 8, 1024, 1024, 64, dtype="bfloat16"),
    "fused, keys shared": case(2, 8, 2048, 1500, 64, num_kv_heads=2, causal="lower_right"),
    "fused, tokens first": case(4, 8, 1024, 1024, 64, layout="bthd"),
    "fused, tokens first, one item": case(1, 16, 2048, 2048, 64, layout="bthd"),
    "fused, few rows, keys shared": case(1, 32, 27, 3805, 80, num_kv_heads=8),
    "fused, decoding": case(8, 16, 1, 1024, 64, num_kv_heads=4),
    "fused, decoding, tokens first": case(8, 16, 1, 1024, 64, num_kv_heads=4, layout="btd"),
    "manual": case(1, 8, 1024, 1024, 64, outputs=WHOLE),
    "manual, a mask": case(1, 8, 1024, 1024, 64, outputs=WHOLE, rules=MASK),
    "manual, bfloat16": case(2, 8, 1024, 1024, 64, outputs=WHOLE, dtype="bfloat16"),
    "manual, causal": case(4, 8, 512, 512, 64, outputs=("weights", "logsumexp"), causal="lower_right"),
    "manual, many items": case(32, 8, 128, 128, 64, outputs=WHOLE),
    "manual, every matrix": case(1, 8, 512, 512, 64, outputs=("context", "weights", "scores", "logits")),
    "manual, decoding, tokens first": case(8, 16, 1, 1024, 64, num_kv_heads=4, layout="btd", outputs=WHOLE),
    "manual, entropy alone": case(8, 8, 512, 512, 64, outputs=("entropy",), path="manual"),
    "blocked": case(1, 8, 2048, 2048, 64, outputs=SUMMARIES, top_k=16),
    "blocked, mask and bias": case(1, 8, 2048, 2048, 64, outputs=SUMMARIES, top_k=16, rules=MASK_AND_BIAS),
    "blocked, bfloat16, a window": case(1, 8, 2048, 2048, 64, outputs=SUMMARIES, top_k=16, dtype="bfloat16", **WINDOW),
    "blocked, bfloat16, many items": case(
        8, 2, 32, 4096, 64, outputs=SUMMARIES, top_k=16, dtype="bfloat16", path="blocked"
    ),
    "blocked, few rows": case(1, 8, 14, 8192, 64, outputs=("logsumexp",), path="blocked"),
    "gradients": backward(2, 8, 1024, 1024, 64),
    "gradients, keys shared": backward(2, 8, 1024, 1024, 64, num_kv_heads=2, causal="lower_right"),
    "gradients, bfloat16, a mask": backward(2, 8, 1024, 1024, 64, dtype="bfloat16", rules=MASK),
    "gradients, of key alone": backward(4, 8, 512, 512, 64, asked=("grad_key",)),
    "gradients, decoding": backward(4, 8, 1, 1024, 64),
    "gradients, decoding, bfloat16": backward(4, 8, 1, 2048, 64, num_kv_heads=4, layout="btd", dtype="bfloat16"),
    "layer": layer(2, 1024, 512, 8, 64),
    "layer, one item, bfloat16": layer(1, 2048, 512, 8, 64, dtype="bfloat16", biases=False),
    "layer, memory, keys shared": layer(4, 128, 512, 8, 64, keys=1024, num_kv_heads=2, weight_layout="out_in"),
    "layer, with weights": layer(1, 512, 512, 8, 64, outputs=("output", "weights")),
    "layer, decoding": layer(16, 1, 1024, 16, 64, keys=128, num_kv_heads=4),
    "layer gradients": layer_backward(2, 512, 512, 8, 64),
    "layer gradients, of input, bfloat16": layer_backward(
        2, 1024, 512, 8, 64, dtype="bfloat16", weight_layout="out_in", asked=("grad_input",)
    ),
    "layer gradients, memory": layer_backward(4, 128, 512, 8, 64, keys=512, num_kv_heads=2, biases=False),
}


@pytest.fixture(scope="module")
def peaks() -> dict[str, Peak]:
    return dict(zip(CASES, measure_peaks(CASES.values()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_peak_of_a_fresh_process_is_within_the_estimate_and_near_it(name: str, peaks: dict[str, Peak]) -> None:
    found = peaks[name]
    assert found.refusal is None
    assert found.estimate > 16 * MIB
    assert LEAST <= found.ratio <= 1.0, found
