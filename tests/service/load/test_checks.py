"""The check of answers: what is right passes in every dtype and with every option it knows, what is wrong is named."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from attn_core import Engine
from attn_core.problem import AttentionOptions, AttentionProblem
from service.credentials import CommandError
from service.load.checks import Checker, check_options
from service.load.problems import Problem, draw_problems, read_shape
from service.load.worker import Sample

OUTPUTS = ("context", "weights", "scores", "logits", "logsumexp", "entropy")
ENGINE = Engine()


def problem(shape: str = "1,4/2,9,8", *, dtype: str = "float32") -> Problem:
    return draw_problems([read_shape(shape)], dtype=dtype, seed=5)[0]


def tensor_of(array: Any) -> torch.Tensor:
    """torch knows no bfloat16 of numpy; float64 has every number of it."""
    return torch.from_numpy(array.astype(np.float64)).to(getattr(torch, array.dtype.name))


def answers(asked: Problem, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    said = {name: value for name, value in options.items() if name not in ("window", "query_offset")}
    window = options.get("window", {})
    given = {name: tensor_of(array) for name, array in asked.tensors.items()}
    if "query_offset" in options:
        given["query_offset"] = torch.tensor([options["query_offset"]])
    options_ = AttentionOptions(
        outputs=OUTPUTS, window_left=window.get("left"), window_right=window.get("right"), **said
    )
    return ENGINE.attend(AttentionProblem(**given, options=options_)).outputs


def content(outputs: dict[str, torch.Tensor]) -> bytes:
    members: dict[str, Any] = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "data": base64.b64encode(tensor.contiguous().view(torch.uint8).numpy().tobytes()).decode(),
        }
        for name, tensor in outputs.items()
    }
    return orjson.dumps(members | {"info": {}})


def checker(asked: Problem, options: dict[str, Any], dtype: str = "float32") -> Checker:
    check_options(options)
    return Checker([asked], options, dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("1,4/2,9,8", {}),
        ("1,4/2,9,8", {"causal": True, "scale": 0.3}),
        ("2,3,5/7,8/6", {"causal": "lower_right", "softcap": 2.0}),
        ("1,2,7/5,4", {"causal": "lower_right"}),
        ("1,2,7/5,4", {"causal": "upper_left"}),
        ("1,2,40,16", {"window": {"left": 3, "right": 0}}),
        ("1,2,4/9,16", {"causal": True, "query_offset": 5, "window": {"left": 2}}),
        ("1,2,4/9,16", {"causal": True, "query_offset": -2}),
        ("1,1,3/300,64", {"scale": 0}),
    ],
    ids=str,
)
def test_right_answers_pass(shape: str, options: dict[str, Any], dtype: str) -> None:
    asked = problem(shape, dtype=dtype)
    found = checker(asked, options, dtype).check("base64", [Sample(0, content(answers(asked, options)))] * 2)
    assert found.wrong == () and found.is_right and found.answers == 2
    assert 0 <= found.error <= found.allowed


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("wrong", ["one number", "nan", "shape", "row"])
def test_a_wrong_output_is_named(name: str, wrong: str) -> None:
    asked = problem()
    outputs = {key: tensor.clone() for key, tensor in answers(asked, {}).items()}
    right = outputs[name]
    last = (-1,) * right.ndim
    if wrong == "one number":
        right[last] += 1e-3
    elif wrong == "nan":
        right[last] = float("nan")
    elif wrong == "row":
        outputs[name] = right.roll(1, dims=2)
    else:
        outputs[name] = right[:, :1]
    found = checker(asked, {}).check("base64", [Sample(0, content(outputs))])
    assert len(found.wrong) == 1 and f"{name} is off" in found.wrong[0] and not found.is_right


def test_an_option_that_the_service_did_not_heed_is_found() -> None:
    asked = problem()
    found = checker(asked, {"causal": True}).check("base64", [Sample(0, content(answers(asked, {})))])
    assert not found.is_right


def test_one_bit_between_two_answers_to_one_request_is_found() -> None:
    asked = problem()
    outputs = answers(asked, {})
    other = {name: tensor.clone() for name, tensor in outputs.items()}
    other["context"].view(torch.int32)[0, 0, 0, 0] ^= 1
    made = checker(asked, {})
    assert made.check("base64", [Sample(0, content(outputs))]).same_bits
    found = made.check("base64", [Sample(0, content(other))])
    assert not found.same_bits and "context" in found.wrong[0]


def test_an_answer_that_cannot_be_read_is_wrong() -> None:
    found = checker(problem(), {}).check("json", [Sample(0, b"<html>")])
    assert "cannot be read" in found.wrong[0]


def test_of_a_long_problem_whole_rows_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.load.checks.MAX_PAIRS", 4 * 9 * 3)
    asked = problem()
    outputs = {name: tensor.clone() for name, tensor in answers(asked, {}).items()}
    outputs["context"][0, 0, 1] += 1
    # The first, the middle and the last row.
    assert checker(asked, {}).check("base64", [Sample(0, content(outputs))]).is_right
    outputs["context"][0, 0, 4] += 1
    assert not checker(asked, {}).check("base64", [Sample(0, content(outputs))]).is_right


def test_selected_rows_are_compared_among_themselves_alone() -> None:
    asked, options = problem(), {"select": {"rows": [2]}}
    outputs = answers(asked, {}) | {"weights": torch.zeros(1, 4, 1, 9)}
    assert checker(asked, options).check("base64", [Sample(0, content(outputs))]).is_right


def test_an_option_that_the_check_does_not_know_is_refused() -> None:
    with pytest.raises(CommandError, match="--check 0"):
        check_options({"sinks": [1.0]})
