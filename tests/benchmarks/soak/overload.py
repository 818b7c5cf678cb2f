"""Ten times as many requests as the service can compute, in an open loop: what it refuses, and how it fares meanwhile.

Capacity is measured first, by a closed loop over the same requests, and once more afterwards. The requests are of many
kinds: short ones and such as have a lane of their own, binary and text, with a deadline that some can meet and without.
``python -m tests.benchmarks.soak.overload --help``
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.benchmarks.generator import Flood, Generator
from tests.benchmarks.processes import Server
from tests.benchmarks.soak.client import request_bytes
from tests.benchmarks.soak.livez import Watch, quantile, watching
from tests.benchmarks.soak.outcome import Form, Outcome, at_least, at_most, equal, run_forms
from tests.benchmarks.soak.service import GAUGES, metrics_of, refusals_between, serving, total
from tests.support.bodies import JSON, SAFETENSORS, list_body, safetensors_body
from tests.support.factory import make_tensor

ALLOWED = (200, 429, 503, 504)
CLOSED_CONNECTIONS = 8
NUM_ROUNDS = 3
LIVEZ_INTERVAL_S = 0.02
RSS_INTERVAL_S = 0.25
MAX_LIVEZ_MS = 200.0
WAITS_OF_P99 = 3.0
MAX_GROWTH = 1.05
SETTLING_SHARE = 0.2
"""A flood of this share of the time comes before the one that is measured."""
MAX_LATE_MS = 250.0
"""A deadline is counted from when the server reads the head, this from when the client began to send."""
MIN_RATE_AFTER = 0.85
MAX_P50_AFTER = 1.2
"""The machine drifts that much by itself."""
DEFAULT_TIMEOUT_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the requests. ``share`` is how often it comes in a round of all."""

    name: str
    request: bytes
    share: int = 1
    timeout_ms: float = DEFAULT_TIMEOUT_MS


@dataclass(frozen=True, slots=True)
class Closed:
    """Medians over rounds of a closed loop."""

    requests_per_s: float
    p50_ms: float


def kinds(*, max_wait_s: float) -> list[Kind]:
    """Short on bytes and long on exponentials, or reading and refusing would be all that is measured."""

    def binary(shape: Sequence[int], **options: object) -> bytes:
        return request_bytes(safetensors_body({"query": make_tensor(*shape)}, options), SAFETENSORS)

    text = list_body({"query": make_tensor(1, 2, 64, 16)}, {})
    timeout_ms = 750.0 * max_wait_s
    return [
        Kind("work: [1,8,512,4]", binary((1, 8, 512, 4)), share=4),
        Kind("wide: [1,4,256,64]", binary((1, 4, 256, 64)), share=2),
        Kind("tiny: [1,4,16,32]", binary((1, 4, 16, 32)), share=2),
        Kind("manual: [1,4,256,8]", binary((1, 4, 256, 8), outputs=["logsumexp", "entropy"]), share=2),
        Kind("large: [1,4,2048,16]", binary((1, 4, 2048, 16))),
        Kind("text: [1,2,64,16]", request_bytes(text, JSON)),
        Kind(
            f"in {timeout_ms:g} ms: [1,8,512,4]",
            binary((1, 8, 512, 4), timeout_ms=timeout_ms),
            share=2,
            timeout_ms=timeout_ms,
        ),
        Kind("in 20 ms: [1,4,256,4]", binary((1, 4, 256, 4), timeout_ms=20), share=2, timeout_ms=20.0),
    ]


