"""Attention in pure torch: problems in, results out, no waiting and no I/O.

Holds the decision of what the core offers to the rest: the problem and its options, the check, the engine.
"""

from attn_core.engine import Engine
from attn_core.errors import AttentionError, Fault, InvalidProblem, TooLarge
from attn_core.problem import (
    AttentionOptions,
    AttentionProblem,
    AttentionResult,
    TensorSpec,
    WeightedSumProblem,
)
from attn_core.validate import check_problem

__all__ = [
    "AttentionError",
    "AttentionOptions",
    "AttentionProblem",
    "AttentionResult",
    "Engine",
    "Fault",
    "InvalidProblem",
    "TensorSpec",
    "TooLarge",
    "WeightedSumProblem",
    "check_problem",
]
