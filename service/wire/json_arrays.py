"""JSON text and flat arrays, both ways and without torch: by a text worker, or for short text by the server itself.

Reading takes a body apart, checks each tensor by itself and rounds its numbers; what needs torch or the whole problem
is done by ``json_format`` on what is handed over here.
"""

from __future__ import annotations

import base64
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from attn_core.errors import MAX_FAULTS, Fault, InvalidProblem, names_text, shape_text
from service.wire.arrays import (
    FLOAT_NAMES,
    HALF_NAMES,
    STORAGE,
    Buffer,
    FlatTensor,
    Limits,
    Room,
    aligned_room,
    decode_base64,
    overflow_place,
    path_of,
    round_numbers,
    shape_faults,
    truth_faults,
    widened,
)
from service.wire.text import ListFault, NestedList, Shown, read_object, short, short_name

Encoding = Literal["list", "base64"]

NUMBER_TENSORS = frozenset(
    {
        *("query", "key", "value", "bias", "alibi_slopes", "sinks", "weights", "input", "memory"),
        *("w_query", "w_key", "w_value", "w_output", "b_query", "b_key", "b_value", "b_output"),
        *("grad_context", "grad_logsumexp", "grad_output"),
    }
)
MASK_TENSORS = frozenset({"allow_mask", "block_mask"})
MAX_OPTION_ITEMS = 2**20
"""Options are walked as Python objects, in the server's own process too."""
SHORT_TEXT_BYTES = 64 * 1024
"""Text up to this length is joined: one write costs less than several."""
LIST_PIECE_ELEMENTS = 2**18
BASE64_PIECE_BYTES = 3 * 2**20
_TENSOR_FORMS = 'nested lists, or an object with "dtype", "shape" and "data"'


@dataclass(frozen=True, slots=True)
class Names:
    """The members that one call takes: tensors in the contract's order, and options."""

    tensors: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(slots=True)
class ReadBody:
    """A body taken apart: see ``requests.Parts``, which it becomes.

    ``declared`` has dtype and shape of the tensors that name them, also of one whose data does not fill them.
    ``unknown`` holds at most as many strangers as are named.
    """

    tensors: dict[str, FlatTensor] = field(default_factory=dict)
    declared: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    lists: set[str] = field(default_factory=set)
    first_came_as_list: bool = False


def read(body: Buffer, names: Names, limits: Limits, room: Room = aligned_room) -> ReadBody:
    """A JSON body taken apart; tensors are written where ``room`` says.

    Raises: Malformed when it is not JSON; InvalidProblem when it cannot be taken apart.
    """
    try:
        members, repeated = read_object(
            body, NUMBER_TENSORS, frozenset((*names.tensors, *names.options)), max_lists=limits.max_json_lists
        )
        return _Reader(names, limits, room, members.get("dtype")).read(members, repeated)
    except RecursionError:
        raise InvalidProblem([Fault("", "lists and objects a few levels deep", "hundreds of levels")]) from None


