"""One use case behind every door: the same problem has the same bits through all of them, and every error its row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
import torch
from torch import Tensor

from attn_core import Engine
from attn_core.errors import Fault, InvalidProblem, TooLarge
from attn_core.problem import PARAMETER_NAMES
from service.attend import Attend
from service.errors import (
    AlreadyExists,
    BodyTooLarge,
    DeadlinePassed,
    Draining,
    Malformed,
    MediaTypeNotServed,
    MethodNotServed,
    ModelsStay,
    NotAcceptable,
    NotFound,
    NotServed,
    Overloaded,
    QueueTimeout,
    Unauthenticated,
    Unavailable,
)
from service.failures import FAILURES, INTERNAL, failure_of
from tests.support import bodies, inference, rpc
from tests.support.golden import GoldenCase, golden_cases
from tests.support.in_process import InProcess, service_in_process
from tests.support.roads import calls_to
from tests.support.server import RunningServer

OUTPUTS = ("context", "weights", "scores", "logits", "logsumexp", "entropy")
LAYER_OUTPUTS = ("output", "query", "key", "value", *OUTPUTS, "weight_totals")
WIDE = ("scores", "logits", "logsumexp", "entropy", "weight_totals", "grad_weights", "grad_logits")
"""Outputs of the dtype of the arithmetic."""
SUFFIXES = {torch.float32: "", torch.float64: "_fp64", torch.float16: "_fp16", torch.bfloat16: "_bf16"}
HALF = (torch.float16, torch.bfloat16)
SAFETENSORS = {"content-type": bodies.SAFETENSORS}


@dataclass(frozen=True, slots=True)
class Operation:
    """What one path computes, and the model that computes the same. ``is_layer``: a layer that is kept by its name."""

    path: str
    model: str
    is_layer: bool = False

    def model_of(self, dtype: torch.dtype) -> str:
        return self.model if self.is_layer else self.model + SUFFIXES[dtype]


ATTENTION = Operation("/v1/attention", "attention")
GRADIENTS = Operation("/v1/attention/gradients", "attention_gradients")
LAYER = Operation("/v1/layer", "layer")
Ask = Callable[[Operation, dict[str, Tensor], dict[str, Any], list[str]], dict[str, Tensor]]


def dtype_of(tensors: Mapping[str, Tensor]) -> torch.dtype:
    return next(iter(tensors.values())).dtype


def as_the_protocol_has_it(
    tensors: Mapping[str, Tensor], options: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inputs and the parameters of a native problem."""
    options = dict(options)
    inputs = {
        name: tensor if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor.to(torch.int64)
        for name, tensor in tensors.items()
    }
    offset = options.pop("query_offset", None)
    if offset is not None:
        inputs["query_offset"] = torch.tensor([offset])
    window = options.pop("window", None) or {}
    options |= {f"window_{side}": number for side, number in window.items() if number is not None}
    return inputs, options


class Doors:
    """Asks one problem through each of them; gives the outputs."""

    def __init__(self, client: httpx.Client, caller: rpc.Caller) -> None:
        self._client = client
        self._caller = caller

    def native(self, write: Callable[..., bytes], media_type: str) -> Ask:
        def ask(
            operation: Operation, tensors: dict[str, Tensor], options: dict[str, Any], outputs: list[str]
        ) -> dict[str, Tensor]:
            content = write(tensors, options | {"outputs": outputs})
            answer = self._client.post(operation.path, content=content, headers={"content-type": media_type})
            assert answer.status_code == 200, answer.text
            dtype = dtype_of(tensors)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            dtypes = {name: wide if name in WIDE else dtype for name in outputs}
            return bodies.read_answer(answer.content, media_type, dtypes)[0]

        return ask

    def rest(self, *, binary: bool) -> Ask:
        def ask(
            operation: Operation, tensors: dict[str, Tensor], options: dict[str, Any], outputs: list[str]
        ) -> dict[str, Tensor]:
            model = operation.model_of(dtype_of(tensors))
            inputs, parameters = as_the_protocol_has_it(tensors, options)
            asked = [{"name": name, "parameters": {"binary_data": binary}} for name in outputs]
            if binary:
                content, headers = inference.binary_body(inputs, parameters=parameters, outputs=asked)
            else:
                content, headers = inference.json_body(inputs, parameters=parameters, outputs=asked), {}
            answer = self._client.post(f"/v2/models/{model}/infer", content=content, headers=headers)
            return inference.read_answer(answer)[1]

        return ask

    def over_grpc(self, *, typed: bool) -> Ask:
        def ask(
            operation: Operation, tensors: dict[str, Tensor], options: dict[str, Any], outputs: list[str]
        ) -> dict[str, Tensor]:
            model = operation.model_of(dtype_of(tensors))
            inputs, parameters = as_the_protocol_has_it(tensors, options)
            message = rpc.request_of(inputs, model=model, parameters=parameters, outputs=outputs)
            if typed:
                del message.raw_input_contents[:]
                for given, tensor in zip(message.inputs, inputs.values(), strict=True):
                    fields = {"FP32": "fp32", "FP64": "fp64", "BOOL": "bool", "INT64": "int64"}
                    getattr(given.contents, f"{fields[given.datatype]}_contents").extend(tensor.reshape(-1).tolist())
                    given.contents.SetInParent()
            return rpc.outputs_of(self._caller.infer(message))

        return ask

    def stream(
        self, operation: Operation, tensors: dict[str, Tensor], options: dict[str, Any], outputs: list[str]
    ) -> dict[str, Tensor]:
        model = operation.model_of(dtype_of(tensors))
        inputs, parameters = as_the_protocol_has_it(tensors, options)
        with self._caller.stream() as streaming:
            streaming.send(rpc.request_of(inputs, model=model, parameters=parameters, outputs=outputs))
            streaming.close()
            (answer,) = streaming.rest()
        assert not answer.error_message
        return rpc.outputs_of(answer.infer_response)

    def all(self, dtype: torch.dtype) -> dict[str, Ask]:
        """Those in whose forms a dtype can be said."""
        doors: dict[str, Ask] = {
            "/v1 lists": self.native(bodies.list_body, bodies.JSON),
            "/v1 base64": self.native(bodies.object_body, bodies.JSON),
            "/v1 safetensors": self.native(bodies.safetensors_body, bodies.SAFETENSORS),
            "/v2 binary": self.rest(binary=True),
            "gRPC raw": self.over_grpc(typed=False),
            "gRPC stream": self.stream,
        }
        if dtype not in HALF:
            doors |= {"/v2 JSON": self.rest(binary=False), "gRPC typed": self.over_grpc(typed=True)}
        return doors


