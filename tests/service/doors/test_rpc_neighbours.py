"""Health and reflection beside the inference service."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from service.doors.rpc_neighbours import MAX_WATCHERS, SERVICES
from tests.support.in_process import GatedEngine, service_in_process
from tests.support.rpc import (
    SERVICE,
    WAIT_S,
    Caller,
    calls_by_rpc,
    refused,
)
from tests.support.rpc_service import (
    check_health,
    drain,
    reflect,
    running,
    watch,
)

Code = grpc.StatusCode


@pytest.mark.parametrize("name", ["", SERVICE])
def test_health_follows_the_service_for_everyone_who_watches(name: str) -> None:
    engine = GatedEngine()
    with (
        service_in_process(engine, start_engine=False, with_grpc=True) as service,
        calls_by_rpc(service.grpc_port) as caller,
    ):
        watching = [watch(caller, name) for _ in range(3)]
        statuses = [[next(call).status] for call in watching]
        assert health_pb2.HealthCheckResponse.FromString(check_health(caller, name).result()).status == 2
        # One that leaves is missed by nobody.
        watching.pop().cancel()
        statuses.pop()
        service.call(service.parts.lifecycle.mark_ready)
        for call, seen in zip(watching, statuses, strict=True):
            seen.append(next(call).status)
        assert health_pb2.HealthCheckResponse.FromString(check_health(caller, name).result()).status == 1
        assert drain(service, 1.0).result(WAIT_S) == 0
        for call, seen in zip(watching, statuses, strict=True):
            seen.append(next(call).status)
        assert statuses == [[2, 1, 2]] * 2


def test_the_health_of_strangers_is_not_known(caller: Caller) -> None:
    assert refused(check_health(caller, "other")).code() is Code.NOT_FOUND
    watching = watch(caller, "other")
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watching.cancel()


def test_health_needs_no_key(keyed: Caller) -> None:
    assert check_health(keyed, "").result() == b"\x08\x01"
    watching = watch(keyed, SERVICE)
    assert next(watching).status == 1
    watching.cancel()


def test_watchers_are_bounded() -> None:
    with running() as (_, caller):
        watching = [watch(caller, "") for _ in range(MAX_WATCHERS)]
        for call in watching:
            next(call)
        with pytest.raises(grpc.RpcError) as refusal:
            next(watch(caller, ""))
        assert refusal.value.code() is Code.UNAVAILABLE
        for call in watching:
            call.cancel()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_knows_every_service_and_its_messages(caller: Caller, version: str) -> None:
    questions = [reflection_pb2.ServerReflectionRequest(list_services="")]
    questions += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in SERVICES]
    listed, *files = list(reflect(caller, version, *questions))
    assert {service.name for service in listed.list_services_response.service} == set(SERVICES)
    for name, file in zip(SERVICES, files, strict=True):
        assert name.rpartition(".")[2].encode() in b"".join(file.file_descriptor_response.file_descriptor_proto)


def test_reflection_answers_nonsense_by_an_error(caller: Caller) -> None:
    (answer,) = reflect(caller, "v1", b"\xff")
    assert answer.error_response.error_code == Code.INVALID_ARGUMENT.value[0]
