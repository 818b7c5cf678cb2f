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


@dataclass(frozen=True, slots=True)
class Round:
    """One cell, everyone measured one after the other."""

    service: Sample
    echo: Sample
    bound: Sample
    torch: Sample


RATIOS: dict[str, Callable[[Round], float]] = {
    "requests_over_echo": lambda r: r.service.requests_per_s / r.echo.requests_per_s,
    "requests_over_bound": lambda r: r.service.requests_per_s / r.bound.requests_per_s,
    "p50_over_torch": lambda r: r.service.p50_ms / r.torch.p50_ms,
}


@dataclass(frozen=True, slots=True)
class Figures:
    """One cell over all rounds. ``drift`` is the echo's best round over its worst: how restless the machine was."""

    cell: Cell
    service: Sample
    echo: Sample
    bound: Sample
    torch: Sample
    ratios: dict[str, float]
    drift: float
    max_abs_error: float
    rounds: list[Round]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.cell.name,
            "sizes": self.cell.shape.sizes,
            "format": self.cell.format.name,
            "connections": self.cell.connections,
            "median": {name: asdict(getattr(self, name)) for name in ("service", "echo", "bound", "torch")},
            "ratios": self.ratios,
            "drift": self.drift,
            "max_abs_error": self.max_abs_error,
            "rounds": [asdict(one) for one in self.rounds],
        }


def summarize(cell: Cell, rounds: list[Round], max_abs_error: float) -> Figures:
    """Medians; a ratio is taken within each round first, where both sides saw the same machine."""
    echoes = [one.echo.requests_per_s for one in rounds]
    return Figures(
        cell=cell,
        service=_median([one.service for one in rounds]),
        echo=_median([one.echo for one in rounds]),
        bound=_median([one.bound for one in rounds]),
        torch=_median([one.torch for one in rounds]),
        ratios={name: median(ratio(one) for one in rounds) for name, ratio in RATIOS.items()},
        drift=max(echoes) / min(echoes),
        max_abs_error=max_abs_error,
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
    )
