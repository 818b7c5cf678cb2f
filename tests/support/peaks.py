"""What a problem really takes at most, resident memory and all, each in a process of its own.

``python -m tests.support.peaks`` reads lines of JSON, one a case, and answers each with a line. It has imported torch
and computes nothing itself: every case runs in a fork of it, so that what torch and BLAS keep for later of one case
is none of the next one's.

A case is a problem without its numbers: ``kind`` as in ``_problem_of``, ``tensors`` (dtype and shape by name),
``numbers`` (lengths and offsets by name), ``options``, ``outputs``, and ``hazards``, of ``HAZARDS``, with which it is
measured too.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_core import AttentionOptions, AttentionProblem, AttentionResult, Engine
from attn_core.problem import (
    GradientsProblem,
    LayerGradientsProblem,
    LayerOptions,
    LayerProblem,
    Problem,
    WeightedSumProblem,
)
from tests.support.memory import peak_bytes_of

HAZARDS = {
    "nan": "a few NaN in each tensor of tokens",
    "infinite_keys": "infinity in half of the keys, or of what they are made of",
    "huge": "numbers of 1e30, one in a hundred, in each tensor of tokens",
    "everywhere": "infinity in every token",
    "forbidden": "NaN in the last tenth of the keys, which masks and lengths forbid",
    "bias": "a few NaN in the bias",
    "masking_bias": "-infinity in a third of the bias, and in a row of it",
    "slopes": "slopes of ALiBi that shift logits beyond all numbers",
}
_NEEDS = {"bias": "bias", "masking_bias": "bias", "slopes": "alibi_slopes"}
_OF_TOKENS = ("query", "key", "value", "grad_context", "grad_logsumexp", "weights", "input", "memory", "grad_output")
_MASKS = {"allow_mask": False, "block_mask": True}
"""And what forbids in them."""
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

Case = dict[str, Any]


class NotMeasured(Exception):
    """A case ended with something else than an answer or a refusal."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes, inputs counted in. ``estimate`` is for plain numbers and ``with_spare`` for any; ``resident`` is what the
    process took and ``allocated`` what torch's allocator gave for plain numbers, ``hazardous`` what it gave with each
    hazard. ``refusal`` says why there is no answer."""

    estimate: int
    with_spare: int
    allocated: int
    resident: int
    path: str
    hazardous: dict[str, int]
    refusal: str | None

    @property
    def ratio(self) -> float:
        return self.allocated / self.estimate

    @property
    def hazardous_ratio(self) -> float:
        """The highest; 0 where no hazard was tried."""
        return max(self.hazardous.values(), default=0) / self.with_spare

    @property
    def resident_ratio(self) -> float:
        return self.resident / self.estimate


def measure_peaks(cases: Iterable[Case]) -> Iterator[Peak]:
    """The peak of each case, in their order. Raises: NotMeasured."""
    command, pipe = [sys.executable, "-m", "tests.support.peaks"], subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        for case in cases:
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                log.seek(0)
                raise NotMeasured(log.read())
            found = json.loads(answer)
            if "failed" in found:
                raise NotMeasured(f"{found['failed']}\n{json.dumps(case)}")
            yield Peak(**found)
        process.stdin.close()


def possible_hazards(tensors: Container[str]) -> list[str]:
    """Those that a problem with these tensors can have."""
    return [name for name in HAZARDS if name not in _NEEDS or _NEEDS[name] in tensors]


def without_numbers(case: Case) -> Problem:
    """The problem on torch's device ``meta``, but for its lengths and offsets."""
    return _problem_of(case, lambda name, dtype, shape: torch.empty(shape, dtype=dtype, device="meta"))


