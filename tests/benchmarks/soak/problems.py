"""Random problems from a seed, from tiny to large enough for blocks of rows, and the bytes that ask them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

from attn_core import AttentionOptions, AttentionProblem
from attn_core.problem import (
    OUTPUTS,
    GradientsProblem,
    LayerGradientsProblem,
    LayerOptions,
    LayerProblem,
    Problem,
)
from tests.benchmarks.soak.client import request_bytes
from tests.support.bodies import JSON, SAFETENSORS, list_body, object_body, safetensors_body
from tests.support.factory import DTYPES, features, make_mask, make_problem, make_tensor, with_options
from tests.support.gradients import make_gradients
from tests.support.layers import make_layer, make_layer_gradients
from tests.support.strategies import problems

KINDS = (
    ("any form", 0.25),
    ("any short form", 0.25),
    ("small", 0.22),
    ("medium", 0.077),
    ("large", 0.003),
    ("gradients", 0.1),
    ("layer", 0.05),
    ("layer gradients", 0.05),
)
"""And how many of all: what hypothesis draws, short for what the fused kernel can answer, three sizes from the
factory, and what stands around an attention."""
WAVE = 250
MAX_LIST_ELEMENTS = 20_000
"""Longer ones are not written as nested lists."""
WAYS = ("binary", "binary in two writes", "ASGI, chunked", "ASGI by a header", "JSON, base64", "JSON, lists")
"""Formats and roads: the first two are answered without ASGI."""
_DRAWN = {"any form": OUTPUTS, "any short form": ("context", "logsumexp")}
_OTHER_ROAD = "te: trailers\r\n"
_MASKS_OF_LONG = ("nothing", "causal", "lengths", "window", "mask of keys", "bias of pairs", "sinks", "softcap")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One problem as its caller would write it."""

    number: int
    kind: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    path: str = "/v1/attention"

    @property
    def first(self) -> Tensor:
        return next(iter(self.tensors.values()))

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"problem {self.number} ({self.kind}, {self.dtype}): {shapes}; {self.options}"

    def request(self, way: str) -> bytes:
        """A whole HTTP request, in one of ``WAYS``."""
        if way.startswith("JSON"):
            write = list_body if way == "JSON, lists" else object_body
            return request_bytes(write(self.tensors, self.options), JSON, path=self.path)
        body = safetensors_body(self.tensors, self.options)
        is_chunked = way == "ASGI, chunked"
        more = _OTHER_ROAD if way == "ASGI by a header" else ""
        return request_bytes(body, SAFETENSORS, path=self.path, is_chunked=is_chunked, more=more)

    def can_go(self, way: str) -> bool:
        """Whether this way says the same: nested lists have one dtype for all tensors, and an end in length."""
        if way != "JSON, lists":
            return True
        numbers = [tensor for tensor in self.tensors.values() if tensor.is_floating_point()]
        return (
            self.first.numel() > 0
            and sum(tensor.numel() for tensor in self.tensors.values()) <= MAX_LIST_ELEMENTS
            and len({tensor.dtype for tensor in numbers}) == 1
        )


def cases(count: int, *, seed: int) -> Iterator[list[Case]]:
    """So many problems in waves, each of all kinds in their shares and in an order that mixes them."""
    chooser = random.Random(seed)
    number = 0
    while number < count:
        size = min(WAVE, count - number)
        kinds = chooser.choices([kind for kind, _ in KINDS], [share for _, share in KINDS], k=size)
        if number == 0:
            # However few there are, each kind is among them.
            kinds[: len(KINDS)] = [kind for kind, _ in KINDS]
        drawn = {
            kind: _drawn(kinds.count(kind), outputs, seed=chooser.randrange(2**30)) for kind, outputs in _DRAWN.items()
        }
        wave = []
        for kind in kinds:
            problem = next(drawn[kind]) if kind in drawn else _MAKERS[kind](chooser)
            # Without the holes that some have in memory: bodies have none.
            tensors = {
                name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in problem.tensors().items()
            }
            path, options = _asked(problem)
            wave.append(Case(number, kind, tensors, options, path))
            number += 1
        yield wave


