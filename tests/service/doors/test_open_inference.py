"""The REST door of the Open Inference Protocol in states that only a test can bring about."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import threading
import zlib
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import httpx
import pytest
import torch

from attn_core import Engine
from service.doors.peer import is_loopback_address
from tests.support.in_process import GatedEngine, InProcess, service_in_process
from tests.support.inference import binary_body, json_body, raw, read_answer, said

INFER = "/v2/models/sdpa/infer"
TENSORS = {name: torch.eye(4).view(1, 1, 4, 4) for name in ("query", "key", "value")}


def client_of(service: InProcess) -> httpx.Client:
    return httpx.Client(base_url=service.url, timeout=30)


def error_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    text: str = answer.json()["error"]
    return text


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.200.0.9", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("unix:", True),
        ("unix:/tmp/socket", True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("localhost", False),
        ("", False),
        (None, False),
    ],
)
def test_loopback_is_told_by_the_address_alone(host: str | None, is_loopback: bool) -> None:
    assert is_loopback_address(host) is is_loopback


@pytest.mark.parametrize("state", ["starting", "device lost", "draining"])
def test_health_answers_while_everything_else_is_refused(state: str) -> None:
    with service_in_process(GatedEngine(), start_engine=False) as service, client_of(service) as client:
        lifecycle = service.parts.lifecycle
        if state == "device lost":
            service.call(lambda: lifecycle.mark_lost(RuntimeError("gone")))
        elif state == "draining":
            service.call(lambda: asyncio.ensure_future(lifecycle.drain(notice_s=30, timeout_s=30)))
            while lifecycle.state.value != state:
                pass
        assert client.get("/v2/health/live").json() == {"live": True}
        for path in ("/v2/health/ready", "/v2/models/sdpa/ready"):
            assert state in error_of(client.get(path), 503)
        error_of(client.get("/v2/models/nope/ready"), 404)
        assert client.get("/v2/models/sdpa").status_code == 200
        index = client.post("/v2/repository/index").json()
        assert {(each["state"], each["reason"]) for each in index} == {("UNAVAILABLE", state)}
        assert client.post("/v2/repository/index", content=b'{"ready":true}').json() == []
        answer = client.post(INFER, content=json_body(TENSORS))
        error_of(answer, 503)
        assert answer.headers["retry-after"] == "1"


def test_a_full_server_says_unavailable_and_when_to_come_again() -> None:
    engine = GatedEngine()
    with service_in_process(engine, max_requests_inside=1) as service, client_of(service) as client:
        answers: list[httpx.Response] = []
        first = threading.Thread(
            target=lambda: answers.append(httpx.post(service.url + INFER, content=json_body(TENSORS)))
        )
        first.start()
        engine.wait_until_entered()
        answer = client.post(INFER, content=json_body(TENSORS))
        error_of(answer, 503)
        assert int(answer.headers["retry-after"]) >= 1
        assert client.get("/v2/health/ready").status_code == 200
        engine.open()
        first.join()
        assert [each.status_code for each in answers] == [200]


def test_what_waits_longer_than_its_timeout_is_refused_and_counted_as_failed() -> None:
    engine = GatedEngine()
    with service_in_process(engine) as service, client_of(service) as client:
        first = threading.Thread(target=httpx.post, args=(service.url + INFER,), kwargs={"content": json_body(TENSORS)})
        first.start()
        engine.wait_until_entered()
        answer = client.post(INFER, content=json_body(TENSORS, parameters={"timeout": 1000}))
        error_of(answer, 503)
        engine.open()
        first.join()
        figures = client.get("/v2/models/sdpa/stats").json()["model_stats"][0]["inference_stats"]
        assert (figures["success"]["count"], figures["fail"]["count"]) == (1, 1)


def test_a_mistake_of_the_engine_is_a_text_and_counted_as_failed() -> None:
    engine = GatedEngine()
    engine.failure = RuntimeError("secret")
    engine.open()
    with service_in_process(engine) as service, client_of(service) as client:
        assert "secret" not in error_of(client.post(INFER, content=json_body(TENSORS)), 500)
        figures = client.get("/v2/models/sdpa/stats").json()["model_stats"][0]["inference_stats"]
        assert (figures["success"]["count"], figures["fail"]["count"]) == (0, 1)


def test_text_without_workers_takes_the_same_road() -> None:
    engine = Engine(device="cpu", max_threads=1)
    tensors = {name: torch.rand(1, 2, 300, 16) for name in ("query", "key", "value")}
    with service_in_process(engine, text_workers=0) as service, client_of(service) as client:
        written = read_answer(client.post(INFER, content=json_body(tensors)))[1]
        body, headers = binary_body(tensors, parameters={"binary_data_output": True})
        binary = read_answer(client.post(INFER, content=body, headers=headers))[1]
        assert raw(written["context"]) == raw(binary["context"])


def test_a_body_over_the_limit_is_refused_at_its_head_and_while_it_is_read() -> None:
    with service_in_process(GatedEngine(), max_body_bytes=4096) as service, client_of(service) as client:
        error_of(client.post(INFER, content=bytes(5000)), 413)
        error_of(client.post(INFER, content=iter([bytes(3000), bytes(3000)])), 413)
        error_of(client.post("/v2/repository/index", content=bytes(5000)), 413)
        for coding, sent in (("gzip", gzip.compress(bytes(5000))), ("deflate", zlib.compress(bytes(5000)))):
            error_of(client.post(INFER, content=sent, headers={"content-encoding": coding}), 413)


# Shared memory


@contextlib.contextmanager
def shared(data: bytes, size: int) -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=size)
    try:
        assert memory.buf is not None
        memory.buf[: len(data)] = data
        yield memory
    finally:
        memory.close()
        memory.unlink()


@pytest.fixture
def with_memory() -> Iterator[httpx.Client]:
    engine = Engine(device="cpu", max_threads=1)
    with service_in_process(engine, shared_memory=True) as service, client_of(service) as client:
        while client.get("/v2/health/ready").status_code != 200:
            pass
        yield client


def test_tensors_in_shared_memory_never_cross_the_socket(with_memory: httpx.Client) -> None:
    client = with_memory
    assert "system_shared_memory" in client.get("/v2").json()["extensions"]
    size = TENSORS["query"].nbytes
    with shared(b"".join(map(raw, TENSORS.values())), 4096) as memory:
        registered: dict[str, Any] = {"key": f"/{memory.name.lstrip('/')}", "byte_size": 4 * size, "offset": 0}
        answer = client.post("/v2/systemsharedmemory/region/a%20b/register", json=registered)
        assert (answer.status_code, answer.content) == (200, b"")
        wanted = [{"name": "a b", **registered}]
        for path in ("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/a%20b/status"):
            status = client.get(path).json()
            assert [{name: region[name] for name in wanted[0]} for region in status] == wanted

        def place(index: int) -> dict[str, Any]:
            return {
                "shared_memory_region": "a b",
                "shared_memory_offset": index * size,
                "shared_memory_byte_size": size,
            }

        inputs = [said(name, TENSORS[name], parameters=place(index)) for index, name in enumerate(TENSORS)]
        outputs = [{"name": "context", "parameters": place(3)}]
        answer = client.post(INFER, json={"inputs": inputs, "outputs": outputs})
        assert answer.json()["outputs"] == [{"name": "context", "datatype": "FP32", "shape": [1, 1, 4, 4]}]
        inline = read_answer(client.post(INFER, content=json_body(TENSORS)))[1]["context"]
        assert memory.buf is not None and bytes(memory.buf[3 * size : 4 * size]) == raw(inline)
        error_of(client.post("/v2/systemsharedmemory/region/a%20b/register", json=registered), 400)
        assert client.post("/v2/systemsharedmemory/region/a%20b/unregister").content == b""
        error_of(client.post(INFER, json={"inputs": inputs, "outputs": outputs}), 404)
        error_of(client.get("/v2/systemsharedmemory/region/a%20b/status"), 404)
        assert client.post("/v2/systemsharedmemory/unregister").status_code == 200
        assert client.get("/v2/systemsharedmemory/status").json() == []


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"key": 5, "byte_size": 8},
        {"key": "/x", "byte_size": "8"},
        {"key": "/x", "byte_size": 8.0},
        {"key": "/x", "byte_size": True},
        {"key": "/x", "byte_size": -1},
        {"key": "/x", "byte_size": 8, "offset": "0"},
        {"key": "/x", "byte_size": 8, "offset": -1},
        {"key": "/nothing-that-is-there", "byte_size": 8},
    ],
)
def test_a_region_is_registered_by_a_name_and_whole_numbers(with_memory: httpx.Client, members: dict[str, Any]) -> None:
    error_of(with_memory.post("/v2/systemsharedmemory/region/r/register", json=members), 400)


def test_whom_a_proxy_speaks_for_decides_about_shared_memory(with_memory: httpx.Client) -> None:
    headers = {"x-forwarded-for": "10.0.0.1"}
    error_of(with_memory.get("/v2/systemsharedmemory/status", headers=headers), 501)
    assert with_memory.get("/v2/systemsharedmemory/status").json() == []
