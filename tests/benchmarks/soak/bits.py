"""Promise 3: a problem has the same answer, bit for bit, alone and among any others.

Random problems are asked one after the other of an idle server, then all of them at once, twice each, over many
connections, both wire formats and both roads of HTTP, beside a client that sends large problems and one that sends
long text. Every output is compared byte by byte, and what is said of it (kernel, reason, rows counted) and refusals
too. ``python -m tests.benchmarks.soak.bits --help``
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from tests.benchmarks.soak.client import Connection, NoAnswer, Reply, request_bytes
from tests.benchmarks.soak.outcome import Form, Law, Outcome, at_least, equal, run_forms
from tests.benchmarks.soak.problems import WAYS, Case, cases
from tests.benchmarks.soak.service import serving
from tests.support.bodies import JSON, SAFETENSORS, list_body, read_tensor, safetensors_body
from tests.support.factory import DTYPES, make_tensor

SETTINGS = {"ATTN_LOG_LEVEL": "warning", "ATTN_MAX_WAIT_S": "600", "ATTN_REQUEST_TIMEOUT_S": "600"}
"""Nobody is refused for the sake of time: an answer is awaited for each problem."""
SAME_INFO = ("path", "why", "dtype", "empty_rows", "nonfinite_rows", "flops")
LARGE_FLOPS = 10**9
PATHS = ("fused", "manual")
MAX_SHOWN = 10
_CODES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of an answer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply as far as it must not depend on company. ``error`` is the body of a refusal."""

    status: int
    outputs: dict[str, Output]
    info: dict[str, Any]
    error: Any = None


@dataclass(slots=True)
class Tally:
    """What was seen. ``answered`` counts by kernel and dtype; ``differences`` says what was not equal."""

    num_problems: int = 0
    num_compared: Counter[str] = field(default_factory=Counter)
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    num_refused: int = 0
    num_large: int = 0
    num_full: int = 0
    num_noise: int = 0
    alone_s: float = 0.0
    mixed_s: float = 0.0
    most_in_batch: int = 0
    differences: list[str] = field(default_factory=list)


async def compare(port: int, *, num_problems: int, connections: int, seed: int, told: bool = False) -> Tally:
    """All problems, alone and in company. ``told``: progress goes to stderr. Raises: NoAnswer."""
    tally, chooser = Tally(), random.Random(seed)
    noise = [_Noise(request) for request in _noise_requests()]
    for wave in cases(num_problems, seed=seed):
        began = time.monotonic()
        await _ask_noise_alone(port, noise)
        alone = await _ask_alone(port, wave, tally)
        between = time.monotonic()
        await _ask_together(port, wave, alone, noise, connections=connections, chooser=chooser, tally=tally)
        tally.alone_s += between - began
        tally.mixed_s += time.monotonic() - between
        tally.num_problems += len(wave)
        if told:
            print(f"{tally.num_problems} problems, {len(tally.differences)} differ", file=sys.stderr, flush=True)
    tally.num_noise = sum(one.num_answers for one in noise)
    return tally


async def _ask_alone(port: int, wave: list[Case], tally: Tally) -> list[Answer]:
    connection = await Connection.open(port)
    answers = []
    for case in wave:
        answer = read_answer(await connection.ask(case.request("binary")))
        tally.kinds[case.kind] += 1
        if answer.status == 200:
            tally.answered[answer.info["path"], answer.info["dtype"]] += 1
            tally.num_large += answer.info["flops"] >= LARGE_FLOPS
        else:
            tally.num_refused += 1
        answers.append(answer)
    await connection.close()
    return answers


