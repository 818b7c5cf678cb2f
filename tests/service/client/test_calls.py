"""What is sent for each call, and what is read of the answer, without a wire."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

from service.client import calls
from service.client.calls import JSON, PROBLEM, SAFETENSORS, Call, Reply, TensorsBody, TextBody
from service.client.errors import BY_STATUS, AttentionServiceError, Fault, Overloaded, TooLarge, Unavailable

INFO = {
    "path": "manual",
    "why": "asked for",
    "device": "cpu",
    "dtype": "float32",
    "queue_ms": 0.1,
    "compute_ms": 0.2,
    "batch_requests": 1,
    "empty_rows": 0,
    "nonfinite_rows": 0,
    "peak_bytes": 1,
    "flops": 1,
}
QUERY = np.arange(12, dtype=np.float32).reshape(1, 2, 3, 2)


def attention(
    query: Any = QUERY, options: Mapping[str, Any] | None = None, layout: str | None = "bhtd", **tensors: Any
) -> Call[Any]:
    return calls.computation("/v1/attention", {"query": query, **tensors}, options or {}, layout=layout)


def sent(call: Call[Any], timeout_ms: float | None = None) -> bytes:
    assert call.body is not None
    return b"".join(call.body.pieces(timeout_ms))


def members(call: Call[Any], timeout_ms: float | None = None) -> Any:
    assert isinstance(call.body, TextBody) and call.body.media_type == JSON
    return json.loads(sent(call, timeout_ms))


def opened(call: Call[Any], timeout_ms: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and options of safetensors, as another's library reads them."""
    assert isinstance(call.body, TensorsBody) and call.body.media_type == SAFETENSORS
    body = sent(call, timeout_ms)
    length = int.from_bytes(body[:8], "little")
    assert length % 8 == 0
    header = json.loads(body[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    assert set(metadata) <= {"options"}
    return safetensors.numpy.load(body), json.loads(metadata.get("options", "{}"))


def reply(
    content: bytes, media_type: str = JSON, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Reply:
    return Reply(status, {"content-type": media_type, **(headers or {})}, memoryview(bytearray(content)))


def tensors_reply(**arrays: Any) -> Reply:
    return reply(safetensors.numpy.save(arrays, {"info": json.dumps(INFO)}), SAFETENSORS)


# What is sent


def test_arrays_go_as_safetensors_and_answers_are_asked_for_in_it() -> None:
    call = attention(key=QUERY, options={"causal": True})
    arrays, options = opened(call)
    assert set(arrays) == {"query", "key"} and np.array_equal(arrays["query"], QUERY)
    assert options == {"causal": True} and call.accept == SAFETENSORS and call.method == "POST"


def test_the_memory_of_an_array_is_not_copied() -> None:
    array = np.zeros((1, 1, 2, 2), dtype=np.float32)
    call = attention(array)
    array[:] = 1.0
    assert opened(call)[0]["query"].tolist() == array.tolist()


def test_an_odd_mask_leaves_other_arrays_where_they_can_be_computed_from() -> None:
    call = attention(allow_mask=np.ones((1, 1, 3, 3), dtype=bool), bias=np.zeros((1, 1, 3, 3)))
    body = sent(call)
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    assert {name: entry["data_offsets"][0] % 4 for name, entry in header.items()} == dict.fromkeys(header, 0)


def test_lists_go_as_json_and_lists_come_back() -> None:
    call = attention([[1, 2.5]], key=[[0.5, -1]], options={"dtype": "float16"})
    assert members(call) == {"query": [[1, 2.5]], "key": [[0.5, -1]], "dtype": "float16"}
    assert call.accept == JSON


def test_lists_keep_every_digit_and_say_nan_in_the_words_of_the_contract() -> None:
    call = attention([[0.1, math.nan], [math.inf, -math.inf], [np.float32(0.1), np.int64(3)]])
    assert members(call)["query"] == [[0.1, "NaN"], ["Infinity", "-Infinity"], [float(np.float32(0.1)), 3]]


def test_what_is_wrong_in_a_list_is_sent_for_the_service_to_name_the_place() -> None:
    query = [[1, None], ["2"], True, [2**80]]
    assert members(attention(query))["query"] == query


@pytest.mark.parametrize("wrong", [[[{1}]], [[np.zeros(2)]], [[torch.zeros(2)]], [b"1"]])
def test_a_list_of_what_json_cannot_say_is_told_before_anything_is_sent(wrong: Any) -> None:
    with pytest.raises(TypeError):
        sent(attention(wrong))


def test_a_mask_and_lengths_in_lists_join_arrays_as_arrays() -> None:
    arrays, _ = opened(attention(allow_mask=[[True, False, True]] * 3, key_lengths=[2], query_offset=[0]))
    assert arrays["allow_mask"].dtype == bool and arrays["allow_mask"].shape == (1, 1, 3, 3)
    assert arrays["key_lengths"].dtype == arrays["query_offset"].dtype == np.int64


@pytest.mark.parametrize(
    "given",
    [{"sinks": [0.5, 1.5]}, {"key": [[1.0, 2.0]]}, {"allow_mask": [[True], [True, False]]}, {"key_lengths": [1.5]}],
)
def test_a_list_that_must_be_rounded_or_looked_at_makes_it_json_that_is_answered_in_arrays(given: Any) -> None:
    call = attention(**given)
    sent_members = members(call)
    (name,) = given
    assert sent_members["query"]["dtype"] == "float32" and sent_members["query"]["shape"] == [1, 2, 3, 2]
    # A mask stands behind leading ones in JSON, too.
    assert str(given[name][0]).lower() in json.dumps(sent_members[name])
    assert call.accept == SAFETENSORS
    assert call.read(tensors_reply(context=QUERY)).context.tolist() == QUERY.tolist()


def test_options_at_their_defaults_are_not_sent() -> None:
    options = {
        "causal": False,
        "verify": np.False_,
        "empty_rows": "zeros",
        "layout": "bhtd",
        "scale": None,
        "window": None,
    }
    assert opened(attention(options=options))[1] == {}
    assert b"__metadata__" not in sent(attention(options=options))


def test_what_equals_a_default_and_is_not_it_is_sent() -> None:
    assert opened(attention(options={"causal": 0, "verify": 0.0}))[1] == {"causal": 0, "verify": 0.0}


def test_an_option_that_is_no_number_is_never_dropped() -> None:
    options = {"scale": math.nan, "softcap": math.inf}
    assert opened(attention(options=options))[1] == {"scale": "NaN", "softcap": "Infinity"}
    assert members(attention([[1]], options=options)) == {"query": [[1]], "scale": "NaN", "softcap": "Infinity"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"window": (2, None)}, {"window": {"left": 2, "right": None}}),
        ({"window": {"left": 1}}, {"window": {"left": 1}}),
        ({"outputs": "weights"}, {"outputs": ["weights"]}),
        ({"outputs": ("context", "weights")}, {"outputs": ["context", "weights"]}),
        (
            {"select": {"rows": np.arange(2), "heads": (0,), "top_k": np.int64(4)}},
            {"select": {"rows": [0, 1], "heads": [0], "top_k": 4}},
        ),
        ({"scale": np.float32(0.1)}, {"scale": float(np.float32(0.1))}),
    ],
)
def test_options_are_said_in_the_words_of_the_contract(given: Any, said: Any) -> None:
    assert opened(attention(options=given))[1] == said


