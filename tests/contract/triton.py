"""tritonclient's four clients behind one form of call, so that a test says once what all of them meet."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from numpy.typing import NDArray
from torch import Tensor
from tritonclient.utils import InferenceServerException

__all__ = ["KINDS", "Answer", "Client", "InferenceServerException", "array_of", "client_of", "status_of", "tensor_of"]

MODULES: dict[str, Any] = {
    "http": tritonclient.http,
    "grpc": tritonclient.grpc,
    "http.aio": tritonclient.http.aio,
    "grpc.aio": tritonclient.grpc.aio,
}
KINDS = tuple(MODULES)
DATATYPES = {
    torch.float32: "FP32",
    torch.float64: "FP64",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.int64: "INT64",
}


def array_of(tensor: Tensor) -> NDArray[Any]:
    """As tritonclient takes it: bfloat16 is ml_dtypes'."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def tensor_of(array: NDArray[Any]) -> Tensor:
    """As tritonclient gives it."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def status_of(error: InferenceServerException) -> str:
    """The status of a refusal: digits over HTTP, the name of the code over gRPC."""
    return str(error.status()).removeprefix("StatusCode.")


@dataclass(frozen=True, slots=True)
class Answer:
    """``parameters`` by name, of whatever type."""

    id: str
    outputs: dict[str, Tensor]
    parameters: dict[str, Any]


class Client:
    """One of the four. ``options`` of a call are tritonclient's own arguments."""

    def __init__(self, kind: str, url: str, **arguments: Any) -> None:
        self.kind = kind
        self.module = MODULES[kind]
        self.is_grpc = kind.startswith("grpc")
        self._runner = asyncio.Runner() if kind.endswith("aio") else None
        self.raw: Any = self._made(url, arguments)

    def _made(self, url: str, arguments: dict[str, Any]) -> Any:
        if self._runner is None:
            return self.module.InferenceServerClient(url, **arguments)

        async def make() -> Any:
            return self.module.InferenceServerClient(url, **arguments)

        return self._runner.run(make())

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """A method of the client, waited for."""
        return self.wait(getattr(self.raw, method)(*arguments, **options))

    def wait(self, result: Any) -> Any:
        if self._runner is None or not inspect.isawaitable(result):
            return result

        async def finish() -> Any:
            return await result

        return self._runner.run(finish())

    def as_json(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What a method answers, as JSON would have it over either door."""
        return self.call(method, *arguments, **options, **({"as_json": True} if self.is_grpc else {}))

    def inputs(self, tensors: dict[str, Tensor], *, binary: bool = True) -> list[Any]:
        inputs = []
        for name, tensor in tensors.items():
            given = self.module.InferInput(name, list(tensor.shape), DATATYPES[tensor.dtype])
            form = {} if self.is_grpc else {"binary_data": binary}
            given.set_data_from_numpy(array_of(tensor), **form)
            inputs.append(given)
        return inputs

    def asked(self, names: Sequence[str] | None, *, binary: bool = True) -> list[Any] | None:
        if names is None:
            return None
        form = {} if self.is_grpc else {"binary_data": binary}
        return [self.module.InferRequestedOutput(name, **form) for name in names]

    def infer(
        self,
        model: str,
        tensors: dict[str, Tensor],
        outputs: Sequence[str] | None = None,
        *,
        binary: bool = True,
        **options: Any,
    ) -> Answer:
        asked = self.asked(outputs, binary=binary)
        result = self.call("infer", model, self.inputs(tensors, binary=binary), outputs=asked, **options)
        return self.answer(result)

    def answer(self, result: Any) -> Answer:
        response = result.get_response()
        if self.is_grpc:
            parameters = {name: getattr(p, p.WhichOneof("parameter_choice")) for name, p in response.parameters.items()}
            names, request_id = [output.name for output in response.outputs], response.id
        else:
            parameters, request_id = response.get("parameters", {}), response.get("id", "")
            names = [output["name"] for output in response["outputs"]]
        arrays = {name: result.as_numpy(name) for name in names}
        outputs = {name: tensor_of(array) for name, array in arrays.items() if array is not None}
        return Answer(request_id, outputs, parameters)

    def close(self) -> None:
        self.call("close")
        if self._runner is not None:
            self._runner.close()


@contextlib.contextmanager
def client_of(kind: str, *, port: int, grpc_port: int, **arguments: Any) -> Iterator[Client]:
    """A client of the door that its kind speaks to."""
    client = Client(kind, f"127.0.0.1:{grpc_port if kind.startswith('grpc') else port}", **arguments)
    try:
        yield client
    finally:
        client.close()
