"""From tensors and options, however they came, to a checked problem; every fault of both in one refusal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attn_core.errors import MAX_FAULTS, Fault, InvalidProblem, shape_text
from attn_core.problem import (
    GRADIENTS_TENSOR_NAMES,
    LAYER_GRADIENTS_TENSOR_NAMES,
    LAYER_TENSOR_NAMES,
    PARAMETER_NAMES,
    TENSOR_NAMES,
    AttentionProblem,
    GradientsProblem,
    LayerGradientsProblem,
    LayerParameters,
    LayerProblem,
    Problem,
    TensorSpec,
    WeightedSumProblem,
)
from attn_core.validate import (
    dtype_text,
    faults_where,
    find_faults,
    find_gradients_faults,
    find_layer_faults,
    find_layer_gradients_faults,
    find_value_faults,
    find_weighted_sum_faults,
    known_lengths,
    layer_lengths,
    spec_of,
)
from attn_core.validate.layer import find_parameters_faults
from service.wire.arrays import Limits
from service.wire.json_arrays import NUMBER_TENSORS, Encoding, Names
from service.wire.options import (
    EXPECTED,
    AttentionCallOptions,
    CallOptions,
    GradientsCallOptions,
    LayerCallOptions,
    LayerGradientsCallOptions,
    NamedLayerCallOptions,
    NamedLayerGradientsCallOptions,
    Options,
    ParametersOptions,
    read_options,
    unknown_fault,
)
from service.wire.text import short

WEIGHTED_SUM_NAMES: tuple[str, ...] = ("weights", "value")
VALUED_TENSORS = frozenset({"bias", "key_lengths", "query_lengths", "query_offset", "alibi_slopes", "sinks"})
"""Tensors whose numbers are checked, not only their shapes."""
READING_OPTIONS: tuple[str, ...] = ("num_heads", "num_kv_heads", "weight_layout")
"""How a layer's weights are to be read: options that a stored layer brings with it."""

Specs = Mapping[str, TensorSpec]
Broken = Container[str]
Lengths = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The members that a body may have. ``refused`` says of others, known elsewhere, why they mean nothing here."""

    tensors: tuple[str, ...]
    options: type[Options]
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def option_names(self) -> tuple[str, ...]:
        fields = self.options.model_fields
        return tuple(name for name in EXPECTED if name in fields)

    @property
    def names(self) -> Names:
        return Names(self.tensors, self.option_names)

    def fault_of_stranger(self, name: str, value: Any) -> Fault:
        if name in self.refused:
            return Fault(name, self.refused[name], short(value))
        return unknown_fault(name, value, (*self.tensors, *self.option_names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Form):
    """What one endpoint takes, how that is checked, and the problem that it states.

    ``find_faults``, ``find_lengths`` (seq_len_q and seq_len_kv, as far as they can be told) and ``build`` are given
    the tensors, or what is known of them, and the options as ``options`` read them.
    """

    options: type[CallOptions]
    find_faults: Callable[[Specs, Any, Broken], list[Fault]]
    find_lengths: Callable[[Specs, Any, Broken], Lengths]
    build: Callable[[Mapping[str, Tensor], Any], Problem]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCall(Form):
    """What an endpoint of a stored layer takes; with the layer's own tensors and options it is the call ``whole``."""

    options: type[CallOptions]
    whole: Call


def _attention_faults(specs: Specs, options: AttentionCallOptions, broken: Broken) -> list[Fault]:
    return find_faults(specs, options.to_core(), broken=broken)


def _attention_lengths(specs: Specs, options: AttentionCallOptions | GradientsCallOptions, broken: Broken) -> Lengths:
    return known_lengths(specs, options.to_core(), broken=broken)


def _attention(tensors: Mapping[str, Tensor], options: AttentionCallOptions) -> AttentionProblem:
    return AttentionProblem(**tensors, options=options.to_core())


def _weighted_sum_faults(specs: Specs, options: CallOptions, broken: Broken) -> list[Fault]:
    return find_weighted_sum_faults(specs, broken=broken)


def _weighted_sum_lengths(specs: Specs, options: CallOptions, broken: Broken) -> Lengths:
    return None, None


