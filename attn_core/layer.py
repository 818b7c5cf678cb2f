"""A layer: attention between learned projections, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attn_core.errors import Checkpoint
from attn_core.prepared import Prepared
from attn_core.problem import (
    AttentionProblem,
    AttentionResult,
    GradientsProblem,
    LayerGradientsProblem,
    LayerProblem,
)

RunAttention = Callable[[AttentionProblem], AttentionResult]
RunGradients = Callable[[GradientsProblem], AttentionResult]


def run_layer(
    problem: LayerProblem,
    prepared: Prepared,
    *,
    device: torch.device,
    attend: RunAttention,
    checkpoint: Checkpoint,
) -> AttentionResult:
    """The asked outputs of a layer; ``attend`` runs the attention inside."""
    raise NotImplementedError


def run_layer_gradients(
    problem: LayerGradientsProblem,
    prepared: Prepared,
    *,
    device: torch.device,
    attend: RunAttention,
    differentiate: RunGradients,
    checkpoint: Checkpoint,
) -> AttentionResult:
    """The asked gradients of a layer; ``differentiate`` runs the backward pass of the attention inside."""
    raise NotImplementedError
