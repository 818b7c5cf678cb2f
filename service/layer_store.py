"""Layers that are kept by a name: uploaded once, used by many requests.

Held here: what a layer may be called, how many bytes all of them may have together, and that memory and directory tell
the same. A layer is never changed: it is replaced or forgotten, and whoever has got it before goes on with what he has.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from attn_core.errors import Abandoned, AttentionError, Checkpoint, Fault, InvalidProblem, TooLarge
from attn_core.problem import LayerParameters
from attn_core.validate import dtype_text
from service.errors import AlreadyExists, Malformed, NotFound, ServiceError, Unavailable
from service.layer_directory import LayerDirectory, content_hash, in_order
from service.wire import safetensors_format
from service.wire.inference_models import BUILT_IN
from service.wire.requests import ReadLimits
from service.wire.text import short, short_name

log = logging.getLogger("attn.layers")

MAX_LAYERS = 1024
"""However few bytes they have: each is a model in the lists of /v2."""
MAX_REASONS = 5
"""So many of the faults for which a file is no layer the log names."""
RESERVED_NAMES = frozenset({*BUILT_IN, "stats"})
"""What means something else where a model is called by its name."""
# It begins with a letter and has no slash: as a file's name it is neither "." nor "..", not hidden, and stays inside.
NAME_PATTERN = r"[A-Za-z][A-Za-z0-9._-]{0,63}"
_NAME = re.compile(NAME_PATTERN)
_NAME_RULE = "1 to 64 of a-z A-Z 0-9 . _ -, beginning with a letter"

T = TypeVar("T")


def name_faults(name: str) -> list[Fault]:
    """What is wrong with a layer's name."""
    if not _NAME.fullmatch(name):
        return [Fault("name", _NAME_RULE, short(name))]
    if name in RESERVED_NAMES:
        return [Fault("name", "a name that no model of /v2 has, and not stats", short(name))]
    return []


@dataclass(frozen=True, slots=True, eq=False)
class StoredLayer:
    """One layer. ``content_hash`` is of all that decides its answers: weights to the bit, and how they are read."""

    name: str
    parameters: LayerParameters
    content_hash: str

    @property
    def num_kv_heads(self) -> int:
        return self.parameters.num_kv_heads or self.parameters.num_heads

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters.weights["w_query"].dtype

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in in_order(self.parameters)}

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.parameters.weights.values())

    @property
    def num_bytes(self) -> int:
        return parameters_bytes(self.parameters)

    def as_dict(self) -> dict[str, Any]:
        """As GET /v1/layers/{name} answers."""
        return {
            "name": self.name,
            "num_heads": self.parameters.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "weight_layout": self.parameters.weight_layout,
            "dtype": dtype_text(self.dtype),
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "parameters": self.num_parameters,
        }


@dataclass(frozen=True, slots=True)
class Kept:
    """A layer that is there; ``is_new`` where its name was free."""

    layer: StoredLayer
    is_new: bool


def parameters_bytes(parameters: LayerParameters) -> int:
    return sum(tensor.nbytes for tensor in parameters.weights.values())


def _own(layer: StoredLayer) -> StoredLayer:
    """The layer with weights of its own, where torch puts them: those of a request lie in memory that is used again."""
    weights = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in in_order(layer.parameters)}
    return replace(layer, parameters=replace(layer.parameters, weights=weights))


class _Wanted:
    """Whether anybody still waits for a change; asked by the thread that makes it."""

    def __init__(self) -> None:
        self.is_over = False

    def check(self) -> None:
        if self.is_over:
            raise Abandoned("nobody waits for this layer")


