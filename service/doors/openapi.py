"""The OpenAPI document and its page: schemas from the Pydantic models, examples that run as they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fastapi_offline
from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.json_schema import models_json_schema
from starlette.staticfiles import StaticFiles

from attn_core.problem import TENSOR_NAMES
from service.doors import openapi_inference
from service.doors.exchange import OPEN_PATHS
from service.doors.problem_details import MEDIA_TYPE as PROBLEM_MEDIA_TYPE
from service.failures import FAILURES
from service.wire import json_format, safetensors_format
from service.wire.json_arrays import MASK_TENSORS, NUMBER_TENSORS
from service.wire.options import AttentionCallOptions, CallOptions

DESCRIPTION = """\
Attention and nothing else: POST query, key and value, get context, weights, scores, logits, log-sum-exps and more
back. JSON (nested lists or base64) and safetensors, both ways, gzip both ways. Nothing that changes the numbers is
guessed: where two conventions exist the name of the field says which, or the request is refused with both named.
"""

Axis = dict[str, Any]


def _lists(items: Axis, ranks: range) -> list[Axis]:
    choices = []
    for rank in ranks:
        schema = items
        for _ in range(rank):
            schema = {"type": "array", "items": schema, "minItems": 1}
        choices.append(schema)
    return choices


class TensorObject(BaseModel):
    """A tensor as base64: little endian, row major."""

    model_config = ConfigDict(extra="forbid")

    dtype: str = Field(
        json_schema_extra={"enum": ["float64", "float32", "float16", "bfloat16", "bool", "int64", "int32"]}
    )
    shape: list[int] = Field(max_length=4, json_schema_extra={"items": {"type": "integer", "minimum": 0}})
    data: str = Field(json_schema_extra={"contentEncoding": "base64"})


class Info(BaseModel):
    """How an answer came about."""

    path: str = Field(description="the kernel that ran")
    why: str = Field(description="the reason in a few words")
    device: str
    dtype: str = Field(description="dtype of the query")
    queue_ms: float
    compute_ms: float
    batch_requests: int = Field(description="requests that were computed together")
    empty_rows: int = Field(description="rows of one head each that may attend no key")
    nonfinite_rows: int = Field(description="rows of one head each that came out with NaN or infinity")
    peak_bytes: int = Field(description="the memory that admission counted")
    flops: int


class ProblemFault(BaseModel):
    """One thing that is wrong."""

    field: str = Field(description='a dotted path such as "key.0.0.1"; empty for the whole body')
    expected: str
    received: str


class ProblemDetails(BaseModel):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[ProblemFault] = Field(max_length=50)
    needed_bytes: int | None = None
    allowed_bytes: int | None = None


_REF = {"$ref": "#/components/schemas/TensorObject"}
_NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}

_MEANINGS = {
    "query": "[B,H,T,D], or [H,T,D] or [T,D]",
    "key": "[B,K,S,D]; left out together with value: key = value = query",
    "value": "[B,K,S,V]",
    "allow_mask": "bool, to [B,H,T,S]; true = may attend",
    "block_mask": "bool, to [B,H,T,S]; true = must not attend",
    "bias": "float, to [B,H,T,S]; added to the logits, -inf blocks",
    "key_lengths": "int [B]; keys at and after it are padding",
    "query_lengths": "int [B]; queries at and after it are padding",
    "query_offset": "int [B], [1] or a number; the place of the first query among the keys",
    "alibi_slopes": "float [H]; slope * |p(i) - j| is subtracted",
    "sinks": "float [H]; one more logit per head, in the denominator only",
    "weights": "[B,H,T,S] as given; rows need not add up to 1",
}


def _tensor_field(name: str, *, required_value: bool) -> Any:
    if name in MASK_TENSORS:
        choices = _lists({"type": "boolean"}, range(1, 5))
    elif name in ("alibi_slopes", "sinks"):
        choices = _lists(_NUMBER, range(1, 2))
    elif name in NUMBER_TENSORS:
        choices = _lists(_NUMBER, range(1, 5) if name == "bias" else range(2, 5))
    else:
        choices = _lists({"type": "integer"}, range(1, 2))
        if name == "query_offset":
            choices.append({"type": "integer"})
    extra: dict[str, Any] = {"anyOf": [*choices, _REF]}
    if name in ("query", "weights") or (name == "value" and required_value):
        return Field(description=_MEANINGS[name], json_schema_extra=extra)
    return Field(None, description=_MEANINGS[name], json_schema_extra=extra)


def _body_model(title: str, tensors: tuple[str, ...], options: type[CallOptions]) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (Any, _tensor_field(name, required_value="weights" in tensors)) for name in tensors}
    return create_model(title, __base__=options, **fields)


AttentionBody = _body_model("AttentionBody", TENSOR_NAMES, AttentionCallOptions)
WeightedSumBody = _body_model("WeightedSumBody", ("weights", "value"), CallOptions)

SIX_VECTORS = [
    [0.43, 0.15, 0.89],
    [0.55, 0.87, 0.66],
    [0.57, 0.85, 0.64],
    [0.22, 0.58, 0.33],
    [0.77, 0.25, 0.10],
    [0.05, 0.80, 0.55],
]

ATTENTION_EXAMPLES: dict[str, Any] = {
    "self-attention": {
        "summary": "Six vectors attend to themselves, without scale",
        "value": {"query": SIX_VECTORS, "scale": 1, "outputs": ["context", "weights"]},
    },
    "mask with an empty row": {
        "summary": "Weights, a mask, and a query that may attend nothing",
        "value": {
            "query": [[1, 0], [0, 1]],
            "key": [[1, 0], [0, 1]],
            "value": [[1, 2], [3, 4]],
            "allow_mask": [[True, True], [False, False]],
            "outputs": ["context", "weights", "logsumexp"],
        },
    },
    "causal": {
        "summary": "Causal, two query heads sharing one key head",
        "value": {
            "query": [[[[1, 0], [0, 1], [1, 1]], [[0, 1], [1, 0], [1, 1]]]],
            "key": [[[[1, 0], [0, 1], [1, 1]]]],
            "value": [[[[1, 2], [3, 4], [5, 6]]]],
            "causal": True,
        },
    },
    "two faults": {
        "summary": "Refused, with every fault named",
        "value": {"query": [[1, 2]], "key": [[1, 2, 3]], "value": [[1]], "is_casual": True},
    },
}
WEIGHTED_SUM_EXAMPLES: dict[str, Any] = {
    "one row": {
        "summary": "Weights given by hand",
        "value": {"weights": [[0.2, 0.5, 0.3]], "value": [[1, 0], [0, 1], [1, 1]]},
    }
}


def _answer_model(title: str, outputs: dict[str, str]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name, shape in outputs.items():
        choices: Any = [{"type": "array"}, _REF]
        fields[name] = (Any, Field(None, description=shape, json_schema_extra={"anyOf": choices}))
    return create_model(title, info=(Info, ...), **fields)


AttentionAnswer = _answer_model(
    "AttentionAnswer",
    {
        "context": "as query, the last axis V",
        "weights": "[B,H,T,S]",
        "scores": "[B,H,T,S], unscaled, for every pair",
        "logits": "[B,H,T,S], -inf at forbidden pairs",
        "logsumexp": "[B,H,T], natural log",
        "entropy": "[B,H,T], nats",
        "top_weights": "[B,H,T,k], largest first",
        "top_keys": "[B,H,T,k], int64; -1 where fewer keys are allowed",
        "weight_totals": "[B,H,S], the weight each key got from all query rows",
    },
)
WeightedSumAnswer = _answer_model("WeightedSumAnswer", {"context": "[B,H,T,V]"})


def _route(summary: str, description: str, body: str, answer: str, examples: dict[str, Any]) -> dict[str, Any]:
    problem = {"content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}}
    responses: dict[int | str, dict[str, Any]] = {
        200: {
            "description": "The asked outputs and info",
            "content": {
                json_format.MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{answer}"}},
                safetensors_format.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
            },
        }
    }
    for failure in FAILURES.values():
        responses.setdefault(failure.http, {"description": failure.title, **problem})
    del responses[404], responses[405]
    return {
        "summary": summary,
        "description": description,
        "tags": ["attention"],
        "response_model": None,
        "responses": responses,
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {
                    json_format.MEDIA_TYPE: {
                        "schema": {"$ref": f"#/components/schemas/{body}"},
                        "examples": examples,
                    },
                    safetensors_format.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
                },
            }
        },
    }


ATTENTION_ROUTE = _route(
    "Attention",
    "softmax(scale * query @ key^T, masked) @ value, and every step of it on request. In safetensors the options are "
    "JSON text in the metadata entry `options`.",
    "AttentionBody",
    "AttentionAnswer",
    ATTENTION_EXAMPLES,
)
WEIGHTED_SUM_ROUTE = _route(
    "Weighted sum",
    "weights @ value by the plain product, the weights taken as they are.",
    "WeightedSumBody",
    "WeightedSumAnswer",
    WEIGHTED_SUM_EXAMPLES,
)
SERVICE_ROUTE: dict[str, Any] = {"summary": "Version, device, dtypes, limits", "tags": ["operations"]}


KEY_SCHEMES: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Either is enough, where keys are set."""


