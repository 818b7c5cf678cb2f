"""A whole load test: what is asked once before, the client's ceiling, the steps one after the other, the checks behind.

Client processes send; this one only counts and shows. Nothing is checked while a step runs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import httpx
import orjson

from service.credentials import CommandError, Credentials
from service.load.account import Account, Glance
from service.load.arrivals import ClosedLoop, OpenLoop
from service.load.echo import serve_echo
from service.load.payloads import Payload, payloads
from service.load.problems import Problem, Shape, draw_problems
from service.load.results import Ceiling, Checked, Results, StepResult
from service.load.sending import Outcome, Target, make_sender
from service.load.worker import STOP, Job, Part, Step, make_loop, work

_HEAD_START_S = 0.1
"""Between telling the client processes of a step and its begin."""
_GLANCE_EVERY_S = 0.25
_FIRST_MESSAGE_S = 60.0
_CALLERS_EACH = 8
_CEILING_WARM_UP_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a load test is to do: each of ``forms`` is loaded by each of ``loops``.

    ``ceiling_s``: how long the client alone is measured, at each concurrency; 0: not at all.
    """

    url: str
    forms: tuple[str, ...]
    shapes: tuple[Shape, ...]
    loops: tuple[OpenLoop | ClosedLoop, ...]
    dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    ramp_s: float = 0.0
    warm_up_s: float = 1.0
    duration_s: float = 10.0
    num_processes: int = 1
    max_in_flight: int = 1000
    timeout_s: float = 30.0
    ceiling_s: float = 1.0
    num_checked: int = 32
    seed: int = 0
    credentials: Credentials = field(default_factory=Credentials)
    command: str = ""


class Progress(Protocol):
    """Who is told how a load test goes."""

    def say(self, what: str) -> None:
        """What goes on between steps."""
        ...

    def warn(self, what: str) -> None: ...

    def begin(self, name: str, seconds: float) -> None: ...

    def glance(self, glance: Glance) -> None: ...

    def end(self, result: StepResult | Ceiling | None) -> None: ...


class LostWorker(Exception):
    """A client process is gone."""


def run_load(plan: LoadPlan, progress: Progress, *, is_over: Callable[[], bool] = lambda: False) -> Results:
    """Every step in turn. Where ``is_over`` comes true, sending ends at once, and the results say that they were cut.

    So they do where a client process is lost: what was measured before is worth as much as it was.
    Raises: CommandError where the service does not answer these problems, or it ends before any of them is loaded.
    """
    progress.say("drawing numbers, writing requests")
    problems = draw_problems(plan.shapes, dtype=plan.dtype, seed=plan.seed)
    bodies = {form: payloads(problems, form, plan.options, dtype=plan.dtype) for form in plan.forms}
    target = Target(url=plan.url, credentials=plan.credentials, timeout_s=plan.timeout_s)
    progress.say("asking each request once")
    with asyncio.Runner(loop_factory=make_loop) as runner:
        asked = {form: runner.run(_ask_each(target, form, each, is_over)) for form, each in bodies.items()}
    service = _service(target, asked)
    answers = {form: [_whole(outcome, form) for outcome in outcomes] for form, outcomes in asked.items()}
    del asked
    with _workers(plan, target, bodies, [problem.share for problem in problems]) as workers:
        test = _Test(plan, problems, bodies, workers, progress, is_over)
        ceilings = [ceiling for form in plan.forms for ceiling in test.ceilings(form, answers.pop(form))]
        accounts = test.steps(ceilings)
    progress.say("checking answers")
    return Results(
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        command=plan.command,
        url=plan.url,
        service=service,
        client=_client(plan),
        shapes=tuple(f"{shape.text}@{shape.share:g}" for shape in plan.shapes),
        options={**plan.options, "dtype": plan.dtype},
        seed=plan.seed,
        was_cut=test.was_cut,
        ceilings=tuple(ceilings),
        steps=tuple(test.results(accounts, ceilings)),
    )


