"""The OpenAPI document and its page: schemas from the Pydantic models, examples that run as they stand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import fastapi_offline
from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.json_schema import models_json_schema
from starlette.staticfiles import StaticFiles

from attn_core.problem import PROJECTION_BIAS_NAMES, WEIGHT_NAMES
from service.doors import openapi_inference
from service.doors.exchange import OPEN_PATHS
from service.doors.problem_details import MEDIA_TYPE as PROBLEM_MEDIA_TYPE
from service.failures import FAILURES
from service.wire import json_format, safetensors_format
from service.wire.json_arrays import MASK_TENSORS, NUMBER_TENSORS
from service.wire.options import LayerGradientsCallOptions
from service.wire.requests import (
    ATTENTION,
    GRADIENTS,
    LAYER,
    LAYER_GRADIENTS,
    LAYER_PARAMETERS,
    NAMED_LAYER,
    NAMED_LAYER_GRADIENTS,
    WEIGHTED_SUM,
    Form,
)

DESCRIPTION = """\
Attention and nothing else: POST query, key and value, get context, weights, scores, logits, log-sum-exps and more
back, or their gradients; alone, or between the projections of a layer. JSON (nested lists or base64) and safetensors,
both ways, gzip both ways. Nothing that changes the numbers is guessed: where two conventions exist the name of the
field says which, or the request is refused with both named.
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
    dtype: str = Field(description="dtype of the query, the weights or the layer's input")
    queue_ms: float
    compute_ms: float
    batch_requests: int = Field(description="requests that were computed together")
    empty_rows: int = Field(description="rows of one head each that may attend no key")
    nonfinite_rows: int = Field(description="rows of one head each that came out with NaN or infinity")
    peak_bytes: int = Field(description="the memory that admission counted")
    flops: int
    max_abs_error: float | Literal["Infinity"] | None = Field(
        None, description="with verify: the largest difference from float64"
    )
    max_rel_error: float | Literal["Infinity"] | None = Field(
        None, description="with verify: the same, over the largest float64 value of the row"
    )
    worst: str | None = Field(None, description='with verify: where it is, such as "context[0,3,17]"')


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
    "grad_context": "shape and dtype of the context",
    "grad_logsumexp": "[B,H,T], of the dtype of the logsumexp",
    "input": "[B,T,E] or [T,E]",
    "memory": "[B,S,M], from which keys and values come; else they come from input",
    "w_query": "in_out: [E,H*D]; out_in: [H*D,E]",
    "w_key": "in_out: [M,K*D], E for M without memory; out_in: [K*D,M]",
    "w_value": "in_out: [M,K*V], E for M without memory; out_in: [K*V,M]",
    "w_output": "in_out: [H*V,O]; out_in: [O,H*V]",
    "b_query": "[H*D]",
    "b_key": "[K*D]",
    "b_value": "[K*V]",
    "b_output": "[O]",
    "grad_output": "[B,T,O], shape and dtype of the output",
}
_RANKS: dict[str, range] = {
    **dict.fromkeys(("allow_mask", "block_mask", "bias"), range(1, 5)),
    **dict.fromkeys(("key_lengths", "query_lengths", "query_offset", "alibi_slopes", "sinks"), range(1, 2)),
    "grad_logsumexp": range(1, 4),
    **dict.fromkeys(("input", "memory", "grad_output"), range(2, 4)),
    **dict.fromkeys(WEIGHT_NAMES, range(2, 3)),
    **dict.fromkeys(PROJECTION_BIAS_NAMES, range(1, 2)),
}
"""How many axes a tensor may have, where these are not 2 to 4."""


def _tensor_field(name: str, *, is_required: bool) -> Any:
    items: Axis = {"type": "boolean"} if name in MASK_TENSORS else {"type": "integer"}
    choices = _lists(_NUMBER if name in NUMBER_TENSORS else items, _RANKS.get(name, range(2, 5)))
    if name == "query_offset":
        choices.append({"type": "integer"})
    extra: dict[str, Any] = {"anyOf": [*choices, _REF]}
    return Field(... if is_required else None, description=_MEANINGS[name], json_schema_extra=extra)


