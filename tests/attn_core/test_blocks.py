"""Large problems in blocks: the same answer however often, in little memory, and given up between two blocks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_core import Abandoned, AttentionOptions, AttentionProblem, AttentionResult, Engine, WeightedSumProblem
from attn_core.canonical import CanonicalProblem, canonicalize
from attn_core.cut import Cut, cut_heads_first, even, even_runs
from attn_core.kernels import fused, isolated, manual
from attn_core.prepared import prepare
from attn_core.problem import OUTPUTS, Dims
from tests.support.factory import DTYPES, features, make_problem, make_tensor, with_tensors
from tests.support.memory import peak_bytes_of
from tests.support.oracle import assert_matches_reference, assert_same_bits, same_bits

MIB = 2**20
AXES: dict[str, Any] = {"batch": 2, "num_heads": 4, "seq_len_q": 66, "seq_len_kv": 80}
SQUARE: dict[str, Any] = {"batch": 2, "num_heads": 4, "seq_len_q": 70, "seq_len_kv": 70}


def cases() -> dict[str, tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]]:
    """Every way to answer a problem in blocks: axes, tensors, options."""
    found = {}
    for name in ("nothing", "lower_right", "window", "causal window", "mask and bias", "bias of all", "key_lengths"):
        found[name] = (AXES, *features(**AXES)[name])
    for name in ("upper_left", "negative scale", "lower_right with lengths", "causal at one offset"):
        found[f"square, {name}"] = (SQUARE, *features(**SQUARE)[name])
    found["square, negative scale"][2]["causal"] = True
    return found


@pytest.fixture
def modest_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems of 66 queries are cut, by rows too; blocks keep some size."""
    monkeypatch.setattr(fused, "BLOCK_PAIRS", 2**11)
    monkeypatch.setattr(fused, "LONG_ROWS", 32)
    monkeypatch.setattr(fused, "CAUSAL_ROWS", 16)
    monkeypatch.setattr(fused, "ROW_MULTIPLE", 8)
    monkeypatch.setattr(fused, "BLOCK_ROW_MULTIPLE", 16)
    monkeypatch.setattr(isolated, "PART_BYTES", 2**12)
    monkeypatch.setattr(manual, "BLOCK_PAIRS", 2**10)
    monkeypatch.setattr(manual, "KEY_NUMBERS", 2**9)
    monkeypatch.setattr(manual, "SUM_PAIRS", 2**12)
    monkeypatch.setattr(manual, "SORTED_PAIRS", 2**8)


def make_case(case: str, dtype: torch.dtype, path: str) -> AttentionProblem:
    axes, tensors, options = cases()[case]
    if "bias" in tensors and path == "fused":
        tensors = {**tensors, "bias": tensors["bias"].to(dtype)}
    own: dict[str, Any] = {"outputs": ("context", "logsumexp")} if path == "fused" else {"outputs": OUTPUTS, "top_k": 3}
    problem = make_problem(
        num_kv_heads=2, head_dim=16, dtype=dtype, tensors=tensors, path=path, **axes, **own, **options
    )
    assert fused.is_cut(canonicalize(problem))
    return problem


def poisoned(problem: AttentionProblem) -> AttentionProblem:
    """NaN in one query, and in one key far back."""
    assert problem.key is not None
    query, key = problem.query.clone(), problem.key.clone()
    query[0, 1, 7], key[1, 0, -3] = torch.nan, torch.nan
    return with_tensors(problem, query=query, key=key)


@pytest.mark.usefixtures("modest_blocks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", ["fused", "manual"])
@pytest.mark.parametrize("case", list(cases()))
def test_problem_in_blocks_matches_reference_and_has_its_bits_in_any_company(
    case: str, path: str, dtype: torch.dtype
) -> None:
    problem = make_case(case, dtype, path)
    alone = Engine().attend(problem)
    assert_matches_reference(problem, alone)
    small = make_problem()
    results = Engine().run([small, problem, poisoned(problem), problem, small])
    for place in (1, 3):
        beside = results[place]
        assert isinstance(beside, AttentionResult)
        assert_same_bits(alone, beside)


@pytest.mark.usefixtures("modest_blocks")
@pytest.mark.parametrize("case", list(cases()))
def test_number_that_is_not_finite_cannot_change_the_other_rows_of_a_problem_in_blocks(case: str) -> None:
    problem = make_case(case, torch.float32, "fused")
    clean, result = Engine().attend(problem), Engine().attend(poisoned(problem))
    bad = result.outputs["logsumexp"].isnan()
    assert 0 < result.nonfinite_rows == int(bad.sum()) < bad.numel()
    assert same_bits(result.outputs["logsumexp"][~bad], clean.outputs["logsumexp"][~bad])
    assert same_bits(result.outputs["context"][~bad], clean.outputs["context"][~bad])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["plain", "square", "band", "key_lengths"])
