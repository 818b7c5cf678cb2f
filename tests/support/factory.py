"""The one place where tests get problems from: every number follows from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_core import AttentionOptions, AttentionProblem
from attn_core.problem import Layout

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Feature = tuple[dict[str, Tensor], dict[str, Any]]
WITHOUT_TOP = ("context", "weights", "scores", "logits", "logsumexp", "entropy", "weight_totals")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    """Normal numbers, drawn in float64 and rounded once, so that each dtype gets the same ones."""
    return (torch.randn(shape, generator=generator(seed), dtype=torch.float64) * std).to(dtype)


def make_mask(*shape: int, seed: int = 0, share: float = 0.7) -> Tensor:
    """Booleans, about ``share`` of them True."""
    return torch.rand(shape, generator=generator(seed)) < share


def make_problem(
    *,
    seed: int = 0,
    batch: int = 2,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    seq_len_q: int = 5,
    seq_len_kv: int = 7,
    head_dim: int = 8,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    std: float = 1.0,
    layout: Layout = "bhtd",
    rank: int = 4,
    self_attention: bool = False,
    tensors: dict[str, Tensor] | None = None,
    **options: Any,
) -> AttentionProblem:
    """A problem with random query, key and value; ``tensors`` are masks and the like, the rest are options.

    Rank 3 and 2 (layout bhtd) take the first item, and the first head, of the problem of rank 4.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    shapes = {"query": (batch, num_heads, seq_len_q, head_dim)}
    if not self_attention:
        shapes["key"] = (batch, num_kv_heads, seq_len_kv, head_dim)
        shapes["value"] = (batch, num_kv_heads, seq_len_kv, head_dim_v)
    operands = {}
    for number, (name, shape) in enumerate(shapes.items()):
        tensor = make_tensor(*shape, seed=3 * seed + number, dtype=dtype, std=std)
        operands[name] = in_layout(tensor, layout) if layout != "bhtd" else tensor[(0,) * (4 - rank)]
    if layout == "btd":
        options.setdefault("num_heads", num_heads)
        options.setdefault("num_kv_heads", num_kv_heads)
    return AttentionProblem(**operands, **(tensors or {}), options=AttentionOptions(layout=layout, **options))


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """``[batch, heads, tokens, width]`` as a caller of another layout sends it, contiguous."""
    if layout == "bhtd":
        return tensor
    tensor = tensor.transpose(1, 2)
    return tensor.contiguous() if layout == "bthd" else tensor.flatten(2)


def with_options(problem: AttentionProblem, **options: Any) -> AttentionProblem:
    return replace(problem, options=replace(problem.options, **options))


def with_tensors(problem: AttentionProblem, **tensors: Tensor | None) -> AttentionProblem:
    changed: dict[str, Any] = dict(tensors)
    return replace(problem, **changed)


