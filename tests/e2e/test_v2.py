"""The Open Inference Protocol over HTTP, as bytes that anybody's client could send to a real server."""

from __future__ import annotations

import gzip
import json
import math
import socket
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from tests.support.bodies import SAFETENSORS, safetensors_body
from tests.support.bodies import read_answer as read_native
from tests.support.inference import LENGTH, binary_body, json_body, raw, read_answer, said
from tests.support.server import RunningServer

INFER = "/v2/models/sdpa/infer"
SUFFIXES = {torch.float32: "", torch.float64: "_fp64", torch.float16: "_fp16", torch.bfloat16: "_bf16"}
BINARY = {"binary_data_output": True}
EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "parameters", "statistics"]


def qkv(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (1, 2, 5, 8)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name in ("query", "key", "value")}


def native(client: httpx.Client, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    headers = {"content-type": SAFETENSORS}
    answer = client.post("/v1/attention", content=safetensors_body(tensors, options), headers=headers)
    assert answer.status_code == 200, answer.text
    return read_native(answer.content, SAFETENSORS, {})[0]


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in tensors.items()}


def refused(answer: httpx.Response, status: int) -> str:
    """The text of a refusal in the protocol's form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert "content-encoding" not in answer.headers
    members = answer.json()
    assert list(members) == ["error"]
    text: str = members["error"]
    return text


# What the service says of itself


def test_the_server_announces_what_it_serves(client: httpx.Client) -> None:
    members = client.get("/v2").json()
    assert set(members) == {"name", "version", "extensions"}
    assert members["extensions"] == EXTENSIONS


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/v2/models/sdpa/ready", {"name": "sdpa", "ready": True}),
        ("/v2/models/sdpa/versions/1/ready", {"name": "sdpa", "ready": True}),
    ],
)
def test_health_is_a_status_and_a_body(client: httpx.Client, method: str, path: str, body: Any) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 200
    assert method == "HEAD" or answer.json() == body


def test_models_are_listed_by_name_and_by_state(client: httpx.Client) -> None:
    names = client.get("/v2/models").json()["models"]
    assert {"sdpa", "attention", "sdpa_bf16"} <= set(names)
    for path in ("/v2/repository/index", "/v2/repository/any/index"):
        for body in (b"", b"{}", b'{"ready":true}', b'{"ready":null,"x":1}'):
            index = client.post(path, content=body).json()
            assert index == [{"name": name, "version": "1", "state": "READY"} for name in names]
    assert "ready" in refused(client.post("/v2/repository/index", content=b'{"ready":1}'), 400)
    for body in (b"[]", b"{", b'{"ready":true,"ready":true}'):
        refused(client.post("/v2/repository/index", content=body), 400)


@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_a_model_says_what_it_takes_and_gives(client: httpx.Client, version: str) -> None:
    metadata = client.get(f"/v2/models/attention{version}").json()
    assert metadata["versions"] == ["1"]
    assert {"name": "allow_mask", "datatype": "BOOL", "shape": [-1] * 4} in metadata["inputs"]
    configuration = client.get(f"/v2/models/attention{version}/config").json()
    assert configuration["max_batch_size"] == 0
    assert [each["name"] for each in configuration["input"]] == [each["name"] for each in metadata["inputs"]]
    assert [each["dims"] for each in configuration["output"]] == [each["shape"] for each in metadata["outputs"]]


@pytest.mark.parametrize(
    "model", ["nope", "sdpa/versions/2", "sdpa/versions/x", "sd%20pa", "sd%2Fpa", "stats/versions/1"]
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("GET", "/ready"), ("GET", "/config"), ("GET", "/stats"), ("POST", "/infer")]
)
def test_an_unknown_model_or_version_is_not_found(client: httpx.Client, model: str, method: str, path: str) -> None:
    refused(client.request(method, f"/v2/models/{model}{path}"), 404)


def test_names_in_a_path_may_be_escaped(client: httpx.Client) -> None:
    assert client.get("/v2/models/sd%70a").json()["name"] == "sdpa"


def test_an_unknown_model_is_refused_before_its_body_is_read(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"POST /v2/models/nope/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 404"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/", 404),
        ("GET", "/v2/nope", 404),
        ("POST", "/v2/models/sdpa/explain", 404),
        ("GET", "/v2/models/sdpa/versions/1/trace/setting", 404),
        ("POST", "/v2", 405),
        ("GET", "/v2/models/sdpa/infer", 405),
        ("GET", "/v2/repository/index", 405),
        ("DELETE", "/v2/models/sdpa", 405),
        ("POST", "/v2/health/live", 405),
        ("POST", "/v2/repository/models/sdpa/load", 503),
        ("POST", "/v2/repository/models/sdpa/unload", 503),
        ("POST", "/v2/repository/any/models/nope/load", 503),
        ("GET", "/v2/cudasharedmemory/status", 501),
        ("GET", "/v2/cudasharedmemory/region/r/status", 501),
        ("POST", "/v2/cudasharedmemory/region/r/register", 501),
        ("POST", "/v2/cudasharedmemory/region/r/unregister", 501),
        ("POST", "/v2/cudasharedmemory/unregister", 501),
        ("GET", "/v2/trace/setting", 501),
        ("POST", "/v2/models/sdpa/trace/setting", 501),
        ("GET", "/v2/logging", 501),
        ("POST", "/v2/logging", 501),
        ("GET", "/v2/systemsharedmemory/status", 501),
        ("GET", "/v2/systemsharedmemory/region/r/status", 501),
        ("POST", "/v2/systemsharedmemory/region/r/register", 501),
        ("POST", "/v2/systemsharedmemory/region/r/unregister", 501),
        ("POST", "/v2/systemsharedmemory/unregister", 501),
    ],
)
def test_every_refusal_is_one_text_in_json(client: httpx.Client, method: str, path: str, status: int) -> None:
    answer = client.request(method, path, headers={"accept": "text/html", "accept-encoding": "gzip"})
    assert refused(answer, status)
    assert ("allow" in answer.headers) is (status == 405)


def test_a_head_that_cannot_be_read_is_refused_in_the_form_of_its_path(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"GET /v2/models?x HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n")
        reply = b""
        while part := connection.recv(65536):
            reply += part
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"content-type: application/json\r\n" in head + b"\r\n"
    assert list(json.loads(body)) == ["error"]


# Inference


@pytest.mark.parametrize("dtype", list(SUFFIXES))
@pytest.mark.parametrize("shape", [(1, 2, 5, 8), (2, 1, 40, 64), (1, 1, 300, 24)])
def test_every_form_of_a_problem_gives_the_same_bits(
    client: httpx.Client, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensors = qkv(*shape, dtype=dtype)
    wanted = bits(native(client, tensors))
    path = f"/v2/models/sdpa{SUFFIXES[dtype]}/infer"
    body, headers = binary_body(tensors, parameters=BINARY)
    members, outputs = read_answer(client.post(path, content=body, headers=headers))
    assert bits(outputs) == wanted
    assert members["model_name"] == f"sdpa{SUFFIXES[dtype]}" and members["model_version"] == "1"
    assert "id" not in members
    if dtype.itemsize >= 4:
        for body, headers in ((json_body(tensors), {}), (binary_body(tensors))):
            answer = client.post(path, content=body, headers=headers)
            assert LENGTH not in answer.headers
            assert bits(read_answer(answer)[1]) == wanted
        answer = client.post(path, content=json_body(tensors, parameters=BINARY))
        assert bits(read_answer(answer)[1]) == wanted


def test_options_and_outputs_are_those_of_the_native_interface(client: httpx.Client) -> None:
    tensors = qkv(1, 4, 6, 8)
    generator = torch.Generator().manual_seed(1)
    more = {
        "allow_mask": torch.rand(1, 1, 6, 6, generator=generator) < 0.7,
        "bias": torch.randn(1, 4, 6, 6, generator=generator),
        "key_lengths": torch.tensor([5]),
        "query_offset": torch.tensor([1]),
        "sinks": torch.randn(4, generator=generator),
    }
    names = ["logsumexp", "weights", "context", "scores", "logits", "entropy"]
    options: dict[str, Any] = {"causal": True, "scale": 0.5, "softcap": 3, "path": "manual"}
    wanted = native(client, tensors | more, outputs=names, window={"left": 3, "right": 1}, **options)
    parameters = options | {"window_left": 3, "window_right": 1}
    outputs = [{"name": name, "parameters": {"binary_data": name in ("weights", "scores")}} for name in names]
    body, headers = binary_body(tensors | more, parameters=parameters, outputs=outputs, id='é\n"')
    members, read = read_answer(client.post("/v2/models/attention/infer", content=body, headers=headers))
    assert members["id"] == 'é\n"'
    assert list(read) == names
    assert bits(read) == bits({name: wanted[name] for name in names})
    assert members["parameters"]["path"] == "manual"


def test_an_empty_row_is_minus_infinity_in_json(client: httpx.Client) -> None:
    mask = torch.tensor([[True, True], [False, False]])
    tensors = {"query": torch.eye(2).view(1, 1, 2, 2), "allow_mask": mask}
    body = json_body(tensors, outputs=[{"name": "logsumexp"}])
    answer = client.post("/v2/models/attention/infer", content=body)
    assert b"-Infinity" in answer.content
    members, read = read_answer(answer)
    assert read["logsumexp"][0, 0, 1] == -math.inf
    assert members["parameters"]["empty_rows"] == 1


def test_nan_goes_in_and_comes_out(client: httpx.Client) -> None:
    tensors = qkv()
    tensors["query"][0, 0, 0, 0] = math.nan
    read = read_answer(client.post(INFER, content=json_body(tensors)))[1]
    assert read["context"].isnan().sum() == 8


def test_all_outputs_come_where_none_is_named(client: httpx.Client) -> None:
    names = [each["name"] for each in client.get("/v2/models/attention").json()["outputs"]]
    members: list[dict[str, Any]] = [{}, {"outputs": []}, {"outputs": None}]
    for outputs in members:
        answer = client.post("/v2/models/attention/infer", content=json_body({"query": qkv()["query"]}, **outputs))
        assert list(read_answer(answer)[1]) == names


@pytest.mark.parametrize("length", [4, 200, 600])
def test_long_text_goes_both_ways_with_every_bit(client: httpx.Client, length: int) -> None:
    tensors = qkv(1, 2, length, 16, seed=length)
    for path in (INFER, "/v2/models/sdpa/versions/1/infer"):
        read = read_answer(client.post(path, content=json_body(tensors)))[1]
        assert bits(read) == bits(native(client, tensors))


def test_long_text_beside_binary_data(client: httpx.Client) -> None:
    tensors = qkv(1, 2, 300, 16)
    inputs = [said("query", tensors["query"], data=tensors["query"].tolist())]
    inputs += [
        said(name, tensors[name], parameters={"binary_data_size": tensors[name].nbytes}) for name in ("key", "value")
    ]
    text = json.dumps({"inputs": inputs}).encode()
    body = text + raw(tensors["key"]) + raw(tensors["value"])
    read = read_answer(client.post(INFER, content=body, headers={LENGTH: str(len(text))}))[1]
    assert bits(read) == bits(native(client, tensors))


@pytest.mark.parametrize(
    "content_type", [None, "", "application/x-www-form-urlencoded", "application/octet-stream", "text/plain; charset=x"]
)
def test_the_content_type_does_not_matter(client: httpx.Client, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    tensors = qkv()
    answer = client.post(f"{INFER}?timeout=5", content=json_body(tensors), headers=headers)
    assert bits(read_answer(answer)[1]) == bits(native(client, tensors))


@pytest.mark.parametrize("size", [7, 4096])
def test_chunks_are_a_body_too(client: httpx.Client, size: int) -> None:
    tensors = qkv()
    body, headers = binary_body(tensors)
    parts = iter([body[at : at + size] for at in range(0, len(body), size)])
    answer = client.post(INFER, content=parts, headers=headers)
    assert bits(read_answer(answer)[1]) == bits(native(client, tensors))


def test_whoever_waits_for_a_hundred_gets_it(server: RunningServer) -> None:
    body = json_body(qkv())
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"


CODINGS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("coding", list(CODINGS))
@pytest.mark.parametrize("length", [5, 400])
def test_a_compressed_body_is_read_whole(client: httpx.Client, coding: str, length: int) -> None:
    tensors = qkv(1, 1, length, 8)
    wanted = bits(native(client, tensors))
    for body, headers in ((json_body(tensors), {}), binary_body(tensors)):
        sent = CODINGS[coding](body)
        for content in (sent, iter([sent[:100], sent[100:]])):
            answer = client.post(INFER, content=content, headers=headers | {"content-encoding": coding})
            assert bits(read_answer(answer)[1]) == wanted


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [("gzip", "gzip"), ("deflate", "deflate"), ("gzip, deflate", None), ("gzip;q=0", None), ("identity", None)],
)
@pytest.mark.parametrize("is_binary", [True, False])
def test_an_answer_is_compressed_where_one_coding_is_named(
    client: httpx.Client, accepted: str, coding: str | None, is_binary: bool
) -> None:
    tensors = {name: torch.zeros(1, 1, 400, 8) for name in ("query", "key", "value")}
    body, headers = binary_body(tensors, parameters={"binary_data_output": is_binary})
    answer = client.post(INFER, content=body, headers=headers | {"accept-encoding": accepted})
    # httpx has inflated it.
    assert answer.headers.get("content-encoding") == coding
    assert bits(read_answer(answer)[1]) == bits({"context": torch.zeros(1, 1, 400, 8)})


def test_nothing_but_inference_is_compressed(client: httpx.Client) -> None:
    for path in ("/v2/models/attention", "/v2/models/attention/config", "/v2/models/stats"):
        answer = client.get(path, headers={"accept-encoding": "gzip"})
        assert len(answer.content) > 1024 and "content-encoding" not in answer.headers


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "zstd"])
def test_other_codings_are_refused_with_those_that_are_served(client: httpx.Client, encoding: str) -> None:
    answer = client.post(INFER, content=json_body(qkv()), headers={"content-encoding": encoding})
    refused(answer, 415)
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", {}, 400),
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b'{"id":"\\ud800"}', {}, 400),
        (b'{"parameters":{"\\ud800":1},"x":1e400}', {}, 400),
        (b'{"x":' + b"[" * 100_000, {}, 400),
        (b"{}", {LENGTH: "0"}, 400),
        (b"{}", {LENGTH: "x"}, 400),
        (b"{}", {LENGTH: "1"}, 400),
        (b"{}", {LENGTH: "3"}, 400),
        (b"{}", {LENGTH: str(2**62)}, 413),
        (b"not gzip", {"content-encoding": "gzip"}, 400),
        (zlib.compress(b"{}", wbits=-15), {"content-encoding": "deflate"}, 400),
        (json_body(qkv() | {"sinks": torch.ones(2)}), {}, 400),
        (json_body(qkv(), parameters={"timeout": -1}), {}, 400),
        (json_body(qkv(), parameters={"timeout_ms": 0.001}), {}, 504),
        (json_body(qkv(), parameters={"colour": 1, "timeout": 10**6, "priority": 0, "sequence_id": 0}), {}, 200),
    ],
)
def test_a_fault_of_the_client_leaves_its_connection_as_it_was(
    server: RunningServer, body: bytes, headers: dict[str, str], status: int
) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as own:
        answer = own.post(INFER, content=body, headers=headers)
        if status == 200:
            assert answer.status_code == 200, answer.text
        else:
            assert refused(answer, status)
        assert own.post(INFER, content=json_body(qkv())).status_code == 200


def test_every_fault_is_in_the_one_text(client: httpx.Client) -> None:
    body = json_body(qkv() | {"sinks": torch.ones(2)}, parameters={"scale": "x"}, outputs=[{"name": "weights"}])
    text = refused(client.post(INFER, content=body), 400)
    assert text.startswith("3 faults: ")
    assert all(name in text for name in ("sinks", "scale", "weights"))


def test_statistics_count_what_was_answered(client: httpx.Client) -> None:
    def counts(path: str) -> dict[str, int]:
        (figures,) = [m for m in client.get(path).json()["model_stats"] if m["name"] == "sdpa_fp64"]
        assert figures["version"] == "1"
        stats = figures["inference_stats"]
        assert stats.keys() == {
            "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
        }  # fmt: skip
        return {name: duration["count"] for name, duration in stats.items()}

    before = counts("/v2/models/sdpa_fp64/stats")
    path = "/v2/models/sdpa_fp64/infer"
    for _ in range(3):
        assert client.post(path, content=json_body(qkv(dtype=torch.float64))).status_code == 200
    refused(client.post(path, content=b"{}"), 400)
    after = counts("/v2/models/stats")
    rises = {name: after[name] - before[name] for name in after}
    assert rises == {
        "success": 3,
        "queue": 3,
        "compute_input": 3,
        "compute_infer": 3,
        "compute_output": 3,
    } | dict.fromkeys(("fail", "cache_hit", "cache_miss"), 0)


def test_metrics_name_routes_and_never_what_a_caller_wrote(client: httpx.Client) -> None:
    client.get("/v2/models/made-up-by-a-caller")
    client.get("/v2/made-up-by-a-caller")
    text = client.get("/metrics").text
    assert "made-up" not in text
    assert 'route="/v2/models/{model}"' in text


def test_the_documents_examples_run(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    described = document["paths"]["/v2/models/{model}/infer"]["post"]
    assert described["tags"] == ["open inference protocol"]
    models = {"gradients": "attention_gradients", "layer": "layer"}
    examples = described["requestBody"]["content"]["application/json"]["examples"]
    assert models.keys() < examples.keys()
    for name, example in examples.items():
        model = models.get(name, "attention")
        assert model in example["summary"]
        assert client.post(f"/v2/models/{model}/infer", json=example["value"]).status_code == 200
    assert {"/v2", "/v2/health/ready", "/v2/models/{model}", "/v2/repository/index"} <= set(document["paths"])


def test_the_contracts_worked_examples_have_its_numbers(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    described = document["paths"]["/v2/models/{model}/infer"]["post"]["requestBody"]["content"]["application/json"]
    expected = {
        "attention_gradients": {
            "grad_query": [-0.39322],
            "grad_key": [-0.39322, 0.39322],
            "grad_value": [0.73106, 0.26894],
        },
        "layer": {"output": [1, 1, 0.5, 1.96212], "weights": [1, 0, 0.5, 0.5, 1, 0, 0.26894, 0.73106]},
    }
    for model, example in (("attention_gradients", "gradients"), ("layer", "layer")):
        asked = described["examples"][example]["value"]
        answer = client.post(f"/v2/models/{model}/infer", json=asked).json()
        found = {output["name"]: output["data"] for output in answer["outputs"]}
        assert found.keys() == expected[model].keys()
        for name, numbers in expected[model].items():
            assert found[name] == pytest.approx(numbers, abs=5e-6), name
