"""Attention weights as a picture: which panels there are, what is marked in them, and what stands at their axes.

matplotlib is imported when a picture is made, and never its pyplot: a figure belongs to who asked for it alone.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

MAX_PANELS = 64
"""More than these nobody could read, and a file of them would take gigabytes to make."""
FORMS = (".png", ".svg", ".pdf")
"""Endings of files, in small letters or capitals."""
MISSING = "pictures need matplotlib, which is not installed: pip install 'attn[plot]'"
Tokens = Sequence[str] | tuple[Sequence[str], Sequence[str]]

_DPI = 150
_CELL_IN, _TICK_IN, _LETTER_IN = 0.24, 0.16, 0.085
_PANEL_IN, _LARGEST_WITH_TOKENS_IN = (2.6, 4.2), 8.0
_MAX_WIDTH_IN, _MAX_HEIGHT_IN = 24.0, 40.0
_TOKEN_CHARACTERS = 16
_EMPTY, _NOT_FINITE = "0.88", "#d62728"


def plot(
    answer: Any,
    *,
    heads: Sequence[int] | None = None,
    tokens: Tokens | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draw weights, one panel for each item and head, all in one scale of colours from 0 to the largest of them.

    ``answer`` has ``weights`` among its outputs, as an ``Answer`` or a captured call may, or is the weights: ``[T,S]``,
    ``[H,T,S]`` or ``[B,H,T,S]``, numpy, torch or nested lists. ``heads`` chooses some of H; heads, queries and keys are
    numbered as they stand in the weights. ``tokens`` stand at the axes, as many as can be read: one text for each where
    queries and keys are the same, or a pair, those of the queries and those of the keys. ``path``: a file to write too,
    in the form that its ending names (.png, .svg, .pdf). Signs that the font lacks are boxes, and matplotlib warns of
    them: ``rcParams["font.family"]`` takes a list of fonts. Rows of nothing but zeros, as those that may attend no key
    have, are hatched; what is not finite is red.

    Opens no window and leaves matplotlib's state as it is. Raises: ValueError for weights, heads or tokens that do not
    go together, more than 64 panels, or another ending; OSError where the file cannot be written; ModuleNotFoundError
    where matplotlib is missing.
    """
    if path is not None and not os.fspath(path).lower().endswith(FORMS):
        raise ValueError(f"path ends in {', '.join(FORMS)}, not {os.fspath(path)!r}")
    given = _numbers(answer.weights if hasattr(answer, "outputs") else answer)
    weights, chosen = _chosen(given, heads)
    num_items, num_heads, num_queries, num_keys = weights.shape
    labels = _labels(tokens, num_queries, num_keys)
    try:
        from matplotlib import colormaps
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(MISSING, name="matplotlib") from None

    finite = weights[np.isfinite(weights)]
    largest, smallest = (float(finite.max()), min(float(finite.min()), 0.0)) if finite.size else (1.0, 0.0)
    scale = Normalize(smallest, largest if largest > smallest else smallest + 1.0)
    colours = colormaps["viridis"].with_extremes(bad=_NOT_FINITE)
    most_columns = 4 if _aspect(weights) == "equal" or num_queries > num_keys else 1
    columns = num_heads if num_items > 1 and num_heads <= 2 * most_columns else min(num_items * num_heads, most_columns)
    rows = math.ceil(num_items * num_heads / columns)
    width, height = _panel_size(num_queries, num_keys, has_tokens=labels is not None)
    # Beside each panel its axes, and at the right end of the figure the scale of colours.
    beside, below = [max(map(len, texts)) * _LETTER_IN for texts in labels] if labels else (0.2, 0.2)
    whole = (columns * (width + beside + 0.5) + 0.9, rows * (height + below + 0.7) + 0.4)
    shrink = min(1.0, _MAX_WIDTH_IN / whole[0], _MAX_HEIGHT_IN / whole[1])
    figure = Figure(figsize=(whole[0] * shrink, whole[1] * shrink), dpi=_DPI, layout="compressed")
    grid = figure.subplots(rows, columns, squeeze=False)
    panels: list[Axes] = list(grid.flat)
    for unused in panels[num_items * num_heads :]:
        unused.remove()
    panels = panels[: num_items * num_heads]
    for index, axes in enumerate(panels):
        item, head = divmod(index, num_heads)
        matrix = weights[item, head]
        image = axes.imshow(
            np.ma.masked_invalid(matrix), cmap=colours, norm=scale, aspect=_aspect(matrix), interpolation="auto"
        )
        for start, end in empty_runs(matrix):
            axes.axhspan(start - 0.5, end - 0.5, facecolor=_EMPTY, edgecolor="0.55", hatch="////", linewidth=0)
        axes.set_title(_title(item, chosen[head], num_items, given.ndim), fontsize=10)
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        _label(axes.yaxis, num_queries, height * shrink, labels and labels[0])
        _label(axes.xaxis, num_keys, width * shrink, labels and labels[1])
        if labels:
            axes.tick_params(axis="x", labelrotation=90)
    figure.colorbar(image, ax=panels, label="weight", pad=0.02, aspect=max(6.0, whole[1] / 0.25))
    marks = []
    if any(empty_runs(weights[item, head]) for item in range(num_items) for head in range(num_heads)):
        marks.append(Patch(facecolor=_EMPTY, edgecolor="0.55", hatch="////", linewidth=0, label="empty row"))
    if finite.size < weights.size:
        marks.append(Patch(facecolor=_NOT_FINITE, label="not finite"))
    if marks:
        figure.legend(handles=marks, loc="outside lower left", ncols=len(marks), frameon=False)
    if path is not None:
        figure.savefig(path)
    return figure


