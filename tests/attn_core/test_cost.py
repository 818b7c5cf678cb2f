"""The estimate: exact in flops, and never below what is really taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_core import AttentionProblem, Engine, WeightedSumProblem
from attn_core.prepared import prepare
from attn_core.problem import OUTPUTS, Problem
from tests.support.factory import features, make_problem, make_tensor, with_tensors
from tests.support.gradients import make_gradients
from tests.support.layers import make_layer, make_layer_gradients
from tests.support.memory import peak_bytes_of

MIB = 2**20
AXES: dict[str, dict[str, Any]] = {
    "wide": {"batch": 1, "num_heads": 8, "seq_len_q": 640, "seq_len_kv": 700, "head_dim": 32},
    "many items": {"batch": 64, "num_heads": 8, "seq_len_q": 16, "seq_len_kv": 16, "head_dim": 64},
    "one key": {"batch": 1, "num_heads": 1, "seq_len_q": 2**19, "seq_len_kv": 1, "head_dim": 1},
    "one query": {"batch": 1, "num_heads": 2, "seq_len_q": 1, "seq_len_kv": 2**18, "head_dim": 1},
}
ASKED: dict[str, dict[str, Any]] = {
    "context": {"outputs": ("context",)},
    "logsumexp": {"outputs": ("context", "logsumexp")},
    "weights": {"outputs": ("context", "weights")},
    "top": {"outputs": ("top_weights",), "top_k": 4},
    "summaries": {"outputs": ("entropy", "weight_totals")},
}
FEATURES = ("nothing", "lower_right", "mask and bias", "both lengths", "window", "alibi", "softcap")


def features_of(axes: dict[str, Any], feature: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return features(**{name: axes[name] for name in ("batch", "num_heads", "seq_len_q", "seq_len_kv")})[feature]


def peak_of(problem: Problem) -> int:
    """What is taken at most, inputs counted in."""
    engine = Engine()
    inputs = sum(tensor.nbytes for tensor in problem.tensors().values())
    return inputs + peak_bytes_of(lambda: engine.attend(problem))


def assert_holds(problem: Problem) -> None:
    """The peak that was measured is not above the estimate."""
    assert peak_of(problem) <= prepare(problem, device_type="cpu").cost.peak_bytes


def assert_holds_with_spare(problem: Problem) -> None:
    """Nor above that for numbers that are not finite."""
    assert peak_of(problem) <= prepare(problem, device_type="cpu").cost.with_spare.peak_bytes


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("axes", AXES)
def test_peak_is_not_above_the_estimate(axes: str, feature: str) -> None:
    # Three of the five sets of outputs each; over the whole table every set meets every feature and both dtypes.
    turn = list(AXES).index(axes) + FEATURES.index(feature)
    tensors, options = features_of(AXES[axes], feature)
    for place, asked in enumerate(list(ASKED)[turn % 2 :: 2]):
        dtype = (torch.float32, torch.bfloat16)[(turn + place) % 2]
        if "bias" in tensors:
            tensors = {**tensors, "bias": tensors["bias"].to(dtype)}
        assert_holds(make_problem(**AXES[axes], dtype=dtype, tensors=tensors, **ASKED[asked], **options))


@pytest.mark.parametrize("layout", ["bthd", "btd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_peak_in_another_layout_is_not_above_the_estimate(dtype: torch.dtype, layout: Any) -> None:
    for asked in ("context", "weights"):
        assert_holds(make_problem(**AXES["wide"], num_kv_heads=2, dtype=dtype, layout=layout, **ASKED[asked]))


@pytest.mark.parametrize("feature", ["nothing", "lower_right", "mask and bias"])
@pytest.mark.parametrize("axes", AXES)
def test_peak_with_numbers_that_are_not_finite_is_not_above_the_estimate(axes: str, feature: str) -> None:
    tensors, options = features_of(AXES[axes], feature)
    problem = make_problem(**AXES[axes], tensors=tensors, **ASKED["logsumexp"], **options)
    assert problem.key is not None and problem.value is not None
    query, key, value = problem.query.clone(), problem.key.clone(), problem.value.clone()
    query[0, 0, 0], key[0, 0, 0], value[0, 0, 0] = torch.nan, torch.nan, torch.nan
    assert_holds_with_spare(with_tensors(problem, query=query, key=key, value=value))


def test_peak_of_every_output_of_a_large_problem_is_not_above_the_estimate() -> None:
    problem = make_problem(batch=1, num_heads=2, seq_len_q=1500, seq_len_kv=1500, head_dim=32, outputs=OUTPUTS, top_k=3)
    assert prepare(problem, device_type="cpu").cost.peak_bytes > 50 * MIB
    assert_holds(problem)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 1024, 1024), (1, 2**18, 0), (1, 2**18, 1)])
def test_peak_of_a_weighted_sum_is_not_above_the_estimate(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weights = make_tensor(*shape, dtype=dtype)
    assert_holds(WeightedSumProblem(weights, make_tensor(shape[0], shape[2], 16, dtype=dtype)))


def test_flops_are_two_for_each_product_and_nothing_is_off_for_masks() -> None:
    problem = make_problem(batch=3, num_kv_heads=2, head_dim=8, head_dim_v=6, causal="lower_right")
    assert prepare(problem, device_type="cpu").cost.flops == 2 * 3 * 4 * 5 * 7 * (8 + 6)


@pytest.mark.parametrize("asked", ASKED)
def test_output_bytes_are_those_of_the_answer(asked: str) -> None:
    heads: dict[str, Any] = {} if asked in ("context", "logsumexp") else {"select_heads": (2, 0)}
    problem = make_problem(**ASKED[asked], **heads)
    result = Engine().attend(problem)
    output_bytes = sum(tensor.nbytes for tensor in result.outputs.values())
    assert prepare(problem, device_type="cpu").cost.output_bytes == output_bytes


def test_estimate_of_a_shape_alone_allocates_nothing() -> None:
    query = torch.empty(64, 64, 2**20, 128, device="meta")
    mask = torch.empty(64, 64, 2**20, 2**20, dtype=torch.bool, device="meta")
    problem = AttentionProblem(query, allow_mask=mask, key_lengths=torch.empty(64, dtype=torch.int64, device="meta"))
    assert peak_bytes_of(lambda: prepare(problem, device_type="cpu")) < MIB
    assert prepare(problem, device_type="cpu").cost.peak_bytes > 2**52


@pytest.mark.parametrize("shape", [(600_000, 1), (300_000, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_peak_of_a_weighted_sum_of_narrow_values_is_not_above_the_estimate(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    assert_holds(WeightedSumProblem(make_tensor(*shape, dtype=dtype), make_tensor(shape[1], 1, dtype=dtype)))


VERIFIED: dict[str, dict[str, Any]] = {
    "few keys": {"batch": 1, "num_heads": 8, "seq_len_q": 2048, "seq_len_kv": 16, "head_dim": 64},
    "wide values": {"batch": 16, "num_heads": 6, "num_kv_heads": 2, "seq_len_q": 8, "seq_len_kv": 1, "head_dim": 8,
                    "head_dim_v": 1024},
    "narrow values": {"batch": 16, "num_heads": 10, "seq_len_q": 160, "seq_len_kv": 5, "head_dim": 128,
                      "head_dim_v": 5, "layout": "bthd", "outputs": ("entropy",)},
    "one head": {"batch": 1, "num_heads": 1, "seq_len_q": 192, "seq_len_kv": 3, "head_dim": 1024},
}  # fmt: skip


@pytest.mark.parametrize("axes", VERIFIED.values(), ids=VERIFIED)
def test_peak_of_a_verification_is_not_above_the_estimate(axes: dict[str, Any]) -> None:
    assert_holds(make_problem(**axes, verify=True))


def test_verification_of_little_needs_little() -> None:
    problem = make_problem(batch=1, num_heads=1, seq_len_q=1, seq_len_kv=1, verify=True)
    gradients = make_gradients(problem)
    layers: list[Problem] = [make_layer(verify=True), make_layer_gradients(verify=True)]
    for one in (problem, gradients, *layers):
        assert prepare(one, device_type="cpu").cost.peak_bytes < 3 * MIB


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3)])
def test_peak_of_strided_operands_is_not_above_the_estimate(order: tuple[int, ...]) -> None:
    tensors = {name: make_tensor(4, 512, 8, 64).permute(*order) for name in ("query", "key", "value")}
    assert_holds(AttentionProblem(query=tensors["query"], key=tensors["key"], value=tensors["value"]))


@pytest.mark.parametrize("shift", [0, 1])
def test_copies_of_tensors_at_odd_addresses_and_of_turned_masks_are_counted(shift: int) -> None:
    numbers = 8 * 1024 * 64
    tensors = {name: make_tensor(numbers + 1)[shift : numbers + shift].view(1, 8, 1024, 64) for name in "qkv"}
    mask = make_tensor(1, 8, 1024, 1024).transpose(2, 3) > 0
    assert_holds(AttentionProblem(query=tensors["q"], key=tensors["k"], value=tensors["v"], allow_mask=mask))


LITTLE_BESIDES: dict[str, dict[str, Any]] = {
    "lengths of queries": {"batch": 8, "num_heads": 1, "seq_len_q": 646, "seq_len_kv": 512, "head_dim": 64,
                           "outputs": ("entropy",), "tensors": {"query_lengths": torch.full((8,), 400)}},
    "a mask of rows": {"batch": 32, "num_heads": 2, "seq_len_q": 128, "seq_len_kv": 128, "head_dim": 64,
                       "outputs": ("weight_totals",), "tensors": {"allow_mask": torch.ones(32, 2, 128, 1) > 0}},
    "many narrow rows": {"batch": 1, "num_heads": 1, "seq_len_q": 300_000, "seq_len_kv": 4, "head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize("case", LITTLE_BESIDES.values(), ids=LITTLE_BESIDES)
def test_estimate_is_near_the_peak_of_masks_without_keys_and_of_narrow_rows(case: dict[str, Any]) -> None:
    problem = make_problem(**case)
    assert 0.7 <= peak_of(problem) / prepare(problem, device_type="cpu").cost.peak_bytes <= 1.0
