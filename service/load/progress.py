"""How a load test goes, while it runs: a line that changes where somebody looks on, a line a step where nobody does."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from service.load.account import Glance
from service.load.digits import percentile_ms
from service.load.results import Ceiling, StepResult


class ShownProgress:
    """To be used with ``with``: on a terminal it draws in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._name, self._seconds = "", 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, what: str) -> None:
        if self._live is not None:
            self._live.update(Text(what), refresh=True)

    def warn(self, what: str) -> None:
        self._console.print(Text(what, "bold red"), soft_wrap=True)

    def begin(self, name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self.glance(None)

    def glance(self, glance: Glance | None) -> None:
        if self._live is not None:
            at_s = 0.0 if glance is None else glance.at_s
            head = Table.grid(padding=(0, 2))
            bar = ProgressBar(total=self._seconds, completed=min(at_s, self._seconds), width=24)
            head.add_row(Text(self._name, "bold"), bar, Text(f"{at_s:.0f} of {self._seconds:.0f} s"))
            self._live.update(Group(head, Text("" if glance is None else said(glance))), refresh=True)

    def end(self, result: StepResult | Ceiling | None) -> None:
        line = Text(f"{self._name}: {ended(result)}")
        if isinstance(result, StepResult) and result.late:
            # Why is said at the end, beside the figures.
            line.append(" (not the service's alone)", "bold red")
        self._console.print(line, soft_wrap=True)


def said(glance: Glance) -> str:
    """One line: what is so now."""
    parts = [f"{glance.answered} answered", f"{glance.answered_s:.0f}/s", f"{glance.in_flight} under way"]
    if glance.failed:
        parts.append(f"{glance.failed} failed")
    for name, value in (("p50", glance.p50_ms), ("p99", glance.p99_ms), ("client late p99", glance.late_ms)):
        if value is not None:
            parts.append(f"{name} {value:.2f} ms")
    return ", ".join(parts)


def ended(result: StepResult | Ceiling | None) -> str:
    """One line: what it came to."""
    if result is None:
        return "nothing was measured"
    shown = {f"p{at:g}": percentile_ms(result.latency, at) for at in (50.0, 99.0)}
    times = ", ".join(f"{name} {value:.2f} ms" for name, value in shown.items() if value is not None) or "no answers"
    failed = f", {result.failed} failed" if isinstance(result, StepResult) and result.failed else ""
    return f"{result.requests_s:.1f}/s, {times}{failed}"