def test_number_of_threads_cannot_change_a_bit_of_a_problem_in_blocks(case: str, dtype: torch.dtype) -> None:
    every: dict[str, dict[str, Any]] = {
        "plain": {},
        "square": {"causal": True},
        "band": {"causal": "lower_right", "window_left": 2000},
        "key_lengths": {"tensors": {"key_lengths": torch.tensor([3900])}},
    }
    # A row more than two blocks have, which is not left alone.
    rows = 6001 if case == "square" else 4097
    keys = 6001 if case == "square" else 4000
    problem = make_problem(
        batch=1, num_heads=1, seq_len_q=rows, seq_len_kv=keys, head_dim=64, dtype=dtype, **every[case]
    )
    assert fused.cut(canonicalize(problem)).rows < rows
    before = torch.get_num_threads()
    try:
        one, two = (Engine(max_threads=threads).attend(problem) for threads in (1, 2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert_same_bits(one, two)


@pytest.mark.parametrize("layout", ["bhtd", "bthd", "btd"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seq_len_q", [1, 3, 6, 40])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 7])
def test_heads_beside_one_that_is_not_finite_keep_their_bits_on_any_number_of_threads(
    num_heads: int, seq_len_q: int, threads: int, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "PART_BYTES", 1)
    for module in ("engine", "kernels.fused"):
        monkeypatch.setattr(f"attn_core.{module}.THREADS_FROM_FLOPS", 0 if threads > 1 else 2**60)
    problem = make_problem(
        batch=3, num_heads=num_heads, seq_len_q=seq_len_q, seq_len_kv=600, head_dim=64, layout=layout,
        tensors={"key_lengths": torch.full((3,), 590)},
    )  # fmt: skip
    assert problem.key is not None
    query, key = problem.query.clone(), problem.key.clone()
    # Behind the length, of every head.
    key.select(2 if layout == "bhtd" else 1, 595).fill_(torch.inf)
    # Of the first head of the first item.
    query[(0, 0, 0) if layout != "btd" else (0, 0, slice(64))] = torch.nan
    before = torch.get_num_threads()
    try:
        clean, result = (
            Engine(max_threads=2).attend(own).outputs["context"].clone()
            for own in (problem, with_tensors(problem, query=query, key=key))
        )
    finally:
        torch.set_num_threads(before)
    clean[(0, 0, 0) if layout != "btd" else (0, 0, slice(64))] = torch.nan
    assert same_bits(clean, result)


@pytest.mark.parametrize("seq_len_q", [1, 40])
@pytest.mark.parametrize("seq_len_kv", [600, 601])
@pytest.mark.parametrize("layout", ["bhtd", "bthd", "btd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_nan_leaves_the_bits_of_every_layout(
    dtype: torch.dtype, layout: Any, seq_len_kv: int, seq_len_q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "PART_BYTES", 1)
    lengths = {"key_lengths": torch.tensor([500, seq_len_kv, 7])}
    problem = make_problem(
        batch=3, num_kv_heads=2, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv, head_dim=64, layout=layout, dtype=dtype,
        tensors=lengths,
    )  # fmt: skip
    assert problem.key is not None and problem.value is not None
    key, value = problem.key.clone(), problem.value.clone()
    behind = (2, slice(None), 9) if layout == "bhtd" else (2, 9)
    key[behind], value[behind] = torch.nan, torch.inf
    clean, result = (Engine().attend(own) for own in (problem, with_tensors(problem, key=key, value=value)))
    assert_same_bits(clean, result)
    assert result.nonfinite_rows == 0


@pytest.mark.parametrize("causal", [False, True])
def test_cut_between_heads_has_the_bits_of_one_call(causal: bool) -> None:
    problem = make_problem(
        batch=1, num_heads=4, num_kv_heads=2, seq_len_q=2300, seq_len_kv=2300, head_dim=64, causal=causal
    )
    assert fused.cut(canonicalize(problem)) in (Cut(1, 1, 2300), Cut(1, 2, 2300), Cut(1, 4, 2300))
    assert problem.key is not None and problem.value is not None
    whole = F.scaled_dot_product_attention(problem.query, problem.key, problem.value, is_causal=causal, enable_gqa=True)
    assert same_bits(Engine().attend(problem).outputs["context"], whole)


_axes = st.builds(
    lambda batch, groups, group, rows, keys, width, width_v: Dims(
        batch, groups * group, groups, rows, keys, width, width_v
    ),
    st.sampled_from((1, 3, 64, 1000)),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((1, 3, 8)),
    st.sampled_from((1, 17, 512, 1100, 4096, 2**15 + 1, 2**18)),
    st.sampled_from((1, 16, 512, 4096, 5000, 2**15, 2**18)),
    st.sampled_from((1, 16, 64, 128, 4096)),
    st.sampled_from((64, 256)),
)


def shaped(dims: Dims, dtype: torch.dtype, **options: Any) -> CanonicalProblem:
    """A problem without numbers."""
    shapes = (
        (dims.num_heads, dims.seq_len_q, dims.head_dim),
        (dims.num_kv_heads, dims.seq_len_kv, dims.head_dim),
        (dims.num_kv_heads, dims.seq_len_kv, dims.head_dim_v),
    )
    query, key, value = (torch.empty(dims.batch, *shape, dtype=dtype, device="meta") for shape in shapes)
    return canonicalize(AttentionProblem(query, key, value, options=AttentionOptions(**options)))


@given(_axes, st.sampled_from(DTYPES), st.booleans())
def test_no_block_of_the_fused_kernel_takes_more_than_its_flops(dims: Dims, dtype: torch.dtype, causal: bool) -> None:
    problem = shaped(dims, dtype, causal="lower_right" if causal else False)
    size = fused.cut(problem, device_type="cpu")
    most = 2 * fused.BLOCK_FLOPS[problem.compute_dtype]
    pairs = size.items * size.heads * size.rows * dims.seq_len_kv
    if fused.is_square_causal(problem) and size.rows == dims.seq_len_q:
        # What lies behind the diagonal is left out.
        pairs = size.items * size.heads * (dims.seq_len_q * dims.seq_len_q // 2)
    is_one_tile = (size.items, size.heads) == (1, 1) and size.rows <= fused.ROW_MULTIPLE
    assert pairs * 2 * (dims.head_dim + dims.head_dim_v) <= most or is_one_tile
    assert pairs <= fused.BLOCK_PAIRS or is_one_tile


@given(_axes, st.integers(1, 2**18))
def test_no_block_of_the_manual_kernel_takes_more_than_its_flops(dims: Dims, num_rows: int) -> None:
    size = manual.cut(dims, num_rows)
    pairs = size.items * size.heads * size.rows * dims.seq_len_kv
    flops = pairs * 2 * (dims.head_dim + dims.head_dim_v)
    is_least = (size.items, size.heads) == (1, 1) and size.rows <= manual.MIN_BLOCK_ROWS
    assert (pairs <= manual.BLOCK_PAIRS and flops <= manual.BLOCK_FLOPS) or is_least


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 400))
def test_blocks_cover_every_row_once_and_split_no_group_with_others(
    batch: int, groups: int, group: int, rows: int, pairs: int
) -> None:
    dims = Dims(batch, groups * group, groups, rows, 3, 1, 1)
    seen = torch.zeros(batch, groups * group, rows)
    for items, heads, own in cut_heads_first(dims, pairs).blocks(dims):
        seen[items, heads, own] += 1
        whole = heads.start % group == 0 and heads.stop % group == 0
        assert whole or heads.start // group == (heads.stop - 1) // group
    assert seen.eq(1).all()


@given(st.integers(1, 10_000), st.integers(1, 40), st.sampled_from((1, 32)))
def test_runs_are_of_about_one_length(total: int, most: int, multiple: int) -> None:
    found = list(even_runs(total, most * multiple, multiple=multiple))
    lengths = [run.stop - run.start for run in found]
    assert sum(lengths) == total and max(lengths) <= most * multiple and len(found) == -(-total // (most * multiple))
    assert max(lengths) <= min(lengths) + 2 * multiple - 1 and even(total, most * multiple, multiple=multiple) <= (
        max(lengths) + multiple - 1
    )
    assert max(lengths) <= even(total, most * multiple, multiple=multiple)


class Gone:
    """A checkpoint of a caller who leaves after so many calls."""

    def __init__(self, *, after: int) -> None:
        self.after = after
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls > self.after:
            raise Abandoned


NEVER = 10**9


@pytest.mark.usefixtures("modest_blocks")
@pytest.mark.parametrize("path", ["fused", "manual"])
@pytest.mark.parametrize("case", ["nothing", "square, upper_left", "mask and bias"])
def test_problem_given_up_stands_as_abandoned_and_leaves_its_neighbours_right(case: str, path: str) -> None:
    problem = make_case(case, torch.float32, path)
    expected = Engine().attend(problem)
    for subject in (problem, poisoned(problem)):
        patient = Gone(after=NEVER)
        Engine().attend(subject, patient)
        assert patient.num_calls > 8
        for after in (0, 1, 5, patient.num_calls // 2, patient.num_calls - 1):
            gone = Gone(after=after)
            first, second, third = Engine().run([problem, subject, problem], [None, gone, Gone(after=NEVER)])
            assert isinstance(second, Abandoned) and gone.num_calls == after + 1
            for result in (first, third):
                assert isinstance(result, AttentionResult)
                assert_same_bits(result, expected)


@pytest.mark.usefixtures("modest_blocks")
def test_abandoned_problem_keeps_no_memory() -> None:
    problem = make_case("mask and bias", torch.float32, "fused")
    held = [weakref.ref(tensor) for tensor in problem.tensors().values()]
    (error,) = Engine().run([problem], [Gone(after=5)])
    del problem
    gc.collect()
    assert isinstance(error, Abandoned) and error.__traceback__ is None
    assert [ref() for ref in held] == [None] * len(held)


@pytest.mark.usefixtures("modest_blocks")
def test_weighted_sum_in_blocks_is_the_plain_product_and_can_be_given_up() -> None:
    for dtype in DTYPES:
        problem = WeightedSumProblem(make_tensor(2, 4, 130, 150, dtype=dtype), make_tensor(2, 2, 150, 8, dtype=dtype))
        patient = Gone(after=NEVER)
        result = Engine().attend(problem, patient)
        weights = problem.weights.double()
        value = problem.value.double().repeat_interleave(2, dim=1)
        allowed = 4 * torch.finfo(dtype).eps * (weights.abs() @ value.abs())
        assert ((result.outputs["context"].double() - weights @ value).abs() <= allowed).all()
        assert patient.num_calls > 8
        (error,) = Engine().run([problem], [Gone(after=4)])
        assert isinstance(error, Abandoned)


def test_small_problem_is_asked_after_before_it_begins() -> None:
    gone = Gone(after=0)
    with pytest.raises(Abandoned):
        Engine().attend(make_problem(), gone)
    assert gone.num_calls == 1


def measured_peak(problem: AttentionProblem) -> int:
    engine = Engine()
    inputs = sum(tensor.nbytes for tensor in problem.tensors().values())
    return inputs + peak_bytes_of(lambda: engine.attend(problem))


@pytest.mark.usefixtures("modest_blocks")
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", list(cases()))
def test_peak_of_blocks_is_not_above_the_estimate(
    case: str, dtype: torch.dtype, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the part that is there for any call, so that what is too low shows.
    monkeypatch.setattr("attn_core.cost.FIXED_BYTES", 2**14)
    axes, tensors, options = cases()[case]
    own = {**tensors, "bias": tensors["bias"].to(dtype)} if "bias" in tensors else tensors
    for asked in (("context",), ("context", "logsumexp")):
        problem = make_problem(
            num_kv_heads=2, head_dim=16, dtype=dtype, layout=layout, tensors=own, outputs=asked, **axes, **options
        )
        cost = prepare(problem, device_type="cpu").cost
        assert measured_peak(problem) <= cost.peak_bytes
        if layout == "bhtd":
            assert measured_peak(poisoned(problem)) <= cost.with_spare.peak_bytes


@pytest.mark.parametrize("causal", [False, True])
def test_answer_of_a_large_problem_stands_in_memory_once(causal: bool) -> None:
    problem = make_problem(batch=1, num_heads=8, seq_len_q=2300, seq_len_kv=2300, head_dim=64, causal=causal)
    output_bytes = problem.query.nbytes
    peak = measured_peak(problem)
    assert peak <= prepare(problem, device_type="cpu").cost.peak_bytes
    assert peak <= 4 * output_bytes + 3 * MIB


def test_estimate_of_a_fused_problem_is_little_more_than_its_tensors() -> None:
    problem = make_problem(batch=1, num_heads=8, seq_len_q=1024, seq_len_kv=1024, head_dim=64)
    assert prepare(problem, device_type="cpu").cost.peak_bytes <= 15 * MIB
