"""Asks /livez from a process of its own until its input ends, in turn on a kept connection and on a fresh one.

``python -m tests.benchmarks.soak.livez PORT INTERVAL_S``; latencies go to stdout as one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.benchmarks.processes import HOST, ROOT
from tests.benchmarks.soak.client import get_bytes

TIMEOUT_S = 10.0
_REQUEST = get_bytes("/livez")


@dataclass(slots=True)
class Watch:
    """Filled in when the watch is over. A probe that was not answered 200 is a failure, with its reason."""

    kept_ms: list[float] = field(default_factory=list)
    fresh_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def all_ms(self) -> list[float]:
        return self.kept_ms + self.fresh_ms


@contextlib.contextmanager
def watching(port: int, *, interval_s: float) -> Iterator[Watch]:
    """Ask while the block runs."""
    watch = Watch()
    command = [sys.executable, "-m", "tests.benchmarks.soak.livez", str(port), str(interval_s)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "asking\n"
        yield watch
        text, _ = process.communicate()
    finally:
        process.kill()
        process.wait()
    seen = json.loads(text)
    watch.kept_ms, watch.fresh_ms, watch.failures = seen["kept_ms"], seen["fresh_ms"], seen["failures"]


def quantile(sorted_values: list[float], share: float) -> float:
    """NaN of nothing."""
    return sorted_values[int((len(sorted_values) - 1) * share)] if sorted_values else float("nan")


def _open(port: int) -> socket.socket:
    own = socket.create_connection((HOST, port), timeout=TIMEOUT_S)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return own


def _ask(own: socket.socket) -> None:
    """Raises: OSError, ValueError when the answer is another."""
    own.sendall(_REQUEST)
    received = b""
    while not received.endswith(b'{"live":true}'):
        part = own.recv(4096)
        if not part:
            raise ValueError(f"the connection ended after {received[:100]!r}")
        received += part
    if not received.startswith(b"HTTP/1.1 200 "):
        raise ValueError(f"{received[:100]!r}")


def watch_until_told(port: int, interval_s: float) -> Watch:
    watch = Watch()
    kept = _open(port)
    print("asking", flush=True)
    is_fresh = False
    while not select.select([sys.stdin], [], [], interval_s)[0]:
        is_fresh = not is_fresh
        began = time.perf_counter()
        try:
            if is_fresh:
                with _open(port) as own:
                    _ask(own)
            else:
                _ask(kept)
        except (OSError, ValueError) as error:
            watch.failures.append(f"{'fresh' if is_fresh else 'kept'} connection: {error}")
            if not is_fresh:
                kept.close()
                kept = _open(port)
            continue
        (watch.fresh_ms if is_fresh else watch.kept_ms).append((time.perf_counter() - began) * 1e3)
    kept.close()
    return watch


if __name__ == "__main__":
    found = watch_until_told(int(sys.argv[1]), float(sys.argv[2]))
    json.dump({"kept_ms": found.kept_ms, "fresh_ms": found.fresh_ms, "failures": found.failures}, sys.stdout)
