"""Gradients through the engine: every feature, layout, rank and dtype against autograd in float64."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core import AttentionProblem, AttentionResult, Engine, Fault, InvalidProblem
from attn_core.prepared import prepare
from attn_core.problem import GradientsProblem, Layout
from tests.support.factory import DTYPES, features, make_mask, make_problem, make_tensor, with_options, with_tensors
from tests.support.golden import GoldenCase, attention_problem, disagreement, golden_cases
from tests.support.gradients import all_outputs, assert_matches_autograd, make_gradients
from tests.support.memory import peak_bytes_of
from tests.support.oracle import assert_same_bits
from tests.support.strategies import problems

GOLDEN = [case for case in golden_cases("attention") if case.gradients]
FEATURES = features()


def feature_problem(feature: str, **axes: Any) -> AttentionProblem:
    tensors, options = FEATURES[feature]
    return make_problem(tensors=tensors, **axes, **options)


def with_all(problem: GradientsProblem) -> GradientsProblem:
    return replace(problem, outputs=all_outputs(problem))


def test_worked_example_of_the_contract() -> None:
    attention = make_problem(scale=1.0, batch=1, num_heads=1, rank=2)
    attention = with_tensors(
        attention,
        query=torch.tensor([[1.0]]),
        key=torch.tensor([[0.5], [-0.5]]),
        value=torch.tensor([[1.0], [3.0]]),
    )
    problem = GradientsProblem(
        attention,
        torch.tensor([[1.0]]),
        outputs=("grad_query", "grad_key", "grad_value", "grad_weights", "grad_logits"),
    )
    result = Engine().attend(problem)
    assert (result.path, result.why) == ("manual", "grad_weights asked for")
    expected = {
        "grad_query": [[-0.39322]],
        "grad_key": [[-0.39322], [0.39322]],
        "grad_value": [[0.73106], [0.26894]],
        "grad_weights": [[1.0, 3.0]],
        "grad_logits": [[-0.39322, 0.39322]],
    }
    for name, numbers in expected.items():
        torch.testing.assert_close(result.outputs[name], torch.tensor(numbers), rtol=0, atol=5e-6)


@pytest.mark.parametrize("path", [None, "blocked", "manual"])
@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_engine_agrees_with_the_golden_case(case: GoldenCase, path: str | None) -> None:
    attention = attention_problem(case, outputs=("context",), path=path)
    problem = GradientsProblem(attention, case.tensors["grad_context"], outputs=case.gradients)
    result = Engine().attend(problem)
    assert result.path == (path or "blocked")
    for name in case.gradients:
        assert disagreement(result.outputs[name], case.expected[name], case.tolerance[name]) is None, name


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_matches_autograd_in_float64(feature: str, num_kv_heads: int) -> None:
    attention = feature_problem(feature, num_kv_heads=num_kv_heads, head_dim_v=6, dtype=torch.float64)
    problem = make_gradients(attention)
    everything = with_all(problem)
    result = Engine().attend(everything)
    assert_matches_autograd(everything, result, relative=1e-10)
    usual = Engine().attend(problem)
    assert usual.path == "blocked"
    for name, tensor in usual.outputs.items():
        assert torch.equal(tensor, result.outputs[name]), name
    for context in (True, False):
        problem = make_gradients(attention, context=context, logsumexp=not context)
        assert_matches_autograd(problem, Engine().attend(problem), relative=1e-10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_dtype_is_as_near_as_promised(feature: str, dtype: torch.dtype) -> None:
    problem = with_all(make_gradients(feature_problem(feature, num_kv_heads=2, dtype=dtype)))
    assert_matches_autograd(problem, Engine().attend(problem))


@settings(max_examples=150)
@given(attention=problems(), context=st.booleans(), logsumexp=st.booleans(), data=st.data())
def test_any_mix_of_options_matches_autograd(
    attention: AttentionProblem, context: bool, logsumexp: bool, data: st.DataObject
) -> None:
    attention = replace(attention, options=replace(attention.options, select_heads=None, select_rows=None, top_k=None))
    problem = make_gradients(attention, context=context or not logsumexp, logsumexp=logsumexp)
    asked = data.draw(st.lists(st.sampled_from(all_outputs(problem)), min_size=1, unique=True) | st.none())
    problem = replace(problem, outputs=None if asked is None else tuple(asked))
    result = Engine().attend(problem)
    relative = 1e-10 if attention.query.dtype == torch.float64 else None
    assert_matches_autograd(problem, result, relative=relative)
    assert result.nonfinite_rows == 0


@pytest.mark.parametrize("self_attention", [False, True])
@pytest.mark.parametrize("layout", ["bhtd", "bthd", "btd"])
def test_gradients_lie_as_their_tensors_do(layout: Layout, self_attention: bool) -> None:
    attention = make_problem(
        layout=layout, seq_len_kv=5, self_attention=self_attention, dtype=torch.float64, causal=True, head_dim_v=8
    )
    problem = with_all(make_gradients(attention))
    assert_matches_autograd(problem, Engine().attend(problem), relative=1e-10)
    if self_attention:
        assert replace(problem, outputs=None).asked == ("grad_query",)


@pytest.mark.parametrize("rank", [2, 3])
def test_gradients_have_the_rank_of_the_problem(rank: int) -> None:
    attention = make_problem(batch=1, rank=rank, tensors={"bias": make_tensor(5, 7)}, dtype=torch.float64)
    problem = with_all(make_gradients(attention))
    result = Engine().attend(problem)
    assert result.outputs["grad_bias"].shape == (5, 7)
    assert result.outputs["grad_logits"].ndim == rank
    assert_matches_autograd(problem, result, relative=1e-10)


@pytest.mark.parametrize("feature", ["nothing", "softcap", "mask and bias", "sinks and mask", "causal alibi"])
def test_gradients_match_central_differences(feature: str) -> None:
    problem = make_gradients(feature_problem(feature, num_kv_heads=2, dtype=torch.float64))
    result, step = Engine().attend(problem), 1e-5
    of_context, of_lse = problem.grad_context, problem.grad_logsumexp
    assert of_context is not None and of_lse is not None

    def loss(attention: AttentionProblem) -> float:
        outputs = Engine().attend(with_options(attention, outputs=("context", "logsumexp"), path="manual")).outputs
        # The logsumexp of an empty row is a constant.
        lse = torch.where(empty, 0.0, outputs["logsumexp"])
        total = (of_context * outputs["context"]).sum() + (of_lse * lse).sum()
        return float(total.item())

    weights = Engine().attend(with_options(problem.attention, outputs=("weights",))).outputs["weights"]
    empty = ~weights.any(dim=-1)
    for name in ("query", "key", "value"):
        tensor: torch.Tensor = getattr(problem.attention, name)
        for place in (7, 100, tensor.numel() - 3):
            moved = [tensor.clone(), tensor.clone()]
            moved[0].view(-1)[place] += step
            moved[1].view(-1)[place] -= step
            up, down = (loss(with_tensors(problem.attention, **{name: one})) for one in moved)
            own = result.outputs[f"grad_{name}"].reshape(-1)[place].item()
            assert own == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-8), (name, place)


def test_gradients_are_those_of_sdpa() -> None:
    attention = make_problem(seq_len_q=37, seq_len_kv=37, causal=True)
    problem = make_gradients(attention, logsumexp=False)
    assert attention.key is not None and attention.value is not None
    query, key, value = (t.clone().requires_grad_() for t in (attention.query, attention.key, attention.value))
    context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    found = torch.autograd.grad(context, (query, key, value), problem.grad_context)
    for name, gradient in zip(("grad_query", "grad_key", "grad_value"), found, strict=True):
        torch.testing.assert_close(Engine().attend(problem).outputs[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_have_the_same_bits_beside_others(feature: str) -> None:
    problem = with_all(make_gradients(feature_problem(feature)))
    other = make_gradients(make_problem(seq_len_q=9, causal="upper_left"))
    alone = Engine().attend(problem)
    for beside in Engine().run([other, problem, feature_problem("nothing"), problem])[1::2]:
        assert isinstance(beside, AttentionResult)
        assert_same_bits(alone, beside)


def test_empty_rows_are_counted_padded_queries_not() -> None:
    attention = feature_problem("causal at an offset")
    result = Engine().attend(make_gradients(attention))
    forward = Engine().attend(attention)
    assert 0 < result.empty_rows == forward.empty_rows
    padded = make_problem(tensors={"query_lengths": torch.tensor([1, 0]), "key_lengths": torch.tensor([2, 0])})
    assert Engine().attend(make_gradients(padded)).empty_rows == Engine().attend(padded).empty_rows == 0


def test_empty_rows_have_gradients_of_0_with_sinks_too() -> None:
    tensors, options = FEATURES["everything forbidden"]
    problem = with_all(make_gradients(make_problem(tensors={**tensors, "sinks": make_tensor(4)}, **options)))
    result = Engine().attend(problem)
    assert result.empty_rows == 2 * 4 * 5
    assert set(result.outputs) == set(problem.asked)
    for tensor in result.outputs.values():
        assert not tensor.any() and not torch.signbit(tensor).any()


def test_empty_row_is_refused_where_it_is_an_error() -> None:
    attention = feature_problem("causal at an offset", empty_rows="error")
    faults = []
    for problem in (attention, make_gradients(attention)):
        with pytest.raises(InvalidProblem) as refusal:
            Engine().attend(problem)
        faults.append(refusal.value.faults)
    assert faults[0] == faults[1]


@pytest.mark.parametrize("shape", [(0, 4, 5, 7), (2, 4, 0, 7), (2, 4, 5, 0), (2, 4, 0, 0)])
def test_problem_without_pairs_has_gradients_of_0(shape: tuple[int, ...]) -> None:
    batch, heads, rows, keys = shape
    problem = with_all(make_gradients(make_problem(batch=batch, num_heads=heads, seq_len_q=rows, seq_len_kv=keys)))
    result = Engine().attend(problem)
    for tensor in result.outputs.values():
        assert not tensor.any()
    assert result.outputs["grad_key"].shape == (batch, heads, keys, 8)
    assert result.empty_rows == (batch * heads * rows if keys == 0 else 0)


def faults_of(problem: GradientsProblem) -> list[Fault]:
    with pytest.raises(InvalidProblem) as refusal:
        Engine().attend(problem)
    return list(refusal.value.faults)


def test_path_that_cannot_serve_is_refused() -> None:
    problem = make_gradients(make_problem())
    fused = replace(problem, attention=with_options(problem.attention, path="fused"))
    assert faults_of(fused) == [
        Fault("path", "blocked or manual, or nothing, since gradients asked for", "fused"),
    ]
    blocked = replace(problem, attention=with_options(problem.attention, path="blocked"), outputs=("grad_logits",))
    assert faults_of(blocked) == [Fault("path", "manual, or nothing, since grad_logits asked for", "blocked")]
    paged = replace(problem, attention=with_options(problem.attention, path="paged"))
    assert faults_of(paged) == [Fault("path", "blocked or manual", "paged")]


def test_every_fault_is_found_at_once() -> None:
    attention = with_options(make_problem(), select_heads=(0,), select_rows=(1,), top_k=2, scale=float("nan"))
    problem = GradientsProblem(
        attention,
        torch.zeros(2, 4, 5, 7, dtype=torch.float64),
        torch.zeros(2, 4, 6, dtype=torch.float16),
        outputs=("grad_bias", "grad_query", "grad_query", "context", "grad_sinks"),
    )
    found = faults_of(problem)
    assert [(fault.field, fault.received) for fault in found] == [
        ("scale", "nan"),
        ("grad_context", "float64"),
        ("grad_context", "[2,4,5,7]"),
        ("grad_logsumexp", "float16"),
        ("grad_logsumexp", "[2,4,6]"),
        ("select.heads", "[0]"),
        ("select.rows", "[1]"),
        ("select.top_k", "2"),
        ("outputs.0", "grad_bias"),
        ("outputs.2", "grad_query"),
        ("outputs.3", "context"),
        ("outputs.4", "grad_sinks"),
    ]


def test_gradient_of_nothing_is_refused() -> None:
    (fault,) = faults_of(GradientsProblem(make_problem()))
    assert (fault.field, fault.received) == ("grad_context", "nothing")
    assert faults_of(make_gradients(make_problem(), outputs=()))[0].field == "outputs"


@pytest.mark.parametrize("name", ["grad_key", "grad_value"])
def test_gradient_of_what_is_left_out_is_refused(name: str) -> None:
    (fault,) = faults_of(make_gradients(make_problem(self_attention=True), outputs=("grad_query", name)))
    assert (fault.field, fault.received) == ("outputs.1", name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradient_of_the_logsumexp_of_half_numbers_may_be_either(dtype: torch.dtype) -> None:
    attention = make_problem(dtype=torch.float16)
    problem = make_gradients(attention, context=False)
    assert problem.grad_logsumexp is not None
    Engine().attend(replace(problem, grad_logsumexp=problem.grad_logsumexp.to(dtype)))


AXES: dict[str, dict[str, Any]] = {
    "wide": {"batch": 1, "num_heads": 8, "seq_len_q": 640, "seq_len_kv": 700, "head_dim": 32},
    "many items": {"batch": 64, "num_heads": 8, "seq_len_q": 16, "seq_len_kv": 16, "head_dim": 64},
    "one query": {"batch": 1, "num_heads": 2, "seq_len_q": 1, "seq_len_kv": 2**16, "head_dim": 2},
}


PEAKS = [
    *(("wide", feature, torch.float32) for feature in ("nothing", "lower_right", "mask and bias", "alibi", "softcap")),
    *(("wide", feature, torch.bfloat16) for feature in ("nothing", "both lengths")),
    *(("many items", feature, torch.float32) for feature in ("mask and bias", "both lengths")),
    *(("one query", feature, torch.bfloat16) for feature in ("nothing", "alibi")),
]


@pytest.mark.parametrize(("axes", "feature", "dtype"), PEAKS, ids=str)
def test_peak_is_not_above_the_estimate(axes: str, feature: str, dtype: torch.dtype) -> None:
    sizes = AXES[axes]
    tensors, options = features(**{name: size for name, size in sizes.items() if name != "head_dim"})[feature]
    problem = make_gradients(make_problem(**sizes, dtype=dtype, tensors=tensors, **options))
    assert problem.attention.key is not None and problem.grad_context is not None
    key, grad_context = problem.attention.key.clone(), problem.grad_context.clone()
    key[0, 0, ::3], grad_context[0, 0, ::3] = torch.nan, torch.inf
    poisoned = replace(problem, attention=with_tensors(problem.attention, key=key), grad_context=grad_context)
    for one in (problem, with_all(problem), poisoned):
        inputs = sum(tensor.nbytes for tensor in one.tensors().values())
        results: list[AttentionResult] = []
        measured = inputs + peak_bytes_of(lambda one=one, kept=results: kept.append(Engine().attend(one)))  # type: ignore[misc]
        estimate = prepare(one, device_type="cpu").cost
        assert measured <= estimate.peak_bytes
        assert estimate.output_bytes == sum(tensor.nbytes for tensor in results[0].outputs.values())


NEAR: dict[str, dict[str, Any]] = {
    "decoding": {"sizes": (4, 8, 1, 2048, 64), "asked": ("grad_query",)},
    "decoding, one head": {"sizes": (1, 1, 1, 40000, 64), "asked": ("grad_query",), "dtype": torch.float64},
    "decoding, half": {"sizes": (4, 8, 1, 4096, 64), "dtype": torch.bfloat16, "layout": "bthd"},
    "value": {"sizes": (2, 8, 300, 1500, 64), "asked": ("grad_value",), "layout": "bthd"},
    "logsumexp": {"sizes": (4, 8, 1000, 300, 64), "asked": ("grad_key",), "context": False},
    "pairs, many items": {"sizes": (1024, 2, 16, 8, 64), "asked": ("grad_weights", "grad_logits"), "layout": "btd"},
    "window": {"sizes": (1, 2, 5000, 5000, 64), "causal": "lower_right", "window_left": 100},
    "softcap": {"sizes": (2, 8, 700, 700, 64), "softcap": 5.0},
    "self-attention": {"sizes": (8, 8, 256, 256, 64), "self_attention": True},
    "bias": {"sizes": (1, 4, 1000, 1000, 16), "bias": (1, 4, 1000, 1000), "asked": ("grad_bias",)},
}


@pytest.mark.parametrize("case", NEAR)
def test_peak_of_plain_numbers_is_near_the_estimate_and_that_of_others_not_above_it(case: str) -> None:
    wanted = dict(NEAR[case])
    asked, context = wanted.pop("asked", None), wanted.pop("context", True)
    names = ("batch", "num_heads", "seq_len_q", "seq_len_kv", "head_dim")
    axes = dict(zip(names, wanted.pop("sizes"), strict=True))
    tensors = {"bias": make_tensor(*wanted.pop("bias"), dtype=torch.float16)} if "bias" in wanted else {}
    attention = make_problem(**axes, tensors=tensors, **wanted)
    problem = make_gradients(attention, context=context, logsumexp=not context, outputs=asked)
    estimate = prepare(problem, device_type="cpu").cost.peak_bytes
    assert estimate > 16 * 2**20

    def share_of(one: GradientsProblem) -> float:
        inputs = sum(tensor.nbytes for tensor in one.tensors().values())
        return (inputs + peak_bytes_of(lambda: Engine().attend(one))) / estimate

    assert 0.7 <= share_of(problem) <= 1.0
    own = {}
    for name in ("query", "key", "value"):
        tensor: torch.Tensor | None = getattr(problem.attention, name)
        if tensor is not None:
            own[name] = tensor.masked_fill(make_mask(*tensor.shape[:-1], 1, share=0.1), torch.nan)
    assert share_of(replace(problem, attention=with_tensors(problem.attention, **own))) <= 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_bytes_are_those_of_the_answer_whatever_the_dtypes(dtype: torch.dtype) -> None:
    for own in DTYPES:
        tensors = {"bias": make_tensor(4, 1, 7, dtype=own), "sinks": make_tensor(4, dtype=own)}
        problem = with_all(make_gradients(make_problem(batch=1, dtype=dtype, tensors=tensors)))
        found = Engine().attend(problem).outputs
        estimate = prepare(problem, device_type="cpu").cost.output_bytes
        assert estimate == sum(tensor.nbytes for tensor in found.values())


def test_flops_are_those_of_five_products() -> None:
    problem = make_gradients(make_problem(batch=3, num_kv_heads=2, head_dim=8, head_dim_v=6, causal="lower_right"))
    assert prepare(problem, device_type="cpu").cost.flops == 2 * 3 * 4 * 5 * 7 * (3 * 8 + 2 * 6)


LONG = """
import resource, torch
from attn_core import AttentionProblem, Engine
from attn_core.prepared import prepare
from attn_core.problem import GradientsProblem

def peak(): return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def problem(tokens):
    tensors = [torch.randn(1, 8, tokens, 64) for _ in range(4)]
    return GradientsProblem(AttentionProblem(*tensors[:3]), tensors[3])

Engine().attend(problem(64))
large = problem(2048)
before = peak()
answer = Engine().attend(large)
answers = sum(tensor.nbytes for tensor in answer.outputs.values())
print(peak() - before - answers)
"""


def test_long_backward_pass_takes_little_beside_its_answers() -> None:
    ran = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=True)
    # Whole matrices would be 128 MiB each.
    assert int(ran.stdout) <= 16 * 2**20
