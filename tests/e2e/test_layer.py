"""POST /v1/layer and /v1/layer/gradients as callers see them: equal to what they replace, and what is refused."""

from __future__ import annotations

import gzip
import json
import math
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

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
from tests.support.factory import make_mask, make_tensor
from tests.support.roads import Road

FORWARD, GRADIENTS = "/v1/layer", "/v1/layer/gradients"
UNIT = [[1, 0], [0, 1]]
TWO_HEADS: dict[str, Any] = {
    "input": UNIT,
    "w_query": UNIT,
    "w_key": UNIT,
    "w_value": UNIT,
    "w_output": [[1, 1], [0, 2]],
    "weight_layout": "in_out",
    "num_heads": 2,
    "causal": True,
}
WITH_GRAD = TWO_HEADS | {"grad_output": [[1, 0], [0, 1]]}
GRAD_NAMES = ("grad_input", "grad_w_query", "grad_w_key", "grad_w_value", "grad_w_output")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
RTOL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}


def make_tensors(
    dtype: torch.dtype = torch.float32, *, is_cross: bool = False, biases: bool = True
) -> dict[str, Tensor]:
    """B = 2, T = 3, E = 6; four heads of D = 2 on two of keys, V = 3; O = 5. With memory S = 4 and M = 7."""
    shapes: dict[str, tuple[int, ...]] = {"input": (2, 3, 6)}
    if is_cross:
        shapes["memory"] = (2, 4, 7)
    width = 7 if is_cross else 6
    shapes |= {"w_query": (6, 8), "w_key": (width, 4), "w_value": (width, 6), "w_output": (12, 5)}
    if biases:
        shapes |= {"b_query": (8,), "b_key": (4,), "b_value": (6,), "b_output": (5,)}
    return {
        name: make_tensor(*shape, seed=seed, std=0.5).to(dtype) for seed, (name, shape) in enumerate(shapes.items())
    }


def by_torch(tensors: dict[str, Tensor], *, mask: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """The layer of ``make_tensors`` written down in float64, and the leaves that autograd fills."""
    leaves = {
        name: tensor.double().clone().requires_grad_() for name, tensor in tensors.items() if name != "grad_output"
    }

    def projected(source: Tensor, name: str, heads: int) -> Tensor:
        columns = source @ leaves[f"w_{name}"] + leaves.get(f"b_{name}", torch.zeros(1))
        return columns.unflatten(-1, (heads, -1)).transpose(1, 2)  # type: ignore[no-untyped-call, no-any-return]

    memory = leaves.get("memory", leaves["input"])
    query, key, value = (
        projected(leaves["input"], "query", 4),
        projected(memory, "key", 2),
        projected(memory, "value", 2),
    )
    logits = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) / math.sqrt(query.shape[-1])
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    context = (torch.softmax(logits, -1) @ value.repeat_interleave(2, dim=1)).transpose(1, 2).flatten(2)
    return leaves, context @ leaves["w_output"] + leaves.get("b_output", torch.zeros(1))


