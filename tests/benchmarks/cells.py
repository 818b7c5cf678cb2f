"""What is asked: sizes, formats, connections; the bytes of each request, and the tensor in those of an answer."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import orjson
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from torch import Tensor

from service.wire import open_inference_pb2 as messages
from tests.benchmarks.headers import ANSWER_BYTES, HEAD_ALIGNMENT, SHAPE, TEXT_BYTES

Sizes = tuple[int, int, int, int]
"""``[batch, num_heads, seq_len, head_dim]`` of query, key and value alike."""
Inputs = tuple[Tensor, Tensor, Tensor]

MAX_ALIKE_REQUESTS = 4
"""Different requests of one size in one cell."""
NUM_MIXED_LENGTHS = 32
MIXED_LENGTHS = range(17, 257)
MIXED_SEED = 3
NAMES = ("query", "key", "value")
ATTENTION_PATH = "/v1/attention"
MODEL = "sdpa"
"""Of the service's Open Inference Protocol."""
INFER_METHOD = "/inference.GRPCInferenceService/ModelInfer"


class NoSuchCell(Exception):
    """A pattern that selects no cell."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The sizes of different requests. Each connection goes round all of them and begins at another."""

    name: str
    sizes: tuple[Sizes, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """A way of writing tensors, the same in the request and in the answer.

    ``encode`` gives what stands before the tensors and the tensors; ``decode`` the context in an answer. ``is_grpc``:
    what ``encode`` gives is a message, and ``path`` the method that it is sent to.
    """

    name: str
    media_type: str
    encode: Callable[[Inputs], tuple[bytes, bytes]]
    decode: Callable[[bytes, Sizes], Tensor]
    path: str = ATTENTION_PATH
    is_grpc: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table. ``is_optional``: measured when named and not otherwise."""

    workload: Workload
    format: Format
    connections: int
    is_optional: bool = False

    @property
    def name(self) -> str:
        return f"{self.workload.name}/{self.format.name}/c{self.connections}"

    @property
    def sizes(self) -> tuple[Sizes, ...]:
        """Of each request that is sent."""
        return self.workload.sizes[: self.connections]

    @property
    def tensor_bytes_inside(self) -> int:
        """Of requests and answers, when each connection has its largest under way."""
        return self.connections * 4 * max(tensor_bytes(sizes) for sizes in self.sizes)


def tensor_bytes(sizes: Sizes) -> int:
    """Of one tensor of these sizes: query, key, value or context."""
    return math.prod(sizes) * 4


def _encode_safetensors(inputs: Inputs) -> tuple[bytes, bytes]:
    header, at = {}, 0
    for name, tensor in zip(NAMES, inputs, strict=True):
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, join(inputs)


def _decode_safetensors(body: bytes, sizes: Sizes) -> Tensor:
    data_at = 8 + int.from_bytes(body[:8], "little")
    entry = json.loads(body[8:data_at])["context"]
    begin, end = entry["data_offsets"]
    return _tensor(np.frombuffer(body[data_at + begin : data_at + end], "<f4").reshape(entry["shape"]))


def _encode_json(inputs: Inputs) -> tuple[bytes, bytes]:
    members = {name: tensor.numpy() for name, tensor in zip(NAMES, inputs, strict=True)}
    return orjson.dumps(members, option=orjson.OPT_SERIALIZE_NUMPY), b""


def _decode_json(body: bytes, sizes: Sizes) -> Tensor:
    return _tensor(np.asarray(orjson.loads(body)["context"], np.float32))


def _encode_v2(inputs: Inputs) -> tuple[bytes, bytes]:
    described = [
        {
            "name": name,
            "shape": list(tensor.shape),
            "datatype": "FP32",
            "parameters": {"binary_data_size": tensor.nbytes},
        }
        for name, tensor in zip(NAMES, inputs, strict=True)
    ]
    outputs = [{"name": "context", "parameters": {"binary_data": True}}]
    return json.dumps({"inputs": described, "outputs": outputs}).encode(), join(inputs)


def _decode_v2(body: bytes, sizes: Sizes) -> Tensor:
    data_at = len(body) - tensor_bytes(sizes)
    (output,) = json.loads(body[:data_at])["outputs"]
    return decode_raw(body[data_at:], tuple(output["shape"]))


def _encode_grpc(model: str, inputs: Inputs) -> tuple[bytes, bytes]:
    request = messages.ModelInferRequest(model_name=model)
    for name, tensor in zip(NAMES, inputs, strict=True):
        request.inputs.add(name=name, datatype="FP32", shape=list(tensor.shape))
        request.raw_input_contents.append(tensor.numpy().tobytes())
    return b"", request.SerializeToString()


def _decode_grpc(body: bytes, sizes: Sizes) -> Tensor:
    try:
        answer = messages.ModelInferResponse.FromString(body)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    (output,), (contents,) = answer.outputs, answer.raw_output_contents
    return _tensor(np.frombuffer(contents, "<f4").reshape(tuple(output.shape)))


def decode_raw(body: bytes, sizes: Sizes) -> Tensor:
    """An answer that is the context and nothing else."""
    return _tensor(np.frombuffer(body, "<f4").reshape(sizes))


def join(inputs: Inputs) -> bytes:
    """The numbers of query, key and value, end to end."""
    return b"".join(tensor.numpy().tobytes() for tensor in inputs)


def _tensor(numbers: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(numbers.copy())


def v2_of(model: str, name: str) -> Format:
    """The Open Inference Protocol over HTTP, with Triton's extension for binary tensors."""
    return Format(name, "application/octet-stream", _encode_v2, _decode_v2, path=f"/v2/models/{model}/infer")


def grpc_of(model: str, name: str) -> Format:
    """The Open Inference Protocol over gRPC, with raw contents."""
    encode = functools.partial(_encode_grpc, model)
    return Format(name, "application/grpc", encode, _decode_grpc, path=INFER_METHOD, is_grpc=True)


def _mixed_sizes() -> tuple[Sizes, ...]:
    lengths = random.Random(MIXED_SEED).sample(MIXED_LENGTHS, NUM_MIXED_LENGTHS)
    return tuple((1, 8, length, 64) for length in lengths)


SAFETENSORS = Format("safetensors", "application/vnd.safetensors", _encode_safetensors, _decode_safetensors)
JSON = Format("json", "application/json", _encode_json, _decode_json)
V2 = v2_of(MODEL, "v2")
GRPC = grpc_of(MODEL, "grpc")
TINY = Workload("tiny", ((1, 4, 16, 32),) * MAX_ALIKE_REQUESTS)
SMALL = Workload("small", ((1, 8, 128, 64),) * MAX_ALIKE_REQUESTS)
MEDIUM = Workload("medium", ((1, 8, 512, 64),) * MAX_ALIKE_REQUESTS)
LARGE = Workload("large", ((1, 16, 2048, 64),) * MAX_ALIKE_REQUESTS)
MIXED = Workload("mixed", _mixed_sizes())
# Large comes first, where malloc keeps nothing of other cells: its memory has a goal.
CELLS = (
    Cell(LARGE, SAFETENSORS, 1),
    Cell(TINY, SAFETENSORS, 1),
    Cell(TINY, SAFETENSORS, 8, is_optional=True),
    Cell(TINY, SAFETENSORS, 32),
    Cell(SMALL, SAFETENSORS, 1),
    Cell(SMALL, SAFETENSORS, 8),
    Cell(SMALL, SAFETENSORS, 32),
    Cell(MEDIUM, SAFETENSORS, 1),
    Cell(MEDIUM, SAFETENSORS, 8),
    Cell(MIXED, SAFETENSORS, 64),
    Cell(TINY, JSON, 1),
    Cell(TINY, JSON, 8, is_optional=True),
    Cell(TINY, JSON, 32, is_optional=True),
    Cell(SMALL, JSON, 1),
    Cell(SMALL, JSON, 8, is_optional=True),
    Cell(MEDIUM, JSON, 1, is_optional=True),
    Cell(MEDIUM, JSON, 8, is_optional=True),
    Cell(TINY, V2, 1),
    Cell(TINY, V2, 32, is_optional=True),
    Cell(SMALL, V2, 1),
    Cell(SMALL, V2, 8),
    Cell(SMALL, V2, 32, is_optional=True),
    Cell(MEDIUM, V2, 1, is_optional=True),
    Cell(MEDIUM, V2, 8, is_optional=True),
    Cell(LARGE, V2, 1, is_optional=True),
    Cell(TINY, GRPC, 1),
    Cell(TINY, GRPC, 32),
    Cell(SMALL, GRPC, 1),
    Cell(SMALL, GRPC, 8),
    Cell(SMALL, GRPC, 32),
    Cell(MEDIUM, GRPC, 1),
    Cell(MEDIUM, GRPC, 8),
    Cell(LARGE, GRPC, 1),
)
USUAL = "usual"
"""The pattern for all cells that are not optional."""


def select_cells(patterns: str) -> list[Cell]:
    """The cells that any of the patterns fits: ``tiny``, ``medium/json``, ``c1``, ``usual``, with commas between.

    Raises: NoSuchCell for a pattern that fits none.
    """
    chosen: set[Cell] = set()
    for pattern in patterns.split(","):
        parts = set(pattern.strip().split("/"))
        fitting = {cell for cell in CELLS if parts <= _words(cell)}
        if not fitting:
            raise NoSuchCell(f"{pattern!r} fits none of {', '.join(cell.name for cell in CELLS)}")
        chosen |= fitting
    return [cell for cell in CELLS if cell in chosen]


def _words(cell: Cell) -> set[str]:
    return {*cell.name.split("/"), *([] if cell.is_optional else [USUAL])}


@functools.cache
def inputs_of(sizes: Sizes, index: int) -> Inputs:
    """Query, key and value of one request: float32, normally distributed, from a seed."""
    generator = torch.Generator().manual_seed(100 + index)
    query, key, value = (torch.randn(sizes, generator=generator) for _ in NAMES)
    return query, key, value


def request_bytes(sizes: Sizes, form: Format, index: int) -> bytes:
    """A whole HTTP request, or message of gRPC.

    Every contender is sent the same headers, also those that others are there for.
    """
    text, data = form.encode(inputs_of(sizes, index))
    if form.is_grpc:
        return text + data
    head = (
        f"POST {form.path} HTTP/1.1\r\n"
        "host: 127.0.0.1\r\n"
        f"content-type: {form.media_type}\r\n"
        f"content-length: {len(text) + len(data)}\r\n"
        f"{SHAPE}: {','.join(str(size) for size in sizes)}\r\n"
        f"{ANSWER_BYTES}: {tensor_bytes(sizes)}\r\n"
        f"{TEXT_BYTES}: {len(text)}\r\n"
        "x-padding: {}\r\n\r\n"
    )
    return head.format("0" * (-(len(head) - 2) % HEAD_ALIGNMENT)).encode() + text + data
