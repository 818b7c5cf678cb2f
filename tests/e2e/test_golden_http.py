"""The golden cases through the real HTTP door, in every form."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from tests.support.bodies import FORMS, ask, dtype_name
from tests.support.golden import GoldenCase, disagreement, golden_cases

PATHS = {"attention": "/v1/attention", "weighted_sum": "/v1/weighted_sum", "layer": "/v1/layer"}
NUM_GRADIENT_CASES = 6


def forward(
    client: httpx.Client, case: GoldenCase, form: str, outputs: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {name: tensor for name, tensor in case.tensors.items() if not name.startswith("grad_")}
    options = case.options if case.op == "weighted_sum" else case.options | {"outputs": list(outputs)}
    dtype = next(iter(tensors.values())).dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return ask(client, PATHS[case.op], form, tensors, options, dict.fromkeys(("scores", "logits", "logsumexp"), wide))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", golden_cases(), ids=str)
def test_golden_case_over_http(client: httpx.Client, case: GoldenCase, form: str) -> None:
    outputs, info = forward(client, case, form, case.forward_outputs)
    assert set(outputs) == set(case.forward_outputs)
    for name in outputs:
        reason = disagreement(outputs[name], case.expected[name], case.tolerance[name])
        assert reason is None, f"{name}: {reason}"
    assert info["dtype"] == dtype_name(next(iter(case.tensors.values())).dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [case for case in golden_cases() if case.gradients], ids=str)
def test_the_gradients_of_a_golden_case_over_http(client: httpx.Client, case: GoldenCase, form: str) -> None:
    outputs, info = ask(client, f"{PATHS[case.op]}/gradients", form, case.tensors, case.options)
    assert set(case.gradients) <= set(outputs)
    for name in case.gradients:
        reason = disagreement(outputs[name], case.expected[name], case.tolerance[name])
        assert reason is None, f"{name}: {reason}"
    asked, _ = ask(
        client, f"{PATHS[case.op]}/gradients", form, case.tensors, case.options | {"outputs": [*case.gradients]}
    )
    assert set(asked) == set(case.gradients)
    assert all(torch.equal(asked[name], outputs[name]) for name in asked)
    assert info["dtype"] == dtype_name(next(iter(case.tensors.values())).dtype)


@pytest.mark.parametrize("case", [case for case in golden_cases("attention") if "context" in case.expected], ids=str)
def test_context_alone_agrees_too_and_is_the_same_in_every_form(client: httpx.Client, case: GoldenCase) -> None:
    contexts = {form: forward(client, case, form, ("context",))[0]["context"] for form in FORMS}
    for context in contexts.values():
        assert disagreement(context, case.expected["context"], case.tolerance["context"]) is None
        assert torch.equal(context.isnan(), contexts["lists"].isnan())
        assert torch.equal(context.nan_to_num(0.0), contexts["lists"].nan_to_num(0.0))


def test_every_golden_case_is_accounted_for() -> None:
    by_op = Counter(case.op for case in golden_cases())
    assert by_op == {"attention": 70, "layer": 7, "weighted_sum": 2}
    assert set(by_op) == set(PATHS)
    assert sum(bool(case.gradients) for case in golden_cases()) == NUM_GRADIENT_CASES
