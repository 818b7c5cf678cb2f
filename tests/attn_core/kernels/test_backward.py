"""The backward pass in blocks: NaN and infinities stay where the sums take them, cuts change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_core import Abandoned, AttentionProblem, AttentionResult, Engine
from attn_core.canonical import canonicalize
from attn_core.cut import Cut
from attn_core.kernels import backward
from attn_core.maths import gradients as maths
from attn_core.problem import Dims, GradientsProblem
from tests.support.factory import DTYPES, features, make_mask, make_problem, with_tensors
from tests.support.gradients import all_outputs, assert_matches_autograd, by_hand, make_gradients
from tests.support.oracle import assert_same_bits

AXES: dict[str, Any] = {"batch": 2, "num_heads": 4, "seq_len_q": 66, "seq_len_kv": 80}
NAMES = ("query", "key", "value", "grad_context", "grad_logsumexp")
MASKED = (
    "allow_mask of keys",
    "allow_mask of queries",
    "allow_mask of all",
    "block_mask of all",
    "bias of queries and keys",
    "mask and bias",
    "both lengths",
    "lower_right with lengths",
    "causal at an offset",
    "causal window",
    "sinks and mask",
    "everything forbidden",
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems of 66 queries are cut, by rows too, and so is all that is done to a part of a block at once."""
    monkeypatch.setattr(backward, "BLOCK_PAIRS", 2**11)
    monkeypatch.setattr(backward, "SKIPPING_BLOCK_PAIRS", 2**11)
    monkeypatch.setattr(backward, "MIN_BLOCK_ROWS", 16)
    monkeypatch.setattr(backward, "KEY_MULTIPLE", 4)
    monkeypatch.setattr(backward, "KEY_BYTES_AT_ONCE", 2**9)
    for name in ("SUMS_AT_ONCE", "MARKS_AT_ONCE", "SHIFTED_AT_ONCE"):
        monkeypatch.setattr(backward, name, 2**8)
    for name in ("PAIRS_AT_ONCE", "MARKED_AT_ONCE"):
        monkeypatch.setattr(maths, name, 2**8)


def problem_of(feature: str, *, dtype: torch.dtype = torch.float32, **axes: Any) -> GradientsProblem:
    sizes = {name: axes[name] for name in AXES if name in axes}
    tensors, options = features(**sizes)[feature]
    problem = make_gradients(make_problem(num_kv_heads=2, dtype=dtype, tensors=tensors, **axes, **options))
    return replace(problem, outputs=all_outputs(problem))


def usual(problem: GradientsProblem) -> GradientsProblem:
    return replace(problem, outputs=None)


def with_numbers(problem: GradientsProblem, where: dict[str, Tensor], number: float) -> GradientsProblem:
    """The problem with ``number`` in the marked tokens of its tensors."""

    def poisoned(name: str, tensor: Tensor) -> Tensor:
        marks = where[name]
        return tensor.masked_fill(marks if name == "grad_logsumexp" else marks.unsqueeze(-1), number)

    attention = problem.attention
    own = {name: poisoned(name, getattr(attention, name)) for name in where if hasattr(attention, name)}
    problem = replace(problem, attention=with_tensors(attention, **own))
    for name in ("grad_context", "grad_logsumexp"):
        if name in where:
            tensor: Tensor = getattr(problem, name)
            problem = replace(problem, **{name: poisoned(name, tensor)})  # type: ignore[arg-type]
    return problem


