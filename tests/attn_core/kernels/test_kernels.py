"""The laws that every kernel keeps, each test one body for all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

from attn_core import AttentionOptions, AttentionProblem, AttentionResult, Engine, InvalidProblem, canonical, hazards
from attn_core.kernels import SUPPORTED_OUTPUTS, blocked, fused, isolated, manual
from attn_core.problem import OUTPUTS
from tests.support.factory import (
    DTYPES,
    features,
    make_problem,
    make_tensor,
    with_options,
    with_tensors,
)
from tests.support.oracle import (
    assert_close,
    assert_matches_reference,
    assert_same_bits,
    expected_outputs,
    same_bits,
)
from tests.support.strategies import problems

KERNELS = ("fused", "manual", "blocked")
ALL_OUTPUTS: dict[str, dict[str, Any]] = {
    "fused": {"outputs": ("context", "logsumexp")},
    "manual": {"outputs": OUTPUTS, "top_k": 3},
    "blocked": {"outputs": ("context", "logsumexp", "entropy", "top_weights", "weight_totals"), "top_k": 3},
}
NOT_SERVED_BY_FUSED = {"alibi", "causal alibi", "sinks", "sinks and mask", "softcap"}
POISON = (torch.nan, torch.inf, -torch.inf, 1e30, -3e38)


def attend(problem: AttentionProblem) -> AttentionResult:
    return Engine().attend(problem)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loop over blocks of items, heads and rows goes round many times."""
    monkeypatch.setattr(manual, "BLOCK_PAIRS", 1)
    monkeypatch.setattr(manual, "KEY_NUMBERS", 1)
    monkeypatch.setattr(manual, "MIN_BLOCK_ROWS", 3)
    monkeypatch.setattr(manual, "SORTED_PAIRS", 1)
    for name in ("BLOCK_PAIRS", "TILE_PAIRS", "RANKED_AT_ONCE"):
        monkeypatch.setattr(blocked, name, 1)
    monkeypatch.setattr(blocked, "FEW_ROWS", 3)
    monkeypatch.setattr(blocked, "GROUP_SIZES", (2, 3))
    monkeypatch.setattr(fused, "BLOCK_PAIRS", 1)
    for name in ("LONG_ROWS", "ROW_MULTIPLE", "BLOCK_ROW_MULTIPLE"):
        monkeypatch.setattr(fused, name, 3)
    monkeypatch.setattr(isolated, "PART_BYTES", 1)
    monkeypatch.setattr(canonical, "MASK_BLOCK_PAIRS", 1)
    monkeypatch.setattr(hazards, "PAIRS_PER_BLOCK", 1)
    monkeypatch.setattr(hazards, "READ_AT_ONCE", 1)
    monkeypatch.setattr(hazards, "COPIED_AT_ONCE", 1)


SERVED = [
    (kernel, feature)
    for kernel in KERNELS
    for feature in features()
    if kernel != "fused" or feature not in NOT_SERVED_BY_FUSED
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "feature"), SERVED)
def test_kernel_with_feature_matches_reference(kernel: str, feature: str, dtype: torch.dtype) -> None:
    tensors, options = features()[feature]
    problem = make_problem(num_kv_heads=2, dtype=dtype, tensors=tensors, path=kernel, **ALL_OUTPUTS[kernel], **options)
    if kernel == "fused" and "bias" in tensors:
        problem = with_tensors(problem, bias=tensors["bias"].to(dtype))
    assert_matches_reference(problem, attend(problem))


@pytest.mark.parametrize("feature", sorted(NOT_SERVED_BY_FUSED))
def test_feature_beyond_the_fused_kernel_is_refused_when_it_is_asked_for(feature: str) -> None:
    tensors, options = features()[feature]
    with pytest.raises(InvalidProblem) as refusal:
        attend(make_problem(tensors=tensors, path="fused", **options))
    assert [fault.field for fault in refusal.value.faults] == ["path"]
    assert attend(make_problem(tensors=tensors, **options)).path == "manual"


@settings(max_examples=500)
@given(problems())
def test_any_problem_matches_reference(problem: AttentionProblem) -> None:
    assert_matches_reference(problem, attend(problem))


