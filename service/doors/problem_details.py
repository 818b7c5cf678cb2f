"""Refusals as RFC 9457 problem details."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from attn_core.errors import MAX_FAULTS, Fault, InvalidProblem, TooLarge
from service.errors import MethodNotServed, Overloaded, QueueTimeout, ServiceError, Unavailable
from service.failures import INTERNAL, Failure, failure_of

MEDIA_TYPE = "application/problem+json"
_MAX_NAMES = 10

log = logging.getLogger("attn.door")


def describe(error: BaseException, request_id: str) -> tuple[Failure, bytes, Mapping[str, str]]:
    """An error as its row of the table, the body that tells a caller what to mend, and headers of its own."""
    failure = failure_of(error)
    faults: tuple[Fault, ...] = error.faults if isinstance(error, InvalidProblem | ServiceError) else ()
    body: dict[str, Any] = {
        "type": f"/errors/{failure.name}",
        "title": failure.title,
        "status": failure.http,
        "detail": _detail(error, failure, faults, request_id),
        "errors": [
            {"field": fault.field, "expected": fault.expected, "received": fault.received}
            for fault in faults[:MAX_FAULTS]
        ],
    }
    headers: dict[str, str] = {}
    if isinstance(error, TooLarge):
        body["needed_bytes"] = error.needed_bytes
        body["allowed_bytes"] = error.allowed_bytes
    if isinstance(error, Overloaded | Unavailable | QueueTimeout) and error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, MethodNotServed):
        headers["allow"] = error.allow
    if failure is INTERNAL:
        log.error("unexpected", exc_info=error, extra={"fields": {"request_id": request_id}})
    # The standard library: a count of bytes may be beyond 64 bits, and a refusal must not fail.
    return failure, json.dumps(body, separators=(",", ":")).encode(), headers


def _detail(error: BaseException, failure: Failure, faults: tuple[Fault, ...], request_id: str) -> str:
    if failure is INTERNAL:
        return f"this is a mistake of the server; its log names request {request_id}"
    if isinstance(error, InvalidProblem):
        names = list(dict.fromkeys(fault.field or "body" for fault in faults))
        listed = ", ".join(names[:_MAX_NAMES]) + (" and more" if len(names) > _MAX_NAMES else "")
        count = len(faults) if len(faults) < MAX_FAULTS else f"at least {MAX_FAULTS}"
        return f"{count} fault{'' if count == 1 else 's'}: {listed}"
    return str(error)
