"""The service beside its limits, in one run: ``make bench``, or ``python -m tests.benchmarks.serving --help``.

In every round each cell is asked of the service, of a bare echo, of the bound and of torch in this process, one after
the other, so that a ratio holds on a machine whose speed drifts. Nothing here passes or fails on a time; what fails is
an answer that is wrong, missing or not 200.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.benchmarks import report
from tests.benchmarks.cells import (
    CELLS,
    SAFETENSORS,
    Cell,
    Format,
    NoSuchCell,
    Shape,
    decode_raw,
    inputs_of,
    request_bytes,
    select_cells,
)
from tests.benchmarks.figures import Figures, Round, Sample, summarize
from tests.benchmarks.generator import Generator, LoadFailed, NoCompiler
from tests.benchmarks.processes import HOST, Server, ServerFailed, free_ports, running

MAX_ABS_ERROR = 1e-5
"""The numbers are of size 1 and the arithmetic float32: what differs by more is another answer."""
MIN_ANSWERS = 5
TORCH_SHARE = 0.4
"""Torch in process answers evenly, so a part of the time is enough."""
SERVICE_ENVIRONMENT = {"ATTN_TORCH_THREADS": "1", "ATTN_LOG_LEVEL": "warning"}
LIMIT_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
"""Left to itself, glibc gives memory back after each small body until it has freed a large one: the echo would be four
times slower or not, by what it was asked before."""
UVICORN_EXIT_CODES = frozenset({0, -signal.SIGTERM})
"""Once it has shut down, uvicorn raises the signal that ended it again."""


class WrongAnswer(Exception):
    """An answer that torch in process does not give."""


@dataclass(frozen=True, slots=True)
class Servers:
    """All running; none works unless asked."""

    service: Server
    echo: Server
    bound: Server


class Bench:
    """Measures cells. ``folder`` holds requests, answers and the load generator."""

    def __init__(self, servers: Servers, folder: Path, *, seconds: float) -> None:
        self._servers = servers
        self._folder = folder
        self._seconds = seconds
        self._generator = Generator(folder)

    def measure(self, cell: Cell, *, turn: int) -> tuple[Round, float]:
        """One round, and the greatest error of the service in it. Another contender comes first each ``turn``.

        Raises: LoadFailed, WrongAnswer.
        """
        errors: list[float] = []
        shape, servers = cell.shape, self._servers

        def check_service(index: int, body: bytes) -> None:
            errors.append(_error(f"service, {cell.name}", cell.format.decode(body), shape, index))

        def check_bound(index: int, body: bytes) -> None:
            _error(f"bound, {cell.name}", decode_raw(body, shape), shape, index)

        def check_echo(index: int, body: bytes) -> None:
            if len(body) != shape.tensor_bytes:
                raise WrongAnswer(f"echo, {cell.name}: {len(body)} bytes instead of {shape.tensor_bytes}")

        contenders: list[tuple[str, Callable[[], Sample]]] = [
            ("service", lambda: self._load(servers.service, cell, cell.format, check_service)),
            ("echo", lambda: self._load(servers.echo, cell, cell.format, check_echo)),
            # The bound reads no text: beside JSON it shows what the text costs.
            ("bound", lambda: self._load(servers.bound, cell, SAFETENSORS, check_bound)),
            ("torch", lambda: _in_process(shape, self._seconds * TORCH_SHARE)),
        ]
        first = turn % len(contenders)
        samples = {name: sample() for name, sample in contenders[first:] + contenders[:first]}
        return Round(**samples), max(errors)

    def _load(self, server: Server, cell: Cell, form: Format, check: Callable[[int, bytes], None]) -> Sample:
        requests = [self._request_file(cell.shape, form, index) for index in range(cell.num_requests)]
        server.reset_peak()
        cpu_before = server.cpu_s()
        load = self._generator.run(
            server,
            requests,
            connections=cell.connections,
            seconds=self._seconds,
            min_answers=max(MIN_ANSWERS, cell.connections),
        )
        cpu_s = server.cpu_s() - cpu_before
        for index, body in enumerate(load.answers):
            check(index, body)
        return Sample(
            requests_per_s=load.requests_per_s,
            p50_ms=load.p50_ms,
            p99_ms=load.p99_ms,
            num_counted=load.num_counted,
            cpu_ms=cpu_s * 1e3 / load.num_answers,
            peak_rss_mb=server.peak_rss_mb(),
        )

    def _request_file(self, shape: Shape, form: Format, index: int) -> Path:
        path = self._folder / f"{shape.name}.{form.name}.{index}.request"
        if not path.exists():
            path.write_bytes(request_bytes(shape, form, index))
        return path


@torch.inference_mode()
def _in_process(shape: Shape, seconds: float) -> Sample:
    """Torch itself, on one thread, one call after the other."""
    query, key, value = inputs_of(shape, 0)
    scaled_dot_product_attention(query, key, value)
    times: list[float] = []
    began = ended = time.perf_counter()
    while ended < began + seconds or len(times) < MIN_ANSWERS:
        call_began = time.perf_counter()
        scaled_dot_product_attention(query, key, value)
        ended = time.perf_counter()
        times.append(ended - call_began)
    times.sort()
    return Sample(
        requests_per_s=len(times) / (ended - began),
        p50_ms=times[len(times) // 2] * 1e3,
        p99_ms=times[int((len(times) - 1) * 0.99)] * 1e3,
        num_counted=len(times),
    )


@torch.inference_mode()
def _error(what: str, context: Tensor, shape: Shape, index: int) -> float:
    """The greatest difference from torch in process. Raises: WrongAnswer."""
    expected = scaled_dot_product_attention(*inputs_of(shape, index))
    if context.shape != expected.shape:
        raise WrongAnswer(f"{what}: shape {list(context.shape)} instead of {list(expected.shape)}")
    error = float((context - expected).abs().max())
    # Written so that NaN is refused too.
    if not error <= MAX_ABS_ERROR:
        raise WrongAnswer(f"{what}: differs from torch in process by {error:g}")
    return error


@contextlib.contextmanager
def start_servers(folder: Path) -> Iterator[Servers]:
    """The three servers, each on a free port. Raises: ServerFailed, also when one does not end as it must."""
    ports = free_ports(3)
    serve = ["-m", "service", "serve", "--host", HOST, "--port", str(ports[0])]
    with contextlib.ExitStack() as stack:
        service = running(
            "service", serve, port=ports[0], folder=folder, environment=SERVICE_ENVIRONMENT, ready_path="/readyz"
        )
        echo = running(
            "echo",
            ["-m", "tests.benchmarks.echo", str(ports[1])],
            port=ports[1],
            folder=folder,
            environment=LIMIT_ENVIRONMENT,
            exit_codes=UVICORN_EXIT_CODES,
        )
        bound = running(
            "bound",
            ["-m", "tests.benchmarks.bound", str(ports[2])],
            port=ports[2],
            folder=folder,
            environment=LIMIT_ENVIRONMENT,
        )
        yield Servers(*(stack.enter_context(server) for server in (service, echo, bound)))


def run(cells: list[Cell], *, num_rounds: int, seconds: float) -> list[Figures]:
    """Every cell in every round. Raises: NoCompiler, ServerFailed, LoadFailed, WrongAnswer."""
    torch.set_num_threads(1)
    rounds: dict[Cell, list[Round]] = {cell: [] for cell in cells}
    errors = dict.fromkeys(cells, 0.0)
    with tempfile.TemporaryDirectory(prefix="attn-bench-") as name, start_servers(Path(name)) as servers:
        bench = Bench(servers, Path(name), seconds=seconds)
        for turn in range(num_rounds):
            began = time.monotonic()
            for cell in cells:
                one, error = bench.measure(cell, turn=turn)
                rounds[cell].append(one)
                errors[cell] = max(errors[cell], error)
            print(f"round {turn + 1} of {num_rounds}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return [summarize(cell, rounds[cell], errors[cell]) for cell in cells]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.serving", description=__doc__)
    parser.add_argument("--rounds", type=_count, default=5, help="default: 5")
    parser.add_argument("--seconds", type=_length_s, default=0.6, help="each measurement, default: 0.6")
    parser.add_argument(
        "--cells", help=f"such as tiny, medium/json or c1, with commas between; default: all {len(CELLS)}"
    )
    parser.add_argument("--json", type=Path, help="where the figures go; default: a new file in results/")
    arguments = parser.parse_args()
    # A bench that is told to end takes its servers along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    machine = report.machine_facts()
    try:
        cells = select_cells(arguments.cells) if arguments.cells else list(CELLS)
        figures = run(cells, num_rounds=arguments.rounds, seconds=arguments.seconds)
    except (NoSuchCell, NoCompiler, ServerFailed, LoadFailed, WrongAnswer) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    report.show(figures, machine)
    path = arguments.json or report.default_file(datetime.now(UTC))
    report.write(
        path,
        machine=machine,
        settings={"rounds": arguments.rounds, "seconds": arguments.seconds},
        figures=figures,
    )
    print(f"figures of every round: {path}")
    return 0


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError("a whole number from 1 on")
    return int(text)


def _length_s(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("a number of seconds above 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
