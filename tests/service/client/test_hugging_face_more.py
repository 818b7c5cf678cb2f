"""Masks, dtypes and graphs of models of transformers, beyond the models of test_hugging_face."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from service.client.hugging_face import NotPassedOn
from tests.service.client.test_hugging_face import (
    GROUPED,
    LENGTH,
    NAME,
    ROUNDINGS,
    SIZES,
    VOCABULARY,
    Listening,
    attend,
    by,
    client,
    distance,
    llama,
    made,
    padding,
    tokens,
    transformers,
    url,
)

__all__ = ["client", "url"]


def deepseek_v4() -> Any:
    """Its attention adds columns to the mask, of 0 and of -inf."""
    pytest.importorskip("transformers.models.deepseek_v4", reason="this transformers has no DeepSeek-V4")
    config = transformers.DeepseekV4Config(
        **GROUPED | {"num_key_value_heads": 1},
        q_lora_rank=16,
        o_lora_rank=8,
        o_groups=2,
        sliding_window=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    )
    model = transformers.DeepseekV4ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "sinks" in name or "position_bias" in name:
            nn.init.normal_(parameter)
    return model


def deepseek_v32() -> Any:
    """Each query attends the keys that an indexer of its own has chosen."""
    pytest.importorskip("transformers.models.deepseek_v32", reason="this transformers has no DeepSeek-V3.2")
    config = transformers.DeepseekV32Config(
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_topk=3,
        index_n_heads=2,
        index_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=2,
    )
    return transformers.DeepseekV32ForCausalLM(config)


def bigbird_pegasus() -> Any:
    """Its encoder adds the mask to scores of its own, its decoder asks the interface."""
    config = transformers.BigBirdPegasusConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        attention_type="original_full",
        init_std=0.3,
        eos_token_id=None,
    )
    return transformers.BigBirdPegasusForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (deepseek_v4, {}),
        (deepseek_v32, {}),
        (bigbird_pegasus, {"attention_mask": padding(), "decoder_input_ids": tokens(length=5)}),
    ],
    ids=["DeepSeek-V4", "DeepSeek-V3.2", "BigBird-Pegasus"],
)
def test_a_model_whose_own_code_adds_to_its_mask_answers_as_with_eager(
    make: Callable[[], Any], inputs: dict[str, Tensor], client: Listening
) -> None:
    model = made(make)
    call = lambda: model(tokens(), **inputs).logits  # noqa: E731
    eager, ours = by("eager", model, call), by(NAME, model, call)
    assert client.heard
    assert distance(ours, eager) <= ROUNDINGS
    client.without = frozenset({"allow_mask"})
    assert distance(by(NAME, model, call), eager) > 1000 * ROUNDINGS


@pytest.mark.parametrize("mask", [None, torch.ones(5, 5, dtype=torch.bool).tril()[None, None]], ids=["no mask", "mask"])
def test_only_the_keys_that_are_named_are_attended(mask: Tensor | None, client: Listening) -> None:
    indices = torch.tensor([[[0, 1], [1, 1], [0, 2], [2, 3], [4, 0]]], dtype=torch.int32)
    named = torch.zeros(1, 1, 5, 5, dtype=torch.bool)
    for query, keys in enumerate(indices[0].tolist()):
        named[..., query, keys] = True
    ours = attend(mask=mask, indices=indices)
    torch.testing.assert_close(ours, attend(mask=named if mask is None else named & mask), rtol=0, atol=0)


def test_indices_of_another_rank_are_refused_by_name(client: Listening) -> None:
    with pytest.raises(NotPassedOn, match=r"^indices: "):
        attend(indices=torch.zeros(5, 2, dtype=torch.long))


OF_THEIR_OWN = {
    "Bloom": lambda: transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4),
    "MPT": lambda: transformers.MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=1, n_heads=4),
    "RemBERT": lambda: transformers.RemBertConfig(**SIZES, is_decoder=True),
    "XGLM": lambda: transformers.XGLMConfig(
        vocab_size=VOCABULARY, d_model=32, ffn_dim=48, num_layers=1, attention_heads=4, pad_token_id=0
    ),
}


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_a_model_that_would_attend_without_asking_is_refused_by_name(name: str, client: Listening) -> None:
    config = OF_THEIR_OWN[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    with pytest.raises(NotPassedOn, match=r"^attn_implementation: \w*Attention") as refusal:
        model(tokens())
    assert refusal.value.keyword == "attn_implementation"
    assert not client.heard


def test_only_models_that_never_ask_the_interface_are_refused(client: Listening) -> None:
    """Others may inherit what asks, or be made of models that do."""
    asked = transformers.AttentionMaskInterface()[NAME]
    for kind in ("llama", "bert", "paligemma", "bigbird_pegasus", "xlm_roberta"):
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        home = importlib.import_module(f"transformers.models.{kind}.configuration_{kind}")
        config = next(kind for kind in vars(home).values() if getattr(kind, "model_type", ""))
        assert asked(batch_size=1, q_length=2, kv_length=2, config=config()).shape == (1, 1, 2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padded", [False, True])
def test_the_masks_that_models_see_are_those_of_eager(dtype: torch.dtype, padded: bool, client: Listening) -> None:
    sizes: dict[str, Any] = {"batch_size": 2, "q_length": 3, "kv_length": LENGTH, "q_offset": 8, "dtype": dtype}
    if padded:
        sizes["attention_mask"] = padding().bool()
    ours, eager = (transformers.AttentionMaskInterface()[name](**sizes) for name in (NAME, "eager"))
    assert ours.dtype == dtype
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -torch.inf])
def test_a_mask_that_only_blocks_travels_as_bool(least: float, client: Listening) -> None:
    allowed = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    added = torch.zeros(1, 1, 5, 5).masked_fill(~allowed, least)
    torch.testing.assert_close(attend(mask=added), attend(mask=allowed), rtol=0, atol=0)
    assert torch.equal(client.heard[0]["allow_mask"], allowed)
    assert client.heard[0].get("bias") is None


@pytest.mark.parametrize("number", [0.5, -1e4])
def test_a_mask_with_any_other_number_is_added_as_it_is(number: float, client: Listening) -> None:
    added = torch.zeros(1, 1, 5, 5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    added[..., 4, 0] = number
    attend(mask=added)
    assert torch.equal(client.heard[0]["bias"], added)
    assert "allow_mask" not in client.heard[0]


def test_under_autocast_the_service_gets_what_sdpa_gets(client: Listening) -> None:
    model = made(llama)
    call = lambda: model(tokens()).logits  # noqa: E731
    exact = by("eager", model, call)
    with torch.autocast("cpu", torch.bfloat16):
        ours, sdpa = by(NAME, model, call), by("sdpa", model, call)
    assert ours.dtype == sdpa.dtype == torch.bfloat16
    assert (ours.float() - exact).abs().max() <= 2 * (sdpa.float() - exact).abs().max()


class Attending(nn.Module):
    def forward(self, query: Tensor) -> Tensor:
        function = transformers.AttentionInterface()[NAME]
        context: Tensor = function(self, query, query, query, None, is_causal=False)[0]
        return context


def test_compiled_code_asks_the_service_outside_its_graph(client: Listening) -> None:
    query = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(3))
    compiled = torch.compile(Attending(), backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(query), Attending()(query), rtol=0, atol=0)
    assert len(client.heard) == 4


@pytest.mark.parametrize(
    "record",
    [
        lambda module, query: torch.jit.trace(module, (query,), check_trace=False),  # type: ignore[no-untyped-call]
        lambda module, query: torch.export.export(module, (query,), strict=False),
    ],
    ids=["jit.trace", "export"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_recording_of_a_model_never_holds_an_answer(
    record: Callable[[nn.Module, Tensor], object], client: Listening
) -> None:
    with pytest.raises(NotPassedOn, match=r"^tracing: "):
        record(Attending(), torch.randn(1, 2, 3, 4))
    assert not client.heard


def test_weights_that_are_asked_for_refuse_a_backward_pass_too(client: Listening) -> None:
    model = made(llama)
    model.set_attn_implementation(NAME)
    attentions = model(tokens(), output_attentions=True).attentions
    with pytest.raises(NotPassedOn, match=r"^backward: "):
        attentions[-1].square().sum().backward()


def test_a_mask_that_is_learned_refuses_a_backward_pass(client: Listening) -> None:
    mask = torch.zeros(1, 1, 5, 5, requires_grad=True)
    with pytest.raises(NotPassedOn, match=r"^backward: "):
        attend(mask=mask).sum().backward()  # type: ignore[no-untyped-call]


def test_tensors_without_numbers_are_refused_by_name(client: Listening) -> None:
    model = made(llama).to("meta")
    model.set_attn_implementation(NAME)
    with pytest.raises(TypeError, match="meta"):
        model(tokens().to("meta"))
