"""plotly.js, which draws every chart of a page of ours: from the wheel of plotly, no copy in this repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def plotly_file() -> Path:
    """Where it lies; the package itself is not imported, which would take a while.

    Raises: ModuleNotFoundError where plotly is not installed.
    """
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("plotly is not installed: plotly.min.js is taken from its wheel")
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"
