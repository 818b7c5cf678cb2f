"""Keys: where they are set, every path and every method asks for one, whatever it is called; only health does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch

from service.ask import Refused, ask
from service.credentials import CommandError, Credentials
from service.doors.exchange import OPEN_PATHS
from tests.support.bodies import safetensors_body, strict_json
from tests.support.every_call import METHODS, OPEN_METHODS, outcome, rest_calls
from tests.support.roads import BOTH, Caller, Reply, Road, body_of, request
from tests.support.server import RunningServer, running_server, server_environment

PLAIN_BODY = body_of()
KEYS = ("first-key-of-two", "second:key=of~two")
WRONG = "first-key-of-tw"
CREDENTIALS = [
    {"authorization": f"Bearer {KEYS[0]}"},
    {"authorization": f"bEARER {KEYS[1]}"},
    {"x-api-key": KEYS[0]},
    {"x-api-key": KEYS[1], "authorization": "Bearer wrong"},
]
NO_CREDENTIALS: list[dict[str, str]] = [
    {},
    {"authorization": f"Bearer {WRONG}"},
    {"authorization": KEYS[0]},
    {"authorization": f"Basic {KEYS[0]}"},
    {"x-api-key": WRONG},
    {"x-api-key": f"{KEYS[0]},{KEYS[1]}"},
    {"x-api-key": ""},
    {"cookie": f"x-api-key={KEYS[0]}"},
]


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    """A server with keys; whatever happens to it, none of them gets into its log."""
    with running_server(ATTN_API_KEYS=",".join(KEYS), ATTN_LOG_LEVEL="debug") as server:
        yield server
    for key in (*KEYS, WRONG):
        assert not [entry for entry in server.log if key in str(entry)]


@pytest.fixture(scope="module")
def caller(locked: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=locked.url, timeout=60.0) as client:
        yield client


@pytest.fixture(scope="module")
def channel(locked: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{locked.grpc_port}") as opened:
        yield opened


def assert_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    if answer.request.method == "HEAD":
        return
    body = strict_json(answer.content)
    if answer.request.url.path.startswith("/v2"):
        assert answer.headers["content-type"] == "application/json"
        assert body.keys() == {"error"}
        text = body["error"]
    else:
        assert answer.headers["content-type"] == "application/problem+json"
        assert body["type"] == "/errors/unauthenticated"
        text = body["detail"]
    assert "x-api-key" in text
    assert not any(key in answer.text for key in (*KEYS, WRONG))


def test_every_route_asks_for_a_key_but_health(caller: httpx.Client) -> None:
    calls = rest_calls(caller, CREDENTIALS[0])
    assert {("GET", path) for path in OPEN_PATHS} <= set(calls)
    for method, path in calls:
        if path in OPEN_PATHS:
            assert caller.request(method, path).status_code == 200
            continue
        for verb in {method, "GET", "HEAD", "OPTIONS", "POST"}:
            assert_refused(caller.request(verb, path))
        for headers in NO_CREDENTIALS:
            assert_refused(caller.request(method, path, headers=headers))
        for headers in CREDENTIALS:
            assert caller.request(method, path, headers=headers).status_code != 401


@pytest.mark.parametrize(
    "target",
    [
        "//livez/../v1",
        "//v1",
        "/livez/../v1",
        "/livez/%2e%2e/v1",
        "/./v1",
        "/livez/",
        "//livez",
        "/LIVEZ",
        "/livez%00",
        "/livez;/v1",
        "/v1?/livez",
        "/v1#/livez",
        "/v1?path=/livez",
        "/%76%31",
        "http://x/v1",
        "http://x/livez/../v1",
        "http://livez/v1",
        "*",
    ],
)
def test_no_way_to_write_a_target_gets_round_the_key(locked: RunningServer, target: str) -> None:
    with Caller(locked.port) as caller:
        caller.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert caller.reply().status in (400, 401)


@pytest.mark.parametrize("target", ["/livez", "/livez?x=/v1", "http://x/livez", "/%6civez"])
def test_health_is_open_however_its_own_path_is_written(locked: RunningServer, target: str) -> None:
    with Caller(locked.port) as caller:
        caller.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert caller.reply().status == 200


def answered(locked: RunningServer, road: Road, *headers: str) -> Reply:
    with Caller(locked.port) as caller:
        caller.send(request(road, PLAIN_BODY, *headers))
        return caller.reply()


@BOTH
@pytest.mark.parametrize("header", [f"Authorization: Bearer {KEYS[0]}", f"x-api-key: {KEYS[1]}"])
def test_both_roads_give_the_same_bits_with_a_key(locked: RunningServer, road: Road, header: str) -> None:
    assert answered(locked, road, header).data == answered(locked, road.other, f"X-API-KEY: {KEYS[0]}").data


def test_a_connection_has_no_key_only_its_requests_have(locked: RunningServer) -> None:
    key = f"x-api-key: {KEYS[0]}"
    with Caller(locked.port) as caller:
        for road in (Road.BINARY, Road.ASGI, Road.BINARY):
            texts = [request(road, PLAIN_BODY, *headers) for headers in ([key], [], [key], [f"x-api-key: {WRONG}"])]
            caller.send(b"".join(texts))
            assert [reply.status for reply in caller.replies(4)] == [200, 401, 200, 401]


@BOTH
def test_a_caller_without_a_key_is_refused_before_its_body_is_there(locked: RunningServer, road: Road) -> None:
    with Caller(locked.port) as caller:
        text = request(road, PLAIN_BODY, "Expect: 100-continue")
        caller.send(text[: -len(PLAIN_BODY)])
        reply = caller.reply()
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_grpc_asks_for_a_key_but_health(channel: grpc.Channel, method: str) -> None:
    if method in OPEN_METHODS:
        assert outcome(channel, method, {}) is grpc.StatusCode.OK
        return
    for metadata in NO_CREDENTIALS:
        assert outcome(channel, method, metadata) is grpc.StatusCode.UNAUTHENTICATED
    for metadata in CREDENTIALS:
        assert outcome(channel, method, metadata) is not grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_the_health_of_grpc_is_open(channel: grpc.Channel, method: str) -> None:
    assert outcome(channel, f"/grpc.health.v1.Health/{method}", {}) is grpc.StatusCode.OK


def test_a_refusal_over_grpc_says_how_to_send_a_key(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")(b"", metadata=[("x-api-key", WRONG)])
    assert "x-api-key" in caught.value.details()
    assert WRONG not in caught.value.details()


@pytest.mark.parametrize("keys", ["", " ", f"{KEYS[0]},", "a b"])
def test_an_empty_key_refuses_to_start(keys: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "service", "serve", "--port", "0"],
        env=server_environment(ATTN_API_KEYS=keys),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("attn: ATTN_API_KEYS: ")
    assert KEYS[0] not in ended.stderr + ended.stdout


def test_help_shows_no_key() -> None:
    environment = server_environment(ATTN_API_KEYS=KEYS[0], ATTN_CLIENT_KEY=KEYS[1])
    for command in ("serve", "ask"):
        ran = subprocess.run(
            [sys.executable, "-m", "service", command, "--help"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert not any(key in ran.stdout for key in KEYS)


@pytest.fixture
def problem(tmp_path: Path) -> str:
    file = tmp_path / "problem.safetensors"
    file.write_bytes(safetensors_body({"query": torch.ones(1, 1, 2, 2)}, {}))
    return str(file)


def asks(locked: RunningServer, problem: str, key: str | None) -> dict[str, Any]:
    _, info = ask(
        [problem],
        url=locked.url,
        path="/v1/attention",
        options=[],
        outputs=None,
        save=None,
        credentials=Credentials(key=key),
    )
    return info


def test_the_command_brings_its_key(locked: RunningServer, problem: str) -> None:
    assert asks(locked, problem, KEYS[0])["path"]
    assert asks(locked, problem, f" {KEYS[1]}\n")["path"]
    for key in (None, "", WRONG):
        with pytest.raises(Refused, match=r"^401: "):
            asks(locked, problem, key)
    with pytest.raises(CommandError) as caught:
        asks(locked, problem, "séc\nret")
    assert "ret" not in str(caught.value).replace("printable", "")


def test_the_command_reads_its_key_from_a_variable_of_its_own(locked: RunningServer, problem: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "service", "ask", problem, "--url", locked.url],
        env=server_environment(ATTN_CLIENT_KEY=KEYS[0]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "context" in ran.stdout


def test_the_document_says_how_a_key_is_sent(caller: httpx.Client, server: RunningServer) -> None:
    document = caller.get("/openapi.json", headers=CREDENTIALS[0]).json()
    assert document["security"] == [{"bearer": []}, {"header": []}]
    assert set(document["components"]["securitySchemes"]) == {"bearer", "header"}
    assert document["paths"]["/livez"]["get"]["security"] == []
    assert "security" not in httpx.get(f"{server.url}/openapi.json").json()
