"""POST /v1/attention/plan: what it foresees is what the same request is then told."""

from __future__ import annotations

import functools
import json
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from attn_core import Engine
from attn_core.support import PATHS
from tests.support.bodies import JSON, SAFETENSORS, dtype_name, read_answer, safetensors_body
from tests.support.factory import features, make_problem, make_tensor
from tests.support.in_process import service_in_process
from tests.support.rpc_service import until

FIGURES = {"flops", "bytes_moved", "peak_bytes", "estimated_ms"}


def spec(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}


def specs(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: spec(tensor) for name, tensor in tensors.items()}


def plan(client: httpx.Client, tensors: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/v1/attention/plan", json=specs(tensors) | options)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def info_and_bytes(
    client: httpx.Client, tensors: dict[str, Tensor], options: dict[str, Any], to: str
) -> tuple[dict[str, Any], int]:
    """What the answer says of itself, and how many bytes its tensors have."""
    answer = client.post(to, content=safetensors_body(tensors, options), headers={"content-type": SAFETENSORS})
    assert answer.status_code == 200, answer.text
    outputs, info = read_answer(answer.content, SAFETENSORS, {})
    return info, sum(tensor.nbytes for tensor in outputs.values())


def assert_foreseen(
    client: httpx.Client, tensors: dict[str, Tensor], options: dict[str, Any], to: str = "/v1/attention"
) -> None:
    found = plan(client, tensors, options)
    assert found["admitted"] and found["needed_bytes"] <= found["allowed_bytes"]
    info, num_bytes = info_and_bytes(client, tensors, options, to)
    own = found["paths"][found["path"]]
    assert (found["path"], found["why"]) == (info["path"], info["why"]) == (info["path"], own["why"])
    assert (own["flops"], own["peak_bytes"], found["needed_bytes"]) == (
        info["flops"],
        info["peak_bytes"],
        info["peak_bytes"],
    )
    assert found["answer_bytes"] == num_bytes
    assert tuple(found["paths"]) == PATHS
    for path, one in found["paths"].items():
        if one["supported"]:
            own_info, _ = info_and_bytes(client, tensors, options | {"path": path}, to)
            assert (own_info["path"], own_info["flops"], own_info["peak_bytes"]) == (
                path,
                one["flops"],
                one["peak_bytes"],
            )
            assert one["estimated_ms"] > 0
        else:
            assert all(one[name] is None for name in FIGURES) and one["why"]
            body = safetensors_body(tensors, options | {"path": path})
            refused = client.post(to, content=body, headers={"content-type": SAFETENSORS})
            assert refused.status_code == 422 and one["why"] in refused.text


