"""What the OpenAPI document says of /v2: schemas, and examples that run as they stand."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from service.failures import FAILURES
from service.layer_store import NAME_PATTERN
from service.wire import open_inference_json
from service.wire.inference_models import BUILT_IN

TAG = "open inference protocol"
_DATATYPES: list[Any] = ["FP32", "FP64", "FP16", "BF16", "BOOL", "INT64"]
_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]},
}
_WHOLE: dict[str, Any] = {"type": "integer", "minimum": 0}


class InferenceInputBody(BaseModel):
    """A tensor: its elements as ``data``, or behind the JSON, or in shared memory."""

    model_config = ConfigDict(extra="allow")

    name: str
    shape: list[int] = Field(max_length=4, json_schema_extra={"items": _WHOLE})
    datatype: str = Field(json_schema_extra={"enum": _DATATYPES})
    parameters: dict[str, Any] | None = Field(
        None,
        description="binary_data_size, or shared_memory_region, shared_memory_byte_size and shared_memory_offset",
        json_schema_extra=_PARAMETERS,
    )
    data: list[Any] | None = Field(
        None, description="row major, flat or nested as the shape is; FP16 and BF16 have no form in JSON"
    )


class InferenceOutputBody(BaseModel):
    """An output that is asked for."""

    model_config = ConfigDict(extra="allow")

    name: str
    parameters: dict[str, Any] | None = Field(
        None, description="binary_data, or a place in shared memory", json_schema_extra=_PARAMETERS
    )


class InferenceBody(BaseModel):
    """A request; with binary data it is the first part of the body, Inference-Header-Content-Length bytes long."""

    model_config = ConfigDict(extra="allow")

    id: str | None = Field(None, description="echoed")
    parameters: dict[str, Any] | None = Field(
        None, description="the options of the model, and the protocol's own", json_schema_extra=_PARAMETERS
    )
    inputs: list[InferenceInputBody]
    outputs: list[InferenceOutputBody] | None = Field(None, description="all of them where none is named")


class InferenceOutput(BaseModel):
    """An output; ``data`` is flat."""

    name: str
    datatype: str = Field(json_schema_extra={"enum": _DATATYPES})
    shape: list[int]
    parameters: dict[str, Any] | None = Field(None, json_schema_extra=_PARAMETERS)
    data: list[Any] | None = None


class InferenceAnswerBody(BaseModel):
    """An answer; ``parameters`` say how it came about."""

    id: str | None = None
    model_name: str
    model_version: str
    parameters: dict[str, Any] = Field(json_schema_extra=_PARAMETERS)
    outputs: list[InferenceOutput]


class InferenceError(BaseModel):
    """A refusal: one text, with every fault in it."""

    error: str


class RegionBody(BaseModel):
    """A part of a POSIX shared memory object."""

    key: str
    byte_size: int = Field(ge=0)
    offset: int = Field(0, ge=0)


MODELS: tuple[type[BaseModel], ...] = (InferenceBody, InferenceAnswerBody, InferenceError, RegionBody)

INFER_EXAMPLES: dict[str, Any] = {
    "causal": {
        "summary": "Two tokens attend causally; the model is sdpa or attention",
        "value": {
            "id": "1",
            "parameters": {"causal": True},
            "inputs": [
                {"name": name, "shape": [1, 1, 2, 2], "datatype": "FP32", "data": data}
                for name, data in (("query", [1, 0, 0, 1]), ("key", [1, 0, 0, 1]), ("value", [1, 2, 3, 4]))
            ],
        },
    },
    "mask and outputs": {
        "summary": "A mask with an empty row, three outputs; the model is attention",
        "value": {
            "inputs": [
                {"name": "query", "shape": [1, 1, 2, 2], "datatype": "FP32", "data": [[[[1, 0], [0, 1]]]]},
                {"name": "allow_mask", "shape": [2, 2], "datatype": "BOOL", "data": [True, True, False, False]},
            ],
            "outputs": [{"name": "context"}, {"name": "weights"}, {"name": "logsumexp"}],
        },
    },
    "gradients": {
        "summary": "Gradients of query, key and value; the model is attention_gradients",
        "value": {
            "parameters": {"scale": 1},
            "inputs": [
                {"name": name, "shape": [1, 1, len(data), 1], "datatype": "FP32", "data": data}
                for name, data in (
                    ("query", [1]), ("key", [0.5, -0.5]), ("value", [1, 3]), ("grad_context", [1]),
                )
            ],
        },
    },
    "layer": {
        "summary": "Two heads of width 1 between projections; the model is layer",
        "value": {
            "parameters": {"num_heads": 2, "weight_layout": "in_out", "causal": True},
            "inputs": [
                {"name": name, "shape": shape, "datatype": "FP32", "data": data}
                for name, shape, data in (
                    ("input", [1, 2, 2], [1, 0, 0, 1]), ("w_query", [2, 2], [1, 0, 0, 1]),
                    ("w_key", [2, 2], [1, 0, 0, 1]), ("w_value", [2, 2], [1, 0, 0, 1]),
                    ("w_output", [2, 2], [1, 1, 0, 2]),
                )
            ],
            "outputs": [{"name": "output"}, {"name": "weights"}],
        },
    },
}  # fmt: skip


def _about(summary: str, description: str = "", **more: Any) -> dict[str, Any]:
    return {"summary": summary, "description": description, **more}


SERVER = _about("Name, version and extensions of the server")
LIVE = _about("Whether the process answers")
READY = _about("Whether new work is taken")
NAMES = _about("The names of all models")
MODEL = _about("Inputs and outputs of a model")
MODEL_READY = _about("Whether a model takes requests")
CONFIGURATION = _about("The configuration of a model")
STATISTICS = _about("What a model has done")
ALL_STATISTICS = _about("What all models have done")
LOAD = _about("Refused: models are there from the start, and layers as long as they are kept")
REGIONS = _about("The regions of shared memory", "Where the server's settings allow it, for callers on its machine.")
UNREGISTER = _about("Forget a region of shared memory, or all")
REGISTER = _about(
    "Make a region of shared memory known by a name",
    "Where the server's settings allow it, for callers on its machine.",
    body={"$ref": "#/components/schemas/RegionBody"},
)
INDEX = _about("The models and their states", "The body may be empty.", body={"type": "object"})
INFER = _about(
    "Inference",
    "Attention, its gradients or a layer, by a model of this protocol. Tensors stand in the JSON, follow it in binary "
    "(then the header `Inference-Header-Content-Length` gives the length of the JSON, and the answer has it likewise), "
    "or lie in shared memory. gzip and deflate both ways.",
    body={"$ref": "#/components/schemas/InferenceBody"},
    answer={"$ref": "#/components/schemas/InferenceAnswerBody"},
    examples=INFER_EXAMPLES,
    is_binary=True,
)


_MODEL: dict[str, Any] = {
    "name": "model",
    "in": "path",
    "required": True,
    "description": "a model, or a layer that is kept by this name",
    "schema": {"type": "string", "anyOf": [{"enum": list(BUILT_IN)}, {"pattern": f"^{NAME_PATTERN}$"}]},
}


def route(
    path: str,
    *,
    summary: str,
    description: str,
    body: dict[str, Any] | None = None,
    answer: dict[str, Any] | None = None,
    examples: dict[str, Any] | None = None,
    is_binary: bool = False,
) -> dict[str, Any]:
    """What a route is added with."""
    binary: dict[str, Any] = {}
    if is_binary:
        binary = {open_inference_json.BINARY: {"schema": {"type": "string", "format": "binary"}}}
    refused = {"content": {open_inference_json.JSON: {"schema": {"$ref": "#/components/schemas/InferenceError"}}}}
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": "Yes", "content": {open_inference_json.JSON: {"schema": answer or {}}, **binary}}
    }
    for failure in FAILURES.values():
        responses.setdefault(failure.inference, {"description": failure.title, **refused})
    extra: dict[str, Any] = {"parameters": []}
    if "{model}" in path:
        extra["parameters"].append(_MODEL)
    if "{region}" in path:
        schema = {"type": "string"}
        extra["parameters"].append({"name": "region", "in": "path", "required": True, "schema": schema})
    if body is not None:
        content: dict[str, Any] = {"schema": body}
        if examples is not None:
            content["examples"] = examples
        extra["requestBody"] = {
            "required": examples is not None,
            "content": {open_inference_json.JSON: content, **binary},
        }
    return {
        "summary": summary,
        "description": description,
        "tags": [TAG],
        "response_model": None,
        "responses": responses,
        "openapi_extra": extra,
    }
