"""Calls of gRPC as a client makes them, in our own messages: no client library of the protocol is needed."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import torch
from torch import Tensor

from service.wire import open_inference_pb2 as pb
from tests.support.factory import make_tensor

SERVICE = "inference.GRPCInferenceService"
WAIT_S = 20.0
CODES = {
    torch.float32: "FP32",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float64: "FP64",
    torch.bool: "BOOL",
    torch.int64: "INT64",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}


def operands(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, names: Sequence[str] = ("query", "key", "value")
) -> dict[str, Tensor]:
    shape = shape or (1, 2, 3, 8)
    return {name: make_tensor(*shape, seed=3 * seed + place, dtype=dtype) for place, name in enumerate(names)}


def parameter(value: Any) -> pb.InferParameter:
    match value:
        case bool():
            return pb.InferParameter(bool_param=value)
        case int():
            return pb.InferParameter(int64_param=value)
        case float():
            return pb.InferParameter(double_param=value)
    return pb.InferParameter(string_param=value)


def raw_of(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def request_of(
    tensors: Mapping[str, Tensor],
    *,
    model: str = "sdpa",
    id: str = "",
    parameters: Mapping[str, Any] | None = None,
    outputs: Iterable[str] = (),
) -> pb.ModelInferRequest:
    """A request with raw contents."""
    message = pb.ModelInferRequest(model_name=model, id=id)
    for name, value in (parameters or {}).items():
        message.parameters[name].CopyFrom(parameter(value))
    for name, tensor in tensors.items():
        message.inputs.add(name=name, datatype=CODES[tensor.dtype], shape=list(tensor.shape))
        message.raw_input_contents.append(raw_of(tensor))
    for name in outputs:
        message.outputs.add(name=name)
    return message


def outputs_of(answer: pb.ModelInferResponse) -> dict[str, Tensor]:
    assert len(answer.outputs) == len(answer.raw_output_contents)
    read = {}
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        assert not output.HasField("contents")
        flat = torch.frombuffer(bytearray(raw), dtype=DTYPES[output.datatype]) if raw else torch.empty(0)
        read[output.name] = flat.view(*output.shape)
    return read


def parameters_of(answer: pb.ModelInferResponse) -> dict[str, Any]:
    return {
        name: getattr(value, str(value.WhichOneof("parameter_choice"))) for name, value in answer.parameters.items()
    }


class Caller:
    """A connection to a server."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def start(self, name: str, message: Any, *, metadata: Sequence[tuple[str, str]] = (), **options: Any) -> Any:
        """Begin a unary call whose result is awaited later; a name without a slash is one of the inference service."""
        path = name if name.startswith("/") else f"/{SERVICE}/{name}"
        answers = getattr(pb, f"{name}Response", None)
        method = self.channel.unary_unary(
            path,
            request_serializer=lambda sent: sent if isinstance(sent, bytes) else sent.SerializeToString(),
            response_deserializer=None if answers is None else answers.FromString,
        )
        return method.future(message, metadata=tuple(metadata), timeout=options.pop("timeout", WAIT_S), **options)

    def call(self, name: str, message: Any, **options: Any) -> Any:
        return self.start(name, message, **options).result()

    def infer(self, message: pb.ModelInferRequest, **options: Any) -> pb.ModelInferResponse:
        answer: pb.ModelInferResponse = self.call("ModelInfer", message, **options)
        return answer

    @contextmanager
    def stream(self, *, metadata: Sequence[tuple[str, str]] = ()) -> Iterator[Streaming]:
        streaming = Streaming(self.channel, metadata)
        try:
            yield streaming
        finally:
            streaming.call.cancel()


class Streaming:
    """One ModelStreamInfer: messages are sent as they are put."""

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self._queue: queue.SimpleQueue[pb.ModelInferRequest | bytes | None] = queue.SimpleQueue()
        self.call = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=lambda sent: sent if isinstance(sent, bytes) else sent.SerializeToString(),
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )(iter(self._queue.get, None), metadata=tuple(metadata), timeout=WAIT_S)

    def send(self, *messages: pb.ModelInferRequest | bytes) -> None:
        for message in messages:
            self._queue.put(message)

    def close(self) -> None:
        """Nothing more will be sent."""
        self._queue.put(None)

    def answers(self, count: int) -> list[pb.ModelStreamInferResponse]:
        return [next(self.call) for _ in range(count)]

    def rest(self) -> list[pb.ModelStreamInferResponse]:
        """What comes to the end of the stream."""
        return list(self.call)


@contextmanager
def calls_by_rpc(port: int, *options: tuple[str, int]) -> Iterator[Caller]:
    channel = grpc.insecure_channel(
        f"127.0.0.1:{port}",
        options=[
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            # A connection of its own, for one test.
            ("grpc.use_local_subchannel_pool", 1),
            *options,
        ],
    )
    with channel:
        yield Caller(channel)


def refused(call: Any) -> grpc.RpcError:
    """The error with which a call that was begun ends."""
    error = call.exception()
    assert error is not None, "was answered"
    return error
