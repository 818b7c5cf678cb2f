"""Clients that go away, and a server that does.

Half of many requests end early: by a reset or an orderly close when all was sent, in the middle of the body, in the
middle of the answer, or in silence, until the server's own limits end them. Afterwards every place must be free again:
as many requests and as many bytes are let in as the settings say, one more is refused, memory is what it was. Then the
server is told to stop, again and again, under load: whoever had sent a whole request gets an answer.
``python -m tests.benchmarks.soak.disconnects --help``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from tests.benchmarks.processes import Server
from tests.benchmarks.soak.client import Connection, NoAnswer, Reply, request_bytes
from tests.benchmarks.soak.outcome import Figure, Form, Law, Outcome, at_least, at_most, equal, run_forms
from tests.benchmarks.soak.service import GAUGES, metrics_of, refusals_between, serving, total
from tests.support.bodies import JSON, SAFETENSORS, list_body, safetensors_body
from tests.support.factory import make_tensor

MAX_INSIDE = 96
MAX_BYTES_INSIDE = 64 * 2**20
SETTINGS = {
    "ATTN_LOG_LEVEL": "warning",
    "ATTN_MAX_REQUESTS_INSIDE": str(MAX_INSIDE),
    "ATTN_MAX_BODY_BYTES_INSIDE": str(MAX_BYTES_INSIDE),
    "ATTN_MEMORY_BUDGET_BYTES": str(512 * 2**20),
    "ATTN_REQUEST_TIMEOUT_S": "3",
    "ATTN_WRITE_TIMEOUT_S": "2",
}
"""Limits that a leak would reach soon, and an end for those who are silent."""
CONNECTIONS = 32
SILENT_EVERY = 500
"""Each holds a place until a limit ends it."""
ALLOWED = (200, 429, 503, 504)
LIMIT_S = 60.0
MAX_SHOWN = 10
MAX_GROWTH = 1.05
RECEIVE_BYTES = 32 * 1024
STOP_CONNECTIONS = 12
REQUESTS_BEFORE_STOP = 200


async def _reset_after_all(connection: Connection) -> None:
    await connection.reset()


async def _close_after_all(connection: Connection) -> None:
    await connection.close()


async def _reset_in_answer(connection: Connection) -> None:
    await connection.read_some()
    await connection.reset()


async def _close_in_answer(connection: Connection) -> None:
    await connection.read_some()
    await connection.close()


@dataclass(frozen=True, slots=True)
class Leaving:
    """A way to go: how much of the request is sent, and what is done then; None is nothing, until all others are done.

    ``needs_long``: a long answer is asked.
    """

    name: str
    share_sent: float
    then: Callable[[Connection], Awaitable[None]] | None
    needs_long: bool = False


LEAVINGS = (
    Leaving("reset when all is sent", 1.0, _reset_after_all),
    Leaving("closed when all is sent", 1.0, _close_after_all),
    Leaving("reset in the body", 0.6, _reset_after_all),
    Leaving("closed in the body", 0.6, _close_after_all),
    Leaving("reset in the answer", 1.0, _reset_in_answer, needs_long=True),
    Leaving("closed in the answer", 1.0, _close_in_answer, needs_long=True),
)
SILENCES = (
    Leaving("silent in the body", 0.6, None),
    Leaving("silent in the answer", 1.0, None, needs_long=True),
)


@dataclass(slots=True)
class Tally:
    """What the clients saw. ``silent`` are still connected."""

    statuses: Counter[int] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    unanswered: list[str] = field(default_factory=list)
    silent: list[Connection] = field(default_factory=list)


def _requests() -> tuple[list[bytes], bytes]:
    """Requests of every road and length, and one whose answer is longer than what the system keeps for a client."""

    def binary(*shape: int, more: str = "", is_chunked: bool = False, **options: object) -> bytes:
        body = safetensors_body({"query": make_tensor(*shape)}, options)
        return request_bytes(body, SAFETENSORS, more=more, is_chunked=is_chunked)

    requests = [
        binary(1, 4, 16, 32),
        binary(1, 4, 128, 64),
        binary(1, 8, 384, 4),
        binary(1, 4, 128, 16, outputs=["context", "weights"]),
        binary(1, 4, 64, 16, more="te: trailers\r\n"),
        binary(1, 4, 64, 16, is_chunked=True),
        request_bytes(list_body({"query": make_tensor(1, 2, 32, 16)}, {}), JSON),
        request_bytes(list_body({"query": make_tensor(1, 4, 128, 32)}, {}), JSON),
    ]
    return requests, binary(1, 2, 1024, 1, outputs=["weights"])


async def leave_often(port: int, *, count: int, seed: int) -> Tally:
    """So many requests; every other one is given up in one of the ways, the others read their answers."""
    tally, chooser = Tally(), random.Random(seed)
    requests, long = _requests()
    numbers = iter(range(count))

    async def one(number: int) -> None:
        leaving: Leaving | None = None
        if number % SILENT_EVERY == SILENT_EVERY // 2:
            leaving = SILENCES[number // SILENT_EVERY % len(SILENCES)]
        elif number % 2:
            leaving = chooser.choice(LEAVINGS)
        needs_long = leaving is not None and leaving.needs_long
        request = long if needs_long else chooser.choice(requests)
        connection = await Connection.open(port, receive_bytes=RECEIVE_BYTES if needs_long else None)
        if leaving is None:
            try:
                tally.statuses[(await connection.ask(request)).status] += 1
            except NoAnswer as error:
                tally.unanswered.append(f"of {len(request)} bytes: {error}")
            await connection.close()
            return
        tally.left[leaving.name] += 1
        try:
            await connection.send(request[: int(leaving.share_sent * len(request))])
            if leaving.then is None:
                tally.silent.append(connection)
            else:
                await leaving.then(connection)
        except NoAnswer:
            # Refused before it was whole, and lost with it.
            await connection.close()

    async def work() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(work())
    return tally


def until_inside(port: int, count: int) -> float:
    """How many requests are inside, once they are so many and none waits, or after a limit."""
    end = time.monotonic() + LIMIT_S
    while True:
        inside, waiting = (total(metrics_of(port), name) for name in GAUGES)
        if (inside, waiting) == (count, 0) or time.monotonic() > end:
            return inside + waiting


async def places_that_are_free(port: int) -> tuple[float, int]:
    """How many requests are let in that stop within their bodies, out of as many as may be; and the status of one more.

    Nobody else must be asking.
    """
    request = _requests()[0][1]
    held = [await Connection.open(port) for _ in range(MAX_INSIDE)]
    for connection in held:
        await connection.send(request[:-100])
    inside = until_inside(port, MAX_INSIDE)
    one_more = await Connection.open(port)
    status = (await one_more.ask(request)).status
    for connection in (*held, one_more):
        await connection.reset()
    until_inside(port, 0)
    return inside, status


async def bytes_that_are_free(port: int) -> tuple[float, int]:
    """The same with two requests, announced with as many bytes as may be inside; and the status of one of 8 bytes."""
    held = [await Connection.open(port) for _ in range(2)]
    for connection in held:
        await connection.send(_beginning(MAX_BYTES_INSIDE // 2))
    inside = until_inside(port, len(held))
    one_more = await Connection.open(port)
    status = (await one_more.ask(_beginning(8))).status
    for connection in (*held, one_more):
        await connection.reset()
    until_inside(port, 0)
    return inside, status


def _beginning(length: int) -> bytes:
    """The head of a request and the first 8 bytes of its body."""
    head = request_bytes(b"", SAFETENSORS)
    return head.replace(b"content-length: 0", b"content-length: %d" % length) + bytes(8)


async def measure_leaving(server: Server, *, count: int, warm_up: int, seed: int) -> Outcome:
    """Clients that leave, and the laws that hold after them."""
    port = server.port
    await _reset_all(await leave_often(port, count=warm_up, seed=seed))
    until_inside(port, 0)
    rss_before, before = server.rss_mb(), metrics_of(port)
    began = time.monotonic()
    tally = await leave_often(port, count=count, seed=seed + 1)
    took_s = time.monotonic() - began
    left_inside = until_inside(port, 0)
    await _reset_all(tally)
    rss_after, after = server.rss_mb(), metrics_of(port)
    places, status_of_place = await places_that_are_free(port)
    num_bytes, status_of_byte = await bytes_that_are_free(port)
    grown = {series: value - before.get(series, 0.0) for series, value in after.items()}
    outcomes = {
        outcome: value
        for outcome in ("ok", "disconnected", "not_read", "cancelled", "deadline", "overloaded", "internal")
        if (value := total(grown, "attn_requests_total", f'outcome="{outcome}",route="/v1/attention"'))
    }
    num_other = sum(number for status, number in tally.statuses.items() if status not in ALLOWED)
    return Outcome(
        "disconnects",
        figures={
            "requests": count,
            "requests/s": count / took_s,
            **{f"answered {status}": number for status, number in sorted(tally.statuses.items())},
            **refusals_between(before, after),
            **dict(sorted(tally.left.items())),
            **{f"counted by the service as {outcome}": value for outcome, value in outcomes.items()},
            "memory after the warm-up, MB": rss_before,
            "memory afterwards, MB": rss_after,
        },
        laws=[
            equal("requests of those who stayed without an answer", len(tally.unanswered), 0),
            equal("answers of another status than 200, 429, 503, 504", num_other, 0),
            equal("requests inside or waiting afterwards", left_inside, 0.0),
            at_least("requests counted as disconnected", outcomes.get("disconnected", 0.0), 1),
            equal("requests counted as mistakes of the server", outcomes.get("internal", 0.0), 0.0),
            equal(f"places free afterwards, of {MAX_INSIDE}", places, float(MAX_INSIDE)),
            equal("status of one more", status_of_place, 429),
            equal("requests let in with half of the bytes each, of 2", num_bytes, 2.0),
            equal("status of a byte more", status_of_byte, 429),
            at_most("memory afterwards / after the warm-up", rss_after / rss_before, MAX_GROWTH, is_timed=True),
        ],
        notes=tally.unanswered[:MAX_SHOWN],
    )


async def _reset_all(tally: Tally) -> None:
    for connection in tally.silent:
        await connection.reset()


@dataclass(slots=True)
class Stop:
    """What came of the requests of one server that was told to stop under load.

    ``before`` were sent whole before the signal, ``after`` not; each by the status of its answer, 0 where there was
    none. ``not_sent`` could not be sent to their end.
    """

    before: Counter[int] = field(default_factory=Counter)
    after: Counter[int] = field(default_factory=Counter)
    not_sent: int = 0
    exit_code: int | None = None
    given_up: int = 0
    reasons: list[str] = field(default_factory=list)


async def stop_under_load(server: Server, *, requests_before: int) -> Stop:
    """Ask over several connections; after so many answers tell the server to stop, and go on until nobody listens."""
    stop, requests = Stop(), _requests()[0]
    told_at: list[float] = []
    loop = asyncio.get_running_loop()

    async def work(number: int) -> None:
        connection: Connection | None = None
        while True:
            number += 1
            try:
                connection = connection or await Connection.open(server.port)
            except ConnectionError:
                return
            sent_at = loop.time()
            try:
                await connection.send(requests[number % len(requests)])
                sent_at = loop.time()
            except NoAnswer:
                stop.not_sent += 1
                await connection.close()
                connection = None
                continue
            reply: Reply | None = None
            try:
                reply = await connection.read()
            except NoAnswer as error:
                stop.reasons.append(
                    f"{error}, {(sent_at - told_at[0]) * 1e3:.0f} ms after the signal" if told_at else ""
                )
            was_before = not told_at or sent_at < told_at[0]
            (stop.before if was_before else stop.after)[reply.status if reply is not None else 0] += 1
            if reply is None or reply.must_close:
                await connection.close()
                connection = None
            if not told_at and stop.before.total() >= requests_before:
                told_at.append(loop.time())
                server.process.send_signal(signal.SIGTERM)

    async with asyncio.TaskGroup() as group:
        for number in range(STOP_CONNECTIONS):
            group.create_task(work(number))
    stop.exit_code = await asyncio.to_thread(server.process.wait, LIMIT_S)
    last = json.loads(server.log.read_text().splitlines()[-1])
    stop.given_up = last["given_up_requests"] + last["unsent_answers"]
    return stop


def stop_outcome(stops: list[Stop]) -> tuple[dict[str, Figure], list[Law], list[str]]:
    before: Counter[int] = sum((stop.before for stop in stops), Counter())
    after: Counter[int] = sum((stop.after for stop in stops), Counter())
    figures: dict[str, Figure] = {"servers stopped under load": len(stops)}
    for when, statuses in (("before", before), ("after", after)):
        for status, number in sorted(statuses.items()):
            figures[f"sent {when} the signal, {f'answered {status}' if status else 'unanswered'}"] = number
    figures["not sent to their end"] = sum(stop.not_sent for stop in stops)
    others = sum(number for status, number in (before + after).items() if status not in (0, 200, 429, 503))
    laws = [
        equal("sent before the signal and unanswered", before[0], 0),
        equal("sent after the signal and unanswered", after[0], 0),
        equal("answers of another status than 200, 429, 503", others, 0),
        equal("exit codes that are not 0", sum(stop.exit_code != 0 for stop in stops), 0),
        equal("requests given up by the server", sum(stop.given_up for stop in stops), 0),
    ]
    return figures, laws, [reason for stop in stops for reason in stop.reasons][:MAX_SHOWN]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=20_000, help="default: 20000")
    parser.add_argument(
        "--warm-up", type=int, default=12000, help="requests before memory is looked at, default: 12000"
    )
    parser.add_argument("--stops", type=int, default=10, help="servers stopped under load, default: 10")
    parser.add_argument("--seed", type=int, default=4, help="default: 4")


def run(options: argparse.Namespace) -> Outcome:
    """Raises: ServerFailed."""
    with tempfile.TemporaryDirectory(prefix="attn-soak-") as name:
        folder = Path(name)
        with serving(folder, SETTINGS) as server:
            outcome = uvloop.run(
                measure_leaving(server, count=options.requests, warm_up=options.warm_up, seed=options.seed)
            )
        stops = []
        for _ in range(options.stops):
            with serving(folder, {}, ends_itself=True) as server:
                stops.append(uvloop.run(stop_under_load(server, requests_before=REQUESTS_BEFORE_STOP)))
    figures, laws, notes = stop_outcome(stops)
    return Outcome(
        outcome.form, figures=outcome.figures | figures, laws=outcome.laws + laws, notes=outcome.notes + notes
    )


FORM = Form("disconnects", "clients that go away, and a server that does", add_options, run)

if __name__ == "__main__":
    sys.exit(run_forms([FORM], prog="python -m tests.benchmarks.soak.disconnects", description=__doc__ or ""))
