"""The report as a file: what is in it, and that it needs nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from service.load.comparison import compare
from service.load.digits import count, milliseconds, percentile_ms, scaled
from service.load.page import page
from service.load.results import Results
from tests.support.load_results import make_results

HOSTILE = '</script><img src="http://evil.test/x" onerror=alert(1)>&{{plotly}}'
VOID = {"meta", "img", "br"}


class Read(HTMLParser):
    """A page as a browser takes it apart: text, scripts, tables, whatever loads something."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.headings: list[tuple[int, str]] = []
        self.sources: list[str] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self.rows: list[list[str]] = []
        self.words = ""
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if re.fullmatch(r"h\d", tag):
            self.headings.append((int(tag[1]), ""))
        if tag not in VOID:
            self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "script":
            if attributes.get("type") == "application/json":
                self.figures[str(attributes["id"])] = json.loads(data)
            return
        self.words += data
        inside = {name for name, _ in self._open}
        if inside & {"td", "th"}:
            self.rows[-1][-1] += data
        if inside & {"h1", "h2", "h3"}:
            level, said = self.headings[-1]
            self.headings[-1] = (level, said + data)


@cache
def whole() -> tuple[Results, Results, str]:
    results = make_results(
        forms=("safetensors", "json"),
        rates=(50, 400),
        concurrencies=(8,),
        num_failed=5,
        shapes=("a", "b"),
        late=("slow",),
    )
    before = make_results(forms=("json",), rates=(50, 400), slowness=1.6)
    return results, before, page(results, before)


def read(results: Results, before: Results | None = None) -> Read:
    return Read(page(results, before))


def test_nothing_is_loaded_from_anywhere() -> None:
    text = whole()[2]
    assert Read(text).sources == []
    own = text.replace(text[text.index("<script>") : text.index("</script>\n<script>")], "")
    assert not re.search(r"\b(?:src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|import\(", own)
    assert "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:" in own
    assert "Plotly.newPlot" in own and "plotly.js v" in text


def test_every_number_of_a_step_stands_in_one_row() -> None:
    results, _, text = whole()
    rows = Read(text).rows
    for step in results.steps:
        expected = [
            *(count(number) for number in (step.planned, step.answered, step.failed)),
            *(scaled(number) for number in (step.requests_s, step.sent_mb_s, step.received_mb_s)),
            *(milliseconds(percentile_ms(step.latency, at)) for at in (50, 90, 99, 99.9)),
            milliseconds(step.latency.max_ms),
        ]
        assert any(row[0].startswith(step.form + step.level) and row[1:12] == expected for row in rows), step.name


def test_every_line_of_a_chart_has_its_numbers_in_a_table_behind_it() -> None:
    results, _, text = whole()
    parsed = Read(text)
    charts = [name.removesuffix("-figure") for name in parsed.figures]
    assert len(charts) == len(set(charts)) == 2 + 4 + 6 + 6
    for name in charts:
        after = text[text.index(f'id="{name}-figure"') :]
        is_folded = after[after.index("</figure>") :].startswith("</figure>\n<details>")
        # That of the comparison stands before it, unfolded.
        assert is_folded or name == "changes"
    cells = {cell for row in parsed.rows for cell in row}
    for step in results.steps:
        for moment in step.timeline:
            assert milliseconds(moment.p99_ms) in cells
        for stage in step.stages.values():
            assert {milliseconds(stage.mean_ms), milliseconds(stage.p99_ms)} <= cells
        for shape in step.shapes.values():
            assert milliseconds(shape.p50_ms) in cells


def test_the_charts_draw_the_numbers_of_the_results() -> None:
    results, _, text = whole()
    figures = Read(text).figures
    drawn = {trace["name"]: trace for trace in figures["latency-open-figure"]["data"]}
    steps = [step for step in results.steps if step.form == "json" and step.loop == "open"]
    assert drawn["json p99"]["x"] == [step.rate_s for step in steps]
    assert drawn["json p99"]["y"] == [step.latency.p99_ms for step in steps]
    (closed,) = (step for step in results.steps if step.form == "json" and step.loop == "closed")
    assert {trace["name"]: trace["x"] for trace in figures["latency-closed-figure"]["data"]}["json p50"] == [
        closed.requests_s
    ]
    over_time = {trace["name"]: trace for trace in figures["time-0-figure"]["data"]}
    first = results.steps[0]
    assert over_time["sent"]["y"][:-1] == [moment.sent / first.bin_s for moment in first.timeline]
    assert over_time["p99"]["y"] == [moment.p99_ms for moment in first.timeline]
    solid, dashed, marks = figures["curve-0-figure"]["data"][:3]
    assert solid["y"][-1] == first.latency.curve([100.0])[0]
    assert solid["line"]["dash"] == "solid" and dashed["line"]["dash"] == "dash"
    assert marks["y"] == first.latency.curve([0, 50, 90, 99])


def test_the_time_that_does_not_count_is_shaded() -> None:
    layout = Read(whole()[2]).figures["time-0-figure"]["layout"]
    spans = {
        name["text"]: (shade["x0"], shade["x1"])
        for name, shade in zip(layout["annotations"], layout["shapes"], strict=True)
    }
    assert spans == {"ramp": (0.0, 1.0), "warm-up": (1.0, 2.0), "tail": (10.0, 11.0)}


