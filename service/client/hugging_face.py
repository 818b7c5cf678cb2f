"""A Hugging Face model whose attention the service computes: ``register_transformers``.

Decided here: what each keyword of transformers means to the service. What it can do is passed on; what changes no
number is listed in ``CHANGES_NOTHING``; everything else is refused by ``NotPassedOn``, which names it. Masks are made
in the form of eager, which every model understands, and read back as bool before they travel. It needs torch, and
transformers once something is registered.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from service.client.answers import Answer

CHANGES_NOTHING = frozenset(
    {
        "cache_position",
        "deterministic",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords that reach an attention function and leave its numbers as they are.

Positions are in query and key by then (rotary), or in the mask (packed sequences); ``deterministic`` is of a backward.
"""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
# By these parts of a name transformers decides what a kernel can do, whoever registered it.
_TAKEN = ("flash", "flex", "sdpa", "eager", "paged")


class Attends(Protocol):
    """Anything with the method ``attention`` of ``AttentionClient``."""

    @property
    def attention(self) -> Callable[..., Any]: ...


class NotPassedOn(ValueError):
    """A model asked for what the service does not do, or what could be read in two ways; ``keyword`` names it."""

    def __init__(self, keyword: str, why: str) -> None:
        super().__init__(f"{keyword}: {why}")
        self.keyword = keyword


def register_transformers(client: Attends, name: str = "attn_service") -> str:
    """Has every model with ``attn_implementation=name`` ask the service for its attention, through ``client``.

        name = register_transformers(client)
        model = AutoModelForCausalLM.from_pretrained("...", attn_implementation=name)      # or
        model.set_attn_implementation(name)

    The attention and the mask function go under the one name, which comes back: without the second transformers gives
    no mask at all. The name holds for the whole process; the same name again means the new client. The client must wait
    (``AttentionClient``) and stay open.

    Passed on: ``attention_mask`` (of rank 4 as the mask function makes it, or a caller's own, bool or additive),
    ``position_bias``, ``scaling``, ``softcap``, ``s_aux`` and ``sinks`` (one logit a head), ``is_causal``,
    ``sliding_window``, ``indices`` (the only keys of each query), ``output_attentions``. Where there is a mask it says
    alone who attends whom, as for eager and sdpa: window and causality are in it. A query that may attend no key
    (padding on the left, or far from every token under a window) gets 0, where eager gives the mean of all values. A
    keyword that is None is as good as absent.

    Dropout is refused, in training too; a backward pass raises, since the service keeps no graph. Under autocast query,
    key and value leave in its dtype, as with sdpa; torch.compile leaves its graph for each call.

    A model that multiplies its attention out itself (Bloom, MPT, XGLM, LED ...) never comes here. Loaded with this name
    it is refused when it makes its first mask; ``set_attn_implementation`` says so in transformers' log, and leaves it.

    Raises: ImportError without transformers, ValueError for a name that transformers reads a meaning into or another
    has registered, TypeError for a client whose methods are awaited. The model's calls raise ``NotPassedOn`` and the
    classes of ``service.client.errors``.
    """
    from inspect import iscoroutinefunction

    from service.client.asynchronous import AsyncAttentionClient

    if isinstance(client, AsyncAttentionClient) or iscoroutinefunction(getattr(client, "attention", None)):
        raise TypeError("client: a model cannot await; give an AttentionClient")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError("register_transformers needs transformers: pip install 'transformers>=5'") from error
    if not _NAME.fullmatch(name) or any(part in name for part in _TAKEN):
        raise ValueError(f"name: letters, digits, '_', '.', '-', and none of {', '.join(_TAKEN)}, not {name!r}")
    known = AttentionInterface()
    if name in known and not isinstance(known[name], _ServiceAttention):
        raise ValueError(f"name: {name!r} is registered already, and not by register_transformers")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def service_mask(*sizes: Any, config: Any = None, dtype: torch.dtype = torch.float32, **keywords: Any) -> Any:
        """The mask [batch, 1, queries, keys] to add, 0 or the least number of dtype; None only where all may attend.

        Code of models that was written beside eager adds it to scores, or adds to it; bool would go wrong in silence.
        Without a mask causality would hang on conventions that differ between kernels, so it is never left out.
        """
        _check_that_it_asks(type(config).__module__, name)
        allowed: Tensor | None = sdpa_mask(*sizes, **keywords | {"allow_is_causal_skip": False})
        return None if allowed is None else _added(allowed, dtype)

    AttentionInterface.register(name, _ServiceAttention(client))
    AttentionMaskInterface.register(name, service_mask)
    return name


