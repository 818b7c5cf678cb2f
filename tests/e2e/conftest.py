"""A browser for every test here that opens a page."""

from tests.support.browser import browser

__all__ = ["browser"]
