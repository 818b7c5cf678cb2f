"""A load test as one HTML file that needs nothing else: no network, no neighbour files. It holds plotly.js itself."""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from service.charts import plotly_file
from service.load import digits, figures
from service.load.caveats import CLOSED, FAILED, FEW, caveats, ceilings_said
from service.load.comparison import RULE, Change, Pair, compare
from service.load.digits import NONE, max_ms, milliseconds, percentile_ms
from service.load.markup import (
    Cell,
    Row,
    chart,
    facts,
    note,
    paragraph,
    section,
    side_by_side,
    subheading,
    table,
    warning,
)
from service.load.results import PERCENTILES, Distribution, Results, StepResult

_SLOT = re.compile(r"\{\{(\w+)\}\}")
_SHOWN = (50.0, 90.0, 99.0, 99.9)
_CURVE_SHOWN = (*PERCENTILES, 99.99)
_NOT_ALONE = "not the service's alone"
_MEASURES = {"requests_s": "requests/s", "p50_ms": "p50, ms", "p99_ms": "p99, ms", "p99_9_ms": "p99.9, ms"}


def page(results: Results, before: Results | None = None) -> str:
    """The whole report; with ``before``, an earlier run, what changed since.

    Raises: ModuleNotFoundError without plotly.
    """
    parts = (
        _asked(results),
        _caveats(results),
        _steps(results),
        _against(results, before) if before else "",
        _latency_by_rate(results),
        _curves(results),
        _timelines(results),
        _stages(results),
        _errors(results),
        _lateness(results),
        _ceilings(results),
        _shapes(results),
    )
    slots = {
        "title": f"Load test of {html.escape(results.url)}",
        "heading": f"Load test of {html.escape(results.url)}",
        "subtitle": html.escape(_subtitle(results)),
        "body": "\n".join(part for part in parts if part),
        "plotly": _plotly(),
    }
    template = importlib.resources.files("service.load").joinpath("page.html").read_text("utf-8")
    # In one pass: what fills a slot is never searched for slots.
    return _SLOT.sub(lambda slot: slots[slot[1]], template)


def _plotly() -> str:
    return plotly_file().read_text("utf-8").replace("</script", "<\\/script")


def _subtitle(results: Results) -> str:
    number = len(results.steps)
    steps = "1 step" if number == 1 else f"{number} steps"
    version, device = (results.service.get(name) for name in ("version", "device"))
    service = ", ".join(part for part in (f"attn {version}" if version else "", device and f"on {device}") if part)
    return " · ".join(part for part in (service, steps, results.written.replace("T", " ")) if part)


def _asked(results: Results) -> str:
    known = [
        ("Command", results.command),
        ("Address", results.url),
        ("Shapes", ", ".join(results.shapes)),
        ("Options", _options(results.options) or "none"),
        ("Service", _members(results.service)),
        ("Client", _members({name: said for name, said in results.client.items() if name not in _ROWS})),
        ("Time", _times(results.steps)),
        *((row, results.client[name]) for name, row in _ROWS.items() if row and name in results.client),
        ("Seed", str(results.seed)),
        ("Written", results.written.replace("T", " ")),
    ]
    return section("What was asked", facts(known, code=frozenset({"Command", "Address"})))


_ROWS = {"times": "", "limits": "Limits", "checks": "Checked"}
"""What the client says that has a row of its own here; the times are those of the steps."""


def _members(mapping: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in mapping.items())


def _options(options: Mapping[str, Any]) -> str:
    """As they stand in a request."""
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items())


def _times(steps: Sequence[StepResult]) -> str:
    """Seconds of each step, once where all are alike."""
    said = dict.fromkeys(
        f"{step.duration_s:g} s measured, after {step.ramp_s:g} s of ramp and {step.warm_up_s:g} s of warm-up "
        "that do not count"
        for step in steps
    )
    return "; ".join(said)


def _caveats(results: Results) -> str:
    return section(
        "Before you read the figures",
        *(warning(caveat.about, caveat.reasons, caveat.meaning) for caveat in caveats(results)),
    )


