"""The vocabulary of the core: a problem, its options, its result. The names are the ones callers use on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Layout = Literal["bhtd", "bthd", "btd"]
Causal = Literal["upper_left", "lower_right"] | bool
EmptyRows = Literal["zeros", "error"]

LAYOUTS: tuple[str, ...] = ("bhtd", "bthd", "btd")
OUTPUTS: tuple[str, ...] = (
    "context",
    "weights",
    "scores",
    "logits",
    "logsumexp",
    "entropy",
    "top_weights",
    "weight_totals",
)
"""What can be asked for. ``top_weights`` brings ``top_keys`` with it."""
SELECTABLE_BY_ROW = frozenset({"weights", "scores", "logits", "entropy", "top_weights"})
SELECTABLE_BY_HEAD = SELECTABLE_BY_ROW | {"weight_totals"}

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LENGTH_DTYPES = (torch.int64, torch.int32)
TENSOR_NAMES: tuple[str, ...] = (
    "query",
    "key",
    "value",
    "allow_mask",
    "block_mask",
    "bias",
    "key_lengths",
    "query_lengths",
    "query_offset",
    "alibi_slopes",
    "sinks",
)
"""Every tensor of a problem, in the order in which faults name them."""


class TensorSpec(NamedTuple):
    """A tensor without its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Every option of one attention; a field left at its default is off.

    ``scale`` None is 1/sqrt(head_dim). ``window_left`` and ``window_right`` None are open. ``select_heads`` and
    ``select_rows`` replace those axes in the outputs that have a line per head and query. ``path`` None lets
    the core choose the kernel.
    """

    causal: Causal = False
    scale: float | None = None
    softcap: float | None = None
    window_left: int | None = None
    window_right: int | None = None
    layout: Layout = "bhtd"
    num_heads: int | None = None
    num_kv_heads: int | None = None
    outputs: tuple[str, ...] = ("context",)
    select_heads: tuple[int, ...] | None = None
    select_rows: tuple[int, ...] | None = None
    top_k: int | None = None
    empty_rows: EmptyRows = "zeros"
    path: str | None = None

    @property
    def has_window(self) -> bool:
        return self.window_left is not None or self.window_right is not None


DEFAULT_OPTIONS = AttentionOptions()


@dataclass(frozen=True, slots=True, eq=False)
class AttentionProblem:
    """One attention as its caller states it, in the caller's layout and rank.

    query ``[batch, num_heads, seq_len_q, head_dim]`` (layout bhtd), key and value with ``num_kv_heads`` and
    ``seq_len_kv``; key and value None together mean key = value = query. Masks and bias broadcast to
    ``[batch, num_heads, seq_len_q, seq_len_kv]``. ``check_problem`` says whether it can be computed.
    """

    query: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    allow_mask: Tensor | None = None
    block_mask: Tensor | None = None
    bias: Tensor | None = None
    key_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    query_offset: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    options: AttentionOptions = DEFAULT_OPTIONS

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name, in the order of ``TENSOR_NAMES``."""
        return {name: t for name in TENSOR_NAMES if (t := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, eq=False)
class WeightedSumProblem:
    """weights ``[batch, num_heads, seq_len_q, seq_len_kv]`` as given, times value; ranks 4, 3 or 2."""

    weights: Tensor
    value: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {"weights": self.weights, "value": self.value}


@dataclass(frozen=True, slots=True)
class Dims:
    """The axes of a checked problem."""

    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len_q: int
    seq_len_kv: int
    head_dim: int
    head_dim_v: int

    @property
    def group_size(self) -> int:
        """How many query heads share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_rows(self) -> int:
        """Rows of one head each."""
        return self.batch * self.num_heads * self.seq_len_q

    @property
    def num_pairs(self) -> int:
        return self.num_rows * self.seq_len_kv


@dataclass(frozen=True, slots=True, eq=False)
class AttentionResult:
    """The asked outputs in the caller's layout and rank, and how they came about.

    ``empty_rows`` and ``nonfinite_rows`` count rows of one head each; ``peak_bytes`` is the estimate of
    ``cost``, inputs and outputs counted in.
    """

    outputs: dict[str, Tensor]
    path: str
    why: str
    device: str
    dtype: torch.dtype
    empty_rows: int = 0
    nonfinite_rows: int = 0
    peak_bytes: int = 0
    flops: int = 0