def install(app: FastAPI, *, asks_for_keys: bool) -> None:
    """Serve /openapi.json with the models' schemas, and /docs from files on this machine."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes, summary=None
            )
            native: tuple[type[BaseModel], ...] = (
                AttentionBody,
                WeightedSumBody,
                AttentionAnswer,
                WeightedSumAnswer,
                TensorObject,
                ProblemDetails,
            )
            models = (*native, *openapi_inference.MODELS)
            _, definitions = models_json_schema(
                [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
            )
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            components.update(definitions["$defs"])
            for unused in ("HTTPValidationError", "ValidationError"):
                components.pop(unused, None)
            if asks_for_keys:
                schema["components"]["securitySchemes"] = KEY_SCHEMES
                schema["security"] = [{name: []} for name in KEY_SCHEMES]
                for path in OPEN_PATHS & set(schema["paths"]):
                    for operation in schema["paths"][path].values():
                        operation["security"] = []
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
    static = Path(fastapi_offline.__file__).parent / "static"
    app.mount("/docs/static", StaticFiles(directory=static), name="docs-static")

    async def docs(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        return get_swagger_ui_html(
            openapi_url=f"{root}{app.openapi_url}",
            title=app.title,
            swagger_js_url=f"{root}/docs/static/swagger-ui-bundle.js",
            swagger_css_url=f"{root}/docs/static/swagger-ui.css",
            swagger_favicon_url=f"{root}/docs/static/favicon.png",
            swagger_ui_parameters={"tryItOutEnabled": True},
        )

    app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)