def _steps(results: Results) -> str:
    headings = (
        "Step",
        "planned",
        "answered",
        "failed",
        "requests/s",
        "MB/s sent",
        "MB/s received",
        *(f"p{at:g} ms" for at in _SHOWN),
        "max ms",
        "of client's ceiling",
        "answers checked",
    )
    steps = results.steps
    if not steps:
        return section("Steps", paragraph("No step was finished."))
    return section(
        "Steps",
        table(
            "Latency: in an open loop from the planned send to the whole answer, in a closed one from the send",
            headings,
            (_step_row(step) for step in steps),
        ),
        note(FAILED) if any(step.failed for step in steps) else "",
        note(FEW) if any(not digits.is_carried(step.answered, 99.9) for step in steps) else "",
        note(CLOSED) if any(step.loop == "closed" for step in steps) else "",
        _checked(steps),
    )


def _step_row(step: StepResult) -> Row:
    return _row(
        step,
        digits.count(step.planned),
        digits.count(step.answered),
        Cell(digits.count(step.failed), "fault" if step.failed else ""),
        digits.scaled(step.requests_s),
        digits.scaled(step.sent_mb_s),
        digits.scaled(step.received_mb_s),
        *(milliseconds(percentile_ms(step.latency, at)) for at in _SHOWN),
        milliseconds(max_ms(step.latency)),
        digits.percent(step.ceiling_share),
        _verdict_of_check(step),
        warning=_NOT_ALONE if step.late else "",
    )


def _row(step: StepResult, *cells: str | Cell, warning: str = "") -> Row:
    return Row(step.form, step.level, cells, warning)


def _verdict_of_check(step: StepResult) -> str | Cell:
    if step.checked is None:
        return "none"
    if step.checked.is_right:
        return f"{step.checked.answers:,}, all right"
    fault = f"{len(step.checked.wrong):,} wrong" if step.checked.wrong else "bits differ"
    return Cell(f"{step.checked.answers:,}, {fault}", "fault")


def _checked(steps: Sequence[StepResult]) -> str:
    rows = [
        _row(
            step,
            digits.count(step.checked.answers),
            digits.count(len(step.checked.wrong)),
            step.checked.output,
            f"{step.checked.error:.2g}",
            f"{step.checked.allowed:.2g}",
            "yes" if step.checked.same_bits else Cell("no", "fault"),
            Cell(", ".join(step.checked.only_compared) or "none", "text"),
        )
        for step in steps
        if step.checked
    ]
    if not rows:
        return ""
    headings = (
        "Step",
        "answers",
        "wrong",
        "nearest to its limit",
        "error",
        "allowed",
        "same request, same bits",
        "outputs that were only compared",
    )
    checked = table("Answers held against the formula in float64", headings, rows)
    return f"<details><summary>How the answers were checked</summary>{checked}</details>"


def _against(results: Results, before: Results) -> str:
    comparison = compare(results, before)
    differences = (Row(one.what, "", (Cell(one.old, "text"), Cell(one.new, "text"))) for one in comparison.differences)
    return section(
        "Against the earlier run",
        paragraph(f"The earlier run was written {before.written.replace('T', ' ')}."),
        paragraph(comparison.caution, "caution") if comparison.caution else "",
        table("What differs", ("What", "earlier", "now"), differences, texts=("earlier", "now"))
        if comparison.caution
        else "",
        *_changes(comparison.pairs),
        _without_partner("Only in this run", comparison.only_new),
        _without_partner("Only in the earlier run", comparison.only_old),
    )


def _changes(pairs: Sequence[Pair]) -> list[str]:
    if not pairs:
        return [paragraph("No step of the one run has a partner in the other.")]
    says = "Latency of both runs: the earlier one hollow, this one filled"
    return [
        table("Earlier → now", ("Step", *_MEASURES.values(), "failed"), map(_pair_row, pairs)),
        note(RULE),
        chart("changes", figures.change_dots(pairs), says),
    ]


def _pair_row(pair: Pair) -> Row:
    form, _, level = pair.name.partition(", ")
    late = " and ".join({"old": "earlier", "new": "now"}[side] for side in pair.late)
    return Row(form, level, [*map(_change_cell, pair.changes)], f"{_NOT_ALONE} ({late})" if late else "")


def _change_cell(change: Change) -> Cell:
    write = {"requests_s": digits.scaled, "failed_share": digits.percent}.get(change.measure, milliseconds)
    ratio = f"× {change.ratio:.2f}, " if change.ratio is not None else ""
    look = {"better": "good", "worse": "fault"}.get(change.verdict, "")
    return Cell(f"{write(change.old)} → {write(change.new)}", look, f"{ratio}{change.verdict}")


def _without_partner(what: str, names: Sequence[str]) -> str:
    return paragraph(f"{what}: {'; '.join(names)}.") if names else ""


