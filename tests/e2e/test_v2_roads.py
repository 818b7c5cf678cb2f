"""The binary requests of the Open Inference Protocol by the road without ASGI: nothing tells which one was taken."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from service.doors.asgi_protocol import AsgiProtocol
from service.wire.plain_recipes import MAX_HEADER_BYTES
from tests.e2e.test_two_roads import asgi_requests, gated, new_engine, quick, until_empty, until_inside
from tests.support.in_process import InProcess, service_in_process
from tests.support.roads import Caller, Reply, calls_to, cuts, figure, port_of, tensors_of

__all__ = ["asgi_requests"]

DATATYPES = {torch.float32: "FP32", torch.float64: "FP64", torch.float16: "FP16", torch.bfloat16: "BF16"}
SUFFIXES = {torch.float32: "", torch.float64: "_fp64", torch.float16: "_fp16", torch.bfloat16: "_bf16"}


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def json_part(
    tensors: Mapping[str, Tensor], *, request_id: str | None = "7", parameters: dict[str, Any] | None = None
) -> bytes:
    """As tritonclient writes it."""
    members: dict[str, Any] = {} if request_id is None else {"id": request_id}
    members["inputs"] = [
        {
            "name": name,
            "shape": list(tensor.shape),
            "datatype": DATATYPES[tensor.dtype],
            "parameters": {"binary_data_size": tensor.nbytes},
        }
        for name, tensor in tensors.items()
    ]
    members["outputs"] = [{"name": "context", "parameters": {"binary_data": True}}]
    if parameters:
        members["parameters"] = parameters
    return json.dumps(members).encode()


def request_of(
    tensors: Mapping[str, Tensor],
    *,
    text: bytes | None = None,
    path: str = "/v2/models/sdpa/infer",
    slow: bool = False,
    headers: tuple[str, ...] = (),
    **about: Any,
) -> bytes:
    """``slow`` makes it take the other road: parameters in the URL say nothing, and only that one reads them."""
    text = json_part(tensors, **about) if text is None else text
    data = b"".join(map(raw, tensors.values()))
    lines = [
        f"POST {path}{'?road=asgi' if slow else ''} HTTP/1.1",
        "Host: x",
        f"Inference-Header-Content-Length: {len(text)}",
        f"Content-Length: {len(text) + len(data)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + text + data


def taken_apart(reply: Reply) -> tuple[dict[str, Any], bytes]:
    """The JSON part without its times, and the data."""
    assert reply.status == 200, reply.body[:300]
    length = int(reply.headers["inference-header-content-length"])
    members = json.loads(reply.body[:length])
    members["parameters"] |= {"queue_ms": 0, "compute_ms": 0}
    return members, reply.body[length:]


@pytest.fixture(scope="module")
def service() -> Iterator[InProcess]:
    with service_in_process(new_engine(), loop_engine=new_engine()) as running, calls_to(running):
        yield running


@pytest.fixture
def port(service: InProcess) -> int:
    return port_of(service)


def learn(port: int, request: bytes) -> Reply:
    """Have a request answered once, so that it is known."""
    with Caller(port) as caller:
        caller.send(request)
        return caller.reply()


@pytest.mark.parametrize("dtype", DATATYPES)
@pytest.mark.parametrize("tokens", [2, 16, 130])
def test_a_known_request_is_answered_alike_without_asgi(
    port: int, asgi_requests: list[AsgiProtocol], dtype: torch.dtype, tokens: int
) -> None:
    tensors = tensors_of(tokens, 32, num_heads=4, dtype=dtype)
    path = f"/v2/models/sdpa{SUFFIXES[dtype]}/infer"
    first = learn(port, request_of(tensors, path=path, slow=True))
    before = len(asgi_requests)
    with Caller(port) as caller:
        caller.send(request_of(tensors, path=path))
        fast = caller.reply()
        assert len(asgi_requests) == before
    assert taken_apart(fast) == taken_apart(first)
    names = {"date", "server", "x-request-id", "server-timing", "content-type", "content-length"}
    assert set(fast.headers) >= {"x-request-id", "server-timing", "inference-header-content-length"}
    assert fast.headers["content-type"] == first.headers["content-type"] == "application/octet-stream"
    assert set(first.headers) ^ set(fast.headers) <= {"vary"}
    assert names - set(fast.headers) == names - set(first.headers)


@pytest.mark.parametrize("request_id", [None, "", "1", "an id with spaces, {brackets} [and] %s", "x" * 256, "x" * 300,
                                        'a "quote"', "ünïcödé", "\\n"])  # fmt: skip
def test_the_id_differs_and_the_rest_is_known(port: int, request_id: str | None) -> None:
    tensors = tensors_of(4, 16)
    learn(port, request_of(tensors, request_id="another"))
    learn(port, request_of(tensors, request_id=None))
    for slow in (False, True):
        members, _ = taken_apart(learn(port, request_of(tensors, request_id=request_id, slow=slow)))
        assert members.get("id") == request_id


def test_an_id_that_stands_behind_is_no_other_requests_id(port: int) -> None:
    tensors = tensors_of(4, 16)
    members = json.loads(json_part(tensors))
    request_id = members.pop("id")
    text = json.dumps(members | {"id": request_id}).encode()
    for _ in range(3):
        answered, _ = taken_apart(learn(port, request_of(tensors, text=text)))
        assert answered["id"] == request_id


def test_a_request_may_come_in_any_pieces(port: int, asgi_requests: list[AsgiProtocol]) -> None:
    tensors = tensors_of(64, 64, num_heads=4)
    whole = request_of(tensors)
    expected = taken_apart(learn(port, whole))
    head = whole.index(b"\r\n\r\n") + 4
    text = len(json_part(tensors))
    before = len(asgi_requests)
    with Caller(port) as caller:
        for places in ([head], [head, head + 1], [head + text], [head + text - 1, head + text + 3], [len(whole) - 1]):
            caller.send(*cuts(whole, places))
            assert taken_apart(caller.reply()) == expected
    assert len(asgi_requests) == before


def test_several_requests_in_one_piece_are_answered_in_order(port: int) -> None:
    requests = [tensors_of(tokens, 16, seed=tokens) for tokens in (2, 4, 6, 8)]
    alone = [taken_apart(learn(port, request_of(tensors, request_id=str(n)))) for n, tensors in enumerate(requests)]
    with Caller(port) as caller:
        caller.send(b"".join(request_of(tensors, request_id=str(n)) for n, tensors in enumerate(requests)))
        assert [taken_apart(reply) for reply in caller.replies(len(requests))] == alone


def test_a_request_that_is_not_known_is_answered_whole_on_the_other_road(
    port: int, asgi_requests: list[AsgiProtocol]
) -> None:
    with Caller(port) as caller:
        for number in range(4):
            # Data that do not lie aligned are never remembered.
            tensors = tensors_of(3, 5, seed=number)
            whole = request_of(tensors, request_id=str(number))
            head = whole.index(b"\r\n\r\n") + 4
            caller.send(*cuts(whole, [head, head + 10][: number % 3]))
            members, data = taken_apart(caller.reply())
            assert members["id"] == str(number) and len(data) == tensors["query"].nbytes
    assert len(asgi_requests) == 4


def test_numbers_that_need_care_take_the_longer_way_and_say_so(port: int) -> None:
    tensors = tensors_of(4, 16)
    learn(port, request_of(tensors))
    tensors["query"][0, 0, 1, 0] = math.nan
    slow = learn(port, request_of(tensors, slow=True))
    fast = learn(port, request_of(tensors))
    members, data = taken_apart(fast)
    assert members["parameters"]["nonfinite_rows"] == 1
    assert (members, data) == taken_apart(slow)


@pytest.mark.parametrize(
    "wrong",
    [
        {"headers": ("Inference-Header-Content-Length: 5",)},
        {"headers": ("Content-Encoding: br",)},
        {"path": "/v2/models/sdpa/versions/2/infer"},
        {"text": b'{"id": "7"}'},
        {"text": b"{" + b" " * MAX_HEADER_BYTES},
        {"text": b"\xff" * 40},
    ],
)
def test_what_is_wrong_is_refused_alike(port: int, wrong: dict[str, Any]) -> None:
    tensors = tensors_of(4, 16)
    learn(port, request_of(tensors))
    given = {"path": "/v2/models/sdpa/infer"} | wrong
    fast, slow = (learn(port, request_of(tensors, slow=slow, **given)) for slow in (False, True))
    assert fast.status == slow.status and 400 <= fast.status < 500
    assert fast.headers["content-type"] == slow.headers["content-type"] == "application/json"
    assert json.loads(fast.body).keys() == {"error"} and fast.body == slow.body


def test_a_known_json_part_with_too_little_or_too_much_data_is_refused(port: int) -> None:
    tensors = tensors_of(4, 16)
    learn(port, request_of(tensors))
    whole = request_of(tensors)
    for change in (-4, 4):
        length = len(json_part(tensors)) + sum(t.nbytes for t in tensors.values())
        body = (whole + bytes(8))[: len(whole) + change]
        body = body.replace(b"\r\nContent-Length: %d\r\n" % length, b"\r\nContent-Length: %d\r\n" % (length + change))
        reply = learn(port, body)
        assert reply.status == 400 and b"error" in reply.body


def test_answers_are_counted_by_model_and_route(service: InProcess, port: int) -> None:
    tensors = tensors_of(4, 16)
    learn(port, request_of(tensors))
    figures = service.parts.inference.statistics.of("sdpa")
    route = 'attn_requests_total{outcome="ok",route="/v2/models/{model}/infer"}'
    with calls_to(service) as client:
        counted, before = figure(client, route), figures.success.count
        for slow in (False, True, False):
            learn(port, request_of(tensors, slow=slow))
        assert figures.success.count - before == 3
        assert figures.success.count == figures.queue.count == figures.compute_infer.count
        assert figure(client, route) - counted == 3


def test_a_full_server_refuses_in_the_protocols_form() -> None:
    tensors = tensors_of(4, 16)
    with gated(max_requests_inside=1) as (service, engine, _):
        engine.let_through()
        port = port_of(service)
        known = learn(port, request_of(tensors))
        assert known.status == 200
        with Caller(port) as first, Caller(port) as second:
            first.send(request_of(tensors))
            until_inside(service, 1)
            second.send(request_of(tensors))
            refused = second.reply()
            assert refused.status == 503 and "retry-after" in refused.headers
            assert json.loads(refused.body).keys() == {"error"}
            assert refused.headers["content-type"] == "application/json"
            engine.open()
            assert taken_apart(first.reply()) == taken_apart(known)
            second.send(request_of(tensors))
            assert second.reply().status == 200
        until_empty(service)


def test_what_waits_for_the_engine_is_answered_alike() -> None:
    tensors = tensors_of(4, 16)
    with gated() as (service, engine, _):
        engine.open()
        port = port_of(service)
        slow = learn(port, request_of(tensors, slow=True))
        assert taken_apart(learn(port, request_of(tensors))) == taken_apart(slow)
        until_empty(service)


def test_a_body_that_ends_early_frees_its_place() -> None:
    tensors = tensors_of(64, 64)
    with quick() as (service, _):
        port = port_of(service)
        whole = request_of(tensors)
        learn(port, whole)
        caller = Caller(port)
        caller.send(whole[:5000])
        until_inside(service, 1)
        caller.reset()
        until_empty(service)
