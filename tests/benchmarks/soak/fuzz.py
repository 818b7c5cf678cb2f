"""Mutated requests of the Open Inference Protocol over both doors: no mistake of the server, no crash, no growth.

A third each are JSON bodies, binary bodies and protobuf messages. ``python -m tests.benchmarks.soak.fuzz --help``
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import random
import sys
import tempfile
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from service.wire import open_inference_pb2 as pb
from tests.benchmarks.processes import HOST, Server, free_ports
from tests.benchmarks.soak import mutations
from tests.benchmarks.soak.outcome import Figure, Form, Law, Outcome, at_least, at_most, equal, run_forms
from tests.benchmarks.soak.service import serving

METHOD = "/inference.GRPCInferenceService/ModelInfer"
FAULTS = frozenset({"200", "400", "404", "413", "415"})
"""The only statuses that a client's mistake may have; the grpc codes below are theirs."""
CODES = frozenset({"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"})
MAX_GROWTH = 1.05
SETTINGS = {"ATTN_SHARED_MEMORY": "true", "ATTN_LOG_LEVEL": "error"}
"""With shared memory on a strange region is a region that is not there, and not 501."""
TIMEOUT_S = 60


@dataclass(slots=True)
class Tally:
    """How often each answer came; ``wrong`` keeps a few of those that must not."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)

    def note(self, status: str, *, is_allowed: bool, what: str) -> None:
        self.statuses[status] += 1
        if not is_allowed and len(self.wrong) < 20:
            self.wrong.append(f"{status}: {what[:600]}")


class Fuzz:
    """One connection of each door. Raises: OSError where the server went away."""

    def __init__(self, port: int, grpc_port: int) -> None:
        self._http = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
        self._channel = grpc.insecure_channel(f"{HOST}:{grpc_port}")
        self._infer = self._channel.unary_unary(METHOD)
        self.tally = Tally()

    def run(self, count: int, seed: int) -> None:
        """Send so many requests, each of them a function of its number and the seed."""
        for number in range(count):
            random_ = random.Random(f"{seed}:{number}")
            if number % 3 == 2:
                self._send_message(mutations.message(random_))
            else:
                self._send_body((mutations.json_body, mutations.binary_body)[number % 3](random_))

    def _send_body(self, body: mutations.Body) -> None:
        content, headers = body.content, {}
        if body.json_bytes is not None:
            headers["Inference-Header-Content-Length"] = body.json_bytes.encode().decode("latin-1")
        if body.encoding is not None:
            headers["Content-Encoding"] = body.encoding
            if body.encoding == "gzip":
                content = gzip.compress(content)
            elif body.encoding == "deflate":
                content = zlib.compress(content)
        try:
            self._http.request("POST", body.path, content, headers)
            answer = self._http.getresponse()
            text = answer.read()
        except (http.client.HTTPException, OSError) as error:
            self._http.close()
            self.tally.note("no answer", is_allowed=False, what=f"{error!r} {body}")
            return
        status = str(answer.status)
        is_allowed = status in FAULTS and (status == "200" or text.startswith(b'{"error":'))
        self.tally.note(status, is_allowed=is_allowed, what=f"{text[:200]!r} {body}")

    def _send_message(self, message: bytes) -> None:
        code, details = "OK", ""
        try:
            answer = self._infer(message, timeout=TIMEOUT_S)
            pb.ModelInferResponse.FromString(answer)
        except grpc.RpcError as error:
            code, details = error.code().name, error.details()
        self.tally.note(code, is_allowed=code in CODES, what=f"{details} {message!r}")

    def close(self) -> None:
        self._http.close()
        self._channel.close()


def measure(server: Server, grpc_port: int, *, count: int, seed: int, warm_up: int = 0) -> Outcome:
    """``count`` requests after a warm-up, the memory of the server looked at on the way."""
    fuzz = Fuzz(server.port, grpc_port)
    try:
        fuzz.run(warm_up, seed + 1)
        parts = 10
        memory = [_resident_bytes(server)]
        for part in range(parts):
            fuzz.run(count // parts, seed * 1000 + part)
            memory.append(_resident_bytes(server))
    finally:
        fuzz.close()
    tally = fuzz.tally
    answered = sum(n for status, n in tally.statuses.items() if status in ("200", "OK"))
    figures: dict[str, Figure] = {"requests": sum(tally.statuses.values())}
    figures |= {f"answered {status}": n for status, n in sorted(tally.statuses.items())}
    half = len(memory) // 2
    growth = max(memory[half:]) / max(memory[:half])
    figures["memory, second half over first"] = growth
    laws: list[Law] = [
        equal("answers that no fault of a client may have", len(tally.wrong), 0),
        at_least("answered well, so that the mutations reach deep", answered, count // 50),
        at_most("memory, second half over first", growth, MAX_GROWTH),
    ]
    return Outcome("fuzz", figures, laws, notes=tally.wrong)


def _resident_bytes(server: Server) -> int:
    with open(f"/proc/{server.process.pid}/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=100_000, help="requests, default: 100000")
    parser.add_argument("--warm-up", type=int, default=5_000, help="requests before memory is looked at, default: 5000")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")


def _run(options: argparse.Namespace) -> Outcome:
    (grpc_port,) = free_ports(1)
    settings = SETTINGS | {"ATTN_GRPC_PORT": str(grpc_port)}
    with tempfile.TemporaryDirectory(prefix="attn-fuzz-") as name, serving(Path(name), settings) as server:
        return measure(server, grpc_port, count=options.count, seed=options.seed, warm_up=options.warm_up)


FORM = Form("fuzz", __doc__ or "", _add_options, _run)

if __name__ == "__main__":
    sys.exit(run_forms([FORM], prog="python -m tests.benchmarks.soak.fuzz", description=__doc__ or ""))
