"""What a hostile user did to the playground, and what it must answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from playwright.sync_api import BrowserContext, Route

from service.doors.playground_files import PLOTLY
from tests.e2e.test_playground import (
    NARROW,
    WIDE,
    Playground,
    context,
    shown,
    tab,
    tab_of,
)
from tests.support.server import RunningServer

__all__ = ["context", "shown", "tab"]

OLD = "What is shown below is the last problem that was answered."


def go(tab: Playground, state: str = "answered", **fields: str) -> None:
    """To an address that says these fields."""
    tab.page.evaluate(
        "hash => { document.documentElement.dataset.state = 'busy'; location.hash = hash }",
        urlencode({"source": "tensors"} | fields),
    )
    tab.settle(state)


def focus(tab: Playground, matrix: str, row: int, column: int) -> list[str]:
    tab.page.locator(f"[data-matrix={matrix}] td[data-row='{row}'][data-column='{column}']").focus()
    return tab.readout().splitlines()


def read(tab: Playground, **fields: str) -> dict[str, Any]:
    """What the page makes of fields: `body` and `faults`."""
    made: dict[str, Any] = tab.page.evaluate(
        """fields => import("/playground/fields.js")
            .then(({ buildRequest, DEFAULTS }) => buildRequest({ ...DEFAULTS, source: "tensors", ...fields }))""",
        fields,
    )
    return made


def test_numbers_alone_make_no_row_empty_and_no_pair_forbidden(tab: Playground) -> None:
    go(tab, query='[["-Infinity"],[1]]', key="1\n1", value="1\n2")
    assert "0 empty rows, 1 non-finite row." in tab.page.inner_text("#status")
    assert [row[3] for row in tab.numbers("#rows")] == ["no", "no"]
    assert focus(tab, "weights", 0, 0) == ["weights[0,0,0,0] = NaN", "= exp(logits − logsumexp)", "= exp(−∞ − NaN)"]
    assert focus(tab, "logits", 0, 0) == ["logits[0,0,0,0] = −∞", "= scale·scores", "= 1/√1·(−∞)"]
    assert tab.page.locator("td.forbidden, td.empty").count() == 0


def test_a_query_beyond_its_length_is_padding_and_not_empty(tab: Playground) -> None:
    go(tab, query="1\n2", query_lengths="1")
    assert "0 empty rows" in tab.page.inner_text("#status")
    assert [row[3] for row in tab.numbers("#rows")] == ["no", "padding"]
    assert tab.page.is_hidden("#empty-note")
    assert focus(tab, "context", 1, 0)[1] == "= 0: the query is padding, at or after query_lengths"


def test_the_sum_of_a_context_has_the_allowed_pairs_alone(tab: Playground) -> None:
    go(tab, query="1\n1", key="1\nNaN\n2", value="1\nNaN\n3", allow_mask="[true, false, true]")
    first, *_, last = focus(tab, "context", 0, 0)
    assert "NaN" not in first and re.fullmatch(r"= 0\.\d+·1 \+ 0\.\d+·3", last)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"query_offset": "1"}, "(0 + 1)"),
        ({"query_offset": "-1"}, "(0 + (−1))"),
        ({"causal": "lower_right"}, "(0 + 2 − 1)"),
        ({"causal": "lower_right", "key_lengths": "1"}, "(0 + 1 − 1)"),
        ({"causal": "upper_left"}, "0"),
    ],
)
def test_the_formula_says_from_which_place_alibi_measures(tab: Playground, fields: dict[str, str], place: str) -> None:
    go(tab, query="[[1]]", key="1\n2", value="1\n2", alibi_slopes="0.5", **fields)
    assert focus(tab, "logits", 0, 0)[2] == f"= 1/√1·1 − 0.5·|{place} − 0|"


def test_half_types_say_that_they_rounded(tab: Playground) -> None:
    go(tab, query="0.1\n0.3", dtype="bfloat16")
    assert focus(tab, "scores", 0, 1)[-1] == "query and key were rounded to bfloat16 first"
    go(tab, query="0.1\n0.3")
    assert "rounded" not in "".join(focus(tab, "scores", 0, 1))


@pytest.mark.parametrize(
    ("text", "tensor"),
    [
        ("[[1., 2.], [.5, -4e-1]]", [[1, 2], [0.5, -0.4]]),
        ("[[1. 2.]\n [3. 4.]]", [[1, 2], [3, 4]]),
        ("array([[1., nan],\n       [3., 4.]])", [[1, "NaN"], [3, 4]]),
        ("tensor([[1., 2.],\n        [-inf, 4.]])", [[1, 2], ["-Infinity", 4]]),
        ("torch.tensor([[1, 2]])", [[1, 2]]),
        ("[[NaN, 1], [0, Infinity]]", [["NaN", 1], [0, "Infinity"]]),
        ("[[1, 2],]", [[1, 2]]),
        ("1 2\r\n3, 4\n", [[1, 2], [3, 4]]),
        ("[[[[1]], [[2]]]]", [[[[1]], [[2]]]]),
        ('[["NaN"]]', [["NaN"]]),
    ],
)
def test_a_tensor_is_read_as_people_have_it(tab: Playground, text: str, tensor: object) -> None:
    made = read(tab, query=text)
    assert (made["faults"], made["body"]["query"]) == ([], tensor)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[1e400, 1]]", "numbers that float64 can hold"),
        ("1e400 1", "numbers that float64 can hold"),
        ("[" * 20_000 + "1" + "]" * 20_000, "at most 4 axes"),
        ("tensor([[1.]], dtype=torch.float16)", "the brackets alone; dtype is a field of its own"),
        ("[[1. 2. ... 9.]]", "all numbers; this print leaves some out"),
        ("[[a, b]]", "numbers, NaN, inf, true or false"),
        ("[[1, 2", "JSON, or a row of numbers in each line"),
        ("[1, 2]]", "JSON, or a row of numbers in each line"),
        ("[[1]] [[2]]", "JSON, or a row of numbers in each line"),
    ],
)
def test_what_is_no_tensor_is_refused_by_the_page(tab: Playground, text: str, expected: str) -> None:
    faults = read(tab, query=text)["faults"]
    assert [(fault["field"], fault["expected"]) for fault in faults] == [("query", expected)]


def test_one_number_or_one_line_is_a_list_where_a_list_is_due(tab: Playground) -> None:
    fields = {"query": "1 2", "sinks": "0.5", "key_lengths": "1 2", "query_offset": "[3]", "scale": " .5 "}
    made = read(tab, window_left="1e400", **fields)
    assert {name: made["body"][name] for name in ("sinks", "key_lengths", "query_offset", "scale", "window")} == {
        "sinks": [0.5],
        "key_lengths": [1, 2],
        "query_offset": [3],
        "scale": 0.5,
        "window": {"left": "1e400"},
    }


def test_numbers_are_shown_to_one_width_and_whole_ones_as_such(tab: Playground) -> None:
    numbers = [1, 0, -3, 0.99999994, 0.0073184, -0.5, 2.01, 123.456, 9999.7, 1e21, -1.2345e-7, "NaN", "-Infinity"]
    texts = tab.page.evaluate(
        'numbers => import("/playground/nested.js").then(({ short }) => numbers.map((one) => short(one)))', numbers
    )
    assert texts[:6] == ["1", "0", "−3", "1.000", "0.0073", "−0.5000"]
    assert texts[6:] == ["2.010", "123.5", "1.0e4", "1.0e21", "−1.2e−7", "NaN", "−∞"]


def test_a_paste_without_an_end_does_not_stop_the_page(shown: Playground) -> None:
    shown.fill("query", "[" * 20_000, state="refused")
    assert "at most 4 axes" in shown.faults("query")


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, "null", "Refused: the answer, 500, was not a JSON object"),
        (200, "<html>", "Refused: the answer, 200, was not a JSON object"),
        (200, "{}", "This page failed: "),
        (422, '{"title": "No", "errors": [{"field": "constructor", "expected": "a", "received": "b"}]}', "No\n\nconst"),
    ],
)
def test_an_answer_like_none_of_the_service_is_said_to_be_one(
    shown: Playground, status: int, body: str, said: str
) -> None:
    shown.page.route("**/v1/attention", lambda route: route.fulfill(status=status, body=body))
    shown.page.fill("#softcap", "7")
    shown.page.wait_for_selector("html[data-state=refused], html[data-state=failed]")
    assert shown.page.inner_text("#general-fault").startswith(said)
    assert OLD in shown.page.inner_text("#status")
    shown.page.unroute("**/v1/attention")


def test_after_a_refusal_that_passes_one_may_try_again_and_sees_that_the_numbers_are_old(shown: Playground) -> None:
    def drain(route: Route) -> None:
        problem = {"title": "Not ready", "detail": "draining"}
        route.fulfill(status=503, headers={"Retry-After": "3"}, body=json.dumps(problem))

    before = shown.page.evaluate("getComputedStyle(document.querySelector('#readout'), '::before').content")
    shown.page.route("**/v1/attention", drain)
    shown.fill("softcap", "7", state="refused")
    assert shown.page.inner_text("#general-fault").split("\n\n") == [
        "Not ready: draining",
        "It may be asked again in 3 s.",
    ]
    during = shown.page.evaluate("getComputedStyle(document.querySelector('#readout'), '::before').content")
    assert before == "none" and "last problem" in during
    shown.page.unroute("**/v1/attention")
    shown.page.click("#again")
    shown.settle()
    assert shown.page.is_hidden("#again") and shown.page.is_hidden("#general-fault")
    shown.fill("softcap", "0", state="refused")
    assert shown.page.is_hidden("#again")


def test_an_answer_that_is_overtaken_changes_nothing(shown: Playground) -> None:
    # An answer that no abort can stop any more.
    shown.page.evaluate("""() => {
        const real = window.fetch;
        const released = new Promise((release) => { window.release = release });
        window.asked = new Promise((asked) => {
            window.fetch = async (url, options) => {
                window.fetch = real;
                asked();
                const answer = await real(url, { ...options, signal: undefined });
                await released;
                return answer;
            };
        });
    }""")
    shown.page.fill("#softcap", "7")
    shown.page.evaluate("() => window.asked")
    shown.fill("softcap", "0.001")
    logits = shown.matrix("logits")
    shown.page.evaluate("async () => { window.release(); await fetch('/livez') }")
    assert shown.matrix("logits") == logits
    assert shown.page.get_attribute("html", "data-state") == "answered"


@pytest.mark.parametrize(
    ("fragment", "strange"),
    [
        ("tokens=a&causal=True", "causal=True"),
        ("tokens=a&dtype=int8&toks=b", "dtype=int8, toks=b"),
        ("tokens=a&constructor=1&tokens=b", "constructor=1, tokens=b"),
    ],
)
def test_what_an_address_says_in_vain_is_told(tab: Playground, fragment: str, strange: str) -> None:
    tab.page.evaluate("hash => { document.documentElement.dataset.state = 'busy'; location.hash = hash }", fragment)
    tab.settle()
    assert tab.page.inner_text("#address-note").endswith(f"and which is left out: {strange}.")
    tab.fill("tokens", "a b")
    assert tab.page.is_hidden("#address-note")


def test_an_address_entered_right_after_an_edit_is_not_written_over(tab: Playground) -> None:
    tab.fill("tokens", "a b")
    # The page writes the address a while after an edit; a busy page comes to that and to the new address at once.
    tab.page.evaluate("""() => {
        document.querySelector("#tokens").value = "a b c";
        document.querySelector("#tokens").dispatchEvent(new Event("input", {bubbles: true}));
        location.hash = "tokens=mine+alone";
        const end = performance.now() + 600;
        while (performance.now() < end);
    }""")
    tab.page.wait_for_function("() => document.querySelector('#tokens').value === 'mine alone'")
    tab.settle()
    assert "tokens=mine+alone" in tab.page.url


def test_back_returns_to_what_was_there_before_an_example(context: BrowserContext, server: RunningServer) -> None:
    shown = tab_of(context, server)
    shown.open("#tokens=mine+alone")
    shown.pick("gqa")
    shown.page.evaluate("document.documentElement.dataset.state = 'busy'")
    shown.page.go_back()
    shown.settle()
    assert shown.page.input_value("#tokens") == "mine alone"
    shown.page.evaluate("document.documentElement.dataset.state = 'busy'")
    shown.page.go_forward()
    shown.settle()
    assert shown.page.input_value("#tokens") == "many ask few answer"
    shown.page.close()


def test_a_reload_keeps_what_was_just_typed_and_an_empty_page_too(
    context: BrowserContext, server: RunningServer
) -> None:
    shown = tab_of(context, server)
    shown.open("#tokens=a")
    shown.page.fill("#tokens", "just typed")
    shown.page.reload()
    shown.settle()
    assert shown.page.input_value("#tokens") == "just typed"
    shown.fill("tokens", "", state="refused")
    shown.page.reload()
    shown.settle("refused")
    assert shown.faults("tokens") == "expected at least one token; received none"
    assert shown.page.inner_text("#plan-answer") == "There is no problem to plan for yet."
    shown.page.close()


def test_without_plotly_the_tables_have_the_numbers(context: BrowserContext, server: RunningServer) -> None:
    shown = tab_of(context, server)
    shown.page.route(f"**{PLOTLY}", lambda route: route.abort())
    shown.open("#tokens=a+b")
    assert len(shown.matrix("weights")) == 2
    assert "plotly.min.js did not load" in shown.page.inner_text("[data-matrix=weights] .heatmap")
    focus(shown, "weights", 1, 1)
    assert shown.readout().startswith("weights[0,0,1,1] = ")
    shown.page.close()


def test_nothing_shines_through_the_number_in_focus(tab: Playground) -> None:
    tab.pick("causal")
    tab.page.evaluate("""() => {
        const corner = document.querySelector('[data-matrix=scores] thead th').getBoundingClientRect();
        scrollTo({ top: scrollY + corner.top - 40, behavior: 'instant' });
    }""")
    on_top = tab.page.evaluate("""() => {
        const { left, top } = document.querySelector('[data-matrix=scores] thead th').getBoundingClientRect();
        return Boolean(document.elementFromPoint(left + 5, top + 5).closest('#readout'));
    }""")
    tab.page.evaluate("scrollTo(0, 0)")
    assert on_top


@pytest.mark.parametrize("example", ["six-vectors", "causal", "cross", "padding", "window", "sinks"])
def test_no_table_of_an_example_is_cut(tab: Playground, example: str) -> None:
    tab.pick(example)
    cut = tab.page.eval_on_selector_all(
        ".panel .grid", "grids => grids.filter(grid => grid.scrollWidth > grid.clientWidth).map(grid => grid.innerText)"
    )
    assert cut == []


def test_a_long_token_pushes_no_number_out_of_sight(tab: Playground) -> None:
    tab.pick("causal")
    tab.fill("tokens", f"one {'🦜' * 600} two")
    grid = tab.page.locator("[data-matrix=weights] .grid")
    assert grid.evaluate("grid => grid.scrollWidth <= grid.clientWidth")
    assert grid.locator("tbody th").nth(1).get_attribute("title") == f"1 {'🦜' * 600}"
    assert (
        tab.page.locator("[data-matrix=weights] .heatmap text", has_text="1 🦜").first.text_content()
        == f"1 {'🦜' * 8}…"
    )


def test_small_shares_of_many_keys_are_seen(tab: Playground) -> None:
    steps = """() => document.querySelector("[data-matrix=weights] .heatmap").data[0].colorscale.map(([at]) => at)"""
    tab.pick("window")
    assert tab.page.evaluate(steps) == [0, 1]
    assert tab.page.is_hidden("#root-note")
    tab.fill("tokens", " ".join(f"t{i}" for i in range(20)))
    assert tab.page.evaluate(steps) == [0, 1 / 64, 1 / 16, 1 / 4, 1]
    assert tab.page.is_visible("#root-note")


def test_the_readout_names_its_place_and_the_key_is_marked_too(tab: Playground) -> None:
    tab.pick("causal")
    focus(tab, "weights", 4, 1)
    assert tab.page.inner_text("#readout .hint") == "head 0, query 4 the, key 1 cat"
    assert tab.page.locator("#keys td.marked").get_attribute("data-row") == "1"
    tab.page.locator("#keys td").nth(3).focus()
    assert tab.readout().startswith("weights[0,0,4,3] = ")
    focus(tab, "context", 4, 1)
    assert tab.page.locator("#keys td.marked").count() == 0


@pytest.mark.parametrize(
    "query",
    [
        '[["NaN", -0.0], [1e-7, 1e21]]',
        '{"dtype": "float16", "shape": [2, 2], "data": "ADwAAAAAADw="}',
    ],
)
def test_the_python_copy_runs_whatever_stands_in_it(tab: Playground, client: httpx.Client, query: str) -> None:
    go(tab, query=query, window_left="1", causal="true", sinks="0.5")
    text = tab.copy("python")
    assert ("from service.client import AttentionClient" in text) == query.startswith("[")
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    printed = dict(line.split(" ", 1) for line in ran.stdout.splitlines())
    weights = client.post("/v1/attention", json=tab.body()).json()["weights"]
    assert printed["weights"].replace("nan", "'NaN'") == str(weights)


def test_a_plan_that_is_refused_says_why_once(tab: Playground) -> None:
    go(tab, query="1 2\n3 4", bias="1 2\n3 4", plan="16")
    said = tab.page.inner_text("#plan-answer")
    assert said.startswith("No plan at this length: bias.shape: expected ") and said.count("bias") == 1


def test_the_verdict_of_the_plan_says_how_long_it_would_take(shown: Playground) -> None:
    assert re.match(
        r"Would be let in, and take about [\d.]+ (ms|s|min) on the path fused: ", shown.page.inner_text(".verdict")
    )


def test_on_a_phone_the_results_are_one_step_away(tab: Playground) -> None:
    tab.pick("causal")
    assert tab.page.is_hidden("#to-results")
    tab.page.set_viewport_size(NARROW)
    tab.page.click("#to-results")
    assert tab.page.locator("#results-title").evaluate("title => title.getBoundingClientRect().top < innerHeight")
    tab.page.set_viewport_size(WIDE)


def test_on_paper_it_is_light_and_whole(tab: Playground) -> None:
    tab.pick("window")
    tab.page.emulate_media(media="print", color_scheme="dark")
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
    assert tab.page.evaluate("getComputedStyle(document.querySelector('#copy-text')).overflowY") == "visible"
    assert tab.page.locator("#readout").evaluate("readout => getComputedStyle(readout).position") == "static"
    tab.page.emulate_media(media="screen", color_scheme="light")


def test_before_a_key_is_given_the_copies_ask_for_one_too(context: BrowserContext, server: RunningServer) -> None:
    shown = tab_of(context, server)
    shown.page.route("**/v1/attention", lambda route: route.fulfill(status=401, body='{"title": "No key"}'))
    shown.open("#tokens=a", state="locked")
    assert "$ATTN_CLIENT_KEY" in shown.copy("curl")
    assert 'api_key=os.environ["ATTN_CLIENT_KEY"]' in shown.copy("python")
    assert shown.page.inner_text("#plan-answer") == "There is no problem to plan for yet."
    shown.page.close()


def test_what_was_copied_is_not_said_of_another_text(context: BrowserContext, tab: Playground) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.pick("causal")
    tab.page.click("#copy-button")
    tab.page.wait_for_selector("#copy-done:has-text('Copied.')")
    tab.fill("softcap", "2")
    assert tab.page.inner_text("#copy-done") == ""