def body_model(title: str, form: Form, *required: str) -> type[BaseModel]:
    """The body of a form in JSON; ``required`` names tensors and options that are never left out."""
    fields: dict[str, Any] = {name: (Any, _tensor_field(name, is_required=name in required)) for name in form.tensors}
    for name in form.option_names:
        if name in required:
            option = form.options.model_fields[name]
            # Absent is None in the model, so that its absence is a fault in our words.
            (annotation,) = set(get_args(option.annotation)) - {type(None)}
            least = 1 if annotation is int else None
            fields[name] = (annotation, Field(..., description=option.description, ge=least))
    return create_model(title, __base__=form.options, **fields)


_LAYER_REQUIRED = ("input", *WEIGHT_NAMES, "num_heads", "weight_layout")
AttentionBody = body_model("AttentionBody", ATTENTION, "query")
GradientsBody = body_model("GradientsBody", GRADIENTS, "query")
WeightedSumBody = body_model("WeightedSumBody", WEIGHTED_SUM, "weights", "value")
LayerBody = body_model("LayerBody", LAYER, *_LAYER_REQUIRED)
LayerGradientsBody = body_model("LayerGradientsBody", LAYER_GRADIENTS, *_LAYER_REQUIRED, "grad_output")
NamedLayerBody = body_model("NamedLayerBody", NAMED_LAYER, "input")
NamedLayerGradientsBody = body_model("NamedLayerGradientsBody", NAMED_LAYER_GRADIENTS, "input", "grad_output")
LayerParametersBody = body_model("LayerParametersBody", LAYER_PARAMETERS, *WEIGHT_NAMES, "num_heads", "weight_layout")

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
_TWO_KEYS: dict[str, Any] = {"query": [[1]], "key": [[0.5], [-0.5]], "value": [[1], [3]], "scale": 1}
GRADIENTS_EXAMPLES: dict[str, Any] = {
    "one query": {
        "summary": "One query, two keys, and the gradients on the way",
        "value": {
            **_TWO_KEYS,
            "grad_context": [[1]],
            "outputs": ["grad_query", "grad_key", "grad_value", "grad_weights", "grad_logits"],
        },
    },
    "of the logsumexp": {
        "summary": "The gradient of the logsumexp alone",
        "value": {**_TWO_KEYS, "grad_logsumexp": [1]},
    },
}
_UNIT = [[1, 0], [0, 1]]
_TWO_HEADS: dict[str, Any] = {
    "input": _UNIT,
    "w_query": _UNIT,
    "w_key": _UNIT,
    "w_value": _UNIT,
    "w_output": [[1, 1], [0, 2]],
    "weight_layout": "in_out",
    "num_heads": 2,
    "causal": True,
}
LAYER_EXAMPLES: dict[str, Any] = {
    "two heads": {
        "summary": "Two heads of width 1, causal, weights as the papers write them",
        "value": {**_TWO_HEADS, "outputs": ["output", "context", "weights"]},
    },
    "without weight_layout": {
        "summary": "Refused: which way the weights lie is never guessed",
        "value": {name: value for name, value in _TWO_HEADS.items() if name != "weight_layout"},
    },
}
LAYER_GRADIENTS_EXAMPLES: dict[str, Any] = {
    "two heads": {
        "summary": "Of everything given",
        "value": {**_TWO_HEADS, "grad_output": [[1, 0], [0, 1]]},
    },
}
WEIGHTED_SUM_EXAMPLES: dict[str, Any] = {
    "one row": {
        "summary": "Weights given by hand",
        "value": {"weights": [[0.2, 0.5, 0.3]], "value": [[1, 0], [0, 1], [1, 1]]},
    }
}


