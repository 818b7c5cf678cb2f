"""Messages of the Open Inference Protocol to and from the forms that both of its doors share.

Bytes of tensors never become part of a message object: a request is taken apart at its top level, and only what
precedes its raw contents is parsed; an answer's raw contents are written behind the rest of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from torch import Tensor

from attn_core.errors import MAX_FAULTS, Fault, shape_text
from attn_core.validate import dtype_text
from service.errors import Malformed
from service.wire import open_inference_pb2 as pb
from service.wire.arrays import MAX_RANK, STORAGE, Buffer, FlatTensor, aligned_room
from service.wire.inference import (
    FINAL_RESPONSE_ASKED,
    InferenceInput,
    InferenceRequest,
    MemoryPlace,
    ParameterValue,
    RequestedOutput,
)
from service.wire.inference_models import DATATYPES, VERSION, Datatype
from service.wire.inference_request import MAX_NAMED
from service.wire.tensors import bytes_of
from service.wire.text import short, short_name

Piece = bytes | memoryview
M = TypeVar("M", bound=Message)

FINAL_RESPONSE = "triton_final_response"
MAX_FIELDS = 4 * MAX_NAMED
"""So many fields a message has at its top level; they are counted before it is parsed, since each takes a multiple of
its bytes."""
_RAW_INPUT, _ID, _RAW_OUTPUT, _INFER_RESPONSE = 0x3A, 0x1A, b"\x32", b"\x12"
"""Tags: field number and wire type 2, which is a length and so many bytes."""
_TYPED_FIELDS = {
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
_PACKED_BYTES = {"BOOL": 1, "FP32": 4, "FP64": 8}
"""Bytes of one element as it is packed on the wire, where that is how it lies in memory."""
_REGION, _REGION_OFFSET, _REGION_SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
_MAX_INT64, _MAX_UINT64 = 2**63 - 1, 2**64 - 1
FINAL_PIECE = pb.ModelInferResponse(parameters={FINAL_RESPONSE: pb.InferParameter(bool_param=True)}).SerializeToString()
"""What makes an answer the last one of its request; it may stand anywhere in it."""


# Bytes to messages


def parse(message_class: type[M], data: bytes | memoryview) -> M:
    """Raises: Malformed."""
    try:
        message: M = message_class.FromString(bytes(data))
    except DecodeError:
        # What the parser says differs from one of its implementations to the next.
        name = message_class.DESCRIPTOR.full_name
        fault = Fault("", f"a message {name}", f"{len(data)} bytes that are none")
        raise Malformed(f"the message is no {name}", faults=[fault]) from None
    return message


@dataclass(frozen=True, slots=True)
class Frame:
    """The top level of a request whose raw contents come last: ``head`` is what precedes them, ``key`` that without
    the id, ``id_field`` the whole field of the id, ``spans`` begin and end of each raw content."""

    head: bytes
    key: bytes
    id_field: bytes
    spans: tuple[tuple[int, int], ...]


def split(message: bytes) -> Frame | None:
    """Take a request apart without parsing it. None where it is out of the ordinary, or no message at all."""
    at, end = 0, len(message)
    head_end = id_at = id_end = -1
    spans: list[tuple[int, int]] = []
    num_fields = 0
    try:
        while at < end:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                return None
            tag, size, begin = message[at], message[at + 1], at + 2
            if size > 127:
                size, begin = _long_size(message, at + 1)
            after = begin + size
            if after > end:
                return None
            if tag == _RAW_INPUT:
                if head_end < 0:
                    head_end = at
                spans.append((begin, after))
            elif tag & 0x87 != 2 or tag < 8 or head_end >= 0:
                return None
            elif tag == _ID:
                if id_at >= 0:
                    return None
                id_at, id_end = at, after
            at = after
    except IndexError:
        return None
    head = message[:head_end] if head_end >= 0 else message
    if id_at < 0:
        return Frame(head, head, b"", tuple(spans))
    return Frame(head, head[:id_at] + head[id_end:], head[id_at:id_end], tuple(spans))


def _long_size(message: bytes, at: int) -> tuple[int, int]:
    """A length of several bytes at ``at``, and where it ends. Raises: IndexError where there is none."""
    size = 0
    for shift in range(0, 35, 7):
        byte = message[at]
        at += 1
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return size, at
    raise IndexError


def check_fields(message: bytes) -> None:
    """Count the fields of a message, those of groups too. Raises: Malformed where it has more than any request."""
    at, end = 0, len(message)
    try:
        for _ in range(MAX_FIELDS):
            if at >= end:
                return
            tag, at = _long_size(message, at)
            kind = tag & 7
            if kind == 0:
                while message[at] >= 0x80:
                    at += 1
                at += 1
            elif kind in (1, 5):
                at += 8 if kind == 1 else 4
            elif kind == 2:
                size, at = _long_size(message, at)
                at += size
            elif kind not in (3, 4):
                return
    except IndexError:
        # The parser says what is wrong with it.
        return
    fault = Fault("", f"a message of at most {MAX_FIELDS} fields", "more")
    raise Malformed("the message has too many fields", faults=[fault])


def read_message(message: bytes, frame: Frame | None) -> tuple[pb.ModelInferRequest, list[Buffer]]:
    """A request without its raw contents, and these, as views where it was ``split``. Raises: Malformed."""
    if frame is None:
        check_fields(message)
        whole = parse(pb.ModelInferRequest, message)
        return whole, list(whole.raw_input_contents)
    view = memoryview(message)
    return parse(pb.ModelInferRequest, frame.head), [view[begin:end] for begin, end in frame.spans]


def read_request(message: pb.ModelInferRequest, raw: Sequence[Buffer]) -> InferenceRequest:
    """A parsed request in the form that ``inference.check`` takes; the raw contents are not copied."""
    faults: list[Fault] = []
    counts = {"inputs": len(message.inputs), "outputs": len(message.outputs), "parameters": len(message.parameters)}
    for name, count in counts.items():
        if count > MAX_NAMED:
            faults.append(Fault(name, f"at most {MAX_NAMED}", f"{count}"))
    return InferenceRequest(
        id=message.id or None,
        parameters=_read_parameters("parameters", message.parameters, faults),
        inputs=_read_inputs(message.inputs[:MAX_NAMED], raw, faults),
        outputs=[_read_output(output, faults) for output in message.outputs[:MAX_NAMED]],
        is_binary=True,
        faults=faults,
    )


def id_of(message: bytes, frame: Frame | None) -> str:
    """The id of a request, empty where it has none or cannot be read."""
    try:
        # The field alone is a message, too.
        return parse(pb.ModelInferRequest, message if frame is None else frame.id_field).id
    except Malformed:
        return ""


def asks_final_response(message: pb.ModelInferRequest) -> bool:
    """Whether the answer is to say that it is the last one."""
    return FINAL_RESPONSE_ASKED in message.parameters and message.parameters[FINAL_RESPONSE_ASKED].bool_param


def _read_parameters(
    path: str, parameters: Mapping[str, pb.InferParameter], faults: list[Fault]
) -> dict[str, ParameterValue]:
    read: dict[str, ParameterValue] = {}
    for name, parameter in itertools.islice(parameters.items(), MAX_NAMED):
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None:
            read[name] = getattr(parameter, kind)
        elif len(faults) < MAX_FAULTS:
            faults.append(Fault(f"{path}.{short_name(name)}", "a value", "none"))
    return read


def _read_place(name: str, parameters: Mapping[str, ParameterValue], faults: list[Fault]) -> MemoryPlace | None:
    """Where in shared memory a tensor is to lie; None where it is not, or not said well."""
    if parameters.keys().isdisjoint((_REGION, _REGION_OFFSET, _REGION_SIZE)):
        return None
    region, offset, size = parameters.get(_REGION), parameters.get(_REGION_OFFSET, 0), parameters.get(_REGION_SIZE)
    found = []
    if not isinstance(region, str):
        found.append(Fault(f"{name}.{_REGION}", "the name of a region", "none" if region is None else short(region)))
    for key, value in ((_REGION_OFFSET, offset), (_REGION_SIZE, size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            received = "none" if value is None else short(value)
            found.append(Fault(f"{name}.{key}", "a whole number of bytes, 0 or more", received))
    if found:
        faults += found
        return None
    assert isinstance(region, str) and isinstance(offset, int) and isinstance(size, int)
    return MemoryPlace(region, offset, size)


def _read_output(output: pb.ModelInferRequest.InferRequestedOutputTensor, faults: list[Fault]) -> RequestedOutput:
    name = f"outputs.{short_name(output.name)}"
    parameters = _read_parameters(name, output.parameters, faults) if output.parameters else {}
    if "classification" in parameters and len(faults) < MAX_FAULTS:
        faults.append(Fault(f"{name}.classification", "no classification, which is not served", "it"))
    return RequestedOutput(output.name, is_binary=True, place=_read_place(name, parameters, faults))


def _read_inputs(
    inputs: Iterable[pb.ModelInferRequest.InferInputTensor], raw: Sequence[Buffer], faults: list[Fault]
) -> list[InferenceInput]:
    rest = iter(raw)
    read = []
    num_raw = 0
    for given in inputs:
        name = short_name(given.name) or "inputs"
        parameters = _read_parameters(name, given.parameters, faults) if given.parameters else {}
        num_faults = len(faults)
        place = _read_place(name, parameters, faults)
        is_shared = place is not None or len(faults) > num_faults
        content: Buffer | FlatTensor | MemoryPlace | None = place
        if given.HasField("contents") and (raw or is_shared):
            expected = "one source of data: raw_input_contents for all inputs, contents in all, or shared memory"
            faults.append(Fault(f"{name}.contents", expected, "contents besides another"))
        elif not is_shared and raw:
            num_raw += 1
            content = next(rest, None)
        elif not is_shared and len(given.shape) <= MAX_RANK:
            content = _read_contents(name, given, faults)
        # One axis too many is enough to be refused for it.
        shape = tuple(given.shape[: MAX_RANK + 1])
        read.append(InferenceInput(given.name, given.datatype, shape, content))
        if len(faults) >= MAX_FAULTS:
            return read
    if raw and num_raw != len(raw):
        expected = f"{num_raw} entries, one for each input that is not in shared memory"
        faults.append(Fault("raw_input_contents", expected, f"{len(raw)}"))
    return read


def _read_contents(name: str, given: pb.ModelInferRequest.InferInputTensor, faults: list[Fault]) -> FlatTensor | None:
    """The elements of an input that came typed; None where it is faulty, here or by its datatype."""
    datatype = DATATYPES.get(given.datatype)
    if datatype is None:
        return None
    if datatype.name not in _TYPED_FIELDS:
        received = "contents" if given.HasField("contents") else "none"
        expected = f"raw_input_contents, since {datatype.name} has no other form"
        faults.append(Fault(f"{name}.contents", expected, received))
        return None
    count = math.prod(given.shape)
    field = _TYPED_FIELDS[datatype.name]
    contents = given.contents
    elements = getattr(contents, field)
    others = [descriptor.name for descriptor, _ in contents.ListFields() if descriptor.name != field]
    if others:
        faults.append(Fault(f"{name}.contents", f"{field} alone for {datatype.name}", ", ".join(others)))
        return None
    if len(elements) != count:
        nothing = "neither contents nor raw_input_contents"
        received = f"{len(elements)}" if given.HasField("contents") else nothing
        if all(axis >= 0 for axis in given.shape):
            expected = f"{count} elements for shape {shape_text(given.shape)}"
            faults.append(Fault(f"{name}.contents", expected, received))
        return None
    return _typed(contents, elements, datatype)


def _typed(contents: pb.InferTensorContents, elements: Sequence[Any], datatype: Datatype) -> FlatTensor:
    """Elements as they lie in memory. Packed ones are written out and taken as they are: one by one, a megabyte of
    them would hold up the event loop for tens of milliseconds."""
    name, count = dtype_text(datatype.dtype), len(elements)
    room = aligned_room(name, count)
    if datatype.name in _PACKED_BYTES:
        contents.DiscardUnknownFields()  # type: ignore[attr-defined]
        packed = contents.SerializeToString()
        begin = len(packed) - count * _PACKED_BYTES[datatype.name]
        room[:] = np.frombuffer(packed, STORAGE[name], count, begin)
    else:
        room[:] = np.fromiter(elements, STORAGE[name], count)
    return FlatTensor(name, (count,), room)


# Messages to bytes


def varint(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def raw_output_head(num_bytes: int) -> bytes:
    """What precedes an output's bytes in an answer."""
    return _RAW_OUTPUT + varint(num_bytes)


