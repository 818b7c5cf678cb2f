"""A directory with one safetensors file for each layer that is kept by a name.

Held here: how a file comes and goes, so that after whatever happens it is there whole or not at all. It is written
under another name in the same directory, synced, renamed, and the directory synced; what an interrupted write has left
is removed at the next start. Where the last step fails, what was there before is put back. Nothing here waits for the
event loop: each function is to be called in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from attn_core.errors import Checkpoint, never_abandoned
from attn_core.placement import ALIGNMENT_BYTES
from attn_core.problem import PARAMETER_NAMES, LayerParameters
from attn_core.validate import dtype_text
from service.wire import safetensors_format
from service.wire.arrays import Buffer
from service.wire.tensors import bytes_of

log = logging.getLogger("attn.layers")

SUFFIX = ".safetensors"
# No layer's name begins with a dot.
_UNFINISHED_PREFIX, _UNFINISHED_SUFFIX = ".attn-", ".unfinished"
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)


def in_order(parameters: LayerParameters) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer, by the names of ``PARAMETER_NAMES`` and in their order."""
    return ((name, parameters.weights[name]) for name in PARAMETER_NAMES if name in parameters.weights)


def content_hash(parameters: LayerParameters) -> str:
    """A hash of all that decides the answers of a layer: weights to the bit, and how they are read."""
    num_kv_heads = parameters.num_kv_heads or parameters.num_heads
    tensors = [(name, dtype_text(tensor.dtype), list(tensor.shape)) for name, tensor in in_order(parameters)]
    head = json.dumps([parameters.weight_layout, parameters.num_heads, num_kv_heads, tensors])
    digest = hashlib.sha256(head.encode())
    for _, tensor in in_order(parameters):
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


class UnusableDirectory(Exception):
    """Layers cannot be kept there; the message names the directory and says why."""


class LayerDirectory:
    """``path`` must be there; it belongs to one service at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> None:
        """See that files can be written, and remove what an interrupted write has left. Raises: UnusableDirectory."""
        try:
            with os.scandir(self._path) as entries:
                left = [entry.name for entry in entries if _is_unfinished(entry.name)]
            for name in left:
                os.unlink(self._path / name)
                log.warning("a layer that was not written to its end is removed: %s", self._path / name)
            descriptor, probe = self._make_unfinished()
            os.close(descriptor)
            os.unlink(probe)
            self._sync()
        except OSError as error:
            raise UnusableDirectory(f"layers cannot be kept in {self._path}: {error.strerror or error}") from None

    def names(self) -> Iterator[str]:
        """The names of files as layers are kept in, in order. What else is there is told to the log."""
        for entry in sorted(self._path.iterdir()):
            if entry.name.endswith(SUFFIX) and entry.is_file():
                yield entry.name.removesuffix(SUFFIX)
            else:
                log.warning("not a layer: %s is no file *%s", entry, SUFFIX)

    def file(self, name: str) -> Path:
        return self._path / f"{name}{SUFFIX}"

    def read(self, name: str) -> Buffer:
        """The bytes of a layer's file, its numbers where torch would put them. Raises: OSError."""
        with self.file(name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            room = np.empty(size + ALIGNMENT_BYTES, dtype=np.uint8)
            data_at = 8 + int.from_bytes(file.read(8), "little")
            begin = -(room.ctypes.data + data_at) % ALIGNMENT_BYTES
            file.seek(0)
            count = file.readinto(room.data[begin : begin + size])
        return room.data[begin : begin + count]

    def size(self, name: str) -> int:
        """Raises: OSError."""
        return self.file(name).stat().st_size

    def holds(self, name: str) -> bool:
        """Whether there is a file for a layer of this name, whatever is in it."""
        return os.path.lexists(self.file(name))

    def is_one_file(self, name: str, other: str) -> bool:
        """Whether two names mean the same file, as they may where case does not count."""
        try:
            return self.file(name).samefile(self.file(other))
        except FileNotFoundError:
            return False

    def write(
        self,
        name: str,
        parameters: LayerParameters,
        *,
        previous: LayerParameters | None = None,
        check: Checkpoint = never_abandoned,
    ) -> None:
        """Keep a layer instead of ``previous``, if there is one. Raises: OSError, and then nothing has changed.

        ``check`` is called last, before the file gets its name, and may raise.
        """
        self._write(name, parameters, check)
        self._sync_or_restore(name, previous)

    def remove(self, name: str, previous: LayerParameters) -> None:
        """Forget a layer; a file that is gone already is no error. Raises: OSError, and then nothing has changed."""
        self.file(name).unlink(missing_ok=True)
        self._sync_or_restore(name, previous)

    def _write(self, name: str, parameters: LayerParameters, check: Checkpoint) -> None:
        descriptor, unfinished = self._make_unfinished()
        try:
            with open(descriptor, "wb") as file:
                for piece in safetensors_format.encode_parameters(parameters, content_hash(parameters)):
                    file.write(piece)
                file.flush()
                os.fsync(descriptor)
            check()
            os.replace(unfinished, self.file(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise

    def _make_unfinished(self) -> tuple[int, str]:
        return tempfile.mkstemp(prefix=_UNFINISHED_PREFIX, suffix=_UNFINISHED_SUFFIX, dir=self._path)

    def _sync_or_restore(self, name: str, previous: LayerParameters | None) -> None:
        try:
            self._sync()
        except OSError:
            try:
                if previous is None:
                    self.file(name).unlink()
                else:
                    self._write(name, previous, never_abandoned)
            except OSError as error:
                log.error("%s is not what it was, and cannot be put back: %s", self.file(name), error.strerror)
            raise

    def _sync(self) -> None:
        """Have what was renamed or removed outlive a loss of power, as far as the file system knows how."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise
        finally:
            os.close(descriptor)


def _is_unfinished(file_name: str) -> bool:
    return file_name.startswith(_UNFINISHED_PREFIX) and file_name.endswith(_UNFINISHED_SUFFIX)
