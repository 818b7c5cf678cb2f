"""One call on its way: what each try sends, what becomes of its outcome, and the one deadline over all of them.

Shared by both clients, which do no more than send, sleep and read. The clock is handed in.

What the service is told: a limit that the caller set himself, whole in the first try and what is left of it in later
ones, so that the service drops what nobody waits for. The 60 s that hold where he set none are not sent: they are the
service's own default, and its limit may be lower.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import ssl
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
import numpy as np

from service.client import calls
from service.client.calls import Call, Pieces, Reply
from service.client.errors import (
    AttentionServiceError,
    ConnectionFailed,
    DeadlineExceeded,
    Overloaded,
    Unavailable,
    UnreadableAnswer,
)
from service.client.retries import Broken, Retries

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_MAX_CONNECTIONS = 64
KEEP_ALIVE_S = 60.0
"""Less than the service's own 75 s, so that it is the client who lets go of an idle connection."""
SLICE_BYTES = 256 * 1024
"""The HTTP library copies what a socket has not taken yet, so it is given no more than this at once."""
SMALL_BODY_BYTES = 64 * 1024
"""Up to here a copy costs less than a write for each array."""
_REQUEST_ID_BYTES = 128
_LENGTH_DIGITS = 18
_LEAST_S = 0.001
_MOST_S = 1e6
"""A socket's timer is set to no more: the system's clock ends somewhere."""
_LAST_PORT = 2**16 - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Answered(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What holds for every call of one client. Raises: ValueError for what cannot be meant."""

    base_url: str
    api_key: str | None = field(repr=False)
    timeout_s: float | None
    retries: Retries
    clock: Callable[[], float]
    random: Callable[[], float]

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise ValueError(f"base_url: {error}") from None
        if url.userinfo:
            # Not shown: there is a password in it.
            raise ValueError("base_url: without a user and password; a key is api_key")
        # An empty query or fragment would swallow the path that is put behind it.
        has_more = not {"?", "#"}.isdisjoint(self.base_url)
        if url.scheme not in ("http", "https") or not url.host or has_more or (url.port or 0) > _LAST_PORT:
            raise ValueError(f"base_url: such as http://127.0.0.1:8000, not {self.base_url!r}")
        if self.api_key is not None and not _is_key(self.api_key):
            # Not shown: it may be a key all the same.
            raise ValueError("api_key: printable ASCII characters, at least one, and no space at either end")
        if self.retries.max_retries < 0:
            raise ValueError(f"max_retries: 0 or more, not {self.retries.max_retries}")
        _check_timeout(self.timeout_s)

    def headers(self) -> dict[str, str]:
        """Those of every request. Numbers hardly shrink, so no coding is asked for."""
        headers = {"user-agent": "attn-client", "accept-encoding": "identity"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers


class Tries(Generic[T]):
    """``begin`` before each try, ``after`` behind it."""

    def __init__(self, make: Callable[[], Call[T]], terms: Terms) -> None:
        began = terms.clock()
        call = make()
        _check_timeout(call.timeout_s)
        _check_request_id(call.request_id)
        self._call = call
        self._terms = terms
        self._timeout_s = terms.timeout_s if call.timeout_s is None else call.timeout_s
        self._end = None if self._timeout_s is None else began + self._timeout_s
        is_own = call.timeout_s is not None or terms.timeout_s != DEFAULT_TIMEOUT_S
        self._is_told = call.takes_timeout and is_own
        self._request_id = call.request_id or uuid.uuid4().hex
        self._count = 0

    @property
    def method(self) -> str:
        return self._call.method

    @property
    def url(self) -> str:
        return self._terms.base_url.rstrip("/") + self._call.path

    def left_s(self) -> float | None:
        """Seconds until the deadline, a little above 0 even behind it; None where there is none."""
        return None if self._end is None else max(_LEAST_S, self._end - self._terms.clock())

    @property
    def is_over(self) -> bool:
        return self._end is not None and self._terms.clock() >= self._end

    def begin(self) -> tuple[dict[str, str], Pieces]:
        """Headers and body of the next try. Raises: TimeoutException, as the wire would, where no time is left."""
        self._count += 1
        if self.is_over:
            raise httpx.TimeoutException("no time is left for another try")
        headers = {"accept": self._call.accept, "x-request-id": self._request_id}
        body = self._call.body
        if body is None:
            return headers, []
        pieces = body.pieces(self._timeout_ms())
        num_bytes = sum(memoryview(piece).nbytes for piece in pieces)
        headers["content-type"] = body.media_type
        headers["content-length"] = str(num_bytes)
        return headers, [b"".join(pieces)] if num_bytes <= SMALL_BODY_BYTES else pieces

    def after(self, outcome: Reply | Exception) -> Wait | Answered[T]:
        """What the caller gets, or how long to wait before the next try. Raises: what service or wire refused."""
        cause = outcome if isinstance(outcome, Exception) else None
        broken: Broken | None = None
        if isinstance(outcome, Reply):
            refused = calls.refusal_of(self._call, outcome)
            if refused is None:
                try:
                    return Answered(calls.answer_of(self._call, outcome))
                except UnreadableAnswer as unreadable:
                    unreadable.request_id = unreadable.request_id or self._request_id
                    raise
            error = refused
        elif isinstance(outcome, httpx.TimeoutException | TimeoutError):
            error = self._out_of_time()
        elif isinstance(outcome, httpx.DecodingError):
            error = UnreadableAnswer(f"the answer's coding: {outcome}", name="unreadable-answer")
        else:
            broken = _how_broken(outcome)
            error = self._no_connection(outcome)
        error.request_id = error.request_id or self._request_id
        error.__cause__ = cause
        wait_s = self._wait_s(error, broken)
        if wait_s is not None:
            return Wait(wait_s)
        return Answered(self._call.fail(error))

    def _wait_s(self, error: AttentionServiceError, broken: Broken | None) -> float | None:
        what = broken or error.status
        if what is None or not self._call.may_retry:
            return None
        return self._terms.retries.wait_s(
            what,
            tries=self._count,
            left_s=None if self._end is None else self._end - self._terms.clock(),
            draw=self._terms.random(),
            retry_after_s=error.retry_after_s if isinstance(error, Overloaded | Unavailable) else None,
            may_repeat=self._call.may_repeat,
        )

    def _timeout_ms(self) -> float | None:
        if not self._is_told or self._timeout_s is None:
            return None
        # The first is always the same, so that the service knows the header again.
        left_s = self._timeout_s if self._count == 1 else self.left_s() or _LEAST_S
        return math.ceil(left_s * 1e3)

    def _out_of_time(self) -> DeadlineExceeded:
        tries = f" in {self._count} tries" if self._count > 1 else ""
        return DeadlineExceeded(
            f"no answer from {self.url} within {self._timeout_s:g} s{tries}",
            name="deadline-exceeded",
            request_id=self._request_id,
        )

    def _no_connection(self, cause: Exception) -> ConnectionFailed:
        tries = f" in {self._count} tries" if self._count > 1 else ""
        said = str(cause) or type(cause).__name__
        return ConnectionFailed(f"no answer from {self.url}{tries}: {said}", name="connection-failed")


class Receiving:
    """Memory for one answer: where its length is known, once and of that length. A length that no memory has is not
    believed, and what comes is collected."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        length = headers.get("content-length", "")
        is_plain = headers.get("content-encoding", "identity") == "identity"
        self._room: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        if is_plain and length.isdigit() and len(length) <= _LENGTH_DIGITS:
            with contextlib.suppress(MemoryError):
                self._room = np.empty(int(length), dtype=np.uint8)
        self._begun = 0
        self._grown = bytearray()

    def add(self, chunk: bytes) -> None:
        if self._room is None:
            self._grown += chunk
            return
        end = self._begun + len(chunk)
        self._room[self._begun : end] = np.frombuffer(chunk, dtype=np.uint8)
        self._begun = end

    def content(self) -> memoryview:
        return memoryview(self._grown) if self._room is None else self._room[: self._begun].data


class TimeLeft(dict[str, float | None]):
    """httpx's timeouts of a request, each of them what is left at the moment at which it is looked at."""

    def __init__(self, left_s: Callable[[], float | None]) -> None:
        super().__init__(connect=None, read=None, write=None, pool=None)
        self._left_s = left_s

    def get(self, name: str, default: Any = None) -> Any:
        left_s = self._left_s()
        return None if left_s is None else min(left_s, _MOST_S)


def slices(pieces: Pieces) -> Iterator[memoryview]:
    """The same bytes, nothing copied, in parts of which a socket takes one about at once."""
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, view.nbytes, SLICE_BYTES):
            yield view[start : start + SLICE_BYTES]


