"""The estimate of a problem's memory beside what it takes: never below, and not far above.

Random problems from a seed, of every kind and form, whose estimate lies between 16 and 100 MiB, each measured in a
process of its own, with plain numbers and with hazards. ``python -m tests.benchmarks.soak.peaks --help``
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_core import InvalidProblem
from attn_core.prepared import prepare
from attn_core.problem import (
    GRADIENT_OUTPUTS,
    LAYER_GRADIENT_OUTPUTS,
    LAYER_OUTPUTS,
    OUTPUTS,
    PAIR_GRADIENTS,
    SELECTABLE_BY_HEAD,
    SELECTABLE_BY_ROW,
    Dims,
)
from attn_core.support import SUPPORTED_OUTPUTS
from attn_core.validate import check_problem
from tests.benchmarks.generator import LoadFailed
from tests.benchmarks.soak.outcome import Form, Law, Outcome, equal, run_forms
from tests.support.peaks import NotMeasured, Peak, measure_peaks, possible_hazards, without_numbers

Case = dict[str, Any]
"""A problem as ``tests.support.peaks`` takes it."""

MIB = 2**20
LEAST_BYTES, MOST_BYTES = 16 * MIB, 100 * MIB
LEAST = 0.7
"""Of the estimate plain numbers take at least so much."""
MAX_FLOPS = 8 * 10**9
"""Of a problem: one thread has them within seconds."""
NUM_HAZARDS = 3
"""So many are tried with each problem."""
DTYPES = ("float32", "float32", "float16", "bfloat16", "float64")
HEAD_DIMS = (64, 64, 128, 32, 16, 80, 96, 33, 7, 256)
WIDTHS = (64, 100, 128, 256, 512, 768, 1024, 2048)
MAX_SELECTED = 32


@dataclass(frozen=True, slots=True)
class Measured:
    kind: str
    case: Case
    peak: Peak

    @property
    def is_low(self) -> bool:
        """The estimate is far above. Who is refused has not done all of its work."""
        return self.peak.refusal is None and self.peak.ratio < LEAST

    @property
    def is_high(self) -> bool:
        return self.highest > 1.0

    @property
    def highest(self) -> float:
        return max(self.peak.ratio, self.peak.hazardous_ratio)

    def __str__(self) -> str:
        peak = self.peak
        hazards = "".join(f", {name} {taken / peak.with_spare:.3f}" for name, taken in peak.hazardous.items())
        ratios = f"plain {peak.ratio:.3f}, resident {peak.resident_ratio:.3f}{hazards}"
        return f"{self.kind}, {peak.path}, {peak.estimate / MIB:.1f} MiB: {ratios}"


def draw_cases(count: int, *, seed: int, kinds: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """So many problems, each with its kind, one kind after the other."""
    for number in range(count):
        kind = kinds[number % len(kinds)]
        yield kind, _drawn(random.Random(f"{seed}/{number}"), kind)


def _drawn(chooser: random.Random, kind: str) -> Case:
    """The first one drawn that is of the kind, can be computed, and has the size."""
    while True:
        case = KINDS[kind](chooser)
        problem = without_numbers(case)
        try:
            check_problem(problem)
            prepared = prepare(problem, device_type="cpu")
        except InvalidProblem:
            continue
        cost = prepared.cost
        is_sized = LEAST_BYTES < cost.peak_bytes <= MOST_BYTES and cost.flops <= MAX_FLOPS
        if is_sized and (case["kind"] != "attention" or prepared.path == kind):
            return case


def _attention(chooser: random.Random, path: str) -> Case:
    dims = _dims(chooser, same_width=0.95 if path == "fused" else 0.7)
    form = _Form(chooser, dims)
    form.add_operands()
    form.add_rules(of_fused=path == "fused")
    if chooser.random() < 0.3:
        form.options["path"] = path
    names = [name for name in OUTPUTS if name in SUPPORTED_OUTPUTS[path]]
    outputs = ["context"] if path == "fused" and chooser.random() < 0.5 else _some(chooser, names)
    form.select(outputs)
    form.drop_axis()
    return form.case("attention", outputs)


def _weighted_sum(chooser: random.Random) -> Case:
    dims = _dims(chooser, same_width=0.7)
    form = _Form(chooser, dims)
    form.add("weights", dims.batch, dims.num_heads, dims.seq_len_q, dims.seq_len_kv)
    form.add("value", dims.batch, dims.num_kv_heads, dims.seq_len_kv, dims.head_dim_v)
    return form.case("weighted_sum", None)


def _gradients(chooser: random.Random) -> Case:
    dims = _dims(chooser, same_width=0.7)
    form = _Form(chooser, dims)
    form.add_operands()
    form.add_rules()
    uses = chooser.choice((("context",), ("context",), ("logsumexp",), ("context", "logsumexp")))
    if "context" in uses:
        form.add("grad_context", *form.placed(dims.batch, dims.num_heads, dims.seq_len_q, dims.head_dim_v))
    if "logsumexp" in uses:
        wide = "float64" if form.dtype == "float64" else "float32"
        form.add("grad_logsumexp", dims.batch, dims.num_heads, dims.seq_len_q, dtype=wide)
    outputs = _asked(chooser, form, [name for name in GRADIENT_OUTPUTS if name not in PAIR_GRADIENTS])
    if outputs and chooser.random() < 0.2:
        outputs.append(chooser.choice(sorted(PAIR_GRADIENTS)))
    form.drop_axis()
    return form.case("gradients", outputs)


def _layer(chooser: random.Random) -> Case:
    form = _layer_form(chooser)
    outputs = ["output"] if chooser.random() < 0.4 else _some(chooser, LAYER_OUTPUTS)
    form.select(outputs)
    return form.case("layer", outputs)


def _layer_gradients(chooser: random.Random) -> Case:
    form = _layer_form(chooser)
    _, matrix = form.tensors["w_output"]
    columns = matrix[1 if form.options["weight_layout"] == "in_out" else 0]
    form.add("grad_output", form.dims.batch, form.dims.seq_len_q, columns)
    return form.case("layer_gradients", _asked(chooser, form, LAYER_GRADIENT_OUTPUTS))


def _layer_form(chooser: random.Random) -> _Form:
    has_memory = chooser.random() < 0.4
    dims = _dims(chooser, same_width=0.8, same_tokens=0.4 if has_memory else 1.0)
    form = _Form(chooser, dims)
    width, output_width = chooser.choice(WIDTHS), chooser.choice(WIDTHS)
    memory_width = chooser.choice((width, *WIDTHS)) if has_memory else width
    has_biases, weight_layout = chooser.random() < 0.5, chooser.choice(("in_out", "out_in"))
    form.options |= {"num_heads": dims.num_heads, "num_kv_heads": dims.num_kv_heads, "weight_layout": weight_layout}
    form.add("input", dims.batch, dims.seq_len_q, width)
    if has_memory:
        form.add("memory", dims.batch, dims.seq_len_kv, memory_width)
    for name, into, out_of in (
        ("query", width, dims.num_heads * dims.head_dim),
        ("key", memory_width, dims.num_kv_heads * dims.head_dim),
        ("value", memory_width, dims.num_kv_heads * dims.head_dim_v),
        ("output", dims.num_heads * dims.head_dim_v, output_width),
    ):
        form.add(f"w_{name}", *((into, out_of) if weight_layout == "in_out" else (out_of, into)))
        if has_biases:
            form.add(f"b_{name}", out_of)
    form.add_rules()
    return form


def _dims(chooser: random.Random, *, same_width: float, same_tokens: float = 0.4) -> Dims:
    num_kv_heads = chooser.choice((1, 2, 4, 8))
    many = _between(chooser, 32, 4096)
    seq_len_q = chooser.choice((1, chooser.randint(2, 32), many, many))
    seq_len_kv = seq_len_q if chooser.random() < same_tokens else _between(chooser, 1, 8192)
    head_dim = chooser.choice(HEAD_DIMS)
    return Dims(
        batch=chooser.choice((1, 1, 1, 2, 3, 8, 32)),
        num_heads=num_kv_heads * chooser.choice((1, 1, 1, 2, 4, 8)),
        num_kv_heads=num_kv_heads,
        seq_len_q=seq_len_q,
        seq_len_kv=seq_len_kv,
        head_dim=head_dim,
        head_dim_v=head_dim if chooser.random() < same_width else chooser.choice(HEAD_DIMS),
    )


def _between(chooser: random.Random, least: int, most: int) -> int:
    """As often from 32 to 64 as from 1024 to 2048; a power of two three times in ten."""
    exponent = chooser.uniform(math.log2(least), math.log2(most))
    return int(2 ** (round(exponent) if chooser.random() < 0.3 else exponent))


def _some(chooser: random.Random, names: Sequence[str]) -> list[str]:
    """Some of the names, one alone as often as several."""
    count = 1 if chooser.random() < 0.5 else chooser.randint(1, len(names))
    chosen = set(chooser.sample(names, count))
    return [name for name in names if name in chosen]


def _asked(chooser: random.Random, form: _Form, names: Sequence[str]) -> list[str] | None:
    """Some of the gradients of what is given, or all."""
    given = [name for name in names if name.removeprefix("grad_") in form.tensors]
    return None if chooser.random() < 0.4 else _some(chooser, given)


@dataclass(slots=True)
class _Form:
    """A case while it is drawn."""

    chooser: random.Random
    dims: Dims
    tensors: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    numbers: dict[str, list[int]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""
    layout: str = "bhtd"

    def __post_init__(self) -> None:
        self.dtype = self.chooser.choice(DTYPES)

    def add(self, name: str, *shape: int, dtype: str | None = None) -> None:
        self.tensors[name] = (dtype or self.dtype, list(shape))

    def placed(self, batch: int, heads: int, tokens: int, width: int) -> list[int]:
        match self.layout:
            case "bhtd":
                return [batch, heads, tokens, width]
            case "bthd":
                return [batch, tokens, heads, width]
        return [batch, tokens, heads * width]

    def add_operands(self) -> None:
        """Query, key and value in some layout, or query alone for self-attention."""
        dims = self.dims
        self.layout = self.chooser.choice(("bhtd", "bhtd", "bthd", "btd"))
        if self.layout != "bhtd":
            self.options["layout"] = self.layout
        if self.layout == "btd":
            self.options["num_heads"] = dims.num_heads
        self.add("query", *self.placed(dims.batch, dims.num_heads, dims.seq_len_q, dims.head_dim))
        of_query = dims.num_heads, dims.seq_len_q, dims.head_dim
        if (dims.num_kv_heads, dims.seq_len_kv, dims.head_dim_v) == of_query and self.chooser.random() < 0.3:
            return
        if self.layout == "btd":
            self.options["num_kv_heads"] = dims.num_kv_heads
        self.add("key", *self.placed(dims.batch, dims.num_kv_heads, dims.seq_len_kv, dims.head_dim))
        self.add("value", *self.placed(dims.batch, dims.num_kv_heads, dims.seq_len_kv, dims.head_dim_v))

    def add_rules(self, *, of_fused: bool = False) -> None:
        """Who attends whom, and how: nothing, or some of it. ``of_fused``: without what the fused kernel has not."""
        chooser, dims, options = self.chooser, self.dims, self.options
        share = chooser.choice((0.0, 0.15, 0.3))

        def sometimes() -> bool:
            return chooser.random() < share

        def pairs() -> list[int]:
            axes = (dims.batch, dims.num_heads, dims.seq_len_q, dims.seq_len_kv)
            return [chooser.choice((axis, 1)) for axis in axes]

        def other_dtype() -> str:
            return chooser.choice((self.dtype, *DTYPES))

        if sometimes():
            self.add("allow_mask", *pairs(), dtype="bool")
        if sometimes():
            self.add("block_mask", *pairs(), dtype="bool")
        if sometimes():
            self.add("bias", *pairs(), dtype=self.dtype if of_fused else other_dtype())
        if sometimes():
            self.numbers["key_lengths"] = [chooser.randint(0, dims.seq_len_kv) for _ in range(dims.batch)]
        if sometimes():
            self.numbers["query_lengths"] = [chooser.randint(0, dims.seq_len_q) for _ in range(dims.batch)]
        if not of_fused:
            if sometimes():
                self.add("alibi_slopes", dims.num_heads, dtype=other_dtype())
            if sometimes():
                self.add("sinks", dims.num_heads, dtype=other_dtype())
            if sometimes():
                options["softcap"] = 20.0
        if sometimes():
            options["window_left"] = chooser.choice((0, 16, 256, 1024))
            if chooser.random() < 0.5:
                options["window_right"] = chooser.choice((0, 16, 256))
        if sometimes():
            options["causal"] = chooser.choice(("upper_left", "lower_right", True))
        is_measured = "window_left" in options or "alibi_slopes" in self.tensors or options.get("causal") is True
        if is_measured and not isinstance(options.get("causal"), str):
            count = chooser.choice((1, dims.batch))
            self.numbers["query_offset"] = [chooser.randint(-4, dims.seq_len_kv) for _ in range(count)]
        if chooser.random() < 0.05:
            options["empty_rows"] = "error"

    def select(self, outputs: Sequence[str]) -> None:
        chooser, asked = self.chooser, set(outputs)
        for name, selectable, size in (
            ("select_rows", SELECTABLE_BY_ROW, self.dims.seq_len_q),
            ("select_heads", SELECTABLE_BY_HEAD, self.dims.num_heads),
        ):
            if asked & selectable and chooser.random() < 0.25:
                self.options[name] = sorted(chooser.sample(range(size), chooser.randint(1, min(MAX_SELECTED, size))))
        if "top_weights" in asked:
            self.options["top_k"] = chooser.choice((1, 4, 16, 64))

    def drop_axis(self) -> None:
        """Sometimes rank 3, where there is one item."""
        if self.layout != "bhtd" or self.dims.batch > 1 or self.chooser.random() > 0.2:
            return
        for name in ("query", "key", "value", "grad_context", "grad_logsumexp"):
            if name in self.tensors:
                dtype, shape = self.tensors[name]
                self.tensors[name] = (dtype, shape[1:])

    def case(self, kind: str, outputs: list[str] | None) -> Case:
        hazards = possible_hazards(self.tensors)
        parts = {
            "numbers": self.numbers,
            "options": self.options,
            "outputs": outputs,
            "hazards": self.chooser.sample(hazards, min(NUM_HAZARDS, len(hazards))),
        }
        return {"kind": kind, "tensors": self.tensors} | {name: part for name, part in parts.items() if part}


KINDS: dict[str, Callable[[random.Random], Case]] = {
    "fused": lambda chooser: _attention(chooser, "fused"),
    "manual": lambda chooser: _attention(chooser, "manual"),
    "blocked": lambda chooser: _attention(chooser, "blocked"),
    "weighted_sum": _weighted_sum,
    "gradients": _gradients,
    "layer": _layer,
    "layer_gradients": _layer_gradients,
}


def measure(cases: Iterable[tuple[str, Case]], *, told: bool = False) -> list[Measured]:
    """``told``: each goes to stderr. Raises: NotMeasured."""
    asked: list[tuple[str, Case]] = []

    def given() -> Iterator[Case]:
        for kind, case in cases:
            asked.append((kind, case))
            yield case

    found: list[Measured] = []
    for peak in measure_peaks(given()):
        kind, case = asked[len(found)]
        found.append(Measured(kind, case, peak))
        if told:
            print(f"{len(found)}: {found[-1]}", file=sys.stderr, flush=True)
    return found


def laws_of(found: Sequence[Measured]) -> list[Law]:
    return [
        equal(f"problems that take less than {LEAST} of the estimate", sum(one.is_low for one in found), 0),
        equal("problems that take more than the estimate", sum(one.is_high for one in found), 0),
    ]


def outcome_of(found: Sequence[Measured]) -> Outcome:
    columns = ("", "problems", "lowest", "5th percentile", "highest", "with hazards", "resident")
    rows = [_row(kind, [one for one in found if one.kind == kind]) for kind in dict.fromkeys(one.kind for one in found)]
    notes = []
    for one in sorted((one for one in found if one.is_high), key=lambda one: -one.highest):
        notes += [f"# above the estimate: {one}", json.dumps(one.case)]
    for one in sorted((one for one in found if one.is_low), key=lambda one: one.peak.ratio):
        notes += [f"# far below the estimate: {one}", json.dumps(one.case)]
    return Outcome(
        "peaks",
        figures={"problems": len(found), "of them refused": sum(one.peak.refusal is not None for one in found)},
        laws=laws_of(found),
        tables=[("measured / estimate", columns, rows)],
        notes=notes,
    )


def _row(kind: str, ones: Sequence[Measured]) -> tuple[str, int, float, float, float, float, float]:
    answered = sorted(one.peak.ratio for one in ones if one.peak.refusal is None) or [math.nan]
    return (
        kind,
        len(ones),
        answered[0],
        answered[len(answered) // 20],
        answered[-1],
        max(one.peak.hazardous_ratio for one in ones),
        max(one.peak.resident_ratio for one in ones),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    kinds = ",".join(KINDS)
    parser.add_argument("--problems", type=int, default=210, help="default: 210")
    parser.add_argument("--seed", type=int, default=5, help="default: 5")
    parser.add_argument("--kinds", type=_kinds, default=tuple(KINDS), help=f"with commas between, default: {kinds}")
    parser.add_argument("--case", action="append", default=[], help="a problem as JSON instead of random ones")
    parser.add_argument("--cases", type=Path, help="a file of them, one a line; a line that begins with # is none")


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := set(kinds) - set(KINDS):
        raise argparse.ArgumentTypeError(f"no kind is called {', '.join(sorted(unknown))}")
    return kinds


def run(options: argparse.Namespace) -> Outcome:
    """Raises: LoadFailed."""
    lines = [*options.case, *(options.cases.read_text().splitlines() if options.cases else ())]
    cases = [json.loads(line) for line in lines if line.strip() and not line.startswith("#")]
    asked: Iterable[tuple[str, Case]] = [(_kind_of(case), case) for case in cases]
    if not cases:
        asked = draw_cases(options.problems, seed=options.seed, kinds=options.kinds)
    try:
        return outcome_of(measure(asked, told=True))
    except NotMeasured as error:
        raise LoadFailed(str(error)) from None


def _kind_of(case: Case) -> str:
    return prepare(without_numbers(case), device_type="cpu").path if case["kind"] == "attention" else case["kind"]


FORM = Form("peaks", "memory beside its estimate", add_options, run)

if __name__ == "__main__":
    sys.exit(run_forms([FORM], prog="python -m tests.benchmarks.soak.peaks", description=__doc__ or ""))
