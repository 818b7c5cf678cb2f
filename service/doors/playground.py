"""GET /playground: a page that asks this service and shows what it answers.

Open without a key, as it holds nothing of anybody's: what it shows comes from the API, which asks for one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from service.charts import plotly_file
from service.doors.body import accepts_gzip, joined_headers
from service.doors.playground_files import PAGE, PATHS, page_file
from service.doors.serving import PiecesResponse

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        # plotly says how its images are scaled in an attribute, and draws heatmaps into images of its own.
        "style-src-attr 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Nothing from elsewhere, and no script but those files."""
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Asked for again each time, which costs a 304: a new version is never mixed with an old one.
    "cache-control": "no-cache",
    "vary": "Accept-Encoding",
}


def router() -> APIRouter:
    """The page and its files. Raises: ModuleNotFoundError where plotly is missing, so at the start."""
    plotly_file()
    routes = APIRouter()
    described: dict[str, Any] = {
        "tags": ["operations"],
        "summary": "A page to try attention in",
        "response_class": Response,
        "responses": {200: {"description": "The page", "content": {"text/html": {}}}},
    }
    for path in sorted(PATHS):
        is_page = path == PAGE
        routes.add_api_route(path, _endpoint(path), methods=["HEAD"], include_in_schema=False)
        routes.add_api_route(
            path, _endpoint(path), methods=["GET"], include_in_schema=is_page, **(described if is_page else {})
        )
    return routes


def _endpoint(path: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        file = await run_in_threadpool(page_file, path)
        sent = joined_headers(request.scope["headers"])
        is_gzipped = accepts_gzip(sent.get("accept-encoding", ""))
        etag = file.etag_of(is_gzipped=is_gzipped)
        headers = {**_HEADERS, "etag": etag}
        if _is_known(sent.get("if-none-match", ""), etag):
            return Response(status_code=304, headers=headers)
        if is_gzipped:
            headers["content-encoding"] = "gzip"
        content = file.gzipped if is_gzipped else file.plain
        if request.method == "HEAD":
            return Response(headers={**headers, "content-length": str(len(content))}, media_type=file.media_type)
        return PiecesResponse([content], file.media_type, headers, held=contextlib.ExitStack())

    return send


def _is_known(if_none_match: str, etag: str) -> bool:
    """Whether the caller has it; weak tags count, as a proxy may have made one of ours."""
    tags = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return etag in tags or "*" in tags
