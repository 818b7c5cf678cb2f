"""What stands beside the inference service on its port: grpc.health.v1, and reflection in both of its versions.

The stock health servicer is not used: with several watchers of one name, the first that leaves makes it forget the
others. Reflection is the stock one, over a pool in which our messages are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as stock

from service.errors import NotFound, Overloaded, Unavailable
from service.lifecycle import Lifecycle
from service.wire.open_inference_pb2 import DESCRIPTOR

INFERENCE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"
REFLECTION_ALPHA, REFLECTION = "grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection"
SERVICES = (INFERENCE, HEALTH, REFLECTION_ALPHA, REFLECTION)
MAX_WATCHERS = 128
"""Watchers need no key, and each takes one of the places for calls."""
_Response = health_pb2.HealthCheckResponse


class Health:
    """Follows the lifecycle. Used from the event loop; to be made in it."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._changes: set[asyncio.Event] = set()
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        lifecycle.watch(self._tell)

    def check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Raises: NotFound for a service that is not followed."""
        if request.service not in ("", INFERENCE):
            raise NotFound(f"the health of {request.service[:200]!r} is not known")
        return self._status_of(request.service)

    async def watch(self, request: health_pb2.HealthCheckRequest) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now, and each time that it has become another. Raises: Overloaded; Unavailable at the end."""
        if len(self._changes) >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} callers watch the health already", reason="requests")
        changed = asyncio.Event()
        self._changes.add(changed)
        latest = None
        try:
            while not self._is_over:
                status = self._status_of(request.service)
                if status != latest:
                    latest = status
                    yield status
                await changed.wait()
                changed.clear()
            raise Unavailable("the server stops")
        finally:
            self._changes.discard(changed)

    def end(self) -> None:
        """Nobody is to watch any more."""
        self._is_over = True
        self._wake()

    def _status_of(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in ("", INFERENCE):
            return _Response(status=_Response.SERVICE_UNKNOWN)
        return _Response(status=_Response.SERVING if self._lifecycle.is_ready else _Response.NOT_SERVING)

    def _tell(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for changed in self._changes:
            changed.set()


class Reflection:
    """Answers both versions: their messages are equal but for the name of their package."""

    def __init__(self) -> None:
        self._servicer = stock.ReflectionServicer(SERVICES, pool=DESCRIPTOR.pool)

    async def answers(self, questions: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """An answer to each question, in their order."""
        read = (_read_question(question) async for question in questions)
        async for answer in self._servicer.ServerReflectionInfo(read, None):
            yield answer.SerializeToString()


def _read_question(data: bytes) -> Any:
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(data)
    except DecodeError:
        # Asks nothing, and is answered that this is no valid question.
        return reflection_pb2.ServerReflectionRequest()


def _fill_pool() -> None:
    """Health and reflection beside our own messages, so that a caller is told of all of them."""
    for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        described = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(described)
        DESCRIPTOR.pool.Add(described)
    described.name = "grpc/reflection/v1/reflection.proto"
    described.package = "grpc.reflection.v1"
    described.ClearField("options")
    for message in described.message_type:
        for field in message.field:
            if field.HasField("type_name"):
                field.type_name = _in_v1(field.type_name)
    for method in described.service[0].method:
        method.input_type, method.output_type = _in_v1(method.input_type), _in_v1(method.output_type)
    DESCRIPTOR.pool.Add(described)


def _in_v1(type_name: str) -> str:
    return type_name.replace(".grpc.reflection.v1alpha.", ".grpc.reflection.v1.")


_fill_pool()