async def _ask_together(
    port: int,
    wave: list[Case],
    alone: list[Answer],
    noise: list[_Noise],
    *,
    connections: int,
    chooser: random.Random,
    tally: Tally,
) -> None:
    """Each once by the first way and once by another, in an order that has nothing to do with that of before."""
    asked = [(place, WAYS[0]) for place in range(len(wave))]
    for place, case in enumerate(wave):
        way = WAYS[1 + case.number % (len(WAYS) - 1)]
        asked.append((place, way if case.can_go(way) else WAYS[1]))
    chooser.shuffle(asked)

    async def work() -> None:
        connection = await Connection.open(port)
        while asked:
            place, way = asked.pop()
            request = wave[place].request(way)
            if way == "binary in two writes":
                half = len(request) - len(request) // 3
                await connection.send(request[:half])
                # The loop turns once more, and the server has read the first part or has not.
                await asyncio.sleep(0)
                request = request[half:]
            reply = await connection.ask(request)
            if reply.status == 429:
                tally.num_full += 1
                asked.append((place, way))
                continue
            answer = read_answer(reply, like=alone[place])
            tally.num_compared[way] += 1
            tally.most_in_batch = max(tally.most_in_batch, int(answer.info.get("batch_requests", 0)))
            difference = difference_of(alone[place], answer, is_list=way == "JSON, lists")
            if difference is not None:
                tally.differences.append(f"{way}: {difference}; {wave[place]}")
        await connection.close()

    is_over = asyncio.Event()
    disturbing = [asyncio.ensure_future(one.disturb(port, is_over, tally)) for one in noise]
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(work())
    finally:
        is_over.set()
    await asyncio.gather(*disturbing)


