"""What a picture is not made of: heads that are none, texts that are none, complex numbers, files of no known form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.client.plot import plot

WEIGHTS = np.full((4, 2, 2), 0.5)


@pytest.mark.parametrize(
    "heads",
    [[True, False, True, True], np.array([True, False, True, True]), [1.5], "12", 1, [None]],
    ids=["mask", "mask of numpy", "fraction", "text", "number", "None"],
)
def test_heads_that_are_no_whole_numbers_are_refused_and_none_is_guessed(heads: Any) -> None:
    with pytest.raises(ValueError, match="heads is a list of whole numbers"):
        plot(WEIGHTS, heads=heads)


def test_heads_may_be_of_numpy_and_a_range() -> None:
    several: list[Any] = [np.array([0, 2]), range(0, 4, 2), [np.int32(0), torch.tensor(2)]]
    for heads in several:
        titles = [axes.get_title() for axes in plot(WEIGHTS, heads=heads).axes if axes.images]
        assert titles == ["head 0", "head 2"]


@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 3], [b"a", b"b"], ["a", ["b", "c"]], [["a", "b"], None]])
def test_tokens_that_are_no_texts_are_refused_with_what_would_do(tokens: Any) -> None:
    with pytest.raises(ValueError, match="one list of texts, or a pair of them"):
        plot(WEIGHTS, tokens=tokens)


@pytest.mark.parametrize("weights", [np.eye(2) * 1j, torch.eye(2, dtype=torch.complex64)])
def test_complex_weights_are_refused_and_lose_no_half(weights: Any) -> None:
    with pytest.raises(ValueError, match="real numbers"):
        plot(weights)


@pytest.mark.parametrize("name", ["weights", "weights.xyz", ""])
def test_a_path_of_no_known_ending_is_refused_and_no_other_file_is_made(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path ends in \.png, \.svg, \.pdf"):
        plot(WEIGHTS, path=f"{tmp_path}/{name}")
    assert not list(tmp_path.iterdir())


def test_an_ending_in_capitals_names_the_same_form(tmp_path: Path) -> None:
    plot(WEIGHTS, path=tmp_path / "weights.PNG")
    assert (tmp_path / "weights.PNG").read_bytes().startswith(b"\x89PNG")
