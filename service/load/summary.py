"""A load test in the terminal, at the end of a run: what must be said first in red, then figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from service.load import digits
from service.load.caveats import CLOSED, FAILED, FEW, Caveat, caveats, ceilings_said
from service.load.comparison import RULE, Change, Comparison, Pair
from service.load.digits import max_ms, milliseconds, percentile_ms
from service.load.results import Results, StepResult

_WIDE = 120
"""Columns of a terminal that takes every column of the steps."""
_LEAST_WIDTH, _WIDEST = 80, 1000
_LOOKS = {"better": "green", "worse": "bold red", "same": "", "too few": "dim"}
_MEASURES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "requests_s": ("requests/s", digits.scaled),
    "p50_ms": ("p50 ms", milliseconds),
    "p99_ms": ("p99 ms", milliseconds),
    "p99_9_ms": ("p99.9 ms", milliseconds),
    "failed_share": ("failed", digits.percent),
}


def show(results: Results, console: Console) -> None:
    """All of a run that fits a terminal; the page has the rest."""
    _show_steps(results.steps, console)
    _show_stages(results.steps, console)
    _show_errors(results.steps, console)
    _show_ceilings(results, console)
    _show_checks(results.steps, console)
    for caveat in caveats(results):
        _show_caveat(caveat, console)


def show_comparison(comparison: Comparison, console: Console) -> None:
    """What changed, pair by pair: the earlier run, this one, and what to make of it."""
    if comparison.caution:
        console.print(Text(comparison.caution, "bold yellow"))
        _print(
            console,
            "",
            ("What", "earlier", "now"),
            ((one.what, one.old, one.new) for one in comparison.differences),
            texts=3,
        )
    for pair in comparison.pairs:
        _show_pair(pair, console)
    if comparison.pairs:
        console.print(Text(RULE, "dim"))
    for what, names in (("this run", comparison.only_new), ("the earlier run", comparison.only_old)):
        if names:
            console.print(Text(f"Only in {what}: {'; '.join(names)}"))


def _show_steps(steps: Sequence[StepResult], console: Console) -> None:
    if not steps:
        console.print(Text("No step has figures: no send fell into its measured time."))
        return
    is_wide = console.width >= _WIDE
    more = ("planned", "answered", "MB/s out", "MB/s in") if is_wide else ()
    at = (50.0, 90.0, 99.0, 99.9) if is_wide else (50.0, 99.0, 99.9)
    headings = (
        "form",
        "load",
        "req/s",
        "failed",
        *more,
        *(f"p{one:g}" for one in at),
        "max",
        *(("ceiling",) if is_wide else ()),
    )
    rows = (
        (
            step.form,
            _load(step),
            digits.scaled(step.requests_s),
            Text(digits.count(step.failed), "bold red" if step.failed else ""),
            *(_amounts(step) if is_wide else ()),
            *(milliseconds(percentile_ms(step.latency, one)) for one in at),
            milliseconds(max_ms(step.latency)),
            *((digits.percent(step.ceiling_share),) if is_wide else ()),
        )
        for step in steps
    )
    _print(console, "Latency in ms", headings, rows, texts=2)
    if any(step.failed for step in steps):
        console.print(Text(FAILED, "dim"))
    if any(not digits.is_carried(step.answered, 99.9) for step in steps):
        console.print(Text(FEW, "dim"))
    if any(step.loop == "closed" for step in steps):
        console.print(Text(CLOSED, "dim"))


def _load(step: StepResult) -> str:
    return f"{step.rate_s:g}/s {step.arrivals}" if step.loop == "open" else f"{step.concurrency} at once"


def _amounts(step: StepResult) -> Iterable[str]:
    return (
        digits.count(step.planned),
        digits.count(step.answered),
        digits.scaled(step.sent_mb_s),
        digits.scaled(step.received_mb_s),
    )


def _show_stages(steps: Sequence[StepResult], console: Console) -> None:
    stages = list(dict.fromkeys(stage for step in steps for stage in step.stages))
    if stages:
        rows = (
            (
                *((step.form, _load(step)) if at == 50 else ("", "")),
                f"p{at:g}",
                *(milliseconds(digits.stage_ms(step, stage, at)) for stage in stages),
            )
            for step in steps
            for at in (50.0, 99.0)
        )
        _print(console, "The service's own times in ms", ("form", "load", "", *stages), rows, texts=3)


def _show_errors(steps: Sequence[StepResult], console: Console) -> None:
    rows = [
        (step.form, _load(step), digits.count(number), kind) for step in steps for kind, number in step.errors.items()
    ]
    if rows:
        _print(console, "Failed requests", ("form", "load", "number", "kind"), rows, texts=2, last_text=True)
    told = {kind: detail for step in steps for kind, detail in step.details.items() if detail}
    for kind, detail in told.items():
        said = detail.splitlines()[0]
        console.print(Text(said if said.startswith(kind) else f"{kind}: {said}", "dim"))


def _show_ceilings(results: Results, console: Console) -> None:
    rows = [
        (
            one.form,
            f"{one.concurrency} at once",
            digits.scaled(one.requests_s),
            milliseconds(percentile_ms(one.latency, 50)),
        )
        for one in results.ceilings
    ]
    if rows:
        _print(console, "The client's ceiling", ("form", "load", "req/s", "p50 ms"), rows, texts=2)
        console.print(Text(ceilings_said(results), "dim"))


def _show_checks(steps: Sequence[StepResult], console: Console) -> None:
    checked = [step.checked for step in steps if step.checked is not None]
    if not checked:
        return
    number, wrong = sum(one.answers for one in checked), sum(len(one.wrong) for one in checked)
    answered = sum(step.answered for step in steps)
    only = sorted({name for one in checked for name in one.only_compared})
    is_right = all(one.is_right for one in checked)
    verdict = "all right, and equal bit for bit where they answer one request" if is_right else f"{wrong:,} wrong"
    beside = f"; of {', '.join(only)} nothing but that they are equal was looked at" if only else ""
    console.print(Text(f"Answers checked against torch in float64: {number:,} of {answered:,}, {verdict}{beside}"))


def _show_caveat(caveat: Caveat, console: Console) -> None:
    reasons = "; ".join(reason.rstrip(".") for reason in caveat.reasons)
    console.print(Text(f"{caveat.about}: {reasons}. {caveat.meaning}", "bold red"))


def _show_pair(pair: Pair, console: Console) -> None:
    late = "".join(f" [{'earlier' if side == 'old' else 'now'}: not the service's alone]" for side in pair.late)
    _print(
        console,
        pair.name + late,
        ("", "earlier", "now", "ratio", "verdict"),
        map(_change, pair.changes),
        texts=1,
        last_text=True,
    )


def _change(change: Change) -> tuple[str | Text, ...]:
    name, write = _MEASURES[change.measure]
    ratio = digits.NONE if change.ratio is None else f"{change.ratio:.2f}"
    return name, write(change.old), write(change.new), ratio, Text(change.verdict, _LOOKS[change.verdict])


def _print(
    console: Console,
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    texts: int,
    last_text: bool = False,
) -> None:
    """A table whose first ``texts`` columns are words, and the last where said so; whatever is too long is folded."""
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for index, heading in enumerate(headings):
        is_text = index < texts or (last_text and index == len(headings) - 1)
        justify: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(Text(heading), justify=justify, no_wrap=not is_text, overflow="fold")
    for row in rows:
        # Text, so that no bracket of a name is read as a style.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    # A terminal that is too narrow breaks lines; a number that lacked its last digits would be another number.
    needed = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    own, console.width = console.width, max(console.width, min(needed, _LEAST_WIDTH))
    console.print(table, highlight=False)
    console.width = own
