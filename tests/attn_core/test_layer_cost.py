"""The estimate for a layer and its gradients: exact in flops, never below what is taken, and not far above it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_core import Engine
from attn_core.prepared import prepare
from attn_core.problem import LAYER_OUTPUTS, WEIGHT_NAMES, LayerGradientsProblem, LayerProblem
from tests.support.factory import features, make_mask
from tests.support.layers import make_layer, make_layer_gradients, with_layer_options
from tests.support.memory import peak_bytes_of

MIB = 2**20
AXES: dict[str, dict[str, Any]] = {
    "wide": {"batch": 1, "seq_len_q": 64, "width": 1536, "num_heads": 12, "head_dim": 128, "output_width": 1536},
    "many items": {"batch": 64, "seq_len_q": 128, "width": 96, "num_heads": 2, "head_dim": 48, "output_width": 96},
    "wide output": {"batch": 1, "seq_len_q": 512, "width": 128, "num_heads": 2, "head_dim": 64, "output_width": 4096},
    "wide input": {"batch": 1, "seq_len_q": 512, "width": 4096, "num_heads": 2, "head_dim": 64, "output_width": 128},
}


def share_taken(problem: LayerProblem | LayerGradientsProblem) -> float:
    """What was measured, inputs counted in, over the estimate."""
    engine = Engine()
    inputs = sum(tensor.nbytes for tensor in problem.tensors().values())
    estimate = prepare(problem, device_type="cpu").cost.peak_bytes
    return (inputs + peak_bytes_of(lambda: engine.attend(problem))) / estimate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axes", AXES)
def test_estimate_is_above_what_is_taken_and_near_to_it(axes: str, dtype: torch.dtype) -> None:
    forms: list[dict[str, Any]] = [
        {"outputs": ("output", "weights"), "path": "manual"},
        {"outputs": ("output", "query", "key", "value", "logsumexp"), "path": "manual", "weight_layout": "out_in"},
    ]
    for form in forms:
        problem = make_layer(**AXES[axes], dtype=dtype, **form)
        assert prepare(problem, device_type="cpu").cost.peak_bytes > 8 * MIB
        assert 0.7 <= share_taken(problem) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axes", AXES)
def test_estimate_of_gradients_is_above_what_is_taken_and_near_to_it(axes: str, dtype: torch.dtype) -> None:
    forms: list[dict[str, Any]] = [{}, {"outputs": ("grad_input", "grad_w_key"), "weight_layout": "out_in"}]
    for form in forms:
        problem = make_layer_gradients(**AXES[axes], dtype=dtype, **form)
        assert prepare(problem, device_type="cpu").cost.peak_bytes > 8 * MIB
        assert 0.7 <= share_taken(problem) <= 1.0


@pytest.mark.parametrize("outputs", [("grad_w_output",), ("grad_b_output",)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_estimate_of_gradients_behind_the_attention_is_above_what_is_taken_and_near_to_it(
    dtype: torch.dtype, outputs: tuple[str, ...]
) -> None:
    forms: list[dict[str, Any]] = [
        {"batch": 1, "seq_len_q": 256, "width": 1536, "num_heads": 12, "head_dim": 128, "output_width": 1536},
        {"batch": 1, "seq_len_q": 2048, "width": 128, "num_heads": 2, "head_dim": 64, "output_width": 4096},
    ]
    for form in forms:
        problem = make_layer_gradients(**form, dtype=dtype, outputs=outputs)
        assert prepare(problem, device_type="cpu").cost.peak_bytes > 16 * MIB
        assert 0.7 <= share_taken(problem) <= 1.0
        problem.grad_output[0, 7] = torch.nan
        assert share_taken(problem) <= 1.0


@pytest.mark.parametrize("feature", ["nothing", "mask and bias", "both lengths", "alibi", "softcap", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_with_any_feature_is_not_above_the_estimate(dtype: torch.dtype, feature: str) -> None:
    axes = {"batch": 2, "num_heads": 4, "seq_len_q": 160, "seq_len_kv": 170}
    tensors, options = features(**axes)[feature]
    form: dict[str, Any] = {**axes, "width": 192, "head_dim": 48, "output_width": 192, "tensors": tensors, **options}
    for problem in (
        make_layer(**form, dtype=dtype),
        make_layer(**form, dtype=dtype, outputs=LAYER_OUTPUTS, top_k=30),
        make_layer_gradients(**form, dtype=dtype),
    ):
        assert share_taken(problem) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_with_numbers_that_are_not_finite_is_not_above_the_estimate(dtype: torch.dtype) -> None:
    allow = make_mask(1, 4, 512, 512, seed=1)
    allow[:, 1:, :, 3] = False
    problem = make_layer_gradients(
        batch=1, seq_len_q=512, width=512, head_dim=64, output_width=512, dtype=dtype, tensors={"allow_mask": allow}
    )
    tokens, grad_output, w_key = (
        tensor.clone() for tensor in (problem.layer.input, problem.grad_output, problem.layer.w_key)
    )
    tokens[0, 3] = grad_output[0, 7] = w_key[5] = torch.nan
    changes: list[dict[str, Any]] = [{"input": tokens}, {"w_key": w_key}]
    for changed in changes:
        layer = replace(problem.layer, **changed)
        assert share_taken(replace(problem, layer=layer)) <= 1.0
        assert share_taken(replace(problem, layer=layer, grad_output=grad_output)) <= 1.0
        assert share_taken(layer) <= 1.0


def test_peak_of_what_does_not_lie_in_order_is_not_above_the_estimate() -> None:
    problem = make_layer_gradients(batch=8, seq_len_q=128, width=512, head_dim=64, output_width=512)
    strided: dict[str, Any] = {
        name: tensor.transpose(0, -1).contiguous().transpose(0, -1) for name, tensor in problem.layer.tensors().items()
    }
    layer = replace(problem.layer, **strided)
    for changed in (layer, replace(problem, layer=layer)):
        assert share_taken(changed) <= 1.0


def test_matrices_that_lie_by_columns_or_inside_others_are_counted_once() -> None:
    problem = make_layer_gradients(batch=1, seq_len_q=64, width=1024, num_heads=16, head_dim=64, output_width=1024)
    estimate = prepare(problem, device_type="cpu").cost.peak_bytes
    for change in (lambda one: one.t().contiguous().t(), lambda one: torch.cat((one, one), dim=1)[:, :1024]):
        matrices: dict[str, Any] = {name: change(getattr(problem.layer, name)) for name in WEIGHT_NAMES}
        layer = replace(problem.layer, **matrices)
        changed = replace(problem, layer=layer)
        assert prepare(changed, device_type="cpu").cost.peak_bytes == estimate
        for one in (changed, replace(changed, outputs=("grad_w_output",)), layer):
            assert share_taken(one) <= 1.0


def test_flops_are_those_of_the_attention_and_of_every_projection() -> None:
    form: dict[str, Any] = {"batch": 3, "num_kv_heads": 2, "seq_len_kv": 7, "head_dim_v": 3, "memory_width": 9}
    problem = make_layer(**form, causal="lower_right")
    attention = 2 * 3 * 4 * 5 * 7 * (6 + 3)
    forward = 2 * 3 * (5 * 12 * 24 + 7 * 9 * 12 + 7 * 9 * 6)
    output = 2 * 3 * 5 * 12 * 10
    assert prepare(problem, device_type="cpu").cost.flops == attention + forward + output
    unprojected = with_layer_options(problem, outputs=("weights", "key"))
    assert prepare(unprojected, device_type="cpu").cost.flops == attention + forward
    backward = 2 * 3 * 4 * 5 * 7 * (3 * 6 + 2 * 3)
    gradients = make_layer_gradients(**form)
    assert prepare(gradients, device_type="cpu").cost.flops == attention + backward + 3 * forward + 2 * output
    w_key = 2 * 3 * 7 * 9 * 12
    alone = make_layer_gradients(**form, outputs=("grad_w_key",))
    assert prepare(alone, device_type="cpu").cost.flops == backward + forward + output + w_key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_output_bytes_are_those_of_the_answer(dtype: torch.dtype) -> None:
    for outputs in (("output",), ("query", "weights"), LAYER_OUTPUTS):
        selected: dict[str, Any] = {"select_heads": (2, 0), "top_k": 3} if outputs == LAYER_OUTPUTS else {}
        problem = make_layer(seq_len_kv=7, num_kv_heads=2, dtype=dtype, outputs=outputs, **selected)
        found = Engine().attend(problem).outputs
        assert prepare(problem, device_type="cpu").cost.output_bytes == sum(t.nbytes for t in found.values())
    tensors = {"bias": torch.zeros(4, 1, 7), "sinks": torch.zeros(4, dtype=torch.float64)}
    for asked in (None, ("grad_memory", "grad_b_key"), ("grad_w_output",)):
        gradients = make_layer_gradients(seq_len_kv=7, dtype=dtype, tensors=tensors, outputs=asked)
        found = Engine().attend(gradients).outputs
        assert prepare(gradients, device_type="cpu").cost.output_bytes == sum(t.nbytes for t in found.values())


def test_estimate_of_a_shape_alone_allocates_nothing() -> None:
    problem = make_layer(batch=1)
    huge: dict[str, Any] = {
        "input": torch.empty(64, 2**20, 12, device="meta"),
        "allow_mask": torch.empty(64, 4, 2**20, 2**20, dtype=torch.bool, device="meta"),
    }
    for name, tensor in problem.tensors().items():
        huge.setdefault(name, tensor.to("meta"))
    layer = replace(problem, **huge)
    gradients = LayerGradientsProblem(layer, torch.empty(64, 2**20, 10, device="meta"))
    for one in (layer, gradients):
        assert peak_bytes_of(lambda one=one: prepare(one, device_type="cpu")) < MIB  # type: ignore[misc]
        assert prepare(one, device_type="cpu").cost.peak_bytes > 2**45


def test_estimate_of_a_layer_with_empty_axes_is_there() -> None:
    cases: list[dict[str, Any]] = [{"batch": 0}, {"seq_len_q": 0}, {"seq_len_kv": 0}]
    for axes in cases:
        for problem in (make_layer(**axes), make_layer_gradients(**axes)):
            assert share_taken(problem) <= 1.0
