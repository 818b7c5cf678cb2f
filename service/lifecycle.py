"""Where the process stands: starting, ready, draining, stopped; and the signals that move it on."""

from __future__ import annotations

import asyncio
import enum
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from service.errors import Draining, Unavailable

log = logging.getLogger("attn.lifecycle")

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    LOST = "device lost"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """Used from the event loop; ``mark_ready`` and ``mark_lost`` may be called from the engine's thread."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self._moving = threading.Lock()
        self._watchers: list[Callable[[], object]] = []
        self._inside: dict[object, Callable[[], object]] = {}
        self._given_up: set[object] = set()
        self._stop_asked = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def inside(self) -> int:
        """How many requests are inside."""
        return len(self._inside)

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY

    def watch(self, call: Callable[[], object]) -> None:
        """Have ``call`` called after each change of ``state``, in whichever thread makes it."""
        self._watchers.append(call)

    def mark_ready(self) -> None:
        self._move(State.READY, State.STARTING)

    def mark_lost(self, error: BaseException) -> None:
        if self._move(State.LOST, State.STARTING, State.READY):
            log.error("the device is lost: %s", error)

    def _move(self, state: State, *origins: State) -> bool:
        """Go to ``state`` from one of ``origins``; a warm-up that ends after the drain began must not undo it."""
        with self._moving:
            if self.state not in origins:
                return False
            self.state = state
        for call in self._watchers:
            call()
        return True

    def check_open(self) -> None:
        """Raises: Draining, Unavailable when nothing new is taken."""
        if self.state is State.READY:
            return
        if self.state in (State.DRAINING, State.STOPPED):
            raise Draining("the server is draining and takes no new work")
        raise Unavailable(f"the server is not ready: {self.state.value}")

    def enter(self, request: object, give_up: Callable[[], object]) -> None:
        """Be inside, so that a drain waits; ``give_up`` is called when it waits no longer.

        Raises: Draining, Unavailable when nothing new is taken.
        """
        self.check_open()
        assert request not in self._inside
        self._inside[request] = give_up
        self._idle.clear()

    def leave(self, request: object) -> None:
        """Be outside; a second time changes nothing."""
        self._inside.pop(request, None)
        self._given_up.discard(request)
        if not self._inside:
            self._idle.set()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Be inside, in the task of one request.

        Raises: Draining, Unavailable when nothing new is taken; Draining when a drain gives the request up.
        """
        task = asyncio.current_task()
        assert task is not None
        self.enter(task, task.cancel)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._given_up and task.uncancel() == 0:
                raise Draining("the server stops and its drain's limit is over") from None
            raise
        finally:
            self.leave(task)

    def listen_for_signals(self) -> None:
        """SIGTERM and SIGINT ask for a stop; a second one changes nothing, the drain has its limit."""
        loop = asyncio.get_running_loop()

        def ask(number: int, frame: FrameType | None) -> None:
            # Whoever goes on asking would keep the loop from doing what was asked.
            self.ignore_signals()
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.ask_to_stop)

        # Not the loop's own handlers: they go with the loop, and a second signal would then kill a process that is
        # done and about to say so.
        for number in _STOP_SIGNALS:
            signal.signal(number, ask)

    def ignore_signals(self) -> None:
        """From now to the end of the process: the interpreter puts handlers of ours back to killing as it ends."""
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def ask_to_stop(self) -> None:
        self._stop_asked.set()

    async def wait_until_asked_to_stop(self) -> None:
        await self._stop_asked.wait()

    async def drain(self, *, notice_s: float, timeout_s: float) -> int:
        """Refuse new work, keep the port open for at least ``notice_s``, wait for what is inside.

        Gives how many requests were still inside when ``timeout_s`` was over; they are answered ``Draining``.
        """
        self._move(State.DRAINING, *State)
        log.info("draining: %d requests inside", self.inside)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.error("the drain's limit of %g s is over: %d requests are given up", timeout_s, self.inside)
            self._given_up = set(self._inside)
            given_up = len(self._inside)
            for give_up in list(self._inside.values()):
                try:
                    give_up()
                except Exception:
                    log.exception("a request was not given up")
            return given_up
        await asyncio.sleep(max(0.0, notice_s - (loop.time() - began)))
        return 0

    def mark_stopped(self) -> None:
        self._move(State.STOPPED, *State)
