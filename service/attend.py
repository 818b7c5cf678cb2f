"""The one use case behind every door: admit, enqueue, await."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from attn_core.cost import Cost
from service.admission import Admission
from service.deadline import Clock, Deadline
from service.request_queue import Answer, Pending, Problem, RequestQueue


class Attend:
    """``estimate`` tells what a checked problem costs on the kernel that will serve it."""

    def __init__(
        self,
        *,
        admission: Admission,
        queue: RequestQueue,
        estimate: Callable[[Problem], Cost],
        clock: Clock = time.monotonic,
    ) -> None:
        self._admission = admission
        self._queue = queue
        self._estimate = estimate
        self._clock = clock

    async def attend(self, problem: Problem, deadline: Deadline, *, answer_bytes: Callable[[Cost], int]) -> Answer:
        """Answer one checked problem, or raise why not.

        ``answer_bytes`` gives what the encoded answer takes besides. Raises: InvalidProblem, TooLarge, Overloaded,
        Unavailable, DeadlinePassed.
        """
        cost = self._estimate(problem)
        needed_bytes = cost.peak_bytes + answer_bytes(cost)
        self._admission.check_memory(needed_bytes)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        pending = Pending(problem, deadline, future, self._clock(), needed_bytes)
        self._queue.put(pending)
        try:
            return await deadline.wait_for(future)
        finally:
            if not future.done() or future.cancelled():
                self._queue.discard(pending)
