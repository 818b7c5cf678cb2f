"""tritonclient unmodified: gradients, layers, and a layer that is kept, from its upload to its end."""

from __future__ import annotations

import functools
import itertools
import queue
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from attn_core.problem import PARAMETER_NAMES, LayerParameters
from service.wire.inference_models import Models
from tests.contract.test_tritonclient import HALF, SUFFIXES, assert_same_bits, operands
from tests.contract.triton import Client, InferenceServerException, status_of
from tests.support.bodies import SAFETENSORS, ask, safetensors_body
from tests.support.factory import make_mask, make_tensor
from tests.support.kept_layers import make_parameters, options_of

GRADIENTS, LAYER = "/v1/attention/gradients", "/v1/layer"
ALL_GRADIENTS = ["grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks", "grad_weights", "grad_logits"]
LAYER_OUTPUTS = ["output", "query", "key", "value", "context", "weights", "scores", "logits", "logsumexp", "entropy"]
LAYER_OUTPUTS.append("weight_totals")
READING: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "weight_layout": "in_out"}
_numbers = itertools.count()


def natively(
    client: httpx.Client, path: str, tensors: dict[str, Tensor], **options: Any
) -> tuple[dict[str, Tensor], Any]:
    """What a native path answers, in safetensors."""
    return ask(client, path, "safetensors", tensors, options)


def gradient_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return operands(2, 4, 5, 8, num_kv_heads=2, seq_len_kv=7, dtype=dtype) | {
        "allow_mask": make_mask(2, 1, 5, 7),
        "block_mask": make_mask(1, 4, 1, 7, share=0.2, seed=1),
        "bias": make_tensor(1, 4, 5, 7, seed=5, dtype=dtype),
        "key_lengths": torch.tensor([7, 3]),
        "query_lengths": torch.tensor([5, 4]),
        "query_offset": torch.tensor([2, 1]),
        "alibi_slopes": make_tensor(4, seed=6, dtype=dtype).abs(),
        "sinks": make_tensor(4, seed=7, dtype=dtype),
        "grad_context": make_tensor(2, 4, 5, 8, seed=8, dtype=dtype),
        "grad_logsumexp": make_tensor(2, 4, 5, seed=9, dtype=wide),
    }


def layer_inputs(dtype: torch.dtype, *, width: int = 6, memory_width: int = 9) -> dict[str, Tensor]:
    """What comes with each request, and every tensor that says who attends whom."""
    return {
        "input": make_tensor(2, 3, width, seed=20, dtype=dtype),
        "memory": make_tensor(2, 5, memory_width, seed=21, dtype=dtype),
        "allow_mask": make_mask(2, 1, 3, 5),
        "bias": make_tensor(1, 4, 3, 5, seed=22, dtype=dtype),
        "key_lengths": torch.tensor([5, 3]),
        "query_offset": torch.tensor([2, 1]),
        "alibi_slopes": make_tensor(4, seed=24, dtype=dtype).abs(),
        "sinks": make_tensor(4, seed=23, dtype=dtype),
    }


def make_layer(dtype: torch.dtype, **more: Any) -> LayerParameters:
    return make_parameters(num_heads=4, num_kv_heads=2, memory_width=9, dtype=dtype, **more)


@pytest.fixture
def name(client: httpx.Client) -> Iterator[str]:
    """A name that no layer has, and none keeps."""
    free = f"contract.Layer_{next(_numbers)}"
    yield free
    assert client.delete(f"/v1/layers/{free}").status_code in (204, 404)


def keep(client: httpx.Client, name: str, parameters: LayerParameters, query: str = "") -> None:
    body = safetensors_body(dict(parameters.weights), options_of(parameters))
    answer = client.put(f"/v1/layers/{name}{query}", content=body, headers={"content-type": SAFETENSORS})
    assert answer.status_code in (200, 201), answer.text


def refused(call: Callable[[], Any], client: Client, code: str, status: str) -> str:
    """The text of a refusal."""
    with pytest.raises(InferenceServerException) as caught:
        call()
    assert status_of(caught.value) == (code if client.is_grpc else status)
    return str(caught.value.message())


def invalid(call: Callable[[], Any], client: Client) -> str:
    return refused(call, client, "INVALID_ARGUMENT", "400")


# Gradients


