"""What answers have in common on every road: their info, what is counted of them, and when they are gzipped."""

from __future__ import annotations

import zlib
from typing import Any

from attn_core.errors import TooLarge
from service.errors import BodyTooLarge, DeadlinePassed, Overloaded, Unavailable
from service.request_queue import Answer
from service.telemetry import Metrics
from service.wire.answers import answer_info

GZIP_FROM_BYTES = 1024
GZIP_LEVEL = 1
GZIP_SAMPLE_BYTES = 8 * 1024
GZIP_GLANCE_BYTES = 512
GZIP_WORTH = 0.8
"""An answer is gzipped when a sample of it shrinks to this share or less; most float32 numbers do not."""


def info_of(answer: Answer) -> dict[str, Any]:
    """How an answer came about, as callers read it."""
    result = answer.result
    return answer_info(
        path=result.path,
        why=result.why,
        device=result.device,
        dtype=result.dtype,
        queue_ms=answer.queue_s * 1e3,
        compute_ms=answer.compute_s * 1e3,
        batch_requests=answer.batch_requests,
        empty_rows=result.empty_rows,
        nonfinite_rows=result.nonfinite_rows,
        peak_bytes=answer.needed_bytes,
        flops=result.flops,
        verification=result.verification,
    )


def count_answer(metrics: Metrics, answer: Answer) -> None:
    result = answer.result
    metrics.paths.labels(result.path).inc()
    metrics.flops.inc(result.flops)
    metrics.batch_requests.observe(answer.batch_requests)
    metrics.empty_rows.inc(result.empty_rows)
    metrics.nonfinite_rows.inc(result.nonfinite_rows)


def refusal_reason(error: BaseException) -> str | None:
    """Why work was refused that could have been done at another time, in another size or elsewhere."""
    match error:
        case Overloaded() | Unavailable():
            return error.reason
        case DeadlinePassed(at_once=True):
            return "deadline"
        case BodyTooLarge():
            return "body"
        case TooLarge():
            return "memory"
    return None


def is_worth_gzip(pieces: list[bytes | memoryview]) -> bool:
    """Whether an answer shrinks by a fifth, told from its middle."""
    if sum(len(piece) for piece in pieces) < GZIP_FROM_BYTES:
        return False
    longest = max(pieces, key=len)
    middle = len(longest) // 2
    # Bytes of float32 numbers are near to random: a glance spares most answers the longer look.
    glance = longest[middle : middle + GZIP_GLANCE_BYTES]
    if len(glance) == GZIP_GLANCE_BYTES and len(zlib.compress(glance, GZIP_LEVEL)) > len(glance):
        return False
    sample = longest[middle : middle + GZIP_SAMPLE_BYTES] if len(longest) > 2 * GZIP_SAMPLE_BYTES else longest
    return len(zlib.compress(sample, GZIP_LEVEL)) <= GZIP_WORTH * len(sample)


def deflated(pieces: list[bytes | memoryview]) -> bytes:
    """In the framing of zlib, which is what HTTP means by deflate."""
    return _squeezed(pieces, 15)


def gzipped(pieces: list[bytes | memoryview]) -> bytes:
    return _squeezed(pieces, 31)


def _squeezed(pieces: list[bytes | memoryview], window_bits: int) -> bytes:
    squeeze = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, window_bits)
    return b"".join([*(squeeze.compress(piece) for piece in pieces), squeeze.flush()])
