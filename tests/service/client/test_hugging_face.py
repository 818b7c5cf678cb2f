"""Models of transformers ask a real service for their attention, and answer as they do by themselves.

Every model is tiny, random and made from its config: no hub, no tokenizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_core import Engine
from service.client import AsyncAttentionClient, AttentionClient
from service.client.errors import Invalid
from service.client.hugging_face import CHANGES_NOTHING, NotPassedOn, register_transformers
from tests.support.in_process import service_in_process

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -c constraints.txt '.[transformers]'"
)

NAME = "attn_service"
VOCABULARY, LENGTH, NUM_LAYERS = 40, 11, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}


class Listening:
    """A client that keeps the keywords of every attention, and leaves out those named by ``without``."""

    def __init__(self, client: AttentionClient) -> None:
        self._client = client
        self.heard: list[dict[str, Any]] = []
        self.without: frozenset[str] = frozenset()

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Any:
        self.heard.append(keywords)
        passed = {name: given for name, given in keywords.items() if name not in self.without}
        return self._client.attention(query, key, value, **passed)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with service_in_process(Engine(device="cpu", max_threads=1)) as service:
        yield service.url


@pytest.fixture
def client(url: str) -> Iterator[Listening]:
    with AttentionClient(url) as own:
        listening = Listening(own)
        assert register_transformers(listening) == NAME
        yield listening


@dataclass(frozen=True)
class Kind:
    """A sort of model: how one is made, what it needs besides tokens, which keyword of the client is its own."""

    make: Callable[[], Any]
    matters: str
    calls: int = NUM_LAYERS
    inputs: dict[str, Tensor] = field(default_factory=dict)
    generates: bool = True


def tokens(*, seed: int = 5, length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def padding(*, on_the_left: bool = False) -> Tensor:
    """Four tokens of the second item are padding."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, slice(0, 4) if on_the_left else slice(-4, None)] = 0
    return mask


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED | options))


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        **GROUPED,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    return model


def gemma2() -> Any:
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **GROUPED,
            sliding_window=4,
            attn_logit_softcapping=0.5,
            query_pre_attn_scalar=5,
            final_logit_softcapping=None,
        )
    )


def t5() -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(
        **sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None
    )
    model = transformers.T5ForConditionalGeneration(config)
    for module in model.modules():
        if getattr(module, "has_relative_attention_bias", False):
            nn.init.normal_(module.relative_attention_bias.weight)
    return model


KINDS = {
    "Llama": Kind(llama, "allow_mask"),
    "BERT": Kind(
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
        "allow_mask",
        inputs={"attention_mask": padding()},
        generates=False,
    ),
    "Mistral": Kind(
        lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, sliding_window=4)), "allow_mask"
    ),
    "Gemma-2": Kind(gemma2, "softcap"),
    "GPT-OSS": Kind(gpt_oss, "sinks"),
    # Encoder, decoder, and the decoder's look at the encoder.
    "T5": Kind(
        t5, "bias", 3 * NUM_LAYERS, {"attention_mask": padding(), "decoder_input_ids": tokens(seed=6, length=7)}
    ),
}
GENERATING = [name for name, kind in KINDS.items() if kind.generates]


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make().eval()


def by(implementation: str, model: Any, call: Callable[[], Any]) -> Any:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return call()


def distance(left: Tensor, right: Tensor) -> float:
    """The largest difference, in roundings of the largest number to float32."""
    eps = torch.finfo(torch.float32).eps
    return float((left - right).abs().max() / (right.abs().max() * eps))


ROUNDINGS = 32
"""Two orders of the same float32 sums, through two layers and a head, stay within so many."""


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_eager(
    name: str, client: Listening, record_property: Callable[[str, object], None]
) -> None:
    kind = KINDS[name]
    model = made(kind.make)
    call = lambda: model(tokens(), **kind.inputs).logits  # noqa: E731
    eager, ours = by("eager", model, call), by(NAME, model, call)
    record_property("largest difference", float((eager - ours).abs().max()))
    assert len(client.heard) == kind.calls
    assert distance(ours, eager) <= ROUNDINGS


@pytest.mark.parametrize("name", KINDS)
def test_what_makes_a_model_special_reaches_the_service(name: str, client: Listening) -> None:
    kind = KINDS[name]
    model = made(kind.make)
    call = lambda: model(tokens(), **kind.inputs).logits  # noqa: E731
    eager = by("eager", model, call)
    client.without = frozenset({kind.matters})
    assert distance(by(NAME, model, call), eager) > 1000 * ROUNDINGS


