"""Every fault of the contract, each by its field and in its words, all of them at once, and nothing raised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core import (
    AttentionOptions,
    AttentionProblem,
    AttentionResult,
    Engine,
    InvalidProblem,
    TensorSpec,
    WeightedSumProblem,
)
from attn_core.problem import OUTPUTS
from attn_core.validate import (
    MAX_OFFSET,
    check_problem,
    check_values,
    dims_of,
    find_faults,
    find_value_faults,
    find_weighted_sum_faults,
)
from tests.support.factory import make_problem
from tests.support.memory import peak_bytes_of
from tests.support.strategies import any_options, likely_options, likely_specs, specs

F32, F16, F64, I64, I32, BOOL = (
    torch.float32,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
)
SOUND = {
    "query": TensorSpec(F32, (2, 4, 5, 8)),
    "key": TensorSpec(F32, (2, 2, 7, 8)),
    "value": TensorSpec(F32, (2, 2, 7, 6)),
}
SQUARE = {"query": TensorSpec(F32, (2, 4, 5, 8))}


def spec(dtype: torch.dtype, *shape: int) -> TensorSpec:
    return TensorSpec(dtype, shape)


Case = tuple[dict[str, TensorSpec | None], dict[str, Any], str, tuple[str, ...]]

FAULTS: dict[str, Case] = {
    "no query": ({"query": None}, {}, "query", ("a tensor",)),
    "key without value": ({"value": None}, {}, "value", ("key", "self-attention")),
    "value without key": ({"key": None}, {}, "key", ("value", "self-attention")),
    "integer query": ({"query": spec(I64, 2, 4, 5, 8)}, {}, "query", ("float64", "float32", "float16", "bfloat16")),
    "mixed dtypes": ({"key": spec(F16, 2, 2, 7, 8)}, {}, "key", ("float32", "query")),
    "mixed value": ({"value": spec(F64, 2, 2, 7, 8)}, {}, "value", ("float32", "query")),
    "integer mask": ({"allow_mask": spec(I64, 1, 1, 5, 7)}, {}, "allow_mask", ("bool", "bias")),
    "float mask": ({"block_mask": spec(F32, 1, 1, 5, 7)}, {}, "block_mask", ("bool", "bias")),
    "bool bias": ({"bias": spec(BOOL, 1, 1, 5, 7)}, {}, "bias", ("float32",)),
    "float lengths": ({"key_lengths": spec(F32, 2)}, {}, "key_lengths", ("int64", "int32")),
    "bool query lengths": ({"query_lengths": spec(BOOL, 2)}, {}, "query_lengths", ("int64",)),
    "float offset": ({"query_offset": spec(F32, 2)}, {"causal": True}, "query_offset", ("int64",)),
    "integer slopes": (
        {"alibi_slopes": spec(I32, 4), "query_offset": spec(I64, 1)},
        {},
        "alibi_slopes",
        ("float32",),
    ),
    "integer sinks": ({"sinks": spec(I32, 4)}, {}, "sinks", ("float32",)),
    "rank 1": ({"query": spec(F32, 8)}, {}, "query", ("rank 4, 3 or 2",)),
    "rank 5": ({"key": spec(F32, 1, 2, 2, 7, 8)}, {}, "key", ("rank 4, 3 or 2",)),
    "key of another rank": ({"key": spec(F32, 2, 7, 8)}, {}, "key", ("rank 4, as query has",)),
    "rank 3 in bthd": ({"query": spec(F32, 2, 5, 8)}, {"layout": "bthd"}, "query", ("[B,T,H,D]",)),
    "other batch": ({"key": spec(F32, 3, 2, 7, 8)}, {}, "key", ("batch 2",)),
    "other batch of value": ({"value": spec(F32, 3, 2, 7, 8)}, {}, "value", ("batch 2",)),
    "heads that do not divide": (
        {"key": spec(F32, 2, 3, 7, 8), "value": spec(F32, 2, 3, 7, 8)},
        {},
        "key",
        ("divides query's 4",),
    ),
    "more key heads than query heads": (
        {"key": spec(F32, 2, 8, 7, 8), "value": spec(F32, 2, 8, 7, 8)},
        {},
        "key",
        ("divides query's 4",),
    ),
    "other head dim": ({"key": spec(F32, 2, 2, 7, 9)}, {}, "key", ("head dim 8, as query has",)),
    "value of other heads": ({"value": spec(F32, 2, 4, 7, 8)}, {}, "value", ("2 heads, as key has",)),
    "value of other tokens": ({"value": spec(F32, 2, 2, 6, 8)}, {}, "value", ("7 tokens, as key has",)),
    "no head": ({"query": spec(F32, 2, 0, 5, 8)}, {}, "query", ("at least one head",)),
    "no key head": (
        {"key": spec(F32, 2, 0, 7, 8), "value": spec(F32, 2, 0, 7, 8)},
        {},
        "key",
        ("at least one head",),
    ),
    "no width": ({"query": spec(F32, 2, 4, 5, 0), "key": spec(F32, 2, 2, 7, 0)}, {}, "query", ("head dim",)),
    "no value width": ({"value": spec(F32, 2, 2, 7, 0)}, {}, "value", ("head dim",)),
    "mask of other keys": ({"allow_mask": spec(BOOL, 1, 1, 5, 6)}, {}, "allow_mask", ("broadcasts to [2,4,5,7]",)),
    "mask of rank 0": ({"allow_mask": spec(BOOL)}, {}, "allow_mask", ("rank 1 to 4",)),
    "mask of rank 5": ({"block_mask": spec(BOOL, 1, 1, 1, 5, 7)}, {}, "block_mask", ("rank 1 to 4",)),
    "mask per key head": ({"bias": spec(F32, 2, 2, 5, 7)}, {}, "bias", ("broadcasts to [2,4,5,7]",)),
    "mask of rank 2 that may be per item": (
        {"allow_mask": spec(BOOL, 2, 7)},
        {},
        "allow_mask",
        ("[T,S]", "[1,1,T,S]", "[B,S]", "[B,1,1,S]"),
    ),
    "mask of rank 3 that may be per item": (
        {"bias": spec(F32, 2, 5, 7)},
        {},
        "bias",
        ("[H,T,S]", "[1,H,T,S]", "[B,T,S]", "[B,1,T,S]"),
    ),
    "lengths of another batch": ({"key_lengths": spec(I64, 3)}, {}, "key_lengths", ("[B] = [2]",)),
    "one length for two items": ({"query_lengths": spec(I64, 1)}, {}, "query_lengths", ("[B] = [2]",)),
    "scalar length": ({"key_lengths": spec(I64)}, {}, "key_lengths", ("[B] = [2]",)),
    "offset of another batch": (
        {"query_offset": spec(I64, 3)},
        {"causal": True},
        "query_offset",
        ("[B] = [2]", "[1] or a plain number"),
    ),
    "slopes per key head": (
        {"alibi_slopes": spec(F32, 2), "query_offset": spec(I64, 1)},
        {},
        "alibi_slopes",
        ("[H] = [4]",),
    ),
    "sinks of another number": ({"sinks": spec(F32, 5)}, {}, "sinks", ("[H] = [4]",)),
    "causal without a place": ({}, {"causal": True}, "causal", ("upper_left", "lower_right", "query_offset", "T = 5")),
    "causal and an offset": (
        {"query_offset": spec(I64, 1)},
        {"causal": "lower_right"},
        "causal",
        ("true or false", "query_offset"),
    ),
    "unknown causal": ({}, {"causal": "middle"}, "causal", ("upper_left",)),
    "window without a place": ({}, {"window_left": 1}, "query_offset", ("window", "0 (upper left)", "2 (lower right)")),
    "alibi without a place": ({"alibi_slopes": spec(F32, 4)}, {}, "query_offset", ("alibi_slopes", "upper left")),
    "offset that nothing measures from": ({"query_offset": spec(I64, 1)}, {}, "query_offset", ("causal", "window")),
    "scale of infinity": ({}, {"scale": float("inf")}, "scale", ("finite in float32",)),
    "scale of NaN": ({}, {"scale": float("nan")}, "scale", ("finite in float32",)),
    "scale beyond float32": ({}, {"scale": 1e39}, "scale", ("finite in float32",)),
    "softcap of 0": ({}, {"softcap": 0.0}, "softcap", ("above 0",)),
    "softcap below 0": ({}, {"softcap": -1.0}, "softcap", ("above 0",)),
    "softcap of NaN": ({}, {"softcap": float("nan")}, "softcap", ("above 0",)),
    "softcap that rounds to 0": ({}, {"softcap": 1e-50}, "softcap", ("above 0",)),
    "window below 0": (
        {"query_offset": spec(I64, 1)},
        {"window_left": -1},
        "window.left",
        ("0 or more",),
    ),
    "right window below 0": (
        {"query_offset": spec(I64, 1)},
        {"window_right": -1},
        "window.right",
        ("0 or more",),
    ),
    "unknown layout": ({}, {"layout": "tdbh"}, "layout", ("bhtd", "bthd", "btd")),
    "heads that disagree": ({}, {"num_heads": 3}, "num_heads", ("4, the heads of query",)),
    "key heads that disagree": ({}, {"num_kv_heads": 3}, "num_kv_heads", ("2, the heads of key",)),
    "no output": ({}, {"outputs": ()}, "outputs", ("at least one",)),
    "unknown output": ({}, {"outputs": ("context", "grad_query")}, "outputs.1", ("weights", "logsumexp")),
    "output twice": ({}, {"outputs": ("context", "weights", "context")}, "outputs.2", ("once",)),
    "head twice": ({}, {"outputs": ("weights",), "select_heads": (1, 1)}, "select.heads.1", ("once",)),
    "head below 0": ({}, {"outputs": ("weights",), "select_heads": (-1,)}, "select.heads.0", ("0 to 3",)),
    "head that is not there": ({}, {"outputs": ("weights",), "select_heads": (0, 4)}, "select.heads.1", ("0 to 3",)),
    "row that is not there": ({}, {"outputs": ("weights",), "select_rows": (5,)}, "select.rows.0", ("0 to 4",)),
    "no selected row": ({}, {"outputs": ("weights",), "select_rows": ()}, "select.rows", ("at least one row",)),
    "rows of nothing": ({}, {"select_rows": (0,)}, "select.rows", ("weights", "entropy")),
    "rows of totals": ({}, {"outputs": ("weight_totals",), "select_rows": (0,)}, "select.rows", ("weights",)),
    "heads of nothing": ({}, {"outputs": ("logsumexp",), "select_heads": (0,)}, "select.heads", ("weight_totals",)),
    "top_k of 0": ({}, {"outputs": ("top_weights",), "top_k": 0}, "select.top_k", ("1 or more",)),
    "top_k of nothing": ({}, {"top_k": 2}, "select.top_k", ("top_weights",)),
    "top_weights without top_k": ({}, {"outputs": ("top_weights",)}, "select.top_k", ("how many",)),
    "unknown empty_rows": ({}, {"empty_rows": "nan"}, "empty_rows", ("zeros", "error")),
    "unknown path": ({}, {"path": "paged"}, "path", ("fused", "manual", "blocked")),
}


def faults_of(case: Case) -> list[Any]:
    tensors, options, _, _ = case
    merged = {**SOUND, **tensors}
    given_specs = {name: one for name, one in merged.items() if one is not None}
    return find_faults(given_specs, AttentionOptions(**options))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named_by_its_field_in_the_words_of_the_contract(name: str) -> None:
    _, _, field, words = FAULTS[name]
    faults = faults_of(FAULTS[name])
    assert [fault.field for fault in faults] == [field]
    (fault,) = faults
    for word in words:
        assert word in fault.expected, fault
    assert fault.received


BTD = {"query": spec(F32, 2, 5, 32), "key": spec(F32, 2, 7, 16), "value": spec(F32, 2, 7, 12)}


@pytest.mark.parametrize(
    ("tensors", "options", "fields"),
    [
        ({}, {"num_heads": 4, "num_kv_heads": 2}, []),
        ({}, {}, ["num_heads"]),
        ({}, {"num_heads": 5, "num_kv_heads": 2}, ["query", "key"]),
        ({}, {"num_heads": 4}, ["key"]),
        ({}, {"num_heads": 0, "num_kv_heads": 2}, ["num_heads"]),
        ({"query": spec(F32, 2, 4, 5, 8)}, {"num_heads": 4, "num_kv_heads": 2}, ["query"]),
        ({"key": None, "value": None}, {"num_heads": 4, "num_kv_heads": 2}, ["num_kv_heads"]),
        ({"key": None, "value": None}, {"num_heads": 4, "num_kv_heads": 4}, []),
    ],
)
def test_layout_btd_is_read_through_the_number_of_heads(
    tensors: dict[str, TensorSpec | None], options: dict[str, Any], fields: list[str]
) -> None:
    merged = {name: one for name, one in {**BTD, **tensors}.items() if one is not None}
    found = [fault.field for fault in find_faults(merged, AttentionOptions(layout="btd", **options))]
    if fields == ["query", "key"]:
        assert "query" in found
    else:
        assert found == fields


def test_every_fault_is_named_in_one_answer_in_the_order_of_the_tables() -> None:
    tensors = {
        "query": spec(F32, 2, 4, 5, 8),
        "key": spec(F16, 2, 3, 7, 9),
        "value": spec(F32, 2, 3, 6, 8),
        "allow_mask": spec(I64, 1, 1, 5, 7),
        "bias": spec(F32, 2, 5, 7),
        "key_lengths": spec(F32, 3),
        "query_offset": spec(I64, 2),
        "sinks": spec(F32, 3),
    }
    options = AttentionOptions(
        causal="lower_right", scale=float("nan"), softcap=-1.0, outputs=("context", "nothing"), top_k=0, path="paged"
    )
    fields = [fault.field for fault in find_faults(tensors, options)]
    assert set(fields) == {
        "key",
        "value",
        "allow_mask",
        "bias",
        "key_lengths",
        "sinks",
        "causal",
        "scale",
        "softcap",
        "path",
        "outputs.1",
        "select.top_k",
    }
    assert fields.count("key") == 3 and fields.count("key_lengths") == 2


@pytest.mark.parametrize("name", ["key", "value"])
def test_broken_tensor_is_neither_missed_nor_compared(name: str) -> None:
    tensors = {other: one for other, one in SOUND.items() if other != name}
    assert [fault.field for fault in find_faults(tensors, AttentionOptions())] == [name]
    assert find_faults(tensors, AttentionOptions(), broken={name}) == []


@pytest.mark.parametrize(
    ("broken", "tensors", "options"),
    [
        ("query", {"query": None}, {}),
        ("layout", {}, {}),
        ("num_heads", {"query": spec(F32, 2, 5, 32), "key": None, "value": None}, {"layout": "btd"}),
        ("query_offset", {}, {"causal": True}),
        ("causal", {"query_offset": spec(I64, 2)}, {}),
        ("window", {"query_offset": spec(I64, 2)}, {}),
        ("alibi_slopes", {"query_offset": spec(I64, 2)}, {}),
        ("outputs", {}, {"top_k": 2, "select_rows": (0,)}),
        ("select", {}, {"outputs": ("top_weights",)}),
    ],
)
def test_broken_field_is_held_against_nothing_else(
    broken: str, tensors: dict[str, TensorSpec | None], options: dict[str, Any]
) -> None:
    merged = {name: one for name, one in {**SOUND, **tensors}.items() if one is not None}
    assert find_faults(merged, AttentionOptions(**options)) != [] or broken == "layout"
    assert find_faults(merged, AttentionOptions(**options), broken={broken}) == []


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        ({}, {"causal": "upper_left"}),
        ({"query_offset": spec(I32, 1)}, {"causal": True}),
        ({"query_offset": spec(I64, 2)}, {"window_left": 0}),
        ({"allow_mask": spec(BOOL, 7)}, {}),
        ({"allow_mask": spec(BOOL, 5, 7)}, {}),
        ({"allow_mask": spec(BOOL, 1, 7)}, {}),
        ({"bias": spec(F64, 4, 5, 7)}, {}),
        ({"bias": spec(F16, 2, 1, 1, 1)}, {}),
        ({"key": spec(F32, 2, 2, 0, 8), "value": spec(F32, 2, 2, 0, 6)}, {"causal": "lower_right"}),
        ({}, {"scale": 0.0}),
        ({}, {"num_heads": 4, "num_kv_heads": 2}),
    ],
)
def test_sound_problem_has_no_fault(tensors: dict[str, TensorSpec], options: dict[str, Any]) -> None:
    assert find_faults({**SOUND, **tensors}, AttentionOptions(**options)) == []


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window_left": 1}, {"causal": "lower_right", "window_right": 0}]
)
def test_square_problem_needs_no_offset(options: dict[str, Any]) -> None:
    assert find_faults(SQUARE, AttentionOptions(**options)) == []


@settings(max_examples=400)
@given(specs, any_options)
def test_no_shape_dtype_or_option_makes_the_check_raise(
    given_specs: dict[str, TensorSpec], options: AttentionOptions
) -> None:
    for fault in find_faults(given_specs, options):
        assert fault.expected and isinstance(fault.received, str)


@settings(max_examples=400)
@given(likely_specs(), any_options, st.sets(st.sampled_from(("key", "layout", "causal", "outputs", "select"))))
def test_no_broken_field_makes_the_check_raise(
    given_specs: dict[str, TensorSpec], options: AttentionOptions, broken: set[str]
) -> None:
    given_specs = {name: one for name, one in given_specs.items() if name not in broken}
    find_faults(given_specs, options, broken=broken)


@settings(max_examples=600)
@given(likely_specs(), likely_options)
def test_what_has_no_fault_is_answered(given_specs: dict[str, TensorSpec], options: AttentionOptions) -> None:
    if find_faults(given_specs, options):
        return
    tensors = {name: torch.ones(one.shape, dtype=one.dtype) for name, one in given_specs.items()}
    for name in ("key_lengths", "query_lengths"):
        if name in tensors:
            tensors[name].zero_()
    (result,) = Engine().run([AttentionProblem(**tensors, options=options)])
    if isinstance(result, InvalidProblem):
        (fault,) = result.faults
        assert fault.field in ("path", "empty_rows")
    else:
        assert isinstance(result, AttentionResult)
        assert set(options.outputs) <= result.outputs.keys()


@pytest.mark.parametrize(
    ("name", "numbers", "places"),
    [
        ("key_lengths", [7, 8], ["key_lengths.1"]),
        ("key_lengths", [-1, 0], ["key_lengths.0"]),
        ("query_lengths", [6, 9], ["query_lengths.0", "query_lengths.1"]),
        ("query_offset", [MAX_OFFSET + 1, -MAX_OFFSET - 1], ["query_offset.0", "query_offset.1"]),
        ("query_offset", [-(2**63), 2**63 - 1], ["query_offset.0", "query_offset.1"]),
        ("query_offset", [MAX_OFFSET, -MAX_OFFSET], []),
        ("alibi_slopes", [0.0, float("nan"), 1.0, float("inf")], ["alibi_slopes.1", "alibi_slopes.3"]),
        ("sinks", [0.0, 1.0, float("-inf"), 1.0], ["sinks.2"]),
        ("sinks", [1e300, -1e300, 0.0, 1.0], ["sinks.0", "sinks.1"]),
    ],
)
def test_number_out_of_range_is_refused_by_its_place(name: str, numbers: list[float], places: list[str]) -> None:
    dtype = F64 if name in ("alibi_slopes", "sinks") else I64
    tensor = torch.tensor(numbers, dtype=dtype)
    options: dict[str, Any] = {"causal": True} if name == "query_offset" else {}
    if name == "alibi_slopes":
        options = {"causal": "upper_left"}
    problem = make_problem(tensors={name: tensor}, **options)
    check_problem(problem)
    faults = find_value_faults(problem.tensors(), **lengths_of(problem))
    assert [fault.field for fault in faults] == places
    if places:
        with pytest.raises(InvalidProblem):
            check_values(problem)
    else:
        Engine().attend(problem)


def lengths_of(problem: AttentionProblem) -> dict[str, int]:
    dims = dims_of(problem)
    return {"seq_len_q": dims.seq_len_q, "seq_len_kv": dims.seq_len_kv}


def test_finite_bias_beyond_the_arithmetic_is_refused_by_its_place() -> None:
    bias = torch.zeros(1, 1, 5, 7, dtype=F64)
    bias[0, 0, 1, 2], bias[0, 0, 3, 0], bias[0, 0, 4, 4] = 1e300, -1e39, -torch.inf
    problem = make_problem(seq_len_q=5, seq_len_kv=7, tensors={"bias": bias})
    assert [f.field for f in find_value_faults(problem.tensors())] == ["bias.0.0.1.2", "bias.0.0.3.0"]
    wide = make_problem(seq_len_q=5, seq_len_kv=7, dtype=F64, tensors={"bias": bias})
    assert find_value_faults(wide.tensors()) == []


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("number", [0.0, -torch.inf, torch.nan, 1e300])
def test_numbers_of_a_wide_bias_are_looked_at_in_little_memory(number: float, turned: bool) -> None:
    bias = torch.full((1, 1, 1024, 2048), number, dtype=F64)
    bias = bias.transpose(2, 3) if turned else bias
    tensors = {"query": torch.zeros(1, 1, 1, 1), "bias": bias}
    assert len(find_value_faults(tensors)) == (50 if number == 1e300 else 0)
    assert peak_bytes_of(lambda: find_value_faults(tensors)) < 3 * 2**20


@pytest.mark.parametrize("shape", [(1, 1, 1, 70001), (3, 1, 2, 70001), (40, 1, 41, 70), (600, 3, 1, 70)])
def test_number_far_into_a_wide_bias_is_refused_by_its_place(shape: tuple[int, ...]) -> None:
    bias = torch.zeros(shape, dtype=F64)
    places = [tuple(size - 1 for size in shape), tuple(size // 2 for size in shape)]
    for place in places:
        bias[place] = -1e300
    found = find_value_faults({"query": torch.zeros(1, 1, 1, 1), "bias": bias})
    assert [fault.field for fault in found] == [".".join(["bias", *map(str, place)]) for place in sorted(places)]


@pytest.mark.parametrize("dtype", [I32, I64, F32, BOOL], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 2), (0, 4)])
def test_numbers_of_any_shape_are_looked_at_without_an_exception(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    names = ("key_lengths", "query_lengths", "query_offset", "alibi_slopes", "sinks")
    tensors = {name: torch.ones(shape, dtype=dtype) for name in names}
    assert find_value_faults(tensors) == []
    assert find_value_faults(tensors, seq_len_q=1, seq_len_kv=1) == []


def test_faults_of_one_tensor_are_at_most_fifty() -> None:
    problem = make_problem(batch=60, tensors={"key_lengths": torch.full((60,), 99)})
    assert len(find_value_faults(problem.tensors(), **lengths_of(problem))) == 50


@pytest.mark.parametrize(
    ("weights", "value", "fields"),
    [
        (spec(F32, 2, 4, 5, 7), spec(F32, 2, 2, 7, 3), []),
        (spec(F32, 5, 7), spec(F32, 7, 3), []),
        (None, spec(F32, 7, 3), ["weights"]),
        (spec(F32, 5, 7), None, ["value"]),
        (spec(BOOL, 5, 7), spec(F32, 7, 3), ["weights"]),
        (spec(F32, 7), spec(F32, 7, 3), ["weights"]),
        (spec(F32, 5, 7), spec(F16, 7, 3), ["value"]),
        (spec(F32, 5, 7), spec(F32, 1, 7, 3), ["value"]),
        (spec(F32, 2, 4, 5, 7), spec(F32, 3, 2, 7, 3), ["value"]),
        (spec(F32, 2, 4, 5, 7), spec(F32, 2, 3, 7, 3), ["value"]),
        (spec(F32, 2, 4, 5, 7), spec(F32, 2, 0, 7, 3), ["value"]),
        (spec(F32, 2, 0, 5, 7), spec(F32, 2, 2, 7, 3), ["weights"]),
        (spec(F32, 5, 7), spec(F32, 6, 3), ["value"]),
        (spec(F32, 5, 7), spec(F32, 7, 0), ["value"]),
    ],
)
def test_weighted_sum_that_has_no_meaning_is_refused(
    weights: TensorSpec | None, value: TensorSpec | None, fields: list[str]
) -> None:
    pair = {"weights": weights, "value": value}
    found = find_weighted_sum_faults({name: one for name, one in pair.items() if one is not None})
    assert [fault.field for fault in found] == fields


def test_broken_weights_are_not_missed() -> None:
    assert find_weighted_sum_faults({"value": spec(F32, 7, 3)}, broken={"weights"}) == []


def test_refusal_carries_every_fault_and_says_them() -> None:
    with pytest.raises(InvalidProblem) as refusal:
        check_problem(WeightedSumProblem(torch.ones(2, 3), torch.ones(4, 0)))
    assert [fault.field for fault in refusal.value.faults] == ["value", "value"]
    for fault in refusal.value.faults:
        assert str(fault) in str(refusal.value)


def test_operands_on_two_devices_are_refused() -> None:
    elsewhere = torch.ones(1, 1, 3, 2, device="meta")
    with pytest.raises(InvalidProblem) as refusal:
        check_problem(AttentionProblem(torch.ones(1, 1, 3, 2), elsewhere, elsewhere))
    assert [(fault.field, fault.received) for fault in refusal.value.faults] == [("key", "meta"), ("value", "meta")]


def test_outputs_of_the_contract_are_all_there() -> None:
    assert len(OUTPUTS) == 8
