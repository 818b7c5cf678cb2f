"""`attn load`: what the command line says of a load test, and where its results go."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from service.credentials import CommandError, Credentials
from service.load.arrivals import ClosedLoop, OpenLoop
from service.load.payloads import FORMS
from service.load.problems import DTYPES, read_shape
from service.load.progress import ShownProgress
from service.load.results import Results, UnreadableResults, read_results
from service.load.run import LoadPlan, run_load

HTTP_URL, GRPC_URL = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
ARRIVALS = ("poisson", "even")
_ENDING = b"\nattn: ending, what was measured will be shown; once more to end at once\n"
DEFAULT_SHAPE, DEFAULT_CONCURRENCY = "1,8,128,64", 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where results are written to, and the earlier ones that they are held against."""

    json: Path | None = None
    csv: Path | None = None
    html: Path | None = None
    compare: Path | None = None

    def check(self) -> Results | None:
        """The earlier results, before anything is sent. Raises: CommandError where a file cannot be."""
        given = [(flag, path) for flag, path in self._written() if path is not None]
        for flag, path in given:
            if path.is_dir() or not path.parent.is_dir():
                raise CommandError(f"{flag} {path}: a file in a folder that is there")
        if len({path.absolute() for _, path in given}) < len(given):
            raise CommandError("--json, --csv and --html: each a file of its own")
        if self.compare is None:
            return None
        try:
            return read_results(self.compare.read_bytes())
        except OSError as error:
            raise CommandError(f"--compare {self.compare}: {error.strerror or error}") from None
        except UnreadableResults as error:
            raise CommandError(f"--compare {self.compare}: {error}") from None

    def write(self, results: Results, before: Results | None) -> list[str]:
        """A sentence for each file that was asked for. Raises: CommandError once all were tried, where one failed."""
        from service.load.page import page
        from service.load.table import csv_text

        texts: tuple[Callable[[], bytes], ...] = (
            results.to_json,
            lambda: csv_text(results).encode(),
            lambda: page(results, before).encode(),
        )
        written, failed = [], []
        for (_, path), text in zip(self._written(), texts, strict=True):
            if path is not None:
                try:
                    path.write_bytes(text())
                    written.append(f"wrote {path}")
                except OSError as error:
                    failed.append(f"cannot write {path}: {error.strerror or error}")
                except (ArithmeticError, LookupError, ValueError) as error:
                    failed.append(f"cannot write {path}: {error!r}")
        if failed:
            raise CommandError("; ".join(failed + written))
        return written

    def _written(self) -> tuple[tuple[str, Path | None], ...]:
        return ("--json", self.json), ("--csv", self.csv), ("--html", self.html)


def plan_of(
    *,
    url: str | None,
    over_grpc: bool,
    shapes: Sequence[str],
    forms: str,
    rates: str | None,
    arrivals: str,
    concurrency: str | None,
    dtype: str,
    options: dict[str, Any],
    num_checked: int,
    credentials: Credentials,
    **figures: Any,
) -> LoadPlan:
    """What is to be done, in the order in which it will be. Raises: CommandError for what cannot be meant."""
    if arrivals not in ARRIVALS:
        raise CommandError(f"--arrivals: {' or '.join(ARRIVALS)}, not {arrivals}")
    if dtype not in DTYPES:
        raise CommandError(f"--dtype: one of {', '.join(DTYPES)}, not {dtype}")
    # null is as good as leaving an option out.
    options = {name: value for name, value in options.items() if value is not None}
    if "dtype" in options:
        raise CommandError("--option dtype: say --dtype, which holds in every form")
    loops: list[OpenLoop | ClosedLoop] = [
        OpenLoop(rate_s=_above("--rate", text, float), arrivals=arrivals) for text in _listed(rates)
    ]
    callers = _listed(concurrency) if rates or concurrency else [str(DEFAULT_CONCURRENCY)]
    loops += [ClosedLoop(concurrency=_above("--concurrency", text, int)) for text in callers]
    if num_checked:
        from service.load.checks import check_options

        check_options(options)
    where = _checked_url(url or (GRPC_URL if over_grpc else HTTP_URL))
    if where.startswith("http:") and (credentials.ca or credentials.certificate):
        raise CommandError(f"--ca and --cert are for TLS: --url https://{urlsplit(where).netloc}, or leave them out")
    return LoadPlan(
        url=where,
        forms=_forms(forms, over_grpc),
        shapes=tuple(read_shape(shape) for shape in shapes or [DEFAULT_SHAPE]),
        loops=tuple(loops),
        dtype=dtype,
        options=options,
        num_checked=num_checked,
        credentials=credentials,
        **figures,
    )


def load(plan: LoadPlan, files: Files, console: Console) -> bool:
    """Run it, write it, show it. False where an answer was wrong, none came, or it was not whole.

    Raises: CommandError.
    """
    from service.load.comparison import compare
    from service.load.summary import show, show_comparison

    before = files.check()
    with _ended_by_signals() as is_over, ShownProgress(console) as progress:
        results = run_load(plan, progress, is_over=is_over)
        was_ended = is_over()
    try:
        # Before anything is shown: whoever only wanted the first lines of that is to have his files.
        written = files.write(results, before)
    finally:
        show(results, console)
        if before is not None:
            show_comparison(compare(results, before), console)
    for sentence in written:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    is_right = all(step.checked is None or step.checked.is_right for step in results.steps)
    is_whole = not results.was_cut or was_ended
    return is_right and is_whole and any(step.answered for step in results.steps)


@contextmanager
def _ended_by_signals() -> Iterator[Callable[[], bool]]:
    """Whether somebody wants it to end: what was measured up to then is shown. A second signal ends it at once."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        for each in before:
            signal.signal(each, before[each])
        os.write(2, _ENDING)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, note)
        yield lambda: bool(seen)
    finally:
        for number in before:
            signal.signal(number, before[number])


def _forms(text: str, over_grpc: bool) -> tuple[str, ...]:
    if over_grpc:
        return ("grpc",)
    forms = tuple(dict.fromkeys(_listed(text)))
    over_http = [form for form in FORMS if form != "grpc"]
    if not forms or not set(forms) <= set(over_http):
        raise CommandError(f"--form: {', '.join(over_http)}, or several with commas; not {text} (--grpc is a flag)")
    return forms


def _checked_url(url: str) -> str:
    address = urlsplit(url if "://" in url else f"http://{url}")
    try:
        is_whole = bool(address.hostname) and address.scheme in ("http", "https") and address.port != 0
    except ValueError:
        is_whole = False
    if address.username is not None or address.password is not None:
        # Not shown: there is a password in it.
        raise CommandError("--url: without a user and password; a key is --key")
    if not is_whole or address.path not in ("", "/") or address.query or address.fragment:
        raise CommandError(f"--url: such as {HTTP_URL}, without a path; not {url}")
    return f"{address.scheme}://{address.netloc}"


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _above(flag: str, text: str, kind: type[Any]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise CommandError(f"{flag}: {'a whole number' if kind is int else 'a number'} above 0, or several, not {text}")
    return value
