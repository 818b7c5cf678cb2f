"""The README: its commands answer what it says, its Python runs, its table is the settings."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from service.cli import app
from service.settings import describe_settings
from tests.support.fixtures import forgotten
from tests.support.server import RunningServer

__all__ = ["forgotten"]

README = (Path(__file__).parents[2] / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
GRPC_ADDRESS = "127.0.0.1:8001"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands_and_answers() -> list[tuple[str, str]]:
    """Each curl command and the answer that stands under it."""
    return re.findall(r"```sh\n(curl [^`]*)```\n\n```json\n([^`]*)```", README)


def assert_as_written(answer: Any, written: Any) -> None:
    """Numbers within float32 rounding, which differs from machine to machine; what "..." left out is not looked at."""
    if isinstance(written, dict):
        for name, value in written.items():
            assert_as_written(answer[name], value)
    elif isinstance(written, list):
        assert len(answer) == len(written)
        for one, other in zip(answer, written, strict=True):
            assert_as_written(one, other)
    else:
        assert answer == (pytest.approx(written, abs=1e-6) if isinstance(written, float) else written)


@pytest.mark.parametrize(("command", "answer"), commands_and_answers())
def test_a_command_answers_as_written(server: RunningServer, command: str, answer: str) -> None:
    ran = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, server.url)], capture_output=True, text=True, check=True
    )
    assert_as_written(json.loads(ran.stdout), json.loads(answer.replace(",...", "")))


def test_there_are_commands_with_answers() -> None:
    assert len(commands_and_answers()) == 9


def run_example(example: str, server: RunningServer, folder: Path | None = None) -> str:
    """What it prints."""
    example = example.replace(ADDRESS, server.url).replace(GRPC_ADDRESS, f"127.0.0.1:{server.grpc_port}")
    command = [sys.executable, "-c", example]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout.strip()


def test_the_python_examples_run(server: RunningServer, tmp_path: Path) -> None:
    client, awaited, refused, picture, native, capture, hugging_face, _, inference = blocks("python")
    assert run_example(client, server) == "(1, 8, 128, 64) manual"
    assert run_example(awaited, server) == "(2, 16, 32) True"
    assert run_example(refused, server) in README
    assert run_example(picture, server, tmp_path) == "" and (tmp_path / "weights.png").stat().st_size > 1000
    shape, smallest_sum = run_example(native, server).rsplit(" ", 1)
    assert shape == "(1, 8, 128, 64)"
    assert float(smallest_sum) == pytest.approx(1.0, abs=1e-5)
    assert f"prints `{run_example(capture, server)}`" in README
    if importlib.util.find_spec("transformers"):
        assert run_example(hugging_face, server) == "True"
    assert run_example(inference, server) == "(1, 8, 128, 64) fused"


def test_the_table_of_settings_is_the_settings() -> None:
    rows = [f"| `{name}` | `{default}` | {meaning} |" for name, default, meaning in describe_settings()]
    table = README.split("<!-- settings -->\n")[1].split("<!-- /settings -->")[0].splitlines()
    assert table[2:] == rows


def test_the_files_are_made_and_every_command_answers_them(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files,) = (block for block in blocks("python") if "np.savez" in block)
    run_example(files, server, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTN_URL", server.url)
    (commands,) = (block for block in blocks("sh") if "attn ask --plan" in block)
    for command in commands.replace(ADDRESS, server.url).splitlines():
        ran = CliRunner().invoke(app, shlex.split(command)[1:])
        assert ran.exit_code == 0, ran.output
    assert all((tmp_path / name).stat().st_size for name in ("answer.npz", "answer.safetensors", "weights.png"))


def test_the_load_tests_run(server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [line for line in README.splitlines() if line.startswith("attn load ")]
    assert len(commands) == 5
    for command in commands:
        url = f"http://127.0.0.1:{server.grpc_port}" if "--grpc" in command else server.url
        # The last of an option that is said twice holds.
        short = ["--url", url, "--duration", "0.2", "--warm-up", "0", "--ramp", "0", "--ceiling", "0", "--check", "4"]
        ran = CliRunner().invoke(app, [*shlex.split(command)[1:], *short])
        assert ran.exit_code == 0, ran.output
    assert all((tmp_path / name).stat().st_size for name in ("before.json", "report.html", "steps.csv"))
