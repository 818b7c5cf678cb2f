"""The engine's thread: who is computed, who is not, and what becomes of the thread when something breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from attn_core import AttentionError, AttentionProblem, AttentionResult, Engine
from attn_core.engine import Problem
from attn_core.errors import Fault, InvalidProblem
from service.batcher import Batcher
from service.deadline import Deadline
from service.errors import DeadlinePassed, Unavailable
from service.request_queue import Answer, Pending, RequestQueue

WAIT_S = 30.0


class ScriptedEngine(Engine):
    """Notes whom it computes; ``failures`` are raised one after the other; a closed gate holds it inside a problem."""

    def __init__(self, *, gated: bool = False) -> None:
        super().__init__(device="cpu", max_threads=1)
        self.computed: list[int] = []
        self.failures: list[BaseException] = []
        self.warm_up_failures: list[BaseException | None] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        if not gated:
            self.gate.set()

    def warm_up(self) -> None:
        failure = self.warm_up_failures.pop(0) if self.warm_up_failures else None
        if failure is not None:
            raise failure

    def run(self, problems: Sequence[Problem]) -> list[AttentionResult | AttentionError]:
        self.computed.extend(id(problem) for problem in problems)
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        if self.failures:
            raise self.failures.pop(0)
        return super().run(problems)


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """A batcher around an engine, in a running event loop."""

    engine: ScriptedEngine
    clock: FakeClock = field(default_factory=FakeClock)
    queue: RequestQueue = field(default_factory=lambda: RequestQueue(max_requests=100))
    ready: threading.Event = field(default_factory=threading.Event)
    lost: list[BaseException] = field(default_factory=list)
    is_lost: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.batcher = Batcher(
            make_engine=lambda: self.engine,
            queue=self.queue,
            on_ready=self.ready.set,
            on_lost=self._note_lost,
            clock=self.clock,
        )

    def _note_lost(self, error: BaseException) -> None:
        self.lost.append(error)
        self.is_lost.set()

    def put(self, size: float = 1.0, *, timeout_s: float = 60.0) -> Pending:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        problem = AttentionProblem(query=torch.full((1, 1, 1, 2), float(size)))
        pending = Pending(problem, Deadline.after(timeout_s, self.clock), future, self.clock(), 7)
        self.queue.put(pending)
        return pending

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered_within)

    def entered_within(self) -> bool:
        return self.engine.entered.acquire(timeout=WAIT_S)


def run(engine: ScriptedEngine, check: Callable[[Bench], Awaitable[None]], *, ends: bool = True) -> None:
    async def whole() -> None:
        bench = Bench(engine)
        bench.batcher.start()
        try:
            await asyncio.wait_for(check(bench), WAIT_S)
        finally:
            engine.gate.set()
            assert await asyncio.to_thread(bench.batcher.stop, WAIT_S) is ends

    asyncio.run(whole())


def test_each_is_answered_in_its_turn_with_its_own_result() -> None:
    engine = ScriptedEngine()

    async def check(bench: Bench) -> None:
        pending = [bench.put(float(number)) for number in range(5)]
        answers = [await one.future for one in pending]
        assert [answer.result.outputs["context"].flatten()[0].item() for answer in answers] == [0, 1, 2, 3, 4]
        assert all(answer.needed_bytes == 7 and answer.batch_requests == 1 for answer in answers)
        assert bench.ready.is_set() and not bench.lost

    run(engine, check)


def test_waiting_and_computing_are_told_apart() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        first = bench.put()
        await bench.until_entered()
        second = bench.put()
        bench.clock.now += 2.0
        engine.gate.set()
        answers = await first.future, await second.future
        assert [(answer.queue_s, answer.compute_s) for answer in answers] == [(0.0, 2.0), (2.0, 0.0)]

    run(engine, check)


def test_a_deadline_passed_in_the_queue_is_not_computed() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        first, late, patient = bench.put(1), bench.put(2, timeout_s=5.0), bench.put(3, timeout_s=50.0)
        await bench.until_entered()
        bench.clock.now += 5.0
        engine.gate.set()
        with pytest.raises(DeadlinePassed):
            await late.future
        await first.future
        await patient.future
        assert engine.computed == [id(first.problem), id(patient.problem)]

    run(engine, check)


def test_a_caller_who_has_gone_is_not_computed_for() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        first, gone, patient = bench.put(1), bench.put(2), bench.put(3)
        await bench.until_entered()
        gone.future.cancel()
        engine.gate.set()
        await first.future
        await patient.future
        assert engine.computed == [id(first.problem), id(patient.problem)]

    run(engine, check)


def test_a_caller_who_goes_while_being_computed_for_disturbs_nobody() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        first, second = bench.put(1), bench.put(2)
        await bench.until_entered()
        first.future.cancel()
        engine.gate.set()
        await second.future

    run(engine, check)


@pytest.mark.parametrize("error", [RuntimeError("a mistake"), ValueError(""), IndexError("dims")])
def test_a_mistake_of_the_engine_is_told_to_its_own_caller_alone(error: Exception) -> None:
    engine = ScriptedEngine()
    engine.failures = [error]

    async def check(bench: Bench) -> None:
        first, second = bench.put(1), bench.put(2)
        with pytest.raises(type(error)) as caught:
            await first.future
        assert caught.value is error
        await second.future
        assert not bench.lost

    run(engine, check)


def test_a_refusal_of_the_core_is_handed_on_as_it_is() -> None:
    refusal = InvalidProblem([Fault("empty_rows", "a key", "none")])

    class Refusing(ScriptedEngine):
        def run(self, problems: Sequence[Problem]) -> list[AttentionResult | AttentionError]:
            return [refusal]

    async def check(bench: Bench) -> None:
        with pytest.raises(InvalidProblem) as caught:
            await bench.put().future
        assert caught.value is refusal

    run(Refusing(), check)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_is_not_there_is_a_matter_of_load(error: Exception) -> None:
    engine = ScriptedEngine()
    engine.failures = [error]

    async def check(bench: Bench) -> None:
        first, second = bench.put(1), bench.put(2)
        with pytest.raises(Unavailable):
            await first.future
        await second.future
        assert not bench.lost

    run(engine, check)


@pytest.mark.parametrize("in_making", [True, False])
def test_a_device_lost_at_warm_up_refuses_all_and_computes_nothing(in_making: bool) -> None:
    engine = ScriptedEngine()
    error = RuntimeError("no kernel image")

    async def check() -> None:
        def make_engine() -> Engine:
            if in_making:
                raise error
            engine.warm_up_failures = [error]
            return engine

        bench = Bench(engine)
        bench.batcher = Batcher(
            make_engine=make_engine, queue=bench.queue, on_ready=bench.ready.set, on_lost=bench._note_lost
        )
        before = bench.put()
        bench.batcher.start()
        assert await asyncio.to_thread(bench.is_lost.wait, WAIT_S)
        for pending in (before, bench.put()):
            with pytest.raises(Unavailable, match="no kernel image"):
                await asyncio.wait_for(pending.future, WAIT_S)
        assert bench.lost == [error] and not bench.ready.is_set() and not engine.computed
        assert await asyncio.to_thread(bench.batcher.stop, WAIT_S)

    asyncio.run(check())


def test_a_device_lost_later_is_noticed_and_refuses_all() -> None:
    engine = ScriptedEngine(gated=True)
    lost = RuntimeError("CUDA error: unspecified launch failure")
    engine.failures = [RuntimeError("CUDA error: an illegal memory access was encountered")]
    engine.warm_up_failures = [None, lost]

    async def check(bench: Bench) -> None:
        first, second = bench.put(1), bench.put(2)
        await bench.until_entered()
        engine.gate.set()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await first.future
        with pytest.raises(Unavailable, match="unspecified launch failure"):
            await second.future
        with pytest.raises(Unavailable):
            await bench.put(3).future
        assert bench.lost == [lost] and engine.computed == [id(first.problem)]

    run(engine, check)


def test_a_check_of_the_device_that_finds_no_memory_is_no_loss() -> None:
    engine = ScriptedEngine()
    engine.failures = [RuntimeError("a mistake")]
    engine.warm_up_failures = [None, torch.OutOfMemoryError("full")]

    async def check(bench: Bench) -> None:
        first, second = bench.put(1), bench.put(2)
        with pytest.raises(RuntimeError, match="a mistake"):
            await first.future
        await second.future
        assert not bench.lost

    run(engine, check)


def test_stopping_computes_what_waits_first() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        pending = [bench.put(number) for number in range(3)]
        await bench.until_entered()
        stopping = asyncio.create_task(asyncio.to_thread(bench.batcher.stop, WAIT_S))
        engine.gate.set()
        assert await stopping
        assert len([await one.future for one in pending]) == 3

    run(engine, check)


def test_a_kernel_that_does_not_end_is_told_from_one_that_does() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        pending = bench.put()
        await bench.until_entered()
        assert not bench.batcher.stop(0.0)
        engine.gate.set()
        await pending.future

    run(engine, check)
