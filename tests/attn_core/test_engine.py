"""The engine: the same bits whoever stands beside, what is counted, what is refused at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_core import (
    AttentionProblem,
    AttentionResult,
    Engine,
    InvalidProblem,
    WeightedSumProblem,
    check_problem,
)
from attn_core.cut import THREADS_FROM_FLOPS
from attn_core.prepared import prepare
from attn_core.problem import OUTPUTS
from tests.support.factory import DTYPES, features, make_problem, make_tensor, with_tensors
from tests.support.oracle import assert_matches_reference, assert_same_bits


def run(engine: Engine, problems: list[AttentionProblem]) -> list[AttentionResult]:
    results = []
    for result in engine.run(problems):
        assert isinstance(result, AttentionResult)
        results.append(result)
    return results


def assorted() -> list[AttentionProblem]:
    """Problems of many kinds, both kernels among them, one of them with NaN."""
    found = []
    for seed, (tensors, options) in enumerate(features().values()):
        asked = {"outputs": OUTPUTS, "top_k": 2} if seed % 2 else {"outputs": ("context",)}
        dtype = DTYPES[seed % 4]
        found.append(make_problem(seed=seed, num_kv_heads=2, dtype=dtype, tensors=tensors, **asked, **options))
    poisoned = found[0].query.clone()
    poisoned[0, 0, 0] = torch.nan
    return [*found, with_tensors(found[0], query=poisoned)]


def test_same_problem_twice_gives_the_same_bits() -> None:
    engine = Engine()
    for problem in assorted():
        assert_same_bits(engine.attend(problem), engine.attend(problem))


def test_neighbours_and_their_order_cannot_change_a_bit() -> None:
    problems = assorted()
    alone = [Engine().attend(problem) for problem in problems]
    engine = Engine()
    together = run(engine, problems)
    backwards = run(engine, problems[::-1])[::-1]
    for own, beside, other in zip(alone, together, backwards, strict=True):
        assert_same_bits(own, beside)
        assert_same_bits(own, other)
        assert (own.path, own.why, own.empty_rows, own.nonfinite_rows) == (
            beside.path,
            beside.why,
            beside.empty_rows,
            beside.nonfinite_rows,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", ["fused", "manual"])
@pytest.mark.parametrize("feature", ["nothing", "lower_right"])
def test_number_of_threads_cannot_change_a_bit(feature: str, path: str, dtype: torch.dtype) -> None:
    tensors, options = features()[feature]
    axes = {"batch": 1, "num_heads": 8, "seq_len_q": 520, "seq_len_kv": 530, "head_dim": 64}
    outputs = ("context", "logsumexp") if path == "fused" else ("context", "weights")
    form: dict[str, Any] = {**axes, "path": path, "outputs": outputs, "dtype": dtype, "tensors": tensors, **options}
    problem = make_problem(**form)
    before = torch.get_num_threads()
    try:
        one = Engine(max_threads=1).attend(problem)
        two = Engine(max_threads=2).attend(problem)
        assert torch.get_num_threads() == 2 and one.flops >= THREADS_FROM_FLOPS
    finally:
        torch.set_num_threads(before)
    assert_same_bits(one, two)


def test_small_problem_takes_one_thread_and_a_large_one_all() -> None:
    before = torch.get_num_threads()
    engine = Engine(max_threads=2)
    try:
        engine.attend(make_problem())
        assert torch.get_num_threads() == 1
        engine.attend(make_problem(batch=1, num_heads=8, seq_len_q=512, seq_len_kv=512, head_dim=64))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("feature", ["nothing", "lower_right", "mask and bias", "key_lengths"])
def test_dropout_is_switched_off_by_name(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    original = F.scaled_dot_product_attention

    def recorder(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorder)
    tensors, options = features()[feature]
    assert Engine().attend(make_problem(tensors=tensors, **options)).path == "fused"
    assert [call["dropout_p"] for call in seen] == [0.0]


def test_dropout_is_switched_off_where_logsumexp_is_asked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    original = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def recorder(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, *args: Any, **kwargs: Any) -> Any:
        seen.append(dropout_p)
        return original(query, key, value, dropout_p, *args, **kwargs)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", recorder)
    Engine().attend(make_problem(outputs=("context", "logsumexp")))
    assert seen == [0.0]


def test_every_output_is_the_same_with_a_query_that_asks_for_gradients() -> None:
    problem = make_problem(seq_len_q=20, seq_len_kv=20)
    wanting = with_tensors(problem, query=problem.query.clone().requires_grad_())
    assert_same_bits(Engine().attend(problem), Engine().attend(wanting))


def test_empty_row_is_refused_by_place_when_asked_to_be_an_error() -> None:
    allow = torch.ones(2, 4, 5, 7, dtype=torch.bool)
    allow[1, 2, 3] = False
    allow[1, 3, 0] = False
    problem = make_problem(tensors={"allow_mask": allow}, empty_rows="error")
    with pytest.raises(InvalidProblem) as refusal:
        Engine().attend(problem)
    (fault,) = refusal.value.faults
    assert fault.field == "empty_rows" and "[1,2,3]" in fault.received


def test_padded_query_is_no_empty_row() -> None:
    lengths = torch.tensor([2, 0])
    problem = make_problem(tensors={"query_lengths": lengths}, empty_rows="error", outputs=("context", "weights"))
    assert Engine().attend(problem).empty_rows == 0
    both = make_problem(tensors={"query_lengths": lengths, "key_lengths": torch.tensor([0, 3])})
    assert Engine().attend(both).empty_rows == 2 * 4


@pytest.mark.parametrize("outputs", [("context",), ("weights",), ("context", "weights")])
def test_empty_rows_are_counted_over_the_whole_problem_whatever_is_selected(outputs: tuple[str, ...]) -> None:
    allow = torch.ones(1, 1, 5, 7, dtype=torch.bool)
    allow[..., 1:3, :] = False
    rows = (0, 1) if "weights" in outputs else None
    problem = make_problem(tensors={"allow_mask": allow}, outputs=outputs, select_rows=rows)
    assert Engine().attend(problem).empty_rows == 2 * 2 * 4


def test_refused_problem_leaves_its_neighbours_alone() -> None:
    good = make_problem()
    bad = make_problem(tensors={"key_lengths": torch.tensor([0, 3])}, empty_rows="error")
    results = Engine().run([good, bad, good])
    assert isinstance(results[1], InvalidProblem)
    for result in (results[0], results[2]):
        assert isinstance(result, AttentionResult)
        assert_matches_reference(good, result)


def test_run_of_nothing_gives_nothing() -> None:
    assert Engine().run([]) == []


def test_warm_up_runs_and_leaves_nothing_behind() -> None:
    engine = Engine()
    engine.warm_up()
    assert_matches_reference(make_problem(), engine.attend(make_problem()))


def test_estimate_is_what_the_result_reports() -> None:
    for problem in assorted():
        cost, result = prepare(problem, device_type="cpu").cost, Engine().attend(problem)
        assert (cost.peak_bytes, cost.flops) == (result.peak_bytes, result.flops) and not cost.spare_bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (4, 5, 7), (5, 7), (2, 4, 5, 0), (0, 4, 5, 7), (2, 4, 0, 7)])
def test_weighted_sum_is_the_plain_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kv_heads = 2 if len(shape) > 2 else 1
    weights = make_tensor(*shape, dtype=dtype)
    value = make_tensor(*shape[:-3], *([kv_heads] if len(shape) > 2 else []), shape[-1], 3, seed=1, dtype=dtype)
    result = Engine().attend(WeightedSumProblem(weights, value))
    whole = value.double()
    if len(shape) > 2:
        whole = whole.repeat_interleave(shape[-3] // kv_heads, dim=-3)
    expected = weights.double() @ whole
    eps = torch.finfo(dtype).eps
    context = result.outputs["context"]
    assert context.dtype == dtype and context.shape == expected.shape
    torch.testing.assert_close(context.double(), expected, rtol=2 * eps, atol=16 * eps)
    assert result.nonfinite_rows == 0
    assert prepare(WeightedSumProblem(weights, value), device_type="cpu").cost.output_bytes == context.nbytes


def test_weighted_sum_lets_nan_through_a_weight_of_zero() -> None:
    weights, value = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[torch.nan], [2.0]])
    result = Engine().attend(WeightedSumProblem(weights, value))
    assert result.outputs["context"].isnan().all()
    assert result.nonfinite_rows == 2


def test_check_problem_passes_what_the_engine_answers() -> None:
    for problem in assorted():
        check_problem(problem)


def test_path_is_the_one_that_ran() -> None:
    nan = torch.full((1, 2, 3, 4), torch.nan)
    mixed = torch.zeros(1, 2, 3, 4)
    mixed[0, 0, 0] = torch.nan
    plain = make_problem(batch=1, num_heads=2, seq_len_q=3, seq_len_kv=3, head_dim=4)
    for query, path in ((nan, "manual"), (mixed, "fused")):
        result = Engine().attend(with_tensors(plain, query=query))
        assert result.path == path
        assert "non-finite" in result.why
    half = make_problem(dtype=torch.float16, outputs=("context", "logsumexp"))
    assert Engine().attend(half).path == "manual"
    asked = Engine().attend(make_problem(dtype=torch.float16, outputs=("context", "logsumexp"), path="fused"))
    assert asked.path == "fused" and "logsumexp by the manual kernel" in asked.why
    with pytest.raises(InvalidProblem, match="half precision"):
        Engine().attend(make_problem(dtype=torch.float16, outputs=("logsumexp",), path="fused"))
