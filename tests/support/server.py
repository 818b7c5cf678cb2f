"""A real server in a process of its own, on a port that the system chose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

START_S = 60.0


@dataclass(slots=True)
class RunningServer:
    """``log`` grows as the server writes; each entry is one line, parsed."""

    process: subprocess.Popen[str]
    port: int
    grpc_port: int
    log: list[dict[str, Any]]
    follower: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.follower.join()

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.process.pid}/statm") as statm:
            return int(statm.read().split()[1]) * 4096


def server_environment(**settings: str) -> dict[str, str]:
    """The environment without any setting of whoever runs the tests, and with these."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATTN_")}
    # How long a problem takes is estimated from a machine that other tests keep busy.
    return clean | {"ATTN_DRAIN_NOTICE_S": "0.05", "ATTN_MAX_WAIT_S": "600"} | settings


def spawn(**settings: str) -> RunningServer:
    """Start a server; given back as soon as it listens, ready or not. Ended by ``RunningServer.end``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "service", "serve", "--port", "0", "--grpc-port", "0"],
        env=server_environment(**settings),
        stderr=subprocess.PIPE,
        text=True,
    )
    log: list[dict[str, Any]] = []
    assert process.stderr is not None
    for line in process.stderr:
        entry = json.loads(line)
        log.append(entry)
        if entry["message"] == "listening":
            break
    else:
        raise AssertionError(f"the server ended with {process.wait()} before it listened")
    stream = process.stderr

    def follow() -> None:
        with stream:
            for line in stream:
                try:
                    log.append(json.loads(line))
                except ValueError:
                    log.append({"message": line, "level": "unparsed"})

    follower = threading.Thread(target=follow)
    follower.start()
    return RunningServer(process, int(entry["port"]), int(entry["grpc_port"]), log, follower)


def wait_until_ready(url: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            continue
    raise AssertionError(f"{url} was not ready within {START_S} s")


@contextmanager
def running_server(**settings: str) -> Iterator[RunningServer]:
    """A ready server; at the end it must still be there, and stop in order when asked."""
    server = spawn(**settings)
    try:
        wait_until_ready(server.url)
        yield server
        if server.process.poll() is None:
            server.terminate()
        assert server.wait() == 0, server.log[-5:]
    finally:
        server.end()