def write_answer(
    *,
    model_name: str,
    id: str | None,
    parameters: Mapping[str, ParameterValue],
    outputs: Iterable[tuple[RequestedOutput, Tensor]],
) -> list[Piece]:
    """A ModelInferResponse as pieces to be joined; a tensor in shared memory has an empty entry."""
    message = pb.ModelInferResponse(model_name=model_name, model_version=VERSION, id=id or "")
    write_parameters(message.parameters, parameters)
    pieces: list[Piece] = []
    for output, tensor in outputs:
        described = message.outputs.add()
        described.name, described.datatype = output.name, _code_of(tensor)
        described.shape.extend(tensor.shape)
        data = memoryview(b"") if output.place is not None else bytes_of(tensor)
        pieces += [raw_output_head(len(data)), data]
    return [message.SerializeToString(), *pieces]


def _code_of(tensor: Tensor) -> str:
    return next(code for code, datatype in DATATYPES.items() if datatype.dtype == tensor.dtype)


def write_parameters(written: Any, parameters: Mapping[str, ParameterValue]) -> None:
    """Each value in the kind that fits it."""
    for name, value in parameters.items():
        parameter = written[name]
        match value:
            case bool():
                parameter.bool_param = value
            case str():
                parameter.string_param = value
            case int() if -_MAX_INT64 - 1 <= value <= _MAX_INT64:
                parameter.int64_param = value
            case int() if 0 <= value <= _MAX_UINT64:
                parameter.uint64_param = value
            case _:
                parameter.double_param = float(value)


def stream_answer(pieces: Sequence[Piece]) -> list[Piece]:
    """An answer as one of a stream, where each is the last of its request."""
    size = sum(memoryview(piece).nbytes for piece in pieces) + len(FINAL_PIECE)
    return [_INFER_RESPONSE + varint(size), *pieces, FINAL_PIECE]


def stream_error(text: str, id: str) -> bytes:
    """The answer of a stream to a request that failed."""
    response = pb.ModelInferResponse(id=id)
    written: bytes = pb.ModelStreamInferResponse(error_message=text, infer_response=response).SerializeToString()
    return written


def message_of(message_class: type[M], described: Mapping[str, Any]) -> M:
    """A message with the fields that the same thing has in JSON."""
    return message_class(**described)