@pytest.fixture(scope="module")
def doors(server: RunningServer, client: httpx.Client) -> Iterator[Doors]:
    with rpc.calls_by_rpc(server.grpc_port) as caller:
        yield Doors(client, caller)


def can_be_said(case: GoldenCase) -> bool:
    """Whether all its floats have one dtype, as a model has."""
    floats = {tensor.dtype for tensor in case.tensors.values() if tensor.is_floating_point()}
    return len(floats) == 1


CASES = [case for case in golden_cases("attention") if can_be_said(case)]
GRADIENT_CASES = [case for case in CASES if case.gradients]
LAYERS = [case for case in golden_cases("layer") if can_be_said(case)]


def assert_every_door_agrees(
    doors: Doors, operation: Operation, tensors: dict[str, Tensor], options: Mapping[str, Any], outputs: list[str]
) -> None:
    found = {
        door: ask(operation, tensors, dict(options), outputs) for door, ask in doors.all(dtype_of(tensors)).items()
    }
    expected = found["/v1 safetensors"]
    for door, answer in found.items():
        assert set(answer) == set(outputs), door
        for name, tensor in expected.items():
            assert answer[name].dtype == tensor.dtype and answer[name].shape == tensor.shape, (door, name)
            # Of NaN JSON tells that it is one.
            assert torch.equal(answer[name].isnan(), tensor.isnan()), (door, name)
            assert torch.equal(answer[name].nan_to_num(0.5).signbit(), tensor.nan_to_num(0.5).signbit()), (door, name)
            assert torch.equal(answer[name].nan_to_num(0.5), tensor.nan_to_num(0.5)), (door, name)


def without_gradients(case: GoldenCase) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in case.tensors.items() if not name.startswith("grad_")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_golden_case_has_the_same_bits_through_every_door(doors: Doors, case: GoldenCase) -> None:
    outputs = [name for name in OUTPUTS if name in case.forward_outputs]
    assert_every_door_agrees(doors, ATTENTION, without_gradients(case), case.options, outputs)


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_gradients_of_a_golden_case_have_the_same_bits_through_every_door(doors: Doors, case: GoldenCase) -> None:
    outputs = [*case.gradients, "grad_weights", "grad_logits"]
    assert_every_door_agrees(doors, GRADIENTS, case.tensors, case.options, outputs)


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_a_golden_layer_has_the_same_bits_through_every_door(doors: Doors, case: GoldenCase) -> None:
    assert_every_door_agrees(doors, LAYER, without_gradients(case), case.options, list(LAYER_OUTPUTS))


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_a_golden_layer_that_is_kept_has_the_same_bits_through_every_door(
    doors: Doors, client: httpx.Client, case: GoldenCase
) -> None:
    name = f"golden-{case.name}"
    tensors, options = without_gradients(case), dict(case.options)
    weights = {name: tensors.pop(name) for name in PARAMETER_NAMES if name in tensors}
    reading: dict[str, Any] = {
        name: options.pop(name) for name in ("num_heads", "num_kv_heads", "weight_layout") if name in options
    }
    kept = client.put(f"/v1/layers/{name}", content=bodies.safetensors_body(weights, reading), headers=SAFETENSORS)
    assert kept.status_code == 201, kept.text
    try:
        operation = Operation(f"/v1/layers/{name}/forward", name, is_layer=True)
        assert_every_door_agrees(doors, operation, tensors, options, list(LAYER_OUTPUTS))
    finally:
        assert client.delete(f"/v1/layers/{name}").status_code == 204