def test_a_window_of_three_is_told_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="window: "):
        attention(options={"window": (1, 2, 3)})


def test_a_plain_offset_is_an_option_and_an_array_is_an_array() -> None:
    arrays, options = opened(attention(query_offset=3))
    assert options == {"query_offset": 3} and "query_offset" not in arrays
    assert members(attention([[1]], query_offset=-3))["query_offset"] == -3


def test_the_limit_is_one_more_option_in_every_form() -> None:
    assert opened(attention(options={"causal": True}), 250)[1] == {"causal": True, "timeout_ms": 250}
    assert opened(attention(), 250)[1] == {"timeout_ms": 250}
    assert members(attention([[1]]), 250) == {"query": [[1]], "timeout_ms": 250}


# Ranks of masks


@pytest.mark.parametrize("name", ["allow_mask", "block_mask", "bias"])
@pytest.mark.parametrize(
    ("batch", "shape", "leaves"),
    [
        (1, (5,), (1, 1, 1, 5)),
        (1, (4, 5), (1, 1, 4, 5)),
        (1, (1, 5), (1, 1, 1, 5)),
        (1, (3, 4, 5), (1, 3, 4, 5)),
        (2, (5,), (1, 1, 1, 5)),
        (2, (2,), (1, 1, 1, 2)),
        (2, (4, 5), (1, 1, 4, 5)),
        (2, (3, 4, 5), (1, 3, 4, 5)),
        (2, (2, 5), (2, 5)),
        (2, (2, 4, 5), (2, 4, 5)),
        (2, (2, 1, 1, 5), (2, 1, 1, 5)),
        (2, (), ()),
        (2, (1, 1, 1, 1, 5), (1, 1, 1, 1, 5)),
    ],
)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_masks_and_bias_leave_with_rank_4_unless_they_could_be_read_in_two_ways(
    kind: str, name: str, batch: int, shape: tuple[int, ...], leaves: tuple[int, ...]
) -> None:
    query: Any = np.zeros((batch, 3, 4, 2), dtype=np.float32)
    mask: Any = np.ones(shape, dtype=np.float32 if name == "bias" else bool)
    if kind == "torch":
        query, mask = torch.from_numpy(query), torch.from_numpy(mask)
    assert opened(attention(query, **{name: mask}))[0][name].shape == leaves


