"""The table of failures: every error class of ours has a row, and the rows are those of the contract."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

import attn_core.errors
import service.errors
from attn_core.errors import Abandoned, AttentionError, InvalidProblem, TooLarge
from service.errors import (
    REFUSAL_REASONS,
    BodyTooLarge,
    DeadlinePassed,
    Draining,
    Malformed,
    MediaTypeNotServed,
    MethodNotServed,
    NotAcceptable,
    NotFound,
    Overloaded,
    ServiceError,
    Unavailable,
)
from service.failures import FAILURES, INTERNAL, failure_of

BASES = {AttentionError, ServiceError}
INSIDE = {Abandoned}
"""What no caller is ever told: nobody waits, or the batcher says DeadlinePassed instead."""
CONTRACT = {
    Malformed: (400, "malformed"),
    NotFound: (404, "not-found"),
    MethodNotServed: (405, "method"),
    NotAcceptable: (406, "not-acceptable"),
    BodyTooLarge: (413, "too-large"),
    TooLarge: (413, "too-large"),
    MediaTypeNotServed: (415, "media-type"),
    InvalidProblem: (422, "invalid"),
    Overloaded: (429, "overloaded"),
    Unavailable: (503, "unavailable"),
    Draining: (503, "unavailable"),
    DeadlinePassed: (504, "deadline"),
}
GRPC_CODES = {
    "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED",
    "INTERNAL",
}  # fmt: skip


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
    assert (failure.http, failure.name) == CONTRACT[kind]
    assert failure.grpc in GRPC_CODES and failure.title


def test_the_contract_and_the_classes_are_the_same_set() -> None:
    assert set(OURS) == set(CONTRACT)
    assert set(FAILURES) <= set(OURS)


def test_one_name_has_one_status() -> None:
    rows = [*FAILURES.values(), INTERNAL]
    assert len({(row.name, row.http, row.grpc) for row in rows}) == len({row.name for row in rows})


def test_only_what_load_and_starting_refuse_may_be_tried_again() -> None:
    assert {row.http for row in FAILURES.values() if row.may_retry} == {429, 503}


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), KeyError(), AttentionError(), ServiceError("x"), SystemExit(1), *(kind() for kind in INSIDE)],
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
    assert all(refusal.retry_after_s >= 1 and refusal.reason in REFUSAL_REASONS for refusal in refusals)
    assert Draining.reason != Unavailable.reason
