"""Options as callers write them: Pydantic models for validation and for the OpenAPI schema, and faults in our words."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from attn_core.errors import MAX_FAULTS, Fault, names_text
from attn_core.problem import AttentionOptions, LayerOptions, WeightLayout
from service.wire.text import short, short_name

MAX_MEMBERS = 8
"""More members than any option that is an object has."""

OutputName = Literal["context", "weights", "scores", "logits", "logsumexp", "entropy", "top_weights", "weight_totals"]
GradientName = Literal["grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks", "grad_weights", "grad_logits"]
LayerOutputName = Literal["output", "query", "key", "value", OutputName]
LayerGradientName = Literal[
    "grad_input",
    "grad_memory",
    "grad_w_query",
    "grad_w_key",
    "grad_w_value",
    "grad_w_output",
    "grad_b_query",
    "grad_b_key",
    "grad_b_value",
    "grad_b_output",
    "grad_bias",
    "grad_sinks",
]
FloatName = Literal["float64", "float32", "float16", "bfloat16"]

EXPECTED: dict[str, str] = {
    "causal": "false, true, upper_left or lower_right",
    "scale": "a finite number",
    "softcap": "a finite number above 0",
    "window": 'an object with "left", "right" or both',
    "window.left": "a whole number of keys, 0 or more",
    "window.right": "a whole number of keys, 0 or more",
    "layout": "bhtd, bthd or btd",
    "num_heads": "a whole number, 1 or more",
    "num_kv_heads": "a whole number, 1 or more",
    "weight_layout": "in_out (y = x W) or out_in (y = x W^T, as nn.Linear stores)",
    "outputs": "a list of names, each once, not empty",
    "select": 'an object with "heads", "rows" or "top_k"',
    "select.heads": "a list of whole numbers",
    "select.heads.*": "a whole number",
    "select.rows": "a list of whole numbers",
    "select.rows.*": "a whole number",
    "select.top_k": "a whole number, 1 or more",
    "empty_rows": "zeros or error",
    "path": "fused, manual or blocked",
    "verify": "true or false",
    "encoding": "list or base64",
    "dtype": "float64, float32, float16 or bfloat16",
    "dropout_p": "0 alone: this is inference, dropout is never applied",
    "timeout_ms": "a number of milliseconds above 0",
}
"""What must hold for each option, as faults and the schema say it."""


def _word(value: Any) -> Any:
    # Literal would take 1 and 1.0 for true.
    if isinstance(value, bool | str):
        return value
    raise PydanticCustomError("word", "true, false or a name")


def _truth(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    raise PydanticCustomError("truth", "true or false")


def _number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise PydanticCustomError("number", "a number") from None
    raise PydanticCustomError("number", "a number")


Number = Annotated[float, BeforeValidator(_number)]


def _option(name: str, default: Any = None, **more: Any) -> Any:
    return Field(default, description=EXPECTED[name], **more)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Window(_Strict):
    """Keys kept on each side besides p(i) itself; a side that is absent is open."""

    left: int | None = _option("window.left", ge=0)
    right: int | None = _option("window.right", ge=0)


class Select(_Strict):
    """Replaces the axes of heads and rows in the outputs that have them, in the order listed."""

    heads: list[int] | None = _option("select.heads")
    rows: list[int] | None = _option("select.rows")
    top_k: int | None = _option("select.top_k", ge=1)


class Options(_Strict):
    """What every body may say of itself. ``output_names`` are what may be asked for."""

    output_names: ClassVar[tuple[str, ...]] = ()

    dtype: FloatName | None = _option("dtype")


class CallOptions(Options):
    """What every call may say about itself and the form of its answer."""

    encoding: Literal["list", "base64"] | None = _option("encoding")
    timeout_ms: Number | None = _option("timeout_ms", gt=0)


class _RuleOptions(CallOptions):
    """Who attends whom, and how it is computed: the same for an attention, a layer and the gradients of both."""

    causal: Annotated[Literal[False, True, "upper_left", "lower_right"], BeforeValidator(_word)] = _option(
        "causal", False
    )
    scale: Number | None = _option("scale")
    softcap: Number | None = _option("softcap", gt=0)
    window: Window | None = _option("window")
    empty_rows: Literal["zeros", "error"] = _option("empty_rows", "zeros")
    path: Literal["fused", "manual", "blocked"] | None = _option("path")
    verify: Annotated[bool, BeforeValidator(_truth)] = _option("verify", False)
    dropout_p: Annotated[float, BeforeValidator(_number)] = _option("dropout_p", 0.0, ge=0, le=0)

    def rules(self, **more: Any) -> AttentionOptions:
        """The core's options, with those that not every call has."""
        window = self.window or Window()
        return AttentionOptions(
            causal=self.causal,
            scale=self.scale,
            softcap=self.softcap,
            window_left=window.left,
            window_right=window.right,
            empty_rows=self.empty_rows,
            path=self.path,
            verify=self.verify,
            **more,
        )


