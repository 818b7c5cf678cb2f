"""What a form of soak found: figures to read, and the laws that it kept or broke."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from tests.benchmarks.generator import LoadFailed, NoCompiler
from tests.benchmarks.processes import ServerFailed
from tests.benchmarks.report import MIN_COLUMNS, RESULTS, machine_facts

Figure = float | int | str
_LIMIT_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Law:
    """``reached`` beside what must hold. A figure that is not there (NaN) keeps no law.

    ``is_timed``: a slow machine could break it too.
    """

    what: str
    must: str
    reached: Figure
    is_kept: bool
    is_timed: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """``tables`` are figures with a row for each of several things: a title, names of columns, rows."""

    form: str
    figures: dict[str, Figure]
    laws: list[Law]
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[Figure]]]] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[Law]:
        return [law for law in self.laws if not law.is_kept]


@dataclass(frozen=True, slots=True)
class Form:
    """``run`` takes what ``add_options`` added to the command line, or its defaults.

    Raises: NoCompiler, ServerFailed, LoadFailed.
    """

    name: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Outcome]


def at_most(what: str, reached: float, limit: float, *, is_timed: bool = False) -> Law:
    return Law(what, f"<= {limit:.{_LIMIT_DIGITS}g}", reached, reached <= limit, is_timed)


def at_least(what: str, reached: float, limit: float, *, is_timed: bool = False) -> Law:
    return Law(what, f">= {limit:.{_LIMIT_DIGITS}g}", reached, reached >= limit, is_timed)


def equal(what: str, reached: Figure, expected: Figure) -> Law:
    return Law(what, f"= {expected}", reached, reached == expected)


def run_forms(forms: Sequence[Form], *, prog: str, description: str) -> int:
    """The command line of one form, or of several with their defaults; the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    if len(forms) == 1:
        forms[0].add_options(parser)
    else:
        names = ",".join(form.name for form in forms)
        parser.add_argument("--forms", default=names, help=f"with commas between, default: {names}")
    parser.add_argument("--json", type=Path, help="where the figures go; default: a new file in results/")
    arguments = parser.parse_args()
    if len(forms) > 1:
        chosen = arguments.forms.split(",")
        unknown = set(chosen) - {form.name for form in forms}
        if unknown:
            parser.error(f"no form is called {', '.join(sorted(unknown))}")
        forms = [form for form in forms if form.name in chosen]
    # A soak that is told to end takes its servers along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    machine, console = machine_facts(), Console(width=max(MIN_COLUMNS, Console().width))
    began = datetime.now(UTC)
    outcomes: list[Outcome] = []
    is_whole = True
    for form in forms:
        try:
            outcome = form.run(arguments if len(forms) == 1 else defaults_of(form))
        except (NoCompiler, ServerFailed, LoadFailed) as error:
            print(f"{form.name}: {error}", file=sys.stderr)
            is_whole = False
            continue
        outcomes.append(outcome)
        show(outcome, console)
    name = forms[0].name if len(forms) == 1 else "all"
    path = arguments.json or RESULTS / f"soak-{name}-{began:%Y%m%dT%H%M%SZ}.json"
    write(path, machine, outcomes)
    print(f"figures: {path}")
    return 0 if is_whole and not any(outcome.broken for outcome in outcomes) else 1


def defaults_of(form: Form, **changed: Any) -> argparse.Namespace:
    """The options of a form when its command line is empty, but for those named."""
    parser = argparse.ArgumentParser()
    form.add_options(parser)
    options = parser.parse_args([])
    assert set(changed) <= set(vars(options)), changed
    return argparse.Namespace(**(vars(options) | changed))


def show(outcome: Outcome, console: Console) -> None:
    figures = Table(box=box.SIMPLE)
    figures.add_column(outcome.form, no_wrap=True)
    figures.add_column("", justify="right", no_wrap=True)
    for name, value in outcome.figures.items():
        figures.add_row(name, _text(value))
    console.print(figures)
    for title, columns, rows in outcome.tables:
        table = Table(box=box.SIMPLE)
        table.add_column(title, no_wrap=True)
        for column in columns[1:]:
            table.add_column(column, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*map(_text, row))
        console.print(table)
    laws = Table(box=box.SIMPLE)
    for column in (f"laws of {outcome.form}", "must be", "is", "kept"):
        laws.add_column(column, no_wrap=column != "is")
    for law in outcome.laws:
        laws.add_row(law.what, law.must, _text(law.reached), "yes" if law.is_kept else "NO")
    console.print(laws)
    for note in outcome.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def write(path: Path, machine: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, "forms": [asdict(outcome) for outcome in outcomes]}
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")


def _text(value: Figure) -> str:
    if isinstance(value, str | int):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
