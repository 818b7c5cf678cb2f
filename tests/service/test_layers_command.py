"""What `attn layer` sends, and how it shows the answers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from service.ask import SAFETENSORS, AskError, Refused
from service.credentials import Credentials
from service.layers_command import delete_layer, get_layer, list_layers, put_layer, show_layer, show_layers
from tests.support.answering import PROBLEM, Answering, answering

KEPT = {
    "name": "first",
    "num_heads": 12,
    "num_kv_heads": 12,
    "weight_layout": "in_out",
    "dtype": "float32",
    "shapes": {"w_query": [768, 768], "b_output": [768]},
    "parameters": 1234567,
}
KEY = Credentials(key="secret")


@pytest.fixture
def there() -> Iterator[Answering]:
    with answering() as there:
        there.answer_with(KEPT)
        yield there


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("status", [200, 201])
def test_weights_are_put_under_their_name(there: Answering, tmp_path: Path, replace: bool, status: int) -> None:
    there.status = status
    file = tmp_path / "layer.npz"
    np.savez(file, w_query=np.ones((2, 2), dtype=np.float32))
    options = ["num_heads=1", "weight_layout=in_out"]
    layer, is_new = put_layer("first", [str(file)], url=there.url, options=options, replace=replace, credentials=KEY)
    assert (layer, is_new) == (KEPT, status == 201)
    (asked,) = there.asked
    assert (asked.method, asked.path) == ("PUT", "/v1/layers/first" + "?replace=true" * replace)
    assert asked.headers["content-type"] == SAFETENSORS and asked.headers["authorization"] == "Bearer secret"
    header = json.loads(asked.body[8 : 8 + int.from_bytes(asked.body[:8], "little")])
    assert json.loads(header["__metadata__"]["options"]) == {"num_heads": 1, "weight_layout": "in_out"}
    assert header["w_query"]["shape"] == [2, 2]


def test_a_json_file_is_put_as_it_is(there: Answering, tmp_path: Path) -> None:
    file = tmp_path / "layer.json"
    file.write_text('{"w_query": [[1]],  "num_heads": 1}')
    put_layer("first", [str(file)], url=there.url, options=[])
    assert there.asked[0].body == file.read_bytes()


def test_layers_are_listed_got_and_deleted(there: Answering) -> None:
    assert get_layer("first", url=there.url, credentials=KEY) == KEPT
    there.answer_with({"layers": [KEPT]})
    assert list_layers(url=there.url, credentials=KEY) == [KEPT]
    there.answer_with(None, status=204)
    delete_layer("first", url=there.url, credentials=KEY)
    assert [(asked.method, asked.path, asked.body) for asked in there.asked] == [
        ("GET", "/v1/layers/first", b""),
        ("GET", "/v1/layers", b""),
        ("DELETE", "/v1/layers/first", b""),
    ]
    assert all(asked.headers["authorization"] == "Bearer secret" for asked in there.asked)
    assert all("content-type" not in asked.headers for asked in there.asked)


def test_a_refusal_carries_what_the_service_said(there: Answering) -> None:
    problem = {"type": "/errors/not-found", "title": "There is none", "status": 404, "detail": "no layer second"}
    there.answer_with(problem, status=404, content_type=PROBLEM)
    for refused in (get_layer, delete_layer):
        with pytest.raises(Refused) as caught:
            refused("second", url=there.url)
        assert caught.value.problem == problem


def test_a_name_that_no_layer_can_have_is_refused_before_anything_is_sent(there: Answering) -> None:
    for refused in (get_layer, delete_layer):
        with pytest.raises(AskError, match="a layer's name"):
            refused("../attention", url=there.url)
    with pytest.raises(AskError, match="a layer's name"):
        put_layer("a/b", [], url=there.url, options=[])
    assert not there.asked


def written(show: Any, shown: Any) -> list[str]:
    stream = io.StringIO()
    show(shown, Console(file=stream, width=100))
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_layers_are_shown_as_rows() -> None:
    assert written(show_layers, [KEPT, KEPT | {"name": "[other]"}]) == [
        "name num_heads num_kv_heads weight_layout dtype parameters",
        "first 12 12 in_out float32 1,234,567",
        "[other] 12 12 in_out float32 1,234,567",
    ]
    assert written(show_layers, []) == ["no layers are kept"]


def test_a_layer_is_shown_with_the_shape_of_each_tensor() -> None:
    assert written(show_layer, KEPT) == [
        "name first",
        "num_heads 12",
        "num_kv_heads 12",
        "weight_layout in_out",
        "dtype float32",
        "w_query [768, 768]",
        "b_output [768]",
        "parameters 1,234,567",
    ]
