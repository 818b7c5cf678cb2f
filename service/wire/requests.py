"""From tensors and options, however they came, to a checked problem; every fault of both in one refusal."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from attn_core.errors import MAX_FAULTS, Fault, InvalidProblem
from attn_core.problem import TENSOR_NAMES, AttentionOptions, AttentionProblem, TensorSpec, WeightedSumProblem
from attn_core.validate import (
    find_faults,
    find_value_faults,
    find_weighted_sum_faults,
    known_lengths,
    spec_of,
)
from service.wire.arrays import Limits
from service.wire.json_arrays import NUMBER_TENSORS, Encoding, Names
from service.wire.options import EXPECTED, AttentionCallOptions, CallOptions, read_options, unknown_fault

Problem = AttentionProblem | WeightedSumProblem

WEIGHTED_SUM_NAMES: tuple[str, ...] = ("weights", "value")
VALUED_TENSORS = frozenset({"bias", "key_lengths", "query_lengths", "query_offset", "alibi_slopes", "sinks"})
"""Tensors whose numbers are checked, not only their shapes."""


@dataclass(frozen=True, slots=True)
class Call:
    """What one endpoint takes."""

    tensors: tuple[str, ...]
    options: type[CallOptions]

    @property
    def option_names(self) -> tuple[str, ...]:
        fields = self.options.model_fields
        return tuple(name for name in EXPECTED if name in fields)

    @property
    def names(self) -> Names:
        return Names(self.tensors, self.option_names)


ATTENTION = Call(TENSOR_NAMES, AttentionCallOptions)
WEIGHTED_SUM = Call(WEIGHTED_SUM_NAMES, CallOptions)


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
    query_came_as_list: bool = False


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """A checked problem, and how its caller wants to be answered."""

    problem: Problem
    encoding: Encoding
    timeout_s: float | None


def assemble(call: Call, parts: Parts, limits: ReadLimits, *, answer_is_json: bool) -> DecodedRequest:
    """Check everything and build the problem. Raises: InvalidProblem with every fault, in the contract's order."""
    options, option_faults, broken_options = read_options(call.options, parts.options)
    faults = parts.faults + option_faults
    broken = parts.broken | broken_options
    specs = parts.specs | {name: spec_of(tensor) for name, tensor in parts.tensors.items() if name not in parts.specs}
    specs = {name: specs[name] for name in call.tensors if name in specs}
    core = options.to_core() if isinstance(options, AttentionCallOptions) else None
    if core is None:
        faults += find_weighted_sum_faults(specs, broken=broken)
    else:
        faults += find_faults(specs, core, broken=broken)
        faults += _value_faults(parts, specs, core, broken)
    known = (*call.tensors, *call.option_names)
    strangers = itertools.islice(parts.unknown.items(), MAX_FAULTS)
    faults += [unknown_fault(name, value, known) for name, value in strangers]
    faults += _idle_options(options, parts, limits, answer_is_json=answer_is_json)
    if faults:
        raise InvalidProblem(_in_order(faults, known))
    encoding: Encoding = options.encoding or ("list" if parts.query_came_as_list else "base64")
    problem: Problem = (
        WeightedSumProblem(**parts.tensors) if core is None else AttentionProblem(**parts.tensors, options=core)
    )
    timeout_s = None if options.timeout_ms is None else options.timeout_ms / 1e3
    return DecodedRequest(problem=problem, encoding=encoding, timeout_s=timeout_s)


def _value_faults(
    parts: Parts, specs: Mapping[str, TensorSpec], core: AttentionOptions, broken: Container[str]
) -> list[Fault]:
    """Faults in the numbers, beside faults in the shapes too: whatever can be compared is compared."""
    if VALUED_TENSORS.isdisjoint(parts.tensors):
        return []
    seq_len_q, seq_len_kv = known_lengths(specs, core, broken=broken)
    tensors = {
        name: tensor
        for name, tensor in parts.tensors.items()
        if name not in VALUED_TENSORS or tensor.is_floating_point() == (name in NUMBER_TENSORS)
    }
    return find_value_faults(tensors, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv)


def _idle_options(options: CallOptions, parts: Parts, limits: ReadLimits, *, answer_is_json: bool) -> list[Fault]:
    """Faults of options that are readable and say nothing to this call, or ask for too much."""
    faults = []
    if options.dtype is not None and not parts.lists:
        expected = "a tensor that comes as a list, whose numbers it rounds"
        faults.append(Fault("dtype", expected, "none, and " + options.dtype))
    if options.encoding is not None and not answer_is_json:
        expected = "an answer in JSON, whose tensors it writes"
        faults.append(Fault("encoding", expected, options.encoding + " for an answer in safetensors"))
    if options.timeout_ms is not None and options.timeout_ms > limits.max_timeout_s * 1e3:
        expected = f"at most {limits.max_timeout_s * 1e3:g} milliseconds, the server's limit"
        faults.append(Fault("timeout_ms", expected, f"{options.timeout_ms:g}"))
    return faults


def _in_order(faults: list[Fault], known: tuple[str, ...]) -> list[Fault]:
    place = {name: index for index, name in enumerate(known)}
    ordered = sorted(faults, key=lambda fault: place.get(fault.field.split(".")[0], len(place)))
    return list(dict.fromkeys(ordered))
