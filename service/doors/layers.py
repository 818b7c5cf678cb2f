"""The REST door of layers that are kept by a name: uploaded, shown, forgotten, and computed with.

A layer is looked up once, at the head of a request: one that is replaced or deleted later lives on for that request.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qsl

import orjson
from fastapi import APIRouter, Request, Response

from attn_core.errors import Fault, InvalidProblem
from attn_core.problem import LayerParameters
from service.admission import Admission, BytePermit
from service.deadline import Deadline
from service.doors import openapi_layers as document
from service.doors.answers import gzipped, is_worth_gzip
from service.doors.body import (
    accepts_gzip,
    answer_form,
    joined_headers,
    negotiate,
    parameter_faults,
    read_body,
    safetensors_data_at,
)
from service.doors.serving import LONG_TEXT_BYTES, Pieces, Serving, exchange_of
from service.layer_store import LayerStore, name_faults, parameters_bytes
from service.wire import json_arrays, json_format, safetensors_format
from service.wire.arrays import Buffer
from service.wire.requests import LAYER_PARAMETERS, NAMED_LAYER, NAMED_LAYER_GRADIENTS, NamedCall, ReadLimits
from service.wire.text import short

_ANSWERS = (json_format.MEDIA_TYPE,)
"""What is said about layers is said in JSON alone: there is no tensor in it."""
_NO_PARAMETER = "no parameter in the URL"
_REPLACES = {"true": True, "false": False}


class Compute(Protocol):
    """The way of a request that computes, as POST /v1/layer goes it, with the layer that is kept."""

    def __call__(
        self, call: NamedCall, request: Request, *, stored: LayerParameters | None = None
    ) -> Awaitable[Response]: ...


class LayersDoor:
    def __init__(
        self,
        store: LayerStore,
        serving: Serving,
        *,
        compute: Compute,
        admission: Admission,
        read: ReadLimits,
        max_body_bytes: int,
        max_json_bytes: int,
        default_timeout_s: float,
    ) -> None:
        self._store = store
        self._serving = serving
        self._compute = compute
        self._admission = admission
        self._read_limits = read
        self._max_bytes = {
            json_format.MEDIA_TYPE: min(max_json_bytes, max_body_bytes),
            safetensors_format.MEDIA_TYPE: max_body_bytes,
        }
        self._default_timeout_s = default_timeout_s

    def router(self) -> APIRouter:
        router = APIRouter()
        layer = "/v1/layers/{name}"
        endpoints: Sequence[tuple[str, str, Callable[[Request], Awaitable[Response]], dict[str, Any]]] = (
            ("GET", "/v1/layers", self._list, document.LIST),
            ("GET", layer, self._get, document.GET),
            ("PUT", layer, self._put, document.PUT),
            ("DELETE", layer, self._delete, document.DELETE),
            ("POST", f"{layer}/forward", functools.partial(self._run, NAMED_LAYER), document.FORWARD),
            ("POST", f"{layer}/gradients", functools.partial(self._run, NAMED_LAYER_GRADIENTS), document.GRADIENTS),
        )
        for method, path, serve, described in endpoints:
            router.add_api_route(path, self._serving.endpoint(serve), methods=[method], **described)
        return router

    async def _list(self, request: Request) -> Response:
        self._check_parameters(request)
        return await self._said(request, {"layers": [layer.as_dict() for layer in self._store.all()]})

    async def _get(self, request: Request) -> Response:
        self._check_parameters(request)
        return await self._said(request, self._store.get(request.path_params["name"]).as_dict())

    async def _put(self, request: Request) -> Response:
        name, exchange, headers = request.path_params["name"], exchange_of(request), _headers_of(request)
        deadline = self._deadline(request)
        with self._serving.inside() as (permit, _):
            forms = negotiate(headers, answers=_ANSWERS)
            is_safetensors = forms.request_form == safetensors_format.MEDIA_TYPE
            with exchange.stage("read"):
                body = await read_body(
                    request.receive,
                    headers,
                    exchange=exchange,
                    permit=permit,
                    deadline=deadline,
                    max_bytes=self._max_bytes[forms.request_form],
                    coding="gzip" if forms.body_is_gzipped else None,
                    data_at=safetensors_data_at if is_safetensors else None,
                )
            with exchange.stage("parse"):
                may_replace, faults = read_replace(request.scope["query_string"])
                faults = [*name_faults(name), *faults]
                decode = self._decode_safetensors if is_safetensors else self._decode_json
                parameters = await decode(body, faults, permit, deadline)
            self._admission.check_memory(parameters_bytes(parameters))
            keeping = asyncio.ensure_future(self._store.put(name, parameters, may_replace=may_replace))
            kept = await deadline.wait_for(keeping)
            return await self._said(request, kept.layer.as_dict(), status=201 if kept.is_new else 200)

    async def _decode_safetensors(
        self, body: Buffer, also: Sequence[Fault], permit: BytePermit, deadline: Deadline
    ) -> LayerParameters:
        decode = functools.partial(safetensors_format.decode_parameters, body, self._read_limits, also=also)
        if len(body) < LONG_TEXT_BYTES:
            return decode()
        # Every number is looked at.
        return await self._serving.off_loop(decode, deadline)

    async def _decode_json(
        self, body: Buffer, also: Sequence[Fault], permit: BytePermit, deadline: Deadline
    ) -> LayerParameters:
        read = functools.partial(json_arrays.read, names=LAYER_PARAMETERS.names, limits=self._read_limits.tensors)
        build = functools.partial(json_format.build_parameters, also=also)
        return await self._serving.read_text(body, read, build, permit, deadline)

    async def _delete(self, request: Request) -> Response:
        self._check_parameters(request)
        with self._serving.inside():
            forgetting = asyncio.ensure_future(self._store.delete(request.path_params["name"]))
            await self._deadline(request).wait_for(forgetting)
        return Response(status_code=204)

    async def _run(self, call: NamedCall, request: Request) -> Response:
        layer = self._store.get(request.path_params["name"])
        return await self._compute(call, request, stored=layer.parameters)

    def _check_parameters(self, request: Request) -> None:
        """Raises: InvalidProblem where there is one in the URL."""
        faults = parameter_faults(request.scope["query_string"], expected=_NO_PARAMETER)
        if faults:
            raise InvalidProblem(faults)

    def _deadline(self, request: Request) -> Deadline:
        return Deadline(exchange_of(request).began + self._default_timeout_s)

    async def _said(self, request: Request, members: Mapping[str, Any], *, status: int = 200) -> Response:
        """An answer without tensors. Raises: NotAcceptable, DeadlinePassed."""
        headers = _headers_of(request)
        media_type = answer_form(headers.get("accept"), json_format.MEDIA_TYPE, _ANSWERS)
        pieces: Pieces = [orjson.dumps(members)]
        more_headers = {"vary": "Accept, Accept-Encoding"}
        if accepts_gzip(headers.get("accept-encoding", "")) and is_worth_gzip(pieces):
            pieces = await self._serving.squeeze(pieces, gzipped, self._deadline(request))
            more_headers["content-encoding"] = "gzip"
        return Response(b"".join(pieces), status_code=status, headers=more_headers, media_type=media_type)


def read_replace(query_string: bytes) -> tuple[bool, list[Fault]]:
    """Whether a layer may be replaced, and a fault for whatever else the URL says."""
    faults = parameter_faults(query_string, known=("replace",), expected=f"{_NO_PARAMETER} but replace")
    pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    texts = [text for name, text in pairs if name == "replace"]
    if len(texts) > 1:
        faults.append(Fault("?replace", "true or false, once", f"{len(texts)} of them"))
    elif texts and texts[0] not in _REPLACES:
        faults.append(Fault("?replace", "true or false", short(texts[0])))
    return _REPLACES.get(texts[0], False) if texts else False, faults


def _headers_of(request: Request) -> dict[str, str]:
    return joined_headers(request.scope["headers"])