class _Noise:
    """One request asked over and over while others are compared; its answers are compared too."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._alone: Answer | None = None
        self.num_answers = 0

    async def ask_alone(self, connection: Connection) -> None:
        if self._alone is None:
            self._alone = read_answer(await connection.ask(self._request))

    async def disturb(self, port: int, is_over: asyncio.Event, tally: Tally) -> None:
        assert self._alone is not None
        connection = await Connection.open(port)
        while not is_over.is_set():
            reply = await connection.ask(self._request)
            if reply.status == 429:
                tally.num_full += 1
                continue
            self.num_answers += 1
            difference = difference_of(self._alone, read_answer(reply, like=self._alone), is_list=False)
            if difference is not None:
                tally.differences.append(f"what disturbs: {difference}")
        await connection.close()


async def _ask_noise_alone(port: int, noise: list[_Noise]) -> None:
    connection = await Connection.open(port)
    for one in noise:
        await one.ask_alone(connection)
    await connection.close()


def _noise_requests() -> list[bytes]:
    """A large problem, and text of about 1 MB."""
    large = {name: make_tensor(1, 4, 1024, 64, seed=n) for n, name in enumerate(("query", "key", "value"))}
    text = {name: make_tensor(1, 4, 64, 64, seed=n) for n, name in enumerate(("query", "key", "value"))}
    return [
        request_bytes(safetensors_body(large, {}), SAFETENSORS),
        request_bytes(list_body(text, {"encoding": "base64"}), JSON),
    ]


def read_answer(reply: Reply, *, like: Answer | None = None) -> Answer:
    """``like`` says what the numbers of nested lists are."""
    if reply.status != 200:
        return Answer(reply.status, {}, {}, json.loads(reply.body))
    if reply.headers["content-type"] == SAFETENSORS:
        data_at = 8 + int.from_bytes(reply.body[:8], "little")
        header = json.loads(reply.body[8:data_at])
        info = json.loads(header.pop("__metadata__")["info"])
        outputs = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            data = reply.body[data_at + begin : data_at + end]
            outputs[name] = Output(_CODES[entry["dtype"]], tuple(entry["shape"]), data)
        return Answer(200, outputs, info)
    members = json.loads(reply.body)
    info = members.pop("info")
    return Answer(200, {name: _output(name, value, like) for name, value in members.items()}, info)


def _output(name: str, value: Any, like: Answer | None) -> Output:
    if isinstance(value, dict):
        data = base64.b64decode(value["data"], validate=True)
        return Output(getattr(torch, value["dtype"]), tuple(value["shape"]), data)
    expected = None if like is None else like.outputs.get(name)
    tensor = read_tensor(value, torch.float32 if expected is None else expected.dtype)
    return Output(tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def difference_of(alone: Answer, other: Answer, *, is_list: bool) -> str | None:
    """What differs, in words. As text a NaN has no bits of its own, and the numbers of an empty tensor no shape."""
    if alone.status != other.status:
        return f"status {other.status} instead of {alone.status}: {other.error or alone.error}"
    if alone.error != other.error:
        return f"refused with {other.error} instead of {alone.error}"
    for name in SAME_INFO:
        if alone.info.get(name) != other.info.get(name):
            return f"{name} {other.info.get(name)!r} instead of {alone.info.get(name)!r}"
    if set(alone.outputs) != set(other.outputs):
        return f"outputs {sorted(other.outputs)} instead of {sorted(alone.outputs)}"
    for name, expected in alone.outputs.items():
        found = other.outputs[name]
        if (expected.dtype, expected.shape) != (found.dtype, found.shape):
            return f"{name}: {found.dtype} {found.shape} instead of {expected.dtype} {expected.shape}"
        if expected.data != found.data:
            count = _num_different(expected, found, nan_is_nan=is_list)
            if count:
                return f"{name}: {count} numbers of {len(expected.data) // expected.dtype.itemsize} differ"
    return None


def _num_different(expected: Output, found: Output, *, nan_is_nan: bool) -> int:
    bits = _BITS[expected.dtype.itemsize]
    differ = np.frombuffer(expected.data, bits) != np.frombuffer(found.data, bits)
    if nan_is_nan and expected.dtype.is_floating_point:
        differ &= ~(_is_nan(expected) & _is_nan(found))
    return int(differ.sum())


def _is_nan(output: Output) -> Any:
    return torch.frombuffer(bytearray(output.data), dtype=output.dtype).isnan().numpy()


def laws_of(tally: Tally) -> list[Law]:
    laws = [equal("answers that differ from the one given alone", len(tally.differences), 0)]
    seen = [(path, str(dtype).removeprefix("torch.")) for path in PATHS for dtype in DTYPES]
    laws += [at_least(f"problems answered by {path}, {dtype}", tally.answered[path, dtype], 1) for path, dtype in seen]
    laws.append(at_least("problems of 1e9 flops or more", tally.num_large, 1))
    return laws


def outcome_of(tally: Tally) -> Outcome:
    ways = [(way, tally.num_compared[way]) for way in WAYS]
    kernels = [(f"{path}, {dtype}", count) for (path, dtype), count in sorted(tally.answered.items())]
    return Outcome(
        "bits",
        figures={
            "problems": tally.num_problems,
            **{f"of them {kind}": count for kind, count in tally.kinds.items()},
            "of them refused": tally.num_refused,
            "of them of 1e9 flops or more": tally.num_large,
            "answers compared": tally.num_compared.total(),
            "answers to what disturbs, compared too": tally.num_noise,
            "most requests in a batch": tally.most_in_batch,
            "refused as full, and asked again": tally.num_full,
            "alone, s": tally.alone_s,
            "together, s": tally.mixed_s,
        },
        laws=laws_of(tally),
        tables=[("way of asking in company", ("", "compared"), ways), ("kernel and dtype", ("", "problems"), kernels)],
        notes=tally.differences[:MAX_SHOWN],
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", type=int, default=10_000, help="default: 10000")
    parser.add_argument("--connections", type=int, default=24, help="default: 24")
    parser.add_argument("--seed", type=int, default=3, help="default: 3")


def run(options: argparse.Namespace) -> Outcome:
    """Raises: ServerFailed."""
    with tempfile.TemporaryDirectory(prefix="attn-soak-") as folder, serving(Path(folder), SETTINGS) as server:
        work = compare(
            server.port, num_problems=options.problems, connections=options.connections, seed=options.seed, told=True
        )
        try:
            tally = uvloop.run(work)
        except* NoAnswer as errors:
            raise server.failure(f"a request was not answered: {errors.exceptions[0]}") from None
    return outcome_of(tally)


FORM = Form("bits", "equal bits alone and in company", add_options, run)

if __name__ == "__main__":
    sys.exit(run_forms([FORM], prog="python -m tests.benchmarks.soak.bits", description=__doc__ or ""))
