"""Two load tests against each other: what became better or worse, by more than chance would explain.

A difference must pass two bars. It must be large enough to matter: 10 % for throughput and the median, 20 % for p99 and
p99.9, which rest on a hundredth of the answers or less. And chance must not explain it: a run has only so many answers,
so the true percentile lies anywhere between two neighbours of the one measured (binomial, two standard deviations);
only where these ranges of the two runs lie apart is there a verdict. p99 has such a range from about 400 answers on,
p99.9 from about 4,000: below that it would end beyond the slowest answer, and the verdict is "too few". What no number
of answers shows is how much two runs differ by what else the machine did; hence the first bar.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from service.load.digits import percentile_ms, told_apart
from service.load.results import Distribution, Results, StepResult

Verdict = Literal["better", "worse", "same", "too few"]
THRESHOLDS = {"requests_s": 0.1, "p50_ms": 0.1, "p99_ms": 0.2, "p99_9_ms": 0.2}
LEAST_ANSWERS = 100
_PERCENTILES = {"p50_ms": 50.0, "p99_ms": 99.0, "p99_9_ms": 99.9}
_DEVIATIONS = 2.0
RULE = (
    "A verdict needs a difference of more than 10 % (requests/s, p50) or 20 % (p99, p99.9) that is also more than the "
    "number of answers leaves to chance, two standard deviations each side; of a failed share, the latter alone. "
    '"too few": the answers do not suffice to tell.'
)


@dataclass(frozen=True, slots=True)
class Change:
    """``measure``: "requests_s", "p50_ms", "p99_ms", "p99_9_ms" or "failed_share".

    A percentile is None where the answers do not carry it. ``ratio`` is new / old, None where old is 0 or one is None.
    """

    measure: str
    old: float | None
    new: float | None
    ratio: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Pair:
    """A step of both runs. ``late``: which of them has figures that are not the service's alone."""

    name: str
    changes: tuple[Change, ...]
    late: tuple[Literal["old", "new"], ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """What was not the same in the two runs."""

    what: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """``only_new`` and ``only_old`` are names of steps without a partner."""

    pairs: tuple[Pair, ...]
    only_new: tuple[str, ...]
    only_old: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def caution(self) -> str:
        """A sentence that says how the runs are unlike; empty where they are alike."""
        if not self.differences:
            return ""
        named = ", ".join(difference.what for difference in self.differences)
        return f"The two runs are not alike, and what changed may be due to that: they differ in {named}."


@dataclass(frozen=True, slots=True)
class _Range:
    """What chance leaves open around a number."""

    least: float
    most: float

    def is_apart(self, other: _Range) -> bool:
        return self.most < other.least or other.most < self.least


def compare(new: Results, old: Results) -> Comparison:
    """Steps are partners by form, loop and level; of several alike, the first by the first."""
    steps_new, steps_old = _by_name(new), _by_name(old)
    return Comparison(
        pairs=tuple(_pair(name, step, steps_old[name]) for name, step in steps_new.items() if name in steps_old),
        only_new=tuple(name for name in steps_new if name not in steps_old),
        only_old=tuple(name for name in steps_old if name not in steps_new),
        differences=tuple(_differences(new, old)),
    )


def _by_name(results: Results) -> dict[str, StepResult]:
    return dict(zip(told_apart([step.name for step in results.steps]), results.steps, strict=True))


def _pair(name: str, new: StepResult, old: StepResult) -> Pair:
    percentiles = [_of_percentile(measure, new.latency, old.latency) for measure in _PERCENTILES]
    sides: tuple[tuple[Literal["old", "new"], StepResult], ...] = (("old", old), ("new", new))
    return Pair(
        name=name,
        changes=(_of_throughput(new, old), *percentiles, _of_failures(new, old)),
        late=tuple(side for side, step in sides if step.late),
    )


def _of_throughput(new: StepResult, old: StepResult) -> Change:
    ranges = [_counted(step) for step in (new, old)]
    return _change("requests_s", new.requests_s, old.requests_s, ranges, is_more_better=True)


def _counted(step: StepResult) -> _Range | None:
    """A rate that was counted: of n answers, the square root of n is chance. That of a step that failed says much."""
    if step.answered + step.failed < LEAST_ANSWERS:
        return None
    spread = _DEVIATIONS / math.sqrt(max(step.answered, 1))
    return _Range(step.requests_s * (1 - spread), step.requests_s * (1 + spread))


def _of_percentile(measure: str, new: Distribution, old: Distribution) -> Change:
    percentile = _PERCENTILES[measure]
    (new_ms, new_range), (old_ms, old_range) = (_percentile_range(one, percentile) for one in (new, old))
    return _change(measure, new_ms, old_ms, [new_range, old_range], is_more_better=False)


def _percentile_range(durations: Distribution, percentile: float) -> tuple[float | None, _Range | None]:
    """Milliseconds at a percentile and between which neighbours the true one lies; None where one is off the end."""
    at = percentile_ms(durations, percentile)
    if durations.count < LEAST_ANSWERS:
        return at, None
    share = percentile / 100
    spread = 100 * _DEVIATIONS * math.sqrt(share * (1 - share) / durations.count)
    if percentile + spread >= 100:
        return at, None
    return at, _Range(*durations.curve((percentile - spread, percentile + spread)))


def _change(
    measure: str, new: float | None, old: float | None, ranges: list[_Range | None], *, is_more_better: bool
) -> Change:
    ratio = new / old if old and new is not None else None
    return Change(measure, old, new, ratio, _verdict(ratio, THRESHOLDS[measure], ranges, is_more_better))


def _verdict(ratio: float | None, threshold: float, ranges: list[_Range | None], is_more_better: bool) -> Verdict:
    first, second = ranges
    if ratio is None or first is None or second is None:
        return "too few"
    # As far below as above: 1.2 times as slow and back again is one threshold.
    if 1 / (1 + threshold) <= ratio <= 1 + threshold:
        return "same"
    if not first.is_apart(second):
        return "too few"
    return "better" if (ratio > 1) is is_more_better else "worse"


def _of_failures(new: StepResult, old: StepResult) -> Change:
    """Any difference beyond chance counts: there is no share of failures that does not matter."""
    shares = [_failed_share(step) for step in (new, old)]
    ranges = [_share_range(step.failed, step.answered + step.failed) for step in (new, old)]
    ratio = shares[0] / shares[1] if shares[1] else None
    verdict: Verdict = "same"
    if min(step.answered + step.failed for step in (new, old)) < LEAST_ANSWERS:
        verdict = "too few"
    elif ranges[0].is_apart(ranges[1]):
        verdict = "better" if shares[0] < shares[1] else "worse"
    return Change("failed_share", shares[1], shares[0], ratio, verdict)


def _failed_share(step: StepResult) -> float:
    return step.failed / max(step.answered + step.failed, 1)


def _share_range(num_failed: int, num_requests: int) -> _Range:
    """Wilson's interval, which holds near 0 too. Source: Wilson 1927."""
    requests, squared = max(num_requests, 1), _DEVIATIONS**2
    share = num_failed / requests
    middle = (share + squared / (2 * requests)) / (1 + squared / requests)
    half = (
        _DEVIATIONS * math.sqrt(share * (1 - share) / requests + squared / (4 * requests**2)) / (1 + squared / requests)
    )
    return _Range(middle - half, middle + half)


def _differences(new: Results, old: Results) -> Iterator[Difference]:
    sides = (old, new)
    yield from _unequal("url", *(run.url for run in sides))
    yield from _unequal_members("service", old.service, new.service)
    yield from _unequal_members("client", old.client, new.client)
    yield from _unequal("shapes", *(", ".join(run.shapes) for run in sides))
    yield from _unequal_members("option", old.options, new.options)
    yield from _unequal("seed", *(str(run.seed) for run in sides))
    yield from _unequal("being cut short", *("yes" if run.was_cut else "no" for run in sides))


def _unequal_members(kind: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    for key in dict.fromkeys([*old, *new]):
        yield from _unequal(f"{kind} {key}", *(str(run.get(key, "not given")) for run in (old, new)))


def _unequal(what: str, old: str, new: str) -> Iterator[Difference]:
    if old != new:
        yield Difference(what, old, new)
