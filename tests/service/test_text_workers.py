"""Long text in processes of its own: the same answer, no torch, memory given back, nothing that outlives the server."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import torch
from numpy.typing import NDArray

from attn_core import InvalidProblem
from attn_core.placement import ALIGNMENT_BYTES
from service import text_workers
from service.deadline import Deadline
from service.errors import DeadlinePassed, Malformed, Unavailable
from service.text_process import KEPT_BYTES, NICENESS, ReadReply, ReadTask, answer, room_for_reading
from service.text_workers import TextWorkers
from service.wire import arrays, json_arrays, json_format
from service.wire.arrays import Limits
from service.wire.requests import ATTENTION, WEIGHTED_SUM, ReadLimits
from tests.support.bodies import JSON
from tests.support.server import running_server

LIMITS = ReadLimits()
READ = functools.partial(json_arrays.read, names=ATTENTION.names, limits=LIMITS.tensors)
WRITE = functools.partial(json_arrays.write, info={}, encoding="list")
MEASURE = functools.partial(json_arrays.max_text_bytes, info={}, encoding="list")
WAIT_S = 30.0


def run(law: Callable[[TextWorkers], Coroutine[Any, Any, None]]) -> None:
    """One law of running workers, in an event loop."""

    async def inside() -> None:
        async with running_workers() as workers:
            await law(workers)

    asyncio.run(inside())


@asynccontextmanager
async def running_workers(num_workers: int = 1) -> AsyncIterator[TextWorkers]:
    workers = TextWorkers(num_workers=num_workers)
    workers.start()
    try:
        yield workers
    finally:
        pids = workers.pids()
        await asyncio.to_thread(workers.stop)
        assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end


async def read(workers: TextWorkers, body: bytes, timeout_s: float = WAIT_S) -> Any:
    build = functools.partial(json_format.build, call=ATTENTION, limits=LIMITS)
    return await workers.read(body, READ, Deadline.after(timeout_s), finish=build)


def list_body(*shape: int, **options: Any) -> bytes:
    generator = np.random.default_rng(0)
    tensors = {name: generator.standard_normal(shape) for name in ("query", "key", "value")}
    return orjson.dumps(tensors | options, option=orjson.OPT_SERIALIZE_NUMPY)


def body_bits(problem: Any) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in problem.tensors().items()}


def base64_member(array: NDArray[Any], dtype: str) -> dict[str, Any]:
    (text,) = json_arrays.write({"x": arrays.FlatTensor(dtype, array.shape, array.reshape(-1))}, {}, "base64")
    member: dict[str, Any] = json.loads(bytes(text))["x"]
    return member


@pytest.mark.parametrize("dtype", arrays.FLOAT_NAMES)
def test_a_worker_reads_the_same_bits_where_they_can_be_computed(dtype: str) -> None:
    body = list_body(2, 3, 16, 8, dtype=dtype, causal=True, timeout_ms=5000)

    async def law(workers: TextWorkers) -> None:
        decoded, inline = await read(workers, body), json_format.decode(body, ATTENTION, LIMITS)
        assert body_bits(decoded.problem) == body_bits(inline.problem)
        assert decoded.problem.query.dtype == getattr(torch, dtype)
        assert (decoded.encoding, decoded.timeout_s) == (inline.encoding, inline.timeout_s) == ("list", 5.0)
        assert all(t.data_ptr() % ALIGNMENT_BYTES == 0 for t in decoded.problem.tensors().values())
        decoded.problem.query.add_(1.0)

    run(law)
    assert arrays.ALIGNMENT_BYTES == ALIGNMENT_BYTES


def test_a_worker_reads_every_kind_of_tensor() -> None:
    members = {
        "query": base64_member(np.arange(24, dtype=np.uint16).reshape(1, 2, 3, 4), "bfloat16"),
        "key": base64_member(np.arange(24, dtype=np.uint16).reshape(1, 2, 3, 4), "bfloat16"),
        "value": base64_member(np.zeros((1, 2, 3, 0), dtype=np.uint16), "bfloat16"),
        "allow_mask": [[True, False, True]],
        "key_lengths": [2],
        "query_offset": 5,
        "causal": True,
        "bias": [["-Infinity", 0.5, 1]],
    }
    body = json.dumps(members | {"value": members["key"]}).encode()
    broken = json.dumps(members | {"unknown": [[1]], "scale": "x"}).encode()

    async def law(workers: TextWorkers) -> None:
        assert body_bits((await read(workers, body)).problem) == body_bits(
            json_format.decode(body, ATTENTION, LIMITS).problem
        )
        with pytest.raises(InvalidProblem) as inline:
            json_format.decode(broken, ATTENTION, LIMITS)
        with pytest.raises(InvalidProblem) as caught:
            await read(workers, broken)
        assert caught.value.faults == inline.value.faults
        assert {"unknown", "scale", "value"} <= {fault.field for fault in caught.value.faults}

    run(law)


@pytest.mark.parametrize(
    "body",
    [b"", b"[1]", b'{"query":[[1,NaN]]}', b'{"query":[[1e39]]}', b'{"query":[[1],[2,3]],"query":1}', b"[" * 3000],
)
def test_a_refusal_reads_the_same(body: bytes) -> None:
    async def law(workers: TextWorkers) -> None:
        with pytest.raises((Malformed, InvalidProblem)) as inline:
            json_format.decode(body, ATTENTION, LIMITS)
        with pytest.raises(type(inline.value)) as caught:
            await read(workers, body)
        assert str(caught.value) == str(inline.value)
        assert caught.value.faults == inline.value.faults  # type: ignore[attr-defined]

    run(law)


@pytest.mark.parametrize("encoding", ["list", "base64"])
def test_a_worker_writes_the_same_text(encoding: json_arrays.Encoding) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = {
        "context": torch.randn(2, 3, 50, 7, generator=generator).transpose(1, 2),
        "weights": torch.randn(40, 60, generator=generator).to(torch.bfloat16),
        "logsumexp": torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], dtype=torch.float64),
        "top_keys": torch.tensor([[1, 2**62]]),
        "narrow": torch.full((30, 1, 1, 1), -1.2345678e-38),
        "empty": torch.empty(2, 0),
    }
    info = {"path": "fused", "queue_ms": 0.25}

    async def law(workers: TextWorkers) -> None:
        collect = functools.partial(json_format.flat_outputs, outputs)
        said: dict[str, Any] = {"info": info, "encoding": encoding}
        write = functools.partial(json_arrays.write, **said)
        measure = functools.partial(json_arrays.max_text_bytes, **said)
        pieces = await workers.write(collect, write, measure, Deadline.after(WAIT_S))
        assert b"".join(pieces) == b"".join(json_format.encode(outputs, info, encoding))
        assert all(isinstance(piece, memoryview) for piece in pieces)

    run(law)


@pytest.mark.parametrize("dtype", list(arrays.STORAGE))
@pytest.mark.parametrize("shape", [(50,), (50, 1, 1, 1), (1, 1, 1, 50)])
def test_no_text_is_longer_than_its_room(dtype: str, shape: tuple[int, ...]) -> None:
    worst = {"float64": -1.2345678901234567e-308, "float32": -1.2345679e-38, "int64": -(2**63), "int32": -(2**31)}
    numbers = np.full(50, worst.get(dtype, 0xFFFF if dtype == "bfloat16" else -0.00012345 if dtype == "float16" else 0))
    for data in (numbers.astype(arrays.STORAGE[dtype]), np.full(50, -np.inf)[: 50 if dtype.startswith("float") else 0]):
        flat = arrays.FlatTensor(dtype, shape if data.size else (0,), data.astype(arrays.STORAGE[dtype]))
        for encoding in ("list", "base64"):
            length = sum(map(len, json_arrays.write({"context": flat}, {"a": 1}, encoding)))
            assert length <= json_arrays.max_text_bytes({"context": flat}, {"a": 1}, encoding)


@pytest.mark.parametrize(
    "body",
    [
        b'{"query":[' + b"1," * 999 + b'1],"dtype":"float64"}',
        b'{"query":[[1]],"key_lengths":[' + b"1," * 999 + b"1]}",
        b'{"query":1,"key":[1],"value":[1],"allow_mask":[true],"sinks":[1],"dtype":"float64"}',
        b"{}",
    ],
)
def test_no_body_needs_more_than_its_room(body: bytes) -> None:
    region = np.zeros(room_for_reading(len(body)), dtype=np.uint8)
    region[: len(body)] = np.frombuffer(body, dtype=np.uint8)
    reply = answer(ReadTask(len(body), READ), region)
    assert isinstance(reply, ReadReply), reply
    assert reply.end <= region.size


def test_a_region_comes_back_when_its_last_tensor_goes() -> None:
    body = list_body(1, 2, 8, 4)

    async def law(workers: TextWorkers) -> None:
        (worker,) = workers._workers
        decoded = await read(workers, body)
        part = decoded.problem.query[0, 0, 3:]
        wanted = part.clone()
        assert len(worker._leased) == 1
        del decoded
        for _ in range(3):
            await read(workers, body)
        assert torch.equal(part, wanted)
        await until(lambda: len(worker._leased) == 1)
        del part
        await until(lambda: not worker._leased)
        # How many were used in turn is a matter of when the last reader went.
        assert len(worker._idle) in (2, 3)
        for bad in (b'{"query":[[1]],"scale":"x"}', b"{"):
            with pytest.raises((InvalidProblem, Malformed)):
                await read(workers, bad)
        pieces = await workers.write(dict, WRITE, MEASURE, Deadline.after(WAIT_S))
        assert len(worker._leased) == 1
        del pieces
        await until(lambda: not worker._leased)
        assert len(worker._idle) in (2, 3)

    gc.disable()
    try:
        run(law)
    finally:
        gc.enable()


def test_regions_are_bounded_in_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "MAX_LEASED_REGIONS", 2)
    body = list_body(1, 2, 8, 4)
    long_body = b'{"query":[[1.0]],"bias":[[0.5]]' + b" " * (KEPT_BYTES + 1) + b"}"

    async def law(workers: TextWorkers) -> None:
        (worker,) = workers._workers
        wanted = body_bits(json_format.decode(body, ATTENTION, LIMITS).problem)
        held = [await read(workers, body) for _ in range(5)]
        assert len(worker._leased) == 2
        assert all(body_bits(decoded.problem) == wanted for decoded in held)
        assert all(decoded.problem.key.data_ptr() % ALIGNMENT_BYTES == 0 for decoded in held)
        held.clear()
        await until(lambda: not worker._leased)
        for _ in range(2):
            decoded = await read(workers, long_body)
            assert decoded.problem.query.item() == 1.0
            assert decoded.problem.bias.item() == 0.5
            del decoded
        await read(workers, body)
        await until(lambda: not worker._leased)
        assert 0 < len(worker._idle) <= text_workers.MAX_IDLE_REGIONS
        assert sum(region.used_bytes for region in worker._idle) <= KEPT_BYTES

    run(law)


def test_a_worker_that_is_killed_fails_its_own_request_and_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    body, long_body = list_body(1, 2, 8, 4), list_body(1, 8, 512, 64)

    async def law(workers: TextWorkers) -> None:
        await read(workers, body)
        (pid,) = workers.pids()
        os.kill(pid, signal.SIGSTOP)
        failing = asyncio.create_task(read(workers, long_body))
        await until(lambda: bool(workers._workers[0]._leased))
        waiting = asyncio.create_task(read(workers, body))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await failing
        assert (await waiting).problem.query.shape == (1, 2, 8, 4)
        (new_pid,) = workers.pids()
        assert new_pid != pid
        assert not is_alive(pid)
        # One that dies with nothing to do fails nobody.
        os.kill(new_pid, signal.SIGKILL)
        await until(lambda: not is_alive(new_pid))
        await read(workers, body)

    run(law)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.records[0].fields["exit_code"] == -signal.SIGKILL  # type: ignore[attr-defined]


def test_a_worker_that_cannot_be_started_fails_its_request_and_is_started_for_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body, pair = list_body(1, 2, 8, 4), socket.socketpair
    is_out = True

    def socketpair(*arguments: Any) -> Any:
        if is_out:
            raise OSError(errno.EMFILE, "too many open files")
        return pair(*arguments)

    async def law(workers: TextWorkers) -> None:
        nonlocal is_out
        await read(workers, body)
        (pid,) = workers.pids()
        monkeypatch.setattr(socket, "socketpair", socketpair)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not is_alive(pid))
        with pytest.raises(Unavailable):
            await read(workers, body)
        is_out = False
        assert (await read(workers, body)).problem.query.shape == (1, 2, 8, 4)

    run(law)


def test_a_text_that_nobody_waits_for_frees_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "GIVEN_UP_S", 0.0)
    body = list_body(1, 2, 8, 4)

    async def law(workers: TextWorkers) -> None:
        await read(workers, body)
        (pid,) = workers.pids()
        os.kill(pid, signal.SIGSTOP)
        late = asyncio.create_task(read(workers, body, timeout_s=0.05))
        gone = asyncio.create_task(read(workers, body))
        with pytest.raises(DeadlinePassed):
            await late
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        await read(workers, body)
        assert workers.pids() != [pid]
        await until(lambda: not workers._workers[0]._leased)

    run(law)


def test_two_workers_share_what_waits() -> None:
    body = list_body(1, 4, 64, 32)

    async def law() -> None:
        async with running_workers(2) as workers:
            wanted = body_bits(json_format.decode(body, ATTENTION, LIMITS).problem)
            decoded = await asyncio.gather(*(read(workers, body) for _ in range(20)))
            assert all(body_bits(each.problem) == wanted for each in decoded)
            assert len(workers.pids()) == 2

    asyncio.run(law())


def test_a_worker_never_imports_torch_and_waits_its_turn() -> None:
    program = (
        "import functools, sys, numpy, service.text_process as p, service.wire.json_arrays as j; "
        "from service.wire.arrays import Limits; "
        'body = b\'{"query":[[1.5]],"dtype":"bfloat16"}\'; '
        "region = numpy.zeros(4096, numpy.uint8); region[:len(body)] = numpy.frombuffer(body, numpy.uint8); "
        "read = functools.partial(j.read, names=j.Names(('query',), ('dtype',)), limits=Limits()); "
        "reply = p.answer(p.ReadTask(len(body), read), region); "
        "place = reply.places['query']; "
        "write = functools.partial(j.write, info={}, encoding='list'); "
        "p.answer(p.WriteTask({'context': place}, write, 2048), region); "
        "print(sorted({'torch', 'pydantic', 'asyncio', 'fastapi'} & set(sys.modules)), place.within(region).data)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == f"[] [{0x3FC0}]\n"

    niceness = min(NICENESS, 19 - os.getpriority(os.PRIO_PROCESS, 0))

    def libraries(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    async def law(workers: TextWorkers) -> None:
        await read(workers, b'{"query":[[1.0]]}')
        (pid,) = workers.pids()
        assert "libtorch" not in libraries(pid)
        assert os.getpriority(os.PRIO_PROCESS, pid) - os.getpriority(os.PRIO_PROCESS, 0) == niceness
        # A signal for the server's group is none of its business, and neither is one for itself.
        assert os.getpgid(pid) != os.getpgid(0)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
        await read(workers, b'{"query":[[1.0]]}')
        assert workers.pids() == [pid]

    run(law)


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as first:
        found = first.read().split()
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as children:
            found += children.read().split()
    return sorted({int(child) for child in found})


def test_a_server_reads_and_writes_long_text_in_its_workers_and_takes_them_along() -> None:
    body = list_body(1, 2, 256, 32, causal=True)
    with running_server() as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        answer = client.post("/v1/attention", content=body, headers={"content-type": JSON})
        assert answer.status_code == 200, answer.text[:300]
        context = torch.tensor(answer.json()["context"])
        query, key, value = json_format.decode(body, ATTENTION, LIMITS).problem.tensors().values()
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.testing.assert_close(context, expected)
        workers = children_of(server.process.pid)
        assert workers
        text = client.get("/metrics").text
        resident = float(text.split('attn_device_memory_bytes{kind="resident"} ')[1].split("\n")[0])
        assert resident > server.resident_bytes()
    wait_until(lambda: not any(map(is_alive, workers)))


def test_workers_end_with_a_server_that_is_killed() -> None:
    with running_server() as server:
        # Once it has worked it has made its arrangements.
        answer = httpx.post(
            f"{server.url}/v1/attention", content=list_body(1, 2, 256, 32), headers={"content-type": JSON}
        )
        assert answer.status_code == 200
        workers = children_of(server.process.pid)
        # Even one that is busy, or cannot look at its socket for another reason.
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(map(is_alive, workers)))
        server.process.returncode = 0


def test_weighted_sums_and_unstarted_workers_take_the_same_road() -> None:
    assert not TextWorkers(num_workers=0).is_running
    body = json.dumps({"weights": [[0.5, 0.5]], "value": [[1.0], [3.0]], "limit": 1}).encode()
    with pytest.raises(InvalidProblem) as caught:
        json_format.build(json_arrays.read(body, WEIGHTED_SUM.names, Limits()), WEIGHTED_SUM, LIMITS)
    assert [fault.field for fault in caught.value.faults] == ["limit"]


def test_options_of_a_million_items_are_refused_where_they_are_read() -> None:
    body = b'{"query":[[1]],"causal":[' + b"1," * json_arrays.MAX_OPTION_ITEMS + b"1]}"
    read_body = json_arrays.read(body, ATTENTION.names, Limits())
    assert [fault.field for fault in read_body.faults] == ["causal"]
    assert "causal" not in read_body.options
