"""Errors as objects."""

from __future__ import annotations

import pickle

import pytest

from service.client import errors
from service.client.errors import AttentionServiceError, Fault, Invalid, Overloaded


def test_every_error_leaves_a_process_as_it_was() -> None:
    kinds: list[type[AttentionServiceError]] = [AttentionServiceError, *AttentionServiceError.__subclasses__()]
    for kind in kinds:
        error = kind("why", status=422, name="invalid", faults=[Fault("key", "a", "b")], request_id="abc")
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is kind and str(back) == str(error) and back.faults == error.faults
    full = Overloaded("full", status=429)
    full.retry_after_s = 3.0
    assert pickle.loads(pickle.dumps(full)).retry_after_s == 3.0


def test_a_fault_is_three_texts_by_name_and_by_place() -> None:
    field, expected, received = fault = Fault("key", "this", "that")
    assert (field, expected, received) == (fault.field, fault.expected, fault.received)


def test_whatever_fails_can_be_caught_as_one() -> None:
    for name in ("Invalid", "TooLarge", "Overloaded", "ConnectionFailed", "DeadlineExceeded", "UnreadableAnswer"):
        with pytest.raises(AttentionServiceError):
            raise getattr(errors, name)("no")
    assert str(Invalid("no", faults=[Fault("", "JSON", "text")])) == "no\n  the body: expected JSON, received text"
