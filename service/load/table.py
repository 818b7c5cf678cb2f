"""A load test as CSV: one row a step, times in milliseconds, for spreadsheets and scripts."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from service.load.results import PERCENTILES, Distribution, Results, StepResult

STAGES = ("read", "parse", "queue", "compute", "encode")
"""The stages that have columns in every table; others follow them."""
_PLAIN = (
    "form",
    "loop",
    "rate_s",
    "arrivals",
    "concurrency",
    "ramp_s",
    "warm_up_s",
    "duration_s",
    "planned",
    "answered",
    "failed",
    "requests_s",
    "sent_mb_s",
    "received_mb_s",
)


def csv_text(results: Results) -> str:
    """A header and a row a step. A cell is empty where there is no number, as the rate of a closed loop."""
    stages = stages_of(results)
    rows = [dict(_cells(step, stages)) for step in results.steps]
    names = list(rows[0]) if rows else []
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def stages_of(results: Results) -> list[str]:
    """Every stage of any step: those of the service in their order, others by name."""
    seen = {stage for step in results.steps for stage in step.stages}
    return [*STAGES, *sorted(seen.difference(STAGES))]


def _cells(step: StepResult, stages: list[str]) -> Iterator[tuple[str, Any]]:
    for name in _PLAIN:
        yield name, getattr(step, name)
    yield from _durations("", step.latency)
    yield from _durations("service_time_", step.service_time)
    yield from _durations("lateness_", step.lateness)
    for stage in stages:
        yield from _durations(f"{stage}_", step.stages.get(stage))
    yield "errors", sum(step.errors.values())
    yield "ceiling_share", step.ceiling_share
    yield "late", "yes" if step.late else "no"
    yield "checked_answers", step.checked.answers if step.checked else 0
    yield "wrong_answers", len(step.checked.wrong) if step.checked else 0
    yield "same_bits", ("yes" if step.checked.same_bits else "no") if step.checked else None


def _durations(prefix: str, durations: Distribution | None) -> Iterator[tuple[str, float | None]]:
    known: Mapping[str, float] = durations.percentiles_ms if durations else {}
    has_any = durations is not None and durations.count > 0
    yield f"{prefix}mean_ms", durations.mean_ms if durations and has_any else None
    for at in PERCENTILES:
        yield f"{prefix}p{at:g}_ms".replace(".", "_"), known.get(f"{at:g}")
    yield f"{prefix}max_ms", durations.max_ms if durations and has_any else None
