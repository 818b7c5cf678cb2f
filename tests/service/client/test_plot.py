"""Weights as a picture: its panels, its one scale, its marks, its axes, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import service.client
from service.client import Answer, AsyncAttentionClient, AttentionClient, Info
from service.client.plot import empty_runs, plot, step_of
from tests.service.client.test_calls import INFO

SAID: dict[str, Any] = dict(INFO)
RNG = np.random.default_rng(0)


def some_weights(*shape: int) -> Any:
    numbers = RNG.random(shape)
    return numbers / numbers.sum(-1, keepdims=True)


def panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.images]


def titles(figure: Figure) -> list[str]:
    return [axes.get_title() for axes in panels(figure)]


def ticks(axes: Axes, side: str) -> list[str]:
    return [text.get_text() for text in getattr(axes, f"get_{side}ticklabels")()]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for made in figure.legends for text in made.get_texts()]


def test_each_head_is_a_panel_with_its_numbers_and_all_share_one_scale() -> None:
    weights = some_weights(1, 3, 4, 5)
    figure = plot(weights)
    assert titles(figure) == ["head 0", "head 1", "head 2"]
    for head, axes in enumerate(panels(figure)):
        (image,) = axes.images
        np.testing.assert_array_equal(np.asarray(image.get_array()), weights[0, head])
        assert image.get_clim() == (0.0, weights.max())
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")
        assert (ticks(axes, "x"), ticks(axes, "y")) == (list("01234"), list("0123"))
    assert legend(figure) == []


@pytest.mark.parametrize(
    ("shape", "heads", "said"),
    [
        ((2, 3), None, ["weights"]),
        ((2, 2, 3), None, ["head 0", "head 1"]),
        ((2, 2, 2, 3), None, ["item 0, head 0", "item 0, head 1", "item 1, head 0", "item 1, head 1"]),
        ((1, 9, 2, 3), [7, 2], ["head 7", "head 2"]),
        ((2, 9, 2, 3), [4], ["item 0, head 4", "item 1, head 4"]),
    ],
)
def test_panels_are_named_by_the_places_of_their_weights(
    shape: tuple[int, ...], heads: list[int] | None, said: list[str]
) -> None:
    weights = some_weights(*shape)
    figure = plot(weights, heads=heads)
    assert titles(figure) == said
    whole = weights.reshape((1,) * (4 - weights.ndim) + weights.shape)
    first = panels(figure)[0].images[0].get_array()
    np.testing.assert_array_equal(np.asarray(first), whole[0, heads[0] if heads else 0])


def test_empty_rows_are_hatched_and_what_is_not_finite_is_red() -> None:
    weights = some_weights(1, 2, 5, 3)
    weights[0, 1, 1:3] = 0.0
    weights[0, 0, 4, 2] = np.nan
    figure = plot(weights)
    first, second = panels(figure)
    assert not first.patches
    (mark,) = second.patches
    assert mark.get_hatch() and mark.get_extents().width > 0
    assert [mark.get_y(), mark.get_height()] == [0.5, 2.0]  # type: ignore[attr-defined]  # a rectangle
    assert np.ma.getmaskarray(first.images[0].get_array()).sum() == 1  # type: ignore[arg-type]
    assert legend(figure) == ["empty row", "not finite"]


def test_weights_of_nothing_but_empty_rows_are_drawn() -> None:
    figure = plot(np.zeros((2, 2)))
    assert legend(figure) == ["empty row"] and panels(figure)[0].images[0].get_clim() == (0.0, 1.0)


def test_tokens_stand_at_the_axes_and_are_no_formulas() -> None:
    tokens = ["The", " cat", "$x$", "\n", "extraordinarily long"]
    figure = plot(some_weights(5, 5), tokens=tokens)
    (axes,) = panels(figure)
    shown = ["The", "␣cat", "$x$", "\\n", "extraordinarily…"]
    assert ticks(axes, "x") == ticks(axes, "y") == shown
    assert not any(text.get_parse_math() for text in axes.get_xticklabels())


def test_queries_and_keys_may_have_tokens_of_their_own() -> None:
    (axes,) = panels(plot(some_weights(1, 2), tokens=(["now"], ["before", "now"])))
    assert (ticks(axes, "y"), ticks(axes, "x")) == (["now"], ["before", "now"])


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["a", "b", "c"], "there are 2 queries, and 3 tokens; a pair"),
        ((["a", "b"], ["a"]), "there are 3 keys, and 1 tokens"),
        (([], [], []), "one list of texts, or a pair"),
        ("abc", "not one text"),
    ],
)
def test_tokens_that_do_not_fit_are_refused_with_what_would(tokens: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plot(some_weights(2, 3), tokens=tokens)


@pytest.mark.parametrize(
    ("weights", "heads", "said"),
    [
        (np.ones(3), None, r"not \[3\]"),
        (np.ones((1, 1, 1, 1, 1)), None, r"not \[1, 1, 1, 1, 1\]"),
        (np.ones((2, 0)), None, "nothing to draw"),
        ([[1.0], [1.0, 2.0]], None, "even lengths"),
        ([["a"]], None, "numbers"),
        (np.ones((2, 1, 1)), [2], "heads are 0 to 1 here, not 2"),
        (np.ones((2, 1, 1)), [-1], "heads are 0 to 1 here, not -1"),
        (np.ones((2, 1, 1)), [], "names no head"),
        (np.ones((5, 13, 1, 1)), None, "more than 64 panels"),
    ],
)
def test_what_cannot_be_drawn_is_refused(weights: Any, heads: list[int] | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plot(weights, heads=heads)


def test_arrays_tensors_lists_and_answers_give_the_same_picture() -> None:
    numbers = [[[0.5, 0.5], [0.25, 0.75]]]
    array = np.array(numbers, dtype=np.float32)
    answer = Answer({"weights": array}, Info(**SAID), "a", {})
    tensor = torch.tensor(numbers, dtype=torch.bfloat16, requires_grad=True)
    for given in (numbers, array, tensor, answer):
        (axes,) = panels(plot(given))
        np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), array[0])


def test_an_answer_without_weights_says_what_it_has() -> None:
    answer = Answer({"context": np.ones((1, 1))}, Info(**SAID), "a", {})
    with pytest.raises(AttributeError, match="no weights: it has context"):
        plot(answer)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_file_is_written_where_a_path_is_given(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"weights.{ending}"
    plot(some_weights(1, 2, 3, 3), path=file, tokens=["a", "b", "c"])
    assert {"png": b"PNG", "svg": b"<svg"}[ending] in file.read_bytes()


def test_titles_and_tokens_lie_inside_the_picture() -> None:
    figure = plot(some_weights(1, 2, 6, 6), tokens=["a token of length"] * 6)
    figure.draw_without_rendering()
    whole = figure.bbox
    for axes in panels(figure):
        box = axes.get_tightbbox()
        assert box is not None
        assert box.x0 >= whole.x0 and box.y0 >= whole.y0 and box.x1 <= whole.x1 and box.y1 <= whole.y1


def test_many_long_panels_stay_within_what_a_file_takes() -> None:
    width, height = plot(np.ones((64, 100, 1))).get_size_inches()
    assert width <= 24 and height <= 40


def test_no_window_no_pyplot_and_no_setting_of_matplotlib_is_touched(tmp_path: Path) -> None:
    program = (
        "import sys, matplotlib\n"
        # To read "backend" would have matplotlib choose one, with pyplot.
        "settings = lambda: {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != 'backend'}\n"
        "before = settings()\n"
        "from service.client import plot\n"
        f"plot([[1.0, 0.0], [0.5, 0.5]], path={str(tmp_path / 'weights.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules\n"
        "assert settings() == before\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'attn\[plot\]'"):
        plot([[1.0]])


def test_the_package_and_both_clients_have_it() -> None:
    assert service.client.plot is AttentionClient.plot is AsyncAttentionClient.plot is plot


def test_runs_of_empty_rows_are_half_open_ranges() -> None:
    assert empty_runs(np.array([[0.0], [1.0], [0.0], [0.0], [np.nan]])) == [(0, 1), (2, 4)]
    assert empty_runs(np.ones((2, 2))) == []


@pytest.mark.parametrize(("length", "room", "step"), [(1, 1, 1), (10, 10, 1), (11, 10, 2), (100, 10, 10), (9, 0, 10)])
def test_places_are_numbered_by_round_steps(length: int, room: int, step: int) -> None:
    assert step_of(length, room) == step
