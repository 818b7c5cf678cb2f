"""A service with a port for gRPC in this process, and calls to what stands beside inference on it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from attn_core import Engine
from tests.support.in_process import InProcess, service_in_process
from tests.support.rpc import (
    WAIT_S,
    Caller,
    calls_by_rpc,
    operands,
    request_of,
)

LARGE = request_of(operands(1, 4, 256, 64))
"""Too long for the event loop to compute it."""
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 65536), ("grpc.http2.bdp_probe", 0))


@contextmanager
def running(engine: Engine | None = None, **settings: Any) -> Iterator[tuple[InProcess, Caller]]:
    """A ready service and a connection to it."""
    engine = engine or Engine(device="cpu", max_threads=1)
    with (
        service_in_process(engine, with_grpc=True, **settings) as service,
        calls_by_rpc(service.grpc_port) as caller,
    ):
        until(lambda: service.parts.lifecycle.is_ready)
        yield service, caller


def until(holds: Callable[[], object]) -> None:
    """Go on once it holds; the test's own limit ends what never does."""
    turn = threading.Event()
    while not holds():
        turn.wait(0.001)


def is_empty(service: InProcess) -> bool:
    """Whether nothing is counted as inside."""

    def look() -> bool:
        parts = service.parts
        parts.admission.check_integrity()
        return not (parts.admission.requests_inside or parts.lifecycle.inside or parts.rpc.num_calls)

    return bool(service.call(look))


def figure(service: InProcess, series: str) -> float:
    for line in service.call(service.parts.metrics.text).decode().splitlines():
        if line.startswith(series + " "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def drain(service: InProcess, timeout_s: float) -> Any:
    """Begin to drain; gives what tells how many were given up."""
    pool = ThreadPoolExecutor(1)
    lifecycle = service.parts.lifecycle
    future = pool.submit(service.run, lambda: lifecycle.drain(notice_s=0.0, timeout_s=timeout_s))
    pool.shutdown(wait=False)
    until(lambda: not lifecycle.is_ready)
    return future


def check_health(caller: Caller, service: str) -> Any:
    return caller.start(
        "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest(service=service).SerializeToString()
    )


def watch(caller: Caller, service: str) -> Any:
    method = caller.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return method(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)


def reflect(caller: Caller, version: str, *questions: reflection_pb2.ServerReflectionRequest, ends: bool = True) -> Any:
    method = caller.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=lambda sent: sent if isinstance(sent, bytes) else sent.SerializeToString(),
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for question in questions:
        waiting.put(question)
    if ends:
        waiting.put(None)
    return method(iter(waiting.get, None), timeout=WAIT_S)
