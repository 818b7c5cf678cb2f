"""Gradients of one attention, from the problem as its caller states it to the answer in the caller's form."""

from __future__ import annotations

import torch

from attn_core.errors import Checkpoint
from attn_core.prepared import Prepared
from attn_core.problem import AttentionResult, GradientsProblem


def run_gradients(
    problem: GradientsProblem, prepared: Prepared, *, device: torch.device, checkpoint: Checkpoint
) -> AttentionResult:
    """The asked gradients. Raises: InvalidProblem for an empty row where these are an error, Abandoned."""
    raise NotImplementedError
