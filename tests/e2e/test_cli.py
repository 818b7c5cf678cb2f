"""The command ``attn``, as a user meets it: real processes, a real server, files on disk."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from attn_core import AttentionOptions, AttentionProblem, Engine
from service.ask import AskError, Refused, ask
from tests.support.bodies import list_body, safetensors_body, strict_json
from tests.support.factory import make_tensor
from tests.support.server import RunningServer, server_environment

ATTN = [str(Path(sys.executable).parent / "attn")]
MODULE = [sys.executable, "-m", "service"]
TENSORS = {
    "query": make_tensor(1, 2, 3, 4, seed=0),
    "key": make_tensor(1, 2, 5, 4, seed=1),
    "value": make_tensor(1, 2, 5, 4, seed=2),
}
CAUSAL = {"causal": "lower_right"}


def run(*words: str, command: list[str] = ATTN, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = server_environment(**settings)
    return subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=60)


def expected(*outputs: str, **options: Any) -> dict[str, Tensor]:
    asked = AttentionOptions(outputs=outputs or ("context",), **options)
    return Engine().attend(AttentionProblem(**TENSORS, options=asked)).outputs


def written(folder: Path, form: str, tensors: dict[str, Tensor] | None = None, **options: Any) -> list[str]:
    """The problem as files in one of the forms; what ``attn ask`` is called with."""
    tensors = TENSORS if tensors is None else tensors
    file = folder / f"problem.{form}"
    match form:
        case "json":
            file.write_bytes(list_body(tensors, options))
        case "safetensors":
            file.write_bytes(safetensors_body(tensors, options))
        case "npz":
            np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})  # type: ignore[arg-type]
        case "npy":
            for name, tensor in tensors.items():
                np.save(folder / f"{name}.npy", tensor.numpy())
            return [f"{name}={folder / name}.npy" for name in tensors]
    return [str(file)]


def asked(server: RunningServer, files: list[str], **changes: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the command does, without the start of another process."""
    given: dict[str, Any] = {"path": "/v1/attention", "options": [], "outputs": None, "save": None}
    return ask(files, url=server.url, **given | changes)


@pytest.mark.parametrize("form", ["json", "npz", "safetensors", "npy"])
def test_every_form_of_file_gives_the_same_bits(server: RunningServer, tmp_path: Path, form: str) -> None:
    files = written(tmp_path, form)
    outputs, info = asked(server, files, options=["causal=lower_right"], outputs="context, logsumexp")
    right = expected("context", "logsumexp", causal="lower_right")
    assert outputs.keys() == right.keys()
    assert all(torch.equal(outputs[name], right[name]) for name in right)
    assert info["path"] == "fused"


@pytest.mark.parametrize("form", ["json", "safetensors"])
def test_options_in_a_file_hold_and_the_command_line_wins(server: RunningServer, tmp_path: Path, form: str) -> None:
    files = written(tmp_path, form, causal="lower_right", scale=0.25)
    outputs, _ = asked(server, files, options=["scale=0.5"])
    assert torch.equal(outputs["context"], expected(causal="lower_right", scale=0.5)["context"])


@pytest.mark.parametrize(
    ("form", "load"),
    [
        ("npz", lambda file: {name: torch.from_numpy(array) for name, array in np.load(file).items()}),
        ("safetensors", safetensors.torch.load_file),
        ("json", lambda file: {"context": torch.tensor(strict_json(file.read_bytes())["context"])}),
    ],
)
def test_a_saved_answer_has_the_bits_of_the_service(
    server: RunningServer, tmp_path: Path, form: str, load: Any
) -> None:
    saved = tmp_path / f"answer.{form}"
    asked(server, written(tmp_path, "json"), save=saved)
    assert torch.equal(load(saved)["context"], expected()["context"])


