"""What metadata decides: the kernel and the cost; and which problems have a plain form, with the same bits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_core import AttentionProblem, AttentionResult, Engine, InvalidProblem, WeightedSumProblem
from attn_core.canonical import canonicalize
from attn_core.cost import attention_cost, weighted_sum_cost
from attn_core.hazards import find_hazards
from attn_core.kernels import choose_path, fused
from attn_core.placement import ALIGNMENT_BYTES
from attn_core.prepared import KnownForms, PlainForm, prepare
from tests.support.factory import DTYPES, features, make_problem, make_tensor, with_tensors

SQUARE: dict[str, Any] = {"seq_len_q": 7, "seq_len_kv": 7}
NAMES = ("query", "key", "value")

PLAIN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {**SQUARE, "causal": True},
    "upper_left": {**SQUARE, "causal": "upper_left"},
    "lower_right": {**SQUARE, "causal": "lower_right"},
    "rank 3": {"rank": 3},
    "rank 2": {"rank": 2},
    "causal of rank 2": {**SQUARE, "rank": 2, "causal": True},
    "shared heads": {"num_kv_heads": 2},
    "one shared head": {"num_kv_heads": 1, **SQUARE, "causal": True},
    "self-attention": {"self_attention": True},
    "causal self-attention": {"self_attention": True, "causal": True, "seq_len_q": 40},
    "scale": {"scale": 0.37},
    "negative scale": {"scale": -0.5},
    "scale of 0": {"scale": 0},
    "empty rows are errors": {"empty_rows": "error"},
    "path asked for": {"path": "fused"},
    "decode": {"seq_len_q": 1, "seq_len_kv": 200, "head_dim": 64},
    "prefill": {"batch": 1, "seq_len_q": 130, "seq_len_kv": 130, "head_dim": 64, "causal": True},
    "odd width": {"head_dim": 5},
    "one number": {"batch": 1, "num_heads": 1, "seq_len_q": 1, "seq_len_kv": 1, "head_dim": 1},
    "an offset without a mask": {"tensors": {"query_offset": torch.tensor([2])}},
}

NOT_PLAIN: dict[str, dict[str, Any]] = {
    "another kernel is asked for": {"path": "manual"},
    "logsumexp besides": {"outputs": ("context", "logsumexp")},
    "logsumexp alone": {"outputs": ("logsumexp",)},
    "weights": {"outputs": ("weights",)},
    "layout bthd": {"layout": "bthd"},
    "layout btd": {"layout": "btd"},
    "softcap": {"softcap": 1.5},
    "sinks": {"tensors": {"sinks": torch.zeros(4)}},
    "alibi": {"tensors": {"alibi_slopes": torch.zeros(4)}},
    "alibi and causal": {**SQUARE, "causal": True, "tensors": {"alibi_slopes": torch.zeros(4)}},
    "allow_mask": {"tensors": {"allow_mask": torch.ones(7, dtype=torch.bool)}},
    "block_mask": {"tensors": {"block_mask": torch.zeros(2, 1, 5, 7, dtype=torch.bool)}},
    "bias": {"tensors": {"bias": torch.zeros(1, 1, 5, 7)}},
    "key_lengths": {"tensors": {"key_lengths": torch.tensor([7, 7])}},
    "query_lengths": {"tensors": {"query_lengths": torch.tensor([5, 5])}},
    "causal at an offset": {**SQUARE, "causal": True, "tensors": {"query_offset": torch.tensor([1])}},
    "causal of more keys": {"causal": "upper_left"},
    "causal of more keys to the right": {"causal": "lower_right"},
    "causal of more queries": {"seq_len_q": 9, "causal": "lower_right"},
    "window": {**SQUARE, "window_left": 3},
    "window to the right": {**SQUARE, "window_right": 0},
    "causal window": {**SQUARE, "causal": True, "window_left": 100},
    "causal with a negative scale": {**SQUARE, "causal": True, "scale": -0.5},
    "causal with a scale of 0": {**SQUARE, "causal": True, "scale": 0},
    "causal with a scale that vanishes in float32": {**SQUARE, "causal": True, "scale": 1e-60},
    "value of another width": {"head_dim_v": 4},
    "no keys": {"seq_len_kv": 0},
    "no queries": {"seq_len_q": 0},
    "no items": {"batch": 0},
}


def form_of(problem: AttentionProblem, *, device_type: str = "cpu") -> PlainForm | None:
    return prepare(problem, device_type=device_type).plain


def plain_context(
    problem: AttentionProblem, form: PlainForm | None = None, *, in_one_piece: bool = False
) -> Tensor | None:
    """The context by the plain form, its own or another's; None where its numbers need more care."""
    form = form_of(problem) if form is None else form
    assert form is not None
    canonical = canonicalize(problem)
    operands = canonical.query, canonical.key, canonical.value
    assert tuple(tuple(tensor.shape) for tensor in operands) == (form.query_shape, form.key_shape, form.value_shape)
    pieces = [tensor.flatten() for tensor in operands[: 1 if form.is_self_attention else 3]]
    return Engine().plain_context(form, [torch.cat(pieces)] if in_one_piece else pieces, *operands)


