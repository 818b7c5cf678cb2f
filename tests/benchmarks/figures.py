"""What was measured, and what is made of it: medians over rounds, and ratios within each round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tests.benchmarks.cells import Cell


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one contender in one cell. In process there is no server to ask for processor time and memory."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    num_counted: int
    cpu_ms: float | None = None
    peak_rss_mb: float | None = None
    idle_rss_mb: float | None = None

    @property
    def rss_over_idle_mb(self) -> float | None:
        return None if self.peak_rss_mb is None or self.idle_rss_mb is None else self.peak_rss_mb - self.idle_rss_mb


@dataclass(frozen=True, slots=True)
class Round:
    """One cell, everyone measured one after the other. ``max_abs_error`` is the service's."""

    service: Sample
    echo: Sample
    bound: Sample
    torch: Sample
    peers: dict[str, Sample]
    max_abs_error: float


RATIOS: dict[str, Callable[[Round], float]] = {
    "requests_over_echo": lambda r: r.service.requests_per_s / r.echo.requests_per_s,
    "requests_over_bound": lambda r: r.service.requests_per_s / r.bound.requests_per_s,
    "p50_over_torch": lambda r: r.service.p50_ms / r.torch.p50_ms,
    "p99_over_p50": lambda r: r.service.p99_ms / r.service.p50_ms,
}


@dataclass(frozen=True, slots=True)
class Figures:
    """One cell over all rounds. ``drift`` is the echo's best round over its worst: how restless the machine was.

    ``over_peers`` are requests/s over those of each peer that answered in every round.
    """

    cell: Cell
    service: Sample
    echo: Sample
    bound: Sample
    torch: Sample
    peers: dict[str, Sample]
    ratios: dict[str, float]
    over_peers: dict[str, float]
    drift: float
    max_abs_error: float
    rounds: list[Round]

    @property
    def over_best_peer(self) -> float | None:
        return min(self.over_peers.values(), default=None)

    @property
    def rss_over_bytes(self) -> float | None:
        """Memory above the idle service's, in bytes of the requests and answers under way.

        Of the first round: in others malloc keeps what was freed in every cell.
        """
        over_idle = self.rounds[0].service.rss_over_idle_mb
        return None if over_idle is None else over_idle * 1e6 / self.cell.tensor_bytes_inside

    def as_json(self) -> dict[str, Any]:
        samples = {name: getattr(self, name) for name in ("service", "echo", "bound", "torch")} | self.peers
        return {
            "name": self.cell.name,
            "sizes": self.cell.sizes,
            "format": self.cell.format.name,
            "connections": self.cell.connections,
            "median": {name: asdict(sample) for name, sample in samples.items()},
            "ratios": self.ratios,
            "requests_over_peers": self.over_peers,
            "rss_over_bytes": self.rss_over_bytes,
            "drift": self.drift,
            "max_abs_error": self.max_abs_error,
            "rounds": [asdict(one) for one in self.rounds],
        }


def summarize(cell: Cell, rounds: list[Round]) -> Figures:
    """Medians; a ratio is taken within each round first, where both sides saw the same machine."""
    echoes = [one.echo.requests_per_s for one in rounds]
    steady_peers = [name for name in rounds[0].peers if all(name in one.peers for one in rounds)]
    return Figures(
        cell=cell,
        service=_median([one.service for one in rounds]),
        echo=_median([one.echo for one in rounds]),
        bound=_median([one.bound for one in rounds]),
        torch=_median([one.torch for one in rounds]),
        peers={name: _median([one.peers[name] for one in rounds]) for name in steady_peers},
        ratios={name: median(ratio(one) for one in rounds) for name, ratio in RATIOS.items()},
        over_peers={
            name: median(one.service.requests_per_s / one.peers[name].requests_per_s for one in rounds)
            for name in steady_peers
        },
        drift=max(echoes) / min(echoes),
        max_abs_error=max(one.max_abs_error for one in rounds),
        rounds=rounds,
    )


def _median(samples: list[Sample]) -> Sample:
    cpu = [sample.cpu_ms for sample in samples if sample.cpu_ms is not None]
    rss = [sample.peak_rss_mb for sample in samples if sample.peak_rss_mb is not None]
    return Sample(
        requests_per_s=median(sample.requests_per_s for sample in samples),
        p50_ms=median(sample.p50_ms for sample in samples),
        p99_ms=median(sample.p99_ms for sample in samples),
        num_counted=sum(sample.num_counted for sample in samples),
        cpu_ms=median(cpu) if cpu else None,
        # A peak is the highest there was.
        peak_rss_mb=max(rss) if rss else None,
        idle_rss_mb=samples[0].idle_rss_mb,
    )
