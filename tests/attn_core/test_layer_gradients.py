"""A layer's gradients: against autograd in float64, against differences, and what masks keep out of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attn_core import AttentionError, AttentionResult, Engine, InvalidProblem
from attn_core.cut import THREADS_FROM_FLOPS
from attn_core.errors import Abandoned
from attn_core.prepared import prepare
from attn_core.problem import LAYER_GRADIENT_OUTPUTS, LayerGradientsProblem, LayerOptions
from tests.support.factory import DTYPES, features, make_tensor
from tests.support.layers import (
    in_other_layout,
    layer_gradients_reference,
    layer_reference,
    make_layer,
    make_layer_gradients,
    moved,
    with_layer_options,
)
from tests.support.oracle import assert_same_bits, same_bits

RELATIVE_ERROR = {torch.float64: 1e-10, torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def attend(problem: LayerGradientsProblem) -> AttentionResult:
    return Engine().attend(problem)


def assert_matches_autograd(problem: LayerGradientsProblem, result: AttentionResult) -> None:
    """Every asked gradient has shape and dtype of its tensor, and is near to autograd's, measured by its largest."""
    truth, given_tensors = layer_gradients_reference(problem), problem.layer.tensors()
    assert tuple(result.outputs) == problem.asked
    # A gradient may be 0 but for rounding, such as a key bias's: it is measured by the others too.
    every = max([1e-3, *(tensor.abs().max().item() for tensor in truth.values() if tensor.numel())])
    for name, found in result.outputs.items():
        source = given_tensors[name.removeprefix("grad_")]
        assert found.shape == source.shape and found.dtype == source.dtype and found.is_contiguous(), name
        assert not found.isnan().any(), name
        own = truth[name].abs().max().item() if source.numel() else 0.0
        share = max(RELATIVE_ERROR[dtype] for dtype in (problem.layer.input.dtype, source.dtype))
        limit = share * max(own, every / 100)
        off = (found.double() - truth[name]).abs()
        assert not off.numel() or off.max().item() <= limit, (name, off.max().item(), limit)


@pytest.mark.parametrize("feature", features())
def test_gradients_match_autograd_with_every_feature(feature: str) -> None:
    turn = list(features()).index(feature)
    tensors, options = features()[feature]
    for dtype in (torch.float64, DTYPES[1 + turn % 3]):
        problem = make_layer_gradients(
            seed=turn,
            seq_len_kv=7,
            memory_width=9,
            num_kv_heads=(4, 2, 1)[turn % 3],
            head_dim_v=(6, 3)[turn % 2],
            weight_layout=("in_out", "out_in")[turn % 2],
            biases=turn % 4 != 0,
            dtype=dtype,
            tensors=tensors,
            **options,
        )
        assert_matches_autograd(problem, attend(problem))