def _latency_by_rate(results: Results) -> str:
    answered = [step for step in results.steps if step.latency.count]
    loops = {loop: steps for loop in ("open", "closed") if (steps := [step for step in answered if step.loop == loop])}
    says = {
        "open": "Open loop: latency against the rate that was planned",
        "closed": "Closed loop: latency against the rate that was reached",
    }
    parts: list[str] = []
    for loop, steps in loops.items():
        rows = (
            _row(
                step,
                digits.scaled(step.rate_s) if loop == "open" else digits.count(step.concurrency or 0),
                digits.scaled(step.requests_s),
                *(milliseconds(percentile_ms(step.latency, at)) for at in (50.0, 99.0, 99.9)),
            )
            for step in steps
        )
        headings = ("Step", "planned/s" if loop == "open" else "at once", "answered/s", "p50 ms", "p99 ms", "p99.9 ms")
        drawn = figures.latency_by_rate(steps, loop=loop)
        parts += [subheading(says[loop]), note(CLOSED) if loop == "closed" else ""]
        parts.append(chart(f"latency-{loop}", drawn, says[loop], table(says[loop], headings, rows)))
    return section("Latency against load", *parts)


def _curves(results: Results) -> str:
    answered = [step for step in results.steps if step.latency.count]
    if not answered:
        return ""
    least = min(durations.curve([0.0])[0] for step in answered for durations in (step.latency, step.service_time))
    most = max(step.latency.max_ms for step in answered)
    parts = []
    for index, ((form, loop), steps) in enumerate(figures.by_form_and_loop(answered).items()):
        says = f"Latency by percentile: {form}, {loop} loop"
        numbers = table(
            says, ("Step", "measured", *(f"p{at:g} ms" for at in _CURVE_SHOWN), "max ms"), _curve_rows(steps)
        )
        drawn = figures.percentile_curves(steps, least_ms=least, most_ms=most)
        parts.append(subheading(f"{form}, {loop} loop") + chart(f"curve-{index}", drawn, says, numbers))
    return section(
        "Latency by percentile",
        note(
            "Solid: from the planned send, which is what a user waits. Dashed, in an open loop: from the send as it "
            "happened. A gap between the two is waiting that a test without a plan would have left out (coordinated "
            "omission). Each further nine of the axis takes the same width, and a line ends with the slowest answer. "
            "All charts here have one latency axis."
        ),
        side_by_side(parts),
    )


def _curve_rows(steps: Sequence[StepResult]) -> list[Row]:
    rows = []
    for step in steps:
        rows.append(
            _row(step, "from the plan" if step.loop == "open" else "from the send", *_curve_cells(step.latency))
        )
        if step.loop == "open":
            rows.append(_row(step, "from the send", *_curve_cells(step.service_time)))
    return rows


def _curve_cells(durations: Distribution) -> list[str]:
    found = zip(_CURVE_SHOWN, durations.curve(_CURVE_SHOWN), strict=True)
    cells = [milliseconds(value) if digits.is_carried(durations.count, at) else NONE for at, value in found]
    return [*cells, milliseconds(max_ms(durations))]


def _timelines(results: Results) -> str:
    headings = ("Seconds", "phase", "sent", "answered", "failed", "p50 ms", "p99 ms", "max ms")
    parts = []
    for index, (step, name) in enumerate(zip(results.steps, _names(results.steps), strict=True)):
        if not step.timeline:
            continue
        rows = (
            Row(
                f"{moment.at_s:g}",
                "",
                (
                    Cell(moment.phase, "text"),
                    digits.count(moment.sent),
                    digits.count(moment.answered),
                    digits.count(moment.failed),
                    *map(milliseconds, (moment.p50_ms, moment.p99_ms, moment.max_ms)),
                ),
            )
            for moment in step.timeline
        )
        says = f"Over time: {name}"
        numbers = table(f"{says}; counts of {step.bin_s:g} s each", headings, rows, texts=("phase",))
        parts.append(subheading(name) + chart(f"time-{index}", figures.timeline(step), says, numbers))
    return section(
        "Over time",
        note("Shaded time does not count. Answers stand where they came in, sends where they were planned.")
        if parts
        else "",
        side_by_side(parts) if parts else "",
    )


def _names(steps: Sequence[StepResult]) -> list[str]:
    return digits.told_apart([step.name for step in steps])


