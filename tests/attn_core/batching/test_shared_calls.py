"""Problems that share a call get what they would get alone, to the last bit, and cannot harm each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_core import AttentionProblem, AttentionResult
from attn_core.batching.grouping import group_key, join, split
from attn_core.batching.shared_calls import SharedCalls
from attn_core.canonical import CanonicalProblem, canonicalize, to_callers_form
from attn_core.kernels import fused
from attn_core.kernels.output import KernelOutput
from attn_core.kernels.ragged import RaggedKernel
from tests.support.factory import make_problem, with_tensors
from tests.support.oracle import assert_matches_reference, same_bits
from tests.support.varlen import failing_varlen, neighbourly_varlen, old_varlen, varlen

HALVES = (torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
MIXED: list[dict[str, Any]] = [
    {"seq_len_q": 5, "seq_len_kv": 7},
    {"seq_len_q": 33, "seq_len_kv": 33, "batch": 1, "layout": "btd"},
    {"seq_len_q": 1, "seq_len_kv": 1},
    {"seq_len_q": 1, "seq_len_kv": 90},
    {"seq_len_q": 18, "seq_len_kv": 300, "layout": "bthd", "batch": 3},
    {"tensors": {"key_lengths": torch.tensor([0, 3]), "query_lengths": torch.tensor([5, 2])}},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": "lower_right"},
    {"causal": "lower_right", "window_left": 3},
    {"num_kv_heads": 2, "causal": "lower_right"},
]


def sharing(varlen_attn: Any = varlen, *, device: torch.device = CPU, **options: Any) -> SharedCalls:
    kernel = None if device.type == "cuda" else RaggedKernel(varlen_attn)
    shared = SharedCalls(device, kernel=kernel, **options)
    shared.packs = True
    return shared


def mixed(dtype: torch.dtype, **options: Any) -> list[AttentionProblem]:
    return [
        make_problem(seed=seed, dtype=dtype, **{"num_kv_heads": 4, **form, **options})
        for seed, form in enumerate(MIXED, start=1)
    ]


def answers(shared: SharedCalls, problems: Sequence[AttentionProblem]) -> list[KernelOutput | None]:
    return shared.attend([canonicalize(problem) for problem in problems])


def assert_answers(problem: AttentionProblem, output: KernelOutput | None) -> None:
    assert output is not None
    outputs = {name: to_callers_form(name, tensor, problem) for name, tensor in output.outputs.items()}
    result = AttentionResult(outputs=outputs, path="fused", why="", device="cpu", dtype=problem.query.dtype)
    assert_matches_reference(problem, result)


def assert_same(first: KernelOutput | None, second: KernelOutput | None) -> None:
    assert first is not None and second is not None
    assert same_bits(first.outputs["context"], second.outputs["context"])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_problems_match_reference(dtype: torch.dtype, options: dict[str, Any]) -> None:
    problems = mixed(dtype, **options)
    for problem, output in zip(problems, answers(sharing(), problems), strict=True):
        assert_answers(problem, output)


@pytest.mark.parametrize("outputs", [("context", "logsumexp"), ("logsumexp",)])
def test_packed_logsumexp_matches_reference(outputs: tuple[str, ...]) -> None:
    problems = mixed(torch.bfloat16, causal="lower_right", outputs=outputs)
    for problem, output in zip(problems, answers(sharing(with_logsumexp=True), problems), strict=True):
        assert_answers(problem, output)
    assert answers(sharing(), problems) == [None] * len(problems)


@pytest.mark.parametrize("max_call_bytes", [1, 10_000, 2**25])
def test_sharing_is_batch_invariant(max_call_bytes: int) -> None:
    problems = [problem for options in OPTIONS for problem in mixed(torch.bfloat16, **options)]
    problems += [make_problem(seed=seed, seq_len_kv=5, causal=True) for seed in range(3)]
    shared = sharing(max_call_bytes=max_call_bytes)
    shared.groups = True
    together = answers(shared, problems)
    for problem, output in zip(problems, together, strict=True):
        assert_same(output, answers(shared, [problem])[0])
        assert_same(output, shared.attend_alone(canonicalize(problem)))
    for output, again in zip(reversed(together), answers(shared, problems[::-1]), strict=True):
        assert_same(output, again)


def test_what_cannot_share_a_call_is_left_to_others() -> None:
    odd = make_problem(dtype=torch.bfloat16, softcap=1.0)
    plain = make_problem(dtype=torch.bfloat16)
    shared = sharing()
    outputs = answers(shared, [odd, plain, make_problem(), odd])
    assert [output is None for output in outputs] == [True, False, True, True]
    assert shared.attend_alone(canonicalize(odd)) is None


def test_problem_that_is_answered_in_blocks_shares_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [make_problem(dtype=torch.bfloat16), make_problem()]
    shared = sharing()
    shared.groups = True
    assert None not in answers(shared, problems)
    monkeypatch.setattr(fused, "BLOCK_PAIRS", 1)
    assert answers(shared, problems) == [None, None]
    assert shared.attend_alone(canonicalize(problems[0])) is None


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_hazardous_number_is_left_to_others_and_cannot_change_its_neighbours(name: str, poison: float) -> None:
    # Those of more than one query, which share one call.
    problems = [problem for problem in mixed(torch.bfloat16) if problem.query.shape[-2] > 1]
    shared = sharing()
    clean = answers(shared, problems)
    poisoned = getattr(problems[1], name).clone()
    poisoned[0, 2, 1] = poison
    problems[1] = with_tensors(problems[1], **{name: poisoned})
    assert answers(shared, problems) == [None] * len(problems)
    assert answers(shared, problems[1:2]) == [None]
    for index in (0, 2, 3):
        assert_same(shared.attend_alone(canonicalize(problems[index])), clean[index])


def test_what_padding_holds_changes_nothing() -> None:
    problem = mixed(torch.bfloat16)[5]
    assert problem.key is not None
    key, query = problem.key.clone(), problem.query.clone()
    key[0], key[1, :, 3:], query[1, :, 2:] = torch.nan, torch.inf, torch.nan
    shared = sharing()
    assert_same(*answers(shared, [problem, with_tensors(problem, query=query, key=key)]))


def test_failed_call_is_left_to_be_answered_one_by_one() -> None:
    problems = [make_problem(dtype=torch.bfloat16, batch=1, seed=seed) for seed in range(3)]
    shared = sharing(failing_varlen)
    assert answers(shared, problems) == [None] * 3
    for problem in problems:
        assert_answers(problem, shared.attend_alone(canonicalize(problem)))


def test_error_of_one_alone_is_its_own() -> None:
    shared = sharing(failing_varlen)
    with pytest.raises(torch.OutOfMemoryError):
        shared.attend_alone(canonicalize(make_problem(dtype=torch.bfloat16, batch=2)))


def test_empty_rows_of_packed_problems_are_marked() -> None:
    problems = mixed(torch.bfloat16, causal="lower_right")
    problems.append(make_problem(dtype=torch.bfloat16, seq_len_q=9, seq_len_kv=4, causal="lower_right"))
    for problem, output in zip(problems, answers(sharing(), problems), strict=True):
        assert output is not None
        empty = canonicalize(problem).empty_rows()
        # A single query at the end of its keys sees them all, and nothing is forbidden then.
        marks = torch.zeros_like(empty) if output.empty is None else output.empty
        assert torch.equal(marks, empty)
    assert all(output is not None and output.empty is None for output in answers(sharing(), mixed(HALVES[0])[:5]))


def test_nothing_is_shared_before_it_is_proven() -> None:
    problems = [make_problem(dtype=torch.bfloat16), make_problem()]
    shared = SharedCalls(CPU, kernel=RaggedKernel(varlen))
    assert answers(shared, problems) == [None, None]
    assert shared.prove()
    assert answers(shared, problems)[0] is not None


@pytest.mark.parametrize("unfit", [old_varlen, neighbourly_varlen, failing_varlen])
def test_kernel_that_is_not_batch_invariant_is_not_used(unfit: Any) -> None:
    shared = SharedCalls(CPU, kernel=RaggedKernel(unfit))
    assert not shared.prove()
    assert not shared.packs


def test_kernel_that_is_missing_is_not_used() -> None:
    # Torch's own has no code for this device.
    shared = SharedCalls(CPU)
    assert not shared.prove()


def test_joining_that_changes_bits_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(problem: CanonicalProblem) -> KernelOutput:
        return KernelOutput(outputs={"context": problem.query * (1 + problem.dims.batch)})

    monkeypatch.setattr(fused, "attend", attend)
    shared = SharedCalls(CPU, kernel=RaggedKernel(varlen))
    shared.prove()
    assert not shared.groups


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_joined_problems_match_reference(options: dict[str, Any]) -> None:
    problems = [make_problem(seed=seed, batch=seed, seq_len_kv=5, **options) for seed in (1, 2, 3)]
    shared = sharing()
    shared.groups = True
    for problem, output in zip(problems, answers(shared, problems), strict=True):
        assert_answers(problem, output)


def test_group_key_separates_what_must_not_be_joined() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"seq_len_q": 4},
        {"seq_len_kv": 5},
        {"num_heads": 2},
        {"head_dim": 16, "scale": 8**-0.5},
        {"scale": 0.3},
        {"seq_len_kv": 5, "causal": True},
    ]
    keys = [group_key(canonicalize(make_problem(**change))) for change in changes]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert group_key(canonicalize(make_problem(batch=7, layout="btd"))) == keys[0]
    alone: list[dict[str, Any]] = [
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
        {"num_kv_heads": 2},
        {"causal": "lower_right"},
        {"softcap": 1.0},
        {"head_dim": 6},
        {"outputs": ("context", "logsumexp")},
        {"batch": 0},
        {"tensors": {"key_lengths": torch.tensor([1, 2])}},
        {"tensors": {"sinks": torch.ones(4)}},
    ]
    for change in alone:
        assert group_key(canonicalize(make_problem(**change))) is None, change


def test_splitting_what_was_joined_gives_it_back() -> None:
    problems = [canonicalize(make_problem(seed=seed, batch=batch)) for seed, batch in enumerate((1, 3, 2))]
    whole = join(problems)
    assert whole.dims.batch == 6 and whole.key.shape[0] == whole.value.shape[0] == 6
    for problem, output in zip(problems, split(problems, whole.query), strict=True):
        assert torch.equal(output.outputs["context"], problem.query)


# On a GPU.

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 300)


def on_gpu() -> SharedCalls:
    return sharing(device=torch.device("cuda"), with_logsumexp=True)


def many(dtype: torch.dtype, **options: Any) -> list[AttentionProblem]:
    forms: dict[str, Any] = {"batch": 1, "head_dim": 64, "dtype": dtype, **options}
    return [
        make_problem(seed=seed, seq_len_q=length, seq_len_kv=LENGTHS[-1 - seed] if cross else length, **forms)
        for cross in (False, True)
        for seed, length in enumerate(LENGTHS)
    ]


CUDA_OPTIONS: list[dict[str, Any]] = [
    {},
    {"head_dim": 256, "num_heads": 2},
    {"head_dim": 40},
    {"causal": "lower_right"},
    {"causal": "upper_left"},
    {"causal": "lower_right", "window_left": 30},
    {"num_kv_heads": 1},
    {"num_kv_heads": 2, "causal": "lower_right", "head_dim": 128},
    {"outputs": ("context", "logsumexp"), "causal": "lower_right"},
]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("options", CUDA_OPTIONS, ids=str)
def test_packed_on_a_gpu_matches_reference(dtype: torch.dtype, options: dict[str, Any]) -> None:
    shared = on_gpu()
    if not shared.prove():
        pytest.skip("this torch cannot pack")
    problems = many(dtype, **options)
    outputs = answers(shared, problems)
    answered = [(problem, output) for problem, output in zip(problems, outputs, strict=True) if output is not None]
    # Where queries far outnumber keys, a causal rule from the upper left has no words in the kernel.
    assert len(answered) >= len(problems) // 2
    for problem, output in answered:
        assert_answers(problem, output)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("options", [*CUDA_OPTIONS[:8]], ids=str)
def test_sharing_on_a_gpu_is_batch_invariant(dtype: torch.dtype, options: dict[str, Any]) -> None:
    shared = on_gpu()
    if not shared.prove():
        pytest.skip("this torch cannot pack")
    problems = many(dtype, **options)
    problems += [make_problem(seed=seed, seq_len_q=65, seq_len_kv=65, dtype=dtype, **options) for seed in range(40, 44)]
    together = answers(shared, problems)
    for index, problem in enumerate(problems):
        (alone,) = answers(shared, [problem])
        if alone is None:
            assert together[index] is None
            assert shared.attend_alone(canonicalize(problem)) is None
        else:
            assert_same(together[index], alone)
            assert_same(alone, shared.attend_alone(canonicalize(problem)))
    few = answers(shared, problems[5:9])
    for alone, output in zip(few, together[5:9], strict=True):
        assert (alone is None) == (output is None)
        if alone is not None:
            assert_same(alone, output)


@pytest.mark.cuda
def test_problems_that_lie_on_a_gpu_are_packed_and_answered_there() -> None:
    shared = on_gpu()
    if not shared.prove():
        pytest.skip("this torch cannot pack")
    problems = mixed(torch.bfloat16, causal="lower_right", head_dim=64)
    there = [with_tensors(p, **{name: t.cuda() for name, t in p.tensors().items()}) for p in problems]
    for on_host, on_device in zip(answers(shared, problems), answers(shared, there), strict=True):
        assert on_host is not None and on_device is not None
        context: Tensor = on_device.outputs["context"]
        assert context.is_cuda
        assert same_bits(context.cpu(), on_host.outputs["context"])


@pytest.mark.cuda
def test_many_calls_in_turn_use_the_same_pinned_memory_and_mix_nothing() -> None:
    shared = sharing(device=torch.device("cuda"), max_call_bytes=2**16)
    problems = many(torch.bfloat16)
    first = answers(shared, problems)
    held = shared.staging.pool.held_bytes
    for _ in range(5):
        for output, again in zip(first, answers(shared, problems), strict=True):
            assert_same(output, again)
    shared.staging.pool.check_integrity()
    assert shared.staging.pool.held_bytes <= max(held, shared.staging.pool.max_bytes)
