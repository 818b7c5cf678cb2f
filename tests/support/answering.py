"""Something that answers HTTP with what a test prepared, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

JSON, PROBLEM = "application/json", "application/problem+json"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def members(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Answering:
    """``url`` leads here; whoever asks gets ``status``, ``content_type`` and ``content``."""

    url: str
    status: int = 200
    content_type: str = JSON
    content: bytes = b"{}"
    asked: list[Asked] = field(default_factory=list)

    def answer_with(self, members: Any, status: int = 200, content_type: str = JSON) -> None:
        self.status, self.content_type = status, content_type
        self.content = b"" if members is None else json.dumps(members).encode()


@contextmanager
def answering() -> Iterator[Answering]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            there.asked.append(Asked(self.command, self.path, headers, body))
            self.send_response(there.status)
            if there.content:
                self.send_header("content-type", there.content_type)
            self.send_header("content-length", str(len(there.content)))
            self.end_headers()
            self.wfile.write(there.content)

        do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Nothing on stderr."""

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        there = Answering(f"http://127.0.0.1:{listening.server_port}")
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield there
        finally:
            listening.shutdown()
            thread.join()
