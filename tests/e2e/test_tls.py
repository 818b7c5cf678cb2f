"""TLS on both doors: nothing else is spoken there, and who must show a certificate shows it at the handshake."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from rich.console import Console

from service.ask import AskError, ask
from service.credentials import CommandError, Credentials
from service.load.arrivals import ClosedLoop
from service.load.problems import read_shape
from service.load.progress import ShownProgress
from service.load.run import LoadPlan, run_load
from service.main import StartError, read_tls
from service.settings import read_settings
from tests.support.bodies import SAFETENSORS, safetensors_body
from tests.support.certificates import Authority, Certificate
from tests.support.roads import WAIT_S, body_of, get
from tests.support.server import START_S, RunningServer, server_environment, spawn

KEY = "the-key"
SERVER_LIVE = "/inference.GRPCInferenceService/ServerLive"
METADATA = "/inference.GRPCInferenceService/ServerMetadata"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="module")
def callers_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("callers"), "callers")


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Certificate:
    return authority.sign("server")


@pytest.fixture(scope="module")
def member(callers_authority: Authority) -> Certificate:
    """Of a caller whom the stricter server lets in."""
    return callers_authority.sign("member")


def settings_of(certificate: Certificate, **more: str) -> dict[str, str]:
    return {
        "ATTN_TLS_CERTIFICATE_FILE": str(certificate.file),
        "ATTN_TLS_KEY_FILE": str(certificate.key_file),
        **more,
    }


def context_of(authority: Authority, shown: Certificate | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    if shown is not None:
        context.load_cert_chain(shown.file, shown.key_file)
    return context


def https(server: RunningServer, context: ssl.SSLContext) -> httpx.Client:
    return httpx.Client(base_url=f"https://localhost:{server.port}", verify=context, timeout=WAIT_S)


@contextmanager
def ready(context: ssl.SSLContext, settings: dict[str, str]) -> Iterator[RunningServer]:
    """A server that is up; at the end it stops in order and has called nothing a mistake."""
    server = spawn(**settings)
    try:
        end = time.monotonic() + START_S
        with https(server, context) as client:
            while client.get("/readyz").status_code != 200:
                assert time.monotonic() < end
        yield server
        server.terminate()
        assert server.wait() == 0
        # To be asked before it was ready is none.
        said = [entry for entry in server.log if entry.get("logger") != "attn.request"]
        assert not [entry for entry in said if entry["level"] != "info"]
    finally:
        server.end()


@pytest.fixture(scope="module")
def server(authority: Authority, certificate: Certificate) -> Iterator[RunningServer]:
    """TLS and keys."""
    with ready(context_of(authority), settings_of(certificate, ATTN_API_KEYS=KEY)) as running:
        yield running


@pytest.fixture(scope="module")
def strict(
    authority: Authority, callers_authority: Authority, certificate: Certificate, member: Certificate
) -> Iterator[RunningServer]:
    """Callers must show a certificate."""
    settings = settings_of(certificate, ATTN_TLS_CLIENT_CA_FILE=str(callers_authority.file))
    with ready(context_of(authority, member), settings) as running:
        yield running


def called(
    server: RunningServer,
    method: str,
    credentials: grpc.ChannelCredentials | None,
    *metadata: tuple[str, str],
) -> grpc.StatusCode:
    address = f"localhost:{server.grpc_port}"
    opened = grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
    with opened as channel:
        try:
            channel.unary_unary(method)(b"", metadata=metadata, timeout=WAIT_S)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def test_a_request_over_tls_is_answered_and_needs_its_key_there_too(
    server: RunningServer, authority: Authority
) -> None:
    headers = {"content-type": SAFETENSORS}
    with https(server, context_of(authority)) as client:
        assert client.get("/livez").status_code == 200
        assert client.post("/v1/attention", content=body_of(), headers=headers).status_code == 401
        for _ in range(2):
            answer = client.post("/v1/attention", content=body_of(), headers=headers | {"x-api-key": KEY})
            assert answer.status_code == 200


def test_grpc_over_tls_is_answered_and_needs_its_key_there_too(server: RunningServer, authority: Authority) -> None:
    credentials = grpc.ssl_channel_credentials(root_certificates=authority.pem)
    assert called(server, SERVER_LIVE, credentials) is grpc.StatusCode.OK
    assert called(server, METADATA, credentials) is grpc.StatusCode.UNAUTHENTICATED
    assert called(server, METADATA, credentials, ("authorization", f"Bearer {KEY}")) is grpc.StatusCode.OK


@pytest.mark.parametrize("form", ["safetensors", "grpc"])
def test_a_load_test_shows_its_key_and_knows_the_server(server: RunningServer, authority: Authority, form: str) -> None:
    plan = LoadPlan(
        url=f"https://localhost:{server.grpc_port if form == 'grpc' else server.port}",
        forms=(form,),
        shapes=(read_shape("1,1,4,4"),),
        loops=(ClosedLoop(concurrency=1),),
        duration_s=0.2,
        warm_up_s=0.0,
        ceiling_s=0.0,
        credentials=Credentials(key=KEY, ca=authority.file),
    )
    progress = ShownProgress(Console(quiet=True))
    (step,) = run_load(plan, progress).steps
    assert step.answered and not step.failed and step.checked is not None and step.checked.is_right
    with pytest.raises(CommandError, match=r"401|UNAUTHENTICATED"):
        run_load(replace(plan, credentials=Credentials(ca=authority.file)), progress)


@pytest.mark.parametrize(
    "said",
    [get("/livez"), get("/livez") * 1000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", b"\0" * 70_000, b""],
    ids=["HTTP", "much HTTP", "HTTP/2", "half a hello", "noise", "nothing"],
)
def test_who_speaks_something_else_is_hung_up_on_and_nobody_else_notices(
    server: RunningServer, authority: Authority, said: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as caller:
        try:
            caller.sendall(said)
            caller.shutdown(socket.SHUT_WR)
            heard = caller.recv(1000)
        except ConnectionError:
            heard = b""
    # At most an alert of TLS.
    assert b"HTTP" not in heard
    with https(server, context_of(authority)) as client:
        assert client.get("/livez").status_code == 200


def test_grpc_without_tls_is_refused(server: RunningServer) -> None:
    assert called(server, SERVER_LIVE, None) is grpc.StatusCode.UNAVAILABLE


def test_the_server_is_known_by_its_certificate(server: RunningServer, callers_authority: Authority) -> None:
    with https(server, context_of(callers_authority)) as client, pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        client.get("/livez")
    credentials = grpc.ssl_channel_credentials(root_certificates=callers_authority.pem)
    assert called(server, SERVER_LIVE, credentials) is grpc.StatusCode.UNAVAILABLE


def test_who_shows_a_certificate_of_the_right_authority_is_let_in(
    strict: RunningServer, authority: Authority, member: Certificate
) -> None:
    with https(strict, context_of(authority, member)) as client:
        answer = client.post("/v1/attention", content=body_of(), headers={"content-type": SAFETENSORS})
        assert answer.status_code == 200
    credentials = grpc.ssl_channel_credentials(authority.pem, member.key_pem, member.pem)
    assert called(strict, METADATA, credentials) is grpc.StatusCode.OK


@pytest.mark.parametrize("shown", ["nothing", "another authority's"])
def test_who_shows_nothing_or_something_else_is_refused_at_the_handshake(
    strict: RunningServer, authority: Authority, certificate: Certificate, shown: str
) -> None:
    # The server's own: its authority is none for callers.
    other = certificate if shown != "nothing" else None
    with https(strict, context_of(authority, other)) as client, pytest.raises(httpx.TransportError):
        client.get("/livez")
    credentials = grpc.ssl_channel_credentials(
        authority.pem, None if other is None else other.key_pem, None if other is None else other.pem
    )
    assert called(strict, SERVER_LIVE, credentials) is grpc.StatusCode.UNAVAILABLE


def test_who_never_ends_the_handshake_does_not_hold_up_the_end(authority: Authority, certificate: Certificate) -> None:
    with ready(context_of(authority), settings_of(certificate, ATTN_DRAIN_TIMEOUT_S="1")) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        try:
            silent[1].sendall(b"\x16\x03\x01\x02\x00\x01")
            server.terminate()
            assert server.wait(20.0) == 0
        finally:
            for caller in silent:
                caller.close()


def test_an_idle_connection_does_not_hold_up_the_end(authority: Authority, certificate: Certificate) -> None:
    with ready(context_of(authority), settings_of(certificate, ATTN_DRAIN_TIMEOUT_S="20")) as server:
        raw = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
        with context_of(authority).wrap_socket(raw, server_hostname="localhost") as idle:
            idle.sendall(get("/livez"))
            assert idle.recv(2**16).startswith(b"HTTP/1.1 200 ")
            began = time.monotonic()
            server.terminate()
            assert server.wait(30.0) == 0
            assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("name", ["ATTN_TLS_CERTIFICATE_FILE", "ATTN_TLS_KEY_FILE", "ATTN_TLS_CLIENT_CA_FILE"])
def test_a_file_that_is_none_is_named_by_its_setting(tmp_path: Path, certificate: Certificate, name: str) -> None:
    noise = tmp_path / "noise.pem"
    noise.write_text("noise")
    with pytest.raises(StartError, match=r"^cannot speak TLS: ") as caught:
        read_tls(read_settings(settings_of(certificate) | {name: str(noise)}))
    assert str(noise) in str(caught.value)


def test_a_file_that_is_none_stops_the_start_and_is_named(tmp_path: Path, certificate: Certificate) -> None:
    noise = tmp_path / "noise.pem"
    noise.write_text("noise")
    ended = subprocess.run(
        [sys.executable, "-m", "service", "serve", "--port", "0"],
        env=server_environment(**settings_of(certificate, ATTN_TLS_CLIENT_CA_FILE=str(noise)), ATTN_GRPC_PORT="0"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 1
    assert f"attn: cannot speak TLS: {noise} " in ended.stderr or f"attn: cannot speak TLS: {noise}\n" in ended.stderr
    assert "Traceback" not in ended.stderr


def asks(server: RunningServer, folder: Path, **credentials: Any) -> dict[str, Any]:
    file = folder / "problem.safetensors"
    file.write_bytes(safetensors_body({"query": torch.ones(1, 1, 2, 2)}, {}))
    _, info = ask(
        [str(file)],
        url=f"https://localhost:{server.port}",
        path="/v1/attention",
        options=[],
        outputs=None,
        save=None,
        credentials=Credentials(**credentials),
    )
    return info


def test_the_command_speaks_tls(
    server: RunningServer, strict: RunningServer, authority: Authority, member: Certificate, tmp_path: Path
) -> None:
    assert asks(server, tmp_path, ca=authority.file, key=KEY)["path"]
    shown = {"certificate": member.file, "certificate_key": member.key_file}
    assert asks(strict, tmp_path, ca=authority.file, **shown)["path"]
    with pytest.raises(AskError, match="certificate verify failed"):
        asks(server, tmp_path, key=KEY)
    with pytest.raises(AskError, match="no answer from"):
        asks(strict, tmp_path, ca=authority.file)


@pytest.mark.parametrize("option", ["ca", "certificate"])
def test_the_command_names_a_file_that_is_no_certificate(server: RunningServer, tmp_path: Path, option: str) -> None:
    for content in (None, "", "noise"):
        file = tmp_path / "file.pem"
        if content is not None:
            file.write_text(content)
        with pytest.raises(CommandError, match=r"^--c.*file\.pem: "):
            asks(server, tmp_path, **{option: file})


def test_the_command_asks_nobody_for_the_password_of_a_key(
    server: RunningServer, callers_authority: Authority, tmp_path: Path
) -> None:
    locked = callers_authority.sign("locked", password=b"secret")
    with pytest.raises(CommandError, match=r"^--cert .*locked\.pem --cert-key .*locked\.key: "):
        asks(server, tmp_path, certificate=locked.file, certificate_key=locked.key_file)
    with pytest.raises(CommandError, match="--cert-key needs --cert"):
        asks(server, tmp_path, certificate_key=locked.key_file)