@pytest.mark.parametrize("name", GENERATING)
def test_generating_with_a_cache_gives_the_logits_of_eager(name: str, client: Listening) -> None:
    model = made(KINDS[name].make)
    call = lambda: model.generate(  # noqa: E731
        tokens(),
        attention_mask=torch.ones(2, LENGTH, dtype=torch.long),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    eager, ours = by("eager", model, call), by(NAME, model, call)
    assert len(ours.logits) == 8
    assert torch.equal(ours.sequences, eager.sequences)
    for step, wanted in zip(ours.logits, eager.logits, strict=True):
        assert distance(step, wanted) <= ROUNDINGS


@pytest.mark.parametrize("name", [name for name in GENERATING if name != "T5"])
def test_padding_on_the_left_changes_no_token_behind_it(name: str, client: Listening) -> None:
    model, mask = made(KINDS[name].make), padding(on_the_left=True)
    call = lambda: model(tokens(), attention_mask=mask).logits  # noqa: E731
    eager, ours = by("eager", model, call), by(NAME, model, call)
    assert distance(ours[mask == 1], eager[mask == 1]) <= ROUNDINGS
    assert ours.isfinite().all()


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
def test_a_callers_own_mask_is_passed_on(additive: bool, client: Listening) -> None:
    model = made(llama)
    allowed = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(7)) < 0.5
    allowed |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    eager = by("eager", model, lambda: model(tokens(), attention_mask=added).logits)
    own = added if additive else allowed
    ours = by(NAME, model, lambda: model(tokens(), attention_mask=own).logits)
    assert distance(ours, eager) <= ROUNDINGS


def test_weights_that_are_asked_for_are_those_of_eager(client: Listening) -> None:
    model = made(gpt_oss)
    call = lambda: model(tokens(), output_attentions=True).attentions  # noqa: E731
    for ours, eager in zip(by(NAME, model, call), by("eager", model, call), strict=True):
        assert distance(ours, eager) <= ROUNDINGS


def test_the_window_of_a_model_is_in_the_mask_that_reaches_the_service(client: Listening) -> None:
    model = made(KINDS["Mistral"].make)
    by(NAME, model, lambda: model(tokens()))
    distances = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    band = (distances >= 0) & (distances < 4)
    assert all(
        torch.equal(heard["allow_mask"].expand(2, 1, -1, -1), band.expand(2, 1, -1, -1)) for heard in client.heard
    )


def test_generating_into_a_cache_of_fixed_size_gives_the_logits_of_eager(client: Listening) -> None:
    model = made(llama)
    call = lambda: model.generate(  # noqa: E731
        tokens(),
        attention_mask=padding(on_the_left=True),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        cache_implementation="static",
        disable_compile=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    eager, ours = by("eager", model, call), by(NAME, model, call)
    for step, wanted in zip(ours.logits, eager.logits, strict=True):
        assert distance(step, wanted) <= ROUNDINGS


def test_half_precision_travels_as_it_is(client: Listening) -> None:
    model = made(llama)
    wanted = by("eager", model, lambda: model(tokens()).logits)
    halved = made(llama).to(torch.bfloat16)
    ours, eager = (by(name, halved, lambda: halved(tokens()).logits) for name in (NAME, "eager"))
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - wanted).abs().max() <= 2 * (eager.float() - wanted).abs().max()


def test_a_mask_that_is_the_same_for_all_items_travels_once(client: Listening) -> None:
    model = made(llama)
    by(NAME, model, lambda: model(tokens()))
    assert {tuple(heard["allow_mask"].shape) for heard in client.heard} == {(1, 1, LENGTH, LENGTH)}