def limits(max_connections: int) -> httpx.Limits:
    """Raises: ValueError."""
    if max_connections < 1:
        raise ValueError(f"max_connections: 1 or more, not {max_connections}")
    return httpx.Limits(
        max_connections=max_connections, max_keepalive_connections=max_connections, keepalive_expiry=KEEP_ALIVE_S
    )


def _how_broken(error: Exception) -> Broken:
    if isinstance(error, httpx.ConnectError):
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return Broken.FOR_GOOD
            cause = cause.__cause__ or cause.__context__
        return Broken.BEFORE_SENDING
    if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
        return Broken.SOMEWHERE
    return Broken.FOR_GOOD


def _is_key(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isprintable() and 0 < len(key) == len(key.strip())


def _check_timeout(timeout_s: Any) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, numbers.Real):
        raise TypeError(f"timeout_s: a number of seconds, not {type(timeout_s).__name__}")
    if not 0 < float(timeout_s) < math.inf:
        raise ValueError(f"timeout_s: a number of seconds above 0, not {timeout_s!r}")


def _check_request_id(request_id: Any) -> None:
    if request_id is None:
        return
    if not isinstance(request_id, str):
        raise TypeError(f"request_id: a text, not {type(request_id).__name__}")
    if not (0 < len(request_id) <= _REQUEST_ID_BYTES and all("!" <= letter <= "~" for letter in request_id)):
        raise ValueError(f"request_id: 1 to {_REQUEST_ID_BYTES} printable ASCII characters without spaces")
