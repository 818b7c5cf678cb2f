"""One client process: it sends what was planned, and says when each request was planned, sent and answered.

It imports neither torch nor anything that draws: whoever started it counts, checks and shows.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random as chance
import select
import selectors
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from service.load.arrivals import ClosedLoop, OpenLoop, planned_sends, starts
from service.load.payloads import Payload
from service.load.processes import prepare_process
from service.load.sending import CLIENT, Outcome, Sender, Target, make_sender

TOO_MANY, BEHIND = "not sent: too many under way", "not sent: the client was behind"
ENDED = "no answer yet when it was ended"
GRACE_S = 1.0
"""So long behind the end of a step a client still sends what it should have sent before."""
STOP, READY = "stop", "ready"
ANSWERED = 0
"""The place of answers among the kinds of outcomes."""
_PART_EVERY_S = 0.25
_MAX_SAMPLED_BYTES = 2**25
_MAX_KINDS = 20
OTHERS = "others"
_TICK_S = 0.01
_REHEARSAL_S = 5.0
_AFTER_FAILURE_S = 0.05
"""A caller of a closed loop that was refused waits so long: to ask again at once would be no load but a flood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What holds for every step. ``payloads`` by form, ``shares`` how often each of them is sent."""

    target: Target
    payloads: dict[str, list[Payload]]
    shares: list[float]
    seed: int
    max_in_flight: int
    worker: int
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """``begin``: when it begins, on the machine's monotonic clock. ``echo_urls``: an echo for each worker, instead of
    the service.

    ``num_samples`` answers are kept, drawn evenly from those of the measured time.
    """

    form: str
    loop: OpenLoop | ClosedLoop
    begin: float
    ramp_s: float
    warm_up_s: float
    duration_s: float
    num_samples: int = 0
    echo_urls: tuple[str, ...] = ()

    @property
    def measured_from_s(self) -> float:
        return self.ramp_s + self.warm_up_s

    @property
    def end_s(self) -> float:
        return self.measured_from_s + self.duration_s


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    number: int
    content: bytes


@dataclass(slots=True, eq=False)
class Part:
    """Requests that ended since the last part, a place in each array for each; times in seconds from the step's begin.

    ``kinds``: what ``kind`` counts, answers first. ``stages``: the service's times in milliseconds, of answers whose
    sends were planned in the measured time.
    """

    planned: array[float] = field(default_factory=lambda: array("d"))
    sent: array[float] = field(default_factory=lambda: array("d"))
    done: array[float] = field(default_factory=lambda: array("d"))
    number: array[int] = field(default_factory=lambda: array("H"))
    kind: array[int] = field(default_factory=lambda: array("H"))
    received: array[int] = field(default_factory=lambda: array("L"))
    stages: dict[str, array[float]] = field(default_factory=dict)
    ticks: array[float] = field(default_factory=lambda: array("d"))
    """How late a clock of this process ticked, in the measured time: what held it up held up answers too."""
    kinds: list[str] = field(default_factory=lambda: [""])
    details: dict[str, str] = field(default_factory=dict)
    in_flight: int = 0
    num_behind: int = 0
    """Sends of the measured time that were never made, since the client was still behind when the step was over."""
    samples: list[Sample] = field(default_factory=list)
    is_last: bool = False


class PreciseSelector(selectors.DefaultSelector):
    """A selector whose waits end to the microsecond. epoll counts whole milliseconds, rounded up: longer than a small
    attention takes, and all of it would be counted as the service's."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            # An epoll can be waited for like a socket.
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def make_loop() -> asyncio.AbstractEventLoop:
    selector = PreciseSelector() if sys.platform == "linux" else None
    return asyncio.SelectorEventLoop(selector)


def work(connection: Connection, job: Job) -> None:
    """What a client process runs: steps as they come over ``connection``, until it is closed or None comes."""
    prepare_process()
    # Where whoever started it is gone, there is nobody to tell.
    with suppress(BrokenPipeError, ConnectionResetError), asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(Worker(connection, job).run())


