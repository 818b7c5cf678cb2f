"""Whether an attention or a weighted sum can be computed: every fault at once.

``find_faults`` looks at shapes, dtypes and options alone, so it also serves a problem whose numbers are not
there. ``find_value_faults`` reads the few small tensors whose numbers are part of the shape of the problem:
lengths, offsets, slopes and sinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_core.cut import pieces
from attn_core.errors import MAX_FAULTS, Fault, names_text, shape_text
from attn_core.numerics import compute_dtype, largest
from attn_core.problem import (
    FLOAT_DTYPES,
    LAYOUTS,
    LENGTH_DTYPES,
    OUTPUTS,
    SELECTABLE_BY_HEAD,
    SELECTABLE_BY_ROW,
    AttentionOptions,
    AttentionProblem,
    Dims,
    TensorSpec,
)
from attn_core.support import PATHS, path_expectation, why_not_by_options

MAX_OFFSET = 2**53
"""Beyond it a position is no longer exact in float64, in which ALiBi distances are taken."""
READ_AT_ONCE = 2**16
"""So many numbers are looked at together: this comes before admission, and must take no memory to speak of."""


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def dims_of(problem: AttentionProblem) -> Dims:
    """The axes of a problem that ``check_problem`` has passed."""
    specs = {name: spec_of(tensor) for name, tensor in problem.tensors().items()}
    return _Axes.read(specs, problem.options, broken=()).dims()


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class _Operand:
    """query, key or value read through the layout; None where that axis cannot be told."""

    batch: int | None = None
    heads: int | None = None
    tokens: int | None = None
    width: int | None = None
    given: bool = False
    rank: int | None = None


@dataclass(slots=True)
class _Axes:
    """The three operands, and the faults that reading them through the layout found."""

    query: _Operand
    key: _Operand
    value: _Operand
    self_attention: bool
    faults: list[Fault] = field(default_factory=list)

    @classmethod
    def read(cls, specs: Mapping[str, TensorSpec], options: AttentionOptions, broken: Container[str]) -> _Axes:
        faults: list[Fault] = []
        self_attention = not any(name in specs or name in broken for name in ("key", "value"))
        heads, kv_heads = options.num_heads, options.num_kv_heads
        operands = []
        for name in ("query", "key", "value"):
            spec = specs.get(name)
            if spec is None:
                operands.append(_Operand())
                continue
            own_heads = heads if name == "query" else (kv_heads if kv_heads is not None else heads)
            operands.append(_read_operand(name, spec, options, own_heads, broken, faults))
        query, key, value = operands
        if options.layout == "bhtd" and query.rank is not None:
            for name, operand in (("key", key), ("value", value)):
                if operand.rank is not None and operand.rank != query.rank:
                    expected = f"rank {query.rank}, as query has"
                    faults.append(Fault(name, expected, shape_text(specs[name].shape)))
                    operand.batch = operand.heads = operand.tokens = operand.width = None
        if self_attention:
            key = value = query
        return cls(query, key, value, self_attention, faults)

    def dims(self) -> Dims:
        query, key, value = self.query, self.key, self.value
        assert query.batch is not None and query.heads is not None and query.tokens is not None
        assert query.width is not None and key.heads is not None and key.tokens is not None
        assert value.width is not None
        return Dims(
            batch=query.batch,
            num_heads=query.heads,
            num_kv_heads=key.heads,
            seq_len_q=query.tokens,
            seq_len_kv=key.tokens,
            head_dim=query.width,
            head_dim_v=value.width,
        )


def _read_operand(
    name: str,
    spec: TensorSpec,
    options: AttentionOptions,
    num_heads: int | None,
    broken: Container[str],
    faults: list[Fault],
) -> _Operand:
    shape, rank = spec.shape, len(spec.shape)
    if "layout" in broken or options.layout not in LAYOUTS:
        return _Operand(given=True)
    if options.layout == "bhtd":
        if rank not in (2, 3, 4):
            faults.append(Fault(name, "rank 4, 3 or 2 in layout bhtd", shape_text(shape)))
            return _Operand(given=True)
        batch, heads, tokens, width = (1,) * (4 - rank) + shape
        return _Operand(batch, heads, tokens, width, given=True, rank=rank)
    if options.layout == "bthd":
        if rank != 4:
            faults.append(Fault(name, "rank 4, [B,T,H,D], in layout bthd", shape_text(shape)))
            return _Operand(given=True)
        batch, tokens, heads, width = shape
        return _Operand(batch, heads, tokens, width, given=True)
    if rank != 3:
        faults.append(Fault(name, "rank 3, [B,T,H*D], in layout btd", shape_text(shape)))
        return _Operand(given=True)
    batch, tokens, columns = shape
    if num_heads is None or num_heads < 1:
        return _Operand(batch, None, tokens, None, given=True)
    if columns % num_heads:
        expected = f"a last axis that num_heads {num_heads} divides"
        faults.append(Fault(name, expected, shape_text(shape)))
        return _Operand(batch, num_heads, tokens, None, given=True)
    return _Operand(batch, num_heads, tokens, columns // num_heads, given=True)


def find_faults(
    specs: Mapping[str, TensorSpec],
    options: AttentionOptions,
    *,
    broken: Container[str] = (),
) -> list[Fault]:
    """Every fault that shapes, dtypes and options show, in the order of the contract's tables.

    ``broken`` names tensors and options that were sent and could not be read: they are not reported as
    missing, and nothing is compared with them.
    """
    axes = _Axes.read(specs, options, broken)
    faults: list[Fault] = []
    _check_presence(specs, broken, faults)
    _check_dtypes(specs, broken, faults)
    faults += axes.faults
    _check_operands(specs, options, axes, broken, faults)
    _check_masks(specs, axes, faults)
    _check_vectors(specs, axes, faults)
    _check_options(specs, options, axes, broken, faults)
    return faults


def _check_presence(specs: Mapping[str, TensorSpec], broken: Container[str], faults: list[Fault]) -> None:
    if "query" not in specs and "query" not in broken:
        faults.append(Fault("query", "a tensor", "nothing"))
    for name, other in (("key", "value"), ("value", "key")):
        if name not in specs and name not in broken and (other in specs or other in broken):
            expected = f"a tensor, as {other} is given (self-attention leaves out both)"
            faults.append(Fault(name, expected, "nothing"))


def _check_dtypes(specs: Mapping[str, TensorSpec], broken: Container[str], faults: list[Fault]) -> None:
    query = specs.get("query")
    for name, spec in specs.items():
        received = dtype_text(spec.dtype)
        if name in ("allow_mask", "block_mask"):
            if spec.dtype != torch.bool:
                expected = "bool (a number to add is bias, 0 and 1 are not a mask)"
                faults.append(Fault(name, expected, received))
        elif name in ("key_lengths", "query_lengths", "query_offset"):
            if spec.dtype not in LENGTH_DTYPES:
                faults.append(Fault(name, "int64 or int32", received))
        elif spec.dtype not in FLOAT_DTYPES:
            expected = names_text([dtype_text(dtype) for dtype in FLOAT_DTYPES])
            faults.append(Fault(name, expected, received))
        elif (
            name in ("key", "value") and query is not None and query.dtype in FLOAT_DTYPES and spec.dtype != query.dtype
        ):
            faults.append(Fault(name, f"{dtype_text(query.dtype)}, as query has", received))


def _check_operands(
    specs: Mapping[str, TensorSpec],
    options: AttentionOptions,
    axes: _Axes,
    broken: Container[str],
    faults: list[Fault],
) -> None:
    query, key, value = axes.query, axes.key, axes.value

    def fault(name: str, expected: str) -> None:
        faults.append(Fault(name, expected, shape_text(specs[name].shape)))

    if options.layout == "btd" and options.num_heads is None and "num_heads" not in broken:
        faults.append(Fault("num_heads", "the number of heads, which layout btd needs", "nothing"))
    if query.given:
        if query.heads is not None and query.heads < 1:
            fault("query", "at least one head")
        if query.width is not None and query.width < 1:
            fault("query", "a head dim of at least 1")
    if not axes.self_attention:
        if key.given:
            if query.batch is not None and key.batch is not None and key.batch != query.batch:
                fault("key", f"batch {query.batch}, as query has")
            if key.heads is not None and key.heads < 1:
                fault("key", "at least one head")
            elif query.heads and key.heads and query.heads % key.heads:
                fault("key", f"a number of heads that divides query's {query.heads}, not {key.heads}")
            if key.width is not None and query.width is not None and key.width != query.width:
                fault("key", f"head dim {query.width}, as query has")
        if value.given:
            if query.batch is not None and value.batch is not None and value.batch != query.batch:
                fault("value", f"batch {query.batch}, as query has")
            if key.heads is not None and value.heads is not None and value.heads != key.heads:
                fault("value", f"{key.heads} heads, as key has")
            if key.tokens is not None and value.tokens is not None and value.tokens != key.tokens:
                fault("value", f"{key.tokens} tokens, as key has")
            if value.width is not None and value.width < 1:
                fault("value", "a head dim of at least 1")
    if options.layout != "btd" and "layout" not in broken:
        if options.num_heads is not None and query.heads is not None and options.num_heads != query.heads:
            expected = f"{query.heads}, the heads of query, or nothing in layout {options.layout}"
            faults.append(Fault("num_heads", expected, str(options.num_heads)))
        if options.num_kv_heads is not None and key.heads is not None and options.num_kv_heads != key.heads:
            expected = f"{key.heads}, the heads of key, or nothing in layout {options.layout}"
            faults.append(Fault("num_kv_heads", expected, str(options.num_kv_heads)))
    elif axes.self_attention and options.num_heads and options.num_kv_heads not in (None, options.num_heads):
        expected = f"{options.num_heads}, as num_heads, where key = value = query"
        faults.append(Fault("num_kv_heads", expected, str(options.num_kv_heads)))


def _check_masks(specs: Mapping[str, TensorSpec], axes: _Axes, faults: list[Fault]) -> None:
    target = (axes.query.batch, axes.query.heads, axes.query.tokens, axes.key.tokens)
    letters = ("B", "H", "T", "S")
    for name in ("allow_mask", "block_mask", "bias"):
        spec = specs.get(name)
        if spec is None:
            continue
        rank, received = len(spec.shape), shape_text(spec.shape)
        if rank not in (1, 2, 3, 4):
            faults.append(Fault(name, "rank 1 to 4, lined up from the right with [B,H,T,S]", received))
            continue
        batch = axes.query.batch
        if batch is not None and batch > 1 and rank in (2, 3) and spec.shape[0] == batch:
            per_batch, shared = ("[B,S]", "[T,S]") if rank == 2 else ("[B,T,S]", "[H,T,S]")
            as_batch, as_shared = ("[B,1,1,S]", "[1,1,T,S]") if rank == 2 else ("[B,1,T,S]", "[1,H,T,S]")
            expected = (
                f"rank 4, since with B = {batch} this could be {shared}, said by {as_shared}, "
                f"or {per_batch}, said by {as_batch}"
            )
            faults.append(Fault(name, expected, received))
            continue
        own = spec.shape
        wanted = target[4 - rank :]
        if any(want is not None and axis not in (1, want) for axis, want in zip(own, wanted, strict=True)):
            text = shape_text([str(w) if w is not None else x for w, x in zip(target, letters, strict=True)])  # type: ignore[misc]
            expected = f"a shape that broadcasts to {text} from the right, each axis that size or 1"
            faults.append(Fault(name, expected, received))


def _check_vectors(specs: Mapping[str, TensorSpec], axes: _Axes, faults: list[Fault]) -> None:
    batch, heads = axes.query.batch, axes.query.heads
    for name in ("key_lengths", "query_lengths", "query_offset", "alibi_slopes", "sinks"):
        spec = specs.get(name)
        if spec is None:
            continue
        of_heads = name in ("alibi_slopes", "sinks")
        letter, size = ("H", heads) if of_heads else ("B", batch)
        legal = [] if size is None else [(size,)]
        if name == "query_offset":
            legal.append((1,))
        if len(spec.shape) != 1 or (size is not None and spec.shape not in legal):
            expected = f"[{letter}]"
            if size is not None:
                expected += f" = [{size}], {'one for each head' if of_heads else 'the batch'} of query"
            if name == "query_offset":
                expected += ", [1] or a plain number"
            faults.append(Fault(name, expected, shape_text(spec.shape)))


def _check_options(
    specs: Mapping[str, TensorSpec],
    options: AttentionOptions,
    axes: _Axes,
    broken: Container[str],
    faults: list[Fault],
) -> None:
    query = specs.get("query")
    arithmetic = compute_dtype(query.dtype) if query is not None else torch.float32
    seq_len_q, seq_len_kv = axes.query.tokens, axes.key.tokens
    has_offset = "query_offset" in specs or "query_offset" in broken
    positions_count = options.causal is not False or options.has_window or "alibi_slopes" in specs

    if options.causal not in (False, True, "upper_left", "lower_right"):
        expected = "false, true, upper_left or lower_right"
        faults.append(Fault("causal", expected, str(options.causal)))
    elif isinstance(options.causal, str) and has_offset:
        expected = "true or false, as query_offset already says where the queries stand"
        faults.append(Fault("causal", expected, options.causal))
    elif seq_len_q is not None and seq_len_kv is not None and seq_len_q != seq_len_kv:
        where = f"T = {seq_len_q} and S = {seq_len_kv} differ"
        if options.causal is True and not has_offset:
            expected = (
                f"upper_left (query i sees keys up to i), lower_right (the last query sees the last key) "
                f"or a query_offset, since {where}"
            )
            faults.append(Fault("causal", expected, "true"))
        elif options.causal is False and positions_count and not has_offset and "causal" not in broken:
            rule = "window" if options.has_window else "alibi_slopes"
            expected = (
                f"the place of query 0 among the keys, from which {rule} measures, since {where}: "
                f"0 (upper left) or {seq_len_kv - seq_len_q} (lower right)"
            )
            faults.append(Fault("query_offset", expected, "nothing"))
    if has_offset and not positions_count and not any(name in broken for name in ("causal", "window", "alibi_slopes")):
        expected = "causal, window or alibi_slopes beside it, which alone measure from it"
        faults.append(Fault("query_offset", expected, "none of them"))

    if options.scale is not None and not _is_finite_in(options.scale, arithmetic):
        expected = f"a number that is finite in {dtype_text(arithmetic)}"
        faults.append(Fault("scale", expected, repr(options.scale)))
    if options.softcap is not None and not (
        _is_finite_in(options.softcap, arithmetic) and torch.tensor(options.softcap, dtype=arithmetic).item() > 0
    ):
        expected = f"a number above 0 that is finite in {dtype_text(arithmetic)}"
        faults.append(Fault("softcap", expected, repr(options.softcap)))
    for name, window in (("window.left", options.window_left), ("window.right", options.window_right)):
        if window is not None and window < 0:
            faults.append(Fault(name, "a whole number of keys, 0 or more", str(window)))
    for name, heads in (("num_heads", options.num_heads), ("num_kv_heads", options.num_kv_heads)):
        if heads is not None and heads < 1:
            faults.append(Fault(name, "a whole number, 1 or more", str(heads)))
    if options.layout not in LAYOUTS:
        faults.append(Fault("layout", names_text(LAYOUTS), str(options.layout)))
    if options.empty_rows not in ("zeros", "error"):
        faults.append(Fault("empty_rows", "zeros or error", str(options.empty_rows)))
    _check_path(specs, options, broken, faults)
    _check_outputs(options, axes, broken, faults)


def _check_path(
    specs: Mapping[str, TensorSpec], options: AttentionOptions, broken: Container[str], faults: list[Fault]
) -> None:
    if options.path is None:
        return
    if options.path not in PATHS:
        faults.append(Fault("path", names_text(PATHS), str(options.path)))
    elif "outputs" not in broken:
        reason = why_not_by_options(
            options.path,
            [name for name in options.outputs if name in OUTPUTS],
            softcap=options.softcap is not None,
            sinks="sinks" in specs,
            alibi_slopes="alibi_slopes" in specs,
            selects=options.select_heads is not None or options.select_rows is not None,
        )
        if reason is not None:
            faults.append(Fault("path", path_expectation(options.path, reason), options.path))


def _is_finite_in(number: float, dtype: torch.dtype) -> bool:
    return math.isfinite(number) and abs(number) <= torch.finfo(dtype).max


def _check_outputs(options: AttentionOptions, axes: _Axes, broken: Container[str], faults: list[Fault]) -> None:
    if not options.outputs:
        faults.append(Fault("outputs", "at least one name", "[]"))
    for index, name in enumerate(options.outputs[: 2 * len(OUTPUTS)]):
        if name not in OUTPUTS:
            faults.append(Fault(f"outputs.{index}", names_text(OUTPUTS), str(name)))
        elif name in options.outputs[:index]:
            faults.append(Fault(f"outputs.{index}", "each name once", name))
    asked = set(options.outputs)
    known = "outputs" not in broken and "select" not in broken
    _check_selected(
        "select.heads", options.select_heads, axes.query.heads, "head", asked, SELECTABLE_BY_HEAD, known, faults
    )
    _check_selected(
        "select.rows", options.select_rows, axes.query.tokens, "row", asked, SELECTABLE_BY_ROW, known, faults
    )
    if options.top_k is not None:
        if options.top_k < 1:
            faults.append(Fault("select.top_k", "a whole number, 1 or more", str(options.top_k)))
        if known and "top_weights" not in asked:
            expected = "top_weights among the outputs, which alone uses it"
            faults.append(Fault("select.top_k", expected, str(options.top_k)))
    elif known and "top_weights" in asked:
        expected = "how many keys top_weights should name"
        faults.append(Fault("select.top_k", expected, "nothing"))


def _check_selected(
    name: str,
    indices: tuple[int, ...] | None,
    size: int | None,
    word: str,
    asked: set[str],
    selectable: frozenset[str],
    known: bool,
    faults: list[Fault],
) -> None:
    if indices is None:
        return
    if not indices:
        faults.append(Fault(name, f"at least one {word}", "[]"))
    if known and not asked & selectable:
        ordered = [output for output in OUTPUTS if output in selectable]
        faults.append(Fault(name, f"an asked output that has {word}s: {names_text(ordered)}", "none"))
    seen: set[int] = set()
    limit = len(faults) + MAX_FAULTS
    for place, index in enumerate(indices):
        if len(faults) >= limit:
            break
        if index in seen:
            faults.append(Fault(f"{name}.{place}", f"each {word} once", str(index)))
        elif index < 0 or (size is not None and index >= size):
            expected = f"a {word} of 0 to {size - 1}" if size else f"a {word} that is there"
            faults.append(Fault(f"{name}.{place}", expected, str(index)))
        seen.add(index)


def find_weighted_sum_faults(specs: Mapping[str, TensorSpec], *, broken: Container[str] = ()) -> list[Fault]:
    """Every fault of a weighted sum: weights ``[B,H,T,S]`` and value ``[B,K,S,V]``, ranks 4, 3 or 2."""
    faults: list[Fault] = []
    for name in ("weights", "value"):
        spec = specs.get(name)
        if spec is None:
            if name not in broken:
                faults.append(Fault(name, "a tensor", "nothing"))
            continue
        if spec.dtype not in FLOAT_DTYPES:
            expected = names_text([dtype_text(dtype) for dtype in FLOAT_DTYPES])
            faults.append(Fault(name, expected, dtype_text(spec.dtype)))
        if len(spec.shape) not in (2, 3, 4):
            faults.append(Fault(name, "rank 4, 3 or 2", shape_text(spec.shape)))
    weights, value = specs.get("weights"), specs.get("value")
    if faults or weights is None or value is None:
        return faults
    received = shape_text(value.shape)
    if value.dtype != weights.dtype:
        faults.append(Fault("value", f"{dtype_text(weights.dtype)}, as weights has", dtype_text(value.dtype)))
    if len(value.shape) != len(weights.shape):
        faults.append(Fault("value", f"rank {len(weights.shape)}, as weights has", received))
        return faults
    padding = (1,) * (4 - len(weights.shape))
    batch, heads, _, seq_len_kv = padding + weights.shape
    value_batch, kv_heads, value_tokens, width = padding + value.shape
    if heads < 1:
        faults.append(Fault("weights", "at least one head", shape_text(weights.shape)))
    if value_batch != batch:
        faults.append(Fault("value", f"batch {batch}, as weights has", received))
    if kv_heads < 1 or heads % kv_heads:
        expected = f"a number of heads that divides the {heads} of weights"
        faults.append(Fault("value", expected, received))
    if value_tokens != seq_len_kv:
        faults.append(Fault("value", f"{seq_len_kv} tokens, as weights has keys", received))
    if width < 1:
        faults.append(Fault("value", "a head dim of at least 1", received))
    return faults


def known_lengths(
    specs: Mapping[str, TensorSpec], options: AttentionOptions, *, broken: Container[str] = ()
) -> tuple[int | None, int | None]:
    """seq_len_q and seq_len_kv as far as shapes and layout tell them, of a problem with faults too."""
    axes = _Axes.read(specs, options, broken)
    return axes.query.tokens, axes.key.tokens


def find_value_faults(
    tensors: Mapping[str, Tensor], *, seq_len_q: int | None = None, seq_len_kv: int | None = None
) -> list[Fault]:
    """Faults in the numbers of lengths, offsets, slopes, sinks and wide biases.

    A length that is None is not compared with. The tensors are expected on the host, where they arrive; on a GPU
    this waits for the stream.
    """
    faults: list[Fault] = []

    def look(name: str, expected: str, is_wrong: Callable[[Tensor], Tensor]) -> None:
        tensor = tensors.get(name)
        # find_faults refuses another rank and another kind of dtype.
        if tensor is None or tensor.ndim != 1 or tensor.dtype == torch.bool:
            return
        faults.extend(faults_where(name, tensor, is_wrong, expected))

    for name, length, side in (("key_lengths", seq_len_kv, "key"), ("query_lengths", seq_len_q, "query")):
        if length is not None:
            expected = f"a length of 0 to {length}, the tokens of {side}"
            look(name, expected, lambda x, last=length: (x < 0) | (x > last))  # type: ignore[misc]
    look(
        "query_offset",
        f"a position of -{MAX_OFFSET} to {MAX_OFFSET}",
        lambda x: (x.long() < -MAX_OFFSET) | (x.long() > MAX_OFFSET),
    )
    query, bias = tensors.get("query"), tensors.get("bias")
    arithmetic = torch.float32 if query is None else compute_dtype(query.dtype)
    finite = f"a number that is finite in {dtype_text(arithmetic)}"
    for name in ("alibi_slopes", "sinks"):
        look(name, finite, lambda x: ~torch.isfinite(x.to(arithmetic)))
    if bias is not None and bias.dtype == torch.float64 != arithmetic:
        # Rounded, such a number would be an infinity: it would block, and a finite number only shifts.
        last = torch.finfo(arithmetic).max

        def is_beyond(x: Tensor) -> Tensor:
            if largest(x) <= last:
                return torch.zeros(x.shape, dtype=torch.bool, device=x.device)
            return torch.isfinite(x) & torch.isinf(x.to(arithmetic))

        faults += faults_where("bias", bias, is_beyond, f"a number that {dtype_text(arithmetic)} can hold")
    return faults


def faults_where(name: str, tensor: Tensor, is_wrong: Callable[[Tensor], Tensor], expected: str) -> list[Fault]:
    """The first numbers of a tensor that are wrong, each by its place, found in little memory."""
    faults: list[Fault] = []
    for piece in pieces(tensor.shape, READ_AT_ONCE):
        part = tensor[piece]
        wrong = is_wrong(part)
        if not wrong.any():
            continue
        for place in wrong.nonzero()[: MAX_FAULTS - len(faults)].tolist():
            where = [(run.start or 0) + index for run, index in zip(piece, place, strict=True)]
            faults.append(Fault(".".join([name, *map(str, where)]), expected, number_text(part[tuple(place)].item())))
        if len(faults) == MAX_FAULTS:
            break
    return faults


def number_text(number: float) -> str:
    """A number as callers write it: infinities and NaN by their words."""
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return repr(number)
