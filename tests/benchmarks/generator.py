"""The load generators: built from C and C++ at start, run once a measurement."""

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

LOAD = Path(__file__).parent / "load"
WARM_S = 0.1
MAX_OVERTIME_S = 60.0
COMPILERS = ("cc", "gcc", "clang")
CPP_COMPILERS = ("c++", "g++", "clang++")
MAX_CHANNELS = 4
"""Connections of gRPC: the calls of one client share a few."""
_SHOWN_BYTES = 600


class NoCompiler(Exception):
    """There is nothing here that compiles C."""


class NoGrpcCompiler(NoCompiler):
    """There is nothing here that compiles C++ against gRPC."""


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


class _Program:
    """A compiled generator. What it saw comes as JSON; answers, and the first that is bad, in files."""

    def __init__(self, folder: Path, program: Path) -> None:
        self._folder = folder
        self._program = program
        self._prefix = folder / "answer"

    def _seen(
        self, target: Sequence[str], numbers: Sequence[float], limit_s: float, requests: Sequence[Path]
    ) -> dict[str, Any]:
        for old in self._folder.glob("answer.*"):
            old.unlink()
        ended = subprocess.run(
            [self._program, *target, *map(str, numbers), str(limit_s), self._prefix, *requests],
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise LoadFailed(f"the load generator failed: {ended.stderr}")
        seen: dict[str, Any] = json.loads(ended.stdout)
        return seen

    def _load(self, server: Server, seen: dict[str, Any], num_requests: int, min_answers: int) -> Load:
        """Raises: LoadFailed, unless all is well."""
        if seen["bad"] or seen["connection_errors"] or seen["unfinished"] or seen["counted"] < min_answers:
            raise LoadFailed(str(server.failure(f"not every request was answered well: {seen}{self._bad_answer()}")))
        return Load(
            requests_per_s=seen["requests_per_s"],
            p50_ms=seen["p50_ms"],
            p99_ms=seen["p99_ms"],
            num_counted=seen["counted"],
            num_answers=seen["all"],
            answers=[self._prefix.with_suffix(f".{index}").read_bytes() for index in range(num_requests)],
        )

    def _bad_answer(self) -> str:
        bad = self._prefix.with_suffix(".bad")
        return f"{bad.read_bytes()[:_SHOWN_BYTES].decode(errors='replace')}" if bad.exists() else ""


class Generator(_Program):
    """HTTP in a closed loop: each connection sends its next request, of all in turn, when the answer to its last is
    whole. ``flood`` is an open one.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _compile(folder))

    def run(
        self, server: Server, requests: Sequence[Path], *, connections: int, seconds: float, min_answers: int
    ) -> Load:
        """Load on a server; it is idle again afterwards. ``answers`` has one of the last to each request.

        Raises: LoadFailed.
        """
        numbers = [connections, 0, WARM_S, seconds, min_answers]
        seen = self._seen([HOST, str(server.port)], numbers, WARM_S + seconds + MAX_OVERTIME_S, requests)
        return self._load(server, seen, len(requests), min_answers)

    def flood(
        self, server: Server, requests: Sequence[Path], *, connections: int, rate: float, seconds: float
    ) -> Flood:
        """So many requests a second, all in turn, on at most so many connections. Any answer will do.

        Raises: LoadFailed when the generator itself fails.
        """
        numbers = [connections, rate, 0.0, seconds, 0]
        seen = self._seen([HOST, str(server.port)], numbers, seconds + MAX_OVERTIME_S, requests)
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


class GrpcGenerator(_Program):
    """Unary calls of one method in a closed loop, so many at once on at most ``MAX_CHANNELS`` connections.

    Raises: NoGrpcCompiler.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _compile_grpc(folder))

    def run(
        self, server: Server, method: str, requests: Sequence[Path], *, calls: int, seconds: float, min_answers: int
    ) -> Load:
        """As over HTTP; a request is a whole message.

        Raises: LoadFailed.
        """
        numbers = [calls, min(calls, MAX_CHANNELS), WARM_S, seconds, min_answers]
        port = server.port if server.grpc_port is None else server.grpc_port
        seen = self._seen([HOST, str(port), method], numbers, WARM_S + seconds + MAX_OVERTIME_S, requests)
        return self._load(server, seen, len(requests), min_answers)


def _compile(folder: Path) -> Path:
    compiler = _compiler("CC", COMPILERS)
    if compiler is None:
        raise NoCompiler(f"the load generator needs a C compiler: none of {_sought('CC', COMPILERS)} is here")
    program = folder / "httpload"
    subprocess.run([compiler, "-O2", "-o", program, LOAD / "httpload.c"], check=True)
    return program


def _compile_grpc(folder: Path) -> Path:
    needs = "the load generator of gRPC needs a C++ compiler, pkg-config and gRPC's headers (Debian: libgrpc++-dev)"
    compiler = _compiler("CXX", CPP_COMPILERS)
    if compiler is None:
        raise NoGrpcCompiler(f"{needs}: none of {_sought('CXX', CPP_COMPILERS)} is here")
    if shutil.which("pkg-config") is None:
        raise NoGrpcCompiler(f"{needs}: pkg-config is not here")
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "grpc++"], capture_output=True, text=True, check=False)
    if flags.returncode:
        raise NoGrpcCompiler(f"{needs}: pkg-config knows no grpc++")
    program = folder / "grpcload"
    command = [compiler, "-O2", "-std=c++17", str(LOAD / "grpcload.cc"), "-o", str(program), *flags.stdout.split()]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    if compiled.returncode:
        raise NoGrpcCompiler(f"{needs}: {compiled.stderr[:_SHOWN_BYTES]}")
    return program


def _compiler(variable: str, usual: Sequence[str]) -> str | None:
    named = os.environ.get(variable)
    return next(filter(None, map(shutil.which, (named,) if named else usual)), None)


def _sought(variable: str, usual: Sequence[str]) -> str:
    return os.environ.get(variable) or ", ".join(usual)
