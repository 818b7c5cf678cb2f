"""The native REST door: decode, attend, encode."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from attn_core.errors import Fault
from attn_core.prepared import Prepared
from attn_core.problem import GRADIENT_OUTPUTS, LAYER_GRADIENT_OUTPUTS, LAYER_OUTPUTS, OUTPUTS, LayerParameters
from attn_core.support import PATHS
from service.admission import Admission, BytePermit
from service.attend import Attend
from service.authentication import Authentication
from service.deadline import Deadline
from service.doors import health, openapi, openapi_layers, plan, playground
from service.doors.answers import count_answer, gzipped, info_of, is_worth_gzip
from service.doors.body import (
    Negotiated,
    joined_headers,
    negotiate,
    parameter_faults,
    read_body,
    safetensors_data_at,
)
from service.doors.exchange import ExchangeLayer
from service.doors.inference import Inference
from service.doors.layers import LayersDoor
from service.doors.open_inference import InferenceDoor
from service.doors.serving import Pieces, PiecesResponse, Serving, exchange_of, refusal
from service.errors import REFUSAL_REASONS, MethodNotServed, NotFound
from service.layer_store import LayerStore
from service.lifecycle import Lifecycle
from service.request_queue import Answer
from service.telemetry import Metrics
from service.text_workers import TextWorkers
from service.wire import json_arrays, json_format, safetensors_format
from service.wire.arrays import FLOAT_NAMES, MAX_RANK, Buffer
from service.wire.plain_recipes import PlainRecipes
from service.wire.requests import (
    ATTENTION,
    GRADIENTS,
    LAYER,
    LAYER_GRADIENTS,
    WEIGHTED_SUM,
    Call,
    DecodedRequest,
    NamedCall,
    ReadLimits,
)


@dataclass(frozen=True, slots=True)
class RestLimits:
    """What the door lets through, and what it says about it under GET /v1."""

    read: ReadLimits
    max_body_bytes: int
    max_json_bytes: int
    write_timeout_s: float
    default_timeout_s: float
    max_queue_requests: int
    memory_bytes: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the door works with, made by ``main``."""

    attend: Attend
    admission: Admission
    lifecycle: Lifecycle
    authentication: Authentication
    metrics: Metrics
    limits: RestLimits
    version: str
    device: str
    text_workers: TextWorkers
    inference: Inference
    recipes: PlainRecipes
    layers: LayerStore


def build_app(parts: Parts) -> ExchangeLayer:
    """The FastAPI app with every REST route, wrapped in the layer that gives each request its id and its answer."""
    app = FastAPI(
        title="attn, the attention service",
        version=parts.version,
        description=openapi.DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    serving = Serving(
        attend=parts.attend,
        admission=parts.admission,
        lifecycle=parts.lifecycle,
        metrics=parts.metrics,
        text_workers=parts.text_workers,
    )
    rest = _RestDoor(parts, serving)
    app.include_router(rest.router())
    planning = plan.PlanDoor(
        serving,
        attend=parts.attend,
        admission=parts.admission,
        read=parts.limits.read,
        device=parts.device,
        max_body_bytes=parts.limits.max_body_bytes,
        max_json_bytes=parts.limits.max_json_bytes,
        default_timeout_s=parts.limits.default_timeout_s,
    )
    app.include_router(planning.router())
    layers = LayersDoor(
        parts.layers,
        serving,
        compute=rest.serve,
        admission=parts.admission,
        read=parts.limits.read,
        max_body_bytes=parts.limits.max_body_bytes,
        max_json_bytes=parts.limits.max_json_bytes,
        default_timeout_s=parts.limits.default_timeout_s,
    )
    app.include_router(layers.router())
    inference = InferenceDoor(
        parts.inference,
        serving,
        admission=parts.admission,
        max_body_bytes=parts.limits.max_body_bytes,
        max_json_bytes=parts.limits.max_json_bytes,
        default_timeout_s=parts.limits.default_timeout_s,
        recipes=parts.recipes,
    )
    app.include_router(inference.router())
    app.include_router(health.router(parts.lifecycle, parts.metrics))
    app.include_router(playground.router())
    more_models = (*openapi_layers.MODELS, *plan.MODELS)
    openapi.install(app, asks_for_keys=parts.authentication.is_required, more_models=more_models)
    app.add_exception_handler(HTTPException, _routing_error)
    routes = frozenset(app.openapi()["paths"]) | {"/docs", "/openapi.json"}
    parts.metrics.prepare(routes=routes, paths=PATHS, reasons=REFUSAL_REASONS)
    return ExchangeLayer(
        app,
        metrics=parts.metrics,
        lifecycle=parts.lifecycle,
        authentication=parts.authentication,
        routes=routes,
        write_timeout_s=parts.limits.write_timeout_s,
    )


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


async def _routing_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses, in the form of all other refusals."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allow = ", ".join(sorted(_methods_of(request)))
        message = f"{request.url.path} takes {allow}, not {request.method}"
        return refusal(request, MethodNotServed(message, allow=allow))
    return refusal(request, NotFound(f"there is no {request.url.path[:200]}"))


def _methods_of(request: Request) -> set[str]:
    """What the path takes, by whichever route."""
    # A router that is included has no methods of its own to be read: each is tried.
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    routes = request.app.routes
    return {m for m, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)}


