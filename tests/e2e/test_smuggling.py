"""Requests that two readers could read in two ways: refused, or read alike by both roads, and the next one is found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core import Engine
from tests.support.bodies import SAFETENSORS
from tests.support.in_process import InProcess, service_in_process
from tests.support.roads import BOTH, Caller, Reply, Road, body_of, calls_to, chunked, cuts, port_of, request

BODY = body_of()
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\nX-Request-Id: smuggled\r\n\r\n"
N = len(BODY)


@pytest.fixture(scope="module")
def service() -> Iterator[InProcess]:
    with (
        service_in_process(
            Engine(device="cpu", max_threads=1), loop_engine=Engine(device="cpu", max_threads=1)
        ) as running,
        calls_to(running),
    ):
        yield running


@pytest.fixture(scope="module")
def port(service: InProcess) -> int:
    return port_of(service)


def written(
    road: Road, framing: bytes, *, start: bytes = b"POST /v1/attention HTTP/1.1", end: bytes = b"\r\n\r\n"
) -> bytes:
    """A head with one line, or several, about its length."""
    lines = [start, b"Host: x", b"X-Request-Id: attack", b"Content-Type: " + road.content_type.encode(), framing]
    return b"\r\n".join(lines) + end


def answered(port: int, parts: list[bytes]) -> list[tuple[int, str]]:
    """Status and id of every answer to these bytes and a marker behind them, until nothing more comes."""
    replies: list[tuple[int, str]] = []
    with Caller(port) as caller:
        with contextlib.suppress(OSError):
            # It may have been refused, and closed, at the first part.
            caller.send(*parts[:-1], parts[-1] + request(Road.BINARY, BODY, "X-Request-Id: marker"))
            caller.end()
        received = caller.until_gone()
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode("latin-1").lower().split("\r\n")[1:])
        status = int(head[9:12])
        if status < 200:
            continue
        sent_id = fields["x-request-id"]
        replies.append((status, sent_id if sent_id in ("attack", "marker", "smuggled") else "made"))
        received = received[int(fields["content-length"]) :]
    return replies


REFUSED = [(400, "made")]
READ = [(200, "attack"), (200, "marker")]
MALFORMED = [(400, "attack"), (200, "marker")]

LENGTH = b"Content-Length: %d" % N


@BOTH
@pytest.mark.parametrize(
    "framing",
    [
        LENGTH + b"\r\n" + LENGTH,
        LENGTH + b"\r\nContent-Length: 0",
        b"Content-Length: 0\r\n" + LENGTH,
        LENGTH + b"\r\nContent-Length: 5",
        LENGTH + b"\r\nContent-Length: %d" % (N + 100),
        b"Content-Length: %d, %d" % (N, N),
        b"Content-Length: %d,%d" % (N, N),
        b"Content-Length: %d 5" % N,
        b"Content-Length: +%d" % N,
        b"Content-Length: -%d" % N,
        b"Content-Length: -1",
        b"Content-Length: 0x%x" % N,
        b"Content-Length: %d.0" % N,
        b"Content-Length: %de0" % N,
        b"Content-Length: %d;x" % N,
        b"Content-Length: %d_0" % N,
        b"Content-Length: '%d'" % N,
        b"Content-Length: \xef\xbc\x95",
        b"Content-Length: \xd9\xa5",
        b"Content-Length: \xb2",
        b"Content-Length:",
        b"Content-Length:    ",
        b"Content-Length: x",
        b"Content-Length: 99999999999999999999999999",
        b"Content-Length: 18446744073709551616",
        b"Content-Length: " + b"9" * 1500,
        b"Content-Length: \x0b%d" % N,
        b"Content-Length: %d\x0c" % N,
        b"Content-Length: %d\x00" % N,
        b"Content-Length: \x00%d" % N,
        b"Content-Length : %d" % N,
        b"Content-Length\t: %d" % N,
        b"Content-Length\x00: %d" % N,
        b"Content-Length\xa0: %d" % N,
        b" Content-Length: %d" % N,
        b"\tContent-Length: %d" % N,
        b"Content-Length:\r\n %d" % N,
        b"Content-Length: 1\r\n %d" % N,
        b"Content-Length: 1\r\n\t%d" % N,
        LENGTH + b"\r\nX-A: 1\r\n folded",
        LENGTH + b"\r\nX-A: 1\r\n\tContent-Length: 3",
        LENGTH + b"\nX-A: 1",
        LENGTH + b"\rX-A: 1",
        LENGTH + b"\n\nX-A: 1",
        LENGTH + b"\r\n\nX-A: 1",
        LENGTH + b"\n\r\nX-A: 1",
        LENGTH + b"\r\n\rX-A: 1",
        LENGTH + b"\r\nX-A: a\x00b",
        LENGTH + b"\r\nX-A: a\rb",
        LENGTH + b"\r\nX-A: a\nb",
        LENGTH + b"\r\nX-\x00A: a",
        LENGTH + b"\r\nX A: a",
        LENGTH + b"\r\n: a",
        LENGTH + b"\r\nno colon",
        LENGTH + b"\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\n" + LENGTH,
        LENGTH + b"\r\ntransfer-encoding: CHUNKED",
        LENGTH + b"\r\nTransfer-Encoding: identity",
        LENGTH + b"\r\nTransfer-Encoding: xchunked",
        LENGTH + b"\r\nTransfer-Encoding:",
        LENGTH + b"\r\nTransfer-Encoding : chunked",
        LENGTH + b"\r\nTransfer-Encoding\x0b: chunked",
        LENGTH + b"\r\n Transfer-Encoding: chunked",
        LENGTH + b"\r\nX: x\r\n\tTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: gzip",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding: \x0bchunked",
        b"Transfer-Encoding: 'chunked'",
    ],
)
def test_a_length_that_could_be_read_in_two_ways_is_refused(port: int, road: Road, framing: bytes) -> None:
    for parts in ([written(road, framing) + BODY + SMUGGLED], [written(road, framing), BODY, SMUGGLED]):
        assert answered(port, parts) == REFUSED
    # Also behind a good one.
    good = request(road, BODY, "X-Request-Id: attack")
    assert answered(port, [good, written(road, framing) + BODY]) in ([READ[0], *REFUSED], [READ[0]])


@BOTH
@pytest.mark.parametrize(
    "start",
    [
        b"POST /v1/attention HTTP/1.10",
        b"POST /v1/attention HTTP/1.2",
        b"POST /v1/attention HTTP/11",
        b"POST /v1/attention HTTP/1,1",
        b"POST /v1/attention HTTP/ 1.1",
        b"POST /v1/attention http/1.1",
        b"POST /v1/attention HTTP/1.1 x",
        b"POST /v1/attention HTTP/1.1\x0b",
        b"POST /v1/attention x HTTP/1.1",
        b"POST\t/v1/attention HTTP/1.1",
        b"POST /v1/attention\tHTTP/1.1",
        b"POST\x00 /v1/attention HTTP/1.1",
        b"POST /v1/attention\x00 HTTP/1.1",
        b"POST /v1/\xe9 HTTP/1.1",
        b"post /v1/attention HTTP/1.1",
        b"POSTX /v1/attention HTTP/1.1",
        b" POST /v1/attention HTTP/1.1",
        b"POST HTTP/1.1",
        b"POST",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0",
    ],
)
def test_a_start_that_is_not_one_is_refused(port: int, road: Road, start: bytes) -> None:
    for parts in ([written(road, LENGTH, start=start) + BODY], [written(road, LENGTH, start=start), BODY]):
        assert answered(port, parts) == REFUSED


@BOTH
@pytest.mark.parametrize(
    "text",
    [
        b"POST /v1/attention HTTP/1.1\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n",
        b"POST /v1/attention HTTP/1.1\r\nHost: x\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n",
        b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\n\n",
        b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\n",
        b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\n\r\n",
        b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\r\n\r\n",
        b"POST /v1/attention HTTP/1.1\r\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n",
    ],
)
def test_lines_end_in_one_way(port: int, road: Road, text: bytes) -> None:
    head = text % (road.content_type.encode(), N)
    assert answered(port, [head + BODY + SMUGGLED]) == REFUSED
    assert answered(port, [head, BODY + SMUGGLED]) == REFUSED


@BOTH
@pytest.mark.parametrize(
    ("framing", "replies"),
    [
        (LENGTH, READ),
        (b"Content-Length: 000%d" % N, READ),
        (b"Content-Length:%d" % N, READ),
        (b"Content-Length:   %d" % N, READ),
        (b"Content-Length:\t%d" % N, READ),
        (b"Content-Length: %d  " % N, READ),
        (b"Content-Length: %d\t" % N, READ),
        (b"cOnTeNt-LeNgTh: %d" % N, READ),
        (LENGTH + b"\r\nContent_Length: 3", READ),
        (LENGTH + b"\r\nContent-Lengt: 3", READ),
        (LENGTH + b"\r\nX-Content-Length: 3", READ),
        (LENGTH + b"\r\nConnection: content-length", READ),
        (LENGTH + b"\r\nConnection: keep-alive, x", READ),
        (LENGTH + b"\r\nTransfer_Encoding: chunked", READ),
        (LENGTH + b"\r\nX-Transfer-Encoding: chunked", READ),
        (LENGTH + b"\r\nTE: chunked", READ),
        (LENGTH + b"\r\nTrailer: Content-Length", READ),
        (LENGTH + b"\r\nExpect: 100-continue", READ),
        (LENGTH + b"\r\nExpect: something else", READ),
        (LENGTH + b"\r\nUpgrade: h2c\r\nConnection: upgrade, http2-settings\r\nHTTP2-Settings: x", READ),
        (LENGTH + b"\r\nConnection: upgrade", READ),
        (LENGTH + b"\r\nUpgrade: websocket", READ),
        (LENGTH + b"\r\nX-HTTP-Method-Override: GET", READ),
        (LENGTH + b"\r\nHost: elsewhere", READ),
        (LENGTH + b"\r\nX-A: \x80\xff", READ),
        (LENGTH + b"\r\nX-A: " + b"x" * 3000, READ),
        (LENGTH + b"\r\nX-Empty:", READ),
        (LENGTH + b"\r\nConnection: close", READ[:1]),
        (LENGTH + b"\r\nConnection: keep-alive, close", READ[:1]),
        (LENGTH + b"\r\nConnection: CLOSE", READ[:1]),
    ],
)
def test_what_has_one_meaning_is_read(port: int, road: Road, framing: bytes, replies: list[tuple[int, str]]) -> None:
    head = written(road, framing)
    places = [head.index(b"\r\n"), len(head) - len(framing) - 2, len(head) - 4, len(head) - 1, len(head)]
    assert answered(port, [head + BODY]) == replies
    for place in places:
        assert answered(port, cuts(head + BODY, [place])) == replies, place


@BOTH
@pytest.mark.parametrize("start", [b"\r\n", b"\r\n\r\n", b"\r\n" * 50])
def test_empty_lines_before_a_request_are_passed_over(port: int, road: Road, start: bytes) -> None:
    text = request(road, BODY, "X-Request-Id: attack")
    assert answered(port, [start + text + start]) == READ
    assert answered(port, [start, text, start]) == READ
    assert answered(port, [start[:1], start[1:] + text]) == READ


@BOTH
def test_what_two_spaces_or_another_protocol_mean_does_not_depend_on_the_road(port: int, road: Road) -> None:
    for start in (
        b"POST  /v1/attention HTTP/1.1",
        b"POST /v1/attention RTSP/1.1",
        b"POST http://x/v1/attention HTTP/1.1",
    ):
        assert answered(port, [written(road, LENGTH, start=start) + BODY]) == READ
    for start in (b"POST /v1/attention HTTP/1.0", b"POST /v1/attention HTTP/0.9", b"POST /v1/attention"):
        assert answered(port, [written(road, LENGTH, start=start) + BODY]) == READ[:1]


@BOTH
def test_a_body_that_looks_like_requests_is_a_body(port: int, road: Road) -> None:
    inner = SMUGGLED * 3 + b"\r\n\r\n0\r\n\r\n" + request(Road.BINARY, BODY) + b"HTTP/1.1 200 OK\r\n\r\n"
    for body in (inner, BODY[:8] + inner, BODY + inner, BODY[:-4] + b"\r\n\r\n"):
        text = written(road, b"Content-Length: %d" % len(body)) + body
        status = 200 if len(body) == N else 400
        replies = [(status, "attack"), (200, "marker")]
        assert answered(port, [text]) == replies
        for place in range(len(text) - len(body) - 5, len(text), 61):
            assert answered(port, cuts(text, [place])) == replies


@BOTH
def test_bytes_behind_a_body_are_the_next_request_and_nothing_else(port: int, road: Road) -> None:
    longer = written(road, LENGTH) + BODY
    assert answered(port, [longer + SMUGGLED]) == [READ[0], (404, "smuggled"), READ[1]]
    assert answered(port, [longer, SMUGGLED]) == [READ[0], (404, "smuggled"), READ[1]]
    for rubbish in (b"rubbish\r\n\r\n", b"\0" * 200):
        # What is no request ends the connection, with words if nothing else is due at that moment.
        assert answered(port, [longer + rubbish]) in ([READ[0], *REFUSED], [READ[0]])
    # Said to be shorter than it is: the rest is no request.
    shorter = written(road, b"Content-Length: %d" % (N - 10)) + BODY
    assert answered(port, [shorter]) in ([MALFORMED[0], *REFUSED], [MALFORMED[0]])
    # Said to be longer: it takes some of what follows, whose rest is no request.
    more = written(road, b"Content-Length: %d" % (N + 40)) + BODY
    assert answered(port, [more]) in ([MALFORMED[0], *REFUSED], [MALFORMED[0]])
    # Exactly the following request is part of the body.
    all_of_it = written(road, b"Content-Length: %d" % (N + len(SMUGGLED))) + BODY + SMUGGLED
    assert answered(port, [all_of_it]) == MALFORMED


CHUNKED = b"Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("text", "replies"),
    [
        (b"%x\r\n%s\r\n0\r\n\r\n", READ),
        (b"%X\r\n%s\r\n0\r\n\r\n", READ),
        (b"000%x\r\n%s\r\n000\r\n\r\n", READ),
        (b"%x;x\r\n%s\r\n0;y=z\r\n\r\n", READ),
        (b'%x;x="quoted"\r\n%s\r\n0\r\n\r\n', READ),
        (b"%x\r\n%s\r\n0\r\nX-Trailer: a\r\n\r\n", READ),
        (b"%x\r\n%s\r\n0\r\nContent-Length: 3\r\n\r\n", REFUSED),
        (b"%x\n%s\r\n0\r\n\r\n", REFUSED),
        (b"%x\r\n%s\n0\r\n\r\n", REFUSED),
        (b"%x\r\n%s\r\n0\n\n", REFUSED),
        (b"%x;x\n%s\r\n0\r\n\r\n", REFUSED),
        (b"%x;\n%s\r\n0\r\n\r\n", REFUSED),
        (b"%x;x\rX\r\n%s\r\n0\r\n\r\n", REFUSED),
        (b"0x%x\r\n%s\r\n0\r\n\r\n", REFUSED),
        (b"+%x\r\n%s\r\n0\r\n\r\n", REFUSED),
        (b"-%x\r\n%s\r\n0\r\n\r\n", REFUSED),
        (b"%x \r\n%s\r\n0\r\n\r\n", REFUSED),
        (b" %x\r\n%s\r\n0\r\n\r\n", REFUSED),
        (b"%x\x00\r\n%s\r\n0\r\n\r\n", REFUSED),
        (b"\r\n%x\r\n%s\r\n0\r\n\r\n", REFUSED),
        (b"fffffffffffffffff%x\r\n%s\r\n0\r\n\r\n", REFUSED),
        (b"%xz\r\n%s\r\n0\r\n\r\n", REFUSED),
        (b"%x\r\n%sXX0\r\n\r\n", REFUSED),
        (b"%x\r\n%s0\r\n\r\n", REFUSED),
    ],
)
def test_chunks_have_one_form(port: int, text: bytes, replies: list[tuple[int, str]]) -> None:
    """Only one road reads chunks; the marker behind them takes the other."""
    head = written(Road.BINARY, CHUNKED)
    body = text % (N, BODY)
    for parts in ([head + body], [head, body], cuts(head + body, [len(head) + 1, len(head) + N])):
        found = answered(port, parts)
        # A refusal while the body is read: the request that was begun is not answered as if it were whole.
        assert found == replies or (replies == REFUSED and found == [(400, "attack")]), parts
    with Caller(port) as caller:
        caller.send(chunked(BODY, size=7))
        assert caller.reply().status == 200


def test_chunks_too_short_or_too_long_take_nothing_of_the_next_request(port: int) -> None:
    head = written(Road.BINARY, CHUNKED)
    for size in (N - 1, N + 1, N + 2, N + 7):
        found = answered(port, [head + b"%x\r\n%b\r\n0\r\n\r\n" % (size, BODY) + SMUGGLED])
        assert all(status == 400 for status, _ in found) and found
    # The last chunk comes early: what follows it is the next request.
    early = head + b"5\r\n%b\r\n0\r\n\r\n" % BODY[:5]
    assert answered(port, [early + SMUGGLED]) == [(400, "attack"), (404, "smuggled"), (200, "marker")]


HEAD = (
    b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nX-Request-Id: attack\r\n"
    b"Content-Length: %d\r\nConnection: keep-alive\r\nAccept: */*\r\nContent-Type: "
) % N
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
    b";",
    b"0",
    b"5",
    b"\x0b",
    b"\x7f",
    b"\xff",
]
PIECES += [b"\r\nContent-Length: 5\r\n", b"\r\nTransfer-Encoding: chunked\r\n", b"chunked", b"Content-Length: 0\r\n"]


@settings(max_examples=400)
@given(
    place=st.integers(0, len(HEAD) - 1),
    taken=st.integers(0, 3),
    put=st.sampled_from([b"", *PIECES]),
    cut=st.integers(1, len(HEAD)),
)
def test_a_damaged_head_is_read_alike_by_both_roads(port: int, place: int, taken: int, put: bytes, cut: int) -> None:
    damaged = HEAD[:place] + put + HEAD[place + taken :]
    found = []
    for content_type in (SAFETENSORS, Road.ASGI.content_type):
        text = damaged + content_type.encode() + b"\r\n\r\n" + BODY + SMUGGLED
        found += [answered(port, [text]), answered(port, cuts(text, [cut]))]
    assert all(replies == found[0] for replies in found), damaged
    # Whoever is asked for has been: the marker last, and what was smuggled only where it was a request of its own.
    ids = [own for _, own in found[0]]
    assert ids in (
        ["attack", "smuggled", "marker"],
        ["made", "smuggled", "marker"],
        ["attack", "made"],
        ["made", "made"],
        ["attack"],
        ["made"],
        [],
    ), (damaged, found[0])


def test_a_reply_is_what_it_says(port: int) -> None:
    """The reader of this suite itself: a second answer in one would be seen."""
    with Caller(port) as caller:
        caller.send(request(Road.BINARY, BODY) + SMUGGLED)
        first, second = caller.reply(), caller.reply()
        assert isinstance(first, Reply)
        assert (first.status, second.status, second.headers["x-request-id"]) == (200, 404, "smuggled")