def measure(
    server: Server,
    folder: Path,
    *,
    seconds: float,
    factor: float,
    connections: int,
    closed_seconds: float,
    max_wait_s: float,
) -> Outcome:
    """The flood between two measurements. Raises: NoCompiler, LoadFailed."""
    asked = kinds(max_wait_s=max_wait_s)
    in_turn, files = _in_turn(asked, folder)
    # What cannot be met at capacity is no part of it.
    met = [file for kind, file in zip(in_turn, files, strict=True) if kind.timeout_ms > DEFAULT_TIMEOUT_MS / 2]
    generator = Generator(folder)
    _closed(generator, server, met, closed_seconds, rounds=1)
    before = _closed(generator, server, met, closed_seconds)
    rate = factor * before.requests_per_s
    # Memory grows to what a flood takes, and must stay there.
    generator.flood(server, files, connections=connections, rate=rate, seconds=SETTLING_SHARE * seconds)
    metrics_before = metrics_of(server.port)
    rss = _RssLog(server)
    cpu_before = server.cpu_s()
    with watching(server.port, interval_s=LIVEZ_INTERVAL_S) as watch, rss:
        flood = generator.flood(server, files, connections=connections, rate=rate, seconds=seconds)
    cpu_s = server.cpu_s() - cpu_before
    metrics = metrics_of(server.port)
    after = _closed(generator, server, met, closed_seconds)
    return _outcome(
        in_turn,
        flood,
        watch,
        rss,
        before,
        after,
        seconds=seconds,
        factor=factor,
        max_wait_s=max_wait_s,
        cpu_s=cpu_s,
        refusals=refusals_between(metrics_before, metrics),
        gauges={name: total(metrics, name) for name in GAUGES},
    )


def _in_turn(asked: Sequence[Kind], folder: Path) -> tuple[list[Kind], list[Path]]:
    """A round of all, those of one kind apart from each other."""
    most = max(kind.share for kind in asked)
    places = sorted((number * most / kind.share, kind.name) for kind in asked for number in range(kind.share))
    by_name = {kind.name: kind for kind in asked}
    in_turn, files = [], []
    for number, kind in enumerate(asked):
        (folder / f"overload-{number}.request").write_bytes(kind.request)
    numbers = {kind.name: number for number, kind in enumerate(asked)}
    for _, name in places:
        in_turn.append(by_name[name])
        files.append(folder / f"overload-{numbers[name]}.request")
    return in_turn, files


def _closed(
    generator: Generator, server: Server, files: Sequence[Path], seconds: float, *, rounds: int = NUM_ROUNDS
) -> Closed:
    loads = [
        generator.run(server, files, connections=CLOSED_CONNECTIONS, seconds=seconds, min_answers=CLOSED_CONNECTIONS)
        for _ in range(rounds)
    ]
    return Closed(
        requests_per_s=median(load.requests_per_s for load in loads), p50_ms=median(load.p50_ms for load in loads)
    )


