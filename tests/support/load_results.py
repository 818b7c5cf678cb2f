"""Results of load tests that nobody ran, from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.load.results import Ceiling, Checked, Distribution, Moment, Results, StepResult

STAGE_SHARES = {"read": 0.05, "parse": 0.1, "queue": 0.35, "compute": 0.3, "encode": 0.1}
PHASES = ((1, "ramp"), (2, "warm-up"), (10, "measured"), (11, "tail"))


def make_results(
    *,
    seed: int = 0,
    forms: Sequence[str] = ("safetensors",),
    rates: Sequence[float] = (100, 200),
    concurrencies: Sequence[int] = (),
    num_answers: int | None = None,
    slowness: float = 1.0,
    num_failed: int = 0,
    late: Sequence[str] = (),
    wrong: Sequence[str] = (),
    same_bits: bool = True,
    shapes: Sequence[str] = ("1x8x128x64",),
    **given: Any,
) -> Results:
    """A run of some steps, ``num_answers`` each (as many as its rate asks for, without). ``given`` are Results' own."""
    random = np.random.default_rng(seed)
    made = [
        make_step(
            random,
            form=form,
            rate_s=None if rate is None else float(rate),
            concurrency=concurrency,
            num_answers=num_answers,
            slowness=slowness,
            num_failed=num_failed,
            late=late,
            wrong=wrong,
            same_bits=same_bits,
            shapes=shapes,
        )
        for form in forms
        for rate, concurrency in [*((rate, None) for rate in rates), *((None, one) for one in concurrencies)]
    ]
    known: dict[str, Any] = {
        "written": "2026-02-03T04:05:06+00:00",
        "command": "attn load http://127.0.0.1:8000 --rate 100,200",
        "url": "http://127.0.0.1:8000",
        "service": {"version": "0.1.0", "device": "cpu", "torch": "2.13.0"},
        "client": {"processes": "2", "cores": "8"},
        "options": {"causal": True},
        "seed": seed,
        "was_cut": False,
        "ceilings": tuple(
            Ceiling(form=form, concurrency=at, requests_s=2000.0 * at / (at + 4), latency=_of(random, 400, 0.5))
            for form in forms
            for at in (1, 8, 32)
        ),
    }
    return Results(shapes=tuple(shapes), steps=tuple(made), **{**known, **given})


def make_step(
    random: np.random.Generator,
    *,
    form: str,
    rate_s: float | None,
    concurrency: int | None,
    num_answers: int | None,
    slowness: float,
    num_failed: int,
    late: Sequence[str],
    wrong: Sequence[str],
    same_bits: bool,
    shapes: Sequence[str],
) -> StepResult:
    """Slower the more it is asked; in an open loop some requests wait for their send."""
    is_open = rate_s is not None
    reached = rate_s if rate_s is not None else 400.0 * (concurrency or 1) / ((concurrency or 1) + 3)
    answered = int(reached * 8) if num_answers is None else num_answers
    service_s = _seconds(random, answered, slowness * (4 + reached / 40))
    waited_s = random.exponential(0.0002, answered) * (random.random(answered) < 0.3) + 0.05 * (
        random.random(answered) < 0.004
    )
    latency_s = service_s + waited_s if is_open else service_s
    of_shape = np.arange(answered) % len(shapes)
    return StepResult(
        form=form,
        loop="open" if is_open else "closed",
        rate_s=rate_s,
        arrivals="poisson" if is_open else None,
        concurrency=concurrency,
        ramp_s=1.0,
        warm_up_s=1.0,
        duration_s=8.0,
        planned=answered + num_failed,
        answered=answered,
        failed=num_failed,
        requests_s=answered / 8,
        sent_mb_s=answered * 0.4 / 8,
        received_mb_s=answered * 0.13 / 8,
        latency=Distribution.of(latency_s),
        service_time=Distribution.of(service_s),
        lateness=Distribution.of(waited_s if is_open else np.zeros(0)),
        ticks=Distribution.of(np.array([0.0001, 0.0002])),
        errors=_errors(num_failed),
        details=dict.fromkeys(_errors(num_failed), "no more than that"),
        stages={name: Distribution.of(service_s * share) for name, share in STAGE_SHARES.items()},
        shapes={shape: Distribution.of(latency_s[of_shape == index]) for index, shape in enumerate(shapes)},
        bin_s=0.25,
        timeline=tuple(_moment(random, at / 4, reached, latency_s, num_failed) for at in range(44)),
        ceiling_share=reached / 1500,
        late=tuple(late),
        checked=Checked(
            answers=32, wrong=tuple(wrong), output="context", error=1e-7, allowed=4e-7, same_bits=same_bits
        ),
    )


def _errors(num_failed: int) -> Mapping[str, int]:
    refused = num_failed // 2
    kinds = {"429 overloaded": refused, "timeout": num_failed - refused}
    return {kind: number for kind, number in kinds.items() if number}


def _moment(
    random: np.random.Generator, at_s: float, rate: float, latency_s: NDArray[np.float64], num_failed: int
) -> Moment:
    phase = next(phase for end, phase in PHASES if at_s < end)
    level = {"ramp": at_s, "tail": 0.0}.get(phase, 1.0)
    sent = int(random.poisson(rate * level / 4)) if level else 0
    drawn = random.choice(latency_s, sent) * 1e3 if sent and len(latency_s) else None
    return Moment(
        at_s=at_s,
        phase=phase,
        sent=sent,
        answered=sent,
        failed=num_failed // 32 if phase == "measured" else 0,
        p50_ms=float(np.median(drawn)) if drawn is not None else None,
        p99_ms=float(np.percentile(drawn, 99)) if drawn is not None else None,
        max_ms=float(drawn.max()) if drawn is not None else None,
    )


def _seconds(random: np.random.Generator, number: int, middle_ms: float) -> NDArray[np.float64]:
    seconds: NDArray[np.float64] = middle_ms / 1e3 * random.lognormal(0.0, 0.35, number)
    return seconds


def _of(random: np.random.Generator, number: int, middle_ms: float) -> Distribution:
    return Distribution.of(_seconds(random, number, middle_ms))
