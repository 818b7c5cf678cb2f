"""The charts of the report as what Plotly draws: plain JSON.

A colour is the name of a CSS variable of the page, which has one value in the light and one in the dark. Texts of
results are escaped, since Plotly reads tags.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import cycle, groupby
from typing import Any

from service.load.comparison import Pair
from service.load.digits import is_carried, max_ms, percentile_ms, told_apart
from service.load.results import Distribution, Results, StepResult

Figure = dict[str, Any]
Trace = dict[str, Any]
FORM_COLOURS = ("--c0", "--c1", "--c2", "--c3", "--c4", "--c5")
RAMP = ("--r0", "--r1", "--r2", "--r3", "--r4", "--r5")
"""From the least load to the most."""
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
_LINES = {50.0: ("solid", "circle"), 99.0: ("dash", "square"), 99.9: ("dot", "diamond")}
_RATES = (("sent", "--muted", "dot"), ("answered", "--c0", "solid"), ("failed", "--fault", "solid"))
_DURATIONS = (("p50", "--c2", "circle"), ("p99", "--c1", "square"), ("max", "--c3", "diamond"))
_CURVE_TICKS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99)
_LEGEND = {"orientation": "h", "traceorder": "normal"}
_LOG_FROM = 20
"""A span of more than so many times asks for a log axis."""
_MEASURED = "measured"


def plain(text: str) -> str:
    return html.escape(text, quote=False)


def labels_of(steps: Sequence[StepResult]) -> list[str]:
    """Each step in two lines, no two alike."""
    return told_apart([f"{plain(step.form)}<br>{plain(step.level)}" for step in steps])


def latency_by_rate(steps: Sequence[StepResult], *, loop: str) -> Figure:
    """p50, p99 and p99.9 of one loop's steps, one colour a form."""
    traces: list[Trace] = []
    for colour, (form, of_form) in zip(cycle(FORM_COLOURS), by_form(steps).items(), strict=False):
        for percentile, (dash, symbol) in _LINES.items():
            points = [
                (x, y, step.level)
                for step in of_form
                if (x := _load(step, loop)) is not None and (y := percentile_ms(step.latency, percentile)) is not None
            ]
            points.sort(key=lambda point: point[0])
            traces.append(
                {
                    **_line(f"{plain(form)} p{percentile:g}", colour, dash),
                    "mode": "lines+markers",
                    "cliponaxis": False,
                    "x": [x for x, _, _ in points],
                    "y": [y for _, y, _ in points],
                    "text": [plain(level) for _, _, level in points],
                    "marker": {"symbol": symbol, "size": 8},
                    "hovertemplate": "%{text}: %{y:,.5~r} ms<extra>%{fullData.name}</extra>",
                }
            )
    marked = _late_marks(steps, loop)
    x_title = "requests planned per second" if loop == "open" else "requests answered per second"
    return {
        "data": [*traces, *([marked] if marked["x"] else [])],
        "layout": {
            **_layout(420),
            "xaxis": _from_zero(x_title, [x for trace in traces for x in trace["x"]]),
            "yaxis": _milliseconds_axis("latency", [y for trace in traces for y in trace["y"]]),
        },
    }


def _load(step: StepResult, loop: str) -> float | None:
    return step.rate_s if loop == "open" else step.requests_s


def _late_marks(steps: Sequence[StepResult], loop: str) -> Trace:
    """A ring around each point whose step is not the service's alone."""
    points = [
        (_load(step, loop), y)
        for step in steps
        if step.late
        for percentile in _LINES
        if (y := percentile_ms(step.latency, percentile)) is not None
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "not the service's alone",
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "marker": {"symbol": "circle-open", "size": 16, "color": "--fault", "line": {"width": 2, "color": "--fault"}},
        "hoverinfo": "skip",
    }


