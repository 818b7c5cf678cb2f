"""Layers that are kept, as models of the Open Inference Protocol: what becomes of requests when their layer changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
import torch
from torch import Tensor

from attn_core import Engine
from attn_core.problem import AttentionOptions, LayerOptions, LayerParameters, LayerProblem
from service.wire import open_inference_pb2 as pb
from tests.support import inference, rpc
from tests.support.bodies import SAFETENSORS, safetensors_body
from tests.support.factory import make_tensor
from tests.support.in_process import GatedEngine, InProcess
from tests.support.kept_layers import make_parameters, options_of
from tests.support.rpc_service import figure, running, until

LAYER = "/v1/layers/kept"
INFER = "/v2/models/kept/infer"
INPUT = {"input": make_tensor(2, 3, 6)}
FIRST, SECOND = make_parameters(seed=1), make_parameters(seed=2)


def output_of(parameters: LayerParameters) -> Tensor:
    """What a layer makes of ``INPUT``."""
    attention = AttentionOptions(layout="btd", num_heads=parameters.num_heads)
    options = LayerOptions(attention=attention, weight_layout=parameters.weight_layout)
    problem = LayerProblem(**INPUT, **parameters.weights, options=options)
    (result,) = Engine(device="cpu", max_threads=1).run([problem])
    assert not isinstance(result, Exception)
    return result.outputs["output"]


def keep(client: httpx.Client, parameters: LayerParameters) -> None:
    body = safetensors_body(dict(parameters.weights), options_of(parameters))
    answer = client.put(f"{LAYER}?replace=true", content=body, headers={"content-type": SAFETENSORS})
    assert answer.status_code in (200, 201), answer.text


def forget(client: httpx.Client) -> None:
    assert client.delete(LAYER).status_code == 204


def count(client: httpx.Client, group: str = "success") -> int:
    (figures,) = client.get("/v2/models/kept/stats").json()["model_stats"]
    return int(figures["inference_stats"][group]["count"])


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine()


@pytest.fixture
def service(engine: GatedEngine) -> Iterator[tuple[InProcess, rpc.Caller, httpx.Client]]:
    with running(engine) as (service, caller), httpx.Client(base_url=service.url, timeout=rpc.WAIT_S) as client:
        keep(client, FIRST)
        yield service, caller, client


class Asking:
    """One request through each door, all inside at once."""

    def __init__(self, service: InProcess, caller: rpc.Caller, pool: ThreadPoolExecutor) -> None:
        self._caller = caller
        body, headers = inference.binary_body(INPUT, outputs=[{"name": "output"}])
        self._http = pool.submit(httpx.post, service.url + INFER, content=body, headers=headers, timeout=rpc.WAIT_S)
        self._message = rpc.request_of(INPUT, model="kept", outputs=["output"])
        self._call = caller.start("ModelInfer", self._message)
        self._streaming = rpc.Streaming(caller.channel, ())
        self._streaming.send(self._message)
        self._streaming.close()
        parts = service.parts
        until(lambda: service.call(lambda: len(parts.queue)) == 3)

    def outputs(self) -> list[Tensor]:
        (streamed,) = self._streaming.rest()
        assert not streamed.error_message
        return [
            inference.read_answer(self._http.result())[1]["output"],
            rpc.outputs_of(self._call.result())["output"],
            rpc.outputs_of(streamed.infer_response)["output"],
        ]

    def refusals(self) -> tuple[int, grpc.StatusCode, str]:
        (streamed,) = self._streaming.rest()
        return self._http.result().status_code, rpc.refused(self._call).code(), streamed.error_message


@pytest.fixture
def ask(service: tuple[InProcess, rpc.Caller, httpx.Client], engine: GatedEngine) -> Iterator[Callable[[], Asking]]:
    running, caller, _ = service
    with ThreadPoolExecutor(1) as pool:
        # One that is computed keeps all others waiting.
        busy = caller.start("ModelInfer", rpc.request_of(rpc.operands()))
        engine.wait_until_entered()
        yield lambda: Asking(running, caller, pool)
        engine.open()
        busy.result()


@pytest.mark.parametrize("change", ["replaced", "deleted", "deleted, and another under its name"])
def test_a_layer_lives_on_for_the_requests_that_use_it(
    service: tuple[InProcess, rpc.Caller, httpx.Client], engine: GatedEngine, ask: Callable[[], Asking], change: str
) -> None:
    _, caller, client = service
    asking = ask()
    if change.startswith("deleted"):
        forget(client)
    if change != "deleted":
        keep(client, SECOND)
    engine.open()
    expected = output_of(FIRST)
    assert all(torch.equal(output, expected) for output in asking.outputs())
    message = rpc.request_of(INPUT, model="kept", outputs=["output"])
    if change == "deleted":
        assert rpc.refused(caller.start("ModelInfer", message)).code() is grpc.StatusCode.NOT_FOUND
    else:
        assert torch.equal(rpc.outputs_of(caller.infer(message))["output"], output_of(SECOND))


def test_answers_of_a_deleted_layer_count_nowhere(
    service: tuple[InProcess, rpc.Caller, httpx.Client], engine: GatedEngine, ask: Callable[[], Asking]
) -> None:
    _, _, client = service
    asking = ask()
    forget(client)
    engine.open()
    assert len(asking.outputs()) == 3
    keep(client, FIRST)
    assert count(client) == 0


def test_failures_of_a_deleted_layer_count_nowhere(
    service: tuple[InProcess, rpc.Caller, httpx.Client], engine: GatedEngine, ask: Callable[[], Asking]
) -> None:
    _, _, client = service
    asking = ask()
    forget(client)
    engine.let_through()
    engine.wait_until_entered()
    engine.failure = RuntimeError("a mistake")
    engine.open()
    status, code, text = asking.refusals()
    engine.failure = None
    assert (status, code) == (500, grpc.StatusCode.INTERNAL) and text
    keep(client, FIRST)
    assert count(client, "fail") == 0


def test_figures_go_with_the_layer_and_stay_when_it_is_replaced(
    service: tuple[InProcess, rpc.Caller, httpx.Client], engine: GatedEngine
) -> None:
    running, caller, client = service
    engine.open()
    message = rpc.request_of(INPUT, model="kept", outputs=["output"])
    route = f'attn_requests_total{{outcome="ok",route="/{rpc.SERVICE}/ModelInfer"}}'
    answered = figure(running, route)
    for _ in range(3):
        caller.infer(message)
    assert client.post(INFER, content=inference.json_body(INPUT)).status_code == 200
    assert count(client) == 4
    keep(client, SECOND)
    assert count(client) == 4
    (stats,) = caller.call("ModelStatistics", pb.ModelStatisticsRequest(name="kept")).model_stats
    assert stats.inference_count == 4
    forget(client)
    for request in ("ModelStatistics", "ModelMetadata", "ModelConfig"):
        asked = getattr(pb, f"{request}Request")(name="kept")
        assert rpc.refused(caller.start(request, asked)).code() is grpc.StatusCode.NOT_FOUND
    assert not caller.call("ModelReady", pb.ModelReadyRequest(name="kept")).ready
    keep(client, SECOND)
    assert count(client) == 0
    # Metrics know the route, and not whom it was for.
    assert figure(running, route) - answered == 3
    assert '"kept"' not in client.get("/metrics").text


def test_a_list_of_models_is_of_the_moment(service: tuple[InProcess, rpc.Caller, httpx.Client]) -> None:
    _, caller, client = service

    def listed() -> list[set[Any]]:
        index = caller.call("RepositoryIndex", pb.RepositoryIndexRequest()).models
        statistics = caller.call("ModelStatistics", pb.ModelStatisticsRequest()).model_stats
        return [
            {each["name"] for each in client.post("/v2/repository/index").json()},
            set(client.get("/v2/models").json()["models"]),
            {each["name"] for each in client.get("/v2/models/stats").json()["model_stats"]},
            {each.name for each in index},
            {each.name for each in statistics},
        ]

    with_layer = listed()
    forget(client)
    without = listed()
    assert with_layer == [names | {"kept"} for names in without]
    assert all("kept" not in names for names in without)
