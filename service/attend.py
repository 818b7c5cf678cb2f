"""The one use case behind every door: admit, run at once or enqueue, await."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from attn_core.cost import Cost
from attn_core.engine import Engine
from attn_core.errors import Abandoned, AttentionError, NeedsSpare
from attn_core.prepared import PlainForm, Prepared
from attn_core.problem import AttentionResult, Problem
from service.admission import Admission
from service.deadline import Clock, Deadline
from service.errors import DeadlinePassed, QueueTimeout
from service.pace import Pace
from service.request_queue import Answer, Outcome, Pending, RequestQueue

log = logging.getLogger("attn.attend")

AT_ONCE_S = 1.5e-3
"""So much computing the event loop does itself, between two reads. A hop to another thread costs 50 us, and a small
kernel in a second thread starves behind a busy loop; but what computes here reads nothing meanwhile."""


HELP_S = 8e-3
"""And so long a problem that waits it computes itself, one in each turn, where it would have nothing to do: the core of
a thread that only reads bodies is idle for most of the time."""
LONGEST_S = 12e-3
"""After so long the loop stops, at the problem's next checkpoint, and leaves it to the engine's threads."""
BUSY_S = 4e-3
"""A turn that took so long without computing had enough to do."""


class Attend:
    """``prepare`` decides kernel and cost of a checked problem; ``engine`` is the loop's own, None on a GPU.

    Used from the event loop alone.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        queue: RequestQueue,
        pace: Pace,
        prepare: Callable[[Problem], Prepared],
        engine: Engine | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._admission = admission
        self._queue = queue
        self._pace = pace
        self._prepare = prepare
        self._engine = engine
        self._clock = clock
        self._spent_s = 0.0
        self._is_helping = False
        self._helped_at = 0.0
        self._turn_ends = False

    def check_room(self) -> None:
        """Raises: Overloaded when the queue is full."""
        self._queue.check_room()

    def wait_s(self) -> float:
        """The estimated wait of one more small problem."""
        return self._queue.wait_s(is_large=False)

    async def attend(
        self,
        problem: Problem,
        deadline: Deadline,
        *,
        answer_bytes: Callable[[Prepared], int],
        held: Any = None,
        max_queue_s: float | None = None,
        is_alone: bool = True,
    ) -> Answer:
        """Answer one checked problem, or raise why not.

        ``answer_bytes`` gives what the encoded answer takes besides, and may refuse; ``max_queue_s`` is how long the
        problem may wait until it is begun. Raises: InvalidProblem, TooLarge, Overloaded, Unavailable, DeadlinePassed,
        QueueTimeout. Cancelled, it frees its place.
        """
        prepared = self._prepare(problem)
        return await self.attend_prepared(
            prepared,
            deadline,
            more_bytes=answer_bytes(prepared),
            held=held,
            max_queue_s=max_queue_s,
            is_alone=is_alone,
        )

    async def attend_prepared(
        self,
        prepared: Prepared,
        deadline: Deadline,
        *,
        more_bytes: int,
        held: Any = None,
        max_queue_s: float | None = None,
        is_alone: bool = True,
    ) -> Answer:
        """The same for a problem whose kernel and cost are known. Raises: as ``attend``, but InvalidProblem."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def deliver(outcome: Outcome) -> None:
            if future.done():
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        waiting = self.begin(
            prepared,
            deadline,
            more_bytes=more_bytes,
            deliver=deliver,
            held=held,
            max_queue_s=max_queue_s,
            is_alone=is_alone,
        )
        try:
            return await future
        finally:
            if waiting is not None:
                waiting.end()

    def prepare(self, problem: Problem) -> Prepared:
        """Kernel and cost of a checked problem. Raises: InvalidProblem."""
        return self._prepare(problem)

    def estimate_s(self, cost: Cost, path: str) -> float:
        return self._pace.estimate_s(cost, path)

    def least_s(self, cost: Cost, path: str) -> float:
        return self._pace.least_s(cost, path)

    def begin(
        self,
        prepared: Prepared,
        deadline: Deadline,
        *,
        more_bytes: int,
        deliver: Callable[[Outcome], None],
        held: Any = None,
        max_queue_s: float | None = None,
        is_alone: bool = True,
    ) -> Waiting | None:
        """Answer at once and give None, or enqueue; ``deliver`` is called once, unless ``Waiting.end`` comes first.

        Not ``is_alone``: the caller knows of others that are still on their way, so the loop leaves what takes long to
        a thread that has nothing to do.

        Raises: TooLarge, Overloaded, Unavailable, DeadlinePassed.
        """
        needed_bytes = prepared.cost.peak_bytes + more_bytes
        estimated_s = self._pace.estimate_s(prepared.cost, prepared.path)
        # First: what can never be held is told so, not that it would take too long.
        self._admission.check_memory(needed_bytes)
        was_tried = False
        is_tiny = self._pace.is_tiny(prepared.cost, prepared.path)
        if (is_alone or estimated_s <= AT_ONCE_S) and self.may_run_at_once(estimated_s, is_tiny=is_tiny):
            self._admission.check_deadline(0.0, 0.0, deadline)
            outcome = self._run_at_once(prepared, needed_bytes, estimated_s, deadline)
            if isinstance(outcome, NeedsSpare):
                prepared, needed_bytes = prepared.with_spare, needed_bytes + outcome.spare_bytes
            elif outcome is not None:
                deliver(outcome)
                return None
            was_tried = True

        def deliver_or_go_on(outcome: Outcome) -> None:
            if isinstance(outcome, NeedsSpare):
                waiting.begin_with_spare(deliver)
            else:
                deliver(outcome)

        pending = Pending(prepared, deadline, deliver_or_go_on, self._clock(), needed_bytes, estimated_s, held)
        pending.has_failed = was_tried
        wait_s = self._queue.wait_s(is_large=pending.ride.is_large)
        self._admission.check_wait(wait_s)
        self._admission.check_deadline(wait_s, self._pace.least_s(prepared.cost, prepared.path), deadline)
        self._admission.hold_memory(needed_bytes)
        try:
            self._queue.put(pending)
        except BaseException:
            self._admission.release_memory(needed_bytes)
            raise
        is_taken = not is_alone and estimated_s > AT_ONCE_S and self._queue.has_idle_small_worker
        if self._engine is not None and not self._is_helping and not is_taken:
            self._is_helping = True
            self._helped_at = self._clock()
            asyncio.get_running_loop().call_soon(self._help)
        waiting = Waiting(pending, self._queue, self._admission, max_queue_s=max_queue_s)
        return waiting

    def _help(self) -> None:
        """Compute the first that waits, if it is short, once in each turn of the loop for as long as any waits, and as
        the loop has little else to do."""
        began = self._clock()
        is_busy, self._helped_at = began - self._helped_at > BUSY_S, began
        pending = None if is_busy else self._queue.take_short(HELP_S)
        if pending is None and not (is_busy and self._queue.has_small):
            self._is_helping = False
            return
        asyncio.get_running_loop().call_soon(self._help)
        if pending is None:
            # The sockets alone keep this thread busy.
            return
        outcome: Outcome | None = None
        if not pending.is_abandoned:
            outcome = self._run_at_once(pending.prepared, pending.needed_bytes, pending.estimated_s, pending.deadline)
            if outcome is None:
                self._queue.put_back(pending)
                return
        self._queue.done([pending])
        pending.is_computed = True
        if isinstance(outcome, Answer):
            outcome = replace(outcome, queue_s=began - pending.enqueued_at)
        if outcome is not None:
            pending.deliver(outcome)
        self._helped_at = self._clock()

    def may_run_at_once(self, estimated_s: float, *, is_tiny: bool = False) -> bool:
        """Whether the event loop may compute this itself: it is short, nothing waits, and the loop has not yet computed
        for long since it last looked at its sockets.

        A tiny problem it always computes: to hand it over would take longer, and a thread that needs the interpreter
        for each of them falls behind a busy loop for good.
        """
        if self._engine is None:
            return False
        if is_tiny:
            return estimated_s <= AT_ONCE_S
        if estimated_s > AT_ONCE_S:
            # One that is alone has nobody whom it could hold up, and a hop would only cost it time.
            return estimated_s <= HELP_S and self._admission.requests_inside <= 1 and self._queue.is_idle
        if not self._queue.is_empty:
            return False
        if self._spent_s + estimated_s <= AT_ONCE_S:
            return True
        # What is left of earlier turns must not keep the longer ones out for good.
        self._end_turn()
        return False

    def may_run_plain_at_once(self, form: PlainForm, *, is_alone: bool = True) -> float | None:
        """The estimated seconds of a problem that the event loop may compute itself, None for others."""
        estimated_s = self._pace.estimate_s(form.cost, form.path)
        is_tiny = self._pace.is_tiny(form.cost, form.path)
        if not is_alone and estimated_s > AT_ONCE_S:
            return None
        return estimated_s if self.may_run_at_once(estimated_s, is_tiny=is_tiny) else None

    def run_plain_at_once(
        self,
        form: PlainForm,
        numbers: tuple[Tensor, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        estimated_s: float,
    ) -> Tensor | None:
        """The context of a problem of a plain form, after ``may_run_at_once``; None where it needs ``begin``."""
        assert self._engine is not None
        self._spend(estimated_s)
        try:
            return self._engine.plain_context(form, numbers, query, key, value)
        except Exception as error:
            log.warning("not computed at once: %s", type(error).__name__)
            return None

    def _spend(self, estimated_s: float) -> None:
        self._spent_s += estimated_s
        if self._spent_s > AT_ONCE_S / 2:
            # A turn of few small problems need not be told from the next.
            self._end_turn()

    def _end_turn(self) -> None:
        """Begin anew after the next look at the sockets, which comes before what is called soon. The loop's clock does
        not tell these apart: uvloop's runs on between them."""
        if not self._turn_ends:
            self._turn_ends = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._turn_ends, self._spent_s = False, 0.0

    def _run_at_once(
        self, prepared: Prepared, needed_bytes: int, estimated_s: float, deadline: Deadline
    ) -> Outcome | None:
        """None where it takes far longer than estimated, and after a mistake that nobody foresaw: the engine's own
        threads are there for the one and know what to do about the other."""
        assert self._engine is not None
        self._spend(estimated_s)
        began = self._clock()

        def check() -> None:
            if self._clock() - began > LONGEST_S or deadline.has_passed:
                raise Abandoned("too long for the event loop")

        try:
            (outcome,) = self._engine.run([prepared], [check])
        except Exception as error:
            log.warning("not computed at once: %s", type(error).__name__)
            return None
        took_s = self._clock() - began
        if isinstance(outcome, Abandoned):
            self._pace.observe(prepared.cost, prepared.path, took_s)
            return DeadlinePassed("the deadline passed while it was computed") if deadline.has_passed else None
        if isinstance(outcome, AttentionError):
            return outcome
        assert isinstance(outcome, AttentionResult)
        self._pace.observe(prepared.cost, prepared.path, took_s)
        return Answer(result=outcome, needed_bytes=needed_bytes, queue_s=0.0, compute_s=took_s, batch_requests=1)


