"""The use case behind every door: what the loop computes itself, what waits, and what is freed in the end."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_core import AttentionError, AttentionResult, Engine, InvalidProblem
from attn_core.errors import Abandoned, Checkpoint, Fault, NeedsSpare, TooLarge
from attn_core.prepared import PlainForm, Prepared, prepare
from attn_core.problem import Problem
from service.admission import UNASKED_BYTES, Admission
from service.attend import AT_ONCE_S, BUSY_S, HELP_S, LONGEST_S, Attend, Waiting
from service.deadline import Deadline
from service.errors import DeadlinePassed, Draining, Overloaded
from service.pace import Pace
from service.request_queue import Answer, Outcome, Pending, RequestQueue
from tests.support.clock import FakeClock, next_turn, run_still
from tests.support.factory import make_problem
from tests.support.pending import make_answer, make_pending, make_prepared, number_of

FLOPS_PER_S = 1e9
TIMEOUT_S = 60.0


class LoopEngine(Engine):
    """The engine of the loop itself: counts what it was given; ``failure`` is raised, ``refusal`` is its answer."""

    def __init__(self) -> None:
        super().__init__(device="cpu", max_threads=1)
        self._inner = Engine()
        self.num_computed = 0
        self.failure: Exception | None = None
        self.refusal: AttentionError | None = None
        self.clock: FakeClock | None = None
        self.takes_s = 0.0

    def run(
        self, problems: Sequence[Problem | Prepared], checkpoints: Sequence[Checkpoint | None] | None = None
    ) -> list[AttentionResult | AttentionError]:
        self._note()
        for checkpoint in checkpoints or ():
            if self.clock is not None:
                self.clock.now += self.takes_s
            try:
                if checkpoint is not None:
                    checkpoint()
            except Abandoned as error:
                return [error]
        return self._inner.run(problems) if self.refusal is None else [self.refusal]

    def plain_context(
        self, form: PlainForm, numbers: Sequence[Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor | None:
        self._note()
        return self._inner.plain_context(form, numbers, query, key, value)

    def _note(self) -> None:
        self.num_computed += 1
        if self.failure is not None:
            raise self.failure


def lasting(seconds: float, *, number: float = 1.0, peak_bytes: int | None = None, spare_bytes: int = 0) -> Prepared:
    """A problem of which the bench's pace says that it takes so long."""
    flops = round(seconds * FLOPS_PER_S)
    return make_prepared(number, flops=flops, peak_bytes=peak_bytes, spare_bytes=spare_bytes)


@dataclass
class Bench:
    """Attend and the parts below it; the test plays the engine's threads by ``take`` and ``deliver``."""

    clock: FakeClock = field(default_factory=FakeClock)
    engine: LoopEngine | None = None
    max_queue_requests: int = 100
    max_wait_s: float = 1e6
    overhead_s: float = 0.0
    allowed_bytes: int = 2**40

    def __post_init__(self) -> None:
        self.admission = Admission(
            max_requests=100,
            max_body_bytes_inside=2**30,
            allowed_bytes=lambda: self.allowed_bytes,
            max_wait_s=self.max_wait_s,
            clock=self.clock,
        )
        # As the doors do, who is counted inside for as long as the test runs.
        self.admission.enter()
        self.queue = RequestQueue(max_requests=self.max_queue_requests)
        self.attend = Attend(
            admission=self.admission,
            queue=self.queue,
            pace=Pace(overhead_s=self.overhead_s, flops_per_s={"fused": FLOPS_PER_S, "manual": FLOPS_PER_S}),
            prepare=functools.partial(prepare, device_type="cpu"),
            engine=self.engine,
            clock=self.clock,
        )
        self.outcomes: list[Outcome] = []

    def begin(
        self, prepared: Prepared | None = None, *, timeout_s: float = TIMEOUT_S, more_bytes: int = 0, held: Any = None
    ) -> Waiting | None:
        return self.attend.begin(
            lasting(1.0) if prepared is None else prepared,
            Deadline.after(timeout_s, self.clock),
            more_bytes=more_bytes,
            deliver=self.outcomes.append,
            held=held,
        )

    def enqueue(self, prepared: Prepared | None = None, **options: Any) -> Waiting:
        waiting = self.begin(prepared, **options)
        assert waiting is not None
        return waiting

    def ask(self) -> asyncio.Task[Answer]:
        deadline = Deadline.after(TIMEOUT_S, self.clock)
        return asyncio.create_task(
            self.attend.attend(make_problem(), deadline, answer_bytes=lambda prepared: prepared.cost.output_bytes)
        )

    def take(self) -> list[Pending]:
        batch = self.queue.take()
        assert batch
        return batch

    def deliver(self, pending: Pending, outcome: Outcome) -> None:
        """As ``Deliveries`` does."""
        pending.is_computed = True
        if not pending.is_abandoned:
            pending.deliver(outcome)

    def assert_nothing_is_inside(self) -> None:
        assert self.admission.memory_inside == 0 and len(self.queue) == 0
        self.admission.check_integrity()
        self.queue.check_integrity()


