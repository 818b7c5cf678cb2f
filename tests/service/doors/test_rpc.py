"""The gRPC door over real channels: what is refused, who is inside and for how long, in which order answers go."""

from __future__ import annotations

import queue
from typing import Any

import grpc
import pytest
import torch
from grpc_reflection.v1alpha import reflection_pb2

from attn_core import Engine
from service.doors import rpc
from service.doors.rpc import MAX_DETAILS_BYTES, details_of, is_loopback_peer
from service.wire import open_inference_pb2 as pb
from tests.support.in_process import GatedEngine, InProcess
from tests.support.rpc import (
    SERVICE,
    WAIT_S,
    Caller,
    calls_by_rpc,
    operands,
    outputs_of,
    parameters_of,
    refused,
    request_of,
)
from tests.support.rpc_service import (
    LARGE,
    SMALL_WINDOW,
    drain,
    figure,
    is_empty,
    reflect,
    running,
    until,
    watch,
)

Code = grpc.StatusCode
UNARY = [method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]
UNARY.remove("ModelStreamInfer")
NOT_SERVED = [name for name in UNARY if name.startswith("Cuda")] + ["TraceSetting", "LogSettings"]
REFLECT = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


# Answers


def test_both_roads_give_the_same_bits_and_say_the_same(caller: Caller) -> None:
    message = request_of(operands(1, 2, 5, 8), id="é")
    first, second = caller.infer(message), caller.infer(message)
    message.parameters["timeout_ms"].int64_param = 1000
    third = caller.infer(message)
    for answer in (second, third):
        assert torch.equal(outputs_of(answer)["context"], outputs_of(first)["context"])
        assert (answer.id, answer.model_name, answer.model_version) == ("é", "sdpa", "1")
        said, expected = parameters_of(answer), parameters_of(first)
        assert {name: type(value) for name, value in said.items()} == {
            name: type(value) for name, value in expected.items()
        }
        for name in said.keys() - {"queue_ms", "compute_ms"}:
            assert said[name] == expected[name], name


@pytest.mark.parametrize("scale", [1e30, float("nan"), float("inf")])
def test_hazardous_numbers_of_a_known_request_are_computed_with_care(caller: Caller, scale: float) -> None:
    tensors = operands(1, 2, 6, 8, seed=1)
    caller.infer(request_of(tensors))
    tensors["key"][0, 0, 3] *= scale
    answer = outputs_of(caller.infer(request_of(tensors)))["context"]
    alone = outputs_of(caller.infer(request_of(tensors, parameters={"timeout_ms": 9999})))["context"]
    assert torch.equal(answer.nan_to_num(7.0), alone.nan_to_num(7.0))


def test_outputs_come_in_the_order_in_which_they_are_asked(caller: Caller) -> None:
    asked = ["logsumexp", "context", "weights"]
    answer = caller.infer(request_of(operands(), model="attention", outputs=asked))
    assert [output.name for output in answer.outputs] == asked
    assert list(outputs_of(answer)) == asked


def test_what_the_final_response_parameter_asks_for_is_said(caller: Caller) -> None:
    # Known from the second time on, on both ways that a known one may take.
    hazardous = operands(1, 1, 2, 16)
    hazardous["query"][0, 0, 0, 0] = float("nan")
    for tensors in (operands(1, 1, 2, 16), operands(1, 1, 2, 16), hazardous):
        for value in (True, False):
            answer = caller.infer(request_of(tensors, parameters={"triton_enable_empty_final_response": value}))
            assert ("triton_final_response" in parameters_of(answer)) is value


def test_the_service_describes_itself(caller: Caller) -> None:
    assert caller.call("ServerLive", pb.ServerLiveRequest()).live
    assert caller.call("ServerReady", pb.ServerReadyRequest()).ready
    assert caller.call("ServerMetadata", pb.ServerMetadataRequest()).name == "attn"
    metadata = caller.call("ModelMetadata", pb.ModelMetadataRequest(name="sdpa_bf16", version="1"))
    assert [(tensor.name, tensor.datatype) for tensor in metadata.inputs[:1]] == [("query", "BF16")]
    config = caller.call("ModelConfig", pb.ModelConfigRequest(name="attention")).config
    assert {tensor.name: tensor.optional for tensor in config.input}["sinks"]
    assert config.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_name["TYPE_FP32"].number == (
        config.output[0].data_type
    )
    index = caller.call("RepositoryIndex", pb.RepositoryIndexRequest(ready=True))
    assert {model.state for model in index.models} == {"READY"}