def _asked(problem: Problem) -> tuple[str, dict[str, Any]]:
    """Whom a problem is for, and its options as a caller writes them."""
    match problem:
        case GradientsProblem():
            options = wire_options(problem.attention.options) | {"outputs": problem.outputs}
            return "/v1/attention/gradients", {name: value for name, value in options.items() if value is not None}
        case LayerGradientsProblem():
            options = _layer_options(problem.layer.options) | {"outputs": problem.outputs}
            return "/v1/layer/gradients", {name: value for name, value in options.items() if value is not None}
        case LayerProblem():
            return "/v1/layer", _layer_options(problem.options)
        case AttentionProblem():
            return "/v1/attention", wire_options(problem.options)
    raise AssertionError(f"nobody makes {type(problem).__name__}")


def _layer_options(options: LayerOptions) -> dict[str, Any]:
    written = wire_options(options.attention) | {"weight_layout": options.weight_layout, "outputs": options.outputs}
    del written["layout"]
    return written


def wire_options(options: AttentionOptions) -> dict[str, Any]:
    """Options as a caller writes them, those at their default left out."""
    window = {"left": _whole(options.window_left), "right": _whole(options.window_right)}
    select = {"heads": options.select_heads, "rows": options.select_rows, "top_k": options.top_k}
    default = AttentionOptions()
    plain = ("causal", "scale", "softcap", "layout", "num_heads", "num_kv_heads", "outputs", "empty_rows", "path")
    written = {
        name: getattr(options, name) for name in plain if getattr(options, name) not in (None, getattr(default, name))
    }
    for name, members in (("window", window), ("select", select)):
        given_members = {key: value for key, value in members.items() if value is not None}
        if given_members:
            written[name] = given_members
    return written


def _whole(width: int | None) -> int | None:
    # A body that is text has no whole numbers beyond 64 bits.
    return None if width is None else min(width, 2**62)


def _drawn(count: int, outputs: tuple[str, ...], *, seed: int) -> Iterator[AttentionProblem]:
    """What hypothesis makes of a seed."""
    found: list[AttentionProblem] = []
    while len(found) < count:
        found += _examples(count - len(found), outputs, seed + len(found))
    return iter(found)


def _examples(count: int, outputs: tuple[str, ...], number: int) -> list[AttentionProblem]:
    found: list[AttentionProblem] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(problems(outputs=outputs))
    def keep(problem: AttentionProblem) -> None:
        found.append(problem)

    keep()
    return found


def _small(chooser: random.Random) -> AttentionProblem:
    """Every feature by itself, on any kernel that was asked for: some are refused, and that is an answer too."""
    batch, num_kv_heads = chooser.choice((1, 1, 2, 3)), chooser.choice((1, 2, 4))
    num_heads = num_kv_heads * chooser.choice((1, 1, 2))
    seq_len_q, seq_len_kv = (chooser.choice((1, 2, 7, 16, 31, 64)) for _ in "qk")
    found = features(
        batch=batch,
        num_heads=num_heads,
        seq_len_q=seq_len_q,
        seq_len_kv=seq_len_kv,
        seed=chooser.randrange(10**6),
    )
    tensors, options = found[chooser.choice(list(found))]
    outputs = chooser.choice((("context",), ("context", "logsumexp"), ("weights", "context"), ("entropy", "scores")))
    problem = make_problem(
        seed=chooser.randrange(10**6),
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        seq_len_q=seq_len_q,
        seq_len_kv=seq_len_kv,
        head_dim=chooser.choice((8, 16, 32, 64)),
        dtype=chooser.choice(DTYPES),
        std=chooser.choice((1.0, 1.0, 3.0)),
        layout=chooser.choice(("bhtd", "bhtd", "bthd", "btd")),
        tensors=tensors,
        **options | {"outputs": outputs},
    )
    return with_options(
        problem,
        path=chooser.choice((None, None, "manual", "fused")),
        empty_rows=chooser.choice(("zeros", "zeros", "zeros", "error")),
    )


def _medium(chooser: random.Random) -> AttentionProblem:
    return _long(
        chooser,
        batch=chooser.choice((1, 1, 2)),
        num_kv_heads=chooser.choice((1, 2, 4)),
        seq_len_q=chooser.randrange(65, 320),
        seq_len_kv=chooser.randrange(65, 320),
        head_dim=chooser.choice((32, 64)),
        outputs=chooser.choice((("context",), ("context",), ("context", "logsumexp"), ("weight_totals", "context"))),
    )


