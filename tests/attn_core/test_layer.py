"""A layer's forward pass: projections, heads, masks, dtypes, promises, and equality with what others call a layer."""

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
from attn_core.problem import (
    LAYER_OUTPUTS,
    AttentionOptions,
    LayerOptions,
    LayerProblem,
    WeightLayout,
)
from tests.support.factory import DTYPES, features, make_mask, make_tensor
from tests.support.layers import (
    LAYER_WITHOUT_TOP,
    in_other_layout,
    layer_in_its_dtype,
    layer_reference,
    make_layer,
    moved,
    with_layer_options,
)
from tests.support.oracle import assert_same_bits, same_bits

STORED = ("output", "query", "key", "value", "context", "weights")


def attend(problem: LayerProblem) -> AttentionResult:
    return Engine().attend(problem)


def assert_matches_reference(problem: LayerProblem, result: AttentionResult) -> None:
    """Every asked output has its shape and dtype, and errs at most twice as much as the formula in that dtype."""
    truth, plain = layer_reference(problem), layer_in_its_dtype(with_layer_options(problem, select_heads=None))
    storage = problem.input.dtype
    arithmetic = torch.float64 if storage == torch.float64 else torch.float32
    assert tuple(result.outputs) == problem.options.outputs
    whole = layer_reference(with_layer_options(problem, select_heads=None, select_rows=None))
    for name, found in result.outputs.items():
        assert found.dtype == (storage if name in STORED else arithmetic), name
        assert found.is_contiguous() and found.shape == truth[name].shape, name
        exact, own = truth[name], found.double()
        assert torch.equal(exact.isinf(), own.isinf()) and not own.isnan().any(), name
        finite = exact.isfinite()
        size = whole[name][whole[name].isfinite()].abs().max().item() if finite.any() else 0.0
        rough = (plain[name].double() - whole[name])[whole[name].isfinite()].abs()
        # In a small problem the formula is right by luck: it may round each of its steps once.
        steps = 16 * torch.finfo(arithmetic if name not in STORED else storage).eps * (size + 1)
        limit = max(2 * rough.max().item() if rough.numel() else 0.0, steps)
        off = (own - exact)[finite].abs()
        assert not off.numel() or off.max().item() <= limit, (name, off.max().item(), limit)


@pytest.mark.parametrize(
    ("weight_layout", "output"),
    [("in_out", [[1, 1], [0.5, 1.96212]]), ("out_in", [[1, 0], [1.23106, 1.46212]])],
)
def test_worked_example_is_answered_as_written(weight_layout: WeightLayout, output: list[list[float]]) -> None:
    one = torch.eye(2)
    problem = LayerProblem(
        input=one,
        w_query=one,
        w_key=one,
        w_value=one,
        w_output=torch.tensor([[1.0, 1.0], [0.0, 2.0]]),
        options=LayerOptions(
            attention=AttentionOptions(layout="btd", num_heads=2, causal=True),
            weight_layout=weight_layout,
            outputs=("output", "context", "weights"),
        ),
    )
    found = attend(problem).outputs
    expected = {
        "output": output,
        "context": [[1, 0], [0.5, 0.73106]],
        "weights": [[[1, 0], [0.5, 0.5]], [[1, 0], [0.26894, 0.73106]]],
    }
    assert tuple(found) == tuple(expected)
    for name, numbers in expected.items():
        torch.testing.assert_close(found[name], torch.tensor(numbers, dtype=torch.float32), rtol=0, atol=5e-6)


