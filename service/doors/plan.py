"""What a problem would take, told from shapes alone, before anybody sends numbers."""

from __future__ import annotations

import functools
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, create_model

from attn_core.cost import Cost
from attn_core.errors import Fault, TooLarge, names_text
from attn_core.outlook import Outlook, PlannedProblem, max_seq_len, outlook
from attn_core.problem import AttentionProblem, GradientsProblem
from attn_core.support import PATHS
from service.admission import Admission
from service.attend import Attend
from service.deadline import Deadline
from service.doors import problem_details
from service.doors.answers import gzipped, is_worth_gzip
from service.doors.body import joined_headers, negotiate, parameter_faults, read_body
from service.doors.serving import Pieces, Serving, exchange_of
from service.errors import DeadlinePassed, MediaTypeNotServed
from service.failures import FAILURES
from service.wire import json_format, plan_format, plan_text, safetensors_format
from service.wire.arrays import STORAGE
from service.wire.options import GradientName, OutputName
from service.wire.requests import ATTENTION, GRADIENTS, DecodedRequest, ReadLimits

_FORMS = (json_format.MEDIA_TYPE,)
MAX_PLAN_BYTES = 16 * 2**20
"""Nobody needs more to say shapes and options; a list of a million rows has half of it."""
MANY_SELECTED = 2**17
"""From so many on it is looked how long their list is: a file's header has an end."""


class PlanDoor:
    def __init__(
        self,
        serving: Serving,
        *,
        attend: Attend,
        admission: Admission,
        read: ReadLimits,
        device: str,
        max_body_bytes: int,
        max_json_bytes: int,
        default_timeout_s: float,
    ) -> None:
        self._serving = serving
        self._attend = attend
        self._admission = admission
        self._read_limits = read
        self._device_type = device.partition(":")[0]
        self._max_body_bytes = max_body_bytes
        self._max_json_bytes = min(max_json_bytes, max_body_bytes)
        self._default_timeout_s = default_timeout_s

    def router(self) -> APIRouter:
        router = APIRouter()
        endpoint = self._serving.endpoint(self._plan)
        router.add_api_route("/v1/attention/plan", endpoint, methods=["POST"], **PLAN_ROUTE)
        return router

    async def _plan(self, request: Request) -> Response:
        exchange, headers = exchange_of(request), joined_headers(request.scope["headers"])
        deadline = Deadline(exchange.began + self._default_timeout_s)
        with self._serving.inside() as (permit, _):
            forms = negotiate(headers, answers=_FORMS)
            if forms.request_form not in _FORMS:
                fault = Fault("Content-Type", f"{_FORMS[0]}: a plan is made without data", forms.request_form)
                raise MediaTypeNotServed(f"the content type must be {_FORMS[0]}", faults=[fault])
            with exchange.stage("read"):
                body = await read_body(
                    request.receive,
                    headers,
                    exchange=exchange,
                    permit=permit,
                    deadline=deadline,
                    max_bytes=min(MAX_PLAN_BYTES, self._max_json_bytes),
                    coding="gzip" if forms.body_is_gzipped else None,
                )
            with exchange.stage("parse"):
                also = parameter_faults(request.scope["query_string"])
                limits = self._read_limits
                read = functools.partial(plan_text.read, calls=plan_format.CALLS, limits=limits.tensors)
                build = functools.partial(plan_format.build, limits=limits, also=also)
                decoded = await self._serving.read_text(body, read, build, permit, deadline)
            allowed_bytes = self._admission.allowed_bytes()
            with exchange.stage("compute"):
                answer = await self._serving.off_loop(lambda: self._answer(decoded, allowed_bytes), deadline)
            pieces: Pieces = [orjson.dumps(answer)]
            more_headers = {"vary": "Accept, Accept-Encoding"}
            if forms.accepts_gzip and is_worth_gzip(pieces):
                pieces = await self._serving.squeeze(pieces, gzipped, deadline)
                more_headers["content-encoding"] = "gzip"
            return Response(b"".join(pieces), headers=more_headers, media_type=forms.answer_form)

    def _answer(self, decoded: DecodedRequest, allowed_bytes: int) -> dict[str, Any]:
        """The plan of a request in safetensors, answered in safetensors: text takes more besides."""
        problem = decoded.problem
        assert isinstance(problem, AttentionProblem | GradientsProblem)
        found = outlook(problem, device_type=self._device_type)
        refused = self._why_refused(problem, found, decoded.timeout_s)
        limits = self._read_limits.tensors
        return {
            "admitted": refused is None,
            "why": found.chosen.why if refused is None else refused,
            "path": found.chosen.path,
            "answer_bytes": found.chosen.cost.output_bytes,
            "needed_bytes": found.chosen.cost.peak_bytes,
            "allowed_bytes": allowed_bytes,
            "max_seq_len": max_seq_len(
                problem,
                device_type=self._device_type,
                allowed_bytes=allowed_bytes,
                longest=limits.max_axis,
                max_elements=limits.max_tensor_elements,
                max_input_bytes=self._max_body_bytes,
            ),
            "paths": {
                path: {"supported": one.cost is not None, "why": one.why} | self._figures(one.cost, path)
                for path, one in found.paths.items()
            },
        }

    def _figures(self, cost: Cost | None, path: str) -> dict[str, Any]:
        if cost is None:
            return dict.fromkeys(("flops", "bytes_moved", "peak_bytes", "estimated_ms"))
        return {
            "flops": cost.flops,
            "bytes_moved": cost.bytes_moved,
            "peak_bytes": cost.peak_bytes,
            "estimated_ms": round(self._attend.estimate_s(cost, path) * 1e3, 3),
        }

    def _why_refused(self, problem: PlannedProblem, found: Outlook, timeout_s: float | None) -> str | None:
        """What a request would be refused for however empty the service is; None where it would be let in."""
        sent = sum(tensor.nbytes for tensor in problem.tensors().values())
        if sent > self._max_body_bytes:
            return f"its tensors have {sent} bytes, a body may have {self._max_body_bytes}"
        selected = [problem.options.select_heads or (), problem.options.select_rows or ()]
        if sum(map(len, selected)) >= MANY_SELECTED:
            listed = len(orjson.dumps(selected))
            if listed > safetensors_format.MAX_HEADER_BYTES:
                most = safetensors_format.MAX_HEADER_BYTES
                return f"its select has {listed} bytes, a header of safetensors may have {most}"
        cost, path = found.chosen.cost, found.chosen.path
        deadline = Deadline.after(self._default_timeout_s if timeout_s is None else timeout_s)
        try:
            self._admission.check_memory(cost.peak_bytes)
            self._admission.check_deadline(0.0, self._attend.least_s(cost, path), deadline)
        except (TooLarge, DeadlinePassed) as refusal:
            return str(refusal)
        return None


