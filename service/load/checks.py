"""Answers of a load test against torch: the formula of the contract written out in float64, on this machine.

It shares no code with the service. What was asked must be there, in its dtype, and nothing else. An output may err
twice as much as the same formula in its own dtype does, over the largest number of its row, or a few units in the last
place. All answers to one request must be equal bit for bit, in whatever batch, at whatever load, in whatever form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.credentials import CommandError
from service.load.payloads import Arrays, read_outputs, stored_dtype
from service.load.problems import Problem
from service.load.results import Checked
from service.load.worker import Sample

WITHOUT_NUMBERS = frozenset(
    {"outputs", "empty_rows", "path", "verify", "encoding", "dropout_p", "timeout_ms", "select"}
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

    def check(self, form: str, samples: Sequence[Sample], *, is_over: Callable[[], bool] = lambda: False) -> Checked:
        """Several steps may be checked one after the other: bits are compared with the first answer of all.

        Where ``is_over`` comes true, the rest is left unchecked.
        """
        wrong: list[str] = []
        closest = ("", 0.0, 0.0)
        same_bits, num_checked = True, 0
        for sample in samples:
            if is_over():
                break
            num_checked += 1
            faults, errors, is_same = self._hold(form, sample)
            same_bits = same_bits and is_same
            wrong += [f"{self.problems[sample.number].shape.text}: {fault}" for fault in faults]
            for name, error, allowed in errors:
                if math.isfinite(error) and (not closest[0] or error / allowed > closest[1] / closest[2]):
                    closest = (name, error, allowed)
        output, error, allowed = closest
        return Checked(
            answers=num_checked,
            wrong=tuple(wrong),
            output=output,
            error=error,
            allowed=allowed,
            same_bits=same_bits,
            only_compared=self._only_compared(),
        )

    def _hold(self, form: str, sample: Sample) -> tuple[list[str], list[tuple[str, float, float]], bool]:
        """What is wrong with one answer; its outputs' errors and what is allowed; whether its bits are the first's."""
        try:
            outputs = read_outputs(form, sample.content, dtype=self.dtype)
        except ValueError as reason:
            return [f"the answer cannot be read: {reason}"], [], True
        faults, errors = self._expected_of(sample.number).held_against(outputs)
        first = self._first.setdefault(sample.number, outputs)
        differing = [name for name in outputs if not _equal(outputs[name], first.get(name))]
        if differing:
            faults.append(f"{', '.join(differing)} differ from an earlier answer to the same request")
        return faults, errors, not differing

    def _only_compared(self) -> tuple[str, ...]:
        return tuple(sorted({name for expected in self._expected.values() for name in expected.unknown}))

    def _expected_of(self, number: int) -> _Expected:
        if number not in self._expected:
            self._expected[number] = _Expected(self.problems[number], self.options, self.dtype)
        return self._expected[number]


class _Expected:
    """What the answer to one problem should be, in some of its rows: in float64, and how far its own dtype errs."""

    def __init__(self, problem: Problem, options: Mapping[str, Any], dtype: str) -> None:
        tensors = {name: torch.from_numpy(array.astype(np.float64)) for name, array in problem.tensors.items()}
        query, key = tensors["query"], tensors["key"]
        batch, num_heads, seq_len_q, _ = query.shape
        seq_len_kv = key.shape[2]
        num_rows = max(1, min(seq_len_q, MAX_PAIRS // (batch * num_heads * seq_len_kv)))
        self._rows = torch.linspace(0, seq_len_q - 1, num_rows).round().long()
        self._num_rows = seq_len_q
        self._dtype = dtype
        asked = list(options.get("outputs") or ["context"])
        self._asked = [each for name in asked for each in ((name, "top_keys") if name == "top_weights" else (name,))]
        tensors["query"] = query[:, :, self._rows]
        allowed = _allowed(options, self._rows, seq_len_q, seq_len_kv)
        self._exact = _formula(tensors, allowed, options)
        self._sizes = _sizes(tensors, self._exact, options, is_wide=dtype in ("float32", "float64"))
        self._allowed = self._allowances(tensors, allowed, options)
        if "top_weights" in self._asked:
            width = min((options.get("select") or {}).get("top_k", 0), seq_len_kv)
            self._exact["top_weights"] = self._exact["weights"].topk(width).values
            self._allowed["top_weights"], self._sizes["top_weights"] = self._allowed["weights"], self._sizes["weights"]
        has_select = bool({"heads", "rows"} & set(options.get("select") or ()))
        known = {"context", "logsumexp"} if has_select else {*self._exact, "top_keys"}
        if num_rows < seq_len_q:
            known -= {"weight_totals"}
        self.unknown = [name for name in self._asked if name not in known]
        """Asked, and not known here: such outputs are only compared with each other."""

    def _allowances(
        self, tensors: Mapping[str, Tensor], allowed: Tensor, options: Mapping[str, Any]
    ) -> dict[str, float]:
        found = {}
        for name, exact in self._exact.items():
            dtype = stored_dtype(name, self._dtype)
            unit = torch.finfo(getattr(torch, dtype)).eps
            # Nothing is wider than float64: it errs about as float32 does, by so much less as its unit is smaller.
            narrow = torch.float32 if dtype == "float64" else getattr(torch, dtype)
            plain = _formula({key: tensor.to(narrow) for key, tensor in tensors.items()}, allowed, options)
            factor = 2.0 if dtype != "float64" else 4.0 * unit / torch.finfo(narrow).eps
            fewest = FEWEST_UNITS if dtype in ("float32", "float64") else 1
            error = _error(plain[name].double(), exact, self._sizes[name])
            found[name] = max(factor * error, fewest * unit)
        return found

    def held_against(self, outputs: Arrays) -> tuple[list[str], list[tuple[str, float, float]]]:
        """What is wrong; and of each output that is known here its name, largest error and what is allowed."""
        faults, errors = [], []
        if missing := [name for name in self._asked if name not in outputs]:
            faults.append(f"{', '.join(missing)} was asked and is not there")
        if beyond := [name for name in outputs if name not in self._asked]:
            faults.append(f"{', '.join(beyond)} was not asked")
        for name in self._asked:
            if name not in outputs or name in self.unknown:
                continue
            array, expected = outputs[name], "int64" if name == "top_keys" else stored_dtype(name, self._dtype)
            if array.dtype.name != expected:
                faults.append(f"{name} is {array.dtype.name}, not {expected}")
                continue
            error, allowed = self._error_of(name, array)
            errors.append((name, error, allowed))
            if not error <= allowed:
                faults.append(f"{name} is off by {error:.2e} of its row, allowed is {allowed:.2e}")
        return faults, errors

    def _error_of(self, name: str, array: NDArray[Any]) -> tuple[float, float]:
        exact = self._exact["top_weights" if name == "top_keys" else name]
        whole = list(exact.shape)
        if name != "weight_totals":
            whole[2] = self._num_rows
        allowed = self._allowed["top_weights" if name == "top_keys" else name]
        if list(array.shape) != whole:
            return math.inf, allowed
        if name == "top_keys":
            # Ties may stand in any order of torch's: it is the weights of the named keys that must be the largest.
            keys = torch.from_numpy(array.copy())[:, :, self._rows]
            weights = self._exact["weights"]
            is_key = (keys >= 0) & (keys < weights.shape[-1])
            if any(len(set(row[row >= 0].tolist())) < int((row >= 0).sum()) for row in keys.flatten(0, 2)):
                return math.inf, allowed
            named = torch.where(is_key, weights.gather(-1, keys.clamp(0, weights.shape[-1] - 1)), 0.0)
            return _error(named, exact, self._sizes["weights"]), allowed
        # float64 holds every number of every dtype, and bfloat16 is none of torch's numpy.
        given = torch.from_numpy(array.astype(np.float64))
        return _error(given if name == "weight_totals" else given[:, :, self._rows], exact, self._sizes[name]), allowed


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
        "weight_totals": weights.sum(dim=2),
    }


def _allowed(options: Mapping[str, Any], rows: Tensor, seq_len_q: int, seq_len_kv: int) -> Tensor:
    """Which pairs causal and window leave, [batch or 1, 1, rows, seq_len_kv]."""
    causal, window = options.get("causal", False), options.get("window") or {}
    given = options.get("query_offset") or 0
    offset = torch.tensor([given] if isinstance(given, int) else given)
    if causal == "lower_right":
        offset = torch.tensor([seq_len_kv - seq_len_q])
    place = (offset[:, None] + rows)[:, None, :, None]
    key = torch.arange(seq_len_kv)
    allowed = torch.ones(*place.shape[:3], seq_len_kv, dtype=torch.bool)
    if causal:
        allowed &= key <= place
    if window.get("left") is not None:
        allowed &= key >= place - window["left"]
    if window.get("right") is not None:
        allowed &= key <= place + window["right"]
    return allowed


def _sizes(
    tensors: Mapping[str, Tensor], exact: Mapping[str, Tensor], options: Mapping[str, Any], *, is_wide: bool
) -> dict[str, Tensor]:
    """Over what an error counts: the largest sum of absolute products in the row that it came of.

    Terms that cancel leave their roundings behind, and what errs in a logit errs as much in a weight, times its size.
    ``is_wide``: the logits are no better than the results; of half types they are, and rounding is all.
    """
    group_size = tensors["query"].shape[1] // tensors["key"].shape[1]
    key, value = (tensors[name].abs().repeat_interleave(group_size, dim=1) for name in ("key", "value"))
    scores = (tensors["query"].abs() @ key.transpose(-1, -2)).amax(dim=-1, keepdim=True)
    logits = scores * abs(options.get("scale", tensors["query"].shape[-1] ** -0.5))
    spread = logits.clamp(min=1.0)
    carried = spread if is_wide else torch.ones_like(spread)
    context = (exact["weights"] @ value).amax(dim=-1, keepdim=True)
    return {
        "scores": scores,
        "logits": spread,
        "weights": exact["weights"].amax(dim=-1, keepdim=True) * carried,
        "context": context * carried,
        "logsumexp": torch.maximum(spread.squeeze(-1), _finite(exact["logsumexp"]).abs()),
        "entropy": spread.squeeze(-1) * exact["entropy"].clamp(min=1.0),
        "weight_totals": spread.amax(dim=2) * exact["weight_totals"].clamp(min=1.0),
    }


def _finite(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isfinite(), tensor, 0.0)


def _error(found: Tensor, exact: Tensor, size: Tensor) -> float:
    """The largest distance over its size. Equal infinities and NaN agree, others are infinitely far."""
    if found.shape != exact.shape:
        return math.inf
    is_finite = exact.isfinite()
    agrees = (found == exact) | (found.isnan() & exact.isnan())
    if not bool((is_finite | agrees).all()) or not bool(found[is_finite].isfinite().all()):
        return math.inf
    distance = torch.where(is_finite, (found - exact).abs(), 0.0)
    size = torch.where((size > 0) & size.isfinite(), size, 1.0)
    return float((distance / size).amax()) if distance.numel() else 0.0


def _equal(one: NDArray[Any], other: NDArray[Any] | None) -> bool:
    """Bit for bit, but that any NaN is as good as another: no text says which of them it is."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.tobytes() == other.tobytes() or one.dtype.kind not in "fV":
        return one.tobytes() == other.tobytes()
    is_nan = np.isnan(one.astype(np.float64))
    return (
        np.array_equal(is_nan, np.isnan(other.astype(np.float64)))
        and one[~is_nan].tobytes() == other[~is_nan].tobytes()
    )
