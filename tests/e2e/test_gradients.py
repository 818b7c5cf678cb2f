"""POST /v1/attention/gradients as callers see it: what is answered, in which form, and what is refused."""

from __future__ import annotations

import gzip
import json
import math
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from tests.support.bodies import (
    FORMS,
    JSON,
    SAFETENSORS,
    as_lists,
    as_object,
    ask,
    read_answer,
    safetensors_body,
    strict_json,
)
from tests.support.factory import in_layout, make_mask, make_tensor
from tests.support.roads import Road

URL = "/v1/attention/gradients"
TWO_KEYS: dict[str, Any] = {"query": [[1]], "key": [[0.5], [-0.5]], "value": [[1], [3]], "scale": 1}
SMALL = TWO_KEYS | {"grad_context": [[1]]}
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def make_tensors(dtype: torch.dtype = torch.float32, *, batch: int = 2) -> dict[str, Tensor]:
    """Four query heads on two of keys, T = 3, S = 5, D = 4, V = 6."""
    shapes = {
        "query": (batch, 4, 3, 4),
        "key": (batch, 2, 5, 4),
        "value": (batch, 2, 5, 6),
        "grad_context": (batch, 4, 3, 6),
    }
    return {name: make_tensor(*shape, seed=seed, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items())}


def by_autograd(
    tensors: dict[str, Tensor], *, mask: Tensor | None = None, softcap: float | None = None, offset: int | None = None
) -> dict[str, Tensor]:
    """All gradients of rank-4 tensors, in float64, of the formula written down."""
    leaves = {
        name: tensor.double().clone().requires_grad_()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not name.startswith("grad_")
    }
    query, key, value = leaves["query"], leaves.get("key", leaves["query"]), leaves.get("value", leaves["query"])
    group_size = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group_size, dim=1) for tensor in (key, value))
    logits = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits.retain_grad()
    shown = logits + leaves["bias"] if "bias" in leaves else logits
    allowed = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask.expand(logits.shape)
    if offset is not None:
        allowed = allowed & torch.ones_like(allowed).tril(offset)
    shown = shown.masked_fill(~allowed, -1e30)
    if "sinks" in leaves:
        shown = torch.cat([shown, leaves["sinks"].view(1, -1, 1, 1).expand(*shown.shape[:3], 1)], dim=-1)
    weights = torch.softmax(shown, dim=-1)[..., : key.shape[2]] * allowed
    weights.retain_grad()
    total = (weights @ value * tensors.get("grad_context", torch.zeros(1)).double()).sum()
    total = total + (torch.logsumexp(shown, -1) * tensors.get("grad_logsumexp", torch.zeros(1)).double()).sum()
    total.backward()  # type: ignore[no-untyped-call]
    grads = {f"grad_{name}": leaf.grad for name, leaf in leaves.items()}
    assert logits.grad is not None
    grads["grad_logits"] = logits.grad.masked_fill(~allowed, 0.0)
    if weights.grad is not None:
        grads["grad_weights"] = weights.grad.masked_fill(~allowed, 0.0)
    return {name: grad for name, grad in grads.items() if grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float = 1e-5) -> None:
    for name, tensor in found.items():
        truth = expected[name]
        assert tensor.shape == truth.shape, name
        torch.testing.assert_close(tensor.double(), truth, rtol=rtol, atol=rtol * float(truth.abs().max()), msg=name)


def refusal_of(client: httpx.Client, members: dict[str, Any]) -> list[dict[str, str]]:
    answer = client.post(URL, json=members)
    assert answer.status_code == 422, answer.text
    errors: list[dict[str, str]] = answer.json()["errors"]
    return errors


def fields_of(client: httpx.Client, members: dict[str, Any]) -> list[str]:
    return [fault["field"] for fault in refusal_of(client, members)]


def test_the_worked_example_of_the_contract(client: httpx.Client) -> None:
    outputs = ["grad_query", "grad_key", "grad_value", "grad_weights", "grad_logits"]
    answer = strict_json(client.post(URL, json=SMALL | {"outputs": outputs}).content)
    assert list(answer) == [*outputs, "info"]
    assert answer["grad_query"] == [[pytest.approx(-0.39322, abs=1e-5)]]
    assert answer["grad_key"] == [[pytest.approx(-0.39322, abs=1e-5)], [pytest.approx(0.39322, abs=1e-5)]]
    assert answer["grad_value"] == [[pytest.approx(0.73106, abs=1e-5)], [pytest.approx(0.26894, abs=1e-5)]]
    assert answer["grad_weights"] == [[1, 3]]
    assert answer["grad_logits"] == [pytest.approx([-0.39322, 0.39322], abs=1e-5)]
    info = answer["info"]
    assert (info["dtype"], info["empty_rows"], info["nonfinite_rows"]) == ("float32", 0, 0)
    assert info["flops"] == 2 * 1 * 2 * (3 * 1 + 2 * 1)


