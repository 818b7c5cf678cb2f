"""Every call without its wire: what is sent, and what is read from the answer.

Arrays go as safetensors, nested lists as JSON: it is the service that rounds them and names the place of a fault, and
lists come back. What a list says without any rounding (a mask, lengths) goes beside arrays as an array. Options at
their defaults are not sent. Masks and bias leave with rank 4, their own shape behind leading ones: only where a rank-2
or rank-3 one could be read in two ways does it leave as it is, for the service to refuse naming both.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

import numpy as np
import orjson

from service.client.answers import Answer, Info, LayerDescription, PathPlan, Plan, ServiceInfo
from service.client.arrays import (
    ITEM_BYTES,
    LISTS,
    Flat,
    Kind,
    Shape,
    dtype_of,
    exact_flat,
    flat_of,
    is_lists,
    kind_of,
    shape_of,
    with_numbers,
    with_words,
)
from service.client.errors import (
    BY_STATUS,
    AttentionServiceError,
    Fault,
    Overloaded,
    TooLarge,
    Unavailable,
    UnreadableAnswer,
)
from service.client.retries import read_retry_after

JSON, SAFETENSORS, PROBLEM = "application/json", "application/vnd.safetensors", "application/problem+json"
LIFTED = frozenset({"allow_mask", "block_mask", "bias"})
"""What lines up from the right with [B,H,T,S]."""
_MASKS = frozenset({"allow_mask", "block_mask"})
_WHOLE = frozenset({"key_lengths", "query_lengths", "query_offset"})
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "bool": "BOOL",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items() if dtype in ITEM_BYTES}
DEFAULTS: Mapping[str, Any] = {"causal": False, "verify": False, "empty_rows": "zeros", "layout": "bhtd"}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_SHORT_TEXT = 200

T = TypeVar("T")
Pieces = list[bytes | memoryview]


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One HTTP answer; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: memoryview

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class Body(Protocol):
    @property
    def media_type(self) -> str: ...

    def pieces(self, timeout_ms: float | None) -> Pieces:
        """What goes over the wire, with this limit among the options."""
        ...


def _raise(error: AttentionServiceError) -> Any:
    raise error


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call(Generic[T]):
    """One request, and ``read``, which makes of its answer what the caller gets; ``fail`` is asked where none came.

    ``timeout_s`` is the caller's own limit for this call, None where he named none. ``takes_timeout``: the service is
    told of it as well. ``may_repeat``: doing it twice is like doing it once. ``lifted`` counts the axes that nested
    lists were given in front, so that faults name the caller's own places.
    """

    method: str
    path: str
    read: Callable[[Reply], T]
    fail: Callable[[AttentionServiceError], T] = _raise
    body: Body | None = None
    accept: str = JSON
    timeout_s: float | None = None
    request_id: str | None = None
    takes_timeout: bool = False
    may_retry: bool = True
    may_repeat: bool = True
    lifted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TensorsBody:
    """safetensors: a header, then each array's memory as it lies."""

    flats: Mapping[str, Flat]
    options: Mapping[str, Any]
    media_type: str = SAFETENSORS

    def pieces(self, timeout_ms: float | None) -> Pieces:
        options = {**self.options} if timeout_ms is None else {**self.options, "timeout_ms": timeout_ms}
        header: dict[str, Any] = {"__metadata__": {"options": _text(options).decode()}} if options else {}
        data: Pieces = []
        begin = 0
        # Masks behind the rest: an odd number of bytes would leave everything after it on odd addresses.
        for name, flat in sorted(self.flats.items(), key=lambda item: item[1].dtype == "bool"):
            end = begin + flat.data.nbytes
            header[name] = {"dtype": _CODES[flat.dtype], "shape": flat.shape, "data_offsets": [begin, end]}
            begin = end
            if flat.data.nbytes:
                data.append(flat.data)
        text = orjson.dumps(header)
        text += b" " * (-len(text) % 8)
        return [len(text).to_bytes(8, "little") + text, *data]


