"""The loop around the engine's own thread: take what is pending, have it computed, report.

One thread owns torch. The event loop never computes, so health answers while a large problem runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from attn_core.engine import Engine
from attn_core.errors import AttentionError
from service.deadline import Clock
from service.errors import DeadlinePassed, Unavailable
from service.request_queue import Answer, Pending, RequestQueue

log = logging.getLogger("attn.batcher")


class Batcher:
    """Owns the engine's thread. ``on_ready`` is called in that thread once a warm-up problem was answered."""

    def __init__(
        self,
        *,
        make_engine: Callable[[], Engine],
        queue: RequestQueue,
        on_ready: Callable[[], None],
        on_lost: Callable[[BaseException], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self._make_engine = make_engine
        self._queue = queue
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name="attn-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Close the queue and wait for the thread; whether it ended in time."""
        self._queue.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = self._make_engine()
            engine.warm_up()
        except BaseException as error:
            log.exception("the device did not answer the warm-up")
            self._on_lost(error)
            self._refuse_all(error)
            return
        self._on_ready()
        while (pending := self._queue.take()) is not None:
            try:
                self._answer(engine, pending)
            except _DeviceLost as lost:
                self._on_lost(lost.error)
                self._refuse_all(lost.error)
                return

    def _answer(self, engine: Engine, pending: Pending) -> None:
        """Report one outcome. Raises: _DeviceLost when the device answers no more."""
        if pending.future.done():
            return
        if pending.deadline.has_passed:
            pending.deliver(DeadlinePassed("the deadline passed in the queue"))
            return
        began = self._clock()
        try:
            (outcome,) = engine.run([pending.problem])
        except Exception as error:
            ours = _as_ours(error)
            pending.deliver(ours)
            if ours is error:
                _check_device(engine)
            return
        if isinstance(outcome, AttentionError):
            pending.deliver(outcome)
            return
        pending.deliver(
            Answer(
                result=outcome,
                needed_bytes=pending.needed_bytes,
                queue_s=began - pending.enqueued_at,
                compute_s=self._clock() - began,
                batch_requests=1,
            )
        )

    def _refuse_all(self, error: BaseException) -> None:
        while (pending := self._queue.take()) is not None:
            pending.deliver(Unavailable(f"the device is lost: {error}"))


class _DeviceLost(Exception):
    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


def _check_device(engine: Engine) -> None:
    """After a mistake nobody foresaw: a device that fails once may fail for good. Raises: _DeviceLost."""
    try:
        engine.warm_up()
    except Exception as error:
        if _is_out_of_memory(error):
            return
        log.exception("the device does not answer any more")
        raise _DeviceLost(error) from error


def _as_ours(error: Exception) -> Exception:
    """Out of memory is a matter of load and worth another try; anything else is a mistake of ours, and stays."""
    if _is_out_of_memory(error):
        text = str(error)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.warning("out of memory: %s", text.splitlines()[0] if text else type(error).__name__)
        return Unavailable("the memory was not to be had just now")
    return error


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "not enough memory" in text
        or "can't allocate" in text
    )
