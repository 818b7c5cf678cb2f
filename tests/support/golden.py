"""The golden cases under the names of the contract, and the rule of when a result agrees with one.

A case is first tensors and options as a caller would send them, so a test of any door can send them; only
``attention_problem`` and ``weighted_sum_problem`` know the core.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from attn_core import AttentionOptions, AttentionProblem, WeightedSumProblem

GOLDEN = Path(__file__).parents[1] / "golden"

_INPUT_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "x": "input",
    "x_kv": "memory",
    "mask": "allow_mask",
    "dcontext": "grad_context",
    "dy": "grad_output",
}
_OUTPUT_NAMES = {"y": "output", "lse": "logsumexp"}
_PARTS = {"q": "query", "k": "key", "v": "value", "o": "output"}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|result - expected| <= atol + rtol * |expected|."""

    rtol: float
    atol: float


@dataclass(frozen=True, slots=True, eq=False)
class GoldenCase:
    """One request and its answer. ``op`` is attention, layer or weighted_sum; ``expected`` is float64."""

    name: str
    op: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    expected: dict[str, Tensor]
    tolerance: dict[str, Tolerance] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def gradients(self) -> tuple[str, ...]:
        """The expected outputs that are gradients."""
        return tuple(name for name in self.expected if name.startswith("grad_"))

    @property
    def forward_outputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.expected if not name.startswith("grad_"))


@cache
def golden_cases(op: str | None = None) -> tuple[GoldenCase, ...]:
    """All cases, or those of one ``op``, in the order of the file."""
    records = json.loads((GOLDEN / "cases.json").read_text())
    return tuple(_read(record) for record in records if op is None or record["op"] == op)


def attention_problem(case: GoldenCase, *, outputs: tuple[str, ...], path: str | None = None) -> AttentionProblem:
    """A case of ``op`` attention as the core takes it."""
    options = dict(case.options)
    window = options.pop("window", {})
    tensors = {name: tensor for name, tensor in case.tensors.items() if not name.startswith("grad_")}
    return AttentionProblem(
        **tensors,
        options=AttentionOptions(
            outputs=outputs,
            path=path,
            window_left=window.get("left"),
            window_right=window.get("right"),
            **options,
        ),
    )


def weighted_sum_problem(case: GoldenCase) -> WeightedSumProblem:
    return WeightedSumProblem(**case.tensors)


def disagreement(result: Tensor, expected: Tensor, tolerance: Tolerance) -> str | None:
    """Why a result is not the expected one, None when it is; the rule of ``golden/README.md``."""
    result = result.double().cpu()
    if result.shape != expected.shape:
        return f"shape {tuple(result.shape)}, expected {tuple(expected.shape)}"
    if not torch.equal(result.isnan(), expected.isnan()):
        return "NaN does not stand where it is expected"
    infinite = expected.isinf()
    if not torch.equal(result[infinite], expected[infinite]):
        return "infinities differ"
    finite = expected.isfinite()
    excess = (result - expected).abs() - (tolerance.atol + tolerance.rtol * expected.abs())
    if not bool((excess[finite] <= 0).all()):
        return f"off by {excess[finite].max().item()} more than allowed"
    return None


def _read(record: dict[str, Any]) -> GoldenCase:
    arrays = load_file(GOLDEN / f"{record['name']}.safetensors")
    given = {
        name: _generated(spec) if "generate" in spec else arrays[f"input.{name}"]
        for name, spec in record["inputs"].items()
    }
    tensors, options = _in_the_contracts_words(given, record["params"])
    return GoldenCase(
        name=record["name"],
        op=record["op"],
        tensors=tensors,
        options=options,
        expected={_output_name(name): arrays[f"expected.{name}"] for name in record["outputs"]},
        tolerance={_output_name(name): Tolerance(**bounds) for name, bounds in record["tolerance"].items()},
    )


def _in_the_contracts_words(
    given: dict[str, Tensor], params: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in given.items():
        if name == "key_padding_mask":
            tensors["block_mask"] = tensor[:, None, None, :]
        elif name in ("mask", "bias"):
            tensors[_input_name(name)] = tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
        else:
            tensors[_input_name(name)] = tensor
    options = {name: params[name] for name in params if name not in ("causal", "align", "query_offset", "window")}
    if "window" in params:
        left, right = params["window"]
        options["window"] = {"left": left, "right": right}
    align = params.get("align", "upper_left")
    if "query_offset" in params:
        tensors["query_offset"] = torch.tensor([params["query_offset"]])
        options["causal"] = params.get("causal", False)
    elif params.get("causal", False):
        options["causal"] = align
    elif "window" in params or "alibi_slopes" in given:
        seq_len_q, seq_len_kv = given["q"].shape[-2], given["k"].shape[-2]
        if align == "lower_right":
            tensors["query_offset"] = given.get("key_lengths", torch.tensor([seq_len_kv])) - seq_len_q
        elif seq_len_q != seq_len_kv:
            tensors["query_offset"] = torch.tensor([0])
    return tensors, options


def _input_name(name: str) -> str:
    if name[:2] in ("W_", "b_"):
        return f"{name[0].lower()}_{_PARTS[name[2:]]}"
    return _INPUT_NAMES.get(name, name)


def _output_name(name: str) -> str:
    if name.startswith("d"):
        inner = name[1:]
        return f"grad_{_input_name(inner)}"
    return _OUTPUT_NAMES.get(name, name)


def _generated(spec: dict[str, Any]) -> Tensor:
    """An array that is given by its formula, as ``golden/README.md`` has it."""
    rule = spec["generate"]
    rows, columns = spec["shape"]
    i, j = torch.arange(rows).unsqueeze(1), torch.arange(columns).unsqueeze(0)
    whole = (rule["a"] * i + rule["b"] * j + rule["c"] * i * j + rule["start"]) % rule["m"]
    array: Tensor = (whole.double() - (rule["m"] - 1) / 2) / rule["divide"]
    return array.to(getattr(torch, spec["dtype"]))
