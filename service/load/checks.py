"""Answers of a load test against torch: the formula of the contract written out in float64, on this machine.

It shares no code with the service. An output may err twice as much as the same formula in the dtype of the request
does, over the largest number of its row, or a few units in the last place; and all answers to one request must be equal
bit for bit, in whatever batch, at whatever load and in whatever form they came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service.credentials import CommandError
from service.load.payloads import Arrays, read_outputs
from service.load.problems import Problem
from service.load.results import Checked
from service.load.worker import Sample

WITHOUT_NUMBERS = frozenset(
    {"outputs", "empty_rows", "path", "verify", "encoding", "dropout_p", "timeout_ms", "select", "top_k"}
)
UNDERSTOOD = WITHOUT_NUMBERS | {"causal", "scale", "softcap", "window", "query_offset"}
MAX_PAIRS = 2**24
"""Of longer problems so many pairs of query and key are checked, in whole rows spread evenly."""
FEWEST_UNITS = 4
"""In the last place: what is always allowed, since on a small problem the plain formula's own error is luck."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raises: CommandError for an option whose effect the check does not know."""
    unknown = sorted(set(options) - UNDERSTOOD)
    if unknown:
        raise CommandError(
            f"--option {unknown[0]}: answers are checked, and this check knows {', '.join(sorted(UNDERSTOOD))}; "
            f"--check 0 sends it all the same"
        )


@dataclass
class Checker:
    """Holds samples of one load test against the formula; what a problem's answer should be is computed once."""

    problems: Sequence[Problem]
    options: Mapping[str, Any]
    dtype: str
    _expected: dict[int, _Expected] = field(default_factory=dict)
    _first: dict[int, Arrays] = field(default_factory=dict)

    def check(self, form: str, samples: Sequence[Sample]) -> Checked:
        """Several steps may be checked one after the other: bits are compared with the first answer of all."""
        wrong: list[str] = []
        nearest = ("", 0.0, 0.0)
        same_bits = True
        for sample in samples:
            shape = self.problems[sample.number].shape.text
            try:
                outputs = read_outputs(form, sample.content, dtype=self.dtype)
                found = list(self._expected_of(sample.number).errors(outputs))
            except ValueError as reason:
                wrong.append(f"{shape}: the answer cannot be read: {reason}")
                continue
            first = self._first.setdefault(sample.number, outputs)
            if differing := [name for name in outputs if not _equal(outputs[name], first.get(name))]:
                same_bits = False
                wrong.append(f"{shape}: {', '.join(differing)} differ from an earlier answer to the same request")
            for name, error, allowed in found:
                if not error <= allowed:
                    wrong.append(f"{shape}: {name} is off by {error:.2e} of its row, allowed is {allowed:.2e}")
                if not nearest[0] or error / allowed > nearest[1] / nearest[2]:
                    nearest = (name, error, allowed)
        output, error, allowed = nearest
        return Checked(
            answers=len(samples),
            wrong=tuple(wrong),
            output=output,
            error=error,
            allowed=allowed,
            same_bits=same_bits,
        )

    def _expected_of(self, number: int) -> _Expected:
        if number not in self._expected:
            self._expected[number] = _Expected(self.problems[number], self.options, self.dtype)
        return self._expected[number]


