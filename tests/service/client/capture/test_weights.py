"""What is captured is the textbook's, for every form that torch takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from service.client.capture import Captured, capture_attention
from tests.service.client.capture.models import CAUSAL, ROADS, SLOPE, made, padding, textbook, tokens

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def captured_of(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Captured, Tensor]:
    """The capture of one call with numbers of these shapes, and its weights by the textbook."""
    query, key, value = (numbers(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    with capture_attention() as captured:
        F.scaled_dot_product_attention(query, key, value, **options)
    options.pop("dropout_p", None)
    mask = options.pop("attn_mask", None)
    return captured, textbook(query, key, mask, **options)


FORMS = {
    "rank 4": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 3)),
    "rank 3": ((4, 5, 8), (4, 6, 8), (4, 6, 8)),
    "rank 2": ((5, 8), (6, 8), (6, 8)),
    "rank 5": ((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8)),
    "batches broadcast": ((3, 1, 2, 5, 8), (4, 1, 6, 8), (1, 2, 6, 8)),
    "one item of keys": ((3, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8)),
    "one head of keys": ((3, 4, 5, 8), (3, 1, 6, 8), (3, 1, 6, 8)),
    "one head of values": ((3, 4, 5, 8), (3, 4, 6, 8), (3, 1, 6, 8)),
    "one head of queries": ((3, 1, 5, 8), (3, 4, 6, 8), (3, 4, 6, 8)),
    "ranks 3 and 4": ((4, 5, 8), (2, 4, 6, 8), (4, 6, 8)),
    "one token": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    "no queries": ((2, 2, 0, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
    "no batch": ((0, 2, 5, 8), (0, 2, 6, 8), (0, 2, 6, 8)),
}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": -0.7}, {"scale": 0.0}], ids=str)
@pytest.mark.parametrize("shapes", FORMS.values(), ids=FORMS)
def test_weights_are_those_of_the_textbook(shapes: Any, options: dict[str, Any]) -> None:
    captured, expected = captured_of(*shapes, **options)
    batch = torch.broadcast_shapes(*(shape[:-2] for shape in shapes))  # type: ignore[no-untyped-call]
    assert captured[0].weights.shape == (*batch, shapes[0][-2], shapes[1][-2])
    torch.testing.assert_close(
        captured[0].weights.double(), expected.expand(captured[0].weights.shape), rtol=1e-5, atol=1e-6
    )
    assert (captured[0].query_shape, captured[0].key_shape, captured[0].value_shape) == shapes


MASKS = {
    "pairs": lambda: ~CAUSAL[:5, :6],
    "keys": lambda: torch.tensor([[True, False, True, True, True, False]]),
    "queries": lambda: torch.tensor([[True], [False], [True], [True], [False]]),
    "items": lambda: numbers(2, 1, 5, 6, seed=9) > 0,
    "heads": lambda: numbers(1, 4, 5, 6, seed=9) > 0,
    "all": lambda: numbers(2, 4, 5, 6, seed=9) > 0,
    "added to pairs": lambda: SLOPE[:5, :6],
    "added to all": lambda: numbers(2, 4, 5, 6, seed=9),
    "added, some -inf": lambda: numbers(2, 1, 5, 6).masked_fill(numbers(2, 1, 5, 6, seed=9) > 0.3, float("-inf")),
    "added, huge": lambda: torch.zeros(5, 6).masked_fill(CAUSAL[:5, :6], torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_masks_mean_what_torch_means(make: Any) -> None:
    mask = make()
    captured, expected = captured_of((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8), attn_mask=mask)
    torch.testing.assert_close(captured[0].weights.double(), expected, rtol=1e-5, atol=1e-6)
    assert captured[0].mask == ("bool" if mask.dtype == torch.bool else "float")
    assert captured[0].mask_shape == tuple(mask.shape)
    assert captured[0].empty_rows == int((expected.sum(-1) == 0).sum())


def test_masks_of_more_axes_are_merged_with_them() -> None:
    for shape in ((3, 1, 1, 5, 6), (1, 1, 2, 5, 6), (2, 5, 6), (1, 1, 1, 1, 6)):
        mask = numbers(*shape, seed=4) > -0.5
        captured, expected = captured_of((3, 4, 2, 5, 8), (3, 4, 2, 6, 8), (3, 4, 2, 6, 8), attn_mask=mask)
        torch.testing.assert_close(captured[0].weights.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_shared_heads_are_those_of_enable_gqa(num_kv_heads: int, is_causal: bool) -> None:
    for batch in ((2,), (2, 3)):
        shapes = ((*batch, 4, 5, 8), (*batch, num_kv_heads, 6, 8), (*batch, num_kv_heads, 6, 8))
        captured, expected = captured_of(*shapes, enable_gqa=True, is_causal=is_causal)
        torch.testing.assert_close(captured[0].weights.double(), expected, rtol=1e-5, atol=1e-6)
        assert captured[0].enable_gqa


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_have_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    captured, expected = captured_of((2, 2, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8), dtype=dtype, is_causal=True)
    assert captured[0].weights.dtype == captured[0].dtype == dtype
    torch.testing.assert_close(captured[0].weights, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-12)


def test_strides_of_any_kind_are_read() -> None:
    query, key = numbers(2, 5, 4, 8).transpose(1, 2), numbers(2, 8, 4, 6).permute(0, 2, 3, 1)
    with capture_attention() as captured:
        F.scaled_dot_product_attention(query, key, key)
        F.scaled_dot_product_attention(query[:, :1].expand(2, 4, 5, 8), key, key)
    torch.testing.assert_close(captured[0].weights.double(), textbook(query, key), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(captured[1].weights.double(), textbook(query[:, :1], key), rtol=1e-5, atol=1e-6)


def test_top_weights_and_entropy_are_those_of_the_weights() -> None:
    query = numbers(3, 4, 5, 8)
    with (
        capture_attention(keep="top_weights", top_k=2) as top,
        capture_attention(keep="top_weights") as eight,
        capture_attention(keep="entropy") as entropy,
        capture_attention() as whole,
    ):
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    weights = whole[0].weights
    torch.testing.assert_close(top[0].top_weights, weights.sort(-1, descending=True).values[..., :2])
    assert torch.equal(top[0].top_keys[..., 0, :], torch.tensor([0, -1]).expand(3, 4, 2))
    assert eight[0].top_weights.shape == (3, 4, 5, 5)
    torch.testing.assert_close(entropy[0].entropy, torch.special.entr(weights).sum(-1))


def test_weights_with_dropout_are_those_before_it_and_say_so() -> None:
    captured, expected = captured_of((2, 2, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8), dropout_p=0.5)
    torch.testing.assert_close(captured[0].weights.double(), expected, rtol=1e-5, atol=1e-6)
    assert captured[0].dropout_p == 0.5
    assert "without dropout" in captured[0].notes[0]
    model = nn.MultiheadAttention(32, 4, dropout=0.25, batch_first=True)
    with capture_attention(model) as captured:
        model(*[tokens()] * 3, average_attn_weights=False)
    assert captured[0].dropout_p == 0.25
    assert captured[0].path != "model"
    torch.testing.assert_close(captured[0].weights.sum(-1), torch.ones(3, 4, 7))


def test_a_causal_call_of_other_lengths_says_where_it_starts() -> None:
    captured, _ = captured_of((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), is_causal=True)
    assert "query i sees keys up to i" in captured[0].notes[0]
    captured, _ = captured_of((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8), is_causal=True)
    assert captured[0].notes == ()


def heads_of(model: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key of self-attention, [batch, 4, 7, 8]."""
    joined = F.linear(x, model.in_proj_weight, model.in_proj_bias)
    query, key, _ = joined.view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
    return query, key


