"""What must be said before any figure: answers that were wrong, steps whose figures are the client's too, a cut run."""

from __future__ import annotations

from dataclasses import dataclass

from service.load.results import Results, StepResult

FEW = (
    "A dash stands where a step has too few answers for a percentile: p99 takes 100, p99.9 takes 1,000; "
    "with fewer it would be the slowest answer by another name."
)
CLOSED = (
    "In a closed loop a stall of the service stops the sending too: requests that would have met the stall are never "
    "sent, so these percentiles hide it. Read open-loop steps for what users see."
)
FAILED = (
    "Failed requests are in no percentile: they have no whole answer whose time could be taken. Where many fail, the "
    "latencies of the rest look better than the service was."
)
CEILINGS = (
    "What this client can do at most: the same bodies sent and the same answers received, by as many client processes, "
    "with a bare echo for each of them in place of the service. A step near its ceiling measures the client."
)
CEILINGS_OF_GRPC = " Over gRPC an echo costs about as much as a client, so that what is shown is of the two together."
CEILINGS_WITHOUT_TLS = " The echo speaks no TLS: what that costs the client is not in its ceiling."
_MAX_REASONS = 10
SPOILING_SHARE = 0.001
"""From so many failures on, percentiles that are shown have none of them in it."""


def ceilings_said(results: Results) -> str:
    """What a ceiling is, in this run."""
    grpc = CEILINGS_OF_GRPC if any(ceiling.form == "grpc" for ceiling in results.ceilings) else ""
    return CEILINGS + grpc + CEILINGS_WITHOUT_TLS * results.url.startswith("https")


@dataclass(frozen=True, slots=True)
class Caveat:
    """``about`` names the step, or the run; ``meaning`` is what follows from ``reasons``."""

    about: str
    reasons: tuple[str, ...]
    meaning: str


def caveats(results: Results) -> list[Caveat]:
    """The gravest first."""
    wrong = [_of_wrong_answers(step) for step in results.steps if step.checked and not step.checked.is_right]
    late = [
        Caveat(step.name, step.late, "These figures are not the service's alone: what the client added is in them.")
        for step in results.steps
        if step.late
    ]
    failed = [_of_failures(step) for step in results.steps if step.failed > SPOILING_SHARE * step.planned]
    number = len(results.steps)
    cut = Caveat(
        "The run was cut short",
        (
            f"{number} step{'s have' if number != 1 else ' has'} figures, the last of them perhaps of less time than "
            "planned",
        ),
        "What is missing was never measured; it did not fail.",
    )
    return [*wrong, *failed, *late, *([cut] if results.was_cut else [])]


def _of_failures(step: StepResult) -> Caveat:
    share = step.failed / step.planned
    return Caveat(
        step.name,
        (f"{step.failed:,} of {step.planned:,} requests failed, {share:.1%}",),
        f"Percentiles are of the answers alone: of all who asked, nothing beyond p{100 * (1 - share):.4g} is known.",
    )


def _of_wrong_answers(step: StepResult) -> Caveat:
    assert step.checked is not None
    reasons = list(step.checked.wrong[:_MAX_REASONS])
    if (more := len(step.checked.wrong) - len(reasons)) > 0:
        reasons.append(f"and {more:,} more")
    if not step.checked.same_bits:
        reasons.append("answers to one and the same request differ in their bits")
    return Caveat(
        step.name,
        tuple(reasons),
        f"Wrong answers among the {step.checked.answers:,} that were checked: how fast they came says nothing.",
    )
