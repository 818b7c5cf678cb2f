"""Our own client against the real service: every call, every kind of array, every refusal, and a wire that breaks."""

from __future__ import annotations

import asyncio
import math
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from attn_core import Engine
from service.client import Answer, AsyncAttentionClient, AttentionClient, Info, LayerDescription
from service.client import errors as refusals
from service.client.errors import Fault
from tests.support.certificates import Authority
from tests.support.clients import KINDS, WAIT_S, Either, Times, client_of, cutting
from tests.support.factory import in_layout, make_mask, make_tensor
from tests.support.golden import GoldenCase, disagreement, golden_cases
from tests.support.in_process import GatedEngine, InProcess, service_in_process
from tests.support.kept_layers import make_parameters, options_of
from tests.support.server import RunningServer, running_server

ARRAY_KINDS = ("numpy", "torch", "lists")
HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
QKV: dict[str, Any] = {name: make_tensor(2, 4, 5, 8, seed=seed) for seed, name in enumerate(("query", "key", "value"))}
MEMORY_BYTES, BODY_BYTES, KEY = 2**23, 2**22, "a-key"


@pytest.fixture(scope="module", params=KINDS)
def client(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Either]:
    with client_of(request.param, server.url) as connected:
        yield connected


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    """A server with keys and narrow limits."""
    with running_server(
        ATTN_API_KEYS=KEY, ATTN_MEMORY_BUDGET_BYTES=str(MEMORY_BYTES), ATTN_MAX_BODY_BYTES=str(BODY_BYTES)
    ) as running:
        yield running


def of_kind(tensor: Tensor, kind: str) -> Any:
    if kind == "torch":
        return tensor
    if kind == "lists":
        return tensor.tolist()
    return (
        tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )


