"""What each kernel supports: the part of the table that outputs and options alone decide."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core.problem import OUTPUTS

SUPPORTED_OUTPUTS: dict[str, frozenset[str]] = {
    "fused": frozenset({"context", "logsumexp"}),
    "manual": frozenset(OUTPUTS),
    "blocked": frozenset(OUTPUTS) - {"scores", "logits"},
}
PATHS: tuple[str, ...] = tuple(SUPPORTED_OUTPUTS)


def why_not_by_options(
    path: str, outputs: Sequence[str], *, softcap: bool, sinks: bool, alibi_slopes: bool, selects: bool
) -> str | None:
    """Why a kernel cannot serve such a problem whatever its shape and device, in a few words; None if it may.

    ``selects``: whether rows or heads are selected.
    """
    missing = [name for name in outputs if name not in SUPPORTED_OUTPUTS[path]]
    if missing:
        return f"{missing[0]} asked for"
    if path == "blocked" and "weights" in outputs and not selects:
        return "whole weights asked for"
    if path == "fused":
        given = {"softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes}
        return next((f"{name} given" for name, is_given in given.items() if is_given), None)
    return None


def path_expectation(path: str, reason: str) -> str:
    """What a refusal of an asked path names instead."""
    others = [other for other in PATHS if other != path]
    return f"{' or '.join(others)}, or nothing, since {reason}"
