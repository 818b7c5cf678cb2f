"""The service in a thread of this process, on a real socket, with an engine that waits to be told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import uvloop

from attn_core import AttentionError, AttentionResult, Engine
from attn_core.errors import Checkpoint
from attn_core.prepared import Prepared
from attn_core.problem import Problem
from service.doors.rpc_server import RpcServer
from service.main import Composition, compose, listen, make_rpc_server, make_server, read_tls
from service.settings import read_settings

WAIT_S = 30.0


class GatedEngine(Engine):
    """Computes only what the test lets through; ``entered`` counts the problems that reached it."""

    def __init__(self) -> None:
        super().__init__(device="cpu", max_threads=1)
        self.entered = threading.Semaphore(0)
        self._may_run = threading.Semaphore(0)
        self._is_open = threading.Event()
        self.failure: Exception | None = None

    def warm_up(self) -> None:
        """Ready at once."""

    def run(
        self, problems: Sequence[Problem | Prepared], checkpoints: Sequence[Checkpoint | None] | None = None
    ) -> list[AttentionResult | AttentionError]:
        self.entered.release()
        if not self._is_open.is_set():
            assert self._may_run.acquire(timeout=WAIT_S)
        if self.failure is not None:
            raise self.failure
        return super().run(problems, checkpoints)

    def let_through(self, count: int = 1) -> None:
        self._may_run.release(count)

    def open(self) -> None:
        """Let everything through from now on."""
        self._is_open.set()
        self._may_run.release(10_000)

    def wait_until_entered(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.entered.acquire(timeout=WAIT_S)


class InProcess:
    """A running service; ``call`` runs a function in its event loop and gives its result."""

    def __init__(
        self, url: str, parts: Composition, engine: Engine, loop: asyncio.AbstractEventLoop, rpc: RpcServer | None
    ) -> None:
        self.url = url
        self.rpc = rpc
        self.grpc_port = 0
        self.parts = parts
        self.engine = engine
        self._loop = loop

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S)

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What a coroutine in its event loop gives."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(WAIT_S)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have the event loop call it behind all that it is to call already."""
        self._loop.call_soon_threadsafe(function)


@contextmanager
def service_in_process(
    engine: Engine,
    *,
    start_engine: bool = True,
    loop_engine: Engine | None = None,
    with_grpc: bool = False,
    **settings: Any,
) -> Iterator[InProcess]:
    """The real app, queue, batcher and server around ``engine``; the loop itself computes by ``loop_engine``, if any.

    ``with_grpc`` opens a port for gRPC as well.
    """
    resolved = read_settings({}, **settings)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    started: list[InProcess] = []
    is_up, stop = threading.Event(), threading.Event()

    async def run() -> None:
        make_loop_engine = None if loop_engine is None else lambda: loop_engine
        parts = compose(
            resolved,
            torch.device("cpu"),
            make_engine=lambda: engine,
            make_loop_engine=make_loop_engine,
            measure=None,
        )
        server = make_server(parts, resolved, read_tls(resolved)[0])
        if start_engine:
            parts.batcher.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        rpc = make_rpc_server(parts, resolved) if with_grpc else None
        service = InProcess(f"http://127.0.0.1:{port}", parts, engine, asyncio.get_running_loop(), rpc)
        if rpc is not None:
            service.grpc_port = await rpc.start("127.0.0.1:0")
        started.append(service)
        is_up.set()
        await asyncio.to_thread(stop.wait)
        if rpc is not None:
            await rpc.stop(WAIT_S)
        server.should_exit = True
        await serving
        if start_engine:
            assert await asyncio.to_thread(parts.batcher.stop, WAIT_S)
        parts.admission.check_integrity()

    thread = threading.Thread(target=lambda: uvloop.run(run()))
    thread.start()
    assert is_up.wait(WAIT_S)
    try:
        yield started[0]
    finally:
        if isinstance(engine, GatedEngine):
            engine.open()
        stop.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()