def unattended(attention: AttentionProblem) -> dict[str, Tensor]:
    """The tokens of each tensor that take part in nothing."""
    canonical = canonicalize(attention)
    dims = canonical.dims
    allowed = canonical.allowed(canonical.all_rows())
    assert allowed is not None
    allowed = allowed.expand(dims.batch, dims.num_heads, dims.seq_len_q, dims.seq_len_kv)
    rows = ~allowed.any(dim=-1)
    by_group = allowed.any(dim=2).view(dims.batch, dims.num_kv_heads, dims.group_size, dims.seq_len_kv)
    keys = ~by_group.any(dim=2)
    return {"query": rows, "key": keys, "value": keys, "grad_context": rows, "grad_logsumexp": rows}


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("feature", MASKED)
def test_what_takes_part_in_nothing_cannot_change_a_bit(feature: str, number: float) -> None:
    problem = problem_of(feature)
    where = unattended(problem.attention)
    clean = Engine().attend(problem)
    poisoned = Engine().attend(with_numbers(problem, where, number))
    assert_same_bits(clean, poisoned)
    assert poisoned.nonfinite_rows == 0
    of_bias = clean.outputs.get("grad_bias", torch.zeros(1))
    assert not torch.signbit(of_bias[of_bias == 0]).any()
    for name in ("query", "key", "value"):
        assert not clean.outputs[f"grad_{name}"][where[name]].any()
        assert not torch.signbit(clean.outputs[f"grad_{name}"][where[name]]).any()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("feature", ["lower_right with lengths", "window", "bias of all", "block_mask of all"])
def test_what_takes_part_in_nothing_cannot_change_a_bit_of_a_problem_in_blocks(feature: str) -> None:
    problem = problem_of(feature, **AXES)
    poisoned = with_numbers(problem, unattended(problem.attention), torch.nan)
    assert_same_bits(Engine().attend(problem), Engine().attend(poisoned))


@pytest.mark.parametrize("scale", [2.0, -8.0, 1e3])
@pytest.mark.parametrize("name", ["query", "key", "value", "grad_context"])
def test_huge_number_that_takes_part_in_nothing_cannot_change_a_bit_at_any_scale(name: str, scale: float) -> None:
    # So large that BLAS multiplies.
    tensors = {"key_lengths": torch.tensor([15, 19]), "query_lengths": torch.tensor([17, 11])}
    attention = make_problem(num_kv_heads=2, seq_len_q=18, seq_len_kv=19, head_dim=16, tensors=tensors, scale=scale)
    problem = make_gradients(attention)
    problem = replace(problem, outputs=all_outputs(problem))
    where = {name: unattended(attention)[name]}
    clean = Engine().attend(problem)
    for number in (3e38, -3e38):
        poisoned = Engine().attend(with_numbers(problem, where, number))
        assert_same_bits(clean, poisoned)
        assert poisoned.nonfinite_rows == 0


