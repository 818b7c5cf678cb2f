"""The playground as people meet it: in a real browser, by eye, by mouse, by keys and by screen reader."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    Route,
    ViewportSize,
)

from service.doors.playground_files import FILES, PAGE, PATHS, PLOTLY
from tests.support.bodies import strict_json
from tests.support.browser import serious
from tests.support.server import RunningServer, running_server, server_environment

README = (Path(__file__).parents[2] / "README.md").read_text()
SOURCES = Path(__file__).parents[2] / "service" / "playground_page"
EXAMPLES = ("six-vectors", "causal", "cross", "gqa", "padding", "window", "sinks")
MATRICES = ("scores", "logits", "weights", "context")
WIDE: ViewportSize = {"width": 1280, "height": 900}
NARROW: ViewportSize = {"width": 360, "height": 800}


class Playground:
    """The page in a tab; what goes wrong in it, and whom it asks, is kept."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.troubles: list[str] = []
        self.asked: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        # The browser itself writes a line for each answer that is a refusal.
        is_refusal = message.text.startswith("Failed to load resource") and "/v1/" in message.location["url"]
        if message.type in ("error", "warning") and not is_refusal:
            self.troubles.append(message.text)

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith("data:"):
            self.asked.append(request.url)

    def open(self, fragment: str = "", *, state: str = "answered") -> None:
        self.page.goto(f"{self.url}{PAGE}{fragment}")
        self.settle(state)

    def settle(self, state: str = "answered") -> None:
        self.page.wait_for_selector(f"html[data-state={state}]")

    def pick(self, example: str) -> None:
        self.page.click(f"#examples button[value={example}]")
        self.settle()

    def fill(self, field: str, text: str, *, state: str = "answered") -> None:
        self.page.fill(f"#{field}", text)
        self.settle(state)

    def paste(self, **tensors: str) -> None:
        self.page.check("input[value=tensors]")
        for name, text in tensors.items():
            self.page.fill(f"#{name}", text)

    def unfold(self, *, is_open: bool = True) -> None:
        """Open or close the part with the rarer fields."""
        self.page.locator("#more").evaluate("(more, isOpen) => more.open = isOpen", is_open)

    def copy(self, kind: str) -> str:
        """What would be copied."""
        self.page.check(f"#copy-kinds input[value={kind}]")
        return self.page.inner_text("#copy-text")

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.copy("json"))
        return body

    def numbers(self, selector: str) -> list[list[str]]:
        """Every cell of a table, with all digits."""
        rows: list[list[str]] = self.page.eval_on_selector_all(
            f"{selector} tbody tr", "rows => rows.map(row => [...row.querySelectorAll('td')].map(cell => cell.title))"
        )
        return rows

    def matrix(self, name: str) -> list[list[str]]:
        return self.numbers(f"[data-matrix={name}]")

    def readout(self) -> str:
        return "\n".join(self.page.locator("#readout p").all_inner_texts())

    def faults(self, field: str) -> str:
        """What stands beside a field that says that it is wrong."""
        assert self.page.get_attribute(f"#{field}", "aria-invalid") == "true"
        assert f"{field}-fault" in (self.page.get_attribute(f"#{field}", "aria-describedby") or "")
        assert self.page.is_visible(f"#{field}")
        return self.page.inner_text(f"#{field}-fault")

    def assert_quiet(self) -> None:
        """Nothing in the console, and nobody asked but this service."""
        assert self.troubles == []
        assert [url for url in self.asked if not url.startswith(f"{self.url}/")] == []


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport=WIDE, color_scheme="light") as made:
        yield made


def tab_of(context: BrowserContext, server: RunningServer) -> Playground:
    page = context.new_page()
    page.set_default_timeout(15_000)
    return Playground(page, server.url)


@pytest.fixture(scope="module")
def tab(context: BrowserContext, server: RunningServer) -> Iterator[Playground]:
    """One tab for all tests that do not need one of their own."""
    shown = tab_of(context, server)
    shown.open()
    yield shown
    shown.assert_quiet()
    shown.page.close()


@pytest.fixture
def shown(tab: Playground) -> Playground:
    """That tab with the first example in it, whatever was there before."""
    tab.pick("six-vectors")
    return tab


