"""Whether the gradients of an attention can be computed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from attn_core.errors import Fault, names_text, shape_text
from attn_core.numerics import compute_dtype
from attn_core.problem import (
    FLOAT_DTYPES,
    GRADIENT_OUTPUTS,
    PAIR_GRADIENTS,
    TENSOR_NAMES,
    AttentionOptions,
    TensorSpec,
)
from attn_core.validate.attention import dtype_text, find_faults

GRADIENT_PATHS: tuple[str, ...] = ("blocked", "manual")
_OTHER_PATHS: tuple[str, ...] = ("fused",)
_SOURCES = {"grad_key": "key", "grad_value": "value", "grad_bias": "bias", "grad_sinks": "sinks"}


def find_gradients_faults(
    specs: Mapping[str, TensorSpec],
    options: AttentionOptions,
    outputs: Sequence[str] | None,
    *,
    broken: Container[str] = (),
) -> list[Fault]:
    """Every fault of a ``GradientsProblem``; ``broken`` as in ``find_faults``.

    ``options.outputs`` says nothing; ``outputs`` are the asked gradients, None for every one that is defined.
    """
    attention = {name: spec for name, spec in specs.items() if name in TENSOR_NAMES}
    neutral = replace(options, outputs=("context",), select_heads=None, select_rows=None, top_k=None, path=None)
    faults = find_faults(attention, neutral, broken=broken)
    _check_grads(specs, options, broken, faults)
    _check_select(options, faults)
    if options.path is not None:
        _check_path(options.path, () if outputs is None else outputs, broken, faults)
    if outputs is not None and "outputs" not in broken:
        _check_outputs(outputs, specs, broken, faults)
    return faults


def why_not_gradients(path: str, outputs: Sequence[str]) -> str | None:
    """Why a path cannot give these gradients, in a few words; None if it can."""
    if path not in GRADIENT_PATHS:
        return "gradients asked for"
    pairs = [name for name in outputs if name in PAIR_GRADIENTS]
    return f"{pairs[0]} asked for" if pairs and path != "manual" else None


def gradients_path_expectation(reason: str, outputs: Sequence[str]) -> str:
    """What a refusal of an asked path names instead."""
    others = [path for path in GRADIENT_PATHS if why_not_gradients(path, outputs) is None]
    return f"{names_text(others)}, or nothing, since {reason}"


def _check_grads(
    specs: Mapping[str, TensorSpec], options: AttentionOptions, broken: Container[str], faults: list[Fault]
) -> None:
    names = ("grad_context", "grad_logsumexp")
    if not any(name in specs or name in broken for name in names):
        faults.append(Fault("grad_context", "a tensor, or grad_logsumexp, or both", "nothing"))
    query, shapes = specs.get("query"), _result_shapes(specs, options)
    for name in names:
        spec = specs.get(name)
        if spec is None:
            continue
        received = dtype_text(spec.dtype)
        if spec.dtype not in FLOAT_DTYPES:
            faults.append(Fault(name, names_text([dtype_text(dtype) for dtype in FLOAT_DTYPES]), received))
        elif query is not None and query.dtype in FLOAT_DTYPES:
            own = dtype_text(query.dtype)
            if name == "grad_context" and spec.dtype != query.dtype:
                faults.append(Fault(name, f"{own}, as query has", received))
            elif name == "grad_logsumexp" and spec.dtype not in (query.dtype, compute_dtype(query.dtype)):
                exact = dtype_text(compute_dtype(query.dtype))
                either = f"{exact}, as logsumexp has" + (f", or {own}, as query has" if own != exact else "")
                faults.append(Fault(name, either, received))
        wanted = shapes.get(name)
        if wanted is not None and spec.shape != wanted:
            of = name.removeprefix("grad_")
            faults.append(Fault(name, f"{shape_text(wanted)}, the shape of {of}", shape_text(spec.shape)))


def _result_shapes(specs: Mapping[str, TensorSpec], options: AttentionOptions) -> dict[str, tuple[int, ...]]:
    """The shapes of context and logsumexp in the caller's form, as far as query and value tell them."""
    query, value = specs.get("query"), specs.get("value")
    if query is None or (value is None and "key" in specs):
        return {}
    value = query if value is None else value
    heads = options.num_heads
    kv_heads = heads if value is query or options.num_kv_heads is None else options.num_kv_heads
    rank = len(query.shape)
    match options.layout:
        case "bhtd" if rank in (2, 3, 4) and len(value.shape) == rank:
            return {
                "grad_context": (*query.shape[:-1], value.shape[-1]),
                "grad_logsumexp": query.shape[:-1],
            }
        case "bthd" if rank == 4 and len(value.shape) == rank:
            batch, tokens, own, _ = query.shape
            return {
                "grad_context": (batch, tokens, own, value.shape[-1]),
                "grad_logsumexp": (batch, own, tokens),
            }
        case "btd" if rank == 3 and len(value.shape) == rank and heads and kv_heads and heads > 0 and kv_heads > 0:
            batch, tokens, _ = query.shape
            return {
                "grad_context": (batch, tokens, value.shape[2] // kv_heads * heads),
                "grad_logsumexp": (batch, heads, tokens),
            }
    return {}


def _check_select(options: AttentionOptions, faults: list[Fault]) -> None:
    for name, given in (
        ("select.heads", options.select_heads),
        ("select.rows", options.select_rows),
        ("select.top_k", options.top_k),
    ):
        if given is not None:
            received = str(given) if isinstance(given, int) else shape_text(given)
            faults.append(Fault(name, "nothing, as gradients are given whole", received))


def _check_path(path: str, outputs: Sequence[str], broken: Container[str], faults: list[Fault]) -> None:
    if path not in (*_OTHER_PATHS, *GRADIENT_PATHS):
        faults.append(Fault("path", names_text(GRADIENT_PATHS), path))
        return
    asked = () if "outputs" in broken else outputs
    reason = why_not_gradients(path, asked)
    if reason is not None:
        faults.append(Fault("path", gradients_path_expectation(reason, asked), path))


def _check_outputs(
    outputs: Sequence[str], specs: Mapping[str, TensorSpec], broken: Container[str], faults: list[Fault]
) -> None:
    if not outputs:
        faults.append(Fault("outputs", "at least one name", "[]"))
    is_self_attention = not any(name in specs or name in broken for name in ("key", "value"))
    for index, name in enumerate(outputs[: 2 * len(GRADIENT_OUTPUTS)]):
        field = f"outputs.{index}"
        source = _SOURCES.get(name)
        if name not in GRADIENT_OUTPUTS:
            faults.append(Fault(field, names_text(GRADIENT_OUTPUTS), str(name)))
        elif name in outputs[:index]:
            faults.append(Fault(field, "each name once", name))
        elif source in ("key", "value") and is_self_attention:
            expected = "grad_query, which is the sum of all three uses where key and value are left out"
            faults.append(Fault(field, expected, name))
        elif source is not None and source not in specs and source not in broken:
            faults.append(Fault(field, f"a gradient of what is given, which {source} is not", name))
