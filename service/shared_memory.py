"""Regions of POSIX shared memory that clients have registered by a name, for tensors that never cross a socket.

Held here: which objects may be opened, what lies inside a region, and how long its memory is kept. A region belongs to
its owner: it may be written, made shorter or unlinked at any moment. An object is never unlinked here, and its size is
looked at before each use. Small, unaligned and sparse inputs are copied by ``preadv`` and outputs are written by
``pwrite``, which meet a missing page with a short count. What remains: large inputs are read in place, and an owner who
truncates the object between that look and the end of the computing ends this process by SIGBUS. Nothing but a copy
prevents it (objects of ``shm_open`` cannot be sealed). And whoever may register reads and writes what the server's user
may. So this is off unless a setting says otherwise, and then for callers on the same machine alone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attn_core.errors import Fault, InvalidProblem
from attn_core.placement import ALIGNMENT_BYTES
from service.errors import AlreadyExists, NotFound, Overloaded
from service.wire.inference import MemoryPlace
from service.wire.text import short

FOLDER = "/dev/shm"
"""Where Linux keeps the objects of ``shm_open``."""
MAX_REGIONS = 256
"""Each holds two descriptors, of which connections need some too."""
MAX_NAME_BYTES = 255
COPY_BYTES = 64 * 1024
"""Inputs up to this size are copied: it costs microseconds, and no truncation can hurt."""

_BLOCK_BYTES = 512
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class _Region:
    """``mapping`` begins at the page that holds ``offset``. The last who leaves closes all; while there are views of
    the mapping it cannot be closed, and goes with the last of them."""

    name: str
    key: str
    offset: int
    byte_size: int
    descriptor: int
    mapping: mmap.mmap
    num_users: int = 1

    def leave(self) -> None:
        self.num_users -= 1
        if self.num_users == 0:
            os.close(self.descriptor)
            with contextlib.suppress(BufferError):
                self.mapping.close()

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}


@dataclass(slots=True, eq=False)
class MappedPart:
    """A part of a region, inside it by what was registered; usable until its ``with`` block ends."""

    _region: _Region
    _place: MemoryPlace

    def read(self, *, name: str) -> memoryview:
        """The bytes of input ``name``: in place, or a copy where that is safer or needed.

        Raises: InvalidProblem where the object has become too short for it.
        """
        size = self._place.byte_size
        self._check_size(size, name)
        if size == 0:
            return memoryview(b"")
        at = self._region.offset + self._place.offset
        if size > COPY_BYTES and at % ALIGNMENT_BYTES == 0 and self._has_pages(at, size):
            # The mapping begins at a page, so that an aligned offset is an aligned address.
            begin = at - _page_of(self._region.offset)
            return memoryview(self._region.mapping)[begin : begin + size]
        copy = torch.empty(size, dtype=torch.uint8).numpy().data
        read = 0
        while read < size:
            count = os.preadv(self._region.descriptor, [copy[read:]], at + read)
            if count == 0:
                raise self._too_short(size, name)
            read += count
        return copy

    def check_fits(self, num_bytes: int, *, name: str) -> None:
        """Raises: InvalidProblem where output ``name`` does not fit, or the object has become too short for it."""
        if num_bytes > self._place.byte_size:
            expected = f"a part of at least {num_bytes} bytes"
            raise InvalidProblem([Fault(name, expected, f"{self._place.byte_size} bytes")])
        self._check_size(num_bytes, name)

    def write(self, data: memoryview, *, name: str) -> None:
        """Put output ``name`` there, from the beginning of the part. Raises: as ``check_fits``, before it writes."""
        self.check_fits(data.nbytes, name=name)
        at = self._region.offset + self._place.offset
        rest = data.cast("B")
        while rest:
            try:
                count = os.pwrite(self._region.descriptor, rest, at)
            except OSError as error:
                fault = Fault(name, f"an object that can be written, in {FOLDER}", str(error.strerror))
                raise InvalidProblem([fault]) from None
            rest, at = rest[count:], at + count

    def _has_pages(self, at: int, size: int) -> bool:
        """Whether no page is a hole: to fill one takes memory even by reading, and where /dev/shm is full, SIGBUS."""
        descriptor = self._region.descriptor
        found = os.fstat(descriptor)
        if found.st_blocks * _BLOCK_BYTES >= found.st_size:
            return True
        try:
            return os.lseek(descriptor, at, os.SEEK_HOLE) >= at + size
        except OSError:
            # Made shorter this moment.
            return False

    def _check_size(self, size: int, name: str) -> None:
        end = self._region.offset + self._place.offset + size
        if size and os.fstat(self._region.descriptor).st_size < end:
            raise self._too_short(size, name)

    def _too_short(self, size: int, name: str) -> InvalidProblem:
        end = self._region.offset + self._place.offset + size
        has = os.fstat(self._region.descriptor).st_size
        expected = f"an object of at least {end} bytes, as it had when region {short(self._region.name)} was registered"
        return InvalidProblem([Fault(name, expected, f"{has} bytes by now")])


class SharedMemory:
    """Every region by its name, the same for all doors. Used from the event loop alone."""

    def __init__(self, *, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._regions: dict[str, _Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open and map ``byte_size`` bytes from ``offset`` of the object ``key``, to be called ``name`` from now on.

        Raises: AlreadyExists, InvalidProblem, Overloaded where the system has no descriptors left.
        """
        if name in self._regions:
            raise AlreadyExists(f"a region called {short(name)} is registered: unregister it first")
        faults = [*_name_faults(name), *_key_faults(key)]
        if offset < 0:
            faults.append(Fault("offset", "0 or more", f"{offset}"))
        if byte_size < 1:
            faults.append(Fault("byte_size", "1 or more", f"{byte_size}"))
        if len(self._regions) >= MAX_REGIONS:
            faults.append(Fault("name", f"at most {MAX_REGIONS} regions at a time", "one more"))
        if faults:
            raise InvalidProblem(faults)
        descriptor = _open(key)
        try:
            mapping = _map(descriptor, offset, byte_size)
        except BaseException:
            os.close(descriptor)
            raise
        self._regions[name] = _Region(name, key, offset, byte_size, descriptor, mapping)

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """What is registered: name, key, offset and byte_size of one region, or of all. Raises: NotFound."""
        if name:
            return [self._get(name).as_dict()]
        return [region.as_dict() for region in self._regions.values()]

    def unregister(self, name: str = "") -> None:
        """Forget one region, or all; requests that use it finish with it. One that is not there is no error."""
        for gone in [name] if name else list(self._regions):
            region = self._regions.pop(gone, None)
            if region is not None:
                region.leave()

    def close(self) -> None:
        self.unregister()

    @contextlib.contextmanager
    def part(self, place: MemoryPlace) -> Iterator[MappedPart]:
        """The place, looked up, for as long as the block lasts. Raises: NotFound, InvalidProblem."""
        region = self._get(place.region)
        if place.offset < 0 or place.byte_size < 0 or place.offset + place.byte_size > region.byte_size:
            expected = f"a part of region {short(region.name)}, which has {region.byte_size} bytes"
            received = f"{place.byte_size} bytes from offset {place.offset}"
            raise InvalidProblem([Fault("shared_memory_region", expected, received)])
        region.num_users += 1
        try:
            yield MappedPart(region, place)
        finally:
            region.leave()

    def _get(self, name: str) -> _Region:
        region = self._regions.get(name)
        if region is None:
            raise NotFound(f"no region of shared memory is registered as {short(name)}")
        return region

    def check_integrity(self) -> None:
        for name, region in self._regions.items():
            assert region.name == name
            assert region.num_users >= 1
            os.fstat(region.descriptor)