OWN_MASKS = {
    "none": {},
    "causal": {"attn_mask": CAUSAL},
    "padding": {"key_padding_mask": padding()},
    "both": {"attn_mask": CAUSAL, "key_padding_mask": padding(left=True)},
    "added": {"attn_mask": SLOPE},
    "added per head": {"attn_mask": numbers(12, 7, 7, seed=2)},
}


def allowed(masks: dict[str, Tensor]) -> Tensor:
    """Masks of nn.MultiheadAttention as the textbook takes them: added, for each item and head."""
    total = torch.zeros(3, 4, 7, 7)
    for name, mask in masks.items():
        added = mask if mask.is_floating_point() else torch.zeros(mask.shape).masked_fill(mask, float("-inf"))
        if name == "key_padding_mask":
            added = added.view(3, 1, 1, 7)
        total = total + (added.view(3, 4, 7, 7) if added.ndim == 3 else added)
    return total


@pytest.mark.parametrize("is_evaluated", [False, True])
@pytest.mark.parametrize("asks", [{"need_weights": False}, {}, {"average_attn_weights": False}], ids=str)
@pytest.mark.parametrize("masks", OWN_MASKS.values(), ids=OWN_MASKS)
def test_every_road_of_multihead_attention_gives_weights_per_head(
    masks: dict[str, Tensor], asks: dict[str, bool], is_evaluated: bool
) -> None:
    torch.manual_seed(4)
    model = nn.MultiheadAttention(32, 4, batch_first=True).train(not is_evaluated)
    x = tokens()
    with torch.no_grad(), capture_attention(model) as captured:
        _, own = model(x, x, x, **masks, **asks)
        expected = textbook(*heads_of(model, x), allowed(masks))
    (call,) = captured
    weights = call.weights.nan_to_num(0.0)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-5, atol=1e-6)
    assert call.empty_rows == int((expected.sum(-1) == 0).sum())
    if own is not None:
        mean = weights if asks else weights.mean(1)
        torch.testing.assert_close(mean[~own.isnan()], own[~own.isnan()], rtol=1e-5, atol=1e-6)
    if asks.get("average_attn_weights") is False:
        assert call.path == "model"
        assert call.weights.isnan().any() == (call.empty_rows > 0)
        assert bool(call.notes) == (call.empty_rows > 0)


