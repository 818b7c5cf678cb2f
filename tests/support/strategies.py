"""Problems nobody thought of: hypothesis draws the form, the factory the numbers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from attn_core import AttentionOptions, AttentionProblem, TensorSpec
from attn_core.problem import LAYOUTS, OUTPUTS, TENSOR_NAMES, Layout
from tests.support.factory import DTYPES, in_layout, make_mask, make_tensor

_ALL_DTYPES = (*DTYPES, torch.bool, torch.int64, torch.int32, torch.uint8)


@st.composite
def problems(draw: st.DrawFn, *, outputs: tuple[str, ...] = OUTPUTS, path: str | None = None) -> AttentionProblem:
    """A problem that can be computed, with any of the features together; ``outputs`` are those to choose from."""
    seed = draw(st.integers(0, 1000))
    layouts: tuple[Layout, ...] = ("bhtd", "bthd", "btd")
    layout = draw(st.sampled_from(layouts))
    rank = draw(st.sampled_from((4, 4, 4, 3, 2))) if layout == "bhtd" else 4
    batch = draw(st.sampled_from((1, 2, 3, 0))) if rank == 4 else 1
    num_kv_heads = draw(st.sampled_from((1, 2))) if rank > 2 else 1
    num_heads = num_kv_heads * draw(st.sampled_from((1, 2, 3))) if rank > 2 else 1
    seq_len_q = draw(st.sampled_from((5, 1, 0, 17, 33)))
    self_attention = num_heads == num_kv_heads and draw(st.integers(0, 5)) == 5
    seq_len_kv = seq_len_q if self_attention else draw(st.sampled_from((seq_len_q, 7, 1, 0, 16, 18)))
    head_dim = draw(st.sampled_from((4, 1, 7, 16)))
    head_dim_v = head_dim if self_attention or path == "fused" else draw(st.sampled_from((head_dim, 1, 5)))
    dtype = draw(st.sampled_from(DTYPES))
    std = draw(st.sampled_from((1.0, 4.0, 0.1)))

    def operand(number: int, heads: int, tokens: int, width: int) -> Tensor:
        tensor = make_tensor(batch, heads, tokens, width, seed=3 * seed + number, dtype=dtype, std=std)
        tensor = in_layout(tensor, layout) if rank == 4 else tensor[(0,) * (4 - rank)]
        return draw(st.sampled_from((_as_it_is, _with_gaps, _misaligned)))(tensor)

    tensors: dict[str, Tensor] = {"query": operand(0, num_heads, seq_len_q, head_dim)}
    if not self_attention:
        tensors["key"] = operand(1, num_kv_heads, seq_len_kv, head_dim)
        tensors["value"] = operand(2, num_kv_heads, seq_len_kv, head_dim_v)

    def pair_shape() -> tuple[int, ...]:
        whole = (batch, num_heads, seq_len_q, seq_len_kv)
        shape = tuple(draw(st.sampled_from((axis, 1))) for axis in whole)
        shortest = next((i for i, axis in enumerate(shape) if axis != 1), 3)
        short = shape[draw(st.integers(0, min(shortest, 3))) :]
        ambiguous = batch > 1 and len(short) in (2, 3) and short[0] == batch
        return shape if ambiguous else short

    def sometimes() -> bool:
        return draw(st.integers(0, 3)) == 3

    def lengths(most: int) -> Tensor:
        numbers = draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch))
        return torch.tensor(numbers, dtype=draw(st.sampled_from((torch.int64, torch.int32))))

    if sometimes():
        tensors["allow_mask"] = make_mask(*pair_shape(), seed=seed)
    if sometimes():
        tensors["block_mask"] = make_mask(*pair_shape(), seed=seed + 1, share=0.2)
    if sometimes():
        shape = pair_shape()
        bias_dtype = dtype if path == "fused" else draw(st.sampled_from(DTYPES))
        bias = make_tensor(*shape, seed=seed, dtype=bias_dtype)
        tensors["bias"] = bias.masked_fill(make_mask(*shape, seed=seed + 2, share=0.2), -torch.inf)
    if sometimes():
        tensors["key_lengths"] = lengths(seq_len_kv)
    if sometimes():
        tensors["query_lengths"] = lengths(seq_len_q)
    options: dict[str, Any] = {}
    if sometimes():
        options["window_left"] = draw(st.sampled_from((None, 0, 2, 40)))
        options["window_right"] = draw(st.sampled_from((None, 0, 1, 2**70)))
    if path != "fused":
        if sometimes():
            tensors["alibi_slopes"] = make_tensor(num_heads, seed=seed, dtype=draw(st.sampled_from(DTYPES)), std=0.3)
        if sometimes():
            tensors["sinks"] = make_tensor(num_heads, seed=seed + 1, dtype=draw(st.sampled_from(DTYPES)))
        if sometimes():
            options["softcap"] = draw(st.sampled_from((0.5, 3.0, 30.0)))
    options["causal"] = draw(st.sampled_from((False, True, "upper_left", "lower_right")))
    windowed = any(options.get(name) is not None for name in ("window_left", "window_right"))
    if options["causal"] in (False, True) and (options["causal"] or windowed or "alibi_slopes" in tensors):
        needed = seq_len_q != seq_len_kv
        if needed or draw(st.booleans()):
            size = draw(st.sampled_from((1, batch)))
            places = draw(st.lists(st.integers(-seq_len_q - 2, seq_len_kv + 2), min_size=size, max_size=size))
            tensors["query_offset"] = torch.tensor(places, dtype=draw(st.sampled_from((torch.int64, torch.int32))))
    options["scale"] = draw(st.sampled_from((None, None, 0.0, -0.7, 0.25)))
    asked = tuple(draw(st.lists(st.sampled_from(outputs), min_size=1, unique=True)))
    if "top_weights" in asked:
        options["top_k"] = draw(st.sampled_from((1, 3, 100)))
    selectable = {"weights", "scores", "logits", "entropy", "top_weights"} & set(asked)
    if seq_len_q and selectable and sometimes():
        options["select_rows"] = tuple(draw(st.lists(st.integers(0, seq_len_q - 1), min_size=1, unique=True)))
    if (selectable or "weight_totals" in asked) and sometimes():
        options["select_heads"] = tuple(draw(st.lists(st.integers(0, num_heads - 1), min_size=1, unique=True)))
    if layout == "btd":
        options["num_heads"] = num_heads
        options["num_kv_heads"] = None if num_heads == num_kv_heads else num_kv_heads
    return AttentionProblem(**tensors, options=AttentionOptions(layout=layout, outputs=asked, path=path, **options))


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _with_gaps(tensor: Tensor) -> Tensor:
    """The same numbers, each with a hole behind it."""
    wide = torch.full((*tensor.shape, 2), torch.nan, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def _misaligned(tensor: Tensor) -> Tensor:
    """The same numbers, beginning at an odd place in memory."""
    flat = torch.full((tensor.numel() + 1,), torch.nan, dtype=tensor.dtype)
    flat[1:] = tensor.flatten()
    return flat[1:].view(tensor.shape)


specs = st.dictionaries(
    st.sampled_from(TENSOR_NAMES),
    st.builds(TensorSpec, st.sampled_from(_ALL_DTYPES), st.lists(st.integers(0, 4), max_size=6).map(tuple)),
)
"""Tensors of any shape and dtype under the names of a problem."""


@st.composite
def likely_specs(draw: st.DrawFn) -> dict[str, TensorSpec]:
    """Tensors whose axes are drawn once for all, so that many agree, and sometimes do not."""
    axes = {letter: draw(st.integers(0, 3)) for letter in "btsdv"}
    axes["k"] = draw(st.integers(1, 2))
    axes["h"] = axes["k"] * draw(st.integers(1, 2))
    dtype = draw(st.sampled_from(DTYPES))
    letters = {"query": "bhtd", "key": "bksd", "value": "bksv"}
    found = {name: TensorSpec(dtype, tuple(axes[letter] for letter in shape)) for name, shape in letters.items()}
    if draw(st.booleans()):
        del found["key"], found["value"]
    vectors = {"key_lengths": "b", "query_lengths": "b", "query_offset": "b", "alibi_slopes": "h", "sinks": "h"}
    for name, letter in vectors.items():
        if draw(st.integers(0, 3)) == 3:
            number = dtype if letter == "h" else torch.int64
            found[name] = TensorSpec(number, (axes[letter],))
    for name in ("allow_mask", "block_mask", "bias"):
        if draw(st.integers(0, 3)) == 3:
            shape = tuple(draw(st.sampled_from((axes[letter], 1))) for letter in "bhts")
            found[name] = TensorSpec(dtype if name == "bias" else torch.bool, shape)
    return found


_small = st.none() | st.integers(-1, 4)
any_options = st.builds(
    AttentionOptions,
    causal=st.sampled_from((False, True, "upper_left", "lower_right", "middle")),
    scale=st.none() | st.floats(),
    softcap=st.none() | st.floats(),
    window_left=_small,
    window_right=_small,
    layout=st.sampled_from((*LAYOUTS, "tdbh")),
    num_heads=_small,
    num_kv_heads=_small,
    outputs=st.lists(st.sampled_from((*OUTPUTS, "context", "grad_query")), max_size=4).map(tuple),
    select_heads=st.none() | st.lists(st.integers(-1, 4), max_size=3).map(tuple),
    select_rows=st.none() | st.lists(st.integers(-1, 4), max_size=3).map(tuple),
    top_k=_small,
    empty_rows=st.sampled_from(("zeros", "error", "nan")),
    path=st.sampled_from((None, "fused", "manual", "paged")),
)
"""Options of any value their types take, sound or not."""

likely_options = st.builds(
    AttentionOptions,
    causal=st.sampled_from((False, True, "upper_left", "lower_right")),
    scale=st.none() | st.floats(-2, 2),
    softcap=st.none() | st.floats(0.1, 50),
    window_left=st.none() | st.integers(0, 3),
    window_right=st.none() | st.integers(0, 3),
    outputs=st.lists(st.sampled_from([name for name in OUTPUTS if name != "top_weights"]), min_size=1, unique=True).map(
        tuple
    ),
    select_heads=st.none() | st.just((0,)),
    select_rows=st.none() | st.just((0,)),
    empty_rows=st.sampled_from(("zeros", "zeros", "error")),
    path=st.sampled_from((None, None, "fused", "manual")),
)
"""Options that often have a meaning beside ``likely_specs``."""