def test_scale_cannot_make_attended_numbers_overflow_where_the_formula_does_not() -> None:
    attention = make_problem(batch=1, num_heads=1, seq_len_q=17, seq_len_kv=16, head_dim=16, scale=4.0)
    assert attention.key is not None
    key = torch.full_like(attention.key, 1.1e38)
    key[0, 0, ::2] *= -3.0
    attention = with_tensors(attention, query=attention.query * 1e-38, key=key)
    problem = make_gradients(attention, std=1e-3)
    result = Engine().attend(problem)
    assert result.nonfinite_rows == 0
    for name, truth in by_hand(problem).items():
        own = result.outputs[name].double()
        # Some numbers are below the normal ones of float32.
        torch.testing.assert_close(own, truth, rtol=1e-5, atol=1e-6 * truth.abs().max().item() + 1e-44)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layout", ["bhtd", "bthd", "btd"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "num_heads": 2, "seq_len_q": 33, "seq_len_kv": 33, "head_dim": 1},
        {"batch": 2, "num_heads": 2, "seq_len_q": 19, "seq_len_kv": 33, "head_dim": 3},
        {"batch": 1, "num_heads": 1, "seq_len_q": 33, "seq_len_kv": 19, "head_dim": 5},
        {"batch": 2, "num_heads": 3, "seq_len_q": 1, "seq_len_kv": 33, "head_dim": 8},
        {"batch": 1, "num_heads": 2, "seq_len_q": 300, "seq_len_kv": 611, "head_dim": 3},
    ],
    ids=str,
)
def test_odd_shapes_that_lie_in_any_order_keep_their_bits(sizes: dict[str, Any], layout: Any, number: float) -> None:
    lengths = {
        "key_lengths": torch.tensor([6, 9][: sizes["batch"]]),
        "query_lengths": torch.tensor([min(sizes["seq_len_q"], n) for n in (13, 1)][: sizes["batch"]]),
    }
    problem = make_gradients(make_problem(tensors=lengths, layout=layout, **sizes))
    poisoned = problem
    heads = sizes["num_heads"] if layout == "btd" else None
    for name, where in unattended(problem.attention).items():
        tensor: Tensor = getattr(poisoned, name, None)  # type: ignore[assignment]
        tensor = getattr(poisoned.attention, name) if tensor is None else tensor
        if name == "grad_logsumexp":
            tensor = tensor.masked_fill(where, number)
        else:
            marks = where if layout == "bhtd" else where.transpose(1, 2)
            marks = marks.unsqueeze(-1)
            shape = tensor.shape
            split = tensor if heads is None else tensor.view(*shape[:2], heads, -1)
            tensor = split.masked_fill(marks, number).view(shape)
        if name.startswith("grad_"):
            poisoned = replace(poisoned, **{name: tensor})  # type: ignore[arg-type]
        else:
            poisoned = replace(poisoned, attention=with_tensors(poisoned.attention, **{name: tensor}))
    clean, spoiled = Engine().attend(problem), Engine().attend(poisoned)
    assert_same_bits(clean, spoiled)
    assert spoiled.nonfinite_rows == 0


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("sizes", [(1, 20000, 16), (3, 9001, 33), (2, 300, 7)], ids=str)
def test_rows_of_few_queries_keep_their_bits_beside_rows_that_attend_what_is_not_finite(
    sizes: tuple[int, int, int], num_kv_heads: int, number: float
) -> None:
    rows, keys, width = sizes
    mask = make_mask(2, 2, rows, keys, share=0.6)
    mask[1, :, :, 5] = mask[0, 0, :, keys - 1] = False
    axes: dict[str, Any] = {"batch": 2, "num_heads": 2, "seq_len_q": rows, "seq_len_kv": keys, "head_dim": width}
    problem = make_gradients(make_problem(num_kv_heads=num_kv_heads, tensors={"allow_mask": mask}, **axes))
    where = torch.zeros(2, num_kv_heads, keys, dtype=torch.bool)
    where[1, :, 5] = where[0, 0, keys - 1] = where[0, -1, keys - 2] = True
    clean = Engine().attend(problem)
    spoiled = Engine().attend(with_numbers(problem, {"key": where}, number))
    of_group = where.repeat_interleave(2 // num_kv_heads, dim=1)
    touched = (mask & of_group.unsqueeze(2)).any(dim=-1)
    assert spoiled.nonfinite_rows == int(touched.sum()) and not touched.all()
    own, before = spoiled.outputs["grad_query"], clean.outputs["grad_query"]
    assert torch.equal(own[~touched], before[~touched])


ASKED: tuple[tuple[str, ...], ...] = (
    ("grad_bias",),
    ("grad_sinks",),
    ("grad_value",),
    ("grad_key", "grad_value"),
    ("grad_value", "grad_weights"),
    ("grad_key", "grad_value", "grad_weights"),
    ("grad_logits",),
    ("grad_query",),
    ("grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks", "grad_weights", "grad_logits"),
)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_not_finite_are_counted_whatever_is_asked(name: str, number: float) -> None:
    tensors, options = features()["mask and bias"]
    tensors = tensors | {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])}
    problem = make_gradients(make_problem(num_kv_heads=2, tensors=tensors, **options))
    problem = replace(problem, outputs=all_outputs(problem))
    tensor = getattr(problem, name, None)
    tensor = getattr(problem.attention, name) if tensor is None else tensor
    where = torch.zeros(tensor.shape if name == "grad_logsumexp" else tensor.shape[:-1], dtype=torch.bool)
    where[0, 0, 2] = True
    problem = with_numbers(problem, {name: where}, number)
    counts = {Engine().attend(replace(problem, outputs=asked)).nonfinite_rows for asked in ASKED}
    assert len(counts) == 1 and counts != {0}