def turned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same layer in the other weight layout."""
    return {name: tensor.T.contiguous() if name.startswith("w_") else tensor for name, tensor in tensors.items()}


def assert_near(found: Tensor, expected: Tensor, *, rtol: float = 1e-5, name: str = "") -> None:
    expected = expected.detach()
    atol = rtol * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=atol, msg=lambda t: name + t)


def refusal_of(client: httpx.Client, members: dict[str, Any], url: str = FORWARD) -> list[dict[str, str]]:
    answer = client.post(url, json=members)
    assert answer.status_code == 422, answer.text
    errors: list[dict[str, str]] = answer.json()["errors"]
    return errors


def test_the_worked_example_of_the_contract(client: httpx.Client) -> None:
    members = TWO_HEADS | {"outputs": ["output", "context", "weights"]}
    answer = strict_json(client.post(FORWARD, json=members).content)
    assert list(answer) == ["output", "context", "weights", "info"]
    assert answer["output"] == [pytest.approx([1, 1], abs=1e-5), pytest.approx([0.5, 1.96212], abs=1e-5)]
    assert answer["context"] == [pytest.approx([1, 0], abs=1e-5), pytest.approx([0.5, 0.73106], abs=1e-5)]
    assert answer["weights"][0] == [[1, 0], pytest.approx([0.5, 0.5], abs=1e-5)]
    assert answer["weights"][1] == [[1, 0], pytest.approx([0.26894, 0.73106], abs=1e-5)]
    other = client.post(FORWARD, json=members | {"weight_layout": "out_in"}).json()
    assert other["output"] == [pytest.approx([1, 0], abs=1e-5), pytest.approx([1.23106, 1.46212], abs=1e-5)]


def test_the_output_alone_is_answered_where_nothing_is_asked(client: httpx.Client) -> None:
    assert set(client.post(FORWARD, json=TWO_HEADS).json()) == {"output", "info"}
    assert set(client.post(GRADIENTS, json=WITH_GRAD).json()) == {*GRAD_NAMES, "info"}


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_layer_equals_multihead_attention_of_torch(client: httpx.Client, is_causal: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(768, 12, batch_first=True).eval()
    state = module.state_dict()
    nn.init.normal_(state["in_proj_bias"])
    nn.init.normal_(state["out_proj.bias"])
    tensors = {"input": make_tensor(2, 10, 768)}
    tensors |= dict(zip(("w_query", "w_key", "w_value"), state["in_proj_weight"].chunk(3), strict=True))
    tensors |= {"w_output": state["out_proj.weight"]}
    tensors |= dict(zip(("b_query", "b_key", "b_value"), state["in_proj_bias"].chunk(3), strict=True))
    tensors |= {"b_output": state["out_proj.bias"]}
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[1, 7:] = True
    future = torch.ones(10, 10, dtype=torch.bool).triu(1) if is_causal else None
    with torch.no_grad():
        expected, weights = module(
            *[tensors["input"]] * 3, key_padding_mask=padding, attn_mask=future, average_attn_weights=False
        )
    options = {"num_heads": 12, "weight_layout": "out_in", "causal": is_causal, "outputs": ["output", "weights"]}
    tensors["block_mask"] = padding[:, None, None]
    found, info = ask(client, FORWARD, "safetensors", tensors, options)
    assert_near(found["output"], expected)
    assert_near(found["weights"], weights)
    assert info["flops"] == 4 * 2 * 2 * 10 * 768 * 768 + 2 * 2 * 12 * 10 * 10 * (64 + 64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_cross", [False, True], ids=["self", "cross"])
def test_a_layer_and_its_gradients_match_autograd(
    client: httpx.Client, dtype: torch.dtype, form: str, is_cross: bool
) -> None:
    tensors = make_tensors(dtype, is_cross=is_cross)
    options = SIZES | {"weight_layout": "in_out"}
    leaves, expected = by_torch(tensors)
    found, info = ask(client, FORWARD, form, tensors, options)
    assert list(found) == ["output"] and found["output"].dtype == dtype
    assert_near(found["output"], expected, rtol=RTOL[dtype])
    assert info["dtype"] == str(dtype).removeprefix("torch.")
    tensors["grad_output"] = make_tensor(2, 3, 5, seed=20).to(dtype)
    expected.backward(tensors["grad_output"].double())  # type: ignore[no-untyped-call]
    grads, _ = ask(client, GRADIENTS, form, tensors, options)
    assert set(grads) == {f"grad_{name}" for name in leaves}
    for name, grad in grads.items():
        truth = leaves[name.removeprefix("grad_")].grad
        assert truth is not None and grad.dtype == dtype
        assert_near(grad, truth, rtol=RTOL[dtype], name=name)


def test_weights_the_other_way_round_give_the_same_turned(client: httpx.Client) -> None:
    tensors = make_tensors(is_cross=True) | {"grad_output": make_tensor(2, 3, 5, seed=20)}
    one, _ = ask(client, GRADIENTS, "safetensors", tensors, SIZES | {"weight_layout": "in_out"})
    other, _ = ask(client, GRADIENTS, "safetensors", turned(tensors), SIZES | {"weight_layout": "out_in"})
    for name, tensor in turned({name.removeprefix("grad_"): tensor for name, tensor in one.items()}).items():
        assert_near(other[f"grad_{name}"], tensor, name=name)


def test_every_output_has_its_shape(client: httpx.Client) -> None:
    tensors = make_tensors(is_cross=True)
    shapes = {
        "output": (2, 3, 5),
        "query": (2, 4, 3, 2),
        "key": (2, 2, 4, 2),
        "value": (2, 2, 4, 3),
        "context": (2, 3, 12),
        "weights": (2, 4, 3, 4),
        "scores": (2, 4, 3, 4),
        "logits": (2, 4, 3, 4),
        "logsumexp": (2, 4, 3),
        "entropy": (2, 4, 3),
        "top_weights": (2, 4, 3, 2),
        "top_keys": (2, 4, 3, 2),
        "weight_totals": (2, 4, 4),
    }
    asked = [name for name in shapes if name != "top_keys"]
    options = SIZES | {"weight_layout": "in_out", "outputs": asked, "select": {"top_k": 2}}
    found, _ = ask(client, FORWARD, "safetensors", tensors, options)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
    expected = make_tensors(is_cross=True)
    columns = expected["input"].double() @ expected["w_query"].double() + expected["b_query"].double()
    assert_near(found["query"], columns.unflatten(-1, (4, 2)).transpose(1, 2))  # type: ignore[no-untyped-call]
    rows, _ = ask(
        client, FORWARD, "safetensors", tensors, options | {"outputs": ["weights"], "select": {"rows": [2, 0]}}
    )
    assert torch.equal(rows["weights"], found["weights"][:, :, [2, 0]])


def test_masks_mean_what_they_mean_without_projections(client: httpx.Client) -> None:
    mask = make_mask(2, 1, 3, 4, seed=3, share=0.6)
    mask[..., 0] = True
    tensors = make_tensors(torch.float64, is_cross=True)
    _, expected = by_torch(tensors, mask=mask)
    options = SIZES | {"weight_layout": "in_out"}
    for more in (
        {"allow_mask": mask},
        {"block_mask": ~mask},
        {"bias": torch.zeros(2, 1, 3, 4, dtype=torch.float64).masked_fill(~mask, -math.inf)},
    ):
        for path in ({}, {"path": "manual"}, {"path": "blocked"}):
            found, _ = ask(client, FORWARD, "safetensors", tensors | more, options | path)
            assert_near(found["output"], expected, rtol=1e-12)


def test_an_input_without_batch_gives_outputs_without_it(client: httpx.Client) -> None:
    whole = make_tensors()
    whole["input"] = whole["input"][:1]
    options = SIZES | {"weight_layout": "in_out", "outputs": ["output", "query", "context", "weights", "logsumexp"]}
    with_batch, _ = ask(client, FORWARD, "safetensors", whole, options)
    without, _ = ask(client, FORWARD, "safetensors", whole | {"input": whole["input"][0]}, options)
    for name, tensor in with_batch.items():
        assert torch.equal(without[name], tensor[0]), name
    grads, _ = ask(
        client,
        GRADIENTS,
        "safetensors",
        whole | {"input": whole["input"][0], "grad_output": make_tensor(3, 5)},
        SIZES | {"weight_layout": "in_out"},
    )
    assert grads["grad_input"].shape == (3, 6)


@pytest.mark.parametrize("form", ["base64", "safetensors"])
@pytest.mark.parametrize(("batch", "seq_len_q", "seq_len_kv"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_axes_are_answered(client: httpx.Client, form: str, batch: int, seq_len_q: int, seq_len_kv: int) -> None:
    tensors = make_tensors(is_cross=True)
    tensors["input"] = torch.ones(batch, seq_len_q, 6)
    tensors["memory"] = torch.ones(batch, seq_len_kv, 7)
    options = SIZES | {"weight_layout": "in_out"}
    found, info = ask(client, FORWARD, form, tensors, options)
    # An empty row's context is 0, and its output the bias alone.
    assert found["output"].shape == (batch, seq_len_q, 5)
    if seq_len_kv == 0:
        assert torch.equal(found["output"], tensors["b_output"].expand(batch, seq_len_q, 5))
        assert info["empty_rows"] == batch * 4 * seq_len_q
    tensors["grad_output"] = torch.ones(batch, seq_len_q, 5)
    grads, _ = ask(client, GRADIENTS, form, tensors, options)
    for name, grad in grads.items():
        assert grad.shape == tensors[name.removeprefix("grad_")].shape
        assert grad.isfinite().all()
    assert torch.equal(grads["grad_b_output"], torch.full((5,), float(batch * seq_len_q)))


def test_answers_take_the_form_that_is_asked(client: httpx.Client) -> None:
    assert isinstance(client.post(FORWARD, json=TWO_HEADS).json()["output"], list)
    assert client.post(FORWARD, json=TWO_HEADS | {"encoding": "base64"}).json()["output"]["shape"] == [2, 2]
    # The input decides.
    objects = TWO_HEADS | {"input": as_object(torch.eye(2))}
    assert client.post(FORWARD, json=objects).json()["output"]["dtype"] == "float32"
    answer = client.post(
        GRADIENTS, content=json.dumps(WITH_GRAD), headers={"content-type": JSON, "accept": SAFETENSORS}
    )
    found, _ = read_answer(answer.content, SAFETENSORS, {})
    assert found["grad_w_query"].shape == (2, 2)


@pytest.mark.parametrize("url", [FORWARD, GRADIENTS])
def test_both_roads_give_the_same_bits(client: httpx.Client, url: str) -> None:
    tensors = make_tensors()
    if url == GRADIENTS:
        tensors["grad_output"] = make_tensor(2, 3, 5, seed=20)
    content = safetensors_body(tensors, SIZES | {"weight_layout": "in_out", "causal": True})
    answers = [client.post(url, content=content, headers={"content-type": road.content_type}) for road in Road]
    (found, info), (other, other_info) = (read_answer(answer.content, SAFETENSORS, {}) for answer in answers)
    assert found.keys() == other.keys() and info.keys() == other_info.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in found.items())
    broken = safetensors_body(tensors, SIZES | {"causal": True, "layout": "bhtd", "tau": 1})
    refusals = [client.post(url, content=broken, headers={"content-type": road.content_type}) for road in Road]
    assert refusals[0].status_code == refusals[1].status_code == 422
    assert refusals[0].json() == refusals[1].json()


@pytest.mark.parametrize("content_type", [JSON, SAFETENSORS])
def test_gzip_goes_both_ways(client: httpx.Client, content_type: str) -> None:
    tensors = {"input": torch.zeros(1, 64, 32)} | {
        f"w_{name}": torch.zeros(32, 32) for name in ("query", "key", "value", "output")
    }
    options = {"num_heads": 2, "weight_layout": "out_in"}
    members = {name: as_lists(tensor) for name, tensor in tensors.items()} | options
    body = json.dumps(members).encode() if content_type == JSON else safetensors_body(tensors, options)
    headers = {"content-type": content_type, "content-encoding": "gzip", "accept-encoding": "gzip"}
    answer = client.post(FORWARD, content=gzip.compress(body), headers=headers)
    assert answer.headers["content-encoding"] == "gzip"
    found, _ = read_answer(answer.content, content_type, {})
    assert torch.equal(found["output"], torch.zeros(1, 64, 32))


def test_verify_tells_the_error(client: httpx.Client) -> None:
    # The gradient of a key bias is 0 but for rounding, and no error is small beside it.
    tensors = make_tensors(biases=False) | {"grad_output": make_tensor(2, 3, 5, seed=20)}
    options = SIZES | {"weight_layout": "in_out", "verify": True}
    _, info = ask(client, GRADIENTS, "safetensors", tensors, options)
    assert 0 <= info["max_abs_error"] < 1e-4 and 0 <= info["max_rel_error"] < 1e-4
    del tensors["grad_output"]
    _, info = ask(client, FORWARD, "base64", tensors, options)
    assert 0 <= info["max_abs_error"] < 1e-5 and 0 <= info["max_rel_error"] < 1e-5


def test_an_empty_row_can_be_an_error(client: httpx.Client) -> None:
    (fault,) = refusal_of(client, TWO_HEADS | {"key_lengths": [0], "empty_rows": "error"})
    assert fault["field"] == "empty_rows" and "[0,0,0]" in fault["received"]


def test_weight_layout_is_never_guessed(client: httpx.Client) -> None:
    for url, members in ((FORWARD, TWO_HEADS), (GRADIENTS, WITH_GRAD)):
        (fault,) = refusal_of(client, members | {"weight_layout": None}, url)
        assert fault["field"] == "weight_layout" and fault["received"] == "nothing"
        assert "in_out" in fault["expected"] and "out_in" in fault["expected"]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"input": None}, "input"),
        ({"input": [1, 0]}, "input"),
        ({"input": [[1, 0, 0]]}, "w_query"),
        ({"input": as_object(torch.ones(2, 2, dtype=torch.float64))}, "w_query"),
        ({"input": as_object(torch.ones(2, 2, dtype=torch.bool))}, "input"),
        ({"memory": [[1, 0, 0]]}, "w_key"),
        ({"w_query": None}, "w_query"),
        ({"w_query": [1, 0]}, "w_query"),
        ({"w_query": [[1, "x"], [0, 1]]}, "w_query.0.1"),
        ({"w_query": [[1, 0, 0], [0, 1, 0]]}, "w_query"),
        ({"w_key": None}, "w_key"),
        ({"w_key": [[1, 0, 0, 0], [0, 1, 0, 0]]}, "w_key"),
        ({"w_value": None}, "w_value"),
        ({"w_output": None}, "w_output"),
        ({"w_output": [[1, 1]]}, "w_output"),
        ({"w_output": as_object(torch.ones(2, 2, dtype=torch.float16))}, "w_output"),
        ({"b_query": [1]}, "b_query"),
        ({"b_key": [[1, 2]]}, "b_key"),
        ({"b_value": [1, 2, 3]}, "b_value"),
        ({"b_output": [1, 2, 3]}, "b_output"),
        ({"num_heads": None}, "num_heads"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 2.0}, "num_heads"),
        ({"num_heads": 3}, "w_query"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"weight_layout": "out"}, "weight_layout"),
        ({"weight_layout": 1}, "weight_layout"),
        ({"layout": "bhtd"}, "layout"),
        ({"outputs": []}, "outputs"),
        ({"outputs": ["grad_input"]}, "outputs.0"),
        ({"outputs": ["output", "output"]}, "outputs.1"),
        ({"outputs": ["top_weights"]}, "select.top_k"),
        ({"select": {"rows": [0]}}, "select.rows"),
        ({"outputs": ["weights"], "select": {"rows": [2]}}, "select.rows.0"),
        ({"outputs": ["weights"], "select": {"heads": [2]}}, "select.heads.0"),
        ({"path": "fused", "outputs": ["weights"]}, "path"),
        ({"path": "fast"}, "path"),
        ({"verify": 1}, "verify"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"allow_mask": [[True, True, True]]}, "allow_mask"),
        ({"key_lengths": [3]}, "key_lengths.0"),
        ({"query_lengths": [3]}, "query_lengths.0"),
        ({"alibi_slopes": [1]}, "alibi_slopes"),
        ({"alibi_slopes": ["NaN", 1]}, "alibi_slopes.0"),
        ({"sinks": [0, "Infinity"]}, "sinks.1"),
        ({"grad_output": [[1, 0], [0, 1]]}, "grad_output"),
        ({"query": [[1]]}, "query"),
        ({"w_quary": [[1]]}, "w_quary"),
        ({"scale": "1"}, "scale"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_by_its_field(client: httpx.Client, more: dict[str, Any], field: str) -> None:
    assert field in [fault["field"] for fault in refusal_of(client, TWO_HEADS | more)]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"grad_output": None}, "grad_output"),
        ({"grad_output": [[1, 0]]}, "grad_output"),
        ({"grad_output": [1, 0]}, "grad_output"),
        ({"grad_output": as_object(torch.ones(2, 2, dtype=torch.float64))}, "grad_output"),
        ({"outputs": ["output"]}, "outputs.0"),
        ({"outputs": ["grad_memory"]}, "outputs.0"),
        ({"outputs": ["grad_b_key"]}, "outputs.0"),
        ({"outputs": ["grad_input", "grad_input"]}, "outputs.1"),
        ({"select": {"rows": [0]}}, "select"),
        ({"path": "fused"}, "path"),
        ({"grad_context": [[1]]}, "grad_context"),
        ({"layout": "btd"}, "layout"),
    ],
    ids=str,
)
def test_gradients_without_meaning_are_refused_by_their_field(
    client: httpx.Client, more: dict[str, Any], field: str
) -> None:
    assert field in [fault["field"] for fault in refusal_of(client, WITH_GRAD | more, GRADIENTS)]


def test_all_faults_come_at_once_in_the_order_of_the_contract(client: httpx.Client) -> None:
    members = {
        "input": [[1, 0], [0, 1]],
        "w_query": [[1, 0, 0], [0, 1, 0]],
        "w_key": UNIT,
        "w_value": [[1, True], [0, 1]],
        "b_output": [1, 2, 3],
        "allow_mask": [[1]],
        "key_lengths": [7],
        "causal": "right",
        "num_heads": 2,
        "num_kv_heads": 0,
        "weight_layout": "in_out",
        "layout": "bhtd",
        "outputs": ["output", "wieghts"],
        "timeout_ms": 0,
        "tau": 1,
    }
    assert [fault["field"] for fault in refusal_of(client, members)] == [
        "w_query",
        "w_value.0.1",
        "w_output",
        "allow_mask.0.0",
        "key_lengths.0",
        "causal",
        "num_kv_heads",
        "outputs.1",
        "timeout_ms",
        "layout",
        "tau",
    ]
