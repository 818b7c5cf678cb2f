"""Which heads the road for binary bodies takes: those that have one meaning, and that one."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.authentication import Authentication
from service.doors.binary import Head
from service.doors.http_protocol import HeadReader
from tests.support.bodies import JSON, SAFETENSORS

PLAIN = f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: {SAFETENSORS}\r\nContent-Length: 10\r\n\r\n".encode()


def read(head: bytes) -> Head | None:
    return HeadReader(Authentication(())).read(head)


def with_lines(*lines: str) -> bytes:
    return PLAIN[:-2] + "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n"


def test_a_plain_head_is_taken() -> None:
    assert read(PLAIN) == Head(
        target=b"/v1/attention", content_length=10, keep_alive=True, sent_id=None, accepts_gzip=False
    )
    sums = read(PLAIN.replace(b"attention", b"weighted_sum"))
    assert sums is not None and sums.target == b"/v1/weighted_sum"


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        (["Connection: close"], {"keep_alive": False}),
        (["connection: Close"], {"keep_alive": False}),
        (["Connection: keep-alive"], {"keep_alive": True}),
        (["X-Request-Id: a-1"], {"sent_id": b"a-1"}),
        (["X-Request-Id: " + "x" * 128], {"sent_id": b"x" * 128}),
        (["X-Request-Id: " + "x" * 129], {"sent_id": None}),
        (["X-Request-Id: a b"], {"sent_id": None}),
        (["X-Request-Id: \xe9"], {"sent_id": None}),
        (["X-Request-Id:"], {"sent_id": None}),
        (["Accept-Encoding: gzip"], {"accepts_gzip": True}),
        (["Accept-Encoding: br, gzip;q=0.1"], {"accepts_gzip": True}),
        (["Accept-Encoding: gzip;q=0"], {"accepts_gzip": False}),
        (["Accept-Encoding: identity"], {"accepts_gzip": False}),
        ([f"Accept: {SAFETENSORS}"], {}),
        (["Accept: */*"], {}),
        (["Accept: application/*;q=0.1, text/html"], {}),
        (["Accept:"], {}),
        (["Authorization: Bearer x", "Cookie: a=b", "User-Agent: \xff"], {}),
    ],
)
def test_what_a_head_says_is_read(lines: list[str], fields: dict[str, object]) -> None:
    head = read(with_lines(*lines))
    assert head is not None
    assert {name: getattr(head, name) for name in fields} == fields


@pytest.mark.parametrize(
    "head",
    [
        PLAIN.replace(b"POST", b"PUT"),
        PLAIN.replace(b"POST", b"GET"),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/2.0"),
        PLAIN.replace(b" HTTP/1.1", b""),
        PLAIN.replace(b"/v1/attention", b"/v1/attention/"),
        PLAIN.replace(b"/v1/attention", b"/v1/attention?x=1"),
        PLAIN.replace(b"/v1/attention", b"/v1/%61ttention"),
        PLAIN.replace(b"/v1/attention", b"http://x/v1/attention"),
        PLAIN.replace(b"/v1/attention", b"/v1/attention#x"),
        PLAIN.replace(b"/v1/attention", b"*"),
        PLAIN.replace(SAFETENSORS.encode(), JSON.encode()),
        PLAIN.replace(SAFETENSORS.encode(), SAFETENSORS.upper().encode()),
        PLAIN.replace(SAFETENSORS.encode(), SAFETENSORS.encode() + b"; x=y"),
        PLAIN.replace(b"Content-Type", b"X-Type"),
        PLAIN.replace(b"Content-Length: 10", b"Content-Length: 0"),
        PLAIN.replace(b"Content-Length: 10", b"X: 10"),
        with_lines("Content-Length: 10"),
        with_lines("content-length: 11"),
        with_lines("Transfer-Encoding: chunked"),
        with_lines("Content-Encoding: gzip"),
        with_lines("Content-Encoding: identity"),
        with_lines("Expect: 100-continue"),
        with_lines("Upgrade: h2c", "Connection: upgrade"),
        with_lines("Upgrade: h2c"),
        with_lines("TE: trailers"),
        with_lines("Trailer: x"),
        with_lines(f"Accept: {JSON}"),
        with_lines("Accept: text/html"),
        with_lines(f"Accept: {JSON}, {SAFETENSORS};q=0.5"),
        with_lines("X-A: 1", "X-A: 1"),
        with_lines("X-A: 1", "x-a: 2"),
        with_lines(f"Content-Type: {SAFETENSORS}"),
        PLAIN[:-2],
        PLAIN[:-1],
        b"",
        b"\r\n\r\n",
        b"HELLO\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
    ],
)
def test_anything_else_is_left_to_the_other_road(head: bytes) -> None:
    assert read(head) is None


def test_one_reader_tells_heads_apart_whatever_came_before() -> None:
    reader = HeadReader(Authentication(()))
    other = with_lines("X-Request-Id: b", "Connection: close")
    refused = with_lines("Expect: 100-continue")
    for head in (PLAIN, PLAIN, other, refused, refused, PLAIN, other, b"HELLO\r\n\r\n", other, PLAIN):
        assert reader.read(head) == read(head)


WITH_KEY = [with_lines(line) for line in ("Authorization: Bearer K", "authorization: bearer K", "X-API-Key: K")]
WITHOUT_KEY = [
    PLAIN,
    with_lines("Authorization: Bearer k"),
    with_lines("X-Api-Key: KK"),
    with_lines("X-Api-Key: K", "X-Api-Key: K"),
    with_lines("X-Api-Key : K"),
    with_lines("Cookie: x-api-key=K"),
]


@pytest.mark.parametrize("before", [*WITH_KEY, *WITHOUT_KEY])
def test_only_heads_with_a_key_are_taken_where_keys_are_set_whatever_came_before(before: bytes) -> None:
    reader = HeadReader(Authentication(["J", "K"]))
    for head in (*WITH_KEY, *WITHOUT_KEY):
        assert (reader.read(before) is not None) == (before in WITH_KEY)
        assert (reader.read(head) is not None) == (head in WITH_KEY)


TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
GRAMMAR = re.compile(
    rb"[\r\n]*POST +/v1/(attention|weighted_sum) (HTTP|RTSP)/1\.1\r\n(" + TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r\n)*\r\n"
)
"""A head in the strict form of RFC 9112. The parser also lets pass ends of lines before it, two
spaces, and the name of another protocol."""
PIECES = [
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b" ",
    b"\t",
    b":",
    b"\0",
    b",",
    b"0",
    b"+",
    b"\x0b",
    b"\x7f",
    b"\x85",
    b"\xff",
]
PIECES += [b"Content-Length: 5\r\n", b"\r\nTransfer-Encoding: chunked", b"\r\n Folded: x", b"1\r\n", b"\n\n", b"\r\n\n"]
FULL = with_lines("Accept: */*", "X-Request-Id: a", "Connection: keep-alive", "Accept-Encoding: gzip")


@given(st.integers(0, len(FULL)), st.integers(0, 4), st.sampled_from([b"", *PIECES]), st.sampled_from([b"", *PIECES]))
@example(0, 0, b"\r\n", b"")
@example(len(FULL), 0, b"", b"")
def test_a_head_that_is_taken_has_the_strict_form_and_one_length(
    place: int, taken: int, put: bytes, behind: bytes
) -> None:
    damaged = FULL[:place] + put + FULL[place + taken :] + behind
    end = damaged.find(b"\r\n\r\n") + 4
    head = read(damaged[:end]) if end > 3 else None
    if head is None:
        return
    text = damaged[:end]
    assert GRAMMAR.fullmatch(text), text
    lengths = re.findall(rb"(?im)^content-length:[\t ]*([0-9]+)\r$", text)
    assert [int(length) for length in lengths] == [head.content_length]
    assert not re.search(rb"(?i)\r\n(transfer-encoding|expect|upgrade|content-encoding|te|trailer):", text)
    names = [line.split(b":")[0].lower() for line in text.split(b"\r\n")[1:-2] if line]
    assert len(set(names)) == len(names)
