"""The limit of transport: bare uvicorn (uvloop, httptools) that takes a body whole and answers with empty bytes.

Run as ``python -m tests.benchmarks.echo PORT``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import uvicorn

from tests.benchmarks.headers import ANSWER_BYTES

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope

_ANSWER_BYTES = ANSWER_BYTES.encode()
_EMPTY = bytes(16 << 20)


async def app(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    """Join the pieces of the body, as whoever reads it must, and answer as many bytes as were asked for."""
    assert scope["type"] == "http"
    pieces, more = [], True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        pieces.append(message["body"])
        more = message["more_body"]
    _ = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    length = next((value for name, value in scope["headers"] if name == _ANSWER_BYTES), b"0")
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)], "trailers": False}
    )
    await send({"type": "http.response.body", "body": _EMPTY[: int(length)], "more_body": False})


if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        lifespan="off",
        backlog=2048,
    )
