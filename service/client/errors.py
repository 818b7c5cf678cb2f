"""What a call can raise: a class for each row of the contract's table, and three for what happens on the wire.

``AttentionServiceError`` is the base of all. A mistake that shows before anything is sent, such as a set where an array
belongs or a layer's name that no layer can have, is a plain TypeError or ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """One thing to mend: ``field`` is a dotted path such as "key.0.0.1", empty for the whole body."""

    field: str
    expected: str
    received: str


class AttentionServiceError(Exception):
    """A call that gave no answer.

    ``status`` is the HTTP status, None where none came; ``name`` the contract's word for it, such as "invalid";
    ``detail`` one sentence; ``faults`` every fault that the service found, at most 50; ``request_id`` what the
    service's log knows the call by.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int | None = None,
        name: str = "",
        faults: Sequence[Fault] = (),
        request_id: str = "",
    ) -> None:
        self.detail = detail
        self.status = status
        self.name = name
        self.faults = tuple(faults)
        self.request_id = request_id
        super().__init__(detail)

    def __str__(self) -> str:
        head = " ".join(str(part) for part in (self.status, self.name) if part)
        lines = [f"{head}: {self.detail}" if head else self.detail]
        lines += [
            f"  {field or 'the body'}: expected {expected}, received {received}"
            for field, expected, received in self.faults
        ]
        return "\n".join(lines) + (f"\n  (request {self.request_id})" if self.request_id else "")

    def __reduce__(self) -> tuple[Any, ...]:
        # Otherwise an error could not leave a process of a pool: its arguments are keywords.
        return _restored, (type(self), dict(self.__dict__))


def _restored(kind: type[AttentionServiceError], members: dict[str, Any]) -> AttentionServiceError:
    error = kind(members["detail"])
    error.__dict__.update(members)
    return error


class Malformed(AttentionServiceError):
    """400: the service could not read the body."""


class Unauthenticated(AttentionServiceError):
    """401: the service asks for a key, and this client has none or a wrong one."""


class NotFound(AttentionServiceError):
    """404: there is no such layer, or no such path."""


class MethodNotServed(AttentionServiceError):
    """405: the path is there, the method is not."""


class NotAcceptable(AttentionServiceError):
    """406: the service does not write the form that was asked for."""


class Conflict(AttentionServiceError):
    """409: a layer of that name is kept, with other content."""


class TooLarge(AttentionServiceError):
    """413: the body, or the memory that the problem needs.

    ``needed_bytes`` and ``allowed_bytes`` are of that memory; None where the body itself was too large.
    """

    needed_bytes: int | None = None
    allowed_bytes: int | None = None


class MediaTypeNotServed(AttentionServiceError):
    """415: the service does not read that content type or encoding."""


class Invalid(AttentionServiceError):
    """422: readable and without meaning; ``faults`` names everything that is to be mended."""


class Overloaded(AttentionServiceError):
    """429: the queue is full, and stayed so for as many tries as there were.

    ``retry_after_s`` is when the service would like to be asked again; None where it did not say.
    """

    retry_after_s: float | None = None


class Internal(AttentionServiceError):
    """500: a mistake of the service; its log names ``request_id``."""


class NotServed(AttentionServiceError):
    """501: this service does not do that."""


class Unavailable(AttentionServiceError):
    """503: starting, draining, or the device is lost, for as many tries as there were; ``retry_after_s`` as above."""

    retry_after_s: float | None = None


class DeadlinePassed(AttentionServiceError):
    """504: the service gave up, or saw at once that it could not be in time."""


class ConnectionFailed(AttentionServiceError):
    """No answer: no connection, or it broke, in every try. ``__cause__`` is httpx's error."""


class DeadlineExceeded(AttentionServiceError):
    """No answer within ``timeout_s``, all tries and the waits between them counted in."""


class UnreadableAnswer(AttentionServiceError):
    """An answer that is none of this service; is it what listens at that address?"""


BY_STATUS: dict[int, type[AttentionServiceError]] = {
    400: Malformed,
    401: Unauthenticated,
    404: NotFound,
    405: MethodNotServed,
    406: NotAcceptable,
    409: Conflict,
    413: TooLarge,
    415: MediaTypeNotServed,
    422: Invalid,
    429: Overloaded,
    500: Internal,
    501: NotServed,
    503: Unavailable,
    504: DeadlinePassed,
}
"""A refusal's class by its status; any other status is an ``AttentionServiceError`` itself."""
