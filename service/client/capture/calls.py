"""What a capture gives: its calls, by number and by the name of the module that made them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, overload

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class CapturedCall:
    """One attention of the model.

    ``index`` counts all calls of the capture, ``nth`` those of its module ``name`` (None: made by no module of the
    model given, or none was given). ``function`` is what the model called. Shapes are those that the model brought, of
    a nested batch as if padded. ``mask`` is "bool" (True = may attend), "float" (added to the logits) or None;
    ``is_causal`` starts in the upper left corner where queries and keys differ in number; ``scale`` None is
    1/sqrt(head_dim). ``lengths`` [batch] is there for nested batches. ``in_backward``: a checkpointed region that runs
    once more for its gradients.

    ``outputs`` has what was kept, without a graph, on the device of the query: ``weights`` [..., seq_len_q,
    seq_len_kv], ``top_weights`` with ``top_keys`` [..., seq_len_q, k], or ``entropy`` [..., seq_len_q], the axes before
    as torch broadcasts those of query, key and value. ``path`` is what computed it, "model" where these are the model's
    own weights. ``empty_rows`` counts rows of one head each that may attend no key, and is None where nothing was
    computed. ``refusal`` says why nothing could be; ``notes`` what else there is to know.
    """

    index: int
    nth: int
    name: str | None
    thread: str
    function: str
    query_shape: Shape
    key_shape: Shape
    value_shape: Shape
    dtype: torch.dtype
    device: torch.device
    mask: str | None
    mask_shape: Shape | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    dropout_p: float
    lengths: Tensor | None
    in_backward: bool
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    path: str | None = None
    empty_rows: int | None = None
    refusal: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def weights(self) -> Tensor:
        """What each query gives to each key, before dropout; 0 for rows that may attend no key."""
        return self._kept("weights")

    @property
    def top_weights(self) -> Tensor:
        """The largest weights of each row, largest first; 0 beyond the keys that may be attended."""
        return self._kept("top_weights")

    @property
    def top_keys(self) -> Tensor:
        """Which keys they are; -1 beyond."""
        return self._kept("top_keys")

    @property
    def entropy(self) -> Tensor:
        """-sum of w ln w of each row, in nats."""
        return self._kept("entropy")

    def _kept(self, name: str) -> Tensor:
        if name in self.outputs:
            return self.outputs[name]
        if self.refusal is not None:
            raise AttributeError(f"call {self.index} has no {name}: {self.refusal}")
        there = ", ".join(self.outputs) or "none"
        raise AttributeError(f"call {self.index} has no {name}: keep=... decides what is kept, here {there}")

    def __repr__(self) -> str:
        parts = [f"query {list(self.query_shape)}", f"key {list(self.key_shape)}", f"value {list(self.value_shape)}"]
        parts += [str(self.dtype).removeprefix("torch.")]
        parts += [f"{self.mask} mask {list(self.mask_shape)}"] if self.mask_shape is not None else []
        parts += ["causal"] if self.is_causal else []
        parts += [f"scale {self.scale:g}"] if self.scale is not None else []
        parts += [f"dropout {self.dropout_p:g}"] if self.dropout_p else []
        parts += [f"{name} {list(tensor.shape)}" for name, tensor in self.outputs.items()]
        parts += [f"{self.empty_rows} empty rows"] if self.empty_rows else []
        parts += [f"refused: {self.refusal}"] if self.refusal is not None else []
        who = self.function if self.name is None else f"{self.name or 'the model itself'}, {self.nth}"
        return f"CapturedCall({self.index}: {who}; {', '.join(parts)})"


class Captured:
    """The calls of a capture, in the order in which they ended. Read it during the capture or after it.

    ``captured[3]`` is the fourth call, ``captured[-2:]`` the last two, ``captured["layer.3.attn"]`` the only call of
    that module, ``captured["layer.3.attn", 1]`` its second; ``of(name)`` all of them. ``unseen`` says what the capture
    knows that it did not see.
    """

    def __init__(self) -> None:
        self._calls: list[CapturedCall] = []
        self._by_name: dict[str | None, list[CapturedCall]] = {}
        self.unseen: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[CapturedCall]:
        return iter(tuple(self._calls))

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @overload
    def __getitem__(self, which: slice) -> tuple[CapturedCall, ...]: ...
    @overload
    def __getitem__(self, which: SupportsIndex | str | tuple[str, SupportsIndex]) -> CapturedCall: ...
    def __getitem__(
        self, which: slice | SupportsIndex | str | tuple[str, SupportsIndex]
    ) -> CapturedCall | tuple[CapturedCall, ...]:
        """Raises: IndexError, KeyError; KeyError also for a name alone that made several calls."""
        if isinstance(which, slice):
            return tuple(self._calls[which])
        if isinstance(which, SupportsIndex):
            return self._calls[which]
        if isinstance(which, tuple):
            name, nth = which
            return self.of(name)[nth]
        calls = self.of(which)
        if len(calls) > 1:
            raise KeyError(f"{which} made {len(calls)} calls: captured[{which!r}, 0] to [{which!r}, {len(calls) - 1}]")
        return calls[0]

    def of(self, name: str) -> tuple[CapturedCall, ...]:
        """Every call of one module. Raises: KeyError with the names that there are."""
        if name not in self._by_name:
            raise KeyError(f"no call of {name!r}; there are {', '.join(map(repr, self.names)) or 'no names'}")
        return tuple(self._by_name[name])

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that made calls, in the order of their first."""
        return tuple(name for name in self._by_name if name is not None)

    @property
    def refused(self) -> tuple[CapturedCall, ...]:
        """The calls that nothing could be computed of, each with its ``refusal``."""
        return tuple(call for call in self if call.refusal is not None)

    def add(self, make: Any, name: str | None) -> None:
        """Append what ``make`` gives for the next ``index`` and ``nth``."""
        own = self._by_name.setdefault(name, [])
        call: CapturedCall = make(index=len(self._calls), nth=len(own), name=name)
        own.append(call)
        self._calls.append(call)

    def summary(self) -> str:
        """A line for each call, and what was not seen."""
        head = f"{len(self)} calls, {len(self.refused)} of them refused"
        return "\n".join([head, *(f"  {call!r}" for call in self), *(f"not seen: {text}" for text in self.unseen)])

    def __repr__(self) -> str:
        return f"Captured({len(self)} calls of {len(self.names)} modules)"
