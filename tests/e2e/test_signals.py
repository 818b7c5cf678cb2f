"""How a real server goes: at once when idle, after its work under load, and by its limit when that does not end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from tests.support.bodies import SAFETENSORS, safetensors_body
from tests.support.server import RunningServer, server_environment, spawn, wait_until_ready

NUM_CALLERS = 8
WAIT_S = 30.0
ZEROS = torch.zeros(1, 1, 4096, 4)
LONG_ANSWER = safetensors_body({"query": ZEROS, "key": ZEROS, "value": ZEROS}, {"outputs": ["weights"]})
"""Asks for 64 MiB, more than the buffers between two sockets hold."""
LONG_ANSWER_BYTES = 4096 * 4096 * 4
LONG = torch.zeros(1, 8, 32768, 64)
LONG_KERNEL = safetensors_body({"query": LONG, "key": LONG, "value": LONG}, {"path": "fused"})
"""Computes for tens of seconds on one thread."""


@contextmanager
def started(**settings: str) -> Iterator[RunningServer]:
    """A ready server that the test ends itself."""
    server = spawn(ATTN_TORCH_THREADS="1", **settings)
    try:
        wait_until_ready(server.url)
        yield server
    finally:
        server.end()


def said(server: RunningServer, message: str) -> dict[str, Any]:
    """The one line of the log that begins so, once the server has ended."""
    server.follower.join()
    (line,) = [line for line in server.log if line["message"].startswith(message)]
    return line


def until_draining(server: RunningServer) -> None:
    while httpx.get(f"{server.url}/readyz").status_code == 200:
        assert server.process.poll() is None


def until_inside(server: RunningServer, count: int) -> None:
    while f"attn_in_flight_requests {count}.0" not in httpx.get(f"{server.url}/metrics").text:
        assert server.process.poll() is None


def send(server: RunningServer, body: bytes) -> socket.socket:
    """A request whose answer nobody reads yet."""
    caller = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    head = (
        f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: {SAFETENSORS}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    caller.sendall(head.encode() + body)
    return caller


def read_all(caller: socket.socket) -> bytes:
    """The answer to the end of the connection, which must be an orderly one."""
    pieces = []
    while piece := caller.recv(2**20):
        pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_stops_at_once_however_often_it_is_asked(number: signal.Signals) -> None:
    with started() as server:
        began = time.monotonic()
        while server.process.poll() is None:
            server.process.send_signal(number)
        assert server.process.returncode == 0
        assert time.monotonic() - began < 5.0
        assert said(server, "stopped") | {"given_up_requests": 0, "unsent_answers": 0} == said(server, "stopped")


def test_a_stop_while_starting_is_heard() -> None:
    command = [sys.executable, "-m", "service", "serve", "--port", "0"]
    process = subprocess.Popen(command, env=server_environment(), stderr=subprocess.PIPE)
    try:
        while not listens_for(process, signal.SIGTERM):
            assert process.poll() is None
        process.terminate()
        _, log = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, log) == (0, b"")


def listens_for(process: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    with open(f"/proc/{process.pid}/status") as status:
        (caught,) = [line.split()[1] for line in status if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_stop_under_load_loses_nothing() -> None:
    sizes = torch.randint(1, 200, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    bodies = [safetensors_body({"query": torch.ones(1, 4, size, 16)}, {}) for size in sizes]
    warm, counted = threading.Event(), threading.Lock()
    answers: list[httpx.Response] = []
    refused = 0

    def call(server: RunningServer, first: int) -> None:
        """Ask again and again, until told to go elsewhere."""
        nonlocal refused
        with httpx.Client(base_url=server.url, timeout=WAIT_S, headers={"content-type": SAFETENSORS}) as client:
            for number in range(first, 10**6):
                try:
                    answer = client.post("/v1/attention", content=bodies[number % len(bodies)])
                except httpx.ConnectError:
                    with counted:
                        refused += 1
                    return
                with counted:
                    answers.append(answer)
                    if len(answers) >= 50 * NUM_CALLERS:
                        warm.set()
                if answer.status_code != 200:
                    return

    with (
        started(ATTN_DRAIN_NOTICE_S="1.0", ATTN_LOG_LEVEL="debug") as server,
        ThreadPoolExecutor(NUM_CALLERS) as pool,
    ):
        callers = [pool.submit(call, server, 8 * first) for first in range(NUM_CALLERS)]
        assert warm.wait(WAIT_S)
        server.terminate()
        for caller in callers:
            caller.result(WAIT_S)
        assert server.wait() == 0
        assert said(server, "stopped")["given_up_requests"] == 0
    written = [line["status"] for line in server.log if line.get("route") == "/v1/attention"]
    statuses = [answer.status_code for answer in answers]
    assert sorted(statuses) == sorted(written)
    assert statuses.count(200) >= 50 * NUM_CALLERS
    assert statuses.count(503) + refused == NUM_CALLERS
    for answer in answers:
        if answer.status_code == 503:
            assert answer.headers["connection"] == "close" and int(answer.headers["retry-after"]) >= 1


def test_an_answer_that_is_being_read_during_a_drain_is_not_cut() -> None:
    with started(ATTN_DRAIN_TIMEOUT_S="60") as server, send(server, LONG_ANSWER) as caller:
        start = caller.recv(1024)
        server.terminate()
        until_draining(server)
        assert server.process.poll() is None
        head, _, body = (start + read_all(caller)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and len(body) >= LONG_ANSWER_BYTES
        assert f"content-length: {len(body)}".encode() in head
        assert server.wait() == 0
        assert said(server, "stopped")["unsent_answers"] == 0


def test_a_drain_whose_limit_is_over_gives_up_and_says_how_many() -> None:
    with (
        # No estimate of the wait, or of the time, is to refuse them first.
        started(
            ATTN_DRAIN_TIMEOUT_S="0.5", ATTN_MAX_WAIT_S="3600", ATTN_REQUEST_TIMEOUT_S="3600", ATTN_MAX_TIMEOUT_S="3600"
        ) as server,
        send(server, LONG_ANSWER) as stalled,
        ThreadPoolExecutor(2) as pool,
    ):
        assert stalled.recv(1)
        callers = [send(server, LONG_KERNEL), send(server, LONG_KERNEL)]
        until_inside(server, 3)
        began = time.monotonic()
        server.terminate()
        until_draining(server)
        server.terminate()
        for answer in pool.map(read_all, callers):
            head = answer.lower()
            assert head.startswith(b"http/1.1 503 ") and b"connection: close" in head and b"retry-after: " in head
            assert b"/errors/unavailable" in head
        assert server.wait() == 1
        # The kernel that is still running is not waited for.
        assert time.monotonic() - began < 15.0
        for caller in callers:
            caller.close()
        # The one that nobody reads is among them.
        assert "3 requests are given up" in said(server, "the drain's limit of 0.5 s is over")["message"]
        stopped = said(server, "stopped")
        assert (stopped["given_up_requests"], stopped["unsent_answers"]) == (3, 0)
