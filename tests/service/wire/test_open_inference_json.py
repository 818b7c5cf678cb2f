"""Bodies of the Open Inference Protocol over HTTP: both parts read, every misfit named, answers written."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import struct
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_core.errors import InvalidProblem
from service.errors import Malformed
from service.text_process import ReadReply, ReadTask, WriteReply, WriteTask, answer, room_for_reading
from service.wire import inference_text, open_inference_json
from service.wire.arrays import ALIGNMENT_BYTES, FlatTensor, Limits, aligned_room
from service.wire.inference import CheckedInference, check
from service.wire.inference_models import Models
from service.wire.inference_request import InferenceRequest, MemoryPlace, RequestedOutput
from service.wire.requests import ReadLimits
from service.wire.text import MAX_LEVELS, NestedList, read_tree

LIMITS = Limits()
MODELS = Models()


def tensor(name: str = "query", shape: Any = (1, 1, 1, 2), datatype: str = "FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "datatype": datatype, **more}


def qkv(**more: Any) -> list[dict[str, Any]]:
    return [tensor(name, **({"data": [1, 2]} | more)) for name in ("query", "key", "value")]


def body_of(*inputs: dict[str, Any], **members: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **members}).encode()


def decode(body: bytes, json_bytes: int | None = None) -> InferenceRequest:
    return open_inference_json.decode(body, json_bytes, LIMITS)


def checked(body: bytes, json_bytes: int | None = None, model: str = "sdpa") -> CheckedInference:
    return check(decode(body, json_bytes), MODELS.get(model), ReadLimits())


def faults_of(body: bytes, json_bytes: int | None = None, model: str = "sdpa") -> dict[str, str]:
    """What is refused, by field; nothing where the body is fine."""
    try:
        checked(body, json_bytes, model)
    except InvalidProblem as error:
        return {fault.field: f"{fault.expected}, received {fault.received}" for fault in error.faults}
    return {}


def flat_of(request: InferenceRequest, place: int = 0) -> FlatTensor:
    content = request.inputs[place].content
    assert isinstance(content, FlatTensor), request.faults
    return content


def query_of(**more: Any) -> list[Any]:
    """The numbers of a request with one input."""
    numbers: list[Any] = flat_of(decode(body_of(tensor(**more)))).data.tolist()
    return numbers


# Numbers in JSON


@pytest.mark.parametrize(
    "data",
    [
        [1, 2, 3, 4, 5, 6],
        [[1, 2, 3, 4, 5, 6]],
        [[[1, 2, 3], [4, 5, 6]]],
        [[[[1], [2], [3]], [[4], [5], [6]]]],
        [1.0, 2, 3e0, 4, 5, 6],
    ],
)
def test_numbers_are_read_flat_or_nested_to_any_depth_of_the_shape(data: Any) -> None:
    assert query_of(shape=[1, 2, 3, 1], data=data) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "data",
    [
        [[1, 2, 3], [4, 5, 6]],
        [[[1, 2], [3, 4], [5, 6]]],
        [[1], [2], [3], [4], [5], [6]],
        [[[[[1]], [[2]], [[3]]], [[[4]], [[5]], [[6]]]]],
        [[[1, 2, 3], [4, 5]]],
        [[1, 2, 3], 4, 5, 6],
        [[[1, 2, 3], []]],
    ],
)
def test_lists_that_do_not_nest_as_the_shape_does_are_refused(data: Any) -> None:
    found = faults_of(body_of(tensor("query", [1, 2, 3, 1], data=data), *qkv()[1:]))
    assert any(field.startswith("query.data") for field in found), found


@pytest.mark.parametrize("data", [[], [1], [1, 2, 3]])
def test_another_count_than_the_shape_has_is_refused(data: Any) -> None:
    assert "query.data" in faults_of(body_of(tensor(data=data), *qkv()[1:]))


@pytest.mark.parametrize(
    ("shape", "data", "is_fine"),
    [
        ([1, 1, 0, 2], [], True),
        ([1, 1, 0, 2], [[[]]], True),
        ([0, 1, 1, 2], [], True),
        ([2, 1, 0, 3], [[], []], True),
        ([2, 1, 0, 3], [[[]], [[]]], True),
        ([2, 1, 0, 3], [[]], False),
        ([0, 1, 1, 2], [[]], False),
        ([1, 1, 0, 2], [1], False),
        ([1, 1, 0, 2], [[[[]]]], False),
        ([1, 1, 0, 2], 5, False),
    ],
)
def test_a_shape_without_elements_is_said_by_lists_without_any(shape: list[int], data: Any, is_fine: bool) -> None:
    request = decode(body_of(tensor(shape=shape, data=data)))
    assert (not request.faults) is is_fine
    assert (request.inputs[0].content is not None) is is_fine


@pytest.mark.parametrize(
    ("datatype", "wrong"),
    [
        ("FP32", "1"),
        ("FP32", True),
        ("FP32", None),
        ("FP32", {"a": 1}),
        ("FP32", "NaN"),
        ("FP64", "Infinity"),
        ("FP32", 1e39),
        ("INT64", 1.0),
        ("INT64", "1"),
        ("INT64", True),
        ("INT64", 2**63),
        ("BOOL", 1),
        ("BOOL", "true"),
        ("BOOL", 0.0),
    ],
)
def test_an_element_of_another_kind_is_refused_at_its_place(datatype: str, wrong: Any) -> None:
    good = {"BOOL": True}.get(datatype, 1)
    request = decode(body_of(tensor(shape=[3], datatype=datatype, data=[good, good, wrong])))
    assert [fault.field.split(".")[:2] for fault in request.faults] == [["query", "data"]]
    assert "2" in request.faults[0].field or "element 2" in request.faults[0].received
    assert request.inputs[0].content is None


@pytest.mark.parametrize("padding", [0, 4000])
@pytest.mark.parametrize("text", ["1e400", "-1e400", "1" * 400, "[1]", "-"])
def test_numbers_beyond_float64_are_refused_on_both_roads(text: str, padding: int) -> None:
    body = body_of(tensor(shape=[2], datatype="FP64", data=[1, 77])).replace(b"77", text.encode())
    with pytest.raises((InvalidProblem, Malformed)):
        checked(body + b" " * padding)


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@pytest.mark.parametrize("padding", [0, 4000])
def test_bare_words_are_the_numbers_that_json_has_none_for(datatype: str, padding: int) -> None:
    body = body_of(tensor(shape=[4], datatype=datatype, data=[math.nan, math.inf, -math.inf, 1.5]))
    read = flat_of(decode(body + b" " * padding)).data
    assert np.array_equal(read, np.array([math.nan, math.inf, -math.inf, 1.5]), equal_nan=True)


@pytest.mark.parametrize("word", ["+Infinity", "-NaN", "nan", "Infinit", "Nan"])
def test_other_words_are_malformed(word: str) -> None:
    with pytest.raises(Malformed):
        decode(body_of(tensor(shape=[2], data=[1, 77])).replace(b"77", word.encode()))


def test_bare_words_beside_a_number_that_overflows_do_not_excuse_it() -> None:
    body = body_of(tensor(shape=[3], data=[math.inf, 1, 77])).replace(b"77", b"1e400")
    request = decode(body)
    assert [fault.field for fault in request.faults] == ["query.data.2"]


@pytest.mark.parametrize("member", ['"scale":NaN', '"scale":Infinity', '"x":1e400'])
def test_a_parameter_is_a_finite_number(member: str) -> None:
    body = b'{"parameters":{' + member.encode() + b"}," + body_of(*qkv())[1:]
    assert any(field.startswith("parameters.") for field in faults_of(body))


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_datatypes_are_sent_in_binary(datatype: str) -> None:
    model = f"sdpa_{datatype.lower()}"
    found = faults_of(body_of(*(given | {"datatype": datatype} for given in qkv())), model=model)
    assert "binary data" in found["query.data"]
    assert "binary_data" in found["outputs.context"]


@pytest.mark.parametrize("datatype", ["INT32", "UINT8", "BYTES", "FP8", "fp32", ""])
def test_a_datatype_that_the_model_has_not_is_refused(datatype: str) -> None:
    assert "query.datatype" in faults_of(body_of(tensor(datatype=datatype, data=[1, 2]), *qkv()[1:]))


# Members


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"inputs": 5}, "inputs"),
        ({"inputs": {}}, "inputs"),
        ({"inputs": [1]}, "inputs.0"),
        ({"inputs": [{}]}, "inputs.0"),
        ({"inputs": [{"name": 5}]}, "inputs.0"),
        ({"inputs": [tensor("quarry", data=[1, 2])]}, "inputs.0"),
        ({"inputs": [*qkv(), tensor(data=[1, 2])]}, "query"),
        ({"inputs": qkv()[:2]}, "value"),
        ({"inputs": []}, "query"),
        ({}, "query"),
        ({"id": 5}, "id"),
        ({"id": ["a"]}, "id"),
        ({"parameters": []}, "parameters"),
        ({"parameters": {"x": [1]}}, "parameters.x"),
        ({"parameters": {"x": None}}, "parameters.x"),
        ({"parameters": {"triton_x": 1}}, "parameters.triton_x"),
        ({"parameters": {"binary_data_output": 1}}, "parameters.binary_data_output"),
        ({"outputs": {}}, "outputs"),
        ({"outputs": [1]}, "outputs.0"),
        ({"outputs": [{"name": 1}]}, "outputs.0"),
        ({"outputs": [{"name": "weights"}]}, "outputs.0"),
        ({"outputs": [{"name": "context"}, {"name": "context"}]}, "outputs.1"),
        ({"outputs": [{"name": "context", "parameters": {"binary_data": 1}}]}, "outputs.context.binary_data"),
        ({"outputs": [{"name": "context", "parameters": {"classification": 3}}]}, "outputs.context.classification"),
    ],
)
def test_members_of_another_kind_are_refused_by_name(members: dict[str, Any], field: str) -> None:
    assert field in faults_of(json.dumps({"inputs": qkv()} | members if members else {}).encode())


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"shape": None}, "query.shape"),
        ({"shape": "1"}, "query.shape"),
        ({"shape": [1, 1, 1, 2.0]}, "query.shape"),
        ({"shape": [1, 1, True, 2]}, "query.shape"),
        ({"shape": [1, 1, 1, -2]}, "query.shape"),
        ({"shape": [1, 1, 1, 1, 2]}, "query.shape"),
        ({"shape": [2**40, 2**40, 2**40, 2**40]}, "query.shape"),
        ({"shape": [10**30]}, "query.shape"),
        ({"datatype": 5}, "query.datatype"),
        ({"data": None}, "query"),
        ({"data": 5}, "query.data"),
        ({"parameters": {"binary_data_size": 8}}, "query"),
        ({"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}}, "query"),
        ({"parameters": {"shared_memory_byte_size": 8}}, "query.shared_memory_region"),
        ({"parameters": 5}, "query"),
        ({"parameters": {"x": {}}}, "query.x"),
    ],
)
def test_what_is_wrong_about_an_input_is_named(given: dict[str, Any], field: str) -> None:
    assert field in faults_of(body_of(tensor(data=[1, 2]) | given, *qkv()[1:]))


def test_null_is_the_same_as_leaving_a_member_out() -> None:
    inputs = [given | {"parameters": None} for given in qkv()]
    asked = checked(body_of(*inputs, id=None, parameters=None, outputs=None))
    assert asked.id is None
    assert [output.name for output in asked.outputs] == ["context"]


def test_unknown_members_are_ignored_and_unknown_parameters_are_named() -> None:
    inputs = [given | {"content": [1], "parameters": {"content_type": "np"}} for given in qkv()]
    asked = checked(body_of(*inputs, model_name="other", extra={"a": [{"b": 1}]}, parameters={"colour": "red"}))
    assert asked.ignored == ("colour",)


@pytest.mark.parametrize(
    "members",
    [
        b'{"id":"a","id":"b",',
        b'{"parameters":{"scale":1,"scale":2},',
        b'{"unknown":[{"a":1,"a":2}],',
        b'{"unknown":"' + b"x" * 5000 + b'","id":"a","id":"a",',
    ],
)
def test_a_name_that_is_repeated_is_refused_at_any_depth(members: bytes) -> None:
    assert any("each name once" in text for text in faults_of(members + body_of(*qkv())[1:]).values())


@pytest.mark.parametrize("padding", [0, 4000])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b'"a"', b"null", b"{} {}", b"\xef\xbb\xbf{}", b'{"id":"\xff"}']
)
def test_what_is_not_one_json_object_is_refused(body: bytes, padding: int) -> None:
    with pytest.raises((Malformed, InvalidProblem)):
        decode(body + b" " * padding)


@pytest.mark.parametrize("padding", ["", "x" * 4000])
@pytest.mark.parametrize("beside", ["", ',"y":1e400', ',"y":[NaN]'])
def test_half_of_a_surrogate_pair_is_malformed_on_every_road(padding: str, beside: str) -> None:
    body = ('{"id":"\\ud800","x":"' + padding + '"' + beside + ',"inputs":[]}').encode()
    with pytest.raises(Malformed):
        decode(body)


@pytest.mark.parametrize("padding", ["", "x" * 4000])
@pytest.mark.parametrize(("levels", "is_fine"), [(MAX_LEVELS - 1, True), (MAX_LEVELS, False), (100_000, False)])
def test_nesting_is_limited(levels: int, is_fine: bool, padding: str) -> None:
    body = ('{"id":"' + padding + '","x":' + "[" * levels + "]" * levels + "}").encode()
    if is_fine:
        assert decode(body).id == padding
    else:
        with pytest.raises((Malformed, InvalidProblem)):
            decode(body)


def test_lists_are_limited_in_number() -> None:
    with pytest.raises(InvalidProblem):
        open_inference_json.decode(b'{"x":[[],[],[]]}', None, Limits(max_json_lists=3))


def test_a_thousand_broken_inputs_are_not_all_named() -> None:
    assert len(decode(body_of(*[{"name": 1}] * 10_000)).faults) <= 50


@given(text=st.text(alphabet=st.characters(codec="utf-8")))
def test_an_id_comes_back_as_it_was_sent(text: str) -> None:
    request = decode(body_of(*qkv(), id=text))
    assert request.id == text
    parts = open_inference_json.answer_parts(MODELS.get("sdpa"), request.id, {}, [])
    assert json.loads(b"".join(parts.write({})))["id"] == text


# Outputs


def test_the_form_of_an_output_is_its_own_or_the_requests() -> None:
    names = ("context", "weights", "scores")
    outputs: list[dict[str, Any]] = [{"name": name} for name in names]
    outputs[1]["parameters"] = {"binary_data": False}
    outputs[2]["parameters"] = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 4}
    request = decode(body_of(outputs=outputs, parameters={"binary_data_output": True}))
    assert request.outputs == [
        RequestedOutput("context", is_binary=True),
        RequestedOutput("weights", is_binary=False),
        RequestedOutput("scores", is_binary=False, place=MemoryPlace("r", 4, 8)),
    ]
    assert [output.is_binary for output in decode(body_of(outputs=outputs)).outputs] == [False, False, False]


def test_an_output_is_either_in_shared_memory_or_in_the_answer() -> None:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "binary_data": True}
    assert decode(body_of(outputs=[{"name": "context", "parameters": place}])).faults


@pytest.mark.parametrize(
    "parameters",
    [
        {"shared_memory_region": "r"},
        {"shared_memory_region": 5, "shared_memory_byte_size": 8},
        {"shared_memory_region": "r", "shared_memory_byte_size": "8"},
        {"shared_memory_region": "r", "shared_memory_byte_size": 8.0},
        {"shared_memory_region": "r", "shared_memory_byte_size": True},
        {"shared_memory_region": "r", "shared_memory_byte_size": -1},
        {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": -1},
        {"shared_memory_region": "r", "shared_memory_byte_size": 2**63},
        {"shared_memory_offset": 1},
    ],
)
def test_a_place_in_shared_memory_is_a_region_and_whole_numbers(parameters: dict[str, Any]) -> None:
    assert decode(body_of(tensor(parameters=parameters))).faults
    assert decode(body_of(outputs=[{"name": "context", "parameters": parameters}])).faults


def test_an_input_in_shared_memory_is_a_place() -> None:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 64}
    request = decode(body_of(tensor(parameters=parameters)))
    assert request.faults == []
    assert request.inputs[0].content == MemoryPlace("r", 64, 8)


# The binary part


@pytest.mark.parametrize(
    "header", ["", "0", "00", "12abc", "1e3", "+5", "-5", " 5", "5, 5", "0x5", "5.0", "٥", "9" * 19]
)
def test_a_length_that_is_no_whole_number_is_malformed(header: str) -> None:
    with pytest.raises(Malformed):
        open_inference_json.json_length(header)


def test_a_length_is_a_whole_number() -> None:
    assert open_inference_json.json_length(None) is None
    assert open_inference_json.json_length("12") == open_inference_json.json_length("0012") == 12


def binary_body(*parts: tuple[dict[str, Any], bytes], **members: Any) -> tuple[bytes, int]:
    text = body_of(*(given for given, _ in parts), **members)
    return text + b"".join(data for _, data in parts), len(text)


def binary(name: str, data: bytes, size: Any = None, **more: Any) -> tuple[dict[str, Any], bytes]:
    given = tensor(name, **more)
    return given | {"parameters": {"binary_data_size": len(data) if size is None else size}}, data


PAIR = struct.pack("<2f", 1.5, -2.0)


def test_binary_parts_follow_the_json_in_its_order_and_mix_with_numbers() -> None:
    mixed = (tensor("value", data=[5, 6]), b"")
    body, length = binary_body(binary("query", PAIR), mixed, binary("key", struct.pack("<2f", 3, 4)))
    problem = checked(body, length).problem
    read = {name: given.view(-1).tolist() for name, given in problem.tensors().items()}
    assert read == {"query": [1.5, -2.0], "key": [3, 4], "value": [5, 6]}


def test_binary_parts_are_used_where_they_lie() -> None:
    sent, length = binary_body(binary("query", PAIR), binary("key", PAIR), binary("value", PAIR))
    room = aligned_room("bool", len(sent) + ALIGNMENT_BYTES).view(np.uint8)
    start = -length % ALIGNMENT_BYTES
    body = room[start : start + len(sent)]
    body[:] = np.frombuffer(sent, dtype=np.uint8)
    problem = check(decode(body.data, length), MODELS.get("sdpa"), ReadLimits()).problem  # type: ignore[arg-type]
    at = [given.data_ptr() - body.ctypes.data for given in problem.tensors().values()]
    assert at == [length, length + 8, length + 16]


def test_a_tensor_behind_a_mask_of_odd_length_is_read_all_the_same() -> None:
    body, length = binary_body(
        binary("query", PAIR),
        binary("allow_mask", b"\1", shape=[1, 1], datatype="BOOL"),
        binary("bias", struct.pack("<f", 0.5), shape=[1, 1]),
    )
    bias = checked(body, length, "attention").problem.tensors()["bias"]
    assert bias.tolist() == [[0.5]] and bias.data_ptr() % 4 == 0


@pytest.mark.parametrize("cut", [1, 8, -1, -8])
def test_less_or_more_than_the_sum_of_the_sizes_is_refused(cut: int) -> None:
    body, length = binary_body(binary("query", PAIR), binary("key", PAIR), binary("value", PAIR))
    assert "" in faults_of(body[:-cut] if cut > 0 else body + bytes(-cut), length)


@pytest.mark.parametrize("size", [4, 12, 0])
def test_a_size_that_is_not_the_shapes_is_refused(size: int) -> None:
    body, length = binary_body(binary("query", bytes(size)), binary("key", PAIR), binary("value", PAIR))
    assert "query.data" in faults_of(body, length)


@pytest.mark.parametrize("size", [-8, 8.0, "8", True, 2**64, [8]])
def test_a_size_that_is_no_whole_number_is_refused(size: Any) -> None:
    body, length = binary_body(binary("query", PAIR, size=size), binary("key", PAIR), binary("value", PAIR))
    assert "query.binary_data_size" in faults_of(body, length)


@pytest.mark.parametrize("shape", [[2**31, 2**31, 1, 1], [2**62, 2, 2, 2]])
def test_a_declared_shape_allocates_nothing(shape: list[int]) -> None:
    body, length = binary_body(binary("query", PAIR, shape=shape), binary("key", PAIR), binary("value", PAIR))
    assert "query.shape" in faults_of(body, length)


def test_binary_data_without_the_header_is_refused() -> None:
    found = faults_of(binary_body(binary("query", PAIR), *((given, b"") for given in qkv()[1:]))[0][: -len(PAIR)])
    assert "Inference-Header-Content-Length" in found["query"]


def test_json_that_is_longer_than_the_body_is_malformed() -> None:
    with pytest.raises(Malformed):
        decode(body_of(*qkv()), 10_000)


def test_json_that_ends_within_itself_is_malformed() -> None:
    body, length = binary_body(binary("query", PAIR), binary("key", PAIR), binary("value", PAIR))
    with pytest.raises(Malformed):
        decode(body, length - 1)


def test_tensors_without_bytes_are_legal() -> None:
    shape = [1, 1, 0, 2]
    body, length = binary_body(*(binary(name, b"", shape=shape) for name in ("query", "key", "value")))
    assert checked(body, length).problem.tensors()["query"].shape == (1, 1, 0, 2)


@pytest.mark.parametrize("padding", [0, 4000])
def test_json_with_no_binary_input_may_be_announced_too(padding: int) -> None:
    body = body_of(*qkv()) + b" " * padding
    assert faults_of(body, len(body)) == {}
    assert "" in faults_of(body + b" ", len(body))


# Both roads, and workers


@given(
    numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=12),
    datatype=st.sampled_from(["FP32", "FP64"]),
)
def test_numbers_come_back_with_their_bits(numbers: list[float], datatype: str) -> None:
    read = flat_of(decode(body_of(tensor(shape=[len(numbers)], datatype=datatype, data=numbers))))
    sent = torch.tensor(numbers, dtype=torch.float32 if datatype == "FP32" else torch.float64)
    assert read.data.tobytes() == sent.numpy().tobytes()
    written = answer_text({"context": sent.view(1, 1, 1, -1)}, binary=False)
    assert np.array(written["outputs"][0]["data"], dtype=read.data.dtype).tobytes() == sent.numpy().tobytes()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.sampled_from(["data", "name", "shape", "x"]), children, max_size=4)
    ),
    max_leaves=20,
)


@given(document=st.dictionaries(st.sampled_from(["inputs", "data", "id", "outputs"]), JSON, max_size=4))
def test_both_roads_read_the_same_tree(document: dict[str, Any]) -> None:
    short = json.dumps(document).encode()
    trees = [outcome_of(short), outcome_of(short + b" " * 4000)]
    assert repr(trees[0]) == repr(trees[1])
    for body in (short, short + b" " * 4000):
        with contextlib.suppress(Malformed, InvalidProblem):
            decode(body)


def outcome_of(body: bytes) -> Any:
    def plain(node: Any) -> Any:
        if isinstance(node, NestedList):
            return ["nested", node.plain()]
        if isinstance(node, dict):
            return {name: plain(child) for name, child in node.items()}
        return [plain(child) for child in node] if isinstance(node, list) else node

    tree, repeated = read_tree(body, "data")
    return plain(tree), repeated


def test_a_text_worker_reads_and_writes_the_same() -> None:
    inputs = [
        tensor("query", [1, 1, 2, 2], data=[[[[1.5, 2], [3, math.nan]]]]),
        tensor("allow_mask", [2, 2], "BOOL", data=[True, False, True, True]),
        tensor("key_lengths", [1], "INT64", data=[2**53 + 1]),
        tensor("bias", [2], "FP64", data=[0.1, -math.inf]),
    ]
    body = body_of(*inputs, id="x")
    region = np.zeros(2**16, dtype=np.uint8)
    region[: len(body)] = np.frombuffer(body, dtype=np.uint8)
    reply = answer(ReadTask(len(body), functools.partial(inference_text.read, limits=LIMITS)), region)
    assert isinstance(reply, ReadReply), reply
    here = inference_text.read(body, LIMITS)
    assert {place: kept.within(region).data.tobytes() for place, kept in reply.places.items()} == {
        place: flat.data.tobytes() for place, flat in here.tensors.items()
    }
    assert repr(reply.read.request) == repr(here.request)
    parts = open_inference_json.answer_parts(
        MODELS.get("attention"), "x", {"path": "fused"}, [(RequestedOutput("logsumexp", False), torch.ones(1, 1, 2))]
    )
    places = {"logsumexp": reply.places[0]}
    written = answer(WriteTask(places, parts.writer, 2**15), region)
    assert isinstance(written, WriteReply)
    flat = {"logsumexp": reply.places[0].within(region)}
    assert region[written.start : written.end].tobytes() == b"".join(parts.write(flat))


@pytest.mark.parametrize(
    "given",
    [
        tensor("", [1], "FP64", data=[1]),
        tensor("q", [999], "FP64", data=[1] * 999),
        tensor("q", [999], "BOOL", data=[True] * 999),
        tensor("q", [999, 1], "INT64", data=[[1]] * 999),
    ],
)
def test_no_body_needs_more_than_its_room(given: dict[str, Any]) -> None:
    for count in (1, 50, 300):
        body = orjson.dumps({"inputs": [given] * count})
        region = np.zeros(room_for_reading(len(body)), dtype=np.uint8)
        region[: len(body)] = np.frombuffer(body, dtype=np.uint8)
        reply = answer(ReadTask(len(body), functools.partial(inference_text.read, limits=LIMITS)), region)
        assert isinstance(reply, ReadReply), reply
        assert len(reply.places) == count and reply.end <= region.size


# Answers


def answer_text(outputs: dict[str, Tensor], *, binary: bool) -> Any:
    asked = [(RequestedOutput(name, binary), given) for name, given in outputs.items()]
    parts = open_inference_json.answer_parts(MODELS.get("attention"), None, {"path": "fused"}, asked)
    text = b"".join(parts.write(parts.flat()))
    assert len(text) <= inference_text.max_text_bytes(parts.flat(), parts.members, parts.entries)
    return json.loads(text)


def test_an_answer_has_the_outputs_in_their_order_each_in_its_form() -> None:
    place = MemoryPlace("r", 0, 100)
    outputs = [
        (RequestedOutput("logsumexp", is_binary=False), torch.tensor([[[-math.inf, math.nan, math.inf, 0.1]]])),
        (RequestedOutput("context", is_binary=True), torch.ones(1, 1, 1, 2)),
        (RequestedOutput("weights", is_binary=False, place=place), torch.ones(1, 1, 1, 1)),
        (RequestedOutput("scores", is_binary=True), torch.ones(1, 1, 0, 1)),
    ]
    parts = open_inference_json.answer_parts(MODELS.get("attention"), "7", {"path": "fused"}, outputs)
    text = b"".join(parts.write(parts.flat()))
    assert text == (
        b'{"id":"7","model_name":"attention","model_version":"1","parameters":{"path":"fused"},"outputs":['
        b'{"name":"logsumexp","datatype":"FP32","shape":[1,1,4],"data":[-Infinity,NaN,Infinity,0.1]},'
        b'{"name":"context","datatype":"FP32","shape":[1,1,1,2],"parameters":{"binary_data_size":8}},'
        b'{"name":"weights","datatype":"FP32","shape":[1,1,1,1]},'
        b'{"name":"scores","datatype":"FP32","shape":[1,1,0,1],"parameters":{"binary_data_size":0}}]}'
    )
    assert [bytes(piece) for piece in parts.data] == [struct.pack("<2f", 1, 1)]
    assert parts.is_binary


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_outputs_are_flat_lists_with_every_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sent = torch.randn(3, 2, 300, 160, generator=generator, dtype=dtype)
    written = answer_text({"context": sent}, binary=False)["outputs"][0]
    assert written["shape"] == [3, 2, 300, 160]
    read = np.array(written["data"], dtype=np.float32 if dtype == torch.float32 else np.float64)
    assert read.tobytes() == sent.numpy().tobytes()


def test_outputs_without_elements_are_empty_lists() -> None:
    assert answer_text({"context": torch.empty(1, 0, 2, 3)}, binary=False)["outputs"][0]["data"] == []


def test_only_json_has_a_length_to_estimate() -> None:
    model = MODELS.get("sdpa")
    assert open_inference_json.answer_text_bytes([RequestedOutput("context", True)], model, 4000) == 0
    assert open_inference_json.answer_text_bytes([RequestedOutput("context", False)], model, 4000) > 16_000
