"""Rates measured at start, in the engine's own thread, for estimates."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from attn_core.engine import Engine
from attn_core.errors import AttentionError
from attn_core.prepared import GRADIENTS, Prepared
from attn_core.problem import AttentionOptions, AttentionProblem, GradientsProblem, Problem
from service.pace import PAIRS_PER_S

TINY = (1, 1, 4, 8)
TYPICAL = (1, 8, 128, 64)
LONGER = (1, 8, 256, 64)
NUM_RUNS = 5
ENOUGH_S = 0.05
"""After so long no run of the same problem is begun: on a busy machine, which no measurement is worth waiting for."""
SHORTEST_S = 1e-7
"""No measured time counts as less: a clock may have stood still, and rates are divided by it."""
LEAST_SHARE = 0.25
"""So much of the time counts for the products at least, whatever is reckoned for the rest."""


def _attention(sizes: tuple[int, ...], outputs: tuple[str, ...], path: str | None = None) -> AttentionProblem:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sizes, generator=generator) for _ in range(3))
    return AttentionProblem(query, key, value, options=AttentionOptions(outputs=outputs, path=path))


PROBES: dict[str, Callable[[], Problem]] = {
    "fused": lambda: _attention(TYPICAL, ("context",)),
    "manual": lambda: _attention(TYPICAL, ("context", "weights")),
    "blocked": lambda: _attention(LONGER, ("context", "weight_totals"), "blocked"),
    GRADIENTS: lambda: GradientsProblem(_attention(LONGER, ("context",)), grad_context=torch.ones(LONGER)),
}
"""A problem for each kernel that has a pace of its own."""


def measure_rates(engine: Engine, *, clock: Callable[[], float] | None = None) -> tuple[float, dict[str, float]]:
    """Seconds of the smallest problem, and flops a second by kernel. Takes a tenth of a second.

    On a CPU the time of this thread alone counts, not what others took meanwhile: a busy start must not leave the
    service thinking that it is slow. The probes are small enough for one thread.
    """
    clock = clock or (time.thread_time if engine.device.type == "cpu" else time.perf_counter)
    overhead_s = max(SHORTEST_S, _fastest_s(engine, engine.prepare(_attention(TINY, ("context",))), clock))
    rates = {}
    for kernel, make in PROBES.items():
        prepared = engine.prepare(make())
        compute_s = max(SHORTEST_S, _fastest_s(engine, prepared, clock) - overhead_s)
        products_s = max(LEAST_SHARE * compute_s, compute_s - prepared.cost.pair_passes / PAIRS_PER_S)
        rates[kernel] = prepared.cost.flops / products_s
    # The fused kernel multiplies as fast as the machine can; what looks faster is reckoned to do more besides.
    return overhead_s, {kernel: min(rate, rates["fused"]) for kernel, rate in rates.items()}


def _fastest_s(engine: Engine, prepared: Prepared, clock: Callable[[], float]) -> float:
    times: list[float] = []
    while len(times) < NUM_RUNS and sum(times) < ENOUGH_S:
        began = clock()
        (outcome,) = engine.run([prepared])
        times.append(clock() - began)
        if isinstance(outcome, AttentionError):
            raise outcome
    return min(times)
