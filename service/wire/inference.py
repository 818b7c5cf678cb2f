"""A request of the Open Inference Protocol between its bytes and the problem that it states, over REST and gRPC alike.

A reader of either form takes the bytes apart into an ``InferenceRequest``; ``check`` compares that with its model and
makes the problem, or names every fault. How an answer is written is up to the form again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_core.errors import MAX_FAULTS, Fault, InvalidProblem, names_text, shape_text
from attn_core.problem import Problem
from service.wire.arrays import MAX_RANK, FlatTensor, Limits, shape_faults
from service.wire.inference_models import DATATYPES, Model, ModelTensor
from service.wire.inference_request import (
    InferenceInput,
    InferenceRequest,
    MemoryPlace,
    ParameterValue,
    RequestedOutput,
)
from service.wire.requests import VALUED_TENSORS, Parts, ReadLimits, assemble
from service.wire.tensors import bool_fault, tensor_of, view_bytes
from service.wire.text import short, short_name

__all__ = [
    "CheckedInference",
    "InferenceInput",
    "InferenceRequest",
    "MemoryPlace",
    "ParameterValue",
    "RequestedOutput",
    "check",
    "response_parameters",
]

PARAMETER_OPTIONS: tuple[str, ...] = (
    "causal",
    "scale",
    "softcap",
    "window_left",
    "window_right",
    "layout",
    "num_heads",
    "num_kv_heads",
    "weight_layout",
    "empty_rows",
    "path",
    "verify",
    "dropout_p",
    "timeout_ms",
)
"""Options that ride in a request's parameters, under these names."""
_SAID_OTHERWISE = {
    "window": "window_left and window_right",
    "outputs": "the request's own outputs",
    "select": "nothing: selected rows and heads are not served by this protocol",
    "encoding": "binary_data of each output",
    "dtype": "the model's name, which says the datatype",
}
"""Options of the native interface that mean something, so that nobody who sends them is left without them unawares."""
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
RESERVED_PREFIX = "triton_"
FINAL_RESPONSE_ASKED = "triton_enable_empty_final_response"
MAX_TIMEOUT_US = 2**63 - 1
_MAX_NAMED = 20


@dataclass(frozen=True, slots=True)
class CheckedInference:
    """A problem, and how its caller wants to be answered. ``ignored`` names the parameters that say nothing here."""

    model: Model
    id: str | None
    problem: Problem
    outputs: tuple[RequestedOutput, ...]
    timeout_s: float | None
    queue_timeout_s: float | None
    ignored: tuple[str, ...]


def check(
    request: InferenceRequest, model: Model, limits: ReadLimits, *, takes_reserved: bool = False
) -> CheckedInference:
    """A request for ``model`` as a checked problem.

    Places in shared memory have been resolved to buffers. ``takes_reserved``: the door knows parameters that begin
    with ``triton_``. Raises: InvalidProblem with every fault.
    """
    parts = Parts(faults=list(request.faults))
    outputs = _read_outputs(request, model, parts)
    queue_timeout_s, ignored = _read_parameters(request.parameters, model, parts, takes_reserved=takes_reserved)
    _read_inputs(request.inputs, model, limits.tensors, parts)
    parts.options["outputs"] = [output.name for output in outputs] or [model.output_names[0]]
    own = tuple(parts.faults)
    try:
        decoded = assemble(model.call, parts, limits, answer_is_json=False, stored=model.stored)
    except InvalidProblem as error:
        found = [fault if fault in own else _in_our_words(fault, request, outputs) for fault in error.faults]
        raise InvalidProblem(found) from None
    return CheckedInference(
        model=model,
        id=request.id,
        problem=decoded.problem,
        outputs=outputs,
        timeout_s=decoded.timeout_s,
        queue_timeout_s=queue_timeout_s,
        ignored=ignored,
    )


def check_places(request: InferenceRequest, model: Model) -> None:
    """Check what is said of places in shared memory, before any is read. Raises: InvalidProblem."""
    faults: list[Fault] = []
    seen: set[str] = set()
    for given in request.inputs:
        if not isinstance(given.content, MemoryPlace) or len(faults) >= MAX_FAULTS:
            continue
        name, tensor = short_name(given.name), model.input(given.name)
        if tensor is None or given.name in seen:
            faults.append(Fault("inputs", f"each input of {model.name} once, and no other", short(given.name)))
            continue
        seen.add(given.name)
        if len(given.shape) > MAX_RANK or any(axis < 0 for axis in given.shape):
            faults.append(Fault(f"{name}.shape", f"at most {MAX_RANK} axes of 0 or more", short(list(given.shape))))
            continue
        needed = math.prod(given.shape) * tensor.datatype.itemsize
        if given.content.byte_size != needed:
            expected = f"{needed} bytes for {tensor.datatype.name} {shape_text(given.shape)}"
            faults.append(Fault(f"{name}.data", expected, f"{given.content.byte_size} bytes"))
    faults += _overlaps([output for output in request.outputs if output.place is not None])
    if faults:
        raise InvalidProblem(faults)