class _Expected:
    """What the answer to one problem should be, in some of its rows: in float64, and how far its own dtype errs."""

    def __init__(self, problem: Problem, options: Mapping[str, Any], dtype: str) -> None:
        tensors = {name: torch.from_numpy(array.astype(np.float64)) for name, array in problem.tensors.items()}
        query, key = tensors["query"], tensors["key"]
        seq_len_q, seq_len_kv = query.shape[2], key.shape[2]
        num_rows = max(1, min(seq_len_q, MAX_PAIRS // (query.shape[0] * query.shape[1] * seq_len_kv)))
        self._rows = torch.linspace(0, seq_len_q - 1, num_rows).round().long()
        tensors["query"] = query[:, :, self._rows]
        self._has_select = "select" in options
        allowed = _allowed(options, self._rows, seq_len_q, seq_len_kv)
        self._exact = _formula(tensors, allowed, options)
        unit = torch.finfo(getattr(torch, dtype)).eps
        # Nothing is wider than float64: it errs about as float32 does, by so much less as its unit is smaller.
        narrow = torch.float32 if dtype == "float64" else getattr(torch, dtype)
        plain = _formula({name: tensor.to(narrow) for name, tensor in tensors.items()}, allowed, options)
        errors = {name: _error(plain[name].double(), exact, name) for name, exact in self._exact.items()}
        factor = 2.0 if dtype != "float64" else 4.0 * unit / torch.finfo(narrow).eps
        self._allowed = {name: max(factor * error, FEWEST_UNITS * unit) for name, error in errors.items()}

    def errors(self, outputs: Arrays) -> list[tuple[str, float, float]]:
        """Of each output that is known here: its name, its largest error over that of its row, and what is allowed."""
        found = []
        for name, array in outputs.items():
            if name not in self._exact or (self._has_select and name not in ("context", "logsumexp")):
                continue
            # float64 holds every number of every dtype, and bfloat16 is none of torch's numpy.
            given = torch.from_numpy(array.astype(np.float64))[:, :, self._rows]
            found.append((name, _error(given, self._exact[name], name), self._allowed[name]))
        return found


def _formula(tensors: Mapping[str, Tensor], allowed: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The contract's formula in the dtype of its tensors, written out."""
    group_size = tensors["query"].shape[1] // tensors["key"].shape[1]
    query = tensors["query"]
    key, value = (tensors[name].repeat_interleave(group_size, dim=1) for name in ("key", "value"))
    scores = query @ key.transpose(-1, -2)
    logits = scores * options.get("scale", query.shape[-1] ** -0.5)
    if (softcap := options.get("softcap")) is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~allowed, -torch.inf)
    is_empty = ~allowed.any(dim=-1, keepdim=True)
    weights = torch.softmax(logits, dim=-1).masked_fill(is_empty, 0)
    return {
        "scores": scores,
        "logits": logits,
        "weights": weights,
        "context": weights @ value,
        "logsumexp": torch.logsumexp(logits, dim=-1),
        "entropy": -torch.special.xlogy(weights, weights).sum(dim=-1),
    }


def _allowed(options: Mapping[str, Any], rows: Tensor, seq_len_q: int, seq_len_kv: int) -> Tensor:
    """Which pairs causal and window leave, [rows, seq_len_kv]."""
    causal, window = options.get("causal", False), options.get("window") or {}
    offset = options.get("query_offset") or 0
    if causal == "lower_right":
        offset = seq_len_kv - seq_len_q
    place, key = (rows + offset)[:, None], torch.arange(seq_len_kv)
    allowed = torch.ones(len(rows), seq_len_kv, dtype=torch.bool)
    if causal:
        allowed &= key <= place
    if window.get("left") is not None:
        allowed &= key >= place - window["left"]
    if window.get("right") is not None:
        allowed &= key <= place + window["right"]
    return allowed


def _error(found: Tensor, exact: Tensor, name: str) -> float:
    """The largest distance over the largest number of the row; of one number a row, over that or 1. Equal infinities
    and NaN agree, others are infinitely far."""
    if found.shape != exact.shape:
        return float("inf")
    is_finite = exact.isfinite()
    agrees = (found == exact) | (found.isnan() & exact.isnan())
    if not bool((is_finite | agrees).all()) or not bool(found[is_finite].isfinite().all()):
        return float("inf")
    distance = torch.where(is_finite, (found - exact).abs(), 0.0)
    size = torch.where(is_finite, exact.abs(), 0.0)
    if name in ("logsumexp", "entropy"):
        return float((distance / size.clamp(min=1.0)).max())
    largest = size.amax(dim=-1, keepdim=True)
    return float((distance / torch.where(largest == 0, 1.0, largest)).max())


def _equal(one: Any, other: Any) -> bool:
    return other is not None and one.shape == other.shape and one.tobytes() == other.tobytes()
