"""`attn ask --heatmap`: the weights of each head drawn in the terminal, and `--heatmap-file`: in a file.

A terminal with 256 colours or more gets half blocks, two rows of colour in a line of text; any other, and a file, gets
shades. What does not fit is cut, and it is said what.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text
from torch import Tensor

from service.ask import AskError
from service.client.plot import FORMS, MISSING, empty_runs, plot, step_of
from service.client.plot import MAX_PANELS as MAX_FILE_PANELS

MAX_PANELS, MAX_QUERIES = 16, 128
_LINES = 24
_LEVELS = 64
_VIRIDIS = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725")
_EMPTY, _NOT_FINITE = Color.from_rgb(110, 110, 110), Color.from_rgb(214, 39, 40)


def check_file(path: Path) -> None:
    """Before anything is sent. Raises: AskError where no picture can be written there."""
    if path.suffix.lower() not in FORMS:
        raise AskError(f"--heatmap-file takes {', '.join(FORMS)}, not {path.name}")
    if not path.parent.is_dir():
        raise AskError(f"there is no folder {path.parent} to write {path.name} to")
    if importlib.util.find_spec("matplotlib") is None:
        raise AskError(f"--heatmap-file: {MISSING}")


def write(weights: Tensor, path: Path) -> None:
    """The weights of every head as a picture. Raises: AskError."""
    num_heads = math.prod(weights.shape[:-2])
    if num_heads > MAX_FILE_PANELS:
        raise AskError(
            f"--heatmap-file takes {MAX_FILE_PANELS} heads of all items together, and there are {num_heads}: "
            "-o 'select={\"heads\": [0, 1]}' asks for some"
        )
    try:
        plot(weights, path=path)
    except (ValueError, ImportError) as error:
        raise AskError(f"--heatmap-file: {error}") from None
    except OSError as error:
        raise AskError(f"cannot write {path}: {error.strerror or error}") from None


def draw(weights: Tensor, console: Console) -> None:
    """The weights ``[..., T, S]`` of each head, as far as they fit, in one scale of colours, and what it means."""
    if not weights.numel():
        console.print(Text(f"weights of shape {list(weights.shape)} have nothing to draw"), soft_wrap=True)
        return
    numbers = weights.detach().cpu().double().numpy()
    whole = numbers.reshape((-1, *numbers.shape[-2:]))
    num_panels, num_queries, num_keys = whole.shape
    num_heads = numbers.shape[-3] if numbers.ndim > 2 else 1
    coloured = console.color_system in ("256", "truecolor") and not console.no_color
    paint = _Coloured() if coloured else _Shaded(_ASCII if console.options.ascii_only else _BLOCKS)
    drawn_queries = min(num_queries, MAX_QUERIES)
    margin = len(str(drawn_queries - 1)) + 1
    room = max(1, console.width - margin)
    zoom = paint.zoom(drawn_queries, num_keys, room)
    drawn_keys = min(num_keys, room // zoom)
    finite = whole[np.isfinite(whole)]
    largest = float(finite.max()) if finite.size else 0.0
    shown = whole[:MAX_PANELS, :drawn_queries, :drawn_keys]
    for panel in range(len(shown)):
        empty = np.zeros(num_queries, dtype=bool)
        for start, end in empty_runs(whole[panel]):
            empty[start:end] = True
        console.print(_title(panel, num_heads, numbers.ndim, num_panels // num_heads, num_queries, num_keys))
        _print(Text(" " * margin + _key_numbers(drawn_keys, zoom, room)), console)
        levels = _levels(shown[panel], largest, empty[:drawn_queries])
        for number, line in paint.lines(levels, zoom):
            _print(Text(f"{number:>{margin - 1}} ").append_text(line), console)
        if empty.any():
            console.print(Text(f"empty rows: {_ranges(empty_runs(whole[panel]))}"), soft_wrap=True)
        console.print()
    console.print(paint.legend(largest, has_empty=not whole.any(axis=-1).all(), has_bad=finite.size < whole.size))
    cut = []
    if drawn_keys < num_keys:
        cut.append(f"keys 0 to {drawn_keys - 1} of {num_keys}")
    if drawn_queries < num_queries:
        cut.append(f"queries 0 to {drawn_queries - 1} of {num_queries}")
    if len(shown) < num_panels:
        cut.append(f"{len(shown)} of {num_panels} heads")
    if cut:
        said = f"Cut for a terminal {console.width} wide: {', '.join(cut)}; --heatmap-file draws the rest too."
        console.print(Text(said, style="yellow"), soft_wrap=True)


# What a cell is drawn as: 0 to _LEVELS, or one of these.
_IS_EMPTY, _IS_BAD, _IS_NOTHING = -1, -2, -3


def _levels(matrix: NDArray[Any], largest: float, empty: NDArray[np.bool_]) -> NDArray[Any]:
    with np.errstate(invalid="ignore"):
        # Upwards: what is more than 0 never looks like 0.
        levels = np.ceil(np.clip(matrix / (largest if largest > 0 else 1.0), 0.0, 1.0) * _LEVELS)
    levels = np.where(np.isfinite(matrix), levels, _IS_BAD)
    levels[empty] = _IS_EMPTY
    return levels.astype(np.int64)


def _title(panel: int, num_heads: int, rank: int, num_items: int, num_queries: int, num_keys: int) -> Text:
    item, head = divmod(panel, num_heads)
    name = "weights" if rank == 2 else f"head {head}" if num_items == 1 else f"item {item}, head {head}"
    return Text.assemble((name, "bold"), f"  {num_queries} queries down, {num_keys} keys across")


def _key_numbers(num_keys: int, zoom: int, room: int) -> str:
    widest = len(str(num_keys - 1)) + 1
    line = ""
    for key in range(0, num_keys, step_of(num_keys, num_keys * zoom // widest)):
        longer = line.ljust(key * zoom) + str(key)
        line = longer if len(longer) <= room else line
    return line


def _ranges(runs: list[tuple[int, int]]) -> str:
    said = [str(start) if end == start + 1 else f"{start} to {end - 1}" for start, end in runs]
    return ", ".join(said) if len(said) <= 8 else f"{', '.join(said[:8])} and more"


def _print(line: Text, console: Console) -> None:
    console.print(line, no_wrap=True, overflow="crop", crop=True)


@functools.cache
def _colour(level: int) -> Color:
    if level in (_IS_EMPTY, _IS_BAD):
        return _EMPTY if level == _IS_EMPTY else _NOT_FINITE
    place = level / _LEVELS * (len(_VIRIDIS) - 1)
    below = min(int(place), len(_VIRIDIS) - 2)
    ends = [[int(_VIRIDIS[index][at : at + 2], 16) for at in (0, 2, 4)] for index in (below, below + 1)]
    share = place - below
    return Color.from_rgb(*(round(low + (high - low) * share) for low, high in zip(*ends, strict=True)))


@functools.cache
def _style(upper: int, lower: int) -> Style:
    return Style(color=_colour(upper), bgcolor=None if lower == _IS_NOTHING else _colour(lower))


class _Coloured:
    """Half blocks: a cell is a square of ``zoom`` columns and as many halves of a line."""

    def zoom(self, num_queries: int, num_keys: int, room: int) -> int:
        return next((by for by in (4, 2) if num_keys * by <= room and num_queries * by / 2 <= _LINES), 1)

    def lines(self, levels: NDArray[Any], zoom: int) -> list[tuple[str, Text]]:
        halves = np.repeat(levels, zoom, axis=0)
        if len(halves) % 2:
            halves = np.vstack([halves, np.full_like(halves[:1], _IS_NOTHING)])
        made = []
        for upper in range(0, len(halves), 2):
            text = Text()
            for pair in zip(halves[upper].tolist(), halves[upper + 1].tolist(), strict=True):
                text.append("▀" * zoom, _style(*pair))
            query, rest = divmod(upper, zoom)
            # Of two queries in a line the upper one, and every tenth is enough.
            numbered = rest == 0 if zoom > 1 else query % 10 == 0
            made.append((str(query) if numbered else "", text))
        return made

    def legend(self, largest: float, *, has_empty: bool, has_bad: bool) -> Text:
        text = Text("weight 0 ")
        for level in range(0, _LEVELS + 1, 4):
            text.append("█", Style(color=_colour(level)))
        text.append(f" {largest:.4g}")
        if has_empty:
            text.append("   ").append("██", Style(color=_EMPTY)).append(" empty row")
        if has_bad:
            text.append("   ").append("██", Style(color=_NOT_FINITE)).append(" not finite")
        return text


@dataclass(frozen=True, slots=True)
class _Signs:
    ramp: str
    empty: str
    bad: str


_BLOCKS, _ASCII = _Signs(" ░▒▓█", "×", "?"), _Signs(" .:-=+*#@", "x", "?")


class _Shaded:
    """Without colours: a line for each query, a cell ``zoom`` signs wide."""

    def __init__(self, signs: _Signs) -> None:
        self._signs = signs

    def zoom(self, num_queries: int, num_keys: int, room: int) -> int:
        return 2 if num_keys * 2 <= room else 1

    def lines(self, levels: NDArray[Any], zoom: int) -> list[tuple[str, Text]]:
        step = 1 if len(levels) <= _LINES else 10
        return [
            (str(query) if query % step == 0 else "", Text("".join(self._sign(level) * zoom for level in row)))
            for query, row in enumerate(levels.tolist())
        ]

    def legend(self, largest: float, *, has_empty: bool, has_bad: bool) -> Text:
        text = f"weight 0 [{self._signs.ramp}] {largest:.4g}"
        text += f"   {self._signs.empty} empty row" * has_empty + f"   {self._signs.bad} not finite" * has_bad
        return Text(text)

    def _sign(self, level: int) -> str:
        if level < 0:
            return self._signs.empty if level == _IS_EMPTY else self._signs.bad
        return self._signs.ramp[math.ceil(level / _LEVELS * (len(self._signs.ramp) - 1))]
