"""What is asked: shapes, formats, connections; the bytes of each request, and the tensor in those of an answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.benchmarks.headers import ANSWER_BYTES, HEAD_ALIGNMENT, SHAPE

Inputs = tuple[Tensor, Tensor, Tensor]

MAX_REQUESTS = 4
"""Different requests in one cell; connections share them in turn."""
NAMES = ("query", "key", "value")


class NoSuchCell(Exception):
    """A pattern that selects no cell."""


@dataclass(frozen=True, slots=True)
class Shape:
    """``[batch, num_heads, seq_len, head_dim]`` of query, key and value alike."""

    name: str
    sizes: tuple[int, int, int, int]
    connections: tuple[int, ...]

    @property
    def tensor_bytes(self) -> int:
        return int(np.prod(self.sizes)) * 4


@dataclass(frozen=True, slots=True)
class Format:
    """A way of writing tensors, the same in the request and in the answer."""

    name: str
    media_type: str
    encode: Callable[[Inputs], bytes]
    decode: Callable[[bytes], Tensor]


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    shape: Shape
    format: Format
    connections: int

    @property
    def name(self) -> str:
        return f"{self.shape.name}/{self.format.name}/c{self.connections}"

    @property
    def num_requests(self) -> int:
        return min(self.connections, MAX_REQUESTS)


def _encode_safetensors(inputs: Inputs) -> bytes:
    header, data, at = {}, b"", 0
    for name, tensor in zip(NAMES, inputs, strict=True):
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        data += tensor.numpy().tobytes()
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def _decode_safetensors(body: bytes) -> Tensor:
    data_at = 8 + int.from_bytes(body[:8], "little")
    entry = json.loads(body[8:data_at])["context"]
    begin, end = entry["data_offsets"]
    return _tensor(np.frombuffer(body[data_at + begin : data_at + end], "<f4").reshape(entry["shape"]))


def _encode_json(inputs: Inputs) -> bytes:
    members = {name: tensor.numpy() for name, tensor in zip(NAMES, inputs, strict=True)}
    return orjson.dumps(members, option=orjson.OPT_SERIALIZE_NUMPY)


def _decode_json(body: bytes) -> Tensor:
    return _tensor(np.asarray(orjson.loads(body)["context"], np.float32))


def _tensor(numbers: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(numbers.copy())


SAFETENSORS = Format("safetensors", "application/vnd.safetensors", _encode_safetensors, _decode_safetensors)
JSON = Format("json", "application/json", _encode_json, _decode_json)
SHAPES = (
    Shape("tiny", (1, 4, 16, 32), (1, 8, 32)),
    Shape("small", (1, 8, 128, 64), (1, 8)),
    Shape("medium", (1, 8, 512, 64), (1, 8)),
)
CELLS = tuple(
    Cell(shape, form, count) for shape in SHAPES for form in (SAFETENSORS, JSON) for count in shape.connections
)


def select_cells(patterns: str) -> list[Cell]:
    """The cells that any of the patterns fits: ``tiny``, ``medium/json``, ``c1``, with commas between.

    Raises: NoSuchCell for a pattern that fits none.
    """
    chosen: set[Cell] = set()
    for pattern in patterns.split(","):
        parts = set(pattern.strip().split("/"))
        fitting = {cell for cell in CELLS if parts <= set(cell.name.split("/"))}
        if not fitting:
            raise NoSuchCell(f"{pattern!r} fits none of {', '.join(cell.name for cell in CELLS)}")
        chosen |= fitting
    return [cell for cell in CELLS if cell in chosen]


@functools.cache
def inputs_of(shape: Shape, index: int) -> Inputs:
    """Query, key and value of one request: float32, normally distributed, from a seed."""
    generator = torch.Generator().manual_seed(100 + index)
    query, key, value = (torch.randn(shape.sizes, generator=generator) for _ in NAMES)
    return query, key, value


def request_bytes(shape: Shape, form: Format, index: int) -> bytes:
    """A whole HTTP request, the same for every server; the extra headers are for the echo and for the bound."""
    body = form.encode(inputs_of(shape, index))
    head = (
        "POST /v1/attention HTTP/1.1\r\n"
        "host: 127.0.0.1\r\n"
        f"content-type: {form.media_type}\r\n"
        f"content-length: {len(body)}\r\n"
        f"{SHAPE}: {','.join(str(size) for size in shape.sizes)}\r\n"
        f"{ANSWER_BYTES}: {shape.tensor_bytes}\r\n"
        "x-padding: {}\r\n\r\n"
    )
    return head.format("0" * (-(len(head) - 2) % HEAD_ALIGNMENT)).encode() + body


def decode_raw(body: bytes, shape: Shape) -> Tensor:
    """The bound's answer: the context and nothing else."""
    return _tensor(np.frombuffer(body, "<f4").reshape(shape.sizes))
