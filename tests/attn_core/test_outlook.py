"""An outlook from shapes alone: what preparing and running the same problem with numbers says."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_core import AttentionProblem, AttentionResult, Engine, InvalidProblem
from attn_core.outlook import (
    Outlook,
    PlannedProblem,
    at_length,
    max_seq_len,
    on_path,
    outlook,
    with_specs,
)
from attn_core.prepared import prepare
from attn_core.problem import GradientsProblem
from attn_core.support import PATHS
from attn_core.validate import spec_of
from tests.support.factory import features, make_mask, make_problem, make_tensor, with_options, with_tensors
from tests.support.gradients import make_gradients
from tests.support.memory import peak_bytes_of

MIB = 2**20
LIMITS: dict[str, int] = {"longest": 2**24, "max_elements": 2**31 - 1, "max_input_bytes": 2**60}


def hollow(problem: PlannedProblem) -> PlannedProblem:
    """The same without numbers."""
    return with_specs(problem, {name: spec_of(tensor) for name, tensor in problem.tensors().items()})


def look(problem: PlannedProblem) -> Outlook:
    return outlook(hollow(problem), device_type="cpu")


def assert_as_computed(problem: PlannedProblem) -> None:
    """Path, reason and cost of every path are those of the problem with its numbers, and of its answer."""
    engine, found = Engine(), look(problem)
    prepared = engine.prepare(problem)
    assert (found.chosen.path, found.chosen.why, found.chosen.cost) == (prepared.path, prepared.why, prepared.cost)
    assert tuple(found.paths) == PATHS
    for path, one in found.paths.items():
        asked = on_path(problem, path)
        try:
            own = engine.prepare(asked)
        except InvalidProblem as refusal:
            assert one.cost is None
            assert one.why in str(refusal)
            continue
        assert one.cost == own.cost
        (result,) = engine.run([own])
        assert isinstance(result, AttentionResult)
        assert (result.path, result.flops, result.peak_bytes) == (path, one.cost.flops, one.cost.peak_bytes)
        assert result.why == look(asked).chosen.why
        assert sum(tensor.nbytes for tensor in result.outputs.values()) == one.cost.output_bytes
    assert found.paths[found.chosen.path].why == found.chosen.why


@pytest.mark.parametrize("feature", list(features()))
def test_every_feature_is_foreseen_as_it_is_computed(feature: str) -> None:
    tensors, options = features()[feature]
    assert_as_computed(make_problem(tensors=tensors, num_kv_heads=2, **options))


ASKED: list[dict[str, Any]] = [
    {"outputs": ("context", "logsumexp")},
    {"outputs": ("weights",)},
    {"outputs": ("weights",), "select_rows": (1, 0), "select_heads": (2,)},
    {"outputs": ("entropy", "weight_totals")},
    {"outputs": ("top_weights",), "top_k": 3},
    {"outputs": ("logits",)},
    {"outputs": ("logsumexp",), "dtype": torch.bfloat16},
    {"outputs": ("context", "logsumexp"), "dtype": torch.bfloat16},
    {"outputs": ("context", "logsumexp"), "dtype": torch.bfloat16, "seq_len_kv": 0},
    {"verify": True},
    {"layout": "btd"},
    {"layout": "bthd", "head_dim_v": 5},
    {"rank": 2},
    {"self_attention": True},
    {"batch": 0},
    {"seq_len_kv": 0},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_every_form_is_foreseen_as_it_is_computed(asked: dict[str, Any]) -> None:
    assert_as_computed(make_problem(**asked))


@pytest.mark.parametrize(
    "asked", [{}, {"outputs": ("grad_query", "grad_weights")}, {"outputs": ("grad_value",)}], ids=str
)
@pytest.mark.parametrize("self_attention", [False, True])
def test_gradients_are_foreseen_as_they_are_computed(asked: dict[str, Any], self_attention: bool) -> None:
    problem = make_gradients(make_problem(self_attention=self_attention), **asked)
    if self_attention and asked.get("outputs") == ("grad_value",):
        problem = replace(problem, outputs=None)
    assert_as_computed(problem)


def test_an_asked_path_that_cannot_serve_is_refused() -> None:
    with pytest.raises(InvalidProblem, match="path"):
        look(make_problem(softcap=1.0, path="fused"))


def test_a_shape_that_fits_nowhere_allocates_nothing() -> None:
    query = torch.empty(64, 64, 2**20, 128, device="meta")
    attention = AttentionProblem(query)
    problems: tuple[PlannedProblem, ...] = (attention, GradientsProblem(attention, grad_context=query))
    for problem in problems:
        assert peak_bytes_of(functools.partial(outlook, problem, device_type="cpu")) < MIB
        assert outlook(problem, device_type="cpu").chosen.cost.peak_bytes > 2**40


# The longest


def needed(problem: PlannedProblem, seq_len: int) -> int:
    return prepare(with_specs(problem, at_length(problem, seq_len)), device_type="cpu").cost.peak_bytes


def longest(problem: PlannedProblem, allowed_bytes: int, **limits: int) -> int:
    return max_seq_len(hollow(problem), device_type="cpu", allowed_bytes=allowed_bytes, **LIMITS | limits)


def test_the_longest_keeps_to_what_a_body_may_have() -> None:
    problem = make_problem()
    found = longest(problem, 2**40, max_input_bytes=10_000)
    specs = at_length(problem, found), at_length(problem, found + 1)
    sizes = [sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in each.values()) for each in specs]
    assert sizes[0] <= 10_000 < sizes[1]


LENGTHENED: dict[str, PlannedProblem] = {
    "context": make_problem(),
    "weights": make_problem(outputs=("context", "weights")),
    "full mask": make_problem(tensors={"allow_mask": make_mask(2, 1, 5, 7), "bias": make_tensor(7)}),
    "in other layouts": make_problem(layout="btd", num_kv_heads=2, causal="lower_right"),
    "gradients": make_gradients(make_problem()),
    "self-attention": make_problem(self_attention=True, rank=3),
    "verified": make_problem(verify=True),
}


@pytest.mark.parametrize("allowed_mib", [8, 300])
@pytest.mark.parametrize("kind", LENGTHENED)
def test_the_longest_fits_and_one_more_does_not(kind: str, allowed_mib: int) -> None:
    problem, allowed = LENGTHENED[kind], allowed_mib * MIB
    found = longest(problem, allowed)
    assert 0 < found < LIMITS["longest"]
    assert needed(problem, found) <= allowed < needed(problem, found + 1)


def test_nothing_fits_into_nothing() -> None:
    assert longest(make_problem(), 1) == 0


def test_the_longest_keeps_to_what_a_request_may_declare() -> None:
    assert longest(make_problem(), 2**62, longest=1000) == 1000
    # 2 items, 4 heads of 8.
    assert longest(make_problem(), 2**62, max_elements=64 * 123) == 123
    mask = make_mask(1, 1, 5, 7)
    assert longest(make_problem(tensors={"allow_mask": mask}), 2**62, max_elements=100 * 100) == 100


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("query", torch.empty(2, 4, 5, 8), (2, 4, 9, 8)),
        ("allow_mask", torch.empty(2, 1, 5, 7), (2, 1, 9, 9)),
        ("block_mask", torch.empty(1, 4, 1, 7), (1, 4, 1, 9)),
        ("bias", torch.empty(7), (9,)),
        ("key_lengths", torch.empty(2), (2,)),
        ("sinks", torch.empty(4), (4,)),
    ],
)
def test_only_the_axes_of_tokens_grow(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    problem = with_tensors(make_problem(), **{name: tensor})
    assert at_length(problem, 9)[name].shape == shape


def test_gradients_that_come_in_grow_too() -> None:
    grown = at_length(make_gradients(with_options(make_problem(), causal="lower_right")), 9)
    assert grown["grad_context"].shape == (2, 4, 9, 8) and grown["grad_logsumexp"].shape == (2, 4, 9)


def test_a_tensor_without_numbers_has_dtype_and_shape_alone() -> None:
    spec = spec_of(make_tensor(2, 3, dtype=torch.bfloat16))
    assert spec.hollow().is_meta and spec_of(spec.hollow()) == spec


def test_an_outlook_does_no_arithmetic_on_tensors_without_numbers() -> None:
    # torch imports its compiler for the first such, which would hold up everybody for a second.
    program = """
import sys, torch
from attn_core.outlook import outlook
from attn_core import AttentionOptions, AttentionProblem
def hollow(*shape, dtype=torch.float32): return torch.empty(shape, dtype=dtype, device="meta")
def index(): return hollow(2, dtype=torch.int64)
query, kv = hollow(2, 4, 5, 8), hollow(2, 2, 7, 8)
for causal, more in (
    (False, {}),
    (True, {"query_offset": index()}),
    ("lower_right", {"key_lengths": index()}),
    ("lower_right", {"query_lengths": index()}),
    ("lower_right", {"key_lengths": index(), "query_lengths": index()}),
):
    for features in ({}, {"alibi_slopes": hollow(4), "sinks": hollow(4)}, {"bias": hollow(1, 4, 5, 7)}):
        for outputs in (("context",), ("weights",), ("entropy",)):
            if causal is False and features:
                continue
            for verify in (False, True):
                window = 3 if causal else None
                options = AttentionOptions(causal=causal, outputs=outputs, verify=verify, window_left=window)
                outlook(AttentionProblem(query, kv, kv, **more, **features, options=options), device_type="cpu")
print("torch._dynamo" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "False", ran.stderr
