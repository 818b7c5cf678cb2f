"""The models of the Open Inference Protocol: names, tensors, datatypes; metadata and configuration as the protocol has
them. No model here has weights: each is an operation in one datatype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attn_core.problem import TENSOR_NAMES
from service.errors import NotFound
from service.wire.json_arrays import MASK_TENSORS
from service.wire.requests import ATTENTION, Call
from service.wire.text import short_name

PLATFORM = "attn"
VERSION = "1"
MAX_BATCH_SIZE = 0
"""Shapes are whole: the batch is an axis of the tensors, and none that the protocol manages."""
ANY = -1
"""An axis that may have any length."""


@dataclass(frozen=True, slots=True)
class Datatype:
    """A type of elements: its name on the wire, torch's, and how many bytes an element has."""

    name: str
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def is_half(self) -> bool:
        """Whether JSON and typed contents have no form for it."""
        return self.name in ("FP16", "BF16")


DATATYPES: dict[str, Datatype] = {
    name: Datatype(name, dtype)
    for name, dtype in {
        "FP32": torch.float32,
        "FP16": torch.float16,
        "BF16": torch.bfloat16,
        "FP64": torch.float64,
        "BOOL": torch.bool,
        "INT64": torch.int64,
    }.items()
}
"""Every datatype that a tensor of a model has."""
OTHER_DATATYPES = frozenset({"INT8", "INT16", "INT32", "UINT8", "UINT16", "UINT32", "UINT64", "BYTES"})
"""Those of the protocol that no tensor here has."""
DATATYPE_OF: dict[torch.dtype, Datatype] = {datatype.dtype: datatype for datatype in DATATYPES.values()}
SUFFIXES: dict[str, str] = {"": "FP32", "_fp16": "FP16", "_bf16": "BF16", "_fp64": "FP64"}


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """An input or output; ``shape`` has ``ANY`` where the caller decides."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """``call`` says which tensors and options the operation takes."""

    name: str
    call: Call
    datatype: Datatype
    inputs: tuple[ModelTensor, ...]
    outputs: tuple[ModelTensor, ...]

    def input(self, name: str) -> ModelTensor | None:
        return next((tensor for tensor in self.inputs if tensor.name == name), None)

    def output(self, name: str) -> ModelTensor | None:
        return next((tensor for tensor in self.outputs if tensor.name == name), None)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.outputs)

    def metadata(self) -> dict[str, Any]:
        """As GET /v2/models/M answers."""
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": PLATFORM,
            "inputs": [_described(tensor) for tensor in self.inputs],
            "outputs": [_described(tensor) for tensor in self.outputs],
        }

    def configuration(self) -> dict[str, Any]:
        """As GET /v2/models/M/config answers: Triton's ModelConfig in JSON."""
        return {
            "name": self.name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "max_batch_size": MAX_BATCH_SIZE,
            "input": [
                {
                    "name": tensor.name,
                    "data_type": f"TYPE_{tensor.datatype.name}",
                    "dims": list(tensor.shape),
                    "is_shape_tensor": False,
                    "allow_ragged_batch": False,
                    "optional": tensor.is_optional,
                }
                for tensor in self.inputs
            ],
            "output": [
                {
                    "name": tensor.name,
                    "data_type": f"TYPE_{tensor.datatype.name}",
                    "dims": list(tensor.shape),
                    "is_shape_tensor": False,
                }
                for tensor in self.outputs
            ],
            "parameters": {},
            "model_transaction_policy": {"decoupled": False},
        }


def _described(tensor: ModelTensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype.name, "shape": list(tensor.shape)}


class Models:
    """Every model there is, by name, in the order in which they are listed."""

    def __init__(self, models: Mapping[str, Model] | None = None) -> None:
        self._models = dict(BUILT_IN if models is None else models)

    def all(self) -> list[Model]:
        return list(self._models.values())

    def get(self, name: str, version: str = "") -> Model:
        """The model of this name; an empty version is the server's choice. Raises: NotFound."""
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"there is no model {short_name(name)!r}; POST /v2/repository/index lists those there are")
        if version not in ("", VERSION):
            raise NotFound(f"model {name} has version {VERSION} alone, not {short_name(version)!r}")
        return model


def _built_in() -> dict[str, Model]:
    models = {}
    for suffix, code in SUFFIXES.items():
        datatype = DATATYPES[code]
        for model in (_sdpa(f"sdpa{suffix}", datatype), _attention(f"attention{suffix}", datatype)):
            models[model.name] = model
    return dict(sorted(models.items()))


def _sdpa(name: str, datatype: Datatype) -> Model:
    inputs = tuple(ModelTensor(part, datatype, (ANY,) * 4) for part in ("query", "key", "value"))
    return Model(name, ATTENTION, datatype, inputs, (ModelTensor("context", datatype, (ANY,) * 4),))


def _attention(name: str, datatype: Datatype) -> Model:
    wide = datatype if datatype.name == "FP64" else DATATYPES["FP32"]
    outputs = (
        ModelTensor("context", datatype, (ANY,) * 4),
        ModelTensor("weights", datatype, (ANY,) * 4),
        ModelTensor("scores", wide, (ANY,) * 4),
        ModelTensor("logits", wide, (ANY,) * 4),
        ModelTensor("logsumexp", wide, (ANY,) * 3),
        ModelTensor("entropy", wide, (ANY,) * 3),
    )
    return Model(name, ATTENTION, datatype, tuple(_attention_input(part, datatype) for part in TENSOR_NAMES), outputs)


def _attention_input(name: str, datatype: Datatype) -> ModelTensor:
    if name in MASK_TENSORS:
        return ModelTensor(name, DATATYPES["BOOL"], (ANY,) * 4, is_optional=True)
    if name in ("key_lengths", "query_lengths", "query_offset"):
        return ModelTensor(name, DATATYPES["INT64"], (ANY,), is_optional=True)
    if name in ("alibi_slopes", "sinks"):
        return ModelTensor(name, datatype, (ANY,), is_optional=True)
    return ModelTensor(name, datatype, (ANY,) * 4, is_optional=name != "query")


BUILT_IN: dict[str, Model] = _built_in()
