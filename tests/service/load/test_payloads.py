"""Bodies in every form, as the service itself reads them, and its answers read back."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from service.credentials import CommandError
from service.load.payloads import FORMS, payloads, read_outputs, server_times
from service.load.problems import draw_problems, read_shape
from service.wire import open_inference_pb2 as pb

DTYPES = ["float64", "float32", "float16", "bfloat16"]
PROBLEMS = {dtype: draw_problems([read_shape("1,2/1,3/5,4")], dtype=dtype, seed=1) for dtype in DTYPES}


def body(form: str, options: dict[str, Any], dtype: str = "float32") -> bytes:
    return payloads(PROBLEMS[dtype], form, options, dtype=dtype)[0].body


@pytest.mark.parametrize("dtype", DTYPES)
def test_json_lists_have_the_digits_that_give_the_same_numbers_back(dtype: str) -> None:
    members = orjson.loads(body("json", {"causal": True}, dtype))
    assert members["dtype"] == dtype and members["causal"] is True
    stored = PROBLEMS[dtype][0].tensors["value"]
    assert np.array(members["value"]).astype(stored.dtype).tobytes() == stored.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_grpc_message_names_the_model_of_its_dtype_and_what_is_asked(dtype: str) -> None:
    options = {"outputs": ["context", "logsumexp"], "scale": 0.5, "causal": "upper_left", "window": {"left": 2}}
    message = pb.ModelInferRequest.FromString(body("grpc", options, dtype))
    suffix = {"float64": "_fp64", "float32": "", "float16": "_fp16", "bfloat16": "_bf16"}[dtype]
    assert message.model_name == f"attention{suffix}"
    assert [output.name for output in message.outputs] == ["context", "logsumexp"]
    assert message.parameters["scale"].double_param == 0.5
    assert message.parameters["causal"].string_param == "upper_left"
    assert message.parameters["window_left"].int64_param == 2
    assert message.raw_input_contents[2] == PROBLEMS[dtype][0].tensors["value"].tobytes()


def test_what_no_parameter_can_say_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(CommandError, match="select"):
        body("grpc", {"select": {"rows": [1]}})


@pytest.mark.parametrize("form", FORMS)
def test_a_payload_for_an_echo_says_which_it_is(form: str) -> None:
    for number, payload in enumerate(payloads(PROBLEMS["float32"] * 3, form, {}, dtype="float32")):
        assert payload.number == number and payload.to_echo().path == f"/echo/{number}"
        assert payload.to_echo().body == payload.body


def test_words_for_infinities_are_numbers_again() -> None:
    found = read_outputs("json", b'{"logsumexp": [[["-Infinity", 1.5]]], "info": {}}', dtype="float32")
    assert found["logsumexp"].tolist() == [[[-np.inf, 1.5]]] and found["logsumexp"].dtype == np.float32


def test_what_is_no_answer_is_told_of() -> None:
    for form, content in (("json", b"{}"), ("safetensors", b"\0" * 8), ("json", b"<html>")):
        with pytest.raises(ValueError):
            read_outputs(form, content, dtype="float32")


def test_times_over_grpc_are_those_of_info() -> None:
    message = pb.ModelInferResponse()
    message.parameters["queue_ms"].double_param = 1.5
    message.parameters["compute_ms"].double_param = 2.5
    message.parameters["path"].string_param = "fused"
    assert server_times(message.SerializeToString()) == {"queue": 1.5, "compute": 2.5}
