"""What one step has seen so far, and what it comes to: counted in the process that shows it, not in those that send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.load.arrivals import ClosedLoop, OpenLoop
from service.load.digits import is_carried
from service.load.results import Ceiling, Checked, Distribution, Moment, StepResult
from service.load.sending import CLIENT
from service.load.worker import ANSWERED, BEHIND, TOO_MANY, Part, Sample, Step

MAX_BINS = 60
LATE_MS, LATE_MAX_MS = 1.0, 10.0
LATE_SHARES = {"50": 0.1, "90": 0.1, "95": 0.1, "99": 0.1, "99.9": 0.1, "max": 0.5}
"""Sends are late where one of these is beyond a millisecond and such a share of the same of the latencies; a single one
only where it is beyond ten."""
STOOD_STILL_SHARES = {"90": 0.5, "95": 0.5, "99": 0.5, "99.9": 0.5, "max": 0.5}
"""The same of a clock of the client in a closed loop, where a busy client is always somewhat late."""
CEILING_SHARE = 0.8
"""Above so much of what it can do at all, a client's own waiting is no longer small beside the service's."""
_BINS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)

ANSWER = ""
"""The kind of outcome that is none of failure."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """A step that runs, at one moment: counts up to now; rates and latencies of the last second or so."""

    at_s: float
    answered: int
    failed: int
    in_flight: int
    answered_s: float
    p50_ms: float | None
    p99_ms: float | None
    late_ms: float | None


class Account:
    def __init__(self, step: Step, shape_names: Sequence[str], body_bytes: Sequence[int]) -> None:
        self.step = step
        self.stopped_s: float | None = None
        """When sending was ended before its time, from the step's begin."""
        self._shape_names = shape_names
        self._body_bytes = np.array(body_bytes)
        self._parts: list[_Rows] = []
        self._kinds = [ANSWER]
        self._stages: dict[str, list[Floats]] = {}
        self._ticks: list[Floats] = []
        self._in_flight: dict[int, int] = {}
        self._num_behind = 0
        self._num_ended = self._num_answered = 0
        self.samples: list[Sample] = []
        self.details: dict[str, str] = {}

    def add(self, worker: int, part: Part) -> None:
        rows = _Rows(part, [self._code(kind) for kind in part.kinds])
        self._parts.append(rows)
        self._num_ended += len(rows.done)
        self._num_answered += int(rows.is_answer.sum())
        for name, durations in part.stages.items():
            self._stages.setdefault(name, []).append(np.array(durations))
        self._ticks.append(np.array(part.ticks))
        self._in_flight[worker] = part.in_flight
        self._num_behind += part.num_behind
        self.samples += part.samples
        for kind, detail in part.details.items():
            self.details.setdefault(kind, detail)

    def _code(self, kind: str) -> int:
        """The place of a kind of outcome among all that were met; those of each process are numbered apart."""
        if kind not in self._kinds:
            self._kinds.append(kind)
        return self._kinds.index(kind)

    def glance(self, at_s: float) -> Glance:
        """Of what came in the second before ``at_s``; the parts are a fraction of a second behind."""
        last = [rows for rows in self._parts[-64:] if len(rows.done) and rows.done[-1] > at_s - 1]
        latency, late = (_joined([np.zeros(0), *each]) for each in _recent(last))
        return Glance(
            at_s=at_s,
            answered=self._num_answered,
            failed=self._num_ended - self._num_answered,
            in_flight=sum(self._in_flight.values()),
            answered_s=len(latency) / min(1.0, max(at_s, 0.1)),
            p50_ms=_percentile(latency, 50),
            p99_ms=_percentile(latency, 99),
            late_ms=_percentile(late, 99) if isinstance(self.step.loop, OpenLoop) else None,
        )

    def result(self, *, ceiling: Ceiling | None, checked: Checked | None) -> StepResult | None:
        """None where nothing of the measured time was reached."""
        step, loop = self.step, self.step.loop
        from_s = step.measured_from_s
        end_s = step.end_s if self.stopped_s is None else min(step.end_s, self.stopped_s)
        rows = _Rows.joined(self._parts)
        is_measured = (rows.planned >= from_s) & (rows.planned < end_s)
        if end_s <= from_s or not (is_measured.any() or self._num_behind):
            return None
        is_good = is_measured & rows.is_answer
        is_in_time = rows.is_answer & (rows.done >= from_s) & (rows.done < end_s)
        duration_s = end_s - from_s
        latency, lateness = rows.done - rows.planned, rows.sent - rows.planned
        counts = np.bincount(rows.kind[is_measured & ~rows.is_answer], minlength=len(self._kinds))
        kinds = Counter({kind: int(count) for kind, count in zip(self._kinds, counts, strict=True) if count})
        if self._num_behind:
            kinds[BEHIND] = self._num_behind
        was_made = rows.kind != self._code(TOO_MANY)
        was_sent = is_measured & was_made
        requests_s = float(is_in_time.sum() / duration_s)
        latencies = Distribution.of(latency[is_good])
        latenesses = Distribution.of(lateness[was_sent & isinstance(loop, OpenLoop)])
        ticks = Distribution.of(_joined([np.zeros(0), *self._ticks]))
        rate_s = loop.rate_s if isinstance(loop, OpenLoop) else None
        share = None if ceiling is None else (requests_s if rate_s is None else rate_s) / ceiling.requests_s
        is_sent_in_time = (rows.sent >= from_s) & (rows.sent < end_s) & was_made
        return StepResult(
            form=step.form,
            loop="open" if isinstance(loop, OpenLoop) else "closed",
            rate_s=rate_s,
            arrivals=loop.arrivals if isinstance(loop, OpenLoop) else None,
            concurrency=loop.concurrency if isinstance(loop, ClosedLoop) else None,
            ramp_s=step.ramp_s,
            warm_up_s=step.warm_up_s,
            duration_s=duration_s,
            planned=int(is_measured.sum()) + self._num_behind,
            answered=int(is_good.sum()),
            failed=int(kinds.total()),
            requests_s=requests_s,
            sent_mb_s=float(self._body_bytes[rows.number[is_sent_in_time]].sum() / duration_s / 1e6),
            received_mb_s=float(rows.received[is_in_time].sum() / duration_s / 1e6),
            latency=latencies,
            service_time=Distribution.of((rows.done - rows.sent)[is_good]),
            lateness=latenesses,
            ticks=ticks,
            errors=dict(kinds.most_common()),
            details={kind: self.details.get(kind, "") for kind, _ in kinds.most_common()},
            stages={name: Distribution.of(_joined(found) / 1e3) for name, found in self._stages.items()},
            shapes=self._by_shape(latency[is_good], rows.number[is_good]),
            bin_s=self._bin_s,
            timeline=tuple(self._timeline(rows, from_s, end_s)),
            ceiling_share=share,
            late=tuple(_late(latencies, latenesses, ticks, kinds, share)),
            checked=checked,
        )

    def ceiling(self, concurrency: int) -> Ceiling | None:
        """The same as what the client alone can do; None where the echo gave no answer."""
        result = self.result(ceiling=None, checked=None)
        if result is None or not result.answered:
            return None
        return Ceiling(
            form=result.form, concurrency=concurrency, requests_s=result.requests_s, latency=result.service_time
        )

    @property
    def _bin_s(self) -> float:
        return next((bin_s for bin_s in _BINS_S if self.step.end_s / bin_s <= MAX_BINS), _BINS_S[-1])

    def _by_shape(self, latency: Floats, number: NDArray[np.uint16]) -> dict[str, Distribution]:
        if len(set(self._shape_names)) < 2:
            return {}
        names = np.array(self._shape_names)[number]
        return {name: Distribution.of(latency[names == name]) for name in dict.fromkeys(self._shape_names)}

    def _timeline(self, rows: _Rows, from_s: float, end_s: float) -> Iterator[Moment]:
        bin_s, latency = self._bin_s, rows.done - rows.planned
        last_s = max(end_s, float(rows.done.max(initial=0.0)))
        planned, done = (np.floor(at / bin_s).astype(np.int64) for at in (rows.planned, rows.done))
        for place in range(int(np.ceil(last_s / bin_s))):
            at_s = round(place * bin_s, 6)
            came = done == place
            own = latency[came & rows.is_answer]
            yield Moment(
                at_s=at_s,
                phase=self._phase(at_s, end_s),
                sent=int((planned == place).sum()),
                answered=len(own),
                failed=int((came & ~rows.is_answer).sum()),
                p50_ms=_percentile(own, 50),
                p99_ms=_percentile(own, 99),
                max_ms=_percentile(own, 100),
            )

    def _phase(self, at_s: float, end_s: float) -> str:
        if at_s < self.step.ramp_s:
            return "ramp"
        if at_s < self.step.measured_from_s:
            return "warm-up"
        return "measured" if at_s < end_s else "tail"


