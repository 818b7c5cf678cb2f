"""What a capture catches, how it is asked for it, and how it ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode

from attn_core import AttentionOptions, AttentionProblem, Engine
from service.client.capture import Captured, IncompleteCapture, NothingCaptured, capture_attention, interception
from tests.service.client.capture.models import Attention, Stack, textbook, tokens

PATCHED = (
    (F, "multi_head_attention_forward"),
    (torch, "_native_multi_head_attention"),
    (torch, "_transformer_encoder_layer_fwd"),
)


def attend(seq_len: int = 5, **options: Any) -> Tensor:
    x = torch.randn(1, 2, seq_len, 8)
    return F.scaled_dot_product_attention(x, x, x, **options)


@contextmanager
def incomplete(match: str, model: nn.Module | None = None, **asked: Any) -> Iterator[Captured]:
    """A capture that must say at its end what it has not seen."""
    with pytest.warns(IncompleteCapture, match=match), capture_attention(model, **asked) as captured:
        yield captured


def state() -> tuple[Any, ...]:
    """All that a capture changes of torch while it lasts."""
    return (*(getattr(home, name) for home, name in PATCHED), *registered())


def registered() -> tuple[bool, ...]:
    name, keys = "aten::scaled_dot_product_attention", ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA")
    return tuple(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


@pytest.fixture(autouse=True)
def _torch_is_as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    # A runner of tests may have threads of its own, none of which attends.
    monkeypatch.setattr(interception, "_is_alone", lambda: True)
    with capture_attention(keep="none"):
        attend()
    before = state()
    assert not any(registered())
    yield
    assert state() == before


def test_calls_are_found_by_number_and_by_name() -> None:
    model = Stack(Attention(), Attention())
    with capture_attention(model, keep="none") as captured:
        model(tokens())
        model(tokens())
        attend()
    assert len(captured) == 5
    assert [(call.index, call.name, call.nth) for call in captured] == [
        (0, "layers.0", 0),
        (1, "layers.1", 0),
        (2, "layers.0", 1),
        (3, "layers.1", 1),
        (4, None, 0),
    ]
    assert captured["layers.1", 1] is captured[3]
    assert captured.of("layers.0") == (captured[0], captured[2])
    assert captured.names == ("layers.0", "layers.1")
    assert "layers.0" in captured
    with pytest.raises(KeyError, match="made 2 calls"):
        captured["layers.0"]
    with pytest.raises(KeyError, match=r"no call of 'layers.2'; there are 'layers.0', 'layers.1'"):
        captured["layers.2"]
    with pytest.raises(IndexError):
        captured[5]


def test_a_call_says_what_it_was_and_what_it_has_not() -> None:
    with capture_attention(keep="entropy") as captured:
        attend(is_causal=True, scale=0.5)
    assert "query [1, 2, 5, 8]" in repr(captured[0])
    assert "causal, scale 0.5, entropy [1, 2, 5]" in captured.summary()
    with pytest.raises(AttributeError, match=r"call 0 has no weights: keep=\.\.\. decides what is kept, here entropy"):
        _ = captured[0].weights


def test_keeping_nothing_computes_nothing() -> None:
    with capture_attention(keep="none") as captured:
        attend()
    assert not captured[0].outputs
    assert captured[0].empty_rows is None
    assert captured[0].path is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": "wieghts"}, "keep: expected one of weights, top_weights"),
        ({"threads": "some"}, "threads: expected"),
        ({"top_k": 3}, "top_k: says nothing where keep is 'weights'"),
        ({"keep": "top_weights", "top_k": 0}, "top_k: expected at least 1"),
    ],
)
def test_a_capture_that_makes_no_sense_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message), capture_attention(**given):
        raise AssertionError


def test_everything_is_undone_after_an_exception() -> None:
    before = state()

    def fails(error: BaseException) -> None:
        with capture_attention(), capture_attention():
            assert state() != before
            attend()
            raise error

    for error in (ZeroDivisionError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fails(error)
    assert state() == before


def test_beside_other_threads_a_way_through_stays_until_a_capture_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 2, 5, 8)
    bare = F.scaled_dot_product_attention(query, query, query)
    for ends_alone in (False, False, True):
        monkeypatch.setattr(interception, "_is_alone", lambda ends_alone=ends_alone: ends_alone)
        with capture_attention() as captured:
            attend()
        assert len(captured) == 1
        assert all(registered()) != ends_alone
        assert torch.equal(F.scaled_dot_product_attention(query, query, query), bare)


def test_captures_that_come_and_go_do_not_disturb_the_model_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interception, "_is_alone", lambda: False)
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval()
    weighing, x = nn.MultiheadAttention(32, 4), tokens()
    is_over = threading.Event()
    wrong: list[object] = []

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return layer(x), *weighing(x, x, x), F.scaled_dot_product_attention(x, x, x)

    def work() -> None:
        while not is_over.is_set():
            try:
                wrong.extend(i for i, (a, b) in enumerate(zip(run(), bare, strict=True)) if not torch.equal(a, b))
            except Exception as error:
                wrong.append(error)

    bare = run()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IncompleteCapture)
        for _ in range(100):
            with capture_attention(keep="none"):
                attend()
    is_over.set()
    for thread in threads:
        thread.join()
    assert not wrong
    monkeypatch.setattr(interception, "_is_alone", lambda: True)
    with capture_attention(keep="none"):
        attend()


def test_nested_captures_each_get_every_call_in_whatever_order_they_end() -> None:
    outer, inner = capture_attention(), capture_attention(keep="none")
    first = outer.__enter__()
    attend()
    second = inner.__enter__()
    attend()
    outer.__exit__(None, None, None)
    attend()
    inner.__exit__(None, None, None)
    attend()
    assert (len(first), len(second)) == (2, 2)


def test_a_capture_does_not_catch_what_it_computes_itself() -> None:
    @dataclass
    class Fused:
        """Answers with the core's fused kernel, which calls the operator."""

        asked: int = 0

        def attention(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Any:
            self.asked += 1
            problem = AttentionProblem(query, key, value, options=AttentionOptions(path="fused"))
            context = Engine().attend(problem).outputs["context"]
            return Answer({"weights": context}, Info("fused", 0))

    client = Fused()
    with capture_attention(to=client) as captured, capture_attention(to=client) as second:
        attend()
    assert (len(captured), len(second), client.asked) == (1, 1, 2)
    assert not captured.refused


def on_a_thread(run: Callable[[], object], name: str) -> None:
    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()


def test_calls_of_other_threads_are_counted_and_said() -> None:
    with incomplete("2 calls of other threads, which threads='all' takes") as captured:
        attend()
        on_a_thread(lambda: (attend(), attend()), "beside")
    assert len(captured) == 1
    assert captured.unseen[0].startswith("2 calls of other threads")


def test_calls_of_all_threads_are_caught_on_request_each_with_its_threads_name() -> None:
    with capture_attention(threads="all") as captured:
        attend()
        on_a_thread(lambda: attend(6), "beside")
    assert [(call.thread, call.query_shape[2]) for call in captured] == [("MainThread", 5), ("beside", 6)]
    assert captured[1].weights.shape == (1, 2, 6, 6)


def test_captures_of_several_threads_do_not_mix() -> None:
    meeting, found = threading.Barrier(2), {}

    def run(seq_len: int) -> None:
        with warnings.catch_warnings(), capture_attention(keep="none") as captured:
            warnings.simplefilter("ignore", IncompleteCapture)
            meeting.wait(30)
            for _ in range(20):
                attend(seq_len)
            meeting.wait(30)
            found[seq_len] = [call.query_shape[2] for call in captured]

    with warnings.catch_warnings():
        # Of one thread while the other runs: filters of warnings are the process's own.
        warnings.simplefilter("ignore", IncompleteCapture)
        threads = [threading.Thread(target=run, args=(seq_len,)) for seq_len in (3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {3: [3] * 20, 4: [4] * 20}


def test_a_function_mode_around_the_model_does_not_make_two_calls_of_one() -> None:
    class Watching(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    model = nn.MultiheadAttention(32, 4)
    x = tokens()
    with capture_attention(model) as captured, Watching():
        model(x, x, x)
        model(x, x, x, need_weights=False)
    assert [call.function for call in captured] == ["multi_head_attention_forward", "scaled_dot_product_attention"]


def test_functions_that_somebody_else_replaced_meanwhile_stay_his() -> None:
    original = F.multi_head_attention_forward
    model, x = nn.MultiheadAttention(32, 4), tokens()
    calls = []
    try:
        with capture_attention(model) as captured:
            ours = F.multi_head_attention_forward

            def theirs(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                return ours(*args, **kwargs)

            F.multi_head_attention_forward = theirs
            model(x, x, x)
        assert F.multi_head_attention_forward is theirs
        bare = model(x, x, x)
        with capture_attention(model) as again:
            within = model(x, x, x)
        assert F.multi_head_attention_forward is theirs
    finally:
        F.multi_head_attention_forward = original
    assert (len(captured), len(again), len(calls)) == (1, 1, 3)
    assert torch.equal(bare[0], within[0])


def test_what_the_core_refuses_is_a_call_with_its_reason() -> None:
    with incomplete("1 of 2 calls have no weights, the first since: InvalidProblem") as captured:
        attend()
        attend(scale=float("inf"))
    (call,) = captured.refused
    assert call.refusal is not None and "scale" in call.refusal
    with pytest.raises(AttributeError, match="call 1 has no weights: InvalidProblem"):
        _ = call.weights
    assert call.query_shape == (1, 2, 5, 8)


def test_tensors_without_numbers_to_read_are_calls_with_their_reason() -> None:
    query = torch.randn(1, 2, 5, 8)
    with incomplete("2 of 3 calls have no weights") as captured:
        nn.MultiheadAttention(8, 2, device="meta")(*[query[0].to("meta")] * 3)
        torch.func.grad(lambda q: F.scaled_dot_product_attention(q, query, query).sum())(query)
        attend()
    assert [call.refusal for call in captured] == [
        "tensors on device meta have no numbers",
        "inside a transform of torch.func",
        None,
    ]


def test_a_capture_of_nothing_raises_and_says_what_it_could_not_see() -> None:
    with pytest.raises(NothingCaptured, match=r"no attention was caught(.|\n)*flex_attention"), capture_attention():
        torch.ones(2).sum()


def test_a_capture_of_nothing_leaves_the_bodys_own_error_alone() -> None:
    with pytest.raises(ZeroDivisionError), capture_attention():
        raise ZeroDivisionError


class Flexible(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _flexibly(x)
        return found


def _flexibly(x: Tensor) -> Any:
    return flex_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_what_a_model_has_that_cannot_be_seen_is_said() -> None:
    model = Stack(Attention(), Flexible(), Attention())
    with incomplete("calls of flex_attention, which the code of 'layers.1' names", model):
        attend()
    compiled = Stack(Attention(), torch.compile(Attention()))  # type: ignore[arg-type]
    with incomplete(r"calls inside 'layers.1', compiled by torch.compile", compiled):
        attend()
    scripted = Stack(torch.jit.script(nn.MultiheadAttention(32, 4)))
    with incomplete("calls of 'layers.0' in TorchScript", scripted):
        attend()
    eager = Attention()
    eager.config = type("Config", (), {"_attn_implementation": "eager"})  # type: ignore[assignment]
    with (
        pytest.raises(NothingCaptured, match="here: attention by attn_implementation='eager'"),
        capture_attention(eager),
    ):
        pass


@pytest.mark.filterwarnings("ignore")  # both are deprecated, and the tracer warns of what MultiheadAttention does
def test_a_model_can_be_scripted_and_traced_inside_a_capture() -> None:
    class Layer(nn.MultiheadAttention):
        """Of a class that no script has read before."""

    layer, x = Layer(32, 4), tokens()
    bare = layer(x, x, x)[0]
    with capture_attention(keep="none"):
        attend()
        assert torch.equal(torch.jit.script(layer)(x, x, x)[0], bare)
        assert torch.equal(torch.jit.trace(layer, (x, x, x))(x, x, x)[0], bare)  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_calls_inside_torchscript_are_seen() -> None:
    def function(q: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    scripted = torch.jit.script(function)
    query = torch.randn(1, 2, 5, 8)
    with capture_attention() as captured:
        scripted(query)
    torch.testing.assert_close(captured[0].weights.double(), textbook(query, query, is_causal=True))


def test_compiled_code_keeps_its_numbers_and_its_compilation() -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compilations.append(graph)
        return graph

    torch.manual_seed(1)
    model = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        bare = compiled(tokens())
        before = len(compilations)
        with capture_attention(keep="none") as captured:
            attend()
            inside = compiled(tokens())
        after = compiled(tokens())
    assert torch.equal(bare, inside)
    assert torch.equal(bare, after)
    assert len(captured) >= 1
    # Once more at the most, since the functions that it calls are others during a capture.
    assert len(compilations) <= before + 1


def test_compiling_inside_a_capture_gives_the_same_code() -> None:
    def function(x: Tensor, layer: nn.MultiheadAttention) -> Tensor:
        out: Tensor = layer(x, x, x)[0] + F.scaled_dot_product_attention(x, x, x)
        return out

    torch.manual_seed(1)
    layer, x = nn.MultiheadAttention(32, 4), tokens()
    bare = torch.compile(function, backend="aot_eager", fullgraph=True)(x, layer)
    torch.compiler.reset()
    with capture_attention(keep="none") as captured:
        attend()
        inside = torch.compile(function, backend="aot_eager", fullgraph=True)(x, layer)
    torch.compiler.reset()
    assert torch.equal(bare, inside)
    assert len(captured) == 1


@dataclass(frozen=True)
class Info:
    path: str
    empty_rows: int


@dataclass(frozen=True)
class Answer:
    outputs: dict[str, Tensor]
    info: Info

    def __getattr__(self, name: str) -> Tensor:
        return self.outputs[name]


class Client:
    """The service's client as far as a capture knows it: answers with the core, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def attention(
        self, query: Tensor, key: Any = None, value: Any = None, *, outputs: Any, select: Any = None, **rest: Any
    ) -> Answer:
        self.asked.append({"query": query, "key": key, "value": value, "outputs": outputs, "select": select, **rest})
        named = {name: rest.pop(name) for name in ("causal", "scale") if name in rest}
        options = AttentionOptions(outputs=tuple(outputs), top_k=(select or {}).get("top_k"), **named)
        result = Engine().attend(AttentionProblem(query, key, value, options=options, **rest))
        return Answer(result.outputs, Info(result.path, result.empty_rows))


@pytest.mark.parametrize("keep", ["weights", "top_weights", "entropy"])
def test_a_client_gives_what_the_core_gives_here(keep: Any) -> None:
    client, x = Client(), torch.randn(2, 4, 5, 8)
    calls: list[dict[str, Any]] = [
        {"is_causal": True, "scale": 0.5},
        {"attn_mask": torch.rand(5, 5) > 0.5},
        {"attn_mask": torch.randn(2, 1, 5, 5)},
    ]
    with capture_attention(keep=keep) as here, capture_attention(keep=keep, to=client) as there:
        for options in calls:
            F.scaled_dot_product_attention(x, x, x, **options)
        F.scaled_dot_product_attention(x[0], x[0], x[0])
    for one, other in zip(here, there, strict=True):
        assert one.outputs.keys() == other.outputs.keys()
        assert all(torch.equal(one.outputs[name], other.outputs[name]) for name in one.outputs)
        assert one.empty_rows == other.empty_rows
    for asked in client.asked:
        for name in {"query", "key", "value", "allow_mask", "bias"} & asked.keys():
            assert asked[name].ndim == 4
            assert not asked[name].requires_grad
    assert client.asked[0]["causal"] == "upper_left"
    assert client.asked[0]["scale"] == 0.5
    assert client.asked[1]["allow_mask"].dtype == torch.bool
    assert client.asked[2]["bias"].dtype == torch.float32
    assert client.asked[0]["select"] == ({"top_k": 8} if keep == "top_weights" else None)


def test_a_service_that_fails_is_a_reason_and_never_the_models_failure() -> None:
    class Away:
        def attention(self, query: Tensor, *args: Any, **options: Any) -> Any:
            raise ConnectionError("nobody listens on port 8000")

    x = torch.randn(1, 2, 5, 8)
    bare = F.scaled_dot_product_attention(x, x, x)
    with incomplete("1 of 1 calls have no weights", to=Away()) as captured:
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), bare)
    assert captured[0].refusal == "ConnectionError: nobody listens on port 8000"


def test_a_client_that_awaits_is_refused_at_once() -> None:
    class Awaiting:
        async def attention(self, query: Tensor, **options: Any) -> Any:
            await asyncio.sleep(0)

    with pytest.raises(TypeError, match="a client that waits"), capture_attention(to=Awaiting()):
        pass
    with pytest.raises(TypeError, match="with the method attention"), capture_attention(to=object()):  # type: ignore[arg-type]
        pass


def test_the_capture_imports_no_service_but_the_client() -> None:
    code = (
        "import sys, service.client.capture; "
        "print(sorted(m for m in sys.modules if m.startswith('service.') and not m.startswith('service.client')), "
        "'fastapi' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[] False"
