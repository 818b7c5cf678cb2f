"""`attn ask --heatmap-file`: the picture comes after the answer, and takes nothing with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner, Result

from service.ask import SAFETENSORS
from service.cli import app
from tests.support.answering import Answering, answering


@pytest.fixture
def there() -> Iterator[Answering]:
    with answering() as there:
        tensors = {"context": torch.ones(1, 1, 2, 2), "weights": torch.full((1, 1, 2, 2), 0.5)}
        there.content, there.content_type = safetensors.torch.save(tensors, {"info": "{}"}), SAFETENSORS
        yield there


def ask(there: Answering, folder: Path, drawn: str) -> Result:
    file = folder / "tensors.json"
    file.write_text('{"query": [[1]]}')
    words = ["ask", str(file), "--heatmap-file", str(folder / drawn)]
    return CliRunner().invoke(app, words, env={"ATTN_URL": there.url, "ATTN_CLIENT_KEY": ""})


def test_a_picture_that_cannot_be_written_leaves_the_answer_printed(there: Answering, tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    done = ask(there, tmp_path, "taken.png")
    assert done.exit_code == 1
    assert done.stdout.startswith("context float32 [1, 1, 2, 2]")
    assert done.stderr == f"attn: cannot write {tmp_path / 'taken.png'}: Is a directory\n"


def test_a_matplotlib_that_cannot_be_imported_is_told_in_a_sentence(
    there: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is found, and one of its parts is not.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = ask(there, tmp_path, "weights.png")
    assert done.exit_code == 1
    assert done.stdout.startswith("context float32 [1, 1, 2, 2]")
    assert done.stderr.startswith("attn: --heatmap-file: pictures need matplotlib")


def test_an_ending_in_capitals_is_taken(there: Answering, tmp_path: Path) -> None:
    assert ask(there, tmp_path, "weights.PNG").exit_code == 0
    assert (tmp_path / "weights.PNG").is_file()
