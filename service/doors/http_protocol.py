"""uvicorn's HTTP protocol, but that what cannot be read as HTTP is refused in the form of all other refusals."""

from __future__ import annotations

import uuid

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from attn_core.errors import Fault
from service.doors.problem_details import MEDIA_TYPE, describe
from service.errors import Malformed


class HttpProtocol(HttpToolsProtocol):
    """Given to ``uvicorn.Config(http=...)``."""

    def send_400_response(self, msg: str) -> None:
        """Answer and close. A request that is not HTTP has no id yet, and gets one."""
        request_id = uuid.uuid4().hex
        error = Malformed("not HTTP/1.1", faults=[Fault("", "an HTTP/1.1 request", msg.rstrip(". "))])
        failure, body, _ = describe(error, request_id)
        head = (
            f"HTTP/1.1 {failure.http} Bad Request\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {request_id}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
