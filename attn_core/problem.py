"""The vocabulary of the core: a problem, its options, its result. The names are the ones callers use on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Layout = Literal["bhtd", "bthd", "btd"]
Causal = Literal["upper_left", "lower_right"] | bool
EmptyRows = Literal["zeros", "error"]
WeightLayout = Literal["in_out", "out_in"]

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
RULE_NAMES: tuple[str, ...] = TENSOR_NAMES[3:]
"""Those that say who attends whom, and how: the same around projections as without."""
GRADIENTS_TENSOR_NAMES: tuple[str, ...] = (*TENSOR_NAMES, "grad_context", "grad_logsumexp")
GRADIENT_OUTPUTS: tuple[str, ...] = (
    "grad_query",
    "grad_key",
    "grad_value",
    "grad_bias",
    "grad_sinks",
    "grad_weights",
    "grad_logits",
)
PAIR_GRADIENTS = frozenset({"grad_weights", "grad_logits"})
"""Gradients of a whole matrix of pairs, given on request alone."""

WEIGHT_LAYOUTS: tuple[str, ...] = ("in_out", "out_in")
WEIGHT_NAMES: tuple[str, ...] = ("w_query", "w_key", "w_value", "w_output")
PROJECTION_BIAS_NAMES: tuple[str, ...] = ("b_query", "b_key", "b_value", "b_output")
PARAMETER_NAMES: tuple[str, ...] = (*WEIGHT_NAMES, *PROJECTION_BIAS_NAMES)
"""What a layer has learned: its tensors that do not come with each input."""
LAYER_TENSOR_NAMES: tuple[str, ...] = ("input", "memory", *PARAMETER_NAMES, *RULE_NAMES)
LAYER_OUTPUTS: tuple[str, ...] = ("output", "query", "key", "value", *OUTPUTS)
LAYER_GRADIENTS_TENSOR_NAMES: tuple[str, ...] = (*LAYER_TENSOR_NAMES, "grad_output")
LAYER_GRADIENT_OUTPUTS: tuple[str, ...] = (
    "grad_input",
    "grad_memory",
    *(f"grad_{name}" for name in PARAMETER_NAMES),
    "grad_bias",
    "grad_sinks",
)


class TensorSpec(NamedTuple):
    """A tensor without its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def hollow(self) -> Tensor:
        """A tensor of this dtype and shape that takes no memory, on torch's device ``meta``."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Every option of one attention; a field left at its default is off.

    ``scale`` None is 1/sqrt(head_dim). ``window_left`` and ``window_right`` None are open. ``select_heads`` and
    ``select_rows`` replace those axes in the outputs that have a line per head and query. ``path`` None lets
    the core choose the kernel. ``verify`` computes the same once more in float64 and reports the error.
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
    verify: bool = False

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


@dataclass(frozen=True, slots=True, eq=False)
class GradientsProblem:
    """The gradients of sum(grad_context * context) + sum(grad_logsumexp * logsumexp) of one attention.

    ``grad_context`` has the shape and dtype of the context in the caller's layout and rank, ``grad_logsumexp`` those of
    the logsumexp; one of them may be None. ``outputs`` None asks for every gradient that is defined: of query, key,
    value (of query alone, the sum of its three uses, where key and value are left out), and of bias and sinks where
    given. Outputs and selection of ``attention`` itself say nothing here.
    """

    attention: AttentionProblem
    grad_context: Tensor | None = None
    grad_logsumexp: Tensor | None = None
    outputs: tuple[str, ...] | None = None

    @property
    def options(self) -> AttentionOptions:
        return self.attention.options

    @property
    def asked(self) -> tuple[str, ...]:
        """The names of the gradients that are answered."""
        if self.outputs is not None:
            return self.outputs
        given = self.attention.tensors()
        needs = {"grad_query": "query", "grad_key": "key", "grad_value": "value"}
        needs |= {"grad_bias": "bias", "grad_sinks": "sinks"}
        return tuple(name for name, tensor in needs.items() if tensor in given)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name, in the order of ``GRADIENTS_TENSOR_NAMES``."""
        found = self.attention.tensors()
        for name in ("grad_context", "grad_logsumexp"):
            if (tensor := getattr(self, name)) is not None:
                found[name] = tensor
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """How a layer is to be read.

    ``attention`` has every option of the attention inside, selection, path and verify too; its ``layout`` is always
    "btd", its ``num_heads`` always given, and its ``outputs`` say nothing: they are ``outputs`` here. ``weight_layout``
    "in_out": y = x W, as the papers write; "out_in": y = x W^T, as torch's Linear stores.
    """

    attention: AttentionOptions
    weight_layout: WeightLayout
    outputs: tuple[str, ...] = ("output",)


