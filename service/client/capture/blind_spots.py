"""What a model has that a capture cannot see: told from its modules and their classes' code, without running it."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

GENERAL = (
    "calls in regions that torch.compile has turned into code of their own",
    "flex_attention, varlen_attn and kernels of other libraries (flash_attn, xformers)",
    "attention written out as products and softmax (in transformers: attn_implementation='eager'; 'sdpa' is seen)",
    "nn.MultiheadAttention with need_weights=True inside TorchScript, or multi_head_attention_forward imported by name",
    "nested tensors given to scaled_dot_product_attention, jagged or not, and torch.func.vmap",
)
_KERNELS = {
    "flex_attention": "flex_attention",
    "varlen_attn": "torch's varlen_attn",
    "flash_attn_func": "flash_attn",
    "flash_attn_qkvpacked_func": "flash_attn",
    "flash_attn_varlen_func": "flash_attn",
    "flash_attn_with_kvcache": "flash_attn",
    "memory_efficient_attention": "xformers",
}


def blind_spots(model: nn.Module) -> tuple[str, ...]:
    """One text for each kind of thing in the model that hides attentions, or may hide some."""
    modules = dict(model.named_modules())
    found = []
    compiled = [name for name, module in modules.items() if _is_compiled(module)]
    if compiled:
        found.append(f"calls inside {_names(compiled)}, compiled by torch.compile, unless its backend is 'eager'")
    scripted = [name for name, module in modules.items() if getattr(module, "original_name", "") in _BY_HAND]
    if scripted:
        found.append(
            f"calls of {_names(scripted)} in TorchScript, where weights are asked for or the fast path is taken"
        )
    by_kernel: dict[str, list[str]] = {}
    for name, module in modules.items():
        for kernel in sorted(_kernels_of(type(module))):
            by_kernel.setdefault(kernel, []).append(name)
    found += [f"calls of {kernel}, which the code of {_names(names)} names" for kernel, names in by_kernel.items()]
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(implementation, str) and implementation != "sdpa":
        found.append(f"attention by attn_implementation={implementation!r}; with 'sdpa' it is seen")
    return tuple(found)


_BY_HAND = ("MultiheadAttention", "TransformerEncoderLayer")


def _is_compiled(module: nn.Module) -> bool:
    if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
        return True
    return hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")


def _kernels_of(kind: type[nn.Module]) -> set[str]:
    """The kernels that the methods of a class name, or functions of their modules that they name."""
    found: set[str] = set()
    looked_at: set[FunctionType] = set()
    # What torch itself wrote calls none of them.
    own = [base for base in kind.__mro__ if not base.__module__.startswith("torch.") and base is not object]
    waiting = [member for base in own for member in vars(base).values() if isinstance(member, FunctionType)]
    while waiting:
        function = waiting.pop()
        if function in looked_at:
            continue
        looked_at.add(function)
        for name in _global_names(function.__code__):
            if name in _KERNELS:
                found.add(_KERNELS[name])
            value = _uncompiled(function.__globals__.get(name))
            if not isinstance(value, FunctionType):
                continue
            if value.__name__ in _KERNELS:
                found.add(_KERNELS[value.__name__])
            elif value.__globals__ is function.__globals__:
                waiting.append(value)
    return found


def _uncompiled(value: Any) -> Any:
    try:
        return getattr(value, "_torchdynamo_orig_callable", value)
    except Exception:
        # Somebody's lazy object: nothing is known of it, and nothing is to happen to it.
        return value


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _names(names: list[str]) -> str:
    shown = ", ".join(repr(name) if name else "the model itself" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
