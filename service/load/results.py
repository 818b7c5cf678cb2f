"""What a load test found: plain values, to JSON and back.

Times are in milliseconds, points in time in seconds from the first planned send of their step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import numpy as np
import orjson
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from service.load.arrivals import ClosedLoop, OpenLoop

PERCENTILES = (50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
_LEAST_US, _MOST_US, _DIGITS = 1, 3_600_000_000, 3


class UnreadableResults(Exception):
    """A file that is no result of a load test, or of another version."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Durations of many requests: from 1 microsecond to 1 hour, to three digits.

    ``histogram`` is HdrHistogram's own text (V2, compressed), which any of its tools reads; its unit is 1 microsecond.
    """

    count: int
    mean_ms: float
    max_ms: float
    percentiles_ms: Mapping[str, float]
    histogram: str

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> Self:
        """Percentiles never beyond the largest: a bucket of the histogram ends a little above what is in it."""
        histogram = HdrHistogram(_LEAST_US, _MOST_US, _DIGITS)
        microseconds = np.clip(np.rint(seconds * 1e6), _LEAST_US, _MOST_US).astype(np.int64)
        for value, count in zip(*np.unique(microseconds, return_counts=True), strict=True):
            histogram.record_value(int(value), int(count))
        max_ms = float(seconds.max() * 1e3) if len(seconds) else 0.0
        return cls(
            count=len(seconds),
            mean_ms=float(seconds.mean() * 1e3) if len(seconds) else 0.0,
            max_ms=max_ms,
            percentiles_ms={f"{at:g}": min(_at(histogram, at), max_ms) for at in PERCENTILES} if len(seconds) else {},
            histogram=histogram.encode().decode(),
        )

    @property
    def p50_ms(self) -> float:
        return self.percentiles_ms.get("50", 0.0)

    @property
    def p99_ms(self) -> float:
        return self.percentiles_ms.get("99", 0.0)

    def curve(self, percentiles: Iterable[float]) -> list[float]:
        """Milliseconds at any percentiles, from the histogram."""
        asked = list(percentiles)
        found = HdrHistogram.decode(self.histogram).get_percentile_to_value_dict(asked)
        return [float(found.get(at, 0) / 1e3) for at in asked]


def _at(histogram: Any, percentile: float) -> float:
    return float(histogram.get_value_at_percentile(percentile) / 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One bin of a step's time, ``bin_s`` long. ``phase``: "ramp", "warm-up", "measured" or "tail".

    ``sent`` counts planned sends of this bin, ``answered`` and ``failed`` what came back in it. The latencies are of
    answers that came in it; None where there were none.
    """

    at_s: float
    phase: str
    sent: int
    answered: int
    failed: int
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What the client alone can do: the same bodies in, the same answers out, of a bare echo in this very run."""

    form: str
    concurrency: int
    requests_s: float
    latency: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Answers of the step that were held against the formula in float64.

    ``error`` and ``allowed`` are of the one output (``output``) whose error came nearest to what is allowed, as far as
    they are finite. ``wrong`` says of each wrong answer what is wrong, ``same_bits`` whether all answers to one request
    were equal bit for bit; nothing but that is known of the outputs in ``only_compared``.
    """

    answers: int
    wrong: tuple[str, ...]
    output: str
    error: float
    allowed: float
    same_bits: bool
    only_compared: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        return not self.wrong and self.same_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One level of load in one form.

    ``loop`` is "open" (``rate_s`` requests a second, ``arrivals`` "poisson" or "even") or "closed" (``concurrency``
    requests under way, the next sent as one is answered). Only requests planned in the ``duration_s`` behind ramp and
    warm-up count. ``latency`` runs from the planned send to the whole answer, ``service_time`` from the send as it
    happened; ``lateness`` is what lies between the two. In a closed loop no send is planned: the two are the same, and
    there is no lateness. ``ticks``: how late a clock ticked in the client, whatever held it up.
    ``stages``: the service's own times, by the names of Server-Timing. ``late`` says why the figures are not the
    service's alone; empty where they are. ``details``: of each kind of error, what the first one said.
    """

    form: str
    loop: str
    rate_s: float | None
    arrivals: str | None
    concurrency: int | None
    ramp_s: float
    warm_up_s: float
    duration_s: float
    planned: int
    answered: int
    failed: int
    requests_s: float
    sent_mb_s: float
    received_mb_s: float
    latency: Distribution
    service_time: Distribution
    lateness: Distribution
    ticks: Distribution
    errors: Mapping[str, int]
    details: Mapping[str, str]
    stages: Mapping[str, Distribution]
    shapes: Mapping[str, Distribution]
    bin_s: float
    timeline: tuple[Moment, ...]
    ceiling_share: float | None
    late: tuple[str, ...]
    checked: Checked | None

    @property
    def level(self) -> str:
        """Such as "open, 200/s, poisson" or "closed, 8 at once"."""
        if self.rate_s is not None and self.arrivals is not None:
            return OpenLoop(rate_s=self.rate_s, arrivals=self.arrivals).level
        assert self.concurrency is not None
        return ClosedLoop(concurrency=self.concurrency).level

    @property
    def name(self) -> str:
        return f"{self.form}, {self.level}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A whole load test. ``service`` and ``client`` are what each says of itself, ``written`` a time as ISO 8601."""

    written: str
    command: str
    url: str
    service: Mapping[str, str]
    client: Mapping[str, str]
    shapes: tuple[str, ...]
    options: Mapping[str, Any]
    seed: int
    was_cut: bool
    ceilings: tuple[Ceiling, ...]
    steps: tuple[StepResult, ...]
    format: Literal[1] = 1

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)


def read_results(text: bytes) -> Results:
    """What ``to_json`` wrote. Raises: UnreadableResults."""
    try:
        results = TypeAdapter(Results).validate_json(text)
        for step in results.steps:
            _check_step(step)
        for ceiling in results.ceilings:
            _check_distribution(ceiling.latency)
        return results
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UnreadableResults(f"no results of this version's load test: {where}: {first['msg']}") from None


def _check_step(step: StepResult) -> None:
    """What no type says. Raises: UnreadableResults."""
    level = (step.rate_s, step.arrivals) if step.loop == "open" else (step.concurrency,)
    if step.loop not in ("open", "closed") or None in level:
        raise UnreadableResults("no results of this version's load test: a step without its level of load")
    for found in (
        step.latency,
        step.service_time,
        step.lateness,
        step.ticks,
        *step.stages.values(),
        *step.shapes.values(),
    ):
        _check_distribution(found)


def _check_distribution(found: Distribution) -> None:
    """Raises: UnreadableResults."""
    try:
        HdrHistogram.decode(found.histogram)
    except Exception as error:
        # Its decoder names no exceptions: base64, zlib, struct and its own come out of it.
        raise UnreadableResults(f"no results of this version's load test: a histogram that is none: {error}") from None
    if found.count and set(found.percentiles_ms) != {f"{at:g}" for at in PERCENTILES}:
        raise UnreadableResults("no results of this version's load test: percentiles are missing")