class _ServiceAttention:
    """An attention function as ``AttentionInterface`` has them."""

    def __init__(self, client: Attends) -> None:
        self._client = client

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | Tensor | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        position_bias: Tensor | None = None,
        s_aux: Tensor | None = None,
        sinks: Tensor | None = None,
        indices: Tensor | None = None,
        output_attentions: bool | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The context [batch, queries, heads, head_dim], and the weights where ``output_attentions`` asks for them.

        Shapes: query [batch, heads, queries, head_dim]; key and value may have fewer heads. Raises: NotPassedOn.
        """
        if torch._C._is_tracing() or torch.compiler.is_exporting():
            raise NotPassedOn("tracing", "an answer of the service would become a constant of the trace or export")
        if dropout:
            raise NotPassedOn("dropout", f"{dropout}, but the service never drops out; call eval(), or set it to 0")
        for keyword, given in keywords.items():
            if keyword not in CHANGES_NOTHING and given is not None:
                raise NotPassedOn(keyword, "the service knows no such keyword, and to ignore it could change numbers")
        query, key, value = _in_dtype_of_autocast(query, key, value)
        rules = _pairs(module, query, key, attention_mask, is_causal, sliding_window)
        if indices is not None:
            named = _pairs_of(indices, key.shape[2])
            rules["allow_mask"] = named & rules["allow_mask"] if "allow_mask" in rules else named
        bias = _joined_bias(position_bias, rules.pop("bias", None))
        rules |= {"bias": bias, "sinks": _one_sink(query.shape[1], s_aux, sinks), "softcap": softcap}
        if isinstance(scaling, Tensor) and scaling.numel() != 1:
            raise NotPassedOn("scaling", f"one number, not {tuple(scaling.shape)}")
        rules["scale"] = None if scaling is None else float(scaling)
        outputs = ["context", "weights"] if output_attentions else ["context"]
        answer: Answer = self._client.attention(query, key, value, outputs=outputs, **rules)
        context: Tensor = answer.outputs["context"].transpose(1, 2).contiguous()
        weights: Tensor | None = answer.outputs.get("weights")
        inputs = (query, key, value, attention_mask, position_bias, rules["sinks"], scaling)
        origins = [each for each in inputs if isinstance(each, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in origins):
            context = _WithoutBackward.apply(context, *origins)  # type: ignore[no-untyped-call]
            weights = None if weights is None else _WithoutBackward.apply(weights, *origins)  # type: ignore[no-untyped-call]
        return context, weights


class _WithoutBackward(torch.autograd.Function):
    """Passes an output on as what it depends on, so that a backward pass fails and does not leave gradients out."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *origins: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotPassedOn("backward", "the service computed this attention without a graph; client.gradients has them")


@functools.cache
def _check_that_it_asks(configuration: str, name: str) -> None:
    """Raises: NotPassedOn for a module of a configuration whose model multiplies its attention out itself.

    The same signs by which ``set_attn_implementation`` leaves one alone; ``from_pretrained`` looks for none.
    """
    modeling = sys.modules.get(configuration.replace("configuration_", "modeling_"))
    if modeling is None or "configuration_" not in configuration or hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        return
    own = [kind for kind in vars(modeling).values() if isinstance(kind, type) and kind.__module__ == modeling.__name__]
    by_itself = [kind.__name__ for kind in own if nn.Module in kind.__bases__ and "Attention" in kind.__name__]
    if by_itself:
        raise NotPassedOn(
            "attn_implementation",
            f"{', '.join(by_itself)} of {modeling.__name__} would compute without asking {name}; load it with 'eager'",
        )


