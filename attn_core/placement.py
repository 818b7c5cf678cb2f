"""Where tensors lie: on the host at addresses that give equal bits, on the way to a GPU in pinned memory, and back."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
"""Where torch begins the tensors that it allocates on the host."""
MAX_PINNED_BYTES = 2**28
"""Of all buffers that a GPU's staging holds; what does not fit travels from ordinary memory, slower."""
MIN_PINNED_BYTES = 2**18


def aligned(tensor: Tensor) -> Tensor:
    """The tensor where torch itself would have put it: on a multiple of 64 bytes, copied if need be.

    BLAS picks its instructions by the address, so the same numbers elsewhere in memory could give other bits.
    """
    if tensor.device.type != "cpu" or tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone()


def empty_in_step(tensor: Tensor) -> Tensor:
    """An empty tensor of the same shape and order in memory in which every number lies as far from a multiple of 64
    bytes as in ``tensor``, with as little between its rows as that takes."""
    unit, last = ALIGNMENT_BYTES // tensor.dtype.itemsize, tensor.ndim - 1
    strides, room = list(tensor.stride()), 1
    for axis in sorted(range(tensor.ndim), key=lambda axis: (axis != last, strides[axis], -axis)):
        strides[axis] = 1 if axis == last else room + (strides[axis] - room) % unit
        room = strides[axis] * tensor.shape[axis]
    memory = torch.empty(room + 2 * unit, dtype=tensor.dtype, device=tensor.device)
    shift = (tensor.data_ptr() - memory.data_ptr()) // tensor.dtype.itemsize % unit
    return memory[shift:].as_strided(tensor.shape, strides)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """The tensor, not yet written, of pages of two mebibytes where the system lends them to whoever asks.

    The first touch of a page of four kibibytes takes a millisecond a megabyte, a third of the time of whole weights.
    """
    if tensor.device.type == "cpu" and tensor.nbytes >= _FROM_BYTES and (madvise := _madvise()) is not None:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        # Refused where the system knows no such pages; then the tensor is as good as it was.
        madvise(begin, tensor.data_ptr() + tensor.nbytes - begin, mmap.MADV_HUGEPAGE)
    return tensor


_FROM_BYTES = 2**25
"""What the C library maps anew for each tensor; smaller ones come from memory that was touched before."""


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found