class Module(nn.Module):
    """What an attention function sees of the layer that calls it."""

    def __init__(self, *, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal


def attend(
    seq_len_q: int = 5,
    seq_len_kv: int = 5,
    mask: Tensor | None = None,
    *,
    module_is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """The registered function as a layer calls it."""
    chance = torch.Generator().manual_seed(8)
    query = torch.randn(1, 4, seq_len_q, 8, generator=chance)
    key, value = (torch.randn(1, 2, seq_len_kv, 8, generator=chance) for _ in range(2))
    function = transformers.AttentionInterface()[NAME]
    context: Tensor = function(Module(is_causal=module_is_causal), query, key, value, mask, **options)[0]
    return context


@pytest.mark.parametrize("keyword", ["cu_seq_lens_q", "block_indices", "cache", "something_new"])
def test_a_keyword_that_the_service_does_not_know_is_refused_by_name(keyword: str, client: Listening) -> None:
    given: dict[str, Any] = {keyword: torch.ones(1)}
    with pytest.raises(NotPassedOn, match=f"^{keyword}: ") as refusal:
        attend(**given)
    assert refusal.value.keyword == keyword
    assert not client.heard
    absent: dict[str, Any] = {keyword: None}
    attend(**absent)


def test_keywords_that_change_nothing_change_nothing(client: Listening) -> None:
    plain = attend()
    for keyword in CHANGES_NOTHING:
        given: dict[str, Any] = {keyword: True}
        torch.testing.assert_close(attend(**given), plain, rtol=0, atol=0)


def test_dropout_is_refused(client: Listening) -> None:
    with pytest.raises(NotPassedOn, match=r"^dropout: 0\.1"):
        attend(dropout=0.1)


def test_dropout_is_refused_in_training(client: Listening) -> None:
    model = made(lambda: llama(attention_dropout=0.1)).train()
    model.set_attn_implementation(NAME)
    with pytest.raises(NotPassedOn, match=r"^dropout: 0\.1"):
        model(tokens())
    model.eval()(tokens())


def test_a_backward_pass_is_refused_and_not_left_incomplete(client: Listening) -> None:
    model = made(llama)
    model.set_attn_implementation(NAME)
    with pytest.raises(NotPassedOn, match=r"^backward: "):
        model(tokens()).logits.sum().backward()


@pytest.mark.parametrize(
    ("keyword", "options"),
    [
        ("attention_mask", {"mask": torch.ones(1, 5, dtype=torch.bool)}),
        ("attention_mask", {"mask": torch.ones(1, 1, 5, 5, dtype=torch.long)}),
        ("position_bias", {"position_bias": torch.ones(5, 5)}),
        ("scaling", {"scaling": torch.ones(4)}),
        ("s_aux", {"s_aux": torch.ones(1, 4)}),
        ("sinks", {"sinks": torch.ones(2)}),
        ("sinks", {"sinks": torch.ones(4), "s_aux": torch.ones(4)}),
        ("is_causal", {"module_is_causal": True}),
        ("is_causal", {"is_causal": True, "seq_len_kv": 7}),
        ("sliding_window", {"sliding_window": 3}),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused_by_name(
    keyword: str, options: dict[str, Any], client: Listening
) -> None:
    with pytest.raises(NotPassedOn, match=f"^{keyword}: "):
        attend(**options)
    assert not client.heard


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("seq_len_q", [1, 5])
def test_causality_and_window_without_a_mask_are_those_of_a_mask(
    seq_len_q: int, window: int | None, client: Listening
) -> None:
    place = torch.arange(5 - seq_len_q, 5)[:, None]
    allowed = torch.arange(5)[None] <= place
    if window is not None:
        allowed &= torch.arange(5)[None] > place - window
    ours = attend(seq_len_q, is_causal=True, sliding_window=window)
    torch.testing.assert_close(ours, attend(seq_len_q, mask=allowed[None, None]))


def test_a_position_bias_and_an_additive_mask_are_added(client: Listening) -> None:
    chance = torch.Generator().manual_seed(9)
    position_bias, mask = torch.randn(1, 4, 5, 5, generator=chance), torch.randn(1, 1, 5, 5, generator=chance)
    ours = attend(mask=mask, position_bias=position_bias)
    torch.testing.assert_close(ours, attend(mask=position_bias + mask))
    torch.testing.assert_close(client.heard[0]["bias"], position_bias + mask)


def test_a_causal_module_that_is_told_otherwise_attends_to_every_key(client: Listening) -> None:
    ours = attend(module_is_causal=True, is_causal=False)
    torch.testing.assert_close(ours, attend(mask=torch.ones(1, 1, 5, 5, dtype=torch.bool)))


def test_what_the_service_itself_refuses_names_its_field(client: Listening) -> None:
    with pytest.raises(Invalid) as refusal:
        attend(mask=torch.ones(1, 1, 5, 6, dtype=torch.bool))
    assert [fault.field for fault in refusal.value.faults] == ["allow_mask"]


@pytest.mark.parametrize("name", ["sdpa", "my_flash", "flex_attention", "paged|mine", "owner/repository", "", "eager"])
def test_a_name_that_transformers_reads_a_meaning_into_is_refused(name: str, client: Listening) -> None:
    with pytest.raises(ValueError, match=r"^name: "):
        register_transformers(client, name)


def test_a_name_that_another_has_registered_is_refused(client: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "of_another", attend)
    with pytest.raises(ValueError, match=r"^name: 'of_another' is registered already"):
        register_transformers(client, "of_another")


def test_a_client_that_is_awaited_is_refused(url: str) -> None:
    with pytest.raises(TypeError, match=r"^client: "):
        register_transformers(AsyncAttentionClient(url))


@pytest.mark.parametrize(
    ("module", "absent"),
    [("service.client", ("torch", "transformers")), ("service.client.hugging_face", ("transformers",))],
)
def test_importing_loads_nothing_that_only_a_registration_needs(module: str, absent: tuple[str, ...]) -> None:
    program = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"


def test_without_transformers_the_error_says_what_to_install(
    client: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install 'transformers>=5'"):
        register_transformers(client)
