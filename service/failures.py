"""Every error class and what callers see of it: one table for all doors."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.errors import InvalidProblem, TooLarge
from service.errors import (
    BodyTooLarge,
    DeadlinePassed,
    Malformed,
    MediaTypeNotServed,
    MethodNotServed,
    NotAcceptable,
    NotFound,
    Overloaded,
    Unavailable,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """``name`` ends the problem type; ``grpc`` is the status code's name; ``may_retry`` means the same request."""

    name: str
    http: int
    grpc: str
    title: str
    may_retry: bool = False


INTERNAL = Failure("internal", 500, "INTERNAL", "The server made a mistake")

FAILURES: dict[type[BaseException], Failure] = {
    Malformed: Failure("malformed", 400, "INVALID_ARGUMENT", "The body cannot be read"),
    NotFound: Failure("not-found", 404, "NOT_FOUND", "There is no such path"),
    MethodNotServed: Failure("method", 405, "UNIMPLEMENTED", "The method is not served here"),
    NotAcceptable: Failure("not-acceptable", 406, "INVALID_ARGUMENT", "No acceptable form of answer"),
    BodyTooLarge: Failure("too-large", 413, "RESOURCE_EXHAUSTED", "The request is too large"),
    TooLarge: Failure("too-large", 413, "RESOURCE_EXHAUSTED", "The problem needs more memory than it may have"),
    MediaTypeNotServed: Failure("media-type", 415, "INVALID_ARGUMENT", "The content type or encoding is not served"),
    InvalidProblem: Failure("invalid", 422, "INVALID_ARGUMENT", "The request cannot be computed"),
    Overloaded: Failure("overloaded", 429, "RESOURCE_EXHAUSTED", "The server is full", may_retry=True),
    Unavailable: Failure("unavailable", 503, "UNAVAILABLE", "The server takes no work now", may_retry=True),
    DeadlinePassed: Failure("deadline", 504, "DEADLINE_EXCEEDED", "The deadline passed"),
}


def failure_of(error: BaseException) -> Failure:
    """The row of an error, by its class or the nearest parent in the table; ``INTERNAL`` for anything unknown."""
    for kind in type(error).__mro__:
        if kind in FAILURES:
            return FAILURES[kind]
    return INTERNAL
