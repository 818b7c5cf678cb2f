"""The blocked kernel beside the laws of all kernels: selection, ranking, sums over rows, its choice and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn_core import AttentionProblem, Engine, InvalidProblem
from attn_core.cut import THREADS_FROM_FLOPS
from attn_core.kernels import blocked
from attn_core.prepared import prepare
from tests.benchmarks import long
from tests.support.factory import DTYPES, features, make_problem, make_tensor, with_options, with_tensors
from tests.support.memory import peak_bytes_of
from tests.support.oracle import assert_matches_reference, assert_same_bits

MIB = 2**20
SUMMARIES = ("context", "logsumexp", "entropy", "top_weights", "weight_totals")
ALL = (*SUMMARIES, "weights")
SELECTIONS: dict[str, dict[str, Any]] = {
    "rows": {"select_rows": (8, 0, 3)},
    "heads": {"select_heads": (3, 0)},
    "both": {"select_rows": (5,), "select_heads": (2, 1)},
}


@pytest.fixture(autouse=True)
def own_number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loop over blocks, runs of keys and groups goes round many times."""
    for name in ("BLOCK_PAIRS", "TILE_PAIRS", "RANKED_AT_ONCE"):
        monkeypatch.setattr(blocked, name, 40)
    monkeypatch.setattr(blocked, "FEW_ROWS", 2)
    monkeypatch.setattr(blocked, "GROUP_SIZES", (2, 3))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", features())
def test_selection_over_blocks_matches_reference(feature: str, dtype: torch.dtype) -> None:
    axes: dict[str, Any] = {"batch": 2, "seq_len_q": 9, "seq_len_kv": 23}
    tensors, options = features(**axes)[feature]
    # Every feature meets every selection, and every dtype both widths of the values.
    number = list(features()).index(feature) + DTYPES.index(dtype)
    selection = list(SELECTIONS.values())[number % len(SELECTIONS)]
    problem = make_problem(
        **axes, num_kv_heads=2, head_dim_v=(8, 5)[number % 2], dtype=dtype, tensors=tensors, path="blocked",
        outputs=ALL, top_k=3, **selection, **options,
    )  # fmt: skip
    assert_matches_reference(problem, Engine().attend(problem))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", ["bthd", "btd"])
@pytest.mark.parametrize("feature", ["nothing", "mask and bias", "causal window", "sinks", "softcap"])
def test_layout_over_blocks_matches_reference(feature: str, layout: Any) -> None:
    tensors, options = features(seq_len_q=9, seq_len_kv=23)[feature]
    problem = make_problem(
        seq_len_q=9, seq_len_kv=23, num_kv_heads=2, layout=layout, tensors=tensors, path="blocked", outputs=SUMMARIES,
        top_k=3, **options,
    )  # fmt: skip
    assert_matches_reference(problem, Engine().attend(problem))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("selection", [{}, *SELECTIONS.values()], ids=["nothing", *SELECTIONS])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 3e38])
