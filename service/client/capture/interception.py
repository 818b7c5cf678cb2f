"""Where a model's attentions are seen: in torch's dispatcher, and in three functions that never call it.

Not by a function mode, by hooks on modules or by switching the fast path off: under each ``nn.TransformerEncoder``
takes another road, and with the first and the last other numbers come out (1e-6, and 3 where there is padding). Here
every road stays as it is: the original runs first, with what it was given, and its result goes back untouched.

``aten::scaled_dot_product_attention`` is made of other operators; a kernel of our own for the same operator calls that
composition and tells who listens. It is below autocast and above autograd, so the graph is the model's own. Everything
is put in place while somebody listens and taken back with the last, in whatever order captures end. With one exception:
torch frees a kernel that is taken back, even while another thread stands before it. Where other threads run, it stays
as a way through, of some microseconds, until a capture ends with nobody beside it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from service.client.capture.seen import SeenCall, why_unreadable

Listener = Callable[[SeenCall], None]

_BACKENDS = ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1")
_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default


class _OfThread(threading.local):
    """``is_silent``: what is called now is our own, or is told by whoever called it. ``caught``: the place for the
    arguments of an attention that is asked for its arguments alone."""

    is_silent = False
    caught: list[SeenCall] | None = None


_here = _OfThread()
_change = threading.Lock()
_listeners: tuple[Listener, ...] = ()
_library: torch.library.Library | None = None
_beneath: dict[str, Callable[..., Any]] = {}
"""What stood in the place of each function of ours when it was put there."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells ``listener`` of every attention in this process, on the thread that computes it, after it was computed."""
    _start(listener)
    try:
        yield
    finally:
        _stop(listener)


@contextmanager
def silently() -> Iterator[None]:
    """Nobody is told of the attentions that this thread computes inside."""
    before = _here.is_silent
    _here.is_silent = True
    try:
        yield
    finally:
        _here.is_silent = before


@contextmanager
def apart_from_the_model() -> Iterator[None]:
    """Nothing that is computed inside is seen by graphs, by modes that are entered around the model, or by us."""
    with silently(), torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


@contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Products keep their dtype inside, whatever the model is run under."""
    with ExitStack() as stack:
        for kind in sorted({"cpu", device_type}):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _start(listener: Listener) -> None:
    global _listeners, _library
    with _change:
        if not _listeners:
            if _library is None:
                _library = _registered()
            for name, (home, ours) in _PATCHES.items():
                # It is there still where somebody put his own on top of it, and took that away after we had gone.
                if getattr(home, name) is not ours:
                    _beneath[name] = getattr(home, name)
                    setattr(home, name, ours)
        _listeners = (*_listeners, listener)


def _stop(listener: Listener) -> None:
    global _listeners, _library
    with _change:
        _listeners = tuple(one for one in _listeners if one is not listener)
        if _listeners:
            return
        for name, (home, ours) in _PATCHES.items():
            # What somebody put on top of ours stays there, with ours beneath, which is a way through from now on.
            if getattr(home, name) is ours:
                setattr(home, name, _beneath[name])
        if _library is not None and _is_alone():
            _library._destroy()  # type: ignore[no-untyped-call]
            _library = None


def _registered() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for backend in _BACKENDS:
        # Without autograd above them in inference mode, with it otherwise.
        for key in (backend, f"Autograd{backend}"):
            library.impl(_OPERATOR, _scaled_dot_product_attention, key)  # type: ignore[no-untyped-call]
    return library


def _is_alone() -> bool:
    """Whether no other thread can be on its way into our kernel."""
    return threading.active_count() == 1


def _tell(seen: SeenCall) -> None:
    for listener in _listeners:
        listener(seen)


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if _here.caught is None:
        result: Tensor = _OPERATOR.decompose(*given, scale=scale, enable_gqa=enable_gqa)
        # Tensors of a compiler are no attention of a model; when it runs, its numbers come here, or not at all.
        if not _listeners or _here.is_silent or isinstance(query, FakeTensor | FunctionalTensor):
            return result
    else:
        result = value.new_zeros(*query.shape[:-1], value.shape[-1])
    seen = SeenCall(
        function="scaled_dot_product_attention",
        query=query,
        key=key,
        value=value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        unreadable=why_unreadable(query, key, value, attn_mask),
    )
    if _here.caught is None:
        _tell(seen)
    else:
        _here.caught.append(seen)
    return result


def _passes(name: str) -> Callable[..., Any] | None:
    """What a function of ours calls instead of looking, if it does: in the eyes of compilers it is not there at all."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return _beneath[name]
    # A mode around the model calls a function once more from within it; so does somebody's own on top of ours. torch's
    # own then, so that two that stand on each other come to an end.
    return _TORCHS_OWN[name] if _here.is_silent else None if _listeners else _beneath[name]


