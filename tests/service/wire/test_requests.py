"""Every fault of tensors and options in one refusal; nothing that is accepted is without meaning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import Engine, InvalidProblem
from attn_core.problem import (
    GRADIENT_OUTPUTS,
    GRADIENTS_TENSOR_NAMES,
    LAYER_GRADIENT_OUTPUTS,
    LAYER_GRADIENTS_TENSOR_NAMES,
    LAYER_OUTPUTS,
    OUTPUTS,
    TENSOR_NAMES,
)
from service.errors import Malformed
from service.wire.json_arrays import MASK_TENSORS, NUMBER_TENSORS
from service.wire.json_format import decode, encode
from service.wire.options import (
    EXPECTED,
    AttentionCallOptions,
    GradientsCallOptions,
    LayerCallOptions,
    LayerGradientsCallOptions,
    unknown_fault,
)
from service.wire.requests import (
    ATTENTION,
    GRADIENTS,
    LAYER,
    LAYER_GRADIENTS,
    LAYER_PARAMETERS,
    NAMED_LAYER,
    NAMED_LAYER_GRADIENTS,
    WEIGHTED_SUM,
    Form,
    ReadLimits,
)

EVERY_FORM = (
    ATTENTION,
    WEIGHTED_SUM,
    GRADIENTS,
    LAYER,
    LAYER_GRADIENTS,
    LAYER_PARAMETERS,
    NAMED_LAYER,
    NAMED_LAYER_GRADIENTS,
)
LIMITS = ReadLimits()
SQUARE: dict[str, Any] = {"query": [[1, 0], [0, 1]]}


def faults_of(members: dict[str, Any]) -> dict[str, tuple[str, str]]:
    with pytest.raises(InvalidProblem) as caught:
        decode(json.dumps(members).encode(), ATTENTION, LIMITS)
    return {fault.field: (fault.expected, fault.received) for fault in caught.value.faults}


def test_the_refusal_of_the_contract() -> None:
    faults = faults_of({"query": [[1, 2]], "key": [[1, 2, 3]], "value": [[1]], "is_casual": True})
    assert faults == {
        "key": ("head dim 2, as query has", "[1,3]"),
        "is_casual": ("a known field; did you mean causal?", "true"),
    }
    assert list(faults) == ["key", "is_casual"]


def test_faults_of_every_kind_come_at_once() -> None:
    faults = faults_of(
        {
            "query": [[1, 2], [3]],
            "key": [[1, 2]],
            "allow_mask": [[0, 1]],
            "scale": "1",
            "window": {"left": -1, "up": 2},
            "outputs": ["context", "wieghts"],
            "select": {"heads": [0.0]},
            "causal": 1,
            "timeout_ms": 0,
            "tau": 2,
        }
    )
    assert list(faults) == [
        "query.1",
        "value",
        "allow_mask.0.0",
        "allow_mask.0.1",
        "causal",
        "scale",
        "window.left",
        "window.up",
        "outputs.1",
        "select.heads.0",
        "timeout_ms",
        "tau",
    ]


def test_a_fault_in_a_shape_hides_none_in_the_numbers_nor_in_the_path() -> None:
    square = {"query": [[1.0, 2.0]], "key": [[1.0]], "value": [[1.0]]}
    assert list(faults_of(square | {"key_lengths": [9], "scale": "x"})) == ["key", "key_lengths.0", "scale"]
    assert list(faults_of(square | {"path": "fused", "outputs": ["weights"]})) == ["key", "path"]
    assert list(faults_of(SQUARE | {"query_lengths": [9], "alibi_slopes": [1, "NaN"]})) == [
        "query_lengths.0",
        "alibi_slopes",
        "alibi_slopes.1",
    ]
    bias = {"dtype": "float64", "shape": [1], "data": "WfOFGGCcf34="}
    assert list(faults_of(SQUARE | {"bias": bias, "foo": 1})) == ["bias.0", "foo"]


def test_long_names_are_cut() -> None:
    (name,) = faults_of(SQUARE | {"x" * 5000: 1})
    assert len(name) == 101


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("causal", 1),
        ("causal", "upper-left"),
        ("causal", "true"),
        ("scale", "1"),
        ("scale", True),
        ("scale", [1]),
        ("softcap", 0),
        ("softcap", -1.0),
        ("softcap", False),
        ("window", 3),
        ("window", [1, 1]),
        ("window", {}),
        ("window", {"left": None, "right": None}),
        ("window", {"left": 1.0}),
        ("window", {"left": True}),
        ("layout", "bhsd"),
        ("layout", 1),
        ("num_heads", 0),
        ("num_heads", 1.0),
        ("num_kv_heads", "1"),
        ("outputs", []),
        ("outputs", "context"),
        ("outputs", ["context", "context"]),
        ("outputs", {"context": True}),
        ("select", {}),
        ("select", {"rows": 1}),
        ("select", {"rows": [0]}),
        ("select", {"heads": [0]}),
        ("select", {"top_k": 1}),
        ("empty_rows", "zero"),
        ("path", "flash"),
        ("path", ["manual"]),
        ("verify", 0),
        ("verify", 1),
        ("verify", "true"),
        ("encoding", "hex"),
        ("dtype", "float8"),
        ("dtype", "int64"),
        ("dropout_p", 0.5),
        ("dropout_p", False),
        ("dropout_p", "0"),
        ("timeout_ms", 0),
        ("timeout_ms", -5),
        ("timeout_ms", "100"),
        ("timeout_ms", 1e9),
        ("query_offset", 0),
        ("query_offset", 1.5),
        ("query_offset", True),
        ("query_offset", 2**63),
        ("key_lengths", [3]),
        ("key_lengths", [-1]),
        ("key_lengths", [1.0]),
        ("key_lengths", 1),
        ("query_lengths", [3]),
        ("sinks", ["NaN"]),
        ("alibi_slopes", ["Infinity"]),
        ("block_mask", [[True, False], [True]]),
        ("bias", [[True, False]]),
        ("key", [[1, 0]]),
        ("Causal", True),
        ("", 1),
    ],
)
def test_an_option_without_meaning_is_refused_by_its_name(option: str, value: Any) -> None:
    fields = faults_of(SQUARE | {option: value})
    missing = "value" if option == "key" else option
    assert any(field == missing or field.startswith(f"{missing}.") for field in fields), fields


@pytest.mark.parametrize(
    "members",
    [
        {"causal": False},
        {"causal": True},
        {"causal": "lower_right"},
        {"scale": 0},
        {"scale": -1},
        {"softcap": 1},
        {"window": {"left": 0}},
        {"window": {"left": 2**63 - 1, "right": None}},
        {"num_heads": 1, "num_kv_heads": 1},
        {"outputs": ["weights"], "select": {"rows": [1, 0], "heads": [0]}},
        {"outputs": ["top_weights"], "select": {"top_k": 100}},
        {"empty_rows": "error"},
        {"path": "manual"},
        {"path": "blocked"},
        {"path": None},
        {"verify": False},
        {"verify": True},
        {"encoding": "base64"},
        {"dtype": "float64"},
        {"dropout_p": 0},
        {"dropout_p": 0.0},
        {"timeout_ms": 0.5},
        {"query_offset": -5, "causal": True},
        {"key": None, "value": None},
        {"key_lengths": [0], "query_lengths": [2]},
        {"sinks": [0.5], "alibi_slopes": [-1]},
        {"bias": [["-Infinity", 0], [0, 1]]},
        {"allow_mask": [True]},
    ],
)
def test_what_has_a_meaning_is_taken(members: dict[str, Any]) -> None:
    decoded = decode(json.dumps(SQUARE | members).encode(), ATTENTION, LIMITS)
    Engine().attend(decoded.problem)


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    every = (*TENSOR_NAMES[1:], *AttentionCallOptions.model_fields)
    plain = decode(json.dumps(SQUARE).encode(), ATTENTION, LIMITS)
    nulls = decode(json.dumps(SQUARE | dict.fromkeys(every)).encode(), ATTENTION, LIMITS)
    assert nulls.problem.tensors().keys() == plain.problem.tensors().keys()
    assert nulls.encoding == plain.encoding
    assert nulls.timeout_s is plain.timeout_s is None


@pytest.mark.parametrize("form", EVERY_FORM)
def test_every_option_says_what_it_expects(form: Form) -> None:
    assert set(form.options.model_fields) <= set(EXPECTED)
    assert set(form.option_names) == set(form.options.model_fields)


def test_the_names_of_tensors_and_outputs_are_the_cores() -> None:
    assert AttentionCallOptions.output_names == OUTPUTS
    assert GradientsCallOptions.output_names == GRADIENT_OUTPUTS
    assert LayerCallOptions.output_names == LAYER_OUTPUTS
    assert LayerGradientsCallOptions.output_names == LAYER_GRADIENT_OUTPUTS
    every = {*GRADIENTS_TENSOR_NAMES, *LAYER_GRADIENTS_TENSOR_NAMES, *WEIGHTED_SUM.tensors}
    whole_numbers = {"key_lengths", "query_lengths", "query_offset"}
    assert every == NUMBER_TENSORS | MASK_TENSORS | whole_numbers
    assert not NUMBER_TENSORS & MASK_TENSORS and not (NUMBER_TENSORS | MASK_TENSORS) & whole_numbers


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(["NaN", "-Infinity", "context", "lower_right", "float16", "list", "AAAA", ""]),
        st.text(max_size=5),
    ),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(st.sampled_from(["dtype", "shape", "data", "left", "rows", "x"]), children, max_size=3),
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.one_of(st.sampled_from([*ATTENTION.tensors, *ATTENTION.option_names]), st.text(max_size=6)),
        json_values,
        max_size=6,
    ),
    st.booleans(),
)
def test_any_json_is_answered_or_refused_with_faults(members: dict[str, Any], with_query: bool) -> None:
    body = json.dumps((SQUARE if with_query else {}) | members).encode()
    try:
        decoded = decode(body, ATTENTION, LIMITS)
        result = Engine().attend(decoded.problem)
        json.loads(b"".join(encode(result.outputs, {}, decoded.encoding)))
    except (InvalidProblem, Malformed) as error:
        assert error.faults
        assert all(isinstance(fault.expected, str) and isinstance(fault.received, str) for fault in error.faults)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mask", "allow_mask (true = may attend) or block_mask (true = must not)"),
        ("attn_mask", "allow_mask (true = may attend) or block_mask (true = must not)"),
        ("key_padding_mask", "key_lengths, or block_mask of shape [B,1,1,S]"),
        ("need_weights", 'outputs with "weights" in it'),
        ("is_causal", "causal?"),
        ("enable_gqa", "nothing, since key and value may have fewer heads"),
        ("sliding_window", 'window, {"left": n, "right": n}'),
    ],
)
def test_what_other_libraries_call_it_is_told_in_our_words_and_never_guessed(name: str, said: str) -> None:
    known = ("query", "key", "value", "allow_mask", "block_mask", "key_lengths", "outputs", "causal", "window")
    assert said in unknown_fault(name, True, known).expected
    # Where a call has no such field, it is not offered.
    assert "did you mean" not in unknown_fault(name, True, ("weights_of_nothing",)).expected
