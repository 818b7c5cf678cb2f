"""How the numbers of a load test are written for people, and which of them say anything."""

from __future__ import annotations

from collections.abc import Sequence

from service.load.results import Distribution, StepResult

NONE = "–"


def milliseconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.3f}" if value < 1 else scaled(value)


def scaled(value: float | None) -> str:
    """Three digits or more."""
    if value is None:
        return NONE
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f}"


def percent(share: float | None) -> str:
    if share is None:
        return NONE
    if share == 0:
        return "0 %"
    # Few are never none, and all but a few never all.
    if share < 0.0005:
        return "<0.1 %"
    return ">99.9 %" if 0.9995 <= share < 1 else f"{share * 100:.1f} %"


def count(value: int) -> str:
    return f"{value:,}"


def is_carried(num_answers: int, percentile: float) -> bool:
    """Whether at least one answer lies beyond a percentile; if not, it is the slowest answer by another name."""
    return round(num_answers * (100 - percentile), 6) >= 100 or (percentile <= 50 and num_answers > 0)


def percentile_ms(durations: Distribution, percentile: float) -> float | None:
    """None where the answers are too few to carry it."""
    if not is_carried(durations.count, percentile):
        return None
    return durations.percentiles_ms[f"{percentile:g}"]


def stage_ms(step: StepResult, stage: str, percentile: float) -> float | None:
    return percentile_ms(step.stages[stage], percentile) if stage in step.stages else None


def max_ms(durations: Distribution) -> float | None:
    return durations.max_ms if durations.count else None


def told_apart(names: Sequence[str]) -> list[str]:
    """The same names, each numbered from the second of its kind on."""
    return [
        name if name not in names[:index] else f"{name} ({names[:index].count(name) + 1})"
        for index, name in enumerate(names)
    ]
