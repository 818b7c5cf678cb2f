"""Every golden case on every kernel that serves it, and the account of those that nothing serves yet."""

from __future__ import annotations

import pytest

from attn_core import Engine, InvalidProblem
from attn_core.kernels import SUPPORTED_OUTPUTS, reference
from tests.support.golden import (
    GoldenCase,
    attention_problem,
    disagreement,
    golden_cases,
    weighted_sum_problem,
)

ATTENTION = golden_cases("attention")
WEIGHTED_SUM = golden_cases("weighted_sum")
LAYERS = golden_cases("layer")
"""They run in ``test_golden_layers``, the gradients of ``ATTENTION`` in ``test_gradients``."""
NOT_SERVED_BY_FUSED = {
    "alibi_both_directions",
    "alibi_causal",
    "alibi_lower_right",
    "float16_scores_over_65504",
    "gqa_cross_value_width",
    "grad_plain",
    "grad_softcap",
    "odd_sizes_batch_3",
    "sinks",
    "sinks_empty_row",
    "softcap",
    "softcap_with_mask",
    "value_width_larger",
    "value_width_smaller",
}


def by_name(case: GoldenCase) -> str:
    return case.name


def test_every_case_is_run_or_accounted_for() -> None:
    assert {case.name for case in (*ATTENTION, *WEIGHTED_SUM, *LAYERS)} == {case.name for case in golden_cases()}
    assert len(ATTENTION) + len(WEIGHTED_SUM) + len(LAYERS) == len(golden_cases()) == 79


def test_every_output_of_a_case_that_is_run_is_compared() -> None:
    for case in ATTENTION:
        assert set(case.forward_outputs) <= SUPPORTED_OUTPUTS["manual"], case.name
        assert case.tolerance.keys() >= set(case.forward_outputs), case.name


@pytest.mark.parametrize("case", ATTENTION, ids=by_name)
def test_reference_agrees_with_the_golden_case(case: GoldenCase) -> None:
    found = reference.attend(attention_problem(case, outputs=case.forward_outputs))
    for name in case.forward_outputs:
        assert disagreement(found[name], case.expected[name], case.tolerance[name]) is None, name


@pytest.mark.parametrize("path", [None, "manual"])
@pytest.mark.parametrize("case", ATTENTION, ids=by_name)
def test_engine_agrees_with_the_golden_case(case: GoldenCase, path: str | None) -> None:
    result = Engine().attend(attention_problem(case, outputs=case.forward_outputs, path=path))
    assert result.outputs.keys() == set(case.forward_outputs)
    for name in case.forward_outputs:
        assert disagreement(result.outputs[name], case.expected[name], case.tolerance[name]) is None, name


@pytest.mark.parametrize("case", [case for case in ATTENTION if case.name not in NOT_SERVED_BY_FUSED], ids=by_name)
def test_fused_kernel_agrees_with_the_golden_case(case: GoldenCase) -> None:
    outputs = tuple(name for name in case.forward_outputs if name in SUPPORTED_OUTPUTS["fused"])
    result = Engine().attend(attention_problem(case, outputs=outputs, path="fused"))
    assert result.path == "fused"
    for name in outputs:
        assert disagreement(result.outputs[name], case.expected[name], case.tolerance[name]) is None, name


@pytest.mark.parametrize("case", [case for case in ATTENTION if case.name in NOT_SERVED_BY_FUSED], ids=by_name)
def test_case_beyond_the_fused_kernel_is_refused_by_name(case: GoldenCase) -> None:
    with pytest.raises(InvalidProblem) as refusal:
        Engine().attend(attention_problem(case, outputs=("context",), path="fused"))
    (fault,) = refusal.value.faults
    assert fault.field == "path" and fault.expected.startswith("manual or blocked, or nothing, since")


@pytest.mark.parametrize("case", WEIGHTED_SUM, ids=by_name)
def test_weighted_sum_agrees_with_the_golden_case(case: GoldenCase) -> None:
    result = Engine().attend(weighted_sum_problem(case))
    assert disagreement(result.outputs["context"], case.expected["context"], case.tolerance["context"]) is None