class _Test:
    """The steps of one load test, with client processes that stand ready."""

    def __init__(
        self,
        plan: LoadPlan,
        problems: Sequence[Problem],
        bodies: Mapping[str, Sequence[Payload]],
        workers: Sequence[Connection],
        progress: Progress,
        is_over: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._problems = problems
        self._bodies = bodies
        self._workers = workers
        self._progress = progress
        self._is_over = is_over
        self.was_cut = False

    def ceilings(self, form: str, answers: Sequence[bytes]) -> Iterator[Ceiling]:
        """One for each concurrency of the steps; where there is an open loop, one also with callers enough for all."""
        plan = self._plan
        levels = {loop.concurrency for loop in plan.loops if isinstance(loop, ClosedLoop)}
        if any(isinstance(loop, OpenLoop) for loop in plan.loops):
            levels.add(_CALLERS_EACH * plan.num_processes)
        if not plan.ceiling_s:
            return
        with ExitStack() as stack:
            echoes = [stack.enter_context(_echo(answers, over_grpc=form == "grpc")) for _ in self._workers]
            for concurrency in sorted(levels):
                if self.was_cut:
                    return
                account = self._run(
                    f"{form}, the client alone against an echo, {concurrency} at once",
                    form,
                    ClosedLoop(concurrency=concurrency),
                    ramp_s=0.0,
                    warm_up_s=_CEILING_WARM_UP_S,
                    duration_s=plan.ceiling_s,
                    echo_urls=tuple(echoes),
                )
                found = account.ceiling(concurrency)
                self._progress.end(found)
                if account.details:
                    self._progress.warn(f"requests to the echo failed: {', '.join(account.details)}")
                if found is not None:
                    yield found

    def steps(self, ceilings: Sequence[Ceiling]) -> list[Account]:
        plan, accounts = self._plan, []
        num_samples = -(-plan.num_checked // plan.num_processes)
        for form in plan.forms:
            for loop in plan.loops:
                if self.was_cut:
                    continue
                account = self._run(
                    f"{form}, {loop.level}",
                    form,
                    loop,
                    ramp_s=plan.ramp_s,
                    warm_up_s=plan.warm_up_s,
                    duration_s=plan.duration_s,
                    num_samples=num_samples,
                )
                accounts.append(account)
                self._progress.end(account.result(ceiling=_fitting(account.step, ceilings), checked=None))
        return accounts

    def results(self, accounts: Sequence[Account], ceilings: Sequence[Ceiling]) -> Iterator[StepResult]:
        for account, checked in zip(accounts, self._checks(accounts), strict=True):
            result = account.result(ceiling=_fitting(account.step, ceilings), checked=checked)
            if result is not None:
                yield result

    def _checks(self, accounts: Sequence[Account]) -> list[Checked | None]:
        """None for each step whose answers were not checked. Whoever interrupts it keeps what was measured."""
        checks: list[Checked | None] = [None] * len(accounts)
        if not self._plan.num_checked:
            return checks
        # Only now: torch takes seconds to import, and no client process needs it.
        from service.load.checks import Checker

        checker = Checker(self._problems, self._plan.options, self._plan.dtype)
        # What has ended the load already was not meant for the checks.
        is_over = (lambda: False) if self.was_cut else self._is_over
        with suppress(KeyboardInterrupt):
            for place, account in enumerate(accounts):
                try:
                    checks[place] = checker.check(account.step.form, account.samples, is_over=is_over)
                except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                    # What was measured is worth as much as it was, and nobody is to think that it was right.
                    fault = f"could not be checked: {type(error).__name__}: {error}"
                    checks[place] = Checked(
                        answers=0, wrong=(fault,), output="", error=0.0, allowed=0.0, same_bits=True
                    )
        return checks

    def _run(self, name: str, form: str, loop: OpenLoop | ClosedLoop, **times: Any) -> Account:
        step = Step(form=form, loop=loop, begin=time.monotonic() + _HEAD_START_S, **times)
        shapes = [problem.shape.text for problem in self._problems]
        account = Account(step, shapes, [len(payload.body) for payload in self._bodies[form]])
        self._progress.begin(name, step.end_s)
        try:
            for worker in self._workers:
                worker.send(step)
            self._collect(account)
        except (LostWorker, BrokenPipeError):
            self._cut(account)
            self._progress.warn("a client process ended by itself; what it printed says why")
        return account

    def _collect(self, account: Account) -> None:
        """Until every client process is through with its share. Raises: LostWorker."""
        begin = account.step.begin
        left: dict[Any, int] = {worker: number for number, worker in enumerate(self._workers)}
        next_glance = time.monotonic() + _GLANCE_EVERY_S
        while left:
            if not self.was_cut and self._is_over():
                self._cut(account)
                for worker in self._workers:
                    worker.send(STOP)
            for ready in wait(list(left), timeout=_GLANCE_EVERY_S):
                part = _received(ready)
                account.add(left[ready], part)
                if part.is_last:
                    del left[ready]
            if time.monotonic() >= next_glance:
                next_glance = time.monotonic() + _GLANCE_EVERY_S
                self._progress.glance(account.glance(max(0.0, time.monotonic() - begin)))

    def _cut(self, account: Account) -> None:
        self.was_cut, account.stopped_s = True, time.monotonic() - account.step.begin


def _fitting(step: Step, ceilings: Sequence[Ceiling]) -> Ceiling | None:
    """That of the same number of callers; for an open loop the highest."""
    own = [ceiling for ceiling in ceilings if ceiling.form == step.form]
    if isinstance(step.loop, ClosedLoop):
        return next((ceiling for ceiling in own if ceiling.concurrency == step.loop.concurrency), None)
    return max(own, key=lambda ceiling: ceiling.requests_s, default=None)


def _received(worker: Any) -> Part:
    """Raises: LostWorker."""
    try:
        part = worker.recv()
    except (EOFError, OSError):
        raise LostWorker from None
    assert isinstance(part, Part)
    return part


@contextmanager
def _workers(
    plan: LoadPlan, target: Target, bodies: Mapping[str, list[Payload]], shares: list[float]
) -> Iterator[list[Connection]]:
    """Client processes that have begun to listen, one connection to each; gone at the end, whatever happened."""
    spawn = multiprocessing.get_context("spawn")
    connections, processes = [], []
    try:
        for number in range(plan.num_processes):
            job = Job(
                target=target,
                payloads=dict(bodies),
                shares=shares,
                seed=plan.seed,
                max_in_flight=-(-plan.max_in_flight // plan.num_processes),
                worker=number,
                num_workers=plan.num_processes,
            )
            own, theirs = spawn.Pipe()
            process = spawn.Process(target=work, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            connections.append(own)
            processes.append(process)
        for connection in connections:
            _first_message(connection)
        yield connections
    finally:
        for connection in connections:
            with suppress(OSError):
                connection.send(None)
        for process in processes:
            process.join(timeout=2.0)
            process.kill()
        for connection in connections:
            connection.close()


@contextmanager
def _echo(answers: Sequence[bytes], *, over_grpc: bool) -> Iterator[str]:
    """The URL of an echo in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    own, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_echo, args=(theirs, list(answers), over_grpc), daemon=True)
    process.start()
    theirs.close()
    try:
        yield f"http://127.0.0.1:{_first_message(own)}"
    finally:
        own.close()
        process.join(timeout=2.0)
        process.kill()


def _first_message(connection: Connection) -> Any:
    """Raises: CommandError where none comes."""
    try:
        if connection.poll(_FIRST_MESSAGE_S):
            return connection.recv()
    except (EOFError, OSError):
        pass
    raise CommandError("a process of the load test did not start: what it printed says why")


async def _ask_each(target: Target, form: str, bodies: Sequence[Payload], is_over: Callable[[], bool]) -> list[Outcome]:
    """The answer to each body. Raises: CommandError for the first that is none, in the service's words."""
    sender = make_sender(target, grpc=form == "grpc")
    try:
        outcomes = []
        for payload in bodies:
            asking = asyncio.create_task(sender.send(payload))
            while not (await asyncio.wait((asking,), timeout=_GLANCE_EVERY_S))[0]:
                if is_over():
                    raise CommandError("ended before any load: the service had not answered each request once")
            outcome = asking.result()
            if outcome.error:
                raise CommandError(f"{target.url} does not answer this in {form}: {outcome.detail or outcome.error}")
            outcomes.append(outcome)
        return outcomes
    finally:
        await sender.close()


def _whole(outcome: Outcome, form: str) -> bytes:
    """An answer as it came over the wire, for an echo to give back."""
    if form == "grpc":
        return outcome.content
    told = {name: value for name, value in outcome.headers.items() if name not in ("transfer-encoding", "connection")}
    told["content-length"] = str(len(outcome.content))
    head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + outcome.content


def _service(target: Target, asked: Mapping[str, Sequence[Outcome]]) -> dict[str, str]:
    """What the service says of itself: nothing over gRPC, which has no such call."""
    if "grpc" in asked:
        return {}
    try:
        answer = httpx.get(
            f"{target.url}/v1",
            headers=target.credentials.headers(),
            verify=target.credentials.tls(),
            timeout=target.timeout_s,
            trust_env=False,
        )
        said = orjson.loads(answer.raise_for_status().content)
        return {name: str(said[name]) for name in ("version", "torch", "device")}
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise CommandError(f"{target.url}/v1: {error!r}; is attn there?") from None


def _client(plan: LoadPlan) -> dict[str, str]:
    return {
        "processes": str(plan.num_processes),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "library": "grpc.aio" if "grpc" in plan.forms else f"httpx {httpx.__version__}",
        "machine": platform.node(),
        "times": f"{plan.ramp_s:g} s of ramp, {plan.warm_up_s:g} s of warm-up, {plan.duration_s:g} s measured",
        "limits": f"{plan.timeout_s:g} s for an answer, {plan.max_in_flight} requests under way",
        "checks": f"{plan.num_checked} answers of each step",
    }