def _multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """In place of the function in torch.nn.functional: tells of the calls that compute weights by hand."""
    passed = _passes("multi_head_attention_forward")
    if passed is not None:
        return passed(*args, **kwargs)
    original = _beneath["multi_head_attention_forward"]
    try:
        bound = _SIGNATURE.bind(*args, **kwargs)
    except TypeError:
        # Either a fault, which the original names, or somebody's own function of more arguments.
        return original(*args, **kwargs)
    bound.apply_defaults()
    if not bound.arguments["need_weights"]:
        return original(*args, **kwargs)
    with silently():
        result = original(*args, **kwargs)
    _tell(_written_out(bound, result[1]))
    return result


def _written_out(bound: inspect.BoundArguments, weights: Tensor) -> SeenCall:
    """The attention inside a call that computed ``weights``: what the same call would ask the fused kernel for."""
    named = bound.arguments
    dropout_p = named["dropout_p"] if named["training"] else 0.0
    own = None if named["average_attn_weights"] or dropout_p > 0 else weights
    outer = SeenCall(
        function="multi_head_attention_forward",
        query=named["query"],
        key=named["key"],
        value=named["value"],
        dropout_p=dropout_p,
        owner=named["in_proj_weight"],
    )
    why = why_unreadable(outer.query, outer.key, outer.value)
    if why is not None:
        return replace(outer, unreadable=why)
    # The mask itself counts where weights are asked for; is_causal is only a hint about it.
    named.update(need_weights=False, training=False, dropout_p=0.0, is_causal=False)
    # Detached, so that autocast does not remember the weights it casts, without a graph, for the model's next call.
    for name, argument in named.items():
        if isinstance(argument, Tensor):
            named[name] = argument.detach()
    caught: list[SeenCall] = []
    try:
        with apart_from_the_model():
            _here.caught = caught
            try:
                _TORCHS_OWN["multi_head_attention_forward"](*bound.args, **bound.kwargs)
            finally:
                _here.caught = None
        (inner,) = caught
    except Exception as error:
        # It went well with weights: whatever fails here is a fault of this look, and not the model's.
        return replace(outer, unreadable=f"{type(error).__name__}: {error}")
    if own is not None:
        own = own.detach().view(*inner.query.shape[:3], inner.key.shape[2])
    return replace(inner, function=outer.function, dropout_p=dropout_p, own_weights=own, owner=outer.owner)


def _native_multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """In place of torch's: one kernel for projections and attention, the fast path of nn.MultiheadAttention."""
    return _looked_at("_native_multi_head_attention", _inside_attention, args, kwargs)


def _transformer_encoder_layer_fwd(*args: Any, **kwargs: Any) -> Any:
    """In place of torch's: one kernel for a whole layer, the fast path of nn.TransformerEncoderLayer."""
    return _looked_at("_transformer_encoder_layer_fwd", _inside_layer, args, kwargs)