def _weighted_sum(tensors: Mapping[str, Tensor], options: CallOptions) -> WeightedSumProblem:
    return WeightedSumProblem(**tensors)


def _gradients_faults(specs: Specs, options: GradientsCallOptions, broken: Broken) -> list[Fault]:
    return find_gradients_faults(specs, options.to_core(), options.outputs, broken=broken)


def _gradients(tensors: Mapping[str, Tensor], options: GradientsCallOptions) -> GradientsProblem:
    inside = {name: tensor for name, tensor in tensors.items() if name in TENSOR_NAMES}
    return GradientsProblem(
        AttentionProblem(**inside, options=options.to_core()),
        grad_context=tensors.get("grad_context"),
        grad_logsumexp=tensors.get("grad_logsumexp"),
        outputs=_asked(options.outputs),
    )


def _layer_faults(specs: Specs, options: LayerCallOptions, broken: Broken) -> list[Fault]:
    return find_layer_faults(specs, options.to_core(), broken=broken)


def _layer_lengths(specs: Specs, options: CallOptions, broken: Broken) -> Lengths:
    return layer_lengths(specs)


def _layer(tensors: Mapping[str, Tensor], options: LayerCallOptions) -> LayerProblem:
    return LayerProblem(**tensors, options=options.to_core())


def _layer_gradients_faults(specs: Specs, options: LayerGradientsCallOptions, broken: Broken) -> list[Fault]:
    return find_layer_gradients_faults(specs, options.to_core(), options.outputs, broken=broken)


def _layer_gradients(tensors: Mapping[str, Tensor], options: LayerGradientsCallOptions) -> LayerGradientsProblem:
    inside = {name: tensor for name, tensor in tensors.items() if name in LAYER_TENSOR_NAMES}
    layer = LayerProblem(**inside, options=options.to_core())
    return LayerGradientsProblem(layer, tensors["grad_output"], outputs=_asked(options.outputs))


