"""One stream of the gRPC door: ModelStreamInfer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from service.doors.exchange import Exchange
from service.errors import DeadlinePassed, Unavailable
from service.failures import Failure
from service.wire.open_inference_proto import Piece, id_of, stream_answer, stream_error
from service.wire.proto_recipes import Received

if TYPE_CHECKING:
    from service.doors.rpc import RpcDoor

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
WINDOW = 32
"""So many requests of one stream are inside at a time; no more is read of it meanwhile."""
ERROR_AT_ONCE = "triton_grpc_error"
"""Metadata by which the first error of a stream ends it with a status."""


@dataclass(slots=True)
class Item:
    """A request of a stream and what comes of it; ``inside`` is held until that is sent."""

    inside: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    pieces: list[Piece] | None = None
    task: asyncio.Task[list[Piece]] | None = None


class Stream:
    """One stream: requests are computed side by side and answered in their order, ``WINDOW`` of them at a time."""

    def __init__(self, door: RpcDoor, rpc_context: Any) -> None:
        self._door = door
        self._context = rpc_context
        self._window = asyncio.Semaphore(WINDOW)
        self._items: asyncio.Queue[Item | None] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None
        self._is_ended = False
        metadata = dict(rpc_context.invocation_metadata())
        self._error_ends_it = metadata.get(ERROR_AT_ONCE) == "true"

    async def serve(self) -> None:
        self._reading = asyncio.create_task(self._read())
        refusal: Refusal | None = None
        item: Item | None = None
        try:
            while (item := await self._items.get()) is not None:
                with item.inside:
                    pieces = item.pieces if item.task is None else await item.task
                    assert pieces is not None
                    await self._write(b"".join(pieces))
                self._window.release()
            if self._is_ended:
                refusal = self._refusal(Unavailable("the server stops"))
        except Refusal as first:
            refusal = first
        finally:
            await self._leave(item)
        if refusal is not None:
            await self._door.abort(refusal.failure, refusal.text, refusal.error, refusal.exchange, self._context)

    async def _write(self, answer: bytes) -> None:
        """Raises: Refusal where it is not read in time."""
        try:
            async with asyncio.timeout(self._door.limits.time_to_read_s(len(answer))):
                await self._context.write(answer)
        except TimeoutError:
            raise self._refusal(DeadlinePassed("the answers of the stream are not read")) from None

    def _refusal(self, error: Exception) -> Refusal:
        exchange = self._door.exchange(self._context)
        return Refusal(error, exchange, *self._door.refusal(error, exchange))

    def end(self) -> None:
        """Read no more; what has been read is answered."""
        if self._reading is not None and not self._reading.done():
            self._is_ended = True
            self._reading.cancel()

    async def _read(self) -> None:
        try:
            while True:
                await self._window.acquire()
                data = await self._context.read()
                if data is grpc.aio.EOF:
                    return
                self._items.put_nowait(self._begin(data))
        finally:
            self._items.put_nowait(None)

    def _begin(self, data: bytes) -> Item:
        began = time.monotonic()
        received = self._door.recipes.find(data)
        pieces = self._door.answer_at_once(STREAM, received, began, self._context)
        if pieces is not None:
            return Item(pieces=stream_answer(pieces))
        item = Item()
        item.task = asyncio.create_task(self._answer(received, began, item.inside))
        return item

    async def _answer(self, received: Received, began: float, inside: contextlib.ExitStack) -> list[Piece]:
        """Raises: Refusal where the first error is to end the stream."""
        door = self._door
        exchange = door.exchange(self._context)
        exchange.began = began
        with door.recorded(STREAM, exchange):
            try:
                with door.inference.lifecycle.work():
                    permit = door.enter(inside, len(received.data))
                    return stream_answer(await door.answer(received, exchange, self._context, permit))
            except Exception as error:
                failure, text = door.refusal(error, exchange)
                if self._error_ends_it:
                    raise Refusal(error, exchange, failure, text) from None
                return [stream_error(text, id_of(received.data, received.frame))]

    async def _leave(self, current: Item | None) -> None:
        """Give up whatever is still inside."""
        items = [current]
        while not self._items.empty():
            items.append(self._items.get_nowait())
        left = [item for item in items if item is not None]
        tasks = [task for task in (self._reading, *(item.task for item in left)) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            # Whoever cancels the stream may do so a second time.
            for item in left:
                item.inside.close()


class Refusal(Exception):
    """A refusal that has been counted."""

    def __init__(self, error: BaseException, exchange: Exchange, failure: Failure, text: str) -> None:
        self.error = error
        self.exchange = exchange
        self.failure = failure
        self.text = text
        super().__init__(text)