def _with_numbers(case: Case) -> Problem:
    generator = torch.Generator().manual_seed(1)

    def make(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if name in _MASKS:
            share = 0.7 if name == "allow_mask" else 0.2
            return torch.rand(shape, generator=generator) < share
        if name == "alibi_slopes":
            return (2.0 ** -torch.arange(1.0, shape[0] + 1)).to(dtype)
        tensor = torch.randn(shape, generator=generator)
        if name == "weights":
            tensor = tensor.softmax(dim=-1)
        elif name.startswith("w_"):
            tensor /= shape[0] ** 0.5
        return tensor.to(dtype)

    return _problem_of(case, make)


def _problem_of(case: Case, make: Callable[[str, torch.dtype, tuple[int, ...]], Tensor]) -> Problem:
    tensors: dict[str, Any] = {
        name: make(name, getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in case["tensors"].items()
    }
    tensors |= {name: torch.tensor(numbers) for name, numbers in case.get("numbers", {}).items()}
    options: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in case.get("options", {}).items()
    }
    outputs = tuple(case.get("outputs") or ()) or None
    grads = {name: tensors.pop(name) for name in tuple(tensors) if name.startswith("grad_")}
    match case["kind"]:
        case "attention":
            return AttentionProblem(**tensors, options=AttentionOptions(outputs=outputs or ("context",), **options))
        case "weighted_sum":
            return WeightedSumProblem(**tensors)
        case "gradients":
            attention = AttentionProblem(**tensors, options=AttentionOptions(**options))
            return GradientsProblem(attention, **grads, outputs=outputs)
        case "layer":
            return _layer_of(tensors, options, outputs or ("output",))
        case "layer_gradients":
            return LayerGradientsProblem(_layer_of(tensors, options, ("output",)), **grads, outputs=outputs)
    raise AssertionError(f"nothing is called {case['kind']}")


def _layer_of(tensors: dict[str, Any], options: dict[str, Any], outputs: tuple[str, ...]) -> LayerProblem:
    weight_layout = options.pop("weight_layout", "in_out")
    attention = AttentionOptions(layout="btd", **options)
    return LayerProblem(
        **tensors, options=LayerOptions(attention=attention, weight_layout=weight_layout, outputs=outputs)
    )


def _measure(case: Case) -> dict[str, Any]:
    torch.set_num_threads(1)
    problem = _with_numbers(case)
    engine = Engine()
    engine.warm_up()
    prepared = engine.prepare(problem)
    inputs = sum(tensor.nbytes for tensor in problem.tensors().values())
    _CLEAR.write_text("5")
    before = _resident("VmRSS")
    kept = engine.run([prepared])
    resident = _resident("VmHWM") - before
    refusal = None if isinstance(kept[0], AttentionResult) else str(kept[0])
    del kept
    allocated = peak_bytes_of(lambda: engine.run([prepared]))
    hazardous = {}
    for hazard in case.get("hazards", ()):
        plain = {name: tensor.clone() for name, tensor in problem.tensors().items()}
        _write(hazard, problem.tensors(), case)
        hazardous[hazard] = inputs + peak_bytes_of(lambda: engine.run([prepared.with_spare]))
        for name, tensor in problem.tensors().items():
            tensor.copy_(plain[name])
    return {
        "estimate": prepared.cost.peak_bytes,
        "with_spare": prepared.cost.with_spare.peak_bytes,
        "allocated": inputs + allocated,
        "resident": inputs + resident,
        "path": prepared.path,
        "hazardous": hazardous,
        "refusal": refusal,
    }


def _write(hazard: str, tensors: dict[str, Tensor], case: Case) -> None:
    """Write a hazard into the numbers of a problem."""
    generator = torch.Generator().manual_seed(2)
    numbers = {name: tensors[name].view(-1) for name in (*_OF_TOKENS, *_NEEDS.values()) if name in tensors}

    def few(flat: Tensor) -> Tensor:
        return torch.randint(flat.numel(), (3,), generator=generator)

    match hazard:
        case "nan":
            for name in _OF_TOKENS:
                if name in numbers:
                    numbers[name][few(numbers[name])] = torch.nan
        case "huge":
            for name in _OF_TOKENS:
                if name in numbers:
                    numbers[name][torch.rand(numbers[name].shape, generator=generator) < 0.01] = 1e30
        case "everywhere":
            for name in _OF_TOKENS:
                if name in numbers:
                    tensors[name][..., 0] = torch.inf
        case "infinite_keys":
            name = next(name for name in ("key", "memory", "value", "input", "query") if name in tensors)
            numbers[name][:: 2 * tensors[name].shape[-1]] = torch.inf
        case "forbidden":
            _write_where_forbidden(tensors, case)
        case "bias":
            numbers["bias"][few(numbers["bias"])] = torch.nan
        case "masking_bias":
            bias = tensors["bias"]
            bias[torch.rand(bias.shape, generator=generator) < 1 / 3] = -torch.inf
            bias[..., 0, :] = -torch.inf
        case "slopes":
            tensors["alibi_slopes"].fill_(torch.finfo(tensors["alibi_slopes"].dtype).max)


def _write_where_forbidden(tensors: dict[str, Tensor], case: Case) -> None:
    layout = case.get("options", {}).get("layout", "bhtd")
    for name in ("key", "value", "memory"):
        if name not in tensors:
            continue
        tensor = tensors[name]
        axis = -2 if layout == "bhtd" or name == "memory" else 1
        num_keys = tensor.shape[axis]
        first = num_keys - max(1, num_keys // 10)
        tensor.narrow(axis, first, num_keys - first).fill_(torch.nan)
        for mask, forbidding in _MASKS.items():
            if mask in tensors and tensors[mask].shape[-1] == num_keys:
                tensors[mask][..., first:] = forbidding
        if "key_lengths" in tensors:
            tensors["key_lengths"].clamp_(max=first)


def _resident(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def _in_a_fork(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = call()
        # Whatever it is, it is told before this process ends.
        except BaseException:
            found = {"failed": traceback.format_exc()}
        with os.fdopen(writer, "w") as answer:
            answer.write(json.dumps(found))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    _, status = os.waitpid(child, 0)
    whole: dict[str, Any] = json.loads(text) if text else {"failed": f"the case ended with status {status}"}
    return whole


def main() -> None:
    # Before the first fork: what the profiler would import in each of them.
    importlib.import_module("torch._inductor.standalone_compile")

    for line in iter(sys.stdin.readline, ""):
        case = json.loads(line)
        found = _in_a_fork(lambda case=case: _measure(case))  # type: ignore[misc]
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
