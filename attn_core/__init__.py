"""Attention in pure torch: problems in, results out, no waiting and no I/O.

Holds the decision of what the core offers to the rest: the problem and its options, the check, the engine. What is
offered is imported when it is first asked for: a process that only reads text knows the core's errors without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_core.engine import Engine
    from attn_core.errors import Abandoned, AttentionError, Fault, InvalidProblem, TooLarge
    from attn_core.problem import (
        AttentionOptions,
        AttentionProblem,
        AttentionResult,
        TensorSpec,
        WeightedSumProblem,
    )
    from attn_core.validate import check_problem

__all__ = [
    "Abandoned",
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

_MODULES = ("errors", "problem", "validate", "engine")
"""Where the names live, those without torch first."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            home = importlib.import_module(f"attn_core.{module}")
            if name in vars(home):
                globals()[name] = vars(home)[name]
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
