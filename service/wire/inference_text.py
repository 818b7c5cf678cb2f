"""The JSON of the Open Inference Protocol and flat arrays, both ways and without torch: by a text worker, or for short
text by the server itself. What needs torch or the binary part of a body is done by ``open_inference_json``.

The protocol ignores members that it does not know, and null is the same as leaving a member out. NaN and infinities are
bare words both ways, as its clients write and read them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from attn_core.errors import MAX_FAULTS, Fault, InvalidProblem, shape_text
from service.wire.arrays import (
    Buffer,
    FlatTensor,
    Limits,
    Room,
    aligned_room,
    overflow_place,
    round_numbers,
    shape_faults,
)
from service.wire.inference_request import (
    MAX_NAMED,
    InferenceInput,
    InferenceRequest,
    MemoryPlace,
    ParameterValue,
    RequestedOutput,
)
from service.wire.json_arrays import SHORT_TEXT_BYTES, flat_pieces
from service.wire.text import ListFault, NestedList, read_tree, short, short_name

JSON_DTYPES: dict[str, str] = {"FP32": "float32", "FP64": "float64", "BOOL": "bool", "INT64": "int64"}
"""The datatypes that have a form in JSON and that a tensor may have, and their names natively."""
HALF_DATATYPES = ("FP16", "BF16")
_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
_MAX_WHOLE = 2**63 - 1
_MAX_CHARACTERS = 24
"""No number has more."""


@dataclass(slots=True)
class ReadInference:
    """A JSON part taken apart: ``request`` without the contents that came as numbers or follow in binary.

    ``tensors`` and ``sizes``, in bytes, are by the place of their input in the request.
    """

    request: InferenceRequest
    tensors: dict[int, FlatTensor] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)


def read(body: Buffer, limits: Limits, room: Room = aligned_room) -> ReadInference:
    """A JSON part taken apart; tensors are written where ``room`` says.

    Raises: Malformed when it is not JSON; InvalidProblem when it cannot be taken apart.
    """
    try:
        members, repeated = read_tree(body, "data", max_lists=limits.max_json_lists)
    except RecursionError:
        raise InvalidProblem([Fault("", "lists and objects a few levels deep", "hundreds of levels")]) from None
    return _Reader(limits, room).read(members, repeated)


class _Reader:
    def __init__(self, limits: Limits, room: Room) -> None:
        self._limits = limits
        self._room = room
        self._faults: list[Fault] = []

    def read(self, members: Mapping[str, Any], repeated: list[Fault]) -> ReadInference:
        self._faults += repeated
        parameters = self._parameters(members.get("parameters"), "parameters")
        is_binary = parameters.get("binary_data_output") is True
        request = InferenceRequest(
            id=self._id(members.get("id")),
            parameters=parameters,
            inputs=[],
            outputs=self._outputs(members.get("outputs"), is_binary=is_binary),
            is_binary=is_binary,
            faults=self._faults,
        )
        out = ReadInference(request)
        for place, given in enumerate(self._list(members.get("inputs"), "inputs")):
            if len(self._faults) >= MAX_FAULTS:
                break
            self._input(given, f"inputs.{place}", out)
        return out

    def _fault(self, where: str, expected: str, received: Any) -> None:
        self._faults.append(Fault(where, expected, "nothing" if received is None else short(received)))

    def _list(self, value: Any, name: str) -> list[Any]:
        if value is None:
            return []
        if isinstance(value, list):
            if len(value) > MAX_NAMED:
                self._fault(name, f"at most {MAX_NAMED}", str(len(value)))
            return value[:MAX_NAMED]
        self._fault(name, f"a list of {name}", value)
        return []

    def _id(self, value: Any) -> str | None:
        if value is None or isinstance(value, str):
            return value
        self._fault("id", "a string", value)
        return None

    def _parameters(self, value: Any, where: str) -> dict[str, ParameterValue]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._fault(where, "an object", value)
            return {}
        if len(value) > MAX_NAMED:
            self._fault(where, f"at most {MAX_NAMED} parameters", str(len(value)))
            return {}
        strangers = {name: each for name, each in value.items() if not _is_parameter(each)}
        for name in itertools.islice(strangers, MAX_FAULTS):
            expected = "a string, a finite number, true or false"
            self._faults.append(Fault(f"{where}.{short_name(name)}", expected, short(value[name])))
        return {name: each for name, each in value.items() if name not in strangers} if strangers else value

    def _outputs(self, value: Any, *, is_binary: bool) -> list[RequestedOutput]:
        outputs = []
        for index, given in enumerate(self._list(value, "outputs")):
            if len(self._faults) >= MAX_FAULTS:
                break
            where = f"outputs.{index}"
            if not isinstance(given, dict) or not isinstance(given.get("name"), str):
                self._fault(where, "an object with a name", given)
                continue
            where = f"outputs.{short_name(given['name'])}"
            parameters = self._parameters(given.get("parameters"), where)
            asked = parameters.get("binary_data")
            if asked is not None and not isinstance(asked, bool):
                self._fault(f"{where}.binary_data", "true or false", asked)
            if "classification" in parameters:
                self._fault(
                    f"{where}.classification", "no classification: it is not served", parameters["classification"]
                )
            place = self._place(parameters, where)
            if place is not None and asked is True:
                self._fault(f"{where}.binary_data", f"one of binary_data and {_REGION}", "both")
            form = is_binary if asked is None else asked is True
            outputs.append(RequestedOutput(given["name"], form and place is None, place))
        return outputs

    def _place(self, parameters: Mapping[str, ParameterValue], where: str) -> MemoryPlace | None:
        """Where a tensor lies in shared memory, if it does."""
        if not parameters.keys() & {_REGION, _OFFSET, _SIZE}:
            return None
        region, size = parameters.get(_REGION), parameters.get(_SIZE)
        offset = parameters.get(_OFFSET, 0)
        if not isinstance(region, str):
            self._fault(f"{where}.{_REGION}", "the name of a region", region)
        if not _is_whole(size):
            self._fault(f"{where}.{_SIZE}", "a whole number of bytes, 0 or more", size)
        if not _is_whole(offset):
            self._fault(f"{where}.{_OFFSET}", "a whole number of bytes, 0 or more", offset)
        if isinstance(region, str) and isinstance(size, int) and isinstance(offset, int):
            return MemoryPlace(region, offset, size)
        return None

    def _input(self, given: Any, where: str, out: ReadInference) -> None:
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            self._fault(where, "an object with a name, a shape and a datatype", given)
            return
        name = given["name"]
        where = short_name(name) or where
        datatype = given.get("datatype")
        tensor = InferenceInput(name, datatype if isinstance(datatype, str) else "", (), None)
        place = len(out.request.inputs)
        out.request.inputs.append(tensor)
        shape = given.get("shape")
        if isinstance(shape, list) and all(type(axis) is int for axis in shape):
            tensor.shape = tuple(shape)
        else:
            self._fault(f"{where}.shape", "a list of whole numbers", shape)
            shape = None
        parameters = self._parameters(given.get("parameters"), where)
        size, data = parameters.get("binary_data_size"), given.get("data")
        sources = [
            source
            for source, is_there in (
                ("data", data is not None),
                ("binary_data_size", size is not None),
                (_REGION, _REGION in parameters),
            )
            if is_there
        ]
        if len(sources) != 1:
            expected = f"its data, or one of the parameters binary_data_size and {_REGION}"
            self._faults.append(Fault(where, expected, " and ".join(sources) or "none of them"))
        lies_at = self._place(parameters, where)
        if len(sources) == 1:
            tensor.content = lies_at
        if size is not None:
            if _is_whole(size):
                assert isinstance(size, int)
                out.sizes[place] = size
            else:
                self._fault(f"{where}.binary_data_size", "a whole number of bytes, 0 or more", size)
        if data is not None and shape is not None:
            flat = self._data(data, tensor, where)
            if flat is not None and sources == ["data"]:
                out.tensors[place] = flat

    def _data(self, data: Any, tensor: InferenceInput, where: str) -> FlatTensor | None:
        """The numbers of an input. None where they cannot be read, which is a fault, here or in the check."""
        where = f"{where}.data"
        if tensor.datatype in HALF_DATATYPES:
            expected = f"binary data: {tensor.datatype} has no form in JSON"
            self._fault(where, expected, data)
            return None
        dtype = JSON_DTYPES.get(tensor.datatype)
        if dtype is None or shape_faults("", tensor.shape, self._limits):
            return None
        if not isinstance(data, NestedList):
            self._fault(where, "a list of numbers", data)
            return None
        if not math.prod(tensor.shape):
            plain = data.plain()
            if not _is_empty_form(plain, tensor.shape):
                self._fault(where, f"an empty list, as shape {shape_text(tensor.shape)} has no elements", plain)
                return None
            return FlatTensor(dtype, (0,), self._room(dtype, 0))
        try:
            return self._elements(data, dtype, tensor.shape, where)
        except ListFault as fault:
            self._faults += [
                Fault(f"{where}.{misfit.field}" if misfit.field else where, _in_our_words(misfit), misfit.received)
                for misfit in fault.misfits
            ]
            return None

    def _elements(self, data: NestedList, dtype: str, shape: tuple[int, ...], where: str) -> FlatTensor | None:
        if dtype == "bool":
            bools, found = data.booleans()
            flat = self._copied(dtype, bools)
        elif dtype == "int64":
            wholes, found = data.whole_numbers()
            flat = self._copied(dtype, wholes)
        else:
            numbers, found = data.strict_numbers()
            rounded = round_numbers(numbers, dtype, self._room)
            lost = overflow_place(numbers, rounded, dtype)
            if lost is not None:
                expected = f"numbers that {dtype} can hold"
                self._faults.append(Fault(where, expected, f"{float(numbers[lost])!r} as element {lost}"))
                return None
            flat = FlatTensor(dtype, (rounded.size,), rounded)
        depth = len(found) - 1
        is_flat = depth == 0
        conforms = depth < len(shape) and found[:depth] == shape[:depth] and found[depth] == math.prod(shape[depth:])
        if not (is_flat or conforms):
            expected = f"one list of {math.prod(shape)}, or lists in lists as shape {shape_text(shape)} has them"
            self._faults.append(Fault(where, expected, f"lists of shape {shape_text(found)}"))
            return None
        return flat

    def _copied(self, dtype: str, flat: Any) -> FlatTensor:
        data = self._room(dtype, flat.size)
        data[:] = flat
        return FlatTensor(dtype, (flat.size,), data)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_WHOLE


def _is_parameter(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | bool) or (isinstance(value, int) and -(2**63) <= value < 2**64)


def _is_empty_form(node: Any, shape: Sequence[int]) -> bool:
    """Whether lists say a shape that has no elements: flat, or nested to any of its depths."""
    if not isinstance(node, list):
        return False
    if not node:
        return not math.prod(shape)
    return len(shape) > 1 and len(node) == shape[0] and all(_is_empty_form(child, shape[1:]) for child in node)


def _in_our_words(misfit: Fault) -> str:
    """Lists have no other form here that one with nothing in it could be advised to take."""
    return "a list with something in it" if misfit.received == "[]" else misfit.expected


def write(
    outputs: Mapping[str, FlatTensor], members: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> list[bytes | memoryview]:
    """The JSON part of an answer as pieces to be sent one after the other.

    ``entries`` are what it says of each output, in order; those in ``outputs`` get their elements as ``data``.
    """
    pieces: list[bytes | memoryview] = [orjson.dumps(members)[:-1] + b',"outputs":[']
    for place, entry in enumerate(entries):
        text = (b"," if place else b"") + orjson.dumps(entry)
        flat = outputs.get(entry["name"])
        if flat is None:
            pieces.append(text)
        else:
            pieces += [text[:-1] + b',"data":', *flat_pieces(flat.data, flat.dtype), b"}"]
    pieces.append(b"]}")
    return pieces if sum(map(len, pieces)) > SHORT_TEXT_BYTES else [b"".join(pieces)]


def max_text_bytes(
    outputs: Mapping[str, FlatTensor], members: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> int:
    """A length that the text of an answer cannot exceed."""
    total = 64 + len(orjson.dumps(members)) + sum(32 + len(orjson.dumps(entry)) for entry in entries)
    return total + sum((_MAX_CHARACTERS + 1) * flat.data.size for flat in outputs.values())
