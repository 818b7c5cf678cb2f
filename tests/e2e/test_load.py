"""The load test against a real server, with client processes and an echo of their own."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from service.cli import app
from service.credentials import CommandError
from service.load.account import Glance
from service.load.arrivals import ClosedLoop, OpenLoop
from service.load.problems import read_shape
from service.load.results import Ceiling, Results, StepResult, read_results
from service.load.run import LoadPlan, run_load
from service.load.worker import BEHIND, ENDED, TOO_MANY
from tests.support.server import RunningServer, server_environment

SMALL = (read_shape("1,2,16,8@3"), read_shape("1,4/2,5-40,16"))
OPEN, CLOSED = OpenLoop(rate_s=60.0, arrivals="even"), ClosedLoop(concurrency=2)


class Heard:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.warnings: list[str] = []
        self.ends: list[StepResult | Ceiling | None] = []

    def say(self, what: str) -> None:
        assert what

    def warn(self, what: str) -> None:
        self.warnings.append(what)

    def begin(self, name: str, seconds: float) -> None:
        self.names.append(name)

    def glance(self, glance: Glance) -> None:
        assert glance.answered >= 0

    def end(self, result: StepResult | Ceiling | None) -> None:
        self.ends.append(result)


class Stalling(Heard):
    """Stops the server for 200 ms, half a second after each step began."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__()
        self._process_id = server.process.pid

    def begin(self, name: str, seconds: float) -> None:
        super().begin(name, seconds)
        threading.Timer(0.5, os.kill, (self._process_id, signal.SIGSTOP)).start()
        threading.Timer(0.7, os.kill, (self._process_id, signal.SIGCONT)).start()


def run(url: str, progress: Heard | None = None, **members: Any) -> Results:
    given: dict[str, Any] = {
        "forms": ("safetensors",),
        "shapes": SMALL,
        "loops": (CLOSED,),
        "duration_s": 0.4,
        "warm_up_s": 0.1,
        "ceiling_s": 0.0,
    }
    return run_load(LoadPlan(url=url, **given | members), progress or Heard())


def command(*words: str, **variables: str) -> Result:
    return CliRunner().invoke(app, ["load", *words], env={"ATTN_URL": "", "COLUMNS": "200"} | variables)


INFO = dict.fromkeys(("path", "why", "device", "dtype"), "") | dict.fromkeys(
    ("queue_ms", "compute_ms", "batch_requests", "empty_rows", "nonfinite_rows", "peak_bytes", "flops"), 0
)
TENSORS = "application/vnd.safetensors"


