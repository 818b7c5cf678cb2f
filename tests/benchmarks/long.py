"""Long sequences: what summaries take beside the fused kernel's context and logsumexp, in one run, interleaved.

Run as ``python -m tests.benchmarks.long [--tokens T] [--runs N]``; part of ``make bench``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from attn_core import AttentionOptions, AttentionProblem, Engine
from attn_core.prepared import prepare

TOKENS, NUM_HEADS, HEAD_DIM, NUM_THREADS, NUM_ROWS = 32768, 8, 64, 2, 64
MAX_BYTES_PER_THREAD = 64 * 2**20
BASE = ("context", "logsumexp")
ASKED: dict[str, dict[str, Any]] = {
    "context and logsumexp": {"outputs": BASE, "path": "fused"},
    "weight_totals": {"outputs": (*BASE, "weight_totals")},
    "entropy": {"outputs": (*BASE, "entropy")},
    "top_weights of 16": {"outputs": (*BASE, "top_weights"), "top_k": 16},
    "64 rows of weights": {"outputs": (*BASE, "weights")},
    "all together": {"outputs": (*BASE, "weight_totals", "entropy", "top_weights"), "top_k": 16},
}
GOALS = {
    "weight_totals": 1.8,
    "entropy": 1.9,
    "top_weights of 16": 2.3,
    "64 rows of weights": 1.05,
    "all together": 3.5,
}
"""Each with context and logsumexp, as a multiple of the fused kernel's time for these two."""


def problem_of(asked: str, *, seq_len: int) -> AttentionProblem:
    options = dict(ASKED[asked])
    if "weights" in options["outputs"]:
        options["select_rows"] = tuple(row * seq_len // NUM_ROWS for row in range(NUM_ROWS))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, NUM_HEADS, seq_len, HEAD_DIM, generator=generator) for _ in range(3))
    return AttentionProblem(query, key, value, options=AttentionOptions(**options))


def measure(seq_len: int, runs: int) -> dict[str, float]:
    """Median seconds of each, in turn."""
    engine = Engine(max_threads=NUM_THREADS)
    problems = {asked: problem_of(asked, seq_len=seq_len) for asked in ASKED}
    engine.attend(problem_of("all together", seq_len=min(seq_len, 1024)))
    seconds: dict[str, list[float]] = {asked: [] for asked in ASKED}
    for _ in range(runs):
        for asked, problem in problems.items():
            began = time.perf_counter()
            engine.attend(problem)
            seconds[asked].append(time.perf_counter() - began)
    return {asked: statistics.median(times) for asked, times in seconds.items()}


def scratch_bytes(asked: str, seq_len: int) -> int:
    """How far this process grows beyond inputs and answers. To be asked in a process of its own."""
    engine = Engine(max_threads=NUM_THREADS)
    engine.attend(problem_of(asked, seq_len=1024))
    problem = problem_of(asked, seq_len=seq_len)
    # From here on the highest mark is that of this problem: what was held before and given back counts no more.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes("VmRSS")
    engine.attend(problem)
    return max(0, _resident_bytes("VmHWM") - before - prepare(problem, device_type="cpu").cost.output_bytes)


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _scratch_in_a_fresh_process(asked: str, seq_len: int) -> int:
    command = [sys.executable, "-m", __spec__.name, "--tokens", str(seq_len), "--memory-of", asked]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--memory-of", choices=ASKED, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.memory_of is not None:
        print(scratch_bytes(chosen.memory_of, chosen.tokens))
        return
    print(f"T = S = {chosen.tokens}, {NUM_HEADS} heads, D {HEAD_DIM}, float32, {NUM_THREADS} threads of torch")
    seconds = measure(chosen.tokens, chosen.runs)
    base = seconds["context and logsumexp"]
    print(f"{'asked':24}{'seconds':>9}{'ratio':>7}{'goal':>6}{'MiB a thread':>14}{'goal':>6}")
    for asked, took in seconds.items():
        mib = _scratch_in_a_fresh_process(asked, chosen.tokens) / NUM_THREADS / 2**20
        goal = f"{GOALS[asked]:.2f}" if asked in GOALS else ""
        print(f"{asked:24}{took:9.2f}{took / base:7.2f}{goal:>6}{mib:14.1f}{MAX_BYTES_PER_THREAD >> 20:6}", flush=True)


if __name__ == "__main__":
    main()