def run(check: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    bench = Bench(**options)

    async def whole() -> None:
        await check(bench)

    run_still(bench.clock, whole())


def at_once(check: Callable[[Bench, LoopEngine], Awaitable[None]], **options: Any) -> None:
    engine = LoopEngine()

    async def whole(bench: Bench) -> None:
        await check(bench, engine)

    run(whole, engine=engine, **options)


# At once


def test_a_short_problem_is_answered_before_begin_returns() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        prepared = lasting(AT_ONCE_S, number=3.0)
        assert bench.begin(prepared, more_bytes=50) is None
        (answer,) = bench.outcomes
        assert isinstance(answer, Answer) and number_of(answer) == 3.0
        assert answer.needed_bytes == prepared.cost.peak_bytes + 50
        assert (answer.queue_s, answer.batch_requests, engine.num_computed) == (0.0, 1, 1)
        bench.assert_nothing_is_inside()

    at_once(check)


def test_a_longer_problem_waits_for_the_engine() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        bench.admission.enter()
        assert bench.begin(lasting(AT_ONCE_S * 1.01)) is not None
        assert not engine.num_computed and not bench.outcomes and len(bench.queue) == 1

    at_once(check)


def test_a_longer_problem_that_is_alone_is_computed_at_once() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        assert bench.begin(lasting(HELP_S)) is None
        assert bench.begin(lasting(HELP_S * 1.01)) is not None
        assert engine.num_computed == 1
        (running,) = bench.take()
        # Something small is computed: it is alone no more.
        assert bench.begin(lasting(HELP_S)) is not None
        bench.deliver(running, make_answer())

    at_once(check)


def test_the_loop_helps_with_what_waits_one_in_each_turn_in_the_order_of_arrival() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        bench.admission.enter()
        waiting = [bench.enqueue(lasting(HELP_S, number=float(number))) for number in range(3)]
        for done in range(1, 4):
            await next_turn()
            assert engine.num_computed == len(bench.outcomes) == done
        assert [number_of(outcome) for outcome in bench.outcomes] == [0, 1, 2]
        assert all(isinstance(outcome, Answer) and outcome.queue_s == 0 for outcome in bench.outcomes)
        for one in waiting:
            one.end()
        assert len(bench.queue) == 0
        bench.queue.check_integrity()

    at_once(check)


def test_the_loop_does_not_help_with_long_problems() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        bench.enqueue(lasting(HELP_S * 1.01))
        await next_turn(5)
        assert not engine.num_computed and len(bench.queue) == 1

    at_once(check)


def test_the_loop_does_not_help_while_its_sockets_keep_it_busy() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        bench.admission.enter()
        bench.enqueue(lasting(HELP_S))
        for _ in range(5):
            bench.clock.now += BUSY_S * 1.01
            await next_turn()
        assert not bench.outcomes and len(bench.queue) == 1
        await next_turn(2)
        assert engine.num_computed == 1 and len(bench.queue) == 0

    at_once(check)


def test_what_the_loop_fails_at_is_left_to_the_engines_threads() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        bench.admission.enter()
        engine.failure = RuntimeError("a mistake")
        waiting = bench.enqueue(lasting(HELP_S))
        await next_turn(5)
        assert engine.num_computed == 1 and not bench.outcomes and len(bench.queue) == 1
        (pending,) = bench.take()
        answer = make_answer()
        bench.deliver(pending, answer)
        assert bench.outcomes == [answer]
        bench.queue.done([pending])
        waiting.end()

    at_once(check)


def test_what_takes_the_loop_too_long_is_left_to_the_engines_threads() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        engine.clock, engine.takes_s = bench.clock, LONGEST_S * 1.01
        waiting = bench.enqueue(lasting(0.0))
        await next_turn(3)
        assert engine.num_computed == 1 and not bench.outcomes and len(bench.queue) == 1
        waiting.end()
        bench.assert_nothing_is_inside()

    at_once(check)


def test_a_deadline_that_passes_while_the_loop_computes_is_told() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        engine.clock, engine.takes_s = bench.clock, LONGEST_S / 2
        assert bench.begin(lasting(0.0), timeout_s=LONGEST_S / 4) is None
        (outcome,) = bench.outcomes
        assert isinstance(outcome, DeadlinePassed)
        bench.assert_nothing_is_inside()

    at_once(check)


def test_the_loop_computes_nothing_that_was_given_up() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        bench.admission.enter()
        waiting = bench.enqueue(lasting(HELP_S))
        waiting.end()
        await next_turn(3)
        assert not engine.num_computed and not bench.outcomes
        bench.assert_nothing_is_inside()

    at_once(check)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_short_problem_stands_behind_whoever_waits(is_large: bool) -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        bench.queue.put(make_pending(is_large=is_large))
        assert bench.begin(lasting(0.0)) is not None
        assert not engine.num_computed and len(bench.queue) == 2

    at_once(check)


def test_without_an_engine_of_its_own_the_loop_computes_nothing() -> None:
    async def check(bench: Bench) -> None:
        assert not bench.attend.may_run_at_once(0.0)
        assert bench.begin(lasting(0.0)) is not None
        assert len(bench.queue) == 1 and not bench.outcomes

    run(check)


def test_what_the_loop_computes_in_one_turn_is_bounded_and_the_next_turn_begins_anew() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        for turn in range(1, 4):
            for _ in range(3):
                assert bench.begin(lasting(AT_ONCE_S / 3)) is None
            assert not bench.attend.may_run_at_once(AT_ONCE_S / 100)
            # However long that took: the loop has not looked at its sockets.
            bench.clock.now += 1.0
            assert not bench.attend.may_run_at_once(AT_ONCE_S / 100)
            assert engine.num_computed == 3 * turn
            await next_turn()
            assert bench.attend.may_run_at_once(AT_ONCE_S)
        waiting = bench.begin(lasting(AT_ONCE_S)), bench.begin(lasting(AT_ONCE_S))
        assert waiting[0] is None and waiting[1] is not None

    at_once(check)


def test_what_small_problems_of_earlier_turns_took_keeps_no_longer_one_out_for_good() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        for _ in range(10):
            assert bench.begin(lasting(AT_ONCE_S / 10)) is None
            await next_turn()
        for _ in range(2):
            if not bench.attend.may_run_at_once(AT_ONCE_S):
                await next_turn()
        assert bench.begin(lasting(AT_ONCE_S)) is None

    at_once(check)


def test_the_turn_of_the_loop_that_serves_ends_when_it_looks_at_its_sockets_and_not_before() -> None:
    async def check() -> None:
        engine, loop = LoopEngine(), asyncio.get_running_loop()
        bench = Bench(engine=engine)
        began = loop.time()
        assert bench.begin(lasting(AT_ONCE_S)) is None
        while loop.time() == began:
            """Its clock runs within a turn."""
        assert not bench.attend.may_run_at_once(AT_ONCE_S)
        await next_turn()
        assert bench.attend.may_run_at_once(AT_ONCE_S)

    uvloop.run(check())


def plain(of: Prepared) -> tuple[PlainForm, tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]]:
    form, canonical = of.plain, of.canonical
    assert form is not None and canonical is not None
    operands = canonical.query, canonical.key, canonical.value
    return form, (tuple(tensor.flatten() for tensor in operands), *operands)