def _stages(results: Results) -> str:
    steps = [step for step in results.steps if any(stage.count for stage in step.stages.values())]
    if not steps:
        return ""
    stages = list(dict.fromkeys(stage for step in steps for stage in step.stages))
    means = (
        _row(step, *(_mean(step.stages.get(stage)) for stage in stages), milliseconds(figures.outside_ms(step)))
        for step in steps
    )
    says = "Mean time of each stage, ms"
    numbers = table(says, ("Step", *stages, "outside the service"), means)
    tails = (
        _row(step, *(milliseconds(digits.stage_ms(step, stage, at)) for stage in stages for at in (50.0, 99.0)))
        for step in steps
    )
    return section(
        "Where the time goes",
        note(
            "The service's own times, from Server-Timing. What is outside the service is the rest of the mean time "
            "between send and answer: network, kernel and client."
        ),
        chart("stages", figures.stage_bars(steps, stages), says, numbers),
        table(
            "p50 and p99 of each stage, ms; those of several stages do not add up",
            ("Step", *(f"{stage} p{at}" for stage in stages for at in (50, 99))),
            tails,
        ),
    )


def _mean(durations: Distribution | None) -> str:
    return milliseconds(durations.mean_ms if durations and durations.count else None)


def _errors(results: Results) -> str:
    kinds = list(dict.fromkeys(kind for step in results.steps for kind in step.errors))
    if not kinds:
        return section("Errors", paragraph("No request failed.")) if results.steps else ""
    steps = [step for step in results.steps if step.errors]
    rows = (
        _row(
            step,
            *(digits.count(step.errors.get(kind, 0)) for kind in kinds),
            digits.percent(step.failed / step.planned if step.planned else None),
        )
        for step in steps
    )
    says = "Failed requests by kind"
    numbers = table(says, ("Step", *kinds, "of the planned"), rows)
    alone = note("Steps in which nothing failed are left out.") if len(steps) < len(results.steps) else ""
    told = {kind: detail for step in steps for kind, detail in step.details.items() if detail}
    words = table(
        "What the first of each kind said",
        ("Kind", "in its words"),
        (Row(kind, "", (Cell(detail, "text"),)) for kind, detail in told.items()),
        texts=("in its words",),
    )
    return section("Errors", alone, chart("errors", figures.error_bars(steps), says, numbers), words if told else "")


def _lateness(results: Results) -> str:
    steps = [step for step in results.steps if step.loop == "open" and step.lateness.count]
    if not steps:
        return ""
    rows = (
        _row(
            step,
            *(milliseconds(percentile_ms(step.lateness, at)) for at in (50.0, 99.0, 99.9)),
            milliseconds(max_ms(step.lateness)),
        )
        for step in steps
    )
    says = "How late requests were sent, against the plan"
    numbers = table(says, ("Step", "p50 ms", "p99 ms", "p99.9 ms", "max ms"), rows)
    return section(
        "Lateness of the client",
        note(
            "What lies between the planned send and the send as it happened. Each latency of an open loop has it in it."
        ),
        chart("lateness", figures.lateness_dots(steps), says, numbers),
    )


def _ceilings(results: Results) -> str:
    if not results.ceilings:
        return ""
    rows = (
        Row(
            ceiling.form,
            "",
            (
                digits.count(ceiling.concurrency),
                digits.scaled(ceiling.requests_s),
                milliseconds(percentile_ms(ceiling.latency, 50)),
            ),
        )
        for ceiling in results.ceilings
    )
    says = "Requests per second of the client against a bare echo"
    numbers = table(says, ("Form", "at once", "requests/s", "p50 ms"), rows)
    return section(
        "The client's ceiling",
        note(ceilings_said(results)),
        chart("ceilings", figures.ceiling_bars(results), says, numbers),
    )


def _shapes(results: Results) -> str:
    steps = [step for step in results.steps if len(step.shapes) > 1]
    if not steps:
        return ""
    rows = (
        Row(
            step.form,
            step.level,
            (
                Cell(shape, "text"),
                digits.count(durations.count),
                *(milliseconds(percentile_ms(durations, at)) for at in _SHOWN),
                milliseconds(max_ms(durations)),
            ),
        )
        for step in steps
        for shape, durations in step.shapes.items()
    )
    says = "Latency by shape"
    numbers = table(
        says, ("Step", "shape", "answers", *(f"p{at:g} ms" for at in _SHOWN), "max ms"), rows, texts=("shape",)
    )
    return section(says, chart("shapes", figures.shape_dots(steps), says, numbers))
