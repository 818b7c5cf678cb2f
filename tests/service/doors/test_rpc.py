"""The gRPC door over real channels: what is refused, who is inside and for how long, in which order answers go."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from attn_core import Engine
from service.doors import rpc
from service.doors.rpc import MAX_DETAILS_BYTES, WINDOW, details_of, is_loopback_peer
from service.doors.rpc_neighbours import MAX_WATCHERS, SERVICES
from service.wire import open_inference_pb2 as pb
from tests.support.in_process import GatedEngine, InProcess, service_in_process
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

Code = grpc.StatusCode
UNARY = [method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]
UNARY.remove("ModelStreamInfer")
NOT_SERVED = [name for name in UNARY if name.startswith("Cuda")] + ["TraceSetting", "LogSettings"]
REFLECT = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
LARGE = request_of(operands(1, 4, 256, 64))
"""Too long for the event loop to compute it."""


@contextmanager
def running(engine: Engine | None = None, **settings: Any) -> Iterator[tuple[InProcess, Caller]]:
    """A ready service and a connection to it."""
    engine = engine or Engine(device="cpu", max_threads=1)
    with (
        service_in_process(engine, with_grpc=True, **settings) as service,
        calls_by_rpc(service.grpc_port) as caller,
    ):
        until(lambda: service.parts.lifecycle.is_ready)
        yield service, caller


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[InProcess, Caller]]:
    """A service that computes at once what it may, for tests that leave it as they find it."""
    with running(loop_engine=Engine(device="cpu", max_threads=1)) as both:
        yield both


@pytest.fixture
def caller(plain: tuple[InProcess, Caller]) -> Caller:
    return plain[1]


def until(holds: Callable[[], object]) -> None:
    """Go on once it holds; the test's own limit ends what never does."""
    turn = threading.Event()
    while not holds():
        turn.wait(0.001)


def is_empty(service: InProcess) -> bool:
    """Whether nothing is counted as inside."""

    def look() -> bool:
        parts = service.parts
        parts.admission.check_integrity()
        return not (parts.admission.requests_inside or parts.lifecycle.inside or parts.rpc.num_calls)

    return bool(service.call(look))


def figure(service: InProcess, series: str) -> float:
    for line in service.call(service.parts.metrics.text).decode().splitlines():
        if line.startswith(series + " "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


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
    for value in (True, False):
        answer = caller.infer(request_of(operands(), parameters={"triton_enable_empty_final_response": value}))
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


KEYS: dict[str, Any] = {"api_keys": "first-key,second-key", "max_body_bytes": 1024}


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


@pytest.fixture(scope="module")
def keyed() -> Iterator[Caller]:
    with running(**KEYS) as (_, caller):
        yield caller


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
    with running(request_timeout_s=0.3) as (service, caller):
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


SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 65536), ("grpc.http2.bdp_probe", 0))


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


def drain(service: InProcess, timeout_s: float) -> Any:
    """Begin to drain; gives what tells how many were given up."""
    pool = ThreadPoolExecutor(1)
    lifecycle = service.parts.lifecycle
    future = pool.submit(service.run, lambda: lifecycle.drain(notice_s=0.0, timeout_s=timeout_s))
    pool.shutdown(wait=False)
    until(lambda: not lifecycle.is_ready)
    return future


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


# Streams


def test_a_stream_computes_side_by_side_and_answers_in_order() -> None:
    engine = GatedEngine()
    loop_engine = Engine(device="cpu", max_threads=1)
    with running(engine, loop_engine=loop_engine) as (service, caller), caller.stream() as stream:
        slow = request_of(operands(1, 4, 1024, 64), id="slow")
        stream.send(slow)
        engine.wait_until_entered()
        stream.send(*(request_of(operands(), id=str(number)) for number in range(5)))
        # The small ones are done while the first one is computed.
        until(lambda: service.call(lambda: service.parts.inference.statistics.of("sdpa").success.count) == 5)
        engine.open()
        answers = stream.answers(6)
        assert [answer.infer_response.id for answer in answers] == ["slow", "0", "1", "2", "3", "4"]
        for answer in answers:
            assert parameters_of(answer.infer_response)["triton_final_response"] is True
        stream.close()
        assert stream.rest() == []
        until(lambda: is_empty(service))


def test_no_more_of_a_stream_is_inside_than_its_window() -> None:
    engine = GatedEngine()
    with running(engine) as (service, caller), caller.stream() as stream:
        admission, most = service.parts.admission, 0
        enter = admission.enter

        def enter_and_count() -> Any:
            nonlocal most
            permit = enter()
            most = max(most, admission.requests_inside)
            return permit

        admission.enter = enter_and_count  # type: ignore[method-assign]
        count = 2 * WINDOW + 3
        stream.send(*(request_of(operands(), id=str(number)) for number in range(count)))
        stream.close()
        until(lambda: admission.requests_inside == WINDOW)
        engine.open()
        assert [answer.infer_response.id for answer in stream.rest()] == [str(number) for number in range(count)]
        assert most == WINDOW
        until(lambda: is_empty(service))


def test_an_error_answers_its_own_request_and_the_stream_lives_on(caller: Caller) -> None:
    with caller.stream() as stream:
        stream.send(
            request_of(operands(), id="0"),
            request_of(operands(), id="1", model="none"),
            b"\xff",
            request_of(operands(names=("query",)), id="3"),
            request_of(operands(), id="4"),
        )
        stream.close()
        answers = stream.rest()
    assert [answer.infer_response.id for answer in answers] == ["0", "1", "", "3", "4"]
    assert [answer.error_message == "" for answer in answers] == [True, False, False, False, True]
    for answer in answers[1:4]:
        assert answer.infer_response == pb.ModelInferResponse(id=answer.infer_response.id)
    assert stream.call.code() is Code.OK