def test_problems_of_a_plain_form_share_the_turn_with_all_others() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        prepared = prepare(make_problem(), device_type="cpu")
        form, tensors = plain(prepared)
        context = bench.attend.run_plain_at_once(form, *tensors, AT_ONCE_S)
        (result,) = Engine().run([prepared])
        assert isinstance(result, AttentionResult) and context is not None
        assert torch.equal(context, result.outputs["context"])
        assert not bench.attend.may_run_at_once(AT_ONCE_S / 100)
        assert bench.begin(lasting(AT_ONCE_S)) is not None
        assert engine.num_computed == 1

    at_once(check)


def test_a_plain_form_may_run_at_once_where_its_problem_may() -> None:
    prepared = prepare(make_problem(), device_type="cpu")
    form, _ = plain(prepared)

    async def check(bench: Bench, engine: LoopEngine) -> None:
        estimated_s = bench.attend.may_run_plain_at_once(form)
        assert estimated_s == bench.attend._pace.estimate_s(form.cost, form.path)
        assert bench.begin(lasting(AT_ONCE_S)) is None
        assert bench.attend.may_run_plain_at_once(form) is None
        await next_turn()
        assert bench.attend.may_run_plain_at_once(form) == estimated_s
        bench.queue.put(make_pending())
        assert bench.attend.may_run_plain_at_once(form) is None

    at_once(check)