class _LayoutOptions(_RuleOptions):
    """How query, key and value lie."""

    layout: Literal["bhtd", "bthd", "btd"] = _option("layout", "bhtd")
    num_heads: int | None = _option("num_heads", ge=1)
    num_kv_heads: int | None = _option("num_kv_heads", ge=1)

    def rules(self, **more: Any) -> AttentionOptions:
        own = {"layout": self.layout, "num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        return super().rules(**own, **more)


class _SelectOptions(_RuleOptions):
    """What of the outputs is answered."""

    select: Select | None = _option("select")

    def rules(self, **more: Any) -> AttentionOptions:
        select = self.select or Select()
        own = {
            "select_heads": None if select.heads is None else tuple(select.heads),
            "select_rows": None if select.rows is None else tuple(select.rows),
            "top_k": select.top_k,
        }
        return super().rules(**own, **more)


class AttentionCallOptions(_SelectOptions, _LayoutOptions):
    """Every option of POST /v1/attention."""

    output_names: ClassVar[tuple[str, ...]] = get_args(OutputName)

    outputs: list[OutputName] = _option("outputs", ["context"])

    def to_core(self) -> AttentionOptions:
        return self.rules(outputs=tuple(self.outputs))


class GradientsCallOptions(_LayoutOptions):
    """Every option of POST /v1/attention/gradients; outputs absent: every gradient that is defined."""

    output_names: ClassVar[tuple[str, ...]] = get_args(GradientName)

    outputs: list[GradientName] | None = _option("outputs")

    def to_core(self) -> AttentionOptions:
        return self.rules()


class _ParameterFields(_Strict):
    """How the weights of a layer are to be read. That two of them are never absent is checked with the weights."""

    num_heads: int | None = _option("num_heads", ge=1)
    num_kv_heads: int | None = _option("num_kv_heads", ge=1)
    weight_layout: Literal["in_out", "out_in"] | None = _option("weight_layout")


class ParametersOptions(_ParameterFields, Options):
    """Every option of PUT /v1/layers/{name}."""


class NamedLayerCallOptions(_SelectOptions):
    """Every option of POST /v1/layers/{name}/forward."""

    output_names: ClassVar[tuple[str, ...]] = get_args(LayerOutputName)

    outputs: list[LayerOutputName] = _option("outputs", ["output"])


class LayerCallOptions(NamedLayerCallOptions, _ParameterFields):
    """Every option of POST /v1/layer."""

    def to_core(self) -> LayerOptions:
        return _layer_options(self, self, tuple(self.outputs))


class NamedLayerGradientsCallOptions(_RuleOptions):
    """Every option of POST /v1/layers/{name}/gradients; outputs absent: the gradient of everything given."""

    output_names: ClassVar[tuple[str, ...]] = get_args(LayerGradientName)

    outputs: list[LayerGradientName] | None = _option("outputs")


class LayerGradientsCallOptions(NamedLayerGradientsCallOptions, _ParameterFields):
    """Every option of POST /v1/layer/gradients; outputs absent: the gradient of everything given."""

    def to_core(self) -> LayerOptions:
        return _layer_options(self, self, ("output",))


def _layer_options(rules: _RuleOptions, fields: _ParameterFields, outputs: tuple[str, ...]) -> LayerOptions:
    attention = rules.rules(layout="btd", num_heads=fields.num_heads, num_kv_heads=fields.num_kv_heads)
    # Absent it is None, which the check of the weights refuses.
    weight_layout = cast("WeightLayout", fields.weight_layout)
    return LayerOptions(attention=attention, weight_layout=weight_layout, outputs=outputs)


Model = TypeVar("Model", bound=Options)


def read_options(model: type[Model], raw: Mapping[str, Any]) -> tuple[Model, list[Fault], set[str]]:
    """The options that can be read, the faults of the others, and the names of those others.

    null is the same as leaving a field out, inside window and select too.
    """
    given = {name: _without_null(value) for name, value in raw.items() if value is not None}
    faults: list[Fault] = []
    broken: set[str] = set()
    for name in ("window", "select"):
        value = given.get(name)
        if isinstance(value, dict) and not 0 < len(value) <= MAX_MEMBERS:
            faults.append(Fault(name, EXPECTED[name], short(raw[name])))
            broken.add(name)
    select = given.get("select")
    lists = {"outputs": given.get("outputs")}
    if isinstance(select, dict):
        lists |= {f"select.{name}": select.get(name) for name in ("heads", "rows")}
    for name, value in lists.items():
        found = _list_faults(name, value, model.output_names)
        if found:
            faults += found
            broken.add(name.split(".")[0])
    readable = {name: value for name, value in given.items() if name not in broken}
    try:
        return model.model_validate(readable), faults, broken
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)
        faults += [_fault(each["loc"], each["type"], each["input"]) for each in wrong]
        broken |= {str(each["loc"][0]) for each in wrong}
    return model.model_validate({k: v for k, v in readable.items() if k not in broken}), faults, broken


