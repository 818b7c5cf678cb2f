"""What makes a layer, or its gradients, impossible to compute: every fault by its field, all in one answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_core import AttentionOptions, Fault, InvalidProblem, check_problem
from attn_core.problem import (
    LAYER_GRADIENT_OUTPUTS,
    LAYER_OUTPUTS,
    PARAMETER_NAMES,
    LayerOptions,
    LayerProblem,
    TensorSpec,
)
from attn_core.validate import (
    check_values,
    find_layer_faults,
    find_layer_gradients_faults,
    find_parameters_faults,
    layer_lengths,
)
from tests.support.factory import features
from tests.support.layers import in_other_layout, make_layer, make_layer_gradients, with_layer_options

F32 = torch.float32
BOTH_READINGS = "in_out (y = x W, as in the papers) or out_in (y = x W^T, as nn.Linear stores)"


def specs_of(problem: LayerProblem, **changed: TensorSpec | None) -> dict[str, TensorSpec]:
    """The layer without its numbers; None takes a tensor away."""
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in problem.tensors().items()}
    for name, spec in changed.items():
        if spec is None:
            specs.pop(name)
        else:
            specs[name] = spec
    return specs


def spec(*shape: int, dtype: torch.dtype = F32) -> TensorSpec:
    return TensorSpec(dtype, shape)


def faults_of(problem: LayerProblem, **changed: TensorSpec | None) -> list[Fault]:
    return find_layer_faults(specs_of(problem, **changed), problem.options)


def fields(faults: list[Fault]) -> list[str]:
    return [fault.field for fault in faults]


@pytest.mark.parametrize("feature", features())
def test_every_feature_passes(feature: str) -> None:
    tensors, options = features()[feature]
    for kv_heads in (4, 2, 1):
        problem = make_layer(seq_len_kv=7, num_kv_heads=kv_heads, tensors=tensors, **options)
        check_problem(problem)
        check_values(problem)
        check_problem(in_other_layout(problem))
        gradients = make_layer_gradients(seq_len_kv=7, num_kv_heads=kv_heads, tensors=tensors, **options)
        check_problem(gradients)
        check_values(gradients)


@pytest.mark.parametrize("name", ["input", "w_query", "w_key", "w_value", "w_output"])
def test_missing_tensor_is_named_alone(name: str) -> None:
    problem = make_layer()
    assert faults_of(problem, **{name: None}) == [Fault(name, "a tensor", "nothing")]


@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("input", (2, 5, 4, 3), "rank 3 or 2, [B,T,E] or [T,E]"),
        ("input", (2, 5, 0), "a width of at least 1"),
        ("memory", (7, 9), "rank 3, as input has"),
        ("memory", (3, 7, 9), "batch 2, as input has"),
        ("memory", (2, 7, 8), None),
        ("w_query", (12, 24, 1), "rank 2"),
        ("w_query", (11, 24), "12 {into}, as input is wide"),
        ("w_query", (12, 23), "a number of {out_of} that num_heads 4 divides"),
        ("w_key", (9, 13), "a number of {out_of} that num_kv_heads 2 divides"),
        ("w_key", (9, 14), "12 {out_of}, 2 heads of head dim 6 as w_query has"),
        ("w_key", (8, 12), "9 {into}, as memory is wide"),
        ("w_value", (9, 7), "a number of {out_of} that num_kv_heads 2 divides"),
        ("w_value", (8, 12), "9 {into}, as w_key has"),
        ("w_output", (23, 10), "24 {into}, 4 heads of head dim 6 as w_value has"),
        ("w_output", (24, 0), "at least one of its {out_of}"),
    ],
)
def test_wrong_shape_is_refused_at_its_name(
    weight_layout: Any, name: str, shape: tuple[int, ...], words: str | None
) -> None:
    problem = make_layer(seq_len_kv=7, memory_width=9, num_kv_heads=2, biases=False)
    given = shape
    if weight_layout == "out_in":
        problem = in_other_layout(problem)
        given = shape[::-1] if name.startswith("w_") else shape
    faults = faults_of(problem, **{name: spec(*given)})
    if words is None:
        # Both matrices agree with each other, so both stand against memory.
        assert fields(faults) == ["w_key", "w_value"]
        return
    into, out_of = ("rows", "columns") if weight_layout == "in_out" else ("columns", "rows")
    (fault,) = (one for one in faults if one.field == name)
    assert fault.expected.startswith(words.format(into=into, out_of=out_of)), fault
    assert fault.received == "[" + ",".join(map(str, given)) + "]"


def test_keys_from_input_of_another_width_than_memory_would_have_are_refused_at_the_matrices() -> None:
    problem = make_layer(seq_len_kv=7, memory_width=9)
    faults = find_layer_faults(specs_of(problem, memory=None), problem.options)
    assert fields(faults) == ["w_key", "w_value"]
    assert faults[0].expected == "12 rows, as input is wide, where keys come from it"


@pytest.mark.parametrize(("name", "length"), [("b_query", 24), ("b_key", 12), ("b_value", 12), ("b_output", 10)])
def test_bias_of_another_length_than_its_matrix_gives_is_refused(name: str, length: int) -> None:
    problem = make_layer(num_kv_heads=2)
    matrix = name.replace("b_", "w_")
    (fault,) = faults_of(problem, **{name: spec(length + 1)})
    assert fault == Fault(name, f"[{length}], as {matrix} has outputs", f"[{length + 1}]")
    (rank,) = faults_of(problem, **{name: spec(1, length)})
    assert rank.field == name and rank.expected.startswith("rank 1")


@pytest.mark.parametrize("name", ["memory", *PARAMETER_NAMES])
def test_mixed_dtypes_are_refused(name: str) -> None:
    problem = make_layer(seq_len_kv=7)
    own = specs_of(problem)[name]
    (fault,) = faults_of(problem, **{name: own._replace(dtype=torch.float16)})
    assert fault == Fault(name, "float32, as input has", "float16")
    (number,) = faults_of(problem, **{name: own._replace(dtype=torch.int64)})
    assert number.field == name and "float64" in number.expected


def test_bias_of_the_logits_and_sinks_may_have_any_float_dtype() -> None:
    tensors = {"bias": torch.zeros(5, dtype=torch.float64), "sinks": torch.zeros(4, dtype=torch.float16)}
    assert faults_of(make_layer(tensors=tensors)) == []


def test_missing_options_name_what_they_decide() -> None:
    problem = make_layer()
    unread = replace(problem.options, weight_layout=None)  # type: ignore[arg-type]
    unread = replace(unread, attention=replace(unread.attention, num_heads=None, num_kv_heads=None))
    faults = find_layer_faults(specs_of(problem), unread)
    assert faults == [
        Fault("num_heads", "the number of heads", "nothing"),
        Fault("weight_layout", BOTH_READINGS, "nothing"),
    ]
    assert find_layer_faults(specs_of(problem), unread, broken={"num_heads", "weight_layout"}) == []


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "field", "words"),
    [
        (0, None, "num_heads", "a whole number, 1 or more"),
        (4, 0, "num_kv_heads", "a whole number, 1 or more"),
        (4, 3, "num_kv_heads", "a number that divides num_heads 4"),
        (4, 8, "num_kv_heads", "a number that divides num_heads 4"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(
    num_heads: int, num_kv_heads: int | None, field: str, words: str
) -> None:
    problem = make_layer(num_heads=4, head_dim=6)
    options = replace(problem.options.attention, num_heads=num_heads, num_kv_heads=num_kv_heads)
    faults = find_layer_faults(specs_of(problem), replace(problem.options, attention=options))
    (fault,) = (one for one in faults if one.field.startswith("num_"))
    assert (fault.field, fault.expected) == (field, words)


def test_unknown_weight_layout_is_refused_with_both_readings() -> None:
    problem = make_layer()
    options = replace(problem.options, weight_layout="io")  # type: ignore[arg-type]
    assert find_layer_faults(specs_of(problem), options) == [Fault("weight_layout", BOTH_READINGS, "io")]


@pytest.mark.parametrize(
    ("outputs", "field"),
    [(("outputs",), "outputs.0"), (("output", "output"), "outputs.1"), ((), "outputs"), (("top_keys",), "outputs.0")],
)
def test_wrong_outputs_are_refused(outputs: tuple[str, ...], field: str) -> None:
    (fault,) = faults_of(make_layer(outputs=outputs))
    assert fault.field == field
    if outputs == ("outputs",):
        assert fault.expected.startswith("output, query, key, value, context") and "weight_totals" in fault.expected


def test_selecting_from_what_cannot_be_selected_is_refused() -> None:
    for outputs in (("output",), ("query", "context", "logsumexp")):
        assert fields(faults_of(make_layer(outputs=outputs, select_rows=(0,)))) == ["select.rows"]
    assert fields(faults_of(make_layer(outputs=("top_weights",)))) == ["select.top_k"]
    assert fields(faults_of(make_layer(top_k=2))) == ["select.top_k"]
    assert fields(faults_of(make_layer(outputs=("weights",), select_rows=(5,)))) == ["select.rows.0"]
    assert fields(faults_of(make_layer(outputs=("weights",), select_heads=(0, 4)))) == ["select.heads.1"]


@pytest.mark.parametrize(
    ("tensors", "options", "field"),
    [
        ({"allow_mask": torch.ones(5, 6, dtype=torch.bool)}, {}, "allow_mask"),
        ({"block_mask": torch.ones(2, 5, dtype=torch.bool)}, {}, "block_mask"),
        ({"allow_mask": torch.ones(5, 7)}, {}, "allow_mask"),
        ({"bias": torch.zeros(3, 1, 7)}, {}, "bias"),
        ({"key_lengths": torch.zeros(3, dtype=torch.int64)}, {}, "key_lengths"),
        ({"sinks": torch.zeros(3)}, {}, "sinks"),
        ({}, {"causal": True}, "causal"),
        ({}, {"window_left": 2}, "query_offset"),
        ({}, {"window_left": -1, "causal": "lower_right"}, "window.left"),
        ({}, {"scale": float("inf")}, "scale"),
        ({}, {"softcap": 0.0}, "softcap"),
        ({}, {"empty_rows": "ones"}, "empty_rows"),
        ({}, {"path": "flash"}, "path"),
        ({}, {"path": "fused", "softcap": 1.0}, "path"),
    ],
)
def test_rules_are_refused_as_in_an_attention(tensors: dict[str, torch.Tensor], options: Any, field: str) -> None:
    problem = make_layer(seq_len_kv=7, tensors=tensors, **options)
    assert fields(faults_of(problem)) == [field]
    gradients = make_layer_gradients(seq_len_kv=7, tensors=tensors, **options)
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in gradients.tensors().items()}
    expected = [field]
    assert fields(find_layer_gradients_faults(specs, gradients.options, None)) == expected


def test_masks_are_compared_though_a_matrix_is_wrong() -> None:
    tensors = {"allow_mask": torch.ones(1, 3, 5, 7, dtype=torch.bool), "key_lengths": torch.zeros(3, dtype=torch.int64)}
    problem = make_layer(seq_len_kv=7, tensors=tensors)
    faults = faults_of(problem, w_query=spec(12, 23), w_key=None)
    assert fields(faults) == ["w_query", "w_key", "b_query", "allow_mask", "key_lengths"]
    assert "the batch of input" in faults[-1].expected


def test_every_fault_is_named_at_once_in_the_order_of_the_names() -> None:
    tensors = {"bias": torch.zeros(8)}
    problem = make_layer(seq_len_kv=7, tensors=tensors, scale=float("nan"), outputs=("nothing",), select_rows=(0,))
    specs = specs_of(problem, memory=spec(3, 7, 12), w_key=spec(12, 24, dtype=torch.float16), b_output=spec(9))
    options = replace(problem.options, weight_layout="in_out")
    found = fields(find_layer_faults(specs, options))
    assert found == ["memory", "w_key", "b_output", "bias", "scale", "select.rows", "outputs.0"]


def test_what_was_broken_on_the_wire_is_not_named_again() -> None:
    problem = make_layer(seq_len_kv=7, tensors={"allow_mask": torch.ones(5, 7, dtype=torch.bool)})
    for name in ("input", "memory", *PARAMETER_NAMES, "allow_mask"):
        assert find_layer_faults(specs_of(problem, **{name: None}), problem.options, broken={name}) == []
    select = with_layer_options(problem, select_rows=(0,))
    assert find_layer_faults(specs_of(problem), select.options, broken={"outputs"}) == []


def test_broken_memory_is_not_taken_for_self_attention() -> None:
    problem = make_layer(seq_len_kv=7, memory_width=9, tensors={"allow_mask": torch.ones(5, 7, dtype=torch.bool)})
    specs = specs_of(problem, memory=None)
    assert find_layer_faults(specs, problem.options, broken={"memory"}) == []
    assert fields(find_layer_faults(specs, problem.options)) == ["w_key", "w_value", "allow_mask"]


@pytest.mark.parametrize("shape", [(2, 5, 9), (2, 4, 10), (5, 10), (2, 5, 10, 1)])
def test_grad_output_of_another_shape_than_output_is_refused(shape: tuple[int, ...]) -> None:
    problem = make_layer_gradients()
    specs = specs_of(problem.layer, grad_output=spec(*shape))
    (fault,) = find_layer_gradients_faults(specs, problem.options, None)
    assert fault.field == "grad_output" and fault.expected == "[2,5,10], as output has"


def test_grad_output_of_another_dtype_or_missing_is_refused() -> None:
    problem = make_layer_gradients()
    specs = specs_of(problem.layer, grad_output=spec(2, 5, 10, dtype=torch.float64))
    assert find_layer_gradients_faults(specs, problem.options, None) == [
        Fault("grad_output", "float32, as input has", "float64")
    ]
    missing = specs_of(problem.layer)
    assert find_layer_gradients_faults(missing, problem.options, None) == [Fault("grad_output", "a tensor", "nothing")]
    assert find_layer_gradients_faults(missing, problem.options, None, broken={"grad_output"}) == []


@pytest.mark.parametrize(
    ("outputs", "field", "words"),
    [
        (("grad_memory",), "outputs.0", "a gradient of what is given, which memory is not"),
        (("grad_input", "grad_bias"), "outputs.1", "a gradient of what is given, which bias is not"),
        (("grad_input", "grad_input"), "outputs.1", "each name once"),
        (("grad_query",), "outputs.0", "grad_input, grad_memory"),
        ((), "outputs", "at least one name"),
    ],
)
def test_wrong_gradients_are_refused(outputs: tuple[str, ...], field: str, words: str) -> None:
    with pytest.raises(InvalidProblem) as refusal:
        check_problem(make_layer_gradients(outputs=outputs))
    (fault,) = refusal.value.faults
    assert fault.field == field and fault.expected.startswith(words)


def test_selection_and_the_fused_path_are_refused_of_gradients() -> None:
    problem = make_layer_gradients(path="fused", select_heads=(1,), select_rows=(0, 2), top_k=3)
    with pytest.raises(InvalidProblem) as refusal:
        check_problem(problem)
    assert fields(list(refusal.value.faults)) == ["select.heads", "select.rows", "select.top_k", "path"]
    assert refusal.value.faults[-1].expected == "blocked or manual, or nothing, since gradients asked for"


def test_what_the_layer_would_be_asked_for_says_nothing_to_its_gradients() -> None:
    problem = make_layer_gradients()
    for outputs in (("weights",), ("nonsense",), ()):
        check_problem(replace(problem, layer=with_layer_options(problem.layer, outputs=outputs)))


def parameters_faults(problem: LayerProblem, **changed: Any) -> list[Fault]:
    specs = specs_of(problem, input=None)
    heads: dict[str, Any] = {"num_heads": 4, "num_kv_heads": None, "weight_layout": "in_out"}
    for name, value in changed.items():
        if name in heads:
            heads[name] = value
        elif value is None:
            specs.pop(name)
        else:
            specs[name] = value
    return find_parameters_faults(specs, **heads)


def test_layer_without_input_is_checked_in_itself() -> None:
    problem = make_layer()
    assert parameters_faults(problem) == []
    assert fields(parameters_faults(problem, w_key=spec(9, 24))) == ["w_value"]
    assert fields(parameters_faults(problem, w_key=spec(9, 24), w_value=spec(9, 24))) == []
    assert fields(parameters_faults(problem, w_output=None)) == ["w_output"]
    assert fields(parameters_faults(problem, w_value=spec(12, 24, dtype=torch.float64))) == ["w_value"]
    assert (
        parameters_faults(problem, w_value=spec(12, 24, dtype=torch.float64))[0].expected == "float32, as w_query has"
    )
    assert fields(parameters_faults(problem, num_heads=None, weight_layout=None)) == ["num_heads", "weight_layout"]
    assert fields(parameters_faults(problem, num_kv_heads=3)) == ["num_kv_heads"]


def test_against_a_layer_that_is_kept_the_fault_stands_at_what_was_sent() -> None:
    problem = make_layer(seq_len_kv=7, memory_width=9)

    def kept(**changed: TensorSpec | None) -> list[Fault]:
        return find_layer_faults(specs_of(problem, **changed), problem.options, is_kept=True)

    assert kept() == []
    assert kept(input=spec(2, 5, 11)) == [Fault("input", "width 12, as the layer's w_query takes", "[2,5,11]")]
    assert kept(memory=spec(2, 7, 8)) == [Fault("memory", "width 9, as the layer's w_key takes", "[2,7,8]")]
    assert fields(kept(memory=None)) == ["memory"]
    half = kept(input=spec(2, 5, 12, dtype=torch.float16))
    assert half == [Fault("input", "float32, as the layer has", "float16")]


def test_lengths_are_those_of_input_and_memory() -> None:
    assert layer_lengths(specs_of(make_layer())) == (5, 5)
    assert layer_lengths(specs_of(make_layer(seq_len_kv=7))) == (5, 7)
    assert layer_lengths(specs_of(make_layer(rank=2, seq_len_kv=7))) == (5, 7)
    assert layer_lengths({"input": spec(5)}) == (None, None)


def test_lengths_out_of_range_are_refused_by_place() -> None:
    tensors = {"key_lengths": torch.tensor([3, 8]), "query_lengths": torch.tensor([-1, 5])}
    problem = make_layer(seq_len_kv=7, tensors=tensors)
    for one in (problem, make_layer_gradients(seq_len_kv=7, tensors=tensors)):
        with pytest.raises(InvalidProblem) as refusal:
            check_values(one)
        assert fields(list(refusal.value.faults)) == ["key_lengths.1", "query_lengths.0"]


def test_numbers_that_float64_alone_can_hold_pass_in_a_float64_layer_and_in_no_other() -> None:
    tensors = {"sinks": torch.full((4,), 1e200, dtype=torch.float64)}
    check_values(make_layer(dtype=torch.float64, tensors=tensors))
    with pytest.raises(InvalidProblem):
        check_values(make_layer(tensors=tensors))


def test_names_are_those_of_the_contract() -> None:
    assert LAYER_OUTPUTS[:5] == ("output", "query", "key", "value", "context")
    assert LAYER_GRADIENT_OUTPUTS[:3] == ("grad_input", "grad_memory", "grad_w_query")
    assert isinstance(make_layer().options, LayerOptions)
    assert isinstance(make_layer().options.attention, AttentionOptions)