@settings(max_examples=250)
@given(problems(outputs=("context", "logsumexp"), path="fused"))
def test_any_fused_problem_matches_reference(problem: AttentionProblem) -> None:
    # The log-sum-exp alone of half numbers is the manual kernel's.
    assume(problem.options.outputs != ("logsumexp",) or problem.query.dtype in (torch.float32, torch.float64))
    assert_matches_reference(problem, attend(problem))


@pytest.mark.parametrize("std", [1.0, 10.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_errs_at_most_twice_as_much_as_the_plain_formula(kernel: str, dtype: torch.dtype, std: float) -> None:
    problem = make_problem(
        batch=1,
        num_heads=2,
        seq_len_q=96,
        seq_len_kv=130,
        head_dim=64,
        dtype=dtype,
        std=std,
        path=kernel,
        **ALL_OUTPUTS[kernel],
    )
    assert_matches_reference(problem, attend(problem), strict=True)


@pytest.mark.parametrize("seq_len_kv", [7, 40])
@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_beyond_the_half_type_match_reference(kernel: str, seq_len_kv: int) -> None:
    problem = make_problem(
        seq_len_kv=seq_len_kv, dtype=torch.float16, std=200.0, path=kernel, scale=1e-5, **ALL_OUTPUTS[kernel]
    )
    assert problem.key is not None
    scores = problem.query.double() @ problem.key.double().transpose(-1, -2)
    assert scores.abs().max() > torch.finfo(torch.float16).max
    result = attend(problem)
    # The plain formula in float16 has no answer here, so the bounds are units of it.
    eps = torch.finfo(torch.float16).eps
    for name, expected in expected_outputs(problem).items():
        if name not in ("top_keys", "top_weights"):
            size = expected.abs().max().item()
            assert_close(result.outputs[name], expected, error=2 * eps * max(size, 200.0 if name == "context" else 1.0))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("kernel", "feature"), SERVED)
def test_problem_cut_into_blocks_matches_reference(kernel: str, feature: str) -> None:
    tensors, options = features(num_heads=2, seq_len_q=37, seq_len_kv=19)[feature]
    problem = make_problem(
        num_heads=2,
        num_kv_heads=1,
        seq_len_q=37,
        seq_len_kv=19,
        tensors=tensors,
        path=kernel,
        **ALL_OUTPUTS[kernel],
        **options,
    )
    result = attend(problem)
    assert_matches_reference(problem, result)
    for name in result.outputs:
        assert result.outputs[name].isfinite().all() or name in ("logits", "logsumexp")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rows", [(0,), (36, 0, 17), (5, 4, 3, 2, 1, 0), tuple(range(36, -1, -1))])
@pytest.mark.parametrize("heads", [None, (3,), (2, 0)])
@pytest.mark.parametrize("beside", [(), ("context", "logsumexp", "weight_totals")])
def test_selection_over_blocks_matches_reference(
    rows: tuple[int, ...], heads: tuple[int, ...] | None, beside: tuple[str, ...]
) -> None:
    outputs = ("weights", "scores", "logits", "entropy", "top_weights", *beside)
    tensors, options = features(seq_len_q=37, seq_len_kv=19)["mask and bias"]
    problem = make_problem(
        seq_len_q=37,
        seq_len_kv=19,
        tensors=tensors,
        outputs=outputs,
        select_rows=rows,
        select_heads=heads,
        top_k=4,
        **options,
    )
    assert_matches_reference(problem, attend(problem))


@pytest.mark.parametrize("rows", [(0,), (4, 0, 2), (3, 2)])
@pytest.mark.parametrize("beside", [(), ("context",)])
def test_selected_rows_come_in_the_order_asked(rows: tuple[int, ...], beside: tuple[str, ...]) -> None:
    problem = make_problem(outputs=("weights", *beside), select_rows=rows)
    assert_matches_reference(problem, attend(problem))


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=150)
@given(problems())
def test_any_problem_cut_into_blocks_matches_reference(problem: AttentionProblem) -> None:
    assert_matches_reference(problem, attend(problem))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seq_len_q", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("seq_len_kv", [1, 15, 16, 17, 33])
def test_kernel_at_the_edges_of_vectors_matches_reference(kernel: str, seq_len_q: int, seq_len_kv: int) -> None:
    problem = make_problem(
        seq_len_q=seq_len_q, seq_len_kv=seq_len_kv, causal="lower_right", path=kernel, **ALL_OUTPUTS[kernel]
    )
    assert_matches_reference(problem, attend(problem))