class TensorSpecObject(BaseModel):
    """A tensor without its numbers."""

    model_config = ConfigDict(extra="forbid")

    dtype: str = Field(json_schema_extra={"enum": list(STORAGE)})
    shape: list[int] = Field(max_length=4, json_schema_extra={"items": {"type": "integer", "minimum": 0}})


class PathPlan(BaseModel):
    """How one path would do; figures are null where it cannot serve the problem."""

    supported: bool
    why: str
    flops: int | None = Field(description="whole products, nothing off for masks")
    bytes_moved: int | None
    peak_bytes: int | None = Field(description="inputs, outputs and everything between them at once")
    estimated_ms: float | None = Field(description="from rates measured at start, corrected by what was seen since")


class Plan(BaseModel):
    """What a problem would take, sent and answered in safetensors."""

    admitted: bool
    why: str = Field(description="of the path, or of the refusal")
    path: str = Field(description="the path that would answer")
    answer_bytes: int
    needed_bytes: int = Field(description="what admission would count")
    allowed_bytes: int = Field(description="what one problem may need at this moment")
    max_seq_len: int = Field(description="the largest T = S that would be let in, all else kept")
    paths: dict[str, PathPlan] = Field(description=f"of {names_text(PATHS)}")


def _body_model() -> type[BaseModel]:
    fields: dict[str, Any] = {name: (TensorSpecObject | None, None) for name in GRADIENTS.tensors if name != "query"}
    asked = Field(None, description="of the attention, or with grad_context or grad_logsumexp of its gradients")
    fields |= {"query": (TensorSpecObject, ...), "outputs": (list[OutputName | GradientName] | None, asked)}
    return create_model("PlanBody", __base__=ATTENTION.options, **fields)


PlanBody = _body_model()
MODELS: tuple[type[BaseModel], ...] = (TensorSpecObject, PlanBody, PathPlan, Plan)


def _spec(*shape: int) -> dict[str, Any]:
    return {"dtype": "float32", "shape": list(shape)}


_LONG = {name: _spec(1, 8, 8192, 64) for name in ("query", "key", "value")}
PLAN_EXAMPLES: dict[str, Any] = {
    "long and causal": {"summary": "8,192 tokens, 8 heads", "value": {**_LONG, "causal": True}},
    "weights": {"summary": "Whole weights of the same", "value": {**_LONG, "outputs": ["context", "weights"]}},
    "gradients": {"summary": "Its gradients", "value": {**_LONG, "grad_context": _spec(1, 8, 8192, 64)}},
}


def _route() -> dict[str, Any]:
    problem = {"content": {problem_details.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}}
    responses: dict[int | str, dict[str, Any]] = {
        200: {
            "description": "What it would take, whether it would be admitted or not",
            "content": {json_format.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Plan"}}},
        }
    }
    for failure in FAILURES.values():
        if failure.http not in (404, 405, 409):
            responses.setdefault(failure.http, {"description": failure.title, **problem})
    content = {"schema": {"$ref": "#/components/schemas/PlanBody"}, "examples": PLAN_EXAMPLES}
    return {
        "summary": "Plan",
        "description": "What an attention would take, each tensor said by dtype and shape alone; with grad_context or "
        "grad_logsumexp: what its gradients would. Nothing is computed.",
        "tags": ["attention"],
        "response_model": None,
        "responses": responses,
        "openapi_extra": {"requestBody": {"required": True, "content": {json_format.MEDIA_TYPE: content}}},
    }


PLAN_ROUTE = _route()
