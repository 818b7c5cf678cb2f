"""The bytes of a request: which form they have, which form the answer takes, and the body itself within its limits."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

import numpy as np
from starlette.types import Receive

from attn_core.errors import MAX_FAULTS, Fault
from attn_core.placement import ALIGNMENT_BYTES
from service.admission import BytePermit
from service.deadline import Deadline
from service.doors.exchange import Exchange
from service.errors import BodyTooLarge, DeadlinePassed, Malformed, MediaTypeNotServed, NotAcceptable
from service.wire import json_format, safetensors_format
from service.wire.arrays import Buffer

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


def joined_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by lower-case name; one that is sent in several lines is one list, as HTTP has it."""
    joined: dict[str, str] = {}
    for name, value in raw:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        joined[key] = f"{joined[key]}, {text}" if key in joined else text
    return joined


def negotiate(headers: Mapping[str, str]) -> Negotiated:
    """Read the four headers that decide about forms. Raises: MediaTypeNotServed, NotAcceptable."""
    request_form = headers.get("content-type", "").split(";", 1)[0].strip().lower()
    if request_form not in FORMS:
        fault = Fault("Content-Type", " or ".join(FORMS), headers.get("content-type") or "nothing")
        raise MediaTypeNotServed(f"the content type must be {fault.expected}", faults=[fault])
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", headers.get("content-type", ""), re.IGNORECASE)
    if charset is not None and charset.group(1).lower() not in ("utf-8", "utf8"):
        fault = Fault("Content-Type", "charset utf-8, which JSON has", charset.group(1))
        raise MediaTypeNotServed(f"the charset must be {fault.expected}", faults=[fault])
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip", ""):
        fault = Fault("Content-Encoding", "gzip or identity", encoding)
        raise MediaTypeNotServed(f"the content encoding must be {fault.expected}", faults=[fault])
    return Negotiated(
        request_form=request_form,
        answer_form=answer_form(headers.get("accept"), request_form),
        body_is_gzipped=encoding.endswith("gzip"),
        accepts_gzip=accepts_gzip(headers.get("accept-encoding", "")),
    )


def answer_form(accept: str | None, request_form: str) -> str:
    """The form that ``Accept`` asks for, else the request's. Raises: NotAcceptable."""
    if accept is None or not accept.strip():
        return request_form
    ranges = _weighted(accept)
    choices = []
    for form in FORMS:
        # Of the ranges that a form falls into the most exact one says how welcome it is.
        exactness = {form: 2, "application/*": 1, "*/*": 0}
        matching = [(exactness[name], quality) for name, quality in ranges if name in exactness]
        if matching and max(matching)[1] > 0:
            exact, quality = max(matching)
            choices.append((quality, exact, form == request_form, form))
    if not choices:
        fault = Fault("Accept", " or ".join(FORMS), accept)
        raise NotAcceptable(f"answers are written as {fault.expected}", faults=[fault])
    return max(choices)[3]


def accepts_gzip(header: str) -> bool:
    """Whether an ``Accept-Encoding`` lets the answer be gzipped."""
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


def parameter_faults(query_string: bytes) -> list[Fault]:
    """A fault for each parameter in the URL: options are members of the body, and nothing is ignored."""
    names = [name for name, _ in parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)]
    expected = "no parameter in the URL; options stand in the body"
    return [Fault(f"?{name[:100]}", expected, "one") for name in names[:MAX_FAULTS]]


async def read_body(
    receive: Receive,
    headers: Mapping[str, str],
    *,
    exchange: Exchange,
    permit: BytePermit,
    deadline: Deadline,
    max_bytes: int,
    forms: Negotiated,
) -> Buffer:
    """The whole body, inflated. The declared length is refused at once, the real one while it is read.

    Raises: BodyTooLarge, Overloaded, Malformed, DeadlinePassed, Disconnected.
    """
    is_gzipped = forms.body_is_gzipped
    declared = headers.get("content-length")
    length = int(declared) if declared is not None and declared.isascii() and declared.isdigit() else None
    if length is not None:
        if length > max_bytes:
            raise BodyTooLarge(received=f"Content-Length says {length} bytes", allowed_bytes=max_bytes)
        permit.hold(length)
    try:
        async with asyncio.timeout(max(0.0, deadline.remaining_s)):
            # Asked-for memory is only touched, and so only taken, as bytes arrive.
            body: _Whole | _Growing
            if length is None or is_gzipped:
                body = _Growing(permit, max_bytes)
            else:
                body = _Whole(length, is_safetensors=forms.request_form == safetensors_format.MEDIA_TYPE)
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
    """A body of known length, written where it will be read.

    The data of a safetensors body begin on a multiple of 64 bytes, as torch's own tensors do, so that they can be
    computed where they lie.
    """

    def __init__(self, length: int, *, is_safetensors: bool) -> None:
        self._room = np.empty(length + ALIGNMENT_BYTES, dtype=np.uint8)
        self._length = length
        self._filled = 0
        self._is_safetensors = is_safetensors
        self._view: memoryview | None = None

    def add(self, chunk: bytes) -> None:
        if self._view is None:
            header = int.from_bytes(chunk[:8], "little") if self._is_safetensors and len(chunk) >= 8 else 0
            start = -(self._room.ctypes.data + 8 + header) % ALIGNMENT_BYTES
            self._view = self._room.data[start : start + self._length]
        self._view[self._filled : self._filled + len(chunk)] = chunk
        self._filled += len(chunk)

    def finish(self) -> memoryview:
        if self._view is None or self._filled != self._length:
            raise Malformed(f"{self._length} bytes were announced and {self._filled} came")
        return self._view


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
