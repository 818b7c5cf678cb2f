"""safetensors both ways: a header of JSON, then the tensors' bytes, read in place. Options and info are metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import torch
from torch import Tensor

from attn_core.errors import Fault, InvalidProblem
from attn_core.problem import LayerParameters
from service.errors import Malformed
from service.wire.arrays import Buffer, Limits, shape_faults
from service.wire.json_arrays import MASK_TENSORS
from service.wire.requests import (
    LAYER_PARAMETERS,
    Call,
    DecodedRequest,
    Form,
    NamedCall,
    Parts,
    ReadLimits,
    assemble,
    assemble_parameters,
)
from service.wire.tensors import bool_fault, bytes_of, view_bytes
from service.wire.text import load_small, repeated_fault, short, short_name

MEDIA_TYPE = "application/vnd.safetensors"
MAX_HEADER_BYTES = 2**20
CONTENT_HASH = "content_hash"
"""In the metadata of a kept layer's file alone: what its content was as it was written."""

CODES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
}
CODE_OF = {dtype: code for code, dtype in CODES.items()}
# Dtypes of the format that no tensor here may have: named in the refusal, and measured, so that offsets can be checked.
_FOREIGN_BITS = {"U8": 8, "I8": 8, "I16": 16, "U16": 16, "U32": 32, "U64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "C64": 64}


def decode(
    body: Buffer,
    call: Call | NamedCall,
    limits: ReadLimits,
    *,
    answer_is_json: bool = False,
    also: Sequence[Fault] = (),
    stored: LayerParameters | None = None,
) -> DecodedRequest:
    """A safetensors body as a checked problem; the tensors are views of ``body`` where alignment allows.

    Faults found before it was read stand ``also`` in a refusal.

    Raises: Malformed when bytes, offsets and sizes disagree; InvalidProblem with every fault.
    """
    header, data_start = _read_header(body)
    parts = _read(body, header, data_start, call, limits.tensors, also)
    return assemble(call, parts, limits, answer_is_json=answer_is_json, stored=stored)


def decode_parameters(body: Buffer, limits: ReadLimits, *, also: Sequence[Fault] = ()) -> LayerParameters:
    """A safetensors body as a layer that is to be kept; its weights are views of ``body``, as in ``decode``.

    Raises: Malformed when bytes, offsets and sizes disagree; InvalidProblem with every fault.
    """
    header, data_start = _read_header(body)
    return assemble_parameters(_read(body, header, data_start, LAYER_PARAMETERS, limits.tensors, also))


def decode_kept(file: Buffer, limits: ReadLimits) -> tuple[LayerParameters, str | None]:
    """A file that ``encode_parameters`` wrote, and the hash of its content that it has; None where it has none.

    Raises: as ``decode_parameters``.
    """
    header, data_start = _read_header(file)
    metadata = header.get("__metadata__")
    written = metadata.pop(CONTENT_HASH, None) if isinstance(metadata, dict) else None
    return assemble_parameters(_read(file, header, data_start, LAYER_PARAMETERS, limits.tensors, ())), written


def _read(
    body: Buffer, header: dict[str, Any], data_start: int, form: Form, limits: Limits, also: Sequence[Fault]
) -> Parts:
    """A body taken apart. Raises: Malformed, InvalidProblem."""
    parts = Parts(faults=list(also))
    metadata = header.pop("__metadata__", {})
    _read_metadata(metadata, form, parts)
    _check_layout(header, len(body) - data_start)
    for name, entry in header.items():
        if name not in form.tensors:
            if name in form.option_names:
                expected = "an option: JSON text in the metadata entry options, not a tensor"
                parts.faults.append(Fault(name, expected, f"a tensor {entry['dtype']} {short(entry['shape'])}"))
            else:
                parts.unknown[name] = {"dtype": entry["dtype"], "shape": entry["shape"]}
            continue
        _read_tensor(name, entry, body, data_start, limits, parts)
    return parts


def _malformed(field: str, expected: str, received: str) -> Malformed:
    field = short_name(field)
    return Malformed(f"{field or 'body'}: {expected}", faults=[Fault(field, expected, received)])


def _read_header(body: Buffer) -> tuple[dict[str, Any], int]:
    if len(body) < 8:
        raise _malformed("", "8 bytes of header length, the header, the data", f"{len(body)} bytes")
    length = int.from_bytes(body[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise _malformed("", f"a header of at most {MAX_HEADER_BYTES} bytes", f"a header length of {length}")
    if 8 + length > len(body):
        raise _malformed("", f"a header of {length} bytes", f"{len(body) - 8} bytes after the length")
    try:
        text = str(body[8 : 8 + length], "utf-8")
    except UnicodeDecodeError as error:
        raise _malformed("", "a header in UTF-8", str(error)) from None
    if not text.startswith("{"):
        raise _malformed("", "a header that begins with {", short(text[:8]))
    header, repeated = load_small(text)
    if not isinstance(header, dict):
        raise _malformed("", "a header that is a JSON object", short(header))
    if repeated:
        raise InvalidProblem([repeated_fault(name) for name in repeated])
    return header, 8 + length


def _read_metadata(metadata: Any, form: Form, parts: Parts) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _malformed("__metadata__", "an object of texts", short(metadata))
    parts.faults += [
        Fault(f"__metadata__.{short_name(name)}", "options or format alone", short(text))
        for name, text in metadata.items()
        if name not in ("options", "format")
    ]
    if "options" not in metadata:
        return
    try:
        options, repeated = load_small(metadata["options"])
    except Malformed as error:
        fault = error.faults[0]
        raise _malformed("options", f"{fault.expected}, as text", fault.received) from None
    if not isinstance(options, dict):
        raise InvalidProblem([Fault("options", "one JSON object", short(options))])
    parts.faults += [repeated_fault(name) for name in repeated]
    for name, value in options.items():
        if value is None:
            continue
        if name in form.option_names:
            parts.options[name] = value
        elif name == "query_offset" and name in form.tensors:
            _read_offset(value, parts)
        elif name in form.tensors:
            parts.faults.append(Fault(name, "a tensor of the file, not an option", short(value)))
            parts.broken.add(name)
        else:
            parts.unknown[name] = value


def _read_offset(value: Any, parts: Parts) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        parts.tensors["query_offset"] = torch.tensor([value])
    else:
        parts.faults.append(Fault("query_offset", "a whole number", short(value)))
        parts.broken.add("query_offset")


def _check_layout(header: Mapping[str, Any], data_bytes: int) -> None:
    """Entries are well formed and their ranges cover the data without hole or overlap. Raises: Malformed."""
    ranges = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise _malformed(name, "an object of dtype, shape and data_offsets", short(entry))
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not isinstance(entry["dtype"], str):
            raise _malformed(f"{name}.dtype", "a text", short(entry["dtype"]))
        if not isinstance(shape, list) or not all(type(axis) is int and axis >= 0 for axis in shape):
            raise _malformed(f"{name}.shape", "a list of whole numbers", short(shape))
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(place) is int for place in offsets):
            raise _malformed(f"{name}.data_offsets", "two whole numbers", short(offsets))
        begin, end = offsets
        if not 0 <= begin <= end <= data_bytes:
            expected = f"a range inside the {data_bytes} bytes of data"
            raise _malformed(f"{name}.data_offsets", expected, short(offsets))
        code = entry["dtype"]
        bits = CODES[code].itemsize * 8 if code in CODES else _FOREIGN_BITS.get(code)
        if bits is not None and (end - begin) * 8 != math.prod(shape) * bits:
            expected = f"{math.prod(shape) * bits // 8} bytes for {code} {short(shape)}"
            raise _malformed(f"{name}.data_offsets", expected, f"{end - begin} bytes")
        ranges.append((begin, end, name))
    ranges.sort()
    reached = 0
    for begin, end, name in ranges:
        if begin != reached:
            raise _malformed(
                f"{name}.data_offsets", f"data that begins at {reached}, without hole or overlap", str(begin)
            )
        reached = end
    if reached != data_bytes:
        raise _malformed("", f"{reached} bytes of data, as the header says", f"{data_bytes} bytes")


def _read_tensor(
    name: str, entry: Mapping[str, Any], body: Buffer, data_start: int, limits: Limits, parts: Parts
) -> None:
    code, shape = entry["dtype"], entry["shape"]
    faults = shape_faults(name, shape, limits)
    if code not in CODES:
        expected = (
            "BOOL (a number to add is bias, 0 and 1 are not a mask)" if name in MASK_TENSORS else ", ".join(CODES)
        )
        faults.append(Fault(f"{name}.dtype", expected, short_name(code)))
    if name in parts.tensors or name in parts.broken:
        faults.append(Fault(name, "one of tensor and option", "both"))
    if not faults:
        tensor = view_bytes(body, CODES[code], shape, data_start + entry["data_offsets"][0])
        faults += bool_fault(name, tensor)
        parts.tensors[name] = tensor
    if faults:
        parts.faults += faults
        parts.tensors.pop(name, None)
        parts.broken.add(name)


def encode(outputs: Mapping[str, Tensor], info: Mapping[str, Any]) -> list[bytes | memoryview]:
    """An answer as pieces to be sent one after the other; the tensors' memory is not copied."""
    return write(outputs, {"info": orjson.dumps(info).decode()})


def encode_parameters(parameters: LayerParameters, content_hash: str) -> list[bytes | memoryview]:
    """A layer that is kept as pieces of what ``decode_kept`` reads."""
    options = {
        "weight_layout": parameters.weight_layout,
        "num_heads": parameters.num_heads,
        "num_kv_heads": parameters.num_kv_heads,
    }
    return write(
        parameters.weights, {"format": "pt", "options": orjson.dumps(options).decode(), CONTENT_HASH: content_hash}
    )


def write(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """Tensors and texts as the pieces of a file; the tensors' memory is not copied."""
    header: dict[str, Any] = {"__metadata__": metadata}
    pieces: list[bytes | memoryview] = []
    begin = 0
    for name, tensor in tensors.items():
        data = bytes_of(tensor)
        header[name] = {
            "dtype": CODE_OF[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + len(data)],
        }
        begin += len(data)
        if len(data):
            pieces.append(data)
    text = orjson.dumps(header)
    # The data begin at a multiple of 8, so that readers can use them where they lie.
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *pieces]
