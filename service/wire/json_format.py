"""JSON both ways: nested lists or base64 objects in, shortest digits or base64 out."""

from __future__ import annotations

import base64
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_core.errors import Fault, InvalidProblem
from attn_core.problem import TensorSpec
from attn_core.validate import MAX_FAULTS, dtype_text, names_text, shape_text
from service.wire.requests import (
    MASK_TENSORS,
    NUMBER_TENSORS,
    Call,
    DecodedRequest,
    Encoding,
    Parts,
    ReadLimits,
    assemble,
)
from service.wire.tensors import (
    DTYPES,
    FLOAT_NAMES,
    Buffer,
    Limits,
    bool_fault,
    bytes_of,
    decode_base64,
    overflow_place,
    path_of,
    round_numbers,
    shape_faults,
    view_bytes,
)
from service.wire.text import ListFault, NestedList, read_object, short, short_name

MEDIA_TYPE = "application/json"
SHORT_TEXT_BYTES = 64 * 1024
"""Text up to this length is joined: one write costs less than several."""
LIST_PIECE_ELEMENTS = 2**18
BASE64_PIECE_BYTES = 3 * 2**20
_TENSOR_FORMS = 'nested lists, or an object with "dtype", "shape" and "data"'


def decode(
    body: Buffer, call: Call, limits: ReadLimits, *, answer_is_json: bool = True, also: Sequence[Fault] = ()
) -> DecodedRequest:
    """A JSON body as a checked problem. Faults found before it was read stand ``also`` in a refusal.

    Raises: Malformed when it is not JSON; InvalidProblem with every fault.
    """
    try:
        members, repeated = read_object(body, NUMBER_TENSORS, frozenset((*call.tensors, *call.option_names)))
        return _decode_members(members, repeated, call, limits, answer_is_json=answer_is_json, also=also)
    except RecursionError:
        raise InvalidProblem([Fault("", "lists and objects a few levels deep", "hundreds of levels")]) from None


def _decode_members(
    members: dict[str, Any],
    repeated: Sequence[Fault],
    call: Call,
    limits: ReadLimits,
    *,
    answer_is_json: bool,
    also: Sequence[Fault],
) -> DecodedRequest:
    parts = Parts(faults=[*also, *repeated], broken={fault.field.split(".")[0] for fault in repeated})
    dtype = members.get("dtype")
    list_dtype = DTYPES[dtype] if isinstance(dtype, str) and dtype in FLOAT_NAMES else torch.float32
    option_names = frozenset(call.option_names)
    for name, value in members.items():
        if value is None:
            continue
        if name in call.tensors:
            _read_tensor(name, value, list_dtype, limits.tensors, parts)
        elif name in option_names:
            parts.options[name] = value.plain() if isinstance(value, NestedList) else value
        else:
            parts.unknown[name] = value
    first = call.tensors[0]
    parts.query_came_as_list = isinstance(members.get(first), NestedList)
    return assemble(call, parts, limits, answer_is_json=answer_is_json)


def _read_tensor(name: str, value: Any, list_dtype: torch.dtype, limits: Limits, parts: Parts) -> None:
    faults: list[Fault] = []
    tensor: Tensor | None = None
    if isinstance(value, NestedList):
        tensor = _from_lists(name, value, list_dtype, limits, faults)
        if name in NUMBER_TENSORS:
            parts.lists.add(name)
    elif isinstance(value, dict):
        tensor = _from_object(name, value, limits, faults, parts)
    elif name == "query_offset":
        if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
            tensor = torch.tensor([value])
        else:
            faults.append(Fault(name, "a whole number, or int64 [B] or [1]", short(value)))
    else:
        faults.append(Fault(name, _TENSOR_FORMS, short(value)))
    parts.faults += faults
    if tensor is None or faults:
        parts.broken.add(name)
    else:
        parts.tensors[name] = tensor


def _from_lists(
    name: str, value: NestedList, list_dtype: torch.dtype, limits: Limits, faults: list[Fault]
) -> Tensor | None:
    try:
        if name in NUMBER_TENSORS:
            numbers, shape = value.numbers()
            faults += shape_faults(name, shape, limits)
            if faults:
                return None
            tensor = round_numbers(numbers, list_dtype, shape)
            lost = overflow_place(numbers, tensor)
            if lost is not None:
                expected = f"a number that {dtype_text(list_dtype)} can hold"
                faults.append(Fault(path_of(name, lost, shape), expected, repr(float(numbers[lost]))))
            return tensor
        flat, shape = value.booleans() if name in MASK_TENSORS else value.whole_numbers()
        faults += shape_faults(name, shape, limits)
        return None if faults else torch.from_numpy(flat).view(shape)
    except ListFault as fault:
        for misfit in fault.misfits:
            field = f"{name}.{misfit.field}" if misfit.field else name
            faults.append(Fault(field, misfit.expected, misfit.received))
        return None


