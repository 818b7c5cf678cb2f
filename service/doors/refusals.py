"""A refusal in the form of the path that it is for: problem details natively, one text under /v2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from service.doors import problem_details
from service.doors.inference import error_text
from service.errors import MediaTypeNotServed, Unauthenticated
from service.failures import Failure
from service.wire import json_format

INFERENCE_PREFIX = "/v2"


@dataclass(frozen=True, slots=True)
class Refusal:
    """``headers`` are those of its own, besides the content type."""

    failure: Failure
    status: int
    media_type: str
    body: bytes
    headers: Mapping[str, str]


def is_inference(path: str) -> bool:
    """Whether a path is the Open Inference Protocol's."""
    return path == INFERENCE_PREFIX or path.startswith(INFERENCE_PREFIX + "/")


def refusal_of(error: BaseException, request_id: str, *, path: str) -> Refusal:
    """An error as the answer to a request for ``path``."""
    failure, body, native_headers = problem_details.describe(error, request_id)
    headers = dict(native_headers)
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if not is_inference(path):
        return Refusal(failure, failure.http, problem_details.MEDIA_TYPE, body, headers)
    if isinstance(error, MediaTypeNotServed):
        headers["accept-encoding"] = "gzip, deflate"
    _, text = error_text(error, request_id)
    # A text may hold what a client sent, half a surrogate pair too: written as escapes it can always be sent.
    body = json.dumps({"error": text}).encode()
    return Refusal(failure, failure.inference, json_format.MEDIA_TYPE, body, headers)
