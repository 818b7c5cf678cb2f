"""The files of the playground: which there are, their bytes as they are sent, plain and compressed, and their tags."""

from __future__ import annotations

import functools
import gzip
import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path

from service.charts import plotly_file

PAGE = "/playground"
_OWN = Path(__file__).parents[1] / "playground_page"
_JS, _CSS, _HTML = "text/javascript; charset=utf-8", "text/css; charset=utf-8", "text/html; charset=utf-8"
PLOTLY = f"{PAGE}/plotly.min.js"
FILES: dict[str, tuple[str, str]] = {
    PAGE: ("index.html", _HTML),
    f"{PAGE}/style.css": ("style.css", _CSS),
    f"{PAGE}/app.js": ("app.js", _JS),
    f"{PAGE}/fields.js": ("fields.js", _JS),
    f"{PAGE}/examples.js": ("examples.js", _JS),
    f"{PAGE}/embedding.js": ("embedding.js", _JS),
    f"{PAGE}/nested.js": ("nested.js", _JS),
    f"{PAGE}/pasted.js": ("pasted.js", _JS),
    f"{PAGE}/api.js": ("api.js", _JS),
    f"{PAGE}/results.js": ("results.js", _JS),
    f"{PAGE}/heatmap.js": ("heatmap.js", _JS),
    f"{PAGE}/number_grid.js": ("number_grid.js", _JS),
    f"{PAGE}/formulas.js": ("formulas.js", _JS),
    f"{PAGE}/plan.js": ("plan.js", _JS),
    f"{PAGE}/copies.js": ("copies.js", _JS),
}
"""What lies in this package: the path of each, its file and its type."""
PATHS = frozenset({*FILES, PLOTLY})


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, read and compressed."""

    plain: bytes
    gzipped: bytes
    etag: str
    media_type: str

    def etag_of(self, *, is_gzipped: bool) -> str:
        """A strong tag: the two codings are different bytes."""
        return f'"{self.etag}-gzip"' if is_gzipped else f'"{self.etag}"'


_preparing = threading.Lock()


def page_file(path: str) -> PageFile:
    """What is sent under a path; read and compressed once, when somebody first asks for it."""
    # plotly.js has 4.8 MB and takes 0.3 s, which no server that only computes should pay, nor pay twice.
    with _preparing:
        return _prepared(path)


@functools.cache
def _prepared(path: str) -> PageFile:
    file, media_type = (plotly_file(), _JS) if path == PLOTLY else (_OWN / FILES[path][0], FILES[path][1])
    plain = file.read_bytes()
    # mtime=0: the same bytes under the same tag after each start.
    gzipped = gzip.compress(plain, compresslevel=9, mtime=0)
    return PageFile(plain, gzipped, hashlib.sha256(plain).hexdigest()[:32], media_type)
