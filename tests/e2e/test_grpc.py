"""The gRPC door of a real server: the bits of the other doors, and how it stops."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import pytest
import torch

from service.wire import open_inference_pb2 as pb
from tests.support.bodies import SAFETENSORS, read_answer, safetensors_body
from tests.support.rpc import CODES, Caller, calls_by_rpc, operands, outputs_of, refused, request_of
from tests.support.server import RunningServer, server_environment, spawn, wait_until_ready

Code = grpc.StatusCode
SUFFIXES = {torch.float32: "", torch.float16: "_fp16", torch.bfloat16: "_bf16", torch.float64: "_fp64"}
LONG = operands(1, 8, 16384, 64)
"""Computes for many seconds on one thread."""


@pytest.fixture(scope="module")
def caller(server: RunningServer) -> Iterator[Caller]:
    with calls_by_rpc(server.grpc_port) as connected:
        yield connected


@contextmanager
def started(**settings: str) -> Iterator[tuple[RunningServer, Caller]]:
    """A ready server that the test ends itself."""
    server = spawn(ATTN_TORCH_THREADS="1", **settings)
    try:
        wait_until_ready(server.url)
        with calls_by_rpc(server.grpc_port) as connected:
            yield server, connected
    finally:
        server.end()


def assert_clean(server: RunningServer, code: int = 0) -> None:
    """It ended in order: by this code, and with nothing on stderr but lines of its log."""
    assert server.wait() == code
    server.follower.join()
    assert [line for line in server.log if line["level"] in ("unparsed", "error") or "exception" in line] == []
    assert {line["logger"].partition(".")[0] for line in server.log} == {"attn"}


@pytest.mark.parametrize("dtype", SUFFIXES)
@pytest.mark.parametrize("shape", [(1, 2, 1, 8), (2, 4, 17, 16), (1, 8, 300, 64)])
def test_both_roads_give_the_bits_of_the_native_door(
    client: httpx.Client, caller: Caller, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensors = operands(*shape, dtype=dtype)
    answer = client.post(
        "/v1/attention", content=safetensors_body(tensors, {"causal": True}), headers={"content-type": SAFETENSORS}
    )
    expected, _ = read_answer(answer.content, SAFETENSORS, {})
    message = request_of(tensors, model=f"sdpa{SUFFIXES[dtype]}", parameters={"causal": True})
    for _ in range(3):
        assert torch.equal(outputs_of(caller.infer(message))["context"], expected["context"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_typed_contents_give_the_bits_of_raw_ones(caller: Caller, dtype: torch.dtype) -> None:
    tensors = operands(1, 2, 5, 8, dtype=dtype) | {"allow_mask": torch.rand(1, 1, 5, 5) < 0.7}
    model, field = ("attention", "fp32_contents") if dtype == torch.float32 else ("attention_fp64", "fp64_contents")
    raw = caller.infer(request_of(tensors, model=model))
    typed = request_of(tensors, model=model)
    del typed.raw_input_contents[:]
    for given, tensor in zip(typed.inputs, tensors.values(), strict=True):
        assert given.datatype == CODES[tensor.dtype]
        numbers = getattr(given.contents, "bool_contents" if tensor.dtype == torch.bool else field)
        numbers.extend(tensor.flatten().tolist())
    found, expected = outputs_of(caller.infer(typed)), outputs_of(raw)
    assert list(found) == ["context", "weights", "scores", "logits", "logsumexp", "entropy"]
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_many_at_a_time_get_the_answers_they_get_alone(caller: Caller) -> None:
    sizes = torch.randint(1, 160, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    messages = [request_of(operands(1, 4, size, 16, seed=size), id=str(size)) for size in sizes]
    alone = [caller.infer(message) for message in messages]
    together = [caller.start("ModelInfer", message) for message in messages]
    with caller.stream() as stream:
        stream.send(*messages)
        stream.close()
        streamed = [answer.infer_response for answer in stream.rest()]
    for size, expected, *found in zip(sizes, alone, (call.result() for call in together), streamed, strict=True):
        for answer in found:
            assert answer.id == str(size)
            assert torch.equal(outputs_of(answer)["context"], outputs_of(expected)["context"])


def test_a_port_that_is_taken_stops_the_start_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "service", "serve", "--port", "0", "--grpc-port", str(port)]
        ended = subprocess.run(command, env=server_environment(), stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == f"attn: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_port_that_another_server_of_grpc_has_is_taken(server: RunningServer) -> None:
    command = [sys.executable, "-m", "service", "serve", "--port", "0", "--grpc-port", str(server.grpc_port)]
    ended = subprocess.run(command, env=server_environment(), stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1 and str(server.grpc_port) in ended.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1", "localhost"])
def test_every_way_to_name_an_address_works(host: str) -> None:
    server = spawn(ATTN_HOST=host)
    try:
        address = "[::1]" if ":" in host else "127.0.0.1"
        with grpc.insecure_channel(f"{address}:{server.grpc_port}") as channel:
            assert Caller(channel).call("ServerLive", pb.ServerLiveRequest(), wait_for_ready=True).live
        server.terminate()
        assert_clean(server)
    finally:
        server.end()


def test_open_streams_do_not_hold_up_a_stop() -> None:
    with started(ATTN_DRAIN_TIMEOUT_S="20") as (server, caller), caller.stream() as stream:
        stream.send(request_of(operands()))
        stream.answers(1)
        watching = caller.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert next(watching) == b"\x08\x01"
        server.terminate()
        assert next(watching) == b"\x08\x02"
        for call in (stream.call, watching):
            with pytest.raises(grpc.RpcError) as ended:
                next(call)
            assert ended.value.code() is Code.UNAVAILABLE
        assert server.wait(10.0) == 0
        assert_clean(server)


def test_a_stop_under_load_loses_nothing() -> None:
    messages = [request_of(operands(1, 4, size, 16)) for size in range(1, 200, 7)]
    warm, counted = threading.Event(), threading.Lock()
    codes: list[Any] = []

    def call(server: RunningServer, first: int) -> None:
        """Ask again and again, until told to go elsewhere."""
        with calls_by_rpc(server.grpc_port) as caller:
            for turn in range(first, 10**6):
                error = caller.start("ModelInfer", messages[turn % len(messages)]).exception()
                with counted:
                    codes.append(Code.OK if error is None else error.code())
                    if len(codes) > 200:
                        warm.set()
                if error is not None:
                    return

    with started(ATTN_DRAIN_NOTICE_S="0.5") as (server, _), ThreadPoolExecutor(4) as pool:
        callers = [pool.submit(call, server, 5 * first) for first in range(4)]
        assert warm.wait(30.0)
        server.terminate()
        for caller in callers:
            caller.result(30.0)
        assert_clean(server)
    assert set(codes) == {Code.OK, Code.UNAVAILABLE}
    assert codes.count(Code.UNAVAILABLE) == 4


def test_what_does_not_end_in_time_is_given_up_and_counted() -> None:
    with started(ATTN_DRAIN_TIMEOUT_S="0.2") as (server, caller):
        call = caller.start("ModelInfer", request_of(LONG, parameters={"path": "fused"}), timeout=60)
        while "attn_in_flight_requests 1.0" not in httpx.get(f"{server.url}/metrics").text:
            assert not call.done()
        server.terminate()
        assert refused(call).code() is Code.UNAVAILABLE
        assert server.wait() == 1
        server.follower.join()
        (line,) = [line for line in server.log if line["message"] == "stopped"]
        assert line["given_up_requests"] == 1