def written(number: Any) -> str:
    """A number of an answer as the page writes it in full."""
    words = {"Infinity": "∞", "-Infinity": "−∞"}
    return words[number] if number in words else str(number)


def assert_same(cells: list[list[str]], numbers: list[list[Any]]) -> None:
    """Digit for digit the same numbers."""
    assert len(cells) == len(numbers)
    for cell_row, row in zip(cells, numbers, strict=True):
        assert len(cell_row) == len(row)
        for cell, number in zip(cell_row, row, strict=True):
            if isinstance(number, str):
                assert cell == written(number)
            else:
                assert float(cell.replace("−", "-")) == number


def at_rank_4(tensor: list[Any]) -> list[Any]:
    return tensor if isinstance(tensor[0][0], list) else [[tensor]]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_shows_the_numbers_of_the_api(tab: Playground, client: httpx.Client, example: str) -> None:
    tab.pick(example)
    body = tab.body()
    answer = strict_json(client.post("/v1/attention", json=body).content)
    weights = at_rank_4(answer["weights"])
    num_heads, num_keys = len(weights[0]), len(weights[0][0][0])
    ones = [[[[1]] * num_keys]]
    sums = client.post("/v1/weighted_sum", json={"weights": weights, "value": ones}).json()["context"]
    for head in range(num_heads):
        if num_heads > 1:
            tab.page.check(f"#heads-shown input[value='{head}']")
        for name in MATRICES:
            assert_same(tab.matrix(name), at_rank_4(answer[name])[0][head])
        entropy, lse, totals = (
            answer[name] if num_heads == 1 and not isinstance(answer[name][0], list) else answer[name][0][head]
            for name in ("entropy", "logsumexp", "weight_totals")
        )
        rows = tab.numbers("#rows")
        assert_same(
            [row[:3] for row in rows], [[s[0], e, x] for s, e, x in zip(sums[0][head], entropy, lse, strict=True)]
        )
        is_empty = [row[3] == "∅ empty" for row in rows]
        assert is_empty == [all(logit == "-Infinity" for logit in row) for row in at_rank_4(answer["logits"])[0][head]]
        assert sum(is_empty) == answer["info"]["empty_rows"] // num_heads
        assert_same(tab.numbers("#keys"), [[total] for total in totals])


def test_the_first_example_is_the_first_request_of_the_readme(shown: Playground) -> None:
    first = re.search(r"/v1/attention [^\n]*-d '(.*?)'", README, re.DOTALL)
    assert first is not None
    body = shown.body()
    body.pop("outputs")
    assert body == json.loads(first[1])


def test_the_empty_row_is_marked_in_every_picture_and_table(tab: Playground) -> None:
    tab.pick("padding")
    for name in MATRICES:
        panel = tab.page.locator(f"[data-matrix={name}]")
        assert panel.locator("tbody th", has_text="∅").all_inner_texts() == ["∅ 4 [pad]"]
        assert panel.locator(".heatmap text", has_text="∅").count() == 1
    assert "1 empty row," in tab.page.inner_text("#status")
    assert tab.page.is_visible("#empty-note")
    for name in ("weights", "context"):
        tab.page.locator(f"[data-matrix={name}] td[tabindex='0']").focus()
        tab.page.keyboard.press("Control+End")
        assert tab.readout().endswith(" = 0\n= 0: the row is empty, it may attend no key")


def coordinate(token: str, d: int) -> float:
    """What the page says of its embedding, by another hand."""
    value = 0x811C9DC5
    for byte in f"{token}#{d}".encode():
        value = (value ^ byte) * 0x01000193 % 2**32
    return (value % 401 - 200) / 100


def test_tokens_become_the_vectors_that_the_page_says(tab: Playground) -> None:
    tab.pick("causal")
    assert "(FNV-1a mod 401 − 200) / 100" in (tab.page.text_content("#embedding-rule") or "")
    tab.fill("tokens", "<b>naïve</b> 日本 naïve 🦜")
    tokens = ["<b>naïve</b>", "日本", "naïve", "🦜"]
    query = tab.body()["query"]
    assert query == [[[[coordinate(token, 4 * head + d) for d in range(4)] for token in tokens] for head in (0, 1)]]
    assert tab.page.locator("[data-matrix=weights] tbody th").all_inner_texts()[0] == "0 <b>naïve</b>"
    assert tab.page.locator("[data-matrix=weights] .heatmap text", has_text="<b>").count() == 2


