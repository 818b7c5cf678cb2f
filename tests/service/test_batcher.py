"""The engine's threads: who is computed together, who is not, and what becomes of all when something breaks."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from attn_core import AttentionError, AttentionResult, Engine
from attn_core.errors import Abandoned, Checkpoint, Fault, InvalidProblem, TooLarge
from attn_core.prepared import Prepared
from attn_core.problem import Problem
from service.batcher import Batcher
from service.deadline import Deadline
from service.deliveries import Deliveries
from service.errors import DeadlinePassed, Unavailable
from service.pace import Pace
from service.request_queue import Answer, Outcome, Pending, RequestQueue
from tests.support.clock import FakeClock
from tests.support.pending import make_pending, make_prepared, number_of

WAIT_S = 30.0
ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class ScriptedEngine(Engine):
    """Notes the numbers it computes, run by run. A gated one is held in each run until its gate is open.

    ``failures`` are raised by the first runs, one each, None for none; ``fails_with`` by each that has the number.
    """

    def __init__(self, *, gated: bool = False, device_type: str = "cpu") -> None:
        super().__init__(device="cpu", max_threads=1)
        self._inner = Engine()
        # Asked for its type alone: how problems ride depends on it.
        self.device = torch.device(device_type)
        self.runs: list[list[float]] = []
        self.outcomes: list[AttentionResult | AttentionError] = []
        self.failures: list[BaseException | None] = []
        self.fails_with: dict[float, BaseException] = {}
        self.refuses: dict[float, AttentionError] = {}
        self.warm_up_failures: list[BaseException | None] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        if not gated:
            self.gate.set()
        self._gate_of: dict[float, threading.Event] = {}

    def hold(self, number: float) -> threading.Event:
        """A gate before one number."""
        return self._gate_of.setdefault(number, threading.Event())

    def open(self) -> None:
        for gate in (self.gate, *self._gate_of.values()):
            gate.set()

    def warm_up(self) -> None:
        failure = self.warm_up_failures.pop(0) if self.warm_up_failures else None
        if failure is not None:
            raise failure

    def run(
        self, problems: Sequence[Problem | Prepared], checkpoints: Sequence[Checkpoint | None] | None = None
    ) -> list[AttentionResult | AttentionError]:
        numbers = [self._number(problem) for problem in problems]
        self.runs.append(numbers)
        self.entered.release()
        for gate in (self.gate, *(self._gate_of[number] for number in numbers if number in self._gate_of)):
            assert gate.wait(WAIT_S)
        failures = [self.failures.pop(0) if self.failures else None, *map(self.fails_with.get, numbers)]
        for failure in failures:
            if failure is not None:
                raise failure
        answered = self._inner.run(problems, checkpoints)
        outcomes = [self.refuses.get(number, outcome) for number, outcome in zip(numbers, answered, strict=True)]
        self.outcomes.extend(outcomes)
        return outcomes

    @staticmethod
    def _number(problem: Problem | Prepared) -> float:
        assert isinstance(problem, Prepared)
        return problem.problem.tensors()["query"].flatten()[0].item()


class Asker:
    """One who waits for an outcome, and counts how often it comes, and where."""

    def __init__(self, bench: Bench, number: float, *, is_large: bool, timeout_s: float) -> None:
        self.future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.times_told = 0
        self.threads: set[int] = set()
        self.pending: Pending = make_pending(
            make_prepared(number, is_large=is_large),
            deliver=self._deliver,
            timeout_s=timeout_s,
            estimated_s=1.0,
            clock=bench.clock,
        )

    def _deliver(self, outcome: Outcome) -> None:
        self.times_told += 1
        self.threads.add(threading.get_ident())
        if self.future.done():
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


@dataclass
class Bench:
    """A batcher around engines by the names of their threads' lanes, in a running event loop."""

    engine: ScriptedEngine
    large_engine: ScriptedEngine | None = None
    num_small_workers: int = 1
    make_engine: Callable[[], Engine] | None = None
    measure: Callable[[Engine], tuple[float, dict[str, float]]] | None = None
    allowed_bytes: Callable[[], int] = lambda: 2**40
    clock: FakeClock = field(default_factory=FakeClock)
    ready: list[int] = field(default_factory=list)
    lost: list[BaseException] = field(default_factory=list)
    is_lost: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        workers = {
            "num_small_workers": self.num_small_workers,
            "has_large_worker": self.large_engine is not None,
        }
        self.pace = Pace()
        self.queue = RequestQueue(max_requests=100, **workers)  # type: ignore[arg-type]
        self.batcher = Batcher(
            make_engine=self.make_engine or self._engine_of_lane,
            queue=self.queue,
            deliveries=Deliveries(asyncio.get_running_loop()),
            pace=self.pace,
            allowed_bytes=self.allowed_bytes,
            on_ready=lambda: self.ready.append(threading.get_ident()),
            on_lost=self._note_lost,
            measure=self.measure,
            clock=self.clock,
            **workers,  # type: ignore[arg-type]
        )

    def _engine_of_lane(self) -> Engine:
        if self.large_engine is not None and "large" in threading.current_thread().name:
            return self.large_engine
        return self.engine

    def _note_lost(self, error: BaseException) -> None:
        self.lost.append(error)
        self.is_lost.set()

    def put(self, number: float = 1.0, *, is_large: bool = False, timeout_s: float = 60.0) -> Asker:
        asker = Asker(self, number, is_large=is_large, timeout_s=timeout_s)
        self.queue.put(asker.pending)
        return asker

    async def put_while_busy(self, *numbers: float) -> list[Asker]:
        """Those that pile up behind number 0; the gated engine is let go at the end."""
        first = self.put(0)
        await entered(self.engine)
        askers = [self.put(number) for number in numbers]
        self.engine.gate.set()
        await first.future
        return askers