def empty_runs(matrix: NDArray[Any]) -> list[tuple[int, int]]:
    """The rows of ``[T,S]`` that are 0 throughout, as half-open ranges."""
    empty = ~matrix.any(axis=-1)
    edges = np.flatnonzero(np.diff(empty.astype(np.int8), prepend=0, append=0))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _numbers(weights: Any) -> NDArray[Any]:
    # A tensor of torch, without torch: on any device, of bfloat16 too, which numpy has not.
    if hasattr(weights, "detach"):
        weights = weights.detach().cpu() if weights.is_complex() else weights.detach().cpu().double()
    try:
        numbers = np.asarray(weights)
        if np.iscomplexobj(numbers):
            raise ValueError("complex")
        numbers = numbers.astype(np.float64, copy=False)
    except (TypeError, ValueError):
        raise ValueError("weights are real numbers in nested lists of even lengths, or an array of them") from None
    if not 2 <= numbers.ndim <= 4:
        raise ValueError(f"weights are [T,S], [H,T,S] or [B,H,T,S], not {list(numbers.shape)}")
    if not numbers.size:
        raise ValueError(f"weights of shape {list(numbers.shape)} have nothing to draw")
    return numbers


def _chosen(weights: NDArray[Any], heads: Sequence[int] | None) -> tuple[NDArray[Any], list[int]]:
    """The weights as ``[B,H,T,S]``, and which heads these are. Raises: ValueError."""
    whole = weights.reshape((1,) * (4 - weights.ndim) + weights.shape)
    num_items, num_heads = whole.shape[:2]
    chosen = list(range(num_heads)) if heads is None else _whole_numbers(heads)
    if not chosen:
        raise ValueError("heads names no head to draw")
    beyond = [head for head in chosen if not 0 <= head < num_heads]
    if beyond:
        raise ValueError(f"heads are 0 to {num_heads - 1} here, not {', '.join(map(str, beyond))}")
    if num_items * len(chosen) > MAX_PANELS:
        raise ValueError(
            f"items times heads, {num_items} x {len(chosen)}, are more than {MAX_PANELS} panels: choose by heads=[...] "
            "or give the weights of fewer items"
        )
    return whole[:, chosen], chosen