def answer_model(title: str, outputs: dict[str, str]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name, shape in outputs.items():
        choices: Any = [{"type": "array"}, _REF]
        fields[name] = (Any, Field(None, description=shape, json_schema_extra={"anyOf": choices}))
    return create_model(title, info=(Info, ...), **fields)


_PER_PAIR = {
    "weights": "[B,H,T,S]",
    "scores": "[B,H,T,S], unscaled, for every pair",
    "logits": "[B,H,T,S], -inf at forbidden pairs",
    "logsumexp": "[B,H,T], natural log",
    "entropy": "[B,H,T], nats",
    "top_weights": "[B,H,T,k], largest first",
    "top_keys": "[B,H,T,k], int64; -1 where fewer keys are allowed",
    "weight_totals": "[B,H,S], the weight each key got from all query rows",
}
AttentionAnswer = answer_model("AttentionAnswer", {"context": "as query, the last axis V", **_PER_PAIR})
GradientsAnswer = answer_model(
    "GradientsAnswer",
    {
        "grad_query": "as query; where key = value = query the sum of its three uses",
        "grad_key": "as key",
        "grad_value": "as value",
        "grad_bias": "as bias, summed over what it broadcast",
        "grad_sinks": "as sinks",
        "grad_weights": "[B,H,T,S], 0 at forbidden pairs",
        "grad_logits": "[B,H,T,S], of the logits after softcap, 0 at forbidden pairs",
    },
)
WeightedSumAnswer = answer_model("WeightedSumAnswer", {"context": "[B,H,T,V]"})
LayerAnswer = answer_model(
    "LayerAnswer",
    {
        "output": "[B,T,O]",
        "query": "[B,H,T,D], projected and split",
        "key": "[B,K,S,D], projected and split",
        "value": "[B,K,S,V], projected and split",
        "context": "[B,T,H*V], heads merged, before w_output",
        **_PER_PAIR,
    },
)
LayerGradientsAnswer = answer_model(
    "LayerGradientsAnswer",
    {name: f"as {name.removeprefix('grad_')}, where it was given" for name in LayerGradientsCallOptions.output_names},
)


def computing_route(summary: str, description: str, body: str, answer: str, examples: dict[str, Any]) -> dict[str, Any]:
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


ATTENTION_ROUTE = computing_route(
    "Attention",
    "softmax(scale * query @ key^T, masked) @ value, and every step of it on request. In safetensors the options are "
    "JSON text in the metadata entry `options`.",
    "AttentionBody",
    "AttentionAnswer",
    ATTENTION_EXAMPLES,
)
WEIGHTED_SUM_ROUTE = computing_route(
    "Weighted sum",
    "weights @ value by the plain product, the weights taken as they are.",
    "WeightedSumBody",
    "WeightedSumAnswer",
    WEIGHTED_SUM_EXAMPLES,
)
GRADIENTS_ROUTE = computing_route(
    "Gradients of an attention",
    "Of sum(grad_context * context) + sum(grad_logsumexp * logsumexp), one of the two or both given. Each gradient has "
    "the shape and dtype of its tensor; absent outputs ask for every one that is defined.",
    "GradientsBody",
    "GradientsAnswer",
    GRADIENTS_EXAMPLES,
)
LAYER_ROUTE = computing_route(
    "Attention between projections",
    "A multi-head layer with its weights in the request. weight_layout says which way they lie: in_out is y = x W, "
    "out_in is y = x W^T, as nn.Linear stores.",
    "LayerBody",
    "LayerAnswer",
    LAYER_EXAMPLES,
)
LAYER_GRADIENTS_ROUTE = computing_route(
    "Gradients of a layer",
    "Of sum(grad_output * output), by everything that was given; each lies as its tensor does.",
    "LayerGradientsBody",
    "LayerGradientsAnswer",
    LAYER_GRADIENTS_EXAMPLES,
)
SERVICE_ROUTE: dict[str, Any] = {"summary": "Version, device, dtypes, limits", "tags": ["operations"]}


KEY_SCHEMES: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Either is enough, where keys are set."""


MODELS: tuple[type[BaseModel], ...] = (
    AttentionBody,
    GradientsBody,
    WeightedSumBody,
    LayerBody,
    LayerGradientsBody,
    NamedLayerBody,
    NamedLayerGradientsBody,
    LayerParametersBody,
    AttentionAnswer,
    GradientsAnswer,
    WeightedSumAnswer,
    LayerAnswer,
    LayerGradientsAnswer,
    TensorObject,
    ProblemDetails,
)


def install(app: FastAPI, *, asks_for_keys: bool, more_models: Sequence[type[BaseModel]] = ()) -> None:
    """Serve /openapi.json with the models' schemas, and /docs from files on this machine."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes, summary=None
            )
            models = (*MODELS, *openapi_inference.MODELS, *more_models)
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
