"""Requests that were found to hurt: none of them does more than get its answer."""

from __future__ import annotations

import gzip
import itertools
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch

from attn_core import Engine
from tests.support.bodies import JSON, SAFETENSORS, safetensors_body
from tests.support.in_process import InProcess, service_in_process
from tests.support.server import RunningServer

PLAIN = {"query": [[1, 0]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]]}


def post_raw(client: httpx.Client, body: bytes, path: str = "/v1/attention") -> httpx.Response:
    headers = {"content-type": JSON, "content-encoding": "gzip"}
    return client.post(path, content=gzip.compress(body, 1), headers=headers)


def nested(depth: int) -> str:
    return "[" * depth + "1" + "]" * depth


@pytest.mark.parametrize(
    ("body", "field"),
    [
        # More elements than pysimdjson can count, where it would have made a list of them.
        (b'{"query":[[1]],"x":[' + b"1," * (2**24 + 1000) + b"1]}", "x"),
        (b'{"query":[[1]],"causal":[' + b"1," * (2**24 + 1000) + b"1]}", "causal"),
        (b'{"query":[' + b"[]," * (2**22 + 1) + b"[]]}", ""),
        (b"{" + b'"query":[[1]],' * 200_000 + b'"a":1}', "query"),
        (b"{" + b",".join(b'"a%d":1,"a%d":2' % (n, n) for n in range(50_000)) + b"}", ""),
        (b"{" + b",".join(b'"a%d":1' % n for n in range(20_000)) + b"}", ""),
        (b'{"query":[[1]],"outputs":[' + b"1," * 500_000 + b"1]}", "outputs"),
        (b'{"query":[[1]],"outputs":["weights"],"select":{"heads":[' + b"0," * 200_000 + b"0]}}", "select.heads.1"),
        (b'{"query":[[1]],"outputs":["weights"],"select":{"heads":[' + b"0.5," * 200_000 + b"0]}}", "select.heads.0"),
        (b'{"query":[[1]],"window":{' + b",".join(b'"a%d":1' % n for n in range(50_000)) + b"}}", "window"),
        (b'{"query":{' + b",".join(b'"a%d":1' % n for n in range(50_000)) + b"}}", "query.a0"),
        (b'{"query":{"dtype":"float32","shape":[' + b"1," * 100_000 + b'1],"data":""}}', "query.shape"),
        (b'{"query":{"dtype":"float32","shape":[0,2097152,2097152,2097152],"data":""}}', "query.shape"),
        (b'{"query":[[' + b"9" * 5000 + b"]]}", "query.0.0"),
        (b'{"' + b"x" * 200_000 + b'":1,"query":[[1]]}', "x" * 100 + "…"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:20] or "whole body",
)
def test_a_body_made_to_hurt_is_refused_briefly(client: httpx.Client, body: bytes, field: str) -> None:
    answer = post_raw(client, body)
    assert answer.status_code == 422, answer.text[:300]
    assert field in [fault["field"] for fault in answer.json()["errors"]]
    assert len(answer.content) < 20_000
    assert client.post("/v1/attention", json=PLAIN).status_code == 200


@pytest.mark.parametrize("depth", [5, 9, 200, 500, 900, 1000, 1100, 5000])
@pytest.mark.parametrize(
    "write",
    [
        lambda inner: f'{{"query":{inner}}}',
        lambda inner: f'{{"query":[[1]],"scale":{inner}}}',
        lambda inner: f'{{"query":[[1]],"unknown":{inner}}}',
        lambda inner: f'{{"query":[[1]],"window":{{"left":{inner}}}}}',
        lambda inner: (
            f'{{"query":[[1]],"x":{inner.replace("[", chr(123) + chr(34) + "a" + chr(34) + ":").replace("]", "}")}}}'
        ),
        lambda inner: f'{{"query":{{"dtype":"float32","shape":{inner},"data":""}}}}',
    ],
    ids=["tensor", "option", "unknown", "window", "objects", "shape"],
)
def test_deep_nesting_is_refused(client: httpx.Client, write: Callable[[str], str], depth: int) -> None:
    answer = post_raw(client, write(nested(depth)).encode())
    assert answer.status_code in (400, 422), answer.text[:300]
    assert answer.json()["errors"]


def test_bytes_beyond_64_bits_are_refused_and_said(client: httpx.Client) -> None:
    tensors = {
        "weights": {"dtype": "float32", "shape": [1, 1, 2**24, 0], "data": ""},
        "value": {"dtype": "float32", "shape": [1, 1, 0, 2**24], "data": ""},
    }
    answer = client.post("/v1/weighted_sum", json=tensors)
    assert answer.status_code == 413
    assert answer.json()["needed_bytes"] >= 2**50


def test_text_over_its_own_limit_is_refused_where_safetensors_is_not() -> None:
    with service_in_process(Engine(), max_json_bytes=2048) as service, httpx.Client(base_url=service.url) as own:
        tensors = {"query": torch.zeros(1, 1, 64, 16)}
        until_ready(own)
        body = safetensors_body(tensors, {})
        assert own.post("/v1/attention", content=body, headers={"content-type": SAFETENSORS}).status_code == 200
        answer = own.post("/v1/attention", content=b"[" * 4096, headers={"content-type": JSON})
        assert answer.status_code == 413
        assert own.get("/v1").json()["limits"]["max_json_bytes"] == 2048


def until_ready(own: httpx.Client) -> None:
    while own.get("/readyz").status_code != 200:
        pass


def in_flight(own: httpx.Client) -> float:
    text = own.get("/metrics").text
    return float(text.split("\nattn_in_flight_requests ")[1].split("\n")[0])


def test_an_answer_that_nobody_reads_counts_as_inside_and_has_an_end() -> None:
    query = torch.zeros(1, 8, 1024, 1)
    body = safetensors_body({"query": query}, {"outputs": ["weights"]})
    head = (
        f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: {SAFETENSORS}\r\nContent-Length: {len(body)}\r\n\r\n"
    )

    def held(service: InProcess) -> Any:
        return service.call(lambda: service.parts.admission.body_bytes_inside)

    with (
        service_in_process(Engine(), write_timeout_s=1.0) as service,
        httpx.Client(base_url=service.url, timeout=30.0) as own,
    ):
        until_ready(own)
        with socket.create_connection(("127.0.0.1", int(service.url.rsplit(":", 1)[1]))) as caller:
            caller.sendall(head.encode() + body)
            while held(service) < 8 * 1024 * 1024 * 4:
                pass
            assert in_flight(own) == 1.0
            while in_flight(own):
                pass
            assert held(service) == 0


def test_a_head_has_an_end_in_size_and_in_time(server: RunningServer) -> None:
    for filler in (b"X-Filler: " + b"x" * 2_000_000, b"\r\n".join(b"X-%d: %s" % (n, b"x" * 100) for n in range(2000))):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
            received = b""
            try:
                connection.sendall(filler)
                while part := connection.recv(65536):
                    received += part
            except OSError:
                # Refused while it was still being sent: the answer may be lost to the reset, the end is not.
                continue
            assert received.startswith(b"HTTP/1.1 400 ")
    with service_in_process(Engine(), head_timeout_s=0.2) as service:
        port = int(service.url.rsplit(":", 1)[1])
        for start in (b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(start)
                assert connection.recv(4096) == b""


def test_trailers_and_extensions_have_an_end_too(server: RunningServer) -> None:
    head = b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    before = server.resident_bytes()
    for start, filler in ((b"2\r\n{}\r\n0\r\n", b"X-Trailer: %s\r\n" % (b"x" * 1000)), (b"2;x=", b"x" * 1000)):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            sent = 0
            try:
                connection.sendall(head + start)
                while sent < 64 * 2**20:
                    connection.sendall(filler * 100)
                    sent += 100 * len(filler)
            except OSError:
                pass
            assert sent < 64 * 2**20
    assert server.resident_bytes() - before < 2**24


@pytest.mark.parametrize("wish", ["h2c", "websocket", "TLS/1.0"])
def test_an_upgrade_that_is_not_served_is_passed_over(server: RunningServer, wish: str) -> None:
    body = json.dumps(PLAIN).encode()
    head = (
        f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: {wish}\r\n"
        f"HTTP2-Settings: AAMAAABkAAQAAP__\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    whole = head.encode() + body
    splits = [[len(whole)], [len(head)], [head.index("Upgrade:")], [head.index("Upgrade:") + 3], [5, 70, len(head) - 1]]
    for places in splits:
        cuts = [0, *places, len(whole)]
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for begin, end in itertools.pairwise(cuts):
                connection.sendall(whole[begin:end])
            assert read_answers(connection, 1) == [200]
            # On the same connection, behind a plain one and before another.
            plain = head.replace(f"Upgrade: {wish}\r\n", "").encode() + body
            connection.sendall(plain + whole + plain)
            assert read_answers(connection, 3) == [200, 200, 200]


def test_a_tunnel_is_refused(server: RunningServer) -> None:
    for rest in (b"", b"Content-Length: 3\r\nUpgrade: h2c\r\nConnection: upgrade\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n" + rest + b"\r\nabc")
            received = b""
            while part := connection.recv(65536):
                received += part
        assert received.startswith(b"HTTP/1.1 400 ")
        assert b"CONNECT" in received.partition(b"\r\n\r\n")[2]
    assert not [line for line in server.log if line.get("level") == "error"]


def read_answers(connection: socket.socket, count: int) -> list[int]:
    """The statuses of so many answers."""
    received = b""
    statuses: list[int] = []
    while len(statuses) < count:
        part = connection.recv(65536)
        assert part, received
        received += part
        while b"\r\n\r\n" in received:
            head, _, rest = received.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            if len(rest) < length:
                break
            statuses.append(int(head[9:12]))
            received = rest[length:]
    return statuses


def test_bytes_that_look_like_a_header_reach_the_body_unchanged(server: RunningServer) -> None:
    value = torch.frombuffer(bytearray(b"\r\nUpgrade: x\r\n\r\n...!"), dtype=torch.float32).view(1, 1, 1, 5)
    assert value.isfinite().all()
    ones = torch.ones(1, 1, 1, 1)
    body = safetensors_body({"query": ones, "key": ones, "value": value}, {"path": "manual"})
    head = f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: {SAFETENSORS}\r\nConnection: close\r\n"
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    for cut in (len(whole) - len(body) - 1, len(whole) - len(body), len(whole) - 10):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(whole[:cut])
            connection.sendall(whole[cut:])
            received = b""
            while part := connection.recv(65536):
                received += part
        assert value.numpy().tobytes() in received


def test_what_is_not_http_waits_for_the_answer_before_it(server: RunningServer) -> None:
    body = json.dumps(PLAIN).encode()
    head = f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.encode() + body + b"\0\0\0\0")
        received = b""
        while part := connection.recv(65536):
            received += part
    assert received.startswith(b"HTTP/1.1 200 ")


def test_small_answers_that_nobody_reads_have_an_end_too() -> None:
    members = {"query": [[[1.0] * 64] * 64], "encoding": "list"}
    body = json.dumps(members).encode()
    head = f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    with (
        service_in_process(Engine(), write_timeout_s=0.5, max_requests_inside=1) as service,
        httpx.Client(base_url=service.url, timeout=30.0) as own,
    ):
        until_ready(own)
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.settimeout(5.0)
            caller.connect(("127.0.0.1", int(service.url.rsplit(":", 1)[1])))
            try:
                for _ in range(400):
                    caller.sendall(head.encode() + body)
            except OSError:
                pass
            while own.post("/v1/attention", json=PLAIN).status_code != 200:
                pass


def test_a_reset_with_requests_in_line_is_a_disconnect(client: httpx.Client, server: RunningServer) -> None:
    body = json.dumps(PLAIN).encode()
    head = f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall((head.encode() + body) * 3)
    while in_flight(client):
        pass
    assert 'outcome="internal"' not in client.get("/metrics").text
    assert not [line for line in server.log if line.get("level") == "error"]


def test_an_unread_rest_of_a_body_does_not_keep_a_connection() -> None:
    with service_in_process(Engine(), head_timeout_s=0.3, keep_alive_s=60) as service:
        port = int(service.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n")
            assert read_answers(connection, 1) == [404]
            connection.sendall(b"x")
            assert connection.recv(4096) == b""


def test_a_client_that_closes_its_side_still_gets_its_answer(server: RunningServer) -> None:
    body = json.dumps(PLAIN).encode()
    head = f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.encode() + body)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while part := connection.recv(65536):
            received += part
    assert received.startswith(b"HTTP/1.1 200 ")


def test_headers_in_several_lines_are_one_list(client: httpx.Client) -> None:
    body = json.dumps(PLAIN).encode()
    both = [("content-type", JSON), ("accept", "text/html"), ("accept", JSON)]
    assert client.post("/v1/attention", content=body, headers=both).status_code == 200
    twice = [("content-type", JSON), ("content-encoding", "gzip"), ("content-encoding", "gzip")]
    assert client.post("/v1/attention", content=body, headers=twice).status_code == 415
    types = [("content-type", JSON), ("content-type", "text/plain")]
    assert client.post("/v1/attention", content=body, headers=types).status_code == 415
