"""Weights drawn in a terminal: what each cell looks like, what is numbered, what is cut."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from service.ask import AskError
from service.heatmap import MAX_PANELS, MAX_QUERIES, check_file, draw, write
from tests.support.factory import make_tensor

WEIGHTS = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.25, 0.25, 0.5]])
DARKEST, BRIGHTEST, GREY, RED = "68;1;84", "253;231;37", "110;110;110", "214;39;40"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def drawn(weights: Tensor, *, width: int = 80, colours: str | None = "truecolor", no_color: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=colours is not None,
        color_system=colours,  # type: ignore[arg-type]  # one of rich's names
        no_color=no_color,
        _environ={},
    )
    draw(weights, console)
    return file.getvalue()


def some_weights(*shape: int) -> Tensor:
    return make_tensor(*shape).softmax(-1)


def cells(line: str) -> list[tuple[str, str]]:
    """The colours of the upper and the lower half, once for each run of half blocks."""
    return re.findall(r"\x1b\[38;2;([0-9;]+);48;2;([0-9;]+)m▀+", line)


def test_a_cell_has_the_colour_of_its_weight_and_an_empty_row_a_colour_of_its_own() -> None:
    lines = drawn(WEIGHTS).splitlines()
    assert ESCAPE.sub("", lines[0]) == "weights  3 queries down, 3 keys across"
    assert lines[1].split() == ["0", "1", "2"]
    first, empty, last = cells(lines[2]), cells(lines[4]), cells(lines[6])
    assert first[0] == (BRIGHTEST, BRIGHTEST) and set(first[1:]) == {(DARKEST, DARKEST)}
    assert set(empty) == {(GREY, GREY)}
    assert len(set(last)) == 2 and {DARKEST, BRIGHTEST, GREY}.isdisjoint(colour for pair in last for colour in pair)
    assert lines[8] == "empty rows: 1"
    assert "empty row" in lines[-1] and "not finite" not in lines[-1]


def test_half_blocks_join_two_queries_in_a_line() -> None:
    weights = torch.zeros(60, 40)
    weights[0::2, 0] = 1.0
    weights[1::2, 1] = 1.0
    line = drawn(weights).splitlines()[2]
    assert cells(line)[:2] == [(BRIGHTEST, DARKEST), (DARKEST, BRIGHTEST)]


def test_what_is_not_finite_is_red_and_said_and_moves_no_scale() -> None:
    said = drawn(torch.tensor([[float("nan"), 0.5], [float("inf"), 0.25]]))
    assert RED in said and "not finite" in said and "0.5" in said.splitlines()[-1]


def test_one_scale_holds_for_all_heads() -> None:
    weights = torch.stack([torch.tensor([[0.25, 0.25]]), torch.tensor([[1.0, 0.0]])])
    first = drawn(weights).split("head 1")[0]
    assert BRIGHTEST not in first


@pytest.mark.parametrize(
    ("colours", "no_color"), [(None, False), ("standard", False), ("truecolor", True)], ids=["none", "16", "NO_COLOR"]
)
def test_without_enough_colours_cells_are_shades(colours: str | None, no_color: bool) -> None:
    said = ESCAPE.sub("", drawn(WEIGHTS, colours=colours, no_color=no_color))
    assert "  0 1 2\n0 ██    \n1 ××××××\n2 ░░░░▒▒\n" in said
    assert "▀" not in said and "× empty row" in said


def test_a_terminal_without_blocks_gets_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    draw(WEIGHTS, Console(file=file, width=80, _environ={}))
    file.seek(0)
    assert "0 @@    \n1 xxxxxx\n" in file.read()


def test_a_weight_that_is_hardly_more_than_zero_does_not_look_like_zero() -> None:
    assert "\n0 ██░░  \n" in drawn(torch.tensor([[1.0, 1e-30, 0.0]]), colours=None)


@pytest.mark.parametrize("colours", [None, "truecolor"])
@pytest.mark.parametrize("width", [12, 40, 80, 200])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (3, 100), (7, 41), (130, 19), (200, 300)])
def test_no_line_of_cells_is_wider_than_the_terminal_and_what_is_cut_is_said(
    num_queries: int, num_keys: int, width: int, colours: str | None
) -> None:
    said = ESCAPE.sub("", drawn(some_weights(num_queries, num_keys), width=width, colours=colours)).splitlines()
    ends = next(index for index, line in enumerate(said) if not line.strip())
    # The title and what is said at the end may go on in the next line of the terminal.
    start = next(index for index, line in enumerate(said) if line.split()[:1] == ["0"])
    assert all(len(line) <= width for line in said[start:ends])
    room = width - len(str(min(num_queries, MAX_QUERIES) - 1)) - 1
    cut = said[-1] if said[-1].startswith("Cut") else ""
    assert (f"keys 0 to {room - 1} of {num_keys}" in cut) == (num_keys > room)
    assert (f"queries 0 to {MAX_QUERIES - 1} of {num_queries}" in cut) == (num_queries > MAX_QUERIES)
    assert all(number.isdigit() and int(number) < num_keys for number in said[start].split())


def test_of_many_heads_some_are_drawn_and_it_is_said() -> None:
    said = ESCAPE.sub("", drawn(some_weights(3, 6, 2, 2)))
    assert said.count("queries down") == MAX_PANELS
    assert "item 2, head 3" in said and "item 2, head 4" not in said
    assert f"{MAX_PANELS} of 18 heads" in said.splitlines()[-1]


def test_weights_of_no_key_are_told_and_not_drawn() -> None:
    assert drawn(torch.zeros(1, 1, 2, 0)) == "weights of shape [1, 1, 2, 0] have nothing to draw\n"


def test_half_dtypes_are_drawn_as_their_numbers() -> None:
    assert drawn(WEIGHTS.bfloat16()) == drawn(WEIGHTS)


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_file_is_written_in_the_form_of_its_ending(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"weights.{ending}"
    check_file(file)
    write(WEIGHTS, file)
    assert {"png": b"PNG", "svg": b"<svg", "pdf": b"%PDF"}[ending] in file.read_bytes()


def test_a_file_of_another_ending_or_in_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AskError, match=r"takes \.png, \.svg, \.pdf, not weights\.gif"):
        check_file(tmp_path / "weights.gif")
    with pytest.raises(AskError, match="there is no folder"):
        check_file(tmp_path / "nowhere" / "weights.png")


def test_without_matplotlib_a_file_is_refused_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AskError, match=r"pip install 'attn\[plot\]'"):
        check_file(tmp_path / "weights.png")


def test_more_heads_than_a_file_takes_are_refused_with_how_to_ask_for_some(tmp_path: Path) -> None:
    with pytest.raises(AskError, match=r"takes 64 heads .* there are 65: -o 'select="):
        write(some_weights(1, 65, 1, 2), tmp_path / "weights.png")
    assert not list(tmp_path.iterdir())


def test_weights_of_no_key_make_no_file(tmp_path: Path) -> None:
    with pytest.raises(AskError, match="nothing to draw"):
        write(torch.zeros(1, 1, 2, 0), tmp_path / "weights.png")
    assert not list(tmp_path.iterdir())
