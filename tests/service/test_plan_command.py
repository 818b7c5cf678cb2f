"""What `attn ask --plan` sends of a problem, and how it shows the answer."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from service.ask import AskError
from service.plan_command import plan, show_plan
from tests.support.answering import Answering, answering
from tests.support.bodies import dtype_name, list_body, object_body, safetensors_body
from tests.support.factory import make_tensor

TENSORS = {
    "query": make_tensor(1, 2, 3, 4),
    "allow_mask": torch.ones(1, 1, 3, 5, dtype=torch.bool),
    "key_lengths": torch.tensor([5]),
    "sinks": make_tensor(2),
}
SPECS = {name: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)} for name, tensor in TENSORS.items()}


@pytest.fixture
def there() -> Iterator[Answering]:
    with answering() as there:
        yield there


def sent(there: Answering, *files: str, **changes: Any) -> Any:
    """What the service is asked for these words of the command line."""
    given: dict[str, Any] = {"path": "/v1/attention/plan", "options": [], "outputs": None, "save": None}
    plan(files, url=there.url, **given | changes)
    (asked,) = there.asked
    assert (asked.method, asked.path) == ("POST", "/v1/attention/plan")
    assert asked.headers["content-type"] == asked.headers["accept"] == "application/json"
    return asked.members


@pytest.mark.parametrize("form", ["json", "base64.json", "specs.json", "npz", "npy", "safetensors", "words"])
def test_every_form_of_file_gives_the_same_specs(there: Answering, tmp_path: Path, form: str) -> None:
    file = tmp_path / f"problem.{form}"
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in TENSORS.items()}
    files = [str(file)]
    match form:
        case "json":
            file.write_bytes(list_body(TENSORS, {}))
        case "base64.json":
            file.write_bytes(object_body(TENSORS, {}))
        case "specs.json":
            file.write_text(json.dumps(SPECS))
        case "npz":
            np.savez(file, **arrays)
        case "safetensors":
            file.write_bytes(safetensors_body(TENSORS, {}))
        case "npy":
            for name, array in arrays.items():
                np.save(tmp_path / f"{name}.npy", array)
            files = [f"{name}={tmp_path / name}.npy" for name in arrays]
        case "words":
            files = [f"{name}={spec['dtype']}{spec['shape']}" for name, spec in SPECS.items()]
    assert sent(there, *files) == SPECS


def test_half_types_and_no_numbers_at_all_have_specs_too(there: Answering, tmp_path: Path) -> None:
    file = tmp_path / "problem.safetensors"
    file.write_bytes(safetensors_body({"query": torch.zeros(0, 3).bfloat16(), "key": torch.zeros(2, 3).half()}, {}))
    assert sent(there, str(file), "sinks=bfloat16[]") == {
        "query": {"dtype": "bfloat16", "shape": [0, 3]},
        "key": {"dtype": "float16", "shape": [2, 3]},
        "sinks": {"dtype": "bfloat16", "shape": []},
    }


def test_the_head_of_a_file_is_enough(there: Answering, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.npy", tmp_path / "cut.npy"
    np.save(whole, np.zeros((1024, 1024), dtype=np.float32))
    cut.write_bytes(whole.read_bytes()[:1024])
    assert sent(there, f"query={cut}") == {"query": {"dtype": "float32", "shape": [1024, 1024]}}


def test_options_come_from_files_and_the_command_line_wins(there: Answering, tmp_path: Path) -> None:
    stored, members = tmp_path / "query.safetensors", tmp_path / "rest.json"
    stored.write_bytes(safetensors_body({"query": TENSORS["query"]}, {"causal": True, "scale": 1}))
    members.write_text('{"query_offset": 3, "softcap": 2, "is_casual": [true]}')
    words = [str(stored), str(members), "grad_context=float32[1, 2, 3, 4]"]
    assert sent(there, *words, options=["scale=0.5"], outputs="grad_query", verify=True) == {
        "query": SPECS["query"],
        "grad_context": SPECS["query"],
        "query_offset": 3,
        "softcap": 2,
        "is_casual": [True],
        "causal": True,
        "scale": 0.5,
        "outputs": ["grad_query"],
        "verify": True,
    }


@pytest.mark.parametrize("options", [[], ["dtype=float16"]])
def test_the_dtype_of_lists_is_said_with_their_shape_alone(
    there: Answering, tmp_path: Path, options: list[str]
) -> None:
    file = tmp_path / "problem.json"
    members = {"query": [[1, 0]], "bias": [["-Infinity", 0.5]], "key_lengths": [1], "dtype": "bfloat16"}
    file.write_text(json.dumps(members))
    dtype = "float16" if options else "bfloat16"
    assert sent(there, str(file), options=options) == {
        "query": {"dtype": dtype, "shape": [1, 2]},
        "bias": {"dtype": dtype, "shape": [1, 2]},
        "key_lengths": {"dtype": "int64", "shape": [1]},
    }


def test_what_the_service_would_refuse_is_left_for_it_to_refuse(there: Answering, tmp_path: Path) -> None:
    file = tmp_path / "problem.json"
    file.write_text('{"query": true, "key": [[true]], "allow_mask": [[0]], "key_lengths": [0.5], "value": {"a": 1}}')
    assert sent(there, str(file)) == {
        "query": True,
        "key": {"dtype": "bool", "shape": [1, 1]},
        "allow_mask": {"dtype": "int64", "shape": [1, 1]},
        "key_lengths": {"dtype": "float32", "shape": [1]},
        "value": {"a": 1},
    }


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("ragged.json", b'{"query": [[1, 2], [3]]}', "query: its lists are of unequal length or depth"),
        ("deep.json", b'{"query": [[1], 2]}', "query: its lists are of unequal length or depth"),
        ("empty.json", b'{"query": [[], []]}', "query: give an empty tensor as"),
        ("list.json", b"[1]", "not a JSON object"),
        ("broken.npz", b"PK\x03\x04 and no more", "broken.npz: "),
        ("broken.safetensors", b"\x08\0\0\0\0\0\0\0{", "broken.safetensors: "),
        ("query=broken.npy", b"", "broken.npy: "),
        ("query=missing.npy", None, "there is no file missing.npy"),
        ("query=float32[1,,2]", None, "a shape is whole numbers"),
        ("nameless.npy", b"", "name=FILE.npy or name=float32"),
    ],
)
def test_a_word_that_has_no_shape_is_told_in_a_sentence(
    there: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name.removeprefix("query=")).write_bytes(content)
    with pytest.raises(AskError) as caught:
        sent(there, name)
    assert said in str(caught.value) and not there.asked


def test_a_tensor_that_comes_twice_is_refused(there: Answering) -> None:
    with pytest.raises(AskError, match="brings query a second time"):
        sent(there, "query=float32[1]", "query=float32[1]")


def test_a_plan_is_saved_as_it_came_and_as_json_alone(there: Answering, tmp_path: Path) -> None:
    there.content = b'{"admitted": true}'
    sent(there, "query=float32[1]", save=tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_bytes() == there.content
    with pytest.raises(AskError, match=r"--save takes \.json, not plan\.npz"):
        sent(there, "query=float32[1]", save=tmp_path / "plan.npz")
    assert len(there.asked) == 1


def shown(**changes: Any) -> list[str]:
    cost = {"supported": True, "why": None, "flops": 999, "bytes_moved": 1023, "peak_bytes": 3 << 19}
    planned = {
        "admitted": True,
        "why": "long",
        "path": "blocked",
        "answer_bytes": 2048,
        "needed_bytes": 1234567,
        "allowed_bytes": 2**34,
        "max_seq_len": 98765,
        "paths": {
            "fused": {"supported": False, "why": "weights [asked] for"},
            "manual": cost | {"flops": 17_592_186_044_416, "bytes_moved": 2**40, "estimated_ms": 12345.6},
            "blocked": cost | {"flops": 999_500, "estimated_ms": 0.01234},
        },
    }
    written = io.StringIO()
    show_plan(planned | changes, Console(file=written, width=100))
    return [" ".join(line.split()) for line in written.getvalue().splitlines()]


def test_a_plan_is_shown_with_its_verdict_first_and_a_row_for_each_path() -> None:
    assert shown() == [
        "admitted by the blocked path: long",
        "needed_bytes 1,234,567",
        "allowed_bytes 17,179,869,184",
        "answer_bytes 2,048",
        "max_seq_len 98,765",
        "path supported flops bytes moved peak estimated ms why",
        "fused no - - - - weights [asked] for",
        "manual yes 17.6 T 1.00 TiB 1.50 MiB 12,346",
        "blocked yes 1.00 M 1023 B 1.50 MiB 0.0123",
    ]


def test_a_plan_that_is_not_admitted_says_why_first() -> None:
    verdict, needed, *_ = shown(admitted=False, path=None, why="more memory than there is")
    assert (verdict, needed) == ("not admitted: more memory than there is", "needed_bytes 1,234,567")