class _RssLog:
    """Resident memory of the server, looked at again and again in a thread while the block runs."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self.values_mb: list[float] = []

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._is_over.wait(RSS_INTERVAL_S):
            self.values_mb.append(self._server.rss_mb())

    def parts_mb(self, count: int) -> list[float]:
        """Medians of so many parts of equal length, in their order; empty of too few values."""
        size = len(self.values_mb) // count
        return [median(self.values_mb[part * size : (part + 1) * size]) for part in range(count)] if size else []

    def halves_mb(self) -> tuple[float, float]:
        """Medians of the first half and of the second; NaN of too few."""
        first, second = self.parts_mb(2) or (float("nan"), float("nan"))
        return first, second


def _outcome(
    in_turn: Sequence[Kind],
    flood: Flood,
    watch: Watch,
    rss: _RssLog,
    before: Closed,
    after: Closed,
    *,
    seconds: float,
    factor: float,
    max_wait_s: float,
    cpu_s: float,
    refusals: dict[str, float],
    gauges: dict[str, float],
) -> Outcome:
    kept, fresh, every = sorted(watch.kept_ms), sorted(watch.fresh_ms), sorted(watch.all_ms)
    first_mb, second_mb = rss.halves_mb()
    num_answers = sum(flood.statuses.values())
    num_other = num_answers - sum(flood.statuses.get(status, 0) for status in ALLOWED)
    offered = flood.num_sent / seconds / before.requests_per_s
    late_ms = max(latencies.max_ms - kind.timeout_ms for kind, latencies in zip(in_turn, flood.by_request, strict=True))
    rows = [
        (kind.name, latencies.p50_ms, latencies.p99_ms, latencies.max_ms)
        for kind, latencies in zip(in_turn, flood.by_request, strict=True)
    ]
    return Outcome(
        "overload",
        figures={
            "capacity: closed loop of 8, req/s": before.requests_per_s,
            "p50 of it, ms": before.p50_ms,
            "offered, req/s": flood.num_sent / seconds,
            "due while all connections were taken, not sent": flood.num_not_sent,
            "answered": num_answers,
            **{f"answered {status}": count for status, count in sorted(flood.statuses.items())},
            **refusals,
            "accepted in the flood, req/s": flood.statuses.get(200, 0) / seconds,
            "p50 of accepted, ms": flood.accepted.p50_ms,
            "p99 of accepted, ms": flood.accepted.p99_ms,
            "longest of accepted, ms": flood.accepted.max_ms,
            "p50 of refused, ms": flood.refused.p50_ms,
            "p99 of refused, ms": flood.refused.p99_ms,
            "livez asked": len(every),
            "livez p50, ms": quantile(every, 0.5),
            "livez p99 on a kept connection, ms": quantile(kept, 0.99),
            "livez p99 on a fresh connection, ms": quantile(fresh, 0.99),
            "longest livez, ms": quantile(every, 1.0),
            "memory in the first half, MB": first_mb,
            "memory in the second half, MB": second_mb,
            "memory in each eighth, MB": " ".join(f"{part:.0f}" for part in rss.parts_mb(8)),
            "CPU of the server, cores": cpu_s / seconds,
            "CPU of the load, cores": flood.client_cpu_s / seconds,
            "closed loop of 8 afterwards, req/s": after.requests_per_s,
            "p50 of it afterwards, ms": after.p50_ms,
        },
        laws=[
            equal("requests without an answer", flood.num_unanswered, 0),
            equal("answers of another status than 200, 429, 503, 504", num_other, 0),
            at_least("answers accepted", flood.statuses.get(200, 0), 1),
            at_least("answers refused", num_answers - flood.statuses.get(200, 0), 1),
            equal("livez not answered", len(watch.failures), 0),
            *(equal(f"{name} afterwards", value, 0.0) for name, value in gauges.items()),
            at_least("offered / capacity", offered, 0.9 * factor, is_timed=True),
            at_most("accepted beyond their deadline, ms", late_ms, MAX_LATE_MS, is_timed=True),
            at_most(
                "p99 of accepted / limit of wait",
                flood.accepted.p99_ms / 1e3 / max_wait_s,
                WAITS_OF_P99,
                is_timed=True,
            ),
            at_most("livez p99, ms", quantile(every, 0.99), MAX_LIVEZ_MS, is_timed=True),
            at_most("memory: second half / first half", second_mb / first_mb, MAX_GROWTH, is_timed=True),
            at_least(
                "requests/s after / before", after.requests_per_s / before.requests_per_s, MIN_RATE_AFTER, is_timed=True
            ),
            at_most("p50 after / before", after.p50_ms / before.p50_ms, MAX_P50_AFTER, is_timed=True),
        ],
        tables=[("accepted, in the order of a round", ("", "p50 ms", "p99 ms", "longest ms"), rows)],
        notes=watch.failures[:5],
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="of the flood, default: 60")
    parser.add_argument("--factor", type=float, default=10.0, help="times capacity, default: 10")
    parser.add_argument("--connections", type=int, default=1200, help="at most, default: 1200")
    parser.add_argument("--closed-seconds", type=float, default=3.0, help="each of three rounds, default: 3")
    parser.add_argument("--max-wait-s", type=float, default=2.0, help="the service's ATTN_MAX_WAIT_S, default: 2")
    parser.add_argument("--settings", type=json.loads, default={}, help="more settings of the service, as JSON")


def run(options: argparse.Namespace) -> Outcome:
    """Raises: NoCompiler, ServerFailed, LoadFailed."""
    settings = {"ATTN_MAX_WAIT_S": str(options.max_wait_s), **options.settings}
    with tempfile.TemporaryDirectory(prefix="attn-soak-") as name, serving(Path(name), settings) as server:
        return measure(
            server,
            Path(name),
            seconds=options.seconds,
            factor=options.factor,
            connections=options.connections,
            closed_seconds=options.closed_seconds,
            max_wait_s=options.max_wait_s,
        )


FORM = Form("overload", "ten times capacity", add_options, run)

if __name__ == "__main__":
    sys.exit(run_forms([FORM], prog="python -m tests.benchmarks.soak.overload", description=__doc__ or ""))