TINY_S = AT_ONCE_S / 10


def test_a_tiny_problem_is_answered_at_once_whoever_waits_and_whatever_the_turn_took() -> None:
    form, _ = plain(prepare(make_problem(), device_type="cpu"))

    async def check(bench: Bench, engine: LoopEngine) -> None:
        for _ in range(30):
            assert bench.begin(lasting(TINY_S)) is None
        assert bench.begin(lasting(AT_ONCE_S / 2)) is not None and len(bench.queue) == 1
        assert bench.begin(lasting(TINY_S)) is None and bench.attend.may_run_plain_at_once(form) is not None
        assert bench.begin(lasting(AT_ONCE_S / 2)) is not None and len(bench.queue) == 2

    at_once(check, overhead_s=TINY_S)


def test_a_tiny_problem_of_a_slow_machine_and_one_without_an_engine_of_the_loop_wait() -> None:
    async def slow(bench: Bench, engine: LoopEngine) -> None:
        assert bench.begin(lasting(0.0)) is not None

    async def without_engine(bench: Bench) -> None:
        assert bench.begin(lasting(0.0)) is not None
        assert not bench.attend.may_run_at_once(0.0, is_tiny=True)

    at_once(slow, overhead_s=1.1 * AT_ONCE_S)
    run(without_engine, overhead_s=TINY_S)


@pytest.mark.parametrize("failure", [RuntimeError("a mistake"), torch.OutOfMemoryError("full"), MemoryError()])
def test_a_failure_at_once_is_left_to_the_engines_threads(failure: Exception) -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        engine.failure = failure
        prepared = lasting(AT_ONCE_S / 2, peak_bytes=1000)
        waiting = bench.begin(prepared)
        assert waiting is not None and not bench.outcomes
        assert bench.admission.memory_inside == 1000
        assert [one.prepared for one in bench.take()] == [prepared]
        waiting.end()
        form, tensors = plain(prepare(make_problem(), device_type="cpu"))
        assert bench.attend.run_plain_at_once(form, *tensors, 0.0) is None

    at_once(check)


def test_a_refusal_of_the_core_at_once_is_delivered_as_it_is() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        engine.refusal = InvalidProblem([Fault("empty_rows", "a key", "none")])
        assert bench.begin(lasting(0.0)) is None
        assert bench.outcomes == [engine.refusal]
        bench.assert_nothing_is_inside()

    at_once(check)


def test_what_cannot_be_held_or_is_late_is_not_computed_at_once_either() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        with pytest.raises(TooLarge):
            bench.begin(lasting(0.0, peak_bytes=1000), more_bytes=UNASKED_BYTES)
        with pytest.raises(DeadlinePassed) as caught:
            bench.begin(lasting(0.0), timeout_s=0.0)
        assert caught.value.at_once
        assert not engine.num_computed and not bench.outcomes
        bench.assert_nothing_is_inside()

    at_once(check, allowed_bytes=UNASKED_BYTES)


