"""Processes that read and write long JSON text away from the GIL of compute.

A thread that parses keeps the GIL: beside it attention of 32 tokens kept a hundredth of its rate, of 512 a fifth. So
text from 32 KiB on goes to processes that never import torch: one starts in 0.1 s, takes 30 MB, and what a request
of 3 MB of lists costs the server itself falls from 8.6 ms of processor time to 4.0, nearly all of it for receiving and
computing. Body, tensors and written text lie in memory that both sides map, so nothing is copied through a pipe, and
the tensors are computed where the worker put them. Workers run at a low priority.

* A region belongs to whoever holds a view of it and comes back when the last view is gone: nobody has to remember to
  give it up, and a tensor that a kernel still reads is safe. Regions are used again, since fresh pages cost 1 ms a MB.
* A worker that dies fails the text it was working on, which may be sent again, and is replaced.
* A text that nobody waits for any more is finished in vain if that takes no longer than a new worker would, else its
  worker is killed. What has not begun is dropped.
* Workers end with the server, whatever ends it: the kernel kills them with the thread that started them. Until then
  they ignore the signals that ask the server to stop, and stand outside its process group.

Whole front-end processes, which would accept connections and hand every problem to one engine process, were not built:
each binary request would pay a hop and a copy between processes (51 us for a mebibyte, as much for a few bytes) where
all of a tiny request takes 70 us, to free the engine of a loop that no longer reads text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from attn_core.errors import InvalidProblem
from service.deadline import Deadline
from service.errors import Malformed, Unavailable
from service.text_process import (
    KEPT_BYTES,
    FailedReply,
    Place,
    R,
    Reader,
    ReadReply,
    ReadTask,
    RefusedReply,
    Reply,
    Request,
    Writer,
    WriteReply,
    WriteTask,
    aligned,
    room_for_reading,
    wipe,
)
from service.wire.arrays import Buffer, FlatTensor, aligned_room

log = logging.getLogger("attn.text")

REGION_BYTES = 64 * 2**20
"""What a region can hold that is used again and again. Pages that nothing was written to take no memory."""
MAX_IDLE_REGIONS = 3
"""So many regions a worker are kept for the next text, each with at most ``KEPT_BYTES`` in it."""
MAX_LEASED_REGIONS = 64
"""Beyond so many a worker, tensors and text are copied out of their region, which is then free at once."""
GIVEN_UP_S = 0.5
"""A text that nobody waits for may take so much longer, about what a new worker costs; then its worker is replaced."""
POLL_S = 0.1
STOP_S = 2.0
_PROGRAM = "import sys; from service.text_process import serve; serve(int(sys.argv[1]))"
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # glibc keeps what it was given for the next text: fresh pages would take half of the time.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
}

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _WorkerDied(Exception):
    """The process ended under its task."""


class _GivenUp(Exception):
    """Nobody waits for this text any more."""


class _Work(Protocol[T_co]):
    """One text: how much room it needs, what is put there, what becomes of the reply."""

    def needed_bytes(self) -> int: ...

    def fill(self, region: NDArray[np.uint8]) -> ReadTask | WriteTask: ...

    def take(self, region: NDArray[np.uint8], reply: Reply, *, leave_there: bool) -> T_co: ...


@dataclass(slots=True)
class _Reading(Generic[R, T]):
    body: Buffer
    read: Reader[R]
    finish: Callable[[R], T]

    def needed_bytes(self) -> int:
        return room_for_reading(len(self.body))

    def fill(self, region: NDArray[np.uint8]) -> ReadTask:
        region[: len(self.body)] = np.frombuffer(self.body, dtype=np.uint8)
        return ReadTask(len(self.body), self.read)

    def take(self, region: NDArray[np.uint8], reply: Reply, *, leave_there: bool) -> T:
        assert isinstance(reply, ReadReply)
        for name, place in reply.places.items():
            tensor = place.within(region)
            reply.read.tensors[name] = tensor if leave_there else _copied(tensor)
        return self.finish(reply.read)


@dataclass(slots=True)
class _Writing:
    collect: Callable[[], Mapping[str, FlatTensor]]
    write: Writer
    measure: Callable[[Mapping[str, FlatTensor]], int]
    outputs: Mapping[str, FlatTensor] | None = None

    def needed_bytes(self) -> int:
        self.outputs = self.collect()
        tensor_bytes = sum(aligned(tensor.data.nbytes) for tensor in self.outputs.values())
        return tensor_bytes + self.measure(self.outputs)

    def fill(self, region: NDArray[np.uint8]) -> WriteTask:
        assert self.outputs is not None
        places: dict[str, Place] = {}
        end = 0
        for name, tensor in self.outputs.items():
            places[name] = place = Place.of(tensor, end)
            place.within(region).data[:] = tensor.data
            end = aligned(place.end)
        return WriteTask(places, self.write, end)

    def take(self, region: NDArray[np.uint8], reply: Reply, *, leave_there: bool) -> list[bytes | memoryview]:
        assert isinstance(reply, WriteReply)
        text = region[reply.start : reply.end]
        return [(text if leave_there else text.copy()).data]


def _copied(tensor: FlatTensor) -> FlatTensor:
    data = aligned_room(tensor.dtype, tensor.data.size)
    data[:] = tensor.data
    return FlatTensor(tensor.dtype, tensor.shape, data)


class _Ticket:
    """What a caller waits on. The future belongs to the event loop; a worker's thread only reports to it."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future
        self._given_up_at: float | None = None

    @property
    def overdue_s(self) -> float:
        """For how long nobody has been waiting."""
        return 0.0 if self._given_up_at is None else time.monotonic() - self._given_up_at

    def give_up(self) -> None:
        self._given_up_at = time.monotonic()

    def deliver(self, outcome: Any) -> None:
        with contextlib.suppress(RuntimeError):
            # Where the loop has closed, the caller is gone.
            self._future.get_loop().call_soon_threadsafe(self._set, outcome)

    def _set(self, outcome: Any) -> None:
        if self._future.done():
            return
        if isinstance(outcome, BaseException):
            self._future.set_exception(outcome)
        else:
            self._future.set_result(outcome)


