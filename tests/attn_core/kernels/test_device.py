"""Kernels on another device: what they make stands beside the query, and a GPU answers as the reference does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_core import AttentionProblem, AttentionResult, Engine
from attn_core.canonical import CanonicalProblem, canonicalize
from attn_core.hazards import Hazards, touched_rows, without_hazards
from attn_core.kernels import choose_path, fused, manual
from attn_core.kernels.output import without_pairs
from attn_core.prepared import prepare
from attn_core.problem import OUTPUTS
from tests.support.factory import DTYPES, features, make_problem, with_tensors
from tests.support.oracle import assert_matches_reference, assert_same_bits, same_bits

NUM_ROWS = 11
"""More than two blocks, where blocks are of one row or of five."""


def on(device: str, problem: AttentionProblem) -> AttentionProblem:
    return with_tensors(problem, **{name: tensor.to(device) for name, tensor in problem.tensors().items()})


def on_host(result: AttentionResult) -> AttentionResult:
    return replace(result, outputs={name: tensor.cpu() for name, tensor in result.outputs.items()})


def without_numbers(feature: str, **options: Any) -> CanonicalProblem:
    """A problem on the device of shapes, where an operation with a tensor of the host is an error."""
    tensors, own = features(seq_len_q=NUM_ROWS)[feature]
    return canonicalize(on("meta", make_problem(seq_len_q=NUM_ROWS, num_kv_heads=2, tensors=tensors, **options, **own)))


@pytest.mark.parametrize("rows", [None, (3, 0, NUM_ROWS - 1)])
@pytest.mark.parametrize("feature", list(features()))
def test_manual_kernel_makes_everything_on_the_device_of_the_query(
    feature: str, rows: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manual, "BLOCK_PAIRS", 1)
    for outputs in (OUTPUTS, ("weights", "top_weights")):
        problem = without_numbers(feature, outputs=outputs, top_k=2, select_rows=rows, select_heads=(1, 0))
        output = manual.attend(problem, Hazards(query=True, key=True, bias=True))
        assert {tensor.device.type for tensor in output.outputs.values()} == {"meta"}
        assert problem.empty_rows().device.type == "meta"
        assert {tensor.device.type for tensor in without_pairs(problem).outputs.values()} == {"meta"}


@pytest.mark.parametrize("feature", list(features()))
def test_fused_kernel_and_isolation_make_everything_on_the_device_of_the_query(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "MASK_BLOCK_PAIRS", 1)
    monkeypatch.setattr(fused, "ROW_MULTIPLE", 5)
    problem = without_numbers(feature)
    output = fused.attend(problem)
    assert output.outputs["context"].device.type == "meta"
    hazards = Hazards(query=True, key=True, value=True, bias=problem.bias is not None)
    clean, touched = without_hazards(problem, hazards), touched_rows(problem, hazards)
    assert {t.device.type for t in (touched, clean.query, clean.key, clean.value)} == {"meta"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "context and logsumexp only"),
        ({"outputs": ("context", "logsumexp")}, "logsumexp asked for on cuda"),
        ({"dtype": torch.float64}, "float64 on cuda"),
        ({"head_dim": 6}, "multiple of 16 bytes"),
        ({"head_dim_v": 16}, "context and logsumexp only"),
    ],
)
def test_path_on_a_gpu_is_chosen_from_metadata(change: dict[str, Any], reason: str) -> None:
    problem = make_problem(**change)
    path, why = choose_path(canonicalize(problem), None, device_type="cuda")
    assert reason in why
    assert path == ("fused" if reason.startswith("context") else "manual")
    assert prepare(problem, device_type="cuda").cost.peak_bytes > 0


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", list(features()))
def test_gpu_matches_reference(feature: str, dtype: torch.dtype) -> None:
    tensors, options = features()[feature]
    asked: list[dict[str, Any]] = [{}, {"outputs": OUTPUTS, "top_k": 3}]
    for outputs in asked:
        problem = make_problem(num_kv_heads=2, dtype=dtype, tensors=tensors, **outputs, **options)
        result = Engine(device="cuda").attend(problem)
        assert result.device.startswith("cuda")
        assert {tensor.device.type for tensor in result.outputs.values()} == {"cpu"}
        assert_matches_reference(problem, on_host(result))


@pytest.mark.cuda
@pytest.mark.parametrize("seq_len_kv", [7, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_on_a_gpu_reaches_the_rows_that_attend_it_alone(dtype: torch.dtype, seq_len_kv: int) -> None:
    problem = make_problem(seq_len_q=seq_len_kv, seq_len_kv=seq_len_kv, dtype=dtype, causal=True)
    assert problem.key is not None and problem.value is not None
    key, value = problem.key.clone(), problem.value.clone()
    key[0, 1, -1], value[0, 1, -1] = 0, 0
    engine = Engine(device="cuda")
    clean = engine.attend(with_tensors(problem, key=key, value=value)).outputs["context"].cpu()
    key, value = key.clone(), value.clone()
    key[0, 1, -1], value[0, 1, -1] = torch.nan, torch.inf
    result = engine.attend(with_tensors(problem, key=key, value=value))
    clean[0, 1, -1] = torch.nan
    assert same_bits(result.outputs["context"].cpu(), clean)
    assert result.nonfinite_rows == 1


@pytest.mark.cuda
def test_same_problem_twice_on_a_gpu_gives_the_same_bits() -> None:
    engine = Engine(device="cuda")
    for dtype in DTYPES:
        problem = make_problem(seq_len_q=300, seq_len_kv=700, head_dim=64, dtype=dtype, causal="lower_right")
        assert_same_bits(engine.attend(problem), engine.attend(problem))