def as_tensor(value: Any, dtype: torch.dtype) -> Tensor:
    """An output of any kind; lists hold what ``dtype`` holds."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(value)
    return torch.tensor(value, dtype=torch.float64).to(dtype)


def attended(client: Either, kind: str = "torch", *, tensors: dict[str, Tensor] = QKV, **options: Any) -> Answer:
    answer: Answer = client.attention(**{name: of_kind(tensor, kind) for name, tensor in tensors.items()}, **options)
    return answer


# Kinds


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_every_kind_gives_the_same_bits_in_its_own_kind(client: Either, dtype: str) -> None:
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in QKV.items()}
    outputs = ["context", "weights", "top_weights"]
    answers = {}
    for kind in ARRAY_KINDS:
        of_lists = {"dtype": dtype} if kind == "lists" else {}
        asked = {"outputs": outputs, "select": {"top_k": 2}}
        answers[kind] = attended(client, kind, tensors=tensors, **asked, **of_lists)
    assert isinstance(answers["numpy"].context, np.ndarray) and isinstance(answers["lists"].context, list)
    for name in (*outputs, "top_keys"):
        whole = answers["torch"].outputs[name]
        stored = torch.int64 if name == "top_keys" else getattr(torch, dtype)
        assert whole.dtype == stored
        for kind in ("numpy", "lists"):
            assert torch.equal(as_tensor(answers[kind].outputs[name], stored), whole)


def test_arrays_of_an_answer_may_be_written_to(client: Either) -> None:
    for kind in ("numpy", "torch"):
        context = attended(client, kind).context
        context[...] = 0
        assert not context.any()


@pytest.mark.parametrize(
    "turn",
    [
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        lambda t: torch.stack([t, t + 1], dim=-1)[..., 0],
        lambda t: t.flip(2).contiguous().flip(2),
        lambda t: t.clone().requires_grad_(),
    ],
)
def test_strides_change_no_bit(client: Either, turn: Callable[[Tensor], Tensor]) -> None:
    turned = {name: turn(tensor) for name, tensor in QKV.items()}
    assert torch.equal(attended(client, tensors=turned).context, attended(client).context)


@pytest.mark.parametrize("layout", ["bthd", "btd"])
def test_a_layout_is_the_callers_own(client: Either, layout: str) -> None:
    turned = {name: in_layout(tensor, layout) for name, tensor in QKV.items()}
    heads: dict[str, Any] = {"num_heads": 4} if layout == "btd" else {}
    answer = attended(client, tensors=turned, layout=layout, **heads)
    assert torch.equal(answer.context, in_layout(attended(client).context, layout))


def test_the_worked_example_of_the_contract(client: Either) -> None:
    answer = client.attention(
        [[1, 0], [0, 1]],
        [[1, 0], [0, 1]],
        [[1, 2], [3, 4]],
        allow_mask=[[True, True], [False, False]],
        outputs=["context", "weights", "logsumexp"],
    )
    assert answer.weights == pytest.approx(np.array([[0.66976, 0.33024], [0, 0]]), abs=1e-5)
    assert answer.logsumexp[1] == -math.inf and answer.info.empty_rows == 1
    assert isinstance(answer.info, Info) and answer.info.path == "manual" and answer.info.why == "weights asked for"


def test_lists_beside_arrays_are_read_and_arrays_come_back(client: Either) -> None:
    plain = attended(client, "numpy", sinks=np.array([0.5] * 4, dtype=np.float32), key_lengths=np.array([3, 5]))
    mixed = attended(client, "numpy", sinks=[0.5] * 4, key_lengths=[3, 5])
    assert isinstance(mixed.context, np.ndarray) and np.array_equal(mixed.context, plain.context)


def test_numbers_that_no_json_has_travel_in_lists(client: Either) -> None:
    bias = [[0.0, -math.inf], [-math.inf, -math.inf]]
    query, key, value = [[1.0], [math.nan]], [[1.0], [2.0]], [[math.inf], [1.0]]
    answer = client.attention(query, key, value, bias=bias, outputs=["context", "logsumexp"])
    assert answer.context == [[math.inf], [0.0]] and answer.logsumexp[1] == -math.inf


# Masks


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize(
    "shape", [(5,), (1, 5), (5, 5), (4, 5, 5), (1, 5, 1), (1, 1, 5, 5), (2, 1, 5, 5), (2, 4, 5, 5)]
)
@pytest.mark.parametrize("name", ["allow_mask", "block_mask", "bias"])
def test_a_mask_of_any_rank_means_what_torch_means_by_it(
    client: Either, name: str, shape: tuple[int, ...], kind: str
) -> None:
    mask = make_tensor(*shape, seed=7) if name == "bias" else make_mask(*shape, seed=7)
    allowed = mask.double() if name == "bias" else ~mask if name == "block_mask" else mask
    query, key, value = (tensor.double() for tensor in QKV.values())
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed.expand(2, 4, 5, 5))
    answer = attended(client, kind, **{name: of_kind(mask, kind)})
    torch.testing.assert_close(as_tensor(answer.context, torch.float32).double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize(
    ("shape", "said"), [((2, 5), ("[1,1,T,S]", "[B,1,1,S]")), ((2, 5, 5), ("[1,H,T,S]", "[B,1,T,S]"))]
)
def test_a_mask_that_could_be_read_in_two_ways_is_refused_with_both(
    client: Either, shape: tuple[int, ...], said: tuple[str, str], kind: str
) -> None:
    with pytest.raises(refusals.Invalid) as caught:
        attended(client, kind, allow_mask=of_kind(make_mask(*shape), kind))
    (fault,) = caught.value.faults
    assert fault.field == "allow_mask" and all(each in fault.expected for each in said)


# Every call


def test_weighted_sum_is_the_plain_product(client: Either) -> None:
    weights, value = make_tensor(1, 2, 3, 4), make_tensor(1, 2, 4, 5, seed=1)
    for kind in ARRAY_KINDS:
        context = client.weighted_sum(of_kind(weights, kind), of_kind(value, kind)).context
        torch.testing.assert_close(as_tensor(context, torch.float32), weights @ value)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_gradients_are_those_of_autograd_each_in_the_shape_of_its_tensor(client: Either, kind: str, rank: int) -> None:
    bias = make_tensor(*(1, 4, 5, 5)[4 - rank :], seed=8)
    wide = {name: tensor.double().requires_grad_() for name, tensor in (QKV | {"bias": bias}).items()}
    context = torch.nn.functional.scaled_dot_product_attention(
        wide["query"], wide["key"], wide["value"], attn_mask=wide["bias"].expand(2, 4, 5, 5)
    )
    grad_context = make_tensor(2, 4, 5, 8, seed=9)
    torch.autograd.backward(context, grad_context.double())
    given = {
        name: of_kind(tensor, kind) for name, tensor in (QKV | {"bias": bias, "grad_context": grad_context}).items()
    }
    answer = client.gradients(**given)
    assert set(answer.outputs) == {f"grad_{name}" for name in wide}
    for name, tensor in wide.items():
        assert tensor.grad is not None
        found = as_tensor(answer.outputs[f"grad_{name}"], torch.float32)
        torch.testing.assert_close(found, tensor.grad.float(), atol=1e-5, rtol=1e-4)


def test_gradients_of_the_logsumexp_alone(client: Either) -> None:
    answer = client.gradients(**QKV, grad_logsumexp=make_tensor(2, 4, 5), outputs="grad_query")
    assert set(answer.outputs) == {"grad_query"}


def test_a_plan_is_made_of_shapes_and_of_arrays_alike(client: Either) -> None:
    shape = (2, 4, 5, 8)
    plans = [
        client.plan(shape, shape, shape, outputs=["context", "weights"]),
        client.plan(*QKV.values(), outputs=["context", "weights"]),
        client.plan(*(tensor.numpy() for tensor in QKV.values()), outputs=["context", "weights"]),
        client.plan(*(tensor.tolist() for tensor in QKV.values()), outputs=["context", "weights"]),
        client.plan(*(tensor.to("meta") for tensor in QKV.values()), outputs=["context", "weights"]),
        client.plan(*({"dtype": "float32", "shape": list(shape)} for _ in range(3)), outputs=["context", "weights"]),
    ]
    assert {(plan.path, plan.needed_bytes, plan.answer_bytes) for plan in plans} == {
        ("manual", plans[0].needed_bytes, plans[0].answer_bytes)
    }
    assert plans[0].admitted and plans[0].paths["manual"].supported and not plans[0].paths["fused"].supported


def test_a_plan_of_gradients_and_of_what_does_not_fit(client: Either) -> None:
    shape = (1, 8, 2**16, 64)
    assert client.plan(shape, grad_context=shape, dtype="float16").paths["manual"].flops > 0
    plan = client.plan((1, 8, 2**20, 64), outputs="weights")
    assert not plan.admitted and plan.needed_bytes > plan.allowed_bytes
    with pytest.raises(refusals.Invalid):
        client.plan((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4))


def layer_of(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights of a layer, and how they are to be read."""
    parameters = make_parameters(width=6, num_heads=2, **options)
    return dict(parameters.weights), options_of(parameters)


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
def test_a_layer_and_the_same_kept_by_name_give_the_same_bits(client: Either, kind: str, weight_layout: str) -> None:
    weights, reading = layer_of(weight_layout=weight_layout, seed=3)
    given = {name: of_kind(tensor, kind) for name, tensor in weights.items()}
    name = f"layer.{kind}-{weight_layout}"
    kept = client.put_layer(name, **given, **reading, replace=True)
    assert isinstance(kept, LayerDescription) and kept.shapes["w_query"] == tuple(weights["w_query"].shape)
    assert client.put_layer(name, **given, **reading).is_new is False
    tokens, memory = of_kind(make_tensor(2, 5, 6), kind), of_kind(make_tensor(2, 7, 6, seed=1), kind)
    grad_output = of_kind(make_tensor(2, 5, 4, seed=2), kind)
    mask = of_kind(make_mask(1, 7), kind)
    outputs = ["output", "weights", "query"]
    whole = client.layer(tokens, memory, **given, **reading, allow_mask=mask, outputs=outputs)
    named = client.forward(name, tokens, memory, allow_mask=mask, outputs=outputs)
    for output in outputs:
        assert torch.equal(*(as_tensor(one.outputs[output], torch.float32) for one in (whole, named)))
    grads = client.layer_gradients(tokens, memory, **given, **reading, grad_output=grad_output, causal="lower_right")
    named = client.forward_gradients(name, tokens, memory, grad_output=grad_output, causal="lower_right")
    assert set(grads.outputs) == set(named.outputs) >= {"grad_input", "grad_memory", "grad_w_query", "grad_b_output"}
    for output in grads.outputs:
        assert torch.equal(*(as_tensor(one.outputs[output], torch.float32) for one in (grads, named)))
    assert client.delete_layer(name) is None