@pytest.mark.parametrize("dtype", SUFFIXES)
def test_gradients_have_the_bits_of_the_native_door(triton: Client, client: httpx.Client, dtype: torch.dtype) -> None:
    tensors, model = gradient_tensors(dtype), f"attention_gradients{SUFFIXES[dtype]}"
    expected, info = natively(client, GRADIENTS, tensors, causal=True, softcap=3.0, outputs=ALL_GRADIENTS)
    answer = triton.infer(model, tensors, ALL_GRADIENTS, parameters={"causal": True, "softcap": 3.0})
    assert_same_bits(answer.outputs, expected)
    assert list(answer.outputs) == ALL_GRADIENTS
    for field in ("path", "why", "device", "dtype", "empty_rows", "nonfinite_rows", "peak_bytes", "flops"):
        assert answer.parameters[field] == info[field], field
    metadata = triton.as_json("get_model_metadata", model)
    datatypes = {tensor["name"]: tensor["datatype"] for tensor in metadata["outputs"]}
    assert list(datatypes) == ALL_GRADIENTS
    codes = {torch.float32: "FP32", torch.float64: "FP64", torch.float16: "FP16", torch.bfloat16: "BF16"}
    assert {name: codes[tensor.dtype] for name, tensor in answer.outputs.items()} == datatypes


