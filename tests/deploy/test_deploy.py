"""What runs the image keeps its promises, and speaks of settings and series that exist."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from service.failures import FAILURES, INTERNAL
from service.settings import PREFIX, Settings, read_settings
from service.telemetry import STAGES, Metrics
from tests.support.certificates import Authority

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
ENGINE_AND_EXIT_S = 5.0


class _ComposeLoader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML with Compose's own tag."""


_ComposeLoader.add_constructor("!reset", lambda loader, node: None)


def _read_yaml(path: Path) -> Any:
    return yaml.load(path.read_text(), _ComposeLoader)


def _instructions() -> list[tuple[str, str]]:
    """(keyword, rest) of each instruction of the Dockerfile."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def _runtime() -> list[tuple[str, str]]:
    """The instructions of the last stage: what the image is."""
    instructions = _instructions()
    last = max(index for index, (keyword, _) in enumerate(instructions) if keyword == "FROM")
    return instructions[last:]


def _runtime_environment() -> dict[str, str]:
    text = " ".join(rest for keyword, rest in _runtime() if keyword == "ENV")
    return dict(pair.split("=", 1) for pair in text.split())


def _healthcheck() -> list[str]:
    (rest,) = [rest for keyword, rest in _runtime() if keyword == "HEALTHCHECK"]
    command: list[str] = json.loads(rest.split("CMD", 1)[1])
    return command


def _defaults() -> dict[str, str]:
    """The build arguments and what they are when nobody gives them."""
    pairs = [rest.split("=", 1) for keyword, rest in _instructions() if keyword == "ARG"]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _expressions() -> dict[str, str]:
    groups = _read_yaml(DEPLOY / "alerts.yaml")["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def _series() -> set[str]:
    metrics = Metrics()
    metrics.watch_memory(lambda: {"limit": 1.0})
    return {family.name + suffix for family in metrics.registry.collect() for suffix in SUFFIXES[family.type]}


def _seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def test_the_image_runs_as_a_numeric_user_that_is_not_root() -> None:
    (user,) = [rest for keyword, rest in _runtime() if keyword == "USER"]
    uid, gid = map(int, user.split(":"))
    assert uid >= 1000
    assert gid >= 1000


@pytest.mark.parametrize("keyword", ["ENTRYPOINT", "CMD"])
def test_the_image_starts_without_a_shell(keyword: str) -> None:
    (command,) = [json.loads(rest) for found, rest in _runtime() if found == keyword]
    assert command == {"ENTRYPOINT": ["/usr/bin/tini", "--"], "CMD": ["attn", "serve"]}[keyword]


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_healthcheck_says_what_readyz_says(status: int, code: int) -> None:
    asked = []

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Door) as server:
        server.timeout = 20
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        # A proxy that is not there: whoever asks it fails.
        environment = {"ATTN_PORT": str(server.server_port), "http_proxy": "http://127.0.0.1:1"}
        program, *arguments = _healthcheck()
        assert program == "python"
        answer = subprocess.run([sys.executable, *arguments], env=environment, check=False, timeout=20)
        thread.join()
    assert asked == ["/readyz"]
    assert answer.returncode == code


def test_the_healthcheck_speaks_tls_where_the_service_does(tmp_path: Path) -> None:
    certificate = Authority(tmp_path).sign("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.file, certificate.key_file)

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Door) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.timeout = 20
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        environment = {"ATTN_PORT": str(server.server_port), "ATTN_TLS_CERTIFICATE_FILE": str(certificate.file)}
        answer = subprocess.run([sys.executable, *_healthcheck()[1:]], env=environment, check=False, timeout=20)
        thread.join()
    assert answer.returncode == 0


def test_the_image_shows_the_port_of_each_door() -> None:
    environment = _runtime_environment()
    assert ("EXPOSE", f"{environment['ATTN_PORT']} {environment['ATTN_GRPC_PORT']}") in _runtime()
    published = _read_yaml(DEPLOY / "compose.yaml")["services"]["attn"]["ports"]
    assert {port.rsplit(":", 1)[1] for port in published} == {environment["ATTN_PORT"], environment["ATTN_GRPC_PORT"]}


def test_compose_knows_no_key_of_its_own() -> None:
    environment = _read_yaml(DEPLOY / "compose.yaml")["services"]["attn"]["environment"]
    assert environment["ATTN_API_KEYS"] is None


def test_the_image_needs_no_curl() -> None:
    assert "curl" not in " ".join(rest for _, rest in _instructions())


def test_the_image_stops_by_the_signal_that_drains() -> None:
    assert ("STOPSIGNAL", "SIGTERM") in _runtime()


def test_the_image_writes_nothing_outside_tmp() -> None:
    environment = _runtime_environment()
    assert environment["HOME"] == "/tmp"
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert not [rest for keyword, rest in _runtime() if keyword == "VOLUME"]


def test_the_image_sets_only_settings_that_exist() -> None:
    _check_settings(_runtime_environment())


def test_the_image_has_the_versions_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert _defaults()["VERSION"] == project["version"]
    assert _defaults()["TORCH_SPEC"] in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_build_sees_what_the_image_is_made_of_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    let_in = {line[1:] for line in lines if line.startswith("!")}
    copied = [
        source
        for keyword, rest in _instructions()
        if keyword == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert let_in == set(copied)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cpu.yaml"])
def test_compose_sets_only_settings_that_exist(name: str) -> None:
    for service in _read_yaml(DEPLOY / name)["services"].values():
        _check_settings(service.get("environment", {}))


def test_compose_gives_build_arguments_that_the_dockerfile_takes() -> None:
    arguments = _read_yaml(DEPLOY / "compose.cpu.yaml")["services"]["attn"]["build"]["args"]
    assert arguments.keys() <= _defaults().keys()


def test_compose_waits_longer_than_a_drain_may_take() -> None:
    attn = _read_yaml(DEPLOY / "compose.yaml")["services"]["attn"]
    settings = _check_settings(attn["environment"])
    assert _seconds(attn["stop_grace_period"]) >= settings.drain_timeout_s + ENGINE_AND_EXIT_S


def test_compose_takes_every_privilege_away() -> None:
    for service in _read_yaml(DEPLOY / "compose.yaml")["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        # Without keys the service knows no callers.
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_prometheus_scrapes_the_service_at_the_port_of_the_image() -> None:
    config = _read_yaml(DEPLOY / "prometheus.yaml")
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"attn:{_runtime_environment()['ATTN_PORT']}"]}]
    mounted = [
        volume.split(":")[0] for volume in _read_yaml(DEPLOY / "compose.yaml")["services"]["prometheus"]["volumes"]
    ]
    assert {"./prometheus.yaml", *(f"./{name}" for name in config["rule_files"])} <= set(mounted)
    assert all((DEPLOY / name).is_file() for name in config["rule_files"])


@pytest.mark.parametrize("alert", _expressions())
def test_an_alert_reads_series_and_labels_that_exist(alert: str) -> None:
    expression = _expressions()[alert]
    assert set(re.findall(r"\battn_\w+", expression)) <= _series()
    outcomes = {failure.name for failure in FAILURES.values()} | {INTERNAL.name}
    assert set(re.findall(r'outcome="([^"]+)"', expression)) <= outcomes
    assert set(re.findall(r'stage="([^"]+)"', expression)) <= set(STAGES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
def test_alerts_fire_for_what_they_are_for_and_not_otherwise() -> None:
    subprocess.run(["promtool", "check", "config", DEPLOY / "prometheus.yaml"], check=True)
    subprocess.run(["promtool", "test", "rules", Path(__file__).with_name("alerts_fire.yaml")], check=True)


def _check_settings(environment: Mapping[str, str | None]) -> Settings:
    """Each ATTN_ variable is a setting, with a value it takes; one without a value is taken from outside."""
    named = {name: text for name, text in environment.items() if name.startswith(PREFIX)}
    assert {name.removeprefix(PREFIX).lower() for name in named} <= Settings.model_fields.keys()
    return read_settings({name: text for name, text in named.items() if text is not None})
