"""Messages taken apart and put together by hand are those that protobuf reads and writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import descriptor_pool
from hypothesis import given
from hypothesis import strategies as st

from attn_core.errors import Fault, InvalidProblem
from attn_core.prepared import prepare
from service.errors import Malformed
from service.wire import open_inference_pb2 as pb
from service.wire import open_inference_proto as proto
from service.wire.arrays import FlatTensor
from service.wire.inference import CheckedInference, MemoryPlace, RequestedOutput, check
from service.wire.inference_models import Models
from service.wire.inference_request import MAX_NAMED
from service.wire.proto_recipes import MAX_HEAD_BYTES, MAX_RECIPES, ProtoRecipes
from service.wire.requests import ReadLimits
from service.wire.tensors import view_bytes
from tests.support.rpc import operands, outputs_of, parameters_of, raw_of, request_of

FOLDER = Path(proto.__file__).parent
WHATEVER = st.binary(max_size=300)


def read(message: pb.ModelInferRequest) -> Any:
    data = message.SerializeToString()
    return proto.read_request(*proto.read_message(data, proto.split(data)))


def fields_of_faults(faults: list[Fault]) -> set[str]:
    return {fault.field for fault in faults}


def test_what_make_proto_writes_is_what_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", f"--descriptor_set_out={tmp_path}/a.desc"]
    subprocess.run([*command, f"--pyi_out={tmp_path}", "open_inference.proto"], cwd=FOLDER, check=True)
    assert (tmp_path / "a.desc").read_bytes() == (FOLDER / "open_inference.desc").read_bytes()
    assert (tmp_path / "open_inference_pb2.pyi").read_text() == (FOLDER / "open_inference_pb2.pyi").read_text()


def test_nothing_of_ours_is_in_the_pool_of_the_process() -> None:
    assert pb.DESCRIPTOR.pool is not descriptor_pool.Default()  # type: ignore[no-untyped-call]


# Taking requests apart


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2_097_152])
def test_a_request_is_split_where_its_fields_end(size: int) -> None:
    message = request_of({"query": torch.zeros(1, 1, 1, 1)}, id="x" * min(size, 200))
    message.raw_input_contents[:] = [b"r" * size, b"", b"s"]
    data = message.SerializeToString()
    frame = proto.split(data)
    assert frame is not None
    assert [data[begin:end] for begin, end in frame.spans] == list(message.raw_input_contents)
    del message.raw_input_contents[:]
    assert frame.head == message.SerializeToString()
    assert proto.id_of(data, frame) == message.id
    message.ClearField("id")
    assert frame.key == message.SerializeToString()


@given(data=WHATEVER)
def test_whatever_comes_is_read_as_protobuf_reads_it(data: bytes) -> None:
    assert_read_alike(data)


@given(changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4), cut=st.integers(0, 400))
def test_a_damaged_request_is_read_as_protobuf_reads_it(changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(request_of(operands(1, 1, 1, 4), id="é", parameters={"scale": 0.5}).SerializeToString())
    for place, byte in changes:
        data[place % len(data)] = byte
    assert_read_alike(bytes(data[: max(1, len(data) - cut)]))


def assert_read_alike(data: bytes) -> None:
    try:
        whole = pb.ModelInferRequest.FromString(data)
    except Exception:
        with pytest.raises(Malformed):
            proto.read_message(data, proto.split(data))
        return
    message, raw = proto.read_message(data, proto.split(data))
    assert [bytes(content) for content in raw] == list(whole.raw_input_contents)
    assert proto.id_of(data, proto.split(data)) == whole.id
    del message.raw_input_contents[:]
    del whole.raw_input_contents[:]
    assert message.SerializeToString(deterministic=True) == whole.SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    "twist",
    [
        lambda data: data + b"\x0a\x01m",  # a name behind the raw contents
        lambda data: b"\x1a\x01a" + data,  # a second id
        lambda data: b"\x48\x05" + data,  # an unknown number
    ],
)
def test_what_is_out_of_the_ordinary_is_left_to_protobuf(twist: Any) -> None:
    data = twist(request_of(operands(), id="b").SerializeToString())
    assert proto.split(data) is None
    assert_read_alike(data)


# Contents


@pytest.mark.parametrize(
    ("datatype", "field", "dtype"),
    [
        ("FP32", "fp32_contents", torch.float32),
        ("FP64", "fp64_contents", torch.float64),
        ("BOOL", "bool_contents", torch.bool),
        ("INT64", "int64_contents", torch.int64),
    ],
)
@pytest.mark.parametrize("count", [1, 7, 200])
def test_typed_contents_are_the_numbers_that_were_sent(
    datatype: str, field: str, dtype: torch.dtype, count: int
) -> None:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count)).mul(3).to(dtype)
    contents = pb.InferTensorContents(**{field: numbers.tolist()})
    # A field that nobody knows, as a later version might send.
    contents.MergeFromString(b"\x78\x05")
    message = pb.ModelInferRequest(model_name="sdpa")
    message.inputs.add(name="query", datatype=datatype, shape=[count], contents=contents)
    request = read(message)
    assert request.faults == []
    content = request.inputs[0].content
    assert isinstance(content, FlatTensor)
    assert content.data.ctypes.data % 64 == 0
    assert torch.equal(torch.from_numpy(content.data), numbers)


def typed(**fields: Any) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="sdpa")
    given_fields = {"name": "query", "datatype": "FP32", "shape": [2]} | fields
    message.inputs.add(**given_fields)
    return message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (typed(contents=pb.InferTensorContents(fp32_contents=[1])), "query.contents"),
        (typed(contents=pb.InferTensorContents(fp32_contents=[1, 2, 3])), "query.contents"),
        (typed(contents=pb.InferTensorContents(fp64_contents=[1, 2])), "query.contents"),
        (typed(contents=pb.InferTensorContents(fp32_contents=[1, 2], bool_contents=[True])), "query.contents"),
        (typed(), "query.contents"),
        (typed(datatype="FP16", contents=pb.InferTensorContents(fp32_contents=[1, 2])), "query.contents"),
        (typed(datatype="BF16"), "query.contents"),
    ],
)
def test_typed_contents_that_do_not_fit_are_refused(message: pb.ModelInferRequest, field: str) -> None:
    assert fields_of_faults(read(message).faults) == {field}


def test_a_typed_tensor_of_nothing_needs_no_contents() -> None:
    request = read(typed(shape=[0]))
    assert request.faults == [] and isinstance(request.inputs[0].content, FlatTensor)


def test_raw_and_typed_contents_do_not_mix() -> None:
    message = request_of(operands())
    message.inputs[1].contents.fp32_contents.extend([1.0])
    assert "key.contents" in fields_of_faults(read(message).faults)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_raw_contents_are_one_for_each_input(count: int) -> None:
    message = request_of(operands())
    raw = list(message.raw_input_contents) * 2
    del message.raw_input_contents[:]
    message.raw_input_contents.extend(raw[:count])
    assert fields_of_faults(read(message).faults) == {"raw_input_contents"}


def test_an_input_in_shared_memory_takes_no_raw_content() -> None:
    message = request_of(operands())
    for name, value in (("shared_memory_region", "r"), ("shared_memory_byte_size", 8), ("shared_memory_offset", 4)):
        key = message.inputs[1].parameters[name]
        if isinstance(value, str):
            key.string_param = value
        else:
            key.int64_param = value
    del message.raw_input_contents[1]
    request = read(message)
    assert request.faults == []
    assert request.inputs[1].content == MemoryPlace("r", 4, 8)
    assert bytes(request.inputs[2].content) == message.raw_input_contents[1]


@pytest.mark.parametrize("missing", ["shared_memory_region", "shared_memory_byte_size"])
def test_a_place_in_shared_memory_says_region_and_size(missing: str) -> None:
    message = request_of(operands(), outputs=["context"])
    message.outputs[0].parameters["shared_memory_region"].string_param = "r"
    message.outputs[0].parameters["shared_memory_byte_size"].int64_param = 4
    del message.outputs[0].parameters[missing]
    assert fields_of_faults(read(message).faults) == {f"outputs.context.{missing}"}


def test_parameters_of_every_kind_keep_their_kind() -> None:
    message = request_of({})
    message.parameters["a"].bool_param = True
    message.parameters["b"].int64_param = -1
    message.parameters["c"].string_param = "1"
    message.parameters["d"].double_param = 1.0
    message.parameters["e"].uint64_param = 2**64 - 1
    message.parameters["f"].SetInParent()
    request = read(message)
    assert {name: (type(value), value) for name, value in request.parameters.items()} == {
        "a": (bool, True),
        "b": (int, -1),
        "c": (str, "1"),
        "d": (float, 1.0),
        "e": (int, 2**64 - 1),
    }
    assert fields_of_faults(request.faults) == {"parameters.f"}


@pytest.mark.parametrize("name", ["scale", "softcap", "timeout_ms"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_options_that_are_no_numbers_are_refused(name: str, value: float) -> None:
    request = read(request_of(operands(), parameters={name: value}))
    with pytest.raises(InvalidProblem) as refused:
        check(request, Models().get("sdpa"), ReadLimits())
    assert fields_of_faults(list(refused.value.faults)) == {name}


def test_more_than_anybody_needs_is_refused_and_not_read() -> None:
    message = pb.ModelInferRequest(model_name="sdpa")
    for _ in range(MAX_NAMED + 1):
        message.inputs.add()
    assert "inputs" in fields_of_faults(read(message).faults)


# Answers


def test_an_answer_is_the_message_that_protobuf_would_write() -> None:
    weights, context = torch.randn(2, 3), torch.randn(2, 2).to(torch.bfloat16)
    pieces = proto.write_answer(
        model_name="attention",
        id="é",
        parameters={"a": True, "b": 2**63, "c": 2**70, "d": 0.5, "e": "x", "f": -3},
        outputs=[
            (RequestedOutput("weights", is_binary=True), weights),
            (RequestedOutput("elsewhere", is_binary=True, place=MemoryPlace("r", 0, 9)), weights),
            (RequestedOutput("context", is_binary=True), context),
        ],
    )
    answer = pb.ModelInferResponse.FromString(b"".join(pieces))
    assert (answer.model_name, answer.model_version, answer.id) == ("attention", "1", "é")
    assert parameters_of(answer) == {"a": True, "b": 2**63, "c": 2.0**70, "d": 0.5, "e": "x", "f": -3}
    assert [(o.name, o.datatype, list(o.shape)) for o in answer.outputs] == [
        ("weights", "FP32", [2, 3]),
        ("elsewhere", "FP32", [2, 3]),
        ("context", "BF16", [2, 2]),
    ]
    assert list(answer.raw_output_contents) == [raw_of(weights), b"", raw_of(context)]


def test_an_answer_of_a_stream_says_that_it_is_the_last_of_its_request() -> None:
    whole = pb.ModelInferResponse(id="7", raw_output_contents=[b"x" * 300])
    answer = pb.ModelStreamInferResponse.FromString(
        b"".join(proto.stream_answer([whole.SerializeToString()[:5], memoryview(whole.SerializeToString())[5:]]))
    )
    assert parameters_of(answer.infer_response) == {"triton_final_response": True}
    assert (answer.error_message, answer.infer_response.id) == ("", "7")
    assert list(answer.infer_response.raw_output_contents) == [b"x" * 300]


def test_an_error_of_a_stream_holds_the_id_and_nothing_else() -> None:
    answer = pb.ModelStreamInferResponse.FromString(proto.stream_error("no", "7"))
    assert answer == pb.ModelStreamInferResponse(error_message="no", infer_response=pb.ModelInferResponse(id="7"))


# Recipes


def checked(message: pb.ModelInferRequest) -> CheckedInference:
    data = message.SerializeToString()
    parsed, raw = proto.read_message(data, proto.split(data))
    request = proto.read_request(parsed, [])
    for given_input, content in zip(request.inputs, raw, strict=True):
        request.faults.clear()
        given_input.content = memoryview(torch.frombuffer(bytearray(content), dtype=torch.uint8).clone().numpy().data)
    return check(request, Models().get(parsed.model_name), ReadLimits())


def remembered(message: pb.ModelInferRequest, recipes: ProtoRecipes | None = None) -> Any:
    recipes = recipes or ProtoRecipes(device="cpu")
    frame = proto.split(message.SerializeToString())
    assert frame is not None
    sizes = {given.name: len(raw) for given, raw in zip(message.inputs, message.raw_input_contents, strict=True)}
    case = checked(message)
    recipes.remember(frame, sizes, case, prepare(case.problem, device_type="cpu"))
    return recipes.get(frame)


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("order", [("query", "key", "value"), ("value", "query", "key")])
def test_a_recipe_puts_numbers_where_it_reads_them(tokens: int, order: tuple[str, ...]) -> None:
    tensors = operands(1, 1, tokens, 3)
    message = request_of({name: tensors[name] for name in order})
    recipe = remembered(message)
    assert recipe is not None
    data = message.SerializeToString()
    room = bytearray(b"\xff") * recipe.plain.data_bytes
    recipe.fill(memoryview(room), memoryview(data), proto.split(data))
    flat = view_bytes(room, torch.float32, (len(room) // 4,))
    (numbers,), *found = recipe.plain.tensors(flat, 0)
    for name, tensor in zip(("query", "key", "value"), found, strict=True):
        assert torch.equal(tensor, tensors[name])
    assert numbers.square().sum() == pytest.approx(sum(float(t.square().sum()) for t in tensors.values()))


@pytest.mark.parametrize("id", ["", "é", "x" * 127])
def test_an_answer_by_recipe_is_the_one_that_is_written_out(id: str) -> None:
    message = request_of(operands(), id=id, parameters={"foreign": 1})
    recipe, case = remembered(message), checked(message)
    frame = proto.split(message.SerializeToString())
    assert recipe is not None and frame is not None
    context = torch.randn(1, 2, 3, 8)
    begin = recipe.template.beginning(queue_s=0.25, compute_s=0.5, id_text=frame.id_field)
    answer = pb.ModelInferResponse.FromString(begin + recipe.data_head + raw_of(context))
    parameters = parameters_of(answer)
    assert (parameters["queue_ms"], parameters["compute_ms"], parameters["ignored"]) == (250.0, 500.0, "foreign")
    written = proto.write_answer(
        model_name=case.model.name, id=case.id, parameters=parameters, outputs=[(case.outputs[0], context)]
    )
    assert answer == pb.ModelInferResponse.FromString(b"".join(written))
    assert torch.equal(outputs_of(answer)["context"], context)


@pytest.mark.parametrize(
    "message",
    [
        request_of(operands(), parameters={"timeout_ms": 5}),
        request_of(operands(), parameters={"timeout": 5}),
        request_of(operands() | {"sinks": torch.zeros(2)}, model="attention", outputs=["context"]),
        request_of(operands(), model="attention", outputs=["context", "weights"]),
        request_of(operands(), parameters={"foreign": "x" * MAX_HEAD_BYTES}),
    ],
    ids=["a time of its own", "a time in the queue", "another input", "another output", "a long head"],
)
def test_only_plain_requests_are_remembered(message: pb.ModelInferRequest) -> None:
    assert remembered(message) is None


@pytest.mark.parametrize("id_field", [b"\x1a\x01\xff", b"\x1a\x80\x01" + b"x" * 128])
def test_an_id_that_must_be_looked_at_is_left_to_who_reads_it(id_field: bytes) -> None:
    recipes = ProtoRecipes(device="cpu")
    data = request_of(operands()).SerializeToString()
    assert remembered(request_of(operands()), recipes) is not None
    frame = proto.split(id_field + data)
    assert frame is not None and recipes.get(frame) is None


def test_raw_contents_of_another_size_have_no_recipe() -> None:
    recipes = ProtoRecipes(device="cpu")
    message = request_of(operands())
    assert remembered(message, recipes) is not None
    message.raw_input_contents[0] += b"\0"
    frame = proto.split(message.SerializeToString())
    assert frame is not None and recipes.get(frame) is None


def test_a_message_of_a_likely_length_is_the_same_only_if_all_but_its_numbers_is() -> None:
    recipes = ProtoRecipes(device="cpu")
    message = request_of(operands())
    recipe = remembered(message, recipes)
    data = message.SerializeToString()
    for _ in range(2):
        found = recipes.find(data)
        assert found.recipe is recipe is not None
        assert (found.frame, found.data) == (proto.split(data), data)
    frame = proto.split(data)
    assert frame is not None
    numbers = {place for begin, end in frame.spans for place in range(begin, end)}
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        found = recipes.find(bytes(changed))
        assert (found.recipe is recipe) is (place in numbers)
        assert found.frame == proto.split(bytes(changed))


def test_the_oldest_recipe_goes_first() -> None:
    recipes = ProtoRecipes(device="cpu")
    case = checked(request_of(operands()))
    prepared = prepare(case.problem, device_type="cpu")
    frames = [proto.Frame(b"", b"%d" % number, b"", ((0, 192),) * 3) for number in range(MAX_RECIPES + 1)]
    for frame in frames:
        recipes.remember(frame, dict.fromkeys(("query", "key", "value"), 192), case, prepared)
    assert recipes.get(frames[0]) is None
    assert recipes.get(frames[1]) is not None and recipes.get(frames[-1]) is not None