def percentile_curves(steps: Sequence[StepResult], *, least_ms: float, most_ms: float) -> Figure:
    """Latency of one form's and loop's steps, from the least load on; in an open loop service time beside it."""
    traces: list[Trace] = []
    longest = 2.0
    for index, (colour, step) in enumerate(zip(_ramp(len(steps)), steps, strict=True)):
        line, marks = _curve_points(step.latency.count)
        longest = max(longest, line[-1][0])
        drawn = [("solid", step.latency), *([("dash", step.service_time)] if step.loop == "open" else [])]
        for dash, durations in drawn:
            curve = {**_line(plain(step.level), colour, dash), **_curve(durations, line)}
            traces.append({**curve, "mode": "lines", "showlegend": False, "legendgroup": str(index)})
        symbol = {"symbol": _SYMBOLS[index % len(_SYMBOLS)], "size": 8, "color": colour}
        marked = {"type": "scatter", "name": plain(step.level), **_curve(step.latency, marks)}
        traces.append({**marked, "mode": "markers", "marker": symbol, "legendgroup": str(index)})
    ticks = [tick for tick in _CURVE_TICKS if _place(tick) <= longest + 0.15]
    return {
        "data": traces,
        "layout": {
            **_layout(400),
            "xaxis": {
                **_axis("percentile of answers, %"),
                "tickvals": [_place(tick) for tick in ticks],
                "ticktext": [f"{tick:g}" for tick in ticks],
                "range": [-0.05, longest + 0.1],
            },
            "yaxis": _milliseconds_axis("latency", [least_ms, most_ms]),
        },
    }


def _place(percentile: float) -> float:
    return -math.log10(1 - percentile / 100)