class _Reader:
    def __init__(self, names: Names, limits: Limits, room: Room, dtype: Any) -> None:
        self._names = names
        self._limits = limits
        self._room = room
        self._list_dtype = dtype if isinstance(dtype, str) and dtype in FLOAT_NAMES else "float32"
        self._out = ReadBody()

    def read(self, members: Mapping[str, Any], repeated: list[Fault]) -> ReadBody:
        out = self._out
        out.faults += repeated
        out.broken |= {fault.field.split(".")[0] for fault in repeated}
        option_names = frozenset(self._names.options)
        for name, value in members.items():
            if value is None:
                continue
            if name in self._names.tensors:
                self._read_tensor(name, value)
            elif name in option_names:
                self._read_option(name, value.plain() if isinstance(value, NestedList) else value)
            elif len(out.unknown) < MAX_FAULTS:
                out.unknown[name] = Shown(short(value))
        out.first_came_as_list = isinstance(members.get(self._names.tensors[0]), NestedList)
        return out

    def _read_option(self, name: str, value: Any) -> None:
        faults = option_faults(name, value)
        if faults:
            self._out.faults += faults
            self._out.broken.add(name)
        else:
            self._out.options[name] = value

    def _read_tensor(self, name: str, value: Any) -> None:
        out = self._out
        faults: list[Fault] = []
        tensor: FlatTensor | None = None
        if isinstance(value, NestedList):
            tensor = self._from_lists(name, value, faults)
            if name in NUMBER_TENSORS:
                out.lists.add(name)
        elif isinstance(value, dict):
            tensor = self._from_object(name, value, faults)
        elif name == "query_offset":
            if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
                tensor = self._copy("int64", (1,), np.array([value], dtype=np.int64))
            else:
                faults.append(Fault(name, "a whole number, or int64 [B] or [1]", short(value)))
        else:
            faults.append(Fault(name, _TENSOR_FORMS, short(value)))
        out.faults += faults
        if tensor is None or faults:
            out.broken.add(name)
        else:
            out.tensors[name] = tensor

    def _copy(self, dtype: str, shape: tuple[int, ...], flat: NDArray[Any]) -> FlatTensor:
        data = self._room(dtype, flat.size)
        data[:] = flat
        return FlatTensor(dtype, shape, data)

    def _from_lists(self, name: str, value: NestedList, faults: list[Fault]) -> FlatTensor | None:
        try:
            if name in NUMBER_TENSORS:
                numbers, shape = value.numbers()
                faults += shape_faults(name, shape, self._limits)
                if faults:
                    return None
                data = round_numbers(numbers, self._list_dtype, self._room)
                lost = overflow_place(numbers, data, self._list_dtype)
                if lost is not None:
                    expected = f"a number that {self._list_dtype} can hold"
                    faults.append(Fault(path_of(name, lost, shape), expected, repr(float(numbers[lost]))))
                return FlatTensor(self._list_dtype, shape, data)
            is_mask = name in MASK_TENSORS
            flat, shape = value.booleans() if is_mask else value.whole_numbers()
            faults += shape_faults(name, shape, self._limits)
            return None if faults else self._copy("bool" if is_mask else "int64", shape, flat)
        except ListFault as fault:
            for misfit in fault.misfits:
                place = f"{name}.{misfit.field}" if misfit.field else name
                faults.append(Fault(place, misfit.expected, misfit.received))
            return None

    def _from_object(self, name: str, value: dict[str, Any], faults: list[Fault]) -> FlatTensor | None:
        strangers = (member for member in value if member not in ("dtype", "shape", "data"))
        faults += [
            Fault(f"{name}.{short_name(member)}", "dtype, shape and data alone", short(value[member]))
            for member in itertools.islice(strangers, MAX_FAULTS)
        ]
        dtype, shape, data = value.get("dtype"), value.get("shape"), value.get("data")
        if not isinstance(dtype, str) or dtype not in STORAGE:
            received = "nothing" if dtype is None else short(dtype)
            faults.append(Fault(f"{name}.dtype", names_text(list(STORAGE)), received))
        if not isinstance(shape, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in shape):
            received = "nothing" if shape is None else short(shape)
            faults.append(Fault(f"{name}.shape", "a list of whole numbers", received))
        else:
            faults += shape_faults(f"{name}.shape", shape, self._limits)
        raw: bytes | None = None
        if not isinstance(data, str):
            received = "nothing" if data is None else short(data)
            faults.append(Fault(f"{name}.data", "base64 text", received))
        else:
            try:
                raw = decode_base64(data)
            except ValueError as error:
                expected = "base64, standard alphabet, padded"
                faults.append(Fault(f"{name}.data", expected, f"{short(data, 40)}: {error}"))
        if faults:
            return None
        assert isinstance(dtype, str) and shape is not None and raw is not None
        # The shape can be compared with others even if the data does not fill it.
        self._out.declared[name] = dtype, tuple(shape)
        itemsize = STORAGE[dtype].itemsize
        needed = math.prod(shape) * itemsize
        if len(raw) != needed:
            expected = f"{needed} bytes, {math.prod(shape)} elements, for {dtype} {shape_text(shape)}"
            received = f"{len(raw)} bytes, {len(raw) / itemsize:g} elements"
            faults.append(Fault(f"{name}.data", expected, received))
            return None
        if dtype == "bool":
            faults += truth_faults(f"{name}.data", np.frombuffer(raw, dtype=np.uint8))
        return None if faults else self._copy(dtype, tuple(shape), np.frombuffer(raw, dtype=STORAGE[dtype]))


def option_faults(name: str, value: Any) -> list[Fault]:
    """A fault where an option holds more than anybody should look at."""
    if _num_items(value) > MAX_OPTION_ITEMS:
        return [Fault(name, f"at most {MAX_OPTION_ITEMS} items in an option", short(value))]
    return []


def _num_items(value: Any) -> int:
    """How many things a value holds, at every depth; no further counted than it matters."""
    if not isinstance(value, list | dict) or len(value) > MAX_OPTION_ITEMS:
        return len(value) if isinstance(value, list | dict) else 0
    count = len(value)
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, list | dict):
            count += _num_items(child)
            if count > MAX_OPTION_ITEMS:
                break
    return count


