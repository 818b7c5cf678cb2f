"""The load generator: built from C at start, run once a measurement."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.processes import HOST, Server

SOURCE = Path(__file__).parent / "load" / "httpload.c"
WARM_S = 0.1
MAX_OVERTIME_S = 60.0
COMPILERS = ("cc", "gcc", "clang")
_SHOWN_BYTES = 600


class NoCompiler(Exception):
    """There is nothing here that compiles C."""


class LoadFailed(Exception):
    """An answer that is not 200, a broken connection, or none at all."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of the generator saw. ``num_answers`` counts warm-up and end too, the others the timed part."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    num_counted: int
    num_answers: int
    answers: list[bytes]


@dataclass(frozen=True, slots=True)
class Latencies:
    """From sending to the last byte; -1 where nothing was counted."""

    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, seen: dict[str, Any]) -> Latencies:
        return cls(p50_ms=seen["p50_ms"], p99_ms=seen["p99_ms"], max_ms=seen["max_ms"])


@dataclass(frozen=True, slots=True)
class Flood:
    """What came of requests that were sent whatever became of those before.

    ``num_not_sent`` were due while all connections had one under way; ``num_unanswered`` are those whose connection
    broke or that were still due at the end. ``accepted`` is of answers with 200, ``refused`` of all others;
    ``by_request`` of 200 again, for each request by itself.
    """

    num_sent: int
    num_not_sent: int
    num_unanswered: int
    statuses: dict[int, int]
    accepted: Latencies
    refused: Latencies
    by_request: list[Latencies]
    client_cpu_s: float


class Generator:
    """Closed loop: each connection sends its next request, of all in turn, when the answer to its last is whole.

    ``flood`` is an open one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = _compile(folder)
        self._prefix = folder / "answer"

    def run(
        self, server: Server, requests: Sequence[Path], *, connections: int, seconds: float, min_answers: int
    ) -> Load:
        """Load on a server; it is idle again afterwards. ``answers`` has one of the last to each request.

        Raises: LoadFailed.
        """
        seen = self._seen(server, requests, [connections, 0, WARM_S, seconds, min_answers])
        if seen["bad"] or seen["connection_errors"] or seen["unfinished"] or seen["counted"] < min_answers:
            raise LoadFailed(str(server.failure(f"not every request was answered 200: {seen}{self._bad_answer()}")))
        return Load(
            requests_per_s=seen["requests_per_s"],
            p50_ms=seen["p50_ms"],
            p99_ms=seen["p99_ms"],
            num_counted=seen["counted"],
            num_answers=seen["all"],
            answers=[self._prefix.with_suffix(f".{index}").read_bytes() for index in range(len(requests))],
        )

    def flood(
        self, server: Server, requests: Sequence[Path], *, connections: int, rate: float, seconds: float
    ) -> Flood:
        """So many requests a second, all in turn, on at most so many connections. Any answer will do.

        Raises: LoadFailed when the generator itself fails.
        """
        seen = self._seen(server, requests, [connections, rate, 0.0, seconds, 0])
        return Flood(
            num_sent=seen["due"] - seen["not_sent"],
            num_not_sent=seen["not_sent"],
            num_unanswered=seen["connection_errors"] + seen["unfinished"],
            statuses={int(status): count for status, count in seen["statuses"].items()},
            accepted=Latencies.of(seen),
            refused=Latencies.of(seen["refused"]),
            by_request=[Latencies.of(one) for one in seen["requests"]],
            client_cpu_s=seen["client_cpu_s"],
        )

    def _seen(self, server: Server, requests: Sequence[Path], numbers: Sequence[float]) -> dict[str, Any]:
        """``numbers``: connections, rate, warm-up, seconds, least number of answers."""
        for old in self._folder.glob("answer.*"):
            old.unlink()
        _, _, warm_s, seconds, _ = numbers
        ended = subprocess.run(
            [
                self._program,
                HOST,
                str(server.port),
                *map(str, numbers),
                str(warm_s + seconds + MAX_OVERTIME_S),
                self._prefix,
                *requests,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise LoadFailed(f"the load generator failed: {ended.stderr}")
        seen: dict[str, Any] = json.loads(ended.stdout)
        return seen

    def _bad_answer(self) -> str:
        bad = self._prefix.with_suffix(".bad")
        return f"{bad.read_bytes()[:_SHOWN_BYTES].decode(errors='replace')}" if bad.exists() else ""


def _compile(folder: Path) -> Path:
    named = os.environ.get("CC")
    compiler = next(filter(None, map(shutil.which, (named,) if named else COMPILERS)), None)
    if compiler is None:
        raise NoCompiler(f"the load generator needs a C compiler: none of {named or ', '.join(COMPILERS)} is here")
    program = folder / "httpload"
    subprocess.run([compiler, "-O2", "-o", program, SOURCE], check=True)
    return program