@dataclass(frozen=True, slots=True, eq=False)
class TextBody:
    """A JSON object that has members already."""

    text: bytes
    media_type: str = JSON

    def pieces(self, timeout_ms: float | None) -> Pieces:
        if timeout_ms is None:
            return [self.text]
        return [memoryview(self.text)[:-1], b',"timeout_ms":%b}' % orjson.dumps(timeout_ms)]


def computation(
    path: str,
    tensors: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    layout: str | None = None,
    timeout_s: float | None = None,
    request_id: str | None = None,
) -> Call[Answer]:
    """A call that computes. The first of ``tensors`` says what kind of arrays come back; None among them is not there.

    ``layout`` is that of a query; None where the first is the tokens of a layer, or whole weights.
    """
    given = {name: value for name, value in tensors.items() if value is not None}
    options = _said(options)
    first = next(iter(tensors))
    kind = kind_of(first, given.get(first))
    if isinstance(given.get("query_offset"), int | np.integer):
        options["query_offset"] = int(given.pop("query_offset"))
    batch = _batch(shape_of(first, given[first]), layout)
    lifts = {name: _lift(shape_of(name, given[name]), batch) for name in LIFTED & given.keys()}
    own_shapes = {f"grad_{name}": shape_of(name, given[name]) for name, lift in lifts.items() if lift}
    body = _body(given, options, lifts, first)
    is_text = body.media_type == JSON
    return Call(
        method="POST",
        path=path,
        read=lambda reply: _read_answer(reply, kind, own_shapes),
        body=body,
        accept=JSON if kind is LISTS else SAFETENSORS,
        timeout_s=timeout_s,
        request_id=request_id,
        takes_timeout=True,
        lifted={name: lift for name, lift in lifts.items() if is_text and is_lists(given[name])},
    )


def plan(
    tensors: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    layout: str,
    dtype: str | None,
    timeout_s: float | None = None,
    request_id: str | None = None,
) -> Call[Plan]:
    """A question of shapes alone: of each tensor nothing but that is sent."""
    given = {name: value for name, value in tensors.items() if value is not None}
    members = {name: _spec(name, value, dtype or "float32") for name, value in given.items()}
    batch = _batch(_shape_said(members.get("query")), layout)
    for name in LIFTED & members.keys():
        shape = _shape_said(members[name])
        if lift := _lift(shape, batch):
            members[name] = {**members[name], "shape": (1,) * lift + shape}
    return Call(
        method="POST",
        path="/v1/attention/plan",
        read=_read_plan,
        body=TextBody(_text(members | _said(options))),
        timeout_s=timeout_s,
        request_id=request_id,
    )


def layer_path(name: str) -> str:
    """Where a layer is kept. Raises: ValueError for a name that no layer can have, and that might lead elsewhere."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a layer's name is 1 to 64 of a-z A-Z 0-9 . _ -, beginning with a letter, not {name!r}")
    return f"/v1/layers/{quote(name)}"


def put_layer(
    name: str,
    tensors: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    replace: bool,
    timeout_s: float | None = None,
    request_id: str | None = None,
) -> Call[LayerDescription]:
    """Weights to be kept. Replacing is not repeated unasked: another's layer may have come between."""
    path = layer_path(name) + "?replace=true" * replace
    given = {name: value for name, value in tensors.items() if value is not None}
    return Call(
        method="PUT",
        path=path,
        read=lambda reply: _described(_members(reply), is_new=reply.status == 201),
        body=_body(given, _said(options), {}, None),
        timeout_s=timeout_s,
        request_id=request_id,
        may_repeat=not replace,
    )


def get_layer(name: str, **asked: Any) -> Call[LayerDescription]:
    return Call(method="GET", path=layer_path(name), read=lambda reply: _described(_members(reply)), **asked)


def list_layers(**asked: Any) -> Call[list[LayerDescription]]:
    def read(reply: Reply) -> list[LayerDescription]:
        return [_described(layer) for layer in _members(reply)["layers"]]

    return Call(method="GET", path="/v1/layers", read=read, **asked)


