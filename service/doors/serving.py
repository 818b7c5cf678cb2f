"""The way of one request that computes, the same at both REST doors: let in, read, written, and what becomes of it when
its client leaves or its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from service.admission import Admission, BytePermit
from service.attend import Attend
from service.deadline import Deadline
from service.doors.answers import refusal_reason
from service.doors.body import Disconnected
from service.doors.exchange import LOST_EXTENSION, ClientLost, Exchange
from service.doors.refusals import refusal_of
from service.lifecycle import Lifecycle
from service.telemetry import Metrics
from service.text_process import R, Reader, Writer
from service.text_workers import TextWorkers
from service.wire.arrays import Buffer, FlatTensor, aligned_room

LONG_TEXT_BYTES = 32 * 1024
"""Text of this length is read and written off the event loop."""
TEXT_FACTOR = 6
"""What reading JSON takes besides its body, as a multiple of it, in whichever process; one-digit numbers take more."""
SHORT_ANSWER_BYTES = 64 * 1024
SLICE_BYTES = 2**20
"""A longer answer leaves in slices, each of which its reader must take within the time for writing."""

T = TypeVar("T")
Pieces = list[bytes | memoryview]


class PiecesResponse(Response):
    """An answer sent piece by piece, none of them joined or copied.

    ``held`` is given up when the last byte has left for the socket, or the sending fails: an answer that waits for
    its reader is still inside.
    """

    def __init__(
        self,
        pieces: Pieces,
        media_type: str,
        headers: Mapping[str, str],
        *,
        held: contextlib.ExitStack,
    ) -> None:
        self.pieces = pieces
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.body = b""
        self.size = sum(len(piece) for piece in pieces)
        self._held = held
        self.init_headers({**headers, "content-length": str(self.size), "content-type": media_type})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await self._send(send)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self.size <= SHORT_ANSWER_BYTES:
            last = len(self.pieces) - 1
            for index, piece in enumerate(self.pieces):
                await send({"type": "http.response.body", "body": piece, "more_body": index < last})
            return
        for piece in self.pieces:
            for start in range(0, len(piece), SLICE_BYTES):
                part = piece[start : start + SLICE_BYTES]
                await send({"type": "http.response.body", "body": part, "more_body": True})
        # Waits until what was written before has left.
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def exchange_of(request: Request) -> Exchange:
    exchange: Exchange = request.scope["attn.exchange"]
    return exchange


def _client_lost(request: Request) -> ClientLost:
    """What tells of a lost connection; nothing does where another server runs the app."""
    lost: ClientLost = request.scope.get("extensions", {}).get(LOST_EXTENSION) or ClientLost()
    return lost


def refusal(request: Request, error: BaseException) -> Response:
    """An error as its answer, in the form of the path that was asked."""
    exchange = exchange_of(request)
    refused = refusal_of(error, exchange.request_id, path=request.scope["path"])
    exchange.outcome = refused.failure.name
    return Response(
        refused.body, status_code=refused.status, headers=dict(refused.headers), media_type=refused.media_type
    )


class Serving:
    """Shared by both doors; used from the event loop."""

    def __init__(
        self,
        *,
        attend: Attend,
        admission: Admission,
        lifecycle: Lifecycle,
        metrics: Metrics,
        text_workers: TextWorkers,
    ) -> None:
        self._attend = attend
        self._admission = admission
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._text_workers = text_workers
        self._text_pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="attn-text")

    def endpoint(self, serve: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """``serve`` with an answer whatever happens: an error's, or one for nobody where the client has left."""

        async def endpoint(request: Request) -> Response:
            lost = _client_lost(request)
            task = asyncio.current_task()
            assert task is not None
            lost.on_lost(task.cancel)
            try:
                return await serve(request)
            except Disconnected:
                exchange_of(request).outcome = "disconnected"
                return Response(status_code=400)
            except asyncio.CancelledError:
                if not lost.is_told or task.uncancel():
                    raise
                exchange_of(request).outcome = "disconnected"
                return Response(status_code=400)
            except Exception as error:
                reason = refusal_reason(error)
                if reason is not None:
                    self._metrics.refused.labels(reason).inc()
                return refusal(request, error)
            finally:
                # The answer that is being sent notices by itself.
                lost.on_lost(None)

        return endpoint

    @contextlib.contextmanager
    def inside(self) -> Iterator[tuple[BytePermit, contextlib.ExitStack]]:
        """A place for a request, given up at the end unless the answer has taken the stack along.

        Raises: Draining, Unavailable, Overloaded.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._lifecycle.work())
            self._attend.check_room()
            permit = stack.enter_context(self._admission.request())
            stack.enter_context(self._metrics.in_flight.track_inprogress())
            yield permit, stack

    async def read_text(
        self, text: Buffer, read: Reader[R], finish: Callable[[R], T], permit: BytePermit, deadline: Deadline
    ) -> T:
        """What ``finish`` makes of a text taken apart: here if it is short, else by a text worker.

        Raises: as both of them, TooLarge, Overloaded, Unavailable, DeadlinePassed.
        """
        if len(text) < LONG_TEXT_BYTES:
            return finish(read(text, room=aligned_room))
        self._admission.check_memory(TEXT_FACTOR * len(text))
        permit.hold(TEXT_FACTOR * len(text))
        if not self._text_workers.is_running:
            return await self.off_loop(lambda: finish(read(text, room=aligned_room)), deadline)
        return await self._text_workers.read(text, read, deadline, finish=finish)

    async def write_text(
        self,
        tensor_bytes: int,
        collect: Callable[[], Mapping[str, FlatTensor]],
        write: Writer,
        measure: Callable[[Mapping[str, FlatTensor]], int],
        deadline: Deadline,
    ) -> Pieces:
        """The text of an answer whose tensors have so many bytes. Raises: Unavailable, DeadlinePassed."""
        if tensor_bytes < LONG_TEXT_BYTES:
            return write(collect())
        if not self._text_workers.is_running:
            return await self.off_loop(lambda: write(collect()), deadline)
        return await self._text_workers.write(collect, write, measure, deadline)

    async def squeeze(self, pieces: Pieces, by: Callable[[Pieces], bytes], deadline: Deadline) -> Pieces:
        """An answer compressed. Raises: DeadlinePassed."""
        if sum(len(piece) for piece in pieces) < LONG_TEXT_BYTES:
            return [by(pieces)]
        return [await self.off_loop(lambda: by(pieces), deadline)]

    async def off_loop(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Run in the text threads what would hold up the event loop. Raises: DeadlinePassed; the work ends alone."""
        future = asyncio.get_running_loop().run_in_executor(self._text_pool, work)
        return await deadline.wait_for(future)