@pytest.mark.parametrize("feature", features())
def test_every_output_matches_reference_with_every_feature(feature: str) -> None:
    turn = list(features()).index(feature)
    tensors, options = features(num_heads=4, seq_len_q=5, seq_len_kv=7)[feature]
    problem = make_layer(
        seed=turn,
        seq_len_kv=7,
        memory_width=9,
        num_kv_heads=(4, 2, 1)[turn % 3],
        head_dim_v=(6, 3)[turn % 2],
        weight_layout=("in_out", "out_in")[turn % 2],
        dtype=DTYPES[turn % 4],
        tensors=tensors,
        outputs=LAYER_WITHOUT_TOP,
        **options,
    )
    assert_matches_reference(problem, attend(problem))
    only = with_layer_options(problem, outputs=("output",))
    assert_matches_reference(only, attend(only))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_self_attention_matches_reference(kv_heads: int, dtype: torch.dtype) -> None:
    for biases in (False, True):
        problem = make_layer(num_kv_heads=kv_heads, dtype=dtype, biases=biases, causal=True, outputs=LAYER_WITHOUT_TOP)
        assert_matches_reference(problem, attend(problem))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_weight_layouts_are_one_layer(dtype: torch.dtype) -> None:
    problem = make_layer(dtype=dtype, seq_len_kv=6, memory_width=5, outputs=("output", "query", "value"))
    turned = attend(in_other_layout(problem)).outputs
    eps = torch.finfo(dtype).eps
    for name, found in attend(problem).outputs.items():
        torch.testing.assert_close(turned[name], found, rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize(
    ("batch", "tokens", "width", "num_heads"), [(2, 10, 768, 12), (2, 10, 768, 8), (3, 7, 12, 3), (1, 1, 4, 1)]
)
@pytest.mark.parametrize("masks", ["none", "attn_mask", "key_padding_mask", "both"])
def test_layer_equals_nn_multihead_attention(batch: int, tokens: int, width: int, num_heads: int, masks: str) -> None:
    module = nn.MultiheadAttention(width, num_heads, batch_first=True)
    for number, parameter in enumerate(module.parameters()):
        # Its biases begin as zeros, which would hide a slip.
        parameter.data = make_tensor(*parameter.shape, seed=40 + number, std=width**-0.5)
    module.eval()
    x = make_tensor(batch, tokens, width, seed=1)
    blocked_pairs = make_mask(tokens, tokens, seed=2, share=0.3).fill_diagonal_(False)
    blocked_keys = make_mask(batch, tokens, seed=3, share=0.3)
    blocked_keys[:, 0] = blocked_pairs[:, 0] = False
    given: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if masks in ("attn_mask", "both"):
        given["attn_mask"] = blocked_pairs
        tensors["allow_mask"] = ~blocked_pairs[None, None]
    if masks in ("key_padding_mask", "both"):
        given["key_padding_mask"] = blocked_keys
        tensors["block_mask"] = blocked_keys[:, None, None, :]
    with torch.no_grad():
        output, weights = module(x, x, x, average_attn_weights=False, **given)
    thirds = zip(("query", "key", "value"), module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True)
    parameters: dict[str, Any] = {}
    for name, matrix, bias in thirds:
        parameters |= {f"w_{name}": matrix.detach(), f"b_{name}": bias.detach()}
    problem = LayerProblem(
        x,
        **parameters,
        w_output=module.out_proj.weight.detach(),
        b_output=module.out_proj.bias.detach(),
        **tensors,
        options=LayerOptions(
            attention=AttentionOptions(layout="btd", num_heads=num_heads),
            weight_layout="out_in",
            outputs=("output", "weights"),
        ),
    )
    found = attend(problem).outputs
    torch.testing.assert_close(found["output"], output, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found["weights"], weights, rtol=1e-5, atol=1e-6)


class TextbookAttention(nn.Module):
    """The multi-head module as textbooks build it: three Linear layers without bias, one with, a causal mask."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.W_query = nn.Linear(width, width, bias=False)
        self.W_key = nn.Linear(width, width, bias=False)
        self.W_value = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape

        def split(packed: Tensor) -> Tensor:
            return packed.view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)

        queries, keys, values = split(self.W_query(x)), split(self.W_key(x)), split(self.W_value(x))
        scores = queries @ keys.transpose(2, 3)
        scores.masked_fill_(torch.triu(torch.ones(tokens, tokens), diagonal=1).bool(), -torch.inf)
        weights = torch.softmax(scores / self.head_dim**0.5, dim=-1)
        merged: Tensor = self.out_proj((weights @ values).transpose(1, 2).contiguous().view(batch, tokens, width))
        return merged


@pytest.mark.parametrize(("batch", "tokens", "width", "num_heads"), [(2, 10, 768, 12), (1, 6, 16, 4), (3, 1, 8, 2)])
def test_layer_equals_the_textbook_module(batch: int, tokens: int, width: int, num_heads: int) -> None:
    module = TextbookAttention(width, num_heads)
    for number, parameter in enumerate(module.parameters()):
        parameter.data = make_tensor(*parameter.shape, seed=60 + number, std=width**-0.5)
    module.eval()
    x = make_tensor(batch, tokens, width, seed=5)
    problem = LayerProblem(
        x,
        w_query=module.W_query.weight.detach(),
        w_key=module.W_key.weight.detach(),
        w_value=module.W_value.weight.detach(),
        w_output=module.out_proj.weight.detach(),
        b_output=module.out_proj.bias.detach(),
        options=LayerOptions(
            attention=AttentionOptions(layout="btd", num_heads=num_heads, causal=True), weight_layout="out_in"
        ),
    )
    with torch.no_grad():
        expected = module(x)
    torch.testing.assert_close(attend(problem).outputs["output"], expected, rtol=1e-5, atol=2e-6)


def test_columns_of_a_head_stay_together() -> None:
    problem = make_layer(batch=1, num_heads=4, head_dim=3, biases=False, outputs=("query", "context"))
    found = attend(problem).outputs
    projected = problem.input @ problem.w_query
    for head in range(4):
        torch.testing.assert_close(found["query"][:, head], projected[:, :, 3 * head : 3 * head + 3])
    assert found["context"].shape == (1, 5, 12)


def test_without_a_batch_every_output_lacks_that_axis() -> None:
    form: dict[str, Any] = {"batch": 1, "seq_len_kv": 3, "memory_width": 7, "num_kv_heads": 2, "top_k": 2}
    whole = attend(make_layer(outputs=LAYER_OUTPUTS, **form))
    plain = attend(make_layer(outputs=LAYER_OUTPUTS, rank=2, **form))
    assert plain.outputs["output"].shape == (5, 10)
    assert plain.outputs["key"].shape == (2, 3, 6)
    assert plain.outputs["context"].shape == (5, 24)
    assert plain.outputs["top_keys"].shape == (4, 5, 2)
    for name, tensor in whole.outputs.items():
        assert torch.equal(plain.outputs[name], tensor[0]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "axes",
    [
        {"batch": 0},
        {"seq_len_q": 0},
        {"seq_len_q": 0, "seq_len_kv": 4},
        {"seq_len_kv": 0},
        {"batch": 0, "seq_len_q": 0, "seq_len_kv": 0},
    ],
)
def test_axes_of_length_0_are_answered(axes: dict[str, Any], dtype: torch.dtype) -> None:
    problem = make_layer(**axes, dtype=dtype, outputs=LAYER_OUTPUTS, top_k=3)
    result = attend(problem)
    truth = layer_reference(problem)
    for name in LAYER_WITHOUT_TOP:
        assert result.outputs[name].shape == truth[name].shape, name
    if axes.get("seq_len_kv") == 0 and result.outputs["output"].numel():
        assert problem.b_output is not None
        assert torch.equal(result.outputs["output"], problem.b_output.expand(2, 5, 10))
        assert result.empty_rows == 2 * 4 * 5


def test_outputs_come_in_the_order_in_which_they_are_asked() -> None:
    asked = ("weights", "top_weights", "output", "value", "context")
    found = tuple(attend(make_layer(outputs=asked, top_k=2)).outputs)
    assert found == ("weights", "top_weights", "top_keys", "output", "value", "context")


def test_output_is_not_projected_unless_asked() -> None:
    problem = make_layer(outputs=("context",))
    poisoned = replace(problem, w_output=torch.full_like(problem.w_output, torch.nan))
    assert_same_bits(attend(problem), attend(poisoned))
    asked = with_layer_options(problem, outputs=("context", "output"))
    assert attend(asked).flops - attend(problem).flops == 2 * 2 * 5 * 24 * 10


def test_selection_leaves_output_and_context_whole() -> None:
    asked = ("output", "context", "weights", "entropy", "weight_totals", "query")
    problem = make_layer(outputs=asked, select_heads=(3, 0), select_rows=(4, 1, 2))
    result = attend(problem)
    assert result.outputs["weights"].shape == (2, 2, 3, 5)
    assert_matches_reference(with_layer_options(problem, select_rows=(4, 1, 2)), result)


def test_more_outputs_change_none_beyond_rounding() -> None:
    alone = attend(make_layer(causal=True))
    beside = attend(make_layer(causal=True, outputs=("output", "weights", "key")))
    assert (alone.path, beside.path) == ("fused", "manual")
    torch.testing.assert_close(alone.outputs["output"], beside.outputs["output"], rtol=1e-6, atol=1e-6)


def test_row_without_a_key_gives_the_bias_of_the_output() -> None:
    allow = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    allow[0, 0, 2] = False
    for outputs in (("output", "context"), ("output", "context", "weights")):
        problem = make_layer(tensors={"allow_mask": allow}, outputs=outputs)
        result = attend(problem)
        assert problem.b_output is not None
        assert torch.equal(result.outputs["output"][0, 2], problem.b_output)
        assert torch.equal(result.outputs["context"][0, 2], torch.zeros(24))
        assert result.empty_rows == 4
        bare = attend(replace(problem, b_output=None))
        assert torch.equal(bare.outputs["output"][0, 2], torch.zeros(10))


def test_row_without_a_key_is_refused_by_place_where_asked() -> None:
    allow = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    allow[1, 0, 3] = False
    with pytest.raises(InvalidProblem) as refusal:
        attend(make_layer(tensors={"allow_mask": allow}, empty_rows="error", outputs=("query",)))
    (fault,) = refusal.value.faults
    assert fault.field == "empty_rows" and "[1,0,3]" in fault.received


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", [None, "manual"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_token_behind_a_length_cannot_change_another(bad: float, path: str | None, dtype: torch.dtype) -> None:
    tensors = {"key_lengths": torch.tensor([3, 5]), "query_lengths": torch.tensor([4, 5])}
    outputs = ("output", "weights", "logsumexp") if path else ("output",)
    problem = make_layer(dtype=dtype, tensors=tensors, outputs=outputs, path=path)
    tokens = problem.input.clone()
    tokens[0, 4] = bad
    clean, spoiled = attend(problem), attend(replace(problem, input=tokens))
    assert spoiled.nonfinite_rows == 0
    assert problem.b_output is not None
    assert torch.equal(spoiled.outputs["output"][0, 4], problem.b_output)
    for name, tensor in clean.outputs.items():
        assert same_bits(tensor, spoiled.outputs[name]), name


@pytest.mark.parametrize("num_tokens", [5, 70, 1030])
def test_token_that_is_not_finite_spoils_its_own_row_alone(num_tokens: int) -> None:
    allow = torch.eye(num_tokens, dtype=torch.bool)[None, None]
    form: dict[str, Any] = {"batch": 1, "seq_len_q": num_tokens, "width": 33, "tensors": {"allow_mask": allow}}
    problem = make_layer(**form)
    tokens = problem.input.clone()
    tokens[0, 3] = torch.nan
    clean, spoiled = attend(problem), attend(replace(problem, input=tokens))
    assert spoiled.outputs["output"][0, 3].isnan().all() and spoiled.nonfinite_rows == 4
    others = torch.arange(num_tokens) != 3
    assert torch.equal(clean.outputs["output"][0, others], spoiled.outputs["output"][0, others])


def test_memory_behind_a_mask_cannot_change_a_bit() -> None:
    blocked = torch.zeros(2, 1, 1, 7, dtype=torch.bool)
    blocked[..., 2] = True
    problem = make_layer(seq_len_kv=7, tensors={"block_mask": blocked}, outputs=("output", "context"))
    assert problem.memory is not None
    memory = problem.memory.clone()
    memory[:, 2] = torch.nan
    assert_same_bits(attend(problem), attend(replace(problem, memory=memory)))


def assorted() -> list[LayerProblem]:
    found = []
    for seed, (tensors, options) in enumerate(list(features(seq_len_kv=5).values())[::3]):
        asked = LAYER_WITHOUT_TOP if seed % 2 else ("output",)
        found.append(
            make_layer(
                seed=seed,
                seq_len_kv=5 if seed % 3 else None,
                num_kv_heads=2,
                dtype=DTYPES[seed % 4],
                weight_layout=("in_out", "out_in")[seed % 2],
                tensors=tensors,
                outputs=asked,
                **options,
            )
        )
    return found


def test_neighbours_and_their_order_cannot_change_a_bit() -> None:
    problems = assorted()
    alone = [attend(problem) for problem in problems]
    engine = Engine()

    def run(some: list[LayerProblem]) -> list[AttentionResult | AttentionError]:
        return engine.run(some)

    for own, beside, other in zip(alone, run(problems), run(problems[::-1])[::-1], strict=True):
        assert isinstance(beside, AttentionResult) and isinstance(other, AttentionResult)
        assert_same_bits(own, beside)
        assert_same_bits(own, other)


def test_place_in_memory_cannot_change_a_bit() -> None:
    problem = make_layer(batch=3, seq_len_q=33, width=65, seq_len_kv=17, memory_width=31)
    tensors: dict[str, Any] = {name: moved(tensor) for name, tensor in problem.tensors().items()}
    assert_same_bits(attend(problem), attend(replace(problem, **tensors)))


def test_strides_of_what_is_given_cannot_change_a_result() -> None:
    problem = make_layer(batch=3, seq_len_kv=4)
    strided: dict[str, Any] = {
        name: tensor.transpose(0, -1).contiguous().transpose(0, -1) for name, tensor in problem.tensors().items()
    }
    torch.testing.assert_close(
        attend(replace(problem, **strided)).outputs["output"], attend(problem).outputs["output"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_number_of_threads_cannot_change_a_bit(dtype: torch.dtype) -> None:
    problem = make_layer(
        batch=1, seq_len_q=256, width=512, num_heads=8, head_dim=64, output_width=512, dtype=dtype, causal=True
    )
    before = torch.get_num_threads()
    try:
        one, two = Engine(max_threads=1).attend(problem), Engine(max_threads=2).attend(problem)
        assert torch.get_num_threads() == 2 and one.flops >= THREADS_FROM_FLOPS
    finally:
        torch.set_num_threads(before)
    assert_same_bits(one, two)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_layer_is_rounded_once_at_its_end(dtype: torch.dtype) -> None:
    problem = make_layer(seed=3, dtype=dtype, width=64, head_dim=16, outputs=("output", "context", "query"))
    wide = replace(problem, **{n: t.float() for n, t in problem.tensors().items()})  # type: ignore[arg-type]
    expected, found = attend(wide).outputs, attend(problem).outputs
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_made_equal_by_rounding_come_with_the_lower_key_first(dtype: torch.dtype) -> None:
    tensors = {"key_lengths": torch.tensor([40, 3])}
    problem = make_layer(
        seq_len_kv=64, dtype=dtype, tensors=tensors, outputs=("top_weights", "weights"), top_k=48, scale=0.01
    )
    found = attend(problem).outputs
    weights, keys = found["top_weights"], found["top_keys"]
    level = (weights.diff(dim=-1) == 0) & (keys[..., 1:] >= 0)
    assert level.any() and bool((weights.diff(dim=-1) <= 0).all())
    assert bool((keys.diff(dim=-1)[level] > 0).all())
    assert torch.equal(keys[0] >= 0, (torch.arange(48) < 40).expand(4, 5, 48))
    named = found["weights"].gather(-1, keys.clamp(min=0)).masked_fill(keys < 0, 0.0)
    assert torch.equal(named, weights)


def test_asked_path_is_used_or_refused_saying_why() -> None:
    assert attend(make_layer(path="manual")).path == "manual"
    assert attend(make_layer(path="fused")).path == "fused"
    for asked, field in (({"softcap": 2.0}, "softcap given"), ({"outputs": ("weights",)}, "weights asked for")):
        with pytest.raises(InvalidProblem) as refusal:
            attend(make_layer(path="fused", **asked))
        (fault,) = refusal.value.faults
        assert fault.field == "path" and field in fault.expected


def test_widths_that_the_fused_kernel_does_not_serve_are_refused_where_it_is_asked() -> None:
    with pytest.raises(InvalidProblem) as refusal:
        attend(make_layer(head_dim_v=3, path="fused"))
    assert [fault.field for fault in refusal.value.faults] == ["path"]


def test_result_reports_what_was_prepared() -> None:
    for problem in assorted():
        prepared, result = prepare(problem, device_type="cpu"), attend(problem)
        assert (prepared.path, prepared.why) == (result.path, result.why)
        assert (prepared.cost.peak_bytes, prepared.cost.flops) == (result.peak_bytes, result.flops)
        assert result.dtype == problem.input.dtype
        assert prepared.tokens == 2 * 5


def test_rows_left_to_the_manual_kernel_are_told() -> None:
    problem = make_layer(batch=1, num_heads=1)
    tokens = problem.input.clone()
    tokens[:] = torch.nan
    result = attend(replace(problem, input=tokens))
    assert result.path == "manual" and result.why == "every row attends huge or non-finite numbers"
    assert result.nonfinite_rows == 5


def test_abandoned_layer_stops_between_blocks() -> None:
    problem = make_layer(batch=1, seq_len_q=4096, width=512, num_heads=1, head_dim=512, output_width=512)
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    Engine().attend(replace(problem, input=problem.input[:, :64]), count)
    few, calls = calls, 0

    def give_up() -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise Abandoned

    with pytest.raises(Abandoned):
        Engine().attend(problem, give_up)
    assert calls == 4 and few > 4


def test_layer_that_asks_for_gradients_gives_the_same() -> None:
    problem = make_layer()
    wanting = replace(problem, w_query=problem.w_query.clone().requires_grad_(), w_key=nn.Parameter(problem.w_key))
    assert_same_bits(attend(problem), attend(wanting))


def test_what_is_given_is_left_as_it_was() -> None:
    problem = make_layer(outputs=LAYER_WITHOUT_TOP, tensors={"key_lengths": torch.tensor([3, 5])})
    before = {name: tensor.clone() for name, tensor in problem.tensors().items()}
    attend(problem)
    for name, tensor in problem.tensors().items():
        assert torch.equal(tensor, before[name]), name


def test_outputs_share_no_memory_with_what_is_given() -> None:
    # A product with one is a copy all the same.
    one = torch.eye(4)
    problem = make_layer(
        batch=1, width=4, num_heads=1, head_dim=4, output_width=4, biases=False, outputs=LAYER_WITHOUT_TOP
    )
    problem = replace(problem, w_query=one, w_key=one, w_value=one, w_output=one)
    places = {tensor.data_ptr() for tensor in problem.tensors().values()}
    assert places.isdisjoint(tensor.data_ptr() for tensor in attend(problem).outputs.values())


@st.composite
def layers(draw: st.DrawFn) -> LayerProblem:
    kv_heads = draw(st.integers(1, 3))
    num_heads = kv_heads * draw(st.integers(1, 3))
    batch, seq_len_q = draw(st.integers(1, 3)), draw(st.integers(0, 9))
    seq_len_kv = draw(st.none() | st.integers(0, 9))
    axes = {"batch": batch, "num_heads": num_heads, "seq_len_q": seq_len_q}
    axes["seq_len_kv"] = seq_len_q if seq_len_kv is None else seq_len_kv
    found = features(**axes)
    tensors, options = found[draw(st.sampled_from(list(found)))]
    return make_layer(
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
        dtype=draw(st.sampled_from(DTYPES)),
        tensors=tensors,
        outputs=tuple(draw(st.permutations(LAYER_WITHOUT_TOP))[: draw(st.integers(1, 6))]),
        **options,
    )


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(layers())
def test_any_mix_matches_reference_and_gives_the_same_bits_twice(problem: LayerProblem) -> None:
    result = attend(problem)
    assert_matches_reference(problem, result)
    assert_same_bits(result, attend(problem))