def delete_layer(name: str, **asked: Any) -> Call[None]:
    """Not repeated unasked: the second answer would be that there is no such layer, or another's would go."""

    def read(reply: Reply) -> None:
        return None

    return Call(method="DELETE", path=layer_path(name), read=read, may_repeat=False, **asked)


def info(**asked: Any) -> Call[ServiceInfo]:
    def read(reply: Reply) -> ServiceInfo:
        return _made(ServiceInfo, _frozen_lists(_members(reply)))

    return Call(method="GET", path="/v1", read=read, **asked)


def is_ready(**asked: Any) -> Call[bool]:
    """A probe: it is not tried again, and no answer is a no."""

    def read(reply: Reply) -> bool:
        return True

    def fail(error: AttentionServiceError) -> bool:
        if error.status in (None, 503) and not isinstance(error, UnreadableAnswer):
            return False
        raise error

    return Call(method="GET", path="/readyz", read=read, fail=fail, accept="*/*", may_retry=False, **asked)


def answer_of(call: Call[T], reply: Reply) -> T:
    """What the caller gets of an answer that is none of refusal. Raises: UnreadableAnswer."""
    try:
        return call.read(reply)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(reply, f"not what it should be ({error!r})") from error


def refusal_of(call: Call[Any], reply: Reply) -> AttentionServiceError | None:
    """What the service refused, None where it answered. Faults name places in what the caller gave."""
    if 200 <= reply.status < 300:
        return None
    problem: dict[str, Any] = {}
    if reply.media_type == PROBLEM:
        problem = _members_of(reply.content) or {}
    name = str(problem.get("type", "")).rpartition("/")[2]
    said = problem.get("errors")
    faults = said if isinstance(said, list) else []
    detail = problem.get("detail")
    if not isinstance(detail, str):
        detail = bytes(reply.content[:_SHORT_TEXT]).decode(errors="replace").strip() or "no reason was given"
    error = BY_STATUS.get(reply.status, AttentionServiceError)(
        detail,
        status=reply.status,
        name=name,
        faults=[_fault(each, call.lifted) for each in faults if isinstance(each, dict)],
        request_id=reply.headers.get("x-request-id", ""),
    )
    if isinstance(error, Overloaded | Unavailable):
        error.retry_after_s = read_retry_after(reply.headers.get("retry-after"))
    elif isinstance(error, TooLarge):
        error.needed_bytes, error.allowed_bytes = problem.get("needed_bytes"), problem.get("allowed_bytes")
    return error


def _fault(said: Mapping[str, Any], lifted: Mapping[str, int]) -> Fault:
    place, expected, received = (str(said.get(name) or "") for name in ("field", "expected", "received"))
    name, _, inside = place.partition(".")
    front = "0." * lifted.get(name, 0)
    if front and f"{inside}.".startswith(front):
        place = f"{name}.{inside[len(front) :]}".rstrip(".")
    return Fault(place, expected, received)