def _whole_numbers(heads: Sequence[int]) -> list[int]:
    try:
        # True and False, as in a mask of heads, would be read as heads 1 and 0.
        if not any(isinstance(head, bool | np.bool_) for head in heads):
            return [operator.index(head) for head in heads]
    except TypeError:
        pass
    raise ValueError(f"heads is a list of whole numbers, as in heads=[0, 3], not {heads!r}")


def _labels(tokens: Tokens | None, num_queries: int, num_keys: int) -> tuple[list[str], list[str]] | None:
    if tokens is None:
        return None
    if isinstance(tokens, str):
        raise ValueError("tokens is a list with one text for each token, not one text")
    given: list[Any] = list(tokens)
    alike = _are_texts(given)
    if not alike and (len(given) != 2 or isinstance(given[0], str) or not all(map(_are_texts, given))):
        raise ValueError("tokens is one list of texts, or a pair of them: those of the queries, those of the keys")
    pair = [given, given] if alike else given
    for side, texts, expected in zip(("queries", "keys"), pair, (num_queries, num_keys), strict=True):
        if len(texts) != expected:
            more = "; a pair of lists gives queries and keys each their own" * alike
            raise ValueError(f"there are {expected} {side}, and {len(texts)} tokens{more}")
    return [_readable(token) for token in pair[0]], [_readable(token) for token in pair[1]]


def _are_texts(texts: Any) -> bool:
    """Whether it is a list of texts, or an array of them, or one text, which is a list of its signs."""
    return isinstance(texts, Sequence | np.ndarray) and all(isinstance(text, str) for text in texts)


def _readable(token: str) -> str:
    """One line of it, at most 16 characters; spaces at its ends, which many tokenizers mean, are drawn."""
    shown = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in token)
    inner = shown.strip(" ")
    left = len(shown) - len(shown.lstrip(" "))
    shown = "␣" * left + inner + "␣" * (len(shown) - left - len(inner))
    return shown if len(shown) <= _TOKEN_CHARACTERS else shown[: _TOKEN_CHARACTERS - 1] + "…"


def _panel_size(num_queries: int, num_keys: int, *, has_tokens: bool) -> tuple[float, float]:
    """Inches: one size for small matrices and one for long ones, where tokens get the room to be read."""
    least, most = _PANEL_IN
    if has_tokens or num_keys > 4 * num_queries:
        most = _LARGEST_WITH_TOKENS_IN
    width = min(max(num_keys * _CELL_IN, least), most)
    height = min(max(num_queries * _CELL_IN, least if 4 * num_queries >= num_keys else 0.8), most)
    return width, height


def _aspect(matrix: NDArray[Any]) -> Any:
    num_queries, num_keys = matrix.shape[-2:]
    return "equal" if num_keys <= 4 * num_queries and num_queries <= 4 * num_keys else "auto"


def _title(item: int, head: int, num_items: int, rank: int) -> str:
    if rank == 2:
        return "weights"
    return f"item {item}, head {head}" if num_items > 1 else f"head {head}"


def _label(axis: Axis, length: int, inches: float, texts: Sequence[str] | None) -> None:
    """A tick at every, every second, fifth, tenth ... place, as many as can be read."""
    room = max(1, int(inches / (_TICK_IN if texts else 2 * _TICK_IN)))
    places = list(range(0, length, step_of(length, room)))
    axis.set_ticks(places, labels=[texts[place] if texts else str(place) for place in places])
    for text in axis.get_ticklabels():
        text.set_fontsize(8)
        # A token may be "$x$", and is not a formula.
        text.set_parse_math(False)


def step_of(length: int, room: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... by which no more than ``room`` of ``length`` places are numbered."""
    power = 1
    while True:
        for step in (power, 2 * power, 5 * power):
            if math.ceil(length / step) <= max(1, room):
                return step
        power *= 10