def test_layers_are_kept_listed_described_and_forgotten(client: Either) -> None:
    weights, reading = layer_of(seed=4)
    assert client.put_layer("one", **weights, **reading).is_new is True
    other = {**weights, "w_output": weights["w_output"] + 1}
    with pytest.raises(refusals.Conflict, match="replace"):
        client.put_layer("one", **other, **reading)
    assert client.put_layer("one", **other, **reading, replace=True).is_new is False
    assert "one" in [layer.name for layer in client.list_layers()]
    described = client.get_layer("one")
    assert described.dtype == "float32" and described.num_heads == 2 and described.is_new is None
    client.delete_layer("one")
    for gone in (client.get_layer, client.delete_layer):
        with pytest.raises(refusals.NotFound):
            gone("one")
    with pytest.raises(refusals.NotFound):
        client.forward("one", make_tensor(2, 6))


def test_the_service_says_what_it_is(client: Either) -> None:
    info = client.info()
    assert info.state == "ready" and "context" in info.outputs and info.limits["max_rank"] == 4
    assert client.is_ready() is True


def test_verification_comes_with_the_info(client: Either) -> None:
    info = attended(client, verify=True).info
    assert info.max_abs_error is not None and info.max_abs_error < 1e-5 and info.worst is not None
    assert attended(client).info.max_abs_error is None


