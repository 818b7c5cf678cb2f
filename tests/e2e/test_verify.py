"""`verify` through the native door: what comes back, in which form, and what it costs."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from tests.support.bodies import JSON, SAFETENSORS, read_answer, safetensors_body
from tests.support.factory import DTYPES, make_problem, make_tensor

FIELDS = {"max_abs_error", "max_rel_error", "worst"}


def ask(
    client: httpx.Client,
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    to: str = "/v1/attention",
    accept: str = SAFETENSORS,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    answer = client.post(
        to, content=safetensors_body(tensors, options), headers={"content-type": SAFETENSORS, "accept": accept}
    )
    assert answer.status_code == 200, answer.text
    return read_answer(answer.content, accept, {})


@pytest.mark.parametrize("accept", [JSON, SAFETENSORS])
@pytest.mark.parametrize("verify", [False, True])
def test_info_has_the_errors_where_they_are_asked_for_and_nowhere_else(
    client: httpx.Client, verify: bool, accept: str
) -> None:
    tensors = make_problem(seq_len_q=40, seq_len_kv=40).tensors()
    for _ in range(3):
        # From the second time on the header is known to the road for plain requests.
        _, info = ask(client, tensors, {"verify": verify}, accept=accept)
        assert (set(info) >= FIELDS) == verify and (FIELDS.isdisjoint(info)) == (not verify)
    if verify:
        assert 0 < info["max_abs_error"] < 1e-5 and 0 < info["max_rel_error"] < 1e-5
        assert info["worst"].startswith("context[")


def test_verifying_changes_no_bit_of_the_answer(client: httpx.Client) -> None:
    tensors = make_problem(seq_len_q=40, seq_len_kv=40, causal="upper_left").tensors()
    for options in ({}, {"outputs": ["context", "weights"]}, {"causal": True}):
        plain, _ = ask(client, tensors, options)
        verified, _ = ask(client, tensors, options | {"verify": True})
        assert set(plain) == set(verified)
        assert all(torch.equal(plain[name], verified[name]) for name in plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", ["fused", "manual", "blocked"])
def test_every_path_and_dtype_is_verified(client: httpx.Client, path: str, dtype: torch.dtype) -> None:
    tensors = make_problem(seq_len_q=40, seq_len_kv=40, dtype=dtype).tensors()
    _, info = ask(client, tensors, {"verify": True, "path": path})
    assert info["path"] == path and info["max_rel_error"] < 16 * torch.finfo(dtype).eps


def test_gradients_are_verified(client: httpx.Client) -> None:
    tensors = {**make_problem(seq_len_q=40, seq_len_kv=40).tensors(), "grad_context": make_tensor(2, 4, 40, 8)}
    _, info = ask(client, tensors, {"verify": True}, "/v1/attention/gradients")
    assert info["max_abs_error"] < 1e-4 and info["worst"].startswith("grad_")


def test_a_layer_and_its_gradients_are_verified(client: httpx.Client) -> None:
    tensors = {
        name: make_tensor(6, 6, seed=seed) for seed, name in enumerate(("w_query", "w_key", "w_value", "w_output"))
    }
    tensors["input"] = make_tensor(2, 5, 6, seed=9)
    options = {"verify": True, "num_heads": 2, "weight_layout": "in_out"}
    _, info = ask(client, tensors, options, "/v1/layer")
    assert info["max_abs_error"] < 1e-3 and info["worst"].startswith("output[")
    _, info = ask(client, {**tensors, "grad_output": make_tensor(2, 5, 6, seed=10)}, options, "/v1/layer/gradients")
    assert info["max_abs_error"] < 1e-2 and info["worst"].startswith("grad_")


def test_an_error_without_bound_is_said_by_its_word(client: httpx.Client) -> None:
    huge = [[3e38, 3e38]]
    members = {"query": huge, "key": [[3e38, 1], [1, 1]], "value": [[1, 0], [0, 1]], "scale": 1, "verify": True}
    info = client.post("/v1/attention", json=members).json()["info"]
    assert info["nonfinite_rows"] == 1
    assert (info["max_abs_error"], info["max_rel_error"]) == ("Infinity", "Infinity")
    assert info["worst"] == "context[0,0]"
