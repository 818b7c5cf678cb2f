"""What runs in a text worker: requests come in on a socket, bytes in shared memory, and neither torch nor the service's
other parts are ever imported. ``text_workers`` is the other end, and says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from attn_core.errors import Fault, InvalidProblem
from service.errors import Malformed
from service.wire import inference_text, json_arrays, plan_text
from service.wire.arrays import ALIGNMENT_BYTES, STORAGE, Buffer, FlatTensor, Room

FORMATS = (json_arrays, inference_text, plan_text)
"""Whose readers and writers a task may bring. Imported here, or the first task would wait for it."""
NICENESS = 19
"""Below whoever computes: text takes the time that is left, and a tenth of a core where none is."""
OUT_OF_MEMORY_SCORE = 500
"""Whom the system ends first when memory is out: a worker, and not the server."""
KEPT_BYTES = 16 * 2**20
"""A body longer than this is wiped from its region as soon as it was read."""
_PR_SET_PDEATHSIG = 1


class ReadText(Protocol):
    """What became of a text, besides its tensors, which travel by their place."""

    tensors: dict[Any, FlatTensor]


R = TypeVar("R", bound=ReadText)
R_co = TypeVar("R_co", bound=ReadText, covariant=True)


class Reader(Protocol[R_co]):
    """Takes a text apart, and puts its tensors where ``room`` says. Travels to the worker by its name."""

    def __call__(self, body: Buffer, *, room: Room) -> R_co: ...


Writer = Callable[[Mapping[str, FlatTensor]], list[bytes | memoryview]]
"""Makes the pieces of a text of the tensors of an answer."""


@dataclass(frozen=True, slots=True)
class Place:
    """A flat tensor in a region, by its first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    count: int

    @classmethod
    def of(cls, tensor: FlatTensor, start: int) -> Place:
        return cls(tensor.dtype, tensor.shape, start, tensor.data.size)

    @property
    def end(self) -> int:
        return self.start + self.count * STORAGE[self.dtype].itemsize

    def within(self, region: NDArray[np.uint8]) -> FlatTensor:
        """The tensor, over the memory of the region."""
        return FlatTensor(self.dtype, self.shape, region[self.start : self.end].view(STORAGE[self.dtype]))


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Take apart the JSON body with which the region begins; tensors go behind it."""

    body_bytes: int
    read: Reader[ReadText]


@dataclass(frozen=True, slots=True)
class WriteTask:
    """Write an answer of tensors that lie in the region; the text goes to ``start``."""

    outputs: Mapping[str, Place]
    write: Writer
    start: int


@dataclass(frozen=True, slots=True)
class Request:
    """``capacity`` is given for a new region, whose descriptor follows; ``forgotten`` regions will not come again."""

    region: int
    capacity: int | None
    forgotten: tuple[int, ...]
    task: ReadTask | WriteTask


@dataclass(frozen=True, slots=True)
class ReadReply(Generic[R]):
    """``read`` without its tensors, whose places these are; ``end`` is where the used part of the region ends."""

    read: R
    places: Mapping[Any, Place]
    end: int


@dataclass(frozen=True, slots=True)
class WriteReply:
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RefusedReply:
    """The body is not JSON (``malformed`` says what) or cannot be taken apart."""

    malformed: str | None
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class FailedReply:
    """A mistake of ours, or no memory; ``report`` is for the log."""

    out_of_memory: bool
    report: str


Reply = ReadReply[Any] | WriteReply | RefusedReply | FailedReply


def aligned(place: int) -> int:
    """The next multiple of 64."""
    return -(-place // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def room_for_reading(body_bytes: int) -> int:
    """The bytes that a body and its tensors can take: an element has two characters or more and eight bytes at most."""
    return aligned(body_bytes) + 4 * (body_bytes + 2) + 16 * ALIGNMENT_BYTES


class _Allotment:
    """Hands out the region's memory behind ``end``, each piece where torch would begin a tensor."""

    def __init__(self, region: NDArray[np.uint8], end: int) -> None:
        self._region = region
        self.end = end

    def __call__(self, dtype: str, count: int) -> NDArray[Any]:
        storage = STORAGE[dtype]
        start = aligned(self.end)
        end = start + count * storage.itemsize
        if end > self._region.size:
            raise AssertionError(f"{end} bytes are needed of a region that has {self._region.size}")
        self.end = end
        return self._region[start:end].view(storage)

    def start_of(self, data: NDArray[Any]) -> int:
        return int(data.ctypes.data - self._region.ctypes.data)


def answer(task: ReadTask | WriteTask, region: NDArray[np.uint8]) -> Reply:
    """Do one task in its region, and say what became of it."""
    try:
        return _read(task, region) if isinstance(task, ReadTask) else _write(task, region)
    except Malformed as error:
        return RefusedReply(str(error), error.faults)
    except InvalidProblem as error:
        return RefusedReply(None, error.faults)
    except MemoryError:
        return FailedReply(out_of_memory=True, report="")
    except Exception:
        return FailedReply(out_of_memory=False, report=traceback.format_exc())


def _read(task: ReadTask, region: NDArray[np.uint8]) -> ReadReply[ReadText]:
    room = _Allotment(region, task.body_bytes)
    read = task.read(region[: task.body_bytes].data, room=room)
    places = {name: Place.of(tensor, room.start_of(tensor.data)) for name, tensor in read.tensors.items()}
    read.tensors = {}
    return ReadReply(read, places, room.end)


def _write(task: WriteTask, region: NDArray[np.uint8]) -> WriteReply:
    outputs = {name: place.within(region) for name, place in task.outputs.items()}
    end = task.start
    for piece in task.write(outputs):
        region[end : end + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        end += len(piece)
    return WriteReply(task.start, end)


def serve(descriptor: int) -> None:
    """Answer the requests on a socket until its other end closes."""
    _take_a_back_seat()
    regions: dict[int, mmap.mmap] = {}
    with Connection(descriptor) as channel, contextlib.suppress(EOFError, ConnectionError):
        while True:
            request: Request = channel.recv()
            for number in request.forgotten:
                regions.pop(number, None)
            if request.capacity is not None:
                handle = recv_handle(channel)
                regions[request.region] = mmap.mmap(handle, request.capacity)
                os.close(handle)
            memory = regions[request.region]
            reply = answer(request.task, np.frombuffer(memory, dtype=np.uint8))
            if isinstance(request.task, ReadTask) and request.task.body_bytes > KEPT_BYTES:
                wipe(memory, request.task.body_bytes)
            channel.send(reply)
            del reply, request


def wipe(memory: mmap.mmap, num_bytes: int) -> None:
    """Give the first pages of a region back to the system, for everybody who maps it."""
    whole = num_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    if whole and hasattr(mmap, "MADV_REMOVE"):
        memory.madvise(mmap.MADV_REMOVE, 0, whole)


def _take_a_back_seat() -> None:
    """Lowest in the queue for cores, first to go when memory is out, and never without the server."""
    # The server says when it is over, by closing the socket; whoever signals the whole group means the server.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    if sys.platform == "linux":
        # The socket would be looked at after the text at hand, which may be long.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(OUT_OF_MEMORY_SCORE))
