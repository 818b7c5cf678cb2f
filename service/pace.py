"""How long a problem will take: rates measured at start, corrected by what is seen since."""

from __future__ import annotations

from collections.abc import Mapping

from attn_core.cost import Cost

MEMORY_BYTES_PER_S = 5e9
"""What moves bytes and computes little is bound by memory, which no start-up measurement is long enough to see."""
PAIRS_PER_S = 2e9
"""Passes over query-key pairs, such as an exponential of each."""
BUILT_IN_FLOPS_PER_S = {"fused": 2e10, "manual": 5e9, "blocked": 1e10, "gradients": 1e10}
"""Where nothing is measured at start."""
TINY_FACTOR = 2.0
LEARNING_RATE = 0.05
MAX_CORRECTION = 4.0
LEAST_SHARE = 0.25
"""Of what was estimated: causal problems, half types and machines at rest are that much faster than any measurement."""


class Pace:
    """Seconds from costs. ``flops_per_s`` by kernel, which is the path, or what a cost calls its kernel; ``overhead_s``
    is what the smallest problem takes.

    A kernel that was not measured counts as the slowest of those that were, until it is seen at work.

    ``observe`` may be called from the engine's threads while the loop reads: each step is one assignment.
    """

    def __init__(
        self, *, overhead_s: float = 1e-4, flops_per_s: Mapping[str, float] | None = None, num_threads: int = 1
    ) -> None:
        self._num_threads = num_threads
        self._overhead_s = overhead_s
        self._flops_per_s = dict(flops_per_s or BUILT_IN_FLOPS_PER_S)
        self._slowest = min(self._flops_per_s.values())
        self._correction: dict[str, float] = {}

    def set_rates(self, *, overhead_s: float, flops_per_s: Mapping[str, float]) -> None:
        """Start from what was measured on this machine."""
        self._overhead_s = overhead_s
        self._flops_per_s = dict(flops_per_s)
        self._slowest = min(self._flops_per_s.values())
        self._correction = {}

    def estimate_s(self, cost: Cost, path: str) -> float:
        return self._raw_s(cost, path) * self._correction.get(cost.kernel or path, 1.0)

    def least_s(self, cost: Cost, path: str) -> float:
        """What a problem takes at the very least, on all threads and unlike any seen before."""
        return self._raw_s(cost, path) * LEAST_SHARE / self._num_threads

    def is_tiny(self, cost: Cost, path: str) -> bool:
        """Whether computing takes no longer than what every problem costs besides."""
        return self._raw_s(cost, path) <= TINY_FACTOR * self._overhead_s

    def observe(self, cost: Cost, path: str, took_s: float) -> None:
        """Learn from one problem. Machines slow down under load: the estimate follows within a few dozen."""
        if took_s <= 0:
            return
        ratio = took_s / self._raw_s(cost, path)
        ratio = min(MAX_CORRECTION, max(1 / MAX_CORRECTION, ratio))
        kernel = cost.kernel or path
        before = self._correction.get(kernel, 1.0)
        self._correction[kernel] = before + LEARNING_RATE * (ratio - before)

    def _raw_s(self, cost: Cost, path: str) -> float:
        rate = self._flops_per_s.get(cost.kernel or path, self._slowest)
        compute_s = cost.flops / rate + cost.pair_passes / PAIRS_PER_S
        return self._overhead_s + max(compute_s, cost.bytes_moved / MEMORY_BYTES_PER_S)