# Into the queue


def test_what_waits_says_all_that_the_engine_has_to_know() -> None:
    async def check(bench: Bench) -> None:
        prepared, held = lasting(2.0, peak_bytes=1000), object()
        bench.enqueue(prepared, more_bytes=24, timeout_s=50.0, held=held)
        (pending,) = bench.take()
        assert pending.prepared is prepared and pending.held is held
        assert (pending.needed_bytes, pending.estimated_s, pending.enqueued_at) == (1024, 2.0, bench.clock.now)
        assert pending.deadline.remaining_s == 50.0 and not pending.is_abandoned
        assert bench.admission.memory_inside == 1024

    run(check)


def refused(bench: Bench, kind: type[Exception], prepared: Prepared | None = None, **options: Any) -> Any:
    """The refusal; nothing of the problem is counted or queued."""
    before = bench.admission.memory_inside, len(bench.queue)
    with pytest.raises(kind) as caught:
        bench.begin(prepared, **options)
    assert (bench.admission.memory_inside, len(bench.queue)) == before and not bench.outcomes
    return caught.value


def test_an_estimated_wait_over_the_limit_is_refused_with_the_time_to_come_back() -> None:
    async def check(bench: Bench) -> None:
        for _ in range(5):
            bench.enqueue(lasting(0.5))
        assert bench.attend.wait_s() == 2.5
        error = refused(bench, Overloaded, lasting(0.001))
        assert (error.reason, error.retry_after_s) == ("wait", 2)

    run(check, max_wait_s=2.0)


def test_a_wait_in_the_other_lane_is_no_reason_to_refuse() -> None:
    async def check(bench: Bench) -> None:
        for _ in range(2):
            bench.enqueue(lasting(100.0), timeout_s=1e4)
        assert bench.attend.wait_s() == 0
        bench.enqueue(lasting(0.5))
        assert refused(bench, Overloaded, lasting(100.0), timeout_s=1e4).reason == "wait"

    run(check, max_wait_s=150.0)


def test_a_deadline_that_waiting_and_computing_cannot_meet_is_refused_at_once() -> None:
    async def check(bench: Bench) -> None:
        bench.enqueue(lasting(0.5))
        assert refused(bench, DeadlinePassed, lasting(0.5), timeout_s=0.2).at_once
        assert refused(bench, DeadlinePassed, lasting(0.0), timeout_s=0.0).at_once
        bench.enqueue(lasting(0.5), timeout_s=1.0)

    run(check)


def test_what_will_never_fit_is_told_so_and_not_that_it_would_take_too_long() -> None:
    async def check(bench: Bench) -> None:
        bench.enqueue(lasting(0.5))
        bench.enqueue(lasting(0.5))
        refused(bench, TooLarge, lasting(0.5, peak_bytes=2 * UNASKED_BYTES))
        refused(bench, Overloaded, lasting(0.5))

    run(check, max_wait_s=0.8, allowed_bytes=UNASKED_BYTES)


def test_memory_of_those_inside_counts_together_until_they_end() -> None:
    async def check(bench: Bench) -> None:
        large = lasting(0.1, peak_bytes=6 * UNASKED_BYTES)
        first = bench.enqueue(large)
        assert refused(bench, Overloaded, large).reason == "memory_in_use"
        refused(bench, TooLarge, lasting(0.1, peak_bytes=11 * UNASKED_BYTES))
        first.end()
        bench.enqueue(large).end()
        bench.assert_nothing_is_inside()

    run(check, allowed_bytes=10 * UNASKED_BYTES)


def test_a_full_or_closed_queue_gives_the_memory_back() -> None:
    async def check(bench: Bench) -> None:
        waiting = bench.enqueue()
        assert refused(bench, Overloaded).reason == "queue_full"
        with pytest.raises(Overloaded, match="waiting"):
            bench.attend.check_room()
        bench.queue.close()
        refused(bench, Draining)
        waiting.end()
        bench.assert_nothing_is_inside()

    run(check, max_queue_requests=1)