@pytest.mark.parametrize("scale", [0.0, -0.7, -1e-50, 1e-50, 1e-45, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_causal_with_any_scale_matches_reference(kernel: str, dtype: torch.dtype, scale: float) -> None:
    problem = make_problem(
        seq_len_q=33, seq_len_kv=33, causal=True, scale=scale, dtype=dtype, path=kernel, **ALL_OUTPUTS[kernel]
    )
    assert_matches_reference(problem, attend(problem))


def hidden_keys() -> dict[str, tuple[dict[str, Tensor], dict[str, Any], Tensor]]:
    """Ways in which no query may attend some of 20 keys, and which: bool ``[2, 1, 20]``."""
    keep = torch.arange(20) % 3 != 1
    per_item = torch.stack([keep, keep.flip(0)])
    lengths = torch.tensor([3, 18])
    early = torch.arange(20) < 6
    return {
        "key_lengths": ({"key_lengths": lengths}, {}, (torch.arange(20) >= lengths[:, None])[:, None]),
        "allow_mask": ({"allow_mask": keep}, {}, ~keep.expand(2, 1, 20)),
        "allow_mask per item": ({"allow_mask": per_item[:, None, None]}, {}, ~per_item[:, None]),
        "block_mask": ({"block_mask": ~per_item[:, None, None]}, {}, ~per_item[:, None]),
        "bias": ({"bias": torch.zeros(20).masked_fill(~keep, -torch.inf)}, {}, ~keep.expand(2, 1, 20)),
        "causal": ({}, {"causal": "upper_left"}, ~early.expand(2, 1, 20)),
        "window": ({"query_offset": torch.tensor([0])}, {"window_right": 0}, ~early.expand(2, 1, 20)),
        "everything": ({"key_lengths": torch.tensor([0, 0])}, {}, torch.ones(2, 1, 20, dtype=torch.bool)),
    }


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("way", list(hidden_keys()))
@pytest.mark.parametrize("kernel", KERNELS)
def test_key_that_no_query_may_attend_cannot_change_the_answer(kernel: str, way: str, poison: float) -> None:
    tensors, options, hidden = hidden_keys()[way]
    outputs = {name: ALL_OUTPUTS[name]["outputs"] for name in ("fused", "blocked")}
    outputs["manual"] = tuple(name for name in OUTPUTS if name != "scores")
    for dtype in DTYPES:
        own = {name: t.to(dtype) if name == "bias" else t for name, t in tensors.items()}
        problem = make_problem(
            num_kv_heads=2,
            seq_len_q=6,
            seq_len_kv=20,
            dtype=dtype,
            tensors=own,
            path=kernel,
            outputs=outputs[kernel],
            top_k=None if kernel == "fused" else 3,
            **options,
        )
        assert problem.key is not None and problem.value is not None
        here = hidden.unsqueeze(-1)
        zeros = with_tensors(problem, key=problem.key.masked_fill(here, 0), value=problem.value.masked_fill(here, 0))
        key, value = problem.key.clone(), problem.value.clone()
        bad = torch.tensor(poison, dtype=torch.float64).to(dtype)
        poisoned = with_tensors(problem, key=torch.where(here, bad, key), value=torch.where(here, bad, value))
        clean, result = attend(zeros), attend(poisoned)
        assert_same_bits(clean, result)
        assert result.nonfinite_rows == 0
        assert result.empty_rows == clean.empty_rows


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("seq_len_kv", [9, 40])
@pytest.mark.parametrize("kernel", KERNELS)
def test_key_behind_the_diagonal_cannot_change_earlier_rows(kernel: str, seq_len_kv: int, poison: float) -> None:
    cut = seq_len_kv - 3
    problem = make_problem(
        seq_len_q=seq_len_kv, seq_len_kv=seq_len_kv, num_kv_heads=2, causal=True, path=kernel, outputs=("context",)
    )
    assert problem.key is not None and problem.value is not None
    key, value = problem.key.clone(), problem.value.clone()
    key[0, 1, cut], value[0, 1, cut] = 0, 0
    clean = attend(with_tensors(problem, key=key, value=value))
    bad_key, bad_value = key.clone(), value.clone()
    bad_key[0, 1, cut], bad_value[0, 1, cut] = poison, poison
    result = attend(with_tensors(problem, key=bad_key, value=bad_value))
    own, other = result.outputs["context"], clean.outputs["context"]
    assert same_bits(own[1], other[1])
    assert same_bits(own[0, :2], other[0, :2])
    assert same_bits(own[0, 2:, :cut], other[0, 2:, :cut])
    if poison != poison:
        assert own[0, 2:, cut:].isnan().all()
        assert result.nonfinite_rows == 2 * (seq_len_kv - cut)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("kernel", KERNELS)
def test_padded_query_cannot_change_anything_and_is_answered_with_zeros(kernel: str, poison: float) -> None:
    problem = make_problem(
        tensors={"query_lengths": torch.tensor([2, 5])}, path=kernel, outputs=("context", "logsumexp")
    )
    query = problem.query.clone()
    query[0, :, 2:] = poison
    result = attend(with_tensors(problem, query=query))
    assert_same_bits(attend(problem), result)
    assert result.outputs["context"][0, :, 2:].eq(0).all()
    assert result.outputs["logsumexp"][0, :, 2:].eq(-torch.inf).all()
    assert (result.nonfinite_rows, result.empty_rows) == (0, 0)
    assert result.why == "asked for"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_top_keys_of_equal_weight_are_named_from_the_lowest(dtype: torch.dtype) -> None:
    allow = torch.tensor([False, True, True, False, True, True, False])
    problem = make_problem(scale=0.0, dtype=dtype, tensors={"allow_mask": allow}, outputs=("top_weights",), top_k=9)
    result = attend(problem)
    row = torch.tensor([1, 2, 4, 5, -1, -1, -1])
    assert torch.equal(result.outputs["top_keys"], row.expand(2, 4, 5, 7))
    weights = torch.tensor([0.25] * 4 + [0.0] * 3, dtype=dtype)
    assert torch.equal(result.outputs["top_weights"], weights.expand(2, 4, 5, 7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seq_len_kv", [1, 7, 15, 16, 33])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kernel", KERNELS)
def test_query_that_is_not_finite_is_answered_with_nan_alone(
    kernel: str, poison: float, seq_len_kv: int, dtype: torch.dtype
) -> None:
    problem = make_problem(seq_len_kv=seq_len_kv, num_kv_heads=2, dtype=dtype, path=kernel, **ALL_OUTPUTS[kernel])
    query = problem.query.clone()
    query[1, 2, 3, 0] = poison
    assert problem.key is not None
    same_sign = problem.key.abs() + 0.1
    problem = with_tensors(problem, key=same_sign)
    clean, result = attend(problem), attend(with_tensors(problem, query=query))
    own, other = result.outputs["context"], clean.outputs["context"].clone()
    if poison == -torch.inf or poison == torch.inf or poison != poison:
        assert own[1, 2, 3].isnan().all()
    other[1, 2, 3] = torch.nan
    assert same_bits(own, other)
    assert result.outputs["logsumexp"][1, 2, 3].isnan()
    assert result.outputs["logsumexp"].isnan().sum() == 1
    assert result.nonfinite_rows == 1


@pytest.mark.parametrize("seq_len_kv", [1, 7, 15, 16, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_key_that_is_nan_reaches_the_rows_that_attend_it_alone(
    kernel: str, dtype: torch.dtype, seq_len_kv: int
) -> None:
    problem = make_problem(seq_len_kv=seq_len_kv, num_kv_heads=2, dtype=dtype, path=kernel, **ALL_OUTPUTS[kernel])
    assert problem.key is not None
    key = problem.key.clone()
    key[0, 1, seq_len_kv - 1, 2] = torch.nan
    clean, result = attend(problem), attend(with_tensors(problem, key=key))
    other = clean.outputs["context"].clone()
    other[0, 2:] = torch.nan
    assert same_bits(result.outputs["context"], other)
    assert result.nonfinite_rows == 2 * 5


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_value_that_is_not_finite_is_summed_by_the_formula(kernel: str, dtype: torch.dtype, poison: float) -> None:
    problem = make_problem(
        dtype=dtype, path=kernel, tensors={"key_lengths": torch.tensor([3, 0])}, **ALL_OUTPUTS[kernel]
    )
    assert problem.value is not None
    value = problem.value.clone()
    value[:, 1, 2, 5] = poison
    value[:, 2, 2, 5], value[:, 2, 0, 5] = torch.inf, -torch.inf
    poisoned = with_tensors(problem, value=value)
    result = attend(poisoned)
    assert_matches_reference(poisoned, result)
    assert result.nonfinite_rows == 2 * 5


@pytest.mark.parametrize("seq_len_kv", [1, 7, 16, 33])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_that_overflow_give_nan_and_never_zero(kernel: str, sign: float, seq_len_kv: int) -> None:
    problem = make_problem(seq_len_kv=seq_len_kv, path=kernel, outputs=("context", "logsumexp"))
    query, key = problem.query.clone(), torch.full((2, 4, seq_len_kv, 8), 1e20)
    query[1, 3, 4] = sign * 1e20
    problem = with_tensors(problem, query=query, key=key)
    result = attend(problem)
    assert result.outputs["context"][1, 3, 4].isnan().all()
    assert result.outputs["logsumexp"][1, 3, 4].isnan()
    assert result.outputs["context"].isnan().sum() == 8
    assert result.nonfinite_rows == 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_score_that_overflows_downwards_weighs_nothing(kernel: str) -> None:
    problem = make_problem(path=kernel, outputs=("context",))
    assert problem.key is not None
    query, key = problem.query.abs(), problem.key.clone()
    query[0, 0, 0] = 1e20
    key[0, 0, 0] = -1e20
    problem = with_tensors(problem, query=query, key=key.clamp(max=0.0))
    assert_matches_reference(problem, attend(problem))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_bias_of_the_lowest_finite_number_only_shifts(kernel: str, dtype: torch.dtype) -> None:
    bias = torch.zeros(1, 1, 5, 7, dtype=dtype)
    bias[..., 0, :] = torch.finfo(dtype).min
    bias[..., 1, :3] = torch.finfo(dtype).min
    problem = make_problem(dtype=dtype, tensors={"bias": bias}, path=kernel, outputs=("context", "logsumexp"))
    result = attend(problem)
    assert_close(result.outputs["context"], expected_outputs(problem)["context"], error=0.02, name="context")
    assert result.outputs["context"].isfinite().all() and result.outputs["logsumexp"].isfinite().all()
    assert (result.empty_rows, result.nonfinite_rows) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_sign_of_a_zero_cannot_tell_what_a_forbidden_key_holds(kernel: str, dtype: torch.dtype) -> None:
    rules: list[tuple[dict[str, Tensor], dict[str, Any]]] = [
        ({"allow_mask": torch.zeros(1, dtype=torch.bool)}, {}),
        ({"key_lengths": torch.tensor([0])}, {}),
        ({"query_lengths": torch.tensor([0])}, {}),
        ({}, {"causal": "upper_left"}),
    ]
    for seq_len_q, seq_len_kv, width in ((16, 1, 32), (8, 1, 64), (2, 1, 256), (4, 3, 16), (5, 17, 8)):
        for tensors, options in rules:
            contexts = []
            for sign in (1.0, -1.0):
                value = torch.full((1, 1, seq_len_kv, width), sign, dtype=dtype)
                if "causal" in options:
                    # The one key that the first query sees holds 0.
                    value[:, :, 0] = 0.0
                problem = AttentionProblem(
                    query=torch.ones(1, 2, seq_len_q, width, dtype=dtype),
                    key=torch.ones(1, 1, seq_len_kv, width, dtype=dtype),
                    value=value,
                    options=AttentionOptions(path=kernel, **options),
                    **tensors,
                )
                contexts.append(attend(problem).outputs["context"][:, :, :1])
            assert same_bits(*contexts)
            assert not any(torch.signbit(context).any() for context in contexts)


@pytest.mark.parametrize("kernel", KERNELS)
def test_finite_bias_beyond_the_arithmetic_is_no_mask(kernel: str) -> None:
    bias = torch.zeros(1, 1, 5, 7, dtype=torch.float64)
    bias[..., 0, :] = -1e300
    bias[..., 1, :3] = -1e300
    bias[..., 2, 4] = 1e300
    problem = make_problem(tensors={"bias": bias}, path=kernel, outputs=("context", "logsumexp"))
    # check_values refuses it; a kernel that meets it all the same does not take it for a mask.
    (result,) = Engine().run([problem])
    assert isinstance(result, AttentionResult)
    assert result.outputs["context"][:, :, [0, 2]].isnan().all()
    assert result.outputs["logsumexp"][:, :, [0, 2]].isnan().all()
    assert (result.empty_rows, result.nonfinite_rows) == (0, 2 * 2 * 4)
    rest = [1, 3, 4]
    assert (result.outputs["context"] - expected_outputs(problem)["context"])[:, :, rest].abs().max() < 1e-6


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("seq_len_kv", [7, 20])
@pytest.mark.parametrize("kernel", KERNELS)
def test_bias_that_is_not_finite_gives_nan_in_its_rows_alone(kernel: str, seq_len_kv: int, poison: float) -> None:
    bias = torch.zeros(2, 1, 5, seq_len_kv)
    clean = attend(make_problem(seq_len_kv=seq_len_kv, tensors={"bias": bias}, path=kernel))
    bad = bias.clone()
    bad[1, 0, 2, 4] = poison
    result = attend(make_problem(seq_len_kv=seq_len_kv, tensors={"bias": bad}, path=kernel))
    other = clean.outputs["context"].clone()
    other[1, :, 2] = torch.nan
    assert same_bits(result.outputs["context"], other)
    assert result.nonfinite_rows == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_empty_row_is_zero_in_every_output(kernel: str, dtype: torch.dtype) -> None:
    allow = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    allow[0, 0, 3] = False
    problem = make_problem(dtype=dtype, tensors={"allow_mask": allow}, path=kernel, **ALL_OUTPUTS[kernel])
    result = attend(problem)
    assert result.empty_rows == 4
    assert result.outputs["logsumexp"][0, :, 3].eq(-torch.inf).all()
    for name in {"context", "weights", "entropy", "top_weights"} & result.outputs.keys():
        assert result.outputs[name][0, :, 3].eq(0).all()
    if kernel != "fused":
        assert result.outputs["top_keys"][0, :, 3].eq(-1).all()


def test_empty_row_with_sinks_has_the_sink_as_logsumexp() -> None:
    sinks = torch.tensor([0.5, -2.0, 0.0, 7.0])
    for seq_len_kv in (0, 7):
        problem = make_problem(
            seq_len_kv=seq_len_kv,
            tensors={"sinks": sinks, "key_lengths": torch.tensor([0, 0])},
            outputs=("context", "logsumexp"),
        )
        result = attend(problem)
        assert torch.equal(result.outputs["logsumexp"], sinks.view(1, 4, 1).expand(2, 4, 5))
        assert result.outputs["context"].eq(0).all()


@pytest.mark.parametrize(("kernel", "feature"), SERVED)
def test_problem_without_a_query_or_a_key_or_an_item_matches_reference(kernel: str, feature: str) -> None:
    for batch, seq_len_q, seq_len_kv in ((0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)):
        axes: dict[str, Any] = {"batch": batch, "seq_len_q": seq_len_q, "seq_len_kv": seq_len_kv}
        tensors, options = features(**axes)[feature]
        problem = make_problem(tensors=tensors, path=kernel, **axes, **ALL_OUTPUTS[kernel], **options)
        result = attend(problem)
        assert_matches_reference(problem, result)
        unpadded = "query_lengths" not in tensors
        assert result.empty_rows == (batch * 4 * seq_len_q if seq_len_kv == 0 and unpadded else result.empty_rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_and_rank_cannot_change_a_bit_of_the_fused_kernel(dtype: torch.dtype) -> None:
    def answer(**form: Any) -> AttentionResult:
        axes: dict[str, Any] = {"num_kv_heads": 2, "seq_len_q": 21, "seq_len_kv": 21}
        return attend(make_problem(**axes, dtype=dtype, causal=True, **ALL_OUTPUTS["fused"], **form))

    plain, bthd, btd, rank_3 = answer(), answer(layout="bthd"), answer(layout="btd"), answer(rank=3)
    context = plain.outputs["context"]
    assert same_bits(bthd.outputs["context"], context.transpose(1, 2))
    assert same_bits(btd.outputs["context"], context.transpose(1, 2).flatten(2))
    assert same_bits(rank_3.outputs["context"], context[0])
    for other in (bthd, btd):
        assert same_bits(other.outputs["logsumexp"], plain.outputs["logsumexp"])
    assert same_bits(rank_3.outputs["logsumexp"], plain.outputs["logsumexp"][0])


@pytest.mark.parametrize("seq_len_kv", [7, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_operand_spread_without_memory_matches_reference(kernel: str, dtype: torch.dtype, seq_len_kv: int) -> None:
    problem = make_problem(seq_len_kv=seq_len_kv, dtype=dtype, path=kernel, **ALL_OUTPUTS[kernel])
    one_for_all = make_tensor(1, 1, 1, 1, dtype=dtype, seed=5)
    one_key = make_tensor(2, 4, 1, 8, dtype=dtype, seed=6)
    one_item = make_tensor(1, 4, seq_len_kv, 8, dtype=dtype, seed=7)
    shape = (2, 4, seq_len_kv, 8)
    for key, value in (
        (one_for_all.expand(shape), one_item.expand(shape)),
        (one_key.expand(shape), one_key.expand(shape)),
        (one_item.expand(shape), one_for_all.expand(shape)),
    ):
        spread = with_tensors(problem, key=key, value=value, query=one_item[:, :, :5].expand(2, 4, 5, 8))
        assert_matches_reference(spread, attend(spread))


@pytest.mark.parametrize("asked", [("context",), ("context", "logsumexp"), OUTPUTS])
def test_asking_for_more_outputs_changes_none(asked: tuple[str, ...]) -> None:
    tensors, options = features()["mask and bias"]
    top_k = 3 if "top_weights" in asked else None
    problem = make_problem(tensors=tensors, outputs=asked, top_k=top_k, **options)
    assert_matches_reference(problem, attend(problem))


def test_supported_outputs_are_those_of_the_contract() -> None:
    assert SUPPORTED_OUTPUTS["fused"] == {"context", "logsumexp"}
    assert SUPPORTED_OUTPUTS["manual"] == set(OUTPUTS)
    assert SUPPORTED_OUTPUTS["blocked"] == set(OUTPUTS) - {"scores", "logits"}


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name not in ("context", "logsumexp")])
def test_output_beyond_the_fused_kernel_is_refused_by_it_and_answered_by_the_manual_one(name: str) -> None:
    options: dict[str, Any] = {"outputs": ("context", name), "top_k": 2 if name == "top_weights" else None}
    with pytest.raises(InvalidProblem) as refusal:
        attend(make_problem(path="fused", **options))
    assert refusal.value.faults[0].field == "path"
    assert f"{name} asked for" in refusal.value.faults[0].expected
    result = attend(make_problem(**options))
    assert (result.path, result.why) == ("manual", f"{name} asked for")


def test_plain_attention_is_answered_by_the_fused_kernel() -> None:
    assert attend(make_problem()).path == "fused"
    assert attend(with_options(make_problem(), path="manual")).why == "asked for"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["bhtd", "bthd", "btd"])
@pytest.mark.parametrize("path", ["fused", "manual"])
@pytest.mark.parametrize(
    ("seq_len_q", "seq_len_kv", "head_dim"), [(129, 257, 255), (257, 257, 127), (65, 600, 33), (32, 32, 1)]
)
def test_what_a_forbidden_key_holds_cannot_change_a_bit_at_any_width(
    seq_len_q: int, seq_len_kv: int, head_dim: int, path: str, layout: Any, dtype: torch.dtype
) -> None:
    mask = torch.ones(1, 1, 1, seq_len_kv, dtype=torch.bool)
    mask[..., 5] = False
    problem = make_problem(
        batch=1, num_heads=3, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv, head_dim=head_dim, head_dim_v=head_dim,
        dtype=dtype, layout=layout, path=path, tensors={"allow_mask": mask},
    )  # fmt: skip
    wanted = Engine().attend(problem).outputs["context"]
    assert problem.key is not None and problem.value is not None
    for name, tensor in (("key", problem.key), ("value", problem.value)):
        for what in (math.nan, math.inf, 5.0):
            changed = tensor.clone()
            at = (0, 1, 5, 0) if layout == "bhtd" else (0, 5, 1, 0) if layout == "bthd" else (0, 5, head_dim)
            changed[at] = what
            context = Engine().attend(with_tensors(problem, **{name: changed})).outputs["context"]
            assert torch.equal(context, wanted), (name, what)