SHAPES = [(1, 1, 1, 1, 1), (2, 4, 5, 7, 8), (1, 8, 300, 300, 64), (3, 2, 1, 500, 16), (1, 2, 1100, 2100, 8)]
ASKED: dict[str, dict[str, Any]] = {
    "context": {},
    "logsumexp": {"outputs": ["context", "logsumexp"]},
    "weights": {"outputs": ["context", "weights"]},
    "summaries": {"outputs": ["entropy", "weight_totals"]},
    "top": {"outputs": ["top_weights"], "select": {"top_k": 1}},
    "selected weights": {"outputs": ["weights"], "select": {"rows": [0]}},
    "verified": {"verify": True},
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_walk_over_shapes_is_answered_as_planned(client: httpx.Client, shape: tuple[int, ...], asked: str) -> None:
    batch, heads, seq_len_q, seq_len_kv, width = shape
    tensors = {
        "query": make_tensor(batch, heads, seq_len_q, width, seed=1),
        "key": make_tensor(batch, heads, seq_len_kv, width, seed=2),
        "value": make_tensor(batch, heads, seq_len_kv, width, seed=3),
    }
    assert_foreseen(client, tensors, ASKED[asked])


PLANNED_FEATURES = (
    "allow_mask per item",
    "bias of all",
    "both lengths",
    "causal at one offset",
    "alibi",
    "sinks",
    "softcap",
)


@pytest.mark.parametrize("feature", PLANNED_FEATURES)
def test_masks_and_the_like_are_answered_as_planned(client: httpx.Client, feature: str) -> None:
    tensors, options = features()[feature]
    assert_foreseen(client, {**make_problem().tensors(), **tensors}, options)


@pytest.mark.parametrize("outputs", [None, ["grad_query"], ["grad_weights", "grad_key"]])
def test_gradients_are_answered_as_planned(client: httpx.Client, outputs: list[str] | None) -> None:
    tensors = {**make_problem(num_kv_heads=2).tensors(), "grad_context": make_tensor(2, 4, 5, 8)}
    assert_foreseen(client, tensors, {} if outputs is None else {"outputs": outputs}, "/v1/attention/gradients")


def test_flops_count_whole_products(client: httpx.Client) -> None:
    tensors = make_problem(head_dim_v=6, num_kv_heads=2).tensors()
    pairs = 2 * 4 * 5 * 7
    assert plan(client, tensors, {"causal": "upper_left"})["paths"]["manual"]["flops"] == 2 * pairs * (8 + 6)
    found = plan(client, {**tensors, "grad_logsumexp": make_tensor(2, 4, 5)}, {})
    assert found["paths"]["manual"]["flops"] == 2 * pairs * (3 * 8 + 2 * 6)
    assert not found["paths"]["fused"]["supported"]


def test_an_offset_may_be_a_number_or_a_tensor_without_one(client: httpx.Client) -> None:
    tensors = specs(make_problem().tensors())
    answers = [
        client.post("/v1/attention/plan", json=tensors | {"causal": True, "query_offset": offset}).json()
        for offset in (2, {"dtype": "int64", "shape": [1]})
    ]
    assert answers[0]["path"] == answers[1]["path"] and answers[0]["needed_bytes"] == answers[1]["needed_bytes"]


# What would be refused


def test_what_does_not_fit_is_answered_with_200_and_the_reason() -> None:
    with (
        service_in_process(Engine(), memory_budget_bytes=2**24) as service,
        httpx.Client(base_url=service.url) as client,
    ):
        until(lambda: service.parts.lifecycle.is_ready)
        tensors = {name: make_tensor(1, 8, 256, 64) for name in ("query", "key", "value")}
        small = plan(client, tensors, {})
        assert small["admitted"] and small["allowed_bytes"] == 2**24
        longest = small["max_seq_len"]
        for seq_len, is_admitted in ((longest, True), (longest + 1, False)):
            tensors = {name: make_tensor(1, 8, seq_len, 64) for name in ("query", "key", "value")}
            found = plan(client, tensors, {})
            assert found["admitted"] is is_admitted and found["max_seq_len"] == longest
            body = safetensors_body(tensors, {})
            answer = client.post("/v1/attention", content=body, headers={"content-type": SAFETENSORS})
            assert answer.status_code == (200 if is_admitted else 413)
        problem = answer.json()
        assert (found["needed_bytes"], found["allowed_bytes"]) == (problem["needed_bytes"], problem["allowed_bytes"])
        assert found["why"] == f"needs {found['needed_bytes']} bytes, {2**24} bytes are allowed"


def test_memory_that_huge_or_non_finite_numbers_take_is_counted_where_they_come() -> None:
    plain = {"query": make_tensor(1, 1, 1, 64)} | {name: make_tensor(1, 1, 40_000, 64) for name in ("key", "value")}
    key = plain["key"].clone()
    key[..., -1, -1] = torch.nan

    needed = needed_with_nan = 0
    for budget in ("all", "plain numbers alone"):
        bytes_allowed = 2**30 if budget == "all" else needed + 2**20
        with (
            service_in_process(Engine(), memory_budget_bytes=bytes_allowed) as service,
            httpx.Client(base_url=service.url) as client,
        ):
            lifecycle = service.parts.lifecycle
            until(functools.partial(getattr, lifecycle, "is_ready"))
            needed = plan(client, plain, {})["needed_bytes"]
            info, _ = info_and_bytes(client, plain, {}, "/v1/attention")
            assert info["peak_bytes"] == needed
            if budget == "all":
                info, _ = info_and_bytes(client, plain | {"key": key}, {}, "/v1/attention")
                assert info["nonfinite_rows"] == 1
                needed_with_nan = info["peak_bytes"]
                assert needed_with_nan > needed + 2**20
            else:
                body = safetensors_body(plain | {"key": key}, {})
                answer = client.post("/v1/attention", content=body, headers={"content-type": SAFETENSORS})
                assert answer.status_code == 413
                refusal = answer.json()
                assert (refusal["needed_bytes"], refusal["allowed_bytes"]) == (needed_with_nan, bytes_allowed)
            assert service.parts.admission.memory_inside == 0


def test_a_body_over_the_limit_is_foreseen() -> None:
    with service_in_process(Engine(), max_body_bytes=4096) as service, httpx.Client(base_url=service.url) as client:
        until(lambda: service.parts.lifecycle.is_ready)
        found = plan(client, {"query": make_tensor(1, 1, 64, 32)}, {})
        assert not found["admitted"] and found["why"] == "its tensors have 8192 bytes, a body may have 4096"


def test_what_cannot_be_done_in_time_is_foreseen(client: httpx.Client) -> None:
    huge = {name: {"dtype": "float32", "shape": [1, 1, 2**17, 64]} for name in ("query", "key", "value")}
    answer = client.post("/v1/attention/plan", json=huge | {"timeout_ms": 1, "outputs": ["entropy"]}).json()
    assert not answer["admitted"] and answer["why"].startswith("the answer would take about")


def test_a_shape_that_no_memory_holds_is_planned_at_once(client: httpx.Client) -> None:
    huge = {name: {"dtype": "float32", "shape": [1, 64, 2**20, 16]} for name in ("query", "key", "value")}
    answer = client.post("/v1/attention/plan", json=huge | {"outputs": ["weights"]}).json()
    assert not answer["admitted"] and answer["path"] == "manual"
    assert answer["needed_bytes"] > answer["answer_bytes"] == 64 * 2**40 * 4
    assert 0 < answer["max_seq_len"] < 2**20


# Faults


def test_a_list_that_no_header_holds_is_foreseen(client: httpx.Client) -> None:
    rows = 300_000
    tensors = {
        "query": torch.empty(1, 1, rows, 1, device="meta"),
        "key": torch.empty(1, 1, 2, 1, device="meta"),
        "value": torch.empty(1, 1, 2, 1, device="meta"),
    }
    found = plan(client, tensors, {"outputs": ["weights"], "select": {"rows": list(range(rows))}})
    assert not found["admitted"]
    assert found["why"].endswith("a header of safetensors may have 1048576")


def test_a_list_that_no_request_may_have_is_refused(client: httpx.Client) -> None:
    body = b'{"query":{"dtype":"float32","shape":[1,1]},"select":{"rows":[' + b"0," * 2**20 + b"0]}}"
    answer = client.post("/v1/attention/plan", content=body, headers={"content-type": JSON})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["expected"] == "at most 1048576 items in an option"


def test_a_longer_body_than_any_plan_needs_is_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/attention/plan", content=b" " * (2**24 + 1), headers={"content-type": JSON})
    assert answer.status_code == 413


def test_the_longest_is_one_that_a_body_may_have(client: httpx.Client) -> None:
    query = torch.empty(1, 8, 1_000_000, 64, device="meta")
    found = plan(client, {"query": query}, {})
    assert not found["admitted"]
    shorter = torch.empty(1, 8, found["max_seq_len"], 64, device="meta")
    assert "a body may have" not in plan(client, {"query": shorter}, {})["why"]


def test_every_fault_is_named_at_once(client: httpx.Client) -> None:
    members = {
        "query": {"dtype": "float32", "shape": [1, 2], "data": "AAAA"},
        "key": [[1, 2, 3]],
        "value": {"dtype": "int8", "shape": [1, -1]},
        "allow_mask": {"dtype": "bool"},
        "bias": {"shape": [1.5]},
        "sinks": 3,
        "causal": "maybe",
        "is_casual": True,
    }
    answer = client.post("/v1/attention/plan", json=members)
    assert answer.status_code == 422
    fields = [fault["field"] for fault in answer.json()["errors"]]
    assert fields == [
        "query.data", "key", "value.dtype", "value.shape", "allow_mask.shape", "bias.dtype", "bias.shape", "sinks",
        "causal", "is_casual",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"key": {"dtype": "float32", "shape": [1, 3]}}, "key"),
        ({"query": {"dtype": "float32", "shape": [1, 1, 1, 1, 1]}}, "query.shape"),
        ({"query": {"dtype": "float32", "shape": [2**40, 2]}}, "query.shape"),
        ({"path": "fused", "softcap": 1}, "path"),
        ({"dtype": "float16"}, "dtype"),
        ({"grad_context": {"dtype": "float32", "shape": [3, 3]}}, "grad_context"),
        ({"outputs": ["grad_query"]}, "outputs.0"),
        ({"query_offset": 1.5, "causal": True}, "query_offset"),
    ],
)
def test_what_a_request_would_be_refused_for_is_refused(
    client: httpx.Client, change: dict[str, Any], field: str
) -> None:
    members = {name: {"dtype": "float32", "shape": [4, 2]} for name in ("query", "key", "value")}
    answer = client.post("/v1/attention/plan", json=members | change)
    assert answer.status_code == 422
    assert field in [fault["field"] for fault in answer.json()["errors"]]


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"content-type": SAFETENSORS}, safetensors_body({"query": torch.ones(1, 1)}, {}), 415),
        ({"content-type": JSON, "accept": SAFETENSORS}, b"{}", 406),
        ({"content-type": JSON}, b"{", 400),
        ({"content-type": JSON}, b"[]", 422),
        ({"content-type": JSON}, b"{}", 422),
        ({"content-type": JSON}, b'{"query": {"dtype": "float32", "shape": [1, 1]}, "query": 1}', 422),
        ({"content-type": JSON}, b'{"query": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    ],
)
def test_what_is_no_plan_is_refused(client: httpx.Client, headers: dict[str, str], content: bytes, status: int) -> None:
    answer = client.post("/v1/attention/plan", headers=headers, content=content)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"


def test_the_examples_of_the_document_run_as_they_stand(client: httpx.Client) -> None:
    route = client.get("/openapi.json").json()["paths"]["/v1/attention/plan"]["post"]
    examples = route["requestBody"]["content"][JSON]["examples"]
    for example in examples.values():
        answer = client.post("/v1/attention/plan", content=json.dumps(example["value"]), headers={"content-type": JSON})
        assert answer.status_code == 200 and answer.json()["max_seq_len"] > 0