def _added(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a pair may attend, else the least number of dtype, as eager has it; what is expanded stays expanded."""
    shape = allowed.shape
    blocked = ~_once(allowed)
    return torch.zeros_like(blocked, dtype=dtype).masked_fill_(blocked, torch.finfo(dtype).min).expand(shape)


def _allowed(added: Tensor) -> Tensor | None:
    """The bool mask that is meant by a mask of 0 and numbers at least as low as the least of its dtype; else None."""
    if added.is_meta:
        return None
    is_blocked = added <= torch.finfo(added.dtype).min
    return ~is_blocked if bool(((added == 0) | is_blocked).all()) else None


def _once(mask: Tensor) -> Tensor:
    """One of the batch, and one of the heads, where these are only expanded: so often it need not travel."""
    for axis in (0, 1):
        mask = mask.narrow(axis, 0, 1) if mask.stride(axis) == 0 and mask.shape[axis] else mask
    return mask


def _in_dtype_of_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast casts the arguments of sdpa: all but float64 become its dtype, where it is on."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def _pairs(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> dict[str, Any]:
    """Who attends whom, as options of the client; ``bias`` among them for an additive mask."""
    if mask is not None:
        if mask.ndim != 4:
            raise NotPassedOn("attention_mask", f"rank 4 is meant by the attention, not {tuple(mask.shape)}")
        mask = _once(mask)
        if mask.dtype == torch.bool:
            return {"allow_mask": mask}
        if not mask.is_floating_point():
            raise NotPassedOn("attention_mask", f"bool (True = may attend) or float (added), not {mask.dtype}")
        allow_mask = _allowed(mask)
        return {"bias": mask} if allow_mask is None else {"allow_mask": allow_mask}
    seq_len_q, seq_len_kv = query.shape[2], key.shape[2]
    # sdpa's default, too: a module that does not say is causal.
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        if sliding_window is not None and sliding_window < seq_len_kv:
            raise NotPassedOn(
                "sliding_window",
                "both ways and without attention_mask, where flash attention counts the query's own place in and the "
                "masks of transformers do not",
            )
        return {}
    if seq_len_q > 1 and is_causal is None:
        raise NotPassedOn(
            "is_causal",
            "not given, and neither is attention_mask, for a causal module: eager would attend to every key, sdpa not",
        )
    if 1 < seq_len_q != seq_len_kv:
        raise NotPassedOn(
            "is_causal",
            f"True for {seq_len_q} queries and {seq_len_kv} keys without attention_mask: sdpa starts at the first key, "
            "flash attention ends at the last",
        )
    # One query is the last token.
    rules: dict[str, Any] = {"causal": "lower_right" if seq_len_q == 1 else True}
    if sliding_window is not None:
        # transformers counts the query's own place in.
        rules["window"] = (sliding_window - 1, 0)
    return rules


def _pairs_of(indices: Tensor, seq_len_kv: int) -> Tensor:
    """``[batch, 1, queries, keys]``, True for the keys that ``indices`` [batch, queries, any number] name."""
    if indices.ndim != 3:
        raise NotPassedOn("indices", f"[batch, queries, any number] is meant, not {tuple(indices.shape)}")
    named = torch.zeros(*indices.shape[:2], seq_len_kv, dtype=torch.bool, device=indices.device)
    return named.scatter_(-1, indices.long(), True).unsqueeze(1)


def _joined_bias(position_bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if position_bias is not None and position_bias.ndim != 4:
        raise NotPassedOn("position_bias", f"rank 4 is meant by the attention, not {tuple(position_bias.shape)}")
    if position_bias is None or mask is None:
        return mask if position_bias is None else position_bias
    return position_bias + mask


def _one_sink(num_heads: int, s_aux: Tensor | None, sinks: Tensor | None) -> Tensor | None:
    if s_aux is not None and sinks is not None:
        raise NotPassedOn("sinks", "given as s_aux too")
    keyword, given = ("sinks", sinks) if s_aux is None else ("s_aux", s_aux)
    if given is not None and tuple(given.shape) != (num_heads,):
        raise NotPassedOn(keyword, f"one logit for each of {num_heads} heads, not {tuple(given.shape)}")
    return given