def test_every_option_reaches_the_service(shown: Playground) -> None:
    shown.unfold()
    shown.paste(query="1 0\n0 1", key="[[1,0],[0,1],[1,1]]", value="1\n2\n3", bias='[["-Infinity", 0, 0.5]]')
    shown.page.select_option("#causal", "lower_right")
    shown.page.select_option("#dtype", "float64")
    for field, text in {"scale": "0.5", "softcap": "3", "window_left": "1", "sinks": "[0.25]"}.items():
        shown.page.fill(f"#{field}", text)
    for field, text in {"key_lengths": "[3]", "alibi_slopes": "[0.5]", "block_mask": "[[[[false]]]]"}.items():
        shown.page.fill(f"#{field}", text)
    shown.settle()
    body = shown.body()
    assert body.pop("outputs")[0] == "context"
    assert body == {
        "query": [[1, 0], [0, 1]],
        "key": [[1, 0], [0, 1], [1, 1]],
        "value": [[1], [2], [3]],
        "block_mask": [[[[False]]]],
        "bias": [["-Infinity", 0, 0.5]],
        "key_lengths": [3],
        "alibi_slopes": [0.5],
        "sinks": [0.25],
        "causal": "lower_right",
        "scale": 0.5,
        "softcap": 3,
        "window": {"left": 1},
        "dtype": "float64",
    }


def test_each_fault_stands_beside_the_field_it_names(shown: Playground) -> None:
    shown.page.fill("#scale", "abc")
    shown.page.fill("#window_left", "-1")
    shown.paste(key="[[1, 2]]")
    shown.settle("refused")
    assert "number" in shown.faults("scale")
    assert "received" in shown.faults("window_left")
    assert "head dim 3" in shown.faults("key")
    assert shown.page.is_hidden("#general-fault")
    shown.fill("key", "[[1, 2", state="refused")
    assert shown.faults("key").startswith("expected JSON, or a row of numbers in each line; received [[1, 2 (")
    assert shown.page.inner_text("#copy-text") == "There is no request yet."
    assert shown.page.get_attribute("#scale", "aria-invalid") is None
    shown.fill("key", "", state="refused")
    shown.fill("scale", "", state="refused")
    shown.fill("window_left", "")
    assert shown.page.locator(".fault, [aria-invalid]").count() == 0


def test_a_fault_in_a_folded_field_unfolds_it(tab: Playground) -> None:
    tab.pick("causal")
    tab.unfold()
    tab.page.fill("#key_lengths", "[7]")
    tab.unfold(is_open=False)
    tab.settle("refused")
    assert tab.faults("key_lengths")
    tab.fill("key_lengths", "")
    tab.page.fill("#heads", "3")
    tab.fill("kv_heads", "2", state="refused")
    assert "divides query's 3" in tab.faults("kv_heads")
    tab.page.fill("#heads", "none")
    tab.settle("refused")
    assert tab.faults("heads") == "expected a whole number from 1 to 64; received none"
    tab.pick("six-vectors")
    tab.paste(key="[[1, 0, 0]]")
    tab.settle("refused")
    assert "as key is given" in tab.faults("value")


def test_a_refusal_that_names_no_field_and_a_lost_service_are_said(shown: Playground) -> None:
    def full(route: Route) -> None:
        problem = {"type": "/errors/overloaded", "title": "The server is full", "status": 429, "detail": "256 wait"}
        route.fulfill(status=429, content_type="application/problem+json", body=json.dumps(problem))

    shown.page.route("**/v1/attention", full)
    shown.fill("softcap", "7", state="refused")
    assert shown.page.inner_text("#general-fault") == "The server is full: 256 wait"
    shown.page.unroute("**/v1/attention")
    shown.page.route("**/v1/attention", lambda route: route.abort())
    shown.fill("softcap", "8", state="unreachable")
    assert shown.page.inner_text("#general-fault").startswith("The service did not answer: ")
    shown.page.unroute("**/v1/attention")
    shown.fill("softcap", "9")
    assert shown.page.is_hidden("#general-fault")


