"""The models of the Open Inference Protocol: what each takes and gives, and what is refused of gradients and layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_core.errors import InvalidProblem
from attn_core.problem import (
    GRADIENT_OUTPUTS,
    LAYER_OUTPUTS,
    LAYER_TENSOR_NAMES,
    PARAMETER_NAMES,
    RULE_NAMES,
    GradientsProblem,
    LayerParameters,
    LayerProblem,
)
from service.errors import NotFound
from service.layer_store import RESERVED_NAMES
from service.wire import open_inference_json
from service.wire.arrays import Limits
from service.wire.inference import CheckedInference, check
from service.wire.inference_models import ANY, BUILT_IN, DATATYPES, Model, Models, layer_model
from service.wire.requests import GRADIENTS, LAYER, NAMED_LAYER, ReadLimits
from tests.support.factory import make_tensor
from tests.support.inference import binary_body, json_body
from tests.support.kept_layers import make_parameters

SUFFIXES = {"": torch.float32, "_fp16": torch.float16, "_bf16": torch.bfloat16, "_fp64": torch.float64}
HEADS = make_parameters(num_heads=4, num_kv_heads=2, memory_width=9)


@dataclass(frozen=True)
class Kept:
    name: str
    parameters: LayerParameters


class Shelf:
    """Layers that are kept, as far as models ask for them."""

    def __init__(self, *layers: Kept) -> None:
        self.layers = {layer.name: layer for layer in layers}

    def get(self, name: str) -> Kept:
        if name not in self.layers:
            raise NotFound("no layer")
        return self.layers[name]

    def all(self) -> Sequence[Kept]:
        return list(self.layers.values())


def checked(model: Model, tensors: dict[str, Tensor], **members: Any) -> CheckedInference:
    body, headers = binary_body(tensors, **members)
    request = open_inference_json.decode(body, int(next(iter(headers.values()))), Limits())
    return check(request, model, ReadLimits())


def faults_of(model: Model, tensors: dict[str, Tensor], **members: Any) -> dict[str, str]:
    """What is refused, by field; nothing where all is fine."""
    try:
        checked(model, tensors, **members)
    except InvalidProblem as error:
        return {fault.field: f"{fault.expected}, received {fault.received}" for fault in error.faults}
    return {}


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in model.inputs}


def tensors_of(*names: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shape = {"grad_logsumexp": (1, 2, 3), "sinks": (2,), "bias": (1, 1, 3, 3)}
    return {name: make_tensor(*shape.get(name, (1, 2, 3, 4)), seed=n, dtype=dtype) for n, name in enumerate(names)}


# Which there are


def test_there_is_a_model_of_each_operation_in_each_datatype() -> None:
    bases = ("sdpa", "attention", "attention_gradients", "layer")
    assert Models().names() == sorted(base + suffix for base in bases for suffix in SUFFIXES)
    for name in Models().names():
        suffix = next(suffix for suffix in ("_fp16", "_bf16", "_fp64", "") if name.endswith(suffix))
        model = Models().get(name)
        assert model.name == name and model.datatype.dtype == SUFFIXES[suffix]


def test_no_layer_may_be_called_as_a_model_is() -> None:
    assert set(Models().names()) | {"stats"} == RESERVED_NAMES


def test_a_layer_is_a_model_for_as_long_as_it_is_kept() -> None:
    shelf = Shelf(Kept("zeta", make_parameters()), Kept("Alpha", make_parameters(seed=1)))
    models = Models(shelf)
    assert models.names() == ["Alpha", *BUILT_IN, "zeta"]
    assert models.has("zeta") and models.get("zeta", "1").name == "zeta"
    found = models.get("Alpha")
    del shelf.layers["Alpha"]
    assert not models.has("Alpha") and models.names() == [*BUILT_IN, "zeta"]
    with pytest.raises(NotFound):
        models.get("Alpha")
    # Whoever has looked it up goes on with what he has.
    assert checked(found, {"input": make_tensor(1, 3, 6)}).problem.tensors()["w_query"].shape == (6, 6)


@pytest.mark.parametrize("name", ["layer", "kept"])
def test_another_version_is_not_found(name: str) -> None:
    with pytest.raises(NotFound, match="version 1 alone"):
        Models(Shelf(Kept("kept", HEADS))).get(name, "2")


# What they take and give


@pytest.mark.parametrize("name", [*BUILT_IN, "kept"])
def test_a_model_takes_what_its_call_takes(name: str) -> None:
    model = Models(Shelf(Kept("kept", HEADS))).get(name)
    expected = model.call.tensors if not name.startswith("sdpa") else ("query", "key", "value")
    assert tuple(tensor.name for tensor in model.inputs) == expected
    metadata, configuration = model.metadata(), model.configuration()
    assert [tensor["name"] for tensor in metadata["inputs"]] == list(expected)
    assert [tensor["dims"] for tensor in configuration["input"]] == [t["shape"] for t in metadata["inputs"]]
    assert [tensor["name"] for tensor in configuration["output"]] == [t["name"] for t in metadata["outputs"]]
    json.dumps([metadata, configuration])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_datatypes_are_those_of_the_native_interface(suffix: str) -> None:
    gradients, layer = Models().get(f"attention_gradients{suffix}"), Models().get(f"layer{suffix}")
    own = gradients.datatype
    wide = DATATYPES["FP64" if suffix == "_fp64" else "FP32"]
    taken = {tensor.name: tensor.datatype for tensor in (*gradients.inputs, *layer.inputs)}
    narrow = {"query", "bias", "sinks", "grad_context", "input", "memory", *PARAMETER_NAMES}
    assert {taken[name] for name in narrow} == {own}
    assert taken["grad_logsumexp"] is wide
    assert taken["allow_mask"].name == "BOOL" and taken["query_offset"].name == "INT64"
    given = {tensor.name: tensor.datatype for tensor in (*gradients.outputs, *layer.outputs)}
    assert {given[name] for name in ("grad_query", "grad_bias", "output", "key", "context", "weights")} == {own}
    assert {given[name] for name in ("grad_logits", "scores", "logsumexp", "weight_totals")} == {wide}


def test_gradients_and_layers_give_what_the_native_interface_gives() -> None:
    assert Models().get("attention_gradients").output_names == GRADIENT_OUTPUTS
    unselected = tuple(name for name in LAYER_OUTPUTS if name != "top_weights")
    assert Models().get("layer").output_names == layer_model("kept", HEADS).output_names == unselected


def test_what_a_model_is_never_without_is_not_optional() -> None:
    def required(model: Model) -> list[str]:
        return [tensor.name for tensor in model.inputs if not tensor.is_optional]

    assert required(Models().get("attention_gradients")) == ["query"]
    assert required(Models().get("layer")) == ["input", "w_query", "w_key", "w_value", "w_output"]
    assert required(layer_model("kept", make_parameters())) == ["input"]
    # Its keys come from vectors of another width than its input has.
    assert required(layer_model("kept", HEADS)) == ["input", "memory"]


@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
def test_a_layer_that_is_kept_knows_its_axes(weight_layout: Any) -> None:
    parameters = make_parameters(
        width=5, memory_width=9, num_heads=4, num_kv_heads=2, output_width=7, weight_layout=weight_layout
    )
    model = layer_model("kept", parameters)
    inputs = shapes(model)
    assert inputs["input"] == (ANY, ANY, 5) and inputs["memory"] == (ANY, ANY, 9)
    assert inputs["sinks"] == inputs["alibi_slopes"] == (4,)
    # What is broadcast may have 1 for any axis.
    assert inputs["bias"] == inputs["allow_mask"] == (ANY,) * 4
    outputs = {tensor.name: tensor.shape for tensor in model.outputs}
    assert outputs["output"] == (ANY, ANY, 7) and outputs["context"] == (ANY, ANY, 12)
    assert outputs["query"] == (ANY, 4, ANY, 3) and outputs["key"] == outputs["value"] == (ANY, 2, ANY, 3)
    assert outputs["weights"] == (ANY, 4, ANY, ANY) and outputs["logsumexp"] == (ANY, 4, ANY)


def test_a_layer_of_any_weights_says_how_many_axes_there_are() -> None:
    inputs = shapes(Models().get("layer"))
    ranks = {name: len(shape) for name, shape in inputs.items()}
    assert all(axis == ANY for shape in inputs.values() for axis in shape)
    assert ranks["input"] == ranks["memory"] == 3
    assert ranks["w_query"] == ranks["w_output"] == 2 and ranks["b_key"] == 1
    outputs = {tensor.name: tensor.shape for tensor in Models().get("layer").outputs}
    assert outputs["context"] == (ANY,) * 3 and outputs["weights"] == (ANY,) * 4


def test_calls_are_those_of_the_native_interface() -> None:
    assert Models().get("attention_gradients").call is GRADIENTS
    assert Models().get("layer").call is LAYER
    model = layer_model("kept", HEADS)
    assert model.call is NAMED_LAYER and model.stored is HEADS


# Which outputs are answered

GIVEN: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("query", "key", "value", "grad_context"), ("grad_query", "grad_key", "grad_value")),
    (("query", "grad_context"), ("grad_query",)),
    (("query", "key", "value", "bias", "sinks", "grad_logsumexp"),
     ("grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks")),
]  # fmt: skip


@pytest.mark.parametrize(("names", "expected"), GIVEN)
def test_where_no_gradient_is_named_those_come_that_are_defined(
    names: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    found = checked(Models().get("attention_gradients"), tensors_of(*names), parameters={"binary_data_output": True})
    assert isinstance(found.problem, GradientsProblem)
    assert tuple(output.name for output in found.outputs) == found.problem.outputs == expected
    # As many as the native interface gives for none named.
    assert GradientsProblem(found.problem.attention, found.problem.grad_context).asked == expected


def test_gradients_of_pairs_come_when_they_are_named() -> None:
    tensors = tensors_of("query", "key", "value", "grad_context")
    asked = ["grad_logits", "grad_weights", "grad_value"]
    found = checked(Models().get("attention_gradients"), tensors, outputs=[{"name": name} for name in asked])
    assert isinstance(found.problem, GradientsProblem)
    assert [output.name for output in found.outputs] == list(found.problem.asked) == asked


@pytest.mark.parametrize(
    "model", [Models().get("layer"), layer_model("kept", make_parameters())], ids=["layer", "kept"]
)
def test_where_no_output_of_a_layer_is_named_all_come(model: Model) -> None:
    weights = {} if model.stored is not None else dict(make_parameters().weights)
    options = {} if model.stored is not None else {"num_heads": 2, "weight_layout": "in_out"}
    found = checked(model, {"input": make_tensor(2, 3, 6)} | weights, parameters=options)
    assert isinstance(found.problem, LayerProblem)
    assert tuple(output.name for output in found.outputs) == found.problem.options.outputs == model.output_names


# What is refused


@pytest.mark.parametrize("name", ["grad_bias", "grad_sinks"])
def test_a_gradient_of_what_is_not_given_is_refused(name: str) -> None:
    tensors = tensors_of("query", "key", "value", "grad_context")
    source = name.removeprefix("grad_")
    faults = faults_of(Models().get("attention_gradients"), tensors, outputs=[{"name": "grad_key"}, {"name": name}])
    assert faults == {"outputs.1": f"a gradient of what is given, which {source} is not, received {name}"}


def test_faults_of_outputs_stand_where_they_were_asked() -> None:
    tensors = tensors_of("query", "key", "value", "grad_context")
    asked = [{"name": name} for name in ("nothing", "grad_bias", "grad_key", "grad_key", "grad_sinks")]
    faults = faults_of(Models().get("attention_gradients"), tensors, outputs=asked)
    assert set(faults) == {"outputs.0", "outputs.1", "outputs.3", "outputs.4"}
    assert "bias is not" in faults["outputs.1"] and "once" in faults["outputs.3"]


def test_gradients_of_nothing_are_refused() -> None:
    faults = faults_of(Models().get("attention_gradients"), tensors_of("query", "key", "value"))
    assert list(faults) == ["grad_context"] and "grad_logsumexp" in faults["grad_context"]


def test_options_of_the_other_operations_are_refused_with_the_reason() -> None:
    gradients = Models().get("attention_gradients")
    tensors = tensors_of("query", "key", "value", "grad_context")
    faults = faults_of(gradients, tensors, parameters={"path": "fused", "weight_layout": "in_out", "select": 1})
    assert "gradients asked for" in faults["path"]
    assert "attention_gradients has no use for it" in faults["weight_layout"]
    assert "selected rows and heads are not served" in faults["parameters.select"]
    layer = {"input": make_tensor(1, 3, 6)} | dict(make_parameters().weights)
    faults = faults_of(Models().get("layer"), layer, parameters={"layout": "bhtd"})
    assert "always [B,T,E]" in faults["layout"]
    assert set(faults) == {"layout", "num_heads", "weight_layout"}


def test_what_a_kept_layer_has_of_its_own_is_refused_with_the_reason() -> None:
    model = layer_model("kept", make_parameters())
    weights = make_parameters(seed=3).weights
    tensors = {"input": make_tensor(1, 3, 6), "w_query": weights["w_query"], "b_output": weights["b_output"]}
    parameters = {"num_heads": 2, "num_kv_heads": 2, "weight_layout": "in_out", "w_key": 1, "layout": "btd"}
    faults = faults_of(model, tensors, parameters=parameters)
    own = "nothing, since the stored layer has its own"
    assert {name: text.partition(", received")[0] for name, text in faults.items() if name != "layout"} == (
        dict.fromkeys(("num_heads", "num_kv_heads", "weight_layout", "w_query", "b_output", "parameters.w_key"), own)
    )
    assert "always [B,T,E]" in faults["layout"]


def test_a_kept_layer_takes_its_own_datatype_alone() -> None:
    model = layer_model("kept", make_parameters(dtype=torch.float64))
    assert model.datatype.name == "FP64"
    faults = faults_of(model, {"input": make_tensor(1, 3, 6)})
    assert list(faults) == ["input.datatype"] and "FP64, as the metadata of kept says" in faults["input.datatype"]


def test_what_does_not_fit_a_kept_layer_is_refused_where_it_was_sent() -> None:
    tensors = {"input": make_tensor(1, 3, 7), "memory": make_tensor(1, 4, 9), "key_lengths": torch.tensor([5])}
    faults = faults_of(layer_model("kept", HEADS), tensors)
    assert set(faults) == {"input", "key_lengths.0"}
    assert set(faults_of(layer_model("kept", HEADS), {"input": make_tensor(1, 3, 6)})) == {"memory"}


def test_an_unknown_input_is_told_which_there_are() -> None:
    faults = faults_of(layer_model("kept", make_parameters()), {"input": make_tensor(1, 3, 6), "query": make_tensor(2)})
    assert all(name in faults["inputs.1"] for name in ("input", "memory", *RULE_NAMES))
    assert not any(name in faults["inputs.1"] for name in set(LAYER_TENSOR_NAMES) & set(PARAMETER_NAMES))


def test_half_gradients_have_no_form_in_json() -> None:
    model = Models().get("attention_gradients_fp16")
    tensors = tensors_of("query", "key", "value", "grad_context", dtype=torch.float16)
    faults = faults_of(model, tensors)
    assert set(faults) == {"outputs.grad_query", "outputs.grad_key", "outputs.grad_value"}
    asked = [{"name": "grad_logits"}, {"name": "grad_query", "parameters": {"binary_data": True}}]
    assert faults_of(model, tensors, outputs=asked) == {}


def test_elements_may_come_as_numbers() -> None:
    model = layer_model("kept", make_parameters())
    tensors = {"input": make_tensor(1, 3, 6)}
    request = open_inference_json.decode(json_body(tensors, outputs=[{"name": "output"}]), None, Limits())
    found = check(request, model, ReadLimits()).problem.tensors()["input"]
    assert torch.equal(found, tensors["input"])
