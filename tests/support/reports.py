"""The faults of other systems, read into requests of ours: field habits to the contract's names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.support.golden import GOLDEN

Report = dict[str, Any]
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
_ANSWER_NAMES = {
    "out": "context",
    "weights": "weights",
    "lse": "logsumexp",
    "dq": "grad_query",
    "dk": "grad_key",
    "dv": "grad_value",
}


@cache
def reports() -> dict[str, Report]:
    cases: list[Report] = json.loads((GOLDEN / "reports.json").read_text())["cases"]
    return {case["id"]: case for case in cases}


def request_of(given: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A report's input as a JSON body of ours; ``changes`` are members in our names, None takes one out."""
    members: dict[str, Any] = {}
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("scale", "scale"), ("softcap", "softcap")):
        if theirs in given:
            members[ours] = given[theirs]
    for theirs, ours in (
        ("sinks", "sinks"),
        ("kv_lengths", "key_lengths"),
        ("grad_out", "grad_context"),
        ("grad_lse", "grad_logsumexp"),
    ):
        if theirs in given:
            members[ours] = given[theirs]
    if given.get("mask") is not None:
        members["bias" if "float" in given.get("mask_kind", "bool") else "allow_mask"] = given["mask"]
    if "mask_dtype" in given:
        members["bias"] = members.pop("allow_mask", members.get("bias"))
    if given.get("is_causal") is True:
        members["causal"] = given.get("alignment", True)
    if isinstance(given.get("window_left"), int):
        members["window"] = {"left": given["window_left"]}
    dtype = _DTYPES.get(str(given.get("dtype", "fp32")).split()[0].rstrip(","), "float32")
    if dtype != "float32":
        members["dtype"] = dtype
    members |= changes
    return {name: value for name, value in members.items() if value is not None}


def numbers(node: Any) -> Tensor:
    """Nested lists with NaN and infinities as strings, as float64."""

    def read(part: Any) -> Any:
        return [read(child) for child in part] if isinstance(part, list) else float(part)

    return torch.tensor(read(node), dtype=torch.float64)


def expectations(right: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The numbers that a report calls right, by our output names."""
    for theirs, ours in _ANSWER_NAMES.items():
        if theirs in right:
            yield ours, numbers(right[theirs])


def assert_right(answer: dict[str, Any], right: dict[str, Any]) -> None:
    """Every number that the report gives, within its tolerance, NaN and infinities where they should be."""
    tolerance = float(right.get("tolerance", 0.0))
    relative = float(right.get("relative_tolerance", 0.0))
    checked = 0
    for name, expected in expectations(right):
        if name in answer:
            torch.testing.assert_close(
                numbers(answer[name]), expected, atol=tolerance, rtol=relative, equal_nan=True, msg=lambda text: text
            )
            checked += 1
    assert checked, f"nothing of {sorted(right)} was in the answer"
