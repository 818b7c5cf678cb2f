"""Whether a layer, and its gradients, can be computed.

Projections are checked here; masks, lengths and options by what checks the attention inside, on stand-ins for query,
key and value, so that a layer is refused in the same words as an attention.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from attn_core.errors import Fault, names_text, shape_text
from attn_core.problem import (
    FLOAT_DTYPES,
    LAYER_GRADIENT_OUTPUTS,
    LAYER_OUTPUTS,
    OUTPUTS,
    PARAMETER_NAMES,
    PROJECTION_BIAS_NAMES,
    RULE_NAMES,
    WEIGHT_LAYOUTS,
    WEIGHT_NAMES,
    LayerOptions,
    TensorSpec,
)
from attn_core.validate.attention import dtype_text, find_faults
from attn_core.validate.gradients import gradients_path_expectation, why_not_gradients

WEIGHT_LAYOUT_EXPECTED = "in_out (y = x W, as in the papers) or out_in (y = x W^T, as nn.Linear stores)"
_COLUMNS = {"w_query": "H*D", "w_key": "K*D", "w_value": "K*V", "w_output": "O"}
_ROWS = {"w_query": "E", "w_key": "M", "w_value": "M", "w_output": "H*V"}
_INSIDE = frozenset({"query", "key", "value", "layout", "num_heads", "num_kv_heads"})
"""What the check of the attention says of these is said here of the tensors they come from."""


def find_parameters_faults(
    specs: Mapping[str, TensorSpec],
    *,
    num_heads: int | None,
    num_kv_heads: int | None,
    weight_layout: str | None,
    broken: Container[str] = (),
) -> list[Fault]:
    """Every fault of the tensors of ``PARAMETER_NAMES`` among themselves: of a layer that is uploaded without input.

    What is None was not given, or could not be read where ``broken`` names it.
    """
    own = {name: specs[name] for name in PARAMETER_NAMES if name in specs}
    faults = _Parameters(own, num_heads, num_kv_heads, weight_layout, broken).find_faults()
    return faults + _reading_faults(num_heads, num_kv_heads, weight_layout, broken)


def find_layer_faults(
    specs: Mapping[str, TensorSpec], options: LayerOptions, *, broken: Container[str] = (), is_kept: bool = False
) -> list[Fault]:
    """Every fault of a ``LayerProblem``, by the names of ``LAYER_TENSOR_NAMES``; ``broken`` as in ``find_faults``.

    ``is_kept``: the layer is one that is kept by name and in order in itself; where input or memory disagree with it,
    the fault stands at them.
    """
    faults = _tensor_faults(specs, options, broken, is_kept=is_kept)
    faults += _rule_faults(specs, options, broken)
    attention = options.attention
    faults += _reading_faults(attention.num_heads, attention.num_kv_heads, options.weight_layout, broken)
    if "outputs" not in broken:
        faults += _output_faults(options.outputs, LAYER_OUTPUTS)
    return faults


def find_layer_gradients_faults(
    specs: Mapping[str, TensorSpec],
    options: LayerOptions,
    outputs: Sequence[str] | None,
    *,
    broken: Container[str] = (),
    is_kept: bool = False,
) -> list[Fault]:
    """Every fault of a ``LayerGradientsProblem``; ``outputs`` are the asked gradients, None for all there are."""
    attention = options.attention
    faults = _tensor_faults(specs, options, broken, is_kept=is_kept)
    plain = replace(attention, select_heads=None, select_rows=None, top_k=None, path=None)
    faults += _rule_faults(specs, replace(options, attention=plain, outputs=("output",)), broken)
    faults += _grad_output_faults(specs, options, broken)
    for name, chosen in (
        ("select.heads", attention.select_heads),
        ("select.rows", attention.select_rows),
        ("select.top_k", attention.top_k),
    ):
        if chosen is not None:
            received = str(chosen) if isinstance(chosen, int) else shape_text(chosen)
            faults.append(Fault(name, "nothing, as gradients are given whole", received))
    if attention.path is not None and (reason := why_not_gradients(attention.path, ())) is not None:
        faults.append(Fault("path", gradients_path_expectation(reason, ()), attention.path))
    faults += _reading_faults(attention.num_heads, attention.num_kv_heads, options.weight_layout, broken)
    if outputs is not None and "outputs" not in broken:
        faults += _output_faults(outputs, LAYER_GRADIENT_OUTPUTS)
        for index, name in enumerate(outputs[: 2 * len(LAYER_GRADIENT_OUTPUTS)]):
            source = name.removeprefix("grad_")
            if name in LAYER_GRADIENT_OUTPUTS and source not in specs and source not in broken:
                faults.append(Fault(f"outputs.{index}", f"a gradient of what is given, which {source} is not", name))
    return faults


def layer_lengths(specs: Mapping[str, TensorSpec]) -> tuple[int | None, int | None]:
    """seq_len_q and seq_len_kv as far as the shapes of input and memory tell them."""
    seq_len_q = _tokens_of(specs.get("input"))
    return seq_len_q, _tokens_of(specs["memory"]) if "memory" in specs else seq_len_q


def _tokens_of(spec: TensorSpec | None) -> int | None:
    return spec.shape[-2] if spec is not None and len(spec.shape) in (2, 3) else None


def _is_count(number: int | None) -> bool:
    return number is not None and number >= 1


@dataclass(frozen=True, slots=True)
class _Broken:
    """Names that were broken when they came, and some more."""

    names: Container[str]
    more: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return name in self.more or name in self.names


@dataclass(slots=True)
class _Parameters:
    """The matrices and their biases, and what each axis of theirs must be as far as one before it says so."""

    specs: Mapping[str, TensorSpec]
    num_heads: int | None
    num_kv_heads: int | None
    weight_layout: str | None
    broken: Container[str]

    @property
    def kv_heads(self) -> int | None:
        """None where they are wrong in themselves, too."""
        own = self.num_heads if self.num_kv_heads is None and "num_kv_heads" not in self.broken else self.num_kv_heads
        if own is None or own < 1 or (self.num_heads is not None and self.num_heads % own):
            return None
        return own

    def axes(self, name: str) -> tuple[int | None, int | None]:
        """width_in and width_out of a matrix; None where they cannot be told."""
        spec = self.specs.get(name)
        if spec is None or len(spec.shape) != 2 or self.weight_layout not in WEIGHT_LAYOUTS:
            return None, None
        first, second = spec.shape
        return (first, second) if self.weight_layout == "in_out" else (second, first)

    def find_faults(self) -> list[Fault]:
        faults: list[Fault] = []
        first = next((name for name in self.specs if self.specs[name].dtype in FLOAT_DTYPES), None)
        for name in PARAMETER_NAMES:
            spec = self.specs.get(name)
            if spec is None:
                if name in WEIGHT_NAMES and name not in self.broken:
                    faults.append(Fault(name, "a tensor", "nothing"))
                continue
            faults += _dtype_faults(name, spec, self.specs, first)
            faults += (
                self._bias_faults(name, spec) if name in PROJECTION_BIAS_NAMES else self._weight_faults(name, spec)
            )
        return faults

    def _weight_faults(self, name: str, spec: TensorSpec) -> list[Fault]:
        received = shape_text(spec.shape)
        if len(spec.shape) != 2:
            order = f"[{_ROWS[name]},{_COLUMNS[name]}]"
            if self.weight_layout == "out_in":
                order = f"[{_COLUMNS[name]},{_ROWS[name]}]"
            where = f"rank 2, {order}, in weight_layout {self.weight_layout}"
            return [Fault(name, where if self.weight_layout in WEIGHT_LAYOUTS else "rank 2", received)]
        width_in, width_out = self.axes(name)
        if width_in is None or width_out is None:
            return []
        into, out_of = ("rows", "columns") if self.weight_layout == "in_out" else ("columns", "rows")
        faults: list[Fault] = []

        def fault(expected: str) -> None:
            faults.append(Fault(name, expected, received))

        if width_in < 1:
            fault(f"at least one of its {into}")
        if width_out < 1:
            fault(f"at least one of its {out_of}")
            return faults
        heads, kv_heads = self.num_heads, self.kv_heads
        match name:
            case "w_query":
                if heads is not None and heads >= 1 and width_out % heads:
                    fault(f"a number of {out_of} that num_heads {heads} divides")
            case "w_key" | "w_value":
                if kv_heads is not None and width_out % kv_heads:
                    word = "num_heads" if self.num_kv_heads is None else "num_kv_heads"
                    fault(f"a number of {out_of} that {word} {kv_heads} divides")
                elif name == "w_key":
                    head_dim = self._head_dim("w_query", heads)
                    if head_dim is not None and kv_heads is not None and width_out != kv_heads * head_dim:
                        fault(f"{kv_heads * head_dim} {out_of}, {kv_heads} heads of head dim {head_dim} as w_query has")
                if name == "w_value":
                    width_key, _ = self.axes("w_key")
                    if width_key is not None and width_key >= 1 and width_in != width_key:
                        fault(f"{width_key} {into}, as w_key has")
            case _:
                head_dim_v = self._head_dim("w_value", kv_heads)
                if head_dim_v is not None and heads is not None and heads >= 1 and width_in != heads * head_dim_v:
                    fault(f"{heads * head_dim_v} {into}, {heads} heads of head dim {head_dim_v} as w_value has")
        return faults

    def _head_dim(self, name: str, num_heads: int | None) -> int | None:
        _, width_out = self.axes(name)
        if width_out is None or width_out < 1 or num_heads is None or num_heads < 1 or width_out % num_heads:
            return None
        return width_out // num_heads

    def _bias_faults(self, name: str, spec: TensorSpec) -> list[Fault]:
        matrix = name.replace("b_", "w_", 1)
        _, width_out = self.axes(matrix)
        if len(spec.shape) != 1:
            return [Fault(name, f"rank 1, [{_COLUMNS[matrix]}]", shape_text(spec.shape))]
        if width_out is not None and spec.shape != (width_out,):
            return [Fault(name, f"[{width_out}], as {matrix} has outputs", shape_text(spec.shape))]
        return []


def _dtype_faults(
    name: str, spec: TensorSpec, specs: Mapping[str, TensorSpec], first: str | None, *, like: str | None = None
) -> list[Fault]:
    """``first`` is the tensor whose dtype all the others share."""
    if spec.dtype not in FLOAT_DTYPES:
        expected = names_text([dtype_text(dtype) for dtype in FLOAT_DTYPES])
        return [Fault(name, expected, dtype_text(spec.dtype))]
    if first is not None and name != first and spec.dtype != specs[first].dtype:
        return [Fault(name, f"{dtype_text(specs[first].dtype)}, as {like or first} has", dtype_text(spec.dtype))]
    return []


def _tensor_faults(
    specs: Mapping[str, TensorSpec], options: LayerOptions, broken: Container[str], *, is_kept: bool
) -> list[Fault]:
    """Faults of input, memory, matrices and their biases."""
    attention = options.attention
    own = {name: specs[name] for name in ("input", "memory", *PARAMETER_NAMES) if name in specs}
    parameters = _Parameters(own, attention.num_heads, attention.num_kv_heads, options.weight_layout, broken)
    if is_kept:
        return _sent_faults(own, parameters, broken)
    faults: list[Fault] = []
    first = next((name for name in own if own[name].dtype in FLOAT_DTYPES), None)
    faults += _token_faults(own, broken, first)
    by_name: dict[str, list[Fault]] = {name: [] for name in PARAMETER_NAMES}
    for fault in parameters.find_faults():
        by_name[fault.field].append(fault)
    source = "memory" if "memory" in own or "memory" in broken else "input"
    for name, tokens in (("w_query", "input"), ("w_key", source), ("w_value", source)):
        width, (width_in, _) = _width_of(own.get(tokens)), parameters.axes(name)
        if width is None or width_in is None or width_in < 1 or width_in == width:
            continue
        # Where w_key agrees, w_value already disagrees with it.
        if name == "w_value" and parameters.axes("w_key")[0] == width:
            continue
        into = "rows" if options.weight_layout == "in_out" else "columns"
        because = ", where keys come from it" if tokens == "input" and name != "w_query" else ""
        received = shape_text(own[name].shape)
        by_name[name].append(Fault(name, f"{width} {into}, as {tokens} is wide{because}", received))
    return faults + [fault for own_faults in by_name.values() for fault in own_faults]


def _sent_faults(own: Mapping[str, TensorSpec], parameters: _Parameters, broken: Container[str]) -> list[Fault]:
    """Faults of input and memory against a layer that is kept."""
    faults = _token_faults(own, broken, "w_query" if "w_query" in own else None, like="the layer")
    for name, matrix in (("input", "w_query"), ("memory", "w_key")):
        width, (width_in, _) = _width_of(own.get(name)), parameters.axes(matrix)
        if width is not None and width_in is not None and width != width_in:
            faults.append(Fault(name, f"width {width_in}, as the layer's {matrix} takes", shape_text(own[name].shape)))
    if "memory" not in own and "memory" not in broken:
        width, (width_in, _) = _width_of(own.get("input")), parameters.axes("w_key")
        if width is not None and width_in is not None and width != width_in and width == parameters.axes("w_query")[0]:
            expected = f"a tensor of width {width_in}, as the layer's w_key takes, since input has width {width}"
            faults.append(Fault("memory", expected, "nothing"))
    return faults


def _token_faults(
    own: Mapping[str, TensorSpec], broken: Container[str], first: str | None, *, like: str | None = None
) -> list[Fault]:
    """Faults of input and memory between themselves."""
    faults: list[Fault] = []
    if "input" not in own and "input" not in broken:
        faults.append(Fault("input", "a tensor", "nothing"))
    for name, letters in (("input", "[B,T,E] or [T,E]"), ("memory", "[B,S,M] or [S,M]")):
        spec = own.get(name)
        if spec is None:
            continue
        faults += _dtype_faults(name, spec, own, first, like=like)
        if len(spec.shape) not in (2, 3):
            faults.append(Fault(name, f"rank 3 or 2, {letters}", shape_text(spec.shape)))
        elif spec.shape[-1] < 1:
            faults.append(Fault(name, "a width of at least 1", shape_text(spec.shape)))
    tokens, memory = own.get("input"), own.get("memory")
    if tokens is None or memory is None or _width_of(tokens) is None or _width_of(memory) is None:
        return faults
    if len(memory.shape) != len(tokens.shape):
        faults.append(Fault("memory", f"rank {len(tokens.shape)}, as input has", shape_text(memory.shape)))
    elif len(tokens.shape) == 3 and memory.shape[0] != tokens.shape[0]:
        faults.append(Fault("memory", f"batch {tokens.shape[0]}, as input has", shape_text(memory.shape)))
    return faults


def _width_of(spec: TensorSpec | None) -> int | None:
    return spec.shape[-1] if spec is not None and len(spec.shape) in (2, 3) and spec.shape[-1] >= 1 else None


def _rule_faults(specs: Mapping[str, TensorSpec], options: LayerOptions, broken: Container[str]) -> list[Fault]:
    """Faults of masks, lengths and options, as the attention inside has them."""
    attention = options.attention
    heads = attention.num_heads if _is_count(attention.num_heads) else None
    kv_heads = attention.num_kv_heads if _is_count(attention.num_kv_heads) else heads
    stand_ins: dict[str, TensorSpec] = {}
    lengths = layer_lengths(specs)
    spec = specs.get("input")
    if spec is not None and lengths[0] is not None:
        batch = spec.shape[0] if len(spec.shape) == 3 else 1
        dtype = spec.dtype if spec.dtype in FLOAT_DTYPES else torch.float32
        stand_ins["query"] = TensorSpec(dtype, (batch, lengths[0], heads or 1))
        if lengths[1] is not None and "memory" not in broken:
            shape = (batch, lengths[1], kv_heads or 1)
            stand_ins |= {"key": TensorSpec(dtype, shape), "value": TensorSpec(dtype, shape)}
    rules = {name: specs[name] for name in RULE_NAMES if name in specs}
    inside = tuple(dict.fromkeys(name for name in options.outputs if name in OUTPUTS)) or ("context",)
    read = replace(attention, layout="btd", num_heads=heads, num_kv_heads=kv_heads, outputs=inside)
    found = find_faults(stand_ins | rules, read, broken=_Broken(broken, _INSIDE - {"layout"}))
    return [
        replace(fault, expected=_of_a_layer(fault.expected))
        for fault in found
        if fault.field not in _INSIDE and fault.field != "outputs"
    ]


def _of_a_layer(expected: str) -> str:
    return expected.replace("the batch of query", "the batch of input").replace(
        "one for each head of query", "one for each head"
    )


def _grad_output_faults(specs: Mapping[str, TensorSpec], options: LayerOptions, broken: Container[str]) -> list[Fault]:
    spec, tokens = specs.get("grad_output"), specs.get("input")
    if spec is None:
        return [] if "grad_output" in broken else [Fault("grad_output", "a tensor", "nothing")]
    faults = _dtype_faults("grad_output", spec, specs, None)
    if not faults and tokens is not None and tokens.dtype in FLOAT_DTYPES and spec.dtype != tokens.dtype:
        faults.append(Fault("grad_output", f"{dtype_text(tokens.dtype)}, as input has", dtype_text(spec.dtype)))
    if tokens is None or len(tokens.shape) not in (2, 3):
        return faults
    attention = options.attention
    parameters = _Parameters(specs, attention.num_heads, attention.num_kv_heads, options.weight_layout, broken)
    _, width_out = parameters.axes("w_output")
    wanted = (*tokens.shape[:-1], width_out)
    if len(spec.shape) != len(wanted) or any(
        want is not None and axis != want for axis, want in zip(spec.shape, wanted, strict=True)
    ):
        text = shape_text([axis if axis is not None else "O" for axis in wanted])  # type: ignore[misc]
        faults.append(Fault("grad_output", f"{text}, as output has", shape_text(spec.shape)))
    return faults


def _reading_faults(
    num_heads: int | None, num_kv_heads: int | None, weight_layout: str | None, broken: Container[str]
) -> list[Fault]:
    """Faults of the options that say how the matrices are to be read."""
    faults: list[Fault] = []
    if num_heads is None:
        if "num_heads" not in broken:
            faults.append(Fault("num_heads", "the number of heads", "nothing"))
    elif num_heads < 1:
        faults.append(Fault("num_heads", "a whole number, 1 or more", str(num_heads)))
    if num_kv_heads is not None:
        if num_kv_heads < 1:
            faults.append(Fault("num_kv_heads", "a whole number, 1 or more", str(num_kv_heads)))
        elif num_heads is not None and num_heads >= 1 and num_heads % num_kv_heads:
            faults.append(Fault("num_kv_heads", f"a number that divides num_heads {num_heads}", str(num_kv_heads)))
    if "weight_layout" not in broken and weight_layout not in WEIGHT_LAYOUTS:
        received = "nothing" if weight_layout is None else str(weight_layout)
        faults.append(Fault("weight_layout", WEIGHT_LAYOUT_EXPECTED, received))
    return faults


def _output_faults(outputs: Sequence[str], known: tuple[str, ...]) -> list[Fault]:
    if not outputs:
        return [Fault("outputs", "at least one name", "[]")]
    faults = []
    for index, name in enumerate(outputs[: 2 * len(known)]):
        if name not in known:
            faults.append(Fault(f"outputs.{index}", names_text(known), str(name)))
        elif name in outputs[:index]:
            faults.append(Fault(f"outputs.{index}", "each name once", name))
    return faults
