"""What a problem really takes at most, resident memory and all, each in a process of its own.

``python -m tests.support.peaks`` reads lines of JSON, one a case, and answers each with a line. It has imported torch
and computes nothing itself: every case runs in a fork of it, so that what torch and BLAS keep for later of one case
is none of the next one's.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes, inputs counted in. ``resident`` is what the process took, ``allocated`` what torch's allocator gave."""

    estimate: int
    allocated: int
    resident: int

    @property
    def ratio(self) -> float:
        return self.allocated / self.estimate


def measure_peaks(cases: Iterable[dict[str, Any]]) -> list[Peak]:
    """The peak of each case: arguments of ``make_problem`` as JSON has them, ``shapes`` those of masks and bias, and
    ``gradients`` where it is the backward pass of these."""
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    command = [sys.executable, "-m", "tests.support.peaks"]
    answered = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert answered.returncode == 0, answered.stderr
    return [Peak(**json.loads(line)) for line in answered.stdout.splitlines()]


def _resident(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def _in_a_fork(call: Callable[[], dict[str, int]]) -> dict[str, int]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writer, json.dumps(call()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the case ended with status {status}"
    found: dict[str, int] = json.loads(text)
    return found


def _measure(case: dict[str, Any]) -> dict[str, int]:
    import torch

    from attn_core import Engine
    from tests.support.factory import make_mask, make_problem, make_tensor
    from tests.support.gradients import make_gradients
    from tests.support.memory import peak_bytes_of

    torch.set_num_threads(1)
    dtype = getattr(torch, case.pop("dtype", "float32"))
    tensors = {}
    for name, shape in case.pop("shapes", {}).items():
        tensors[name] = make_tensor(*shape, dtype=dtype) if name == "bias" else make_mask(*shape)
    case["outputs"] = tuple(case["outputs"])
    is_backward = case.pop("gradients", False)
    forward = make_problem(dtype=dtype, tensors=tensors, **case)
    problem = make_gradients(forward) if is_backward else forward
    engine = Engine()
    engine.warm_up()
    prepared = engine.prepare(problem)
    inputs = sum(tensor.nbytes for tensor in problem.tensors().values())
    _CLEAR.write_text("5")
    before = _resident("VmRSS")
    kept = engine.run([prepared])
    resident = _resident("VmHWM") - before
    del kept
    allocated = peak_bytes_of(lambda: engine.run([prepared]))
    return {
        "estimate": prepared.cost.peak_bytes,
        "allocated": inputs + allocated,
        "resident": inputs + resident,
    }


def main() -> None:
    # Before the first fork: the core, and what the profiler would import in each of them.
    importlib.import_module("tests.support.gradients")
    importlib.import_module("torch._inductor.standalone_compile")

    for line in sys.stdin:
        case = json.loads(line)
        found = _in_a_fork(lambda case=case: _measure(case))  # type: ignore[misc]
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
