"""One client sends long text, over and over: what is left for those who send binary bodies.

Each round measures them without text and with it, one right after the other: in a closed loop, where all of the machine
is used and the text costs its share of it, and in an open one at half of that rate, where it need not cost anything.
``python -m tests.benchmarks.soak.text --help``
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.benchmarks.cells import JSON, SAFETENSORS, SMALL, TINY, Sizes, request_bytes
from tests.benchmarks.generator import Generator, Load, LoadFailed
from tests.benchmarks.processes import Server
from tests.benchmarks.soak.outcome import Form, Law, Outcome, at_least, at_most, equal, run_forms
from tests.benchmarks.soak.service import serving

TEXT_SIZES: Sizes = (1, 8, 176, 64)
"""3 MB as nested lists."""
WORKLOADS = (TINY, SMALL)
CONNECTIONS = 8
OPEN_SHARE = 0.5
OPEN_CONNECTIONS = 64
TEXT_SECONDS = 1.5
"""Times those of the binary load, so that it ends first."""
MIN_RATE = 0.9
MAX_P99 = 2.0
TOLERANCE = 0.1
"""What a law allows beyond its figure: the machine drifts, and so much of a p99 is chance."""


@dataclass(frozen=True, slots=True)
class Sample:
    """``requests_per_s`` are answers with 200."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Pair:
    """The same load without text and with it, and how many texts were answered meanwhile."""

    without: Sample
    beside: Sample
    texts_per_s: float


class TextSoak:
    """Measures pairs. ``folder`` holds requests and two load generators."""

    def __init__(self, server: Server, folder: Path, *, seconds: float) -> None:
        self._server = server
        self._folder = folder
        self._seconds = seconds
        self._binary, self._text = (Generator(_new(folder / name)) for name in ("binary", "text"))
        self._text_file = folder / "text.request"
        self._text_file.write_bytes(request_bytes(TEXT_SIZES, JSON, 0))
        self.text_bytes = self._text_file.stat().st_size

    def closed(self, name: str, sizes: Sequence[Sizes]) -> Pair:
        files = self._files(name, sizes)

        def load() -> Sample:
            found = self._binary.run(
                self._server, files, connections=CONNECTIONS, seconds=self._seconds, min_answers=CONNECTIONS
            )
            return Sample(found.requests_per_s, found.p50_ms, found.p99_ms)

        return self._pair(load)

    def open(self, name: str, sizes: Sequence[Sizes], *, rate: float) -> Pair:
        """Raises: LoadFailed when there is an answer that is not 200."""
        files = self._files(name, sizes)

        def load() -> Sample:
            found = self._binary.flood(
                self._server, files, connections=OPEN_CONNECTIONS, rate=rate, seconds=self._seconds
            )
            if set(found.statuses) - {200} or found.num_unanswered:
                raise LoadFailed(f"not every request was answered 200: {found}")
            return Sample(found.statuses.get(200, 0) / self._seconds, found.accepted.p50_ms, found.accepted.p99_ms)

        return self._pair(load)

    def _pair(self, load: Callable[[], Sample]) -> Pair:
        without = load()
        with ThreadPoolExecutor(1) as pool:
            texts = pool.submit(self._send_text)
            beside = load()
            found = texts.result()
        return Pair(without, beside, found.requests_per_s)

    def _send_text(self) -> Load:
        return self._text.run(
            self._server, [self._text_file], connections=1, seconds=TEXT_SECONDS * self._seconds, min_answers=1
        )

    def _files(self, name: str, sizes: Sequence[Sizes]) -> list[Path]:
        files = []
        for index, one in enumerate(sizes):
            file = self._folder / f"{name}.{index}.request"
            if not file.exists():
                file.write_bytes(request_bytes(one, SAFETENSORS, index))
            files.append(file)
        return files


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def measure(server: Server, folder: Path, *, seconds: float, rounds: int) -> Outcome:
    """Raises: NoCompiler, LoadFailed."""
    soak = TextSoak(server, folder, seconds=seconds)
    laws: list[Law] = []
    rows: list[Sequence[float | str]] = []
    texts: list[float] = []
    for workload in WORKLOADS:
        closed = [soak.closed(workload.name, workload.sizes) for _ in range(rounds)]
        rate = OPEN_SHARE * median(pair.without.requests_per_s for pair in closed)
        opened = [soak.open(workload.name, workload.sizes, rate=rate) for _ in range(rounds)]
        for loop, pairs in (("closed loop of 8", closed), ("half of that rate", opened)):
            what = f"{workload.name}, {loop}"
            kept = median(pair.beside.requests_per_s / pair.without.requests_per_s for pair in pairs)
            p99 = median(pair.beside.p99_ms / pair.without.p99_ms for pair in pairs)
            laws.append(at_least(f"{what}: rate kept", kept, MIN_RATE * (1 - TOLERANCE), is_timed=True))
            laws.append(at_most(f"{what}: p99 grown", p99, MAX_P99 * (1 + TOLERANCE), is_timed=True))
            rows.append((what, *_medians([p.without for p in pairs]), *_medians([p.beside for p in pairs]), kept, p99))
            texts += [pair.texts_per_s for pair in pairs]
    laws.append(equal("rounds in which no text was answered", sum(rate <= 0 for rate in texts), 0))
    columns = ("", "req/s", "p50 ms", "p99 ms", "with text: req/s", "p50 ms", "p99 ms", "rate kept", "p99 grown")
    return Outcome(
        "text",
        figures={
            "bytes of a text": soak.text_bytes,
            "texts answered per s, median": median(texts),
            "rounds": rounds,
        },
        laws=laws,
        tables=[("binary clients, medians", columns, rows)],
    )


def _medians(samples: Sequence[Sample]) -> tuple[float, float, float]:
    return (
        median(sample.requests_per_s for sample in samples),
        median(sample.p50_ms for sample in samples),
        median(sample.p99_ms for sample in samples),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=3.0, help="each measurement, default: 3")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")


def run(options: argparse.Namespace) -> Outcome:
    """Raises: NoCompiler, ServerFailed, LoadFailed."""
    settings = {"ATTN_TORCH_THREADS": "1", "ATTN_LOG_LEVEL": "warning"}
    with tempfile.TemporaryDirectory(prefix="attn-soak-") as name, serving(Path(name), settings) as server:
        return measure(server, Path(name), seconds=options.seconds, rounds=options.rounds)


FORM = Form("text", "binary clients beside long text", add_options, run)

if __name__ == "__main__":
    sys.exit(run_forms([FORM], prog="python -m tests.benchmarks.soak.text", description=__doc__ or ""))
