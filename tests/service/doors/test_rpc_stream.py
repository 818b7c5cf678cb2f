"""Streams of the gRPC door: side by side, in their order, and in bounds."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from attn_core import Engine
from service.doors.rpc_stream import WINDOW
from service.wire import open_inference_pb2 as pb
from tests.support.in_process import GatedEngine
from tests.support.rpc import (
    Caller,
    calls_by_rpc,
    operands,
    parameters_of,
    request_of,
)
from tests.support.rpc_service import (
    LARGE,
    SMALL_WINDOW,
    is_empty,
    running,
    until,
)

Code = grpc.StatusCode


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
