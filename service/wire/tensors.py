"""Tensors and their bytes: torch's dtypes by name, views without a copy, and the way from and to flat arrays."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attn_core.errors import Fault
from attn_core.validate import dtype_text
from service.wire.arrays import STORAGE, Buffer, FlatTensor, truth_faults

# Bodies that came as bytes are only ever read.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in STORAGE}
"""The dtypes that travel, by the name they have in JSON."""


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
        return truth_faults(name, tensor.contiguous().view(torch.uint8).numpy().reshape(-1))
    return []


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor, row major, little endian; a copy only if it is not on the host or not contiguous."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor on the host that has elements, row major, still in its shape."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.contiguous().numpy().data


def tensor_of(flat: FlatTensor) -> Tensor:
    """A tensor over the same memory."""
    bits = flat.data.view(np.int16) if flat.dtype == "bfloat16" else flat.data
    return torch.from_numpy(bits).view(DTYPES[flat.dtype]).view(flat.shape)


def flat_of(tensor: Tensor) -> FlatTensor:
    """A tensor as an array over the same memory; a copy only if it is not on the host or not contiguous."""
    name = dtype_text(tensor.dtype)
    flat = tensor.detach().cpu().contiguous().view(-1)
    bits = flat.view(torch.int16).numpy().view(np.uint16) if name == "bfloat16" else flat.numpy()
    return FlatTensor(name, tuple(tensor.shape), bits)