class Worker:
    def __init__(self, connection: Connection, job: Job) -> None:
        self._connection = connection
        self._job = job
        self._messages: asyncio.Queue[Step | str | None] = asyncio.Queue()

    async def run(self) -> None:
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._read)
        await self._rehearse()
        self._connection.send(READY)
        while isinstance(step := await self._messages.get(), Step | str):
            if isinstance(step, Step):
                await self._run_step(step)

    def _read(self) -> None:
        try:
            message = self._connection.recv()
        except EOFError:
            message = None
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._messages.put_nowait(message)

    async def _rehearse(self) -> None:
        """One request to this process itself: what an HTTP library loads at its first is loaded by then."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            target = replace(self._job.target, url=f"http://127.0.0.1:{port}", timeout_s=_REHEARSAL_S)
            sender = make_sender(target, grpc=False)
            await sender.send(Payload(0, "/", "", b""))
            await sender.close()

    async def _run_step(self, step: Step) -> None:
        job = self._job
        payloads = job.payloads[step.form]
        target = job.target
        if step.echo_urls:
            payloads = [payload.to_echo() for payload in payloads]
            target = replace(target, url=step.echo_urls[job.worker])
        sender = make_sender(target, grpc=step.form == "grpc")
        sending = Sending(step, job, payloads, sender)
        try:
            await self._watched(sending)
        finally:
            await sender.close()
        self._connection.send(sending.last_part())

    async def _watched(self, sending: Sending) -> None:
        """Until all is sent and answered; a message in between means that nothing more is to be sent."""
        running = asyncio.create_task(sending.run())
        stop: asyncio.Task[object] = asyncio.create_task(self._messages.get())
        while not running.done():
            await asyncio.wait((running, stop), timeout=_PART_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                sending.stop()
                await asyncio.wait((running,), timeout=_PART_EVERY_S)
            if not running.done():
                self._connection.send(sending.part())
        if stop.done():
            # The end of everything is to be seen by ``run`` as well.
            if stop.result() is None:
                self._messages.put_nowait(None)
        else:
            stop.cancel()
        running.result()


class Sending:
    """One step of one worker."""

    def __init__(self, step: Step, job: Job, payloads: Sequence[Payload], sender: Sender) -> None:
        self._step = step
        self._job = job
        self._payloads = payloads
        self._sender = sender
        self._shares = list(itertools.accumulate(job.shares))
        self._random = chance.Random(f"{job.seed} {job.worker} {step.form} {step.loop}")
        # One of its own: how many answers came when must not decide what is sent next.
        self._sampling = chance.Random(f"{job.seed} {job.worker}")
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._part = Part()
        self._kinds = {"": ANSWERED}
        self._samples: list[Sample] = []
        self._num_sampled = 0
        self._sampled_bytes = 0
        self._stopped = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        loop = self._step.loop
        ticking = asyncio.create_task(self._tick())
        sending = self._open(loop) if isinstance(loop, OpenLoop) else self._closed(loop)
        self._sending = asyncio.create_task(sending)
        await asyncio.wait((self._sending,))
        if not self._sending.cancelled():
            self._sending.result()
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        ticking.cancel()

    def stop(self) -> None:
        """Send nothing more; what is under way has a moment left."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._sending is not None and isinstance(self._step.loop, OpenLoop):
            self._sending.cancel()
        asyncio.get_running_loop().call_later(GRACE_S, self._give_up)

    def _give_up(self) -> None:
        for task in self._in_flight:
            task.cancel()

    async def _tick(self) -> None:
        step = self._step
        while (due := time.monotonic() + _TICK_S) < step.begin + step.end_s:
            await asyncio.sleep(_TICK_S)
            if due >= step.begin + step.measured_from_s:
                self._part.ticks.append(time.monotonic() - due)

    def part(self) -> Part:
        part, self._part = self._part, Part()
        part.kinds = list(self._kinds)
        part.in_flight = len(self._in_flight)
        return part

    def last_part(self) -> Part:
        part = self.part()
        part.samples, part.is_last = self._samples, True
        return part

    async def _open(self, loop: OpenLoop) -> None:
        job, begin = self._job, self._step.begin
        sends = planned_sends(
            loop,
            ramp_s=self._step.ramp_s,
            end_s=self._step.end_s,
            worker=job.worker,
            num_workers=job.num_workers,
            seed=job.seed,
        )
        for at_s in sends:
            # Also where it is late already: answers want to be read.
            await asyncio.sleep(max(0.0, begin + at_s - time.monotonic()))
            payload = self._next_payload()
            now_s = time.monotonic() - begin
            if now_s > self._step.end_s + GRACE_S:
                from_s = max(at_s, self._step.measured_from_s)
                self._part.num_behind += round((self._step.end_s - from_s) * loop.rate_s / job.num_workers)
                return
            if len(self._in_flight) >= job.max_in_flight:
                self._add(at_s, now_s, now_s, payload, Outcome(TOO_MANY))
                continue
            task = asyncio.create_task(self._one(payload, at_s))
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    async def _closed(self, loop: ClosedLoop) -> None:
        own = starts(loop, ramp_s=self._step.ramp_s, worker=self._job.worker, num_workers=self._job.num_workers)
        self._in_flight |= {asyncio.create_task(self._caller(at_s)) for at_s in own}
        if self._in_flight:
            await asyncio.wait(self._in_flight)
            self._in_flight.clear()

    async def _caller(self, start_s: float) -> None:
        begin, end_s = self._step.begin, self._step.end_s
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, begin + start_s - time.monotonic())):
                await self._stopped.wait()
        while not self._stopped.is_set() and time.monotonic() - begin < end_s:
            began = time.monotonic()
            if not await self._one(self._next_payload(), None):
                await asyncio.sleep(max(0.0, began + _AFTER_FAILURE_S - time.monotonic()))

    async def _one(self, payload: Payload, planned_s: float | None) -> bool:
        """Whether it was answered."""
        begin = self._step.begin
        sent_s = time.monotonic() - begin
        try:
            outcome = await self._sender.send(payload)
        except asyncio.CancelledError:
            self._add_after(planned_s, sent_s, payload, Outcome(ENDED))
            raise
        except Exception as error:
            # Nothing that was sent is lost without a word, whatever an HTTP library makes of an answer.
            outcome = Outcome(f"{CLIENT}{type(error).__name__}", detail=str(error))
        self._add_after(planned_s, sent_s, payload, outcome)
        return not outcome.error

    def _add_after(self, planned_s: float | None, sent_s: float, payload: Payload, outcome: Outcome) -> None:
        """What became of a send, at this very moment."""
        done_s = time.monotonic() - self._step.begin
        self._add(sent_s if planned_s is None else planned_s, sent_s, done_s, payload, outcome)

    def _next_payload(self) -> Payload:
        return self._random.choices(self._payloads, cum_weights=self._shares)[0]

    def _add(self, planned_s: float, sent_s: float, done_s: float, payload: Payload, outcome: Outcome) -> None:
        part = self._part
        part.planned.append(planned_s)
        part.sent.append(sent_s)
        part.done.append(done_s)
        part.number.append(payload.number)
        part.received.append(len(outcome.content))
        kind = outcome.error if outcome.error in self._kinds or len(self._kinds) < _MAX_KINDS else OTHERS
        part.kind.append(self._kinds.setdefault(kind, len(self._kinds)))
        if outcome.error:
            part.details.setdefault(kind, outcome.detail)
        elif self._step.measured_from_s <= planned_s < self._step.end_s:
            for name, duration_ms in outcome.stages.items():
                if math.isfinite(duration_ms):
                    part.stages.setdefault(name, array("d")).append(duration_ms)
            self._sample(payload, outcome)

    def _sample(self, payload: Payload, outcome: Outcome) -> None:
        """Keep each answer with equal chance (a reservoir), as many as wanted and as memory for them allows."""
        self._num_sampled += 1
        size, sample = len(outcome.content), Sample(payload.number, outcome.content)
        has_room = not self._samples or self._sampled_bytes + size <= _MAX_SAMPLED_BYTES
        if len(self._samples) < self._step.num_samples and has_room:
            self._samples.append(sample)
            self._sampled_bytes += size
            return
        place = self._sampling.randrange(self._num_sampled)
        if place < len(self._samples):
            self._sampled_bytes += size - len(self._samples[place].content)
            self._samples[place] = sample
