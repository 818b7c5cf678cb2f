"""Problems on their way through the service: of any cost at will, and tiny to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from attn_core import AttentionProblem, AttentionResult
from attn_core.batching.plan import LARGE_FROM_FLOPS
from attn_core.prepared import Prepared, prepare
from service.deadline import Clock, Deadline
from service.request_queue import Answer, Outcome, Pending
from tests.support.clock import FakeClock

STANDING = FakeClock()
"""A clock that nobody moves."""


def make_prepared(
    number: float = 1.0,
    *,
    is_large: bool = False,
    flops: int | None = None,
    peak_bytes: int | None = None,
    spare_bytes: int = 0,
) -> Prepared:
    """A problem whose answer is ``number``; ``is_large`` and the figures are what its cost says."""
    prepared = prepare(AttentionProblem(query=torch.full((1, 1, 1, 2), float(number))), device_type="cpu")
    cost = prepared.cost
    flops = (LARGE_FROM_FLOPS if is_large else cost.flops) if flops is None else flops
    peak_bytes = peak_bytes or cost.peak_bytes
    cost = replace(cost, flops=flops, peak_bytes=peak_bytes, spare_bytes=spare_bytes, pair_passes=0.0)
    return replace(prepared, cost=cost)


SMALL, LARGE = make_prepared(), make_prepared(is_large=True)


def drop(outcome: Outcome) -> None:
    """For whom the outcome does not matter."""


def make_pending(
    prepared: Prepared | None = None,
    *,
    is_large: bool = False,
    deliver: Callable[[Outcome], None] = drop,
    timeout_s: float = 60.0,
    estimated_s: float = 0.0,
    needed_bytes: int = 7,
    clock: Clock = STANDING,
) -> Pending:
    return Pending(
        (LARGE if is_large else SMALL) if prepared is None else prepared,
        Deadline.after(timeout_s, clock),
        deliver,
        clock(),
        needed_bytes,
        estimated_s,
    )


def make_answer(number: float = 1.0, *, needed_bytes: int = 7) -> Answer:
    result = AttentionResult(
        outputs={"context": torch.tensor([number])}, path="fused", why="", device="cpu", dtype=torch.float32
    )
    return Answer(result=result, needed_bytes=needed_bytes, queue_s=0.0, compute_s=0.0, batch_requests=1)


def number_of(answer: Outcome) -> float:
    """The number that ``make_prepared`` was given."""
    assert isinstance(answer, Answer), answer
    return answer.result.outputs["context"].flatten()[0].item()
