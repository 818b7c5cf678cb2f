"""Servers as processes: started, measured from /proc, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READY_S = 60.0
STOP_S = 20.0
POLL_S = 0.05
SETTLE_S = 1.0
SETTLED_MB = 0.1
HOST = "127.0.0.1"
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
"""Left to itself, glibc gives memory back after each small body until it has freed a large one: the echo would be four
times slower or not, by what it was asked before."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOG_TAIL_BYTES = 2000
_RESET_PEAK = "5"


class ServerFailed(Exception):
    """A server did not start, or did not end as it must; the message has the end of its log."""


@dataclass(slots=True)
class Server:
    """A running server and everything it started. ``idle_rss_mb`` is its memory once it was ready, before any load.

    ``grpc_port`` is None where it listens on one port only.
    """

    name: str
    port: int
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)
    idle_rss_mb: float = 0.0
    grpc_port: int | None = None

    def cpu_s(self) -> float:
        """Processor time so far, of the whole tree."""
        return sum(_cpu_ticks(pid) for pid in _tree(self.process.pid)) / _TICKS_PER_S

    def reset_peak(self) -> None:
        """Measure the peak of memory from now on."""
        for pid in _tree(self.process.pid):
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)

    def peak_rss_mb(self) -> float:
        """Peak of resident memory since the last reset, summed over the tree, in units of 1e6 bytes."""
        return self._memory_mb("VmHWM")

    def rss_mb(self) -> float:
        """Resident memory at this moment, summed over the tree, in units of 1e6 bytes."""
        return self._memory_mb("VmRSS")

    def _memory_mb(self, name: str) -> float:
        return sum(_status_kib(pid, name) for pid in _tree(self.process.pid)) * 1024 / 1e6

    def failure(self, what: str) -> ServerFailed:
        tail = self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        return ServerFailed(f"{self.name}: {what}\n{tail}")


@contextlib.contextmanager
def running(
    name: str,
    arguments: Sequence[str],
    *,
    port: int,
    grpc_port: int | None = None,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    ready_path: str | None = None,
    exit_codes: frozenset[int] | None = frozenset({0}),
    python: Path = Path(sys.executable),
) -> Iterator[Server]:
    """A server that is ready: listening, or answering 200 on ``ready_path``. Ended by SIGTERM.

    ``arguments`` are those of ``python``. Raises: ServerFailed when it does not start or ends with another code; None
    takes any end.
    """
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    server = Server(name, port, log, process, grpc_port=grpc_port)
    try:
        _wait_until_ready(server, ready_path)
        server.idle_rss_mb = _settled_rss_mb(server)
        yield server
        if exit_codes is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise server.failure(f"still there {STOP_S:g} s after SIGTERM") from None
        if code not in exit_codes:
            raise server.failure(f"exit code {code}")
    finally:
        _end(process)


def _settled_rss_mb(server: Server) -> float:
    """Memory once it grows no more: what a server starts besides may come after it is ready."""
    before = server.rss_mb()
    for _ in range(round(SETTLE_S / POLL_S)):
        time.sleep(POLL_S)
        now = server.rss_mb()
        before, grown = now, now - before
        if grown < SETTLED_MB:
            break
    return before


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on at this moment."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_ready(server: Server, ready_path: str | None) -> None:
    give_up = time.monotonic() + READY_S
    while time.monotonic() < give_up:
        code = server.process.poll()
        if code is not None:
            raise server.failure(f"ended at start with exit code {code}")
        with contextlib.suppress(OSError, urllib.error.URLError):
            if ready_path is None:
                socket.create_connection((HOST, server.port), timeout=1).close()
            else:
                urllib.request.urlopen(f"http://{HOST}:{server.port}{ready_path}", timeout=5).close()
            return
        time.sleep(POLL_S)
    raise server.failure(f"not ready after {READY_S:g} s")


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on: what stands before may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _cpu_ticks(pid: int) -> int:
    try:
        fields = _stat(pid)
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _status_kib(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + ":")), 0)
