"""Every golden case of a layer, forward and backward, on every path that serves it."""

from __future__ import annotations

import pytest
import torch

from attn_core import Engine
from attn_core.problem import LAYER_GRADIENT_OUTPUTS, LAYER_OUTPUTS, LayerGradientsProblem
from tests.support.golden import GoldenCase, disagreement, golden_cases
from tests.support.layers import (
    in_other_layout,
    layer_case,
    layer_gradients_reference,
    layer_reference,
)

CASES = golden_cases("layer")
WITH_GRADIENTS = [case for case in CASES if case.gradients]


def by_name(case: GoldenCase) -> str:
    return case.name


def gradients_case(case: GoldenCase, *, path: str | None = None) -> LayerGradientsProblem:
    layer = layer_case(case, outputs=("output",), path=path)
    return LayerGradientsProblem(layer, case.tensors["grad_output"], outputs=case.gradients)


def test_every_expected_output_of_a_layer_has_a_name_of_ours() -> None:
    assert len(CASES) == 7 and len(WITH_GRADIENTS) == 2
    for case in CASES:
        assert set(case.forward_outputs) <= set(LAYER_OUTPUTS), case.name
        assert set(case.gradients) <= set(LAYER_GRADIENT_OUTPUTS), case.name
        assert case.tolerance.keys() >= case.expected.keys(), case.name


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_oracle_agrees_with_the_golden_layer(case: GoldenCase) -> None:
    found = layer_reference(layer_case(case, outputs=case.forward_outputs))
    if case.gradients:
        found |= layer_gradients_reference(gradients_case(case))
    for name, expected in case.expected.items():
        assert disagreement(found[name], expected, case.tolerance[name]) is None, name


@pytest.mark.parametrize("path", [None, "manual"])
@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_engine_agrees_with_the_golden_layer(case: GoldenCase, path: str | None) -> None:
    problem = layer_case(case, outputs=case.forward_outputs, path=path)
    for layer in (problem, in_other_layout(problem)):
        result = Engine().attend(layer)
        assert tuple(result.outputs) == case.forward_outputs
        for name, found in result.outputs.items():
            assert disagreement(found, case.expected[name], case.tolerance[name]) is None, name


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_output_by_the_fused_kernel_agrees_with_the_golden_layer(case: GoldenCase) -> None:
    result = Engine().attend(layer_case(case, outputs=("output",), path="fused"))
    assert result.path == "fused"
    assert disagreement(result.outputs["output"], case.expected["output"], case.tolerance["output"]) is None


@pytest.mark.parametrize("path", [None, "manual", "blocked"])
@pytest.mark.parametrize("case", WITH_GRADIENTS, ids=by_name)
def test_gradients_agree_with_the_golden_layer(case: GoldenCase, path: str | None) -> None:
    result = Engine().attend(gradients_case(case, path=path))
    assert tuple(result.outputs) == case.gradients
    for name, found in result.outputs.items():
        assert found.dtype == torch.float64
        assert disagreement(found, case.expected[name], case.tolerance[name]) is None, name
