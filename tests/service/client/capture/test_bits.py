"""A capture changes nothing of the model: results, gradients, random numbers, settings of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from service.client.capture import capture_attention
from service.client.capture.capturing import Keep
from tests.service.client.capture.models import ROADS, Attention, Road, Stack, made, padding, tokens

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def attend(x: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, **options)


def allows_cudnn() -> bool:
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]


def ran(road: Road, model: nn.Module) -> list[Tensor | None]:
    """Everything that a run leaves behind: results, gradients of all parameters, the random state."""
    torch.manual_seed(3)
    model.zero_grad()
    x = tokens().requires_grad_(road.trains)
    result = road.call(model, x)
    found = [part for part in (result if isinstance(result, tuple) else (result,)) if part is not None]
    left: list[Tensor | None] = [part.detach().clone() for part in found]
    if road.trains:
        sum((part.float() * torch.linspace(-1, 1, part.shape[-1])).sum() for part in found).backward()
        left += [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [*(None if part is None else part.clone() for part in left), torch.get_rng_state()]


def assert_same_bits(left: list[Tensor | None], right: list[Tensor | None]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("keep", ["weights", "top_weights", "entropy", "none"])
@pytest.mark.parametrize("road", ROADS.values(), ids=ROADS)
def test_a_captured_model_gives_the_bits_of_the_bare_one(road: Road, keep: Keep) -> None:
    model = made(road)
    bare = ran(road, model)
    with capture_attention(model, keep=keep) as captured:
        inside = ran(road, model)
    assert_same_bits(bare, inside)
    assert_same_bits(bare, ran(road, model))
    assert tuple(call.name for call in captured) == road.names
    assert not captured.refused


def test_encoders_keep_to_their_fast_path_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def noting(name: str) -> Any:
        own = getattr(torch, name)

        def noted(*args: Any) -> Any:
            taken.append(name)
            return own(*args)

        return noted

    for name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
        monkeypatch.setattr(torch, name, noting(name))
    for road in ("encoder, padded, evaluated", "MHA, evaluated"):
        model = made(ROADS[road])
        with capture_attention(model):
            ROADS[road].call(model, tokens())
    assert taken == ["_transformer_encoder_layer_fwd"] * 2 + ["_native_multi_head_attention"]


def test_what_is_kept_holds_no_graph_and_can_take_part_in_another() -> None:
    model = Attention()
    with capture_attention(model, keep="weights") as captured:
        model(tokens())
    weights = captured[0].weights
    assert weights.grad_fn is None and not weights.requires_grad and not weights.is_inference()
    scale = torch.ones(1, requires_grad=True)
    torch.autograd.backward((weights * scale).sum())
    assert scale.grad is not None


def test_own_weights_are_a_copy_that_the_models_caller_cannot_write_into() -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad(), capture_attention(model) as captured:
        _, weights = model(*[tokens()] * 3, average_attn_weights=False)
    before = weights.clone()
    weights.zero_()
    assert captured[0].path == "model"
    assert torch.equal(captured[0].weights, before)


def test_a_capture_leaves_torchs_settings_as_they_were() -> None:
    def settings() -> tuple[object, ...]:
        return (
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
            allows_cudnn(),
            torch.is_autocast_enabled("cpu"),
        )

    before_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = settings()
        with capture_attention():
            for _ in range(2):
                attend(torch.randn(1, 8, 128, 64))
                assert settings() == before
        assert settings() == before
    finally:
        torch.set_num_threads(before_threads)


def test_modes_and_devices_around_the_model_see_the_model_alone() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def counted() -> dict[Any, Any]:
        with FlopCounterMode(display=False) as mode:
            attend(torch.randn(1, 2, 5, 8), attn_mask=torch.zeros(5, 5))
            nn.MultiheadAttention(32, 4)(*[tokens()] * 3)
        return dict(mode.get_flop_counts()["Global"])

    alone = counted()
    with capture_attention() as captured:
        assert counted() == alone
        with torch.device("meta"):
            attend(torch.randn(1, 2, 5, 8, device="cpu"))
    assert len(captured) == 3
    assert not captured.refused


def test_recomputation_in_a_backward_pass_is_a_call_of_its_own() -> None:
    model = Stack(Attention(), Attention())

    def passed() -> list[Tensor | None]:
        model.zero_grad()
        x = tokens().requires_grad_()
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        torch.autograd.backward(x.sum())
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    bare = passed()
    with capture_attention(model, keep="none") as captured:
        assert_same_bits(bare, passed())
    told = [(call.name, call.in_backward) for call in captured]
    assert told == [("layers.0", False), ("layers.1", False), ("layers.1", True), ("layers.0", True)]


def test_an_error_of_the_model_is_its_own_and_no_call() -> None:
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 9)
    with pytest.raises(RuntimeError) as bare:
        F.scaled_dot_product_attention(query, key, key)
    with capture_attention() as captured:
        F.scaled_dot_product_attention(query, query, query)
        with pytest.raises(RuntimeError) as inside:
            F.scaled_dot_product_attention(query, key, key)
    assert str(inside.value) == str(bare.value)
    assert len(captured) == 1


@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_in_inference_mode_keeps_its_bits(padded: bool) -> None:
    model = made(ROADS["encoder, evaluated"]).eval()
    mask = padding() if padded else None
    with torch.inference_mode():
        bare = model(tokens(), src_key_padding_mask=mask)
        with capture_attention(model) as captured:
            assert torch.equal(model(tokens(), src_key_padding_mask=mask), bare)
    assert len(captured) == 2


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_captured_models_keep_their_bits_on_a_gpu(dtype: torch.dtype) -> None:
    for road in ("by attribute", "causal", "encoder, evaluated", "MHA, evaluated", "MHA with weights"):
        model = made(ROADS[road]).to("cuda", dtype)
        x = tokens().to("cuda", dtype)

        def run(road: str = road, model: nn.Module = model, x: Tensor = x) -> Tensor:
            result = ROADS[road].call(model, x)
            return result if isinstance(result, Tensor) else result[0]

        bare = run()
        before = allows_cudnn()
        with capture_attention(model) as captured:
            assert torch.equal(run(), bare)
        assert allows_cudnn() == before
        assert not captured.refused
        assert all(call.weights.is_cuda for call in captured)