def test_outputs_left_out_are_every_gradient_that_is_defined(client: httpx.Client) -> None:
    assert set(client.post(URL, json=SMALL).json()) == {"grad_query", "grad_key", "grad_value", "info"}
    alone = {"query": [[1, 0], [0, 1]], "grad_context": [[1, 2], [3, 4]]}
    assert set(client.post(URL, json=alone).json()) == {"grad_query", "info"}
    everything = SMALL | {"bias": [[0, 1]], "sinks": [0.5]}
    assert set(client.post(URL, json=everything).json()) == {
        *("grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks"),
        "info",
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_every_form_matches_autograd(client: httpx.Client, dtype: torch.dtype, form: str) -> None:
    tensors = make_tensors(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = ("grad_weights", "grad_logits")
    outputs = ["grad_query", "grad_key", "grad_value", *pairs]
    found, info = ask(client, URL, form, tensors, {"outputs": outputs}, dict.fromkeys(pairs, wide))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: wide if name in pairs else dtype for name in outputs
    }
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}[dtype]
    assert_close(found, by_autograd(tensors), rtol=rtol)
    assert info["dtype"] == str(dtype).removeprefix("torch.")


def test_every_kind_of_rule_at_once_matches_autograd(client: httpx.Client) -> None:
    tensors = make_tensors(torch.float64) | {
        "allow_mask": make_mask(2, 1, 3, 5, seed=5),
        "bias": make_tensor(1, 4, 1, 5, seed=6, dtype=torch.float64),
        "query_offset": torch.tensor([1]),
        "sinks": make_tensor(4, seed=7, dtype=torch.float64),
        "grad_logsumexp": make_tensor(2, 4, 3, seed=8, dtype=torch.float64),
    }
    expected = by_autograd(tensors, mask=tensors["allow_mask"], softcap=2.0, offset=1)
    options = {"softcap": 2.0, "causal": True}
    for path in ("manual", "blocked", None):
        found, info = ask(client, URL, "safetensors", tensors, options | ({} if path is None else {"path": path}))
        assert set(found) == {"grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks"}
        assert_close(found, expected, rtol=1e-11)
        assert path in (None, info["path"])


def test_the_gradient_of_the_logsumexp_alone_is_answered(client: httpx.Client) -> None:
    tensors = make_tensors()
    del tensors["grad_context"]
    tensors["grad_logsumexp"] = make_tensor(2, 4, 3, seed=9)
    found, _ = ask(client, URL, "base64", tensors, {})
    assert_close(found, by_autograd(tensors) | {"grad_value": torch.zeros(2, 2, 5, 6, dtype=torch.float64)})


def test_key_and_value_left_out_give_the_sum_of_the_three_uses(client: httpx.Client) -> None:
    tensors = {"query": make_tensor(1, 2, 4, 3), "grad_context": make_tensor(1, 2, 4, 3, seed=1)}
    found, _ = ask(client, URL, "safetensors", tensors, {"causal": True})
    assert set(found) == {"grad_query"}
    assert_close(found, by_autograd(tensors, offset=0))


@pytest.mark.parametrize("layout", ["bthd", "btd"])
def test_gradients_lie_as_their_tensors_do(client: httpx.Client, layout: str) -> None:
    tensors = make_tensors()
    plain, _ = ask(client, URL, "safetensors", tensors, {})
    turned = {name: in_layout(tensor, layout).contiguous() for name, tensor in tensors.items()}
    options: dict[str, Any] = {"layout": layout, "num_heads": 4, "num_kv_heads": 2}
    found, _ = ask(client, URL, "safetensors", turned, options)
    for name, tensor in plain.items():
        assert found[name].shape == turned[name.removeprefix("grad_")].shape
        assert torch.equal(found[name], in_layout(tensor, layout)), name


@pytest.mark.parametrize("axes", [1, 2])
def test_gradients_lack_the_axes_that_their_tensors_lack(client: httpx.Client, axes: int) -> None:
    whole = {name: tensor[:1, :1] for name, tensor in make_tensors().items()}
    pairs = ["grad_weights", "grad_logits"]
    options = {"outputs": ["grad_query", "grad_key", "grad_value", *pairs]}
    plain, _ = ask(client, URL, "safetensors", whole, options)
    fewer = {name: tensor.reshape(tensor.shape[axes:]) for name, tensor in whole.items()}
    found, _ = ask(client, URL, "safetensors", fewer, options)
    for name, tensor in plain.items():
        assert torch.equal(found[name], tensor.reshape(tensor.shape[axes:])), name


