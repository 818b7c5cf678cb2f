"""The table of failures: every error class of ours has a row, and the rows are those of the contract."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

import attn_core.errors
import service.errors
from attn_core.errors import Abandoned, AttentionError, InvalidProblem, NeedsSpare, TooLarge
from service.errors import (
    REFUSAL_REASONS,
    AlreadyExists,
    BodyTooLarge,
    DeadlinePassed,
    Draining,
    Malformed,
    MediaTypeNotServed,
    MethodNotServed,
    ModelsStay,
    NotAcceptable,
    NotFound,
    NotServed,
    Overloaded,
    QueueTimeout,
    ServiceError,
    Unauthenticated,
    Unavailable,
)
from service.failures import FAILURES, INTERNAL, failure_of

BASES = {AttentionError, ServiceError}
INSIDE = {Abandoned, NeedsSpare}
"""What no caller is ever told: nobody waits, the batcher says DeadlinePassed instead, or memory is asked for first."""
CONTRACT = {
    Malformed: (400, "malformed", 400, "INVALID_ARGUMENT"),
    Unauthenticated: (401, "unauthenticated", 401, "UNAUTHENTICATED"),
    NotFound: (404, "not-found", 404, "NOT_FOUND"),
    MethodNotServed: (405, "method", 405, "UNIMPLEMENTED"),
    NotAcceptable: (406, "not-acceptable", 406, "INVALID_ARGUMENT"),
    AlreadyExists: (409, "conflict", 400, "ALREADY_EXISTS"),
    BodyTooLarge: (413, "too-large", 413, "RESOURCE_EXHAUSTED"),
    TooLarge: (413, "too-large", 413, "RESOURCE_EXHAUSTED"),
    MediaTypeNotServed: (415, "media-type", 415, "INVALID_ARGUMENT"),
    InvalidProblem: (422, "invalid", 400, "INVALID_ARGUMENT"),
    Overloaded: (429, "overloaded", 503, "UNAVAILABLE"),
    NotServed: (501, "not-served", 501, "UNIMPLEMENTED"),
    Unavailable: (503, "unavailable", 503, "UNAVAILABLE"),
    ModelsStay: (503, "unavailable", 503, "UNAVAILABLE"),
    Draining: (503, "unavailable", 503, "UNAVAILABLE"),
    DeadlinePassed: (504, "deadline", 504, "DEADLINE_EXCEEDED"),
    QueueTimeout: (504, "queue-timeout", 503, "UNAVAILABLE"),
}
"""HTTP status and name, the status under /v2, the gRPC code."""


def errors_in(module: ModuleType) -> Iterator[type[Exception]]:
    for _, member in inspect.getmembers(module, inspect.isclass):
        if member.__module__ == module.__name__ and issubclass(member, Exception):
            yield member


OURS = [
    kind for module in (attn_core.errors, service.errors) for kind in errors_in(module) if kind not in BASES | INSIDE
]


def blank(kind: type[BaseException]) -> BaseException:
    """One of the class, its constructor's wishes aside."""
    return kind.__new__(kind)


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_class_has_the_row_of_the_contract(kind: type[Exception]) -> None:
    failure = failure_of(blank(kind))
    assert failure is not INTERNAL
    assert (failure.http, failure.name, failure.inference, failure.grpc) == CONTRACT[kind]
    assert failure.title


def test_the_contract_and_the_classes_are_the_same_set() -> None:
    assert set(OURS) == set(CONTRACT)
    assert set(FAILURES) <= set(OURS)


def test_one_name_has_one_status() -> None:
    rows = [*FAILURES.values(), INTERNAL]
    assert len({(row.name, row.http, row.grpc) for row in rows}) == len({row.name for row in rows})


def test_only_what_load_and_starting_refuse_may_be_tried_again() -> None:
    assert {row.http for row in FAILURES.values() if row.may_retry} == {429, 503, 504}
    assert {row.inference for row in FAILURES.values() if row.may_retry} == {503}


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), KeyError(), AttentionError(), ServiceError("x"), SystemExit(1), *map(blank, INSIDE)],
)
def test_anything_unknown_is_a_mistake_of_the_server(error: BaseException) -> None:
    assert failure_of(error) is INTERNAL
    assert (INTERNAL.http, INTERNAL.grpc, INTERNAL.may_retry) == (500, "INTERNAL", False)


def test_a_child_is_answered_as_its_nearest_parent() -> None:
    class Fuller(Overloaded):
        pass

    assert failure_of(Fuller("x", reason="bytes")) is FAILURES[Overloaded]


def test_refusals_for_load_say_when_to_come_back_and_why() -> None:
    refusals: list[Overloaded | Unavailable] = [
        Overloaded("full", reason="requests"),
        Unavailable("starting"),
        Draining("going"),
    ]
    assert all((refusal.retry_after_s or 0) >= 1 and refusal.reason in REFUSAL_REASONS for refusal in refusals)
    assert Draining.reason != Unavailable.reason