def _from_object(name: str, value: dict[str, Any], limits: Limits, faults: list[Fault], parts: Parts) -> Tensor | None:
    strangers = (member for member in value if member not in ("dtype", "shape", "data"))
    faults += [
        Fault(f"{name}.{short_name(member)}", "dtype, shape and data alone", short(value[member]))
        for member in itertools.islice(strangers, MAX_FAULTS)
    ]
    dtype_name, shape, data = value.get("dtype"), value.get("shape"), value.get("data")
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        received = "nothing" if dtype_name is None else short(dtype_name)
        faults.append(Fault(f"{name}.dtype", names_text(list(DTYPES)), received))
    if not isinstance(shape, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in shape):
        received = "nothing" if shape is None else short(shape)
        faults.append(Fault(f"{name}.shape", "a list of whole numbers", received))
    else:
        faults += shape_faults(f"{name}.shape", shape, limits)
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
    assert isinstance(dtype_name, str) and shape is not None and raw is not None
    dtype = DTYPES[dtype_name]
    # The shape can be compared with others even if the data does not fill it.
    parts.specs[name] = TensorSpec(dtype, tuple(shape))
    needed = math.prod(shape) * dtype.itemsize
    if len(raw) != needed:
        expected = f"{needed} bytes, {math.prod(shape)} elements, for {dtype_name} {shape_text(shape)}"
        received = f"{len(raw)} bytes, {len(raw) / dtype.itemsize:g} elements"
        faults.append(Fault(f"{name}.data", expected, received))
        return None
    tensor = view_bytes(raw, dtype, shape)
    faults += bool_fault(f"{name}.data", tensor)
    return tensor


def encode(outputs: Mapping[str, Tensor], info: Mapping[str, Any], encoding: Encoding) -> list[bytes | memoryview]:
    """An answer as pieces to be sent one after the other: every output in the asked form, and ``info``.

    Long tensors are written piece by piece, so that another thread gets its turn between two of them.
    """
    pieces: list[bytes | memoryview] = [b"{"]
    for name, tensor in outputs.items():
        pieces.append(b'"%b":' % name.encode())
        pieces += (
            _list_pieces(tensor.detach().cpu()) if encoding == "list" and tensor.numel() else _object_pieces(tensor)
        )
        pieces.append(b",")
    pieces.append(b'"info":' + orjson.dumps(info) + b"}")
    return pieces if sum(map(len, pieces)) > SHORT_TEXT_BYTES else [b"".join(pieces)]


def text_bytes(tensor_bytes: int, itemsize: int, encoding: Encoding) -> int:
    """About how long the text of so many bytes of tensors will be, rather too long than too short."""
    if encoding == "base64":
        return 256 + tensor_bytes * 4 // 3
    return 256 + tensor_bytes // itemsize * (26 if itemsize == 8 else 16)


def _object_pieces(tensor: Tensor) -> Iterator[bytes]:
    head = orjson.dumps({"dtype": dtype_text(tensor.dtype), "shape": list(tensor.shape)})
    yield head[:-1] + b',"data":"'
    data = bytes_of(tensor)
    for start in range(0, len(data), BASE64_PIECE_BYTES):
        yield base64.b64encode(data[start : start + BASE64_PIECE_BYTES])
    yield b'"}'


def _list_pieces(tensor: Tensor) -> Iterator[bytes]:
    if tensor.numel() <= LIST_PIECE_ELEMENTS or tensor.ndim == 1:
        yield _list_text(tensor)
        return
    for index, part in enumerate(tensor):
        yield b"," if index else b"["
        yield from _list_pieces(part)
    yield b"]"


def _list_text(tensor: Tensor) -> bytes:
    tensor = tensor.contiguous()
    array = _shortest_half(tensor) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.numpy()
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    if not tensor.is_floating_point() or b"null" not in text:
        return text
    # orjson writes null for what JSON cannot say. In order of appearance:
    flat = tensor.view(-1)
    special = flat[~torch.isfinite(flat)]
    if bool(torch.isneginf(special).all()):
        return text.replace(b"null", b'"-Infinity"')
    words = iter([_word_of(number) for number in special.tolist()])
    return re.sub(rb"null", lambda _: next(words), text)


def _word_of(number: float) -> bytes:
    if math.isnan(number):
        return b'"NaN"'
    return b'"Infinity"' if number > 0 else b'"-Infinity"'


def _shortest_half(tensor: Tensor) -> NDArray[np.float64]:
    """The float64 numbers whose shortest text is also the shortest that gives back the half numbers' bits."""
    bits = tensor.view(torch.int16).numpy().view(np.uint16)
    return _shortest_table(tensor.dtype)[bits]


@functools.cache
def _shortest_table(dtype: torch.dtype) -> NDArray[np.float64]:
    """For each of the 65,536 numbers of a half type the decimal with the fewest digits that rounds back
    to it, and of those no longer than it the number itself."""
    exact = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).double().numpy()
    table = exact.copy()
    half = slice(0, 2**15)
    open_places = np.flatnonzero(np.isfinite(exact[half]) & (exact[half] > 0))
    for digits in range(1, 7):
        if not open_places.size:
            break
        candidates = np.array([float(f"{exact[i]:.{digits - 1}e}") for i in open_places])
        back = round_numbers(candidates.copy(), dtype, candidates.shape).double().numpy()
        found = back == exact[open_places]
        # 65504 is no longer than 65500, and closer.
        shorter = np.array([len(repr(c)) < len(repr(x)) for c, x in zip(candidates, exact[open_places], strict=True)])
        table[open_places[found & shorter]] = candidates[found & shorter]
        open_places = open_places[~found]
    table[2**15 :] = -table[half]
    return table
