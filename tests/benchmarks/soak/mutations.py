"""Requests of the Open Inference Protocol that something happened to: JSON, binary bodies and protobuf messages.

Half of them are mutated as bytes, half as what they mean: a member replaced by what nobody would write there.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.wire import open_inference_pb2 as pb

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308, 5e-324,
    float("nan"), float("inf"), "", "query", "FP16", "BYTES", "\ud800", "\x00", "é" * 300, "../..", "%s%n", "1",
    [], {}, [[]], [None], [[1], [2, 3]], [1, "a"], {"a": 1}, [[[[[[[[[[1]]]]]]]]]], ["x"] * 200,
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 5, 64, 255, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
NAMES = ("query", "key", "value", "allow_mask", "bias", "key_lengths", "sinks", "context", "nothing", "")
PARAMETERS = ("causal", "scale", "softcap", "window_left", "layout", "num_heads", "path", "dropout_p", "priority",
              "sequence_id", "binary_data_output", "shared_memory_region", "triton_x", "colour", "")  # fmt: skip
MAX_EDITS = 3


@dataclass(frozen=True, slots=True)
class Body:
    """Of a POST to ``path``; ``json_bytes`` is what the header says that the JSON part has, None without the header."""

    path: str
    content: bytes
    json_bytes: str | None
    encoding: str | None = None


def json_body(random_: random.Random) -> Body:
    """A mutated request whose tensors are numbers in JSON."""
    document = _document(random_, binary=False)
    content = _mutated_text(document, random_)
    return Body(_path(random_), content, None if random_.random() < 0.9 else _length(len(content), random_))


def binary_body(random_: random.Random) -> Body:
    """A mutated request whose tensors follow the JSON part."""
    document = _document(random_, binary=True)
    data = b"".join(_array(tensor["shape"]).tobytes() for tensor in document["inputs"])
    text = _mutated_text(document, random_)
    content = text + data
    if random_.random() < 0.3:
        content = _mutated_bytes(content, random_)
    length = str(len(text)) if random_.random() < 0.8 else _length(len(text), random_)
    encoding = random_.choice((None,) * 20 + ("gzip", "deflate", "br", "identity"))
    return Body(_path(random_), content, length, encoding)


def message(random_: random.Random) -> bytes:
    """A mutated ModelInferRequest."""
    request = _message(random_, typed=random_.random() < 0.4)
    for _ in range(random_.randrange(MAX_EDITS + 1)):
        random_.choice(_MESSAGE_EDITS)(request, random_)
    raw: bytes = request.SerializeToString()
    return _mutated_bytes(raw, random_) if random_.random() < 0.5 else raw


def _path(random_: random.Random) -> str:
    model = random_.choice(("sdpa", "sdpa", "attention", "attention", "attention_fp64", "sdpa_bf16", "nothing"))
    return f"/v2/models/{model}{random_.choice(('', '', '', '/versions/1', '/versions/2'))}/infer"


def _array(shape: list[int]) -> Any:
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def _document(random_: random.Random, *, binary: bool) -> dict[str, Any]:
    shape = [1, random_.randint(1, 2), random_.randint(1, 4), random_.choice((2, 8, 16))]
    inputs = []
    for name in ("query", "key", "value"):
        tensor: dict[str, Any] = {"name": name, "shape": shape, "datatype": "FP32"}
        if binary:
            tensor["parameters"] = {"binary_data_size": 4 * int(np.prod(shape))}
        else:
            tensor["data"] = _array(shape).tolist() if random_.random() < 0.5 else _array(shape).ravel().tolist()
        inputs.append(tensor)
    document: dict[str, Any] = {"id": str(random_.randrange(100)), "inputs": inputs}
    if random_.random() < 0.5:
        document["parameters"] = {"scale": 0.5, "causal": True, "binary_data_output": random_.random() < 0.5}
    if random_.random() < 0.5:
        document["outputs"] = [{"name": "context", "parameters": {"binary_data": random_.random() < 0.5}}]
    return copy.deepcopy(document)


def _mutated_text(document: dict[str, Any], random_: random.Random) -> bytes:
    for _ in range(random_.randrange(MAX_EDITS + 1)):
        _edit(document, random_)
    text = json.dumps(document).encode()
    return _mutated_bytes(text, random_) if random_.random() < 0.4 else text


def _edit(document: dict[str, Any], random_: random.Random) -> None:
    """Change one place in a document: replace, remove, repeat or add."""
    node: Any = document
    while True:
        if not node:
            return
        key: Any = random_.choice(list(node)) if isinstance(node, dict) else random_.randrange(len(node))
        child = node[key]
        if isinstance(child, dict | list) and child and random_.random() < 0.75:
            node = child
            continue
        break
    action = random_.randrange(5)
    if action == 0:
        del node[key]
    elif action == 1 and isinstance(node, list):
        node.append(copy.deepcopy(child))
    elif action == 2 and isinstance(node, dict):
        node[random_.choice((*PARAMETERS, *NAMES, "data", "shape", "parameters"))] = _strange(random_)
    else:
        node[key] = _strange(random_) if random_.random() < 0.8 else random_.choice(NUMBERS)


def _strange(random_: random.Random) -> Any:
    # A copy: what is put into a document may be edited in it.
    return copy.deepcopy(random_.choice(STRANGE))


def _length(size: int, random_: random.Random) -> str:
    return random_.choice(
        (str(size - 1), str(size + 1), "0", "-1", "1e3", f"{size}abc", "", str(2**64), " 5", "０", "99999999999999")
    )


def _mutated_bytes(raw: bytes, random_: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(random_.randint(1, MAX_EDITS)):
        if not data:
            break
        place = random_.randrange(len(data))
        action = random_.randrange(6)
        if action == 0:
            data[place] ^= 1 << random_.randrange(8)
        elif action == 1:
            data[place] = random_.randrange(256)
        elif action == 2:
            del data[place : place + random_.randint(1, 16)]
        elif action == 3:
            data[place:place] = random_.randbytes(random_.randint(1, 8))
        elif action == 4:
            other = random_.randrange(len(data))
            data[place:place] = data[other : other + random_.randint(1, 64)]
        else:
            del data[place:]
    return bytes(data)


def _message(random_: random.Random, *, typed: bool) -> pb.ModelInferRequest:
    shape = [1, random_.randint(1, 2), random_.randint(1, 4), random_.choice((2, 8, 16))]
    request = pb.ModelInferRequest(
        model_name=random_.choice(("sdpa", "sdpa", "attention", "sdpa_fp64", "nothing")), id=str(random_.randrange(100))
    )
    for name in ("query", "key", "value"):
        tensor = request.inputs.add(name=name, datatype="FP32", shape=shape)
        if typed:
            tensor.contents.fp32_contents.extend(_array(shape).ravel().tolist())
        else:
            request.raw_input_contents.append(_array(shape).tobytes())
    if random_.random() < 0.5:
        request.outputs.add(name="context")
    if random_.random() < 0.5:
        request.parameters["scale"].double_param = 0.5
    return request


def _strange_parameter(parameter: pb.InferParameter, random_: random.Random) -> None:
    kind = random_.randrange(6)
    if kind == 0:
        parameter.bool_param = random_.random() < 0.5
    elif kind == 1:
        parameter.int64_param = random_.choice([number for number in NUMBERS if number < 2**63])
    elif kind == 2:
        parameter.string_param = random_.choice(("", "lower_right", "manual", "é" * 300, "\x00"))
    elif kind == 3:
        parameter.double_param = random_.choice((0.0, -1.5, 1e308, float("nan"), float("inf"), 5e-324))
    elif kind == 4:
        parameter.uint64_param = random_.choice((0, 1, 2**63, 2**64 - 1))
    else:
        parameter.SetInParent()


def _any_tensor(request: pb.ModelInferRequest, random_: random.Random) -> Any:
    return random_.choice(request.inputs) if request.inputs else request.inputs.add()


def _edit_parameter(request: pb.ModelInferRequest, random_: random.Random) -> None:
    _strange_parameter(request.parameters[random_.choice(PARAMETERS)], random_)


def _edit_input_parameter(request: pb.ModelInferRequest, random_: random.Random) -> None:
    names = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "binary_data_size", "x")
    _strange_parameter(_any_tensor(request, random_).parameters[random_.choice(names)], random_)


def _edit_shape(request: pb.ModelInferRequest, random_: random.Random) -> None:
    tensor = _any_tensor(request, random_)
    if tensor.shape and random_.random() < 0.7:
        tensor.shape[random_.randrange(len(tensor.shape))] = random_.choice(NUMBERS)
    else:
        tensor.shape.extend(random_.choices(NUMBERS, k=random_.randint(1, 80)))


def _edit_name(request: pb.ModelInferRequest, random_: random.Random) -> None:
    _any_tensor(request, random_).name = random_.choice(NAMES)


def _edit_datatype(request: pb.ModelInferRequest, random_: random.Random) -> None:
    _any_tensor(request, random_).datatype = random_.choice(("FP16", "BF16", "INT64", "BOOL", "BYTES", "", "FP32 "))


def _edit_contents(request: pb.ModelInferRequest, random_: random.Random) -> None:
    contents = _any_tensor(request, random_).contents
    random_.choice((
        lambda: contents.bool_contents.append(True),
        lambda: contents.int_contents.append(-1),
        lambda: contents.int64_contents.append(2**62),
        lambda: contents.fp64_contents.append(float("nan")),
        lambda: contents.bytes_contents.append(b"x"),
        lambda: contents.fp32_contents.extend([1.0] * random_.randrange(5)),
    ))()  # fmt: skip


def _edit_raw(request: pb.ModelInferRequest, random_: random.Random) -> None:
    contents = request.raw_input_contents
    if contents and random_.random() < 0.5:
        del contents[random_.randrange(len(contents))]
    else:
        contents.append(random_.randbytes(random_.choice((0, 1, 4, 64))))


def _edit_outputs(request: pb.ModelInferRequest, random_: random.Random) -> None:
    output = request.outputs.add(name=random_.choice(NAMES))
    if random_.random() < 0.5:
        _strange_parameter(output.parameters[random_.choice(("classification", "shared_memory_region", "x"))], random_)


def _edit_input_list(request: pb.ModelInferRequest, random_: random.Random) -> None:
    if request.inputs and random_.random() < 0.5:
        del request.inputs[random_.randrange(len(request.inputs))]
    else:
        request.inputs.add(name=random_.choice(NAMES), datatype="FP32", shape=[1])


def _edit_model(request: pb.ModelInferRequest, random_: random.Random) -> None:
    request.model_version = random_.choice(("", "1", "2", "a", "é"))
    request.id = random_.choice(("", "é" * 200, "\x00"))


_MESSAGE_EDITS: tuple[Callable[[pb.ModelInferRequest, random.Random], None], ...] = (
    _edit_parameter, _edit_input_parameter, _edit_shape, _edit_name, _edit_datatype, _edit_contents, _edit_raw,
    _edit_outputs, _edit_input_list, _edit_model,
)  # fmt: skip