def _name_faults(name: str) -> list[Fault]:
    if name and _num_bytes(name) <= MAX_NAME_BYTES:
        return []
    return [Fault("name", f"1 to {MAX_NAME_BYTES} bytes", short(name))]


def _key_faults(key: str) -> list[Fault]:
    name = key.removeprefix("/")
    if name in ("", ".", "..") or "/" in name or "\0" in name or _num_bytes(name) > MAX_NAME_BYTES:
        expected = f"the name of a POSIX shared memory object, 1 to {MAX_NAME_BYTES} bytes with no slash but the first"
        return [Fault("key", expected, short(key))]
    return []


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        # Half a surrogate pair, which JSON can say and no file can be called.
        return MAX_NAME_BYTES + 1


def _open(key: str) -> int:
    """A descriptor of a regular file. Raises: InvalidProblem, Overloaded."""
    path = f"{FOLDER}/{key.removeprefix('/')}"
    expected = "a shared memory object that the server may read and write"
    try:
        # A pipe would be waited for, a link could lead anywhere.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise Overloaded(f"the region cannot be opened now: {error.strerror}", reason="memory_in_use") from None
        raise InvalidProblem([Fault("key", expected, f"{short(key)}: {error.strerror}")]) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidProblem([Fault("key", expected, f"{short(key)}, which is something else")])
    return descriptor


def _map(descriptor: int, offset: int, byte_size: int) -> mmap.mmap:
    """The pages that hold the range, to be read. Raises: InvalidProblem, Overloaded."""
    has = os.fstat(descriptor).st_size
    if offset + byte_size > has:
        fault = Fault("byte_size", f"offset and byte_size inside the object, which has {has} bytes", f"{byte_size}")
        raise InvalidProblem([fault if not offset else Fault(fault.field, fault.expected, f"{offset} and {byte_size}")])
    begin = _page_of(offset)
    try:
        return mmap.mmap(descriptor, offset - begin + byte_size, prot=mmap.PROT_READ, offset=begin)
    except (OSError, ValueError) as error:
        # Made shorter this moment, or no room for more mappings.
        raise Overloaded(f"the region cannot be mapped now: {error}", reason="memory_in_use") from None


def _page_of(offset: int) -> int:
    return offset - offset % mmap.ALLOCATIONGRANULARITY