def place(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on ``device``. From the host to a GPU they go through pinned memory, and nothing waits for them.

    On the host they stay where they are unless their address would change the bits.
    """
    if device.type == "cpu":
        return {name: aligned(tensor.to(device)) for name, tensor in tensors.items()}
    return {
        name: (tensor if tensor.device.type != "cpu" else tensor.pin_memory()).to(device, non_blocking=True)
        for name, tensor in tensors.items()
    }


def bring_back(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Results on the device that their problem came from; from a GPU to the host by one wait for all of them."""
    if device.type != "cpu" or all(tensor.device == device for tensor in tensors.values()):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    staged = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    torch.cuda.current_stream(next(iter(tensors.values())).device).synchronize()
    return staged


class Event(Protocol):
    """A point on a stream, as torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether the stream is past it. Does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream is past it."""
        ...


def _allocate_pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class BufferPool:
    """Buffers that are used again and again, together never over ``max_bytes``.

    A buffer comes back with the event after which nothing reads or writes it any more; nobody waits for it. None is
    ever freed: torch would keep the pinned memory all the same, and count it nowhere.
    """

    def __init__(
        self, *, max_bytes: int = MAX_PINNED_BYTES, allocate: Callable[[int], Tensor] = _allocate_pinned
    ) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._allocate = allocate
        self._resting: list[tuple[Tensor, Event | None]] = []
        self._lent_bytes = 0

    def lend(self, num_bytes: int) -> Tensor | None:
        """A uint8 buffer of at least so many bytes, the smallest at hand; None if there is no room for one now."""
        fitting = (
            (buffer.numel(), index)
            for index, (buffer, event) in enumerate(self._resting)
            if buffer.numel() >= num_bytes and (event is None or event.query())
        )
        # Sizes are powers of two, so that buffers of problems of about one size serve each other.
        size = max(MIN_PINNED_BYTES, 1 << max(0, num_bytes - 1).bit_length())
        has_room = self.held_bytes + size <= self.max_bytes
        best = min(fitting, default=None)
        if best is not None and (best[0] == size or not has_room):
            buffer, _ = self._resting.pop(best[1])
        elif has_room:
            # An inference tensor could not be written to outside of inference mode.
            with torch.inference_mode(False):
                buffer = self._allocate(size)
            self.held_bytes += size
        else:
            return None
        self._lent_bytes += buffer.numel()
        return buffer

    def take_back(self, buffer: Tensor, event: Event | None) -> None:
        self._lent_bytes -= buffer.numel()
        self._resting.append((buffer, event))

    def check_integrity(self) -> None:
        resting = sum(buffer.numel() for buffer, _ in self._resting)
        assert self._lent_bytes >= 0
        assert resting + self._lent_bytes == self.held_bytes <= self.max_bytes


class Arrival:
    """Tensors on their way to the host; ``with`` waits for them and gives them.

    What must outlive the block is to be copied: their memory is used again.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        event: Event | None = None,
        buffers: Sequence[Tensor] = (),
        pool: BufferPool | None = None,
    ) -> None:
        self._tensors = tensors
        self._event = event
        self._buffers = buffers
        self._pool = pool

    def __enter__(self) -> Sequence[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors

    def __exit__(self, *_: object) -> None:
        for buffer in self._buffers:
            assert self._pool is not None
            self._pool.take_back(buffer, self._event)


class Staging:
    """The way of one batch to a GPU and back, beside the computing of others.

    Pinned buffers that are used again, and a stream for each direction, tied to the computing stream by events: nothing
    on the host waits but who enters an ``Arrival``. On another device nothing is moved. Not for use from two threads at
    once.
    """

    def __init__(self, device: torch.device, *, pool: BufferPool | None = None) -> None:
        self.device = device
        self.pool = BufferPool() if pool is None else pool
        self._lent: list[Tensor] = []
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._inbound, self._outbound = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory to write into what ``send`` will take: pinned where there is room for it, and contiguous."""
        tensor, buffer = self._host(shape, dtype)
        if buffer is not None:
            self._lent.append(buffer)
        return tensor

    def send(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The tensors on the device, for the stream that computes now, which waits for them; the host does not.

        What ``empty`` has made up to now must not be touched afterwards.
        """
        if not self._is_cuda:
            return list(tensors)
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._inbound):
            placed = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        computing.wait_event(self._inbound.record_event())
        for tensor in placed:
            # Its memory is the copying stream's, which must not copy the next one there while this one is read.
            tensor.record_stream(computing)
        self.forget()
        return placed

    def forget(self) -> None:
        """Give back what ``empty`` has made, once the copies under way have read it. ``send`` has done so."""
        if self._lent:
            event = self._inbound.record_event()
            for buffer in self._lent:
                self.pool.take_back(buffer, event)
            self._lent.clear()

    def fetch(self, tensors: Iterable[Tensor]) -> Arrival:
        """Begin to copy results to the host, as soon as the stream that computes now is through with them."""
        if not self._is_cuda:
            return Arrival(list(tensors))
        self._outbound.wait_event(torch.cuda.current_stream(self.device).record_event())
        hosts, buffers = [], []
        with torch.cuda.stream(self._outbound):
            for tensor in tensors:
                host, buffer = self._host(tensor.shape, tensor.dtype)
                hosts.append(host.copy_(tensor, non_blocking=True))
                tensor.record_stream(self._outbound)
                if buffer is not None:
                    buffers.append(buffer)
        return Arrival(hosts, event=self._outbound.record_event(), buffers=buffers, pool=self.pool)

    def _host(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Memory on the host, and the pool's buffer that it is the beginning of."""
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer = self.pool.lend(num_bytes) if self._is_cuda else None
        if buffer is None:
            return torch.empty(tuple(shape), dtype=dtype), None
        return buffer[:num_bytes].view(dtype).view(tuple(shape)), buffer