def _tell_nobody(outcome: Outcome) -> None:
    """For whom nobody waits any more."""


class Waiting:
    """One problem in the queue or with the engine: its place, its memory and its deadline, until ``end``."""

    def __init__(
        self, pending: Pending, queue: RequestQueue, admission: Admission, *, max_queue_s: float | None = None
    ) -> None:
        self._pending = pending
        self._queue = queue
        self._admission = admission
        self._is_over = self._was_waiting = False
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, pending.deadline.remaining_s), self._deadline_passed)
        self._queue_timer = None if max_queue_s is None else loop.call_later(max_queue_s, self._queued_too_long)

    @property
    def is_computing(self) -> bool:
        """Whether the engine may still read the tensors of a problem that was given up."""
        return self._is_over and not self._was_waiting and not self._pending.is_computed

    def end(self) -> None:
        """Nobody waits any more, or the answer is there: free the place, and stop the engine at its next block."""
        if self._is_over:
            return
        self._is_over = True
        self._timer.cancel()
        if self._queue_timer is not None:
            self._queue_timer.cancel()
        self._pending.is_abandoned = True
        if not self._was_waiting:
            self._was_waiting = not self._pending.is_computed and self._queue.discard(self._pending)
        self._admission.release_memory(self._pending.needed_bytes)
        # It may lead back here, and keep the tensors alive in a circle.
        self._pending.deliver = _tell_nobody

    def begin_with_spare(self, deliver: Callable[[Outcome], None]) -> None:
        """Enqueue the problem anew, with the memory that its huge or non-finite numbers take; or deliver why not."""
        first = self._pending
        if self._queue_timer is not None:
            # It was begun in time.
            self._queue_timer.cancel()
        more_bytes = first.prepared.cost.spare_bytes
        self._admission.release_memory(first.needed_bytes)
        needed_bytes = first.needed_bytes + more_bytes
        self._pending = again = Pending(
            first.prepared.with_spare,
            first.deadline,
            deliver,
            first.enqueued_at,
            0,
            first.estimated_s,
            first.held,
        )
        try:
            self._admission.hold_memory(needed_bytes)
            again.needed_bytes = needed_bytes
            self._queue.put(again)
        except Exception as refusal:
            # Whatever it is, somebody waits for it.
            again.is_computed = True
            deliver(refusal)

    def _deadline_passed(self) -> None:
        if self._is_over or self._pending.is_computed:
            return
        deliver = self._pending.deliver
        self.end()
        deliver(DeadlinePassed("the deadline passed before the answer was there"))

    def _queued_too_long(self) -> None:
        if self._is_over or self._pending.is_computed or not self._queue.discard(self._pending):
            # It is over, or has been begun.
            return
        self._was_waiting = True
        deliver = self._pending.deliver
        self.end()
        deliver(QueueTimeout("the request has waited in the queue for as long as its timeout lets it"))
