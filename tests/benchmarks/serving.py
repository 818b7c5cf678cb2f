"""The service beside its limits, in one run: ``make bench``, or ``python -m tests.benchmarks.serving --help``.

In every round each cell is asked of the service, of a bare echo, of the bound, of torch in this process and of the
peers that were named, one after the other, so that a ratio holds on a machine whose speed drifts; cells of gRPC of a
bare grpc.aio server too. Nothing here passes or fails on a time; what fails is an answer that is wrong, missing or not
200. A peer that gives one is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.benchmarks import report
from tests.benchmarks.cells import (
    CELLS,
    SAFETENSORS,
    USUAL,
    Cell,
    Format,
    NoSuchCell,
    Sizes,
    decode_raw,
    inputs_of,
    request_bytes,
    select_cells,
    tensor_bytes,
)
from tests.benchmarks.figures import Figures, Round, Sample, summarize
from tests.benchmarks.generator import Generator, GrpcGenerator, LoadFailed, NoCompiler, NoGrpcCompiler
from tests.benchmarks.peers.catalogue import GRPCAIO_RAW, PEERS, NoSuchPeer, Peer, running_peer, select_peers
from tests.benchmarks.peers.install import NotInstalled
from tests.benchmarks.processes import HOST, KEEPS_MEMORY, Server, ServerFailed, free_ports, running

MAX_ABS_ERROR = 1e-5
"""The numbers are of size 1 and the arithmetic float32: what differs by more is another answer."""
MIN_ANSWERS = 5
TORCH_SHARE = 0.4
"""Torch in process answers evenly, so a part of the time is enough."""
SERVICE_ENVIRONMENT = {"ATTN_TORCH_THREADS": "1", "ATTN_LOG_LEVEL": "warning"}
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
    peers: list[tuple[Peer, Server]]
    failures: list[str] = field(default_factory=list)
    """Why a peer is left out, altogether or of a cell."""


class Bench:
    """Measures cells. ``folder`` holds requests, answers and the load generators; ``grpc_generator`` is there where a
    cell is of gRPC.
    """

    def __init__(self, servers: Servers, folder: Path, grpc_generator: GrpcGenerator | None, *, seconds: float) -> None:
        self._servers = servers
        self._folder = folder
        self._seconds = seconds
        self._generator = Generator(folder)
        self._grpc_generator = grpc_generator
        self._left_out: set[tuple[str, Cell]] = set()

    def measure(self, cell: Cell, *, turn: int) -> Round:
        """One round. Another contender comes first each ``turn``.

        Raises: LoadFailed, WrongAnswer.
        """
        servers = self._servers
        service_errors: list[float] = []

        def check_service(index: int, body: bytes) -> None:
            service_errors.append(_error(f"service, {cell.name}", cell.format.decode, body, cell.sizes[index], index))

        def check_bound(index: int, body: bytes) -> None:
            _error(f"bound, {cell.name}", decode_raw, body, cell.sizes[index], index)

        def check_echo(index: int, body: bytes) -> None:
            expected_bytes = tensor_bytes(cell.sizes[index])
            if len(body) != expected_bytes:
                raise WrongAnswer(f"echo, {cell.name}: {len(body)} bytes instead of {expected_bytes}")

        # The echo and the bound know HTTP only: beside gRPC they show what it costs.
        echo_form = SAFETENSORS if cell.format.is_grpc else cell.format
        contenders: dict[str, Callable[[], Sample | None]] = {
            "service": lambda: self._load(servers.service, cell, cell.format, check_service),
            "echo": lambda: self._load(servers.echo, cell, echo_form, check_echo),
            # The bound reads no text: beside JSON it shows what the text costs.
            "bound": lambda: self._load(servers.bound, cell, SAFETENSORS, check_bound),
            "torch": lambda: _in_process(cell.sizes, self._seconds * TORCH_SHARE),
        }
        for peer, server in servers.peers:
            contenders[peer.name] = functools.partial(self._load_peer, peer, server, cell)
        names = list(contenders)
        first = turn % len(names)
        samples = {name: contenders[name]() for name in names[first:] + names[:first]}
        measured = {name: sample for name, sample in samples.items() if sample is not None}
        ours = {name: measured.pop(name) for name in ("service", "echo", "bound", "torch")}
        return Round(**ours, peers=measured, max_abs_error=max(service_errors))

    def _load_peer(self, peer: Peer, server: Server, cell: Cell) -> Sample | None:
        """None where the peer does not take part, or has failed in this round or one before."""
        form = peer.formats.get(cell.format.name)
        if form is None or (peer.name, cell) in self._left_out:
            return None

        def check(index: int, body: bytes) -> None:
            _error(f"{peer.name}, {cell.name}", form.decode, body, cell.sizes[index], index)

        try:
            return self._load(server, cell, form, check)
        except (LoadFailed, WrongAnswer) as error:
            self._left_out.add((peer.name, cell))
            self._servers.failures.append(f"{peer.name} is left out of {cell.name}: {error}")
            return None

    def _load(self, server: Server, cell: Cell, form: Format, check: Callable[[int, bytes], None]) -> Sample:
        requests = [self._request_file(cell, form, index) for index in range(len(cell.sizes))]
        server.reset_peak()
        cpu_before = server.cpu_s()
        min_answers = max(MIN_ANSWERS, cell.connections)
        if form.is_grpc:
            assert self._grpc_generator is not None
            load = self._grpc_generator.run(
                server, form.path, requests, calls=cell.connections, seconds=self._seconds, min_answers=min_answers
            )
        else:
            load = self._generator.run(
                server, requests, connections=cell.connections, seconds=self._seconds, min_answers=min_answers
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
            idle_rss_mb=server.idle_rss_mb,
        )

    def _request_file(self, cell: Cell, form: Format, index: int) -> Path:
        path = self._folder / f"{cell.workload.name}.{form.name}.{index}.request"
        if not path.exists():
            path.write_bytes(request_bytes(cell.sizes[index], form, index))
        return path


@torch.inference_mode()
def _in_process(sizes: Sequence[Sizes], seconds: float) -> Sample:
    """Torch itself, on one thread, one call after the other, whole times round all requests."""
    problems = [inputs_of(one, index) for index, one in enumerate(sizes)]
    for problem in problems:
        scaled_dot_product_attention(*problem)
    times: list[float] = []
    began = ended = time.perf_counter()
    while ended < began + seconds or len(times) < MIN_ANSWERS:
        for query, key, value in problems:
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
def _error(what: str, decode: Callable[[bytes, Sizes], Tensor], body: bytes, sizes: Sizes, index: int) -> float:
    """The greatest difference of an answer from torch in process. Raises: WrongAnswer."""
    expected = scaled_dot_product_attention(*inputs_of(sizes, index))
    try:
        context = decode(body, sizes)
    except (ValueError, KeyError, TypeError) as error:
        raise WrongAnswer(f"{what}: cannot be read: {error!r}") from error
    if context.shape != expected.shape:
        raise WrongAnswer(f"{what}: shape {list(context.shape)} instead of {list(expected.shape)}")
    difference = float((context - expected).abs().max())
    # Written so that NaN is refused too.
    if not difference <= MAX_ABS_ERROR:
        raise WrongAnswer(f"{what}: differs from torch in process by {difference:g}")
    return difference


def running_service(port: int, grpc_port: int, folder: Path) -> contextlib.AbstractContextManager[Server]:
    """The service with both doors. Raises: ServerFailed."""
    return running(
        "service",
        ["-m", "service", "serve", "--host", HOST, "--port", str(port)],
        port=port,
        grpc_port=grpc_port,
        folder=folder,
        environment={**SERVICE_ENVIRONMENT, "ATTN_GRPC_PORT": str(grpc_port)},
        ready_path="/readyz",
    )


@contextlib.contextmanager
def start_servers(folder: Path, peers: Sequence[Peer]) -> Iterator[Servers]:
    """The three servers and the peers, each on a free port. A peer that does not start is left out.

    Raises: ServerFailed, also when one of the three does not end as it must.
    """
    service_port, grpc_port, echo_port, bound_port, *peer_ports = free_ports(4 + len(peers))
    with contextlib.ExitStack() as stack:
        echo = running(
            "echo",
            ["-m", "tests.benchmarks.echo", str(echo_port)],
            port=echo_port,
            folder=folder,
            environment=KEEPS_MEMORY,
            exit_codes=UVICORN_EXIT_CODES,
        )
        bound = running(
            "bound",
            ["-m", "tests.benchmarks.bound", str(bound_port)],
            port=bound_port,
            folder=folder,
            environment=KEEPS_MEMORY,
        )
        servers = Servers(
            service=stack.enter_context(running_service(service_port, grpc_port, folder)),
            echo=stack.enter_context(echo),
            bound=stack.enter_context(bound),
            peers=[],
        )
        for peer, port in zip(peers, peer_ports, strict=True):
            try:
                servers.peers.append((peer, stack.enter_context(running_peer(peer, port, folder))))
            except (NotInstalled, ServerFailed) as error:
                servers.failures.append(f"{peer.name} is left out: {error}")
        yield servers


def run(
    cells: list[Cell], peers: Sequence[Peer], *, num_rounds: int, seconds: float
) -> tuple[list[Figures], Sequence[str]]:
    """Every cell in every round; and why cells or peers were left out.

    Raises: NoCompiler, ServerFailed, LoadFailed, WrongAnswer.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="attn-bench-") as name:
        folder = Path(name)
        cells, grpc_generator, failures = _measurable(cells, folder)
        references = [] if grpc_generator is None else [GRPCAIO_RAW]
        rounds: dict[Cell, list[Round]] = {cell: [] for cell in cells}
        with start_servers(folder, [*references, *peers]) as servers:
            bench = Bench(servers, folder, grpc_generator, seconds=seconds)
            for turn in range(num_rounds):
                began = time.monotonic()
                for cell in cells:
                    rounds[cell].append(bench.measure(cell, turn=turn))
                print(
                    f"round {turn + 1} of {num_rounds}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
                )
    return [summarize(cell, rounds[cell]) for cell in cells], [*failures, *servers.failures]


