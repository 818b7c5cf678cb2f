"""What the service refuses besides the core's own errors. They know no HTTP; ``failures`` translates."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core.errors import Fault

REFUSAL_REASONS = (
    "requests", "bytes", "queue_full", "wait", "memory_in_use", "unavailable", "draining", "body", "memory", "deadline",
)  # fmt: skip
"""Every ``reason`` for which work is refused unread or unqueued; a label of a metric."""


class ServiceError(Exception):
    """Base of everything the service raises on purpose. ``faults`` may be empty."""

    def __init__(self, message: str, *, faults: Sequence[Fault] = ()) -> None:
        self.faults = tuple(faults)
        super().__init__(message)


class Malformed(ServiceError):
    """The bytes are not what their media type says."""


class MediaTypeNotServed(ServiceError):
    """The request's content type or encoding is not read here."""


class NotAcceptable(ServiceError):
    """None of the forms that the caller accepts is written here."""


class NotFound(ServiceError):
    """No such path."""


class AlreadyExists(ServiceError):
    """The name is taken."""


class NotServed(ServiceError):
    """A part of a protocol that this service does not speak, or that its settings switch off."""


class Unauthenticated(ServiceError):
    """Keys are set, and the caller brought none of them."""


class MethodNotServed(ServiceError):
    """The path is there, the method is not. ``allow`` lists those that are."""

    def __init__(self, message: str, *, allow: str) -> None:
        self.allow = allow
        super().__init__(message)


class BodyTooLarge(ServiceError):
    """The body, as sent or inflated, is over the limit. Figures are bytes."""

    def __init__(self, *, received: str, allowed_bytes: int) -> None:
        self.allowed_bytes = allowed_bytes
        super().__init__(
            f"the body may have {allowed_bytes} bytes, {received}",
            faults=[Fault("", f"a body of at most {allowed_bytes} bytes", received)],
        )


class Overloaded(ServiceError):
    """No place left. ``retry_after_s`` says when it is worth another try; ``reason`` is one of ``REFUSAL_REASONS``."""

    def __init__(self, message: str, *, reason: str, retry_after_s: int = 1) -> None:
        self.reason = reason
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Unavailable(ServiceError):
    """Nothing can be computed now: starting, or the device is lost."""

    reason = "unavailable"
    retry_after_s: int | None = 1
    """None where another try is of no use."""


class Draining(Unavailable):
    """The server is finishing what it has and takes nothing new."""

    reason = "draining"


class ModelsStay(Unavailable):
    """Models are neither loaded nor unloaded on request."""

    retry_after_s = None

    def __init__(self) -> None:
        super().__init__(
            "models are there from the start, layers as long as they are kept: none is loaded or unloaded on request"
        )


class DeadlinePassed(ServiceError):
    """The request's time was over before its answer was there, or ``at_once``: it would be."""

    def __init__(self, message: str, *, at_once: bool = False) -> None:
        self.at_once = at_once
        super().__init__(message)


class QueueTimeout(DeadlinePassed):
    """The request has waited in the queue for as long as its caller lets it wait."""

    retry_after_s: int | None = 1