def test_what_stands_behind_a_fault_is_said_to_be_old(shown: Playground) -> None:
    before = shown.matrix("weights")
    shown.fill("softcap", "0", state="refused")
    assert "What is shown below is the last problem that was answered." in shown.page.inner_text("#status")
    assert shown.matrix("weights") == before
    shown.paste(key="[[1, 2]]", value="[[1]]")
    shown.settle("refused")
    shown.page.focus("#plan")
    shown.page.keyboard.press("Home")
    shown.page.wait_for_selector("#plan-section[data-state=answered] #plan-answer[data-length='16'] .verdict")


def test_more_pairs_than_can_be_drawn_are_refused_by_the_page(tab: Playground) -> None:
    tab.pick("causal")
    tab.fill("tokens", "word " * 400, state="refused")
    assert tab.faults("tokens").endswith("received 320000")


def test_each_item_of_a_batch_has_its_own_pictures(shown: Playground, client: httpx.Client) -> None:
    shown.unfold()
    shown.page.fill("#key_lengths", "[2, 1]")
    shown.fill("query", "[[[[1, 0], [0, 1]]], [[[2, 0], [0, 3]]]]")
    answer = client.post("/v1/attention", json=shown.body()).json()
    for item in (0, 1):
        shown.page.check(f"#items input[value='{item}']")
        assert_same(shown.matrix("weights"), answer["weights"][item][0])
    assert shown.readout().startswith("weights[1,0,0,0] = 1")


def test_the_keyboard_reaches_everything(tab: Playground) -> None:
    tab.pick("causal")
    tab.unfold()
    tab.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    wanted: set[str] = set(
        tab.page.eval_on_selector_all(
            "a[href], button, textarea, select, input, summary, .grid, #copy-text, .scroll[tabindex]",
            """parts => parts.filter(part => part.checkVisibility() && !part.disabled
                   && !(part.type === 'radio' && !part.checked))
                .map((part, index) => part.dataset.stop = String(index))""",
        )
    )
    reached: set[str] = set()
    # From wherever the browser begins, once around.
    for _ in range(2 * len(wanted)):
        tab.page.keyboard.press("Tab")
        stop = tab.page.evaluate("document.activeElement.closest('[data-stop]')?.dataset.stop")
        reached |= {stop} - {None}
        if reached == wanted:
            break
    assert len(wanted) > 40
    assert wanted - reached == set()


