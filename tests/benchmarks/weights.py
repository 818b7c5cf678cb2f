"""Whole weights beside torch's kernel that gives none: ``python -m tests.benchmarks.weights``, or ``make bench``.

Each case runs in turn, SDPA alone (the context only) among them, so that a ratio holds on a machine whose speed drifts.
Memory is set up as in the service: freed memory is kept, and answers of 32 MiB and more lie in huge pages where the
system lends them to whoever asks. Nothing passes or fails on a time; a goal that is missed is shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attn_core import Engine
from attn_core.problem import AttentionProblem
from service.host import keep_freed_memory
from tests.support.factory import make_mask, make_problem

GOALS = {128: 1.2, 512: 1.2, 2048: 1.3}
"""The ratio to SDPA alone that whole weights without a mask shall have, by length."""
NUM_HEADS, HEAD_DIM = 8, 64
ROUNDS_OF_PAIRS = 2**27
"""A length is repeated until so many query-key pairs were asked of each case, 9 times at least and 99 at most."""


def cases(seq_len: int) -> dict[str, AttentionProblem]:
    """Context and weights without a mask, with the causal one, and with booleans for each pair."""
    masks: dict[str, dict[str, Any]] = {
        "no mask": {},
        "causal": {"causal": True},
        "allow_mask [T,S]": {"tensors": {"allow_mask": make_mask(1, 1, seq_len, seq_len)}},
    }
    return {
        name: make_problem(
            batch=1, num_heads=NUM_HEADS, seq_len_q=seq_len, seq_len_kv=seq_len, head_dim=HEAD_DIM,
            outputs=("context", "weights"), **own,
        )
        for name, own in masks.items()
    }  # fmt: skip


def measure(seq_len: int) -> dict[str, float]:
    """Median seconds of SDPA alone and of each case."""
    engine = Engine(max_threads=1)
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], object]] = {}
    for name, problem in cases(seq_len).items():
        prepared = engine.prepare(problem)
        runs[name] = lambda prepared=prepared: engine.run([prepared])  # type: ignore[misc]
    query, key, value = problem.query, problem.key, problem.value
    assert key is not None and value is not None
    runs = {"SDPA alone": lambda: scaled_dot_product_attention(query, key, value)} | runs
    times: dict[str, list[float]] = {name: [] for name in runs}
    rounds = min(99, max(9, ROUNDS_OF_PAIRS // (NUM_HEADS * seq_len**2)))
    for turn in range(rounds + 2):
        for name, run in runs.items():
            begun = time.perf_counter()
            kept = run()
            took = time.perf_counter() - begun
            del kept
            if turn >= 2:
                times[name].append(took)
    return {name: statistics.median(found) for name, found in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="128,512,2048", help="T = S of each measurement")
    lengths = [int(length) for length in parser.parse_args(arguments).lengths.split(",")]
    keep_freed_memory()
    print(f"context and weights, float32, B 1, {NUM_HEADS} heads, D {HEAD_DIM}, torch threads 1, through Engine.run")
    print(f"{'T = S':>6}  {'case':<18}{'ms':>9}{'/ SDPA':>8}  goal")
    for length in lengths:
        found = measure(length)
        alone = found["SDPA alone"]
        for name, took in found.items():
            ratio, goal = took / alone, GOALS.get(length) if name == "no mask" else None
            said = "" if goal is None else f"<= {goal} {'met' if ratio <= goal else 'missed'}"
            print(f"{length:>6}  {name:<18}{1000 * took:>9.2f}{ratio:>8.2f}  {said}")


if __name__ == "__main__":
    main()
