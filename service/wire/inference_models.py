"""The models of the Open Inference Protocol: names, tensors, datatypes; metadata and configuration as the protocol has
them. Most are an operation in one datatype, without weights; each layer that is kept by a name is one more.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attn_core.problem import (
    GRADIENT_OUTPUTS,
    LAYER_OUTPUTS,
    PAIR_GRADIENTS,
    PROJECTION_BIAS_NAMES,
    TENSOR_NAMES,
    WEIGHT_NAMES,
    LayerParameters,
)
from service.errors import NotFound
from service.wire.json_arrays import MASK_TENSORS
from service.wire.requests import ATTENTION, GRADIENTS, LAYER, NAMED_LAYER, Call, NamedCall
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
class ModelOutput(ModelTensor):
    """``source`` is the input without which there is no such output; one ``on_request`` comes only when it is named."""

    source: str | None = None
    on_request: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """``call`` says which tensors and options the operation takes; a named one is that of a layer that is kept, whose
    parameters are ``stored``."""

    name: str
    call: Call | NamedCall
    datatype: Datatype
    inputs: tuple[ModelTensor, ...]
    outputs: tuple[ModelOutput, ...]
    stored: LayerParameters | None = None

    def input(self, name: str) -> ModelTensor | None:
        return next((tensor for tensor in self.inputs if tensor.name == name), None)

    def output(self, name: str) -> ModelOutput | None:
        return next((tensor for tensor in self.outputs if tensor.name == name), None)

    def defined_outputs(self, inputs: Container[str]) -> tuple[str, ...]:
        """What is answered where no output is named: whatever these inputs define."""
        return tuple(
            tensor.name
            for tensor in self.outputs
            if not tensor.on_request and (tensor.source is None or tensor.source in inputs)
        )

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


class KeptLayer(Protocol):
    """A layer that is kept by a name."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> LayerParameters: ...


class KeptLayers(Protocol):
    """Those that are kept at the moment."""

    def get(self, name: str) -> KeptLayer:
        """Raises: NotFound."""
        ...

    def all(self) -> Sequence[KeptLayer]: ...


class Models:
    """Every model there is, by name: the operations, and the layers that are kept as long as they are."""

    def __init__(self, layers: KeptLayers | None = None) -> None:
        self._layers = layers

    def names(self) -> list[str]:
        """In the order in which models are listed."""
        layers = () if self._layers is None else self._layers.all()
        return sorted([*BUILT_IN, *(layer.name for layer in layers)])

    def has(self, name: str) -> bool:
        return name in BUILT_IN or self._kept(name) is not None

    def get(self, name: str, version: str = "") -> Model:
        """The model of this name; an empty version is the server's choice. A layer is what it is at this moment,
        whatever becomes of its name. Raises: NotFound."""
        model = BUILT_IN.get(name) or self._of_layer(name)
        if model is None:
            raise NotFound(f"there is no model {short_name(name)!r}; POST /v2/repository/index lists those there are")
        if version not in ("", VERSION):
            raise NotFound(f"model {name} has version {VERSION} alone, not {short_name(version)!r}")
        return model

    def _of_layer(self, name: str) -> Model | None:
        layer = self._kept(name)
        return None if layer is None else layer_model(name, layer.parameters)

    def _kept(self, name: str) -> KeptLayer | None:
        try:
            return None if self._layers is None else self._layers.get(name)
        except NotFound:
            return None


@dataclass(frozen=True, slots=True)
class _Axes:
    """Lengths that a layer's weights decide."""

    heads: int = ANY
    kv_heads: int = ANY
    head_dim: int = ANY
    head_dim_v: int = ANY
    merged: int = ANY
    width: int = ANY
    memory_width: int = ANY
    output_width: int = ANY


def _axes_of(stored: LayerParameters) -> _Axes:
    reads, gives = (0, 1) if stored.weight_layout == "in_out" else (1, 0)
    shapes = {name: tuple(stored.weights[name].shape) for name in WEIGHT_NAMES}
    heads, kv_heads = stored.num_heads, stored.num_kv_heads or stored.num_heads
    return _Axes(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=shapes["w_query"][gives] // heads,
        head_dim_v=shapes["w_value"][gives] // kv_heads,
        merged=shapes["w_output"][reads],
        width=shapes["w_query"][reads],
        memory_width=shapes["w_key"][reads],
        output_width=shapes["w_output"][gives],
    )


_ATTENTION_OUTPUTS = ("context", "weights", "scores", "logits", "logsumexp", "entropy")
_LAYER_OUTPUTS = tuple(name for name in LAYER_OUTPUTS if name != "top_weights")
"""All that need no selection, which has no form in this protocol."""
_LENGTHS = ("key_lengths", "query_lengths", "query_offset")
_OF_PAIRS = ("weights", "scores", "logits", "grad_weights", "grad_logits")
_WIDE = ("scores", "logits", "logsumexp", "entropy", "weight_totals", "grad_logsumexp", *PAIR_GRADIENTS)
"""Of the dtype of the arithmetic, which the half types are too narrow for."""