class _Rows:
    """The columns of a part, as numpy has them; ``codes`` are those of its kinds."""

    planned: Floats
    sent: Floats
    done: Floats
    number: NDArray[np.uint16]
    received: NDArray[np.int64]
    kind: NDArray[np.int16]
    is_answer: NDArray[np.bool_]

    def __init__(self, part: Part, codes: Sequence[int]) -> None:
        self.planned, self.sent, self.done = np.array(part.planned), np.array(part.sent), np.array(part.done)
        self.number, self.received = np.array(part.number, np.uint16), np.array(part.received, np.int64)
        self.kind = np.array(codes, np.int16)[np.array(part.kind, np.int16)]
        self.is_answer = self.kind == ANSWERED

    @classmethod
    def joined(cls, parts: Sequence[_Rows]) -> _Rows:
        whole = cls(Part(), [ANSWERED])
        for name in vars(whole):
            setattr(whole, name, np.concatenate([getattr(whole, name), *(getattr(part, name) for part in parts)]))
        return whole


def _recent(parts: Sequence[_Rows]) -> tuple[list[Floats], list[Floats]]:
    latency = [(rows.done - rows.planned)[rows.is_answer] for rows in parts]
    return latency, [rows.sent - rows.planned for rows in parts]


def _late(
    latency: Distribution, lateness: Distribution, ticks: Distribution, kinds: Mapping[str, int], share: float | None
) -> Iterator[str]:
    """Why the figures are not the service's alone. Sends are late in open loops alone; there they say all of it."""
    if spoiled := _spoiled(latency, lateness, LATE_SHARES):
        yield (
            f"the client was late for its planned sends: by {lateness.p50_ms:.2f} ms at the median, "
            f"{lateness.p99_ms:.2f} ms at p99, {lateness.max_ms:.2f} ms at most, which spoils {spoiled}"
        )
    elif not lateness.count and (spoiled := _spoiled(latency, ticks, STOOD_STILL_SHARES)):
        yield f"the client stood still: by {ticks.max_ms:.2f} ms at most, which spoils {spoiled}"
    if kinds[TOO_MANY]:
        yield f"{kinds[TOO_MANY]} planned sends did not happen: --max-in-flight requests were under way"
    if kinds[BEHIND]:
        yield f"{kinds[BEHIND]} planned sends did not happen: the client was still behind at the end"
    if any(kind.startswith(CLIENT) for kind in kinds):
        yield "some requests failed in the client itself"
    if share is not None and share > CEILING_SHARE:
        near = f"at {share:.0%} of its own ceiling" if share < 1 else "as fast as it can go"
        yield f"the client was {near}, by what it reached against a bare echo"


def _spoiled(latency: Distribution, held_up: Distribution, shares: Mapping[str, float]) -> str:
    """The percentiles of latencies of which too large a share may be the client's; empty where there are none.

    One that no answer lies beyond is the largest by another name, and is shown nowhere.
    """
    fewest = min(latency.count, held_up.count)
    carried = [at for at in shares if fewest and (at == "max" or is_carried(fewest, float(at)))]
    least = {at: LATE_MAX_MS if at == "max" else LATE_MS for at in carried}
    found = [at for at in carried if _told(held_up, at) > max(least[at], shares[at] * _told(latency, at))]
    return ", ".join(at if at == "max" else f"p{at}" for at in found)


def _told(durations: Distribution, at: str) -> float:
    return durations.max_ms if at == "max" else durations.percentiles_ms.get(at, 0.0)


def _joined(parts: Sequence[Floats]) -> Floats:
    return np.concatenate(parts)


def _percentile(seconds: Floats, percent: float) -> float | None:
    return float(np.percentile(seconds, percent) * 1e3) if len(seconds) else None