def test_nearly_every_case_can_be_said() -> None:
    assert len(CASES) >= 65
    assert len(GRADIENT_CASES) == 4
    assert len(LAYERS) == len(golden_cases("layer")) >= 7


FAULT = Fault("query", "something", "something else")
ERRORS: dict[type[BaseException], BaseException] = {
    Malformed: Malformed("m", faults=[FAULT]),
    Unauthenticated: Unauthenticated("u"),
    NotFound: NotFound("n"),
    MethodNotServed: MethodNotServed("m", allow="GET"),
    NotAcceptable: NotAcceptable("n"),
    AlreadyExists: AlreadyExists("a"),
    BodyTooLarge: BodyTooLarge(received="more", allowed_bytes=5),
    TooLarge: TooLarge(needed_bytes=7, allowed_bytes=5),
    MediaTypeNotServed: MediaTypeNotServed("m"),
    InvalidProblem: InvalidProblem([FAULT]),
    Overloaded: Overloaded("o", reason="wait", retry_after_s=3),
    NotServed: NotServed("n"),
    Unavailable: Unavailable("u"),
    DeadlinePassed: DeadlinePassed("d"),
    QueueTimeout: QueueTimeout("q"),
}
MORE: list[BaseException] = [Draining("d"), ModelsStay(), RuntimeError("a mistake of ours")]
TENSORS = rpc.operands(1, 1, 2, 16)


@pytest.fixture(scope="module")
def service() -> Iterator[InProcess]:
    engine = Engine(device="cpu", max_threads=1)
    with service_in_process(engine, with_grpc=True) as running, calls_to(running):
        yield running


@pytest.fixture(scope="module")
def caller(service: InProcess) -> Iterator[rpc.Caller]:
    with rpc.calls_by_rpc(service.grpc_port) as connected:
        yield connected


def test_every_row_of_the_table_is_walked() -> None:
    assert set(ERRORS) == set(FAILURES)


@pytest.mark.parametrize("error", [*ERRORS.values(), *MORE], ids=lambda error: type(error).__name__)
def test_an_error_has_its_row_behind_every_door(
    service: InProcess, caller: rpc.Caller, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    row = failure_of(error)
    # What is known takes the ways on which nothing is read: they must refuse alike.
    known, headers = inference.binary_body(TENSORS, outputs=[{"name": "context", "parameters": {"binary_data": True}}])
    message = rpc.request_of(TENSORS)
    with httpx.Client(base_url=service.url) as client:
        for _ in range(2):
            assert client.post("/v2/models/sdpa/infer", content=known, headers=headers).status_code == 200
            caller.infer(message)

        def begin(self: Attend, *_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(Attend, "begin", begin)
        monkeypatch.setattr(Attend, "may_run_plain_at_once", lambda *_, **__: None)
        natively = [
            client.post("/v1/attention", content=bodies.safetensors_body(TENSORS, {}), headers=SAFETENSORS),
            client.post("/v1/attention", content=bodies.list_body(TENSORS, {})
                        , headers={"content-type": bodies.JSON}),
        ]  # fmt: skip
        by_protocol = [
            client.post("/v2/models/sdpa/infer", content=known, headers=headers),
            client.post("/v2/models/attention/infer", content=inference.json_body(TENSORS)),
        ]
    for answer in natively:
        assert answer.status_code == row.http
        assert answer.json()["type"] == f"/errors/{row.name}" and answer.json()["title"] == row.title
    for answer in by_protocol:
        assert answer.status_code == row.inference
        assert answer.headers["content-type"] == "application/json" and list(answer.json()) == ["error"]
    for answer in (*natively, *by_protocol):
        assert answer.headers.get("retry-after") == {
            Overloaded: "3",
            Unavailable: "1",
            Draining: "1",
            QueueTimeout: "1",
        }.get(type(error))
        assert row is not INTERNAL or "a mistake of ours" not in answer.text
    for sent in (message, rpc.request_of(TENSORS, model="attention", outputs=["weights"])):
        refused = rpc.refused(caller.start("ModelInfer", sent))
        assert refused.code() is grpc.StatusCode[row.grpc]
        assert refused.details() and (row is not INTERNAL or "a mistake of ours" not in refused.details())
    with caller.stream() as streaming:
        streaming.send(message)
        (answered,) = streaming.answers(1)
        # What follows names the request.
    assert answered.error_message.partition("names request")[0] == refused.details().partition("names request")[0]