def test_rows_that_are_not_finite_are_counted_of_self_attention_too() -> None:
    lengths = {"key_lengths": torch.tensor([3, 5]), "sinks": torch.zeros(4)}
    problem = make_gradients(make_problem(self_attention=True, seq_len_q=5, seq_len_kv=5, tensors=lengths))
    where = torch.zeros(2, 4, 5, dtype=torch.bool)
    where[0, 1, 1] = where[1, 2, 4] = where[0, 3, 4] = True
    problem = with_numbers(problem, {"query": where}, torch.nan)
    counts = {
        asked: Engine().attend(replace(problem, outputs=asked)).nonfinite_rows
        for asked in (("grad_query",), ("grad_sinks",), ("grad_query", "grad_sinks", "grad_logits"))
    }
    # All five rows of the first two, and one row by itself that no other attends.
    assert set(counts.values()) == {5 + 5 + 1}


def test_key_behind_the_mask_of_some_queries_changes_the_gradients_of_the_others_alone() -> None:
    problem = problem_of("upper_left", seq_len_q=7, num_heads=4)
    clean = Engine().attend(problem)
    for name in ("key", "value"):
        last = torch.zeros(2, 2, 7, dtype=torch.bool)
        last[0, 1, 5] = True
        result = Engine().attend(with_numbers(problem, {name: last}, torch.nan))
        touched = result.outputs["grad_query"].isnan().all(dim=-1)
        assert touched[0, 2:, 5:].all() and touched.sum() == 2 * 2
        assert result.nonfinite_rows == 4
        same = result.outputs["grad_query"][~touched]
        assert torch.equal(same, clean.outputs["grad_query"][~touched])
        # Keys that the touched queries attend collect from them; those of other items and heads do not.
        assert torch.equal(result.outputs["grad_key"][1], clean.outputs["grad_key"][1])
        assert torch.equal(result.outputs["grad_value"][0, 0], clean.outputs["grad_value"][0, 0])
        assert result.outputs["grad_logits"][0, 2, 5, 6] == 0 == result.outputs["grad_weights"][0, 2, 5, 6]


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "feature", ["nothing", "lower_right", "softcap", "sinks", "mask and bias", "negative scale", "scale of 0", "alibi"]
)
def test_attended_number_that_is_not_finite_goes_where_the_formula_takes_it(
    feature: str, name: str, number: float
) -> None:
    problem = usual(problem_of(feature, dtype=torch.float64))
    tensor = getattr(problem, name, None)
    tensor = getattr(problem.attention, name) if tensor is None else tensor
    shape = tensor.shape if name == "grad_logsumexp" else tensor.shape[:-1]
    where = torch.zeros(shape, dtype=torch.bool)
    where[0, 1, 2] = where[1, 0, -1] = True
    if name != "grad_logsumexp":
        # One number of a token, so that its neighbours stay finite.
        tensor = tensor.clone()
        tensor[where, torch.full((2,), 3)] = number
    else:
        tensor = tensor.masked_fill(where, number)
    if name in ("grad_context", "grad_logsumexp"):
        problem = replace(problem, **{name: tensor})
    else:
        problem = replace(problem, attention=with_tensors(problem.attention, **{name: tensor}))
    expected, result = by_hand(problem), Engine().attend(problem)
    for gradient, truth in expected.items():
        own = result.outputs[gradient].double()
        assert torch.equal(own.isnan(), truth.isnan()), gradient
        assert torch.equal(own.isposinf(), truth.isposinf()) and torch.equal(own.isneginf(), truth.isneginf()), gradient
        finite = truth.isfinite()
        torch.testing.assert_close(own[finite], truth[finite], rtol=1e-6, atol=1e-6)
    assert result.nonfinite_rows == int((~expected["grad_query"].isfinite()).any(dim=-1).sum())


IN_BLOCKS = (
    "nothing", "lower_right", "window", "causal window", "mask and bias", "bias of all", "bias per head", "sinks",
    "key_lengths", "both lengths", "causal at an offset", "alibi", "softcap", "allow_mask of queries",
)  # fmt: skip


