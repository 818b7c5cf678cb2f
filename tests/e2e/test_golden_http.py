"""The golden cases through the real HTTP door, in every form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from tests.support.bodies import JSON, SAFETENSORS, list_body, object_body, read_answer, safetensors_body
from tests.support.golden import GoldenCase, disagreement, golden_cases

Write = Callable[[dict[str, Tensor], dict[str, Any]], bytes]
FORMS: dict[str, tuple[Write, str]] = {
    "lists": (list_body, JSON),
    "base64": (object_body, JSON),
    "safetensors": (safetensors_body, SAFETENSORS),
}
PATHS = {"attention": "/v1/attention", "weighted_sum": "/v1/weighted_sum"}


def served(case: GoldenCase) -> bool:
    """Layers and gradients come with later issues; of a gradient case the forward outputs are served."""
    return case.op in PATHS


def ask(
    client: httpx.Client, case: GoldenCase, form: str, outputs: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    write, content_type = FORMS[form]
    tensors = {name: tensor for name, tensor in case.tensors.items() if not name.startswith("grad_")}
    options = case.options if case.op == "weighted_sum" else case.options | {"outputs": list(outputs)}
    answer = client.post(PATHS[case.op], content=write(tensors, options), headers={"content-type": content_type})
    assert answer.status_code == 200, answer.text
    dtype = next(iter(tensors.values())).dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dtypes = {"context": dtype, "weights": dtype} | dict.fromkeys(("scores", "logits", "logsumexp"), wide)
    return read_answer(answer.content, answer.headers["content-type"], dtypes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [case for case in golden_cases() if served(case)], ids=str)
def test_golden_case_over_http(client: httpx.Client, case: GoldenCase, form: str) -> None:
    outputs, info = ask(client, case, form, case.forward_outputs)
    assert set(outputs) == set(case.forward_outputs)
    for name in outputs:
        reason = disagreement(outputs[name], case.expected[name], case.tolerance[name])
        assert reason is None, f"{name}: {reason}"
    assert info["dtype"] == str(next(iter(case.tensors.values())).dtype).removeprefix("torch.")


@pytest.mark.parametrize("case", [case for case in golden_cases("attention") if "context" in case.expected], ids=str)
def test_context_alone_agrees_too_and_is_the_same_in_every_form(client: httpx.Client, case: GoldenCase) -> None:
    contexts = {form: ask(client, case, form, ("context",))[0]["context"] for form in FORMS}
    for context in contexts.values():
        assert disagreement(context, case.expected["context"], case.tolerance["context"]) is None
        assert torch.equal(context.isnan(), contexts["lists"].isnan())
        assert torch.equal(context.nan_to_num(0.0), contexts["lists"].nan_to_num(0.0))


def test_every_golden_case_is_accounted_for() -> None:
    by_op = Counter(case.op for case in golden_cases())
    now = sum(served(case) for case in golden_cases())
    not_yet = [case.name for case in golden_cases() if not served(case)]
    assert by_op == {"attention": 70, "layer": 7, "weighted_sum": 2}
    assert now + len(not_yet) == 79
    assert all(case.op == "layer" for case in golden_cases() if case.name in not_yet)


@pytest.mark.parametrize("path", ["/v1/layer", "/v1/attention/gradients", "/v1/attention/plan"])
def test_what_is_not_served_yet_is_not_found(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json={})
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "/errors/not-found"
