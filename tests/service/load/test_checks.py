"""The check of answers: what is right passes in every dtype and with every option it knows, what is wrong is named."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from attn_core import Engine
from attn_core.problem import AttentionOptions, AttentionProblem
from service.credentials import CommandError
from service.load.checks import Checker, check_options
from service.load.payloads import FORMS
from service.load.problems import Problem, draw_problems, read_shape
from service.load.results import Checked, Results, read_results
from service.load.worker import Sample
from tests.support.load_results import make_results

OUTPUTS = ("context", "weights", "scores", "logits", "logsumexp", "entropy")
ENGINE = Engine()


def problem(shape: str = "1,4/2,9,8", *, dtype: str = "float32") -> Problem:
    return draw_problems([read_shape(shape)], dtype=dtype, seed=5)[0]


def tensor_of(array: Any) -> torch.Tensor:
    """torch knows no bfloat16 of numpy; float64 has every number of it."""
    return torch.from_numpy(array.astype(np.float64)).to(getattr(torch, array.dtype.name))


def answers(asked: Problem, options: dict[str, Any], outputs: tuple[str, ...] = OUTPUTS) -> dict[str, torch.Tensor]:
    said = {name: value for name, value in options.items() if name not in ("window", "query_offset", "select")}
    window, select = options.get("window", {}), options.get("select", {})
    given = {name: tensor_of(array) for name, array in asked.tensors.items()}
    if "query_offset" in options:
        given["query_offset"] = torch.tensor(options["query_offset"]).reshape(-1)
    options_ = AttentionOptions(
        outputs=outputs,
        window_left=window.get("left"),
        window_right=window.get("right"),
        top_k=select.get("top_k"),
        select_rows=tuple(select["rows"]) if "rows" in select else None,
        **said,
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


def checker(
    asked: Problem, options: dict[str, Any], dtype: str = "float32", outputs: tuple[str, ...] = OUTPUTS
) -> Checker:
    check_options(options)
    return Checker([asked], options | {"outputs": list(outputs)}, dtype)


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
        ("2,1,4/9,8", {"causal": True, "query_offset": [5, -1]}),
        ("1,2,9,8", {"select": {"top_k": 3}}),
        ("1,2,4/9,8", {"select": {"top_k": 50}, "causal": True, "query_offset": 1}),
    ],
    ids=str,
)
def test_right_answers_pass(shape: str, options: dict[str, Any], dtype: str) -> None:
    asked = problem(shape, dtype=dtype)
    outputs = (*OUTPUTS, "weight_totals", *(("top_weights",) if "select" in options else ()))
    sample = Sample(0, content(answers(asked, options, outputs)))
    found = checker(asked, options, dtype, outputs).check("base64", [sample] * 2)
    assert found.wrong == () and found.is_right and found.answers == 2 and found.only_compared == ()
    assert 0 <= found.error <= found.allowed


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("1,1,40,1/1", {"causal": "lower_right"}),
        ("1,2,3/200,64", {"scale": 0.0}),
        ("1,1,1/1,1", {}),
        ("1,1,1/2000,16", {}),
    ],
)
def test_terms_that_cancel_raise_no_false_alarm(shape: str, options: dict[str, Any], dtype: str) -> None:
    for seed in range(100, 108):
        (asked,) = draw_problems([read_shape(shape)], dtype=dtype, seed=seed)
        found = checker(asked, options, dtype).check("base64", [Sample(0, content(answers(asked, options)))])
        assert found.wrong == (), seed


TOP: dict[str, Any] = {"select": {"top_k": 3}}
ALL = (*OUTPUTS, "weight_totals", "top_weights")


@pytest.mark.parametrize("name", [*ALL, "top_keys"])
@pytest.mark.parametrize("wrong", ["one number", "nan", "shape", "rank", "row", "dtype", "missing", "renamed"])
def test_a_wrong_output_is_named(name: str, wrong: str) -> None:
    asked = problem()
    outputs = {key: tensor.clone() for key, tensor in answers(asked, TOP, ALL).items()}
    right = outputs[name]
    last = (-1,) * right.ndim
    said = f"{name} is off"
    if wrong == "one number":
        right[last] += 1 if name == "top_keys" else 1e-3
    elif wrong == "nan":
        right[last] = -5 if name == "top_keys" else float("nan")
    elif wrong == "row":
        outputs[name] = right.roll(1, dims=2)
    elif wrong == "shape":
        outputs[name] = right[:, :1]
    elif wrong == "rank":
        outputs[name] = right.reshape(-1)
    elif wrong == "dtype":
        outputs[name] = right.to(torch.int32 if name == "top_keys" else torch.float64)
        said = f"{name} is "
    else:
        del outputs[name]
        said = f"{name} was asked and is not there"
        if wrong == "renamed":
            outputs["foo"] = right
    found = checker(asked, TOP, outputs=ALL).check("base64", [Sample(0, content(outputs))])
    assert any(said in fault for fault in found.wrong) and not found.is_right
    assert len(found.wrong) == (2 if wrong == "renamed" else 1)
    assert read_results_of(found).steps[0].checked == found


def read_results_of(found: Checked) -> Results:
    """What was found is written so that it can be read again."""
    results = make_results(rates=(5,))
    return read_results(replace(results, steps=(replace(results.steps[0], checked=found),)).to_json())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_numbers_that_are_all_a_little_too_large_are_found(dtype: str) -> None:
    asked = problem(dtype=dtype)
    outputs = answers(asked, {})
    for name, scale in (("scores", 1.0001), ("logsumexp", 1.0001), ("context", 1.05), ("weights", 1.05)):
        larger = outputs | {name: outputs[name] * scale}
        found = checker(asked, {}, dtype).check("base64", [Sample(0, content(larger))])
        assert len(found.wrong) == 1 and f"{name} is off" in found.wrong[0], (name, found)


def test_an_option_that_the_service_did_not_heed_is_found() -> None:
    asked = problem()
    found = checker(asked, {"causal": True}).check("base64", [Sample(0, content(answers(asked, {})))])
    assert not found.is_right


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_without_anything_that_was_asked_is_wrong(form: str) -> None:
    empty = {"safetensors": b"\x02\0\0\0\0\0\0\0{}", "grpc": b"", "json": b'{"info": {}}', "base64": b'{"info": {}}'}
    assert not checker(problem(), {}).check(form, [Sample(0, empty[form])]).is_right


def test_a_key_that_is_named_twice_is_wrong_where_weights_tie() -> None:
    asked, options = problem("1,1,2/3,4"), {"scale": 0.0, "select": {"top_k": 2}}
    outputs = answers(asked, options, ("top_weights",))
    made = checker(asked, options, outputs=("top_weights",))
    assert made.check("base64", [Sample(0, content(outputs))]).is_right
    twice = outputs | {"top_keys": torch.ones_like(outputs["top_keys"])}
    assert not made.check("base64", [Sample(0, content(twice))]).is_right


def test_not_a_number_is_equal_to_another() -> None:
    asked = problem()
    outputs = {name: tensor.clone() for name, tensor in answers(asked, {}).items()}
    made = checker(asked, {})
    outputs["context"][0, 0, 0, 0] = float("nan")
    made.check("base64", [Sample(0, content(outputs))])
    outputs["context"].view(torch.int32)[0, 0, 0, 0] ^= -(2**31)
    assert made.check("base64", [Sample(0, content(outputs))]).same_bits


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


def test_what_the_check_does_not_know_is_compared_and_said_to_be_no_more() -> None:
    asked, options = problem(), {"select": {"rows": [2]}}
    outputs = answers(asked, options, ("context", "weights"))
    found = checker(asked, options, outputs=("context", "weights")).check("base64", [Sample(0, content(outputs))])
    assert found.is_right and found.only_compared == ("weights",)


def test_checking_ends_where_somebody_wants_it_to() -> None:
    asked = problem()
    found = checker(asked, {}).check("base64", [Sample(0, content(answers(asked, {})))] * 3, is_over=lambda: True)
    assert found.answers == 0


def test_an_option_that_the_check_does_not_know_is_refused() -> None:
    with pytest.raises(CommandError, match="--check 0"):
        check_options({"sinks": [1.0]})
