"""Whether a layer, and its gradients, can be computed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from attn_core.errors import Fault
from attn_core.problem import LayerOptions, TensorSpec


def find_parameters_faults(
    specs: Mapping[str, TensorSpec],
    *,
    num_heads: int | None,
    num_kv_heads: int | None,
    weight_layout: str | None,
    broken: Container[str] = (),
) -> list[Fault]:
    """Every fault of the tensors of ``PARAMETER_NAMES`` among themselves: of a layer that is uploaded without input.

    What is None was not given, or could not be read where ``broken`` names it.
    """
    raise NotImplementedError


def find_layer_faults(
    specs: Mapping[str, TensorSpec], options: LayerOptions, *, broken: Container[str] = ()
) -> list[Fault]:
    """Every fault of a ``LayerProblem``, by the names of ``LAYER_TENSOR_NAMES``; ``broken`` as in ``find_faults``."""
    raise NotImplementedError


def find_layer_gradients_faults(
    specs: Mapping[str, TensorSpec],
    options: LayerOptions,
    outputs: Sequence[str] | None,
    *,
    broken: Container[str] = (),
) -> list[Fault]:
    """Every fault of a ``LayerGradientsProblem``; ``outputs`` are the asked gradients, None for all there are."""
    raise NotImplementedError


def layer_lengths(specs: Mapping[str, TensorSpec]) -> tuple[int | None, int | None]:
    """seq_len_q and seq_len_kv as far as the shapes of input and memory tell them."""
    raise NotImplementedError