@pytest.mark.parametrize(
    ("name", "version", "ready"), [("sdpa", "", True), ("sdpa", "1", True), ("sdpa", "2", False), ("no", "", False)]
)
def test_a_model_that_is_not_there_is_not_ready(caller: Caller, name: str, version: str, ready: bool) -> None:
    assert caller.call("ModelReady", pb.ModelReadyRequest(name=name, version=version)).ready is ready


def test_every_request_is_counted_once(plain: tuple[InProcess, Caller]) -> None:
    service, caller = plain
    route = f'{{outcome="ok",route="/{SERVICE}/ModelInfer"}}'

    def counts() -> tuple[int, int, float, float]:
        (stats,) = caller.call("ModelStatistics", pb.ModelStatisticsRequest(name="sdpa_fp64")).model_stats
        inference = stats.inference_stats
        assert inference.compute_input.count == inference.compute_infer.count == inference.compute_output.count
        assert inference.queue.count == stats.inference_count
        return (
            stats.inference_count,
            inference.success.count,
            figure(service, "attn_requests_total" + route),
            figure(service, 'attn_path_requests_total{path="fused"}'),
        )

    message = request_of(operands(1, 2, 3, 8, dtype=torch.float64), model="sdpa_fp64")
    before = counts()
    for number in range(1, 4):
        caller.infer(message)
        assert counts() == tuple(figure + number for figure in before)


# Refusals


@pytest.mark.parametrize("name", UNARY)
def test_bytes_that_are_no_message_are_the_callers_mistake(caller: Caller, name: str) -> None:
    error = refused(caller.start(name, b"\xff\xff"))
    assert (error.code(), error.details() != "") == (Code.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_says_so(caller: Caller, name: str) -> None:
    assert refused(caller.start(name, b"")).code() is Code.UNIMPLEMENTED


@pytest.mark.parametrize("name", ["/inference.GRPCInferenceService/Nothing", "/nothing/ModelInfer"])
def test_a_method_that_is_not_there_is_unimplemented(caller: Caller, name: str) -> None:
    assert refused(caller.start(name, b"")).code() is Code.UNIMPLEMENTED


@pytest.mark.parametrize("name", ["RepositoryModelLoad", "RepositoryModelUnload"])
def test_models_are_neither_loaded_nor_unloaded(caller: Caller, name: str) -> None:
    error = refused(caller.start(name, b""))
    assert error.code() is Code.UNAVAILABLE
    assert "retry-after" not in dict(error.trailing_metadata())


@pytest.mark.parametrize("name", ["Status", "Register", "Unregister"])
def test_shared_memory_is_off_unless_it_is_switched_on(caller: Caller, name: str) -> None:
    assert refused(caller.start(f"SystemSharedMemory{name}", b"")).code() is Code.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("message", "code", "named"),
    [
        (request_of(operands(), model="none"), Code.NOT_FOUND, "none"),
        (request_of(operands(names=("query", "key"))), Code.INVALID_ARGUMENT, "value"),
        (request_of(operands(), parameters={"scale": float("nan")}), Code.INVALID_ARGUMENT, "scale"),
        (request_of(operands(), parameters={"timeout": "1"}), Code.INVALID_ARGUMENT, "timeout"),
        (request_of(operands(), parameters={"triton_other": True}), Code.INVALID_ARGUMENT, "triton_other"),
        (request_of(operands(), outputs=["weights"]), Code.INVALID_ARGUMENT, "weights"),
        (request_of(operands(dtype=torch.float64)), Code.INVALID_ARGUMENT, "FP32"),
    ],
)
def test_a_refusal_names_what_is_wrong(caller: Caller, message: pb.ModelInferRequest, code: Any, named: str) -> None:
    error = refused(caller.start("ModelInfer", message, metadata=[("x-request-id", "mine")]))
    assert error.code() is code and named in error.details()
    assert ("x-request-id", "mine") in error.trailing_metadata()