class LayerStore:
    """Every layer by its name. Used from the event loop alone; whatever takes long is done in its threads.

    ``max_bytes`` is for the weights of all layers together. A change, once it has begun to show, is finished whoever
    leaves; changes of one name wait for each other. ``on_deleted`` is told each name as it becomes free.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        directory: LayerDirectory | None = None,
        max_layers: int = MAX_LAYERS,
        on_deleted: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.max_bytes = max_bytes
        self.max_layers = max_layers
        self._directory = directory
        self._on_deleted = on_deleted
        self._layers: dict[str, StoredLayer] = {}
        self._promised: dict[str, int] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._changes: set[asyncio.Task[Any]] = set()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="attn-layers")

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self._layers.values())

    def get(self, name: str) -> StoredLayer:
        """Raises: NotFound."""
        layer = self._layers.get(name)
        if layer is None:
            raise NotFound(f"there is no layer {short_name(name)!r}; GET /v1/layers lists those there are")
        return layer

    def all(self) -> list[StoredLayer]:
        """Every layer, by name."""
        return [layer for _, layer in sorted(self._layers.items())]

    def load(self, limits: ReadLimits) -> None:
        """Read the directory, before anything else. A file that is no layer is named in the log, and stays there.

        Raises: UnusableDirectory.
        """
        if self._directory is None:
            return
        self._directory.open()
        for name in self._directory.names():
            try:
                self._load(name, self._directory, limits)
            except (AttentionError, ServiceError, OSError, MemoryError) as error:
                log.warning("a layer is not read: %s: %s", self._directory.file(name), _reason(error))
        log.info("layers read", extra={"fields": {"layers": self.num_layers, "layer_bytes": self.num_bytes}})

    def _load(self, name: str, directory: LayerDirectory, limits: ReadLimits) -> None:
        faults = name_faults(name)
        if faults:
            raise InvalidProblem(faults)
        # A header may be long; what is behind it has to find room.
        file_bytes = directory.size(name)
        self._check_room(name, max(0, file_bytes - safetensors_format.MAX_HEADER_BYTES - 8))
        parameters, written = safetensors_format.decode_kept(directory.read(name), limits)
        self._check_room(name, parameters_bytes(parameters))
        found = content_hash(parameters)
        if written is not None and written != found:
            raise Malformed("its content is not what was written: the hash of it is another")
        self._layers[name] = _own(StoredLayer(name, parameters, found))

    def check_room(self, name: str, num_bytes: int) -> None:
        """Refuse a layer that would not find room. Raises: TooLarge, InvalidProblem where there are too many."""
        self._check_room(name, num_bytes)

    async def put(self, name: str, parameters: LayerParameters, *, may_replace: bool = False) -> Kept:
        """Keep a layer whose parameters were checked and stay as they are until this is over.

        The same content again changes nothing. Cancelled, it changes nothing, unless it was just about to be over.

        Raises: InvalidProblem for the name; AlreadyExists where other content has it; TooLarge; Unavailable where the
        directory refuses.
        """
        faults = name_faults(name)
        if faults:
            raise InvalidProblem(faults)
        return await self._change(lambda wanted: self._put(name, parameters, wanted.check, may_replace=may_replace))

    async def delete(self, name: str) -> None:
        """Forget a layer. Raises: NotFound; Unavailable where the directory refuses."""
        self.get(name)
        await self._change(lambda wanted: self._delete(name))

    async def close(self, timeout_s: float) -> bool:
        """Wait for changes that have begun; gives whether all of them ended."""
        if self._changes:
            await asyncio.wait(self._changes, timeout=timeout_s)
        self._pool.shutdown(wait=False)
        return not self._changes

    async def _put(self, name: str, parameters: LayerParameters, check: Checkpoint, *, may_replace: bool) -> Kept:
        async with self._alone(name):
            offered = StoredLayer(name, parameters, await self._in_thread(content_hash, parameters))
            present = self._layers.get(name)
            if present is not None and present.content_hash == offered.content_hash:
                return Kept(present, is_new=False)
            if present is not None and not may_replace:
                raise AlreadyExists(f"a layer {name} with other content is kept: ?replace=true replaces it")
            check()
            with self._room(name, offered.num_bytes):
                twins = [other for other in self._layers if other != name and other.lower() == name.lower()]
                layer = await self._in_thread(self._keep, offered, present, twins, check, may_replace)
                self._layers[name] = layer
            return Kept(layer, is_new=present is None)

    def _keep(
        self,
        offered: StoredLayer,
        present: StoredLayer | None,
        twins: list[str],
        check: Checkpoint,
        may_replace: bool,
    ) -> StoredLayer:
        layer, directory = _own(offered), self._directory
        if directory is None:
            check()
            return layer
        for twin in twins:
            if directory.is_one_file(layer.name, twin):
                raise AlreadyExists(f"the file system takes {layer.name} and {twin}, which is kept, for one name")
        if present is None and not may_replace and directory.holds(layer.name):
            # Valid, perhaps, and beyond a budget that was set too low: nobody's weights go without a word.
            raise AlreadyExists(f"a file of layer {layer.name} is there and was not read: ?replace=true writes over it")
        previous = None if present is None else present.parameters
        with _told(f"layer {layer.name} cannot be written"):
            directory.write(layer.name, layer.parameters, previous=previous, check=check)
        return layer

    async def _delete(self, name: str) -> None:
        async with self._alone(name):
            layer = self.get(name)
            await self._in_thread(self._remove, layer)
            del self._layers[name]
            self._on_deleted(name)

    def _remove(self, layer: StoredLayer) -> None:
        if self._directory is not None:
            with _told(f"layer {layer.name} cannot be removed"):
                self._directory.remove(layer.name, layer.parameters)

    async def _change(self, begin: Callable[[_Wanted], Coroutine[Any, Any, T]]) -> T:
        """Make a change in a task of its own, which ends in order when nobody waits for it any more."""
        wanted = _Wanted()
        change = asyncio.ensure_future(begin(wanted))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        try:
            return await asyncio.shield(change)
        except asyncio.CancelledError:
            wanted.is_over = True
            raise

    def _alone(self, name: str) -> asyncio.Lock:
        """Whoever changes this name holds the lock; it is there for as long as anybody holds it or waits for it."""
        return self._locks.setdefault(name, asyncio.Lock())

    @contextlib.contextmanager
    def _room(self, name: str, num_bytes: int) -> Iterator[None]:
        """Room that nobody else is given while a layer is on its way into it. Raises: as ``check_room``."""
        self._check_room(name, num_bytes)
        self._promised[name] = num_bytes
        try:
            yield
        finally:
            del self._promised[name]

    def _check_room(self, name: str, num_bytes: int) -> None:
        others = {other: layer.num_bytes for other, layer in self._layers.items() if other != name}
        for other, promised in self._promised.items():
            # One that is being replaced may yet stay.
            others[other] = max(promised, others.get(other, 0))
        others.pop(name, None)
        if len(others) >= self.max_layers:
            raise InvalidProblem(
                [Fault("", f"at most {self.max_layers} layers at a time; delete one that is not needed", "one more")]
            )
        allowed = self.max_bytes - sum(others.values())
        if num_bytes > allowed:
            raise TooLarge(needed_bytes=num_bytes, allowed_bytes=allowed)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(work, *arguments))

    def check_integrity(self) -> None:
        """Nothing stays promised when nothing changes, and no more is kept than may be."""
        assert self._changes or not self._promised
        assert self.num_bytes <= self.max_bytes
        assert self.num_layers <= self.max_layers
        assert all(layer.name == name for name, layer in self._layers.items())


def _reason(error: Exception) -> str:
    faults = error.faults if isinstance(error, InvalidProblem | ServiceError) else ()
    named = "; ".join(map(str, faults[:MAX_REASONS])) or str(error)
    return f"{named}; and more" if len(faults) > MAX_REASONS else named


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """What the disk refuses, to the log and to the caller. Raises: Unavailable."""
    try:
        yield
    except OSError as error:
        log.error("%s: %s", what, error)
        raise Unavailable(f"{what}: {error.strerror or error}") from None