def test_an_answer_tells_its_id_and_how_long_each_stage_took(client: Either) -> None:
    answer = attended(client, request_id="my-id")
    assert answer.request_id == "my-id"
    assert set(answer.server_timing) == {"read", "parse", "queue", "compute", "encode"}
    assert len(attended(client).request_id) == 32


# Refusals


def test_every_fault_is_told_at_its_place(client: Either) -> None:
    with pytest.raises(refusals.Invalid) as caught:
        client.attention([[1, 2]], [[1, 2, 3]], [[1]], window={"left": -1}, request_id="mine")
    error = caught.value
    assert (error.status, error.name, error.request_id) == (422, "invalid", "mine")
    assert Fault("key", "head dim 2, as query has", "[1,3]") in error.faults
    assert "window.left" in [fault.field for fault in error.faults] and "head dim 2" in str(error)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"query": [[1, "x"]]}, "query.0.1"),
        ({"query": [[1, 2], [3]]}, "query.1"),
        ({"query": [[1, 1e300]]}, "query.0.1"),
        ({"query": [[1]], "allow_mask": [[1]]}, "allow_mask.0.0"),
        ({"query": np.ones((1, 1), dtype=np.float32), "allow_mask": [[1]]}, "allow_mask.0.0"),
        ({"query": np.ones((1, 1), dtype=np.float32), "key_lengths": [0.5]}, "key_lengths.0"),
        ({"query": np.ones((1, 1), dtype=np.float32), "allow_mask": np.ones((1, 1), dtype=np.int64)}, "allow_mask"),
        ({"query": np.ones((1, 1), dtype=np.uint8)}, "query.dtype"),
        ({"query": [[1]], "scale": math.nan}, "scale"),
        ({"query": [[1]], "select": {"rows": [0]}}, "select.rows"),
        ({"query": np.ones((1, 1), dtype=np.float32), "dtype": "float16"}, "dtype"),
        ({"query": []}, "query"),
    ],
)  # fmt: skip
def test_a_fault_names_the_place_in_what_the_caller_gave(client: Either, given: dict[str, Any], field: str) -> None:
    with pytest.raises(refusals.Invalid) as caught:
        client.attention(**given)
    assert field in [fault.field for fault in caught.value.faults], str(caught.value)


