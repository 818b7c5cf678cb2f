"""The gRPC door: ``inference.GRPCInferenceService`` on grpc.aio, with health and reflection beside it.

A call is looked at before its message is read: key, and room for work. Messages come and go as bytes. Those of plain
requests that are known are neither parsed nor built; of all others only what is not a tensor is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from attn_core.errors import AttentionError, TooLarge
from attn_core.placement import ALIGNMENT_BYTES
from attn_core.prepared import Prepared
from service.admission import Admission, BytePermit
from service.attend import Attend
from service.authentication import Authentication
from service.doors.answers import refusal_reason
from service.doors.exchange import Exchange, record
from service.doors.inference import Inference, InferenceAnswer, error_text
from service.doors.peer import is_loopback_address
from service.doors.receive_buffers import LANDING_BYTES, ReceiveBuffer, ReceiveBuffers
from service.doors.rpc_neighbours import HEALTH, INFERENCE, REFLECTION, REFLECTION_ALPHA, Health, Reflection
from service.doors.rpc_stream import STREAM, Stream
from service.errors import (
    DeadlinePassed,
    ModelsStay,
    NotFound,
    NotServed,
    Overloaded,
    QueueTimeout,
    ServiceError,
    Unavailable,
)
from service.failures import INTERNAL, Failure
from service.lifecycle import State
from service.telemetry import OTHER_ROUTE
from service.wire import open_inference_pb2 as pb
from service.wire.arrays import MAX_RANK
from service.wire.inference import CheckedInference, InferenceRequest
from service.wire.inference_models import DATATYPES, Model
from service.wire.open_inference_proto import (
    FINAL_PIECE,
    Frame,
    Piece,
    asks_final_response,
    id_of,
    message_of,
    parse,
    read_message,
    read_request,
    write_answer,
)
from service.wire.proto_recipes import ProtoRecipe, ProtoRecipes, Received
from service.wire.tensors import memory_of

log = logging.getLogger("attn.door")

MAX_DETAILS_BYTES = 6000
"""Of an error's text as it is sent: clients refuse headers of over 8 KiB."""
ANSWER_OVERHEAD_BYTES = 16 * 1024
"""What an answer takes at most besides its outputs and its id."""
SHORT_BYTES = 64 * 1024
"""A message of which no more than this is to be parsed is read by the event loop, and an answer of this length is not
counted while it is sent."""
SLICE_BYTES = 2**20
UNWATCHED_CALLS = 128
"""With so many unary calls open, it is seen to that the message of one more comes."""
MAX_SUCH_CALLS = 400
"""Of streams, and of calls of health."""

_INFER = f"/{INFERENCE}/ModelInfer"
_CHECK, _WATCH = f"/{HEALTH}/Check", f"/{HEALTH}/Watch"
_REFLECT = (f"/{REFLECTION}/ServerReflectionInfo", f"/{REFLECTION_ALPHA}/ServerReflectionInfo")
_WORK = frozenset({_INFER, STREAM})
_OPEN = frozenset({_CHECK, _WATCH, f"/{INFERENCE}/ServerLive", f"/{INFERENCE}/ServerReady"})
"""Health alone is told to everybody."""
_STATUS: Mapping[str, grpc.StatusCode] = {code.name: code for code in grpc.StatusCode}

Method = Callable[[Any, Any], Message]
"""Gives the answer to a parsed request; the other argument is gRPC's context."""


