"""The loop around the engine's own threads: take what is pending, have it computed, report.

On the host the small lane has a worker for each core, each with one torch thread, and the large lane one worker of its
own whose problems may use all cores: neither lane can starve the other, the system shares the cores between them.
Problems are dispatched together, one hop for many, and each is computed at its own shape: joined along the batch they
would cost copies and gain nothing (facts: batching never pays on CPU). A GPU has one worker for both lanes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

from attn_core.engine import Engine
from attn_core.errors import Abandoned, AttentionError, Checkpoint, NeedsSpare, TooLarge
from attn_core.problem import AttentionResult
from service.calibration import measure_rates
from service.deadline import Clock
from service.deliveries import Deliveries
from service.errors import DeadlinePassed, Unavailable
from service.pace import Pace
from service.request_queue import Answer, Outcome, Pending, RequestQueue

log = logging.getLogger("attn.batcher")

NICENESS = 10
"""Of the engine's threads: behind busy ones the loop would answer late what takes it no time, health and refusals."""


class Batcher:
    """Owns the engine's threads. ``on_ready`` is called in one of them once a warm-up problem was answered.

    ``make_engine`` is called once for each thread: an engine is not shared. ``allowed_bytes`` tells whether what did
    not fit would ever fit; ``measure`` gives the rates that estimates begin with.
    """

    def __init__(
        self,
        *,
        make_engine: Callable[[], Engine],
        queue: RequestQueue,
        deliveries: Deliveries,
        pace: Pace,
        allowed_bytes: Callable[[], int],
        on_ready: Callable[[], None],
        on_lost: Callable[[BaseException], None],
        num_small_workers: int = 1,
        has_large_worker: bool = False,
        measure: Callable[[Engine], tuple[float, dict[str, float]]] | None = measure_rates,
        clock: Clock = time.monotonic,
    ) -> None:
        self._make_engine = make_engine
        self._queue = queue
        self._deliveries = deliveries
        self._pace = pace
        self._allowed_bytes = allowed_bytes
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._measure = measure
        self._clock = clock
        self._lost: BaseException | None = None
        self._losing = threading.Lock()
        lanes = [("small", True, not has_large_worker)] * num_small_workers
        lanes += [("large", False, True)] * has_large_worker
        self._is_ready = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._run, args=(small, large, index == 0), name=f"attn-{name}-{index}", daemon=True
            )
            for index, (name, small, large) in enumerate(lanes)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Close the queue and wait for the threads; whether they ended in time."""
        self._queue.close()
        self._is_ready.set()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def is_lost(self) -> bool:
        """Whether the device answers no more."""
        return self._lost is not None

    def _run(self, small: bool, large: bool, is_first: bool) -> None:
        if sys.platform == "linux":
            # There, alone, a thread has a priority of its own.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        if not is_first:
            # The first one measures the machine, which nobody must disturb.
            self._is_ready.wait()
        try:
            engine = self._make_engine()
            engine.warm_up()
            if engine.shares_calls is not None:
                log.info("calls of a kernel are shared: %s", engine.shares_calls)
            if is_first and self._measure is not None:
                overhead_s, rates = self._measure(engine)
                self._pace.set_rates(overhead_s=overhead_s, flops_per_s=rates)
        except BaseException as error:
            log.exception("the device did not answer the warm-up")
            self._lose(error)
        else:
            if is_first:
                self._is_ready.set()
                self._on_ready()
        self._serve(engine if self._lost is None else None, small, large)

    def _serve(self, engine: Engine | None, small: bool, large: bool) -> None:
        after_small = False
        while (batch := self._queue.take(small=small, large=large, after_small=after_small)) is not None:
            after_small = not batch[0].ride.is_large
            self._settle(engine, batch)
            # While it waits for the next one, a worker must not keep the tensors of the last one alive.
            del batch

    def _settle(self, engine: Engine | None, batch: Sequence[Pending]) -> None:
        """Have every one of a batch answered or refused, whatever happens."""
        try:
            if engine is None or self._lost is not None:
                self._refuse(batch)
            else:
                self._answer(engine, batch)
        except _DeviceLost as lost:
            self._lose(lost.error)
            self._refuse(batch)
        except Exception as error:
            # A mistake of ours must neither end the lane nor leave anybody waiting.
            log.exception("a batch of %d was given up", len(batch))
            for pending in batch:
                self._post(pending, error)
        finally:
            self._queue.done(batch)

    def _answer(self, engine: Engine, batch: Sequence[Pending]) -> None:
        """Report every outcome. Raises: _DeviceLost when the device answers no more."""
        riding = [pending for pending in batch if self._is_wanted(pending)]
        if engine.device.type == "cpu":
            # Each is reported when it is done: nothing is gained by having the first wait for the last.
            for pending in riding:
                if self._is_wanted(pending):
                    self._compute(engine, [pending], batch_requests=len(riding))
        elif riding:
            self._compute(engine, riding, batch_requests=len(riding))

    def _is_wanted(self, pending: Pending) -> bool:
        if pending.is_abandoned:
            return False
        if pending.deadline.has_passed:
            self._post(pending, DeadlinePassed("the deadline passed in the queue"))
            return False
        return True

    def _compute(self, engine: Engine, riding: Sequence[Pending], *, batch_requests: int) -> None:
        began = self._clock()
        try:
            outcomes = engine.run(
                [pending.prepared for pending in riding], [self._checkpoint(pending) for pending in riding]
            )
        except Exception as error:
            self._after_failure(engine, riding, error)
            return
        took_s = self._clock() - began
        if len(riding) == 1 and not isinstance(outcomes[0], NeedsSpare):
            self._pace.observe(riding[0].prepared.cost, riding[0].prepared.path, took_s)
        for pending, outcome in zip(riding, outcomes, strict=True):
            if isinstance(outcome, AttentionError):
                self._post(pending, _as_refusal(outcome))
            else:
                self._report(pending, outcome, began, took_s, batch_requests)

    def _report(
        self, pending: Pending, result: AttentionResult, began: float, took_s: float, batch_requests: int
    ) -> None:
        self._post(
            pending,
            Answer(
                result=result,
                needed_bytes=pending.needed_bytes,
                queue_s=began - pending.enqueued_at,
                compute_s=took_s,
                batch_requests=batch_requests,
            ),
        )

    def _after_failure(self, engine: Engine, riding: Sequence[Pending], error: Exception) -> None:
        """One bad item never touches its neighbours: each is tried again by itself. Raises: _DeviceLost."""
        out_of_memory = _is_out_of_memory(error)
        if out_of_memory:
            text = str(error)
            log.warning("out of memory: %s", text.splitlines()[0] if text else type(error).__name__)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        else:
            log.error("a batch of %d failed", len(riding), exc_info=error)
            _check_device(engine)
        if len(riding) > 1 or out_of_memory:
            for pending in riding:
                self._try_alone(engine, pending)
        else:
            self._post(riding[0], error)

    def _try_alone(self, engine: Engine, pending: Pending) -> None:
        began = self._clock()
        try:
            (outcome,) = engine.run([pending.prepared], [self._checkpoint(pending)])
        except Exception as error:
            if not _is_out_of_memory(error):
                _check_device(engine)
                self._post(pending, error)
                return
            allowed = self._allowed_bytes()
            if pending.needed_bytes > allowed:
                self._post(pending, TooLarge(needed_bytes=pending.needed_bytes, allowed_bytes=allowed))
            else:
                self._post(pending, Unavailable("the memory was not to be had just now"))
            return
        if isinstance(outcome, AttentionError):
            self._post(pending, _as_refusal(outcome))
        else:
            self._report(pending, outcome, began, self._clock() - began, 1)

    def _checkpoint(self, pending: Pending) -> Checkpoint:
        def check() -> None:
            if pending.is_abandoned:
                raise Abandoned("nobody waits for the answer")
            if pending.deadline.has_passed:
                raise Abandoned("the deadline passed")

        return check

    def _post(self, pending: Pending, outcome: Outcome) -> None:
        self._deliveries.post(pending, outcome)

    def _lose(self, error: BaseException) -> None:
        with self._losing:
            first, self._lost = self._lost is None, self._lost or error
        self._is_ready.set()
        if first:
            self._on_lost(error)

    def _refuse(self, batch: Sequence[Pending]) -> None:
        for pending in batch:
            if not pending.is_computed:
                self._post(pending, Unavailable(f"the device is lost: {self._lost}"))


class _DeviceLost(Exception):
    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


def _as_refusal(error: AttentionError) -> Exception:
    return DeadlinePassed("the deadline passed while it was computed") if isinstance(error, Abandoned) else error


def _check_device(engine: Engine) -> None:
    """After a mistake nobody foresaw: a device that fails once may fail for good. Raises: _DeviceLost."""
    try:
        engine.warm_up()
    except Exception as error:
        if _is_out_of_memory(error):
            return
        log.exception("the device does not answer any more")
        raise _DeviceLost(error) from error


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "not enough memory" in text
        or "can't allocate" in text
    )
