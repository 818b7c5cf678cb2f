"""Each way to call the service: every route of REST and every method of gRPC, by their own descriptions."""

from __future__ import annotations

import re
from typing import Any

import grpc
import httpx

from service.wire.open_inference_pb2 import DESCRIPTOR

INFERENCE = DESCRIPTOR.services_by_name["GRPCInferenceService"]
OPEN_METHODS = (
    "/grpc.health.v1.Health/Check",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
)
METHODS = [
    *(f"/{INFERENCE.full_name}/{method.name}" for method in INFERENCE.methods),
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/inference.GRPCInferenceService/NoSuchMethod",
    "/nobody.Knows/This",
]


def rest_calls(caller: httpx.Client, headers: dict[str, str]) -> list[tuple[str, str]]:
    """Each method and path that the service describes, others that it serves, and some that are not there."""
    paths: dict[str, dict[str, Any]] = caller.get("/openapi.json", headers=headers).json()["paths"]
    described = [(method.upper(), _filled(path)) for path, methods in paths.items() for method in methods]
    assert len(described) > 20
    page = caller.get("/docs", headers=headers).text
    files = [part.split('"')[0] for part in page.split('="/')[1:]]
    assert files
    files += re.findall(r'="(playground/[^"]+)"', caller.get("/playground").text)
    others = ["docs", "openapi.json", "metrics", "nowhere", "v2/nowhere", "", "v1/", "favicon.ico", *files]
    return [*described, *(("GET", f"/{path}") for path in others)]


def _filled(path: str) -> str:
    """A path with what may stand in its braces."""
    names = {"model": "sdpa", "version": "1"}
    return re.sub(r"\{(\w+)\}", lambda brace: names.get(brace[1], "name"), path)


def outcome(channel: grpc.Channel, method: str, metadata: dict[str, str]) -> grpc.StatusCode:
    """How a call with an empty message ends."""
    is_stream = method.endswith(("Info", "Watch", "StreamInfer"))
    if is_stream:
        call = channel.stream_stream(method)(iter([b""]), metadata=list(metadata.items()), timeout=20)
        try:
            for _ in call:
                break
            call.cancel()
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK
    try:
        channel.unary_unary(method)(b"", metadata=list(metadata.items()), timeout=20)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK
