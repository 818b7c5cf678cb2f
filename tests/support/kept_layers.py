"""Layers to be kept by a name: every number follows from a seed; and a directory that writes when the test lets it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from attn_core.errors import Checkpoint, never_abandoned
from attn_core.problem import PARAMETER_NAMES, LayerParameters, WeightLayout
from service.layer_directory import LayerDirectory
from tests.support.factory import make_tensor

WAIT_S = 30.0


def make_parameters(
    *,
    seed: int = 0,
    width: int = 6,
    memory_width: int | None = None,
    num_heads: int = 2,
    num_kv_heads: int | None = None,
    head_dim: int = 3,
    output_width: int = 4,
    weight_layout: WeightLayout = "in_out",
    biases: bool = True,
    dtype: torch.dtype = torch.float32,
) -> LayerParameters:
    kv_columns = (num_kv_heads or num_heads) * head_dim
    memory_width = width if memory_width is None else memory_width
    shapes = {
        "query": (width, num_heads * head_dim),
        "key": (memory_width, kv_columns),
        "value": (memory_width, kv_columns),
        "output": (num_heads * head_dim, output_width),
    }
    columns = {name: shape[1] for name, shape in shapes.items()}
    if weight_layout == "out_in":
        shapes = {name: (columns, rows) for name, (rows, columns) in shapes.items()}
    made: dict[str, tuple[int, ...]] = {f"w_{name}": shape for name, shape in shapes.items()}
    if biases:
        made |= {f"b_{name}": (length,) for name, length in columns.items()}
    weights = {
        name: make_tensor(*made[name], seed=100 * seed + number, dtype=dtype)
        for number, name in enumerate(PARAMETER_NAMES)
        if name in made
    }
    return LayerParameters(weights, weight_layout, num_heads, num_kv_heads)


def options_of(parameters: LayerParameters) -> dict[str, Any]:
    """How the weights are to be read, as a caller says it."""
    options: dict[str, Any] = {"weight_layout": parameters.weight_layout, "num_heads": parameters.num_heads}
    if parameters.num_kv_heads is not None:
        options["num_kv_heads"] = parameters.num_kv_heads
    return options


def num_bytes(parameters: LayerParameters) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in parameters.weights.values())


class GatedDirectory(LayerDirectory):
    """Writes once the test lets it; ``entered`` says that it would like to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.entered = threading.Event()
        self.gate = threading.Event()

    def write(
        self,
        name: str,
        parameters: LayerParameters,
        *,
        previous: LayerParameters | None = None,
        check: Checkpoint = never_abandoned,
    ) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        super().write(name, parameters, previous=previous, check=check)
