"""How far numbers are from the same in float64: the largest differences, and where the largest one stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.errors import Checkpoint, never_abandoned
from attn_core.problem import Verification

COMPARED_AT_ONCE = 2**19
"""So many numbers are compared between two checkpoints."""

Place = Callable[[str, tuple[int, ...]], tuple[int, ...]]
"""Where an element of an output, in the order in which it was compared, stands in the caller's shape."""


@dataclass(frozen=True, slots=True, eq=False)
class RowErrors:
    """Of each row its largest |difference| and its largest finite |float64 value|; rows are seen whole or in pieces."""

    error: Tensor
    largest: Tensor

    def joined(self, other: RowErrors | None) -> RowErrors:
        """With what other pieces of the same rows gave."""
        if other is None:
            return self
        return RowErrors(torch.maximum(self.error, other.error), torch.maximum(self.largest, other.largest))


class Comparison:
    """Collects what is compared. Every look reads one number back, so on a GPU it waits for the stream.

    Equal infinities and NaN agree; any other number that is not finite, on either side, is infinitely far. A relative
    error is one over the largest finite |float64 value| of the row, the last axis; in a row of zeros it is the
    difference itself.
    """

    def __init__(self) -> None:
        self._max_abs_error = 0.0
        self._max_rel_error = 0.0
        self._worst: tuple[str, tuple[int, ...]] | None = None

    def see(self, name: str, got: Tensor, want: Tensor, at: Sequence[Sequence[int]]) -> RowErrors:
        """Compare a piece of an output, float64 both; ``at`` has the indices of each of its axes in the whole."""
        if want.numel() == 0:
            return _no_errors(want)
        apart = (got - want).abs_().nan_to_num_(nan=math.inf, posinf=math.inf)
        apart.masked_fill_((got == want) | (torch.isnan(got) & torch.isnan(want)), 0.0)
        return self.note(name, apart, want, at)

    def note(self, name: str, apart: Tensor, want: Tensor, at: Sequence[Sequence[int]]) -> RowErrors:
        """Count differences from ``want`` that are known already."""
        if want.numel() == 0:
            return _no_errors(want)
        self._note(name, apart, at)
        largest = want.abs().nan_to_num_(nan=0.0, posinf=0.0).amax(dim=-1)
        return RowErrors(apart.amax(dim=-1), largest)

    def settle(self, rows: RowErrors | None) -> None:
        """Count the relative errors of rows that were seen whole."""
        if rows is None or rows.error.numel() == 0:
            return
        relative = torch.where(rows.largest > 0, rows.error / rows.largest, rows.error)
        # 0 over 0 stands in no row that was chosen, and infinity over infinity in none at all.
        self._max_rel_error = max(self._max_rel_error, float(relative.max().item()))

    def see_whole(self, name: str, got: Tensor, want: Tensor, checkpoint: Checkpoint = never_abandoned) -> None:
        """Compare an output, piece by piece; ``want`` is float64, on any device."""
        if want.numel() == 0:
            return
        width = want.shape[-1]
        flat_got, flat_want = got.reshape(-1, width), want.reshape(-1, width)
        shape, step = want.shape[:-1], max(1, COMPARED_AT_ONCE // max(1, width))
        for start in range(0, flat_want.shape[0], step):
            checkpoint()
            part = flat_want[start : start + step]
            own = flat_got[start : start + step].to(part.device, torch.float64)
            before = self._worst
            self.settle(self.see(name, own, part, (range(start, start + step), range(width))))
            if self._worst is not before and self._worst is not None:
                row, column = self._worst[1]
                self._worst = name, (*_unravelled(row, shape), column)

    def verification(self, place: Place) -> Verification:
        worst = ""
        if self._worst is not None:
            name, index = self._worst
            worst = f"{name}[{','.join(str(axis) for axis in place(name, index))}]"
        return Verification(self._max_abs_error, self._max_rel_error, worst)

    def _note(self, name: str, apart: Tensor, at: Sequence[Sequence[int]]) -> None:
        largest = float(apart.max().item())
        if largest > self._max_abs_error:
            self._max_abs_error = largest
            local = _unravelled(int(apart.argmax().item()), apart.shape)
            self._worst = name, tuple(axis[index] for axis, index in zip(at, local, strict=True))


def _no_errors(want: Tensor) -> RowErrors:
    none = torch.zeros(want.shape[:-1], dtype=torch.float64, device=want.device)
    return RowErrors(none, none)


def _unravelled(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, own = divmod(flat, size)
        index.append(own)
    return tuple(reversed(index))