class _RestDoor:
    def __init__(self, parts: Parts, serving: Serving) -> None:
        self._parts = parts
        self._serving = serving

    def router(self) -> APIRouter:
        router = APIRouter()
        calls: dict[str, tuple[Call, dict[str, Any]]] = {
            "/v1/attention": (ATTENTION, openapi.ATTENTION_ROUTE),
            "/v1/attention/gradients": (GRADIENTS, openapi.GRADIENTS_ROUTE),
            "/v1/weighted_sum": (WEIGHTED_SUM, openapi.WEIGHTED_SUM_ROUTE),
            "/v1/layer": (LAYER, openapi.LAYER_ROUTE),
            "/v1/layer/gradients": (LAYER_GRADIENTS, openapi.LAYER_GRADIENTS_ROUTE),
        }
        for path, (call, described) in calls.items():
            router.add_api_route(path, self._endpoint(call), methods=["POST"], **described)
        router.add_api_route("/v1", self._describe_service, methods=["GET"], **openapi.SERVICE_ROUTE)
        return router

    def _endpoint(self, call: Call) -> Callable[[Request], Awaitable[Response]]:
        return self._serving.endpoint(functools.partial(self.serve, call))

    async def serve(
        self, call: Call | NamedCall, request: Request, *, stored: LayerParameters | None = None
    ) -> Response:
        """Decode, attend, encode; ``stored`` is the layer of a named call. Raises: whatever a refusal says."""
        parts, exchange, headers = self._parts, exchange_of(request), joined_headers(request.scope["headers"])
        deadline = Deadline(exchange.began + parts.limits.default_timeout_s)
        with self._serving.inside() as (permit, inside):
            forms = negotiate(headers)
            with exchange.stage("read"):
                body = await read_body(
                    request.receive,
                    headers,
                    exchange=exchange,
                    permit=permit,
                    deadline=deadline,
                    max_bytes=self._max_bytes(forms),
                    coding="gzip" if forms.body_is_gzipped else None,
                    data_at=safetensors_data_at if forms.request_form == safetensors_format.MEDIA_TYPE else None,
                )
            with exchange.stage("parse"):
                also = parameter_faults(request.scope["query_string"])
                decoded = await self._decode(body, call, forms, also, permit, deadline, stored)
            if decoded.timeout_s is not None:
                deadline = Deadline(exchange.began + decoded.timeout_s)
            answer = await parts.attend.attend(
                decoded.problem, deadline, answer_bytes=functools.partial(_answer_bytes, decoded, forms), held=body
            )
            exchange.stages |= {"queue": answer.queue_s, "compute": answer.compute_s}
            count_answer(parts.metrics, answer)
            with exchange.stage("encode"):
                pieces, more_headers = await self._encode(answer, decoded, forms, deadline)
            response = PiecesResponse(pieces, forms.answer_form, more_headers, held=inside.pop_all())
            permit.count(response.size)
            return response

    def _max_bytes(self, forms: Negotiated) -> int:
        limits = self._parts.limits
        is_json = forms.request_form == json_format.MEDIA_TYPE
        return min(limits.max_json_bytes, limits.max_body_bytes) if is_json else limits.max_body_bytes

    async def _decode(
        self,
        body: Buffer,
        call: Call | NamedCall,
        forms: Negotiated,
        also: Sequence[Fault],
        permit: BytePermit,
        deadline: Deadline,
        stored: LayerParameters | None,
    ) -> DecodedRequest:
        limits = self._parts.limits.read
        asked: dict[str, Any] = {
            "answer_is_json": forms.answer_form == json_format.MEDIA_TYPE,
            "also": also,
            "stored": stored,
        }
        if forms.request_form == safetensors_format.MEDIA_TYPE:
            return safetensors_format.decode(body, call, limits, **asked)
        read = functools.partial(json_arrays.read, names=call.names, limits=limits.tensors)
        build = functools.partial(json_format.build, call=call, limits=limits, **asked)
        return await self._serving.read_text(body, read, build, permit, deadline)

    async def _encode(
        self, answer: Answer, decoded: DecodedRequest, forms: Negotiated, deadline: Deadline
    ) -> tuple[Pieces, dict[str, str]]:
        """The answer's pieces and the headers that go with them."""
        outputs, info = answer.result.outputs, info_of(answer)
        if forms.answer_form == safetensors_format.MEDIA_TYPE:
            pieces = safetensors_format.encode(outputs, info)
        else:
            pieces = await self._serving.write_text(
                sum(tensor.nbytes for tensor in outputs.values()),
                functools.partial(json_format.flat_outputs, outputs),
                functools.partial(json_arrays.write, info=info, encoding=decoded.encoding),
                functools.partial(json_arrays.max_text_bytes, info=info, encoding=decoded.encoding),
                deadline,
            )
        headers = {"vary": "Accept, Accept-Encoding"}
        if forms.accepts_gzip and is_worth_gzip(pieces):
            pieces = await self._serving.squeeze(pieces, gzipped, deadline)
            headers["content-encoding"] = "gzip"
        return pieces, headers

    async def _describe_service(self) -> dict[str, Any]:
        limits = self._parts.limits
        return {
            "version": self._parts.version,
            "torch": torch.__version__,
            "device": self._parts.device,
            "state": self._parts.lifecycle.state.value,
            "dtypes": list(FLOAT_NAMES),
            "outputs": list(OUTPUTS),
            "gradients": list(GRADIENT_OUTPUTS),
            "layer_outputs": list(LAYER_OUTPUTS),
            "layer_gradients": list(LAYER_GRADIENT_OUTPUTS),
            "paths": list(PATHS),
            "limits": {
                "max_body_bytes": limits.max_body_bytes,
                "max_json_bytes": min(limits.max_json_bytes, limits.max_body_bytes),
                "memory_bytes": limits.memory_bytes(),
                "max_queue_requests": limits.max_queue_requests,
                "default_timeout_ms": limits.default_timeout_s * 1e3,
                "max_timeout_ms": limits.read.max_timeout_s * 1e3,
                "max_tensor_elements": limits.read.tensors.max_tensor_elements,
                "max_axis": limits.read.tensors.max_axis,
                "max_rank": MAX_RANK,
                "max_header_bytes": safetensors_format.MAX_HEADER_BYTES,
                "layer_budget_bytes": self._parts.layers.max_bytes,
                "max_layers": self._parts.layers.max_layers,
            },
        }


def _answer_bytes(decoded: DecodedRequest, forms: Negotiated, prepared: Prepared) -> int:
    """What the written answer takes besides the outputs themselves: nothing where their memory is sent as it is."""
    if forms.answer_form == safetensors_format.MEDIA_TYPE:
        return 0
    first = decoded.problem.tensors()
    itemsize = next(iter(first.values())).dtype.itemsize
    return json_format.text_bytes(prepared.cost.output_bytes, itemsize, decoded.encoding)