def test_half_types_are_saved_to_npz_without_loss(server: RunningServer, tmp_path: Path) -> None:
    halves = {name: tensor.bfloat16() for name, tensor in TENSORS.items()}
    outputs, _ = asked(server, written(tmp_path, "safetensors", halves), save=tmp_path / "answer.npz")
    assert outputs["context"].dtype == torch.bfloat16
    assert np.array_equal(np.load(tmp_path / "answer.npz")["context"], outputs["context"].float().numpy())


def test_a_weighted_sum_is_asked_for_by_its_own_flag(server: RunningServer, tmp_path: Path) -> None:
    tensors = {"weights": torch.ones(1, 1, 2, 3), "value": make_tensor(1, 1, 3, 2)}
    outputs, _ = asked(server, written(tmp_path, "npy", tensors), path="/v1/weighted_sum")
    torch.testing.assert_close(outputs["context"], tensors["value"].sum(2, keepdim=True).expand(1, 1, 2, 2))


def test_a_path_with_an_equals_sign_is_a_path(server: RunningServer, tmp_path: Path) -> None:
    folder = tmp_path / "head=2"
    folder.mkdir()
    for form in ("npz", "npy"):
        outputs, _ = asked(server, written(folder, form))
        assert torch.equal(outputs["context"], expected()["context"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"options": ["causal"]}, "name=value"),
        ({"save": Path("answer.txt")}, ".json, .npz, .safetensors"),
        ({"save": Path("/nowhere/answer.npz")}, "no folder /nowhere"),
        ({"url": "http://[bad"}, "no answer from http://[bad"),
        ({"url": "ftp://127.0.0.1"}, "no answer from ftp://127.0.0.1"),
    ],
)
def test_a_wrong_word_on_the_command_line_is_told_in_a_sentence(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    given: dict[str, Any] = {"url": "http://127.0.0.1:1", "path": "/v1/attention", "options": [], "outputs": None}
    with pytest.raises(AskError) as caught:
        ask(written(tmp_path, "json"), **{"save": None} | given | changes)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.json", None, "there is no file"),
        ("query=missing.npy", None, "there is no file missing.npy"),
        ("list.json", b"[1]", "not a JSON object"),
        ("broken.json", b"{", "not JSON"),
        ("broken.npz", b"PK\x03\x04 and no more", "broken.npz: "),
        ("empty.npz", b"", "empty.npz: "),
        ("broken.safetensors", b"\x08\0\0\0\0\0\0\0{", "broken.safetensors: "),
        ("short.safetensors", b"", "short.safetensors: "),
        ("nameless.npy", b"", "name=FILE.npy"),
        ("other.txt", b"", "give a .json, .npz or .safetensors"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(AskError) as caught:
        ask([name], url="http://127.0.0.1:1", path="/v1/attention", options=["causal=true"], outputs=None, save=None)
    assert said in str(caught.value)


def test_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    twice = [*written(tmp_path, "npz"), *written(tmp_path, "npy")]
    beside = [*written(tmp_path, "json"), *written(tmp_path, "npz")]
    for files, said in ((twice, "a second time"), (beside, "comes alone")):
        with pytest.raises(AskError, match=said):
            ask(files, url="http://127.0.0.1:1", path="/v1/attention", options=[], outputs=None, save=None)


def test_a_refusal_carries_what_the_service_said(server: RunningServer, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        asked(server, written(tmp_path, "json"), options=["is_casual=true"])
    assert caught.value.problem["status"] == 422
    assert [fault["field"] for fault in caught.value.problem["errors"]] == ["is_casual"]


def test_the_command_prints_numbers_whole_rows_of_nan_too(server: RunningServer, tmp_path: Path) -> None:
    value = TENSORS["value"].clone()
    value[0, 0] = torch.nan
    files = written(tmp_path, "npz", TENSORS | {"value": value})
    done = run("ask", *files, "--outputs", "context,logsumexp", ATTN_URL=server.url)
    assert (done.returncode, done.stderr) == (0, "")
    context, rest = done.stdout.split("logsumexp float32 [1, 2, 3]\n")
    assert context.startswith("context float32 [1, 2, 3, 4]\n") and context.count("nan") == 12
    assert f"{expected()['context'][0, 1, 0, 0].item():.4f}" in context
    info = dict(line.split(maxsplit=1) for line in rest.splitlines() if line and line.lstrip()[0] != "[")
    assert info["nonfinite_rows"].strip() == "3" and info["path"].startswith("fused")


def test_the_command_saves_and_says_where(server: RunningServer, tmp_path: Path) -> None:
    saved = tmp_path / "[answer].safetensors"
    words = ["--url", server.url, "-o", "causal=lower_right", "--save", str(saved)]
    done = run("ask", *written(tmp_path, "npy"), *words)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"wrote {saved}", "")
    outputs = safetensors.torch.load_file(saved)
    assert torch.equal(outputs["context"], expected(causal="lower_right")["context"])


def test_the_command_shows_a_refusal_as_a_table_and_exits_with_1(server: RunningServer, tmp_path: Path) -> None:
    members = {"query": [[1, 2]], "key": [[1, 2, 3]], "value": [[1]], "allow_mask": [[0]]}
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(members))
    done = run("ask", str(file), "-o", "is_casual=true", "--url", server.url)
    assert (done.returncode, done.stdout) == (1, "")
    first, titles, *rows = done.stderr.splitlines()
    assert first.startswith("422 ") and titles.split() == ["field", "expected", "received"]
    fields = {row.split()[0] for row in rows}
    assert {"key", "is_casual", "allow_mask.0.0"} <= fields and "[1,3]" in done.stderr


def test_the_command_says_that_nobody_is_there(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = run("ask", *written(tmp_path, "json"), "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"attn: no answer from {url}: ") and "Traceback" not in done.stderr


def test_version_names_what_the_numbers_depend_on() -> None:
    done = run("version")
    assert (done.returncode, done.stderr) == (0, "")
    table = dict(line.split() for line in done.stdout.splitlines())
    assert table.keys() == {"attn", "torch", "python", "device"}
    assert table["torch"] == torch.__version__


def test_the_module_is_the_same_command() -> None:
    by_name, by_module = run("serve", "--help"), run("serve", "--help", command=MODULE)
    assert by_name.returncode == by_module.returncode == 0
    assert by_name.stdout.splitlines()[2:] == by_module.stdout.splitlines()[2:]
    assert "ATTN_MAX_QUEUE_REQUESTS" in by_name.stdout


@pytest.mark.parametrize("command", [ATTN, MODULE], ids=["attn", "python -m service"])
def test_every_wrong_variable_is_named_at_once_before_anything_starts(command: list[str]) -> None:
    wrong = {
        "ATTN_PORT": "tcp://10.0.0.1:8000",
        "ATTN_SERVICE_HOST": "10.0.0.1",
        "ATTN_MAX_BODY_BYTES": "512MB",
        "ATTN_PROT": "1",
    }
    done = run("serve", command=command, ATTN_URL="http://10.0.0.1", **wrong)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert len(lines) == len(wrong) and all(line.startswith("attn: ATTN_") for line in lines)
    for name in wrong:
        (line,) = [line for line in lines if line.startswith((f"attn: {name} ", f"attn: {name}:"))]
        assert ("enableServiceLinks: false" in line) == (name in ("ATTN_PORT", "ATTN_SERVICE_HOST"))


def test_a_port_that_is_taken_is_named(server: RunningServer) -> None:
    done = run("serve", "--port", str(server.port))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"attn: cannot listen on 127.0.0.1:{server.port}: Address already in use\n"


def test_a_device_that_is_not_there_is_named() -> None:
    done = run("serve", "--port", "0", "--device", "cuda:99")
    assert done.returncode == 1 and "cuda:99 is not there" in done.stderr and "Traceback" not in done.stderr
