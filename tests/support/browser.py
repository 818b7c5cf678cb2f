"""A real browser for the tests of pages, and what axe-core finds in one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
NEED_BROWSER = "TESTS_NEED_BROWSER"
"""Set where the tests of pages must not be skipped."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        why = "no Chromium here (apt-get install chromium): no page is tried"
        if os.environ.get(NEED_BROWSER):
            pytest.fail(why)
        pytest.skip(why)
    with sync_playwright() as playwright:
        # In a container there is no sandbox to be had, and /dev/shm is small.
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        with launched:
            yield launched


def serious(page: Page) -> list[str]:
    """What axe-core finds that keeps people from using the page."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found if one["impact"] in ("serious", "critical")]