def test_the_first_error_ends_a_stream_that_asks_for_it() -> None:
    engine = GatedEngine()
    with running(engine) as (service, caller), caller.stream(metadata=[("triton_grpc_error", "true")]) as stream:
        engine.let_through()
        stream.send(request_of(operands(), id="0"), request_of(operands(), model="none"), LARGE)
        assert stream.answers(1)[0].infer_response.id == "0"
        with pytest.raises(grpc.RpcError) as ended:
            stream.answers(1)
        assert ended.value.code() is Code.NOT_FOUND and "none" in ended.value.details()
        until(lambda: is_empty(service))


def test_an_empty_stream_ends_at_once(caller: Caller) -> None:
    with caller.stream() as stream:
        stream.close()
        assert stream.rest() == []
        assert stream.call.code() is Code.OK


def test_a_stream_whose_answers_are_not_read_keeps_nobody_out_for_ever() -> None:
    with (
        running(max_requests_inside=1, write_timeout_s=0.02) as (service, caller),
        calls_by_rpc(service.grpc_port, *SMALL_WINDOW) as reader,
        reader.stream() as stream,
    ):
        stream.send(request_of(operands(1, 1, 16, 16384)))
        statistics = service.parts.inference.statistics.of("sdpa").success
        until(lambda: service.call(lambda: statistics.count == 1 and not service.parts.admission.requests_inside))
        assert caller.infer(request_of(operands())).model_name == "sdpa"


def test_a_stream_that_is_cancelled_leaves_nothing_behind() -> None:
    engine = GatedEngine()
    with running(engine) as (service, caller):
        with caller.stream() as stream:
            stream.send(*(request_of(operands(1, 4, 256, 64)) for _ in range(5)))
            until(lambda: service.call(lambda: service.parts.admission.requests_inside) == 5)
        until(lambda: is_empty(service) and service.call(lambda: service.parts.rpc.num_streams) == 0)
        engine.open()
        assert caller.infer(LARGE).model_name == "sdpa"


# Neighbours


def check_health(caller: Caller, service: str) -> Any:
    return caller.start(
        "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest(service=service).SerializeToString()
    )


def watch(caller: Caller, service: str) -> Any:
    method = caller.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return method(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)


def reflect(caller: Caller, version: str, *questions: reflection_pb2.ServerReflectionRequest, ends: bool = True) -> Any:
    method = caller.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=lambda sent: sent if isinstance(sent, bytes) else sent.SerializeToString(),
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for question in questions:
        waiting.put(question)
    if ends:
        waiting.put(None)
    return method(iter(waiting.get, None), timeout=WAIT_S)


@pytest.mark.parametrize("name", ["", SERVICE])
def test_health_follows_the_service_for_everyone_who_watches(name: str) -> None:
    engine = GatedEngine()
    with (
        service_in_process(engine, start_engine=False, with_grpc=True) as service,
        calls_by_rpc(service.grpc_port) as caller,
    ):
        watching = [watch(caller, name) for _ in range(3)]
        statuses = [[next(call).status] for call in watching]
        assert health_pb2.HealthCheckResponse.FromString(check_health(caller, name).result()).status == 2
        # One that leaves is missed by nobody.
        watching.pop().cancel()
        statuses.pop()
        service.call(service.parts.lifecycle.mark_ready)
        for call, seen in zip(watching, statuses, strict=True):
            seen.append(next(call).status)
        assert health_pb2.HealthCheckResponse.FromString(check_health(caller, name).result()).status == 1
        assert drain(service, 1.0).result(WAIT_S) == 0
        for call, seen in zip(watching, statuses, strict=True):
            seen.append(next(call).status)
        assert statuses == [[2, 1, 2]] * 2


def test_the_health_of_strangers_is_not_known(caller: Caller) -> None:
    assert refused(check_health(caller, "other")).code() is Code.NOT_FOUND
    watching = watch(caller, "other")
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watching.cancel()


def test_health_needs_no_key(keyed: Caller) -> None:
    assert check_health(keyed, "").result() == b"\x08\x01"
    watching = watch(keyed, SERVICE)
    assert next(watching).status == 1
    watching.cancel()


def test_watchers_are_bounded() -> None:
    with running() as (_, caller):
        watching = [watch(caller, "") for _ in range(MAX_WATCHERS)]
        for call in watching:
            next(call)
        with pytest.raises(grpc.RpcError) as refusal:
            next(watch(caller, ""))
        assert refusal.value.code() is Code.UNAVAILABLE
        for call in watching:
            call.cancel()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_knows_every_service_and_its_messages(caller: Caller, version: str) -> None:
    questions = [reflection_pb2.ServerReflectionRequest(list_services="")]
    questions += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in SERVICES]
    listed, *files = list(reflect(caller, version, *questions))
    assert {service.name for service in listed.list_services_response.service} == set(SERVICES)
    for name, file in zip(SERVICES, files, strict=True):
        assert name.rpartition(".")[2].encode() in b"".join(file.file_descriptor_response.file_descriptor_proto)


def test_reflection_answers_nonsense_by_an_error(caller: Caller) -> None:
    (answer,) = reflect(caller, "v1", b"\xff")
    assert answer.error_response.error_code == Code.INVALID_ARGUMENT.value[0]