@pytest.mark.parametrize("path", [None, "manual", "blocked"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_gradients_of_self_attention_add_up_three_paths(kv_heads: int, dtype: torch.dtype, path: str | None) -> None:
    problem = make_layer_gradients(num_kv_heads=kv_heads, dtype=dtype, causal=True, path=path)
    result = attend(problem)
    assert_matches_autograd(problem, result)
    assert path is None or result.path == path
    assert set(result.outputs) == {f"grad_{name}" for name in problem.layer.tensors()}


def test_gradients_lie_as_the_weights_do() -> None:
    problem = make_layer_gradients(seq_len_kv=6, memory_width=5)
    turned = replace(problem, layer=in_other_layout(problem.layer))
    found = attend(turned).outputs
    for name, gradient in attend(problem).outputs.items():
        own = found[name].t() if name.startswith("grad_w_") else found[name]
        torch.testing.assert_close(own, gradient, rtol=1e-5, atol=1e-5)


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
def test_gradients_equal_those_of_nn_multihead_attention(weight_layout: str) -> None:
    batch, tokens, width, num_heads = 2, 10, 768, 12
    module = nn.MultiheadAttention(width, num_heads, batch_first=True)
    for number, parameter in enumerate(module.parameters()):
        parameter.data = make_tensor(*parameter.shape, seed=40 + number, std=width**-0.5)
    x = make_tensor(batch, tokens, width, seed=1).requires_grad_()
    causal = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool), diagonal=1)
    output, _ = module(x, x, x, attn_mask=causal, need_weights=False)
    grad_output = make_tensor(batch, tokens, width, seed=2)
    output.backward(grad_output)
    parameters: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    thirds = [module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)]
    grads = [gradient_of(parameter).chunk(3) for parameter in (module.in_proj_weight, module.in_proj_bias)]
    for place, name in enumerate(("query", "key", "value")):
        parameters |= {f"w_{name}": thirds[0][place].detach(), f"b_{name}": thirds[1][place].detach()}
        expected |= {f"grad_w_{name}": grads[0][place], f"grad_b_{name}": grads[1][place]}
    parameters |= {"w_output": module.out_proj.weight.detach(), "b_output": module.out_proj.bias.detach()}
    expected |= {
        "grad_w_output": gradient_of(module.out_proj.weight),
        "grad_b_output": gradient_of(module.out_proj.bias),
        "grad_input": gradient_of(x),
    }
    form = make_layer(num_heads=num_heads, causal=True, weight_layout="out_in")
    given_tensors: dict[str, Any] = {"input": x.detach(), **parameters}
    layer = replace(form, **given_tensors)
    problem = LayerGradientsProblem(layer, grad_output)
    if weight_layout == "in_out":
        problem = replace(problem, layer=in_other_layout(layer))
    found = attend(problem).outputs
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        own = gradient.t() if weight_layout == "in_out" and name.startswith("grad_w_") else gradient
        torch.testing.assert_close(own, expected[name], rtol=1e-4, atol=1e-4)


