"""Rates measured at start, in the engine's own thread, for estimates."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from attn_core.engine import Engine
from attn_core.prepared import Prepared
from attn_core.problem import AttentionOptions, AttentionProblem

TINY = (1, 1, 4, 8)
TYPICAL = (1, 8, 128, 64)
NUM_RUNS = 5
SHORTEST_S = 1e-7
"""No measured time counts as less: a clock may have stood still, and rates are divided by it."""
OUTPUTS = {"fused": ("context",), "manual": ("context", "weights")}


def measure_rates(engine: Engine, *, clock: Callable[[], float] = time.perf_counter) -> tuple[float, dict[str, float]]:
    """Seconds of the smallest problem, and flops a second by kernel. Takes a few hundredths of a second."""
    overhead_s = max(SHORTEST_S, _fastest_s(engine, _problem(engine, TINY, "fused"), clock))
    rates = {}
    for path in OUTPUTS:
        prepared = _problem(engine, TYPICAL, path)
        compute_s = max(SHORTEST_S, _fastest_s(engine, prepared, clock) - overhead_s)
        rates[path] = prepared.cost.flops / compute_s
    return overhead_s, rates


def _problem(engine: Engine, sizes: tuple[int, ...], path: str) -> Prepared:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sizes, generator=generator) for _ in range(3))
    return engine.prepare(AttentionProblem(query, key, value, options=AttentionOptions(outputs=OUTPUTS[path])))


def _fastest_s(engine: Engine, prepared: Prepared, clock: Callable[[], float]) -> float:
    times = []
    for _ in range(NUM_RUNS):
        began = clock()
        engine.run([prepared])
        times.append(clock() - began)
    return min(times)