# Huge or non-finite numbers


def test_what_needs_its_spare_memory_is_begun_anew_with_it() -> None:
    async def check(bench: Bench) -> None:
        prepared, held = lasting(0.1, peak_bytes=1000, spare_bytes=500), object()
        waiting = bench.enqueue(prepared, more_bytes=24, held=held, timeout_s=50.0)
        (first,) = bench.take()
        bench.deliver(first, NeedsSpare(500))
        assert not bench.outcomes and bench.admission.memory_inside == 1524
        (again,) = bench.take()
        assert again.prepared.cost.peak_bytes == again.needed_bytes - 24 == 1500
        assert again.prepared.cost.spare_bytes == 0 and again.held is held
        assert (again.enqueued_at, again.deadline) == (first.enqueued_at, first.deadline)
        answer = make_answer()
        bench.deliver(again, answer)
        assert bench.outcomes == [answer]
        waiting.end()
        bench.assert_nothing_is_inside()

    run(check)


def test_spare_memory_that_is_not_to_be_had_is_told_and_nothing_stays_counted() -> None:
    async def check(bench: Bench) -> None:
        alone = bench.enqueue(lasting(0.1, peak_bytes=6 * UNASKED_BYTES, spare_bytes=5 * UNASKED_BYTES))
        (pending,) = bench.take()
        bench.deliver(pending, NeedsSpare(5 * UNASKED_BYTES))
        (refusal,) = bench.outcomes
        assert isinstance(refusal, TooLarge)
        assert (refusal.needed_bytes, refusal.allowed_bytes) == (11 * UNASKED_BYTES, 10 * UNASKED_BYTES)
        alone.end()
        bench.assert_nothing_is_inside()
        one, other = (
            bench.enqueue(lasting(0.1, peak_bytes=4 * UNASKED_BYTES, spare_bytes=3 * UNASKED_BYTES)) for _ in "ab"
        )
        first, second = bench.take()
        bench.deliver(first, NeedsSpare(3 * UNASKED_BYTES))
        assert isinstance(bench.outcomes[1], Overloaded) and bench.outcomes[1].reason == "memory_in_use"
        one.end()
        bench.deliver(second, NeedsSpare(3 * UNASKED_BYTES))
        assert len(bench.outcomes) == 2 and bench.admission.memory_inside == 7 * UNASKED_BYTES
        other.end()
        bench.assert_nothing_is_inside()

    run(check, allowed_bytes=10 * UNASKED_BYTES)


def test_what_was_begun_in_time_and_needs_its_spare_memory_may_wait_once_more() -> None:
    async def check(bench: Bench) -> None:
        waiting = bench.attend.begin(
            lasting(0.1, spare_bytes=500),
            Deadline.after(TIMEOUT_S, bench.clock),
            more_bytes=0,
            deliver=bench.outcomes.append,
            max_queue_s=0.2,
        )
        assert waiting is not None
        bench.deliver(bench.take()[0], NeedsSpare(500))
        bench.clock.now += 1.0
        await next_turn(2)
        assert not bench.outcomes and not bench.queue.is_empty
        waiting.end()
        bench.assert_nothing_is_inside()

    run(check)


def test_what_needs_its_spare_memory_at_once_goes_to_the_engines_threads() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        engine.refusal = NeedsSpare(500)
        waiting = bench.begin(lasting(AT_ONCE_S / 2, peak_bytes=1000, spare_bytes=500))
        assert waiting is not None and not bench.outcomes and bench.admission.memory_inside == 1500
        assert [one.prepared.cost.spare_bytes for one in bench.take()] == [0]
        waiting.end()
        bench.assert_nothing_is_inside()

    at_once(check)


# Until the end


def test_the_deadline_of_one_that_waits_is_told_on_time_and_frees_place_and_memory() -> None:
    async def check(bench: Bench) -> None:
        bench.enqueue(timeout_s=5.0)
        other = bench.enqueue(timeout_s=50.0)
        bench.clock.now += 4.999
        await next_turn(2)
        assert not bench.outcomes
        bench.clock.now += 0.001
        await next_turn(2)
        (error,) = bench.outcomes
        assert isinstance(error, DeadlinePassed) and not error.at_once
        (pending,) = bench.take()
        assert pending is other._pending and bench.admission.memory_inside == pending.needed_bytes
        other.end()
        bench.assert_nothing_is_inside()

    run(check)