def _built_in() -> dict[str, Model]:
    models = {}
    for suffix, code in SUFFIXES.items():
        datatype = DATATYPES[code]
        for model in (
            _sdpa(f"sdpa{suffix}", datatype),
            _attention(f"attention{suffix}", datatype),
            _gradients(f"attention_gradients{suffix}", datatype),
            _layer(f"layer{suffix}", datatype),
        ):
            models[model.name] = model
    return dict(sorted(models.items()))


def _sdpa(name: str, datatype: Datatype) -> Model:
    inputs = _inputs(("query", "key", "value"), datatype, required=("query", "key", "value"))
    return Model(name, ATTENTION, datatype, inputs, _outputs(("context",), datatype))


def _attention(name: str, datatype: Datatype) -> Model:
    inputs = _inputs(TENSOR_NAMES, datatype, required=("query",))
    return Model(name, ATTENTION, datatype, inputs, _outputs(_ATTENTION_OUTPUTS, datatype))


def _gradients(name: str, datatype: Datatype) -> Model:
    inputs = _inputs(GRADIENTS.tensors, datatype, required=("query",))
    outputs = tuple(
        ModelOutput(
            name=output,
            datatype=_datatype_of(output, datatype),
            shape=_input_shape(output.removeprefix("grad_"), _Axes()),
            source=None if output in PAIR_GRADIENTS else output.removeprefix("grad_"),
            on_request=output in PAIR_GRADIENTS,
        )
        for output in GRADIENT_OUTPUTS
    )
    return Model(name, GRADIENTS, datatype, inputs, outputs)


def _layer(name: str, datatype: Datatype) -> Model:
    inputs = _inputs(LAYER.tensors, datatype, required=("input", *WEIGHT_NAMES), layer=_Axes())
    return Model(name, LAYER, datatype, inputs, _outputs(_LAYER_OUTPUTS, datatype, _Axes()))


def layer_model(name: str, stored: LayerParameters) -> Model:
    """A layer that is kept: ``layer`` with its weights and all that they decide."""
    datatype, axes = DATATYPE_OF[stored.weights["w_query"].dtype], _axes_of(stored)
    required = ("input",) if axes.width == axes.memory_width else ("input", "memory")
    inputs = _inputs(NAMED_LAYER.tensors, datatype, required=required, layer=axes)
    return Model(name, NAMED_LAYER, datatype, inputs, _outputs(_LAYER_OUTPUTS, datatype, axes), stored)


def _inputs(
    names: Iterable[str], datatype: Datatype, *, required: Container[str], layer: _Axes | None = None
) -> tuple[ModelTensor, ...]:
    axes = layer or _Axes()
    return tuple(
        ModelTensor(name, _datatype_of(name, datatype), _input_shape(name, axes), is_optional=name not in required)
        for name in names
    )


def _outputs(names: Iterable[str], datatype: Datatype, layer: _Axes | None = None) -> tuple[ModelOutput, ...]:
    return tuple(ModelOutput(name, _datatype_of(name, datatype), _output_shape(name, layer)) for name in names)


def _datatype_of(name: str, datatype: Datatype) -> Datatype:
    if name in MASK_TENSORS:
        return DATATYPES["BOOL"]
    if name in _LENGTHS:
        return DATATYPES["INT64"]
    return DATATYPES["FP32"] if name in _WIDE and datatype.is_half else datatype


def _input_shape(name: str, axes: _Axes) -> tuple[int, ...]:
    match name:
        case "input":
            return ANY, ANY, axes.width
        case "memory":
            return ANY, ANY, axes.memory_width
        case "grad_logsumexp":
            return (ANY,) * 3
        case "alibi_slopes" | "sinks":
            return (axes.heads,)
        case _ if name in WEIGHT_NAMES:
            return (ANY,) * 2
        case _ if name in _LENGTHS or name in PROJECTION_BIAS_NAMES:
            return (ANY,)
    return (ANY,) * 4


def _output_shape(name: str, layer: _Axes | None) -> tuple[int, ...]:
    axes = layer or _Axes()
    match name:
        case "output":
            return ANY, ANY, axes.output_width
        case "context" if layer is not None:
            return ANY, ANY, axes.merged
        case "query":
            return ANY, axes.heads, ANY, axes.head_dim
        case "key":
            return ANY, axes.kv_heads, ANY, axes.head_dim
        case "value":
            return ANY, axes.kv_heads, ANY, axes.head_dim_v
        case _ if name in _OF_PAIRS:
            return ANY, axes.heads, ANY, ANY
        case "logsumexp" | "entropy" | "weight_totals":
            return ANY, axes.heads, ANY
    return (ANY,) * 4


BUILT_IN: dict[str, Model] = _built_in()