def _overlaps(outputs: Sequence[RequestedOutput]) -> list[Fault]:
    """A fault for each output whose place another one would be written over."""
    faults = []
    for index, output in enumerate(outputs[:MAX_FAULTS]):
        for other in outputs[:index]:
            assert output.place is not None and other.place is not None
            begin = max(output.place.offset, other.place.offset)
            end = min(output.place.offset + output.place.byte_size, other.place.offset + other.place.byte_size)
            if output.place.region == other.place.region and begin < end:
                expected = f"a place of its own in region {short_name(output.place.region)}"
                faults.append(Fault(f"outputs.{short_name(output.name)}", expected, f"one that {other.name} has too"))
    return faults


def response_parameters(info: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, ParameterValue]:
    """What the answer says in its parameters: each field of ``info`` under its own name, and what was ignored."""
    return dict(info) | ({"ignored": ", ".join(ignored)} if ignored else {})


def _in_our_words(fault: Fault, request: InferenceRequest, outputs: Sequence[RequestedOutput]) -> Fault:
    """A window's sides are parameters of their own here, and an output's place is that among all that were asked."""
    option, _, part = fault.field.partition(".")
    if option == "window" and part:
        return Fault(f"window_{part}", fault.expected, fault.received)
    if option == "outputs" and part.isdigit() and int(part) < len(outputs) and request.outputs:
        asked = [output.name for output in request.outputs]
        return Fault(f"outputs.{asked.index(outputs[int(part)].name)}", fault.expected, fault.received)
    return fault


def _read_outputs(request: InferenceRequest, model: Model, parts: Parts) -> tuple[RequestedOutput, ...]:
    if not request.outputs:
        given = {given.name for given in request.inputs}
        everything = tuple(RequestedOutput(name, request.is_binary) for name in model.defined_outputs(given))
        parts.faults += _form_faults(everything, model)
        return everything
    known: dict[str, RequestedOutput] = {}
    for place, output in enumerate(request.outputs):
        if len(parts.faults) >= MAX_FAULTS:
            break
        if model.output(output.name) is None:
            expected = f"an output of {model.name}: {names_text(model.output_names)}"
            parts.faults.append(Fault(f"outputs.{place}", expected, short(output.name)))
        elif output.name in known:
            parts.faults.append(Fault(f"outputs.{place}", "each output once", f"{output.name} again"))
        else:
            known[output.name] = output
    outputs = tuple(known.values())
    parts.faults += _form_faults(outputs, model)
    return outputs


def _form_faults(outputs: Iterable[RequestedOutput], model: Model) -> list[Fault]:
    """Faults of outputs whose datatype JSON has no form for: told before anything is computed."""
    faults = []
    for output in outputs:
        tensor = model.output(output.name)
        if tensor is not None and tensor.datatype.is_half and not output.is_binary and output.place is None:
            expected = f"binary_data true, since {tensor.datatype.name} has no form in JSON"
            faults.append(Fault(f"outputs.{output.name}", expected, "JSON asked for"))
    return faults


def _read_parameters(
    parameters: Mapping[str, ParameterValue], model: Model, parts: Parts, *, takes_reserved: bool
) -> tuple[float | None, tuple[str, ...]]:
    """Options into ``parts``; gives how long the request may wait in the queue, and what is ignored."""
    queue_timeout_s: float | None = None
    window: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in parameters.items():
        if name in PARAMETER_OPTIONS:
            _read_option(name, value, model, parts, window)
        elif name == "timeout":
            queue_timeout_s = _queue_timeout_s(value, parts)
        elif name == "priority" or name in _SEQUENCE:
            _check_protocols_own(name, value, parts)
        elif name == "binary_data_output":
            if not isinstance(value, bool):
                parts.faults.append(Fault("parameters.binary_data_output", "true or false", short(value)))
        elif name.startswith(RESERVED_PREFIX):
            _check_reserved(name, value, parts, takes_reserved=takes_reserved)
        elif name in _SAID_OTHERWISE:
            parts.faults.append(Fault(f"parameters.{name}", _SAID_OTHERWISE[name], short(value)))
        elif name in model.call.tensors:
            parts.faults.append(Fault(f"parameters.{name}", "an input of this name, not a parameter", short(value)))
        elif name in model.call.refused:
            parts.faults.append(Fault(f"parameters.{name}", model.call.refused[name], short(value)))
        else:
            ignored.append(short_name(name))
    if window:
        parts.options["window"] = window
    return queue_timeout_s, tuple(ignored[:_MAX_NAMED])