def _measurable(cells: list[Cell], folder: Path) -> tuple[list[Cell], GrpcGenerator | None, list[str]]:
    """The cells whose load generator can be built, that of gRPC where one needs it, and why others are left out.

    Raises: NoGrpcCompiler when none is left.
    """
    others = [cell for cell in cells if not cell.format.is_grpc]
    if len(others) == len(cells):
        return cells, None, []
    try:
        return cells, GrpcGenerator(folder), []
    except NoGrpcCompiler as error:
        if not others:
            raise
        return others, None, [f"cells of gRPC are left out: {error}"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.serving", description=__doc__)
    parser.add_argument("--rounds", type=_count, default=5, help="default: 5")
    parser.add_argument("--seconds", type=_length_s, default=0.6, help="each measurement, default: 0.6")
    parser.add_argument(
        "--cells",
        default=USUAL,
        help="such as tiny, medium/json or c1, with commas between; default: usual, which is all but "
        + ", ".join(cell.name for cell in CELLS if cell.is_optional),
    )
    parser.add_argument(
        "--peers",
        help="with commas between, or all for all but fastapi_raw_malloc; default: none; there are "
        + ", ".join(peer.name for peer in PEERS),
    )
    parser.add_argument("--json", type=Path, help="where the figures go; default: a new file in results/")
    arguments = parser.parse_args()
    # A bench that is told to end takes its servers along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    machine = report.machine_facts()
    try:
        cells, peers = select_cells(arguments.cells), select_peers(arguments.peers)
        figures, failures = run(cells, peers, num_rounds=arguments.rounds, seconds=arguments.seconds)
    except (NoSuchCell, NoSuchPeer, NoCompiler, ServerFailed, LoadFailed, WrongAnswer) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    report.show(figures, machine, failures)
    path = arguments.json or report.default_file(datetime.now(UTC))
    report.write(
        path,
        machine=machine,
        settings={"rounds": arguments.rounds, "seconds": arguments.seconds},
        figures=figures,
        failures=failures,
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
