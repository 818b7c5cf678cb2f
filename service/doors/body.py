"""The bytes of a request: which form they have, which form the answer takes, and the body itself within its limits."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.types import Receive

from attn_core.errors import Fault
from service.admission import BytePermit
from service.deadline import Deadline
from service.doors.exchange import Exchange
from service.errors import BodyTooLarge, DeadlinePassed, Malformed, MediaTypeNotServed, NotAcceptable
from service.wire import json_format, safetensors_format

FORMS = (json_format.MEDIA_TYPE, safetensors_format.MEDIA_TYPE)
_INFLATE_STEP_BYTES = 2**20


class Disconnected(Exception):
    """The client went away before its request was whole; nobody is there to be told."""


@dataclass(frozen=True, slots=True)
class Negotiated:
    """The media types of request and answer, how the body is encoded, and whether the answer may be gzipped."""

    request_form: str
    answer_form: str
    body_is_gzipped: bool
    accepts_gzip: bool


def negotiate(headers: Mapping[str, str]) -> Negotiated:
    """Read the four headers that decide about forms. Raises: MediaTypeNotServed, NotAcceptable."""
    request_form = headers.get("content-type", "").split(";", 1)[0].strip().lower()
    if request_form not in FORMS:
        fault = Fault("Content-Type", " or ".join(FORMS), headers.get("content-type") or "nothing")
        raise MediaTypeNotServed(f"the content type must be {fault.expected}", faults=[fault])
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip", ""):
        fault = Fault("Content-Encoding", "gzip or identity", encoding)
        raise MediaTypeNotServed(f"the content encoding must be {fault.expected}", faults=[fault])
    return Negotiated(
        request_form=request_form,
        answer_form=_answer_form(headers.get("accept"), request_form),
        body_is_gzipped=encoding.endswith("gzip"),
        accepts_gzip=_accepts_gzip(headers.get("accept-encoding", "")),
    )


def _answer_form(accept: str | None, request_form: str) -> str:
    if accept is None or not accept.strip():
        return request_form
    best: tuple[float, int, bool, str] | None = None
    for media_range, quality in _weighted(accept):
        for form in FORMS:
            exactness = 2 if media_range == form else 1 if media_range == "application/*" else 0
            if quality <= 0 or (exactness == 0 and media_range != "*/*"):
                continue
            candidate = (quality, exactness, form == request_form, form)
            best = candidate if best is None else max(best, candidate)
    if best is None:
        fault = Fault("Accept", " or ".join(FORMS), accept)
        raise NotAcceptable(f"answers are written as {fault.expected}", faults=[fault])
    return best[3]


def _accepts_gzip(header: str) -> bool:
    qualities = dict(_weighted(header))
    return qualities.get("gzip", qualities.get("x-gzip", qualities.get("*", 0.0))) > 0


def _weighted(header: str) -> Sequence[tuple[str, float]]:
    """The entries of a header with their q; an entry whose q cannot be read counts as refused."""
    entries = []
    for entry in header.lower().split(","):
        name, *parameters = [part.strip() for part in entry.split(";")]
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        if name:
            entries.append((name, quality))
    return entries


async def read_body(
    receive: Receive,
    headers: Mapping[str, str],
    *,
    exchange: Exchange,
    permit: BytePermit,
    deadline: Deadline,
    max_bytes: int,
    is_gzipped: bool,
) -> bytearray:
    """The whole body, inflated. The declared length is refused at once, the real one while it is read.

    Raises: BodyTooLarge, Overloaded, Malformed, DeadlinePassed, Disconnected.
    """
    declared = headers.get("content-length")
    length = int(declared) if declared is not None and declared.isdigit() else None
    if length is not None:
        if length > max_bytes:
            raise BodyTooLarge(received=f"Content-Length says {length} bytes", allowed_bytes=max_bytes)
        permit.hold(length)
    try:
        async with asyncio.timeout(max(0.0, deadline.remaining_s)):
            # Asked-for memory is only touched, and so only taken, as bytes arrive.
            body = _Whole(length) if length is not None and not is_gzipped else _Growing(permit, max_bytes)
            inflate = _Inflate(permit, max_bytes, counted=length is not None) if is_gzipped else None
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                chunk: bytes = message.get("body", b"")
                exchange.received_bytes += len(chunk)
                if inflate is not None:
                    await inflate.add(chunk)
                else:
                    body.add(chunk)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise DeadlinePassed("the deadline passed before the body was there") from None
    exchange.body_is_read = True
    return inflate.finish() if inflate is not None else body.finish()


class _Whole:
    """A body of known length, written where it will be read."""

    def __init__(self, length: int) -> None:
        self._bytes = bytearray(length)
        self._view = memoryview(self._bytes)
        self._filled = 0

    def add(self, chunk: bytes) -> None:
        self._view[self._filled : self._filled + len(chunk)] = chunk
        self._filled += len(chunk)

    def finish(self) -> bytearray:
        self._view.release()
        if self._filled != len(self._bytes):
            raise Malformed(f"{len(self._bytes)} bytes were announced and {self._filled} came")
        return self._bytes


class _Growing:
    """A body of unknown length."""

    def __init__(self, permit: BytePermit, max_bytes: int) -> None:
        self._bytes = bytearray()
        self._permit = permit
        self._max_bytes = max_bytes

    def add(self, chunk: bytes) -> None:
        if len(self._bytes) + len(chunk) > self._max_bytes:
            raise BodyTooLarge(received=f"over {self._max_bytes} bytes came", allowed_bytes=self._max_bytes)
        self._permit.hold(len(chunk))
        self._bytes += chunk

    def finish(self) -> bytearray:
        return self._bytes


class _Inflate:
    """A gzipped body, of one member or several, counted as sent and as it grows."""

    def __init__(self, permit: BytePermit, max_bytes: int, *, counted: bool) -> None:
        self._out = _Growing(permit, max_bytes)
        self._member = zlib.decompressobj(wbits=31)
        self._sent = 0
        self._counted = counted
        self._permit = permit
        self._max_bytes = max_bytes

    async def add(self, chunk: bytes) -> None:
        self._sent += len(chunk)
        if not self._counted:
            if self._sent > self._max_bytes:
                raise BodyTooLarge(received=f"over {self._max_bytes} bytes came", allowed_bytes=self._max_bytes)
            self._permit.hold(len(chunk))
        try:
            while chunk:
                if self._member.eof:
                    self._member = zlib.decompressobj(wbits=31)
                self._out.add(self._member.decompress(chunk, _INFLATE_STEP_BYTES))
                chunk = self._member.unconsumed_tail or self._member.unused_data
                if chunk:
                    # A little data can grow a thousandfold: let others have a turn.
                    await asyncio.sleep(0)
        except zlib.error as error:
            raise Malformed(f"not gzip: {error}", faults=[Fault("", "a gzipped body", str(error))]) from None

    def finish(self) -> bytearray:
        if self._sent and not self._member.eof:
            raise Malformed("gzip ends early", faults=[Fault("", "a whole gzip stream", "a truncated one")])
        return self._out.finish()
