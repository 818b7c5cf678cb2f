"""What those who tried to break the doors of the Open Inference Protocol found, mended."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from service.wire import open_inference_pb2 as pb
from tests.e2e.test_v2_roads import json_part, request_of
from tests.support import rpc
from tests.support.inference import json_body
from tests.support.roads import Caller, figure, tensors_of
from tests.support.server import RunningServer, running_server

PATH = "/v2/models/sdpa/infer"
LIVELY_S = 3.0
"""A busy machine included; what was found took 7 to 17 seconds."""


@contextmanager
def watched(server: RunningServer) -> Iterator[Callable[[], float]]:
    """Asks /livez all the time; gives the longest wait for it."""
    waits, stop = [0.0], threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60.0) as client:
            while not stop.is_set():
                began = time.monotonic()
                client.get("/livez")
                waits.append(time.monotonic() - began)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield lambda: max(waits)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("name", ["314159.25", "271828.25", "%s", "%.3f"])
def test_a_parameters_name_does_not_get_into_a_template(server: RunningServer, name: str) -> None:
    tensors = tensors_of(4, 16)
    with Caller(server.port) as caller:
        for _ in range(3):
            caller.send(request_of(tensors, parameters={name: 1}))
            reply = caller.reply()
            length = int(reply.headers["inference-header-content-length"])
            assert json.loads(reply.body[:length])["parameters"]["ignored"] == name
    with rpc.calls_by_rpc(server.grpc_port) as by_rpc:
        for _ in range(3):
            answer = by_rpc.infer(rpc.request_of(tensors, parameters={name: 1}))
            assert rpc.parameters_of(answer)["ignored"] == name


@pytest.mark.parametrize("count", [999, 1000, 5000])
def test_an_option_behind_many_parameters_is_read_or_the_request_refused(client: httpx.Client, count: int) -> None:
    tensors = tensors_of(3, 4)
    many = {f"p{number}": number for number in range(count)}
    few = client.post(PATH, content=json_body(tensors, parameters={"causal": True})).json()["outputs"]
    answer = client.post(PATH, content=json_body(tensors, parameters=many | {"causal": True}))
    assert answer.status_code == (200 if count < 1000 else 400)
    assert answer.status_code == 400 or answer.json()["outputs"] == few


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: b'{"id": "x", ' + text,
        lambda text: text[len(b'{"id": "7", ') :],
        lambda text: b"\x0b" + text,
        lambda text: text.replace(b'"id":', b'"id"\x0c:'),
        lambda text: text[1:],
    ],
)
def test_what_is_no_json_is_refused_however_well_the_rest_is_known(
    server: RunningServer, spoil: Callable[[bytes], bytes]
) -> None:
    tensors = tensors_of(4, 16)
    with Caller(server.port) as caller:
        for request_id in ("7", None, "7"):
            caller.send(request_of(tensors, request_id=request_id))
            assert caller.reply().status == 200
        caller.send(request_of(tensors, text=spoil(json_part(tensors))))
        assert caller.reply().status == 400


def test_hundreds_of_thousands_of_inputs_hold_nobody_up(server: RunningServer, client: httpx.Client) -> None:
    entry = b'{"name":"query","shape":[1],"datatype":"FP32","parameters":{"binary_data_size":4}}'
    text = b'{"inputs":[' + b",".join([entry] * 200_000) + b"]}"
    with watched(server) as longest:
        answer = client.post(
            PATH, content=text + bytes(800_000), headers={"Inference-Header-Content-Length": str(len(text))}
        )
        assert answer.status_code == 400 and "at most 1000" in answer.json()["error"]
    assert longest() < LIVELY_S


HUGE = 2**62 + 12345


def _many_axes(typed: bool) -> bytes:
    message = pb.ModelInferRequest(model_name="sdpa")
    given = message.inputs.add(name="query", datatype="FP32", shape=[HUGE] * 100_000)
    if typed:
        given.contents.fp32_contents.append(1)
    else:
        message.raw_input_contents.append(b"1234")
    raw: bytes = message.SerializeToString()
    return raw


@pytest.mark.parametrize(
    "message",
    [
        _many_axes(typed=False),
        _many_axes(typed=True),
        b"\x0a\x04sdpa" + b"\x3a\x00" * 2_000_000,
        b"\x0a\x04sdpa" + b"\x2a\x00" * 2_000_000,
        b"\x0a\x04sdpa" + b"\x32\x00" * 2_000_000,
        b"\x08\x01" + b"\x3a\x00" * 2_000_000,
    ],
    ids=["axes", "typed axes", "contents", "inputs", "outputs", "after a varint"],
)
def test_a_message_of_very_many_parts_is_refused_and_holds_nobody_up(server: RunningServer, message: bytes) -> None:
    with watched(server) as longest, rpc.calls_by_rpc(server.grpc_port) as caller:
        assert rpc.refused(caller.start("ModelInfer", message)).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert longest() < LIVELY_S


def test_a_burst_of_calls_is_answered_or_refused_and_none_is_dropped(server: RunningServer) -> None:
    message = rpc.request_of(rpc.operands(1, 1, 2, 16))
    with rpc.calls_by_rpc(server.grpc_port) as caller:
        calls = [caller.start("ModelInfer", message) for _ in range(1200)]
        codes = {call.code() for call in calls}
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


def test_a_stream_cancelled_with_unread_answers_leaves_nothing_inside(
    server: RunningServer, client: httpx.Client
) -> None:
    message = rpc.request_of(rpc.operands(1, 8, 1024, 64))
    for _ in range(3):
        with rpc.calls_by_rpc(server.grpc_port) as caller, caller.stream() as streaming:
            streaming.send(*[message] * 40)
            streaming.answers(1)
    while figure(client, "attn_in_flight_requests"):
        pass


def test_inputs_in_shared_memory_are_compared_before_they_are_read() -> None:
    name = f"attn-test-{uuid.uuid4().hex}"
    place = Path("/dev/shm") / name
    with running_server(ATTN_SHARED_MEMORY="true") as server, httpx.Client(base_url=server.url, timeout=60) as client:
        try:
            with place.open("wb") as file:
                os.truncate(file.fileno(), 4 * 2**30)
            registered = client.post(
                f"/v2/systemsharedmemory/region/{name}/register", json={"key": name, "byte_size": 4 * 2**30}
            )
            assert registered.status_code == 200
            before = server.resident_bytes()

            def inputs(*names: str) -> dict[str, Any]:
                there = {"shared_memory_region": name, "shared_memory_byte_size": 4 * 2**30}
                given = {"shape": [1, 1, 1, 1], "datatype": "FP32", "parameters": there}
                return {"inputs": [{"name": each, **given} for each in names]}

            for wrong in (inputs("query"), inputs(*[f"x{n}" for n in range(60)]), inputs("query", "query")):
                answer = client.post("/v2/models/attention/infer", json=wrong)
                assert answer.status_code == 400
            assert server.resident_bytes() - before < 200 * 2**20
        finally:
            place.unlink()


def test_idle_streams_keep_neither_health_nor_others_out(server: RunningServer) -> None:
    message = rpc.request_of(rpc.operands(1, 1, 2, 16))
    with rpc.calls_by_rpc(server.grpc_port) as crowd, rpc.calls_by_rpc(server.grpc_port) as caller:
        method = crowd.channel.stream_stream(f"/{rpc.SERVICE}/ModelStreamInfer")
        silent = threading.Event()

        def nothing() -> Iterator[bytes]:
            silent.wait()
            yield from ()

        streams = [method(nothing()) for _ in range(420)]
        # The last ones are refused once all places are taken.
        assert streams[-1].code() is grpc.StatusCode.UNAVAILABLE
        assert caller.call("ServerReady", pb.ServerReadyRequest()).ready
        assert len(caller.infer(message).outputs) == 1
        silent.set()
        for stream in streams:
            stream.cancel()


def test_a_length_may_have_blanks_around_it(server: RunningServer) -> None:
    tensors = tensors_of(3, 4)
    text = json_part(tensors)
    with Caller(server.port) as caller:
        for blank in (b" ", b"\t", b" \t "):
            sent = request_of(tensors).replace(
                b"Length: %d\r\nContent" % len(text), b"Length:%b%d%b\r\nContent" % (blank, len(text), blank)
            )
            caller.send(sent)
            assert caller.reply().status == 200


@pytest.mark.parametrize("path", ["/v2/models/nothing/infer", PATH])
def test_a_refused_body_of_some_mebibytes_leaves_its_connection_open(server: RunningServer, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\nContent-Length: {2**22}\r\n\r\n"
    with Caller(server.port) as caller:
        for _ in range(2):
            caller.send(head.encode(), bytes(2**22))
            reply = caller.reply()
            assert reply.status in (404, 415) and not reply.closes