def _read_option(name: str, value: ParameterValue, model: Model, parts: Parts, window: dict[str, Any]) -> None:
    option, _, side = name.partition("_") if name.startswith("window_") else (name, "", "")
    if option not in model.call.option_names:
        expected = model.call.refused.get(name, f"no such option, since {model.name} has no use for it")
        parts.faults.append(Fault(name, expected, short(value)))
    elif side:
        window[side] = value
    else:
        parts.options[option] = value


def _queue_timeout_s(value: ParameterValue, parts: Parts) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TIMEOUT_US:
        parts.faults.append(Fault("parameters.timeout", "a whole number of microseconds, 0 or more", short(value)))
        return None
    return value / 1e6 if value else None


def _check_protocols_own(name: str, value: ParameterValue, parts: Parts) -> None:
    """Parameters that the protocol defines and that change nothing here: no model has sequences or priorities."""
    is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64
    if name == "priority":
        fits, expected = is_whole, "a whole number, 0 or more"
    elif name == "sequence_id":
        fits, expected = is_whole or isinstance(value, str), "a whole number, 0 or more, or a string"
    else:
        fits, expected = isinstance(value, bool), "true or false"
    if not fits:
        parts.faults.append(Fault(f"parameters.{name}", expected, short(value)))


def _check_reserved(name: str, value: ParameterValue, parts: Parts, *, takes_reserved: bool) -> None:
    if not takes_reserved or name != FINAL_RESPONSE_ASKED:
        expected = f"no parameter that begins with {RESERVED_PREFIX}: the protocol reserves them"
        parts.faults.append(Fault(f"parameters.{short_name(name)}", expected, short(value)))
    elif not isinstance(value, bool):
        parts.faults.append(Fault(f"parameters.{name}", "true or false", short(value)))


def _read_inputs(inputs: Sequence[InferenceInput], model: Model, limits: Limits, parts: Parts) -> None:
    seen: set[str] = set()
    for place, given in enumerate(inputs):
        if len(parts.faults) >= MAX_FAULTS:
            break
        tensor = model.input(given.name)
        if tensor is None and given.name in model.call.refused:
            parts.faults.append(Fault(given.name, model.call.refused[given.name], "an input"))
        elif tensor is None:
            names = names_text([tensor.name for tensor in model.inputs])
            parts.faults.append(Fault(f"inputs.{place}", f"an input of {model.name}: {names}", short(given.name)))
        elif given.name in seen:
            parts.faults.append(Fault(given.name, "each input once", "one more"))
        else:
            seen.add(given.name)
            _read_input(given, tensor, model, limits, parts)
    for tensor in model.inputs:
        if not tensor.is_optional and tensor.name not in seen and model.input(tensor.name) is not None:
            expected = f"an input of datatype {tensor.datatype.name}, which {model.name} is never without"
            parts.faults.append(Fault(tensor.name, expected, "nothing"))
            parts.broken.add(tensor.name)


def _read_input(given: InferenceInput, tensor: ModelTensor, model: Model, limits: Limits, parts: Parts) -> None:
    name, datatype = given.name, tensor.datatype
    faults = shape_faults(f"{name}.shape", given.shape, limits)
    if given.datatype != datatype.name:
        expected = f"{datatype.name}, as the metadata of {model.name} says"
        faults.append(Fault(f"{name}.datatype", expected, short(given.datatype)))
    if not faults and given.content is not None:
        count = math.prod(given.shape)
        if isinstance(given.content, FlatTensor):
            if given.content.data.size != count:
                expected = f"{count} elements for shape {shape_text(given.shape)}"
                faults.append(Fault(f"{name}.data", expected, f"{given.content.data.size}"))
            else:
                flat = FlatTensor(given.content.dtype, given.shape, given.content.data)
                parts.tensors[name] = tensor_of(flat)
        else:
            assert not isinstance(given.content, MemoryPlace)
            needed = count * datatype.itemsize
            if len(given.content) != needed:
                expected = f"{needed} bytes for {datatype.name} {shape_text(given.shape)}"
                faults.append(Fault(f"{name}.data", expected, f"{len(given.content)} bytes"))
            else:
                content = given.content
                if given.is_shared and (name in VALUED_TENSORS or datatype is DATATYPES["BOOL"]):
                    # What is checked must not change behind the check.
                    content = bytearray(content)
                read = view_bytes(content, datatype.dtype, given.shape)
                faults += bool_fault(name, read)
                parts.tensors[name] = read
    if faults or given.content is None:
        parts.faults += faults
        parts.tensors.pop(name, None)
        parts.broken.add(name)
