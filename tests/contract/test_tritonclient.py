"""tritonclient unmodified, in its four forms, over both doors."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from tests.contract.triton import Client, InferenceServerException, status_of
from tests.support.bodies import SAFETENSORS, read_answer, safetensors_body
from tests.support.factory import make_mask, make_tensor

HALF = {torch.float16: "_fp16", torch.bfloat16: "_bf16"}
SUFFIXES = {torch.float32: "", torch.float64: "_fp64", **HALF}
OUTPUTS = ["context", "weights", "scores", "logits", "logsumexp", "entropy"]
OPERATIONS = ("sdpa", "attention", "attention_gradients", "layer")
NAMES = sorted(f"{model}{suffix}" for model in OPERATIONS for suffix in SUFFIXES.values())


def operands(
    *shape: int, num_kv_heads: int | None = None, seq_len_kv: int | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    batch, num_heads, tokens, width = shape
    kv_shape = (batch, num_kv_heads or num_heads, seq_len_kv or tokens, width)
    shapes = {"query": shape, "key": kv_shape, "value": kv_shape}
    return {name: make_tensor(*size, seed=number, dtype=dtype) for number, (name, size) in enumerate(shapes.items())}


def natively(client: httpx.Client, tensors: dict[str, Tensor], **options: Any) -> tuple[dict[str, Tensor], Any]:
    """What POST /v1/attention answers, in safetensors."""
    body = safetensors_body(tensors, options)
    response = client.post("/v1/attention", content=body, headers={"content-type": SAFETENSORS})
    assert response.status_code == 200, response.text
    return read_answer(response.content, SAFETENSORS, {})


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(
            found[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        ), name


def test_health_is_told(triton: Client) -> None:
    assert triton.call("is_server_live") is True
    assert triton.call("is_server_ready") is True
    assert triton.call("is_model_ready", "sdpa") is True
    assert triton.call("is_model_ready", "attention_bf16", "1") is True
    assert triton.call("is_model_ready", "nothing") is False
    assert triton.call("is_model_ready", "sdpa", "2") is False


def test_the_server_announces_what_it_serves(triton: Client) -> None:
    metadata = triton.as_json("get_server_metadata")
    assert metadata["name"] == "attn" and metadata["version"]
    assert metadata["extensions"] == [
        "binary_tensor_data", "model_configuration", "model_repository", "parameters", "statistics",
    ]  # fmt: skip


def test_a_model_describes_itself(triton: Client) -> None:
    metadata = triton.as_json("get_model_metadata", "sdpa_bf16")
    assert metadata["name"] == "sdpa_bf16" and metadata["versions"] == ["1"]
    shape = ["-1"] * 4 if triton.is_grpc else [-1] * 4
    assert metadata["inputs"] == [
        {"name": name, "datatype": "BF16", "shape": shape} for name in ("query", "key", "value")
    ]
    assert metadata["outputs"] == [{"name": "context", "datatype": "BF16", "shape": shape}]
    wide = triton.as_json("get_model_metadata", "attention", "1")
    assert [tensor["name"] for tensor in wide["outputs"]] == OUTPUTS
    assert {tensor["name"]: tensor["datatype"] for tensor in wide["inputs"]}["key_lengths"] == "INT64"


def test_a_model_has_a_configuration(triton: Client) -> None:
    answer = triton.as_json("get_model_config", "attention_fp16")
    config = answer["config"] if triton.is_grpc else answer
    assert config["name"] == "attention_fp16" and config.get("max_batch_size", 0) == 0
    inputs = {tensor["name"]: tensor for tensor in config["input"]}
    assert inputs["query"]["data_type"] == "TYPE_FP16" and not inputs["query"].get("optional", False)
    assert inputs["allow_mask"]["data_type"] == "TYPE_BOOL" and inputs["allow_mask"]["optional"] is True
    assert [int(axis) for axis in inputs["sinks"]["dims"]] == [-1]
    outputs = {tensor["name"]: tensor for tensor in config["output"]}
    assert outputs["logsumexp"]["data_type"] == "TYPE_FP32" and len(outputs["logsumexp"]["dims"]) == 3


def test_the_repository_lists_every_model(triton: Client) -> None:
    answer = triton.as_json("get_model_repository_index")
    models = answer["models"] if triton.is_grpc else answer
    assert [model["name"] for model in models] == NAMES
    assert all(model["state"] == "READY" and model["version"] == "1" for model in models)


def test_models_are_neither_loaded_nor_unloaded(triton: Client) -> None:
    expected = "UNAVAILABLE" if triton.is_grpc else "503"
    for method in ("load_model", "unload_model"):
        with pytest.raises(InferenceServerException) as refused:
            triton.call(method, "sdpa")
        assert status_of(refused.value) == expected


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("get_trace_settings", ()),
        ("update_trace_settings", ()),
        ("get_log_settings", ()),
        ("update_log_settings", ({"log_verbose_level": 1},)),
        ("get_cuda_shared_memory_status", ()),
        ("unregister_cuda_shared_memory", ()),
        ("get_system_shared_memory_status", ()),
        ("register_system_shared_memory", ("region", "/region", 64)),
        ("unregister_system_shared_memory", ()),
    ],
)
def test_what_is_not_served_says_so(triton: Client, method: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InferenceServerException) as refused:
        triton.call(method, *arguments)
    assert status_of(refused.value) == ("UNIMPLEMENTED" if triton.is_grpc else "501")
    assert refused.value.message()


@pytest.mark.parametrize("dtype", SUFFIXES)
@pytest.mark.parametrize("aligned", [True, False])
def test_sdpa_gives_the_bits_of_the_native_door(
    triton: Client, client: httpx.Client, dtype: torch.dtype, aligned: bool
) -> None:
    shape = (2, 4, 16, 32) if aligned else (1, 3, 5, 7)
    tensors = operands(*shape, dtype=dtype)
    expected, _ = natively(client, tensors)
    # The third time it is known.
    for _ in range(3):
        answer = triton.infer(f"sdpa{SUFFIXES[dtype]}", tensors, ["context"], request_id="a")
        assert_same_bits(answer.outputs, expected)
        assert answer.id == "a"


@pytest.mark.parametrize("dtype", SUFFIXES)
def test_attention_gives_the_bits_of_the_native_door(triton: Client, client: httpx.Client, dtype: torch.dtype) -> None:
    tensors = operands(2, 4, 5, 8, num_kv_heads=2, seq_len_kv=7, dtype=dtype) | {
        "allow_mask": make_mask(2, 1, 5, 7),
        "block_mask": make_mask(1, 4, 1, 7, share=0.2, seed=1),
        "bias": make_tensor(1, 4, 5, 7, seed=5, dtype=dtype),
        "key_lengths": torch.tensor([7, 3]),
        "query_lengths": torch.tensor([5, 4]),
        "query_offset": torch.tensor([2, 1]),
        "alibi_slopes": make_tensor(4, seed=6, dtype=dtype).abs(),
        "sinks": make_tensor(4, seed=7, dtype=dtype),
    }
    expected, info = natively(client, tensors, causal=True, outputs=OUTPUTS)
    answer = triton.infer(f"attention{SUFFIXES[dtype]}", tensors, parameters={"causal": True})
    assert_same_bits(answer.outputs, expected)
    for name in ("path", "why", "device", "dtype", "empty_rows", "nonfinite_rows", "peak_bytes", "flops"):
        assert answer.parameters[name] == info[name], name
    assert answer.parameters["queue_ms"] >= 0 and answer.parameters["compute_ms"] > 0
    assert answer.parameters["batch_requests"] >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("binary", [True, False])
def test_json_has_the_same_bits(triton_http: Client, client: httpx.Client, dtype: torch.dtype, binary: bool) -> None:
    tensors = operands(1, 2, 4, 8, dtype=dtype) | {
        "allow_mask": make_mask(1, 1, 4, 4),
        "key_lengths": torch.tensor([3]),
    }
    expected, _ = natively(client, tensors, outputs=OUTPUTS)
    model = f"attention{SUFFIXES[dtype]}"
    inputs = triton_http.inputs(tensors, binary=binary)
    asked = triton_http.asked(OUTPUTS, binary=not binary)
    mixed = triton_http.answer(triton_http.call("infer", model, inputs, outputs=asked))
    assert_same_bits(mixed.outputs, expected)
    alike = triton_http.infer(model, tensors, OUTPUTS, binary=binary)
    assert_same_bits(alike.outputs, expected)


def test_numbers_that_json_has_no_words_for_travel_as_rapidjson_writes_them(
    triton_http: Client, client: httpx.Client
) -> None:
    tensors = operands(1, 1, 3, 4)
    tensors["query"][0, 0, 0, 0] = math.nan
    tensors["value"][0, 0, 2, 1] = math.inf
    tensors["bias"] = torch.zeros(1, 1, 3, 3)
    tensors["bias"][..., 1, :] = -math.inf
    expected, _ = natively(client, tensors, outputs=OUTPUTS)
    found = triton_http.infer("attention", tensors, OUTPUTS, binary=False)
    assert torch.isneginf(found.outputs["logsumexp"][0, 0, 1])
    for name, tensor in expected.items():
        assert torch.equal(torch.isnan(found.outputs[name]), torch.isnan(tensor)), name
        assert torch.equal(torch.nan_to_num(found.outputs[name]), torch.nan_to_num(tensor)), name


@pytest.mark.parametrize("dtype", HALF)
def test_half_numbers_in_json_are_refused_before_computing(triton_http: Client, dtype: torch.dtype) -> None:
    tensors = operands(1, 1, 3, 4, dtype=dtype)
    model = f"sdpa{SUFFIXES[dtype]}"
    inputs, asked = triton_http.inputs(tensors), triton_http.asked(["context"], binary=False)
    with pytest.raises(InferenceServerException) as refused:
        triton_http.call("infer", model, inputs, outputs=asked)
    assert status_of(refused.value) == "400" and "binary" in refused.value.message()
    if dtype == torch.bfloat16:
        # The client itself refuses to send it as numbers.
        return
    with pytest.raises(InferenceServerException) as refused:
        triton_http.infer(model, tensors, ["context"], binary=False)
    assert status_of(refused.value) == "400" and "binary" in refused.value.message()


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"causal": True}, {"causal": True}),
    ({"causal": "upper_left"}, {"causal": "upper_left"}),
    ({"causal": "lower_right"}, {"causal": "lower_right"}),
    ({"scale": 0.25}, {"scale": 0.25}),
    ({"scale": 2}, {"scale": 2}),
    ({"softcap": 1.5}, {"softcap": 1.5}),
    ({"window_left": 1, "window_right": 0}, {"window": {"left": 1, "right": 0}}),
    ({"window_right": 1}, {"window": {"right": 1}}),
    ({"layout": "bthd"}, {"layout": "bthd"}),
    ({"num_heads": 6, "num_kv_heads": 6}, {"num_heads": 6, "num_kv_heads": 6}),
    ({"empty_rows": "zeros"}, {"empty_rows": "zeros"}),
    ({"path": "manual"}, {"path": "manual"}),
    ({"verify": False, "dropout_p": 0}, {"verify": False, "dropout_p": 0}),
    ({"timeout_ms": 5000.5}, {"timeout_ms": 5000.5}),
]


@pytest.mark.parametrize(("parameters", "options"), OPTIONS, ids=[json.dumps(given) for given, _ in OPTIONS])
def test_options_ride_in_the_parameters(
    triton: Client, client: httpx.Client, parameters: dict[str, Any], options: dict[str, Any]
) -> None:
    tensors = operands(1, 6, 6, 4)
    expected, _ = natively(client, tensors, **options)
    answer = triton.infer("sdpa", tensors, parameters=parameters)
    assert_same_bits(answer.outputs, expected)
    assert "ignored" not in answer.parameters


def test_layout_btd_takes_rank_3(triton: Client, client: httpx.Client) -> None:
    tensors = {name: tensor[0] for name, tensor in operands(1, 2, 6, 4).items()}
    options = {"layout": "btd", "num_heads": 2}
    expected, _ = natively(client, tensors, **options)
    assert_same_bits(triton.infer("sdpa", tensors, parameters=options).outputs, expected)


def test_unknown_parameters_are_ignored_and_named(triton: Client) -> None:
    answer = triton.infer("sdpa", operands(1, 1, 2, 4), parameters={"is_causal": True, "colour": "blue", "n": 1})
    assert answer.parameters["ignored"].split(", ") == ["is_causal", "colour", "n"] or sorted(
        answer.parameters["ignored"].split(", ")
    ) == ["colour", "is_causal", "n"]


def test_what_the_protocol_defines_is_taken(triton: Client, client: httpx.Client) -> None:
    tensors = operands(1, 1, 2, 4)
    expected, _ = natively(client, tensors)
    answer = triton.infer(
        "sdpa", tensors, sequence_id=7, sequence_start=True, sequence_end=True, priority=1, timeout=60_000_000
    )
    assert_same_bits(answer.outputs, expected)
    assert "ignored" not in answer.parameters


@pytest.mark.parametrize("request_id", ["", "1", 'with "quotes" and \\', "Ünïcödé ✓ 日本", "x" * 1000])
def test_the_id_comes_back_as_sent(triton: Client, request_id: str) -> None:
    for _ in range(2):
        assert triton.infer("sdpa", operands(1, 1, 2, 16), ["context"], request_id=request_id).id == request_id


def test_outputs_come_in_the_asked_order_and_no_others(triton: Client) -> None:
    for names in (["logsumexp", "context"], ["weights"], ["entropy", "scores", "context"]):
        assert list(triton.infer("attention", operands(1, 1, 2, 4), names).outputs) == names


def test_self_attention_leaves_key_and_value_out(triton: Client, client: httpx.Client) -> None:
    tensors = {"query": make_tensor(1, 2, 5, 16)}
    expected, _ = natively(client, tensors)
    assert_same_bits(triton.infer("attention", tensors, ["context"]).outputs, expected)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4)])
def test_nothing_in_a_tensor_is_a_tensor(triton: Client, client: httpx.Client, shape: tuple[int, ...]) -> None:
    tensors = operands(*shape)
    expected, _ = natively(client, tensors)
    assert_same_bits(triton.infer("sdpa", tensors, ["context"]).outputs, expected)


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {{"key": "keys"}.get(name, name): tensor for name, tensor in tensors.items()}


PLAIN = operands(1, 2, 3, 4)
FAULTS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("an unknown input", {"model": "sdpa", "tensors": _renamed(PLAIN)}, ("keys", "key:")),
    ("a missing input", {"model": "sdpa", "tensors": {"query": PLAIN["query"]}}, ("key", "value")),
    ("another datatype", {"model": "sdpa_fp16", "tensors": PLAIN}, ("query.datatype", "FP16", "FP32")),
    ("heads that disagree", {"model": "sdpa", "tensors": PLAIN | {"key": make_tensor(1, 3, 3, 4)}}, ("key",)),
    ("widths that disagree", {"model": "sdpa", "tensors": PLAIN | {"key": make_tensor(1, 2, 3, 5)}}, ("key", "4")),
    ("a mask of numbers", {"model": "attention", "tensors": PLAIN | {"allow_mask": torch.ones(3, 3)}}, ("BOOL",)),
    ("a length beyond the keys", {"model": "attention", "tensors": PLAIN | {"key_lengths": torch.tensor([4])}},
     ("key_lengths",)),
    ("rank 5", {"model": "sdpa", "tensors": {"query": torch.ones(1, 1, 1, 1, 1)}}, ("query",)),
    ("an unknown output", {"model": "sdpa", "tensors": PLAIN, "outputs": ["weights"]}, ("weights", "context")),
    ("a bad option", {"model": "sdpa", "tensors": PLAIN, "parameters": {"softcap": -1.0}}, ("softcap",)),
    ("a bad side of the window", {"model": "sdpa", "tensors": PLAIN, "parameters": {"window_left": -1}},
     ("window_left",)),
    ("an option as text", {"model": "sdpa", "tensors": PLAIN, "parameters": {"scale": "1"}}, ("scale",)),
    ("a layer's option", {"model": "sdpa", "tensors": PLAIN, "parameters": {"weight_layout": "in_out"}},
     ("weight_layout",)),
    ("a native option", {"model": "sdpa", "tensors": PLAIN, "parameters": {"window": 3}}, ("window_left",)),
    ("dropout", {"model": "sdpa", "tensors": PLAIN, "parameters": {"dropout_p": 0.1}}, ("dropout_p",)),
    ("two faults", {"model": "sdpa", "tensors": PLAIN, "parameters": {"softcap": -1.0, "path": "fastest"}},
     ("2 faults", "softcap", "path")),
    ("an empty row that is an error", {
        "model": "attention", "tensors": PLAIN | {"allow_mask": torch.zeros(1, 1, 3, 3, dtype=torch.bool)},
        "parameters": {"empty_rows": "error"}}, ("[0,0,0]",)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "fragments"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_faults_of_the_client_are_told_whole(triton: Client, given: dict[str, Any], fragments: tuple[str, ...]) -> None:
    with pytest.raises(InferenceServerException) as refused:
        triton.infer(**given)
    assert status_of(refused.value) == ("INVALID_ARGUMENT" if triton.is_grpc else "400")
    for fragment in fragments:
        assert fragment in refused.value.message()
    assert triton.call("is_server_ready")


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("get_model_metadata", ("nothing",)),
        ("get_model_metadata", ("sdpa", "2")),
        ("get_model_config", ("nothing",)),
        ("get_inference_statistics", ("nothing",)),
    ],
)
def test_unknown_models_and_versions_are_not_found(triton: Client, method: str, arguments: tuple[str, ...]) -> None:
    with pytest.raises(InferenceServerException) as refused:
        triton.call(method, *arguments)
    assert status_of(refused.value) == ("NOT_FOUND" if triton.is_grpc else "404")


@pytest.mark.parametrize(("model", "version"), [("nothing", ""), ("sdpa", "2")])
def test_inference_of_an_unknown_model_is_not_found(triton: Client, model: str, version: str) -> None:
    with pytest.raises(InferenceServerException) as refused:
        triton.infer(model, PLAIN, model_version=version)
    assert status_of(refused.value) == ("NOT_FOUND" if triton.is_grpc else "404")


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bodies_are_compressed_both_ways(triton_http: Client, client: httpx.Client, coding: str) -> None:
    tensors = {name: tensor.round() for name, tensor in operands(1, 4, 64, 16).items()}
    expected, _ = natively(client, tensors, outputs=["context", "weights"])
    for binary in (True, False):
        answer = triton_http.infer(
            "attention",
            tensors,
            ["context", "weights"],
            binary=binary,
            request_compression_algorithm=coding,
            response_compression_algorithm=coding,
        )
        assert_same_bits(answer.outputs, expected)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_messages_are_compressed(triton_grpc: Client, client: httpx.Client, coding: str) -> None:
    tensors = operands(1, 4, 64, 16)
    expected, _ = natively(client, tensors)
    answer = triton_grpc.infer("sdpa", tensors, compression_algorithm=coding)
    assert_same_bits(answer.outputs, expected)


def test_an_answer_of_eight_mebibytes_comes_whole(triton: Client, client: httpx.Client) -> None:
    """SIZE-05: both sides of tritonclient's gRPC raise the limit that gRPC has by itself."""
    tensors = operands(1, 8, 512, 8)
    expected, _ = natively(client, tensors, outputs=["weights"])
    assert_same_bits(triton.infer("attention", tensors, ["weights"]).outputs, expected)


def test_statistics_count_answers_and_no_refusals(triton: Client) -> None:
    def figures() -> dict[str, Any]:
        (found,) = triton.as_json("get_inference_statistics", "attention_fp64")["model_stats"]
        assert found["name"] == "attention_fp64" and found["version"] == "1"
        return dict(found)

    def count(found: dict[str, Any], name: str) -> int:
        return int(found["inference_stats"][name].get("count", 0))

    tensors = operands(1, 1, 2, 4, dtype=torch.float64)
    triton.infer("attention_fp64", tensors)
    before = figures()
    for _ in range(3):
        triton.infer("attention_fp64", tensors)
    with pytest.raises(InferenceServerException):
        triton.infer("attention_fp64", tensors, ["nothing"])
    after = figures()
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert count(after, name) - count(before, name) == 3
    assert count(after, "fail") == count(before, "fail")
    assert int(after["inference_count"]) - int(before["inference_count"]) == 3
    assert int(after["last_inference"]) >= int(before["last_inference"]) > 1.6e12
    assert set(after["inference_stats"]) >= {"cache_hit", "cache_miss"} or triton.is_grpc
    listed = triton.as_json("get_inference_statistics")["model_stats"]
    assert sorted(model["name"] for model in listed) == NAMES
