"""Every error class and what callers see of it: one table for all doors."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.errors import InvalidProblem, TooLarge
from service.errors import (
    AlreadyExists,
    BodyTooLarge,
    DeadlinePassed,
    Malformed,
    MediaTypeNotServed,
    MethodNotServed,
    NotAcceptable,
    NotFound,
    NotServed,
    Overloaded,
    QueueTimeout,
    Unauthenticated,
    Unavailable,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """``name`` ends the problem type; ``inference`` is the HTTP status under /v2, ``grpc`` the status code's name;
    ``may_retry`` means the same request."""

    name: str
    http: int
    inference: int
    grpc: str
    title: str
    may_retry: bool = False


INTERNAL = Failure("internal", 500, 500, "INTERNAL", "The server made a mistake")

FAILURES: dict[type[BaseException], Failure] = {
    Malformed: Failure("malformed", 400, 400, "INVALID_ARGUMENT", "The body cannot be read"),
    Unauthenticated: Failure("unauthenticated", 401, 401, "UNAUTHENTICATED", "No key, or one that is not known"),
    NotFound: Failure("not-found", 404, 404, "NOT_FOUND", "There is no such path"),
    MethodNotServed: Failure("method", 405, 405, "UNIMPLEMENTED", "The method is not served here"),
    NotAcceptable: Failure("not-acceptable", 406, 406, "INVALID_ARGUMENT", "No acceptable form of answer"),
    AlreadyExists: Failure("conflict", 409, 400, "ALREADY_EXISTS", "The name is taken"),
    BodyTooLarge: Failure("too-large", 413, 413, "RESOURCE_EXHAUSTED", "The request is too large"),
    TooLarge: Failure("too-large", 413, 413, "RESOURCE_EXHAUSTED", "The problem needs more memory than it may have"),
    MediaTypeNotServed: Failure(
        "media-type", 415, 415, "INVALID_ARGUMENT", "The content type or encoding is not served"
    ),
    InvalidProblem: Failure("invalid", 422, 400, "INVALID_ARGUMENT", "The request cannot be computed"),
    Overloaded: Failure("overloaded", 429, 503, "UNAVAILABLE", "The server is full", may_retry=True),
    NotServed: Failure("not-served", 501, 501, "UNIMPLEMENTED", "This is not served here"),
    Unavailable: Failure("unavailable", 503, 503, "UNAVAILABLE", "The server takes no work now", may_retry=True),
    DeadlinePassed: Failure("deadline", 504, 504, "DEADLINE_EXCEEDED", "The deadline passed"),
    QueueTimeout: Failure("queue-timeout", 504, 503, "UNAVAILABLE", "The time for waiting was over", may_retry=True),
}


def failure_of(error: BaseException) -> Failure:
    """The row of an error, by its class or the nearest parent in the table; ``INTERNAL`` for anything unknown."""
    for kind in type(error).__mro__:
        if kind in FAILURES:
            return FAILURES[kind]
    return INTERNAL