def test_the_deadline_of_one_that_is_computed_is_told_on_time_and_stops_the_engine() -> None:
    async def check(bench: Bench) -> None:
        waiting = bench.enqueue(timeout_s=5.0)
        (pending,) = bench.take()
        bench.clock.now += 5.0
        await next_turn(2)
        assert [type(outcome) for outcome in bench.outcomes] == [DeadlinePassed]
        is_read = [waiting.is_computing]
        bench.deliver(pending, make_answer())
        is_read.append(waiting.is_computing)
        assert pending.is_abandoned and is_read == [True, False] and len(bench.outcomes) == 1
        bench.assert_nothing_is_inside()

    run(check)


@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_in_time_is_the_only_outcome(ends: bool) -> None:
    async def check(bench: Bench) -> None:
        waiting, answer = bench.enqueue(timeout_s=5.0), make_answer()
        (pending,) = bench.take()
        bench.deliver(pending, answer)
        if ends:
            waiting.end()
        bench.clock.now += 100.0
        await next_turn(2)
        assert bench.outcomes == [answer]

    run(check)


def test_whether_the_engine_still_reads_a_problem_that_was_given_up_is_known() -> None:
    async def check(bench: Bench) -> None:
        waits, runs, is_done = (bench.enqueue() for _ in range(3))
        for one in (runs, is_done):
            bench.queue.discard(one._pending)
        bench.deliver(is_done._pending, make_answer())
        assert not any(one.is_computing for one in (waits, runs, is_done)), "nobody has given up"
        for one in (waits, runs, is_done):
            one.end()
        assert [one.is_computing for one in (waits, runs, is_done)] == [False, True, False]
        bench.deliver(runs._pending, make_answer())
        assert not runs.is_computing

    run(check)


def test_ending_a_second_time_changes_nothing() -> None:
    async def check(bench: Bench) -> None:
        waiting, other = bench.enqueue(), bench.enqueue()
        for _ in range(2):
            waiting.end()
            assert len(bench.queue) == 1
            assert bench.admission.memory_inside == other._pending.needed_bytes

    run(check)


@pytest.mark.parametrize("is_spared", [False, True])
def test_what_has_ended_keeps_nothing_of_its_problem_alive(is_spared: bool) -> None:
    class Buffer:
        """What the tensors lie in."""

    async def check(bench: Bench) -> None:
        buffer = Buffer()
        is_there = weakref.ref(buffer)
        waiting = bench.enqueue(lasting(1.0, spare_bytes=500), held=buffer)
        if is_spared:
            bench.deliver(bench.take()[0], NeedsSpare(500))
        waiting.end()
        del waiting, buffer
        assert is_there() is None, "until its deadline, that would be"

    run(check)


steps = st.lists(
    st.tuples(st.sampled_from(["begin", "begin", "end", "take", "deliver", "spare", "wait"]), st.integers(0, 5)),
    max_size=40,
)