@dataclass(slots=True)
class _Job:
    """``work`` is None once nobody waits for it."""

    work: _Work[Any] | None
    ticket: _Ticket


class _Region:
    """Memory shared with one worker. It has no name, so nothing is left of it when both have ended.

    Whoever holds the array that ``lease`` gives, or a view of it or a tensor over it, holds the region.
    """

    def __init__(self, owner: _Worker, number: int, capacity: int) -> None:
        self.owner = owner
        self.pid = owner.pid
        self.number = number
        self.capacity = capacity
        self.used_bytes = 0
        self.descriptor: int | None = _anonymous_file()
        try:
            os.ftruncate(self.descriptor, capacity)
            self.memory = mmap.mmap(self.descriptor, capacity)
        except BaseException:
            self.close_descriptor()
            raise

    def lease(self) -> NDArray[np.uint8]:
        """The whole region; its owner hears of it when the last view is gone, in whichever thread that happens."""
        array = np.frombuffer(self.memory, dtype=np.uint8)
        weakref.finalize(array, self.owner.give_back, self).atexit = False
        return array

    def close_descriptor(self) -> None:
        """Both sides have mapped the region, or one of them never will."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("attn-text")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Worker:
    """One process, the regions shared with it, and the thread that starts it, talks to it and replaces it."""

    def __init__(self, inbox: SimpleQueue[_Job | _Region | None]) -> None:
        self._inbox = inbox
        self._thread = threading.Thread(target=self._run, name="attn-text", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._numbers = itertools.count()
        # Touched by every thread that drops a region: single operations that cannot be seen half done.
        self._idle: deque[_Region] = deque()
        self._leased: set[_Region] = set()
        self._forgotten: deque[int] = deque()
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        self._thread.start()

    def interrupt(self) -> None:
        """End the process, whatever it does, and let the thread end when it next comes to the inbox."""
        self._is_stopping = True
        if self._process is not None:
            self._process.kill()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def give_back(self, region: _Region) -> None:
        """Take a region that nobody reads any more. From any thread, in the midst of anything."""
        self._leased.discard(region)
        is_reusable = region.pid == self.pid and region.capacity == REGION_BYTES and region.used_bytes <= KEPT_BYTES
        if is_reusable and len(self._idle) < MAX_IDLE_REGIONS:
            self._idle.append(region)
        else:
            # To free much memory takes a while.
            self._inbox.put(region)

    def forget(self, region: _Region) -> None:
        """Free a region for good: its pages now, the worker's view of it with the next request."""
        wipe(region.memory, region.capacity)
        region.close_descriptor()
        if region.pid == self.pid:
            self._forgotten.append(region.number)

    def _run(self) -> None:
        self._start_process()
        while self._do_next():
            # What one turn has held is gone when the next waits.
            pass
        self._end_process()

    def _do_next(self) -> bool:
        item = self._inbox.get()
        if item is None or self._is_stopping:
            return False
        if isinstance(item, _Region):
            item.owner.forget(item)
        elif (work := item.work) is not None:
            outcome = self._outcome(work, item.ticket)
            error = outcome if isinstance(outcome, BaseException) else None
            while error is not None:
                # Or the frames that it came through would hold the region for as long as it is remembered.
                traceback.clear_frames(error.__traceback__)
                error = error.__context__
            item.ticket.deliver(outcome)
        return True

    def _outcome(self, work: _Work[Any], ticket: _Ticket) -> Any:
        """What became of one text: a value, or the error that says why not."""
        try:
            return self._exchange(work, ticket)
        except _WorkerDied:
            self._replace_process("a text worker died under its work")
            return Unavailable("the process that worked on this text ended; the same request may be sent again")
        except _GivenUp:
            self._replace_process("a text that nobody waits for was taking too long")
            return Unavailable("nobody waits for this text")
        except (MemoryError, OSError) as error:
            log.warning("no memory for text: %s", error)
            return Unavailable("the memory was not to be had just now")
        except Exception as error:
            return error

    def _exchange(self, work: _Work[Any], ticket: _Ticket) -> Any:
        if self._process is None or self._process.poll() is not None:
            self._replace_process("a text worker had ended")
        if self._process is None:
            raise Unavailable("the process for text cannot be started")
        needed_bytes = work.needed_bytes()
        region = self._region_for(needed_bytes)
        array = region.lease()
        self._leased.add(region)
        region.used_bytes = needed_bytes
        task = work.fill(array)
        try:
            self._send(region, task)
            reply = self._receive(ticket)
        except (EOFError, OSError):
            raise _WorkerDied from None
        if isinstance(reply, RefusedReply):
            if reply.malformed is None:
                raise InvalidProblem(reply.faults)
            raise Malformed(reply.malformed, faults=reply.faults)
        if isinstance(reply, FailedReply):
            if reply.out_of_memory:
                raise MemoryError("in a text worker")
            raise RuntimeError(f"a text worker failed:\n{reply.report}")
        region.used_bytes = reply.end
        return work.take(array, reply, leave_there=len(self._leased) <= MAX_LEASED_REGIONS)

    def _region_for(self, needed_bytes: int) -> _Region:
        if needed_bytes > REGION_BYTES:
            return _Region(self, next(self._numbers), -(-needed_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return _Region(self, next(self._numbers), REGION_BYTES)

    def _send(self, region: _Region, task: ReadTask | WriteTask) -> None:
        assert self._channel is not None and self._process is not None
        forgotten = []
        with contextlib.suppress(IndexError):
            while True:
                forgotten.append(self._forgotten.popleft())
        is_new = region.descriptor is not None
        self._channel.send(Request(region.number, region.capacity if is_new else None, tuple(forgotten), task))
        if region.descriptor is not None:
            send_handle(self._channel, region.descriptor, self._process.pid)
            region.close_descriptor()

    def _receive(self, ticket: _Ticket) -> Reply:
        assert self._channel is not None
        while not self._channel.poll(POLL_S):
            if ticket.overdue_s > GIVEN_UP_S:
                raise _GivenUp
        reply: Reply = self._channel.recv()
        return reply

    def _start_process(self) -> None:
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            log.exception("a text worker cannot be started")
            return
        modules = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        # Inherited, so that there is no moment at which a signal for the server would end the worker.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | _ENVIRONMENT | modules,
                # Not a session of its own: the kernel may weigh sessions against each other, niceness left aside.
                process_group=0,
            )
        except OSError:
            log.exception("a text worker cannot be started")
            ours.close()
        else:
            self._channel = Connection(ours.detach())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()

    def _end_process(self) -> int | None:
        """End what is left of the process; its exit code."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            channel.close()
        if process is None:
            return None
        process.kill()
        return process.wait()

    def _replace_process(self, reason: str) -> None:
        pid = self.pid
        exit_code = self._end_process()
        self._idle.clear()
        self._forgotten.clear()
        if self._is_stopping:
            return
        if pid is not None:
            log.warning("%s", reason, extra={"fields": {"pid": pid, "exit_code": exit_code}})
        self._start_process()


class TextWorkers:
    """The road of long text. Used from the event loop; nothing is started before ``start``."""

    def __init__(self, *, num_workers: int) -> None:
        self._inbox: SimpleQueue[_Job | _Region | None] = SimpleQueue()
        self._workers = [_Worker(self._inbox) for _ in range(num_workers)]
        self.is_running = False

    def start(self) -> None:
        """Start every worker, and wait for none."""
        for worker in self._workers:
            worker.start()
        self.is_running = bool(self._workers)

    def stop(self) -> None:
        """End every worker at once; to be called when nobody waits for text any more."""
        if not self.is_running:
            return
        self.is_running = False
        for worker in self._workers:
            worker.interrupt()
        for _ in self._workers:
            self._inbox.put(None)
        for worker in self._workers:
            worker.join(STOP_S)

    def pids(self) -> list[int]:
        """The processes there are at this moment."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def read(self, body: Buffer, read: Reader[R], deadline: Deadline, *, finish: Callable[[R], T]) -> T:
        """What ``finish`` makes of a JSON body taken apart; its arrays lie in memory that is theirs while they live.

        ``read`` is a function of the formats, or a partial of one; ``finish`` runs in a thread. Raises: Malformed,
        InvalidProblem, Unavailable, DeadlinePassed, and as it does.
        """
        return await self._do(_Reading(body, read, finish), deadline)

    async def write(
        self,
        collect: Callable[[], Mapping[str, FlatTensor]],
        write: Writer,
        measure: Callable[[Mapping[str, FlatTensor]], int],
        deadline: Deadline,
    ) -> list[bytes | memoryview]:
        """An answer as the pieces of its text, of at most as many bytes as ``measure`` says.

        ``write`` is a function of the formats, or a partial of one; ``collect`` and ``measure`` run in a thread.
        Raises: Unavailable, DeadlinePassed.
        """
        return await self._do(_Writing(collect, write, measure), deadline)

    async def _do(self, work: _Work[T], deadline: Deadline) -> T:
        assert self.is_running
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _Job(work, _Ticket(future))
        self._inbox.put(job)
        try:
            return await deadline.wait_for(future)
        finally:
            if not future.done() or future.cancelled():
                job.work = None
                job.ticket.give_up()
