"""The bytes of a request: which form they have, which form the answer takes, and the body itself within its limits."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
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
Coding = Literal["gzip", "deflate"]
DataAt = Callable[[bytes], int]
_WINDOW_BITS: Mapping[Coding, int] = {"gzip": 31, "deflate": 15}
_CODING_NAMES: Mapping[Coding, str] = {"gzip": "gzip", "deflate": "deflate, which is framed by zlib"}
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


def negotiate(headers: Mapping[str, str], *, answers: Sequence[str] = FORMS) -> Negotiated:
    """Read the four headers that decide about forms; ``answers`` are those there may be of an answer.

    Raises: MediaTypeNotServed, NotAcceptable.
    """
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
        answer_form=answer_form(headers.get("accept"), request_form, answers),
        body_is_gzipped=encoding.endswith("gzip"),
        accepts_gzip=accepts_gzip(headers.get("accept-encoding", "")),
    )


def answer_form(accept: str | None, request_form: str, forms: Sequence[str] = FORMS) -> str:
    """The one of ``forms`` that ``Accept`` asks for, else the request's or the first. Raises: NotAcceptable."""
    if accept is None or not accept.strip():
        return request_form if request_form in forms else forms[0]
    ranges = _weighted(accept)
    choices = []
    for form in forms:
        # Of the ranges that a form falls into the most exact one says how welcome it is.
        exactness = {form: 2, "application/*": 1, "*/*": 0}
        matching = [(exactness[name], quality) for name, quality in ranges if name in exactness]
        if matching and max(matching)[1] > 0:
            exact, quality = max(matching)
            choices.append((quality, exact, form == request_form, form))
    if not choices:
        fault = Fault("Accept", " or ".join(forms), accept)
        raise NotAcceptable(f"answers are written as {fault.expected}", faults=[fault])
    return max(choices)[3]


def inference_coding(header: str) -> Coding | None:
    """The coding of a body under /v2, by its ``Content-Encoding``. Raises: MediaTypeNotServed."""
    match header.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return "gzip"
        case "deflate":
            return "deflate"
    fault = Fault("Content-Encoding", "gzip, deflate or identity", header)
    raise MediaTypeNotServed(f"the content encoding must be {fault.expected}", faults=[fault])


def only_coding(header: str) -> Coding | None:
    """The one coding that an ``Accept-Encoding`` names. A list, which libraries send unasked, names none."""
    match [name for name, quality in _weighted(header) if quality > 0]:
        case ["gzip" | "x-gzip"]:
            return "gzip"
        case ["deflate"]:
            return "deflate"
    return None


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


def parameter_faults(
    query_string: bytes,
    *,
    known: Container[str] = (),
    expected: str = "no parameter in the URL; options stand in the body",
) -> list[Fault]:
    """A fault for each parameter in the URL that is not known: nothing is ignored."""
    pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    names = [name for name, _ in pairs if name not in known]
    return [Fault(f"?{name[:100]}", expected, "one") for name in names[:MAX_FAULTS]]


async def read_body(
    receive: Receive,
    headers: Mapping[str, str],
    *,
    exchange: Exchange,
    permit: BytePermit,
    deadline: Deadline,
    max_bytes: int,
    coding: Coding | None = None,
    data_at: DataAt | None = None,
) -> Buffer:
    """The whole body, inflated. The declared length is refused at once, the real one while it is read.

    ``data_at`` gives the first byte of the data, of a body that begins so; where the body is neither inflated nor
    chunked they lie as torch would put them. Raises: BodyTooLarge, Overloaded, Malformed, DeadlinePassed, Disconnected.
    """
    declared = headers.get("content-length")
    length = int(declared) if declared is not None and declared.isascii() and declared.isdigit() else None
    if length is not None:
        if length > max_bytes:
            raise BodyTooLarge(received=f"Content-Length says {length} bytes", allowed_bytes=max_bytes)
        permit.hold(length)
    try:
        async with asyncio.timeout(max(0.0, deadline.remaining_s)):
            # Asked-for memory is only touched, and so only taken, as bytes arrive.
            body = _Growing(permit, max_bytes) if length is None or coding is not None else _Whole(length, data_at)
            inflate = None if coding is None else _Inflate(coding, permit, max_bytes, counted=length is not None)
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                chunk: bytes = message.get("body", b"")
                exchange.received_bytes += len(chunk)
                exchange.body_is_read = not message.get("more_body", False)
                if inflate is not None:
                    await inflate.add(chunk)
                else:
                    body.add(chunk)
                if exchange.body_is_read:
                    break
    except TimeoutError:
        raise DeadlinePassed("the deadline passed before the body was there") from None
    return inflate.finish() if inflate is not None else body.finish()


def safetensors_data_at(begun: bytes) -> int:
    """The first byte of the data, of a safetensors body that begins so."""
    return 8 + int.from_bytes(begun[:8], "little") if len(begun) >= 8 else 8


class _Whole:
    """A body of known length, written where it will be read.

    Its data begin on a multiple of 64 bytes, as torch's own tensors do, so that they can be computed where they lie.
    """

    def __init__(self, length: int, data_at: DataAt | None) -> None:
        self._room = np.empty(length + ALIGNMENT_BYTES, dtype=np.uint8)
        self._length = length
        self._filled = 0
        self._data_at = data_at
        self._view: memoryview | None = None

    def add(self, chunk: bytes) -> None:
        if self._view is None:
            data_at = 0 if self._data_at is None else self._data_at(chunk)
            start = -(self._room.ctypes.data + data_at) % ALIGNMENT_BYTES
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
    """A compressed body, counted as sent and as it grows. Of gzip it may have several members."""

    def __init__(self, coding: Coding, permit: BytePermit, max_bytes: int, *, counted: bool) -> None:
        self._coding = coding
        self._out = _Growing(permit, max_bytes)
        self._member = zlib.decompressobj(_WINDOW_BITS[coding])
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
                    if self._coding == "deflate":
                        raise Malformed("deflate goes on", faults=[Fault("", "one deflate stream", "more behind it")])
                    self._member = zlib.decompressobj(_WINDOW_BITS[self._coding])
                self._out.add(self._member.decompress(chunk, _INFLATE_STEP_BYTES))
                chunk = self._member.unconsumed_tail or self._member.unused_data
                if chunk:
                    # A little data can grow a thousandfold: let others have a turn.
                    await asyncio.sleep(0)
        except zlib.error as error:
            fault = Fault("", f"a body in {_CODING_NAMES[self._coding]}", str(error))
            raise Malformed(f"not {self._coding}: {error}", faults=[fault]) from None

    def finish(self) -> bytearray:
        if self._sent and not self._member.eof:
            fault = Fault("", f"a whole {self._coding} stream", "a truncated one")
            raise Malformed(f"{self._coding} ends early", faults=[fault])
        return self._out.finish()