def test_rows_that_attend_bad_numbers_match_the_manual_kernel(poison: float, selection: dict[str, Any]) -> None:
    problem = make_problem(
        seq_len_q=9, seq_len_kv=9, num_kv_heads=2, causal=True, path="blocked", top_k=3,
        outputs=ALL if selection else SUMMARIES, **selection,
    )  # fmt: skip
    assert problem.key is not None and problem.value is not None
    key, value, query = problem.key.clone(), problem.value.clone(), problem.query.clone()
    key[0, 1, 6], value[1, 0, 4], query[0, 0, 2] = poison, poison, poison
    problem = with_tensors(problem, query=query, key=key, value=value)
    result, manual = (Engine().attend(with_options(problem, path=path)) for path in ("blocked", "manual"))
    assert (result.nonfinite_rows, result.empty_rows) == (manual.nonfinite_rows, manual.empty_rows)
    assert result.outputs.keys() == manual.outputs.keys()
    for name, own in result.outputs.items():
        torch.testing.assert_close(own, manual.outputs[name], equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_keys", "count"), [(5, 5), (700, 3), (1000, 1), (2100, 16), (4096, 7)])
def test_ranking_names_the_lower_key_of_equal_weights(num_keys: int, count: int, dtype: torch.dtype) -> None:
    # Few different numbers, so that most are equal to others; some stand for forbidden keys.
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    weights = (make_tensor(6, num_keys, std=3).abs().round() / 7).to(arithmetic)
    weights[3, num_keys // 2 :], weights[4], weights[5] = -1.0, 0.0, -1.0
    found, keys = blocked.top_of(weights.clone(), count, dtype)
    truth = torch.sort(weights.to(dtype), dim=-1, descending=True, stable=True)
    assert torch.equal(found, truth.values[:, :count])
    assert torch.equal(keys, truth.indices[:, :count])


def test_ranking_by_groups_is_what_long_rows_get() -> None:
    assert blocked.group_size(32768, 16) in blocked.GROUP_SIZES
    assert blocked.group_size(700, 300) is None


@pytest.mark.parametrize(
    ("dtype", "feature"),
    [
        *((torch.float32, feature) for feature in ("nothing", "mask and bias", "sinks and mask")),
        *((torch.bfloat16, feature) for feature in ("lower_right", "alibi", "both lengths")),
    ],
    ids=str,
)
def test_number_of_threads_cannot_change_a_bit(dtype: torch.dtype, feature: str) -> None:
    axes: dict[str, Any] = {"batch": 1, "num_heads": 2, "seq_len_q": 230, "seq_len_kv": 4500}
    tensors, options = features(**axes)[feature]
    problem = make_problem(
        **axes, head_dim=64, dtype=dtype, tensors=tensors, path="blocked", outputs=SUMMARIES, top_k=16, **options
    )
    one, two = (Engine(max_threads=threads).attend(problem) for threads in (1, 2))
    assert torch.get_num_threads() == 2 and two.flops >= THREADS_FROM_FLOPS
    assert_same_bits(one, two)


@pytest.mark.parametrize("name", ["scores", "logits", "weights"])
def test_whole_matrix_is_refused_by_the_blocked_kernel(name: str) -> None:
    with pytest.raises(InvalidProblem) as refusal:
        Engine().attend(make_problem(path="blocked", outputs=("context", name)))
    (fault,) = refusal.value.faults
    assert fault.field == "path"
    assert fault.expected.startswith("fused or manual, or nothing, since ")
    assert ("whole weights asked for" if name == "weights" else f"{name} asked for") in fault.expected


def test_kernel_of_summaries_follows_from_the_number_of_pairs() -> None:
    def path(seq_len: int, **options: Any) -> tuple[str, str]:
        query, key, value = (torch.empty(1, 8, seq_len, 64, device="meta") for _ in range(3))
        problem = with_options(AttentionProblem(query, key, value), **options)
        prepared = prepare(problem, device_type="cpu")
        return prepared.path, prepared.why

    assert path(256, outputs=("entropy",)) == ("manual", "entropy asked for")
    assert path(2048, outputs=("entropy",)) == ("blocked", "entropy asked for, of many pairs")
    assert path(2048, outputs=("context",), softcap=3.0) == ("blocked", "softcap given, of many pairs")
    assert path(2048, outputs=("weights",)) == ("manual", "weights asked for")
    assert path(2048, outputs=("weights",), select_rows=(0,)) == ("blocked", "weights asked for, of many pairs")
    assert path(2048, outputs=("context", "logsumexp"))[0] == "fused"
    assert path(256, outputs=("context",), path="blocked") == ("blocked", "asked for")


@pytest.mark.parametrize(
    ("dtype", "feature"),
    [
        *((torch.float32, feature) for feature in ("nothing", "mask and bias", "softcap")),
        *((torch.bfloat16, feature) for feature in ("lower_right", "alibi")),
    ],
    ids=str,
)
def test_peak_of_long_rows_is_not_above_the_estimate(dtype: torch.dtype, feature: str) -> None:
    axes: dict[str, Any] = {"batch": 1, "num_heads": 2, "seq_len_q": 128, "seq_len_kv": 10240}
    tensors, options = features(**axes)[feature]
    problem = make_problem(
        **axes, head_dim=32, dtype=dtype, tensors=tensors, path="blocked", outputs=SUMMARIES, top_k=16, **options
    )
    inputs = sum(tensor.nbytes for tensor in problem.tensors().values())
    measured = inputs + peak_bytes_of(lambda: Engine().attend(problem))
    assert measured <= prepare(problem, device_type="cpu").cost.peak_bytes


@pytest.mark.parametrize("asked", long.ASKED)
def test_summaries_of_many_tokens_take_no_more_memory_than_promised(asked: str) -> None:
    problem = long.problem_of(asked, seq_len=2048)
    inputs = sum(tensor.nbytes for tensor in problem.tensors().values())
    cost = prepare(problem, device_type="cpu").cost
    taken = peak_bytes_of(lambda: Engine().attend(problem)) - cost.output_bytes
    assert taken <= long.MAX_BYTES_PER_THREAD
    assert 0.7 * cost.peak_bytes <= inputs + cost.output_bytes + taken <= cost.peak_bytes