def _list_faults(name: str, value: Any, names: tuple[str, ...]) -> list[Fault]:
    """Faults of a list option found here, where they are counted: Pydantic would keep each of a million of them."""
    if not isinstance(value, list):
        return []
    if name == "outputs":
        if len(value) > len(names):
            return [Fault(name, EXPECTED[name], f"{len(value)} of them")]
        return [
            Fault(f"{name}.{place}", names_text(names), short(item))
            for place, item in enumerate(value)
            if not isinstance(item, str) or item not in names
        ]
    wrong = ((place, item) for place, item in enumerate(value) if type(item) is not int)
    return [
        Fault(f"{name}.{place}", EXPECTED[f"{name}.*"], short(item))
        for place, item in itertools.islice(wrong, MAX_FAULTS)
    ]


_MASKS = ("allow_mask", "allow_mask (true = may attend) or block_mask (true = must not)")
_PADDING = ("block_mask", "key_lengths, or block_mask of shape [B,1,1,S] (true = padding)")
_WEIGHTS = ("outputs", 'outputs with "weights" in it')
FOREIGN_NAMES = {
    "mask": _MASKS,
    "attn_mask": _MASKS,
    "attention_mask": _MASKS,
    "padding_mask": _PADDING,
    "key_padding_mask": _PADDING,
    "need_weights": _WEIGHTS,
    "return_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "is_causal": ("causal", "causal"),
    "enable_gqa": ("key", "nothing, since key and value may have fewer heads"),
    "softmax_scale": ("scale", "scale"),
    "scaling": ("scale", "scale"),
    "window_size": ("window", 'window, {"left": n, "right": n}'),
    "sliding_window": ("window", 'window, {"left": n, "right": n}'),
    "position_bias": ("bias", "bias"),
    "s_aux": ("sinks", "sinks"),
}
"""What other libraries call it: the field that must be among the known ones, and what is said. Nothing is guessed: a
name that two of them read in two ways is told both."""


def unknown_fault(name: str, value: Any, known: Iterable[str]) -> Fault:
    """The fault of a field that no call has, with the one that may have been meant."""
    known = frozenset(known)
    meant, others = FOREIGN_NAMES.get(name, ("", ""))
    close = [others] if meant in known else difflib.get_close_matches(name[:100], known, n=1, cutoff=0.63)
    expected = "a known field" + (f"; did you mean {close[0]}?" if close else "")
    return Fault(short_name(name), expected, short(value))


def _fault(location: tuple[int | str, ...], kind: str, value: Any) -> Fault:
    field = ".".join(short_name(str(part)) for part in location)
    pattern = ".".join("*" if isinstance(part, int) else part for part in location)
    if kind == "extra_forbidden":
        return Fault(field, EXPECTED[str(location[0])], short(value))
    return Fault(field, EXPECTED[pattern], short(value))


def _without_null(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
