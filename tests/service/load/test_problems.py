"""Shapes and mixes as the command line says them."""

from __future__ import annotations

import numpy as np
import pytest

from service.credentials import CommandError
from service.load.problems import NUM_LENGTHS, draw_problems, read_shape


def sizes(text: str) -> list[tuple[tuple[int, ...], ...]]:
    problems = draw_problems([read_shape(text)], dtype="float32", seed=3)
    return [tuple(array.shape for array in problem.tensors.values()) for problem in problems]


@pytest.mark.parametrize(
    ("text", "query", "key", "value"),
    [
        ("1,8,128,64", (1, 8, 128, 64), (1, 8, 128, 64), (1, 8, 128, 64)),
        ("2,8/2,16,4", (2, 8, 16, 4), (2, 2, 16, 4), (2, 2, 16, 4)),
        ("1,2,3/5,4", (1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
        ("1,2,3,4/6", (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 6)),
        (" 3, 4/1, 1/7, 2/9 @2.5", (3, 4, 1, 2), (3, 1, 7, 2), (3, 1, 7, 9)),
    ],
)
def test_a_shape_says_every_axis(
    text: str, query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]
) -> None:
    assert sizes(text) == [(query, key, value)]


def test_a_range_gives_lengths_within_it_and_keys_of_the_same_length() -> None:
    found = sizes("1,2,17-256,8")
    assert len(found) == NUM_LENGTHS
    assert all(query == key == value and 17 <= query[2] <= 256 for query, key, value in found)
    assert len({query[2] for query, _, _ in found}) > NUM_LENGTHS // 2


def test_a_range_of_keys_leaves_the_queries_alone() -> None:
    found = sizes("1,2,1/1-9,8")
    assert {query[2] for query, _, _ in found} == {1}
    assert len({key[2] for _, key, _ in found}) > 3


def test_shares_are_parts_of_one_and_a_range_divides_its_own() -> None:
    problems = draw_problems([read_shape("1,1,4,2@3"), read_shape("1,1,1-9,2")], dtype="float32", seed=0)
    assert problems[0].share == 0.75
    assert [problem.share for problem in problems[1:]] == [0.25 / NUM_LENGTHS] * NUM_LENGTHS


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_the_same_seed_draws_the_same_numbers_and_another_others(dtype: str) -> None:
    one, same, other = (draw_problems([read_shape("1,2,3,4")], dtype=dtype, seed=seed)[0].tensors for seed in (1, 1, 2))
    assert all(one[name].dtype.name == dtype for name in one)
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not any(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("1,8,128", "B,H,T,D"),
        ("1,8,128,64,2", "B,H,T,D"),
        ("1,8,x,64", "B,H,T,D"),
        ("1,8,-4,64", "B,H,T,D"),
        ("1,8,128,64@", "B,H,T,D"),
        ("1,8,128,64@0", "above 0"),
        ("0,8,128,64", "above 0"),
        ("1,8,0-5,64", "above 0"),
        ("1,8,128,0", "above 0"),
        ("1,8/3,128,64", "divide"),
        ("1,8,9-5,64", "from the least"),
    ],
)
def test_what_is_no_shape_is_refused(text: str, word: str) -> None:
    with pytest.raises(CommandError, match=word):
        read_shape(text)
