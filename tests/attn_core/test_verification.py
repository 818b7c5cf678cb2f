"""Verification: what agrees with float64 is said to, what does not is found, with its size and its place."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_core import AttentionOptions, AttentionProblem, AttentionResult, Engine
from attn_core.errors import Abandoned, never_abandoned
from attn_core.prepared import prepare
from attn_core.problem import (
    LAYER_OUTPUTS,
    OUTPUTS,
    GradientsProblem,
    LayerGradientsProblem,
    LayerOptions,
    LayerProblem,
    Verification,
)
from attn_core.verification import VerifiedProblem, pairs, verification_cost, verify
from tests.support.factory import (
    DTYPES,
    WITHOUT_TOP,
    features,
    make_mask,
    make_problem,
    make_tensor,
    with_options,
    with_tensors,
)
from tests.support.gradients import all_outputs, by_autograd, make_gradients
from tests.support.layers import grad_output_of, with_layer_options
from tests.support.layers import make_layer as layer_of
from tests.support.memory import peak_bytes_of
from tests.support.oracle import expected_outputs

MIB = 2**20
EVERYTHING: dict[str, Any] = {"outputs": OUTPUTS, "top_k": 3}


def result_of(problem: VerifiedProblem, outputs: dict[str, Tensor]) -> AttentionResult:
    return AttentionResult(outputs, path="manual", why="", device="cpu", dtype=torch.float64)


def verified(problem: VerifiedProblem, outputs: dict[str, Tensor]) -> Verification:
    return verify(problem, result_of(problem, outputs), never_abandoned)


def exact(problem: AttentionProblem) -> dict[str, Tensor]:
    """The answer of the oracle, in float64 whatever the problem's dtype."""
    return expected_outputs(problem)


def assert_agrees(problem: VerifiedProblem, outputs: dict[str, Tensor], limit: float = 1e-12) -> None:
    found = verified(problem, outputs)
    assert found.max_abs_error <= limit, found
    assert found.max_rel_error <= limit, found


# Agreement


@pytest.mark.parametrize("feature", list(features()))
def test_every_output_of_the_reference_agrees(feature: str) -> None:
    tensors, options = features()[feature]
    problem = make_problem(num_kv_heads=2, dtype=torch.float64, tensors=tensors, **EVERYTHING, **options)
    assert_agrees(problem, exact(problem))


@pytest.mark.parametrize("feature", list(features(seq_len_q=9, seq_len_kv=33)))
def test_rows_and_keys_that_are_cut_give_the_same(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = features(seq_len_q=9, seq_len_kv=33)[feature]
    problem = make_problem(
        num_kv_heads=2, seq_len_q=9, seq_len_kv=33, dtype=torch.float64, tensors=tensors, **EVERYTHING, **options
    )
    whole = pairs.sizes_of(pairs.Pairs.of(problem, torch.device("cpu")).dims, 9)
    monkeypatch.setattr(pairs, "KEY_BYTES", 8 * 16 * 7)
    monkeypatch.setattr(pairs, "PAIRS_AT_ONCE", 60)
    size = pairs.sizes_of(pairs.Pairs.of(problem, torch.device("cpu")).dims, 9)
    assert whole.keys == 33 and size.keys == 7 and size.rows < 9
    assert_agrees(problem, exact(problem))


@pytest.mark.parametrize("layout", ["bhtd", "bthd", "btd"])
@pytest.mark.parametrize("select", [{}, {"select_heads": (3, 0), "select_rows": (4, 1)}])
def test_every_layout_and_selection_agrees(layout: Any, select: dict[str, Any]) -> None:
    problem = make_problem(
        num_kv_heads=2, head_dim_v=5, dtype=torch.float64, layout=layout, causal="lower_right", **EVERYTHING, **select
    )
    assert_agrees(problem, exact(problem))


@pytest.mark.parametrize("rank", [3, 2])
@pytest.mark.parametrize("self_attention", [False, True])
def test_every_rank_agrees(rank: int, self_attention: bool) -> None:
    problem = make_problem(rank=rank, dtype=torch.float64, self_attention=self_attention, **EVERYTHING)
    assert_agrees(problem, exact(problem))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq_len_q": 0}, {"seq_len_kv": 0}])
def test_nothing_to_compute_agrees(sizes: dict[str, Any]) -> None:
    sinks = {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])}
    for tensors in ({}, sinks):
        problem = make_problem(**sizes, dtype=torch.float64, tensors=tensors, **EVERYTHING)
        assert_agrees(problem, exact(problem))


