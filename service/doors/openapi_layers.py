"""What the OpenAPI document says of layers that are kept by a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from service.doors import problem_details
from service.doors.openapi import LAYER_EXAMPLES, LAYER_GRADIENTS_EXAMPLES, computing_route
from service.failures import FAILURES
from service.layer_store import NAME_PATTERN
from service.wire import json_format, safetensors_format
from service.wire.requests import LAYER_PARAMETERS

TAG = "layers"


class LayerDescription(BaseModel):
    """A layer that is kept: all but its numbers."""

    name: str
    num_heads: int
    num_kv_heads: int
    weight_layout: str = Field(json_schema_extra={"enum": ["in_out", "out_in"]})
    dtype: str = Field(json_schema_extra={"enum": ["float64", "float32", "float16", "bfloat16"]})
    shapes: dict[str, list[int]] = Field(description="of each weight and bias there is, by name")
    parameters: int = Field(description="how many numbers it has learned")


class LayerList(BaseModel):
    """Every layer that is kept, by name."""

    layers: list[LayerDescription]


MODELS: tuple[type[BaseModel], ...] = (LayerDescription, LayerList)

_NAME: dict[str, Any] = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "1 to 64 of a-z A-Z 0-9 . _ -, beginning with a letter; no model of /v2, and not stats",
    "schema": {"type": "string", "pattern": f"^{NAME_PATTERN}$", "example": "first"},
}
_REPLACE: dict[str, Any] = {
    "name": "replace",
    "in": "query",
    "required": False,
    "description": "whether other content under the same name is replaced; requests that run finish on the old one",
    "schema": {"type": "boolean", "default": False},
}
_BY_STATUS = {failure.http: failure for failure in FAILURES.values()}


def _without_stored(example: Mapping[str, Any]) -> dict[str, Any]:
    """An example of a layer's call as a call of the layer that ``LAYER_EXAMPLES`` would have kept."""
    kept = (*LAYER_PARAMETERS.tensors, *LAYER_PARAMETERS.option_names)
    value = {name: member for name, member in example["value"].items() if name not in kept}
    return {"summary": example["summary"], "value": value}


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    content = {problem_details.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    return {status: {"description": _BY_STATUS[status].title, "content": content} for status in statuses}


def _described(description: str, schema: str) -> dict[str, Any]:
    content = {json_format.MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


def _route(
    summary: str,
    description: str,
    responses: dict[int | str, dict[str, Any]],
    parameters: list[dict[str, Any]],
    **extra: Any,
) -> dict[str, Any]:
    return {
        "summary": summary,
        "description": description,
        "tags": [TAG],
        "response_model": None,
        # Or FastAPI would describe an answer of its own beside ours.
        "status_code": min(status for status in responses if isinstance(status, int)),
        "responses": responses,
        "openapi_extra": {"parameters": parameters, **extra},
    }


def _computing(
    summary: str, description: str, body: str, answer: str, examples: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """A call with the layer of a name in its path."""
    value = _without_stored(examples["two heads"])
    route = computing_route(summary, description, body, answer, {"two heads": value})
    route["responses"] |= _refusals(404)
    route["openapi_extra"]["parameters"] = [_NAME]
    return {**route, "tags": [TAG]}


_KEPT = {name: LAYER_EXAMPLES["two heads"]["value"][name] for name in (*LAYER_PARAMETERS.tensors[:4], "weight_layout")}
LIST = _route(
    "Every layer that is kept",
    "By name, as each was described when it was uploaded.",
    {200: _described("The layers", "LayerList"), **_refusals(401, 406, 422)},
    [],
)
GET = _route(
    "One layer",
    "All but its numbers.",
    {200: _described("The layer", "LayerDescription"), **_refusals(401, 404, 406, 422)},
    [_NAME],
)
PUT = _route(
    "Keep a layer",
    "Weights, biases and how they are to be read, to be used by name from now on. The same content again changes "
    "nothing; other content needs replace=true. In safetensors the options are JSON text in the metadata entry "
    "`options`.",
    {
        200: _described("It was there, or has replaced another", "LayerDescription"),
        201: _described("It is new", "LayerDescription"),
        **_refusals(400, 401, 406, 409, 413, 415, 422, 429, 503, 504),
    },
    [_NAME, _REPLACE],
    requestBody={
        "required": True,
        "content": {
            json_format.MEDIA_TYPE: {
                "schema": {"$ref": "#/components/schemas/LayerParametersBody"},
                "examples": {
                    "two heads": {"summary": "Two heads of width 1", "value": {**_KEPT, "num_heads": 2}},
                },
            },
            safetensors_format.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
        },
    },
)
DELETE = _route(
    "Forget a layer",
    "Requests that run finish with it.",
    {204: {"description": "It is gone"}, **_refusals(401, 404, 422, 429, 503, 504)},
    [_NAME],
)
FORWARD = _computing(
    "A layer that is kept, forward",
    "As POST /v1/layer, bit for bit, with the weights that are kept; they are not accepted again.",
    "NamedLayerBody",
    "LayerAnswer",
    LAYER_EXAMPLES,
)
GRADIENTS = _computing(
    "Gradients of a layer that is kept",
    "As POST /v1/layer/gradients, bit for bit, with the weights that are kept; they are not accepted again.",
    "NamedLayerGradientsBody",
    "LayerGradientsAnswer",
    LAYER_GRADIENTS_EXAMPLES,
)