class _MadeWhenAsked(Mapping[str, Feature]):
    """One feature of forty is what most tests want, and the numbers of all would take longer than they do."""

    def __init__(self, makers: dict[str, Callable[[], Feature]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Feature:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def features(
    *, batch: int = 2, num_heads: int = 4, seq_len_q: int = 5, seq_len_kv: int = 7, seed: int = 100
) -> Mapping[str, Feature]:
    """Every feature that decides about pairs or shifts logits, by name: its tensors and its options."""
    b, h, t, s = batch, num_heads, seq_len_q, seq_len_kv

    def bias(*shape: int) -> Tensor:
        return make_tensor(*shape, seed=seed).masked_fill(~make_mask(*shape, seed=seed + 1, share=0.8), -torch.inf)

    lengths = torch.tensor([(s - 2 - i) % (s + 1) for i in range(b)], dtype=torch.int64)
    query_lengths = torch.tensor([(t - 1 - i) % (t + 1) for i in range(b)], dtype=torch.int64)
    offset = torch.tensor([i - 1 for i in range(b)], dtype=torch.int64)
    offset_0 = torch.tensor([0])
    slopes = torch.tensor([2.0**-i for i in range(h)])
    return _MadeWhenAsked(
        {
            "nothing": lambda: ({}, {}),
            "allow_mask of keys": lambda: ({"allow_mask": make_mask(s, seed=seed)}, {}),
            "allow_mask of queries and keys": lambda: ({"allow_mask": make_mask(1, 1, t, s, seed=seed)}, {}),
            "allow_mask of queries": lambda: ({"allow_mask": make_mask(1, 1, t, 1, seed=seed)}, {}),
            "allow_mask per item": lambda: ({"allow_mask": make_mask(b, 1, 1, s, seed=seed)}, {}),
            "allow_mask per head": lambda: ({"allow_mask": make_mask(1, h, t, s, seed=seed)}, {}),
            "allow_mask of all": lambda: ({"allow_mask": make_mask(b, h, t, s, seed=seed)}, {}),
            "block_mask of keys": lambda: ({"block_mask": make_mask(b, 1, 1, s, seed=seed, share=0.3)}, {}),
            "block_mask of all": lambda: ({"block_mask": make_mask(b, h, t, s, seed=seed, share=0.3)}, {}),
            "bias of keys": lambda: ({"bias": bias(s)}, {}),
            "bias of queries and keys": lambda: ({"bias": bias(1, 1, t, s)}, {}),
            "bias per head": lambda: ({"bias": bias(1, h, t, s)}, {}),
            "bias of all": lambda: ({"bias": bias(b, h, t, s)}, {}),
            "float64 bias": lambda: ({"bias": bias(1, 1, t, s).double()}, {}),
            "float16 bias": lambda: ({"bias": bias(b, h, 1, s).half()}, {}),
            "mask and bias": lambda: ({"allow_mask": make_mask(b, 1, t, s, seed=seed), "bias": bias(1, h, 1, s)}, {}),
            "key_lengths": lambda: ({"key_lengths": lengths}, {}),
            "int32 lengths": lambda: ({"key_lengths": lengths.int(), "query_lengths": query_lengths.int()}, {}),
            "query_lengths": lambda: ({"query_lengths": query_lengths}, {}),
            "both lengths": lambda: ({"key_lengths": lengths, "query_lengths": query_lengths}, {}),
            "upper_left": lambda: ({}, {"causal": "upper_left"}),
            "lower_right": lambda: ({}, {"causal": "lower_right"}),
            "lower_right with lengths": lambda: (
                {"key_lengths": lengths, "query_lengths": query_lengths},
                {"causal": "lower_right"},
            ),
            "causal at an offset": lambda: ({"query_offset": offset}, {"causal": True}),
            "causal at one offset": lambda: ({"query_offset": torch.tensor([2])}, {"causal": True}),
            "window": lambda: ({"query_offset": offset}, {"window_left": 2, "window_right": 1}),
            "window to the left": lambda: ({"query_offset": offset_0}, {"window_left": 0}),
            "window to the right": lambda: ({"query_offset": offset_0}, {"window_right": 0}),
            "wide window": lambda: ({"query_offset": offset_0}, {"window_left": 2**70, "window_right": 2**70}),
            "causal window": lambda: ({}, {"causal": "lower_right", "window_left": 2}),
            "alibi": lambda: ({"query_offset": offset, "alibi_slopes": slopes}, {}),
            "causal alibi": lambda: ({"alibi_slopes": slopes}, {"causal": "lower_right"}),
            "sinks": lambda: ({"sinks": make_tensor(h, seed=seed)}, {}),
            "sinks and mask": lambda: (
                {"sinks": make_tensor(h, seed=seed), "allow_mask": make_mask(t, s, share=0.2)[None, None]},
                {},
            ),
            "softcap": lambda: ({}, {"softcap": 1.5}),
            "scale": lambda: ({}, {"scale": 0.37}),
            "negative scale": lambda: ({}, {"scale": -0.5}),
            "scale of 0": lambda: ({}, {"scale": 0}),
            "everything forbidden": lambda: ({"allow_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}, {}),
        }
    )
