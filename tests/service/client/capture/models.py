"""Small models of every road that an attention can take in torch, and the formula that judges what is captured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

Attend = Callable[..., Tensor]


class Attention(nn.Module):
    """Self-attention of 4 heads with 2 key heads, by one way of reaching the function."""

    def __init__(self, attend: Attend | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.project = nn.Linear(32, 64)
        self.back = nn.Linear(32, 32)
        self.attend = attend
        self.dropout = dropout

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        batch, seq_len, _ = x.shape
        heads = self.project(x).view(batch, seq_len, 8, 8).transpose(1, 2)
        # By attribute only now, as most code does it.
        attend = self.attend or F.scaled_dot_product_attention
        dropout_p = self.dropout if self.training else 0.0
        found = attend(heads[:, :4], heads[:, 4:6], heads[:, 6:], dropout_p=dropout_p, enable_gqa=True, **options)
        out: Tensor = self.back(found.transpose(1, 2).reshape(batch, seq_len, 32))
        return out


class Stack(nn.Module):
    """Two attentions, one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@dataclass(frozen=True)
class Road:
    """A model, how it is called, and the calls that a capture of it must see, by the names of their modules."""

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, Tensor], Any]
    names: tuple[str, ...]
    trains: bool = True


def tokens() -> Tensor:
    return torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(5))


def padding(*, left: bool = False) -> Tensor:
    """True where there is padding: 7, 4 and 2 tokens are there."""
    place = torch.arange(7)
    marks = torch.stack([place >= length for length in (7, 4, 2)])
    return marks.flip(1) if left else marks


CAUSAL = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
SLOPE = -0.5 * (torch.arange(7).view(7, 1) - torch.arange(7)).abs().float()


def _encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first", False))


def _decoder() -> nn.TransformerDecoder:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, batch_first=True), 2)


def _mha(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(32, 4, batch_first=True, **options)


def _evaluated(model: nn.Module, x: Tensor, **options: Any) -> Any:
    with torch.no_grad():
        return model.eval()(x, **options)


def _decoded(model: nn.Module, x: Tensor) -> Any:
    return model(x, x.flip(0)[:, :5], tgt_mask=CAUSAL, tgt_is_causal=True, memory_key_padding_mask=padding()[:, :5])


def _in_half(model: nn.Module, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Twice, so that what autocast remembers of the first is used.
        return model(x, x, x)[0] + model(x, x, x)[0]


_ENCODED = ("layers.0.self_attn", "layers.1.self_attn")
_DECODED = tuple(f"layers.{i}.{name}" for i in range(2) for name in ("self_attn", "multihead_attn"))
ROADS = {
    "by attribute": Road(lambda: Stack(Attention(), Attention()), lambda m, x: m(x), ("layers.0", "layers.1")),
    "by name": Road(lambda: Attention(imported_by_name), lambda m, x: m(x), ("",)),
    "causal": Road(Attention, lambda m, x: m(x, is_causal=True, scale=0.3), ("",)),
    "boolean mask": Road(Attention, lambda m, x: m(x, attn_mask=~padding()[:, None, None]), ("",)),
    "float mask": Road(Attention, lambda m, x: m(x, attn_mask=SLOPE), ("",)),
    "dropout": Road(lambda: Attention(dropout=0.4), lambda m, x: m(x), ("",)),
    "MHA": Road(_mha(), lambda m, x: m(x, x, x, need_weights=False)[0], ("",)),
    "MHA, evaluated": Road(_mha(), lambda m, x: _evaluated(m, x, key=x, value=x, need_weights=False)[0], ("",), False),
    "MHA with weights": Road(_mha(), lambda m, x: m(x, x, x), ("",)),
    "MHA with weights, evaluated": Road(_mha(), lambda m, x: _evaluated(m, x, key=x, value=x), ("",), False),
    "MHA with weights per head": Road(
        _mha(), lambda m, x: m(x, x, x, average_attn_weights=False, key_padding_mask=padding(), attn_mask=CAUSAL), ("",)
    ),
    "MHA with weights per head, evaluated": Road(
        _mha(),
        lambda m, x: _evaluated(m, x, key=x, value=x, average_attn_weights=False, attn_mask=CAUSAL),
        ("",),
        False,
    ),
    "MHA with weights and dropout": Road(_mha(dropout=0.3), lambda m, x: m(x, x, x), ("",)),
    "MHA of one item": Road(_mha(), lambda m, x: m(x[0], x[0], x[0]), ("",)),
    "MHA with other sizes": Road(
        _mha(kdim=16, vdim=24, add_bias_kv=True, add_zero_attn=True),
        lambda m, x: m(x, x[..., :16], x[..., :24]),
        ("",),
    ),
    "MHA under autocast": Road(_mha(), _in_half, ("", "")),
    "encoder": Road(lambda: _encoder(), lambda m, x: m(x), _ENCODED),
    "encoder, evaluated": Road(_encoder, _evaluated, _ENCODED, False),
    "encoder, norm first, evaluated": Road(lambda: _encoder(norm_first=True), _evaluated, _ENCODED, False),
    "encoder, padded, evaluated": Road(
        _encoder, lambda m, x: _evaluated(m, x, src_key_padding_mask=padding()), _ENCODED, False
    ),
    "encoder, padded left, evaluated": Road(
        _encoder, lambda m, x: _evaluated(m, x, src_key_padding_mask=padding(left=True)), _ENCODED, False
    ),
    "encoder, causal, evaluated": Road(
        _encoder, lambda m, x: _evaluated(m, x, mask=CAUSAL, is_causal=True), _ENCODED, False
    ),
    "decoder": Road(_decoder, _decoded, _DECODED),
    "decoder, evaluated": Road(_decoder, lambda m, x: _decoded(m.eval(), x), _DECODED),
}


def made(road: Road) -> nn.Module:
    torch.manual_seed(11)
    return road.make()


def textbook(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The weights as the documentation of scaled_dot_product_attention writes them, in float64; 0 in empty rows."""
    query, key = query.double(), key.double()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    logits = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if attn_mask is not None:
        is_boolean = attn_mask.dtype == torch.bool
        logits = logits.masked_fill(~attn_mask, -math.inf) if is_boolean else logits + attn_mask.double()
    return logits.softmax(-1).nan_to_num(0.0)
