"""KServe's InferenceClient: health, inference and errors over both doors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import httpx
import kserve
import pytest
import torch
from kserve import InferInput, InferOutput, InferRequest, InferResponse
from kserve.inference_client import RESTConfig

from tests.contract.test_tritonclient import assert_same_bits, natively, operands
from tests.contract.triton import tensor_of
from tests.support.server import RunningServer

T = TypeVar("T")
TENSORS = operands(1, 2, 5, 16)


def rest(server: RunningServer, use: Callable[[Any, str], Awaitable[T]]) -> T:
    async def run() -> T:
        client = kserve.InferenceRESTClient(RESTConfig(protocol="v2"))
        try:
            return await use(client, server.url)
        finally:
            await client.close()

    return asyncio.run(run())


def rpc(server: RunningServer, use: Callable[[Any], Awaitable[T]]) -> T:
    async def run() -> T:
        client = kserve.InferenceGRPCClient(f"127.0.0.1:{server.grpc_port}")
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


def request_of(model: str, *, binary: bool = True, names: tuple[str, ...] = ("query", "key", "value")) -> InferRequest:
    inputs = []
    for name in names:
        given = InferInput(name, list(TENSORS[name].shape), "FP32")
        given.set_data_from_numpy(TENSORS[name].numpy(), binary_data=binary)
        inputs.append(given)
    return InferRequest(model_name=model, infer_inputs=inputs, request_id="k")


def outputs_of(response: InferResponse) -> dict[str, torch.Tensor]:
    outputs: list[InferOutput] = response.outputs
    return {output.name: tensor_of(output.as_numpy()) for output in outputs}


def test_health_is_told_over_rest(server: RunningServer) -> None:
    assert rest(server, lambda client, url: client.is_server_live(url)) is True
    assert rest(server, lambda client, url: client.is_server_ready(url)) is True
    assert rest(server, lambda client, url: client.is_model_ready(url, "sdpa")) is True
    assert rest(server, lambda client, url: client.is_model_ready(url, "nothing")) is False


def test_health_is_told_over_grpc(server: RunningServer) -> None:
    assert rpc(server, lambda client: client.is_server_live()) is True
    assert rpc(server, lambda client: client.is_server_ready()) is True
    assert rpc(server, lambda client: client.is_model_ready("sdpa")) is True
    assert rpc(server, lambda client: client.is_model_ready("nothing")) is False


@pytest.mark.parametrize("binary", [True, False])
def test_inference_over_rest_gives_the_bits_of_the_native_door(
    server: RunningServer, client: httpx.Client, binary: bool
) -> None:
    expected, _ = natively(client, TENSORS)
    request = request_of("sdpa", binary=binary)
    response = rest(server, lambda kserve_client, url: kserve_client.infer(url, request, model_name="sdpa"))
    assert response.id == "k" and response.model_name == "sdpa"
    assert_same_bits(outputs_of(response), expected)


@pytest.mark.parametrize("binary", [True, False])
def test_inference_over_grpc_gives_the_bits_of_the_native_door(
    server: RunningServer, client: httpx.Client, binary: bool
) -> None:
    expected, _ = natively(client, TENSORS)
    response = rpc(server, lambda kserve_client: kserve_client.infer(request_of("sdpa", binary=binary)))
    assert response.id == "k" and response.model_name == "sdpa"
    assert_same_bits(outputs_of(response), expected)


def test_errors_are_read_over_rest(server: RunningServer) -> None:
    for request, model, status, fragment in [
        (request_of("sdpa", names=("query",)), "sdpa", 400, "key"),
        (request_of("nothing"), "nothing", 404, "nothing"),
    ]:
        with pytest.raises(httpx.HTTPStatusError) as refused:
            rest(server, lambda client, url, r=request, m=model: client.infer(url, r, model_name=m))
        assert refused.value.response.status_code == status
        assert fragment in str(refused.value)


def test_errors_are_read_over_grpc(server: RunningServer) -> None:
    for request, code, fragment in [
        (request_of("sdpa", names=("query",)), grpc.StatusCode.INVALID_ARGUMENT, "key"),
        (request_of("nothing"), grpc.StatusCode.NOT_FOUND, "nothing"),
    ]:
        with pytest.raises(grpc.RpcError) as refused:
            rpc(server, lambda client, r=request: client.infer(r))
        assert refused.value.code() == code
        assert fragment in refused.value.details()
