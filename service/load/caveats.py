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
    "What this client can do at most: the same bodies sent and the same answers received, on the same processes, with "
    "a bare echo in place of the service. A step near its ceiling measures the client."
)


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
    cut = Caveat(
        "The run was cut short",
        (f"{len(results.steps)} steps have figures, and the last of them may be of less time than planned.",),
        "What is missing was never measured; it did not fail.",
    )
    return [*wrong, *late, *([cut] if results.was_cut else [])]


def _of_wrong_answers(step: StepResult) -> Caveat:
    assert step.checked is not None
    reasons = list(step.checked.wrong)
    if not step.checked.same_bits:
        reasons.append("answers to one and the same request differ in their bits")
    return Caveat(
        step.name,
        tuple(reasons),
        f"Wrong answers among the {step.checked.answers:,} that were checked: how fast they came says nothing.",
    )