@pytest.mark.parametrize("shape", [[-1, 2, 3, 8], [1, 2, 3, -8], [2**62, 2**62, 2**62, 2**62]])
def test_shapes_that_cannot_be_are_refused_before_anything_is_allocated(caller: Caller, shape: list[int]) -> None:
    message = request_of(operands())
    message.inputs[0].shape[:] = shape
    assert refused(caller.start("ModelInfer", message)).code() is Code.INVALID_ARGUMENT


def test_an_error_is_short_enough_for_every_client(caller: Caller) -> None:
    message = request_of(operands(), model="é" * 100)
    for number in range(60):
        message.parameters[f"triton_{'%' * 90}{number}"].bool_param = True
    message.model_name = "sdpa"
    error = refused(caller.start("ModelInfer", message))
    assert error.code() is Code.INVALID_ARGUMENT and "triton_" in error.details()


@pytest.mark.parametrize("character", ["a", "%", "é", "漢", "\n", "\x7f"])
def test_details_are_bounded_as_they_are_sent(character: str) -> None:
    text = details_of(character * 10_000)
    sent = sum(1 if 32 <= byte < 127 and byte != 37 else 3 for byte in text.encode())
    assert MAX_DETAILS_BYTES - 20 < sent <= MAX_DETAILS_BYTES + 3
    assert details_of(character) == character


