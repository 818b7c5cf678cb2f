"""One suite for both roads of HTTP: what a caller sees does not tell which one a request took."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from attn_core import Engine
from service.doors.asgi_protocol import AsgiProtocol
from service.doors.receive_buffers import LANDING_BYTES, MIN_BUFFER_BYTES, SPARE_BYTES
from tests.support.bodies import JSON, SAFETENSORS, list_body, safetensors_body
from tests.support.certificates import Authority
from tests.support.in_process import GatedEngine, InProcess, service_in_process
from tests.support.roads import (
    BOTH,
    WAIT_S,
    Caller,
    Reply,
    Road,
    body_of,
    calls_to,
    chunked,
    cuts,
    figure,
    get,
    head_of,
    json_request,
    port_of,
    request,
    sized_body,
    tensors_of,
)
from tests.support.server import RunningServer, spawn, wait_until_ready

PLAIN = body_of()
MANUAL = body_of(outputs=["context", "weights"])
SMALL_JSON = b'{"query": [[1, 0]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]]}'
LONG_ANSWER = safetensors_body({"query": torch.zeros(1, 4, 1024, 1)}, {"outputs": ["weights"]})
"""Asks for 16 MiB, more than the buffers between two sockets hold."""


def new_engine() -> Engine:
    return Engine(device="cpu", max_threads=1)


@pytest.fixture(scope="module")
def service() -> Iterator[InProcess]:
    """One that computes in its loop what is short, as the real one does."""
    with service_in_process(new_engine(), loop_engine=new_engine()) as running, calls_to(running):
        yield running


@pytest.fixture
def port(service: InProcess) -> int:
    return port_of(service)


@contextmanager
def quick(**settings: Any) -> Iterator[tuple[InProcess, httpx.Client]]:
    """A ready service that computes in its loop what is short, with settings of its own."""
    with (
        service_in_process(new_engine(), loop_engine=new_engine(), **settings) as running,
        calls_to(running) as client,
    ):
        yield running, client


@contextmanager
def gated(**settings: Any) -> Iterator[tuple[InProcess, GatedEngine, httpx.Client]]:
    """A service whose every problem waits to be let through."""
    engine = GatedEngine()
    with service_in_process(engine, **settings) as running, calls_to(running) as client:
        yield running, engine, client


@pytest.fixture
def asgi_requests(monkeypatch: pytest.MonkeyPatch) -> list[AsgiProtocol]:
    """Grows by one for each request that takes the road through ASGI."""
    begun: list[AsgiProtocol] = []
    begin = AsgiProtocol.on_message_begin

    def counted(self: AsgiProtocol) -> None:
        begun.append(self)
        begin(self)

    monkeypatch.setattr(AsgiProtocol, "on_message_begin", counted)
    return begun


def inside(service: InProcess) -> tuple[int, int, int, int]:
    """Requests, their bytes, memory of problems, and leased buffers."""
    admission, buffers = service.parts.admission, service.parts.door.buffers
    figures: tuple[int, int, int, int] = service.call(
        lambda: (admission.requests_inside, admission.body_bytes_inside, admission.memory_inside, buffers.leased)
    )
    return figures


def until_empty(service: InProcess) -> None:
    while any(inside(service)):
        pass


def until_inside(service: InProcess, requests: int) -> None:
    while inside(service)[0] != requests:
        pass


class Standstill:
    """The event loop does nothing from here to ``go_on``; what comes meanwhile is there when it goes on."""

    def __init__(self, service: InProcess) -> None:
        self._stands, self._may_go_on = threading.Event(), threading.Event()
        service.call_soon(self._stand)

    def _stand(self) -> None:
        self._stands.set()
        assert self._may_go_on.wait(WAIT_S)

    def wait(self) -> None:
        assert self._stands.wait(WAIT_S)

    def go_on(self) -> None:
        self._may_go_on.set()


def outcomes(client: httpx.Client, outcome: str, route: str = "/v1/attention") -> float:
    return figure(client, f'attn_requests_total{{outcome="{outcome}",route="{route}"}}')


def marked(caller: Caller, road: Road = Road.BINARY) -> None:
    """The connection is where it should be: a marker sent now is answered next, and as itself."""
    caller.send(request(road, PLAIN, "X-Request-Id: marker"))
    reply = caller.reply()
    assert (reply.status, reply.headers["x-request-id"]) == (200, "marker"), reply


def test_what_is_handed_over_in_one_long_read_is_answered_whole(service: InProcess, port: int) -> None:
    with Caller(port) as caller:
        for _ in range(2):
            # The next read has room for as much.
            caller.send(request(Road.BINARY, sized_body(3_000_000)))
            assert caller.reply().status == 200
        still = Standstill(service)
        still.wait()
        caller.send(chunked(sized_body(614_000)) + get("/livez") + request(Road.BINARY, PLAIN))
        still.go_on()
        assert [reply.status for reply in caller.replies(3)] == [200] * 3
        marked(caller)


# Which road


@pytest.mark.parametrize(
    ("write", "is_binary"),
    [
        (lambda: request(Road.BINARY, PLAIN), True),
        (lambda: request(Road.BINARY, PLAIN, "Accept: */*", "Accept-Encoding: gzip, br", "X-Request-Id: a"), True),
        (lambda: request(Road.BINARY, PLAIN, f"Accept: {SAFETENSORS};q=0.9, {JSON};q=0.1"), True),
        (lambda: request(Road.BINARY, PLAIN, "Connection: keep-alive"), True),
        (lambda: request(Road.BINARY, PLAIN, "X-Long: " + "x" * 1800), True),
        (lambda: request(Road.BINARY, PLAIN, "X-Long: " + "x" * 2048), False),
        (lambda: request(Road.ASGI, PLAIN), False),
        (lambda: request(Road.BINARY, PLAIN, f"Accept: {JSON}"), False),
        (lambda: request(Road.BINARY, PLAIN, "X-A: 1", "X-A: 2"), False),
        (lambda: request(Road.BINARY, PLAIN, "TE: trailers"), False),
        (lambda: request(Road.BINARY, PLAIN, "Expect: 100-continue"), False),
        (lambda: request(Road.BINARY, PLAIN, "Content-Encoding: identity"), False),
        (lambda: request(Road.BINARY, PLAIN, "Upgrade: h2c", "Connection: upgrade"), False),
        (lambda: request(Road.BINARY, PLAIN, path="http://x/v1/attention"), False),
        (lambda: chunked(PLAIN), False),
        (lambda: json_request(SMALL_JSON), False),
        (lambda: get("/livez"), False),
    ],
)
def test_the_head_says_which_road_and_the_next_request_begins_anew(
    port: int, asgi_requests: list[AsgiProtocol], write: Callable[[], bytes], is_binary: bool
) -> None:
    with Caller(port) as caller:
        for number in range(3):
            caller.send(write())
            assert caller.reply().status == 200
            assert bool(asgi_requests) != is_binary
            before = len(asgi_requests)
            caller.send(request(Road.BINARY, PLAIN, f"X-Request-Id: {number}"))
            assert caller.reply().headers["x-request-id"] == str(number)
            assert len(asgi_requests) == before


def test_one_connection_serves_everything_by_turns(port: int, asgi_requests: list[AsgiProtocol]) -> None:
    with Caller(port) as caller:
        texts = [get("/livez"), request(Road.BINARY, PLAIN), json_request(SMALL_JSON), request(Road.BINARY, PLAIN)]
        texts += [chunked(PLAIN), request(Road.BINARY, MANUAL), get("/nowhere"), request(Road.BINARY, PLAIN)]
        for text, status in zip(texts * 3, [200, 200, 200, 200, 200, 200, 404, 200] * 3, strict=True):
            caller.send(text)
            assert caller.reply().status == status
        assert len(asgi_requests) == 4 * 3


# What an answer looks like

WEIGHTS_WITHOUT_KEYS = {"weights": torch.zeros(1, 1, 2**24, 0), "value": torch.zeros(1, 1, 0, 2**24)}


@pytest.mark.parametrize(
    ("body", "headers", "path", "status"),
    [
        (PLAIN, [], "/v1/attention", 200),
        (MANUAL, [], "/v1/attention", 200),
        (safetensors_body(tensors_of(), {"path": "manual", "causal": True}), [], "/v1/attention", 200),
        (safetensors_body({"query": torch.zeros(1, 2, 3, 0)}, {}), [], "/v1/attention", 422),
        (safetensors_body({"query": torch.zeros(0, 2, 4, 3)}, {}), [], "/v1/attention", 200),
        (safetensors_body({"weights": torch.ones(2, 3), "value": torch.ones(3, 2)}, {}), [], "/v1/weighted_sum", 200),
        (b"x", [], "/v1/attention", 400),
        (b"x" * 7, [], "/v1/attention", 400),
        (b"\0" * 8, [], "/v1/attention", 400),
        (b"\xff" * 300, [], "/v1/attention", 400),
        (PLAIN[:-1], [], "/v1/attention", 400),
        (PLAIN + b"\0", [], "/v1/attention", 400),
        (PLAIN[:50], [], "/v1/attention", 400),
        (PLAIN, [], "/nowhere", 404),
        (PLAIN, [], "/livez", 405),
        (PLAIN, ["Accept: text/html"], "/v1/attention", 406),
        (PLAIN, ["Content-Encoding: br"], "/v1/attention", 415),
        (body_of(is_casual=True), [], "/v1/attention", 422),
        (body_of(empty_rows="error", causal=True, timeout_ms=-1), [], "/v1/attention", 422),
        (PLAIN, [], "/v1/weighted_sum", 422),
        (PLAIN, [], "/v1/attention?scale=1", 422),
        (safetensors_body(WEIGHTS_WITHOUT_KEYS, {}), [], "/v1/weighted_sum", 413),
    ],
)
def test_answers_are_alike(port: int, body: bytes, headers: list[str], path: str, status: int) -> None:
    replies = []
    for road in Road:
        with Caller(port) as caller:
            # The second time a header may be known already.
            for _ in range(2):
                caller.send(request(road, body, *headers, path=path))
                replies.append(caller.reply().alike())
            marked(caller)
    assert replies[0][0] == status, replies[0]
    assert all(reply == replies[0] for reply in replies)


@BOTH
def test_every_answer_has_an_id_its_timing_and_the_date(port: int, road: Road) -> None:
    ids = set()
    with Caller(port) as caller:
        for body, status in ((PLAIN, 200), (MANUAL, 200), (b"xy", 400), (body_of(x=1), 422)) * 3:
            caller.send(request(road, body))
            reply = caller.reply()
            assert reply.status == status
            assert re.fullmatch(r"[0-9a-f]{32}", reply.headers["x-request-id"])
            ids.add(reply.headers["x-request-id"])
            assert list(reply.timing) == ["read", "parse", "queue", "compute", "encode"]
            assert all(duration >= 0 for duration in reply.timing.values())
            assert (reply.timing["compute"] > 0) == (status == 200)
            assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", reply.headers["date"])
            assert reply.headers.get("vary") == ("Accept, Accept-Encoding" if status == 200 else None)
            assert "connection" not in reply.headers and "content-encoding" not in reply.headers
    assert len(ids) == 12


@BOTH
@pytest.mark.parametrize("body", [PLAIN, MANUAL, b"xy"], ids=["at once", "manual", "malformed"])
@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [
        ("mine-1", True),
        ("x" * 128, True),
        ("!~", True),
        ("x" * 129, False),
        ("a b", False),
        ("\xe9", False),
        ("", False),
    ],
)
def test_an_id_comes_back_as_sent_or_is_made(port: int, road: Road, body: bytes, sent: str, is_kept: bool) -> None:
    head, rest = request(road, body, "X-Request-Id: @").split(b"@", 1)
    with Caller(port) as caller:
        for _ in range(2):
            caller.send(head + sent.encode("latin-1") + rest)
            made = caller.reply().headers["x-request-id"]
            assert made == sent if is_kept else re.fullmatch(r"[0-9a-f]{32}", made)


@BOTH
def test_figures_count_both_roads_alike(road: Road) -> None:
    series = [
        'attn_requests_total{outcome="ok",route="/v1/attention"}',
        'attn_requests_total{outcome="invalid",route="/v1/attention"}',
        'attn_requests_total{outcome="malformed",route="/v1/attention"}',
        'attn_request_seconds_count{route="/v1/attention"}',
        'attn_path_requests_total{path="fused"}',
        'attn_path_requests_total{path="manual"}',
        "attn_computed_flops_total",
        "attn_batch_requests_count",
        "attn_received_bytes_total",
    ]
    with service_in_process(new_engine(), loop_engine=new_engine()) as own, calls_to(own) as client:
        before = [figure(client, name) for name in series]
        with Caller(port_of(own)) as caller:
            for body in (PLAIN, PLAIN, MANUAL, b"xy", body_of(x=1)):
                caller.send(request(road, body))
                caller.reply()
        grown = [figure(client, name) - first for name, first in zip(series, before, strict=True)]
        flops = 3 * 2 * 2 * 3 * 3 * (8 + 8)
        sent_bytes = 2 * len(PLAIN) + len(MANUAL) + 2 + len(body_of(x=1))
        assert grown == [3, 1, 1, 5, 2, 1, flops, 3, sent_bytes]
        assert figure(client, "attn_in_flight_requests") == 0
        for stage, count in (("parse", 5), ("compute", 3), ("encode", 3)):
            assert figure(client, f'attn_stage_seconds_count{{stage="{stage}"}}') == count


def test_answers_of_zeros_are_gzipped_for_a_client_that_reads_gzip(service: InProcess) -> None:
    zeros = torch.zeros(1, 2, 300, 32)
    body = safetensors_body({"query": zeros}, {})
    answers = []
    with httpx.Client(base_url=service.url, timeout=WAIT_S) as client:
        for road in Road:
            for _ in range(3):
                with client.stream(
                    "POST", "/v1/attention", content=body, headers={"content-type": road.content_type}
                ) as answer:
                    raw = b"".join(answer.iter_raw())
                    assert answer.headers["content-encoding"] == "gzip"
                    assert answer.headers["content-length"] == str(len(raw))
                    assert answer.headers["vary"] == "Accept, Accept-Encoding"
                answers.append((road, len(raw)))
            plain = client.post("/v1/attention", content=body, headers={"content-type": road.content_type})
            assert Reply(200, {}, plain.content).data == bytes(zeros.numel() * 4)
            # Numbers that do not shrink leave as they are.
            noise = client.post("/v1/attention", content=body_of(64, 32), headers={"content-type": road.content_type})
            assert noise.status_code == 200 and "content-encoding" not in noise.headers
    assert all(size < zeros.numel() for _, size in answers)


# Keeping and closing


@BOTH
@pytest.mark.parametrize("body", [PLAIN, MANUAL, b"xy"], ids=["at once", "manual", "malformed"])
def test_a_connection_is_kept_unless_its_caller_says_close(port: int, road: Road, body: bytes) -> None:
    with Caller(port) as caller:
        for _ in range(5):
            caller.send(request(road, body))
            assert not caller.reply().closes
        caller.send(request(road, body, "Connection: close"))
        assert caller.reply().closes
        assert caller.until_closed() == b""


@BOTH
def test_nothing_is_answered_behind_the_wish_to_close(port: int, road: Road) -> None:
    with Caller(port) as caller:
        caller.send(request(road, PLAIN, "Connection: close") + request(road, PLAIN))
        assert caller.reply().closes
        assert caller.until_gone() == b""


def test_http_1_0_is_answered_and_closed(port: int) -> None:
    for content_type in (SAFETENSORS, Road.ASGI.content_type):
        with Caller(port) as caller:
            caller.send(head_of(Road.BINARY, len(PLAIN), content_type=content_type, version="1.0") + PLAIN)
            assert caller.reply().status == 200
            assert caller.until_closed() == b""


# Splits and sizes


@pytest.fixture(scope="module")
def expected(service: InProcess) -> bytes:
    with Caller(port_of(service)) as caller:
        caller.send(request(Road.ASGI, PLAIN))
        return caller.reply().data


@BOTH
def test_a_head_that_comes_byte_by_byte_is_the_same_head(port: int, road: Road, expected: bytes) -> None:
    text = request(road, PLAIN)
    with Caller(port) as caller:
        for size in (1, 2, 3):
            head_bytes = text.index(b"\r\n\r\n") + 4
            caller.send(*cuts(text, range(0, head_bytes, size)))
            assert caller.reply().data == expected
        marked(caller)


@BOTH
@pytest.mark.parametrize("body", [PLAIN, MANUAL, body_of(x=1)], ids=["at once", "manual", "invalid"])
def test_a_request_is_the_same_however_it_is_cut(port: int, road: Road, body: bytes) -> None:
    text = request(road, body)
    body_at = text.index(b"\r\n\r\n") + 4
    data_at = body_at + 8 + int.from_bytes(body[:8], "little")
    places = [1, 20, body_at - 4, body_at - 2, body_at - 1, body_at, body_at + 1, body_at + 7, body_at + 8, body_at + 9]
    places += [data_at - 1, data_at, data_at + 1, data_at + 3, data_at + 64, len(text) - 1]
    with Caller(port) as caller:
        caller.send(text)
        whole = caller.reply().alike()
        for place in places:
            caller.send(*cuts(text, [place]))
            assert caller.reply().alike() == whole, place
        for first, second in itertools.combinations(places[3:], 2):
            caller.send(*cuts(text, [first, second]))
            assert caller.reply().alike() == whole, (first, second)
        caller.send(*cuts(text, range(body_at, len(text), 5)))
        assert caller.reply().alike() == whole


@BOTH
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "head first"])
def test_a_body_of_any_size_is_read_whole(port: int, road: Road, is_split: bool) -> None:
    landing = LANDING_BYTES - len(head_of(road, LANDING_BYTES))
    sizes = [1, 2, 7, 8, 9, 63, 64, 65, 2000]
    sizes += [edge + step for edge in (MIN_BUFFER_BYTES, 2 * MIN_BUFFER_BYTES) for step in (-2 * SPARE_BYTES, -1, 0, 1)]
    sizes += [landing + step for step in (-SPARE_BYTES, -1, 0, 1, SPARE_BYTES)]
    sizes += [LANDING_BYTES // 2 + step for step in (-300, -100, 0, 1)]
    sizes += [LANDING_BYTES - 1, LANDING_BYTES, LANDING_BYTES + 1, 2**20 + 1, 2**22 - 128, 30 * 10**6]
    with Caller(port) as caller:
        # Up, and down again: buffers are chosen by what came before.
        for size in (*sizes, *sizes[-6::-3]):
            body = sized_body(size) if size >= 2000 else b"\1" * size
            text = head_of(road, len(body))
            caller.send(*([text, body] if is_split else [text + body]))
            reply = caller.reply()
            assert reply.status == (200 if size >= 2000 else 400), size
            if size >= 2000:
                assert len(reply.data) == 64 * 4
        marked(caller)


def test_no_body_at_all_is_malformed(port: int) -> None:
    replies = []
    for length in ("0", "00"):
        for road in Road:
            with Caller(port) as caller:
                caller.send(head_of(road, 0).replace(b"Length: 0", f"Length: {length}".encode()))
                replies.append(caller.reply().alike())
                marked(caller)
    assert replies[0][0] == 400
    assert all(reply == replies[0] for reply in replies)


@pytest.mark.parametrize("head_dim", [1, 7, 8, 33, 64])
def test_numbers_have_the_same_bits_wherever_they_land(port: int, head_dim: int) -> None:
    """Where the numbers begin follows from the lengths of head and header; kernels may see it, callers may not."""
    answers = set()
    with Caller(port) as caller:
        for padding in range(64):
            body = body_of(19, head_dim, padding=padding)
            road = Road.ASGI if padding % 8 == 0 else Road.BINARY
            filler = f"X-Filler: {'x' * (padding * 7 % 64)}"
            text = request(road, body, filler)
            # Once as the first of its header, once as one that is known, once in two parts.
            for parts in ([text], [text], [text[:-50], text[-50:]]):
                caller.send(*parts)
                answers.add(caller.reply().data)
    assert len(answers) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_bits_do_not_tell_the_road(port: int, dtype: torch.dtype) -> None:
    for tokens, head_dim in ((1, 33), (17, 7), (60, 64)):
        for options in ({}, {"causal": True}, {"outputs": ["weights", "logsumexp"]}):
            body = safetensors_body(tensors_of(tokens, head_dim, dtype=dtype), options)
            answers = set()
            with Caller(port) as caller:
                for road in (*Road, *Road):
                    caller.send(request(road, body))
                    answers.add(caller.reply().data)
                # Beside a neighbour, at another place in memory.
                caller.send(request(Road.BINARY, PLAIN) + request(Road.BINARY, body))
                answers.add(caller.replies(2)[1].data)
            assert len(answers) == 1, (tokens, head_dim, options)


# Pipelining


def in_line(count: int, mix: str) -> tuple[list[bytes], list[int]]:
    """So many requests with their ids, and what they will be answered."""
    kinds: dict[str, Callable[[str], bytes]] = {
        "b": lambda own_id: request(Road.BINARY, PLAIN, own_id),
        "a": lambda own_id: request(Road.ASGI, PLAIN, own_id),
        "m": lambda own_id: request(Road.BINARY, MANUAL, own_id),
        "j": lambda own_id: json_request(SMALL_JSON, own_id),
        "c": lambda own_id: chunked(PLAIN, own_id, size=200),
        "x": lambda own_id: request(Road.BINARY, b"xy", own_id),
        "i": lambda own_id: request(Road.BINARY, body_of(x=1), own_id),
        "l": lambda own_id: request(Road.BINARY, sized_body(150_000), own_id),
    }
    statuses = {"x": 400, "i": 422}
    names = list(itertools.islice(itertools.cycle(mix), count))
    texts = [kinds[name](f"X-Request-Id: {number}") for number, name in enumerate(names)]
    return texts, [statuses.get(name, 200) for name in names]


MIXES = ["b", "a", "m", "x", "l", "bm", "ba", "ab", "bj", "bc", "bix", "mbxajclb", "lb", "lxb", "lxm", "lmba"]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("count", [2, 3, 50])
def test_requests_in_one_write_are_answered_in_order(port: int, mix: str, count: int) -> None:
    texts, statuses = in_line(count if "l" not in mix else min(count, 12), mix)
    with Caller(port) as caller:
        for _ in range(2):
            caller.send(b"".join(texts))
            replies = caller.replies(len(texts))
            assert [reply.headers["x-request-id"] for reply in replies] == [str(n) for n in range(len(texts))]
            assert [reply.status for reply in replies] == statuses
        marked(caller)


@pytest.mark.parametrize("mix", ["b", "m", "a", "bma", "xb"])
def test_a_line_of_requests_may_be_cut_anywhere(port: int, mix: str) -> None:
    texts, statuses = in_line(3, mix)
    whole = b"".join(texts)
    with Caller(port) as caller:
        for place in [*range(1, len(texts[0]), 97), *range(len(texts[0]) - 3, len(texts[0]) + len(texts[1]) + 3, 11)]:
            caller.send(*cuts(whole, [place]))
            replies = caller.replies(3)
            assert [reply.status for reply in replies] == statuses, place
            assert [reply.headers["x-request-id"] for reply in replies] == ["0", "1", "2"], place


@pytest.mark.parametrize("mix", ["m", "bma", "xbm"])
def test_a_line_of_requests_may_come_in_tiny_parts(port: int, mix: str) -> None:
    texts, statuses = in_line(6, mix)
    whole = b"".join(texts)
    with Caller(port) as caller:
        for size in (37, 101, 500):
            caller.send(*cuts(whole, range(0, len(whole), size)))
            assert [reply.status for reply in caller.replies(6)] == statuses


def test_what_came_first_is_read_first() -> None:
    """What is read while one request is computed stays before what comes at the moment of its answer."""
    text = request(Road.BINARY, PLAIN, "X-Request-Id: second")
    for place in (len(text) - len(PLAIN) - 30, len(text) - len(PLAIN) + 3, len(text) - 40):
        with (
            gated() as (running, engine, client),
            Caller(port_of(running)) as caller,
            Caller(port_of(running)) as other,
        ):
            caller.send(request(Road.BINARY, PLAIN, "X-Request-Id: first"))
            engine.wait_until_entered()
            caller.send(text[:place])
            other.send(request(Road.BINARY, PLAIN))
            # Every socket has been looked at once this is answered.
            assert client.get("/livez").status_code == 200
            before = Standstill(running)
            before.wait()
            engine.let_through()
            # The first one is computed, and its answer posted, before the next problem begins.
            engine.wait_until_entered()
            behind = Standstill(running)
            before.go_on()
            # It stands right behind the answer.
            behind.wait()
            caller.send(text[place:])
            behind.go_on()
            engine.open()
            assert [reply.headers["x-request-id"] for reply in caller.replies(2)] == ["first", "second"]
            assert other.reply().status == 200


def test_a_buffer_that_was_given_back_is_not_read_from() -> None:
    """Behind a long request, a read may bring several short ones: the first is refused at once, the second waits."""
    with gated() as (running, engine, _), Caller(port_of(running)) as caller, Caller(port_of(running)) as other:
        engine.let_through(2)
        for connection in (caller, other):
            connection.send(request(Road.BINARY, sized_body(200_000)))
            assert connection.reply().status == 200
        engine.wait_until_entered(2)
        expected_data = bytes_by_manual(caller, engine)
        caller.send(request(Road.BINARY, sized_body(200_000)))
        engine.let_through()
        assert caller.reply().status == 200
        engine.wait_until_entered()
        caller.send(request(Road.BINARY, b"xy") + request(Road.BINARY, MANUAL) + request(Road.BINARY, MANUAL)[:300])
        assert caller.reply().status == 400
        engine.wait_until_entered()
        other.send(request(Road.BINARY, sized_body(200_000)))
        until_inside(running, 2)
        engine.open()
        assert caller.reply().data == expected_data
        assert other.reply().status == 200
        caller.send(request(Road.BINARY, MANUAL)[300:])
        assert caller.reply().data == expected_data
        until_empty(running)


def bytes_by_manual(caller: Caller, engine: GatedEngine) -> bytes:
    engine.let_through()
    caller.send(request(Road.ASGI, MANUAL))
    reply = caller.reply()
    engine.wait_until_entered()
    return reply.data


@pytest.mark.parametrize("rest", ["all", "part", "head"])
def test_a_long_request_behind_a_short_one_is_read_whole(port: int, rest: str) -> None:
    """After a long one the next read goes into a long buffer, where what follows a short one must be found."""
    long = request(Road.BINARY, sized_body(200_000))
    short = request(Road.BINARY, PLAIN)
    head_bytes = len(long) - 200_000
    places = {"all": [], "part": [head_bytes + 1000], "head": [head_bytes - 5]}[rest]
    with Caller(port) as caller:
        for _ in range(3):
            caller.send(long)
            assert caller.reply().status == 200
            first, *others = cuts(long, places)
            caller.send(short + first)
            assert caller.reply().status == 200
            caller.send(*others, short)
            assert [reply.status for reply in caller.replies(2)] == [200, 200]


def test_no_more_is_read_ahead_than_a_little() -> None:
    text = request(Road.BINARY, sized_body(50_000))
    with gated() as (running, engine, _), Caller(port_of(running)) as caller:
        caller.send(text)
        engine.wait_until_entered()
        sent = 0
        caller.socket.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while sent < 2**28:
                sent += caller.socket.send(text[sent % len(text) :])
        assert sent < 2**28
        caller.socket.settimeout(WAIT_S)
        assert inside(running)[1] < 60_000
        engine.open()
        whole, begun = divmod(sent, len(text))
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(caller.send, text[begun:] if begun else b"")
            assert all(reply.status == 200 for reply in caller.replies(1 + whole + bool(begun)))
            rest.result()
        until_empty(running)


@pytest.mark.parametrize("seed", range(12))
def test_any_talk_is_understood(port: int, seed: int) -> None:
    """Requests of every kind in any order, in parts of any size, as many at once as fit."""
    dice = random.Random(seed)
    talk: list[tuple[int, bytes]] = []
    for number in range(40):
        own_id = f"X-Request-Id: {number}"
        road, other = dice.sample(list(Road), 2)
        long = sized_body(dice.choice([5_000, 70_000, 140_000, 300_000]))
        talk.append(
            dice.choice(
                [
                    (200, request(road, PLAIN, own_id)),
                    (200, request(Road.BINARY, PLAIN, own_id)),
                    (200, request(Road.BINARY, MANUAL, own_id, "Accept-Encoding: gzip")),
                    (200, request(road, long, own_id)),
                    (200, request(road, PLAIN, own_id, "Expect: 100-continue")),
                    (200, request(road, PLAIN, own_id, "Upgrade: h2c", "Connection: upgrade")),
                    (200, chunked(PLAIN, own_id, size=dice.choice([1, 50, 5000]))),
                    (200, json_request(SMALL_JSON, own_id)),
                    (400, request(road, b"xy", own_id)),
                    (400, request(Road.BINARY, request(other, PLAIN), own_id)),
                    (422, request(road, body_of(x=1), own_id)),
                    (404, request(road, b"x" * dice.choice([0, 1, 1000, 60_000]), own_id, path="/nowhere")),
                    (406, request(road, PLAIN, own_id, "Accept: text/html")),
                    (404, get("/nowhere").replace(b"Host: x", own_id.encode())),
                ]
            )
        )
    whole = b"".join(text for _, text in talk)
    sizes = dice.choice([[7, 100, 1500], [1500, 9000], [60_000], [400_000]])
    places, place = [], 0
    while place < len(whole):
        place += dice.choice(sizes)
        places.append(place)
    with Caller(port) as caller, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(caller.send, *cuts(whole, [place for place in places if place < len(whole)]))
        replies = caller.replies(len(talk))
        sending.result()
        assert [reply.headers["x-request-id"] for reply in replies] == [str(number) for number in range(len(talk))]
        assert [reply.status for reply in replies] == [status for status, _ in talk]
        marked(caller)


# Slow clients and lost ones


@BOTH
def test_a_client_that_closes_its_side_still_gets_its_answers(road: Road) -> None:
    with gated() as (running, engine, _):
        for count in (1, 2, 5):
            for last in (b"", request(road, PLAIN)[:70], request(road, PLAIN)[:-10], request(road.other, PLAIN)[:-10]):
                with Caller(port_of(running)) as caller:
                    caller.send(request(road, PLAIN) * count + last)
                    engine.wait_until_entered()
                    caller.end()
                    engine.let_through(count)
                    assert [reply.status for reply in caller.replies(count)] == [200] * count
                    assert caller.until_closed().replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == b""
                    engine.wait_until_entered(count - 1)
        until_empty(running)


@BOTH
def test_a_half_closed_line_of_both_roads_is_answered(road: Road) -> None:
    with gated() as (running, engine, _), Caller(port_of(running)) as caller:
        caller.send((request(road, PLAIN) + request(road.other, PLAIN)) * 2)
        engine.wait_until_entered()
        caller.end()
        engine.open()
        replies = caller.replies(4)
        assert [reply.status for reply in replies] == [200] * 4
        assert caller.until_closed() == b""
        until_empty(running)


@BOTH
def test_the_answer_to_a_client_that_said_all_says_close(road: Road) -> None:
    with gated() as (running, engine, _), Caller(port_of(running)) as caller:
        caller.send(request(road, PLAIN))
        engine.wait_until_entered()
        caller.end()
        # Once the end was seen, and not before.
        assert caller.socket.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        engine.open()
        assert caller.reply().closes
        assert caller.until_closed() == b""


@BOTH
def test_a_short_answer_reaches_a_client_that_closed_its_side_at_once(port: int, road: Road) -> None:
    for _ in range(20):
        with Caller(port) as caller:
            caller.send(request(road, PLAIN) * 3)
            caller.end()
            assert [reply.status for reply in caller.replies(3)] == [200] * 3
            caller.until_closed()


@BOTH
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_client_that_goes_away_frees_its_place_and_is_counted(road: Road, how: str) -> None:
    with gated() as (running, engine, client):
        # Of the last the server reads only so much ahead, and then no more of the connection.
        further = (b"", request(road, PLAIN), get("/livez"), request(road, sized_body(200_000)))
        for number, ahead in enumerate(further):
            caller = Caller(port_of(running))
            caller.send(request(road, PLAIN) + ahead)
            engine.wait_until_entered()
            if how == "closed":
                caller.socket.close()
            else:
                caller.reset()
            until_inside(running, 0)
            while outcomes(client, "disconnected") < number + 1:
                pass
            engine.let_through()
            until_empty(running)
        assert outcomes(client, "internal") == 0
        with Caller(port_of(running)) as caller:
            engine.open()
            marked(caller, road)


@BOTH
def test_a_client_that_goes_away_while_it_waits_in_the_queue_is_not_computed(road: Road) -> None:
    with gated() as (running, engine, client), Caller(port_of(running)) as first:
        first.send(request(road, PLAIN))
        engine.wait_until_entered()
        waiting = Caller(port_of(running))
        waiting.send(request(road, PLAIN))
        until_inside(running, 2)
        while running.call(lambda: len(running.parts.queue)) != 1:
            pass
        waiting.reset()
        until_inside(running, 1)
        assert running.call(lambda: len(running.parts.queue)) == 0
        engine.open()
        assert first.reply().status == 200
        until_empty(running)
        assert outcomes(client, "disconnected") == 1


@BOTH
@pytest.mark.parametrize("how", ["closed", "half closed", "reset"])
def test_a_client_that_goes_away_within_its_request_leaves_nothing(road: Road, how: str) -> None:
    text = request(road, sized_body(400_000))
    head_bytes = len(text) - 400_000
    with service_in_process(new_engine(), loop_engine=new_engine()) as running, calls_to(running) as client:
        begun = 0
        for sent in (0, 1, head_bytes - 1, head_bytes, head_bytes + 1, head_bytes + 8, len(text) - 1):
            caller = Caller(port_of(running))
            caller.send(text[:sent])
            if sent >= head_bytes:
                until_inside(running, 1)
                begun += 1
            if how == "reset":
                caller.reset()
            elif how == "half closed":
                caller.end()
                assert caller.until_closed() == b""
                caller.socket.close()
            else:
                caller.socket.close()
            while outcomes(client, "disconnected") < begun:
                pass
            until_empty(running)
        assert outcomes(client, "ok") == outcomes(client, "internal") == 0


@BOTH
def test_a_client_that_goes_away_before_it_has_read_leaves_nothing(road: Road) -> None:
    with service_in_process(new_engine()) as running, calls_to(running) as client:
        for how in ("closed", "reset", "half closed"):
            caller = Caller(port_of(running), receive_buffer=4096)
            caller.send(request(road, LONG_ANSWER))
            assert caller.socket.recv(1) == b"H"
            until_inside(running, 1)
            if how == "reset":
                caller.reset()
            elif how == "closed":
                caller.socket.close()
            else:
                caller.end()
                assert len(caller.until_closed()) > 2**24
                caller.socket.close()
            until_empty(running)
        assert figure(client, "attn_in_flight_requests") == 0
        assert outcomes(client, "internal") == 0


@BOTH
def test_an_answer_that_nobody_reads_is_inside_and_has_an_end(road: Road) -> None:
    with quick(write_timeout_s=0.2) as (running, client), Caller(port_of(running), receive_buffer=4096) as caller:
        caller.send(request(road, LONG_ANSWER))
        until_inside(running, 1)
        while inside(running)[1] < 2**24:
            pass
        assert figure(client, "attn_in_flight_requests") == 1
        until_empty(running)
        assert figure(client, "attn_in_flight_requests") == 0
        assert outcomes(client, "not_read") == 1
        assert len(caller.until_gone()) < 2**24


@BOTH
def test_short_answers_that_nobody_reads_have_an_end_too(road: Road) -> None:
    body = body_of(64, 64, num_heads=4)
    with (
        service_in_process(
            new_engine(), loop_engine=new_engine(), write_timeout_s=0.2, max_requests_inside=1
        ) as running,
        calls_to(running),
        Caller(port_of(running), receive_buffer=4096) as caller,
    ):
        caller.socket.settimeout(0.2)
        text = request(road, body)
        with contextlib.suppress(OSError):
            for _ in range(400):
                caller.send(text)
            raise AssertionError("everything was taken")
        until_empty(running)
        with Caller(port_of(running)) as another:
            marked(another, road)


def test_a_head_has_its_time() -> None:
    with service_in_process(new_engine(), loop_engine=new_engine(), head_timeout_s=0.2, keep_alive_s=60) as running:
        head = head_of(Road.BINARY, len(PLAIN))
        with ExitStack() as stack:
            new = [stack.enter_context(Caller(port_of(running))) for _ in range(3)]
            served = [stack.enter_context(Caller(port_of(running))) for _ in range(2)]
            with calls_to(running):
                pass
            for caller in served:
                marked(caller)
            for caller, start in zip((*new, *served), (b"", head[:1], head[:-2], head[:1], head[:-2]), strict=True):
                caller.send(start)
            for caller in (*new, *served):
                assert caller.until_closed() == b""


def test_an_idle_connection_is_closed_in_its_time() -> None:
    with quick(head_timeout_s=30, keep_alive_s=0.3) as (running, _), ExitStack() as stack:
        one, other = [stack.enter_context(Caller(port_of(running))) for _ in range(2)]
        marked(one, Road.BINARY)
        marked(other, Road.ASGI)
        assert one.until_closed() == other.until_closed() == b""


@BOTH
def test_a_body_that_does_not_come_is_answered_504(road: Road) -> None:
    settings: dict[str, Any] = {"request_timeout_s": 0.1, "head_timeout_s": 0.3}
    with service_in_process(new_engine(), loop_engine=new_engine(), **settings) as running, calls_to(running) as client:
        with ExitStack() as stack:
            callers = []
            for length, sent in itertools.product((1000, 60_000, 300_000), (0, 5, 900)):
                caller = stack.enter_context(Caller(port_of(running)))
                caller.send(head_of(road, length) + bytes(sent))
                callers.append((length, caller))
            for length, caller in callers:
                reply = caller.reply()
                assert reply.status == 504 and b"/errors/deadline" in reply.body
                assert reply.closes == (length > 65536)
                if reply.closes:
                    caller.end()
            for _, caller in callers:
                assert caller.until_closed() == b""
        until_empty(running)
        assert outcomes(client, "deadline") == len(callers)


@BOTH
def test_a_body_that_comes_too_late_is_passed_over(road: Road) -> None:
    with quick(request_timeout_s=0.1) as (running, _), Caller(port_of(running)) as caller:
        text = request(road, sized_body(50_000))
        caller.send(text[:20_000])
        assert caller.reply().status == 504
        caller.send(text[20_000:])
        marked(caller, road)
        caller.send(text[:20_000])
        assert caller.reply().status == 504
        caller.send(text[20_000:] + request(Road.BINARY, PLAIN, "X-Request-Id: behind"))
        assert caller.reply().headers["x-request-id"] == "behind"


@BOTH
def test_the_time_a_body_takes_is_reading(port: int, road: Road) -> None:
    for body in (PLAIN, MANUAL):
        text = request(road, body)
        with Caller(port) as caller, Caller(port) as other:
            caller.send(text[:-3])
            # As long as a few dozen answers take: no parsing of so small a body is near that.
            for _ in range(50):
                marked(other)
            caller.send(text[-3:])
            timing = caller.reply().timing
            assert timing["read"] > timing["parse"]


# Refusals for lack of room or time


@BOTH
def test_a_full_service_refuses_and_the_connection_goes_on(road: Road) -> None:
    with gated(max_requests_inside=1) as (running, engine, client), Caller(port_of(running)) as first:
        first.send(request(road, PLAIN))
        engine.wait_until_entered()
        refused = []
        for length in (len(PLAIN), 60_000, 300_000, 9 * 2**20):
            body = PLAIN if length == len(PLAIN) else sized_body(length)
            for parts in ([request(road, body)], [head_of(road, length), body], cuts(request(road, body), [900])):
                with Caller(port_of(running)) as caller, ThreadPoolExecutor(1) as pool:
                    sending = pool.submit(caller.send, *parts)
                    reply = caller.reply()
                    assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1
                    assert b"/errors/overloaded" in reply.body
                    if reply.closes:
                        assert length > 65536
                        caller.until_gone()
                        assert sending.exception() is None or isinstance(sending.exception(), OSError)
                    else:
                        sending.result()
                        caller.send(request(road, PLAIN, "X-Request-Id: again"))
                        again = caller.reply()
                        assert (again.status, again.headers["x-request-id"]) == (429, "again")
                        refused.append(again)
        assert refused
        assert figure(client, 'attn_refused_requests_total{reason="requests"}') >= 12
        engine.open()
        assert first.reply().status == 200
        marked(first, road)
        until_empty(running)


def test_refusals_for_lack_of_room_are_alike() -> None:
    with gated(max_requests_inside=1) as (running, engine, _), Caller(port_of(running)) as first:
        first.send(request(Road.BINARY, PLAIN))
        engine.wait_until_entered()
        for length in (1, 60_000, 70_000, 300_000):
            replies = []
            for road in Road:
                with Caller(port_of(running)) as caller:
                    caller.send(head_of(road, length))
                    replies.append(caller.reply().alike())
            assert replies[0] == replies[1]
            assert replies[0][0] == 429
    # Bodies of others leave no room.
    with gated(max_body_bytes_inside=2**20) as (running, engine, client), Caller(port_of(running)) as first:
        first.send(request(Road.ASGI, PLAIN))
        engine.wait_until_entered()
        replies = []
        for road in Road:
            with Caller(port_of(running)) as caller:
                caller.send(head_of(road, 2**20))
                replies.append(caller.reply().alike())
        assert replies[0] == replies[1]
        assert replies[0][0] == 429
        assert figure(client, 'attn_refused_requests_total{reason="bytes"}') == 2


def test_a_full_queue_refuses_alike() -> None:
    with gated(max_queue_requests=1) as (running, engine, _), ExitStack() as stack:
        for number in range(2):
            first = stack.enter_context(Caller(port_of(running)))
            first.send(request(Road.BINARY, PLAIN))
            until_inside(running, number + 1)
            if not number:
                engine.wait_until_entered()
        while running.call(lambda: len(running.parts.queue)) != 1:
            pass
        replies = []
        for road in Road:
            with Caller(port_of(running)) as caller:
                caller.send(request(road, PLAIN))
                replies.append(caller.reply().alike())
        assert replies[0] == replies[1]
        assert replies[0][0] == 429
        engine.open()


@pytest.mark.parametrize("state", ["starting", "lost", "draining"])
def test_a_service_that_takes_no_work_says_so_alike(state: str) -> None:
    with service_in_process(new_engine(), start_engine=False) as running:
        if state == "lost":
            running.call(lambda: running.parts.lifecycle.mark_lost(RuntimeError("gone")))
        elif state == "draining":
            drain = running.parts.lifecycle.drain
            running.call(lambda: asyncio.ensure_future(drain(notice_s=0, timeout_s=30)))
            while httpx.get(f"{running.url}/readyz").json()["detail"] != "not ready: draining":
                pass
        for length in (len(PLAIN), 60_000, 300_000):
            replies = []
            for road in Road:
                with Caller(port_of(running)) as caller:
                    caller.send(head_of(road, length) + (PLAIN if length == len(PLAIN) else b""))
                    replies.append(caller.reply())
            assert replies[0].alike() == replies[1].alike()
            assert replies[0].status == 503 and int(replies[0].headers["retry-after"]) >= 1
            assert replies[0].closes == (state == "draining" or length > 65536)


@BOTH
def test_a_deadline_passes_in_the_queue_and_while_computing(road: Road) -> None:
    with gated() as (running, engine, client):
        with Caller(port_of(running)) as caller, Caller(port_of(running)) as other:
            caller.send(request(road, body_of(timeout_ms=100)))
            engine.wait_until_entered()
            other.send(request(road, body_of(timeout_ms=100)))
            for connection in (caller, other):
                reply = connection.reply()
                assert reply.status == 504 and b"/errors/deadline" in reply.body and not reply.closes
                assert b"the deadline passed before the answer was there" in reply.body
            engine.open()
            marked(caller, road)
            marked(other, road)
        until_empty(running)
        assert outcomes(client, "deadline") == 2


def test_a_body_over_the_limit_is_refused_alike_before_it_comes() -> None:
    with service_in_process(new_engine(), max_body_bytes=100_000, max_json_bytes=1024) as running, calls_to(running):
        replies = []
        for road in Road:
            with Caller(port_of(running)) as caller:
                caller.send(head_of(road, 100_001))
                replies.append(caller.reply())
                assert replies[-1].closes
            with Caller(port_of(running)) as caller:
                caller.send(request(road, sized_body(100_000)))
                assert caller.reply().status == 200
        assert replies[0].alike() == replies[1].alike()
        assert replies[0].status == 413


@BOTH
def test_a_mistake_of_the_engine_is_answered_500(road: Road) -> None:
    with gated() as (running, engine, client), Caller(port_of(running)) as caller:
        engine.failure = RuntimeError("a mistake")
        engine.open()
        caller.send(request(road, PLAIN))
        reply = caller.reply()
        assert reply.status == 500 and reply.headers["x-request-id"] in json.loads(reply.body)["detail"]
        engine.failure = None
        marked(caller, road)
        until_empty(running)
        assert outcomes(client, "internal") == 1


# Buffers


def test_idle_connections_hold_no_buffer(service: InProcess, port: int) -> None:
    bodies = [PLAIN, MANUAL, sized_body(100_000), sized_body(400_000), b"xy"]
    with ExitStack() as stack:
        callers = [stack.enter_context(Caller(port)) for _ in range(1000)]
        for number, caller in enumerate(callers):
            caller.send(request(Road.BINARY if number % 8 else Road.ASGI, bodies[number % 5]))
        for caller in callers:
            assert caller.reply().status in (200, 400)
        until_empty(service)
        assert service.call(lambda: service.parts.door.buffers.free_bytes) <= service.parts.door.buffers.max_free_bytes
        # And all of them are still there.
        for caller in callers[::100]:
            marked(caller)


@BOTH
def test_many_callers_at_once_each_get_their_own_numbers(port: int, road: Road) -> None:
    bodies = [body_of(5 + seed, 33, seed=seed) for seed in range(8)]

    def call(number: int) -> list[bytes]:
        with Caller(port) as caller:
            answers = []
            for body in bodies:
                text = request(road if number % 2 else road.other, body)
                caller.send(*cuts(text, [len(text) - number * 13]))
                answers.append(caller.reply().data)
            return answers

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(call, range(16)))
    assert all(answer == answers[0] for answer in answers)


# The end


def test_a_drain_finds_requests_in_every_phase_on_each_road() -> None:
    server = spawn(ATTN_TORCH_THREADS="1", ATTN_DRAIN_NOTICE_S="0.3", ATTN_DRAIN_TIMEOUT_S="30")
    try:
        wait_until_ready(server.url)
        with ExitStack() as stack:
            started = {road: _in_every_phase(server, road, stack) for road in Road}
            # Last, so that both are still being computed when the signal comes.
            long = torch.zeros(1, 8, 4096, 64)
            body = safetensors_body({"query": long, "key": long, "value": long}, {"path": "fused"})
            for road, phases in started.items():
                phases.computing.send(request(road, body))
            while "attn_in_flight_requests 6.0" not in httpx.get(f"{server.url}/metrics").text:
                assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            while httpx.get(f"{server.url}/readyz").status_code == 200:
                assert server.process.poll() is None
            for road, (idle, in_head, in_body, computing, flushing) in started.items():
                idle.send(request(road, PLAIN))
                reply = idle.reply()
                assert reply.status == 503 and reply.closes
                assert idle.until_closed() == b""
                in_head.send(request(road, PLAIN)[30:])
                assert in_head.reply().status == 503
                in_body.send(PLAIN[100:])
                reply = in_body.reply()
                assert reply.status == 200 and reply.closes
                assert in_body.until_closed() == b""
                reply = computing.reply()
                assert reply.status == 200 and reply.closes
                assert len(flushing.reply().body) > 2**24
                # Its head was written before, and did not say that the connection would be closed.
                flushing.send(request(road, PLAIN))
                assert flushing.reply().status == 503
        assert server.wait() == 0
        server.follower.join()
        (stopped,) = [line for line in server.log if line["message"] == "stopped"]
        assert (stopped["given_up_requests"], stopped["unsent_answers"]) == (0, 0)
        assert not [line for line in server.log if line["level"] in ("error", "unparsed")]
    finally:
        server.end()


class _Phases(NamedTuple):
    """A connection for each; ``computing`` is yet to send its request."""

    idle: Caller
    in_head: Caller
    in_body: Caller
    computing: Caller
    flushing: Caller


def _in_every_phase(server: RunningServer, road: Road, stack: ExitStack) -> _Phases:
    idle, in_head, in_body, computing = [stack.enter_context(Caller(server.port)) for _ in range(4)]
    flushing = stack.enter_context(Caller(server.port))
    marked(idle, road)
    in_head.send(request(road, PLAIN)[:30])
    in_body.send(request(road, PLAIN)[: -len(PLAIN) + 100])
    flushing.send(request(road, LONG_ANSWER))
    assert flushing.socket.recv(1, socket.MSG_PEEK) == b"H"
    return _Phases(idle, in_head, in_body, computing, flushing)


@BOTH
def test_a_drain_whose_limit_is_over_answers_503_in_every_phase(road: Road) -> None:
    with gated() as (running, engine, _), ExitStack() as stack:
        in_body, computing, waiting = [stack.enter_context(Caller(port_of(running))) for _ in range(3)]
        flushing = stack.enter_context(Caller(port_of(running)))
        flushing.send(request(road, LONG_ANSWER))
        engine.let_through()
        engine.wait_until_entered()
        assert flushing.socket.recv(1, socket.MSG_PEEK) == b"H"
        in_body.send(request(road, PLAIN)[: -len(PLAIN) + 100])
        computing.send(request(road, PLAIN))
        engine.wait_until_entered()
        waiting.send(request(road, PLAIN))
        until_inside(running, 4)
        drain = running.parts.lifecycle.drain
        running.call(lambda: asyncio.ensure_future(drain(notice_s=0, timeout_s=0.05)))
        for caller in (in_body, computing, waiting):
            reply = caller.reply()
            assert reply.status == 503 and reply.closes
            caller.end()
            assert caller.until_closed() == b""
        # An answer that is not read to its end cannot become another one.
        assert len(flushing.until_gone()) < 2**24
        until_inside(running, 0)
        engine.open()
        until_empty(running)


# TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_service(authority: Authority) -> Iterator[InProcess]:
    certificate = authority.sign("server")
    files: dict[str, Any] = {"tls_certificate_file": certificate.file, "tls_key_file": certificate.key_file}
    with service_in_process(new_engine(), loop_engine=new_engine(), **files) as running:
        while not running.call(lambda: running.parts.lifecycle.is_ready):
            pass
        yield running


@pytest.fixture
def tls_port(tls_service: InProcess) -> int:
    return port_of(tls_service)


class TlsCaller(Caller):
    def __init__(self, port: int, authority: Authority) -> None:
        super().__init__(port)
        context = ssl.create_default_context(cafile=authority.file)
        self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")


@BOTH
def test_tls_is_the_same_road(
    tls_service: InProcess, authority: Authority, port: int, road: Road, asgi_requests: list[AsgiProtocol]
) -> None:
    bodies = [PLAIN, MANUAL, b"xy", sized_body(200_000), sized_body(1_500_000), PLAIN, body_of(300, 64)]
    with TlsCaller(port_of(tls_service), authority) as secret, Caller(port) as plain:
        for body in bodies:
            text = request(road, body)
            replies = []
            for caller in (secret, plain):
                caller.send(*cuts(text, [len(text) - len(body), len(text) - 1]))
                replies.append(caller.reply().alike())
                caller.send(text)
                replies.append(caller.reply().alike())
            assert all(reply == replies[0] for reply in replies)
        assert asgi_requests
        marked(secret, road.other)
        secret.send(request(road, PLAIN, "Connection: close"))
        assert secret.reply().closes
        assert secret.until_closed() == b""
    until_empty(tls_service)


def test_lines_of_requests_over_tls_are_answered_in_order(tls_service: InProcess, authority: Authority) -> None:
    for mix in ("b", "m", "ba", "mbxajclb"):
        texts, statuses = in_line(24, mix)
        with TlsCaller(port_of(tls_service), authority) as caller:
            caller.send(b"".join(texts))
            assert [reply.status for reply in caller.replies(24)] == statuses
            caller.send(*cuts(b"".join(texts), range(0, 10_000, 333)))
            assert [reply.status for reply in caller.replies(24)] == statuses
            marked(caller)
    until_empty(tls_service)


@BOTH
def test_a_real_client_over_tls(tls_service: InProcess, authority: Authority, road: Road) -> None:
    context = ssl.create_default_context(cafile=authority.file)
    url = tls_service.url.replace("http://", "https://")
    with httpx.Client(base_url=url, verify=context, timeout=WAIT_S) as client:
        for _ in range(3):
            answer = client.post("/v1/attention", content=PLAIN, headers={"content-type": road.content_type})
            assert answer.status_code == 200
            assert client.get("/livez").status_code == 200
            assert client.post("/v1/attention", content=list_body(tensors_of(), {}), headers={"content-type": JSON})
        long = client.post("/v1/attention", content=LONG_ANSWER, headers={"content-type": road.content_type})
        assert len(long.content) > 2**24