def test_gradients_match_central_differences() -> None:
    tensors = {"bias": make_tensor(1, 4, 3, 4, seed=8, dtype=torch.float64), "sinks": make_tensor(4, seed=9)}
    problem = make_layer_gradients(
        seq_len_q=3, seq_len_kv=4, num_kv_heads=2, width=5, head_dim=3, output_width=4,
        softcap=2.0, causal="lower_right", dtype=torch.float64, tensors={n: t.double() for n, t in tensors.items()},
    )  # fmt: skip
    found = attend(problem).outputs

    def total(name: str, tensor: Tensor) -> float:
        changed: dict[str, Any] = {name: tensor}
        output = layer_reference(replace(problem.layer, **changed))["output"]
        return float((output * problem.grad_output).sum())

    step = 1e-5
    for name, tensor in problem.layer.tensors().items():
        for place in range(0, tensor.numel(), max(1, tensor.numel() // 3)):
            change = torch.zeros(tensor.numel(), dtype=torch.float64)
            change[place] = step
            change = change.view(tensor.shape)
            slope = (total(name, tensor + change) - total(name, tensor - change)) / (2 * step)
            own = found[f"grad_{name}"].flatten()[place].item()
            assert own == pytest.approx(slope, rel=1e-6, abs=1e-7), (name, place)


def test_each_gradient_alone_is_what_it_is_among_all() -> None:
    tensors, options = features()["mask and bias"]
    tensors = {**tensors, "sinks": make_tensor(4)}
    problem = make_layer_gradients(seq_len_kv=7, tensors=tensors, **options)
    every = attend(problem).outputs
    assert set(every) == set(LAYER_GRADIENT_OUTPUTS)
    for name in LAYER_GRADIENT_OUTPUTS:
        alone = attend(replace(problem, outputs=(name,)))
        assert tuple(alone.outputs) == (name,)
        torch.testing.assert_close(alone.outputs[name], every[name], rtol=1e-5, atol=1e-6)


def test_gradients_come_in_the_order_in_which_they_are_asked() -> None:
    asked = ("grad_w_output", "grad_input", "grad_b_key")
    assert tuple(attend(make_layer_gradients(outputs=asked)).outputs) == asked


@pytest.mark.parametrize("rank", [2, 3])
def test_gradients_without_a_batch_have_the_rank_of_their_tensors(rank: int) -> None:
    problem = make_layer_gradients(batch=1, rank=rank, seq_len_kv=6)
    result = attend(problem)
    assert result.outputs["grad_input"].ndim == result.outputs["grad_memory"].ndim == rank
    assert_matches_autograd(problem, result)


@pytest.mark.parametrize("axes", [{"batch": 0}, {"seq_len_q": 0}, {"seq_len_q": 0, "seq_len_kv": 4}, {"seq_len_kv": 0}])
def test_gradients_of_axes_of_length_0_are_answered(axes: dict[str, Any]) -> None:
    problem = make_layer_gradients(**axes)
    assert_matches_autograd(problem, attend(problem))


def padded(**form: Any) -> LayerGradientsProblem:
    """The last token of item 0 is padding, as query and as key."""
    tensors = {"key_lengths": torch.tensor([4, 5]), "query_lengths": torch.tensor([4, 5])}
    return make_layer_gradients(tensors=tensors, **form)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
def test_token_behind_a_mask_cannot_change_a_gradient(weight_layout: str, dtype: torch.dtype, bad: float) -> None:
    problem = padded(dtype=dtype, weight_layout=weight_layout)
    tokens = problem.layer.input.clone()
    tokens[0, 4] = bad
    clean, spoiled = attend(problem), attend(replace(problem, layer=replace(problem.layer, input=tokens)))
    for name, gradient in spoiled.outputs.items():
        assert same_bits(gradient, clean.outputs[name]), name
    assert torch.equal(spoiled.outputs["grad_input"][0, 4], torch.zeros(12, dtype=dtype))
    assert spoiled.nonfinite_rows == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
def test_token_hidden_from_one_head_cannot_change_a_bit_of_its_columns(weight_layout: str, bad: float) -> None:
    hidden = torch.zeros(1, 4, 1, 300, dtype=torch.bool)
    hidden[:, 1, :, 7:290] = True
    problem = make_layer_gradients(
        seq_len_q=9, seq_len_kv=300, tensors={"block_mask": hidden}, weight_layout=weight_layout
    )
    assert problem.layer.memory is not None
    memory = problem.layer.memory.clone()
    memory[:, 7:290] = bad
    clean, spoiled = attend(problem), attend(replace(problem, layer=replace(problem.layer, memory=memory)))
    for name in ("grad_w_query", "grad_w_key", "grad_w_value", "grad_b_query", "grad_b_value"):
        own, other = (found.outputs[name] for found in (clean, spoiled))
        if weight_layout == "out_in" and own.ndim == 2:
            own, other = own.t(), other.t()
        assert same_bits(own[..., 6:12].contiguous(), other[..., 6:12].contiguous()), name
    assert not spoiled.outputs["grad_w_value"].isfinite().all()


@pytest.mark.parametrize("scale", [8.0, -1e3])
def test_huge_memory_behind_a_mask_cannot_change_a_gradient_at_any_scale(scale: float) -> None:
    lengths = {"key_lengths": torch.tensor([15, 18])}
    problem = make_layer_gradients(seq_len_q=16, seq_len_kv=20, head_dim=16, tensors=lengths, scale=scale)
    assert problem.layer.memory is not None
    memory = problem.layer.memory.clone()
    memory[0, 15:], memory[1, 18:] = 1e38, -1e38
    clean, spoiled = attend(problem), attend(replace(problem, layer=replace(problem.layer, memory=memory)))
    for name, gradient in spoiled.outputs.items():
        assert same_bits(gradient, clean.outputs[name]), name
    assert spoiled.nonfinite_rows == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_memory_behind_a_mask_cannot_change_a_gradient(bad: float) -> None:
    blocked = torch.zeros(2, 1, 1, 7, dtype=torch.bool)
    blocked[..., 2] = True
    problem = make_layer_gradients(seq_len_kv=7, tensors={"block_mask": blocked})
    assert problem.layer.memory is not None
    memory = problem.layer.memory.clone()
    memory[:, 2] = bad
    clean, spoiled = attend(problem), attend(replace(problem, layer=replace(problem.layer, memory=memory)))
    assert_same_bits(clean, spoiled)
    assert torch.equal(spoiled.outputs["grad_memory"][:, 2], torch.zeros(2, 12))


def test_token_that_one_head_may_not_attend_leaves_the_columns_of_that_head_alone() -> None:
    blocked = torch.zeros(1, 4, 1, 7, dtype=torch.bool)
    blocked[:, 1:, :, 2] = True
    problem = make_layer_gradients(seq_len_kv=7, tensors={"block_mask": blocked})
    assert problem.layer.memory is not None
    memory = problem.layer.memory.clone()
    memory[0, 2] = torch.nan
    clean = attend(problem).outputs
    spoiled = attend(replace(problem, layer=replace(problem.layer, memory=memory))).outputs
    for name in ("grad_w_key", "grad_w_value"):
        assert spoiled[name][:, :6].isnan().all()
        torch.testing.assert_close(spoiled[name][:, 6:], clean[name][:, 6:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", ["empty", "padded"])
def test_what_comes_back_at_a_row_without_a_key_reaches_the_bias_of_the_output_alone(rows: str) -> None:
    allow = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    allow[0, 0, 4] = False
    tensors = {"allow_mask": allow} if rows == "empty" else {"query_lengths": torch.tensor([4, 5])}
    problem = make_layer_gradients(tensors=tensors)
    grad_output = problem.grad_output.clone()
    grad_output[0, 4] = torch.nan
    clean, spoiled = attend(problem), attend(replace(problem, grad_output=grad_output))
    for name, gradient in spoiled.outputs.items():
        if name == "grad_b_output":
            assert gradient.isnan().all()
        else:
            assert same_bits(gradient, clean.outputs[name]), name
    assert clean.empty_rows == (4 if rows == "empty" else 0)


def test_what_comes_back_at_a_row_that_is_empty_in_one_head_does_not_reach_its_part_of_w_output() -> None:
    allow = torch.ones(1, 4, 5, 5, dtype=torch.bool)
    allow[0, 2, 3] = False
    problem = make_layer_gradients(batch=1, tensors={"allow_mask": allow})
    grad_output = problem.grad_output.clone()
    grad_output[0, 3] = torch.nan
    clean = attend(problem).outputs["grad_w_output"]
    spoiled = attend(replace(problem, grad_output=grad_output)).outputs["grad_w_output"]
    own = torch.zeros(24, dtype=torch.bool)
    own[12:18] = True
    assert spoiled[~own].isnan().all()
    torch.testing.assert_close(spoiled[own], clean[own], rtol=1e-5, atol=1e-5)


def test_nan_that_is_attended_is_no_silent_zero() -> None:
    problem = make_layer_gradients()
    tokens = problem.layer.input.clone()
    tokens[0, 1] = torch.nan
    found = attend(replace(problem, layer=replace(problem.layer, input=tokens)))
    for name in ("grad_input", "grad_w_query", "grad_w_key", "grad_w_value", "grad_w_output"):
        assert found.outputs[name].isnan().any(), name
    assert not found.outputs["grad_input"][1].isnan().any()
    assert found.nonfinite_rows > 0


@pytest.mark.parametrize(
    ("name", "place", "num_rows"),
    [
        # In each of 4 heads a token's own row, none of padding; those that attend a token, none beyond a length; all.
        ("grad_output", (0, 1), 4),
        ("grad_output", (0, 4), 0),
        ("input", (0, 1), 4),
        ("memory", (1, 2), 4 * 5),
        ("memory", (1, 6), 0),
        ("w_output", (), 4 * 9),
    ],
)
@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_finite_are_counted_alike_whatever_is_asked(
    dtype: torch.dtype, number: float, name: str, place: tuple[int, ...], num_rows: int
) -> None:
    lengths = {"query_lengths": torch.tensor([4, 5]), "key_lengths": torch.tensor([7, 6])}
    problem = make_layer_gradients(seq_len_kv=7, dtype=dtype, tensors=lengths)
    asked = [("grad_w_output",), ("grad_b_output",), ("grad_input",), ("grad_w_value", "grad_w_output"), None]
    for outputs in asked:
        assert attend(replace(problem, outputs=outputs)).nonfinite_rows == 0, outputs
    problem.tensors()[name][place] = number
    for outputs in asked:
        assert attend(replace(problem, outputs=outputs)).nonfinite_rows == num_rows, outputs


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_rows_that_are_not_finite_are_counted_alike_in_many_parts(num_kv_heads: int) -> None:
    problem = make_layer_gradients(
        batch=3, seq_len_q=1100, width=33, num_kv_heads=num_kv_heads, head_dim=64, causal="upper_left"
    )
    problem.grad_output[1, 700] = torch.nan
    problem.layer.input[2, 1000] = torch.inf
    for asked in (("grad_w_output",), ("grad_w_query",)):
        assert attend(replace(problem, outputs=asked)).nonfinite_rows == 4 * (1 + 100), asked


def test_padded_token_has_gradient_0_whatever_the_weights_hold() -> None:
    problem = padded()
    poisoned = problem.layer.w_key.clone()
    poisoned[0, 0] = torch.nan
    found = attend(replace(problem, layer=replace(problem.layer, w_key=poisoned)))
    assert torch.equal(found.outputs["grad_input"][0, 4], torch.zeros(12))
    assert found.outputs["grad_input"][1].isnan().all()


def test_row_without_a_key_is_refused_by_place_where_asked() -> None:
    allow = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    allow[1, 0, 3] = False
    for outputs in (None, ("grad_b_output",), ("grad_input",)):
        problem = make_layer_gradients(tensors={"allow_mask": allow}, empty_rows="error", outputs=outputs)
        with pytest.raises(InvalidProblem) as refusal:
            attend(problem)
        (fault,) = refusal.value.faults
        assert fault.field == "empty_rows" and "[1,0,3]" in fault.received


def test_outputs_of_the_forward_pass_say_nothing() -> None:
    problem = make_layer_gradients()
    other = replace(problem, layer=with_layer_options(problem.layer, outputs=("weights", "query")))
    assert_same_bits(attend(problem), attend(other))


def assorted() -> list[LayerGradientsProblem]:
    found = []
    for seed, (tensors, options) in enumerate(list(features(seq_len_kv=5).values())[1::4]):
        found.append(
            make_layer_gradients(
                seed=seed,
                seq_len_kv=5 if seed % 3 else None,
                num_kv_heads=2,
                dtype=DTYPES[seed % 4],
                weight_layout=("in_out", "out_in")[seed % 2],
                tensors=tensors,
                **options,
            )
        )
    return found


def test_neighbours_and_their_order_cannot_change_a_bit() -> None:
    problems = assorted()
    alone = [attend(problem) for problem in problems]
    engine = Engine()

    def run(some: list[LayerGradientsProblem]) -> list[AttentionResult | AttentionError]:
        return engine.run([*(problem.layer for problem in some), *some])[len(some) :]

    for own, beside, other in zip(alone, run(problems), run(problems[::-1])[::-1], strict=True):
        assert isinstance(beside, AttentionResult) and isinstance(other, AttentionResult)
        assert_same_bits(own, beside)
        assert_same_bits(own, other)


def test_result_reports_what_was_prepared() -> None:
    for problem in assorted():
        prepared, result = prepare(problem, device_type="cpu"), attend(problem)
        assert (prepared.path, prepared.why) == (result.path, result.why)
        assert (prepared.cost.peak_bytes, prepared.cost.flops) == (result.peak_bytes, result.flops)
        assert result.dtype == problem.layer.input.dtype and prepared.tokens == 2 * 5


def test_place_in_memory_cannot_change_a_bit() -> None:
    problem = make_layer_gradients(batch=3, seq_len_q=33, width=65, seq_len_kv=17, memory_width=31)
    tensors: dict[str, Any] = {name: moved(tensor) for name, tensor in problem.layer.tensors().items()}
    other = LayerGradientsProblem(replace(problem.layer, **tensors), moved(problem.grad_output))
    assert_same_bits(attend(problem), attend(other))


def test_number_of_threads_cannot_change_a_bit() -> None:
    problem = make_layer_gradients(
        batch=1, seq_len_q=256, width=512, num_heads=8, head_dim=64, output_width=512, causal=True
    )
    before = torch.get_num_threads()
    try:
        one, two = Engine(max_threads=1).attend(problem), Engine(max_threads=2).attend(problem)
        assert torch.get_num_threads() == 2 and one.flops >= THREADS_FROM_FLOPS
    finally:
        torch.set_num_threads(before)
    assert_same_bits(one, two)


def test_abandoned_gradients_stop_between_blocks() -> None:
    problem = make_layer_gradients()
    calls = 0

    def give_up(after: int) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Abandoned

    Engine().attend(problem, lambda: give_up(10**9))
    every, stops = calls, 0
    assert every > 20
    for after in range(0, every, 5):
        calls = 0
        with pytest.raises(Abandoned):
            Engine().attend(problem, lambda after=after: give_up(after))  # type: ignore[misc]
        stops += calls == after + 1
    assert stops == len(range(0, every, 5))


@st.composite
def gradients(draw: st.DrawFn) -> LayerGradientsProblem:
    kv_heads = draw(st.integers(1, 3))
    num_heads = kv_heads * draw(st.integers(1, 3))
    batch, seq_len_q = draw(st.integers(1, 3)), draw(st.integers(0, 9))
    seq_len_kv = draw(st.none() | st.integers(0, 9))
    axes = {"batch": batch, "num_heads": num_heads, "seq_len_q": seq_len_q}
    axes["seq_len_kv"] = seq_len_q if seq_len_kv is None else seq_len_kv
    found = features(**axes)
    tensors, options = found[draw(st.sampled_from(list(found)))]
    problem = make_layer_gradients(
        seed=draw(st.integers(0, 99)),
        batch=batch,
        seq_len_q=seq_len_q,
        seq_len_kv=seq_len_kv,
        width=draw(st.integers(1, 9)),
        memory_width=draw(st.integers(1, 9)),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 5)),
        head_dim_v=draw(st.integers(1, 5)),
        output_width=draw(st.integers(1, 9)),
        weight_layout=draw(st.sampled_from(["in_out", "out_in"])),
        biases=draw(st.booleans()),
        rank=3 if batch > 1 else draw(st.sampled_from([2, 3])),
        dtype=draw(st.sampled_from([torch.float64, *DTYPES])),
        tensors=tensors,
        path=draw(st.sampled_from([None, "manual", "blocked"])),
        **options,
    )
    asked = draw(st.permutations(problem.asked))
    return replace(problem, outputs=tuple(asked[: draw(st.integers(1, len(asked)))]))


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(gradients())
def test_any_mix_matches_autograd_and_gives_the_same_bits_twice(problem: LayerGradientsProblem) -> None:
    result = attend(problem)
    assert_matches_autograd(problem, result)
    assert_same_bits(result, attend(problem))


def test_default_is_every_gradient_of_what_was_given() -> None:
    assert isinstance(make_layer_gradients().options, LayerOptions)
    assert make_layer_gradients(biases=False).asked == (
        "grad_input", "grad_w_query", "grad_w_key", "grad_w_value", "grad_w_output"
    )  # fmt: skip
