"""What the service has to reach in each cell, and whether it did. A goal that is missed is shown and fails nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.figures import Figures


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure of one cell; ``figure`` gives None where it was not measured, such as a peer that did not run."""

    cell: str
    what: str
    limit: float
    figure: Callable[[Figures], float | None]
    is_ceiling: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A goal beside what was reached."""

    goal: Goal
    reached: float | None

    @property
    def is_met(self) -> bool | None:
        if self.reached is None:
            return None
        return self.reached <= self.goal.limit if self.goal.is_ceiling else self.reached >= self.goal.limit

    def as_json(self) -> dict[str, Any]:
        goal = self.goal
        side = "at_most" if goal.is_ceiling else "at_least"
        return {
            "cell": goal.cell,
            "what": goal.what,
            side: goal.limit,
            "reached": self.reached,
            "is_met": self.is_met,
        }


def _over(peer: str) -> Callable[[Figures], float | None]:
    return lambda figures: figures.over_peers.get(peer)


def _goals(
    cell: str,
    *,
    over_bound: float | None = None,
    over_best_peer: float | None = None,
    over_peers: Mapping[str, float] | None = None,
    p99_over_p50: float | None = None,
    cpu_ms: float | None = None,
    rss_over_bytes: float | None = None,
) -> Iterator[Goal]:
    if over_bound is not None:
        yield Goal(cell, "requests/s / bound", over_bound, lambda f: f.ratios["requests_over_bound"])
    if p99_over_p50 is not None:
        yield Goal(cell, "p99 / p50", p99_over_p50, lambda f: f.ratios["p99_over_p50"], is_ceiling=True)
    if cpu_ms is not None:
        yield Goal(cell, "CPU ms", cpu_ms, lambda f: f.service.cpu_ms, is_ceiling=True)
    if rss_over_bytes is not None:
        what = "memory over idle / bytes asked and answered, first round"
        yield Goal(cell, what, rss_over_bytes, lambda f: f.rss_over_bytes, is_ceiling=True)
    if over_best_peer is not None:
        yield Goal(cell, "requests/s / best peer", over_best_peer, lambda f: f.over_best_peer)
    for peer, limit in (over_peers or {}).items():
        yield Goal(cell, f"requests/s / {peer}", limit, _over(peer))


OF_GRPCAIO = {"grpcaio_raw": 0.9}
OF_GRPC = {**OF_GRPCAIO, "triton_grpc": 1.0}
GOALS = (
    *_goals("large/safetensors/c1", over_bound=0.95, rss_over_bytes=1.5, over_best_peer=1),
    *_goals("tiny/safetensors/c1", over_bound=0.60, over_best_peer=2, over_peers={"triton_http": 4}),
    *_goals("tiny/safetensors/c32", over_bound=0.60, over_best_peer=2),
    *_goals("small/safetensors/c1", over_bound=0.90, over_best_peer=1.3),
    *_goals("small/safetensors/c8", over_bound=0.90, p99_over_p50=2, over_best_peer=1.4),
    *_goals("small/safetensors/c32", over_bound=0.90, p99_over_p50=2, over_best_peer=1.4),
    *_goals("medium/safetensors/c1", over_bound=0.95, over_best_peer=1),
    *_goals("medium/safetensors/c8", over_bound=0.95, over_best_peer=1),
    *_goals("mixed/safetensors/c64", over_best_peer=1.5),
    *_goals("small/json/c1", cpu_ms=14, over_peers={"fastapi_json": 13}),
    *_goals("tiny/grpc/c1", over_peers=OF_GRPCAIO),
    *_goals("tiny/grpc/c32", over_peers=OF_GRPCAIO),
    *_goals("small/grpc/c1", over_peers=OF_GRPCAIO),
    *_goals("small/grpc/c8", over_peers=OF_GRPC),
    *_goals("small/grpc/c32", over_peers=OF_GRPC),
    *_goals("medium/grpc/c1", over_peers=OF_GRPC),
    *_goals("medium/grpc/c8", over_peers=OF_GRPC),
    *_goals("large/grpc/c1", over_peers=OF_GRPC),
)


def outcomes(figures: Sequence[Figures]) -> list[Outcome]:
    """Of every goal whose cell was measured."""
    by_cell = {one.cell.name: one for one in figures}
    return [Outcome(goal, goal.figure(by_cell[goal.cell])) for goal in GOALS if goal.cell in by_cell]