@pytest.mark.parametrize(
    ("query_shape", "layout", "batch"),
    [
        ((2, 3, 4, 5), "bhtd", 2),
        ((2, 3, 4), "bhtd", 1),
        ((2, 3), "bhtd", 1),
        ((2, 4, 3, 5), "bthd", 2),
        ((2, 4, 15), "btd", 2),
        ((2, 4, 8), None, 2),
        ((2, 8), None, 1),
    ],
)
def test_the_batch_is_where_the_layout_has_it(query_shape: tuple[int, ...], layout: str | None, batch: int) -> None:
    mask = np.ones((2, 7), dtype=bool)
    arrays, _ = opened(attention(np.zeros(query_shape, dtype=np.float32), layout=layout, allow_mask=mask))
    assert arrays["allow_mask"].shape == ((2, 7) if batch == 2 else (1, 1, 2, 7))


def test_masks_in_lists_leave_with_rank_4_and_faults_name_the_callers_own_places() -> None:
    call = attention([[1, 2]], allow_mask=[[True, 1]], bias=[[[0.5]]])
    assert members(call)["allow_mask"] == [[[[True, 1]]]] and members(call)["bias"] == [[[[0.5]]]]
    errors = [
        {"field": "allow_mask.0.0.0.1", "expected": "true or false", "received": "1"},
        {"field": "allow_mask.0.0", "expected": "a list", "received": "1"},
        {"field": "bias.0.0.0.0", "expected": "a", "received": "b"},
        {"field": "bias", "expected": "a", "received": "b"},
        {"field": "query.0.0.0", "expected": "a", "received": "b"},
    ]
    error = calls.refusal_of(call, reply(json.dumps({"errors": errors}).encode(), PROBLEM, status=422))
    assert error is not None
    fields = [fault.field for fault in error.faults]
    assert fields == ["allow_mask.0.1", "allow_mask", "bias.0.0.0", "bias", "query.0.0.0"]


@pytest.mark.parametrize("shape", [(3,), (3, 3), (2, 3, 3), (1, 2, 3, 3)])
@pytest.mark.parametrize("kind", ["numpy", "torch", "lists"])
def test_the_gradient_of_a_bias_has_the_rank_of_the_bias(kind: str, shape: tuple[int, ...]) -> None:
    query: Any = QUERY
    bias: Any = np.zeros(shape, dtype=np.float32)
    whole = np.zeros((1,) * (4 - len(shape)) + shape, dtype=np.float32)
    if kind == "torch":
        query, bias = torch.from_numpy(query), torch.from_numpy(bias)
    if kind == "lists":
        call = attention(query.tolist(), bias=bias.tolist())
        answer = call.read(reply(json.dumps({"grad_bias": whole.tolist(), "info": INFO}).encode()))
        assert answer.grad_bias == bias.tolist()
    else:
        answer = attention(query, bias=bias).read(tensors_reply(grad_bias=whole))
        assert tuple(answer.grad_bias.shape) == shape


# Plans and layers