@pytest.mark.parametrize("form", ["base64", "safetensors"])
@pytest.mark.parametrize(("batch", "seq_len_q", "seq_len_kv"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_axes_are_answered(client: httpx.Client, form: str, batch: int, seq_len_q: int, seq_len_kv: int) -> None:
    tensors = {
        "query": torch.ones(batch, 2, seq_len_q, 4),
        "key": torch.ones(batch, 2, seq_len_kv, 4),
        "value": torch.ones(batch, 2, seq_len_kv, 5),
        "grad_context": torch.ones(batch, 2, seq_len_q, 5),
    }
    found, info = ask(client, URL, form, tensors, {})
    assert info["empty_rows"] == (batch * 2 * seq_len_q if seq_len_kv == 0 else 0)
    for name, tensor in found.items():
        assert tensor.shape == tensors[name.removeprefix("grad_")].shape
        assert not tensor.any()


def test_what_is_behind_a_mask_gets_exactly_nothing(client: httpx.Client) -> None:
    tensors = make_tensors()
    tensors["allow_mask"] = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    tensors["allow_mask"][:, :, 1] = False
    tensors["allow_mask"][..., 2] = False
    for name in ("key", "value"):
        tensors[name][:, :, 2] = math.nan
    for path in ("manual", "blocked"):
        found, info = ask(client, URL, "safetensors", tensors, {"path": path})
        assert info["empty_rows"] == 8
        assert not found["grad_query"][:, :, 1].any()
        assert not found["grad_key"][:, :, 2].any() and not found["grad_value"][:, :, 2].any()
        assert all(tensor.isfinite().all() for tensor in found.values())


def test_answers_take_the_form_that_is_asked(client: httpx.Client) -> None:
    as_list = client.post(URL, json=SMALL).json()
    assert isinstance(as_list["grad_query"], list)
    assert client.post(URL, json=SMALL | {"encoding": "base64"}).json()["grad_key"]["shape"] == [2, 1]
    # The query decides.
    objects = SMALL | {"query": as_object(torch.ones(1, 1))}
    assert client.post(URL, json=objects).json()["grad_query"]["dtype"] == "float32"
    headers = {"content-type": JSON, "accept": SAFETENSORS}
    answer = client.post(URL, content=json.dumps(SMALL), headers=headers)
    found, info = read_answer(answer.content, SAFETENSORS, {})
    assert torch.equal(found["grad_key"], torch.tensor(as_list["grad_key"]))
    assert info["flops"] == as_list["info"]["flops"]


@pytest.mark.parametrize("road", list(Road), ids=lambda road: road.value)
def test_both_roads_give_the_same_bits(client: httpx.Client, road: Road) -> None:
    content = safetensors_body(make_tensors(), {"causal": "lower_right"})
    answers = [
        client.post(URL, content=content, headers={"content-type": each.content_type}) for each in (road, road.other)
    ]
    found, other = (read_answer(answer.content, SAFETENSORS, {}) for answer in answers)
    assert all(torch.equal(other[0][name], tensor) for name, tensor in found[0].items())
    assert set(found[1]) == set(other[1])


@pytest.mark.parametrize("content_type", [JSON, SAFETENSORS])
def test_gzip_goes_both_ways(client: httpx.Client, content_type: str) -> None:
    zeros = torch.zeros(1, 2, 64, 16)
    tensors = {"query": zeros, "grad_context": zeros}
    members = {name: as_lists(tensor) for name, tensor in tensors.items()}
    body = json.dumps(members).encode() if content_type == JSON else safetensors_body(tensors, {})
    headers = {"content-type": content_type, "content-encoding": "gzip", "accept-encoding": "gzip"}
    answer = client.post(URL, content=gzip.compress(body), headers=headers)
    assert answer.headers["content-encoding"] == "gzip"
    found, _ = read_answer(answer.content, content_type, {})
    assert torch.equal(found["grad_query"], zeros)


def test_verify_tells_the_error(client: httpx.Client) -> None:
    assert "worst" not in client.post(URL, json=SMALL | {"verify": False}).json()["info"]
    for form in FORMS:
        found, info = ask(client, URL, form, make_tensors(), {"verify": True})
        assert 0 <= info["max_abs_error"] < 1e-5 and 0 <= info["max_rel_error"] < 1e-5
        assert info["worst"] == "" or info["worst"].partition("[")[0] in found


def test_an_empty_row_can_be_an_error(client: httpx.Client) -> None:
    members = SMALL | {"allow_mask": [[False, False]], "empty_rows": "error"}
    (fault,) = refusal_of(client, members)
    assert fault["field"] == "empty_rows"
    assert "[0,0,0]" in fault["received"]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"grad_context": None}, "grad_context"),
        ({"grad_context": [[1, 2]]}, "grad_context"),
        ({"grad_context": [1]}, "grad_context"),
        ({"grad_context": [[1], [2]]}, "grad_context"),
        ({"grad_context": [["x"]]}, "grad_context.0.0"),
        ({"grad_context": [[1e39]]}, "grad_context.0.0"),
        ({"grad_context": as_object(torch.ones(1, 1, dtype=torch.float64))}, "grad_context"),
        ({"grad_context": as_object(torch.ones(1, 1, dtype=torch.bool))}, "grad_context"),
        ({"grad_logsumexp": [[1]]}, "grad_logsumexp"),
        ({"grad_logsumexp": [1, 2]}, "grad_logsumexp"),
        ({"grad_logsumexp": [True]}, "grad_logsumexp.0"),
        ({"grad_logsumexp": as_object(torch.ones(1, dtype=torch.int64))}, "grad_logsumexp"),
        ({"outputs": []}, "outputs"),
        ({"outputs": "grad_query"}, "outputs"),
        ({"outputs": ["context"]}, "outputs.0"),
        ({"outputs": ["grad_query", "grad_input"]}, "outputs.1"),
        ({"outputs": ["grad_query", "grad_query"]}, "outputs.1"),
        ({"outputs": ["grad_bias"]}, "outputs.0"),
        ({"outputs": ["grad_sinks"]}, "outputs.0"),
        ({"key": None, "value": None, "grad_context": [[1]], "outputs": ["grad_key"]}, "outputs.0"),
        ({"select": {"rows": [0]}}, "select"),
        ({"select": {"top_k": 1}}, "select"),
        ({"path": "fused"}, "path"),
        ({"path": "flash"}, "path"),
        ({"verify": "true"}, "verify"),
        ({"verify": 1}, "verify"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"layout": "btd"}, "num_heads"),
        ({"key_lengths": [3]}, "key_lengths.0"),
        ({"query_offset": 0}, "query_offset"),
        ({"causal": True}, "causal"),
        ({"sinks": ["NaN"]}, "sinks.0"),
        ({"grad_contxt": [[1]]}, "grad_contxt"),
        ({"grad_output": [[1]]}, "grad_output"),
        ({"weight_layout": "in_out"}, "weight_layout"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_by_its_field(client: httpx.Client, more: dict[str, Any], field: str) -> None:
    assert field in fields_of(client, SMALL | more)


def test_selecting_is_refused_with_a_reason(client: httpx.Client) -> None:
    (fault,) = refusal_of(client, SMALL | {"select": {"rows": [0]}})
    assert fault == {
        "field": "select",
        "expected": "nothing, since a gradient is always whole",
        "received": fault["received"],
    }
    assert client.post(URL, json=SMALL | {"select": None}).status_code == 200
    (fault,) = refusal_of(client, SMALL | {"path": "fused"})
    assert "manual" in fault["expected"] and fault["received"] == "fused"
    headers = {"content-type": SAFETENSORS}
    content = safetensors_body(make_tensors(), {"select": {"rows": [0]}})
    assert client.post(URL, content=content, headers=headers).json()["errors"][0]["field"] == "select"


def test_all_faults_come_at_once_in_the_order_of_the_contract(client: httpx.Client) -> None:
    members = {
        "query": [[1, 2]],
        "key": [[1]],
        "value": [[1]],
        "allow_mask": [[1]],
        "key_lengths": [7],
        "grad_context": [[1, 2, 3]],
        "grad_logsumexp": [1, 2, 3],
        "scale": "1",
        "outputs": ["grad_query", "weights"],
        "select": {"heads": [0]},
        "path": "fused",
        "encoding": "hex",
        "tau": 1,
    }
    assert fields_of(client, members) == [
        "key",
        "allow_mask.0.0",
        "key_lengths.0",
        "grad_context",
        "grad_logsumexp",
        "scale",
        "outputs.1",
        "path",
        "encoding",
        "select",
        "tau",
    ]


def test_what_no_machine_can_hold_is_refused_with_the_bytes(client: httpx.Client) -> None:
    tensors = dict.fromkeys(("query", "key", "value", "grad_context"), torch.zeros(1, 1, 2**20, 1))
    content = safetensors_body(tensors, {"outputs": ["grad_weights"]})
    answer = client.post(URL, content=content, headers={"content-type": SAFETENSORS})
    assert answer.status_code == 413
    assert answer.json()["needed_bytes"] >= 4 * 2**40 > answer.json()["allowed_bytes"]