@pytest.mark.parametrize("self_attention", [False, True])
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("feature", IN_BLOCKS)
def test_problem_in_blocks_matches_autograd(feature: str, self_attention: bool) -> None:
    dtype = DTYPES[(IN_BLOCKS.index(feature) + 2 * self_attention) % len(DTYPES)]
    axes = {**AXES, "seq_len_kv": 66} if self_attention else AXES
    tensors, options = features(**axes)[feature]
    heads: dict[str, Any] = {"self_attention": True} if self_attention else {"num_kv_heads": 2}
    problem = make_gradients(make_problem(dtype=dtype, head_dim=16, tensors=tensors, **axes, **heads, **options))
    problem = replace(problem, outputs=all_outputs(problem))
    result = Engine().attend(problem)
    assert_matches_autograd(problem, result, relative=1e-10 if dtype == torch.float64 else None)
    poisoned = with_numbers(problem, {"query": make_mask(2, 4, 66, share=0.01)}, torch.nan)
    beside = Engine().run([poisoned, make_gradients(make_problem()), problem, poisoned])[2]
    assert isinstance(beside, AttentionResult)
    assert_same_bits(result, beside)


def test_blocks_follow_from_the_shape_and_are_never_too_small() -> None:
    assert backward.cut(Dims(1, 8, 8, 512, 512, 64, 64)) == Cut(1, 1, 512)
    assert backward.cut(Dims(1, 8, 8, 512, 512, 64, 64), skips_keys=True) == Cut(1, 1, 128)
    assert backward.cut(Dims(4, 8, 2, 16, 16, 64, 64)) == Cut(4, 8, 16)
    assert backward.cut(Dims(1, 8, 2, 2048, 2048, 64, 64)) == Cut(1, 1, 128)
    assert backward.cut(Dims(1, 8, 1, 8192, 8192, 64, 64)) == Cut(1, 1, 64)
    assert backward.cut(Dims(1, 1, 1, 4096, 2**20, 64, 64)) == Cut(1, 1, 2)
    assert backward.cut(Dims(1, 1, 1, 0, 0, 1, 1)).rows == 1


def test_block_of_few_rows_has_few_keys() -> None:
    assert backward.cut(Dims(8, 16, 4, 1, 4096, 64, 64)) == Cut(1, 16, 1)
    assert backward.cut(Dims(8, 16, 16, 1, 1024, 64, 64)) == Cut(1, 16, 1)
    assert backward.cut(Dims(4, 8, 8, 1, 65536, 64, 64)) == Cut(1, 1, 1)


def test_block_under_a_window_sees_no_more_keys_than_it_is_said_to() -> None:
    for left, right, causal, offset in ((9, 0, False, 3), (40, None, "lower_right", None), (0, 70, False, 31)):
        tensors = {} if offset is None else {"query_offset": torch.tensor([offset])}
        attention = make_problem(
            seq_len_q=300, seq_len_kv=400, tensors=tensors, window_left=left, window_right=right, causal=causal
        )
        canonical = canonicalize(attention)
        size = Cut(1, 4, 16)
        most = backward.most_seen(canonical, size)
        assert most < 400
        seen = [backward._seen_keys(canonical, slice(first, min(300, first + 16))) for first in range(0, 300, 16)]
        assert all(run is None or run[1] - run[0] <= most for run in seen)


@pytest.mark.parametrize("causal", [False, True])
def test_number_of_threads_cannot_change_a_bit(causal: bool) -> None:
    attention = make_problem(batch=1, num_heads=2, seq_len_q=720, seq_len_kv=720, head_dim=64, causal=causal)
    problem = make_gradients(attention)
    one, two = Engine(max_threads=1).attend(problem), Engine(max_threads=2).attend(problem)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert_same_bits(one, two)


def test_abandoned_backward_pass_stops_at_its_next_block() -> None:
    problem = make_gradients(make_problem(batch=1, num_heads=8, seq_len_q=512, seq_len_kv=512))
    calls = 0

    def checkpoint() -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise Abandoned

    with pytest.raises(Abandoned):
        Engine().attend(problem, checkpoint)
    assert calls == 12