@pytest.mark.parametrize("is_first", [False, True], ids=["norm last", "norm first"])
def test_layers_on_the_fast_path_give_the_weights_of_the_slow_one(is_first: bool) -> None:
    model = made(ROADS["encoder, norm first, evaluated" if is_first else "encoder, evaluated"]).eval()
    with torch.no_grad(), capture_attention(model) as fast:
        model(tokens(), mask=CAUSAL)
    with capture_attention(model) as slow:
        model(tokens(), mask=CAUSAL)
    assert [call.function for call in fast] == ["_transformer_encoder_layer_fwd"] * 2
    assert [call.function for call in slow] == ["scaled_dot_product_attention"] * 2
    for name in fast.names:
        torch.testing.assert_close(fast[name].weights, slow[name].weights, rtol=1e-4, atol=1e-6)


def test_a_nested_batch_gives_its_padded_weights() -> None:
    model = made(ROADS["encoder, evaluated"]).eval()
    with torch.no_grad(), capture_attention(model) as nested:
        model(tokens(), src_key_padding_mask=padding())
    call = nested["layers.1.self_attn"]
    assert call.lengths is not None and call.lengths.tolist() == [7, 4, 2]
    assert call.empty_rows == 0
    for item, length in enumerate((7, 4, 2)):
        with torch.no_grad(), capture_attention(model) as alone:
            model(tokens()[item : item + 1, :length])
        whole = torch.zeros(4, 7, 7)
        whole[:, :length, :length] = alone["layers.1.self_attn"].weights[0]
        torch.testing.assert_close(call.weights[item], whole, rtol=1e-4, atol=1e-6)


def test_attended_nan_stays_in_its_row() -> None:
    query = numbers(1, 1, 3, 4)
    query[0, 0, 1, 0] = float("nan")
    with capture_attention() as captured:
        F.scaled_dot_product_attention(query, numbers(1, 1, 3, 4, seed=1), numbers(1, 1, 3, 4, seed=2))
    assert captured[0].weights.isnan().any(-1).flatten().tolist() == [False, True, False]