def _asked(outputs: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if outputs is None else tuple(outputs)


_NO_SELECT = {"select": "nothing, since a gradient is always whole"}
_NO_LAYOUT = {"layout": "nothing, since input and memory are always [B,T,E] and [B,S,M]"}
_STORED = dict.fromkeys((*PARAMETER_NAMES, *READING_OPTIONS), "nothing, since the stored layer has its own")

ATTENTION = Call(
    tensors=TENSOR_NAMES,
    options=AttentionCallOptions,
    find_faults=_attention_faults,
    find_lengths=_attention_lengths,
    build=_attention,
)
WEIGHTED_SUM = Call(
    tensors=WEIGHTED_SUM_NAMES,
    options=CallOptions,
    find_faults=_weighted_sum_faults,
    find_lengths=_weighted_sum_lengths,
    build=_weighted_sum,
)
GRADIENTS = Call(
    tensors=GRADIENTS_TENSOR_NAMES,
    options=GradientsCallOptions,
    refused=_NO_SELECT,
    find_faults=_gradients_faults,
    find_lengths=_attention_lengths,
    build=_gradients,
)
LAYER = Call(
    tensors=LAYER_TENSOR_NAMES,
    options=LayerCallOptions,
    refused=_NO_LAYOUT,
    find_faults=_layer_faults,
    find_lengths=_layer_lengths,
    build=_layer,
)
LAYER_GRADIENTS = Call(
    tensors=LAYER_GRADIENTS_TENSOR_NAMES,
    options=LayerGradientsCallOptions,
    refused=_NO_LAYOUT | _NO_SELECT,
    find_faults=_layer_gradients_faults,
    find_lengths=_layer_lengths,
    build=_layer_gradients,
)
NAMED_LAYER = NamedCall(
    tensors=tuple(name for name in LAYER.tensors if name not in PARAMETER_NAMES),
    options=NamedLayerCallOptions,
    refused=_NO_LAYOUT | _STORED,
    whole=LAYER,
)
NAMED_LAYER_GRADIENTS = NamedCall(
    tensors=tuple(name for name in LAYER_GRADIENTS.tensors if name not in PARAMETER_NAMES),
    options=NamedLayerGradientsCallOptions,
    refused=_NO_LAYOUT | _NO_SELECT | _STORED,
    whole=LAYER_GRADIENTS,
)
LAYER_PARAMETERS = Form(tensors=PARAMETER_NAMES, options=ParametersOptions)
"""A layer that is to be kept: it states no problem, see ``assemble_parameters``."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What a request may hold and ask for."""

    tensors: Limits = field(default_factory=Limits)
    max_timeout_s: float = 600.0


@dataclass(slots=True)
class Parts:
    """A body taken apart: tensors that could be read, options as they came, and what was wrong so far.

    ``broken`` names the tensors that were there and could not be read; ``lists`` those that came as nested lists of
    numbers; ``unknown`` every other member.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    lists: set[str] = field(default_factory=set)
    first_came_as_list: bool = False


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """A checked problem, and how its caller wants to be answered."""

    problem: Problem
    encoding: Encoding
    timeout_s: float | None


def assemble(
    call: Call | NamedCall,
    parts: Parts,
    limits: ReadLimits,
    *,
    answer_is_json: bool,
    stored: LayerParameters | None = None,
) -> DecodedRequest:
    """Check everything and build the problem; ``stored`` is the layer of a named call.

    Raises: InvalidProblem with every fault, in the contract's order.
    """
    strangers = _strangers(call, parts)
    if isinstance(call, NamedCall):
        assert stored is not None
        whole, found = call.whole, _with_stored(parts, stored)
    else:
        whole, found = call, parts
    options, option_faults, broken_options = read_options(whole.options, found.options)
    broken = parts.broken | broken_options
    specs = _specs(whole, found)
    problem_faults = whole.find_faults(specs, options, broken)
    if stored is not None:
        problem_faults = _of_what_was_sent(problem_faults, specs, stored, broken)
    faults = parts.faults + option_faults + problem_faults
    if not VALUED_TENSORS.isdisjoint(parts.tensors):
        faults += _value_faults(found.tensors, whole.find_lengths(specs, options, broken))
    faults += strangers
    faults += _idle_options(options, parts, limits, answer_is_json=answer_is_json)
    if faults:
        raise InvalidProblem(_in_order(faults, whole))
    return DecodedRequest(
        problem=whole.build(found.tensors, options),
        encoding=options.encoding or ("list" if parts.first_came_as_list else "base64"),
        timeout_s=None if options.timeout_ms is None else options.timeout_ms / 1e3,
    )


def assemble_parameters(parts: Parts) -> LayerParameters:
    """A layer that is to be kept, checked by itself; its tensors are those of ``parts``.

    Raises: InvalidProblem with every fault, numbers that are not finite among them.
    """
    form = LAYER_PARAMETERS
    options, faults, broken_options = read_options(ParametersOptions, parts.options)
    faults = parts.faults + faults
    faults += find_parameters_faults(
        _specs(form, parts),
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        weight_layout=options.weight_layout,
        broken=parts.broken | broken_options,
    )
    for name, tensor in parts.tensors.items():
        faults += _nonfinite_faults(name, tensor)
    faults += _strangers(form, parts)
    faults += _idle_dtype(options.dtype, parts)
    if faults:
        raise InvalidProblem(_in_order(faults, form))
    assert options.num_heads is not None and options.weight_layout is not None
    return LayerParameters(
        weights={name: parts.tensors[name] for name in PARAMETER_NAMES if name in parts.tensors},
        weight_layout=options.weight_layout,
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
    )


def _with_stored(parts: Parts, stored: LayerParameters) -> Parts:
    """What the caller sent and what the layer has, as one."""
    own = {name: getattr(stored, name) for name in READING_OPTIONS}
    return replace(
        parts,
        tensors=parts.tensors | dict(stored.weights),
        options=parts.options | {name: value for name, value in own.items() if value is not None},
    )


def _of_what_was_sent(faults: list[Fault], specs: Specs, stored: LayerParameters, broken: Broken) -> list[Fault]:
    """A disagreement with a stored layer stands at what was sent: the layer by itself has no fault."""
    at_stored = [fault for fault in faults if fault.field.partition(".")[0] in _STORED]
    found = [fault for fault in faults if fault not in at_stored]
    for fault in _misfits(specs, stored, broken) if at_stored else []:
        if all(other.field != fault.field for other in found):
            found.append(fault)
    return found or at_stored


def _misfits(specs: Specs, stored: LayerParameters, broken: Broken) -> list[Fault]:
    """Where input and memory do not fit a stored layer."""
    faults = []
    reads = 0 if stored.weight_layout == "in_out" else 1
    for name, weight in (("input", stored.weights["w_query"]), ("memory", stored.weights["w_key"])):
        width, spec = weight.shape[reads], specs.get(name)
        if spec is None:
            continue
        if spec.dtype != weight.dtype:
            expected = f"{dtype_text(weight.dtype)}, as the stored layer has"
            faults.append(Fault(name, expected, dtype_text(spec.dtype)))
        if spec.shape[-1:] != (width,):
            faults.append(Fault(name, f"a last axis of {width}, as the stored layer takes", shape_text(spec.shape)))
    query_width, width = (stored.weights[name].shape[reads] for name in ("w_query", "w_key"))
    if "memory" not in specs and "memory" not in broken and width != query_width:
        faults.append(Fault("memory", f"a tensor with a last axis of {width}, as the stored layer takes", "nothing"))
    return faults


def _specs(form: Form, parts: Parts) -> dict[str, TensorSpec]:
    """What is known of the tensors, in the contract's order."""
    specs = parts.specs | {name: spec_of(tensor) for name, tensor in parts.tensors.items() if name not in parts.specs}
    return {name: specs[name] for name in form.tensors if name in specs}


def _strangers(form: Form, parts: Parts) -> list[Fault]:
    named = itertools.islice(parts.unknown.items(), MAX_FAULTS)
    return [form.fault_of_stranger(name, value) for name, value in named]


def _value_faults(tensors: Mapping[str, Tensor], lengths: Lengths) -> list[Fault]:
    """Faults in the numbers, beside faults in the shapes too: whatever can be compared is compared."""
    comparable = {
        name: tensor
        for name, tensor in tensors.items()
        if not tensor.is_meta and (name not in VALUED_TENSORS or tensor.is_floating_point() == (name in NUMBER_TENSORS))
    }
    seq_len_q, seq_len_kv = lengths
    return find_value_faults(comparable, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv)


def _nonfinite_faults(name: str, tensor: Tensor) -> list[Fault]:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return []
    # Nearly all are finite, and large: without a mark for each number.
    if all(math.isfinite(end.item()) for end in torch.aminmax(tensor)):
        return []
    return faults_where(name, tensor, lambda piece: ~torch.isfinite(piece), "a finite number")


def _idle_options(options: CallOptions, parts: Parts, limits: ReadLimits, *, answer_is_json: bool) -> list[Fault]:
    """Faults of options that are readable and say nothing to this call, or ask for too much."""
    faults = _idle_dtype(options.dtype, parts)
    if options.encoding is not None and not answer_is_json:
        expected = "an answer in JSON, whose tensors it writes"
        faults.append(Fault("encoding", expected, options.encoding + " for an answer in safetensors"))
    if options.timeout_ms is not None and options.timeout_ms > limits.max_timeout_s * 1e3:
        expected = f"at most {limits.max_timeout_s * 1e3:g} milliseconds, the server's limit"
        faults.append(Fault("timeout_ms", expected, f"{options.timeout_ms:g}"))
    return faults


def _idle_dtype(dtype: str | None, parts: Parts) -> list[Fault]:
    if dtype is None or parts.lists:
        return []
    return [Fault("dtype", "a tensor that comes as a list, whose numbers it rounds", "none, and " + dtype)]


def _in_order(faults: list[Fault], form: Form) -> list[Fault]:
    place = {name: index for index, name in enumerate((*form.tensors, *form.option_names))}
    ordered = sorted(faults, key=lambda fault: place.get(fault.field.split(".")[0], len(place)))
    return list(dict.fromkeys(ordered))
