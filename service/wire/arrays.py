"""Tensors without torch: flat numpy arrays with the dtype and shape they have on the wire; rounding, base64, limits.

A process that reads and writes text for the server never imports torch (``service/text_process.py``), so nothing
here and in ``text`` and ``json_arrays`` may.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_core.errors import Fault, shape_text

Buffer = bytes | bytearray | memoryview

STORAGE: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "bool": np.dtype(np.bool_),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
}
"""The dtypes that travel, by the name they have in JSON, and what holds their bits here."""
FLOAT_NAMES: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16")
HALF_NAMES: tuple[str, ...] = ("float16", "bfloat16")
MAX_RANK = 4
ALIGNMENT_BYTES = 64
"""``attn_core.placement`` says why: tensors that begin on a multiple of it are computed where they lie."""
_BFLOAT16_NAN = 0xFFFF
"""What torch makes of any NaN."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most elements a tensor may have, the most that one axis may count, the most lists one JSON body may have."""

    max_tensor_elements: int = 2**31 - 1
    max_axis: int = 2**24
    max_json_lists: int = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class FlatTensor:
    """A tensor as its bits lie in memory: row major, ``data`` one-dimensional, of the dtype in ``STORAGE``."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[Any]


Room = Callable[[str, int], NDArray[Any]]
"""Gives writable memory for so many elements of a dtype."""


def aligned_room(dtype: str, count: int) -> NDArray[Any]:
    """Fresh memory of this process, beginning where torch would begin it."""
    storage = STORAGE[dtype]
    raw = np.empty(count * storage.itemsize + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + count * storage.itemsize].view(storage)


def shape_faults(name: str, shape: Sequence[int], limits: Limits) -> list[Fault]:
    """What is wrong with a declared shape by itself. Nothing is allocated for it."""
    if len(shape) > MAX_RANK:
        received = shape_text(shape) if len(shape) <= 2 * MAX_RANK else f"{len(shape)} axes"
        return [Fault(name, f"at most {MAX_RANK} axes", received)]
    received = short_shape(shape)
    if any(axis < 0 or axis > limits.max_axis for axis in shape):
        return [Fault(name, f"axes of 0 to {limits.max_axis}", received)]
    # An axis of 0 must not hide what the others multiply to: strides are made of them.
    if math.prod(max(1, axis) for axis in shape) > limits.max_tensor_elements:
        expected = f"at most {limits.max_tensor_elements} elements, an axis of 0 taken as 1"
        return [Fault(name, expected, received)]
    return []


def short_shape(shape: Sequence[int]) -> str:
    """A shape as text, cut where an axis has more digits than any number that fits."""
    text = shape_text(shape)
    return text if len(text) <= 120 else text[:120] + "…"


def truth_faults(name: str, raw: NDArray[np.uint8]) -> list[Fault]:
    """A boolean is a byte of 0 or 1; any other byte would be read differently by different kernels."""
    top = int(raw.max(initial=0))
    return [Fault(name, "bytes of 0 or 1 for bool", f"a byte of {top}")] if top > 1 else []


def decode_base64(text: str) -> bytes:
    """Standard alphabet, padded, nothing else. Raises: ValueError saying what is wrong."""
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(str(error)) from None
    spare = len(data) % 3
    if spare and binascii.b2a_base64(data[-spare:], newline=False).decode() != text[-4:]:
        raise ValueError("bits behind the last byte that are not 0")
    return data


def round_numbers(numbers: NDArray[np.float64], dtype: str, room: Room = aligned_room) -> NDArray[Any]:
    """Numbers rounded once, half to even, from float64 to a float ``dtype``."""
    rounded = room(dtype, numbers.size)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != "bfloat16":
            rounded[:] = numbers
            return rounded
        # By way of float32 the number would be rounded twice. Rounded to odd on the way, it is not.
        single = numbers.astype(np.float32)
        toward_zero = np.where(np.abs(single) > np.abs(numbers), np.nextafter(single, np.float32(0)), single)
        inexact = (toward_zero.astype(np.float64) != numbers) & np.isfinite(numbers)
        bits = toward_zero.view(np.uint32) | inexact
        # Half to even on the upper 16 bits; beyond the largest number this carries into infinity.
        bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded[:] = bits >> np.uint32(16)
        rounded[np.isnan(numbers)] = _BFLOAT16_NAN
    return rounded


def infinities(bits: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    """Where numbers of a float ``dtype`` are infinite."""
    infinite: NDArray[np.bool_] = (bits & 0x7FFF) == 0x7F80 if dtype == "bfloat16" else np.isinf(bits)
    return infinite


def overflow_place(numbers: NDArray[np.float64], rounded: NDArray[Any], dtype: str) -> int | None:
    """Where a finite number became infinite in rounding: a flat index, or None."""
    became = infinities(rounded, dtype)
    if not became.any():
        return None
    lost = np.flatnonzero(became & np.isfinite(numbers))
    return int(lost[0]) if lost.size else None


def widened(bits: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Numbers of a float ``dtype`` as float64, none of them changed."""
    if dtype != "bfloat16":
        return bits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        # Some NaN signal.
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def path_of(name: str, flat_index: int, shape: Sequence[int]) -> str:
    """``key.0.0.1``: the dotted path of an element."""
    return ".".join([name, *(str(i) for i in np.unravel_index(flat_index, tuple(shape)))])