@pytest.mark.parametrize("key", [None, "wrong"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_the_key_nothing_is_served_but_health(strict: RunningServer, kind: str, key: str | None) -> None:
    with client_of(kind, strict.url, api_key=key) as client:
        for call in (lambda: attended(client), client.info, client.list_layers, lambda: client.plan((1, 2))):
            with pytest.raises(refusals.Unauthenticated) as caught:
                call()
            assert "wrong" not in str(caught.value)
        assert client.is_ready()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_large_says_how_much_too_large(strict: RunningServer, kind: str) -> None:
    with client_of(kind, strict.url, api_key=KEY) as client:
        assert attended(client).info.path == "fused"
        tokens = np.zeros((1, 1, 2048, 8), dtype=np.float32)
        with pytest.raises(refusals.TooLarge) as caught:
            client.attention(tokens, outputs="weights")
        error = caught.value
        assert error.needed_bytes is not None and error.needed_bytes > 2048 * 2048 * 4
        assert error.allowed_bytes == MEMORY_BYTES
        with pytest.raises(refusals.TooLarge) as caught:
            client.attention(np.zeros((1, 1, 2**17, 16), dtype=np.float32))
        assert caught.value.needed_bytes is None and str(BODY_BYTES) in str(caught.value)


class Mangling(httpx.BaseTransport):
    """Sends something else than what the client says, to see the refusals that it does not provoke by itself."""

    def __init__(self, change: Callable[[httpx.Request], httpx.Request]) -> None:
        self._inner = httpx.HTTPTransport()
        self._change = change

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return self._inner.handle_request(self._change(request))

    def close(self) -> None:
        self._inner.close()


def changed(
    request: httpx.Request, *, method: str = "POST", content: bytes | None = None, **headers: str
) -> httpx.Request:
    sent = {name: value for name, value in request.headers.items() if name != "content-length"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Request(method, request.url, headers=sent, content=request.content if content is None else content)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda request: changed(request, content=request.content[:-1]), refusals.Malformed),
        (lambda request: changed(request, method="PATCH"), refusals.MethodNotServed),
        (lambda request: changed(request, accept="image/png"), refusals.NotAcceptable),
        (lambda request: changed(request, content_type="image/png"), refusals.MediaTypeNotServed),
    ],
)
def test_refusals_that_a_client_of_ours_does_not_provoke_have_their_classes_too(
    server: RunningServer, change: Callable[[httpx.Request], httpx.Request], kind: type[Exception]
) -> None:
    with AttentionClient(server.url, transport=Mangling(change)) as client, pytest.raises(kind):
        client.attention(**QKV)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_service_is_waited_for_and_told_if_it_stays_full(kind: str) -> None:
    engine, times = GatedEngine(), Times()
    with service_in_process(engine, max_requests_inside=1) as service, ThreadPoolExecutor(1) as threads:

        def first() -> Answer:
            with AttentionClient(service.url) as other:
                return other.attention(**QKV)

        running = threads.submit(first)
        engine.wait_until_entered()
        with client_of(kind, service.url, max_retries=2, **times.options(kind)) as client:
            with pytest.raises(refusals.Overloaded) as caught:
                attended(client)
            assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1
            assert len(times.slept) == 2 and min(times.slept) >= caught.value.retry_after_s
            engine.open()
            whole = running.result(WAIT_S)
            assert torch.equal(attended(client).context, whole.context)


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_that_starts_is_waited_for(kind: str) -> None:
    engine = GatedEngine()
    engine.open()
    ready = threading.Event()
    with service_in_process(engine, start_engine=False) as service:
        service.parts.lifecycle.watch(ready.set)

        def start(_: float) -> None:
            if not ready.is_set():
                service.call(service.parts.batcher.start)
                assert ready.wait(WAIT_S)

        async def start_then(seconds: float) -> None:
            await asyncio.to_thread(start, seconds)

        with client_of(kind, service.url, sleep=start if kind == "sync" else start_then) as client:
            assert client.is_ready() is False
            assert attended(client).context.shape == (2, 4, 5, 8)
            assert client.is_ready() is True
        assert service.parts.batcher.stop(WAIT_S)