@pytest.mark.parametrize("dtype", SUFFIXES)
@pytest.mark.parametrize("given", ["everything", "no bias", "self-attention", "logsumexp alone"])
def test_where_no_gradient_is_named_those_come_that_the_native_door_gives(
    triton: Client, client: httpx.Client, dtype: torch.dtype, given: str
) -> None:
    names = {
        "everything": tuple(gradient_tensors(dtype)),
        "no bias": ("query", "key", "value", "grad_context"),
        "self-attention": ("query", "grad_context"),
        "logsumexp alone": ("query", "key", "value", "sinks", "grad_logsumexp"),
    }[given]
    tensors = {name: tensor for name, tensor in gradient_tensors(dtype).items() if name in names}
    if given != "everything":
        tensors = {name: tensor[:1] if name != "sinks" else tensor for name, tensor in tensors.items()}
    expected, _ = natively(client, GRADIENTS, tensors)
    answer = triton.infer(f"attention_gradients{SUFFIXES[dtype]}", tensors)
    assert_same_bits(answer.outputs, expected)
    assert set(expected).isdisjoint({"grad_weights", "grad_logits"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("binary", [True, False])
def test_gradients_in_json_have_the_same_bits(
    triton_http: Client, client: httpx.Client, dtype: torch.dtype, binary: bool
) -> None:
    tensors, model = gradient_tensors(dtype), f"attention_gradients{SUFFIXES[dtype]}"
    expected, _ = natively(client, GRADIENTS, tensors, outputs=ALL_GRADIENTS)
    inputs = triton_http.inputs(tensors, binary=binary)
    mixed = triton_http.call("infer", model, inputs, outputs=triton_http.asked(ALL_GRADIENTS, binary=not binary))
    assert_same_bits(triton_http.answer(mixed).outputs, expected)
    assert_same_bits(triton_http.infer(model, tensors, ALL_GRADIENTS, binary=binary).outputs, expected)


@pytest.mark.parametrize("layout", ["bthd", "btd"])
def test_gradients_lie_as_their_tensors_do(triton: Client, client: httpx.Client, layout: str) -> None:
    tensors = operands(2, 5, 4, 8) | {"grad_context": make_tensor(2, 5, 4, 8, seed=8)}
    options: dict[str, Any] = {"layout": layout}
    if layout == "btd":
        tensors, options = {name: tensor.flatten(2) for name, tensor in tensors.items()}, options | {"num_heads": 4}
    expected, _ = natively(client, GRADIENTS, tensors, **options)
    assert_same_bits(triton.infer("attention_gradients", tensors, parameters=options).outputs, expected)


@pytest.mark.parametrize(
    ("outputs", "parameters", "more", "fragments"),
    [
        (["grad_query", "grad_bias"], {}, {}, ("outputs.1", "grad_bias", "bias is not")),
        (["context"], {}, {}, ("outputs.0", "attention_gradients", "grad_query")),
        (None, {"path": "fused"}, {}, ("path", "gradients asked for")),
        (None, {"weight_layout": "in_out"}, {}, ("weight_layout", "no use for it")),
        (None, {}, {"grad_context": make_tensor(1, 2, 3, 5)}, ("grad_context", "[1,2,3,4]")),
        (None, {}, {"grad_logsumexp": make_tensor(1, 2, 3, dtype=torch.float64)}, ("grad_logsumexp", "FP32", "FP64")),
        (None, {}, {"grad_output": make_tensor(1, 2, 3)}, ("inputs.4", "grad_output")),
    ],
)
def test_what_has_no_gradient_is_refused(
    triton: Client, outputs: list[str] | None, parameters: dict[str, Any], more: dict[str, Tensor],
    fragments: tuple[str, ...],
) -> None:  # fmt: skip
    tensors = operands(1, 2, 3, 4) | {"grad_context": make_tensor(1, 2, 3, 4, seed=8)} | more
    text = invalid(lambda: triton.infer("attention_gradients", tensors, outputs, parameters=parameters or None), triton)
    assert text.startswith("1 fault: ") and all(fragment in text for fragment in fragments), text


# Layers


@pytest.mark.parametrize("dtype", SUFFIXES)
@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
def test_a_layer_has_the_bits_of_the_native_door(
    triton: Client, client: httpx.Client, dtype: torch.dtype, weight_layout: Any
) -> None:
    weights = dict(make_layer(dtype, weight_layout=weight_layout).weights)
    tensors, options = layer_inputs(dtype) | weights, READING | {"weight_layout": weight_layout, "causal": True}
    expected, info = natively(client, LAYER, tensors, outputs=LAYER_OUTPUTS, **options)
    answer = triton.infer(f"layer{SUFFIXES[dtype]}", tensors, LAYER_OUTPUTS, parameters=options)
    assert_same_bits(answer.outputs, expected)
    for field in ("path", "why", "dtype", "empty_rows", "peak_bytes", "flops"):
        assert answer.parameters[field] == info[field], field
    # None named is all of them.
    everything = triton.infer(f"layer{SUFFIXES[dtype]}", tensors, parameters=options)
    assert_same_bits(everything.outputs, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_in_json_has_the_same_bits(triton_http: Client, client: httpx.Client, dtype: torch.dtype) -> None:
    tensors = layer_inputs(dtype) | dict(make_layer(dtype).weights)
    expected, _ = natively(client, LAYER, tensors, outputs=LAYER_OUTPUTS, **READING)
    answer = triton_http.infer(f"layer{SUFFIXES[dtype]}", tensors, LAYER_OUTPUTS, binary=False, parameters=READING)
    assert_same_bits(answer.outputs, expected)


def test_a_layer_asks_how_its_weights_are_to_be_read(triton: Client) -> None:
    tensors = layer_inputs(torch.float32) | dict(make_layer(torch.float32).weights)
    text = invalid(lambda: triton.infer("layer", tensors, ["output"]), triton)
    assert "num_heads" in text and "weight_layout" in text and "in_out" in text and "out_in" in text
    del tensors["w_value"]
    text = invalid(lambda: triton.infer("layer", tensors, ["output"], parameters=READING | {"layout": "btd"}), triton)
    assert text.startswith("2 faults: ") and "w_value" in text and "always [B,T,E]" in text


def test_verify_is_told_in_the_parameters(triton: Client) -> None:
    gradients = operands(1, 2, 3, 4) | {"grad_context": make_tensor(1, 2, 3, 4, seed=8)}
    layer = layer_inputs(torch.float32) | dict(make_layer(torch.float32).weights)
    for model, tensors, options in (("attention_gradients", gradients, {}), ("layer", layer, READING)):
        found = triton.infer(model, tensors, parameters=options | {"verify": True}).parameters
        assert 0 <= found["max_abs_error"] < 1e-4 and 0 <= found["max_rel_error"] < 1e-4
        assert found["max_abs_error"] == 0 or "[" in found["worst"]


# Layers that are kept


@pytest.mark.parametrize("dtype", SUFFIXES)
def test_a_kept_layer_has_the_bits_of_the_native_door(
    triton: Client, client: httpx.Client, name: str, dtype: torch.dtype
) -> None:
    parameters, tensors = make_layer(dtype), layer_inputs(dtype)
    keep(client, name, parameters)
    path = f"/v1/layers/{name}/forward"
    expected, info = natively(client, path, tensors, causal=True, outputs=LAYER_OUTPUTS)
    answer = triton.infer(name, tensors, parameters={"causal": True})
    assert_same_bits(answer.outputs, expected)
    assert answer.parameters["flops"] == info["flops"] and answer.parameters["path"] == info["path"]
    one = triton.infer(name, tensors, ["output"], parameters={"causal": True}, model_version="1", request_id="a")
    assert_same_bits(one.outputs, natively(client, path, tensors, causal=True)[0])
    assert one.id == "a"
    # The same as with the weights in the request.
    whole = tensors | dict(parameters.weights)
    other = triton.infer(f"layer{SUFFIXES[dtype]}", whole, ["output"], parameters=READING | {"causal": True})
    assert_same_bits(other.outputs, one.outputs)


def test_a_kept_layer_is_a_model_from_its_upload_to_its_end(triton: Client, client: httpx.Client, name: str) -> None:
    def index() -> dict[str, dict[str, str]]:
        answer = triton.as_json("get_model_repository_index")
        return {model["name"]: model for model in (answer["models"] if triton.is_grpc else answer)}

    def statistics() -> dict[str, Any]:
        listed = triton.as_json("get_inference_statistics")["model_stats"]
        return {model["name"]: model for model in listed}

    tensors = layer_inputs(torch.float32)
    calls: list[Callable[[], Any]] = [
        lambda: triton.as_json("get_model_metadata", name),
        lambda: triton.as_json("get_model_config", name),
        lambda: triton.as_json("get_inference_statistics", name),
        lambda: triton.infer(name, tensors, ["output"]),
    ]

    def is_nowhere() -> bool:
        for call in calls:
            assert name in refused(call, triton, "NOT_FOUND", "404")
        return not (triton.call("is_model_ready", name) or name in index() or name in statistics())

    assert is_nowhere()
    keep(client, name, make_layer(torch.float32))
    assert triton.call("is_model_ready", name) and triton.call("is_model_ready", name, "1")
    assert not triton.call("is_model_ready", name, "2")
    assert index()[name] == {"name": name, "version": "1", "state": "READY"}
    metadata = triton.as_json("get_model_metadata", name)
    shapes = {
        tensor["name"]: [int(axis) for axis in tensor["shape"]] for tensor in metadata["inputs"] + metadata["outputs"]
    }
    assert shapes["input"] == [-1, -1, 6] and shapes["memory"] == [-1, -1, 9] and shapes["output"] == [-1, -1, 4]
    assert shapes["sinks"] == [4] and shapes["weights"] == [-1, 4, -1, -1] and shapes["key"] == [-1, 2, -1, 3]
    assert shapes.keys().isdisjoint(PARAMETER_NAMES)
    answer = triton.as_json("get_model_config", name)
    config = answer["config"] if triton.is_grpc else answer
    assert config["name"] == name and config.get("max_batch_size", 0) == 0
    optional = {tensor["name"]: tensor.get("optional", False) for tensor in config["input"]}
    assert not optional["input"] and not optional["memory"] and optional["bias"]
    first = triton.infer(name, tensors, ["output"])
    assert int(statistics()[name]["inference_count"]) == 1
    # Replaced, its name has other weights, and the same figures.
    keep(client, name, make_layer(torch.float32, seed=1), "?replace=true")
    second = triton.infer(name, tensors, ["output"])
    assert not torch.equal(first.outputs["output"], second.outputs["output"])
    assert int(statistics()[name]["inference_count"]) == 2
    assert client.delete(f"/v1/layers/{name}").status_code == 204
    assert is_nowhere()
    keep(client, name, make_layer(torch.float32))
    assert int(statistics()[name].get("inference_count", 0)) == 0


@pytest.mark.parametrize(
    ("tensors", "parameters", "fragments"),
    [
        ({"w_query": make_tensor(6, 12)}, {}, ("w_query", "the stored layer has its own")),
        ({}, {"num_heads": 4}, ("num_heads", "the stored layer has its own")),
        ({}, {"num_kv_heads": 2}, ("num_kv_heads", "the stored layer has its own")),
        ({}, {"weight_layout": "in_out"}, ("weight_layout", "the stored layer has its own")),
        ({}, {"layout": "bhtd"}, ("layout", "always [B,T,E]")),
        ({"query": make_tensor(1, 2, 3, 4)}, {}, ("inputs.8", "query")),
        ({"input": make_tensor(2, 3, 7)}, {}, ("input", "6", "[2,3,7]")),
        ({"input": make_tensor(2, 3, 6, dtype=torch.float64)}, {}, ("input.datatype", "FP32", "FP64")),
    ],
)
def test_what_a_kept_layer_does_not_take_is_refused(
    triton: Client, client: httpx.Client, name: str, tensors: dict[str, Tensor], parameters: dict[str, Any],
    fragments: tuple[str, ...],
) -> None:  # fmt: skip
    keep(client, name, make_layer(torch.float32))
    given = layer_inputs(torch.float32) | tensors
    text = invalid(lambda: triton.infer(name, given, ["output"], parameters=parameters or None), triton)
    assert text.startswith("1 fault: ") and all(fragment in text for fragment in fragments), text


def test_a_kept_layer_is_neither_loaded_nor_unloaded(triton: Client, client: httpx.Client, name: str) -> None:
    keep(client, name, make_layer(torch.float32))
    for method in ("load_model", "unload_model"):
        assert refused(functools.partial(triton.call, method, name), triton, "UNAVAILABLE", "503")
    assert triton.call("is_model_ready", name)


@pytest.mark.parametrize("dtype", HALF)
def test_half_outputs_of_a_kept_layer_have_no_form_in_json(
    triton_http: Client, client: httpx.Client, name: str, dtype: torch.dtype
) -> None:
    keep(client, name, make_layer(dtype))
    inputs = triton_http.inputs(layer_inputs(dtype))
    asked = triton_http.asked(["output"], binary=False)
    text = invalid(lambda: triton_http.call("infer", name, inputs, outputs=asked), triton_http)
    assert "output" in text and "binary" in text


def test_one_stream_asks_all_of_them(server: Any, client: httpx.Client, name: str) -> None:
    keep(client, name, make_layer(torch.float32))
    inputs, weights = layer_inputs(torch.float32), dict(make_layer(torch.float32).weights)
    gradients = operands(1, 2, 3, 4) | {"grad_context": make_tensor(1, 2, 3, 4, seed=8)}
    triton = Client("grpc", f"127.0.0.1:{server.grpc_port}")
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    triton.raw.start_stream(lambda result, error: answers.put((result, error)))
    asked: list[tuple[str, dict[str, Tensor], list[str], dict[str, Any]]] = [
        (name, inputs, ["output"], {}),
        ("layer", inputs | weights, ["output", "weights"], READING),
        ("attention_gradients", gradients, ["grad_key", "grad_logits"], {"causal": True}),
        ("contract.Layer_that_is_not_there", inputs, ["output"], {}),
        (name, inputs, ["output"], {"num_heads": 4}),
        (name, inputs, ["logsumexp"], {}),
    ]
    try:
        for number, (model, tensors, outputs, options) in enumerate(asked):
            triton.raw.async_stream_infer(
                model, triton.inputs(tensors), outputs=triton.asked(outputs), request_id=str(number), parameters=options
            )
        found = [answers.get(timeout=20) for _ in asked]
    finally:
        triton.raw.stop_stream()
        triton.close()
    errors = ["" if error is None else error.message() for _, error in found]
    assert [bool(error) for error in errors] == [False, False, False, True, True, False]
    assert "contract.Layer_that_is_not_there" in errors[3] and "the stored layer has its own" in errors[4]
    kept = f"/v1/layers/{name}/forward"
    expected = [
        natively(client, kept, inputs)[0],
        natively(client, LAYER, inputs | weights, outputs=["output", "weights"], **READING)[0],
        natively(client, GRADIENTS, gradients, outputs=["grad_key", "grad_logits"], causal=True)[0],
        natively(client, kept, inputs, outputs=["logsumexp"])[0],
    ]
    for (result, _), right in zip([each for each in found if each[1] is None], expected, strict=True):
        assert_same_bits(triton.answer(result).outputs, right)


def test_models_are_those_that_the_metadata_is_told_of(triton: Client) -> None:
    """Each that is listed describes itself, and is ready."""
    answer = triton.as_json("get_model_repository_index")
    for model in answer["models"] if triton.is_grpc else answer:
        metadata = triton.as_json("get_model_metadata", model["name"])
        expected = Models().get(model["name"]).metadata()
        assert [tensor["name"] for tensor in metadata["inputs"]] == [each["name"] for each in expected["inputs"]]
        assert [tensor["name"] for tensor in metadata["outputs"]] == [each["name"] for each in expected["outputs"]]
        assert triton.call("is_model_ready", model["name"])
