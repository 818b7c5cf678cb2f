"""Numbers that a fused kernel would answer wrongly: found in little memory, and in few blocks answered by another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_core import AttentionProblem, AttentionResult, Engine
from attn_core.canonical import canonicalize
from attn_core.errors import NeedsSpare
from attn_core.hazards import find_hazards, without_hazards
from attn_core.kernels import blocked, isolated, manual
from attn_core.maths import context as context_maths
from attn_core.placement import ALIGNMENT_BYTES, empty_in_step
from tests.support.factory import make_mask, make_problem, make_tensor, with_tensors
from tests.support.memory import peak_bytes_of
from tests.support.oracle import assert_matches_reference

MIB = 2**20


@pytest.mark.parametrize("last", [0.0, -torch.inf, torch.inf, torch.nan, 1e300])
@pytest.mark.parametrize("turned", [False, True])
def test_wide_bias_is_looked_at_in_little_memory(last: float, turned: bool) -> None:
    bias = torch.zeros(1, 1, 2048, 1024, dtype=torch.float64)
    bias[..., 1::2], bias[..., -1, -1] = -torch.inf, last
    problem = make_problem(
        batch=1, num_heads=1, seq_len_q=2048 if not turned else 1024, seq_len_kv=1024 if not turned else 2048,
        tensors={"bias": bias.transpose(2, 3) if turned else bias},
    )  # fmt: skip
    canonical = canonicalize(problem)
    assert find_hazards(canonical).bias == (last not in (0.0, -torch.inf))
    assert peak_bytes_of(lambda: find_hazards(canonical)) < 2 * MIB


@pytest.mark.parametrize("shape", [(2, 3, 5, 70001), (1, 1, 1, 200001), (400, 1, 401, 3)])
def test_copy_without_hazards_has_every_other_number(shape: tuple[int, ...]) -> None:
    bias = make_tensor(*shape)
    bias.view(-1)[:: 2**15] = torch.inf
    axes: dict[str, Any] = dict(zip(("batch", "num_heads", "seq_len_q", "seq_len_kv"), shape, strict=True))
    canonical = canonicalize(make_problem(**axes, head_dim=1, tensors={"bias": bias}))
    clean = without_hazards(canonical, find_hazards(canonical)).bias
    assert clean is not None and torch.equal(clean, bias.masked_fill(bias == torch.inf, 0.0))


def attended_by_all(**axes: Any) -> AttentionProblem:
    problem = make_problem(**axes)
    assert problem.key is not None
    key = problem.key.clone()
    key[:, :, 0] = torch.inf
    return with_tensors(problem, key=key)


@pytest.mark.parametrize("outputs", [("context",), ("context", "logsumexp")])
def test_exact_blocks_of_a_long_problem_are_those_of_the_manual_kernel(outputs: tuple[str, ...]) -> None:
    axes: dict[str, Any] = {"batch": 1, "num_heads": 8, "seq_len_q": 4096, "seq_len_kv": 4096, "head_dim": 128}
    problem = canonicalize(make_problem(**axes, outputs=outputs))
    size = isolated.exact_size(problem.dims, isolated.exact_pairs(problem))
    assert size == manual.cut(problem.dims, problem.dims.seq_len_q)


def test_exact_blocks_of_a_problem_do_not_depend_on_what_is_asked() -> None:
    axes: dict[str, Any] = {"batch": 1, "num_heads": 8, "seq_len_q": 1024, "seq_len_kv": 1024, "head_dim": 96}
    names = [("context",), ("entropy",), ("context", "logsumexp", "entropy", "weight_totals")]
    assert len({isolated.exact_pairs(canonicalize(make_problem(**axes, outputs=own))) for own in names}) == 1


def test_block_of_which_every_row_attends_a_hazard_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[slice, slice]] = []
    compute = blocked._Blocks._compute

    def counting(self: Any, part: Any, block: Any, *rest: Any) -> Any:
        computed.append((block.items, block.heads))
        return compute(self, part, block, *rest)

    monkeypatch.setattr(blocked._Blocks, "_compute", counting)
    monkeypatch.setattr(blocked, "BLOCK_PAIRS", 1)
    problem = attended_by_all(path="blocked", outputs=("entropy", "weight_totals"), causal="upper_left", seq_len_kv=5)
    result = Engine().attend(problem)
    assert computed == [] and result.nonfinite_rows == 2 * 4 * 5
    assert_matches_reference(problem, result)


def test_slopes_that_overflow_leave_empty_rows_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK_PAIRS", 1)
    tensors = {"alibi_slopes": torch.full((4,), 3e38), "key_lengths": torch.tensor([0, 7])}
    problem = make_problem(path="blocked", outputs=("entropy", "weight_totals"), causal="lower_right", tensors=tensors)
    result, by_manual = (
        Engine().attend(problem),
        Engine().attend(
            make_problem(path="manual", outputs=("entropy", "weight_totals"), causal="lower_right", tensors=tensors)
        ),
    )
    assert (result.empty_rows, result.nonfinite_rows) == (by_manual.empty_rows, by_manual.nonfinite_rows)
    assert result.empty_rows >= 4 * 5
    assert_matches_reference(problem, result)


def test_of_values_that_are_not_finite_only_their_keys_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    carry = context_maths._carry_infinities_

    def counting(context: Tensor, weights: Tensor, value: Tensor, allowed: Tensor | None) -> None:
        widths.append(weights.shape[-1])
        carry(context, weights, value, allowed)

    monkeypatch.setattr(context_maths, "_carry_infinities_", counting)
    weights, value = make_tensor(2, 4, 5, 9).softmax(dim=-1), make_tensor(2, 2, 9, 3)
    value[0, 1, 2, 1], value[1, 0, 6] = torch.inf, torch.nan
    allowed = torch.ones(1, 1, 5, 9, dtype=torch.bool)
    allowed[..., 0, 2] = False
    weights = weights * allowed
    found = context_maths.weighted_context_of_allowed(weights, value, allowed)
    assert widths == [2]
    expected = torch.where(allowed.unsqueeze(-1), weights.unsqueeze(-1) * value.repeat_interleave(2, 1).unsqueeze(2), 0)
    torch.testing.assert_close(found, expected.sum(dim=-2), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 70, 7), (1, 5, 33, 64), (3, 1, 1, 80)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_empty_tensor_in_step_begins_and_steps_as_far_from_a_cache_line(
    order: tuple[int, ...], shape: tuple[int, ...], shift: int, dtype: torch.dtype
) -> None:
    inner = [shape[axis] for axis in order]
    memory = make_tensor(shift + math.prod(shape), dtype=dtype)
    whole = memory[shift:].view(inner).permute(*order)
    tensor = whole[:, 1:]
    if not tensor.numel():
        tensor = whole
    found = empty_in_step(tensor)
    assert found.shape == tensor.shape and found.stride(-1) == 1
    found.copy_(tensor)
    assert torch.equal(found, tensor), "no two numbers lie in one place"
    assert (found.data_ptr() - tensor.data_ptr()) % ALIGNMENT_BYTES == 0
    unit = ALIGNMENT_BYTES // dtype.itemsize
    assert all((a - b) % unit == 0 for a, b in zip(found.stride(), tensor.stride(), strict=True))
    assert found.untyped_storage().nbytes() <= tensor.nbytes + ALIGNMENT_BYTES * (3 + shape[0] * shape[2])


FORBIDDEN_AXES: dict[str, dict[str, Any]] = {
    "one head": {"batch": 1, "num_heads": 1, "seq_len_q": 700, "seq_len_kv": 600, "head_dim": 33},
    "tokens first": {"batch": 1, "num_heads": 6, "seq_len_q": 257, "seq_len_kv": 333, "head_dim": 33, "layout": "bthd"},
    "merged": {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len_q": 129, "seq_len_kv": 900, "head_dim": 20,
               "layout": "btd"},
    "few rows": {"batch": 1, "num_heads": 10, "num_kv_heads": 5, "seq_len_q": 16, "seq_len_kv": 9000, "head_dim": 96},
    "few rows of one group": {"batch": 3, "num_heads": 1, "seq_len_q": 32, "seq_len_kv": 30000, "head_dim": 48},
    "a decoding step": {"batch": 1, "num_heads": 7, "seq_len_q": 3, "seq_len_kv": 50000, "head_dim": 128},
}  # fmt: skip


@pytest.mark.parametrize("axes", FORBIDDEN_AXES.values(), ids=FORBIDDEN_AXES)
@pytest.mark.parametrize("hazard", [torch.nan, torch.inf, 1e30])
def test_forbidden_hazard_cannot_change_a_bit_in_any_order_of_memory_or_on_several_threads(
    axes: dict[str, Any], hazard: float
) -> None:
    problem = make_problem(**axes, tensors={"allow_mask": make_mask(1, 1, 1, axes["seq_len_kv"])})
    mask = problem.allow_mask
    assert mask is not None and problem.key is not None and problem.value is not None
    at = (~mask.flatten()).nonzero().flatten()
    axis = 2 if problem.options.layout == "bhtd" else 1
    poisoned = with_tensors(
        problem, **{name: getattr(problem, name).index_fill(axis, at, hazard) for name in ("key", "value")}
    )
    engine = Engine(max_threads=2)
    plain, behind = engine.attend(problem), engine.attend(poisoned)
    assert plain.path == behind.path == "fused" and behind.nonfinite_rows == 0
    assert torch.equal(plain.outputs["context"], behind.outputs["context"])


def test_hazardous_query_changes_no_bit_of_another_row() -> None:
    problem = make_problem(batch=2, num_heads=2, seq_len_q=300, seq_len_kv=90, head_dim=64)
    query = problem.query.clone()
    query[1, :, ::7] = torch.tensor([torch.nan, torch.inf, -1e30, 1.0]).repeat(16)
    plain, result = Engine().attend(problem), Engine().attend(with_tensors(problem, query=query))
    others = torch.arange(300) % 7 != 0
    assert torch.equal(plain.outputs["context"][0], result.outputs["context"][0])
    assert torch.equal(plain.outputs["context"][1][:, others], result.outputs["context"][1][:, others])
    assert result.nonfinite_rows == 2 * 43 and result.outputs["context"][1][:, ::7].isnan().all()


@pytest.mark.parametrize("outputs", [("context",), ("context", "entropy")])
def test_memory_that_hazards_take_is_asked_for_where_they_are_met(outputs: tuple[str, ...]) -> None:
    axes: dict[str, Any] = {"batch": 1, "num_heads": 1, "seq_len_q": 3, "seq_len_kv": 40_000, "head_dim": 64}
    problem = make_problem(**axes, outputs=outputs, path="fused" if len(outputs) == 1 else "blocked")
    engine = Engine()
    plain = engine.prepare(problem)
    assert plain.cost.spare_bytes > 0
    (answered,) = engine.run([plain])
    assert isinstance(answered, AttentionResult) and answered.peak_bytes == plain.cost.peak_bytes
    hazardous = engine.prepare(attended_by_all(**axes, outputs=outputs, path=problem.options.path))
    (refused,) = engine.run([hazardous])
    assert isinstance(refused, NeedsSpare) and refused.spare_bytes == hazardous.cost.spare_bytes
    (answered,) = engine.run([hazardous.with_spare])
    assert isinstance(answered, AttentionResult)
    assert answered.peak_bytes == plain.cost.peak_bytes + plain.cost.spare_bytes
    assert answered.nonfinite_rows == 3
    assert engine.attend(hazardous.problem).nonfinite_rows == 3, "a problem alone may take what it needs"


@pytest.mark.parametrize("axes", [(1, 2, 1, 30_001, 9), (1, 1, 2, 262_151, 9), (2, 3, 40, 5001, 16)], ids=str)
def test_forbidden_nan_in_values_of_one_number_cannot_change_a_bit(axes: tuple[int, ...]) -> None:
    names = ("batch", "num_heads", "seq_len_q", "seq_len_kv", "head_dim")
    own: dict[str, Any] = {**dict(zip(names, axes, strict=True)), "head_dim_v": 1, "path": "manual"}
    mask = torch.ones(1, 1, 1, axes[3], dtype=torch.bool)
    mask[..., 77] = False
    problem = make_problem(**own, tensors={"allow_mask": mask})
    assert problem.value is not None
    value = problem.value.clone()
    value[:, :, 77] = torch.nan
    plain, behind = Engine().attend(problem), Engine().attend(with_tensors(problem, value=value))
    assert torch.equal(plain.outputs["context"], behind.outputs["context"])
