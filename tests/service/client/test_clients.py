"""Both clients over prepared answers and a clock that only sleeping moves: tries, deadlines, headers, closing."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from service.client import AsyncAttentionClient, AttentionClient, AttentionServiceError
from service.client.errors import (
    Conflict,
    ConnectionFailed,
    DeadlineExceeded,
    DeadlinePassed,
    Internal,
    Invalid,
    Overloaded,
    Unavailable,
    UnreadableAnswer,
)
from service.client.methods import Methods
from service.client.tries import SLICE_BYTES, Receiving, TimeLeft, slices
from tests.service.client.test_calls import INFO
from tests.support.clients import KINDS, Either, Times, client_of, prepared
from tests.support.clock import FakeClock, next_turn, run_still

QUERY = np.ones((1, 1, 2, 2), dtype=np.float32)
GOOD = httpx.Response(
    200,
    headers={"content-type": "application/vnd.safetensors"},
    content=safetensors.numpy.save({"context": QUERY}, {"info": json.dumps(INFO)}),
)
LAYER = {
    "name": "a",
    "num_heads": 1,
    "num_kv_heads": 1,
    "weight_layout": "in_out",
    "dtype": "float32",
    "shapes": {"w_query": [2, 2]},
    "parameters": 4,
}
KEPT = httpx.Response(201, json=LAYER)
GONE = httpx.Response(204)
HEAVY = {"torch", "attn_core", "fastapi", "starlette", "pydantic", "uvicorn", "grpc", "ml_dtypes", "safetensors"}
HEAVY |= {"transformers", "matplotlib", "scipy", "pandas"}
CUT = (httpx.ReadError("cut"), httpx.WriteError("cut"), httpx.RemoteProtocolError("cut"))
Call = Callable[[Either], Any]


def refused(status: int, **headers: str) -> httpx.Response:
    content = json.dumps({"type": "/errors/word", "detail": "no", "errors": []}).encode()
    return httpx.Response(status, headers={"content-type": "application/problem+json", **headers}, content=content)


def ask(client: Either, **options: Any) -> Any:
    return client.attention(QUERY, **options)


def put(client: Either, **options: Any) -> Any:
    weights = dict.fromkeys(("w_query", "w_key", "w_value", "w_output"), QUERY)
    return client.put_layer("a", **weights, num_heads=1, weight_layout="in_out", **options)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    text: str = request.param
    return text


def run(
    kind: str, call: Call, *answers: Any, times: Times | None = None, **options: Any
) -> tuple[Any, list[httpx.Request], list[float]]:
    """What the call gives or raises, the requests it made, and the sleeps between them."""
    asked: list[httpx.Request] = []
    times = times or Times()
    transport = httpx.MockTransport(prepared(answers, asked))
    with client_of(kind, "http://there", transport=transport, **(times.options(kind) | options)) as client:
        try:
            given = call(client)
        except AttentionServiceError as error:
            given = error
    return given, asked, times.slept


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_that_passes_is_waited_out(kind: str, status: int) -> None:
    answer, asked, slept = run(kind, ask, refused(status), refused(status), GOOD)
    assert answer.context.tolist() == QUERY.tolist()
    assert len(asked) == 3 and slept == pytest.approx([0.05, 0.1])


def test_every_try_is_the_same_request_under_the_same_id(kind: str) -> None:
    _, asked, _ = run(kind, ask, refused(503), httpx.ReadError("cut"), GOOD)
    assert len({request.content for request in asked}) == 1 and asked[0].content
    (request_id,) = {request.headers["x-request-id"] for request in asked}
    assert len(request_id) == 32


def test_retry_after_is_honoured(kind: str) -> None:
    _, _, slept = run(kind, ask, refused(429, **{"retry-after": "7"}), GOOD, times=Times(draw=0.0))
    assert slept == [7.0]


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), *CUT])
def test_a_broken_connection_is_tried_again(kind: str, error: Exception) -> None:
    answer, asked, _ = run(kind, ask, error, GOOD)
    assert answer.context.tolist() == QUERY.tolist() and len(asked) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 405, 406, 409, 413, 415, 422, 500, 501, 502, 504, 302])
def test_no_other_refusal_is_tried_again(kind: str, status: int) -> None:
    error, asked, slept = run(kind, ask, refused(status, **{"retry-after": "1"}), GOOD)
    assert error.status == status and len(asked) == 1 and not slept


def test_tries_end_after_as_many_as_were_asked_for_with_the_last_refusal(kind: str) -> None:
    error, asked, _ = run(kind, ask, refused(503), refused(429), max_retries=2)
    assert isinstance(error, Overloaded) and len(asked) == 3
    error, asked, _ = run(kind, ask, httpx.ReadError("cut"), max_retries=0)
    assert isinstance(error, ConnectionFailed) and len(asked) == 1
    assert isinstance(error.__cause__, httpx.ReadError) and "cut" in str(error) and error.request_id


def test_all_tries_and_waits_together_have_one_deadline(kind: str) -> None:
    times = Times(draw=1.0)
    error, asked, slept = run(kind, ask, refused(503), times=times, timeout_s=1.0, max_retries=100)
    assert isinstance(error, Unavailable | DeadlineExceeded)
    assert sum(slept) <= 1.0 and len(asked) == len(slept)


def test_a_wait_that_would_end_behind_the_deadline_is_not_begun(kind: str) -> None:
    error, asked, slept = run(kind, ask, refused(429, **{"retry-after": "30"}), timeout_s=10.0)
    assert isinstance(error, Overloaded) and error.retry_after_s == 30.0 and len(asked) == 1 and not slept


@pytest.mark.parametrize(
    "kind_of_timeout", [httpx.ConnectTimeout, httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout]
)
def test_a_try_that_takes_the_whole_time_is_our_own_deadline(kind: str, kind_of_timeout: type[Exception]) -> None:
    error, asked, _ = run(kind, ask, kind_of_timeout("late"), timeout_s=2.5)
    assert isinstance(error, DeadlineExceeded) and not isinstance(error, DeadlinePassed)
    assert "within 2.5 s" in str(error) and error.status is None and len(asked) == 1


def test_the_wire_is_given_what_is_left_at_each_moment() -> None:
    times = Times(draw=1.0)
    lefts: list[float] = []

    def late(request: httpx.Request) -> httpx.Response:
        lefts.append(request.extensions["timeout"].get("connect"))
        times.clock.now += 2.0
        lefts.append(request.extensions["timeout"].get("read"))
        times.clock.now += 20.0
        lefts.append(request.extensions["timeout"].get("read"))
        raise httpx.ReadTimeout("late")

    run("sync", ask, late, times=times, timeout_s=10.0)
    assert lefts[:2] == pytest.approx([10.0, 8.0]) and 0 < lefts[2] < 0.1
    _, (request,), _ = run("sync", ask, GOOD, timeout_s=None)
    assert request.extensions["timeout"].get("read") is None


class Dribble(httpx.SyncByteStream):
    """An answer that comes in pieces, each of which takes its time."""

    def __init__(self, times: Times) -> None:
        self._times = times

    def __iter__(self) -> Any:
        for _ in range(1000):
            self._times.clock.now += 1.0
            yield b"x"


def test_an_answer_that_dribbles_in_cannot_outlive_the_deadline() -> None:
    times = Times()
    error, _, _ = run(
        "sync", ask, lambda request: httpx.Response(200, stream=Dribble(times)), times=times, timeout_s=5.0
    )
    assert isinstance(error, DeadlineExceeded) and times.clock.now == pytest.approx(105.0)


def test_what_never_comes_ends_at_the_deadline_of_the_one_that_awaits() -> None:
    class Never(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

    clock = FakeClock()

    async def main() -> None:
        async with AsyncAttentionClient(transport=Never(), timeout_s=2.5, clock=clock) as client:
            call = asyncio.ensure_future(client.attention(QUERY))
            await next_turn(9)
            clock.now += 2.4
            await next_turn(9)
            assert not call.done()
            clock.now += 0.2
            with pytest.raises(DeadlineExceeded, match=r"within 2\.5 s"):
                await call
            limited = asyncio.ensure_future(asyncio.wait_for(client.attention(QUERY, timeout_s=60.0), 1.0))
            await next_turn(9)
            clock.now += 1.1
            with pytest.raises(TimeoutError):
                await limited

    run_still(clock, main())


def options_of(request: httpx.Request) -> Any:
    length = int.from_bytes(request.content[:8], "little")
    metadata = json.loads(request.content[8 : 8 + length]).get("__metadata__", {})
    return json.loads(metadata.get("options", "{}"))


def told(request: httpx.Request) -> Any:
    return options_of(request).get("timeout_ms")


def test_the_service_is_told_what_is_left_of_a_limit_that_the_caller_set(kind: str) -> None:
    for own, call in (({"timeout_s": 10.0}, ask), ({}, lambda client: ask(client, timeout_s=10.0))):
        _, asked, _ = run(kind, call, refused(503), refused(503), GOOD, times=Times(draw=1.0), **own)
        assert [told(request) for request in asked] == pytest.approx([10_000, 9_900, 9_700], abs=1)


def test_the_service_is_not_told_of_the_limit_that_nobody_set(kind: str) -> None:
    for options in ({}, {"timeout_s": None}):
        _, asked, _ = run(kind, ask, refused(503), GOOD, **options)
        assert [told(request) for request in asked] == [None, None]


def test_calls_that_take_no_such_option_are_sent_none(kind: str) -> None:
    for call in (
        lambda client: client.plan((1, 1, 2, 2), timeout_s=5.0),
        lambda client: client.get_layer("a", timeout_s=5.0),
        lambda client: client.info(timeout_s=5.0),
    ):
        _, (request,), _ = run(kind, call, httpx.Response(200, json={}))
        assert b"timeout_ms" not in request.content


def test_what_may_not_be_done_twice_is_tried_again_only_if_nothing_was_sent(kind: str) -> None:
    def delete(client: Either) -> Any:
        return client.delete_layer("a")

    def replace(client: Either) -> Any:
        return put(client, replace=True)

    for call, good in ((delete, GONE), (replace, KEPT)):
        for harmless in (httpx.ConnectError("refused"), refused(429), refused(503)):
            given, asked, _ = run(kind, call, harmless, good)
            assert not isinstance(given, Exception) and len(asked) == 2
        for harmful in CUT:
            error, asked, _ = run(kind, call, harmful, good)
            assert isinstance(error, ConnectionFailed) and len(asked) == 1


def test_keeping_the_same_weights_may_be_done_twice(kind: str) -> None:
    layer, asked, _ = run(kind, put, httpx.ReadError("cut"), KEPT)
    assert layer.is_new and layer.shapes == {"w_query": (2, 2)} and len(asked) == 2
    assert asked[0].method == "PUT" and asked[0].url.path == "/v1/layers/a"
    error, _, _ = run(kind, put, refused(409))
    assert isinstance(error, Conflict)


def test_readiness_is_asked_once_and_no_answer_is_a_no(kind: str) -> None:
    for answer, ready in (
        (httpx.Response(200), True),
        (httpx.Response(503), False),
        (httpx.ConnectError("refused"), False),
        (httpx.ReadTimeout("late"), False),
    ):
        given, asked, _ = run(kind, lambda client: client.is_ready(), answer)
        assert given is ready and len(asked) == 1
    error, _, _ = run(kind, lambda client: client.is_ready(), refused(500))
    assert isinstance(error, Internal)


def test_turning_arrays_into_a_body_counts_in_the_deadline(kind: str) -> None:
    times = Times()

    class Slow(list[Any]):
        def __len__(self) -> int:
            times.clock.now += 3.0
            return super().__len__()

    error, asked, _ = run(kind, lambda client: client.attention(Slow([1.0])), GOOD, times=times, timeout_s=2.0)
    assert isinstance(error, DeadlineExceeded) and not asked
    given, _, _ = run(kind, lambda client: client.is_ready(timeout_s=1e-9), httpx.Response(200), clock=ticking())
    assert given is False


def ticking() -> Callable[[], float]:
    count = itertools.count()
    return lambda: float(next(count))


def test_a_key_and_an_id_travel_as_headers_and_are_shown_nowhere(kind: str) -> None:
    error, (request,), _ = run(kind, lambda client: ask(client, request_id="mine"), refused(401), api_key="secret")
    assert request.headers["authorization"] == "Bearer secret" and request.headers["x-request-id"] == "mine"
    assert request.headers["accept-encoding"] == "identity" and "secret" not in str(error) + repr(error)
    with client_of(kind, "http://there", api_key="secret") as client:
        assert "secret" not in repr(client.client) + repr(vars(client.client)["_terms"])


def test_the_length_of_a_body_is_said_before_it(kind: str) -> None:
    _, (request,), _ = run(kind, ask, GOOD)
    assert int(request.headers["content-length"]) == len(request.content)
    assert "transfer-encoding" not in request.headers
    _, (request,), _ = run(kind, lambda client: client.list_layers(), httpx.Response(200, json={"layers": []}))
    assert not request.content and "content-type" not in request.headers


def test_a_large_body_leaves_in_slices_without_a_copy() -> None:
    array = np.zeros(3 * SLICE_BYTES + 5, dtype=np.uint8)
    parts = list(slices([b"head", array.data]))
    assert [part.nbytes for part in parts] == [4, SLICE_BYTES, SLICE_BYTES, SLICE_BYTES, 5]
    array[-1] = 7
    assert parts[-1][-1] == 7


@pytest.mark.parametrize(
    "base_url", ["http://there", "http://there/", "http://there/behind/", "http://there:80/behind"]
)
def test_the_service_may_stand_behind_a_prefix(kind: str, base_url: str) -> None:
    asked: list[httpx.Request] = []
    with client_of(kind, base_url, transport=httpx.MockTransport(prepared([GOOD], asked))) as client:
        ask(client)
    assert asked[0].url.path == ("/behind" if "behind" in base_url else "") + "/v1/attention"


@pytest.mark.parametrize("client", [AttentionClient, AsyncAttentionClient])
@pytest.mark.parametrize(
    "wrong",
    [
        {"base_url": "there"},
        {"base_url": "ftp://there"},
        {"base_url": "http://"},
        {"base_url": "http://there:port"},
        {"base_url": "http://me:secret@there"},
        {"base_url": "http://there?a=1"},
        {"base_url": "http://there/?"},
        {"base_url": "http://there#"},
        {"base_url": "http://there:99999"},
        {"api_key": ""},
        {"api_key": "sécret"},
        {"api_key": "secret\n"},
        {"api_key": "secret "},
        {"api_key": b"secret"},
        {"timeout_s": 0},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"max_retries": -1},
        {"max_connections": 0},
    ],
)
def test_a_client_that_cannot_be_meant_is_not_made(client: type[Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        client(**wrong)
    assert next(iter(wrong)) in str(caught.value) and "secret" not in str(caught.value)


def test_a_mistake_in_a_call_is_told_before_anything_is_sent(kind: str) -> None:
    mistakes: tuple[tuple[Call, str], ...] = (
        (lambda client: client.attention(QUERY, is_casual=True), "did you mean causal?"),
        (lambda client: client.attention(None), "query: a numpy array"),
        (lambda client: ask(client, timeout_s=0), "timeout_s"),
        (lambda client: ask(client, timeout_s="5"), "timeout_s"),
        (lambda client: ask(client, timeout_s=True), "timeout_s"),
        (lambda client: ask(client, request_id=5), "request_id"),
        (lambda client: ask(client, request_id="a b"), "request_id"),
        (lambda client: ask(client, request_id=""), "request_id"),
        (lambda client: client.forward("../x", QUERY), "a layer's name"),
    )
    for wrong, said in mistakes:
        asked: list[httpx.Request] = []
        transport = httpx.MockTransport(prepared([GOOD], asked))
        with client_of(kind, "http://there", transport=transport) as client:
            with pytest.raises((TypeError, ValueError)) as caught:
                wrong(client)
            assert said in str(caught.value) and not asked


def test_an_answer_that_is_not_ours_is_told_as_that_and_not_tried_again(kind: str) -> None:
    coded = {"content-encoding": "gzip"}
    for answer in (
        httpx.Response(200, text="hello"),
        httpx.Response(200, headers=coded, stream=httpx.ByteStream(b"no gzip")),
    ):
        error, asked, _ = run(
            kind, lambda client: ask(client, request_id="mine"), lambda request, answer=answer: answer
        )
        assert isinstance(error, UnreadableAnswer) and len(asked) == 1 and error.request_id == "mine"


@pytest.mark.parametrize("errors", [5, "x", {"field": "key"}, [5], [{"field": None, "expected": 3}]])
def test_a_refusal_whose_faults_are_none_is_a_refusal_all_the_same(kind: str, errors: Any) -> None:
    content = json.dumps({"type": 3, "detail": ["no"], "errors": errors}).encode()
    answer = httpx.Response(422, headers={"content-type": "application/problem+json"}, content=content)
    error, _, _ = run(kind, ask, answer)
    assert isinstance(error, Invalid) and all(fault.field == "" for fault in error.faults)


@pytest.mark.parametrize("length", ["99999999999999999", "9" * 19, "9" * 5000])
def test_a_length_that_no_memory_has_is_not_believed(length: str) -> None:
    receiving = Receiving({"content-length": length})
    receiving.add(b"abc")
    assert bytes(receiving.content()) == b"abc"


def test_no_wait_for_the_wire_is_longer_than_its_timer_knows(kind: str) -> None:
    answer, _, _ = run(kind, lambda client: ask(client, timeout_s=1e300), GOOD)
    assert not isinstance(answer, Exception)
    assert TimeLeft(lambda: 1e300).get("read") <= 1e6 and TimeLeft(lambda: None).get("read") is None


def test_whole_numbers_and_selections_come_as_numpy_torch_and_python_have_them(kind: str) -> None:
    select = {"rows": range(2), "heads": np.array([0])}
    for offset in (1, np.int64(1)):
        _, asked, _ = run(kind, functools.partial(ask, query_offset=offset, select=select), GOOD)
        options = options_of(asked[0])
        assert options["query_offset"] == 1 and options["select"] == {"rows": [0, 1], "heads": [0]}


def test_a_client_is_closed_when_its_block_ends() -> None:
    with AttentionClient(transport=httpx.MockTransport(prepared([GOOD], []))) as client:
        assert client.attention(QUERY).info.path == "manual"
    with pytest.raises(RuntimeError, match="closed"):
        client.attention(QUERY)

    async def main() -> None:
        async with AsyncAttentionClient(transport=httpx.MockTransport(prepared([GOOD], []))) as client:
            assert (await client.attention(QUERY)).info.path == "manual"
        with pytest.raises(RuntimeError, match="closed"):
            await client.attention(QUERY)

    asyncio.run(main())


def test_both_clients_have_the_same_calls_each_with_every_keyword_spelled_out_and_said() -> None:
    calls = [name for name in vars(Methods) if not name.startswith("_")]
    assert len(calls) == 14
    for name in calls:
        method = getattr(AttentionClient, name)
        assert method is getattr(AsyncAttentionClient, name) and inspect.getdoc(method)
        parameters = inspect.signature(method).parameters
        assert {"timeout_s", "request_id"} <= set(parameters)
        assert not [one for one in parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD]
    assert "w_query" in inspect.signature(AttentionClient.layer).parameters
    assert inspect.signature(AttentionClient.put_layer).parameters["w_key"].default is inspect.Parameter.empty


def test_importing_the_client_loads_neither_the_service_nor_torch() -> None:
    program = (
        "import sys, service.client\n"
        "for name in sys.modules:\n"
        "    top = name.partition('.')[0]\n"
        "    assert top != 'service' or name.startswith('service.client') or name == 'service', name\n"
        f"    assert top not in {sorted(HEAVY)}, name\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
