"""The HTTP door as callers see it: forms, headers, refusals, documentation, metrics."""

from __future__ import annotations

import gzip
import json
import re
import socket
from typing import Any

import httpx
import pytest
import torch

from tests.support.bodies import JSON, SAFETENSORS, as_lists, as_object, read_answer, safetensors_body, strict_json
from tests.support.roads import Caller
from tests.support.server import RunningServer

PLAIN: dict[str, Any] = {"query": [[1, 0]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]]}
PROBLEM = "application/problem+json"


def raw_exchange(server: RunningServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


def test_the_worked_example_of_the_contract_with_an_empty_row(client: httpx.Client) -> None:
    members = {
        "query": [[1, 0], [0, 1]],
        "key": [[1, 0], [0, 1]],
        "value": [[1, 2], [3, 4]],
        "allow_mask": [[True, True], [False, False]],
        "outputs": ["context", "weights", "logsumexp"],
    }
    answer = strict_json(client.post("/v1/attention", json=members).content)
    assert answer["context"][0] == pytest.approx([1.66048, 2.66048], abs=1e-5)
    assert answer["context"][1] == [0, 0]
    assert answer["weights"][0] == pytest.approx([0.66976, 0.33024], abs=1e-5)
    assert answer["logsumexp"] == [pytest.approx(1.10794, abs=1e-5), "-Infinity"]
    info = answer["info"]
    assert (info["path"], info["why"], info["empty_rows"]) == ("manual", "weights asked for", 1)
    assert set(info) == {
        "path", "why", "device", "dtype", "queue_ms", "compute_ms", "batch_requests", "empty_rows", "nonfinite_rows",
        "peak_bytes", "flops",
    }  # fmt: skip


def test_the_worked_refusal_of_the_contract(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/attention", json={"query": [[1, 2]], "key": [[1, 2, 3]], "value": [[1]], "is_casual": True}
    )
    assert answer.status_code == 422
    assert answer.headers["content-type"] == PROBLEM
    assert answer.json() == {
        "type": "/errors/invalid",
        "title": "The request cannot be computed",
        "status": 422,
        "detail": "2 faults: key, is_casual",
        "errors": [
            {"field": "key", "expected": "head dim 2, as query has", "received": "[1,3]"},
            {"field": "is_casual", "expected": "a known field; did you mean causal?", "received": "true"},
        ],
    }


def test_the_worked_weighted_sum(client: httpx.Client) -> None:
    members = {"weights": [[0.2, 0.5, 0.3]], "value": [[1, 0], [0, 1], [1, 1]]}
    answer = strict_json(client.post("/v1/weighted_sum", json=members).content)
    assert answer["context"] == [pytest.approx([0.5, 0.8])]
    by_plain_product = client.post("/v1/weighted_sum", json={"weights": [[0, 1]], "value": [["NaN"], [1]]}).json()
    assert by_plain_product["context"] == [["NaN"]]
    assert by_plain_product["info"]["nonfinite_rows"] == 1


def test_every_form_of_answer_holds_the_same_bits(client: httpx.Client) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensors = {name: torch.randn(2, 3, 7, 5, generator=generator).to(dtype) for name in ("query", "key", "value")}
        outputs = ["context", "weights", "logsumexp", "entropy", "top_weights", "weight_totals"]
        options = {"outputs": outputs, "select": {"top_k": 3}, "causal": True}
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        dtypes = {"context": dtype, "weights": dtype, "top_weights": dtype, "top_keys": torch.int64} | dict.fromkeys(
            ("logsumexp", "entropy", "weight_totals"), wide
        )
        answers = []
        for accept in (JSON, SAFETENSORS):
            for encoding in (None, "list", "base64"):
                own = options | ({} if encoding is None or accept == SAFETENSORS else {"encoding": encoding})
                answer = client.post(
                    "/v1/attention",
                    content=safetensors_body(tensors, own),
                    headers={"content-type": SAFETENSORS, "accept": accept},
                )
                assert answer.status_code == 200, answer.text
                assert answer.headers["content-type"] == accept
                answers.append(read_answer(answer.content, accept, dtypes)[0])
        assert set(answers[0]) == {*outputs, "top_keys"}
        for other in answers[1:]:
            assert all(torch.equal(other[name], tensor) for name, tensor in answers[0].items())
            assert all(other[name].dtype == dtypes[name] for name in other)


def test_lists_are_answered_as_lists_and_objects_as_objects(client: httpx.Client) -> None:
    as_list = client.post("/v1/attention", json=PLAIN).json()
    assert isinstance(as_list["context"], list)
    objects = {name: as_object(torch.tensor(value, dtype=torch.float32)) for name, value in PLAIN.items()}
    assert client.post("/v1/attention", json=objects).json()["context"]["dtype"] == "float32"
    turned = client.post("/v1/attention", json=PLAIN | {"encoding": "base64"}).json()
    assert turned["context"]["shape"] == [1, 2]


@pytest.mark.parametrize("content_type", [JSON, SAFETENSORS])
def test_gzip_goes_both_ways(client: httpx.Client, content_type: str) -> None:
    zeros = torch.zeros(1, 2, 64, 16)
    body = (
        json.dumps({"query": as_lists(zeros)}).encode()
        if content_type == JSON
        else safetensors_body({"query": zeros}, {})
    )
    headers = {"content-type": content_type, "content-encoding": "gzip"}
    plain = client.post("/v1/attention", content=gzip.compress(body), headers=headers | {"accept-encoding": "identity"})
    assert plain.status_code == 200
    assert "content-encoding" not in plain.headers
    with client.stream(
        "POST", "/v1/attention", content=gzip.compress(body), headers=headers | {"accept-encoding": "gzip"}
    ) as squeezed:
        raw = b"".join(squeezed.iter_raw())
        assert squeezed.headers["content-encoding"] == "gzip"
        assert "Accept-Encoding" in squeezed.headers["vary"]
    assert len(raw) < len(plain.content) / 4
    one, other = (read_answer(content, content_type, {})[0] for content in (plain.content, gzip.decompress(raw)))
    assert torch.equal(one["context"], other["context"])


def test_numbers_that_gzip_cannot_shrink_are_sent_as_they_are(client: httpx.Client) -> None:
    query = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    answer = client.post(
        "/v1/attention",
        content=safetensors_body({"query": query}, {}),
        headers={"content-type": SAFETENSORS, "accept-encoding": "gzip"},
    )
    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status", "name"),
    [
        ("GET", "/nowhere", {}, None, 404, "not-found"),
        ("GET", "/v1/attention/", {}, None, 404, "not-found"),
        ("GET", "/v1/attention", {}, None, 405, "method"),
        ("DELETE", "/v1", {}, None, 405, "method"),
        ("POST", "/livez", {}, None, 405, "method"),
        ("POST", "/v1/attention", {"content-type": "text/plain"}, b"{}", 415, "media-type"),
        ("POST", "/v1/attention", {"content-type": JSON, "content-encoding": "br"}, b"{}", 415, "media-type"),
        ("POST", "/v1/attention", {"content-type": JSON, "accept": "text/html"}, b"{}", 406, "not-acceptable"),
        ("POST", "/v1/attention", {"content-type": JSON}, b"", 400, "malformed"),
        ("POST", "/v1/attention", {"content-type": JSON}, b"{", 400, "malformed"),
        ("POST", "/v1/attention", {"content-type": JSON}, b'{"query": [[NaN]]}', 400, "malformed"),
        ("POST", "/v1/attention", {"content-type": SAFETENSORS}, b"\x00" * 20, 400, "malformed"),
        ("POST", "/v1/attention", {"content-type": JSON, "content-encoding": "gzip"}, b"{}", 400, "malformed"),
        ("POST", "/v1/attention", {"content-type": JSON}, b"{}", 422, "invalid"),
        ("POST", "/v1/attention", {"content-type": JSON}, b"[]", 422, "invalid"),
        ("POST", "/v1/weighted_sum", {"content-type": JSON}, b'{"query": [[1]]}', 422, "invalid"),
    ],
)
def test_a_refusal_is_problem_details(
    client: httpx.Client,
    method: str,
    path: str,
    headers: dict[str, str],
    content: bytes | None,
    status: int,
    name: str,
) -> None:
    answer = client.request(method, path, headers=headers, content=content)
    assert answer.status_code == status
    assert answer.headers["content-type"] == PROBLEM
    body = answer.json()
    assert body["type"] == f"/errors/{name}"
    assert body["status"] == status
    assert body["title"] and body["detail"]
    assert all(set(fault) == {"field", "expected", "received"} for fault in body["errors"])
    if status == 405:
        assert answer.headers["allow"]