def _said(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say anything, in types that JSON has."""
    found = {}
    for name, given in options.items():
        value = with_words(_listed(given))
        default = DEFAULTS.get(name)
        # 0 equals False in Python, and is not the same option.
        if value is None or (type(value) is type(default) and value == default):
            continue
        if name == "window" and isinstance(value, list):
            if len(value) != 2:
                raise ValueError(f'window: (left, right) or {{"left": ..., "right": ...}}, not {len(value)} values')
            value = {"left": value[0], "right": value[1]}
        elif name == "outputs" and isinstance(value, str):
            value = [value]
        found[name] = value
    return found


def _listed(option: Any) -> Any:
    """Rows and heads that are selected may come as an array, a tensor or a range."""
    if isinstance(option, Mapping):
        return {name: _listed(value) for name, value in option.items()}
    if isinstance(option, range):
        return list(option)
    return option.tolist() if hasattr(option, "tolist") else option


def _batch(shape: Shape, layout: str | None) -> int:
    """B as far as the first tensor has it; 1 in the ranks that leave it out."""
    whole_rank = {"bhtd": 4, "bthd": 4, "btd": 3, None: 3}.get(layout, 4)
    return shape[0] if len(shape) == whole_rank else 1


def _lift(shape: Shape, batch: int) -> int:
    """How many ones go in front of a mask or bias."""
    rank = len(shape)
    if not 1 <= rank < 4 or (rank > 1 and batch > 1 and shape[0] == batch):
        return 0
    return 4 - rank


def _body(given: Mapping[str, Any], options: dict[str, Any], lifts: Mapping[str, int], first: str | None) -> Body:
    """JSON where ``first`` is lists, or a list is among the rest that the service is to round or to look at."""
    flats = None if first is not None and is_lists(given[first]) else _as_flats(given, lifts)
    if flats is not None:
        return TensorsBody(flats, options)
    return TextBody(_text({name: _as_member(name, value, lifts) for name, value in given.items()} | options))


def _as_flats(given: Mapping[str, Any], lifts: Mapping[str, int]) -> dict[str, Flat] | None:
    """All as arrays; None where that cannot be without rounding."""
    flats: dict[str, Flat] = {}
    for name, value in given.items():
        flat = flat_of(name, value) if kind_of(name, value) is not LISTS else None
        if flat is None and name in _MASKS | _WHOLE:
            flat = exact_flat(value, is_mask=name in _MASKS)
        if flat is None:
            return None
        lift = lifts.get(name, 0)
        flats[name] = Flat(flat.dtype, (1,) * lift + flat.shape, flat.data) if lift else flat
    return flats


def _as_member(name: str, value: Any, lifts: Mapping[str, int]) -> Any:
    lift = lifts.get(name, 0)
    if is_lists(value):
        for _ in range(lift):
            value = [value]
        return value
    flat = flat_of(name, value)
    shape = (1,) * lift + flat.shape
    return {"dtype": flat.dtype, "shape": shape, "data": base64.b64encode(flat.data).decode()}


def _spec(name: str, value: Any, dtype: str) -> Any:
    """``dtype`` and ``shape``: of an array, of nested lists, of a tuple that is a shape, or as they stand."""
    if isinstance(value, dict):
        return value
    if name == "query_offset" and isinstance(value, int | np.integer):
        return int(value)
    own = "bool" if name in _MASKS else "int64" if name in _WHOLE else dtype
    if isinstance(value, tuple) and all(isinstance(axis, int) for axis in value):
        return {"dtype": own, "shape": list(value)}
    shape = list(shape_of(name, value))
    return {"dtype": own if is_lists(value) else dtype_of(name, value), "shape": shape}


def _shape_said(spec: Any) -> Shape:
    """No axes where a caller's own object says none: the service tells him."""
    shape = spec.get("shape") if isinstance(spec, dict) else None
    return tuple(shape) if isinstance(shape, list | tuple) else ()


def _text(members: Mapping[str, Any]) -> bytes:
    """JSON, in which NaN and infinities are the contract's words. Raises: TypeError for what is no number or list."""
    try:
        text = orjson.dumps(members, default=_plain)
        if b"null" not in text:
            return text
    except TypeError:
        # Whole numbers beyond 64 bits among others: the service says what it thinks of them.
        pass
    return json.dumps(with_words(members), separators=(",", ":"), allow_nan=False, default=_plain).encode()


def _plain(value: Any) -> Any:
    number = getattr(value, "item", None)
    if number is None or np.ndim(value):
        raise TypeError(f"lists hold numbers, truth values and lists, not {type(value).__name__}")
    return number()


def _read_answer(reply: Reply, kind: Kind, own_shapes: Mapping[str, Shape]) -> Answer:
    read = _read_lists if kind is LISTS else _read_tensors
    outputs, said = read(reply, kind)
    for name, shape in own_shapes.items():
        if name in outputs:
            outputs[name] = _in_shape(outputs[name], shape)
    # An infinite error is a word, as JSON has it.
    errors: dict[str, Any] = {name: float(said[name]) for name in ("max_abs_error", "max_rel_error") if name in said}
    return Answer(
        outputs=outputs,
        info=_made(Info, {**said, **errors}),
        request_id=reply.headers.get("x-request-id", ""),
        server_timing=read_timing(reply.headers.get("server-timing", "")),
    )


def _in_shape(value: Any, shape: Shape) -> Any:
    """A gradient with the rank of what it is the gradient of: without the ones that were put in front of that."""
    if not isinstance(value, list):
        return value.reshape(shape)
    for _ in range(4 - len(shape)):
        value = value[0]
    return value


def _read_lists(reply: Reply, kind: Kind) -> tuple[dict[str, Any], dict[str, Any]]:
    members = _members(reply)
    said = members.pop("info")
    text = bytes(reply.content)
    has_words = b'NaN"' in text or b'Infinity"' in text
    outputs = {}
    for name, value in members.items():
        if isinstance(value, dict):
            # Nested lists cannot say a shape with a 0 in it.
            shape = tuple(value["shape"])
            value = kind.made(value["dtype"], shape, memoryview(base64.b64decode(value["data"])))
        outputs[name] = with_numbers(value) if has_words else value
    return outputs, said


def _read_tensors(reply: Reply, kind: Kind) -> tuple[dict[str, Any], dict[str, Any]]:
    content = reply.content
    if reply.media_type != SAFETENSORS:
        raise _unreadable(reply, f"{reply.media_type or 'nothing'} instead of {SAFETENSORS}")
    length = int.from_bytes(content[:8], "little")
    header = _members_of(content[8 : 8 + length]) if 8 + length <= content.nbytes else None
    if header is None:
        raise _unreadable(reply, "safetensors without a header")
    data = content[8 + length :]
    metadata = header.pop("__metadata__", None)
    said = _members_of(metadata.get("info", "").encode()) if isinstance(metadata, dict) else None
    if said is None:
        raise _unreadable(reply, "safetensors without info")
    outputs = {}
    for name, entry in header.items():
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        part = data[begin:end]
        if part.nbytes != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{name}: {part.nbytes} bytes for {dtype} {shape}")
        outputs[name] = kind.made(dtype, shape, part)
    return outputs, said


def read_timing(header: str) -> dict[str, float]:
    """Milliseconds of each stage, from Server-Timing; what says none is left out."""
    found = {}
    for entry in header.split(","):
        name, _, duration = entry.strip().partition(";dur=")
        with suppress(ValueError):
            found[name] = float(duration)
    return found


def _read_plan(reply: Reply) -> Plan:
    members = _members(reply)
    paths = {name: _made(PathPlan, path) for name, path in members["paths"].items()}
    return _made(Plan, {**members, "paths": paths})


def _described(members: Mapping[str, Any], *, is_new: bool | None = None) -> LayerDescription:
    shapes = {name: tuple(shape) for name, shape in members["shapes"].items()}
    return _made(LayerDescription, {**members, "shapes": shapes, "is_new": is_new})


def _made(form: type[T], members: Mapping[str, Any]) -> T:
    """An object of ours from what the service said; members that a later service adds are left out."""
    known = {each.name for each in fields(form)}  # type: ignore[arg-type]
    return form(**{name: value for name, value in members.items() if name in known})


def _frozen_lists(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in members.items()}


def _members(reply: Reply) -> dict[str, Any]:
    """Raises: UnreadableAnswer where the answer is no JSON object."""
    if reply.media_type != JSON:
        raise _unreadable(reply, f"{reply.media_type or 'nothing'} instead of {JSON}")
    members = _members_of(reply.content)
    if members is None:
        raise _unreadable(reply, "no JSON object")
    return members


def _members_of(text: bytes | memoryview) -> dict[str, Any] | None:
    try:
        members = orjson.loads(text)
    except ValueError:
        return None
    return members if isinstance(members, dict) else None


def _unreadable(reply: Reply, what: str) -> UnreadableAnswer:
    request_id = reply.headers.get("x-request-id", "")
    return UnreadableAnswer(
        f"the answer is {what}; is attn there?", status=reply.status, name="unreadable-answer", request_id=request_id
    )