@pytest.mark.parametrize(
    ("peer", "is_loopback"),
    [
        ("ipv4:127.0.0.1:40", True),
        ("ipv4:127.9.9.9:40", True),
        ("ipv4:10.0.0.1:40", False),
        ("ipv6:%5B::1%5D:40", True),
        ("ipv6:[::1]:40", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:40", True),
        ("ipv6:[fe80::1%25eth0]:40", False),
        ("unix:", True),
        ("unix:/tmp/a", True),
        ("", False),
        ("dns:localhost:40", False),
    ],
)
def test_a_caller_on_this_machine_is_known_by_its_address(peer: str, is_loopback: bool) -> None:
    assert is_loopback_peer(peer) is is_loopback


def test_an_answer_that_cannot_be_sent_is_refused_before_it_is_computed() -> None:
    engine = GatedEngine()
    with running(engine, max_grpc_answer_bytes=20_000) as (service, caller):
        error = refused(caller.start("ModelInfer", request_of(operands(1, 4, 64, 64))))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "20000" in error.details() and str(4 * 64 * 64 * 4 + 16 * 1024) in error.details()
        until(lambda: is_empty(service))
        assert not engine.entered.acquire(blocking=False)


def test_a_message_over_the_limit_is_refused() -> None:
    with running(max_body_bytes=100_000) as (_, caller):
        assert refused(caller.start("ModelInfer", b"\x0a" + b"x" * 100_001)).code() is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("metadata", [[], [("x-api-key", "third-key")], [("authorization", "Basic first-key")]])
@pytest.mark.parametrize(
    "name", [*UNARY, "ModelStreamInfer", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"]
)
def test_without_a_key_nothing_is_read(keyed: Caller, name: str, metadata: list[tuple[str, str]]) -> None:
    if name in ("ServerLive", "ServerReady"):
        assert keyed.call(name, b"").ByteSize() > 0
        return
    # Read, so long a message would be refused for its length.
    error = refused(keyed.start(name, b"\x0a" * 100_000, metadata=metadata))
    assert error.code() is Code.UNAUTHENTICATED
    assert "-key" not in error.details().replace("x-api-key", "")


@pytest.mark.parametrize("metadata", [("x-api-key", "first-key"), ("authorization", "Bearer second-key")])
def test_with_a_key_everything_is_served(keyed: Caller, metadata: tuple[str, str]) -> None:
    message = request_of(operands(1, 1, 1, 4))
    assert keyed.infer(message, metadata=[metadata]).model_name == "sdpa"
    with keyed.stream(metadata=[metadata]) as stream:
        stream.send(message)
        assert stream.answers(1)[0].error_message == ""


# Who is inside


def test_a_full_queue_refuses_before_the_message_is_read() -> None:
    engine = GatedEngine()
    with running(engine, max_queue_requests=1, max_body_bytes=2**20) as (service, caller):
        first = caller.start("ModelInfer", LARGE)
        engine.wait_until_entered()
        second = caller.start("ModelInfer", LARGE)
        until(lambda: service.call(lambda: len(service.parts.queue)) == 1)
        error = refused(caller.start("ModelInfer", b"\x0a" * 2**21))
        assert error.code() is Code.UNAVAILABLE
        assert dict(error.trailing_metadata())["retry-after"].isdigit()
        assert figure(service, 'attn_refused_requests_total{reason="queue_full"}') == 1
        engine.open()
        assert torch.equal(outputs_of(first.result())["context"], outputs_of(second.result())["context"])
        until(lambda: is_empty(service))


def test_only_so_many_are_let_in() -> None:
    engine = GatedEngine()
    with running(engine, max_requests_inside=1) as (service, caller):
        first = caller.start("ModelInfer", LARGE)
        engine.wait_until_entered()
        error = refused(caller.start("ModelInfer", LARGE))
        assert error.code() is Code.UNAVAILABLE and "1 requests" in error.details()
        engine.open()
        first.result()
        until(lambda: is_empty(service))


@pytest.mark.parametrize("end", ["cancel", "deadline"])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_caller_that_waits_no_longer_frees_its_place(end: str, is_known: bool) -> None:
    engine = GatedEngine()
    with running(engine) as (service, caller):
        if is_known:
            engine.let_through()
            caller.infer(LARGE)
            engine.wait_until_entered()
        call = caller.start("ModelInfer", LARGE, timeout=0.3 if end == "deadline" else WAIT_S)
        engine.wait_until_entered()
        if end == "cancel":
            call.cancel()
        else:
            assert refused(call).code() is Code.DEADLINE_EXCEEDED
        until(lambda: is_empty(service))
        engine.open()
        assert caller.infer(LARGE).model_name == "sdpa"


def test_a_deadline_that_has_been_named_ends_the_waiting() -> None:
    engine = GatedEngine()
    with running(engine) as (service, caller):
        message = request_of(operands(1, 4, 256, 64), parameters={"timeout_ms": 50})
        assert refused(caller.start("ModelInfer", message)).code() is Code.DEADLINE_EXCEEDED
        until(lambda: is_empty(service))
        statistics = service.call(lambda: service.parts.inference.statistics.of("sdpa").fail.count)
        assert statistics == 1


@pytest.mark.parametrize("kind", ["int64_param", "uint64_param"])
def test_the_protocols_timeout_is_the_time_in_the_queue(kind: str) -> None:
    engine = GatedEngine()
    with running(engine) as (_, caller):
        first = caller.start("ModelInfer", LARGE)
        engine.wait_until_entered()
        waiting = request_of(operands(1, 4, 256, 64))
        setattr(waiting.parameters["timeout"], kind, 1000)
        error = refused(caller.start("ModelInfer", waiting))
        assert error.code() is Code.UNAVAILABLE and "timeout" in error.details()
        engine.open()
        assert first.result().model_name == "sdpa"


def test_a_failure_of_the_engine_is_the_servers_mistake_and_says_no_more() -> None:
    engine = GatedEngine()
    with running(engine) as (service, caller):
        engine.failure = RuntimeError("secret")
        engine.open()
        error = refused(caller.start("ModelInfer", LARGE))
        assert error.code() in (Code.INTERNAL, Code.UNAVAILABLE)
        assert "secret" not in error.details()
        until(lambda: is_empty(service))


@pytest.mark.parametrize("name", ["ModelInfer", "ServerLive"])
def test_with_many_calls_open_a_message_that_does_not_come_is_not_waited_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "UNWATCHED_CALLS", 1)
    with running(request_timeout_s=1.0) as (service, caller):
        silence: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def begin() -> Any:
            method = caller.channel.stream_unary(f"/{SERVICE}/{name}")
            return method.future(iter(silence.get, b""), timeout=WAIT_S)

        unwatched = begin()
        until(lambda: service.call(lambda: service.parts.rpc.num_calls) == 1)
        error = refused(begin())
        assert error.code() is Code.DEADLINE_EXCEEDED and "before the message was there" in error.details()
        assert not unwatched.done()
        # Whoever sends a message is served the same on this way.
        message = request_of(operands(), id="3")
        assert caller.infer(message).id == "3"
        assert caller.call("ServerReady", pb.ServerReadyRequest()).ready
        assert refused(caller.start("ModelInfer", b"\xff")).code() is Code.INVALID_ARGUMENT
        unwatched.cancel()
        until(lambda: service.call(lambda: service.parts.rpc.num_calls) == 0)
        for _ in range(2):
            silence.put(b"")


@pytest.mark.parametrize("at_once", [False, True])
def test_an_answer_that_is_not_read_keeps_nobody_out_for_ever(at_once: bool) -> None:
    loop_engine = Engine(device="cpu", max_threads=1) if at_once else None
    with (
        running(max_requests_inside=1, write_timeout_s=0.02, loop_engine=loop_engine) as (service, caller),
        calls_by_rpc(service.grpc_port, *SMALL_WINDOW) as reader,
    ):
        message = request_of(operands(1, 1, 16, 16384))
        caller.infer(message)
        until(lambda: is_empty(service))
        # As a call of streams, its answer is not read before somebody asks for it.
        deaf = reader.channel.stream_stream(f"/{SERVICE}/ModelInfer")(iter([message.SerializeToString()]))
        statistics = service.parts.inference.statistics.of("sdpa").success
        until(lambda: service.call(lambda: statistics.count == 2 and not service.parts.admission.requests_inside))
        assert service.call(lambda: service.parts.rpc.num_calls) == 1
        assert caller.infer(request_of(operands())).model_name == "sdpa"
        deaf.cancel()
        until(lambda: is_empty(service))


# Draining


def test_a_drain_finishes_what_is_inside_and_refuses_the_rest() -> None:
    engine = GatedEngine()
    with running(engine) as (service, caller), caller.stream() as stream:
        call = caller.start("ModelInfer", LARGE)
        stream.send(LARGE)
        engine.wait_until_entered()
        until(lambda: service.call(lambda: service.parts.lifecycle.inside) == 2)
        drained = drain(service, WAIT_S)
        error = refused(caller.start("ModelInfer", LARGE))
        assert error.code() is Code.UNAVAILABLE and ("retry-after", "1") in error.trailing_metadata()
        assert not caller.call("ServerReady", pb.ServerReadyRequest()).ready
        assert caller.call("ServerLive", pb.ServerLiveRequest()).live
        stream.send(request_of(operands(), id="late"))
        engine.open()
        assert call.result().model_name == "sdpa"
        first, late = stream.answers(2)
        assert (first.error_message, late.infer_response.id) == ("", "late")
        assert "draining" in late.error_message
        assert drained.result(WAIT_S) == 0


def test_what_a_drain_gives_up_is_told_to_come_again() -> None:
    engine = GatedEngine()
    with running(engine) as (service, caller), caller.stream() as stream:
        call = caller.start("ModelInfer", LARGE)
        stream.send(LARGE)
        until(lambda: service.call(lambda: service.parts.lifecycle.inside) == 2)
        assert drain(service, 0.05).result(WAIT_S) == 2
        assert refused(call).code() is Code.UNAVAILABLE
        assert "drain" in stream.answers(1)[0].error_message
        until(lambda: is_empty(service))


def test_the_end_of_the_server_ends_streams_and_watchers() -> None:
    with running() as (service, caller), caller.stream() as stream:
        stream.send(request_of(operands()))
        stream.answers(1)
        watching = watch(caller, "")
        next(watching)
        reflecting = reflect(caller, "v1", reflection_pb2.ServerReflectionRequest(list_services=""), ends=False)
        next(reflecting)
        rpc = service.rpc
        assert rpc is not None
        assert service.run(lambda: rpc.stop(WAIT_S)) == 0
        for call in (stream.call, watching):
            with pytest.raises(grpc.RpcError) as ended:
                next(call)
            assert ended.value.code() is Code.UNAVAILABLE
        with pytest.raises(grpc.RpcError):
            next(reflecting)
