"""Who may be packed with whom, and that packing loses and mixes nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from attn_core import AttentionProblem
from attn_core.batching.packing import Packable, cumulative, pack, packable, unpack
from attn_core.canonical import CanonicalProblem, canonicalize, to_callers_form
from tests.support.factory import features, make_problem, make_tensor, with_tensors
from tests.support.oracle import same_bits
from tests.support.varlen import corner_mask

HALF = torch.bfloat16


def half_problem(**change: Any) -> CanonicalProblem:
    return canonicalize(make_problem(**{"dtype": HALF, **change}))


def rider(problem: CanonicalProblem | None = None, **change: Any) -> Packable:
    found = packable(half_problem(**change) if problem is None else problem)
    assert found is not None
    return found


def lengths(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float32},
        {"dtype": torch.float64},
        {"head_dim": 12},
        {"head_dim": 264},
        {"head_dim_v": 16},
        {"outputs": ("context", "weights")},
        {"outputs": ("logsumexp",)},
        {"softcap": 1.0},
        {"scale": 0.0},
        {"scale": -0.5},
        {"scale": 1e-45},
        {"scale": 1e38},
        {"seq_len_q": 0},
        {"seq_len_kv": 0},
        {"batch": 0},
        {"tensors": {"key_lengths": lengths(0, 0)}},
        {"tensors": {"query_lengths": lengths(0, 0)}},
        {"tensors": {"key_lengths": lengths(0, 7), "query_lengths": lengths(5, 0)}},
        # Of two items no one window says the same.
        {"tensors": {"query_offset": lengths(0, 1)}, "window_left": 1},
        # The corner is so far off that the left side would be less than 0.
        {"seq_len_q": 12, "seq_len_kv": 3, "tensors": {"query_offset": lengths(0)}, "window_left": 1},
        # More queries than keys, and a right side that FlashAttention would open.
        {"seq_len_q": 12, "seq_len_kv": 3, "causal": "upper_left"},
    ],
    ids=str,
)
def test_what_the_kernel_answers_otherwise_is_not_packed(change: dict[str, Any]) -> None:
    assert packable(half_problem(**change)) is None


@pytest.mark.parametrize("feature", ["alibi", "sinks", "allow_mask of keys", "block_mask of all", "bias of keys"])
def test_what_the_kernel_cannot_do_is_not_packed(feature: str) -> None:
    tensors, options = features()[feature]
    assert packable(half_problem(tensors=tensors, **options)) is None


SEPARATING: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16},
    {"num_heads": 2},
    {"num_kv_heads": 2},
    {"head_dim": 16, "scale": 8**-0.5},
    {"scale": 0.3},
    {"causal": "lower_right"},
    {"tensors": {"query_offset": lengths(2)}, "window_left": 2},
    {"tensors": {"query_offset": lengths(2)}, "window_left": 1},
    {"tensors": {"query_offset": lengths(2)}, "window_right": 1},
    {"causal": "lower_right", "window_left": 1},
    # One query in each sequence: the kernel takes another way.
    {"seq_len_q": 1},
]


def test_key_separates_what_must_not_ride_together() -> None:
    keys = [rider(**change).key for change in SEPARATING]
    assert len(set(keys)) == len(keys)
    with_logsumexp = packable(half_problem(outputs=("context", "logsumexp")), with_logsumexp=True)
    assert with_logsumexp is not None and with_logsumexp.key not in keys
    elsewhere = replace(rider().key, device=torch.device("meta"))
    assert elsewhere not in keys


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"seq_len_q": 33, "seq_len_kv": 2, "batch": 3, "seed": 5}),
        ({}, {"layout": "btd"}),
        ({}, {"tensors": {"key_lengths": lengths(0, 3), "query_lengths": lengths(2, 4)}}),
        # Open, since it forbids nothing.
        ({}, {"tensors": {"query_offset": lengths(2, 2)}, "window_left": 9, "window_right": 2**70}),
        # A single query at the end of its keys sees them all.
        ({"seq_len_q": 1}, {"seq_len_q": 1, "causal": "lower_right", "tensors": {"key_lengths": lengths(3, 7)}}),
        # Causal from the upper left corner is causal from the lower right one, of the keys that anyone sees.
        ({"causal": "lower_right"}, {"causal": "upper_left"}),
        ({"causal": "lower_right"}, {"causal": "upper_left", "seq_len_q": 6, "seq_len_kv": 6}),
        ({"causal": "lower_right"}, {"causal": True, "tensors": {"query_offset": lengths(1, 2)}}),
        ({"causal": "lower_right"}, {"window_right": 0, "tensors": {"query_offset": lengths(2)}}),
        (
            {"causal": "lower_right"},
            {"causal": "lower_right", "tensors": {"key_lengths": lengths(3, 7), "query_lengths": lengths(5, 2)}},
        ),
        (
            {"causal": "lower_right", "window_left": 1},
            {"causal": "lower_right", "window_left": 1, "seq_len_q": 40, "seq_len_kv": 90},
        ),
    ],
    ids=str,
)
def test_key_joins_what_may_ride_together(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert rider(**first).key == rider(**second).key


@given(st.lists(st.integers(0, 1000)))
def test_cumulative_lengths_begin_at_0_and_never_fall(numbers: list[int]) -> None:
    ends = cumulative(numbers)
    assert ends[0] == 0 and ends[-1] == sum(numbers) and len(ends) == len(numbers) + 1
    assert all(first <= second for first, second in itertools.pairwise(ends))


@st.composite
def windows(draw: st.DrawFn) -> CanonicalProblem:
    """A problem of any lengths, offsets, causal rule and window; small numbers, so that edges meet."""
    batch = draw(st.integers(1, 3))
    seq_len_q, seq_len_kv = draw(st.integers(1, 6)), draw(st.integers(1, 6))

    def per_item(least: int, most: int) -> Tensor | None:
        return draw(
            st.none()
            | st.lists(st.integers(least, most), min_size=batch, max_size=batch).map(torch.tensor)
            | st.integers(least, most).map(lambda number: torch.tensor([number] * batch))
        )

    given_tensors = {
        "key_lengths": per_item(0, seq_len_kv),
        "query_lengths": per_item(0, seq_len_q),
        "query_offset": per_item(-7, 7),
    }
    tensors = {name: tensor for name, tensor in given_tensors.items() if tensor is not None}
    width = st.none() | st.integers(0, 8) | st.just(2**70)
    left, right = draw(width), draw(width)
    options: dict[str, Any] = {"window_left": left, "window_right": right}
    if "query_offset" in tensors:
        options["causal"] = draw(st.booleans())
    else:
        options["causal"] = draw(st.sampled_from(("upper_left", "lower_right")))
    return half_problem(
        batch=batch, num_heads=1, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv, tensors=tensors, **options
    )


@given(windows(), st.integers(0, 20))
def test_packed_window_says_who_attends_whom_whatever_the_neighbours(problem: CanonicalProblem, longer: int) -> None:
    mine = packable(problem)
    assume(mine is not None)
    assert mine is not None
    allowed = problem.allowed(problem.all_rows())
    dims = problem.dims
    told = torch.zeros(dims.batch, 1, dims.seq_len_q, dims.seq_len_kv, dtype=torch.bool)
    left, right = (-1 if side is None else side for side in (mine.key.window_left, mine.key.window_right))
    longest = max(mine.seq_lens_kv) + longer
    for item, (len_q, len_kv) in enumerate(zip(mine.seq_lens_q, mine.seq_lens_kv, strict=True)):
        assert (len_q > 0) == (len_kv > 0)
        told[item, 0, :len_q, :len_kv] = corner_mask(len_q, len_kv, (left, right), max_kv=longest)
    assert allowed is None or torch.equal(told, allowed.expand_as(told))
    assert allowed is not None or told.all()


RIDERS: list[dict[str, Any]] = [
    {"seed": 1},
    {"seed": 2, "layout": "btd", "seq_len_q": 33, "seq_len_kv": 2, "batch": 3},
    {"seed": 3, "layout": "bthd", "tensors": {"key_lengths": lengths(0, 3), "query_lengths": lengths(2, 4)}},
    {"seed": 4, "seq_len_kv": 1, "tensors": {"query_lengths": lengths(5, 0)}},
]


def riders() -> list[Packable]:
    return [rider(**change) for change in RIDERS]


def test_unpacking_what_was_packed_gives_it_back() -> None:
    several = riders()
    batch = pack(several)
    lse = batch.query[..., 0].t().float()
    for one, output in zip(several, unpack(several, batch.query, lse), strict=True):
        query = one.problem.query
        entered = torch.zeros(query.shape[:3], dtype=torch.bool)
        for item, length in enumerate(one.seq_lens_q):
            entered[item, :, :length] = True
        assert same_bits(output.outputs["context"], query.masked_fill(~entered.unsqueeze(-1), 0))
        assert output.outputs.keys() == {"context"}
    (output,) = unpack(several[:1], batch.query, lse)
    assert output.outputs["context"].data_ptr() != batch.query.data_ptr()


def test_unpacked_logsumexp_of_what_did_not_enter_is_that_of_an_empty_row() -> None:
    both = half_problem(outputs=("logsumexp", "context"), tensors={"query_lengths": lengths(2, 0)})
    mine = packable(both, with_logsumexp=True)
    assert mine is not None
    lse = make_tensor(4, 2)
    (output,) = unpack([mine], pack([mine]).query, lse)
    assert list(output.outputs) == ["logsumexp", "context"]
    assert torch.equal(output.outputs["logsumexp"][0, :, :2], lse)
    assert (output.outputs["logsumexp"][0, :, 2:] == -torch.inf).all()
    assert (output.outputs["logsumexp"][1] == -torch.inf).all()
    assert output.empty is not None and not output.empty.any()


def test_packed_sequences_stand_end_to_end() -> None:
    several = riders()
    batch = pack(several)
    assert batch.cu_seqlens_q.dtype == batch.cu_seqlens_kv.dtype == torch.int32
    assert batch.cu_seqlens_q.tolist() == [0, 5, 10, 43, 76, 109, 113, 118]
    assert batch.cu_seqlens_kv.tolist() == [0, 7, 14, 16, 18, 20, 23, 24]
    assert (batch.max_seq_len_q, batch.max_seq_len_kv) == (33, 7)
    assert torch.equal(batch.value[20:23].transpose(0, 1), several[2].problem.value[1, :, :3])
    assert sum(t.nbytes for t in (batch.query, batch.key, batch.value)) == sum(one.num_bytes for one in several)
    assert sum(one.num_sequences for one in several) == batch.cu_seqlens_q.numel() - 1


@pytest.mark.parametrize("layout", ["bhtd", "bthd", "btd"])
def test_unpacked_context_lies_as_its_caller_wants_it(layout: str) -> None:
    problem = make_problem(dtype=HALF, layout=layout)  # type: ignore[arg-type]
    mine = rider(canonicalize(problem))
    (output,) = unpack([mine], pack([mine]).query, None)
    context = output.outputs["context"]
    asked = to_callers_form("context", context, problem)
    assert asked.data_ptr() == context.data_ptr()
    assert asked.shape == problem.query.shape


def test_neighbour_cannot_change_what_is_packed_of_an_item() -> None:
    alone, several = pack(riders()[2:3]), pack(riders())
    assert torch.equal(several.query[109:113], alone.query)
    assert torch.equal(several.key[20:23], alone.key)


def test_packing_makes_everything_on_the_device_of_the_problems() -> None:
    def on_meta(problem: AttentionProblem) -> CanonicalProblem:
        return canonicalize(with_tensors(problem, **{n: t.to("meta") for n, t in problem.tensors().items()}))

    problems = [on_meta(make_problem(dtype=HALF, seq_len_q=tokens, num_kv_heads=2)) for tokens in (3, 300)]
    several = [rider(problem) for problem in problems]
    batch = pack(several)
    assert batch.query.shape == (606, 4, 8) and batch.key.shape == batch.value.shape == (28, 2, 8)
    tensors = [batch.query, batch.key, batch.value, batch.cu_seqlens_q, batch.cu_seqlens_kv]
    outputs = unpack(several, torch.empty_like(batch.query), torch.empty(4, 606, device="meta"))
    tensors += [output.outputs["context"] for output in outputs]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert [output.outputs["context"].shape for output in outputs] == [p.query.shape for p in problems]
