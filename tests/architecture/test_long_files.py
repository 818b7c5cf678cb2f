"""The order in which files of tests begin."""

from __future__ import annotations

from tests.conftest import LONG_FILES, TESTS


def test_every_file_that_begins_first_is_there_and_named_once() -> None:
    assert [name for name in LONG_FILES if not (TESTS / name).is_file()] == []
    assert len(set(LONG_FILES)) == len(LONG_FILES)
