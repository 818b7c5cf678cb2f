"""The problems of a load test: shapes and mixes of lengths as they are said, and the numbers drawn for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from service.credentials import CommandError

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NUM_LENGTHS = 16
"""How many lengths are drawn from a range: each is a request of its own, made before the load begins."""
FORM = (
    "B,H,T,D, such as 1,8,128,64; H/K for shared heads, T/S for keys of another length, D/V for values of another size"
)
_SHAPE = re.compile(
    r"(?P<batch>\d+),(?P<heads>\d+)(/(?P<kv_heads>\d+))?,(?P<q>\d+(-\d+)?)(/(?P<kv>\d+(-\d+)?))?,"
    r"(?P<dim>\d+)(/(?P<dim_v>\d+))?(@(?P<share>\d+(\.\d+)?))?"
)

Lengths = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One kind of problem in the mix; ``text`` as it was given, lengths from the least to the largest."""

    text: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len_q: Lengths
    seq_len_kv: Lengths | None
    head_dim: int
    head_dim_v: int
    share: float

    @property
    def has_range(self) -> bool:
        return any(lengths is not None and lengths[0] < lengths[1] for lengths in (self.seq_len_q, self.seq_len_kv))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """``tensors``: query [B,H,T,D], key [B,K,S,D], value [B,K,S,V]; ``share`` of all requests ask this one."""

    shape: Shape
    share: float
    tensors: dict[str, NDArray[Any]]


def read_shape(text: str) -> Shape:
    """Raises: CommandError for what is no shape, or none of an attention."""
    match = _SHAPE.fullmatch(text.strip().replace(" ", ""))
    if match is None:
        raise CommandError(f"--shape: {FORM}; lengths may be a range such as 17-256, @3 a share; received {text!r}")
    said = match.groupdict()
    num_heads, head_dim = int(said["heads"]), int(said["dim"])
    shape = Shape(
        text=match[0].partition("@")[0],
        batch=int(said["batch"]),
        num_heads=num_heads,
        num_kv_heads=int(said["kv_heads"] or num_heads),
        seq_len_q=_lengths(said["q"]),
        seq_len_kv=_lengths(said["kv"]) if said["kv"] else None,
        head_dim=head_dim,
        head_dim_v=int(said["dim_v"] or head_dim),
        share=float(said["share"] or 1),
    )
    sizes = (shape.batch, num_heads, shape.num_kv_heads, head_dim, shape.head_dim_v, *shape.seq_len_q)
    if min(*sizes, *(shape.seq_len_kv or (1,))) < 1 or not shape.share:
        raise CommandError(f"--shape {text}: every size and share is above 0")
    if num_heads % shape.num_kv_heads:
        raise CommandError(
            f"--shape {text}: {shape.num_kv_heads} key heads, which must divide the {num_heads} of queries"
        )
    return shape


def draw_problems(shapes: Sequence[Shape], *, dtype: str, seed: int) -> list[Problem]:
    """Standard normal numbers, the same for the same seed. A range gives ``NUM_LENGTHS`` problems."""
    whole = sum(shape.share for shape in shapes)
    problems = []
    for place, shape in enumerate(shapes):
        count = NUM_LENGTHS if shape.has_range else 1
        for number in range(count):
            random = np.random.default_rng([seed, place, number])
            seq_len_q = _drawn(shape.seq_len_q, random)
            seq_len_kv = seq_len_q if shape.seq_len_kv is None else _drawn(shape.seq_len_kv, random)
            sizes = {
                "query": (shape.batch, shape.num_heads, seq_len_q, shape.head_dim),
                "key": (shape.batch, shape.num_kv_heads, seq_len_kv, shape.head_dim),
                "value": (shape.batch, shape.num_kv_heads, seq_len_kv, shape.head_dim_v),
            }
            tensors = {name: random.standard_normal(size).astype(DTYPES[dtype]) for name, size in sizes.items()}
            problems.append(Problem(shape=shape, share=shape.share / whole / count, tensors=tensors))
    return problems


def _lengths(text: str) -> Lengths:
    least, _, most = text.partition("-")
    lengths = int(least), int(most or least)
    if lengths[0] > lengths[1]:
        raise CommandError(f"--shape: a range from the least to the largest length, not {text}")
    return lengths


def _drawn(lengths: Lengths, random: np.random.Generator) -> int:
    return int(random.integers(lengths[0], lengths[1], endpoint=True))