@given(steps)
def test_whatever_happens_each_is_told_once_or_gave_up_and_everything_is_freed(
    steps: list[tuple[str, int]],
) -> None:
    async def check(bench: Bench) -> None:
        told: list[list[Outcome]] = []
        inside: list[tuple[Waiting, list[Outcome]]] = []
        taken: list[Pending] = []
        for step, which in steps:
            if step == "begin":
                outcomes: list[Outcome] = []
                waiting = bench.attend.begin(
                    lasting(0.1, spare_bytes=500),
                    Deadline.after(1.0 + which, bench.clock),
                    more_bytes=which,
                    deliver=outcomes.append,
                )
                assert waiting is not None
                inside.append((waiting, outcomes))
                told.append(outcomes)
            elif step == "end" and which < len(inside):
                waiting, outcomes = inside.pop(which)
                outcomes.append(Draining("gave up")) if not outcomes else None
                waiting.end()
            elif step == "take" and not bench.queue.is_empty:
                batch = bench.take()
                bench.queue.done(batch)
                taken.extend(batch)
            elif step == "deliver" and which < len(taken):
                bench.deliver(taken.pop(which), make_answer())
            elif step == "spare" and which < len(taken) and taken[which].prepared.cost.spare_bytes:
                bench.deliver(taken.pop(which), NeedsSpare(500))
            elif step == "wait":
                bench.clock.now += which / 2
                await next_turn(2)
            counted = sum(one._pending.needed_bytes for one, _ in inside if not one._is_over)
            assert bench.admission.memory_inside == counted
            bench.admission.check_integrity()
            bench.queue.check_integrity()
        for waiting, outcomes in inside:
            outcomes.append(Draining("gave up")) if not outcomes else None
            waiting.end()
        bench.clock.now += 100.0
        await next_turn(2)
        assert all(len(outcomes) == 1 for outcomes in told)
        bench.assert_nothing_is_inside()

    run(check)


# Awaited


def test_attend_gives_the_answer_and_frees_everything() -> None:
    async def check(bench: Bench) -> None:
        asking = bench.ask()
        await next_turn()
        (pending,) = bench.take()
        prepared, answer = pending.prepared, make_answer()
        assert pending.needed_bytes == prepared.cost.peak_bytes + prepared.cost.output_bytes
        bench.deliver(pending, answer)
        assert await asking is answer
        bench.assert_nothing_is_inside()

    run(check)


def test_attend_answers_at_once_where_it_may() -> None:
    async def check(bench: Bench, engine: LoopEngine) -> None:
        answer = await bench.ask()
        assert engine.num_computed == 1 and answer.queue_s == 0
        bench.assert_nothing_is_inside()

    at_once(check)


def test_attend_raises_the_refusal_that_is_delivered() -> None:
    async def check(bench: Bench) -> None:
        asking, refusal = bench.ask(), Overloaded("full", reason="memory_in_use")
        await next_turn()
        bench.deliver(bench.take()[0], refusal)
        with pytest.raises(Overloaded) as caught:
            await asking
        assert caught.value is refusal
        bench.assert_nothing_is_inside()

    run(check)


def test_attend_raises_what_metadata_refuses_before_anything_is_counted() -> None:
    async def check(bench: Bench) -> None:
        problem = make_problem(softcap=1.0, path="fused")
        with pytest.raises(InvalidProblem):
            await bench.attend.attend(problem, Deadline.after(1.0, bench.clock), answer_bytes=lambda _: 0)
        bench.assert_nothing_is_inside()

    run(check)


def test_attend_raises_when_its_deadline_passes() -> None:
    async def check(bench: Bench) -> None:
        asking = bench.ask()
        await next_turn()
        bench.clock.now += TIMEOUT_S
        with pytest.raises(DeadlinePassed):
            await asking
        bench.assert_nothing_is_inside()

    run(check)


@pytest.mark.parametrize("is_taken", [False, True])
def test_attend_frees_its_place_when_it_is_cancelled(is_taken: bool) -> None:
    async def check(bench: Bench) -> None:
        asking = bench.ask()
        await next_turn()
        pending = bench.take()[0] if is_taken else None
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        bench.assert_nothing_is_inside()
        if pending is not None:
            assert pending.is_abandoned
            bench.deliver(pending, make_answer())

    run(check)


def test_an_answer_in_the_moment_of_cancelling_disturbs_nobody() -> None:
    async def check(bench: Bench) -> None:
        asking = bench.ask()
        await next_turn()
        (pending,) = bench.take()
        asking.cancel()
        await next_turn()
        pending.deliver(make_answer())
        pending.deliver(RuntimeError("late"))
        with pytest.raises(asyncio.CancelledError):
            await asking
        bench.assert_nothing_is_inside()

    run(check)


def test_preparing_is_what_the_engine_does() -> None:
    problem = make_problem(causal=True)
    prepared, expected = Bench().attend.prepare(problem), Engine().prepare(problem)
    assert (prepared.path, prepared.why, prepared.cost) == (expected.path, expected.why, expected.cost)