def test_arrow_keys_give_each_number_and_its_formula(tab: Playground) -> None:
    tab.pick("causal")
    tab.page.check("#heads-shown input[value='1']")
    first = {name: tab.matrix(name) for name in MATRICES}
    lse = tab.numbers("#rows")[1][2]
    formulas = {
        "scores": "= query[0,1,1,:] · key[0,1,0,:]",
        "logits": f"= 1/√4·{first['scores'][1][0]}",
        "weights": f"= exp({first['logits'][1][0]} − {lse})",
        "context": "= weights[0,1,1,:] · value[0,1,:,0], over allowed pairs",
    }
    for name in MATRICES:
        grid = tab.page.locator(f"[data-matrix={name}] [role=grid]")
        grid.locator("td[tabindex='0']").focus()
        for key in ("Control+Home", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft", "ArrowLeft"):
            tab.page.keyboard.press(key)
        assert tab.readout().startswith(f"{name}[0,1,1,0] = {first[name][1][0]}")
        assert formulas[name].replace("·−", "·(−") in tab.readout().replace("·−", "·(−")
        assert tab.page.inner_text(":focus") == grid.locator("td.here").inner_text()
        assert tab.page.get_attribute(":focus", "aria-selected") == "true"
    tab.page.locator("[data-matrix=weights] td[tabindex='0']").focus()
    tab.page.keyboard.press("Control+End")
    assert tab.readout().startswith("weights[0,1,5,5] = ")
    tab.page.keyboard.press("Home")
    tab.page.keyboard.press("ArrowUp")
    tab.page.keyboard.press("End")
    assert tab.readout().splitlines() == ["weights[0,1,4,5] = 0", "= 0: exp(−∞), a forbidden pair"]
    tab.page.locator("[data-matrix=logits] td[tabindex='0']").focus()
    assert "= −∞: a forbidden pair. Here may forbid: causal" in tab.readout()


def test_pointing_at_a_cell_gives_its_number_and_marks_it_everywhere(shown: Playground) -> None:
    area = shown.page.locator("[data-matrix=scores] .heatmap .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    column, row = 3, 4
    shown.page.mouse.move(box["x"] + box["width"] * (column + 0.5) / 6, box["y"] + box["height"] * (row + 0.5) / 6)
    shown.page.wait_for_selector("#readout:has-text('scores[0,0,4,3]')")
    scores = shown.matrix("scores")
    assert shown.readout().splitlines() == [
        f"scores[0,0,4,3] = {scores[row][column]}",
        "= query[0,0,4,:] · key[0,0,3,:]",
        "= 0.77·0.22 + 0.25·0.58 + 0.1·0.33",
    ]
    for name in ("scores", "logits", "weights"):
        assert shown.page.locator(f"[data-matrix={name}] td.here").get_attribute("data-column") == "3"
    marked = shown.page.locator("[data-matrix=context] td.marked")
    assert marked.count() == 3 and marked.first.get_attribute("data-row") == "4"
    assert shown.page.locator(".heatmap .shapelayer path").count() == 4
    shown.page.mouse.down()
    shown.page.mouse.up()
    shown.page.wait_for_selector("[data-matrix=scores] td.here:focus")


def test_the_address_holds_the_state(context: BrowserContext, server: RunningServer, tab: Playground) -> None:
    tab.pick("gqa")
    tab.page.fill("#softcap", "2.5")
    tab.page.select_option("#dtype", "float64")
    tab.settle()
    tab.page.check("#heads-shown input[value='3']")
    tab.page.locator("[data-matrix=context] td[tabindex='0']").focus()
    tab.page.keyboard.press("End")
    tab.copy("python")
    tab.page.wait_for_url(re.compile(r"copy=python"))
    address = tab.page.url
    again = tab_of(context, server)
    again.open(f"#{address.partition('#')[2]}")
    for text in ("#readout", "#copy-text", "#plan-length"):
        assert again.page.inner_text(text) == tab.page.inner_text(text)
    assert again.readout().startswith("context[0,3,0,3] = ")
    for field in ("tokens", "heads", "kv_heads", "softcap", "dtype"):
        assert again.page.input_value(f"#{field}") == tab.page.input_value(f"#{field}")
    again.assert_quiet()
    again.page.close()


@pytest.mark.parametrize(
    "fragment", ["#causal=sideways&copy=fax&source=elsewhere", "#at=x.y.z&head=-7&plan=z&tokens=a", "#%%%"]
)
def test_a_broken_address_breaks_nothing(tab: Playground, fragment: str) -> None:
    tab.page.evaluate(
        "fragment => { document.documentElement.dataset.state = 'busy'; location.hash = fragment }", fragment
    )
    tab.page.wait_for_selector("html:not([data-state=busy])")
    tab.pick("window")


def test_the_slider_shows_what_the_plan_says(tab: Playground, client: httpx.Client) -> None:
    tab.pick("padding")
    tab.page.focus("#plan")
    tab.page.keyboard.press("End")
    tab.page.check("#plan-outputs input[value='context weights']")
    tab.page.wait_for_selector(
        "#plan-section[data-state=answered] #plan-answer[data-length='1048576'] .verdict.refused"
    )
    assert tab.page.get_attribute("#plan", "aria-valuetext") == "T = S = 1,048,576 tokens"
    length, spec = 2**20, "float32"
    asked = {
        "query": {"dtype": spec, "shape": [1, 1, length, 4]},
        "allow_mask": {"dtype": "bool", "shape": [1, 1, length, 1]},
        "key_lengths": {"dtype": "int64", "shape": [1]},
        "outputs": ["context", "weights"],
    }
    plan = client.post("/v1/attention/plan", json=asked).json()
    assert not plan["admitted"]
    figures = tab.page.eval_on_selector_all("#plan-answer dd", "found => found.map(one => one.dataset.number)")
    needed, _, answer_bytes, longest = map(int, figures)
    assert (needed, answer_bytes) == (plan["needed_bytes"], plan["answer_bytes"])
    assert longest == pytest.approx(plan["max_seq_len"], rel=0.2)
    tab.page.focus("#plan")
    tab.page.keyboard.press("Home")
    tab.page.wait_for_selector(
        "#plan-section[data-state=answered] #plan-answer[data-length='16'] .verdict:not(.refused)"
    )
    assert tab.page.locator("#plan-answer tr.chosen th").inner_text() == "manual (chosen)"


@pytest.mark.parametrize("example", ["six-vectors", "padding", "sinks"])
def test_each_copy_runs_as_it_stands(tab: Playground, client: httpx.Client, example: str) -> None:
    tab.pick(example)
    expected = client.post("/v1/attention", json=tab.body()).json()
    ran = subprocess.run(["bash", "-c", tab.copy("curl")], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["weights"] == expected["weights"]
    ran = subprocess.run([sys.executable, "-c", tab.copy("python")], capture_output=True, text=True, check=True)
    printed = dict(line.split(" ", 1) for line in ran.stdout.splitlines())
    assert printed["context"] == str(expected["context"])
    assert printed.keys() == expected.keys()


def test_the_button_copies_what_is_shown(context: BrowserContext, tab: Playground) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.pick("causal")
    tab.fill("tokens", 'it\'s "quoted" $HOME END')
    for kind in ("curl", "json"):
        text = tab.copy(kind)
        tab.page.click("#copy-button")
        tab.page.wait_for_selector("#copy-done:has-text('Copied.')")
        assert tab.page.evaluate("navigator.clipboard.readText()").strip() == text.strip()


def test_long_tables_are_walked_page_by_page_and_nan_is_shown(tab: Playground) -> None:
    tab.pick("causal")
    tab.fill("tokens", " ".join(f"t{i}" for i in range(70)))
    tab.page.locator("[data-matrix=weights] td[tabindex='0']").focus()
    for _ in range(5):
        tab.page.keyboard.press("PageDown")
    assert tab.readout().startswith("weights[0,0,50,0] = ")
    assert tab.page.get_attribute(":focus", "data-row") == "50"
    assert "Rows 32 to 63 of 70" in tab.page.inner_text("[data-matrix=weights] .grid")
    tab.pick("six-vectors")
    tab.fill("query", '[["NaN", 1], [0, 1]]')
    assert tab.matrix("weights") == [["NaN", "NaN"], ["NaN", "NaN"]]
    assert "2 non-finite rows" in tab.page.inner_text("#status")


def test_axes_of_nothing_are_said_to_be_nothing(shown: Playground) -> None:
    shown.fill("query", '{"dtype": "float32", "shape": [1, 1, 0, 2], "data": ""}')
    assert "An axis is 0" in shown.readout()
    shown.pick("six-vectors")
    assert len(shown.matrix("weights")) == 6


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (WIDE, "dark"), (NARROW, "light")])
def test_nobody_is_kept_from_using_it(
    tab: Playground, tmp_path: Path, size: ViewportSize, scheme: Literal["light", "dark"]
) -> None:
    tab.page.emulate_media(color_scheme=scheme)
    tab.page.set_viewport_size(size)
    tab.pick("padding")
    tab.page.screenshot(path=tmp_path / "answered.png", full_page=True)
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert serious(tab.page) == []
    tab.fill("scale", "x", state="refused")
    tab.page.locator("#problem").screenshot(path=tmp_path / "refused.png")
    assert serious(tab.page) == []
    assert (tmp_path / "answered.png").stat().st_size > 50_000
    tab.page.emulate_media(color_scheme="light")
    tab.page.set_viewport_size(WIDE)


def test_pictures_follow_the_colours_of_the_machine(shown: Playground) -> None:
    def drawn() -> object:
        return shown.page.locator("[data-matrix=weights] .heatmap image").first.evaluate("image => image.outerHTML")

    light = drawn()
    shown.page.emulate_media(color_scheme="dark")
    assert drawn() != light
    shown.page.emulate_media(color_scheme="light")
    assert drawn() == light


def test_where_keys_are_set_the_page_asks_for_one_and_keeps_it_for_the_tab(browser: Browser) -> None:
    key = "a-key-of-somebody"
    with running_server(ATTN_API_KEYS=key) as locked, browser.new_context() as context:
        shown = tab_of(context, locked)
        shown.open(state="locked")
        assert shown.page.evaluate("document.activeElement.id") == "api_key"
        assert serious(shown.page) == []
        shown.page.keyboard.type("another")
        shown.page.keyboard.press("Enter")
        shown.page.wait_for_selector("#api_key-fault")
        shown.settle("locked")
        assert "a key that this service knows" in shown.faults("api_key")
        shown.page.keyboard.type("schlüssel 1")
        shown.page.keyboard.press("Enter")
        assert "printable ASCII" in shown.faults("api_key")
        shown.page.keyboard.type(key)
        shown.page.click("#key-use")
        shown.settle()
        assert shown.page.is_hidden("#key-form")
        assert len(shown.matrix("weights")) == 6
        kept = shown.page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie, location.href]")
        assert kept[0] == {"attn-key": key}
        assert kept[1:3] == [{}, ""] and key not in kept[3]
        environment = server_environment(ATTN_CLIENT_KEY=key)
        for kind, command in (("curl", ["bash", "-c"]), ("python", [sys.executable, "-c"])):
            text = shown.copy(kind)
            assert key not in text
            ran = subprocess.run([*command, text], env=environment, capture_output=True, text=True, check=True)
            assert "weights" in ran.stdout and "unauthenticated" not in ran.stdout
        other = tab_of(context, locked)
        other.open(state="locked")
        shown.assert_quiet()
        other.assert_quiet()


