"""The Open Inference Protocol over HTTP: JSON, and behind it the bytes of the tensors that are sent in binary.

Text and flat arrays are the matter of ``inference_text``; here the binary part of a body finds its inputs, and a result
becomes the two parts of an answer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from attn_core.errors import MAX_FAULTS, Fault, InvalidProblem
from service.errors import Malformed
from service.wire import inference_text
from service.wire.arrays import Buffer, FlatTensor, Limits, aligned_room
from service.wire.inference_models import DATATYPE_OF, VERSION, Model
from service.wire.inference_request import InferenceRequest, ParameterValue, RequestedOutput
from service.wire.inference_text import ReadInference
from service.wire.json_format import flat_outputs, text_bytes
from service.wire.tensors import bytes_of
from service.wire.text import load_small, repeated_fault, short

JSON, BINARY = "application/json", "application/octet-stream"
LENGTH_HEADER = "inference-header-content-length"
_MAX_LENGTH = 2**63 - 1
_WIDEST_BYTES = 8
"""No element is longer, and one that begins on a multiple of its own length can be read."""


def json_length(header: str | None) -> int | None:
    """The length of the JSON part as the header says it; None, all of the body, without one. Raises: Malformed."""
    if header is None:
        return None
    expected = "a whole number of bytes, 1 or more"
    if not (header.isascii() and header.isdigit() and len(header) <= 19 and 1 <= int(header) <= _MAX_LENGTH):
        received = short(header)
        fault = Fault("Inference-Header-Content-Length", expected, received)
        raise Malformed(f"{fault.field} must be {expected}: {received}", faults=[fault])
    return int(header)


def split(body: Buffer, json_bytes: int | None) -> tuple[Buffer, memoryview | None]:
    """The JSON part and the binary part, None where none was announced. Raises: Malformed."""
    if json_bytes is None:
        return body, None
    if json_bytes > len(body):
        fault = Fault("Inference-Header-Content-Length", f"at most the body's {len(body)} bytes", str(json_bytes))
        raise Malformed("the body is shorter than its JSON part", faults=[fault])
    view = memoryview(body)
    return view[:json_bytes], view[json_bytes:]


def decode(body: Buffer, json_bytes: int | None, limits: Limits) -> InferenceRequest:
    """A body taken apart. Raises: Malformed, InvalidProblem where it cannot be."""
    text, tail = split(body, json_bytes)
    return attach(inference_text.read(text, limits), tail)


def attach(read: ReadInference, tail: memoryview | None) -> InferenceRequest:
    """A JSON part with all contents: those that came as numbers, and parts of the binary ``tail``, not copied."""
    request = read.request
    for place, flat in read.tensors.items():
        request.inputs[place].content = flat
    if tail is None:
        for place in list(read.sizes)[:MAX_FAULTS]:
            expected = "the header Inference-Header-Content-Length beside binary data"
            request.faults.append(Fault(request.inputs[place].name, expected, "none"))
        return request
    total = sum(read.sizes.values())
    if total != len(tail):
        expected = f"{total} bytes behind the JSON part, the sum of every binary_data_size"
        request.faults.append(Fault("", expected, f"{len(tail)} bytes"))
        return request
    start, address = 0, _address_of(tail)
    for place, size in read.sizes.items():
        given, part = request.inputs[place], tail[start : start + size]
        if given.content is None:
            given.content = part if (address + start) % _WIDEST_BYTES == 0 else _moved(part)
        start += size
    return request


def _address_of(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data) if len(data) else 0


def _moved(data: memoryview) -> memoryview:
    """A copy where a tensor can begin: before this one lies one of odd length, such as a mask."""
    room = aligned_room("bool", len(data)).view(np.uint8)
    room[:] = np.frombuffer(data, dtype=np.uint8)
    return room.data


def read_small(body: Buffer) -> dict[str, Any]:
    """The members of a short body that holds no tensors; an empty one has none. Raises: Malformed, InvalidProblem."""
    if not len(body):
        return {}
    members, repeated = load_small(body)
    if not isinstance(members, dict):
        raise InvalidProblem([Fault("", "one JSON object", short(members))])
    if repeated:
        raise InvalidProblem([repeated_fault(name) for name in repeated])
    return members


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """An answer before it is text: ``members`` of its object, ``entries`` of its outputs, the ``tensors`` whose numbers
    stand in the JSON, and the ``data`` that follows it."""

    members: dict[str, Any]
    entries: list[dict[str, Any]]
    tensors: dict[str, Tensor]
    data: list[bytes | memoryview]
    is_binary: bool

    def flat(self) -> dict[str, FlatTensor]:
        return flat_outputs(self.tensors)

    def write(self, outputs: Mapping[str, FlatTensor]) -> list[bytes | memoryview]:
        """The pieces of the JSON part."""
        return inference_text.write(outputs, self.members, self.entries)

    @property
    def writer(self) -> functools.partial[list[bytes | memoryview]]:
        """``write`` for a text worker, which knows no torch."""
        return functools.partial(inference_text.write, members=self.members, entries=self.entries)

    @property
    def measure(self) -> functools.partial[int]:
        return functools.partial(inference_text.max_text_bytes, members=self.members, entries=self.entries)


def answer_parts(
    model: Model,
    request_id: str | None,
    parameters: Mapping[str, ParameterValue],
    outputs: Sequence[tuple[RequestedOutput, Tensor]],
) -> AnswerParts:
    """What an answer consists of; nothing is copied."""
    members: dict[str, Any] = {} if request_id is None else {"id": request_id}
    members |= {"model_name": model.name, "model_version": VERSION, "parameters": dict(parameters)}
    entries: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    data: list[bytes | memoryview] = []
    for output, tensor in outputs:
        datatype = DATATYPE_OF[tensor.dtype].name
        entry: dict[str, Any] = {"name": output.name, "datatype": datatype, "shape": list(tensor.shape)}
        entries.append(entry)
        if output.place is not None:
            continue
        if output.is_binary:
            entry["parameters"] = {"binary_data_size": tensor.nbytes}
            if tensor.nbytes:
                data.append(bytes_of(tensor))
        else:
            tensors[output.name] = tensor
    is_binary = any(output.is_binary for output, _ in outputs)
    return AnswerParts(members, entries, tensors, data, is_binary)


def answer_text_bytes(outputs: Sequence[RequestedOutput], model: Model, output_bytes: int) -> int:
    """About how long the text of an answer is whose outputs have so many bytes, rather too long than too short."""
    if all(output.is_binary or output.place is not None for output in outputs):
        return 0
    return text_bytes(output_bytes, 8 if model.datatype.name == "FP64" else 4, "list")
