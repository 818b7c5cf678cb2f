"""The bytes of a request: forms agreed on, limits held while reading and inflating."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import pytest

from service.admission import Admission
from service.deadline import Deadline
from service.doors.body import (
    Coding,
    DataAt,
    Disconnected,
    inference_coding,
    negotiate,
    only_coding,
    parameter_faults,
    read_body,
    safetensors_data_at,
)
from service.doors.exchange import Exchange
from service.errors import (
    BodyTooLarge,
    DeadlinePassed,
    Malformed,
    MediaTypeNotServed,
    NotAcceptable,
    Overloaded,
)

JSON, SAFETENSORS = "application/json", "application/vnd.safetensors"
LIMIT = 4096


@pytest.mark.parametrize(
    ("content_type", "form"),
    [
        ("application/json", JSON),
        ("Application/JSON; charset=utf-8", JSON),
        ("application/vnd.safetensors", SAFETENSORS),
        (" application/vnd.safetensors ;x=y", SAFETENSORS),
    ],
)
def test_content_types_are_read_without_case_and_parameters(content_type: str, form: str) -> None:
    assert negotiate({"content-type": content_type}).request_form == form


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/x-www-form-urlencoded", "json"])
def test_other_content_types_are_refused(content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    with pytest.raises(MediaTypeNotServed) as caught:
        negotiate(headers)
    assert caught.value.faults[0].field == "Content-Type"


@pytest.mark.parametrize("charset", ["latin-1", '"UTF-16"'])
def test_other_charsets_are_refused(charset: str) -> None:
    with pytest.raises(MediaTypeNotServed):
        negotiate({"content-type": f"application/json; charset={charset}"})


def test_parameters_of_the_url_are_refused_by_their_names() -> None:
    assert parameter_faults(b"") == []
    assert [fault.field for fault in parameter_faults(b"scale=5&foo&a%20b=")] == ["?scale", "?foo", "?a b"]


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "zstd"])
def test_other_content_encodings_are_refused(encoding: str) -> None:
    with pytest.raises(MediaTypeNotServed) as caught:
        negotiate({"content-type": JSON, "content-encoding": encoding})
    assert caught.value.faults[0].field == "Content-Encoding"


@pytest.mark.parametrize(
    ("accept", "asked", "form"),
    [
        (None, JSON, JSON),
        (None, SAFETENSORS, SAFETENSORS),
        ("", SAFETENSORS, SAFETENSORS),
        ("*/*", SAFETENSORS, SAFETENSORS),
        ("*/*", JSON, JSON),
        (JSON, SAFETENSORS, JSON),
        (SAFETENSORS, JSON, SAFETENSORS),
        (f"{JSON};q=0.5, {SAFETENSORS}", JSON, SAFETENSORS),
        (f"{JSON}, {SAFETENSORS};q=0.9", SAFETENSORS, JSON),
        (f"{JSON}, text/plain, */*", SAFETENSORS, JSON),
        ("text/html, application/*;q=0.8", SAFETENSORS, SAFETENSORS),
        (f"{JSON};q=0, */*", JSON, SAFETENSORS),
        ("APPLICATION/JSON", SAFETENSORS, JSON),
    ],
)
def test_the_answer_takes_the_form_that_accept_asks_for(accept: str | None, asked: str, form: str) -> None:
    headers = {"content-type": asked} | ({} if accept is None else {"accept": accept})
    assert negotiate(headers).answer_form == form


@pytest.mark.parametrize("accept", ["text/html", f"{JSON};q=0", "image/*", "*/*;q=0", f"{JSON};q=x"])
def test_no_acceptable_form_is_refused(accept: str) -> None:
    with pytest.raises(NotAcceptable) as caught:
        negotiate({"content-type": JSON, "accept": accept})
    assert caught.value.faults[0].field == "Accept"


@pytest.mark.parametrize(
    ("header", "accepted"),
    [("", False), ("gzip", True), ("br, gzip;q=0.1", True), ("gzip;q=0", False), ("*", True), ("*, gzip;q=0", False)],
)
def test_gzip_is_used_where_it_is_accepted(header: str, accepted: bool) -> None:
    assert negotiate({"content-type": JSON, "accept-encoding": header}).accepts_gzip is accepted


def read(
    chunks: list[bytes],
    *,
    length: int | None = None,
    coding: Coding | None = None,
    data_at: DataAt | None = None,
    admission: Admission | None = None,
    timeout_s: float = 10.0,
    hang: bool = False,
) -> bytes:
    """Read chunks as a server would hand them over; afterwards nothing may be counted as inside."""
    admission = admission or Admission(max_requests=1, max_body_bytes_inside=10**9, allowed_bytes=lambda: 10**9)
    headers = {} if length is None else {"content-length": str(length)}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    if messages and not hang:
        messages[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        if not messages:
            if hang:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}
        return messages.pop(0)

    async def run() -> bytes:
        with admission.request() as permit:
            body = await read_body(
                receive,
                headers,
                exchange=Exchange(dict(raw)),
                permit=permit,
                deadline=Deadline.after(timeout_s),
                max_bytes=LIMIT,
                coding=coding,
                data_at=data_at,
            )
            return bytes(body)

    try:
        return asyncio.run(run())
    finally:
        admission.check_integrity()
        assert admission.requests_inside == 0


@pytest.mark.parametrize("data_at", [None, safetensors_data_at, lambda begun: 3])
@pytest.mark.parametrize("length", [None, 6])
def test_chunks_become_the_body(data_at: DataAt | None, length: int | None) -> None:
    assert read([b"ab", b"", b"cd", b"ef"], length=length, data_at=data_at) == b"abcdef"


def test_the_data_of_a_safetensors_body_lie_where_torch_would_put_them() -> None:
    import numpy as np

    async def run(header_length: int) -> int:
        body = header_length.to_bytes(8, "little") + bytes(header_length) + bytes(64)
        sent = [body[:100], body[100:]]

        async def receive() -> dict[str, Any]:
            chunk = sent.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(sent)}

        admission = Admission(max_requests=1, max_body_bytes_inside=10**9, allowed_bytes=lambda: 10**9)
        with admission.request() as permit:
            read_in = await read_body(
                receive,
                {"content-length": str(len(body))},
                exchange=Exchange({}),
                permit=permit,
                deadline=Deadline.after(10),
                max_bytes=LIMIT,
                data_at=safetensors_data_at,
            )
        address = np.frombuffer(read_in, dtype=np.uint8).ctypes.data
        return (address + 8 + header_length) % 64

    for header_length in (120, 128, 200, 333):
        assert asyncio.run(run(header_length)) == 0


def test_a_declared_length_over_the_limit_is_refused_before_a_byte_is_read() -> None:
    with pytest.raises(BodyTooLarge):
        read([], length=LIMIT + 1, hang=True)


def test_a_real_length_over_the_limit_is_refused_while_reading() -> None:
    with pytest.raises(BodyTooLarge):
        read([bytes(LIMIT), b"x", b"never read"])


@pytest.mark.parametrize("length", [None, "sent"])
def test_gzip_is_inflated_one_member_or_several(length: str | None) -> None:
    sent = gzip.compress(b"abc") + gzip.compress(b"def" * 100)
    for size in (1, 7, 1000):
        chunks = [sent[i : i + size] for i in range(0, len(sent), size)]
        declared = len(sent) if length else None
        assert read(chunks, length=declared, coding="gzip") == b"abc" + b"def" * 100


@pytest.mark.parametrize("length", [None, "sent"])
def test_deflate_is_inflated_in_the_framing_of_zlib(length: str | None) -> None:
    sent = zlib.compress(b"abc" * 100)
    for size in (1, 7, 1000):
        chunks = [sent[i : i + size] for i in range(0, len(sent), size)]
        assert read(chunks, length=len(sent) if length else None, coding="deflate") == b"abc" * 100


@pytest.mark.parametrize(
    "sent",
    [
        b"no deflate at all",
        zlib.compress(b"abc")[:-3],
        zlib.compress(b"abc", wbits=-15),
        gzip.compress(b"abc"),
        zlib.compress(b"abc") + b"rest",
        zlib.compress(b"abc") + zlib.compress(b"abc"),
    ],
)
def test_what_is_not_one_whole_deflate_stream_is_malformed(sent: bytes) -> None:
    with pytest.raises(Malformed):
        read([sent], length=len(sent), coding="deflate")


@pytest.mark.parametrize(
    ("header", "coding"),
    [("", None), ("identity", None), ("gzip", "gzip"), (" X-GZIP ", "gzip"), ("Deflate", "deflate")],
)
def test_the_coding_of_a_body_is_read_without_case(header: str, coding: Coding | None) -> None:
    assert inference_coding(header) == coding


@pytest.mark.parametrize("header", ["br", "gzip, gzip", "gzip, deflate", "x-deflate", "zlib"])
def test_a_coding_that_is_not_served_is_refused(header: str) -> None:
    with pytest.raises(MediaTypeNotServed):
        inference_coding(header)


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        ("", None),
        ("identity", None),
        ("*", None),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("GZIP;q=0.1", "gzip"),
        ("gzip;q=0", None),
        ("gzip;q=x", None),
        ("gzip, deflate", None),
        ("gzip, identity", None),
        ("gzip, identity;q=0", "gzip"),
        ("gzip;q=0, deflate", "deflate"),
        ("br", None),
    ],
)
def test_an_answer_is_compressed_where_exactly_one_coding_is_named(header: str, coding: Coding | None) -> None:
    assert only_coding(header) == coding


def test_gzip_that_grows_over_the_limit_is_refused() -> None:
    bomb = gzip.compress(bytes(50 * LIMIT))
    assert len(bomb) < LIMIT
    with pytest.raises(BodyTooLarge):
        read([bomb], length=len(bomb), coding="gzip")


@pytest.mark.parametrize(
    "sent", [b"not gzip at all", gzip.compress(b"abc")[:-3], zlib.compress(b"abc"), gzip.compress(b"abc") + b"rest"]
)
def test_what_is_not_whole_gzip_is_malformed(sent: bytes) -> None:
    with pytest.raises(Malformed):
        read([sent], length=len(sent), coding="gzip")


def test_an_empty_body_is_read_as_empty() -> None:
    assert read([b""], length=0) == b""
    assert read([b""], length=0, coding="gzip") == b""


def test_a_client_that_goes_away_ends_the_reading() -> None:
    with pytest.raises(Disconnected):
        read([], length=5)


def test_a_client_that_stops_sending_meets_the_deadline() -> None:
    with pytest.raises(DeadlinePassed):
        read([b"a"], length=5, timeout_s=0.0, hang=True)


@pytest.mark.parametrize("length", [50, None])
def test_bodies_of_others_leave_no_room(length: int | None) -> None:
    admission = Admission(max_requests=2, max_body_bytes_inside=100, allowed_bytes=lambda: 10**9)
    headers = {} if length is None else {"content-length": str(length)}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(50), "more_body": True}

    async def run() -> None:
        with admission.request() as permit:
            await read_body(
                receive,
                headers,
                exchange=Exchange({}),
                permit=permit,
                deadline=Deadline.after(10),
                max_bytes=LIMIT,
            )

    with admission.request() as other:
        other.hold(60)
        with pytest.raises(Overloaded) as caught:
            asyncio.run(run())
    assert caught.value.reason == "bytes"
    admission.check_integrity()