def _looked_at(name: str, inside: Callable[..., SeenCall], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a fast path; tells what ``inside`` makes of its arguments, or that this failed."""
    passed = _passes(name)
    if passed is not None:
        return passed(*args, **kwargs)
    # On some devices it calls the operator that is listened to.
    with silently():
        result = _beneath[name](*args, **kwargs)
    if isinstance(args[0], FakeTensor | FunctionalTensor):
        return result
    try:
        with apart_from_the_model():
            seen = inside(result, *args, **kwargs)
    except Exception as error:
        # The model's own call went well: whatever fails here is a fault of this look.
        reason = f"{type(error).__name__}: {error}"
        seen = SeenCall(function=name, query=args[0], key=args[0], value=args[0], unreadable=reason)
    _tell(seen)
    return result


def _inside_attention(
    result: tuple[Tensor, Tensor | None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> SeenCall:
    seen = _packed("_native_multi_head_attention", query, num_head, qkv_weight, qkv_bias, mask, mask_type)
    is_own = need_weights and not average_attn_weights and not query.is_nested
    return replace(seen, own_weights=result[1] if is_own else None)


def _inside_layer(
    result: Tensor,
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> SeenCall:
    norm = (norm_weight_1, norm_bias_1, eps) if norm_first else None
    return _packed("_transformer_encoder_layer_fwd", src, num_heads, qkv_weight, qkv_bias, mask, mask_type, norm)


def _packed(
    function: str,
    tokens: Tensor,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    mask: Tensor | None,
    mask_type: int | None,
    norm: tuple[Tensor, Tensor, float] | None = None,
) -> SeenCall:
    """The attention that a fast path computes of ``tokens`` [batch, seq_len, width], a nested batch of them too."""
    lengths = None
    if tokens.is_nested:
        lengths = tokens._nested_tensor_size()[:, 0].to(tokens.device)
        tokens = torch.nested.to_padded_tensor(tokens, 0.0)
    why = why_unreadable(tokens, qkv_weight, mask)
    if why is not None:
        return SeenCall(function=function, query=tokens, key=tokens, value=tokens, owner=qkv_weight, unreadable=why)
    normed = tokens
    if norm is not None:
        weight, bias, eps = norm
        normed = torch.nn.functional.layer_norm(tokens, (tokens.shape[-1],), weight, bias, eps)
    batch, seq_len, _ = tokens.shape
    joined = torch.nn.functional.linear(normed, qkv_weight, qkv_bias)
    query, key, value = joined.view(batch, seq_len, 3, num_heads, -1).permute(2, 0, 3, 1, 4).unbind()
    allow_mask = None
    if mask is not None:
        # These kernels read what is not 0 as blocked; of padding [batch, seq_len] (type 1), or of pairs.
        allow_mask = ~mask.to(torch.bool)
        allow_mask = allow_mask.view(batch, 1, 1, seq_len) if mask_type == 1 else allow_mask
    return SeenCall(
        function=function,
        query=query,
        key=key,
        value=value,
        attn_mask=allow_mask,
        lengths=lengths,
        owner=qkv_weight,
    )


_PATCHES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "multi_head_attention_forward": (torch.nn.functional, _multi_head_attention_forward),
    "_native_multi_head_attention": (torch, _native_multi_head_attention),
    "_transformer_encoder_layer_fwd": (torch, _transformer_encoder_layer_fwd),
}
_TORCHS_OWN = {name: getattr(home, name) for name, (home, _) in _PATCHES.items()}
_SIGNATURE = inspect.signature(_TORCHS_OWN["multi_head_attention_forward"])


def _is_torchs_own_to_scripts() -> None:
    """TorchScript, which reads the functions that it finds, takes ours for those in whose place they stand."""
    for name, (_, ours) in _PATCHES.items():
        if isinstance(_TORCHS_OWN[name], FunctionType):
            vars(ours).update(__script_if_tracing_wrapper=True, __original_fn=_TORCHS_OWN[name])
            ours.__name__ = name
        else:
            torch.jit._builtins._register_builtin(ours, f"aten::{name}")


_is_torchs_own_to_scripts()
