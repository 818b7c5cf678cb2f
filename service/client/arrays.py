"""Arrays of three kinds, to the bytes of the wire and back: numpy, torch on any device with any strides, nested lists.

torch is never imported here: whoever brings a tensor has imported it. Memory is copied only where it must be: a
contiguous array leaves from where it lies, and answers are views of the memory that they were received into.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "bool": 1, "int64": 8, "int32": 4}
"""The dtypes that the service answers with."""
_FOREIGN = frozenset(
    {"uint8", "int8", "int16", "uint16", "uint32", "uint64", "complex64", "float8_e4m3fn", "float8_e5m2"}
)
"""Dtypes that can be said on the wire, for the service to refuse in its own words."""
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_FORMS = "a numpy array, a torch tensor or nested lists"


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """An array as it travels: ``dtype`` by its name in the contract, ``data`` its bytes, row major, little endian."""

    dtype: str
    shape: Shape
    data: memoryview


class Kind(Protocol):
    """What a caller's arrays are, and so what he gets back."""

    def made(self, dtype: str, shape: Shape, data: memoryview) -> Any:
        """The array whose bytes are ``data``: a view of it where the kind allows."""
        ...


class NumpyKind:
    """numpy arrays; bfloat16 is ``ml_dtypes.bfloat16``."""

    def made(self, dtype: str, shape: Shape, data: memoryview) -> NDArray[Any]:
        return _viewed(dtype, shape, data)


@dataclass(frozen=True, slots=True)
class TorchKind:
    """torch tensors on ``device``."""

    device: Any

    def made(self, dtype: str, shape: Shape, data: memoryview) -> Any:
        torch: Any = sys.modules["torch"]
        stored = getattr(torch, dtype)
        # frombuffer refuses to be given nothing.
        flat = torch.frombuffer(data, dtype=stored) if data.nbytes else torch.empty(0, dtype=stored)
        return flat.view(shape).to(self.device)


class ListKind:
    """Nested lists."""

    def made(self, dtype: str, shape: Shape, data: memoryview) -> Any:
        return _viewed(dtype, shape, data).tolist()


NUMPY, LISTS = NumpyKind(), ListKind()


def _viewed(dtype: str, shape: Shape, data: memoryview) -> NDArray[Any]:
    if dtype == "bfloat16":
        # Only now: numpy knows no bfloat16, and most callers never ask for one.
        import ml_dtypes

        return np.frombuffer(data, dtype=ml_dtypes.bfloat16).reshape(shape)
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def is_torch(value: Any) -> bool:
    """Whether it is a tensor of torch; asked without importing torch."""
    torch: Any = sys.modules.get("torch")
    # Somebody else's half-imported torch, or another module of that name, has no Tensor.
    tensor = getattr(torch, "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def is_lists(value: Any) -> bool:
    return isinstance(value, list | tuple)


def kind_of(name: str, value: Any) -> Kind:
    """Raises: TypeError where it is none of the three."""
    if is_lists(value):
        return LISTS
    if is_torch(value):
        return TorchKind(value.device)
    if isinstance(value, np.ndarray):
        return NUMPY
    raise _not_an_array(name, value)


def shape_of(name: str, value: Any) -> Shape:
    """Of nested lists along their first members: whether others agree is the service's to say. Raises: TypeError."""
    if is_lists(value):
        shape = []
        while is_lists(value):
            shape.append(len(value))
            value = value[0] if value else None
        return tuple(shape)
    kind_of(name, value)
    return tuple(int(axis) for axis in value.shape)


def dtype_of(name: str, value: Any) -> str:
    """The name of an array's dtype, which the wire must have. Raises: TypeError."""
    dtype = str(value.dtype).removeprefix("torch.") if is_torch(value) else value.dtype.name
    if dtype not in ITEM_BYTES and dtype not in _FOREIGN:
        raise TypeError(f"{name}: {dtype} does not travel; {', '.join(ITEM_BYTES)} do")
    return dtype


def flat_of(name: str, value: Any) -> Flat:
    """A numpy array or torch tensor as it travels; copied only if it is not contiguous, not little endian or elsewhere.

    Raises: TypeError where it has no numbers, or a dtype that does not travel.
    """
    dtype = dtype_of(name, value)
    if is_torch(value):
        return Flat(dtype, shape_of(name, value), _torch_bytes(name, value))
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: a masked array; give its numbers, and allow_mask or block_mask beside them")
    array = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
    return Flat(dtype, value.shape, array.reshape(-1).view(np.uint8).data)


def _torch_bytes(name: str, tensor: Any) -> memoryview:
    torch: Any = sys.modules["torch"]
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        what = f"on {tensor.device}" if tensor.layout == torch.strided else f"with layout {tensor.layout}"
        raise TypeError(f"{name}: a tensor {what}; give a dense one that has numbers")
    # Views that are negated or conjugated by a bit alone have other bytes than they show.
    dense = tensor.detach().cpu().resolve_neg().resolve_conj().contiguous()
    return memoryview(dense.view(-1).view(torch.uint8).numpy())


def exact_flat(value: Sequence[Any], *, is_mask: bool) -> Flat | None:
    """Nested lists of truth values or of whole numbers as an array; None where they are not cleanly that.

    Nothing is rounded: what is None here is for the service to look at, which names the place of the fault.
    """
    leaves: list[Any] = []
    shape = shape_of("", value)
    level: list[Any] = [value]
    for axis in shape:
        if any(not is_lists(node) or len(node) != axis for node in level):
            return None
        level = [child for node in level for child in node]
    leaves = level
    wanted: tuple[type, ...] = (bool, np.bool_) if is_mask else (int, np.integer)
    if not leaves or any(not isinstance(leaf, wanted) or (not is_mask and isinstance(leaf, bool)) for leaf in leaves):
        return None
    try:
        array = np.array([leaf.item() if isinstance(leaf, np.generic) else leaf for leaf in leaves])
        array = array.astype(bool if is_mask else np.int64, casting="safe")
    except (OverflowError, TypeError):
        return None
    return Flat(array.dtype.name, shape, array.view(np.uint8).data)


def with_numbers(node: Any) -> Any:
    """Lists of an answer in JSON, their words for NaN and infinities as numbers."""
    if isinstance(node, list):
        return [with_numbers(child) for child in node]
    return _WORDS.get(node, node) if isinstance(node, str) else node


def with_words(node: Any) -> Any:
    """The other way round, for a request: JSON has no NaN. numpy's own numbers become Python's."""
    if isinstance(node, list | tuple):
        return [with_words(child) for child in node]
    if isinstance(node, dict):
        return {name: with_words(child) for name, child in node.items()}
    if isinstance(node, np.generic):
        node = node.item()
    if isinstance(node, float) and not math.isfinite(node):
        return "NaN" if math.isnan(node) else "Infinity" if node > 0 else "-Infinity"
    return node


def _not_an_array(name: str, value: Any) -> TypeError:
    return TypeError(f"{name}: {_FORMS}, not {type(value).__name__}")
