"""The door of layers that are kept by a name, in states that only a test can bring about."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from attn_core.problem import LayerParameters
from service.doors.layers import read_replace
from service.layer_directory import LayerDirectory
from tests.support.bodies import SAFETENSORS, read_answer, safetensors_body
from tests.support.factory import make_tensor
from tests.support.in_process import WAIT_S, GatedEngine, InProcess, service_in_process
from tests.support.kept_layers import GatedDirectory, make_parameters, options_of
from tests.support.roads import Caller, calls_to, port_of

HEADERS = {"content-type": SAFETENSORS}


def body_of(parameters: LayerParameters) -> bytes:
    return safetensors_body(dict(parameters.weights), options_of(parameters))


def put(client: httpx.Client, parameters: LayerParameters, query: str = "") -> httpx.Response:
    return client.put(f"/v1/layers/first{query}", content=body_of(parameters), headers=HEADERS)


def forward(client: httpx.Client) -> torch.Tensor:
    body = safetensors_body({"input": make_tensor(1, 4, 6, seed=9)}, {})
    answer = client.post("/v1/layers/first/forward", content=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return read_answer(answer.content, SAFETENSORS, {})[0]["output"]


@pytest.mark.parametrize(
    ("query", "may_replace", "fields"),
    [
        (b"", False, []),
        (b"replace=true", True, []),
        (b"replace=false", False, []),
        (b"replace", False, ["?replace"]),
        (b"replace=TRUE", False, ["?replace"]),
        (b"replace=true&replace=false", True, ["?replace"]),
        (b"replace=true&x&y=1", True, ["?x", "?y"]),
        (b"r%65place=tru%65", True, []),
    ],
)
def test_the_url_says_whether_a_layer_may_be_replaced_and_nothing_else(
    query: bytes, may_replace: bool, fields: list[str]
) -> None:
    found, faults = read_replace(query)
    assert [fault.field for fault in faults] == fields
    if not faults:
        assert found is may_replace


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_a_request_that_runs_finishes_on_the_layer_it_began_with(change: str) -> None:
    engine = GatedEngine()
    old, new = make_parameters(seed=1), make_parameters(seed=2)
    with service_in_process(engine) as service, calls_to(service) as client, ThreadPoolExecutor(2) as threads:
        put(client, old)
        running = threads.submit(forward, client)
        engine.wait_until_entered()
        if change == "replace":
            assert put(client, new, "?replace=true").status_code == 200
        else:
            assert client.delete("/v1/layers/first").status_code == 204
            assert put(client, new).status_code == 201
        later = threads.submit(forward, client)
        engine.open()
        outputs = running.result(WAIT_S), later.result(WAIT_S)
        put(client, old, "?replace=true")
        assert torch.equal(outputs[0], forward(client))
        put(client, new, "?replace=true")
        assert torch.equal(outputs[1], forward(client))
        assert not torch.equal(*outputs)


def test_a_drain_refuses_changes_and_computing_and_still_shows_layers() -> None:
    with service_in_process(GatedEngine()) as service, calls_to(service) as client:
        assert put(client, make_parameters()).status_code == 201
        lifecycle = service.parts.lifecycle
        service.call(lambda: asyncio.ensure_future(lifecycle.drain(notice_s=30, timeout_s=30)))
        refused = [
            put(client, make_parameters(seed=2)),
            client.delete("/v1/layers/first"),
            client.post("/v1/layers/first/forward", json={"input": [[0] * 6]}),
        ]
        for answer in refused:
            assert answer.status_code == 503
            assert answer.json()["type"] == "/errors/unavailable"
            assert int(answer.headers["retry-after"]) >= 1
        assert client.get("/v1/layers/first").status_code == 200
        assert len(client.get("/v1/layers").json()["layers"]) == 1


def until(service: InProcess, holds: Any) -> None:
    while not service.call(holds):
        pass


def test_an_upload_counts_while_it_is_read() -> None:
    body = body_of(make_parameters(width=64))
    with service_in_process(GatedEngine()) as service, calls_to(service) as client:
        admission = service.parts.admission
        with Caller(port_of(service)) as caller:
            head = f"PUT /v1/layers/first HTTP/1.1\r\nHost: x\r\nContent-Type: {SAFETENSORS}\r\n"
            caller.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:1000])
            until(service, lambda: admission.body_bytes_inside == len(body))
            assert service.call(lambda: admission.requests_inside) == 1
            caller.send(body[1000:])
            assert caller.reply().status == 201
        until(service, lambda: admission.requests_inside == 0)
        assert service.call(lambda: admission.body_bytes_inside) == 0
        assert client.get("/v1/layers/first").status_code == 200


def test_a_layer_whose_sender_left_while_it_was_written_is_not_kept(tmp_path: Path) -> None:
    directory = GatedDirectory(tmp_path)
    with service_in_process(GatedEngine()) as service, calls_to(service) as client:
        layers, lifecycle = service.parts.layers, service.parts.lifecycle
        layers._directory = directory
        body = body_of(make_parameters())
        with Caller(port_of(service)) as caller:
            head = f"PUT /v1/layers/first HTTP/1.1\r\nHost: x\r\nContent-Type: {SAFETENSORS}\r\n"
            caller.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert directory.entered.wait(WAIT_S)
            # Others are answered meanwhile.
            assert client.get("/v1/layers").json() == {"layers": []}
            caller.reset()
            until(service, lambda: lifecycle.inside == 0)
        directory.gate.set()
        assert service.run(lambda: layers.close(WAIT_S))
        assert client.get("/v1/layers").json() == {"layers": []}
        assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_told_with_503(tmp_path: Path) -> None:
    with service_in_process(GatedEngine()) as service, calls_to(service) as client:
        service.parts.layers._directory = LayerDirectory(tmp_path / "gone")
        answer = put(client, make_parameters())
        assert answer.status_code == 503
        assert answer.json()["detail"] == "layer first cannot be written: No such file or directory"
        assert client.get("/v1/layers").json() == {"layers": []}
