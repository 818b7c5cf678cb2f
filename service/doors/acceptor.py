"""The listening socket: whoever waits there is taken in at once.

libuv from 1.46 on, and uvloop with it, takes in one connection in each turn of the loop. Under load a turn takes tens
of milliseconds, so that a fresh connection waits for seconds; and what still waits when the port closes is reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

log = logging.getLogger("attn.acceptor")

MAX_AT_ONCE = 128
"""So many are taken in before those that are inside have their turn."""
MAX_LAST = 1 << 16
GOODBYE_S = 0.5
"""How long a client may take to end TLS in its turn: an idle one that reads nothing would keep a stop waiting."""
PAUSE_S = 0.2
"""After a failure such as no descriptors left: asked again at once, the system would say the same."""


class Acceptor:
    """Takes connections in from its making on; has of ``asyncio.Server`` what uvicorn uses."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        *,
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float | None = None,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._coming: set[asyncio.Task[object]] = set()
        self._is_open = True
        self._tls = tls
        self._handshake_timeout_s = None if tls is None else handshake_timeout_s
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._open()

    def _open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._accept, MAX_AT_ONCE)

    def close(self) -> None:
        """Take in who waits, and then nobody; a second time changes nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._listener.fileno())
        if self._pause is not None:
            self._pause.cancel()
        self._accept(MAX_LAST)
        self._listener.close()

    async def wait_closed(self) -> None:
        if self._tls is not None:
            # Who has not ended the handshake by now may never do so.
            for task in self._coming:
                task.cancel()
        if self._coming:
            await asyncio.wait(self._coming)

    def _accept(self, at_most: int) -> None:
        for _ in range(at_most):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                # One who waited is gone.
                continue
            except OSError as error:
                log.error("a connection was not accepted: %s", error)
                if self._is_open:
                    self._loop.remove_reader(self._listener.fileno())
                    self._pause = self._loop.call_later(PAUSE_S, self._open)
                return
            coming = self._loop.connect_accepted_socket(
                self._make_protocol,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout_s,
                ssl_shutdown_timeout=None if self._tls is None else GOODBYE_S,
            )
            task = self._loop.create_task(coming)
            self._coming.add(task)
            task.add_done_callback(self._came)

    def _came(self, task: asyncio.Task[object]) -> None:
        self._coming.discard(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            # A connection that was lost meanwhile is nobody's mistake.
            task.result()
