"""Layers and gradients as bodies: the problem that they state, layers kept by a name, and layers to be kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_core import InvalidProblem
from attn_core.errors import Fault
from attn_core.problem import (
    PARAMETER_NAMES,
    GradientsProblem,
    LayerGradientsProblem,
    LayerParameters,
    LayerProblem,
)
from service.wire import json_arrays, json_format, safetensors_format
from service.wire.requests import (
    GRADIENTS,
    LAYER,
    LAYER_GRADIENTS,
    LAYER_PARAMETERS,
    NAMED_LAYER,
    NAMED_LAYER_GRADIENTS,
    Call,
    NamedCall,
    ReadLimits,
)
from tests.support.bodies import as_object, safetensors_body
from tests.support.factory import make_tensor
from tests.support.memory import peak_bytes_of

LIMITS = ReadLimits()
UNIT = [[1, 0], [0, 1]]
WEIGHTS: dict[str, Any] = {"w_query": UNIT, "w_key": UNIT, "w_value": UNIT, "w_output": [[1, 1], [0, 2]]}
READING: dict[str, Any] = {"num_heads": 2, "weight_layout": "in_out"}
LAYER_BODY = {"input": UNIT} | WEIGHTS | READING
SMALL: dict[str, Any] = {"query": [[1]], "key": [[0.5], [-0.5]], "value": [[1], [3]], "grad_context": [[1]]}


def make_parameters(*, width: int = 2, memory_width: int = 2, **changes: Any) -> LayerParameters:
    """Two heads of width 3, one of keys; what is learned from memory is as wide as it."""
    shapes = {"w_query": (width, 6), "w_key": (memory_width, 3), "w_value": (memory_width, 3), "w_output": (6, 4)}
    weights = {name: make_tensor(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    found: dict[str, Any] = {"weights": weights, "weight_layout": "in_out", "num_heads": 2, "num_kv_heads": 1}
    return LayerParameters(**found | changes)


def decode(members: dict[str, Any], call: Call | NamedCall, stored: LayerParameters | None = None) -> Any:
    return json_format.decode(json.dumps(members).encode(), call, LIMITS, stored=stored).problem


def faults_of(
    members: dict[str, Any], call: Call | NamedCall, stored: LayerParameters | None = None
) -> tuple[Fault, ...]:
    with pytest.raises(InvalidProblem) as caught:
        decode(members, call, stored)
    return caught.value.faults


def fields_of(members: dict[str, Any], call: Call | NamedCall, stored: LayerParameters | None = None) -> list[str]:
    return [fault.field for fault in faults_of(members, call, stored)]


def parameters_of(members: dict[str, Any]) -> LayerParameters:
    read = json_arrays.read(json.dumps(members).encode(), LAYER_PARAMETERS.names, LIMITS.tensors)
    return json_format.build_parameters(read)


def parameter_faults(members: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(InvalidProblem) as caught:
        parameters_of(members)
    return {fault.field: fault.received for fault in caught.value.faults}


def test_a_body_of_gradients_states_its_problem() -> None:
    members = SMALL | {"grad_logsumexp": [2], "scale": 1, "path": "manual", "verify": True, "outputs": ["grad_key"]}
    problem = decode(members, GRADIENTS)
    assert isinstance(problem, GradientsProblem)
    assert list(problem.tensors()) == ["query", "key", "value", "grad_context", "grad_logsumexp"]
    assert (problem.outputs, problem.options.path, problem.options.verify) == (("grad_key",), "manual", True)
    assert decode(SMALL, GRADIENTS).outputs is None
    assert decode(SMALL, GRADIENTS).asked == ("grad_query", "grad_key", "grad_value")


def test_a_body_of_a_layer_states_its_problem() -> None:
    members = LAYER_BODY | {"b_key": [1, 2], "causal": True, "window": {"left": 1}, "outputs": ["weights", "query"]}
    problem = decode(members | {"select": {"rows": [1]}, "num_kv_heads": 2}, LAYER)
    assert isinstance(problem, LayerProblem)
    assert list(problem.tensors()) == ["input", *WEIGHTS, "b_key"]
    inside = problem.options.attention
    assert (inside.layout, inside.num_heads, inside.num_kv_heads) == ("btd", 2, 2)
    assert (inside.causal, inside.window_left, inside.select_rows) == (True, 1, (1,))
    assert problem.options.outputs == ("weights", "query")
    gradients = decode(LAYER_BODY | {"grad_output": UNIT}, LAYER_GRADIENTS)
    assert isinstance(gradients, LayerGradientsProblem)
    assert gradients.asked == ("grad_input", "grad_w_query", "grad_w_key", "grad_w_value", "grad_w_output")


@pytest.mark.parametrize("call", [NAMED_LAYER, NAMED_LAYER_GRADIENTS], ids=["forward", "gradients"])
@pytest.mark.parametrize("form", ["json", "safetensors"])
def test_a_stored_layer_brings_what_the_body_lacks(call: NamedCall, form: str) -> None:
    stored = make_parameters()
    tensors = {"input": make_tensor(1, 3, 2)}
    if call is NAMED_LAYER_GRADIENTS:
        tensors["grad_output"] = make_tensor(1, 3, 4)
    if form == "json":
        problem = decode({name: as_object(tensor) for name, tensor in tensors.items()} | {"causal": True}, call, stored)
    else:
        body = safetensors_body(tensors, {"causal": True})
        problem = safetensors_format.decode(body, call, LIMITS, stored=stored).problem
    assert all(problem.tensors()[name] is weight for name, weight in stored.weights.items())
    assert torch.equal(problem.tensors()["input"], tensors["input"])
    inside = problem.options.attention
    assert (inside.num_heads, inside.num_kv_heads, problem.options.weight_layout) == (2, 1, "in_out")


def test_what_a_stored_layer_has_is_not_accepted_again() -> None:
    members = {"input": [[1, 2]], "num_heads": 2, "num_kv_heads": None, "w_key": UNIT, "weight_layout": "in_out"}
    faults = faults_of(members, NAMED_LAYER, make_parameters())
    assert [fault.field for fault in faults] == ["w_key", "num_heads", "weight_layout"]
    assert all("stored layer" in fault.expected for fault in faults)
    tensors = {"input": make_tensor(1, 2), "b_output": make_tensor(4)}
    with pytest.raises(InvalidProblem) as caught:
        safetensors_format.decode(safetensors_body(tensors, {}), NAMED_LAYER, LIMITS, stored=make_parameters())
    assert [fault.field for fault in caught.value.faults] == ["b_output"]


@pytest.mark.parametrize(
    ("members", "fields"),
    [
        ({"input": [[1, 2, 3]]}, ["input"]),
        ({"input": [[1, 2]], "dtype": "float64"}, ["input"]),
        ({"input": [[1, 2]], "memory": [[1, 2, 3]]}, ["memory"]),
        ({"input": [[1, 2, 3]], "memory": [[1, 2, 3]]}, ["input", "memory"]),
        ({"input": [[1, 2, 3]], "tau": 1, "key_lengths": [7]}, ["input", "key_lengths.0", "tau"]),
        ({"memory": [[1, 2]]}, ["input"]),
        ({"input": [[1, "x"]]}, ["input.0.1"]),
        ({"input": [[1, 2]], "sinks": [1, 2, 3]}, ["sinks"]),
    ],
    ids=str,
)
def test_a_disagreement_with_a_stored_layer_stands_at_what_was_sent(members: dict[str, Any], fields: list[str]) -> None:
    for stored in (make_parameters(), turned(make_parameters())):
        assert fields_of(members, NAMED_LAYER, stored) == fields
    gradients = members | {"grad_output": as_object(torch.ones(1, 4))}
    if members.get("dtype") is None:
        assert fields_of(gradients, NAMED_LAYER_GRADIENTS, make_parameters()) == fields


def test_a_stored_layer_of_another_memory_asks_for_it() -> None:
    stored = make_parameters(memory_width=5)
    (fault,) = faults_of({"input": [[1, 2]]}, NAMED_LAYER, stored)
    assert fault.field == "memory" and "5" in fault.expected and fault.received == "nothing"
    assert fields_of({"input": [[1, 2]], "memory": [[1, "x"]]}, NAMED_LAYER, stored) == ["memory.0.1"]
    assert decode({"input": [[1, 2]], "memory": [[1, 2, 3, 4, 5]]}, NAMED_LAYER, stored).memory is not None


def turned(layer: LayerParameters) -> LayerParameters:
    weights = {name: tensor.T.contiguous() for name, tensor in layer.weights.items()}
    return LayerParameters(weights, "out_in", layer.num_heads, layer.num_kv_heads)


def test_a_layer_to_be_kept_is_read_from_both_forms() -> None:
    members = WEIGHTS | READING | {"b_query": [1, 2], "dtype": "float16"}
    by_json = parameters_of(members)
    tensors = {name: torch.tensor(members[name], dtype=torch.float16) for name in (*WEIGHTS, "b_query")}
    by_safetensors = safetensors_format.decode_parameters(safetensors_body(tensors, READING), LIMITS)
    for layer in (by_json, by_safetensors):
        assert list(layer.weights) == [*WEIGHTS, "b_query"]
        assert all(torch.equal(layer.weights[name], tensor) for name, tensor in tensors.items())
        assert (layer.num_heads, layer.num_kv_heads, layer.weight_layout) == (2, None, "in_out")


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"w_query": None}, "w_query"),
        ({"w_query": [[1, 0, 0], [0, 1, 0]]}, "w_query"),
        ({"w_value": [[1, 0], [0]]}, "w_value.1"),
        ({"w_key": [["NaN", 0], [0, "-Infinity"]]}, "w_key.0.0"),
        ({"w_key": [["NaN", 0], [0, "-Infinity"]]}, "w_key.1.1"),
        ({"b_output": [1, "Infinity"]}, "b_output.1"),
        ({"b_output": [1]}, "b_output"),
        ({"b_key": as_object(torch.ones(2, dtype=torch.int64))}, "b_key"),
        ({"num_heads": None}, "num_heads"),
        ({"num_heads": True}, "num_heads"),
        ({"num_heads": 3}, "w_query"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"weight_layout": None}, "weight_layout"),
        ({"weight_layout": "oi"}, "weight_layout"),
        ({"input": UNIT}, "input"),
        ({"causal": True}, "causal"),
        ({"encoding": "list"}, "encoding"),
        ({"timeout_ms": 5}, "timeout_ms"),
        ({"name": "mine"}, "name"),
    ],
    ids=str,
)
def test_a_layer_that_cannot_be_kept_is_refused_by_its_field(more: dict[str, Any], field: str) -> None:
    assert field in parameter_faults(WEIGHTS | READING | more)


def test_all_faults_of_a_layer_to_be_kept_come_at_once() -> None:
    members = {"w_key": [["NaN"]], "b_key": [[1]], "num_heads": 0, "tau": 1}
    assert list(parameter_faults(members)) == [
        *("w_query", "w_key.0.0", "w_value", "w_output", "b_key", "num_heads", "weight_layout", "tau")
    ]
    weights = {name: as_object(torch.ones(2, 2)) for name in PARAMETER_NAMES[:4]}
    assert parameter_faults(weights | READING | {"dtype": "float16"}) == {"dtype": "none, and float16"}


def test_numbers_that_are_not_finite_are_named_up_to_fifty() -> None:
    weights: dict[str, Tensor] = {name: torch.full((2, 60), torch.inf) for name in PARAMETER_NAMES[:3]}
    weights["w_output"] = torch.ones(60, 2)
    with pytest.raises(InvalidProblem) as caught:
        safetensors_format.decode_parameters(safetensors_body(weights, READING), LIMITS)
    named = [fault.field for fault in caught.value.faults if fault.field.startswith("w_query")]
    assert named == [f"w_query.0.{column}" for column in range(50)]


def test_numbers_that_are_not_finite_take_little_to_find() -> None:
    weights: dict[str, Tensor] = {name: torch.ones(1024, 1024) for name in PARAMETER_NAMES[:4]}
    weights["w_key"] = torch.full((1024, 1024), torch.nan)
    body = safetensors_body(weights, READING)

    def refuse() -> None:
        with pytest.raises(InvalidProblem, match=r"w_key\.0\.49"):
            safetensors_format.decode_parameters(body, LIMITS)

    assert peak_bytes_of(refuse) < weights["w_key"].nbytes