@dataclass(frozen=True, slots=True, eq=False)
class LayerParameters:
    """A layer without its input: ``weights`` by the names of ``PARAMETER_NAMES``, the four matrices always there.

    ``num_kv_heads`` None is as many as ``num_heads``. What a layer that is kept by name consists of.
    """

    weights: Mapping[str, Tensor]
    weight_layout: WeightLayout
    num_heads: int
    num_kv_heads: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerProblem:
    """Attention between learned projections.

    input ``[batch, seq_len_q, width]`` or ``[seq_len_q, width]``; memory ``[batch, seq_len_kv, memory_width]``, from
    which keys and values come, else they come from input. In layout in_out w_query is
    ``[width, num_heads * head_dim]``, w_key ``[memory_width, num_kv_heads * head_dim]``, w_value
    ``[memory_width, num_kv_heads * head_dim_v]``, w_output ``[num_heads * head_dim_v, output_width]``; a projection's
    bias has the length of its columns. Masks and the rest are those of the attention, and lie as they do there.
    """

    input: Tensor
    w_query: Tensor
    w_key: Tensor
    w_value: Tensor
    w_output: Tensor
    options: LayerOptions
    memory: Tensor | None = None
    b_query: Tensor | None = None
    b_key: Tensor | None = None
    b_value: Tensor | None = None
    b_output: Tensor | None = None
    allow_mask: Tensor | None = None
    block_mask: Tensor | None = None
    bias: Tensor | None = None
    key_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    query_offset: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name, in the order of ``LAYER_TENSOR_NAMES``."""
        return {name: t for name in LAYER_TENSOR_NAMES if (t := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, eq=False)
class LayerGradientsProblem:
    """The gradients of sum(grad_output * output) of a layer.

    ``grad_output`` has shape and dtype of the output. ``outputs`` None asks for the gradient of everything that was
    given: ``LAYER_GRADIENT_OUTPUTS`` as far as their tensors are there.
    """

    layer: LayerProblem
    grad_output: Tensor
    outputs: tuple[str, ...] | None = None

    @property
    def options(self) -> LayerOptions:
        return self.layer.options

    @property
    def asked(self) -> tuple[str, ...]:
        """The names of the gradients that are answered."""
        if self.outputs is not None:
            return self.outputs
        given = self.layer.tensors()
        return tuple(name for name in LAYER_GRADIENT_OUTPUTS if name.removeprefix("grad_") in given)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name, in the order of ``LAYER_GRADIENTS_TENSOR_NAMES``."""
        return self.layer.tensors() | {"grad_output": self.grad_output}


Problem = AttentionProblem | WeightedSumProblem | GradientsProblem | LayerProblem | LayerGradientsProblem
"""Everything that the engine answers."""


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


@dataclass(frozen=True, slots=True)
class Verification:
    """How far the outputs of an answer are from the same in float64.

    ``max_rel_error`` is the largest |difference| over the largest |float64 value| of its row, ``worst`` the place of
    ``max_abs_error``, such as ``context[0,3,17]``; empty where nothing differs.
    """

    max_abs_error: float
    max_rel_error: float
    worst: str


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
    verification: Verification | None = None