def drained(service: InProcess) -> None:
    lifecycle = service.parts.lifecycle
    service.call(lambda: asyncio.ensure_future(lifecycle.drain(notice_s=30, timeout_s=30)))
    while lifecycle.state.value != "draining":
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_that_drains_is_unavailable(kind: str) -> None:
    times = Times()
    options = times.options(kind) | {"max_retries": 1}
    with service_in_process(GatedEngine()) as service, client_of(kind, service.url, **options) as client:
        drained(service)
        with pytest.raises(refusals.Unavailable, match="draining") as caught:
            attended(client)
        assert caught.value.status == 503 and len(times.slept) == 1 and client.is_ready() is False


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_of_the_service_is_told_once_with_the_id_that_its_log_has(kind: str) -> None:
    engine = GatedEngine()
    engine.failure = RuntimeError("secret")
    engine.open()
    with service_in_process(engine) as service, client_of(kind, service.url) as client:
        with pytest.raises(refusals.Internal) as caught:
            attended(client, request_id="mine")
        assert caught.value.request_id == "mine" and "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deadline_that_passes_there_is_told_as_that_and_not_tried_again(kind: str) -> None:
    engine = GatedEngine()
    with service_in_process(engine, request_timeout_s=0.05) as service, client_of(kind, service.url) as client:
        with pytest.raises(refusals.DeadlinePassed) as caught:
            attended(client)
        assert caught.value.status == 504
        tries = [engine.entered.acquire(blocking=False) for _ in range(2)]
        assert tries[1] is False


@pytest.mark.parametrize("kind", KINDS)
def test_a_deadline_that_passes_here_lets_go_of_the_request_there(kind: str) -> None:
    engine = GatedEngine()
    with service_in_process(engine) as service, client_of(kind, service.url) as client:
        with pytest.raises((refusals.DeadlineExceeded, refusals.DeadlinePassed)):
            attended(client, timeout_s=0.05)
        engine.open()
        while service.call(lambda: service.parts.lifecycle.inside):
            pass
        assert attended(client).info.path == "fused"


def test_a_limit_beyond_that_of_the_service_is_refused_by_name(client: Either) -> None:
    with pytest.raises(refusals.Invalid) as caught:
        attended(client, timeout_s=1e6)
    assert [fault.field for fault in caught.value.faults] == ["timeout_ms"]


# The wire


@pytest.mark.parametrize("budget", [1, 100, 700, 1500])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_is_cut_is_asked_for_again(server: RunningServer, kind: str, budget: int) -> None:
    times = Times()
    with cutting(server.port, budget, budget) as between, client_of(kind, between.url, **times.options(kind)) as client:
        whole = attended(client).context
        assert between.connections == 3 and len(times.slept) == 2
    with client_of(kind, server.url) as client:
        assert torch.equal(attended(client).context, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_may_be_gone_is_not_deleted_twice(server: RunningServer, kind: str) -> None:
    weights, reading = layer_of(seed=5)
    with client_of(kind, server.url) as direct, cutting(server.port, 10) as between:
        direct.put_layer("doomed", **weights, **reading)
        with client_of(kind, between.url) as client, pytest.raises(refusals.ConnectionFailed):
            client.delete_layer("doomed")
        assert between.connections == 1
        with pytest.raises(refusals.NotFound):
            direct.get_layer("doomed")


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_listens_no_connection_is_told(kind: str) -> None:
    times = Times()
    with cutting(1) as between:
        url = between.url
    with client_of(kind, url, max_retries=1, **times.options(kind)) as client:
        with pytest.raises(refusals.ConnectionFailed) as caught:
            attended(client)
        assert url in str(caught.value) and len(times.slept) == 1 and client.is_ready() is False


@pytest.mark.parametrize("kind", KINDS)
def test_one_connection_serves_one_call_after_the_other(server: RunningServer, kind: str) -> None:
    with cutting(server.port) as between, client_of(kind, between.url) as client:
        for _ in range(5):
            attended(client)
            client.info()
            with pytest.raises(refusals.Invalid):
                client.attention([[1, 2]], [[1]], [[1]])
            with pytest.raises(refusals.NotFound):
                client.get_layer("nobody")
        assert between.connections == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_behind_tls_is_known_by_its_authority_and_a_stranger_is_not_asked_twice(
    tmp_path: Path, kind: str
) -> None:
    authority = Authority(tmp_path)
    signed = authority.sign("server")
    files: dict[str, Any] = {"tls_certificate_file": signed.file, "tls_key_file": signed.key_file}
    engine, times = GatedEngine(), Times()
    engine.open()
    with service_in_process(engine, **files) as service:
        url = f"https://localhost:{service.url.rpartition(':')[2]}"
        with client_of(kind, url, tls=ssl.create_default_context(cafile=authority.file)) as client:
            assert attended(client).context.shape == (2, 4, 5, 8)
        with client_of(kind, url, **times.options(kind)) as client:
            with pytest.raises(refusals.ConnectionFailed, match="CERTIFICATE_VERIFY_FAILED"):
                attended(client)
            assert not times.slept


def test_many_calls_at_once_share_the_connections_that_there_may_be(server: RunningServer) -> None:
    expected = torch.nn.functional.scaled_dot_product_attention(*QKV.values())
    with cutting(server.port) as between:
        with AttentionClient(between.url, max_connections=3) as client, ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: client.attention(**QKV), range(24)))
        assert between.connections <= 3
    with cutting(server.port) as between:

        async def main() -> list[Answer]:
            async with AsyncAttentionClient(between.url, max_connections=3) as client:
                return list(await asyncio.gather(*(client.attention(**QKV) for _ in range(24))))

        answers += asyncio.run(main())
        assert between.connections <= 3
    for answer in answers:
        torch.testing.assert_close(answer.context, expected)
    assert len({answer.request_id for answer in answers}) == 48