def write(outputs: Mapping[str, FlatTensor], info: Mapping[str, Any], encoding: Encoding) -> list[bytes | memoryview]:
    """An answer as pieces to be sent one after the other: every output in the asked form, and ``info``.

    Long tensors are written piece by piece, so that another thread gets its turn between two of them.
    """
    pieces: list[bytes | memoryview] = [b"{"]
    for name, tensor in outputs.items():
        pieces.append(b'"%b":' % name.encode())
        if encoding == "list" and tensor.data.size:
            pieces += _list_pieces(tensor.data.reshape(tensor.shape), tensor.dtype)
        else:
            pieces += _object_pieces(tensor)
        pieces.append(b",")
    pieces.append(b'"info":' + orjson.dumps(info) + b"}")
    return pieces if sum(map(len, pieces)) > SHORT_TEXT_BYTES else [b"".join(pieces)]


def max_text_bytes(outputs: Mapping[str, FlatTensor], info: Mapping[str, Any], encoding: Encoding) -> int:
    """A length that the text of an answer cannot exceed."""
    total = 64 + len(orjson.dumps(info))
    for name, tensor in outputs.items():
        total += 256 + len(name) + 4 * tensor.data.nbytes // 3
        if encoding == "list":
            # Each list brings two brackets and a comma; no number has more than 24 characters before its comma.
            num_lists = sum(math.prod(tensor.shape[:depth]) for depth in range(len(tensor.shape)))
            total += 3 * num_lists + 25 * tensor.data.size
    return total


def _object_pieces(tensor: FlatTensor) -> Iterator[bytes]:
    head = orjson.dumps({"dtype": tensor.dtype, "shape": list(tensor.shape)})
    yield head[:-1] + b',"data":"'
    data = tensor.data.view(np.uint8)
    for start in range(0, data.size, BASE64_PIECE_BYTES):
        yield base64.b64encode(data[start : start + BASE64_PIECE_BYTES].data)
    yield b'"}'


def _list_pieces(array: NDArray[Any], dtype: str) -> Iterator[bytes]:
    if array.size <= LIST_PIECE_ELEMENTS or array.ndim == 1:
        yield _list_text(array, dtype)
        return
    for index, part in enumerate(array):
        yield b"," if index else b"["
        yield from _list_pieces(part, dtype)
    yield b"]"


def _list_text(array: NDArray[Any], dtype: str, *, quote: bytes = b'"') -> bytes:
    # Of a half number the decimal with the fewest digits that gives its bits back.
    numbers = _shortest_table(dtype)[array.view(np.uint16)] if dtype in HALF_NAMES else array
    text = orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)
    if dtype not in FLOAT_NAMES or b"null" not in text:
        return text
    # orjson writes null for what JSON cannot say. In order of appearance:
    special = numbers[~np.isfinite(numbers)]
    if bool(np.isneginf(special).all()):
        return text.replace(b"null", quote + b"-Infinity" + quote)
    words = iter([quote + _word_of(number) + quote for number in special.tolist()])
    return re.sub(rb"null", lambda _: next(words), text)


def _word_of(number: float) -> bytes:
    if math.isnan(number):
        return b"NaN"
    return b"Infinity" if number > 0 else b"-Infinity"


def flat_pieces(data: NDArray[Any], dtype: str) -> Iterator[bytes]:
    """A flat tensor as one list, in pieces; NaN and infinities are bare words in it, which is not JSON any more."""
    yield b"["
    for start in range(0, data.size, LIST_PIECE_ELEMENTS):
        text = _list_text(data[start : start + LIST_PIECE_ELEMENTS], dtype, quote=b"")
        yield (b"," if start else b"") + text[1:-1]
    yield b"]"


@functools.cache
def _shortest_table(dtype: str) -> NDArray[np.float64]:
    """For each of the 65,536 numbers of a half type the decimal with the fewest digits that rounds back
    to it, and of those no longer than it the number itself."""
    exact = widened(np.arange(2**16, dtype=np.uint16).view(STORAGE[dtype]), dtype)
    table = exact.copy()
    half = slice(0, 2**15)
    open_places = np.flatnonzero(np.isfinite(exact[half]) & (exact[half] > 0))
    for digits in range(1, 7):
        if not open_places.size:
            break
        candidates = np.array([float(f"{exact[i]:.{digits - 1}e}") for i in open_places])
        found = widened(round_numbers(candidates, dtype), dtype) == exact[open_places]
        # 65504 is no longer than 65500, and closer.
        shorter = np.array([len(repr(c)) < len(repr(x)) for c, x in zip(candidates, exact[open_places], strict=True)])
        table[open_places[found & shorter]] = candidates[found & shorter]
        open_places = open_places[~found]
    table[2**15 :] = -table[half]
    return table
