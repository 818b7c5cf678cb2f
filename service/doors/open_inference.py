"""The REST door of the Open Inference Protocol, /v2: what the service says of itself, and inference.

Content types and parameters in the URL say nothing here, as the protocol has it: bodies are read as JSON, with tensors
in binary behind it where a header says how long the JSON is.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from attn_core.errors import Fault, InvalidProblem
from attn_core.prepared import Prepared
from service.admission import Admission, BytePermit
from service.deadline import Deadline
from service.doors import openapi_inference as document
from service.doors.answers import deflated, gzipped, is_worth_gzip
from service.doors.body import inference_coding, joined_headers, only_coding, read_body
from service.doors.exchange import PEER_EXTENSION
from service.doors.inference import Inference, InferenceAnswer
from service.doors.peer import is_loopback_address
from service.doors.serving import Pieces, PiecesResponse, Serving, exchange_of, refusal
from service.errors import BodyTooLarge, ModelsStay, NotServed, Unavailable
from service.wire import inference_text, open_inference_json
from service.wire.arrays import Buffer
from service.wire.inference import CheckedInference, InferenceRequest
from service.wire.inference_models import Model
from service.wire.plain_recipes import MAX_HEADER_BYTES, PlainRecipes, split_id
from service.wire.text import short

MEDIA_TYPE = open_inference_json.JSON
MAX_SMALL_BYTES = 64 * 1024
"""The longest body that holds no tensors."""
_EVERY_METHOD = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
_SQUEEZERS: Mapping[str, Callable[[Pieces], bytes]] = {"gzip": gzipped, "deflate": deflated}


class InferenceDoor:
    def __init__(
        self,
        inference: Inference,
        serving: Serving,
        *,
        admission: Admission,
        max_body_bytes: int,
        max_json_bytes: int,
        default_timeout_s: float,
        recipes: PlainRecipes,
    ) -> None:
        self._recipes = recipes
        self._inference = inference
        self._serving = serving
        self._admission = admission
        self._max_body_bytes = max_body_bytes
        self._max_json_bytes = min(max_json_bytes, max_body_bytes)
        self._default_timeout_s = default_timeout_s

    def router(self) -> APIRouter:
        """Every path; those with a version are not in the document, since they say the same."""
        router = APIRouter()

        def add(method: str, path: str, endpoint: Callable[[Request], Awaitable[Response]], **described: Any) -> None:
            documented = document.route(path, **described) if described else {}
            router.add_api_route(path, endpoint, methods=[method], include_in_schema=bool(described), **documented)

        for version in ("", "/versions/{version}"):
            is_described = not version
            model = f"/v2/models/{{model}}{version}"
            described: dict[str, Any] = document.INFER if is_described else {}
            add("POST", f"{model}/infer", self._serving.endpoint(self._infer), **described)
        # Before the models: none is called stats.
        add("GET", "/v2/models/stats", self._says(self._all_statistics), **document.ALL_STATISTICS)
        for version in ("", "/versions/{version}"):
            model = f"/v2/models/{{model}}{version}"
            for method, path, answer, about in (
                ("GET", model, self._metadata, document.MODEL),
                ("GET", f"{model}/ready", self._model_is_ready, document.MODEL_READY),
                ("HEAD", f"{model}/ready", self._model_is_ready, {}),
                ("GET", f"{model}/config", self._configuration, document.CONFIGURATION),
                ("GET", f"{model}/stats", self._statistics, document.STATISTICS),
            ):
                add(method, path, self._says(answer), **({} if version else about))
        add("GET", "/v2", self._says(self._server), **document.SERVER)
        add("GET", "/v2/models", self._says(self._names), **document.NAMES)
        for path, answer, about in (
            ("/v2/health/live", self._is_live, document.LIVE),
            ("/v2/health/ready", self._is_ready, document.READY),
        ):
            add("GET", path, self._says(answer), **about)
            add("HEAD", path, self._says(answer))
        add("POST", "/v2/repository/index", self._serving.endpoint(self._index), **document.INDEX)
        add("POST", "/v2/repository/{repository}/index", self._serving.endpoint(self._index))
        for repository in ("", "/{repository}"):
            for change in ("load", "unload"):
                about = {} if repository else document.LOAD
                add("POST", f"/v2/repository{repository}/models/{{model}}/{change}", self._says(self._change), **about)
        memory = "/v2/systemsharedmemory"
        for region in ("", "/region/{region}"):
            add("GET", f"{memory}{region}/status", self._says(self._regions), **document.REGIONS)
            add("POST", f"{memory}{region}/unregister", self._says(self._unregister), **document.UNREGISTER)
        register = self._serving.endpoint(self._register)
        add("POST", f"{memory}/region/{{region}}/register", register, **document.REGISTER)
        for path in (
            "/v2/cudasharedmemory/status",
            "/v2/cudasharedmemory/unregister",
            "/v2/cudasharedmemory/region/{region}/status",
            "/v2/cudasharedmemory/region/{region}/register",
            "/v2/cudasharedmemory/region/{region}/unregister",
            "/v2/trace/setting",
            "/v2/models/{model}/trace/setting",
            "/v2/logging",
        ):
            router.add_api_route(
                path, self._says(self._not_served), methods=list(_EVERY_METHOD), include_in_schema=False
            )
        return router

    def _says(self, answer: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        """What needs no body and no waiting; None is an empty answer."""

        async def endpoint(request: Request) -> Response:
            try:
                return _json(answer(request))
            except Exception as error:
                return refusal(request, error)

        return endpoint

    # What the service says of itself

    def _server(self, request: Request) -> dict[str, Any]:
        return self._inference.server_metadata()

    def _names(self, request: Request) -> dict[str, Any]:
        return {"models": self._inference.models.names()}

    def _is_live(self, request: Request) -> dict[str, Any]:
        return {"live": True}

    def _is_ready(self, request: Request) -> dict[str, Any]:
        self._check_ready()
        return {"ready": True}

    def _model_is_ready(self, request: Request) -> dict[str, Any]:
        model = self._model(request)
        self._check_ready()
        return {"name": model.name, "ready": True}

    def _check_ready(self) -> None:
        lifecycle = self._inference.lifecycle
        if not lifecycle.is_ready:
            raise Unavailable(f"not ready: {lifecycle.state.value}")

    def _metadata(self, request: Request) -> dict[str, Any]:
        return self._model(request).metadata()

    def _configuration(self, request: Request) -> dict[str, Any]:
        return self._model(request).configuration()

    def _statistics(self, request: Request) -> dict[str, Any]:
        return self._inference.model_statistics(self._model(request).name)

    def _all_statistics(self, request: Request) -> dict[str, Any]:
        return self._inference.model_statistics()

    def _model(self, request: Request) -> Model:
        """The model that the path names. Raises: NotFound."""
        named = request.path_params
        return self._inference.models.get(named["model"], named.get("version", ""))

    # The repository

    async def _index(self, request: Request) -> Response:
        members = await self._read_small(request)
        ready_only = members.get("ready")
        if ready_only is not None and not isinstance(ready_only, bool):
            raise InvalidProblem([Fault("ready", "true or false", short(ready_only))])
        return _json(self._inference.index(ready_only=ready_only is True))

    def _change(self, request: Request) -> None:
        raise ModelsStay

    # Shared memory

    def _regions(self, request: Request) -> list[dict[str, Any]]:
        self._inference.check_shared_memory(is_loopback=_is_loopback(request))
        return self._inference.shared_memory.status(request.path_params.get("region", ""))

    async def _register(self, request: Request) -> Response:
        self._inference.check_shared_memory(is_loopback=_is_loopback(request))
        members = await self._read_small(request)
        key, size, offset = members.get("key"), members.get("byte_size"), members.get("offset")
        offset = 0 if offset is None else offset
        faults = [] if isinstance(key, str) else [Fault("key", "the name of a shared memory object", short(key))]
        for name, value in (("byte_size", size), ("offset", offset)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                faults.append(Fault(name, "a whole number of bytes, 0 or more", short(value)))
        if faults:
            raise InvalidProblem(faults)
        assert isinstance(key, str) and isinstance(size, int)
        self._inference.shared_memory.register(request.path_params["region"], key, offset, size)
        return _json(None)

    def _unregister(self, request: Request) -> None:
        self._inference.check_shared_memory(is_loopback=_is_loopback(request))
        self._inference.shared_memory.unregister(request.path_params.get("region", ""))

    def _not_served(self, request: Request) -> None:
        raise NotServed(f"{request.scope['path']}: this extension is not served, and GET /v2 does not announce it")

    async def _read_small(self, request: Request) -> dict[str, Any]:
        """The members of a body without tensors. Raises: as ``read_body``, InvalidProblem."""
        headers, exchange = joined_headers(request.scope["headers"]), exchange_of(request)
        with self._admission.request() as permit:
            body = await read_body(
                request.receive,
                headers,
                exchange=exchange,
                permit=permit,
                deadline=Deadline(exchange.began + self._default_timeout_s),
                max_bytes=min(MAX_SMALL_BYTES, self._max_json_bytes),
                coding=inference_coding(headers.get("content-encoding", "")),
            )
            return open_inference_json.read_small(body)

    # Inference

    async def _infer(self, request: Request) -> Response:
        model, exchange = self._model(request), exchange_of(request)
        try:
            return await self._serve(request, model)
        except Exception as error:
            self._inference.failed(model, error, began=exchange.began)
            raise

    async def _serve(self, request: Request, model: Model) -> Response:
        inference, exchange = self._inference, exchange_of(request)
        headers = joined_headers(request.scope["headers"])
        deadline = Deadline(exchange.began + self._default_timeout_s)
        with self._serving.inside() as (permit, inside):
            json_bytes = open_inference_json.json_length(headers.get(open_inference_json.LENGTH_HEADER))
            if json_bytes is not None and json_bytes > self._max_json_bytes:
                raise BodyTooLarge(received=f"{json_bytes} bytes of JSON", allowed_bytes=self._max_json_bytes)
            with exchange.stage("read"):
                body = await read_body(
                    request.receive,
                    headers,
                    exchange=exchange,
                    permit=permit,
                    deadline=deadline,
                    max_bytes=self._max_json_bytes if json_bytes is None else self._max_body_bytes,
                    coding=inference_coding(headers.get("content-encoding", "")),
                    data_at=None if json_bytes is None else lambda begun: json_bytes,
                )
            with exchange.stage("parse"):
                asked = await self._decode(body, json_bytes, permit, deadline)

            def more_bytes(checked: CheckedInference, prepared: Prepared) -> int:
                self._remember(request, body, json_bytes, asked, checked, prepared)
                return _text_bytes(checked, prepared)

            answer = await inference.infer(
                asked,
                model,
                began=exchange.began,
                is_loopback=_is_loopback(request),
                more_bytes=more_bytes,
                held=body,
            )
            exchange.stages |= {"queue": answer.answer.queue_s, "compute": answer.answer.compute_s}
            timeout_ms = asked.parameters.get("timeout_ms")
            if isinstance(timeout_ms, int | float):
                deadline = Deadline(exchange.began + timeout_ms / 1e3)
            with exchange.stage("encode"):
                response_of = await self._encode(answer, headers, deadline)
            response = response_of(held=inside.pop_all())
            permit.count(response.size)
            stages = exchange.stages
            inference.answered(
                answer,
                # From when the request was there: what its client took to send it is no work of a model.
                began=exchange.began + stages["read"],
                input_s=stages["parse"],
                output_s=stages["encode"],
            )
            return response

    def _remember(
        self,
        request: Request,
        body: Buffer,
        json_bytes: int | None,
        asked: InferenceRequest,
        checked: CheckedInference,
        prepared: Prepared,
    ) -> None:
        """Keep what was found out about a plain binary request, for the road without ASGI."""
        if json_bytes is None or json_bytes > MAX_HEADER_BYTES or prepared.plain is None:
            return
        (output,) = checked.outputs
        sizes = {
            given.name: len(given.content)
            for given in asked.inputs
            if isinstance(given.content, memoryview) and not given.is_shared
        }
        id_text, rest = split_id(bytes(body[:json_bytes]))
        # An id that stands elsewhere belongs to this request, and would be answered to every other.
        is_id_apart = bool(id_text) == (checked.id is not None)
        if output.is_binary and output.place is None and len(sizes) == len(asked.inputs) and is_id_apart:
            self._recipes.remember_inference(request.scope["raw_path"] + rest, sizes, checked, prepared)

    async def _decode(
        self, body: Buffer, json_bytes: int | None, permit: BytePermit, deadline: Deadline
    ) -> InferenceRequest:
        text, tail = open_inference_json.split(body, json_bytes)
        read = functools.partial(inference_text.read, limits=self._inference.read_limits.tensors)
        attach = functools.partial(open_inference_json.attach, tail=tail)
        return await self._serving.read_text(text, read, attach, permit, deadline)

    async def _encode(
        self, answer: InferenceAnswer, headers: Mapping[str, str], deadline: Deadline
    ) -> functools.partial[PiecesResponse]:
        """The answer as it will be sent, but for what is held until then."""
        parts = open_inference_json.answer_parts(answer.model, answer.id, answer.parameters, answer.outputs)
        tensor_bytes = sum(tensor.nbytes for tensor in parts.tensors.values())
        pieces = await self._serving.write_text(tensor_bytes, parts.flat, parts.writer, parts.measure, deadline)
        more_headers = {"vary": "Accept-Encoding"}
        if parts.is_binary:
            more_headers[open_inference_json.LENGTH_HEADER] = str(sum(len(piece) for piece in pieces))
            pieces = pieces + parts.data
        coding = only_coding(headers.get("accept-encoding", ""))
        if coding is not None and is_worth_gzip(pieces):
            pieces = await self._serving.squeeze(pieces, _SQUEEZERS[coding], deadline)
            more_headers["content-encoding"] = coding
        media_type = open_inference_json.BINARY if parts.is_binary else open_inference_json.JSON
        return functools.partial(PiecesResponse, pieces, media_type, more_headers)


def _json(content: Any) -> Response:
    return Response(b"" if content is None else orjson.dumps(content), media_type=MEDIA_TYPE)


def _text_bytes(checked: CheckedInference, prepared: Prepared) -> int:
    return open_inference_json.answer_text_bytes(checked.outputs, checked.model, prepared.cost.output_bytes)


def _is_loopback(request: Request) -> bool:
    """Whether the caller is on this machine: by its connection, and by what a proxy says of whom it speaks for."""
    client = request.scope.get("client")
    peer = request.scope.get("extensions", {}).get(PEER_EXTENSION, client)
    return all(is_loopback_address(None if address is None else address[0]) for address in (client, peer))
