"""Layers that are kept by a name, as callers see them over HTTP."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from attn_core.problem import LayerParameters
from tests.support.bodies import JSON, SAFETENSORS, list_body, object_body, read_answer, safetensors_body, strict_json
from tests.support.factory import make_mask, make_tensor
from tests.support.kept_layers import make_parameters, num_bytes, options_of
from tests.support.roads import figure
from tests.support.server import running_server, server_environment

_numbers = itertools.count()
BODIES = {"lists": (list_body, JSON), "base64": (object_body, JSON), "safetensors": (safetensors_body, SAFETENSORS)}
FORMS = pytest.mark.parametrize("form", list(BODIES))


@pytest.fixture
def name(client: httpx.Client) -> Iterator[str]:
    """A name that no layer has, and none keeps."""
    free = f"test.layer-{next(_numbers)}"
    yield free
    assert client.delete(f"/v1/layers/{free}").status_code in (204, 404)


def put(
    client: httpx.Client,
    name: str,
    parameters: LayerParameters,
    *,
    form: str = "safetensors",
    query: str = "",
    **headers: str,
) -> httpx.Response:
    body, content_type = BODIES[form]
    content = body(dict(parameters.weights), options_of(parameters))
    sent = {"content-type": content_type} | {key.replace("_", "-"): text for key, text in headers.items()}
    return client.put(f"/v1/layers/{name}{query}", content=content, headers=sent)


def refused(answer: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = strict_json(answer.content)
    assert problem["type"] == f"/errors/{kind}"
    assert problem["status"] == status
    return problem


def faults_of(answer: httpx.Response) -> dict[str, tuple[str, str]]:
    """(expected, received) by field."""
    errors = refused(answer, 422, "invalid")["errors"]
    assert len({error["field"] for error in errors}) == len(errors)
    return {error["field"]: (error["expected"], error["received"]) for error in errors}


def described(name: str, parameters: LayerParameters) -> dict[str, Any]:
    return {
        "name": name,
        "num_heads": parameters.num_heads,
        "num_kv_heads": parameters.num_kv_heads or parameters.num_heads,
        "weight_layout": parameters.weight_layout,
        "dtype": str(parameters.weights["w_query"].dtype).removeprefix("torch."),
        "shapes": {key: list(tensor.shape) for key, tensor in parameters.weights.items()},
        "parameters": sum(tensor.numel() for tensor in parameters.weights.values()),
    }


@FORMS
def test_a_layer_is_put_shown_listed_and_deleted(client: httpx.Client, name: str, form: str) -> None:
    parameters = make_parameters(num_heads=4, num_kv_heads=2, weight_layout="out_in")
    path = f"/v1/layers/{name}"
    refused(client.get(path), 404, "not-found")
    answer = put(client, name, parameters, form=form)
    assert answer.status_code == 201
    assert answer.headers["content-type"] == JSON
    assert answer.json() == client.get(path).json() == described(name, parameters)
    listed = client.get("/v1/layers").json()
    assert listed.keys() == {"layers"}
    assert described(name, parameters) in listed["layers"]
    assert [layer["name"] for layer in listed["layers"]] == sorted(layer["name"] for layer in listed["layers"])
    gone = client.delete(path)
    assert (gone.status_code, gone.content) == (204, b"")
    for method in ("GET", "DELETE"):
        refused(client.request(method, path), 404, "not-found")
    assert name not in client.get("/v1/layers").text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_form_of_the_same_content_is_the_same_content(
    client: httpx.Client, name: str, dtype: torch.dtype
) -> None:
    parameters = make_parameters(dtype=dtype)
    statuses = [put(client, name, parameters, form=form).status_code for form in (*BODIES, *BODIES)]
    assert statuses == [201, 200, 200, 200, 200, 200]
    assert client.get(f"/v1/layers/{name}").json() == described(name, parameters)


def test_other_content_needs_to_say_that_it_replaces(client: httpx.Client, name: str) -> None:
    old, new = make_parameters(seed=1), make_parameters(seed=2, biases=False)
    put(client, name, old)
    for query in ("", "?replace=false"):
        problem = refused(put(client, name, new, query=query), 409, "conflict")
        assert "replace=true" in problem["detail"]
        assert client.get(f"/v1/layers/{name}").json() == described(name, old)
    answer = put(client, name, new, query="?replace=true")
    assert answer.status_code == 200
    assert answer.json() == client.get(f"/v1/layers/{name}").json() == described(name, new)
    assert put(client, name, new).status_code == 200


@FORMS
def test_a_gzipped_layer_is_read(client: httpx.Client, name: str, form: str) -> None:
    parameters = make_parameters()
    body, content_type = BODIES[form]
    content = gzip.compress(body(dict(parameters.weights), options_of(parameters)))
    headers = {"content-type": content_type, "content-encoding": "gzip"}
    answer = client.put(f"/v1/layers/{name}", content=content, headers=headers)
    assert answer.status_code == 201
    assert put(client, name, parameters).status_code == 200


@FORMS
def test_a_long_body_is_read_beside_the_loop(client: httpx.Client, name: str, form: str) -> None:
    parameters = make_parameters(width=96, head_dim=48, output_width=96)
    assert put(client, name, parameters, form=form).status_code == 201
    assert put(client, name, parameters, form="base64").status_code == 200
    tensors = dict(parameters.weights) | {"w_key": parameters.weights["w_key"].clone()}
    tensors["w_key"][5, 7] = float("-inf")
    body, content_type = BODIES[form]
    content = body(tensors, options_of(parameters))
    answer = client.put(f"/v1/layers/{name}?replace=true", content=content, headers={"content-type": content_type})
    assert faults_of(answer) == {"w_key.5.7": ("a finite number", "-Infinity")}
    assert put(client, name, parameters).status_code == 200


@pytest.mark.parametrize("accept", ["application/json", "application/*", "*/*", "text/html, */*;q=0.1", ""])
def test_answers_are_json_whatever_the_body_was(client: httpx.Client, name: str, accept: str) -> None:
    assert put(client, name, make_parameters(), accept=accept).headers["content-type"] == JSON
    for path in ("/v1/layers", f"/v1/layers/{name}"):
        assert client.get(path, headers={"accept": accept}).headers["content-type"] == JSON


def test_other_forms_are_refused(client: httpx.Client, name: str) -> None:
    for accept in (SAFETENSORS, "text/html"):
        problem = refused(put(client, name, make_parameters(), accept=accept), 406, "not-acceptable")
        assert problem["errors"][0]["expected"] == JSON
        refused(client.get("/v1/layers", headers={"accept": accept}), 406, "not-acceptable")
    path = f"/v1/layers/{name}"
    refused(client.put(path, content=b"{}", headers={"content-type": "text/plain"}), 415, "media-type")
    refused(client.put(path, json={}, headers={"content-encoding": "br"}), 415, "media-type")
    refused(client.put(path, content=b"{", headers={"content-type": JSON}), 400, "malformed")
    refused(client.put(path, content=b"{", headers={"content-type": SAFETENSORS}), 400, "malformed")
    refused(client.get(path), 404, "not-found")


def test_a_long_list_is_gzipped_for_whoever_likes_it(client: httpx.Client, name: str) -> None:
    put(client, name, make_parameters())
    others = [f"{name}-{number}" for number in range(4)]
    for other in others:
        put(client, other, make_parameters())
    answer = client.get("/v1/layers", headers={"accept-encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.json() == client.get("/v1/layers", headers={"accept-encoding": "identity"}).json()
    for other in others:
        client.delete(f"/v1/layers/{other}")


BAD_NAMES = ["1a", "-a", "a%20b", "a%0a", "%C3%A9", "a%00", "a" * 65, "a:b", "%2e", "%2e%2e", "a%5Cb"]
RESERVED_NAMES = ["sdpa", "attention_bf16", "attention_gradients", "attention_gradients_fp64", "layer", "stats"]


@pytest.mark.parametrize("bad", BAD_NAMES + RESERVED_NAMES)
def test_a_bad_name_is_refused(client: httpx.Client, bad: str) -> None:
    request = client.build_request(
        "PUT",
        "/v1/layers/x",
        content=safetensors_body(dict(make_parameters().weights), options_of(make_parameters())),
        headers={"content-type": SAFETENSORS},
    )
    before = client.get("/v1/layers").json()
    # httpx would resolve dots.
    request.url = request.url.copy_with(raw_path=f"/v1/layers/{bad}".encode())
    answer = client.send(request)
    (field,) = faults_of(answer)
    assert field == "name"
    assert client.get("/v1/layers").json() == before


@pytest.mark.parametrize("path", ["/v1/layers/", "/v1/layers/a/b", "/v1/layers/a%2Fb", "/v1/layers/a/"])
def test_a_path_that_is_none_is_not_found(client: httpx.Client, path: str) -> None:
    refused(client.get(path), 404, "not-found")
    refused(client.put(path, json={}), 404, "not-found")


def test_every_fault_of_an_upload_is_named_at_once(client: httpx.Client) -> None:
    members = {
        "w_query": [[1, "NaN"], ["Infinity", 4]],
        "w_key": [[1, 2], [3]],
        "w_output": [[1, 0], [0, 1]],
        "num_heads": 0,
        "input": [[1, 2]],
        "causal": True,
    }
    faults = faults_of(client.put("/v1/layers/2nd?replace=yes&force", json=members))
    assert set(faults) == {
        *("w_query.0.1", "w_query.1.0", "w_key.1", "w_value", "num_heads", "weight_layout"),
        *("input", "causal", "name", "?replace", "?force"),
    }
    assert "in_out" in faults["weight_layout"][0]
    assert "out_in" in faults["weight_layout"][0]


@pytest.mark.parametrize(
    "query", ["replace=1", "replace=", "replace=True", "replace=true&replace=true", "Replace=true"]
)
def test_replace_is_true_or_false_once(client: httpx.Client, name: str, query: str) -> None:
    put(client, name, make_parameters(seed=1))
    faults = faults_of(put(client, name, make_parameters(seed=2), query=f"?{query}"))
    assert set(faults) == {"?" + query.split("=")[0]}
    assert put(client, name, make_parameters(seed=1)).status_code == 200


def test_nothing_else_in_the_url_is_taken(client: httpx.Client, name: str) -> None:
    put(client, name, make_parameters())
    path = f"/v1/layers/{name}"
    asked = [
        client.get(f"{path}?verbose=1"),
        client.get("/v1/layers?verbose=1"),
        client.delete(f"{path}?replace=true"),
        client.post(f"{path}/forward?replace=true", json={"input": [[0] * 6]}),
    ]
    for answer, field in zip(asked, ["?verbose", "?verbose", "?replace", "?replace"], strict=True):
        assert set(faults_of(answer)) == {field}
    assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/layers", "GET"),
        ("/v1/layers/any", "DELETE, GET, PUT"),
        ("/v1/layers/any/forward", "POST"),
        ("/v1/layers/any/gradients", "POST"),
    ],
)
def test_other_methods_are_refused_with_those_that_are_taken(client: httpx.Client, path: str, methods: str) -> None:
    for method in {"GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "HEAD"} - set(methods.split(", ")):
        answer = client.request(method, path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == methods


# Computing with what is kept


def tensors_for(parameters: LayerParameters, *, has_memory: bool, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    is_out_in = parameters.weight_layout == "out_in"
    width = parameters.weights["w_query"].shape[1 if is_out_in else 0]
    tensors = {"input": make_tensor(2, 5, width, seed=seed, dtype=dtype)}
    if has_memory:
        memory_width = parameters.weights["w_key"].shape[1 if is_out_in else 0]
        tensors["memory"] = make_tensor(2, 7, memory_width, seed=seed + 1, dtype=dtype)
        tensors["allow_mask"] = make_mask(2, 1, 5, 7, seed=seed + 2)
    return tensors


ASKED: list[tuple[dict[str, Any], bool, dict[str, Any]]] = [
    ({}, False, {"causal": True}),
    ({"num_heads": 4, "num_kv_heads": 2}, False, {"window": {"left": 2}, "query_offset": 0, "softcap": 3.0}),
    ({"memory_width": 9, "weight_layout": "out_in"}, True, {"outputs": ["output", "context", "weights", "query"]}),
    ({"biases": False, "dtype": torch.float64}, False, {"outputs": ["output", "entropy"], "scale": 0.5}),
    ({"dtype": torch.bfloat16, "weight_layout": "out_in"}, False, {}),
]


@pytest.mark.parametrize(("made", "has_memory", "options"), ASKED)
@pytest.mark.parametrize("verb", ["forward", "gradients"])
def test_a_layer_that_is_kept_answers_as_one_that_is_sent_bit_for_bit(
    client: httpx.Client, name: str, verb: str, made: dict[str, Any], has_memory: bool, options: dict[str, Any]
) -> None:
    parameters = make_parameters(seed=3, **made)
    put(client, name, parameters)
    dtype = parameters.weights["w_query"].dtype
    tensors = tensors_for(parameters, has_memory=has_memory, dtype=dtype, seed=50)
    if verb == "gradients":
        options = {key: value for key, value in options.items() if key != "outputs"}
        tensors["grad_output"] = make_tensor(2, 5, 4, seed=60, dtype=dtype)
    headers = {"content-type": SAFETENSORS}
    kept = client.post(f"/v1/layers/{name}/{verb}", content=safetensors_body(tensors, options), headers=headers)
    assert kept.status_code == 200, kept.text
    whole = safetensors_body(tensors | dict(parameters.weights), options | options_of(parameters))
    path = "/v1/layer" if verb == "forward" else "/v1/layer/gradients"
    sent = client.post(path, content=whole, headers=headers)
    (found, found_info), (expected, info) = (read_answer(a.content, SAFETENSORS, {}) for a in (kept, sent))
    assert found.keys() == expected.keys()
    for output, tensor in expected.items():
        assert torch.equal(found[output].view(torch.uint8), tensor.view(torch.uint8)), output
    assert {**found_info, "queue_ms": 0, "compute_ms": 0} == {**info, "queue_ms": 0, "compute_ms": 0}


def test_the_worked_example_runs_with_a_layer_that_is_kept(client: httpx.Client, name: str) -> None:
    unit = [[1, 0], [0, 1]]
    weights = {"w_query": unit, "w_key": unit, "w_value": unit, "w_output": [[1, 1], [0, 2]]}
    members = {**weights, "weight_layout": "in_out", "num_heads": 2}
    assert client.put(f"/v1/layers/{name}", json=members).status_code == 201
    asked = {"input": unit, "causal": True, "outputs": ["output", "context", "weights"]}
    answer = client.post(f"/v1/layers/{name}/forward", json=asked).json()
    assert answer["output"] == [[1, 1], [0.5, pytest.approx(1.96212, abs=1e-5)]]
    assert answer["context"] == [[1, 0], [0.5, pytest.approx(0.73106, abs=1e-5)]]
    assert answer["weights"][1] == [[1, 0], pytest.approx([0.26894, 0.73106], abs=1e-5)]


def test_what_is_kept_is_not_accepted_again(client: httpx.Client, name: str) -> None:
    put(client, name, make_parameters())
    members = {"input": [[0] * 6], "w_query": [[1.0]], "b_key": [0], "num_heads": 2, "weight_layout": "in_out"}
    faults = faults_of(client.post(f"/v1/layers/{name}/forward", json=members))
    assert set(faults) == {"w_query", "b_key", "num_heads", "weight_layout"}
    assert all("stored layer" in expected for expected, _ in faults.values())


def test_an_input_that_does_not_fit_the_layer_is_refused(client: httpx.Client, name: str) -> None:
    put(client, name, make_parameters(width=6))
    faults = faults_of(client.post(f"/v1/layers/{name}/forward", json={"input": [[0] * 5]}))
    assert faults
    assert not client.post(f"/v1/layers/{name}/forward", json={"input": [[0] * 6]}).is_error


@pytest.mark.parametrize("verb", ["forward", "gradients"])
def test_a_layer_that_is_not_there_computes_nothing(client: httpx.Client, verb: str) -> None:
    problem = refused(client.post(f"/v1/layers/nobody/{verb}", json={"input": [[0]]}), 404, "not-found")
    assert "nobody" in problem["detail"]


def test_layers_are_counted_and_no_name_becomes_a_series(client: httpx.Client, name: str) -> None:
    parameters = make_parameters()
    before = figure(client, "attn_named_layers"), figure(client, "attn_named_layer_bytes")
    put(client, name, parameters)
    assert figure(client, "attn_named_layers") == before[0] + 1
    assert figure(client, "attn_named_layer_bytes") == before[1] + num_bytes(parameters)
    text = client.get("/metrics").text
    assert name not in text
    assert 'route="/v1/layers/{name}"' in text
    assert 'route="/v1/layers/{name}/forward"' in text


def test_the_examples_of_the_document_run(client: httpx.Client, name: str) -> None:
    document = client.get("/openapi.json").json()
    paths = {path: item for path, item in document["paths"].items() if path.startswith("/v1/layers")}
    assert {(method, path) for path, item in paths.items() for method in item} == {
        ("get", "/v1/layers"),
        ("get", "/v1/layers/{name}"),
        ("put", "/v1/layers/{name}"),
        ("delete", "/v1/layers/{name}"),
        ("post", "/v1/layers/{name}/forward"),
        ("post", "/v1/layers/{name}/gradients"),
    }
    for method, path in (
        ("put", "/v1/layers/{name}"),
        ("post", "/v1/layers/{name}/forward"),
        ("post", "/v1/layers/{name}/gradients"),
    ):
        for example in paths[path][method]["requestBody"]["content"][JSON]["examples"].values():
            answer = client.request(method, path.format(name=name), json=example["value"])
            assert answer.status_code == (201 if method == "put" else 200), answer.text


# Servers of their own


def test_the_budget_is_kept_over_http() -> None:
    parameters = make_parameters()
    size = num_bytes(parameters)
    with (
        running_server(ATTN_LAYER_BUDGET_BYTES=str(2 * size - 1), ATTN_MAX_BODY_BYTES="4096") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert put(client, "first", parameters).status_code == 201
        problem = refused(put(client, "second", parameters), 413, "too-large")
        assert (problem["needed_bytes"], problem["allowed_bytes"]) == (size, size - 1)
        assert [layer["name"] for layer in client.get("/v1/layers").json()["layers"]] == ["first"]
        assert put(client, "first", make_parameters(seed=2), query="?replace=true").status_code == 200
        assert client.delete("/v1/layers/first").status_code == 204
        assert put(client, "second", parameters).status_code == 201
        # The body's own limit comes first.
        refused(put(client, "third", make_parameters(width=64)), 413, "too-large")


def test_layers_outlive_the_server(tmp_path: Path) -> None:
    first, second = make_parameters(seed=1, dtype=torch.float16), make_parameters(seed=2, num_heads=4, num_kv_heads=1)
    asked = {"input": make_tensor(1, 3, 6, seed=9, dtype=torch.float16)}

    def forward(client: httpx.Client) -> bytes:
        body = safetensors_body(asked, {"causal": True})
        answer = client.post("/v1/layers/first/forward", content=body, headers={"content-type": SAFETENSORS})
        assert answer.status_code == 200, answer.text
        return answer.content[8 + int.from_bytes(answer.content[:8], "little") :]

    with (
        running_server(ATTN_LAYER_DIRECTORY=str(tmp_path)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert put(client, "first", second).status_code == 201
        assert put(client, "first", first, query="?replace=true").status_code == 200
        assert put(client, "second", second, form="lists").status_code == 201
        assert put(client, "third", second).status_code == 201
        assert client.delete("/v1/layers/third").status_code == 204
        listed, bits = client.get("/v1/layers").json(), forward(client)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.safetensors", "second.safetensors"]
    whole = (tmp_path / "second.safetensors").read_bytes()
    (tmp_path / "damaged.safetensors").write_bytes(whole[:-1])
    (tmp_path / "sdpa.safetensors").write_bytes(whole)
    (tmp_path / ".attn-x.unfinished").write_bytes(whole[:100])
    with (
        running_server(ATTN_LAYER_DIRECTORY=str(tmp_path)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert client.get("/v1/layers").json() == listed
        assert [layer["name"] for layer in listed["layers"]] == ["first", "second"]
        assert forward(client) == bits
        assert put(client, "first", first).status_code == 200
        told = {entry["message"] for entry in server.log if entry["level"] == "warning"}
        # The file may be worth something to somebody: it goes only where that is said.
        assert put(client, "damaged", second).status_code == 409
        assert put(client, "damaged", second, query="?replace=true").status_code == 201
    for name in ("damaged.safetensors", "sdpa.safetensors", ".attn-x.unfinished"):
        assert any(str(tmp_path / name) in message for message in told), told
    assert (tmp_path / "damaged.safetensors").read_bytes() == whole


def test_a_directory_that_cannot_be_used_stops_the_start_and_is_named(tmp_path: Path) -> None:
    directory = str(tmp_path / "nowhere")
    ended = subprocess.run(
        [sys.executable, "-m", "service", "serve", "--port", "0", "--grpc-port", "0"],
        env=server_environment(ATTN_LAYER_DIRECTORY=directory),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode != 0
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("attn: ")]
    assert line.startswith(f"attn: ATTN_LAYER_DIRECTORY: layers cannot be kept in {directory}: ")


def test_layers_ask_for_a_key_where_keys_are_set() -> None:
    headers = {"content-type": SAFETENSORS}
    body = safetensors_body(dict(make_parameters().weights), options_of(make_parameters()))
    calls = [
        ("GET", "/v1/layers", b""),
        ("PUT", "/v1/layers/first", body),
        ("GET", "/v1/layers/first", b""),
        ("POST", "/v1/layers/first/forward", safetensors_body({"input": torch.ones(1, 6)}, {})),
        ("DELETE", "/v1/layers/first", b""),
    ]
    with running_server(ATTN_API_KEYS="one-key") as server, httpx.Client(base_url=server.url) as client:
        for method, path, content in calls:
            refused(client.request(method, path, content=content, headers=headers), 401, "unauthenticated")
        for method, path, content in calls:
            answer = client.request(method, path, content=content, headers=headers | {"x-api-key": "one-key"})
            assert answer.is_success, json.dumps(answer.text)