def _large(chooser: random.Random) -> AttentionProblem:
    """More pairs of queries and keys than one call takes: the fused kernel has a head in blocks of rows, too."""
    if chooser.random() < 0.5:
        return _long(
            chooser,
            batch=1,
            num_kv_heads=1,
            seq_len_q=chooser.choice((4608, 4999)),
            seq_len_kv=chooser.choice((4100, 4608)),
            head_dim=64,
            outputs=("context",),
        )
    return _long(
        chooser,
        batch=1,
        num_kv_heads=chooser.choice((1, 2)),
        seq_len_q=chooser.choice((1024, 1157)),
        seq_len_kv=2200,
        head_dim=32,
        outputs=chooser.choice((("context", "entropy"), ("weight_totals",), ("logsumexp", "context", "top_weights"))),
    )


def _long(
    chooser: random.Random,
    *,
    batch: int,
    num_kv_heads: int,
    seq_len_q: int,
    seq_len_kv: int,
    head_dim: int,
    outputs: tuple[str, ...],
) -> AttentionProblem:
    num_heads = num_kv_heads * chooser.choice((1, 2))
    number = chooser.randrange(10**6)
    tensors: dict[str, Tensor] = {}
    options: dict[str, Any] = {"outputs": outputs}
    match chooser.choice(_MASKS_OF_LONG):
        case "causal":
            options["causal"] = chooser.choice(("upper_left", "lower_right"))
        case "lengths":
            tensors["key_lengths"] = torch.tensor([chooser.randrange(seq_len_kv) for _ in range(batch)])
        case "window":
            options |= {"causal": "lower_right", "window_left": chooser.randrange(seq_len_kv)}
        case "mask of keys":
            tensors["allow_mask"] = make_mask(batch, 1, 1, seq_len_kv, seed=number)
        case "bias of pairs":
            tensors["bias"] = make_tensor(1, 1, seq_len_q, seq_len_kv, seed=number)
        case "sinks":
            tensors["sinks"] = make_tensor(num_heads, seed=number)
        case "softcap":
            options["softcap"] = 20.0
    if "top_weights" in outputs:
        options["top_k"] = 3
    return make_problem(
        seed=number,
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        seq_len_q=seq_len_q,
        seq_len_kv=seq_len_kv,
        head_dim=head_dim,
        dtype=chooser.choice(DTYPES),
        tensors=tensors,
        **options,
    )


def _gradients(chooser: random.Random) -> GradientsProblem:
    make = chooser.choice((_small, _small, _medium))
    attention = make(chooser)
    attention = with_options(attention, select_heads=None, select_rows=None, top_k=None)
    uses = chooser.choice(((True, False), (False, True), (True, True)))
    outputs = chooser.choice((None, None, ("grad_query",), ("grad_logits", "grad_query")))
    problem = make_gradients(
        attention, seed=chooser.randrange(10**6), context=uses[0], logsumexp=uses[1], outputs=outputs
    )
    return replace(problem, attention=with_options(problem.attention, outputs=("context",)))


def _layer(chooser: random.Random) -> LayerProblem:
    outputs = chooser.choice((("output",), ("output",), ("output", "weights"), ("context", "key", "logsumexp")))
    return make_layer(outputs=outputs, **_layer_form(chooser))


def _layer_gradients(chooser: random.Random) -> LayerGradientsProblem:
    return make_layer_gradients(**_layer_form(chooser))


def _layer_form(chooser: random.Random) -> dict[str, Any]:
    batch, num_kv_heads = chooser.choice((1, 2, 3)), chooser.choice((1, 2))
    num_heads, seq_len_q = num_kv_heads * chooser.choice((1, 2)), chooser.choice((1, 7, 33, 128))
    seq_len_kv = chooser.choice((None, None, 5, 64))
    number = chooser.randrange(10**6)
    found = features(
        batch=batch, num_heads=num_heads, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv or seq_len_q, seed=number
    )
    tensors, options = found[chooser.choice(list(found))]
    return {
        "seed": number,
        "batch": batch,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "seq_len_q": seq_len_q,
        "seq_len_kv": seq_len_kv,
        "width": chooser.choice((12, 64)),
        "head_dim": chooser.choice((6, 16)),
        "weight_layout": chooser.choice(("in_out", "out_in")),
        "biases": chooser.random() < 0.5,
        "dtype": chooser.choice(DTYPES),
        "tensors": tensors,
        **options,
    }


_MAKERS: dict[str, Callable[[random.Random], Problem]] = {
    "small": _small,
    "medium": _medium,
    "large": _large,
    "gradients": _gradients,
    "layer": _layer,
    "layer gradients": _layer_gradients,
}
