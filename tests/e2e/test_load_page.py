"""The report of a load test as people open it: a file, in a real browser, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, ViewportSize

from service.load.page import page
from tests.support.browser import serious
from tests.support.load_results import make_results

WIDE: ViewportSize = {"width": 1280, "height": 900}
NARROW: ViewportSize = {"width": 390, "height": 800}
LOUD_LINE = "() => getComputedStyle(document.querySelector('#time-0 .scatterlayer .js-line')).stroke"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_results(
        forms=("</script><b>json",),
        rates=(400,),
        concurrencies=(8,),
        num_failed=9,
        late=("sends came 9 ms late",),
        wrong=("context is off",),
        shapes=("1x8x128x64", "1x8x1024x64"),
    )
    before = make_results(forms=("</script><b>json",), rates=(400,), slowness=1.5, seed=1)
    path = tmp_path_factory.mktemp("report") / "load.html"
    path.write_text(page(run, before))
    return path


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (WIDE, "dark"), (NARROW, "light")])
def test_the_report_opens_from_a_file_draws_every_chart_and_keeps_nobody_out(
    browser: Browser, report: Path, size: ViewportSize, scheme: Literal["light", "dark"]
) -> None:
    with browser.new_context(viewport=size, color_scheme=scheme) as context:
        shown = context.new_page()
        troubles: list[str] = []
        asked: list[str] = []
        shown.on("console", lambda message: troubles.append(message.text))
        shown.on("pageerror", lambda error: troubles.append(str(error)))
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto(report.as_uri())
        shown.wait_for_selector("html[data-state=drawn]")

        charts = shown.locator(".plot")
        assert charts.count() == 1 + 2 + 2 + 2 + 5
        for index in range(charts.count()):
            assert charts.nth(index).locator("svg.main-svg").first.is_visible()
            marks = charts.nth(index).locator(".scatterlayer .trace, .barlayer .trace")
            assert marks.count() > 0, charts.nth(index).get_attribute("id")
        assert shown.evaluate("document.documentElement.scrollWidth") <= size["width"]

        # A chart has the colours of the scheme, also when the scheme changes under it.
        first = shown.evaluate(LOUD_LINE)
        shown.evaluate("delete document.documentElement.dataset.state")
        shown.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
        shown.wait_for_selector("html[data-state=drawn]")
        assert shown.evaluate(LOUD_LINE) != first
        shown.emulate_media(color_scheme=scheme)

        shown.evaluate("document.querySelectorAll('details').forEach((folded) => { folded.open = true; })")
        assert serious(shown) == []
        assert troubles == []
        assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
