"""The echo that tells the client's own ceiling: whole answers, whatever pieces bodies come in."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator

import grpc
import pytest

from service.load.echo import serve_echo

ANSWERS = [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother"]


@pytest.fixture(params=[False, True], ids=["http", "grpc"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    spawn = multiprocessing.get_context("spawn")
    own, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_echo, args=(theirs, ANSWERS, request.param), daemon=True)
    process.start()
    theirs.close()
    yield own.recv()
    own.close()
    process.join(timeout=10)
    # It left because its connection closed, not because it was killed.
    assert process.exitcode == 0


@pytest.mark.parametrize("port", [False], indirect=True)
def test_bodies_in_any_pieces_are_answered_one_after_the_other(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as answers:
        for pieces, number in (
            ([b"POST /echo/1 HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody"], 1),
            ([b"POST /ec", b"ho/0 HTTP/1.1\r\nhost: h\r\ncontent-length: 6\r\n", b"\r\nbo", b"d", b"ies"], 0),
            ([b"POST /echo/0 HTTP/1.1\r\ncontent-length: 300000\r\n\r\n", bytes(300_000)], 0),
        ):
            for piece in pieces:
                connection.sendall(piece)
            assert answers.read(len(ANSWERS[number])) == ANSWERS[number]


@pytest.mark.parametrize("port", [True], indirect=True)
def test_messages_are_answered_by_their_number(port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for number, answer in enumerate(ANSWERS):
            assert channel.unary_unary(f"/echo/{number}")(b"message", timeout=10) == answer