def test_a_plan_sends_shapes_and_no_numbers() -> None:
    tensors = {
        "query": (2, 8, 100, 64),
        "key": torch.zeros(2, 8, 100, 64, device="meta", dtype=torch.bfloat16),
        "value": {"dtype": "float16", "shape": [2, 8, 100, 64]},
        "bias": np.zeros((100, 100)),
        "allow_mask": (2, 100),
        "key_lengths": [3, 4],
        "query_offset": 7,
        "sinks": [[0.5, 1.5]],
        "alibi_slopes": None,
    }
    call = calls.plan(tensors, {"causal": "lower_right", "verify": False}, layout="bhtd", dtype="bfloat16")
    assert members(call) == {
        "query": {"dtype": "bfloat16", "shape": [2, 8, 100, 64]},
        "key": {"dtype": "bfloat16", "shape": [2, 8, 100, 64]},
        "value": {"dtype": "float16", "shape": [2, 8, 100, 64]},
        "bias": {"dtype": "float64", "shape": [1, 1, 100, 100]},
        "allow_mask": {"dtype": "bool", "shape": [2, 100]},
        "key_lengths": {"dtype": "int64", "shape": [2]},
        "query_offset": 7,
        "sinks": {"dtype": "bfloat16", "shape": [1, 2]},
        "causal": "lower_right",
    }
    assert not call.takes_timeout


@pytest.mark.parametrize("query", [None, {"dtype": "float32"}, {"shape": "x"}, {"shape": None}])
def test_a_plan_that_says_no_shape_is_for_the_service_to_refuse(query: Any) -> None:
    call = calls.plan({"query": query, "bias": (3, 3)}, {}, layout="bhtd", dtype=None)
    assert members(call).get("query") == query


@pytest.mark.parametrize("name", ["", "..", ".", "a/../../v1", "1a", "a b", "a?replace=true", "a" * 65, "é", "a\n"])
def test_a_name_that_no_layer_can_have_is_told_before_anything_is_sent(name: str) -> None:
    for call in (calls.layer_path, calls.get_layer, calls.delete_layer):
        with pytest.raises(ValueError, match="a layer's name is 1 to 64"):
            call(name)
    with pytest.raises(ValueError, match="a layer's name is 1 to 64"):
        calls.put_layer(name, {}, {}, replace=False)


def test_only_what_may_be_done_twice_is_repeated() -> None:
    assert attention().may_repeat and calls.get_layer("a").may_repeat
    assert calls.put_layer("a", {"w_query": QUERY}, {}, replace=False).may_repeat
    replacing = calls.put_layer("a", {"w_query": QUERY}, {}, replace=True)
    assert replacing.path == "/v1/layers/a?replace=true"
    assert not replacing.may_repeat and not calls.delete_layer("a").may_repeat


# What is read


def test_an_answer_has_its_outputs_as_attributes_and_says_what_there_is() -> None:
    headers = {"x-request-id": "abc", "server-timing": "read;dur=0.125, parse;dur=1.5, odd"}
    content = safetensors.numpy.save({"context": QUERY, "weights": QUERY}, {"info": json.dumps(INFO)})
    answer = attention().read(reply(content, SAFETENSORS, headers=headers))
    assert np.array_equal(answer.context, QUERY) and set(answer.outputs) == {"context", "weights"}
    assert answer.request_id == "abc" and answer.server_timing == {"read": 0.125, "parse": 1.5}
    assert answer.info.path == "manual" and answer.info.max_abs_error is None
    with pytest.raises(AttributeError, match=r"no scores: it has context, weights; outputs=\[\.\.\.\] asks for more"):
        _ = answer.scores
    assert "weights" in dir(answer) and "context [1, 2, 3, 2]" in repr(answer)


def test_an_answer_and_its_info_cannot_be_changed() -> None:
    answer = attention().read(tensors_reply(context=QUERY))
    for change in (answer, answer.info):
        with pytest.raises(AttributeError):
            change.path = "fused"


def test_numbers_of_torch_come_back_as_torch() -> None:
    answer = attention(torch.zeros(1, 1, 2, 2)).read(tensors_reply(context=QUERY, top_keys=np.array([1, -1])))
    assert isinstance(answer.context, torch.Tensor) and answer.top_keys.dtype == torch.int64


def test_bfloat16_of_numpy_is_that_of_ml_dtypes() -> None:
    query = QUERY.astype(ml_dtypes.bfloat16)
    call = attention(query)
    body = sent(call)
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    assert header["query"]["dtype"] == "BF16"
    header["__metadata__"] = {"info": json.dumps(INFO)}
    text = json.dumps(header).encode()
    answer = call.read(reply(len(text).to_bytes(8, "little") + text + body[8 + length :], SAFETENSORS))
    assert answer.outputs["query"].dtype == ml_dtypes.bfloat16 and np.array_equal(answer.outputs["query"], query)