@pytest.mark.parametrize("path", ["fused", "manual", "blocked"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_answer_of_each_path_is_verified_within_the_error_of_its_dtype(path: str, dtype: torch.dtype) -> None:
    problem = make_problem(dtype=dtype, seq_len_q=20, seq_len_kv=30, causal="lower_right", path=path, verify=True)
    found = Engine().attend(problem).verification
    assert found is not None and found.max_rel_error <= 8 * torch.finfo(dtype).eps
    assert (found.max_abs_error > 0) == (found.worst != "")


def test_only_whoever_asks_gets_a_verification() -> None:
    assert Engine().attend(make_problem()).verification is None
    assert Engine().attend(make_problem(verify=True)).verification is not None


def test_a_problem_that_is_to_be_verified_has_no_plain_form() -> None:
    problem = make_problem()
    assert prepare(problem, device_type="cpu").plain is not None
    assert prepare(with_options(problem, verify=True), device_type="cpu").plain is None


# Disagreement


@pytest.mark.parametrize("name", WITHOUT_TOP)
@pytest.mark.parametrize("select", [{}, {"select_heads": (3, 0), "select_rows": (4, 1)}])
def test_a_number_that_is_off_is_found_in_its_place(name: str, select: dict[str, Any]) -> None:
    problem = make_problem(num_kv_heads=2, dtype=torch.float64, outputs=WITHOUT_TOP, **select)
    outputs = exact(problem)
    for at in [(0,) * outputs[name].ndim, tuple(axis - 1 for axis in outputs[name].shape)]:
        moved = {key: tensor.clone() for key, tensor in outputs.items()}
        moved[name][at] += 0.25
        found = verified(problem, moved)
        assert found.max_abs_error == pytest.approx(0.25)
        assert found.worst == f"{name}[{','.join(map(str, at))}]"
        row = outputs[name][at[:-1]].abs().max().item()
        assert found.max_rel_error == pytest.approx(0.25 / row)


@pytest.mark.parametrize(("layout", "at"), [("bhtd", (1, 2, 3, 4)), ("bthd", (1, 3, 2, 4)), ("btd", (1, 3, 2 * 8 + 4))])
def test_the_place_is_said_in_the_layout_of_the_caller(layout: Any, at: tuple[int, ...]) -> None:
    problem = make_problem(dtype=torch.float64, layout=layout)
    context = exact(problem)["context"].clone()
    context[at] -= 1.0
    assert verified(problem, {"context": context}).worst == f"context[{','.join(map(str, at))}]"


@pytest.mark.parametrize("rank", [3, 2])
def test_the_place_lacks_the_axes_that_the_caller_left_out(rank: int) -> None:
    problem = make_problem(rank=rank, dtype=torch.float64, outputs=("logsumexp",))
    lse = exact(problem)["logsumexp"].clone()
    at = (2, 3)[3 - rank :]
    lse[at] += 1.0
    assert verified(problem, {"logsumexp": lse}).worst == f"logsumexp[{','.join(map(str, at))}]"


def test_the_largest_of_several_errors_is_named() -> None:
    problem = make_problem(dtype=torch.float64, outputs=("context", "weights"))
    outputs = {name: tensor.clone() for name, tensor in exact(problem).items()}
    outputs["context"][1, 2, 3, 4] += 0.5
    outputs["weights"][0, 1, 2, 3] -= 0.75
    found = verified(problem, outputs)
    assert found.max_abs_error == pytest.approx(0.75)
    assert found.worst == "weights[0,1,2,3]"


def test_in_a_row_of_zeros_the_relative_error_is_the_difference() -> None:
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    problem = make_problem(dtype=torch.float64, tensors={"allow_mask": nothing})
    context = exact(problem)["context"].clone()
    context[0, 0, 0, 0] = 1e-3
    assert verified(problem, {"context": context}) == Verification(1e-3, 1e-3, "context[0,0,0,0]")


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_infinitely_far_from_one_that_is(wrong: float) -> None:
    problem = make_problem(dtype=torch.float64)
    context = exact(problem)["context"].clone()
    context[0, 1, 2, 3] = wrong
    assert verified(problem, {"context": context}) == Verification(math.inf, math.inf, "context[0,1,2,3]")


def test_equal_infinities_and_nan_agree_and_others_do_not() -> None:
    problem = make_problem(dtype=torch.float64, outputs=("context", "logsumexp"), causal="lower_right", seq_len_q=9)
    outputs = exact(problem)
    assert torch.isneginf(outputs["logsumexp"]).any()
    assert_agrees(problem, outputs)
    lse = outputs["logsumexp"].masked_fill(torch.isneginf(outputs["logsumexp"]), math.inf)
    assert verified(problem, outputs | {"logsumexp": lse}).max_abs_error == math.inf


def test_a_silent_zero_where_nan_is_due_is_found() -> None:
    problem = make_problem(dtype=torch.float64)
    query = problem.query.clone()
    query[0, 1, 2, 3] = math.nan
    problem = with_tensors(problem, query=query)
    outputs = exact(problem)
    assert_agrees(problem, outputs)
    zeros = outputs["context"].nan_to_num(nan=0.0)
    found = verified(problem, {"context": zeros})
    assert (found.max_abs_error, found.worst) == (math.inf, "context[0,1,2,0]")


# Numbers that are not finite


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("feature", ["nothing", "lower_right", "allow_mask of all", "key_lengths", "sinks and mask"])
def test_what_is_not_finite_is_told_as_the_reference_tells_it(name: str, poison: float, feature: str) -> None:
    tensors, options = features()[feature]
    problem = make_problem(dtype=torch.float64, tensors=tensors, outputs=WITHOUT_TOP, **options)
    tensor = getattr(problem, name).clone()
    tensor[0, 1, -1, 2] = poison
    tensor[1, :, 2] = poison
    problem = with_tensors(problem, **{name: tensor})
    assert_agrees(problem, exact(problem))


def test_overflow_to_minus_infinity_is_no_empty_row() -> None:
    problem = make_problem(dtype=torch.float64, std=1e200, outputs=("context", "logsumexp"))
    assert_agrees(problem, exact(problem))


# Ranking


def test_keys_of_equal_weight_may_stand_in_any_order() -> None:
    problem = with_tensors(make_problem(dtype=torch.float64, outputs=("top_weights",), top_k=3))
    problem = with_tensors(problem, key=torch.zeros_like(problem.query[:, :, :1]).expand(2, 4, 7, 8).contiguous())
    outputs = exact(problem)
    assert_agrees(problem, outputs | {"top_keys": torch.tensor([6, 2, 4]).expand(2, 4, 5, 3)})


def test_a_wrong_key_is_as_far_off_as_its_weight() -> None:
    problem = make_problem(dtype=torch.float64, outputs=("top_weights", "weights"), top_k=2)
    outputs = exact(problem)
    keys = outputs["top_keys"].clone()
    least = outputs["weights"][1, 2, 3].argmin()
    keys[1, 2, 3, 0] = least
    due = outputs["weights"][1, 2, 3].max() - outputs["weights"][1, 2, 3, least]
    found = verified(problem, outputs | {"top_keys": keys})
    assert found.max_abs_error == pytest.approx(due.item())
    assert found.max_rel_error == pytest.approx((due / outputs["weights"][1, 2, 3].max()).item())
    assert found.worst == "top_keys[1,2,3,0]"


@pytest.mark.parametrize("wrong", ["twice", "none", "beyond", "forbidden", "where none is due"])
def test_a_key_that_cannot_be_meant_is_infinitely_far_off(wrong: str) -> None:
    mask = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    mask[..., 2:5] = False
    problem = make_problem(
        dtype=torch.float64, outputs=("top_weights",), top_k=5, tensors={"allow_mask": mask}, select_rows=(4, 3)
    )
    outputs = exact(problem)
    keys = outputs["top_keys"].clone()
    place, key = {
        "twice": (1, int(keys[1, 2, 0, 0])),
        "none": (0, -1),
        "beyond": (0, 7),
        "forbidden": (0, 3),
        "where none is due": (4, 0),
    }[wrong]
    keys[1, 2, 0, place] = key
    found = verified(problem, outputs | {"top_keys": keys})
    assert found.max_abs_error == math.inf and found.worst.startswith("top_keys[1,2,0,")


# Gradients


@pytest.mark.parametrize("feature", list(features()))
def test_every_gradient_by_autograd_agrees(feature: str) -> None:
    tensors, options = features()[feature]
    attention = make_problem(num_kv_heads=2, head_dim_v=6, dtype=torch.float64, tensors=tensors, **options)
    problem = make_gradients(attention)
    problem = replace(problem, outputs=all_outputs(problem))
    assert_agrees(problem, by_autograd(problem))


@pytest.mark.parametrize("feature", ["bias of all", "bias of keys", "softcap", "sinks and mask", "causal window"])
def test_gradients_in_blocks_agree(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = features(seq_len_q=9, seq_len_kv=33)[feature]
    attention = make_problem(
        num_kv_heads=2, seq_len_q=9, seq_len_kv=33, dtype=torch.float64, tensors=tensors, **options
    )
    problem = make_gradients(attention)
    problem = replace(problem, outputs=all_outputs(problem))
    monkeypatch.setattr(pairs, "KEY_BYTES", 8 * 16 * 7)
    monkeypatch.setattr(pairs, "PAIRS_AT_ONCE", 60)
    assert_agrees(problem, by_autograd(problem))


@pytest.mark.parametrize("layout", ["bhtd", "bthd", "btd"])
@pytest.mark.parametrize("self_attention", [False, True])
@pytest.mark.parametrize("which", [{"context": False}, {"logsumexp": False}])
def test_gradients_in_every_layout_agree(layout: Any, self_attention: bool, which: dict[str, Any]) -> None:
    problem = make_gradients(
        make_problem(dtype=torch.float64, layout=layout, self_attention=self_attention, causal="lower_right"), **which
    )
    assert_agrees(problem, by_autograd(problem))


@pytest.mark.parametrize(
    ("name", "at"), [("grad_query", (1, 3, 4, 2)), ("grad_key", (0, 1, 6, 7)), ("grad_bias", (4, 6))]
)
def test_a_gradient_that_is_off_is_found_in_its_place(name: str, at: tuple[int, ...]) -> None:
    bias = make_tensor(5, 7, dtype=torch.float64)
    problem = make_gradients(make_problem(num_kv_heads=2, dtype=torch.float64, tensors={"bias": bias}))
    outputs = by_autograd(problem)
    outputs[name][at] += 0.5
    found = verified(problem, outputs)
    assert found.max_abs_error == pytest.approx(0.5)
    assert found.worst == f"{name}[{','.join(map(str, at))}]"


def test_nan_behind_a_mask_does_not_reach_the_gradients() -> None:
    attention = make_problem(dtype=torch.float64, tensors={"key_lengths": torch.tensor([4, 2])})
    problem = make_gradients(attention)
    outputs = by_autograd(problem)
    assert attention.key is not None and attention.value is not None
    key, value = attention.key.clone(), attention.value.clone()
    key[0, :, 4:], value[1, :, 2:] = math.nan, math.inf
    poisoned = replace(problem, attention=with_tensors(attention, key=key, value=value))
    assert_agrees(poisoned, outputs)


# Layers


def make_layer(
    *, weight_layout: Any = "in_out", memory: bool = False, rank: int = 3, biases: bool = True, **options: Any
) -> LayerProblem:
    """4 query heads of 3 sharing 2, values of 5."""
    widths = {"query": (6, 12), "key": (7 if memory else 6, 6), "value": (7 if memory else 6, 10), "output": (20, 8)}
    tensors: dict[str, Tensor] = {"input": make_tensor(2, 5, 6, seed=1, dtype=torch.float64)}
    if memory:
        tensors["memory"] = make_tensor(2, 9, 7, seed=2, dtype=torch.float64)
    tensors = {name: tensor if rank == 3 else tensor[1] for name, tensor in tensors.items()}
    for seed, (name, (height, width)) in enumerate(widths.items(), start=3):
        matrix = make_tensor(height, width, seed=seed, dtype=torch.float64, std=0.5)
        tensors[f"w_{name}"] = matrix.T.contiguous() if weight_layout == "out_in" else matrix
        if biases:
            tensors[f"b_{name}"] = make_tensor(width, seed=10 + seed, dtype=torch.float64)
    outputs = options.pop("outputs", ("output",))
    attention = AttentionOptions(layout="btd", num_heads=4, num_kv_heads=2, **options)
    return LayerProblem(
        **tensors, options=LayerOptions(attention=attention, weight_layout=weight_layout, outputs=outputs)
    )


def heads_of(columns: Tensor, num_heads: int) -> Tensor:
    """``[.., tokens, num_heads * width]`` as ``[.., num_heads, tokens, width]``."""
    return columns.reshape(*columns.shape[:-1], num_heads, -1).transpose(-2, -3)


def forward(layer: LayerProblem, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer by torch's own operators, differentiable; causal or not, nothing else."""

    def through(name: str, tokens: Tensor) -> Tensor:
        matrix = tensors[f"w_{name}"]
        found = tokens @ (matrix.T if layer.options.weight_layout == "out_in" else matrix)
        return found + tensors[f"b_{name}"] if f"b_{name}" in tensors else found

    source = tensors.get("memory", tensors["input"])
    query = heads_of(through("query", tensors["input"]), 4)
    key = heads_of(through("key", source), 2)
    value = heads_of(through("value", source), 2)
    k, v = (tensor.repeat_interleave(2, dim=-3) for tensor in (key, value))
    logits = query @ k.transpose(-1, -2) / math.sqrt(3)
    if layer.options.attention.causal is not False:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    weights = torch.softmax(logits, dim=-1)
    context = (weights @ v).transpose(-2, -3).flatten(-2)
    return {
        "output": through("output", context),
        "query": query,
        "key": key,
        "value": value,
        "context": context,
        "weights": weights,
        "logsumexp": torch.logsumexp(logits, dim=-1),
    }


LAYERS: dict[str, dict[str, Any]] = {
    "self": {},
    "causal": {"causal": True},
    "cross": {"memory": True},
    "as Linear stores": {"weight_layout": "out_in", "memory": True},
    "without biases": {"biases": False},
    "without batch": {"rank": 2, "causal": True},
}
LAYER_ASKED = ("output", "query", "key", "value", "context", "weights", "logsumexp")


@pytest.mark.parametrize("kind", LAYERS)
def test_every_output_of_a_layer_agrees(kind: str) -> None:
    layer = make_layer(**LAYERS[kind], outputs=LAYER_ASKED)
    assert_agrees(layer, forward(layer, layer.tensors()))


@pytest.mark.parametrize("name", LAYER_ASKED)
@pytest.mark.parametrize("kind", ["self", "without batch"])
def test_a_layers_number_that_is_off_is_found_in_its_place(kind: str, name: str) -> None:
    layer = make_layer(**LAYERS[kind], outputs=LAYER_ASKED)
    outputs = {key: tensor.clone() for key, tensor in forward(layer, layer.tensors()).items()}
    at = tuple(axis - 1 for axis in outputs[name].shape)
    outputs[name][at] += 0.5
    found = verified(layer, outputs)
    assert found.max_abs_error == pytest.approx(0.5)
    assert found.worst == f"{name}[{','.join(map(str, at))}]"


@pytest.mark.parametrize("kind", LAYERS)
def test_every_gradient_of_a_layer_agrees(kind: str) -> None:
    layer = make_layer(**LAYERS[kind])
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in layer.tensors().items()}
    output = forward(layer, leaves)["output"]
    grad_output = make_tensor(*output.shape, seed=30, dtype=torch.float64)
    problem = LayerGradientsProblem(layer, grad_output)
    found = torch.autograd.grad((output * grad_output).sum(), list(leaves.values()))
    outputs = {f"grad_{name}": gradient for name, gradient in zip(leaves, found, strict=True)}
    assert set(problem.asked) == set(outputs)
    # What a key's bias adds cancels in every softmax: its gradient is rounding alone, on both sides.
    assert verified(problem, outputs).max_abs_error <= 1e-12
    name = "grad_w_value"
    outputs[name] = outputs[name].clone()
    outputs[name][1, 2] += 0.5
    assert verified(problem, outputs).worst == f"{name}[1,2]"


def test_padding_that_is_nan_reaches_no_gradient_of_a_layer() -> None:
    """Where no token that counts attends it, and nothing comes back through it."""
    lengths = torch.tensor([3, 5])
    layer = replace(make_layer(memory=True), key_lengths=lengths)
    assert layer.memory is not None
    memory = layer.memory.clone()
    memory[0, 3:], memory[1, 5:] = 0.0, 0.0
    grad_output = make_tensor(2, 5, 8, seed=30, dtype=torch.float64)
    clean = LayerGradientsProblem(replace(layer, memory=memory), grad_output)
    outputs = Engine().attend(clean).outputs
    memory = memory.clone()
    memory[0, 3:], memory[1, 5:] = math.nan, math.inf
    poisoned = replace(clean, layer=replace(layer, memory=memory))
    assert verified(poisoned, outputs).max_abs_error <= 1e-12


@pytest.mark.parametrize(
    ("sizes", "rank"),
    [
        ({"batch": 0}, 3),
        ({"seq_len_q": 0}, 3),
        ({"seq_len_q": 0}, 2),
        ({"seq_len_q": 0, "seq_len_kv": 3}, 3),
        ({"seq_len_kv": 0}, 3),
        ({"seq_len_kv": 0}, 2),
    ],
)
def test_nothing_to_compute_of_a_layer_agrees(sizes: dict[str, Any], rank: int) -> None:
    keys = sizes.get("seq_len_kv", sizes.get("seq_len_q", 5))
    for tensors in ({}, {"sinks": torch.zeros(4), "bias": torch.zeros(1, 1, 1, keys)}):
        layer = layer_of(**sizes, rank=rank, dtype=torch.float64, tensors=tensors, verify=True)
        with_all = with_layer_options(layer, outputs=LAYER_OUTPUTS, top_k=3)
        for problem in (with_all, LayerGradientsProblem(layer, grad_output_of(layer))):
            found = Engine().attend(problem).verification
            assert found is not None and found.max_abs_error <= 1e-12, problem


def test_nothing_to_compute_of_gradients_agrees() -> None:
    for axis in ("batch", "seq_len_q", "seq_len_kv"):
        sizes: dict[str, Any] = {axis: 0}
        keys = sizes.get("seq_len_kv", 7)
        tensors = {"sinks": torch.zeros(4), "bias": torch.zeros(1, 1, 1, keys)}
        problem = make_gradients(make_problem(**sizes, dtype=torch.float64, tensors=tensors, verify=True))
        found = Engine().attend(replace(problem, outputs=all_outputs(problem))).verification
        assert found == Verification(0.0, 0.0, ""), sizes


# Cost


def test_memory_stays_bounded_however_long_the_problem() -> None:
    problem = make_problem(batch=1, num_heads=2, seq_len_q=40, seq_len_kv=20_000, head_dim=64, outputs=("context",))
    outputs = {"context": torch.zeros_like(problem.query)}
    assert peak_bytes_of(lambda: verified(problem, outputs)) < 64 * MIB


COSTED: dict[str, dict[str, Any]] = {
    "wide": {"batch": 1, "num_heads": 8, "seq_len_q": 512, "seq_len_kv": 512, "head_dim": 64},
    "long": {"batch": 1, "num_heads": 2, "seq_len_q": 33, "seq_len_kv": 30_000, "head_dim": 32},
    "many": {"batch": 64, "num_heads": 8, "num_kv_heads": 2, "seq_len_q": 16, "seq_len_kv": 16, "head_dim": 32},
    "one query": {"batch": 1, "num_heads": 4, "seq_len_q": 1, "seq_len_kv": 30_000, "head_dim": 16},
}


@pytest.mark.parametrize("poison", [None, math.nan])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("axes", COSTED)
def test_scratch_is_not_above_its_estimate(axes: str, backward: bool, poison: float | None) -> None:
    own = COSTED[axes]
    shape = own["batch"], own["num_heads"], own["seq_len_q"], own["seq_len_kv"]
    attention = make_problem(**own, tensors={"allow_mask": make_mask(*shape)}, softcap=4.0)
    if poison is not None:
        assert attention.value is not None
        attention.value[..., 3, :] = poison
    problem: VerifiedProblem = attention
    outputs = {"context": torch.zeros_like(attention.query)}
    if backward:
        problem = make_gradients(attention)
        outputs = {name: torch.zeros_like(problem.tensors()[name.removeprefix("grad_")]) for name in problem.asked}
    assert peak_bytes_of(lambda: verified(problem, outputs)) <= verification_cost(problem).scratch_bytes + MIB


@pytest.mark.parametrize(
    ("axes", "top_k", "select"),
    [
        ({"num_heads": 4, "seq_len_q": 512, "seq_len_kv": 512, "head_dim": 32}, 512, {}),
        ({"num_heads": 1, "seq_len_q": 1024, "seq_len_kv": 1024, "head_dim": 64}, 500, {}),
        ({"num_heads": 1, "seq_len_q": 32, "seq_len_kv": 30_000, "head_dim": 16}, 3000, {}),
        (
            {"num_heads": 4, "seq_len_q": 512, "seq_len_kv": 512, "head_dim": 32},
            512,
            {"select_heads": (3, 0, 2), "select_rows": tuple(range(500, 0, -1))},
        ),
    ],
    ids=["all keys", "half of them", "long", "selected"],
)
def test_scratch_of_many_ranks_is_not_above_its_estimate(
    axes: dict[str, Any], top_k: int, select: dict[str, Any]
) -> None:
    problem = make_problem(batch=1, **axes, outputs=("top_weights",), top_k=top_k, **select)
    outputs = Engine().attend(problem).outputs
    assert peak_bytes_of(lambda: verified(problem, outputs)) <= verification_cost(problem).scratch_bytes + MIB


def test_a_verification_costs_time_and_memory_and_no_flops() -> None:
    problem = make_problem(batch=1, num_heads=8, seq_len_q=512, seq_len_kv=512, head_dim=64)
    plain, more = (prepare(with_options(problem, verify=on), device_type="cpu").cost for on in (False, True))
    assert more.pair_passes > 10 * plain.pair_passes and more.peak_bytes > plain.peak_bytes
    assert (more.flops, more.output_bytes) == (plain.flops, plain.output_bytes)


def test_a_verification_stops_when_nobody_waits() -> None:
    problem = make_problem(batch=1, seq_len_q=600, seq_len_kv=600)
    called = []

    def stop() -> None:
        called.append(True)
        if len(called) == 3:
            raise Abandoned("enough")

    with pytest.raises(Abandoned):
        verify(problem, result_of(problem, {"context": torch.zeros_like(problem.query)}), stop)
    assert len(called) == 3


def test_costs_are_told_without_numbers() -> None:
    meta = torch.empty(64, 64, 2**16, 128, device="meta")
    attention = AttentionProblem(meta)
    problems: tuple[VerifiedProblem, ...] = (attention, GradientsProblem(attention, grad_context=meta))
    for problem in problems:
        assert peak_bytes_of(functools.partial(verification_cost, problem)) < MIB
        assert verification_cost(problem).pair_passes > 64 * 64 * 2.0**32
