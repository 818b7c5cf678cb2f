"""The command line in this process: what each command says, where, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner, Result

from service.ask import SAFETENSORS
from service.cli import app
from tests.support.answering import PROBLEM, Answering, answering

KEPT = {"name": "first", "num_heads": 1, "shapes": {"w_query": [2, 2]}}
PLANNED = {"admitted": True, "path": "fused", "why": "short", "needed_bytes": 10, "paths": {}}
SPEC = "query=float32[1,2]"
COMMANDS = {
    "ask --gradients": ("POST", "/v1/attention/gradients"),
    "ask --layer": ("POST", "/v1/layer"),
    "ask --layer-name first --gradients": ("POST", "/v1/layers/first/gradients"),
    "ask --plan": ("POST", "/v1/attention/plan"),
    "layer put first": ("PUT", "/v1/layers/first"),
    "layer list": ("GET", "/v1/layers"),
    "layer get first": ("GET", "/v1/layers/first"),
    "layer delete first": ("DELETE", "/v1/layers/first"),
}


@pytest.fixture
def there() -> Iterator[Answering]:
    with answering() as there:
        yield there


@pytest.fixture
def file(tmp_path: Path) -> str:
    file = tmp_path / "tensors.json"
    file.write_text('{"query": [[1]]}')
    return str(file)


def run(there: Answering, *words: str) -> Result:
    return CliRunner().invoke(app, [*words], env={"ATTN_URL": there.url, "ATTN_CLIENT_KEY": "", "COLUMNS": "200"})


def words_of(command: str, file: str) -> list[str]:
    takes_files = command.startswith(("ask", "layer put"))
    return [*command.split(), *([file] if takes_files else [])]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_calls_its_path_and_shows_a_refusal_and_exits_with_1(
    there: Answering, file: str, command: str
) -> None:
    fault = {"field": "query", "expected": "rank [4]", "received": "[1,1]"}
    problem = {"title": "No", "status": 422, "detail": "1 fault: query", "errors": [fault]}
    there.answer_with(problem, status=422, content_type=PROBLEM)
    done = run(there, *words_of(command, file), "--key", "secret")
    assert [(asked.method, asked.path) for asked in there.asked] == [COMMANDS[command]]
    assert there.asked[0].headers["authorization"] == "Bearer secret"
    assert (done.exit_code, done.stdout) == (1, "")
    first, _, row = done.stderr.splitlines()
    assert first == "422 No: 1 fault: query" and row.split() == ["query", "rank", "[4]", "[1,1]"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_that_nobody_is_there_and_exits_with_1(file: str, command: str) -> None:
    with answering() as gone:
        pass
    done = run(gone, *words_of(command, file))
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"attn: no answer from {gone.url}: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_what_tls_needs(there: Answering, file: str, command: str) -> None:
    done = run(there, *words_of(command, file), "--cert-key", file)
    assert (done.exit_code, done.stderr) == (1, "attn: --cert-key needs --cert\n")
    done = run(there, *words_of(command, file), "--ca", file, "--cert", file)
    assert done.exit_code == 1 and done.stderr.startswith(f"attn: --ca {file}: ")


def test_flags_that_contradict_are_told_and_nothing_is_sent(there: Answering, file: str) -> None:
    done = run(there, "ask", file, "--layer", "--plan")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("attn: --plan is of attention alone: leave --layer out")
    assert not there.asked


def test_verify_is_asked_for_and_its_errors_are_shown(there: Answering, file: str) -> None:
    info = '{"path": "manual", "max_abs_error": 1e-07, "worst": "context[0,3,17]"}'
    there.content, there.content_type = safetensors.torch.save({"output": torch.ones(1)}, {"info": info}), SAFETENSORS
    done = run(there, "ask", file, "--layer", "--verify")
    assert (done.exit_code, done.stderr) == (0, "")
    assert there.asked[0].members["verify"] is True
    shown = [line.split() for line in done.stdout.splitlines()]
    assert ["max_abs_error", "1e-07"] in shown and ["worst", "context[0,3,17]"] in shown


def test_a_plan_is_shown_or_saved(there: Answering, tmp_path: Path) -> None:
    there.answer_with(PLANNED)
    done = run(there, "ask", "--plan", SPEC, "--outputs", "weights")
    assert there.asked[0].members == {"query": {"dtype": "float32", "shape": [1, 2]}, "outputs": ["weights"]}
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "admitted by the fused path: short"
    saved = tmp_path / "plan.json"
    done = run(there, "ask", "--plan", SPEC, "--save", str(saved))
    assert (done.exit_code, done.stdout) == (0, f"wrote {saved}\n")
    assert saved.read_bytes() == there.content


@pytest.mark.parametrize(
    ("status", "flags", "said"),
    [(201, [], "keeps first"), (200, [], "first was there already"), (200, ["--replace"], "keeps first")],
)
def test_putting_a_layer_says_what_became_of_it(
    there: Answering, file: str, status: int, flags: list[str], said: str
) -> None:
    there.answer_with(KEPT, status=status)
    done = run(there, "layer", "put", "first", file, "-o", "num_heads=1", *flags)
    assert there.asked[0].members == {"query": [[1]], "num_heads": 1}
    assert (done.exit_code, done.stderr) == (0, "")
    first, *rows = done.stdout.splitlines()
    assert first.startswith(said) and [row.strip().split(maxsplit=1) for row in rows][-1] == ["w_query", "[2, 2]"]


def test_layers_are_listed_shown_and_deleted(there: Answering) -> None:
    there.answer_with({"layers": [KEPT]})
    assert run(there, "layer", "list").stdout.split() == ["name", "num_heads", "first", "1"]
    there.answer_with(KEPT)
    assert run(there, "layer", "get", "first").stdout.split()[:2] == ["name", "first"]
    there.answer_with(None, status=204)
    done = run(there, "layer", "delete", "first")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "deleted first\n", "")


def answer_with_weights(there: Answering) -> None:
    tensors = {"context": torch.zeros(1, 1, 2, 2), "weights": torch.tensor([[[[1.0, 0.0], [0.25, 0.75]]]])}
    there.content, there.content_type = safetensors.torch.save(tensors, {"info": '{"path": "manual"}'}), SAFETENSORS


def test_a_heatmap_is_drawn_below_the_numbers(there: Answering, file: str) -> None:
    answer_with_weights(there)
    done = run(there, "ask", file, "--heatmap")
    assert (done.exit_code, done.stderr) == (0, "")
    assert there.asked[0].members == {"query": [[1]], "outputs": ["context", "weights"]}
    assert done.stdout.index("manual") < done.stdout.index("head 0  2 queries down, 2 keys across")
    assert "  0 1\n0 ██  \n1 ░░▓▓\n" in done.stdout


def test_a_heatmap_is_written_to_a_file_beside_a_saved_answer(there: Answering, file: str, tmp_path: Path) -> None:
    answer_with_weights(there)
    saved, drawn = tmp_path / "answer.npz", tmp_path / "weights.png"
    done = run(there, "ask", file, "--save", str(saved), "--heatmap-file", str(drawn))
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"wrote {saved}\ndrew {drawn}\n", "")
    assert drawn.read_bytes().startswith(b"\x89PNG\r\n") and saved.is_file()


def test_a_heatmap_that_cannot_be_written_is_told_and_nothing_is_sent(there: Answering, file: str) -> None:
    done = run(there, "ask", file, "--heatmap-file", "weights.txt")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "attn: --heatmap-file takes .png, .svg, .pdf, not weights.txt\n"
    assert not there.asked
