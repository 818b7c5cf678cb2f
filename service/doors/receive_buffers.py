"""Memory that bodies are received into: reused, because fresh pages cost a millisecond a megabyte; bounded.

A connection has none while it is idle: all of them read their heads, and bodies that come with them, into one landing
place. What has to stay is received into, or moved to, a buffer leased for as long as the request lasts.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from attn_core.placement import ALIGNMENT_BYTES
from service.wire.plain_recipes import PlainRecipe, Tensors

LANDING_BYTES = 256 * 1024
MIN_BUFFER_BYTES = 64 * 1024
SPARE_BYTES = 64
"""Room behind a body: a read that fills its buffer to the last byte is followed by another that finds nothing."""


class ReceiveBuffer:
    """``size`` bytes from a multiple of 64 on, and flat tensors over them."""

    __slots__ = ("_flat", "_views", "memory", "size", "view")

    def __init__(self, size: int) -> None:
        room = np.empty(size + ALIGNMENT_BYTES, dtype=np.uint8)
        start = -room.ctypes.data % ALIGNMENT_BYTES
        self.memory = room[start : start + size]
        self.size = size
        self.view: memoryview = self.memory.data
        self._flat: dict[torch.dtype, Tensor] = {}
        self._views: tuple[PlainRecipe | None, int, Tensors | None] = (None, 0, None)

    def views(self, recipe: PlainRecipe, data_at: int) -> Tensors:
        """All numbers, query, key and value of a plain request whose data begin at byte ``data_at``.

        The same as last time, most of the time: then they are not made anew.
        """
        latest, at, tensors = self._views
        if tensors is None or latest is not recipe or at != data_at:
            dtype = recipe.form.dtype
            tensors = recipe.tensors(self._flat_of(dtype), data_at // dtype.itemsize)
            self._views = recipe, data_at, tensors
        return tensors

    def _flat_of(self, dtype: torch.dtype) -> Tensor:
        """All of it as numbers of one dtype; made once."""
        flat = self._flat.get(dtype)
        if flat is None:
            whole = self.size - self.size % dtype.itemsize
            flat = self._flat[dtype] = torch.from_numpy(self.memory[:whole]).view(dtype)
        return flat


class ReceiveBuffers:
    """A pool that keeps at most ``max_free_bytes`` of buffers that nobody has leased."""

    def __init__(self, *, max_free_bytes: int) -> None:
        self.max_free_bytes = max_free_bytes
        self.free_bytes = 0
        self.leased = 0
        # By size; the size used last is the last one.
        self._free: OrderedDict[int, list[ReceiveBuffer]] = OrderedDict()

    def lease(self, num_bytes: int) -> ReceiveBuffer:
        """A buffer of at least so many bytes, with whatever was in it. New memory is only taken as it is written to."""
        size = _rounded(num_bytes)
        self.leased += 1
        same = self._free.get(size)
        if same:
            buffer = same.pop()
            if not same:
                del self._free[size]
            self.free_bytes -= size
            return buffer
        return ReceiveBuffer(size)

    def give_back(self, buffer: ReceiveBuffer) -> None:
        """Nobody reads it any more."""
        self.leased -= 1
        self._free.setdefault(buffer.size, []).append(buffer)
        self._free.move_to_end(buffer.size)
        self.free_bytes += buffer.size
        while self.free_bytes > self.max_free_bytes:
            # The size that was not asked for for the longest time goes first.
            size, same = next(iter(self._free.items()))
            same.pop()
            if not same:
                del self._free[size]
            self.free_bytes -= size

    def lose(self) -> None:
        """A leased buffer does not come back: the engine may still read it."""
        self.leased -= 1


def _rounded(num_bytes: int) -> int:
    """Up to the next quarter of a power of two: different lengths share buffers, and at most a fifth is unused."""
    step = max(MIN_BUFFER_BYTES, 1 << max(0, num_bytes.bit_length() - 3))
    return -(-num_bytes // step) * step