def _curve_points(num_answers: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Places on the axis and their percentiles: twentieths of a decade up to the slowest answer; and the ticks."""
    end = math.log10(num_answers)
    ticks = [(_place(tick), tick) for tick in _CURVE_TICKS if is_carried(num_answers, tick)]
    steps = [(place / 20, 100 * (1 - 10 ** (-place / 20))) for place in range(1, math.ceil(end * 20))]
    return sorted([*ticks, *steps, (end, 100.0)]), ticks


def _curve(durations: Distribution, points: list[tuple[float, float]]) -> Trace:
    percentiles = [percentile for _, percentile in points]
    return {
        "x": [place for place, _ in points],
        "y": durations.curve(percentiles),
        "text": [f"p{percentile:.6g}" for percentile in percentiles],
        "hovertemplate": "%{text}: %{y:,.5~r} ms<extra>%{fullData.name}</extra>",
    }


def timeline(step: StepResult) -> Figure:
    """Requests a second above, latency below, over the whole step."""
    moments = step.timeline
    starts = [moment.at_s for moment in moments]
    end = starts[-1] + step.bin_s if starts else 0.0
    rates: list[Trace] = [
        {
            **_line(name, colour, dash),
            "mode": "lines",
            "x": [*starts, end],
            "y": _held([getattr(moment, name) / step.bin_s for moment in moments]),
            "hovertemplate": "%{y:,.5~r}/s<extra>%{fullData.name}</extra>",
        }
        for name, colour, dash in _RATES
        if name != "failed" or any(moment.failed for moment in moments)
    ]
    for rate in rates:
        rate["line"]["shape"] = "hv"
    latencies: list[Trace] = [
        {
            **_line(name, colour, "solid"),
            "mode": "lines+markers",
            "marker": {"symbol": symbol, "size": 4},
            "x": [at + step.bin_s / 2 for at in starts],
            "y": [getattr(moment, f"{name}_ms") for moment in moments],
            "yaxis": "y2",
            "hovertemplate": "%{y:,.5~r} ms<extra>%{fullData.name}</extra>",
        }
        for name, colour, symbol in _DURATIONS
    ]
    known = [y for trace in latencies for y in trace["y"] if y is not None]
    shades, names = _phases(step)
    return {
        "data": [*rates, *latencies],
        "layout": {
            **_layout(440),
            "hovermode": "x unified",
            "xaxis": {**_axis("seconds since the first planned send"), "range": [0, end], "anchor": "y2"},
            "yaxis": {**_axis("requests/s"), "rangemode": "tozero", "domain": [0.56, 1]},
            "yaxis2": {**_milliseconds_axis("latency", known), "domain": [0, 0.46]},
            "shapes": shades,
            "annotations": names,
        },
    }


def _held(values: list[float]) -> list[float]:
    """The last value once more, for the end of its bin."""
    return [*values, *values[-1:]]


def _phases(step: StepResult) -> tuple[list[Trace], list[Trace]]:
    """Shades behind the time that does not count, and their names."""
    shades, names = [], []
    for index, (phase, group) in enumerate(groupby(step.timeline, key=lambda moment: moment.phase)):
        moments = list(group)
        if phase == _MEASURED:
            continue
        left, right = moments[0].at_s, moments[-1].at_s + step.bin_s
        shade = {"type": "rect", "xref": "x", "yref": "paper", "x0": left, "x1": right, "y0": 0, "y1": 1}
        shades.append({**shade, "layer": "below", "line": {"width": 0}, "fillcolor": "--shade"})
        # Neighbours stand at two heights: on a narrow screen their names would run into each other.
        place = {"x": left, "xanchor": "left", "xref": "x", "y": 0.55 - 0.04 * (index % 2), "yref": "paper"}
        name = {"text": plain(phase), "showarrow": False, "font": {"size": 10, "color": "--muted"}, "yanchor": "top"}
        names.append({**place, **name})
    return shades, names


def stage_bars(steps: Sequence[StepResult], stages: Sequence[str]) -> Figure:
    """Mean time of each stage, stacked to the mean time from the send to the whole answer."""
    labels = labels_of(steps)
    bars: list[Trace] = [
        _bar(
            plain(stage),
            colour,
            labels,
            [step.stages[stage].mean_ms if stage in step.stages else 0.0 for step in steps],
        )
        for colour, stage in zip(cycle(FORM_COLOURS), stages, strict=False)
    ]
    bars.append(_bar("outside the service", "--rest", labels, [outside_ms(step) for step in steps]))
    for bar in bars:
        bar["hovertemplate"] = "%{x:,.5~r} ms<extra>%{fullData.name}</extra>"
    return _bars(bars, labels, "mean time, ms")


def outside_ms(step: StepResult) -> float:
    """What of the mean time between send and answer is in no stage: the network and the client."""
    return max(step.service_time.mean_ms - sum(stage.mean_ms for stage in step.stages.values()), 0.0)


def error_bars(steps: Sequence[StepResult]) -> Figure:
    kinds = list(dict.fromkeys(kind for step in steps for kind in step.errors))
    labels = labels_of(steps)
    bars = [
        _bar(plain(kind), colour, labels, [step.errors.get(kind, 0) for step in steps])
        for colour, kind in zip(cycle(FORM_COLOURS), kinds, strict=False)
    ]
    return _bars(bars, labels, "failed requests")


def lateness_dots(steps: Sequence[StepResult]) -> Figure:
    labels = labels_of(steps)
    found: dict[str, list[float | None]] = {
        "p50": [percentile_ms(step.lateness, 50) for step in steps],
        "p99": [percentile_ms(step.lateness, 99) for step in steps],
        "max": [max_ms(step.lateness) for step in steps],
    }
    traces = [_dots(name, colour, symbol, found[name], labels) for name, colour, symbol in _DURATIONS]
    return _dot_figure(traces, labels, "lateness")


def shape_dots(steps: Sequence[StepResult]) -> Figure:
    """p50 and p99 of each shape, one colour a shape."""
    shapes = list(dict.fromkeys(shape for step in steps for shape in step.shapes))
    labels = labels_of(steps)
    traces = [
        _dots(f"{plain(shape)} p{percentile:g}", colour, symbol, _of_shape(steps, shape, percentile), labels)
        for colour, shape in zip(cycle(FORM_COLOURS), shapes, strict=False)
        for percentile, symbol in ((50.0, "circle"), (99.0, "square-open"))
    ]
    return _dot_figure(traces, labels, "latency")


def _of_shape(steps: Sequence[StepResult], shape: str, percentile: float) -> list[float | None]:
    found = (step.shapes.get(shape) for step in steps)
    return [percentile_ms(durations, percentile) if durations else None for durations in found]


def change_dots(pairs: Sequence[Pair]) -> Figure:
    """p50 and p99 of both runs: hollow the earlier one, filled this one."""
    labels = [plain(pair.name).replace(", ", "<br>", 1) for pair in pairs]
    traces = []
    for name, colour, symbol in _DURATIONS[:2]:
        changes = [next(change for change in pair.changes if change.measure == f"{name}_ms") for pair in pairs]
        traces.append(_dots(f"{name} earlier", colour, f"{symbol}-open", [change.old for change in changes], labels))
        traces.append(_dots(f"{name} now", colour, symbol, [change.new for change in changes], labels))
    return _dot_figure(traces, labels, "latency")


def ceiling_bars(results: Results) -> Figure:
    labels = told_apart([f"{plain(one.form)}<br>{one.concurrency} at once" for one in results.ceilings])
    bar = _bar("echo", "--c0", labels, [ceiling.requests_s for ceiling in results.ceilings])
    figure = _bars([bar], labels, "requests/s")
    figure["layout"]["showlegend"] = False
    return figure


def by_form_and_loop(steps: Sequence[StepResult]) -> dict[tuple[str, str], list[StepResult]]:
    """From the least load to the most."""
    found: dict[tuple[str, str], list[StepResult]] = {}
    for step in steps:
        found.setdefault((step.form, step.loop), []).append(step)
    return {key: sorted(alike, key=lambda step: step.rate_s or step.concurrency or 0) for key, alike in found.items()}


def by_form(steps: Sequence[StepResult]) -> dict[str, list[StepResult]]:
    found: dict[str, list[StepResult]] = {}
    for step in steps:
        found.setdefault(step.form, []).append(step)
    return found


def _ramp(number: int) -> list[str]:
    """So many colours of the ramp, as far apart as can be."""
    last = len(RAMP) - 1
    return [RAMP[round(index * last / max(number - 1, 1))] for index in range(number)]


def _line(name: str, colour: str, dash: str) -> Trace:
    return {"type": "scatter", "name": name, "line": {"color": colour, "width": 2, "dash": dash}}


def _bar(name: str, colour: str, labels: list[str], values: Sequence[float]) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": list(values),
        "y": labels,
        "marker": {"color": colour},
        "hovertemplate": "%{x:,.5~r}<extra>%{fullData.name}</extra>",
    }


def _bars(bars: list[Trace], labels: list[str], title: str) -> Figure:
    layout = {
        **_layout(110 + 44 * len(labels)),
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": {**_axis(title), "rangemode": "tozero"},
        "yaxis": _names_axis(labels),
    }
    return {"data": bars, "layout": layout}


def _dots(name: str, colour: str, symbol: str, values: list[float | None], labels: list[str]) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "cliponaxis": False,
        "name": name,
        "x": values,
        "y": labels,
        "marker": {"color": colour, "symbol": symbol, "size": 9},
        "hovertemplate": "%{x:,.5~r} ms<extra>%{fullData.name}</extra>",
    }


def _dot_figure(traces: list[Trace], labels: list[str], title: str) -> Figure:
    known = [x for trace in traces for x in trace["x"] if x is not None]
    return {
        "data": traces,
        "layout": {
            **_layout(110 + 44 * len(labels)),
            "xaxis": _milliseconds_axis(title, known),
            "yaxis": _names_axis(labels),
        },
    }


def _layout(height: int) -> dict[str, Any]:
    return {
        "height": height,
        "autosize": True,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "--clear",
        "plot_bgcolor": "--clear",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "--text"},
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "hoverlabel": {"bgcolor": "--card", "bordercolor": "--line", "font": {"color": "--text"}},
        "hovermode": "closest",
        "showlegend": True,
    }


def _axis(title: str) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 8},
        "automargin": True,
        "gridcolor": "--grid",
        "linecolor": "--line",
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
        "tickcolor": "--line",
        "separatethousands": True,
    }


def _names_axis(labels: list[str]) -> dict[str, Any]:
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": labels,
        "range": [len(labels) - 0.5, -0.5],
        "automargin": True,
        "ticks": "",
        "linecolor": "--line",
        "showline": True,
        "showgrid": False,
    }


def _from_zero(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Linear from 0, or logarithmic where the span demands it; what is 0 has no place there and is left out."""
    known = [value for value in values if value > 0]
    if known and max(known) > _LOG_FROM * min(known):
        return _log_axis(title, min(known), max(known))
    return {**_axis(title), "range": [0, 1.08 * max(known, default=1.0)]}


def _milliseconds_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    return _from_zero(f"{title}, ms", values)


def _log_axis(title: str, least: float, most: float) -> dict[str, Any]:
    """Ticks at 1, 2 and 5 of each decade, written in full."""
    edge = 0.04 * math.log10(most / least)
    low, high = math.log10(least) - edge, math.log10(most) + edge
    decades = range(math.floor(low), math.ceil(high) + 1)
    digits = (1, 2, 5) if high - low < 2.5 else (1,)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    return {
        **_axis(f"{title} (log scale)"),
        "type": "log",
        "range": [low, high],
        "tickvals": ticks,
        "ticktext": [f"{tick:,.10g}" for tick in ticks],
    }
