"""Where the process stands: starting, ready, draining, stopped; and the signals that move it on."""

from __future__ import annotations

import asyncio
import enum
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import Draining, Unavailable

log = logging.getLogger("attn.lifecycle")


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
        self.inside = 0
        self._stop_asked = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY

    def mark_ready(self) -> None:
        if self.state is State.STARTING:
            self.state = State.READY

    def mark_lost(self, error: BaseException) -> None:
        if self.state in (State.STARTING, State.READY):
            log.error("the device is lost: %s", error)
            self.state = State.LOST

    @contextmanager
    def work(self) -> Iterator[None]:
        """Be inside, so that a drain waits. Raises: Draining, Unavailable when nothing new is taken."""
        if self.state in (State.DRAINING, State.STOPPED):
            raise Draining("the server is draining and takes no new work")
        if self.state is not State.READY:
            raise Unavailable(f"the server is not ready: {self.state.value}")
        self.inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self._idle.set()

    def listen_for_signals(self) -> None:
        """SIGTERM and SIGINT ask for a stop; a second one changes nothing, the drain has its limit."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask_to_stop)

    def ask_to_stop(self) -> None:
        self._stop_asked.set()

    async def wait_until_asked_to_stop(self) -> None:
        await self._stop_asked.wait()

    async def drain(self, *, notice_s: float, timeout_s: float) -> int:
        """Refuse new work, keep the port open for at least ``notice_s``, wait for what is inside.

        Gives how many requests were still inside when ``timeout_s`` was over.
        """
        self.state = State.DRAINING
        log.info("draining: %d requests inside", self.inside)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.error("the drain's limit of %g s is over: %d requests are given up", timeout_s, self.inside)
            return self.inside
        await asyncio.sleep(max(0.0, notice_s - (loop.time() - began)))
        return 0

    def mark_stopped(self) -> None:
        self.state = State.STOPPED
