"""NVIDIA's perf_analyzer, unmodified, on both doors of the Open Inference Protocol and on Triton's.

It asks model ``sdpa`` here and ``attention`` there for the same operation. Both servers run at once and are asked in
turn. Nothing fails on a time, nor on times that differ too much for it; what fails is a request that goes wrong. Where
it is not installed, or the machine lacks its libraries, a line says so and nothing is measured.
Run as ``python -m tests.benchmarks.perf_analyzer``.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tests.benchmarks import report
from tests.benchmarks.cells import MEDIUM, MODEL, NAMES, SMALL, TINY, Sizes, inputs_of
from tests.benchmarks.peers.catalogue import TRITON_GRPC_PEER, TRITON_HTTP_PEER, TRITON_MODEL, running_peer
from tests.benchmarks.peers.install import NotInstalled, python_of
from tests.benchmarks.processes import HOST, ServerFailed, free_ports
from tests.benchmarks.serving import running_service

WORKLOADS = (TINY, SMALL, MEDIUM)
CONCURRENCIES = (1, 8)
WINDOW_MS = 1000
STABLE_WITHIN_PERCENT = 50
MAX_WINDOWS = 10
UNSTEADY = "Failed to obtain stable measurement"
"""What it says where no windows agreed, on a machine that others use."""
LIMIT_S = 120.0
PROTOCOLS = {"http": TRITON_HTTP_PEER, "grpc": TRITON_GRPC_PEER}
_SHOWN_CHARACTERS = 1500


class AnalyzerFailed(Exception):
    """What perf_analyzer says where a request goes wrong."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server in one protocol. ``has_batch_axis``: sizes are told without the batch, which it adds itself."""

    name: str
    model: str
    protocol: str
    port: int
    has_batch_axis: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """Of windows that agreed."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float


class Analyzer:
    """The program in its venv. Raises: NotInstalled, also where it cannot run."""

    def __init__(self) -> None:
        python = python_of("perf_analyzer")
        self._program = python.with_name("perf_analyzer")
        (libraries,) = python.parents[1].glob("lib/python*/site-packages/nvidia/cuda_runtime/lib")
        self._environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
        tried = self._run("--version")
        if tried.returncode:
            needs = "x86-64, glibc and libb64.so.0d (Debian: libb64-0d)"
            raise NotInstalled(f"{self._program} does not run here; it needs {needs}: {tried.stdout.strip()}")

    def measure(self, target: Target, sizes: Sizes, concurrency: int, folder: Path) -> Measured | None:
        """None where times differ too much. Raises: AnalyzerFailed."""
        figures = folder / f"{target.name}.{target.protocol}.{concurrency}.csv"
        shape = ",".join(str(size) for size in sizes[target.has_batch_axis :])
        options = {
            "-m": target.model,
            "-u": f"{HOST}:{target.port}",
            "-i": target.protocol,
            "-b": 1,
            "-p": WINDOW_MS,
            "-s": STABLE_WITHIN_PERCENT,
            "-r": MAX_WINDOWS,
            "-f": figures,
            "--concurrency-range": concurrency,
            # Left to itself it sends random bits, NaN and numbers of size 1e38 among them: nobody's attention.
            "--input-data": _write_inputs(sizes, folder),
        }
        arguments = [str(part) for option in options.items() for part in option]
        shapes = [part for name in NAMES for part in ("--shape", f"{name}:{shape}")]
        ran = self._run(*arguments, *shapes)
        if ran.returncode == 0 and figures.exists():
            return _read(figures)
        if UNSTEADY in ran.stdout:
            return None
        said = ran.stdout[-_SHOWN_CHARACTERS:]
        raise AnalyzerFailed(f"{target.name} over {target.protocol}, {shape}: exit code {ran.returncode}\n{said}")

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._program, *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )


def _write_inputs(sizes: Sizes, folder: Path) -> Path:
    """A folder with a file of numbers for each input."""
    inputs = folder / "inputs"
    inputs.mkdir(exist_ok=True)
    for name, tensor in zip(NAMES, inputs_of(sizes, 0), strict=True):
        (inputs / name).write_bytes(tensor.numpy().tobytes())
    return inputs


def _read(figures: Path) -> Measured:
    """What ``-f`` writes: a line for the concurrency, latencies in microseconds."""
    with figures.open(newline="") as lines:
        (line,) = csv.DictReader(lines)
    return Measured(
        requests_per_s=float(line["Inferences/Second"]),
        p50_ms=float(line["p50 latency"]) / 1e3,
        p99_ms=float(line["p99 latency"]) / 1e3,
    )


@contextlib.contextmanager
def _targets(folder: Path) -> Iterator[list[Target]]:
    """The service and, if it is installed, Triton, in both protocols. Raises: ServerFailed."""
    port, grpc_port = free_ports(2)
    with contextlib.ExitStack() as stack:
        stack.enter_context(running_service(port, grpc_port, folder))
        targets = [
            Target("service", MODEL, "http", port, has_batch_axis=False),
            Target("service", MODEL, "grpc", grpc_port, has_batch_axis=False),
        ]
        for protocol, peer in PROTOCOLS.items():
            (port,) = free_ports(1)
            try:
                stack.enter_context(running_peer(peer, port, folder))
            except (NotInstalled, ServerFailed) as error:
                print(f"{peer.name} is left out: {error}", file=sys.stderr)
            else:
                targets.append(Target(peer.name, TRITON_MODEL, protocol, port, has_batch_axis=True))
        yield targets


def run() -> None:
    """Measure, and print a table.

    Raises: NotInstalled, ServerFailed, AnalyzerFailed.
    """
    analyzer = Analyzer()
    columns = ("perf_analyzer", "server", "infer/s", "p50 ms", "p99 ms", "ours / it")
    table = report.new_table(*columns, num_words=2)
    with tempfile.TemporaryDirectory(prefix="attn-perf-") as name, _targets(Path(name)) as targets:
        for workload, protocol, concurrency in itertools.product(WORKLOADS, PROTOCOLS, CONCURRENCIES):
            folder = Path(name) / workload.name
            folder.mkdir(exist_ok=True)
            figures = {
                target.name: analyzer.measure(target, workload.sizes[0], concurrency, folder)
                for target in targets
                if target.protocol == protocol
            }
            ours = figures["service"]
            for server, it in figures.items():
                row = (f"{workload.name}/{protocol}/c{concurrency}", server)
                if it is None:
                    table.add_row(*row, "unsteady")
                    continue
                over = None if ours is None or it is ours else ours.requests_per_s / it.requests_per_s
                table.add_row(*row, *report.number_texts(it.requests_per_s, it.p50_ms, it.p99_ms, over))
    Console(width=max(report.MIN_COLUMNS, Console().width)).print(table)


def main() -> int:
    # One that is told to end takes its servers along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run()
    except NotInstalled as error:
        print(f"perf_analyzer is left out: {error}", file=sys.stderr)
    except (ServerFailed, AnalyzerFailed, subprocess.TimeoutExpired) as error:
        print(f"perf_analyzer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
