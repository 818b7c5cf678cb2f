"""One client process: it sends what was planned, and says when each request was planned, sent and answered.

It imports neither torch nor anything that draws: whoever started it counts, checks and shows.
"""

from __future__ import annotations

import asyncio
import itertools
import random as chance
import select
import selectors
import signal
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from service.load.arrivals import ClosedLoop, OpenLoop, planned_sends, starts
from service.load.payloads import Payload
from service.load.sending import Outcome, Sender, Target, make_sender

TOO_MANY, BEHIND = "not sent: too many under way", "not sent: the client was behind"
NOT_SENT = (TOO_MANY, BEHIND)
GRACE_S = 1.0
"""So long behind the end of a step a client still sends what it should have sent before."""
STOP, READY = "stop", "ready"
ANSWERED = 0
"""The place of answers among the kinds of outcomes."""
_PART_EVERY_S = 0.25
_MAX_SAMPLED_BYTES = 2**27


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
    """``begin``: when it begins, on the machine's monotonic clock. ``echo_url``: an echo instead of the service.

    ``num_samples`` answers are kept, drawn evenly from those of the measured time.
    """

    form: str
    loop: OpenLoop | ClosedLoop
    begin: float
    ramp_s: float
    warm_up_s: float
    duration_s: float
    num_samples: int = 0
    echo_url: str | None = None

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
    kinds: list[str] = field(default_factory=lambda: [""])
    details: dict[str, str] = field(default_factory=dict)
    in_flight: int = 0
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
    # Whoever started it decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(Worker(connection, job).run())


class Worker:
    def __init__(self, connection: Connection, job: Job) -> None:
        self._connection = connection
        self._job = job
        self._messages: asyncio.Queue[Step | str | None] = asyncio.Queue()

    async def run(self) -> None:
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._read)
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

    async def _run_step(self, step: Step) -> None:
        job = self._job
        payloads = job.payloads[step.form]
        target = job.target
        if step.echo_url is not None:
            payloads = [payload.to_echo() for payload in payloads]
            target = Target(url=step.echo_url, credentials=target.credentials, timeout_s=target.timeout_s)
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
        self._in_flight: set[asyncio.Task[None]] = set()
        self._part = Part()
        self._kinds = {"": ANSWERED}
        self._samples: list[Sample] = []
        self._num_sampled = 0
        self._sampled_bytes = 0
        self._stopped = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        loop = self._step.loop
        sending = self._open(loop) if isinstance(loop, OpenLoop) else self._closed(loop)
        self._sending = asyncio.create_task(sending)
        await asyncio.wait((self._sending,))
        if not self._sending.cancelled():
            self._sending.result()
        if self._in_flight:
            await asyncio.wait(self._in_flight)

    def stop(self) -> None:
        """Send nothing more; what is under way is waited for."""
        self._stopped.set()
        if self._sending is not None and isinstance(self._step.loop, OpenLoop):
            self._sending.cancel()

    def part(self) -> Part:
        part, self._part = self._part, Part(kinds=list(self._kinds))
        part.kinds = list(self._kinds)
        part.in_flight = len(self._in_flight)
        return part

    def last_part(self) -> Part:
        part = self.part()
        part.samples, part.is_last = self._samples, True
        return part

    async def _open(self, loop: OpenLoop) -> None:
        job, begin, is_behind = self._job, self._step.begin, False
        sends = planned_sends(
            loop,
            ramp_s=self._step.ramp_s,
            end_s=self._step.end_s,
            worker=job.worker,
            num_workers=job.num_workers,
            seed=job.seed,
        )
        for at_s in sends:
            if not is_behind:
                # Also where it is late already: answers want to be read.
                await asyncio.sleep(max(0.0, begin + at_s - time.monotonic()))
            payload = self._next_payload()
            now_s = time.monotonic() - begin
            is_behind = now_s > self._step.end_s + GRACE_S
            if is_behind or len(self._in_flight) >= job.max_in_flight:
                self._add(at_s, now_s, now_s, payload, Outcome(BEHIND if is_behind else TOO_MANY))
                continue
            task = asyncio.create_task(self._one(payload, at_s))
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    async def _closed(self, loop: ClosedLoop) -> None:
        own = starts(loop, ramp_s=self._step.ramp_s, worker=self._job.worker, num_workers=self._job.num_workers)
        self._in_flight |= {asyncio.create_task(self._caller(at_s)) for at_s in own}
        await asyncio.wait(self._in_flight) if self._in_flight else None
        for task in self._in_flight:
            task.result()
        self._in_flight.clear()

    async def _caller(self, start_s: float) -> None:
        begin, end_s = self._step.begin, self._step.end_s
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, begin + start_s - time.monotonic())):
                await self._stopped.wait()
        while not self._stopped.is_set() and time.monotonic() - begin < end_s:
            await self._one(self._next_payload(), None)

    async def _one(self, payload: Payload, planned_s: float | None) -> None:
        begin = self._step.begin
        sent_s = time.monotonic() - begin
        outcome = await self._sender.send(payload)
        done_s = time.monotonic() - begin
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
        part.kind.append(self._kinds.setdefault(outcome.error, len(self._kinds)))
        if outcome.error:
            part.details.setdefault(outcome.error, outcome.detail)
        elif planned_s >= self._step.measured_from_s:
            for name, duration_ms in outcome.stages.items():
                part.stages.setdefault(name, array("d")).append(duration_ms)
            self._sample(payload, outcome)

    def _sample(self, payload: Payload, outcome: Outcome) -> None:
        """Keep each answer with equal chance (a reservoir), as far as memory for them goes."""
        self._num_sampled += 1
        size, sample = len(outcome.content), Sample(payload.number, outcome.content)
        if len(self._samples) < self._step.num_samples:
            if not self._samples or self._sampled_bytes + size <= _MAX_SAMPLED_BYTES:
                self._samples.append(sample)
                self._sampled_bytes += size
            return
        place = self._random.randrange(self._num_sampled)
        if place < len(self._samples):
            self._sampled_bytes += size - len(self._samples[place].content)
            self._samples[place] = sample