def test_at_most_fifty_faults_are_listed(client: httpx.Client) -> None:
    answer = client.post("/v1/attention", json=PLAIN | {f"x{n}": n for n in range(80)})
    assert len(answer.json()["errors"]) == 50
    assert answer.json()["detail"].startswith("at least 50 faults: ")


def test_an_empty_row_can_be_an_error(client: httpx.Client) -> None:
    members = PLAIN | {"allow_mask": [[False, False]], "empty_rows": "error"}
    fault = client.post("/v1/attention", json=members).json()["errors"][0]
    assert fault["field"] == "empty_rows"
    assert "[0,0,0]" in fault["received"]


def test_every_answer_has_an_id_and_its_timing(client: httpx.Client) -> None:
    for answer in (
        client.post("/v1/attention", json=PLAIN),
        client.post("/v1/attention", json={}),
        client.get("/livez"),
        client.get("/nowhere"),
        client.get("/metrics"),
    ):
        assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])
        timing = dict(re.findall(r"(\w+);dur=([0-9.]+)", answer.headers["server-timing"]))
        assert list(timing) == ["read", "parse", "queue", "compute", "encode"]
    assert client.get("/livez", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in (b"x" * 129, b"a b", b"\xe9"):
        sent = client.get("/livez", headers=[(b"x-request-id", bad)])
        assert re.fullmatch(r"[0-9a-f]{32}", sent.headers["x-request-id"])


def test_health_answers_get_and_head(client: httpx.Client) -> None:
    assert client.get("/livez").json() == {"live": True}
    assert client.get("/readyz").json()["ready"] is True
    for path in ("/livez", "/readyz"):
        assert client.head(path).status_code == 200


def test_the_service_describes_itself(client: httpx.Client) -> None:
    about = client.get("/v1").json()
    assert about["device"] in ("cpu", "cuda")
    assert about["dtypes"] == ["float64", "float32", "float16", "bfloat16"]
    assert all(about["limits"][name] > 0 for name in ("max_body_bytes", "memory_bytes", "max_queue_requests"))
    assert about["limits"]["default_timeout_ms"] <= about["limits"]["max_timeout_ms"]


def test_a_body_without_length_is_read_and_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    body = json.dumps(PLAIN).encode()
    head = b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    chunked = head + b"X-Request-Id: first\r\nTransfer-Encoding: chunked\r\n\r\n"
    for index in range(0, len(body), 10):
        part = body[index : index + 10]
        chunked += b"%x\r\n%b\r\n" % (len(part), part)
    chunked += b"0\r\n\r\n"
    plain = head + b"X-Request-Id: second\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    received = raw_exchange(server, chunked + plain)
    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert received.index(b"x-request-id: first") < received.index(b"x-request-id: second")


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: x\r\n",
        b"Transfer-Encoding: identity, chunked, x\r\n",
    ],
)
def test_a_length_that_can_be_read_in_two_ways_is_refused(server: RunningServer, head: bytes) -> None:
    request = b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    received = raw_exchange(server, request + head + b"\r\n0\r\n\r\nGET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"200 OK" not in received
    head, _, content = received.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head and b"x-request-id: " in head
    assert json.loads(content)["type"] == "/errors/malformed"


def test_what_is_not_http_is_refused_too(server: RunningServer) -> None:
    received = raw_exchange(server, b"HELLO\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400 ") and b"application/problem+json" in received


def test_parameters_of_the_url_are_refused_beside_other_faults(client: httpx.Client) -> None:
    answer = client.post("/v1/attention?scale=5", json=PLAIN | {"is_casual": True})
    assert answer.status_code == 422
    assert [fault["field"] for fault in answer.json()["errors"]] == ["?scale", "is_casual"]


def test_expect_100_continue_is_answered(server: RunningServer) -> None:
    body = json.dumps(PLAIN).encode()
    head = b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert b"200 OK" in connection.recv(65536)


def test_an_early_refusal_of_a_long_body_arrives(server: RunningServer) -> None:
    """The whole body is on its way when the refusal comes; the client still reads it, and goes on."""
    long = bytes(2 * 2**20)
    with httpx.Client(base_url=server.url) as client:
        for _ in range(2):
            answer = client.post("/v1/attention", content=long, headers={"content-type": "text/plain"})
            assert answer.status_code == 415
            assert "connection" not in answer.headers


def test_so_long_a_body_that_nobody_drops_it_ends_its_connection(server: RunningServer) -> None:
    head = f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: {2**26}\r\n\r\n"
    with Caller(server.port) as caller:
        caller.send(head.encode(), bytes(2**16))
        reply = caller.reply()
        assert reply.status == 415 and reply.closes


def test_metrics_count_what_happened(client: httpx.Client) -> None:
    def value(name: str) -> float:
        text = client.get("/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    names = (
        'attn_requests_total{outcome="ok",route="/v1/attention"}',
        'attn_requests_total{outcome="invalid",route="/v1/attention"}',
        'attn_path_requests_total{path="fused"}',
        'attn_path_requests_total{path="manual"}',
        'attn_stage_seconds_count{stage="compute"}',
        "attn_computed_flops_total",
        "attn_received_bytes_total",
        "attn_sent_bytes_total",
        "attn_empty_rows_total",
        "attn_nonfinite_rows_total",
        "attn_batch_requests_count",
    )
    before = {name: value(name) for name in names}
    client.post("/v1/attention", json=PLAIN)
    client.post("/v1/attention", json=PLAIN | {"outputs": ["weights"], "allow_mask": [False]})
    client.post("/v1/attention", json=PLAIN | {"query": [["NaN", 1]]})
    client.post("/v1/attention", json={})
    grown = {name: value(name) - before[name] for name in names}
    assert list(grown.values())[:5] == [3, 1, 1, 2, 3]
    assert grown["attn_computed_flops_total"] == 3 * 2 * 2 * (2 + 2)
    assert grown["attn_received_bytes_total"] > 200
    assert grown["attn_sent_bytes_total"] > 200
    assert (grown["attn_empty_rows_total"], grown["attn_nonfinite_rows_total"]) == (1, 1)
    assert grown["attn_batch_requests_count"] == 3
    assert value("attn_ready") == 1
    assert value('attn_device_memory_bytes{kind="limit"}') > 2**28


def test_refusals_are_counted_by_their_reason(client: httpx.Client, server: RunningServer) -> None:
    def refused(reason: str) -> float:
        start = f'attn_refused_requests_total{{reason="{reason}"}}'
        (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith(start)]
        return float(line.rsplit(" ", 1)[1])

    before = {reason: refused(reason) for reason in ("body", "memory", "queue_full")}
    members = {
        "weights": {"dtype": "float32", "shape": [1, 1, 2**24, 0], "data": ""},
        "value": {"dtype": "float32", "shape": [1, 1, 0, 2**24], "data": ""},
    }
    assert client.post("/v1/weighted_sum", json=members).status_code == 413
    request = b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    assert raw_exchange(server, request % 2**40).startswith(b"HTTP/1.1 413 ")
    grown = {reason: refused(reason) - count for reason, count in before.items()}
    assert grown == {"body": 1, "memory": 1, "queue_full": 0}


def test_the_examples_of_the_documentation_run_as_they_stand(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    examples = [
        # An example of /v2 names its model in its last word.
        (method, path.format(model=example["summary"].rsplit(" ", 1)[-1], name="documented"), example)
        for path, operations in document["paths"].items()
        for method in ("put", "post")
        for content in [operations.get(method, {}).get("requestBody", {}).get("content", {})]
        for example in content.get(JSON, {}).get("examples", {}).values()
    ]
    assert len(examples) >= 12
    # What is kept by a name comes before what is computed with it.
    for method, path, example in sorted(examples, key=lambda each: each[0] != "put"):
        answer = client.request(method, path, json=example["value"])
        is_refused = example["summary"].startswith("Refused")
        assert answer.status_code == 422 if is_refused else answer.is_success, (path, example, answer.text)
    assert client.delete("/v1/layers/documented").status_code == 204


def test_the_documentation_needs_nothing_from_elsewhere(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) >= 3
    for link in links:
        assert link.startswith("/docs/static/")
        assert client.get(link).status_code == 200
    assert "http://" not in page.text
    assert "https://" not in page.text


def test_references_of_the_document_lead_somewhere(client: httpx.Client) -> None:
    text = client.get("/openapi.json").text
    schemas = json.loads(text)["components"]["schemas"]
    for reference in set(re.findall(r'"#/components/schemas/([^"]+)"', text)):
        assert reference in schemas
    assert "HTTPValidationError" not in text


def test_what_is_no_http_is_counted(server: RunningServer, client: httpx.Client) -> None:
    def count() -> str:
        lines = client.get("/metrics").text.splitlines()
        return next((line for line in lines if line.startswith(series)), "")

    series = 'attn_requests_total{outcome="malformed",route="other"}'
    before = count()
    with Caller(server.port) as caller:
        caller.send(b"garbage garbage\r\n\r\n")
        assert caller.until_closed().startswith(b"HTTP/1.1 400 ")
    assert count() != before
