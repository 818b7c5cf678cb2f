"""Many calls of tritonclient at once: the same bits in company as alone, streams in their order."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.test_tritonclient import assert_same_bits, operands
from tests.contract.triton import Client, InferenceServerException, client_of
from tests.support.factory import make_mask
from tests.support.server import RunningServer

WAIT_S = 30.0


def _calls() -> list[tuple[str, dict[str, Tensor], list[str] | None]]:
    """64 of different models, lengths and outputs."""
    calls: list[tuple[str, dict[str, Tensor], list[str] | None]] = []
    for number in range(16):
        tokens = 1 + 7 * number
        calls.append(("sdpa", operands(1, 2, tokens, 16), ["context"]))
        calls.append(("sdpa_bf16", operands(1, 4, 16 + tokens, 32, dtype=torch.bfloat16), None))
        masked = operands(2, 2, tokens, 8) | {"allow_mask": make_mask(2, 1, tokens, tokens, seed=number)}
        calls.append(("attention", masked, ["context", "logsumexp"]))
        calls.append(("attention_fp64", operands(1, 1, 8, 8, dtype=torch.float64), None))
    return calls


def test_64_mixed_calls_at_once_give_the_bits_that_each_gives_alone(server: RunningServer) -> None:
    calls = _calls()
    where: dict[str, Any] = {"port": server.port, "grpc_port": server.grpc_port}
    with client_of("http", concurrency=16, **where) as http, client_of("grpc", **where) as grpc:
        alone = [http.infer(*call).outputs for call in calls]
        over_http = [
            http.raw.async_infer(model, http.inputs(tensors), outputs=http.asked(names))
            for model, tensors, names in calls
        ]
        answered: queue.SimpleQueue[tuple[int, Any, Any]] = queue.SimpleQueue()

        def note(number: int) -> Any:
            return lambda result, error: answered.put((number, result, error))

        for number, (model, tensors, names) in enumerate(calls):
            grpc.raw.async_infer(model, grpc.inputs(tensors), note(number), outputs=grpc.asked(names))
        for _ in calls:
            number, result, error = answered.get(timeout=WAIT_S)
            assert error is None
            assert_same_bits(grpc.answer(result).outputs, alone[number])
        for pending, expected in zip(over_http, alone, strict=True):
            assert_same_bits(http.answer(pending.get_result()).outputs, expected)


@pytest.mark.parametrize("kind", ["http.aio", "grpc.aio"])
def test_64_tasks_at_once_give_the_bits_that_each_gives_alone(server: RunningServer, kind: str) -> None:
    calls = _calls()
    with client_of(kind, port=server.port, grpc_port=server.grpc_port) as client:
        alone = [client.infer(*call).outputs for call in calls]

        async def together() -> list[Any]:
            inferring = [
                client.raw.infer(model, client.inputs(tensors), outputs=client.asked(names))
                for model, tensors, names in calls
            ]
            return await asyncio.gather(*inferring)

        for result, expected in zip(client.wait(together()), alone, strict=True):
            assert_same_bits(client.answer(result).outputs, expected)


def test_a_stream_answers_in_the_order_of_its_requests_and_survives_a_fault(server: RunningServer) -> None:
    calls = _calls()
    with client_of("grpc", port=server.port, grpc_port=server.grpc_port) as client:
        alone = [client.infer(*call).outputs for call in calls]
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        client.raw.start_stream(callback=lambda result, error: answers.put((result, error)))
        for number, (model, tensors, names) in enumerate(calls):
            if number == 10:
                client.raw.async_stream_infer("sdpa", client.inputs({"query": tensors["query"]}), request_id="wrong")
            client.raw.async_stream_infer(
                model,
                client.inputs(tensors),
                outputs=client.asked(names),
                request_id=str(number),
                enable_empty_final_response=number % 2 == 0,
            )
        for number in range(len(calls)):
            if number == 10:
                result, error = answers.get(timeout=WAIT_S)
                assert result is None and isinstance(error, InferenceServerException)
                assert "key" in error.message()
            result, error = answers.get(timeout=WAIT_S)
            assert error is None
            answer = client.answer(result)
            assert answer.id == str(number)
            assert answer.parameters["triton_final_response"] is True
            assert_same_bits(answer.outputs, alone[number])
        client.raw.stop_stream()


def test_an_async_stream_answers_in_the_order_of_its_requests(server: RunningServer) -> None:
    calls = _calls()
    with client_of("grpc.aio", port=server.port, grpc_port=server.grpc_port) as client:
        alone = [client.infer(*call).outputs for call in calls]

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number, (model, tensors, names) in enumerate(calls):
                yield {
                    "model_name": model,
                    "inputs": client.inputs(tensors),
                    "outputs": client.asked(names),
                    "request_id": str(number),
                }

        async def stream() -> list[Any]:
            return [pair async for pair in client.raw.stream_infer(requests())]

        pairs = client.wait(stream())
        assert len(pairs) == len(calls)
        for number, ((result, error), expected) in enumerate(zip(pairs, alone, strict=True)):
            assert error is None
            answer = client.answer(result)
            assert answer.id == str(number)
            assert_same_bits(answer.outputs, expected)


def test_a_stream_that_asks_for_it_ends_with_the_first_error(server: RunningServer) -> None:
    with client_of("grpc", port=server.port, grpc_port=server.grpc_port) as client:
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        client.raw.start_stream(
            callback=lambda result, error: answers.put((result, error)), headers={"triton_grpc_error": "true"}
        )
        client.raw.async_stream_infer("nothing", client.inputs(operands(1, 1, 2, 4)))
        result, error = answers.get(timeout=WAIT_S)
        assert result is None and error is not None
        assert "NOT_FOUND" in str(error.status())
        client.raw.stop_stream(cancel_requests=True)


def test_shared_client_survives_a_refusal_on_its_connection(triton: Client) -> None:
    for _ in range(3):
        with pytest.raises(InferenceServerException):
            triton.infer("sdpa", {"query": operands(1, 1, 2, 4)["query"]})
        assert triton.infer("sdpa", operands(1, 1, 2, 4)).outputs["context"].shape == (1, 1, 2, 4)