async def entered(engine: ScriptedEngine) -> None:
    def wait() -> bool:
        return engine.entered.acquire(timeout=WAIT_S)

    assert await asyncio.to_thread(wait)


def run(engine: ScriptedEngine, check: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        bench = Bench(engine, **options)
        bench.batcher.start()
        try:
            await asyncio.wait_for(check(bench), WAIT_S)
        finally:
            for one in (engine, bench.large_engine or engine):
                one.open()
            assert await asyncio.to_thread(bench.batcher.stop, WAIT_S)
            bench.queue.check_integrity()
            assert bench.queue.wait_s(is_large=False) == bench.queue.wait_s(is_large=True) == 0

    asyncio.run(whole())


def run_on_gpu(check: Callable[[Bench, ScriptedEngine], Awaitable[None]], **options: Any) -> None:
    """With an engine that computes a batch in one run, and is held in its first one."""
    engine = ScriptedEngine(gated=True, device_type="cuda")

    async def whole(bench: Bench) -> None:
        await check(bench, engine)

    run(engine, whole, **options)


async def refusal_of(asker: Asker, kind: type[BaseException]) -> BaseException:
    with pytest.raises(kind) as caught:
        await asker.future
    return caught.value


# Who rides together


def test_each_is_answered_with_its_own_result_once_and_in_the_loop() -> None:
    async def check(bench: Bench) -> None:
        askers = [bench.put(number) for number in range(5)]
        answers = [await asker.future for asker in askers]
        assert [number_of(answer) for answer in answers] == [0, 1, 2, 3, 4]
        assert all(answer.needed_bytes == 7 for answer in answers)
        assert all(asker.times_told == 1 and asker.threads == {threading.get_ident()} for asker in askers)
        assert not bench.lost and not bench.batcher.is_lost

    run(ScriptedEngine(), check)


def test_a_lone_one_starts_at_once() -> None:
    async def check(bench: Bench) -> None:
        for number in range(3):
            answer = await bench.put(number).future
            assert (answer.batch_requests, answer.queue_s) == (1, 0.0)

    run(ScriptedEngine(), check)


def test_what_piled_up_on_a_gpu_is_computed_in_one_run() -> None:
    async def check(bench: Bench, engine: ScriptedEngine) -> None:
        askers = await bench.put_while_busy(1, 2, 3)
        answers = [await asker.future for asker in askers]
        assert engine.runs == [[0], [1, 2, 3]]
        assert [number_of(answer) for answer in answers] == [1, 2, 3]
        assert [answer.batch_requests for answer in answers] == [3, 3, 3]

    run_on_gpu(check)


def test_what_piled_up_on_the_host_is_dispatched_together_and_computed_one_by_one() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        askers = await bench.put_while_busy(1, 2, 3)
        assert [(await asker.future).batch_requests for asker in askers] == [3, 3, 3]
        assert engine.runs == [[0], [1], [2], [3]]

    run(engine, check)


def test_on_the_host_the_first_of_a_batch_does_not_wait_for_the_last() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        gate = engine.hold(3)
        first, second, third = await bench.put_while_busy(1, 2, 3)
        await first.future
        await second.future
        assert not third.future.done()
        gate.set()
        await third.future

    run(engine, check)


@pytest.mark.parametrize("large_is_held", [False, True])
def test_a_problem_of_one_lane_does_not_hold_up_the_other_lane(large_is_held: bool) -> None:
    small, large = ScriptedEngine(gated=not large_is_held), ScriptedEngine(gated=large_is_held)
    held_engine = large if large_is_held else small

    async def check(bench: Bench) -> None:
        held = bench.put(1, is_large=large_is_held)
        await entered(held_engine)
        others = [bench.put(number, is_large=not large_is_held) for number in (2, 3)]
        for asker in others:
            await asker.future
        assert not held.future.done()
        held_engine.gate.set()
        await held.future
        assert held_engine.runs == [[1]] and (small if large_is_held else large).runs == [[2], [3]]

    run(small, check, large_engine=large)


def test_several_workers_compute_side_by_side() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        askers = [bench.put(1)]
        await entered(engine)
        askers.append(bench.put(2))
        await entered(engine)
        assert engine.runs == [[1], [2]] and not any(asker.future.done() for asker in askers)
        engine.gate.set()
        for asker in askers:
            await asker.future

    run(engine, check, num_small_workers=2)


def test_one_worker_for_both_lanes_takes_them_in_turn() -> None:
    engine = ScriptedEngine(gated=True, device_type="cuda")

    async def check(bench: Bench) -> None:
        first = bench.put(0)
        await entered(engine)
        askers = [bench.put(number, is_large=number >= 10) for number in (10, 1, 11, 2)]
        engine.gate.set()
        for asker in (first, *askers):
            await asker.future
        assert engine.runs == [[0], [10], [1, 2], [11]]

    run(engine, check)


def test_waiting_and_computing_are_told_apart() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        first = bench.put()
        await entered(engine)
        second = bench.put()
        bench.clock.now += 2.0
        engine.gate.set()
        answers = await first.future, await second.future
        assert [(answer.queue_s, answer.compute_s) for answer in answers] == [(0.0, 2.0), (2.0, 0.0)]

    run(engine, check)


def test_what_is_taken_counts_for_the_wait_until_it_is_computed() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        asker = bench.put()
        await entered(engine)
        assert bench.queue.is_empty and bench.queue.wait_s(is_large=False) == 1.0
        engine.gate.set()
        await asker.future

    run(engine, check)


def test_the_pace_follows_what_one_problem_took() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        asker = bench.put()
        cost, path = asker.pending.prepared.cost, asker.pending.prepared.path
        before_s = bench.pace.estimate_s(cost, path)
        await entered(engine)
        bench.clock.now += 1.0
        engine.gate.set()
        await asker.future
        assert before_s < bench.pace.estimate_s(cost, path) < 1.0

    run(engine, check)


def test_the_rates_of_the_first_engine_are_measured_before_it_is_ready() -> None:
    measured: list[Engine] = []

    def measure(engine: Engine) -> tuple[float, dict[str, float]]:
        measured.append(engine)
        return 7.0, {"fused": 1e9, "manual": 1e9}

    engine = ScriptedEngine()

    async def check(bench: Bench) -> None:
        asker = bench.put()
        prepared = asker.pending.prepared
        await asker.future
        assert measured == [engine] and len(bench.ready) == 1
        assert bench.pace.estimate_s(prepared.cost, prepared.path) > 5.0

    run(engine, check, measure=measure, num_small_workers=3, large_engine=ScriptedEngine())


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_waits_keeps_nothing_of_its_last_problem_alive(fails: bool) -> None:
    class Buffer:
        """What the tensors lie in."""

    engine, is_gone = ScriptedEngine(), threading.Event()
    engine.refuses = {1: InvalidProblem([])} if fails else {}

    async def check(bench: Bench) -> None:
        asker = bench.put(1)
        asker.pending.held = Buffer()
        weakref.finalize(asker.pending.held, is_gone.set)
        await asyncio.wait([asker.future])
        assert (asker.future.exception() is not None) is fails
        del asker.pending
        assert await asyncio.to_thread(is_gone.wait, WAIT_S)

    run(engine, check)


# Who is not computed


def test_a_deadline_passed_in_the_queue_is_told_and_not_computed() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        first, late, patient = bench.put(1), bench.put(2, timeout_s=5.0), bench.put(3, timeout_s=50.0)
        await entered(engine)
        bench.clock.now += 5.0
        engine.gate.set()
        assert "in the queue" in str(await refusal_of(late, DeadlinePassed))
        await first.future
        await patient.future
        assert engine.runs == [[1], [3]]

    run(engine, check)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_problem_that_nobody_waits_for_is_not_computed(device_type: str) -> None:
    engine = ScriptedEngine(gated=True, device_type=device_type)

    async def check(bench: Bench) -> None:
        first = bench.put(1)
        await entered(engine)
        gone, patient = bench.put(2), bench.put(3)
        gone.pending.is_abandoned = True
        engine.gate.set()
        await first.future
        assert (await patient.future).batch_requests == 1
        assert engine.runs == [[1], [3]] and gone.times_told == 0

    run(engine, check)


def test_one_given_up_while_another_of_its_batch_is_computed_is_not_begun() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        gate = engine.hold(1)
        first, gone, late, patient = await bench.put_while_busy(1, 2, 3, 4)
        await entered(engine)
        gone.pending.is_abandoned = True
        late.pending.deadline = Deadline.after(0.0, bench.clock)
        gate.set()
        await first.future
        await refusal_of(late, DeadlinePassed)
        await patient.future
        assert engine.runs == [[0], [1], [4]] and gone.times_told == 0

    run(engine, check)


def test_a_running_problem_that_nobody_waits_for_is_stopped_at_its_next_block() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        gone = bench.put(1)
        await entered(engine)
        gone.pending.is_abandoned = True
        engine.gate.set()
        await bench.put(2).future
        assert [type(outcome) for outcome in engine.outcomes] == [Abandoned, AttentionResult]
        assert gone.times_told == 0 and gone.pending.is_computed, "its tensors are read no more"

    run(engine, check)


def test_a_running_problem_whose_deadline_passes_is_stopped_and_told() -> None:
    async def check(bench: Bench, engine: ScriptedEngine) -> None:
        late = bench.put(1, timeout_s=5.0)
        await entered(engine)
        bench.clock.now += 5.0
        engine.gate.set()
        await refusal_of(late, DeadlinePassed)
        assert [type(outcome) for outcome in engine.outcomes] == [Abandoned]

    run_on_gpu(check)


def test_a_late_one_in_a_batch_cannot_stop_its_neighbours() -> None:
    async def check(bench: Bench, engine: ScriptedEngine) -> None:
        first = bench.put(0)
        await entered(engine)
        late, patient = bench.put(1, timeout_s=5.0), bench.put(2)
        slow = engine.run

        def run(*args: Any) -> list[AttentionResult | AttentionError]:
            bench.clock.now += 5.0
            return slow(*args)

        engine.run = run  # type: ignore[assignment, method-assign]
        engine.gate.set()
        await first.future
        await refusal_of(late, DeadlinePassed)
        assert number_of(await patient.future) == 2
        assert engine.runs == [[0], [1, 2]]

    run_on_gpu(check)


# What breaks


@pytest.mark.parametrize("error", [RuntimeError("a mistake"), ValueError(""), IndexError("dims")])
def test_a_mistake_of_the_engine_is_told_to_its_own_caller_alone(error: Exception) -> None:
    engine = ScriptedEngine()
    engine.fails_with = {1: error}

    async def check(bench: Bench) -> None:
        first, second = bench.put(1), bench.put(2)
        assert await refusal_of(first, type(error)) is error
        await second.future
        assert engine.runs.count([1]) == 1 and not bench.lost

    run(engine, check)


def test_a_problem_that_fails_a_batch_cannot_touch_its_neighbours() -> None:
    mistake = RuntimeError("a mistake")

    async def check(bench: Bench, engine: ScriptedEngine) -> None:
        engine.fails_with = {2: mistake}
        first, bad, third = await bench.put_while_busy(1, 2, 3)
        assert await refusal_of(bad, RuntimeError) is mistake
        answers = [await first.future, await third.future]
        assert [(number_of(answer), answer.batch_requests) for answer in answers] == [(1, 1), (3, 1)]
        assert engine.runs == [[0], [1, 2, 3], [1], [2], [3]]
        assert not bench.lost and [one.times_told for one in (first, bad, third)] == [1, 1, 1]

    run_on_gpu(check)


def test_those_who_left_a_batch_that_failed_are_not_computed_again() -> None:
    async def check(bench: Bench, engine: ScriptedEngine) -> None:
        engine.fails_with = {2: RuntimeError("a mistake")}
        first = bench.put(0)
        await entered(engine)
        gone, bad, late = bench.put(1), bench.put(2), bench.put(3, timeout_s=5.0)

        def leave_while_the_device_is_checked() -> None:
            gone.pending.is_abandoned = True
            bench.clock.now += 5.0

        engine.warm_up = leave_while_the_device_is_checked  # type: ignore[method-assign]
        engine.gate.set()
        await first.future
        await refusal_of(bad, RuntimeError)
        await refusal_of(late, DeadlinePassed)
        assert gone.times_told == 0
        assert [type(outcome) for outcome in engine.outcomes] == [AttentionResult, Abandoned, Abandoned]

    run_on_gpu(check)


@pytest.mark.parametrize("is_together", [False, True])
def test_a_refusal_of_the_core_is_handed_on_to_its_own_caller(is_together: bool) -> None:
    async def check(bench: Bench, engine: ScriptedEngine) -> None:
        refusal = InvalidProblem([Fault("empty_rows", "a key", "none")])
        engine.refuses = {1: refusal}
        asker, *others = await bench.put_while_busy(1, *([2] * is_together))
        assert await refusal_of(asker, InvalidProblem) is refusal
        assert [number_of(await other.future) for other in others] == [2] * is_together

    run_on_gpu(check)


OUT_OF_MEMORY: list[Exception] = [
    FULL,
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes."),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_what_finds_no_memory_is_tried_again_alone(error: Exception) -> None:
    engine = ScriptedEngine()
    engine.failures = [error]

    async def check(bench: Bench) -> None:
        assert number_of(await bench.put(1).future) == 1
        assert engine.runs == [[1], [1]] and not bench.lost

    run(engine, check)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_memory_that_is_not_there_is_a_matter_of_load(error: Exception) -> None:
    engine = ScriptedEngine()
    engine.fails_with = {1: error}

    async def check(bench: Bench) -> None:
        first, second = bench.put(1), bench.put(2)
        await refusal_of(first, Unavailable)
        await second.future
        assert not bench.lost

    run(engine, check)


def test_what_will_never_fit_is_told_so_with_both_figures() -> None:
    engine = ScriptedEngine()
    engine.fails_with = {1: FULL}

    async def check(bench: Bench) -> None:
        error = await refusal_of(bench.put(1), TooLarge)
        assert isinstance(error, TooLarge)
        assert (error.needed_bytes, error.allowed_bytes) == (7, 6)

    run(engine, check, allowed_bytes=lambda: 6)


def test_a_batch_that_finds_no_memory_is_computed_one_by_one() -> None:
    async def check(bench: Bench, engine: ScriptedEngine) -> None:
        engine.failures = [None, FULL]
        engine.fails_with = {2: FULL}
        first, large, third = await bench.put_while_busy(1, 2, 3)
        await refusal_of(large, Unavailable)
        assert [number_of(await asker.future) for asker in (first, third)] == [1, 3]
        assert engine.runs == [[0], [1, 2, 3], [1], [2], [3]]

    run_on_gpu(check)


def test_a_mistake_of_the_service_itself_is_told_and_ends_no_lane() -> None:
    engine = ScriptedEngine()
    engine.fails_with = {1: FULL}
    mistake = OSError("/proc cannot be read")

    def allowed_bytes() -> int:
        raise mistake

    async def check(bench: Bench) -> None:
        assert await refusal_of(bench.put(1), OSError) is mistake
        await bench.put(2).future
        assert not bench.lost

    run(engine, check, allowed_bytes=allowed_bytes)


# A device that is lost


@pytest.mark.parametrize("fails_in", ["making", "warming up", "measuring"])
@pytest.mark.parametrize("num_small_workers", [1, 3])
def test_a_device_lost_at_warm_up_is_told_once_and_every_lane_refuses(num_small_workers: int, fails_in: str) -> None:
    engine, error = ScriptedEngine(), RuntimeError("no kernel image")

    def fail(*_: object) -> Any:
        raise error

    options: dict[str, Any] = {"num_small_workers": num_small_workers}
    if fails_in == "making":
        options["make_engine"] = fail
    elif fails_in == "measuring":
        options["measure"] = fail
    else:
        engine.warm_up = fail  # type: ignore[method-assign]

    async def check(bench: Bench) -> None:
        assert await asyncio.to_thread(bench.is_lost.wait, WAIT_S)
        for is_large in (False, True, False):
            refusal = await refusal_of(bench.put(is_large=is_large), Unavailable)
            assert "no kernel image" in str(refusal)
        assert await asyncio.to_thread(bench.batcher.stop, WAIT_S)
        assert bench.batcher.is_lost and bench.lost == [error] and not bench.ready and not engine.runs

    run(engine, check, large_engine=engine, **options)


def test_what_waited_for_a_device_that_is_lost_at_warm_up_is_refused() -> None:
    engine = ScriptedEngine()
    engine.warm_up_failures = [RuntimeError("no kernel image")]

    async def check() -> None:
        bench = Bench(engine)
        early = bench.put()
        bench.batcher.start()
        await asyncio.wait_for(refusal_of(early, Unavailable), WAIT_S)
        assert await asyncio.to_thread(bench.batcher.stop, WAIT_S)

    asyncio.run(check())


def test_one_lane_that_cannot_start_is_the_loss_of_all() -> None:
    small, large = ScriptedEngine(), ScriptedEngine()
    large.warm_up_failures = [RuntimeError("no kernel image")]

    async def check(bench: Bench) -> None:
        assert await asyncio.to_thread(bench.is_lost.wait, WAIT_S)
        await refusal_of(bench.put(), Unavailable)
        await refusal_of(bench.put(is_large=True), Unavailable)
        assert len(bench.lost) == 1 and not small.runs and not large.runs

    run(small, check, large_engine=large)


def test_a_device_lost_later_is_noticed_and_refuses_all() -> None:
    engine = ScriptedEngine(gated=True)
    lost = RuntimeError("CUDA error: unspecified launch failure")
    engine.failures = [ILLEGAL]
    engine.warm_up_failures = [None, lost]

    async def check(bench: Bench) -> None:
        assert len(bench.lost) == 0
        first, second = bench.put(1), bench.put(2)
        await entered(engine)
        engine.gate.set()
        for asker in (first, second, bench.put(3)):
            assert "unspecified launch failure" in str(await refusal_of(asker, Unavailable))
        assert bench.lost == [lost] and bench.batcher.is_lost and engine.runs == [[1]]
        assert [one.times_told for one in (first, second)] == [1, 1]

    run(engine, check)


def test_those_of_a_batch_who_were_answered_before_the_device_was_lost_keep_their_answer() -> None:
    lost = RuntimeError("CUDA error: unspecified launch failure")

    async def check(bench: Bench, engine: ScriptedEngine) -> None:
        engine.fails_with = {2: ILLEGAL}
        bench.put(0)
        await entered(engine)
        # It answers after the batch has failed, and not after its second item has.
        engine.warm_up_failures = [None, lost]
        first, bad, third = (bench.put(number) for number in (1, 2, 3))
        engine.gate.set()
        assert number_of(await first.future) == 1
        for asker in (bad, third):
            await refusal_of(asker, Unavailable)
        assert engine.runs == [[0], [1, 2, 3], [1], [2]] and bench.lost == [lost]
        await refusal_of(bench.put(9), Unavailable)
        assert [one.times_told for one in (first, bad, third)] == [1, 1, 1]

    run_on_gpu(check)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_device_lost_in_one_lane_is_lost_to_the_other(is_large: bool) -> None:
    small, large = ScriptedEngine(), ScriptedEngine()
    failing = large if is_large else small

    async def check(bench: Bench) -> None:
        await bench.put(0, is_large=is_large).future
        failing.failures, failing.warm_up_failures = [ILLEGAL], [RuntimeError("gone")]
        await refusal_of(bench.put(1, is_large=is_large), Unavailable)
        await refusal_of(bench.put(2, is_large=not is_large), Unavailable)
        assert len(bench.lost) == 1

    run(small, check, large_engine=large)


def test_a_check_of_the_device_that_finds_no_memory_is_no_loss() -> None:
    engine = ScriptedEngine()
    engine.failures = [RuntimeError("a mistake")]
    engine.warm_up_failures = [None, torch.OutOfMemoryError("full")]

    async def check(bench: Bench) -> None:
        first, second = bench.put(1), bench.put(2)
        assert "a mistake" in str(await refusal_of(first, RuntimeError))
        await second.future
        assert not bench.lost

    run(engine, check)


# The end


def test_stopping_computes_what_waits_first() -> None:
    engine = ScriptedEngine(gated=True)

    async def check(bench: Bench) -> None:
        askers = [bench.put(number) for number in range(3)]
        await entered(engine)
        stopping = asyncio.create_task(asyncio.to_thread(bench.batcher.stop, WAIT_S))
        engine.gate.set()
        assert await stopping
        assert [number_of(await asker.future) for asker in askers] == [0, 1, 2]

    run(engine, check)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_kernel_that_does_not_end_is_told_from_one_that_does(is_large: bool) -> None:
    small, large = ScriptedEngine(gated=True), ScriptedEngine(gated=True)
    held = large if is_large else small

    async def check(bench: Bench) -> None:
        asker = bench.put(is_large=is_large)
        await entered(held)
        assert not bench.batcher.stop(0.0)
        held.gate.set()
        await asker.future

    run(small, check, large_engine=large)