def test_lists_come_back_with_numbers_for_the_words_and_empty_where_empty() -> None:
    said = {
        "context": [[1.5, "NaN"]],
        "logsumexp": ["-Infinity", "Infinity"],
        "weights": {"dtype": "float32", "shape": [2, 0], "data": ""},
        "info": INFO | {"why": "NaN", "max_abs_error": "Infinity", "max_rel_error": 0.5, "worst": "context[0]"},
    }
    answer = attention([[1]]).read(reply(json.dumps(said).encode()))
    assert answer.context[0][0] == 1.5 and math.isnan(answer.context[0][1])
    assert answer.logsumexp == [-math.inf, math.inf] and answer.weights == [[], []]
    assert answer.info.max_abs_error == math.inf and answer.info.max_rel_error == 0.5 and answer.info.why == "NaN"


def test_what_a_later_service_adds_is_no_fault() -> None:
    said = {"context": [[1.5]], "info": INFO | {"new": 1}}
    assert attention([[1]]).read(reply(json.dumps(said).encode())).info.flops == 1


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (b"<html>", "text/html"),
        (b"", ""),
        (b"{}", JSON),
        (b"", SAFETENSORS),
        (b"\xff" * 8, SAFETENSORS),
        (b"\x02\0\0\0\0\0\0\0{}", SAFETENSORS),
        (safetensors.numpy.save({"context": QUERY}), SAFETENSORS),
        (safetensors.numpy.save({"context": QUERY}, {"info": "no"}), SAFETENSORS),
        (safetensors.numpy.save({"context": QUERY}, {"info": "{}"}), SAFETENSORS),
        (safetensors.numpy.save({"context": QUERY}, {"info": json.dumps(INFO)})[:-1], SAFETENSORS),
        (safetensors.numpy.save({"context": np.zeros(2, dtype=np.uint8)}, {"info": json.dumps(INFO)}), SAFETENSORS),
    ],
)
def test_an_answer_that_is_none_of_the_service_is_told_as_that(content: bytes, media_type: str) -> None:
    with pytest.raises(AttentionServiceError, match="is attn there") as caught:
        calls.answer_of(attention(), reply(content, media_type))
    assert type(caught.value).__name__ == "UnreadableAnswer"


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"context": [[1]]}', b'{"context": {"a": 1}, "info": {}}'])
def test_so_is_json_that_is_none_of_it(content: bytes) -> None:
    for call in (attention([[1]]), calls.get_layer("a"), calls.list_layers(), calls.info()):
        with pytest.raises(AttentionServiceError, match="is attn there"):
            calls.answer_of(call, reply(content))


def test_every_status_of_the_contract_has_a_class_of_its_own() -> None:
    assert set(BY_STATUS) == {400, 401, 404, 405, 406, 409, 413, 415, 422, 429, 500, 501, 503, 504}
    assert len(set(BY_STATUS.values())) == len(BY_STATUS)


@pytest.mark.parametrize("status", [*BY_STATUS, 302, 403, 502])
def test_a_refusal_carries_what_the_service_said(status: int) -> None:
    problem = {
        "type": "/errors/word",
        "title": "no",
        "status": status,
        "detail": "1 fault: key",
        "errors": [{"field": "key", "expected": "this", "received": "that"}],
        "needed_bytes": 2**40,
        "allowed_bytes": 2**30,
    }
    headers = {"x-request-id": "abc", "retry-after": "3"}
    error = calls.refusal_of(attention(), reply(json.dumps(problem).encode(), PROBLEM, status=status, headers=headers))
    assert type(error) is BY_STATUS.get(status, AttentionServiceError)
    assert (error.status, error.name, error.detail, error.request_id) == (status, "word", "1 fault: key", "abc")
    assert error.faults == (Fault("key", "this", "that"),)
    assert str(error) == f"{status} word: 1 fault: key\n  key: expected this, received that\n  (request abc)"
    if isinstance(error, Overloaded | Unavailable):
        assert error.retry_after_s == 3.0
    if isinstance(error, TooLarge):
        assert (error.needed_bytes, error.allowed_bytes) == (2**40, 2**30)


@pytest.mark.parametrize(("content", "media_type"), [(b"<h1>Bad gateway", "text/html"), (b"[1]", PROBLEM), (b"", "")])
def test_a_refusal_by_whoever_stands_between_is_one_too(content: bytes, media_type: str) -> None:
    error = calls.refusal_of(attention(), reply(content, media_type, status=503))
    assert isinstance(error, Unavailable) and error.retry_after_s is None
    assert error.detail == (content.decode() or "no reason was given")