@dataclass(frozen=True, slots=True)
class RpcLimits:
    max_answer_bytes: int
    default_timeout_s: float
    write_timeout_s: float

    def time_to_read_s(self, num_bytes: int) -> float:
        """How long a caller may take to read an answer."""
        return self.write_timeout_s * max(1, -(-num_bytes // SLICE_BYTES))


class RpcDoor(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Every call of one server. To be made in the event loop that serves.

    ``recipes`` are for the device that computes.
    """

    def __init__(
        self,
        *,
        inference: Inference,
        attend: Attend,
        admission: Admission,
        authentication: Authentication,
        buffers: ReceiveBuffers,
        recipes: ProtoRecipes,
        limits: RpcLimits,
    ) -> None:
        self.inference = inference
        self.limits = limits
        self._attend = attend
        self._admission = admission
        self._authentication = authentication
        self._buffers = buffers
        self._landing = ReceiveBuffer(LANDING_BYTES)
        self.recipes = recipes
        self._lifecycle = inference.lifecycle
        self._metrics = inference.metrics
        self._health = Health(inference.lifecycle)
        self._reflection = Reflection()
        self._handlers = self._all_handlers()
        self._streams: set[Stream] = set()
        self._reflections: set[asyncio.Task[Any]] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        # Of streams, and of what is open to everybody.
        self._places: tuple[set[asyncio.Task[Any]], set[asyncio.Task[Any]]] = set(), set()
        self._metrics.prepare(routes=self._handlers, paths=(), reasons=())
        self._ok = {route: self._metrics.requests.labels(route, "ok") for route in _WORK}
        self._seconds = {route: self._metrics.request_seconds.labels(route) for route in _WORK}

    # What gRPC calls

    def service(self, call: Any) -> Any:
        """The handler of a call whose message has not been read; None for a method that is not there.

        Whoever brings no key is not told which are.
        """
        method = call.method
        handler = self._handlers.get(method)
        try:
            if self._authentication.is_required and method not in _OPEN:
                metadata = dict(call.invocation_metadata)
                self._authentication.check(metadata.get("authorization"), metadata.get("x-api-key"))
            if method in _WORK:
                self.inference.check_room()
            if method in _OPEN or method == STREAM:
                self._take_place(method in _OPEN)
        except Exception as error:
            # A handler of streams need not read what it refuses.
            route = OTHER_ROUTE if handler is None else method
            return grpc.stream_stream_rpc_method_handler(functools.partial(self._refuse_unread, error, route))
        if handler is None:
            return None
        if not handler.request_streaming:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            if len(self._calls) > UNWATCHED_CALLS:
                return grpc.stream_stream_rpc_method_handler(functools.partial(self._watched, handler, method))
        return handler

    def _take_place(self, is_open: bool) -> None:
        """Count a call that may stay for long, or that needs no key: there are fewer places for those than for all, so
        that they cannot keep the others out. Raises: Overloaded."""
        places = self._places[is_open]
        if len(places) >= MAX_SUCH_CALLS:
            raise Overloaded(f"{MAX_SUCH_CALLS} calls of this kind are open already", reason="requests")
        task = asyncio.current_task()
        assert task is not None
        places.add(task)
        task.add_done_callback(places.discard)

    @property
    def _is_alone(self) -> bool:
        """Whether no other call is open. gRPC hands messages over one by one, so that none seems to wait while the next
        ones are read; computed here as they come, all of them would share one core."""
        return len(self._calls) + len(self._streams) <= 1

    @property
    def num_calls(self) -> int:
        """How many unary calls have begun and are not over, to the last byte of their answer."""
        return len(self._calls)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def end_streams(self) -> None:
        """Answer what has been read of each stream, and no more."""
        self._health.end()
        for stream in list(self._streams):
            stream.end()
        for reading in list(self._reflections):
            reading.cancel()

    # Handlers

    def _all_handlers(self) -> dict[str, Any]:
        inference = self.inference
        handlers = {
            _INFER: grpc.unary_unary_rpc_method_handler(self._infer),
            STREAM: grpc.stream_stream_rpc_method_handler(self._stream),
            _CHECK: self._unary(_CHECK, health_pb2.HealthCheckRequest, lambda message, _: self._health.check(message)),
            _WATCH: grpc.stream_stream_rpc_method_handler(self._watch_health),
        }
        for path in _REFLECT:
            handlers[path] = grpc.stream_stream_rpc_method_handler(self._reflect)
        unary: dict[str, tuple[type[Message], Method]] = {
            "ServerLive": (pb.ServerLiveRequest, lambda *_: pb.ServerLiveResponse(live=True)),
            "ServerReady": (
                pb.ServerReadyRequest,
                lambda *_: pb.ServerReadyResponse(ready=self._lifecycle.is_ready),
            ),
            "ModelReady": (pb.ModelReadyRequest, self._model_ready),
            "ServerMetadata": (
                pb.ServerMetadataRequest,
                lambda *_: message_of(pb.ServerMetadataResponse, inference.server_metadata()),
            ),
            "ModelMetadata": (pb.ModelMetadataRequest, self._model_metadata),
            "ModelConfig": (pb.ModelConfigRequest, self._model_config),
            "ModelStatistics": (pb.ModelStatisticsRequest, self._model_statistics),
            "RepositoryIndex": (pb.RepositoryIndexRequest, self._index),
            "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, _models_stay),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, _models_stay),
            "SystemSharedMemoryStatus": (pb.SystemSharedMemoryStatusRequest, self._memory_status),
            "SystemSharedMemoryRegister": (pb.SystemSharedMemoryRegisterRequest, self._register_memory),
            "SystemSharedMemoryUnregister": (pb.SystemSharedMemoryUnregisterRequest, self._unregister_memory),
            "CudaSharedMemoryStatus": (pb.CudaSharedMemoryStatusRequest, _not_served),
            "CudaSharedMemoryRegister": (pb.CudaSharedMemoryRegisterRequest, _not_served),
            "CudaSharedMemoryUnregister": (pb.CudaSharedMemoryUnregisterRequest, _not_served),
            "TraceSetting": (pb.TraceSettingRequest, _not_served),
            "LogSettings": (pb.LogSettingsRequest, _not_served),
        }
        for name, (message_class, method) in unary.items():
            path = f"/{INFERENCE}/{name}"
            handlers[path] = self._unary(path, message_class, method)
        return handlers

    def _unary(self, path: str, message_class: type[Message], method: Method) -> Any:
        """A handler for what is answered from what is known."""

        async def serve(data: bytes, rpc_context: Any) -> bytes:
            exchange = self.exchange(rpc_context)
            exchange.received_bytes = len(data)
            with self.recorded(path, exchange):
                try:
                    answer: bytes = method(parse(message_class, data), rpc_context).SerializeToString()
                except Exception as error:
                    await self._refuse(error, exchange, rpc_context)
                exchange.sent_bytes, exchange.status = len(answer), 200
            return answer

        return grpc.unary_unary_rpc_method_handler(serve)

    def _model_ready(self, request: pb.ModelReadyRequest, _: Any) -> pb.ModelReadyResponse:
        try:
            self.inference.models.get(request.name, request.version)
        except NotFound:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._lifecycle.is_ready)

    def _model_metadata(self, request: pb.ModelMetadataRequest, _: Any) -> pb.ModelMetadataResponse:
        return message_of(pb.ModelMetadataResponse, self.inference.models.get(request.name, request.version).metadata())

    def _model_config(self, request: pb.ModelConfigRequest, _: Any) -> pb.ModelConfigResponse:
        configuration = self.inference.models.get(request.name, request.version).configuration()
        return message_of(pb.ModelConfigResponse, {"config": configuration})

    def _model_statistics(self, request: pb.ModelStatisticsRequest, _: Any) -> pb.ModelStatisticsResponse:
        return message_of(pb.ModelStatisticsResponse, self.inference.model_statistics(request.name, request.version))

    def _index(self, request: pb.RepositoryIndexRequest, _: Any) -> pb.RepositoryIndexResponse:
        return message_of(pb.RepositoryIndexResponse, {"models": self.inference.index(ready_only=request.ready)})

    def _memory_status(
        self, request: pb.SystemSharedMemoryStatusRequest, rpc_context: Any
    ) -> pb.SystemSharedMemoryStatusResponse:
        self.inference.check_shared_memory(is_loopback=is_loopback_peer(rpc_context.peer()))
        regions = {region["name"]: region for region in self.inference.shared_memory.status(request.name)}
        return message_of(pb.SystemSharedMemoryStatusResponse, {"regions": regions})

    def _register_memory(
        self, request: pb.SystemSharedMemoryRegisterRequest, rpc_context: Any
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self.inference.check_shared_memory(is_loopback=is_loopback_peer(rpc_context.peer()))
        self.inference.shared_memory.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def _unregister_memory(
        self, request: pb.SystemSharedMemoryUnregisterRequest, rpc_context: Any
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self.inference.check_shared_memory(is_loopback=is_loopback_peer(rpc_context.peer()))
        self.inference.shared_memory.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def _watched(self, handler: Any, route: str, _: Any, rpc_context: Any) -> None:
        """Serve a unary call and watch whether its message comes. gRPC's own way of reading one costs a tenth less, but
        cannot be ended."""
        data = await self._message(route, rpc_context)
        if data is not None:
            await rpc_context.write(await handler.unary_unary(data, rpc_context))

    async def _message(self, route: str, rpc_context: Any) -> bytes | None:
        """The message of a unary call; None where its caller has gone. Ends the call where it does not come."""
        try:
            async with asyncio.timeout(self.limits.default_timeout_s):
                data = await rpc_context.read()
        except TimeoutError:
            await self._refuse_unread(
                DeadlinePassed("the deadline passed before the message was there"), route, None, rpc_context
            )
        return None if data is grpc.aio.EOF else data

    async def _watch_health(self, _: Any, rpc_context: Any) -> None:
        data = await self._message(_WATCH, rpc_context)
        if data is None:
            return
        exchange = self.exchange(rpc_context)
        with self.recorded(_WATCH, exchange):
            try:
                async for status in self._health.watch(parse(health_pb2.HealthCheckRequest, data)):
                    await rpc_context.write(status.SerializeToString())
            except Exception as error:
                await self._refuse(error, exchange, rpc_context)

    async def _reflect(self, _: Any, rpc_context: Any) -> None:
        async def answer_all() -> None:
            async for answer in self._reflection.answers(_messages(rpc_context)):
                await rpc_context.write(answer)

        answering = asyncio.create_task(answer_all())
        self._reflections.add(answering)
        try:
            await asyncio.wait([answering])
        finally:
            self._reflections.discard(answering)
            answering.cancel()
        if answering.cancelled():
            await self._refuse_unread(Unavailable("the server stops"), _REFLECT[0], None, rpc_context)

    # Inference

    async def _infer(self, data: bytes, rpc_context: Any) -> bytes:
        began = time.monotonic()
        received = self.recipes.find(data)
        pieces = self.answer_at_once(_INFER, received, began, rpc_context)
        if pieces is not None:
            answer = b"".join(pieces)
            if len(answer) > SHORT_BYTES:
                self._count_sending(len(answer))
            return answer
        exchange = self.exchange(rpc_context)
        exchange.began = began
        with self.recorded(_INFER, exchange):
            try:
                with contextlib.ExitStack() as inside:
                    inside.enter_context(self._lifecycle.work())
                    permit = self.enter(inside, len(data))
                    pieces = await self.answer(received, exchange, rpc_context, permit)
                    answer = b"".join(pieces)
                    sending = inside.pop_all()
            except Exception as error:
                await self._refuse(error, exchange, rpc_context)
            self._hold_while_sent(sending, len(answer))
        return answer

    def _count_sending(self, num_bytes: int) -> None:
        """Count an answer that is there for as long as it is sent: others are refused meanwhile."""
        with contextlib.ExitStack() as sending:
            permit = self._admission.enter_anyway()
            sending.callback(permit.leave)
            permit.count(num_bytes)
            sending.enter_context(self._metrics.in_flight.track_inprogress())
            self._hold_while_sent(sending.pop_all(), num_bytes)

    def _hold_while_sent(self, sending: contextlib.ExitStack, num_bytes: int) -> None:
        """Close ``sending`` once the call is over to the last byte of its answer.

        Or once its caller has had a mebibyte's time for each that it has: gRPC has no means to end a call whose answer
        is not read, but such a one shall not keep others out.
        """
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(self.limits.time_to_read_s(num_bytes), sending.close)

        def sent(_: object) -> None:
            timer.cancel()
            sending.close()

        task.add_done_callback(sent)

    async def _stream(self, _: Any, rpc_context: Any) -> None:
        stream = Stream(self, rpc_context)
        self._streams.add(stream)
        try:
            await stream.serve()
        finally:
            self._streams.discard(stream)

    def enter(self, inside: contextlib.ExitStack, num_bytes: int) -> BytePermit:
        """Let in a request that has been read. Raises: Overloaded."""
        permit = inside.enter_context(self._admission.request())
        inside.enter_context(self._metrics.in_flight.track_inprogress())
        permit.hold(num_bytes)
        return permit

    def answer_at_once(self, route: str, received: Received, began: float, rpc_context: Any) -> list[Piece] | None:
        """The answer to a plain request that is known, computed here and now; None where it takes the longer way."""
        data, frame, recipe = received.data, received.frame, received.recipe
        if frame is None or recipe is None or self._lifecycle.state is not State.READY:
            return None
        plain = recipe.plain
        estimated_s = self._attend.may_run_plain_at_once(plain.form, is_alone=self._is_alone)
        if estimated_s is None:
            return None
        remaining_s = rpc_context.time_remaining()
        if remaining_s is not None and remaining_s <= 0:
            return None
        # What is computed before the next is read can share one place with it.
        is_long = plain.data_bytes > LANDING_BYTES
        buffer = self._buffers.lease(plain.data_bytes) if is_long else self._landing
        recipe.fill(buffer.view, memoryview(data), frame)
        parsed = time.monotonic()
        context = self._attend.run_plain_at_once(plain.form, *buffer.views(plain, 0), estimated_s)
        if is_long:
            self._buffers.give_back(buffer)
        if context is None:
            return None
        computed = time.monotonic()
        beginning = recipe.template.beginning(queue_s=0.0, compute_s=computed - parsed, id_text=frame.id_field)
        ended = time.monotonic()
        self._ok[route].inc()
        self._seconds[route].observe(ended - began)
        self.inference.statistics.succeeded(
            recipe.template.model_name,
            total_s=ended - began,
            queue_s=0.0,
            input_s=parsed - began,
            infer_s=computed - parsed,
            output_s=ended - computed,
        )
        self._metrics.plain_answered(
            read_s=0.0,
            parse_s=parsed - began,
            compute_s=computed - parsed,
            encode_s=ended - computed,
            received_bytes=len(data),
            sent_bytes=len(beginning) + len(recipe.data_head) + plain.context_bytes,
            path=plain.form.path,
            flops=plain.form.cost.flops,
        )
        return [beginning, recipe.data_head, memory_of(context)]

    async def answer(self, received: Received, exchange: Exchange, rpc_context: Any, permit: BytePermit) -> list[Piece]:
        """A ModelInferResponse to a request that has been let in. Raises: whatever a refusal says."""
        data, frame, recipe = received.data, received.frame, received.recipe
        exchange.received_bytes = len(data)
        asked = Asked(exchange.began, rpc_context.time_remaining(), is_loopback_peer(rpc_context.peer()), permit)
        if frame is not None and recipe is not None:
            answer = await self._infer_known(data, frame, recipe, asked, exchange)
            behind: list[Piece] = [*recipe.template.behind]
        else:
            answer, behind = await self._infer_any(data, frame, asked, exchange)
        exchange.stages |= {"queue": answer.answer.queue_s, "compute": answer.answer.compute_s}
        with exchange.stage("encode"):
            pieces = write_answer(
                model_name=answer.model.name, id=answer.id, parameters=answer.parameters, outputs=answer.outputs
            )
        pieces += behind
        size = sum(len(piece) for piece in pieces)
        if size > self.limits.max_answer_bytes:
            raise TooLarge(needed_bytes=size, allowed_bytes=self.limits.max_answer_bytes)
        permit.count(size)
        exchange.sent_bytes, exchange.status = size, 200
        self.inference.answered(
            answer, began=exchange.began, input_s=exchange.stages["parse"], output_s=exchange.stages["encode"]
        )
        return pieces

    async def _infer_known(
        self, data: bytes, frame: Frame, recipe: ProtoRecipe, asked: Asked, exchange: Exchange
    ) -> InferenceAnswer:
        plain = recipe.plain
        model = self.inference.models.get(recipe.template.model_name)
        with self._buffer(plain.data_bytes, asked.permit) as buffer:
            with exchange.stage("parse"):
                recipe.fill(buffer.view, memoryview(data), frame)
                prepared = plain.prepared(buffer.views(plain, 0))
            with self._counted(model, asked):
                return await self.inference.infer_plain(
                    prepared,
                    model,
                    id=id_of(data, frame) or None,
                    ignored=recipe.template.ignored,
                    began=asked.began,
                    remaining_s=asked.remaining_s,
                    held=buffer,
                    is_alone=self._is_alone,
                )

    async def _infer_any(
        self, data: bytes, frame: Frame | None, asked: Asked, exchange: Exchange
    ) -> tuple[InferenceAnswer, list[Piece]]:
        """An answer, and what is to stand behind it."""
        with contextlib.ExitStack() as stack:
            with exchange.stage("parse"):
                read = functools.partial(_read, data, frame)
                if len(data if frame is None else frame.head) > SHORT_BYTES:
                    message, request = await asyncio.get_running_loop().run_in_executor(None, read)
                else:
                    message, request = read()
                model = self.inference.models.get(message.model_name, message.model_version)
                sizes = _raw_sizes(request)
                buffer = None
                if sizes is not None:
                    buffer = stack.enter_context(self._buffer(sum(map(_aligned, sizes.values())), asked.permit))
                    _move(request, buffer)
            asks_final = asks_final_response(message)

            def more_bytes(checked: CheckedInference, prepared: Prepared) -> int:
                self._check_answer(checked, prepared)
                is_plain = all(output.place is None for output in checked.outputs)
                if frame is not None and sizes is not None and len(sizes) == len(request.inputs) and is_plain:
                    self.recipes.remember(frame, sizes, checked, prepared, asks_final=asks_final)
                return 0

            with self._counted(model, asked):
                answer = await self.inference.infer(
                    request,
                    model,
                    began=asked.began,
                    remaining_s=asked.remaining_s,
                    is_loopback=asked.is_loopback,
                    takes_reserved=True,
                    more_bytes=more_bytes,
                    held=(data, buffer),
                    is_alone=self._is_alone,
                )
        return answer, [FINAL_PIECE] if asks_final else []

    def _check_answer(self, checked: CheckedInference, prepared: Prepared) -> None:
        """Refuse before it is computed what could not be sent. Raises: TooLarge."""
        if any(output.place is not None for output in checked.outputs):
            # What lies in shared memory is not sent; what is sent besides is looked at once it is there.
            return
        id_bytes = 4 * len(checked.id or "")
        needed = prepared.cost.output_bytes + id_bytes + ANSWER_OVERHEAD_BYTES
        if needed > self.limits.max_answer_bytes:
            raise TooLarge(needed_bytes=needed, allowed_bytes=self.limits.max_answer_bytes)

    @contextlib.contextmanager
    def _buffer(self, num_bytes: int, permit: BytePermit) -> Iterator[ReceiveBuffer]:
        """Memory to compute from, counted for a request; used again once nobody can be reading it."""
        buffer = self._buffers.lease(num_bytes)
        is_free = False
        permit.count(buffer.size)
        try:
            yield buffer
            is_free = True
        except (AttentionError, ServiceError) as error:
            is_free = not isinstance(error, DeadlinePassed)
            raise
        finally:
            if is_free:
                self._buffers.give_back(buffer)
            else:
                # Given up while it was computed, say: the engine looks at its checkpoints only.
                self._buffers.lose()

    @contextlib.contextmanager
    def _counted(self, model: Model, asked: Asked) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.inference.failed(model, error, began=asked.began)
            raise

    # Around each call

    def exchange(self, rpc_context: Any) -> Exchange:
        sent = next((value for name, value in rpc_context.invocation_metadata() if name == "x-request-id"), "")
        return Exchange({b"x-request-id": sent.encode("ascii", "replace")})

    @contextlib.contextmanager
    def recorded(self, route: str, exchange: Exchange) -> Iterator[None]:
        """Count and log a call however it ends."""
        try:
            yield
        except asyncio.CancelledError:
            exchange.outcome = "disconnected"
            raise
        finally:
            record(self._metrics, "gRPC", route, exchange)

    def refusal(self, error: BaseException, exchange: Exchange) -> tuple[Failure, str]:
        """An error as its row of the table and as its text."""
        failure, text = error_text(error, exchange.request_id)
        exchange.outcome, exchange.status = failure.name, failure.inference
        reason = refusal_reason(error)
        if reason is not None:
            self._metrics.refused.labels(reason).inc()
        if failure is INTERNAL:
            log.error("unexpected", exc_info=error, extra={"fields": {"request_id": exchange.request_id}})
        return failure, text

    async def _refuse(self, error: BaseException, exchange: Exchange, rpc_context: Any) -> NoReturn:
        failure, text = self.refusal(error, exchange)
        await self.abort(failure, text, error, exchange, rpc_context)

    async def abort(
        self, failure: Failure, text: str, error: BaseException, exchange: Exchange, rpc_context: Any
    ) -> NoReturn:
        """End a call with a status."""
        trailing = [("x-request-id", exchange.request_id)]
        if isinstance(error, Overloaded | Unavailable | QueueTimeout) and error.retry_after_s is not None:
            trailing.append(("retry-after", str(error.retry_after_s)))
        await rpc_context.abort(_STATUS[failure.grpc], details_of(text), tuple(trailing))
        raise AssertionError("an aborted call goes on")

    async def _refuse_unread(self, error: Exception, route: str, _: Any, rpc_context: Any) -> None:
        exchange = self.exchange(rpc_context)
        with self.recorded(route, exchange):
            await self._refuse(error, exchange, rpc_context)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a request besides its message. ``remaining_s`` is what its caller still waits."""

    began: float
    remaining_s: float | None
    is_loopback: bool
    permit: BytePermit


def is_loopback_peer(peer: str) -> bool:
    """Whether a caller, as gRPC names it, is on this machine: ``ipv4:127.0.0.1:5``, ``ipv6:[::1]:5``, ``unix:``."""
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return True
    if kind not in ("ipv4", "ipv6"):
        return False
    host = unquote(rest).rpartition(":")[0].strip("[]")
    return is_loopback_address(host)


def details_of(text: str) -> str:
    """A text that is not too long once it is sent, where each byte that is not plain ASCII takes three."""
    left = MAX_DETAILS_BYTES
    for place, character in enumerate(text):
        is_plain = " " <= character <= "~" and character != "%"
        left -= 1 if is_plain else 3 * len(character.encode("utf-8", "replace"))
        if left < 0:
            return text[:place] + "..."
    return text


async def _messages(rpc_context: Any) -> AsyncIterator[bytes]:
    """What the caller of a stream sends."""
    while (data := await rpc_context.read()) is not grpc.aio.EOF:
        yield data


def _read(data: bytes, frame: Frame | None) -> tuple[pb.ModelInferRequest, InferenceRequest]:
    """Raises: Malformed."""
    message, raw = read_message(data, frame)
    return message, read_request(message, raw)


def _raw_sizes(request: InferenceRequest) -> dict[str, int] | None:
    """The bytes of each raw input, where all are as long as their shapes say; None where there is nothing to move."""
    sizes: dict[str, int] = {}
    for given in request.inputs:
        if not isinstance(given.content, bytes | memoryview):
            continue
        datatype = DATATYPES.get(given.datatype)
        if (
            datatype is None
            or len(given.shape) > MAX_RANK
            or len(given.content) != math.prod(given.shape) * datatype.itemsize
        ):
            return None
        sizes[given.name] = len(given.content)
    return sizes if any(sizes.values()) and not request.faults else None


def _move(request: InferenceRequest, buffer: ReceiveBuffer) -> None:
    """Raw inputs from where they lie in the message to where they are computed from."""
    begin = 0
    for given in request.inputs:
        if isinstance(given.content, bytes | memoryview):
            place = buffer.view[begin : begin + len(given.content)]
            place[:] = given.content
            given.content = place
            begin += _aligned(len(place))


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT_BYTES


def _models_stay(*_: Any) -> Message:
    raise ModelsStay


def _not_served(*_: Any) -> Message:
    raise NotServed("CUDA shared memory, trace and log settings are not served here")
