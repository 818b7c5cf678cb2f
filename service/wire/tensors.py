"""Tensors and their bytes: names of dtypes, views without a copy, rounding of numbers that came as text, limits."""

from __future__ import annotations

import binascii
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_core.errors import Fault
from attn_core.problem import FLOAT_DTYPES
from attn_core.validate import dtype_text, shape_text

# Bodies that came as bytes are only ever read.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)

Buffer = bytes | bytearray | memoryview

DTYPES: dict[str, torch.dtype] = {
    dtype_text(dtype): dtype for dtype in (*FLOAT_DTYPES, torch.bool, torch.int64, torch.int32)
}
"""The dtypes that travel, by the name they have in JSON."""
FLOAT_NAMES: tuple[str, ...] = tuple(dtype_text(dtype) for dtype in FLOAT_DTYPES)
MAX_RANK = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """The most elements a tensor may have, and the most that one axis may count."""

    max_tensor_elements: int = 2**31 - 1
    max_axis: int = 2**24


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


def view_bytes(data: Buffer, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
    """A tensor over ``data`` from ``offset`` on, without a copy where the alignment allows it.

    The length of the data has been checked. Little endian, row major.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    if offset % dtype.itemsize:
        data, offset = bytearray(memoryview(data)[offset : offset + count * dtype.itemsize]), 0
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def bool_fault(name: str, tensor: Tensor) -> list[Fault]:
    """A boolean is a byte of 0 or 1; any other byte would be read differently by different kernels."""
    if tensor.dtype == torch.bool and tensor.numel():
        top = int(tensor.view(torch.uint8).max())
        if top > 1:
            return [Fault(name, "bytes of 0 or 1 for bool", f"a byte of {top}")]
    return []


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor, row major, little endian; a copy only if it is not on the host or not contiguous."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


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


def round_numbers(numbers: NDArray[np.float64], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Numbers rounded once, half to even, from float64 to ``dtype``; ``numbers`` must own writable memory."""
    if dtype == torch.float64:
        return torch.from_numpy(numbers).view(tuple(shape))
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == torch.float16:
            return torch.from_numpy(numbers.astype(np.float16)).view(tuple(shape))
        single = numbers.astype(np.float32)
        if dtype == torch.bfloat16:
            # By way of float32 the number would be rounded twice. Rounded to odd on the way, it is not.
            toward_zero = np.where(np.abs(single) > np.abs(numbers), np.nextafter(single, np.float32(0)), single)
            bits = toward_zero.view(np.uint32)
            inexact = toward_zero.astype(np.float64) != numbers
            odd = np.where(inexact & np.isfinite(numbers), bits | 1, bits).astype(np.uint32)
            return torch.from_numpy(odd.view(np.float32)).to(torch.bfloat16).view(tuple(shape))
    return torch.from_numpy(single).view(tuple(shape))


def overflow_place(numbers: NDArray[np.float64], rounded: Tensor) -> int | None:
    """Where a finite number became infinite in rounding: a flat index, or None."""
    became = torch.isinf(rounded).view(-1)
    if not became.any():
        return None
    lost = np.flatnonzero(became.numpy() & np.isfinite(numbers))
    return int(lost[0]) if lost.size else None


def path_of(name: str, flat_index: int, shape: Sequence[int]) -> str:
    """``key.0.0.1``: the dotted path of an element."""
    return ".".join([name, *(str(i) for i in np.unravel_index(flat_index, tuple(shape)))])
