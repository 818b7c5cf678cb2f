"""The native REST door: decode, attend, encode."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from attn_core.errors import Fault
from attn_core.prepared import Prepared
from attn_core.problem import OUTPUTS
from attn_core.support import PATHS
from service.admission import Admission, BytePermit
from service.attend import Attend
from service.deadline import Deadline
from service.doors import health, openapi
from service.doors.answers import count_answer, gzipped, info_of, is_worth_gzip, refusal_reason
from service.doors.body import Disconnected, Negotiated, joined_headers, negotiate, parameter_faults, read_body
from service.doors.exchange import LOST_EXTENSION, ClientLost, Exchange, ExchangeLayer
from service.doors.problem_details import MEDIA_TYPE as PROBLEM_MEDIA_TYPE
from service.doors.problem_details import describe
from service.errors import REFUSAL_REASONS, MethodNotServed, NotFound
from service.lifecycle import Lifecycle
from service.request_queue import Answer
from service.telemetry import Metrics
from service.text_workers import TextWorkers
from service.wire import json_format, safetensors_format
from service.wire.arrays import FLOAT_NAMES, MAX_RANK, Buffer
from service.wire.requests import ATTENTION, WEIGHTED_SUM, Call, DecodedRequest, ReadLimits

LONG_TEXT_BYTES = 32 * 1024
"""Text of this length is read and written off the event loop."""
TEXT_FACTOR = 6
"""What reading JSON takes besides its body, as a multiple of it, in whichever process; one-digit numbers take more."""
SHORT_ANSWER_BYTES = 64 * 1024
SLICE_BYTES = 2**20
"""A longer answer leaves in slices, each of which its reader must take within the time for writing."""


T = TypeVar("T")


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
    metrics: Metrics
    limits: RestLimits
    version: str
    device: str
    text_workers: TextWorkers


class PiecesResponse(Response):
    """An answer sent piece by piece, none of them joined or copied.

    ``held`` is given up when the last byte has left for the socket, or the sending fails: an answer that waits for
    its reader is still inside.
    """

    def __init__(
        self,
        pieces: list[bytes | memoryview],
        media_type: str,
        headers: Mapping[str, str],
        *,
        held: contextlib.ExitStack,
    ) -> None:
        self.pieces = pieces
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.body = b""
        self.size = sum(len(piece) for piece in pieces)
        self._held = held
        self.init_headers({**headers, "content-length": str(self.size), "content-type": media_type})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await self._send(send)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self.size <= SHORT_ANSWER_BYTES:
            last = len(self.pieces) - 1
            for index, piece in enumerate(self.pieces):
                await send({"type": "http.response.body", "body": piece, "more_body": index < last})
            return
        for piece in self.pieces:
            for start in range(0, len(piece), SLICE_BYTES):
                part = piece[start : start + SLICE_BYTES]
                await send({"type": "http.response.body", "body": part, "more_body": True})
        # Waits until what was written before has left.
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def build_app(parts: Parts) -> ASGIApp:
    """The FastAPI app with every REST route, wrapped in the layer that gives each request its id and its answer."""
    app = FastAPI(
        title="attn, the attention service",
        version=parts.version,
        description=openapi.DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    door = _RestDoor(parts)
    app.include_router(door.router())
    app.include_router(health.router(parts.lifecycle, parts.metrics))
    openapi.install(app)
    app.add_exception_handler(HTTPException, _routing_error)
    routes = frozenset(app.openapi()["paths"]) | {"/docs", "/openapi.json"}
    parts.metrics.prepare(routes=routes, paths=PATHS, reasons=REFUSAL_REASONS)
    return ExchangeLayer(
        app,
        metrics=parts.metrics,
        lifecycle=parts.lifecycle,
        routes=routes,
        write_timeout_s=parts.limits.write_timeout_s,
    )


async def _routing_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses, in the form of all other refusals."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        message = f"{request.url.path} takes {allow}, not {request.method}"
        return refusal(request, MethodNotServed(message, allow=allow))
    return refusal(request, NotFound(f"there is no {request.url.path[:200]}"))


def exchange_of(request: Request) -> Exchange:
    exchange: Exchange = request.scope["attn.exchange"]
    return exchange


def _client_lost(request: Request) -> ClientLost:
    """What tells of a lost connection; nothing does where another server runs the app."""
    lost: ClientLost = request.scope.get("extensions", {}).get(LOST_EXTENSION) or ClientLost()
    return lost


def refusal(request: Request, error: BaseException) -> Response:
    """An error as its answer."""
    exchange = exchange_of(request)
    failure, body, headers = describe(error, exchange.request_id)
    exchange.outcome = failure.name
    return Response(body, status_code=failure.http, headers=dict(headers), media_type=PROBLEM_MEDIA_TYPE)


class _RestDoor:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._text_pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="attn-text")

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route(
            "/v1/attention",
            self._endpoint(ATTENTION),
            methods=["POST"],
            **openapi.ATTENTION_ROUTE,
        )
        router.add_api_route(
            "/v1/weighted_sum",
            self._endpoint(WEIGHTED_SUM),
            methods=["POST"],
            **openapi.WEIGHTED_SUM_ROUTE,
        )
        router.add_api_route("/v1", self._describe_service, methods=["GET"], **openapi.SERVICE_ROUTE)
        return router

    def _endpoint(self, call: Call) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            lost = _client_lost(request)
            task = asyncio.current_task()
            assert task is not None
            lost.on_lost(task.cancel)
            try:
                return await self._serve(request, call)
            except Disconnected:
                exchange_of(request).outcome = "disconnected"
                return Response(status_code=400)
            except asyncio.CancelledError:
                if not lost.is_told or task.uncancel():
                    raise
                exchange_of(request).outcome = "disconnected"
                return Response(status_code=400)
            except Exception as error:
                reason = refusal_reason(error)
                if reason is not None:
                    self._parts.metrics.refused.labels(reason).inc()
                return refusal(request, error)
            finally:
                # The answer that is being sent notices by itself.
                lost.on_lost(None)

        return endpoint

    async def _serve(self, request: Request, call: Call) -> Response:
        parts, exchange, headers = self._parts, exchange_of(request), joined_headers(request.scope["headers"])
        deadline = Deadline(exchange.began + parts.limits.default_timeout_s)
        with contextlib.ExitStack() as inside:
            inside.enter_context(parts.lifecycle.work())
            parts.attend.check_room()
            permit = inside.enter_context(parts.admission.request())
            inside.enter_context(parts.metrics.in_flight.track_inprogress())
            forms = negotiate(headers)
            with exchange.stage("read"):
                body = await read_body(
                    request.receive,
                    headers,
                    exchange=exchange,
                    permit=permit,
                    deadline=deadline,
                    max_bytes=self._max_bytes(forms),
                    forms=forms,
                )
            with exchange.stage("parse"):
                also = parameter_faults(request.scope["query_string"])
                decoded = await self._decode(body, call, forms, also, permit, deadline)
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
        call: Call,
        forms: Negotiated,
        also: Sequence[Fault],
        permit: BytePermit,
        deadline: Deadline,
    ) -> DecodedRequest:
        is_json = forms.request_form == json_format.MEDIA_TYPE
        limits, workers = self._parts.limits.read, self._parts.text_workers
        asked: dict[str, Any] = {"answer_is_json": forms.answer_form == json_format.MEDIA_TYPE, "also": also}
        if not is_json:
            return safetensors_format.decode(body, call, limits, **asked)
        read = functools.partial(json_format.decode, body, call, limits, **asked)
        if len(body) < LONG_TEXT_BYTES:
            return read()
        self._parts.admission.check_memory(TEXT_FACTOR * len(body))
        permit.hold(TEXT_FACTOR * len(body))
        if not workers.is_running:
            return await self._off_loop(read, deadline)
        build = functools.partial(json_format.build, call=call, limits=limits, **asked)
        return await workers.read(body, call.names, limits.tensors, deadline, finish=build)

    async def _encode(
        self, answer: Answer, decoded: DecodedRequest, forms: Negotiated, deadline: Deadline
    ) -> tuple[list[bytes | memoryview], dict[str, str]]:
        """The answer's pieces and the headers that go with them."""
        outputs, info = answer.result.outputs, info_of(answer)
        pieces: list[bytes | memoryview]
        if forms.answer_form == safetensors_format.MEDIA_TYPE:
            pieces = safetensors_format.encode(outputs, info)
        elif sum(tensor.nbytes for tensor in outputs.values()) < LONG_TEXT_BYTES:
            pieces = json_format.encode(outputs, info, decoded.encoding)
        elif self._parts.text_workers.is_running:
            collect = functools.partial(json_format.flat_outputs, outputs)
            pieces = await self._parts.text_workers.write(collect, info, decoded.encoding, deadline)
        else:
            write = functools.partial(json_format.encode, outputs, info, decoded.encoding)
            pieces = await self._off_loop(write, deadline)
        headers = {"vary": "Accept, Accept-Encoding"}
        if forms.accepts_gzip and is_worth_gzip(pieces):
            size = sum(len(piece) for piece in pieces)
            squeeze = functools.partial(gzipped, pieces)
            pieces = [squeeze() if size < LONG_TEXT_BYTES else await self._off_loop(squeeze, deadline)]
            headers["content-encoding"] = "gzip"
        return pieces, headers

    async def _off_loop(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Run in the text threads what would hold up the event loop. Raises: DeadlinePassed; the work ends alone."""
        future = asyncio.get_running_loop().run_in_executor(self._text_pool, work)
        return await deadline.wait_for(future)

    async def _describe_service(self) -> dict[str, Any]:
        limits = self._parts.limits
        return {
            "version": self._parts.version,
            "torch": torch.__version__,
            "device": self._parts.device,
            "state": self._parts.lifecycle.state.value,
            "dtypes": list(FLOAT_NAMES),
            "outputs": list(OUTPUTS),
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
            },
        }


def _answer_bytes(decoded: DecodedRequest, forms: Negotiated, prepared: Prepared) -> int:
    """What the written answer takes besides the outputs themselves: nothing where their memory is sent as it is."""
    if forms.answer_form == safetensors_format.MEDIA_TYPE:
        return 0
    first = decoded.problem.tensors()
    itemsize = next(iter(first.values())).dtype.itemsize
    return json_format.text_bytes(prepared.cost.output_bytes, itemsize, decoded.encoding)