def test_a_log_axis_says_that_it_is_one() -> None:
    text = whole()[2]
    axes = [
        axis
        for figure in Read(text).figures.values()
        for name, axis in figure["layout"].items()
        if name[1:].startswith("axis")
    ]
    assert any(axis.get("type") == "log" for axis in axes) and not all(axis.get("type") == "log" for axis in axes)
    for axis in axes:
        title = axis.get("title", {}).get("text", "")
        assert ("log scale" in title) is (axis.get("type") == "log")
        # What has no title lists names.
        assert title or axis["type"] == "category"


def test_a_percentile_that_the_answers_do_not_carry_is_a_dash_and_not_drawn() -> None:
    parsed = read(make_results(rates=(50,), num_answers=99))
    row = next(row for row in parsed.rows if row[0].startswith("safetensors"))
    assert row[9:11] == ["–", "–"] and row[8] != "–"
    drawn = {trace["name"]: trace["y"] for trace in parsed.figures["latency-open-figure"]["data"]}
    assert len(drawn["safetensors p50"]) == 1 and drawn["safetensors p99"] == drawn["safetensors p99.9"] == []
    assert "p99.9 takes 1,000" in parsed.words


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"late": ("sends came 9 ms late",)}, ("sends came 9 ms late", "These figures are not the service's alone")),
        ({"wrong": ("context is off",)}, ("context is off", "Wrong answers among the 32")),
        ({"same_bits": False}, ("differ in their bits", "32, bits differ")),
        ({"was_cut": True}, ("The run was cut short",)),
    ],
)
def test_a_banner_says_what_spoils_the_figures_and_stands_only_then(
    given: dict[str, Any], said: tuple[str, ...]
) -> None:
    spoilt, clean = read(make_results(rates=(100,), **given)), read(make_results(rates=(100,)))
    for sentence in said:
        assert sentence in spoilt.words and sentence not in clean.words
    assert (2, "Before you read the figures") in spoilt.headings
    assert (2, "Before you read the figures") not in clean.headings


def test_failed_requests_are_said_to_be_in_no_percentile() -> None:
    assert "Failed requests are in no percentile" in read(make_results(num_failed=1)).words
    assert "Failed requests are in no percentile" not in read(make_results()).words


def test_a_closed_loop_is_said_to_hide_stalls() -> None:
    assert "In a closed loop a stall" in read(make_results(rates=(), concurrencies=(2,))).words
    assert "In a closed loop a stall" not in read(make_results()).words


def named(text: str) -> Read:
    """The report of a run that has a text wherever a text can be."""
    run = make_results(
        forms=(text,),
        rates=(100,),
        late=(text,),
        wrong=(text,),
        shapes=(text, "b"),
        command=text,
        url=text,
        options={text: True},
        service={text: text},
        client={text: text},
        written=text,
    )
    first = run.steps[0]
    odd = replace(first, errors={text: 1}, stages={text: first.latency})
    other = replace(run, url=text * 2, options={}, client={}, service={})
    return read(replace(run, steps=(odd,)), other)


def test_no_text_of_results_becomes_a_tag() -> None:
    hostile, harmless = named(HOSTILE), named("harmless")
    assert hostile.tags == harmless.tags
    assert hostile.sources == []
    assert hostile.words.count(HOSTILE) == harmless.words.count("harmless")
    drawn = json.dumps(hostile.figures)
    assert "&lt;/script&gt;&lt;img" in drawn
    # Plotly reads tags too: there are none but ours.
    assert set(re.findall(r"<[^>]*>?", drawn)) == {"<br>", "<extra>", "</extra>"}


def test_headings_step_down_one_at_a_time() -> None:
    levels = [level for level, _ in Read(whole()[2]).headings]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_a_comparison_stands_on_the_page_of_the_run_that_has_one() -> None:
    results, before, text = whole()
    parsed = Read(text)
    comparison = compare(results, before)
    assert comparison.caution in parsed.words
    for pair in comparison.pairs:
        p50 = pair.changes[1]
        cell = f"{milliseconds(p50.old)} → {milliseconds(p50.new)}× {p50.ratio:.2f}, {p50.verdict}"
        assert any(cell in row for row in parsed.rows)
    assert f"Only in this run: {'; '.join(comparison.only_new)}." in parsed.words
    assert "Against the earlier run" not in read(results).words


@pytest.mark.parametrize(
    "results",
    [
        make_results(num_answers=0, num_failed=9),
        make_results(num_answers=1),
        make_results(rates=(), was_cut=True, ceilings=()),
        make_results(rates=(), concurrencies=(1,), ceilings=()),
    ],
    ids=["no answers", "one answer", "no steps", "closed loop alone"],
)
def test_a_run_that_found_little_has_a_page_too(results: Results) -> None:
    assert (1, f"Load test of {results.url}") in read(results, results).headings


def test_steps_alike_are_told_apart() -> None:
    headings = [said for _, said in read(make_results(rates=(100, 100))).headings]
    assert headings.count("safetensors, open, 100/s, poisson") == 1
    assert "safetensors, open, 100/s, poisson (2)" in headings