def by_path_of_all(problem: AttentionProblem) -> AttentionResult:
    """The result without its plain form."""
    (result,) = Engine().run([replace(Engine().prepare(problem), plain=None)])
    assert isinstance(result, AttentionResult)
    return result


def assert_same_bits_as_run(problem: AttentionProblem) -> None:
    expected = by_path_of_all(problem).outputs["context"]
    for context in (plain_context(problem), plain_context(problem, in_one_piece=True)):
        assert context is not None
        assert (context.dtype, context.shape) == (expected.dtype, expected.shape)
        assert torch.equal(context.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_the_plain_form_has_the_bits_of_the_engines_run(options: dict[str, Any], dtype: torch.dtype) -> None:
    assert_same_bits_as_run(make_problem(dtype=dtype, **options))


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([1, 3, 16, 40, 64]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_the_plain_form_of_any_shape_has_the_bits_of_the_engines_run(
    dtype: torch.dtype, batch: int, heads: tuple[int, int], t: int, s: int, width: int, causal: bool, seed: int
) -> None:
    problem = make_problem(
        seed=seed,
        batch=batch,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        seq_len_q=t,
        seq_len_kv=t if causal else s,
        head_dim=width,
        dtype=dtype,
        causal=causal,
    )
    assert_same_bits_as_run(problem)


def test_beside_forbidden_pairs_no_zero_keeps_its_sign() -> None:
    value = torch.full((1, 1, 2, 2), -0.0)
    problem = with_tensors(make_problem(batch=1, num_heads=1, seq_len_q=2, seq_len_kv=2, head_dim=2, causal=True))
    context = plain_context(with_tensors(problem, value=value))
    assert context is not None and not context.signbit().any()
    assert_same_bits_as_run(with_tensors(problem, value=value))


@pytest.mark.parametrize("options", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_a_problem_with_anything_more_has_no_plain_form(options: dict[str, Any]) -> None:
    assert form_of(make_problem(**options)) is None


PLAIN_FEATURES = {"nothing", "scale", "negative scale", "scale of 0"}


@pytest.mark.parametrize("feature", [name for name in features() if name not in PLAIN_FEATURES])
def test_no_feature_that_decides_about_pairs_has_a_plain_form(feature: str) -> None:
    tensors, options = features()[feature]
    assert form_of(make_problem(tensors=tensors, **options)) is None


def test_other_devices_and_given_weights_have_no_plain_form() -> None:
    assert form_of(make_problem(), device_type="cuda") is None
    weighted = WeightedSumProblem(torch.ones(2, 4, 5, 7), make_tensor(2, 4, 7, 3))
    assert prepare(weighted, device_type="cpu").plain is None


@pytest.mark.parametrize("limit", ["BLOCK_FLOPS", "BLOCK_PAIRS"])
def test_a_problem_that_is_answered_in_blocks_has_no_plain_form(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(seq_len_q=100, seq_len_kv=100)
    assert form_of(problem) is not None
    small: Any = dict.fromkeys(fused.BLOCK_FLOPS, 100) if limit == "BLOCK_FLOPS" else 10
    monkeypatch.setattr(fused, limit, small)
    assert form_of(problem) is None


def strided(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def misaligned(tensor: Tensor) -> Tensor:
    room = torch.empty(tensor.numel() + ALIGNMENT_BYTES, dtype=tensor.dtype)
    place = room[1 : tensor.numel() + 1].view(tensor.shape)
    assert place.data_ptr() % ALIGNMENT_BYTES
    return place.copy_(tensor)


@pytest.mark.parametrize("change", [strided, misaligned])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_lie_elsewhere_than_in_one_aligned_row_have_no_plain_form(name: str, change: Any) -> None:
    problem = make_problem()
    assert form_of(with_tensors(problem, **{name: change(getattr(problem, name))})) is None


def test_a_plain_form_serves_every_problem_of_its_shape() -> None:
    form = form_of(make_problem(seed=1))
    assert form is not None
    other = make_problem(seed=2)
    own, lent = plain_context(other), plain_context(other, form)
    assert own is not None and lent is not None and torch.equal(own, lent)


def test_a_plain_form_says_what_the_result_would() -> None:
    problem = make_problem(num_kv_heads=2, rank=3, **SQUARE, causal=True)
    form, result = form_of(problem), by_path_of_all(problem)
    assert form is not None
    assert (form.path, form.why, form.dtype) == (result.path, result.why, result.dtype)
    assert (form.cost.flops, form.cost.peak_bytes) == (result.flops, result.peak_bytes)
    assert form.shares_heads and form.is_causal and not form.is_self_attention
    assert form.result_shape == tuple(result.outputs["context"].shape)
    assert result.empty_rows == result.nonfinite_rows == 0


# Numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", [(0, 0, 0, 0), (-1, -1, -1, -1)])
def test_one_number_that_is_not_finite_needs_more_care(
    at: tuple[int, ...], name: str, poison: float, dtype: torch.dtype
) -> None:
    problem = make_problem(dtype=dtype)
    tensor = getattr(problem, name).clone()
    tensor[at] = poison
    for in_one_piece in (False, True):
        assert plain_context(with_tensors(problem, **{name: tensor}), in_one_piece=in_one_piece) is None


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_one_huge_number_needs_more_care(name: str, dtype: torch.dtype, sign: int) -> None:
    problem = make_problem(dtype=dtype)
    tensor = getattr(problem, name).clone()
    tensor[0, 1, 2, 3] = sign * torch.finfo(dtype).max * 0.9
    assert plain_context(with_tensors(problem, **{name: tensor})) is None


magnitudes = st.floats(-45, 38.5).map(lambda exponent: 10**exponent)


@given(
    st.sampled_from(DTYPES), st.tuples(magnitudes, magnitudes, magnitudes), st.sampled_from([None, 0.0, 1e-3, 1e3, 1e9])
)
def test_what_the_plain_form_answers_has_no_hazard_and_the_same_bits(
    dtype: torch.dtype, sizes: tuple[float, float, float], scale: float | None
) -> None:
    problem = make_problem(dtype=torch.float64, scale=scale)
    operands = {name: (getattr(problem, name) * size).to(dtype) for name, size in zip(NAMES, sizes, strict=True)}
    problem = with_tensors(problem, **operands)
    if plain_context(problem) is not None:
        assert not find_hazards(canonicalize(problem)).any
        assert_same_bits_as_run(problem)


@given(st.sampled_from(DTYPES), st.floats(0, 1), st.integers(1, 300), st.sampled_from([1, 8, 128]))
def test_numbers_well_below_the_limit_of_hazards_need_no_more_care(
    dtype: torch.dtype, share: float, seq_len_kv: int, head_dim: int
) -> None:
    problem = make_problem(seq_len_kv=seq_len_kv, head_dim=head_dim, dtype=dtype)
    form = form_of(problem)
    assert form is not None
    num_numbers = sum(tensor.numel() for tensor in problem.tensors().values())
    # In float32 all squares are added up, so that many large numbers count as one larger still.
    limit = form.safe_number
    if dtype == torch.float32:
        limit = 0.9 * math.sqrt(form.safe_square_sum / num_numbers)
        assert limit > 1e9
    elif dtype == torch.bfloat16:
        # A comparison rounds the limit as the tensor's numbers are.
        limit *= 1 - torch.finfo(dtype).eps
    size = share * limit
    operands = {name: (tensor.sign() * size).to(dtype) for name, tensor in problem.tensors().items()}
    assert_same_bits_as_run(with_tensors(problem, **operands))


@given(st.integers(0, 3), st.floats(0, 0.999))
def test_one_number_below_the_limit_is_no_hazard_in_any_tensor(which: int, share: float) -> None:
    problem = make_problem(std=1e-3)
    form = form_of(problem)
    assert form is not None
    name = NAMES[which % 3]
    tensor = getattr(problem, name).clone()
    tensor[0, 0, 0, 0] = share * math.sqrt(form.safe_square_sum)
    assert_same_bits_as_run(with_tensors(problem, **{name: tensor}))


# Kernel and cost


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("feature", list(features()))
def test_kernel_and_cost_are_those_of_the_tables(feature: str, device_type: str) -> None:
    tensors, options = features()[feature]
    problem = make_problem(tensors=tensors, **options)
    prepared, canonical = prepare(problem, device_type=device_type), canonicalize(problem)
    assert prepared.problem is problem and prepared.canonical is not None
    assert (prepared.path, prepared.why) == choose_path(canonical, None, device_type=device_type)
    assert prepared.cost.flops == attention_cost(canonical, prepared.path).flops


def test_a_weighted_sum_is_prepared_without_a_canonical_form() -> None:
    problem = WeightedSumProblem(torch.ones(2, 4, 5, 7), make_tensor(2, 4, 7, 3))
    prepared = prepare(problem, device_type="cpu")
    assert (prepared.path, prepared.cost, prepared.canonical) == ("manual", weighted_sum_cost(problem), None)


def test_an_asked_kernel_that_cannot_serve_the_problem_is_refused() -> None:
    with pytest.raises(InvalidProblem, match="path"):
        prepare(make_problem(softcap=1.0, path="fused"), device_type="cpu")


@pytest.mark.parametrize(("rank", "tokens"), [(4, 3 * 5), (3, 5), (2, 5)])
def test_tokens_are_the_queries_of_all_items_whatever_the_heads(rank: int, tokens: int) -> None:
    assert prepare(make_problem(batch=3, rank=rank), device_type="cpu").tokens == tokens
    shape = (3, 4, 5, 7)[4 - rank :]
    weighted = WeightedSumProblem(torch.ones(shape), torch.ones((*shape[:-2], shape[-1], 2)))
    assert prepare(weighted, device_type="cpu").tokens == tokens


def test_a_problem_runs_the_same_prepared_or_not() -> None:
    problem = make_problem(outputs=("context", "weights"))
    engine = Engine()
    first, second = engine.run([problem, engine.prepare(problem)])
    assert isinstance(first, AttentionResult) and isinstance(second, AttentionResult)
    for name, tensor in first.outputs.items():
        assert torch.equal(tensor, second.outputs[name])


# Known forms


@pytest.mark.parametrize("feature", features())
@pytest.mark.parametrize("outputs", [("context",), ("weights", "logsumexp")])
def test_known_form_decides_what_the_problem_itself_would(feature: str, outputs: tuple[str, ...]) -> None:
    tensors, options = features()[feature]
    known = KnownForms()
    for seed in range(3):
        problem = make_problem(seed=seed, tensors=tensors, outputs=outputs, **options)
        own, looked_up = prepare(problem, device_type="cpu"), prepare(problem, device_type="cpu", known=known)
        assert (own.path, own.why, own.cost) == (looked_up.path, looked_up.why, looked_up.cost)
        assert looked_up.problem is problem and looked_up.canonical is not None
        assert looked_up.canonical.query.data_ptr() == problem.query.data_ptr()


def test_forms_that_differ_in_anything_are_told_apart_and_no_more_are_kept_than_allowed() -> None:
    known = KnownForms(max_forms=3)
    cases: list[dict[str, Any]] = [
        {}, {"dtype": torch.float64}, {"layout": "bthd"}, {"self_attention": True, **SQUARE}, SQUARE,
        {"path": "manual"}, {"empty_rows": "error"}, {"scale": -1.0, "causal": "upper_left", "seq_len_kv": 5},
        {"causal": "upper_left", "seq_len_kv": 5}, {"outputs": ("entropy",)}, {"num_kv_heads": 1},
    ]  # fmt: skip
    for case in [*cases, *cases[::-1], *cases]:
        problem = make_problem(**case)
        own, looked_up = prepare(problem, device_type="cpu"), prepare(problem, device_type="cpu", known=known)
        assert (own.path, own.why, own.cost) == (looked_up.path, looked_up.why, looked_up.cost), case
        assert len(known._found) <= 3


def test_long_list_of_rows_is_not_kept() -> None:
    known = KnownForms()
    for rows in (range(64), range(65)):
        problem = make_problem(seq_len_q=100, outputs=("entropy",), select_rows=tuple(rows))
        own, looked_up = prepare(problem, device_type="cpu"), prepare(problem, device_type="cpu", known=known)
        assert (own.path, own.why, own.cost) == (looked_up.path, looked_up.why, looked_up.cost)
    assert len(known._found) == 1


def test_refused_path_is_refused_each_time() -> None:
    known, problem = KnownForms(), make_problem(path="fused", outputs=("weights",))
    for _ in range(2):
        with pytest.raises(InvalidProblem):
            prepare(problem, device_type="cpu", known=known)
