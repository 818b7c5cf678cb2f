"""What `attn ask` makes of its flags and options, and what it sends for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from service.ask import SAFETENSORS, AskError, ask, layer_path, path_of, read_options
from tests.support.answering import Answering, answering
from tests.support.factory import make_tensor


@pytest.fixture
def there() -> Iterator[Answering]:
    with answering() as there:
        content = safetensors.torch.save({"context": torch.zeros(1)}, {"info": '{"max_abs_error": 0.5}'})
        there.content, there.content_type = content, SAFETENSORS
        yield there


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ({}, "/v1/attention"),
        ({"verify": True}, "/v1/attention"),
        ({"weighted_sum": True}, "/v1/weighted_sum"),
        ({"gradients": True}, "/v1/attention/gradients"),
        ({"plan": True}, "/v1/attention/plan"),
        ({"layer": True}, "/v1/layer"),
        ({"layer": True, "gradients": True, "verify": True}, "/v1/layer/gradients"),
        ({"layer_name": "gpt-2.h0"}, "/v1/layers/gpt-2.h0/forward"),
        ({"layer_name": "a", "gradients": True}, "/v1/layers/a/gradients"),
        ({"layer_name": "a", "heatmap": True}, "/v1/layers/a/forward"),
    ],
)
def test_flags_lead_to_the_path_of_the_contract(flags: dict[str, Any], path: str) -> None:
    assert path_of(**flags) == path


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"layer": True, "layer_name": "a"}, "give one of them"),
        ({"plan": True, "layer": True}, "leave --layer out"),
        ({"plan": True, "layer_name": "a"}, "leave --layer-name out"),
        ({"plan": True, "gradients": True}, "leave --gradients out"),
        ({"weighted_sum": True, "gradients": True}, "leave it or --gradients out"),
        ({"weighted_sum": True, "plan": True}, "leave it or --plan out"),
        ({"weighted_sum": True, "layer": True}, "leave it or --layer out"),
        ({"weighted_sum": True, "layer_name": "a"}, "leave it or --layer-name out"),
        ({"weighted_sum": True, "verify": True}, "leave it or --verify out"),
        ({"heatmap": True, "gradients": True}, "--gradients gives none: leave one of them out"),
        ({"heatmap": True, "plan": True}, "--plan gives none: leave one of them out"),
        ({"heatmap": True, "weighted_sum": True}, "--weighted-sum gives none: leave one of them out"),
    ],
)
def test_flags_that_contradict_are_refused_with_what_to_do(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(AskError, match=said):
        path_of(**flags)


@pytest.mark.parametrize("name", ["", "..", ".", "a/../../v1", "1a", "a b", "a?replace=true", "a" * 65, "é", "a\n"])
def test_a_name_that_no_layer_can_have_is_refused_before_anything_is_sent(name: str) -> None:
    with pytest.raises(AskError, match="a layer's name is 1 to 64"):
        layer_path(name)


@pytest.mark.parametrize(
    ("words", "outputs", "verify", "said"),
    [
        (["causal=true", "causal=1"], None, False, "--option causal is given twice"),
        (["outputs=[]"], "context", False, "--outputs and --option outputs"),
        (["verify=false"], None, True, "--verify and --option verify=false contradict"),
        (["verify=1"], None, True, "--verify and --option verify=1 contradict"),
    ],
)
def test_options_that_contradict_are_refused_with_what_to_do(
    words: list[str], outputs: str | None, verify: bool, said: str
) -> None:
    with pytest.raises(AskError, match=said) as caught:
        read_options(words, outputs, verify=verify)
    assert ": give " in str(caught.value)


def test_what_is_said_twice_and_alike_is_said() -> None:
    said = read_options(["verify=true", "scale=0.5", "scale=0.5"], "context, weights", verify=True)
    assert said == {"verify": True, "scale": 0.5, "outputs": ["context", "weights"]}


@pytest.mark.parametrize("form", ["json", "npz"])
def test_verify_reaches_the_service_as_its_option(there: Answering, tmp_path: Path, form: str) -> None:
    file = tmp_path / f"problem.{form}"
    if form == "json":
        file.write_text('{"query": [[1]], "verify": false}')
    else:
        safetensors.torch.save_file({"query": make_tensor(1, 1, 2, 2)}, file.with_suffix(".safetensors"))
        file = file.with_suffix(".safetensors")
    _, info = ask([str(file)], url=there.url, path="/v1/attention", options=[], outputs=None, save=None, verify=True)
    (asked,) = there.asked
    if form == "json":
        assert asked.members == {"query": [[1]], "verify": True}
    else:
        header = json.loads(asked.body[8 : 8 + int.from_bytes(asked.body[:8], "little")])
        assert json.loads(header["__metadata__"]["options"]) == {"verify": True}
    assert info["max_abs_error"] == 0.5


def test_a_shape_without_numbers_is_refused_where_numbers_are_needed(there: Answering) -> None:
    with pytest.raises(AskError, match="only --plan takes it"):
        ask(["query=float32[1,2]"], url=there.url, path="/v1/attention", options=[], outputs=None, save=None)
    assert not there.asked


@pytest.mark.parametrize(
    ("path", "options", "asked"),
    [
        ("/v1/attention", [], ["context", "weights"]),
        ("/v1/layer", [], ["output", "weights"]),
        ("/v1/layers/a/forward", [], ["output", "weights"]),
        ("/v1/attention", ['outputs=["weights", "entropy"]'], ["weights", "entropy"]),
    ],
)
@pytest.mark.parametrize("form", ["json", "safetensors"])
def test_a_heatmap_asks_for_the_weights_beside_what_would_come(
    there: Answering, tmp_path: Path, form: str, path: str, options: list[str], asked: list[str]
) -> None:
    file = tmp_path / f"problem.{form}"
    if form == "json":
        file.write_text('{"query": [[1]]}')
    else:
        safetensors.torch.save_file({"query": make_tensor(1, 1, 2, 2)}, file)
    ask([str(file)], url=there.url, path=path, options=options, outputs=None, save=None, heatmap=True)
    (request,) = there.asked
    if form == "json":
        assert request.members["outputs"] == asked
    else:
        header = json.loads(request.body[8 : 8 + int.from_bytes(request.body[:8], "little")])
        assert json.loads(header["__metadata__"]["options"]) == {"outputs": asked}


@pytest.mark.parametrize("form", ["json", "safetensors"])
def test_a_heatmap_of_outputs_without_weights_is_refused_before_anything_is_sent(
    there: Answering, tmp_path: Path, form: str
) -> None:
    file = tmp_path / f"problem.{form}"
    if form == "json":
        file.write_text('{"query": [[1]], "outputs": ["context"]}')
    else:
        tensors = {"query": make_tensor(1, 1, 2, 2)}
        safetensors.torch.save_file(tensors, file, {"options": '{"outputs": ["context"]}'})
    with pytest.raises(AskError, match="the outputs are context: add weights"):
        ask([str(file)], url=there.url, path="/v1/attention", options=[], outputs=None, save=None, heatmap=True)
    assert not there.asked


def test_a_heatmap_of_an_answer_saved_as_json_is_refused_with_what_to_do(there: Answering, tmp_path: Path) -> None:
    save = tmp_path / "answer.json"
    with pytest.raises(AskError, match=r"save it as \.npz or \.safetensors"):
        ask([], url=there.url, path="/v1/attention", options=[], outputs=None, save=save, heatmap=True)
    assert not there.asked