def test_a_call_that_is_cancelled_is_dropped_by_the_service() -> None:
    engine = GatedEngine()
    with service_in_process(engine) as service:

        async def main() -> None:
            async with AsyncAttentionClient(service.url) as client:
                call = asyncio.ensure_future(client.attention(**QKV))
                await asyncio.to_thread(engine.wait_until_entered)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                engine.open()
                while await asyncio.to_thread(service.call, lambda: service.parts.lifecycle.inside):
                    pass
                assert (await client.attention(**QKV)).info.path == "fused"

        asyncio.run(main())


def test_a_large_problem_travels_whole_both_ways() -> None:
    tokens = make_tensor(1, 1, 1500, 64)
    with service_in_process(Engine(device="cpu", max_threads=1)) as service, AttentionClient(service.url) as client:
        answer = client.attention(tokens, outputs=["context", "weights"])
        torch.testing.assert_close(answer.weights.sum(-1), torch.ones(1, 1, 1500))
        torch.testing.assert_close(client.weighted_sum(answer.weights, tokens).context, answer.context)


# Golden cases


def golden(case: GoldenCase, kind: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A case as keywords of a call; a list cannot say a shape with a 0 in it."""
    first = next(iter(tensors.values()))
    given = {name: of_kind(tensor, kind if tensor.numel() else "torch") for name, tensor in tensors.items()}
    name = str(first.dtype).removeprefix("torch.")
    dtype = {"dtype": name} if kind == "lists" and first.numel() and name != "float32" else {}
    return given | case.options | dtype


def check(case: GoldenCase, names: tuple[str, ...], answer: Answer) -> None:
    dtype = next(iter(case.tensors.values())).dtype
    assert set(names) <= set(answer.outputs)
    for name in names:
        wide = torch.float64 if name in ("scores", "logits", "logsumexp") else dtype
        expected = case.expected[name]
        # An empty list has no shape.
        found = as_tensor(answer.outputs[name], wide).reshape(expected.shape)
        reason = disagreement(found, expected, case.tolerance[name])
        assert reason is None, f"{name}: {reason}"


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize("case", golden_cases(), ids=str)
def test_golden_case_through_the_client(sync_client: AttentionClient, case: GoldenCase, kind: str) -> None:
    call: Any = getattr(sync_client, case.op)
    given = golden(case, kind, {name: tensor for name, tensor in case.tensors.items() if not name.startswith("grad_")})
    outputs = {} if case.op == "weighted_sum" else {"outputs": case.forward_outputs}
    check(case, case.forward_outputs, call(**given, **outputs))


@pytest.mark.parametrize("kind", ARRAY_KINDS)
@pytest.mark.parametrize("case", [case for case in golden_cases() if case.gradients], ids=str)
def test_gradients_of_a_golden_case_through_the_client(
    sync_client: AttentionClient, case: GoldenCase, kind: str
) -> None:
    call: Any = sync_client.gradients if case.op == "attention" else sync_client.layer_gradients
    check(case, case.gradients, call(**golden(case, kind, case.tensors)))


@pytest.fixture(scope="module")
def sync_client(server: RunningServer) -> Iterator[AttentionClient]:
    with AttentionClient(server.url) as connected:
        yield connected