def tensors_of(*axes: int) -> bytes:
    """An answer of zeros."""
    size = 4 * math.prod(axes)
    entry = {"dtype": "F32", "shape": [1, 1, *axes], "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": {"info": json.dumps(INFO)}, "context": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


ANSWER = tensors_of(2, 2)
QUICK = ("--duration", "0.3", "--warm-up", "0", "--ceiling", "0", "--shape", "1,1,8,8")


@pytest.mark.parametrize("forms", [("safetensors",), ("json", "base64")], ids="-".join)
def test_every_form_and_loop_is_answered_right(server: RunningServer, forms: tuple[str, ...]) -> None:
    heard, has_ceiling = Heard(), forms == ("safetensors",)
    results = run(
        server.url,
        heard,
        forms=forms,
        loops=(OPEN, CLOSED),
        options={"causal": True, "outputs": ["context", "weights", "logsumexp"]},
        num_processes=2 if has_ceiling else 1,
        ceiling_s=0.3 if has_ceiling else 0.0,
        ramp_s=0.1,
    )
    # At 2 at once for the closed loop, at 8 for each process for the open one.
    assert [ceiling.concurrency for ceiling in results.ceilings] == ([2, 16] if has_ceiling else [])
    assert all(ceiling.requests_s > 0 and ceiling.latency.count for ceiling in results.ceilings)
    assert [(step.form, step.loop) for step in results.steps] == [
        (form, loop) for form in forms for loop in ("open", "closed")
    ]
    for step in results.steps:
        assert step.answered == step.planned > 0 and not step.errors
        assert step.checked is not None and step.checked.is_right and step.checked.answers > 0, step.checked
        assert step.stages.keys() == {"read", "parse", "queue", "compute", "encode"}
        assert step.stages["compute"].count == step.answered
        assert step.latency.count == step.answered == sum(shape.count for shape in step.shapes.values())
        assert sum(moment.answered for moment in step.timeline) >= step.answered
        assert step.received_mb_s > 0 and step.sent_mb_s > 0 and (step.ceiling_share is not None) == has_ceiling
    # 60 a second for 0.4 s, even.
    assert all(abs(step.planned - 24) <= 1 for step in results.steps if step.loop == "open")
    assert results.service["device"] == "cpu" and not results.was_cut
    assert len(heard.names) == len(heard.ends) == len(results.steps) + len(results.ceilings)
    assert read_results(results.to_json()) == results


def test_grpc_is_loaded_as_http_is(server: RunningServer) -> None:
    results = run(
        f"http://127.0.0.1:{server.grpc_port}",
        forms=("grpc",),
        loops=(OPEN, CLOSED),
        options={"scale": 0.5, "window": {"left": 3, "right": 3}},
        dtype="bfloat16",
        ceiling_s=0.3,
    )
    assert results.ceilings[0].requests_s > 0
    for step in results.steps:
        assert step.answered == step.planned > 0
        assert step.checked is not None and step.checked.is_right, step.checked
        assert step.stages.keys() == {"queue", "compute"}


def test_a_stall_of_the_server_shows_in_the_open_loop_and_hides_in_the_closed_one(server: RunningServer) -> None:
    results = run(
        server.url,
        Stalling(server),
        shapes=(read_shape("1,1,8,8"),),
        loops=(OpenLoop(rate_s=100.0, arrivals="even"), ClosedLoop(concurrency=1)),
        warm_up_s=0.2,
        duration_s=1.5,
        num_checked=0,
    )
    opened, closed = results.steps
    # 20 of 150 sends were planned in the stall, evenly along its 200 ms.
    assert opened.latency.p99_ms > 150
    assert sum((moment.max_ms or 0) > 100 for moment in opened.timeline) >= 1
    # One of hundreds waited for it, and nothing was sent meanwhile.
    assert closed.latency.max_ms > 150 and closed.latency.p99_ms < 100


def test_a_plan_beyond_what_the_client_can_send_is_called_the_clients_fault(server: RunningServer) -> None:
    result = command(
        "--url", server.url, *QUICK, "--rate", "20000", "--max-in-flight", "20", "--check", "0", "--arrivals", "even"
    )
    assert result.exit_code == 0, result.output
    assert "late for its planned sends" in result.output and "did not happen" in result.output
    results = run(
        server.url, loops=(OpenLoop(rate_s=20000.0, arrivals="even"),), duration_s=0.3, max_in_flight=20, num_checked=0
    )
    (step,) = results.steps
    assert step.errors.keys() <= {BEHIND, TOO_MANY} and step.late
    assert step.planned == 6000 and step.answered + step.failed == 6000


def test_results_are_written_in_every_form_and_held_against_earlier_ones(server: RunningServer, tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    first = command("--url", server.url, *QUICK, "--json", str(before))
    assert first.exit_code == 0, first.output
    second = command(
        *("--url", server.url, *QUICK, "--compare", str(before), "--json", str(after)),
        *("--csv", str(tmp_path / "a.csv"), "--html", str(tmp_path / "a.html")),
    )
    assert second.exit_code == 0, second.output
    assert read_results(after.read_bytes()).steps[0].concurrency == 8
    assert (tmp_path / "a.csv").read_text().splitlines()[1].startswith("safetensors,closed,")
    assert "<html" in (tmp_path / "a.html").read_text()[:200]
    assert all(f"wrote {tmp_path / name}" in second.output for name in ("after.json", "a.csv", "a.html"))


class Ending(Heard):
    """Does something once a step has answers, here in the thread of the test."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end
        self.has_ended = False

    def glance(self, glance: Glance) -> None:
        if glance.answered and not self.has_ended:
            self.has_ended = True
            self._end()


def test_what_was_measured_before_an_end_is_kept(server: RunningServer) -> None:
    heard = Ending(lambda: None)
    plan = LoadPlan(
        url=server.url,
        forms=("safetensors",),
        shapes=SMALL,
        loops=(OPEN, CLOSED),
        duration_s=60,
        warm_up_s=0,
        ceiling_s=0,
    )
    results = run_load(plan, heard, is_over=lambda: heard.has_ended)
    assert results.was_cut and len(results.steps) == 1
    assert results.steps[0].answered > 0 and 0 < results.steps[0].duration_s < 10
    assert results.steps[0].checked is not None and results.steps[0].checked.is_right


def test_requests_that_had_no_answer_when_it_was_ended_are_failures(stub: str) -> None:
    class Hung(Heard):
        is_hung = False

        def glance(self, glance: Glance) -> None:
            self.is_hung = self.is_hung or glance.in_flight > 3

    Stub.script = ["good"] * 20 + ["hanging"] * 1000
    heard = Hung()
    plan = LoadPlan(
        url=stub,
        forms=("safetensors",),
        shapes=(read_shape("1,1,2,2"),),
        loops=(OPEN,),
        duration_s=60,
        warm_up_s=0,
        ceiling_s=0,
        num_checked=0,
    )
    (step,) = run_load(plan, heard, is_over=lambda: heard.is_hung).steps
    assert step.errors.keys() == {ENDED} and step.failed > 3
    assert step.planned == step.answered + step.failed


@pytest.mark.parametrize("loop", [OPEN, CLOSED], ids=["open", "closed"])
def test_a_client_process_that_dies_leaves_what_was_measured(
    server: RunningServer, loop: OpenLoop | ClosedLoop
) -> None:
    def kill() -> None:
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)

    heard = Ending(kill)
    results = run(server.url, heard, loops=(loop, CLOSED), duration_s=60, warm_up_s=0.0)
    assert results.was_cut and len(results.steps) == 1 and results.steps[0].answered > 0
    assert heard.warnings and not multiprocessing.active_children()


def test_a_signal_to_the_whole_group_ends_it_in_order(server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "cut.json"
    words = ["--url", server.url, "--warm-up", "0", "--ceiling", "0", "--duration", "0.3", "--json", str(file)]
    with subprocess.Popen(
        [sys.executable, "-m", "service", "load", *words, "--concurrency", ",".join(["1"] * 50), "--check", "2"],
        env=server_environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        # The first step is over.
        assert "closed, 1 at once" in process.stdout.readline()
        os.killpg(process.pid, signal.SIGTERM)
        output, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, output + complaints
    assert "what was measured will be shown" in complaints and "Traceback" not in complaints
    results = read_results(file.read_bytes())
    assert results.was_cut and 1 <= len(results.steps) < 10


def test_nobody_waits_for_a_probe_that_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(CommandError, match="ended before any load"):
        run_load(
            LoadPlan(
                url=f"http://127.0.0.1:{silent.getsockname()[1]}",
                forms=("safetensors",),
                shapes=SMALL,
                loops=(CLOSED,),
            ),
            Heard(),
            is_over=lambda: True,
        )


def test_files_are_written_though_one_cannot_be_and_nobody_reads_the_output(
    server: RunningServer, tmp_path: Path
) -> None:
    words = ("--url", server.url, *QUICK, "--json", "/dev/full", "--csv", str(tmp_path / "a.csv"))
    result = command(*words)
    assert result.exit_code == 1 and "cannot write /dev/full" in result.stderr
    assert "req/s" in result.output and (tmp_path / "a.csv").read_text().count("\n") == 2


def test_a_client_recovers_from_a_stall_that_left_hundreds_of_requests_open(stub: str) -> None:
    # At 300 a second 200 ms leave 60 connections open, each of which a pool would look at for every request.
    Stub.script = ["slow" if number == 150 else "good" for number in range(1_000)]
    results = run(
        stub,
        shapes=(read_shape("1,1,2,2"),),
        loops=(OpenLoop(rate_s=300, arrivals="even"),),
        duration_s=1.5,
        num_checked=0,
    )
    (step,) = results.steps
    assert step.answered == step.planned == 450 and not step.errors
    assert step.timeline[-2].p50_ms is not None and step.timeline[-2].p50_ms < step.latency.p99_ms


def test_an_option_that_is_null_is_as_good_as_left_out(server: RunningServer) -> None:
    result = command("--url", server.url, *QUICK, "-o", "scale=null", "-o", "window=null")
    assert result.exit_code == 0, result.output


def test_what_the_service_refuses_is_told_in_its_words_before_any_load(server: RunningServer) -> None:
    result = command("--url", server.url, *QUICK, "-o", "softcap=-1", "--rate", "10")
    assert result.exit_code == 1
    assert "softcap" in result.output and "422 invalid" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "1,2,3"], "--shape: B,H,T,D"),
        (["--rate", "0"], "--rate"),
        (["--rate", "fast"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--concurrency", "1.5"], "--concurrency"),
        (["--form", "xml"], "--form"),
        (["--form", "grpc"], "--grpc"),
        (["--form", ","], "--form"),
        (["--dtype", "int8"], "--dtype"),
        (["--arrivals", "bursts"], "--arrivals"),
        (["-o", "sinks=[1]"], "--check 0"),
        (["-o", "dtype=float16"], "--dtype"),
        (["--url", "http://127.0.0.1:1/v1"], "--url"),
        (["--url", "ftp://127.0.0.1"], "--url"),
        (["--grpc", "--url", "https://127.0.0.1:1", "--cert-key", __file__], "--cert-key needs --cert"),
        (["--json", "a.txt", "--csv", "a.txt"], "a file of its own"),
        (["--json", "/nowhere/at/all.json"], "--json"),
        (["--compare", "/nowhere/at/all.json"], "--compare"),
        (["--compare", __file__], "--compare"),
        (["--grpc"], "ATTN_URL"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_meant_is_told_in_a_sentence(words: list[str], said: str) -> None:
    result = command(*words, ATTN_URL="http://127.0.0.1:1")
    assert result.exit_code == 1 and result.stderr.startswith("attn: ") and said in result.stderr
    assert result.stderr.count("\n") == 1


def test_nobody_at_the_url_is_told_in_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        result = command("--url", f"http://127.0.0.1:{taken.getsockname()[1]}", *QUICK)
    assert result.exit_code == 1 and "no connection" in result.stderr


class Stub(BaseHTTPRequestHandler):
    """A service that does what its script says, over and over; the first request is always answered."""

    protocol_version = "HTTP/1.1"
    answer = b""
    script: ClassVar[list[str]] = ["good"]
    count = 0
    stall = threading.Lock()

    def do_GET(self) -> None:
        self.give(200, "application/json", b'{"version": "0", "torch": "0", "device": "stub"}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        place, Stub.count = Stub.count % len(self.script), Stub.count + 1
        does = self.script[place] if Stub.count > 1 else "good"
        if does == "slow":
            # Nobody else is answered meanwhile.
            with self.stall:
                threading.Event().wait(0.2)
        with self.stall:
            pass
        match does:
            case "good" | "slow":
                self.give(200, TENSORS, self.answer)
            case "full":
                self.give(429, "application/problem+json", b'{"type": "/errors/overloaded", "detail": "no room"}')
            case "hang up":
                self.close_connection = True
            case "rubbish":
                self.give(200, TENSORS, b"no gzip", ("content-encoding", "gzip"))
            case "html":
                self.give(200, "text/html", b"<html>")
            case "timing":
                self.give(
                    200, TENSORS, self.answer, ("server-timing", "queue;dur=1.5, compute;dur=abc, read;dur=nan, parse")
                )
            case "silent" | "hanging":
                threading.Event().wait(0.3 if does == "silent" else 1.5)
                self.close_connection = True

    def give(self, status: int, media_type: str, content: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 512


@pytest.fixture
def stub() -> Iterator[str]:
    Stub.count, Stub.script, Stub.answer = 0, ["good"], ANSWER
    with Server(("127.0.0.1", 0), Stub) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "loop", [ClosedLoop(concurrency=1), OpenLoop(rate_s=100, arrivals="even")], ids=["closed", "open"]
)
def test_every_failure_is_told_by_its_kind_and_never_tried_again(stub: str, loop: OpenLoop | ClosedLoop) -> None:
    Stub.script = ["good", "full", "hang up", "rubbish", "html", "timing", "silent"]
    results = run(
        stub,
        shapes=(read_shape("1,1,2,2"),),
        loops=(loop,),
        num_checked=0,
        timeout_s=0.2,
        duration_s=1.5 if isinstance(loop, ClosedLoop) else 0.7,
        warm_up_s=0.0,
    )
    (step,) = results.steps
    kinds = {
        "429 overloaded",
        "connection broken",
        "an answer that is none",
        f"text/html instead of {TENSORS}",
        "no answer in time",
    }
    assert step.errors.keys() == kinds
    assert step.planned == step.answered + step.failed and step.failed == sum(step.errors.values())
    assert abs(step.answered - step.planned * 2 / 7) <= 3
    assert step.details["429 overloaded"].endswith("no room")
    # What is no number among the server's times is left out, and the rest is there.
    assert step.stages.keys() == {"queue"}
    assert Stub.count <= step.planned + 1


def test_wrong_answers_make_the_command_fail(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "answer", tensors_of(8, 8))
    result = command("--url", stub, *QUICK, "--concurrency", "1")
    assert result.exit_code == 1 and "context is off by" in result.output


def test_a_client_without_descriptors_says_that_it_is_the_client(stub: str) -> None:
    process = subprocess.run(
        [
            "bash",
            "-c",
            f"ulimit -n 40; {sys.executable} -m service load --url {stub} {' '.join(QUICK)} --concurrency 60 --check 0",
        ],
        env=server_environment(COLUMNS="200"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "client: too many open files" in process.stdout, process.stdout + process.stderr
    assert "failed in the client itself" in process.stdout


def test_the_same_seed_sends_the_same_problems_in_the_same_order(stub: str) -> None:
    plan: dict[str, Any] = {"shapes": SMALL, "loops": (OpenLoop(rate_s=80, arrivals="poisson"),), "duration_s": 0.5}
    one, other = (run(stub, seed=seed, num_checked=4, **plan).steps[0] for seed in (7, 7))
    assert {name: found.count for name, found in one.shapes.items()} == {
        name: found.count for name, found in other.shapes.items()
    }
