"""How far an answer is from the same in float64, by the plain formula."""

from __future__ import annotations

from attn_core.errors import Checkpoint
from attn_core.problem import AttentionResult, Problem, Verification


def verify(problem: Problem, result: AttentionResult, checkpoint: Checkpoint) -> Verification:
    """Compute the outputs of an answer in float64, block by block, and compare. Raises: Abandoned."""
    raise NotImplementedError
