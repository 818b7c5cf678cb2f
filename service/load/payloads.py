"""What is sent for each problem, made before the load begins: bodies in every form, and answers read for checks."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from service.client import calls
from service.client.arrays import flat_of, with_numbers
from service.client.calls import JSON, SAFETENSORS, Reply
from service.client.errors import UnreadableAnswer
from service.credentials import CommandError
from service.load.problems import DTYPES, Problem
from service.wire import open_inference_pb2 as pb

FORMS = ("safetensors", "json", "base64", "grpc")
"""safetensors; JSON with nested lists; JSON with base64; the Open Inference Protocol over gRPC, raw contents."""
PATH, METHOD = "/v1/attention", "/inference.GRPCInferenceService/ModelInfer"
_DATATYPES = {"float64": "FP64", "float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
_DTYPES = {**{datatype: dtype for dtype, datatype in _DATATYPES.items()}, "INT64": "int64"}
_SUFFIXES = {"float64": "_fp64", "float32": "", "float16": "_fp16", "bfloat16": "_bf16"}
_TIMES = ("queue_ms", "compute_ms")
_READING = calls.computation(PATH, {"query": np.zeros((1, 1), np.float32)}, {})
"""A call of the client, whose answers are arrays."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """``number``: which problem it asks. ``path`` is where it goes, of a service or of an echo of one."""

    number: int
    path: str
    media_type: str
    body: bytes

    def to_echo(self) -> Payload:
        return Payload(self.number, f"/echo/{self.number}", self.media_type, self.body)


def payloads(problems: Sequence[Problem], form: str, options: Mapping[str, Any], *, dtype: str) -> list[Payload]:
    """One for each problem. Raises: CommandError for an option that this form cannot say."""
    if form == "grpc":
        parameters = _parameters(options)
        return [
            Payload(number, METHOD, "", _message(problem, parameters, options.get("outputs"), dtype))
            for number, problem in enumerate(problems)
        ]
    if form == "safetensors":
        return [
            Payload(number, PATH, SAFETENSORS, _safetensors(problem, options))
            for number, problem in enumerate(problems)
        ]
    write = _listed if form == "json" else _encoded
    members = {**options, "dtype": dtype} if form == "json" else dict(options)
    return [Payload(number, PATH, JSON, _json(problem, members, write)) for number, problem in enumerate(problems)]


def read_outputs(form: str, content: bytes, *, dtype: str) -> Arrays:
    """The outputs of an answer, by name. Raises: ValueError for what is none."""
    try:
        if form == "grpc":
            return _read_message(content)
        if form == "safetensors":
            reply = Reply(200, {"content-type": SAFETENSORS}, memoryview(content))
            return dict(calls.answer_of(_READING, reply).outputs)
        members = orjson.loads(content)
        members.pop("info")
        return {name: _read_member(name, value, dtype) for name, value in members.items()}
    except (KeyError, TypeError, AttributeError, UnreadableAnswer, DecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def server_times(content: bytes) -> dict[str, float]:
    """Milliseconds in the queue and of computing, as an answer over gRPC tells them. Raises: ValueError for none."""
    try:
        message = pb.ModelInferResponse.FromString(content)
    except DecodeError as error:
        raise ValueError(f"no message of the protocol: {error}") from error
    return {
        name.removesuffix("_ms"): message.parameters[name].double_param for name in _TIMES if name in message.parameters
    }


def _safetensors(problem: Problem, options: Mapping[str, Any]) -> bytes:
    call = calls.computation(PATH, problem.tensors, options, layout="bhtd")
    assert call.body is not None
    return b"".join(call.body.pieces(None))


def _json(problem: Problem, options: Mapping[str, Any], write: Any) -> bytes:
    members = {name: write(name, array) for name, array in problem.tensors.items()}
    return orjson.dumps(members | dict(options), option=orjson.OPT_SERIALIZE_NUMPY)


def _listed(name: str, array: NDArray[Any]) -> Any:
    # orjson writes the fewest digits that give a number's bits back, of every dtype that it knows.
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def _encoded(name: str, array: NDArray[Any]) -> Any:
    flat = flat_of(name, array)
    return {"dtype": flat.dtype, "shape": list(flat.shape), "data": base64.b64encode(flat.data).decode()}


def _message(problem: Problem, parameters: Mapping[str, Any], outputs: Sequence[str] | None, dtype: str) -> bytes:
    message = pb.ModelInferRequest(model_name=f"attention{_SUFFIXES[dtype]}")
    for name, value in parameters.items():
        kind = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "double"
        setattr(message.parameters[name], "string_param" if isinstance(value, str) else f"{kind}_param", value)
    for name, array in problem.tensors.items():
        flat = flat_of(name, array)
        message.inputs.add(name=name, datatype=_DATATYPES[flat.dtype], shape=flat.shape)
        message.raw_input_contents.append(bytes(flat.data))
    for name in outputs or ("context",):
        message.outputs.add(name=name)
    return message.SerializeToString()


def _parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as parameters of the protocol, which has no objects and no lists."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name == "outputs":
            continue
        if name == "window" and isinstance(value, Mapping):
            found |= {f"window_{side}": keys for side, keys in value.items() if keys is not None}
        elif isinstance(value, bool | int | float | str):
            found[name] = value
        else:
            raise CommandError(f"--option {name}: parameters over gRPC are numbers, texts, true and false")
    return found


def _read_member(name: str, value: Any, dtype: str) -> NDArray[Any]:
    if isinstance(value, dict):
        return np.frombuffer(base64.b64decode(value["data"]), DTYPES.get(value["dtype"], value["dtype"])).reshape(
            value["shape"]
        )
    stored = np.int64 if name == "top_keys" else DTYPES[stored_dtype(name, dtype)]
    return np.array(with_numbers(value), dtype=np.float64 if stored != np.int64 else stored).astype(stored)


def stored_dtype(name: str, dtype: str) -> str:
    """The dtype of an output, as the contract has it: the query's, or that of the arithmetic."""
    if name in ("context", "weights", "top_weights") or dtype == "float64":
        return dtype
    return "float32"


def _read_message(content: bytes) -> Arrays:
    message = pb.ModelInferResponse.FromString(content)
    found = {}
    for output, raw in zip(message.outputs, message.raw_output_contents, strict=True):
        dtype = _DTYPES[output.datatype]
        found[output.name] = np.frombuffer(raw, DTYPES.get(dtype, dtype)).reshape(tuple(output.shape))
    return found