def test_the_page_and_its_files_are_what_lies_in_the_package() -> None:
    assert {file for file, _ in FILES.values()} == {path.name for path in SOURCES.iterdir()}
    page = (SOURCES / "index.html").read_text()
    named = {f"/{path}" for path in re.findall(r'(?:src|href)="(playground/[^"]+)"', page)}
    assert named | {PAGE} == PATHS
    for path in SOURCES.iterdir():
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", path.read_text()), path


@pytest.mark.parametrize("path", sorted(PATHS))
def test_a_file_is_compressed_and_asked_for_again_by_its_tag(client: httpx.Client, path: str) -> None:
    plain = client.get(path, headers={"accept-encoding": "identity"})
    packed = client.get(path, headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    assert packed.content == plain.content
    assert packed.headers["etag"] != plain.headers["etag"]
    for answer in (plain, packed):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "http" not in policy and "unsafe-eval" not in policy
        assert answer.headers["vary"] == "Accept-Encoding"
        sent = {"accept-encoding": answer.request.headers["accept-encoding"]}
        for tag in (answer.headers["etag"], f"W/{answer.headers['etag']}", f'"x", {answer.headers["etag"]}', "*"):
            again = client.get(path, headers={**sent, "if-none-match": tag})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == answer.headers["etag"]
        assert client.get(path, headers={**sent, "if-none-match": '"x"'}).status_code == 200
        head = client.head(path, headers=sent)
        assert head.headers["content-length"] == answer.headers["content-length"]
        assert head.headers["etag"] == answer.headers["etag"]
    assert client.post(path).status_code == 405


def test_plotly_comes_from_its_wheel_at_a_third_of_its_size(client: httpx.Client) -> None:
    with client.stream("GET", PLOTLY, headers={"accept-encoding": "gzip"}) as answer:
        packed = b"".join(answer.iter_raw())
    content = gzip.decompress(packed)
    assert b"plotly.js v" in content[:200]
    assert len(packed) < len(content) / 3


@pytest.mark.parametrize(
    "path", [f"{PAGE}/", f"{PAGE}/../playground_page/app.js", f"{PAGE}/index.html", f"{PAGE}/%2e%2e/main.py"]
)
def test_nothing_else_is_served_beside_them(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404
