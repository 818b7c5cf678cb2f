"""A problem without numbers, taken apart from JSON: each tensor as its dtype and shape alone. Without torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core.errors import MAX_FAULTS, Fault, InvalidProblem, names_text
from service.wire.arrays import STORAGE, Buffer, FlatTensor, Limits, Room, aligned_room, shape_faults
from service.wire.json_arrays import NUMBER_TENSORS, Names, option_faults
from service.wire.text import NestedList, Shown, read_object, short, short_name

GRADS = frozenset({"grad_context", "grad_logsumexp"})
"""Either of them makes it a question about the gradients."""
_FORM = 'a tensor without data, an object with "dtype" and "shape"'


@dataclass(slots=True)
class ReadPlan:
    """A body taken apart: see ``requests.Parts``, which it becomes. ``tensors`` has none: no number came."""

    is_of_gradients: bool = False
    specs: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    tensors: dict[str, FlatTensor] = field(default_factory=dict)


def read(body: Buffer, calls: tuple[Names, Names], limits: Limits, room: Room = aligned_room) -> ReadPlan:
    """``calls`` are the names of an attention and of its gradients: a plan may be of either.

    Raises: Malformed when it is not JSON; InvalidProblem when it cannot be taken apart.
    """
    attention, gradients = calls
    fields = frozenset((*gradients.tensors, *attention.options))
    try:
        members, repeated = read_object(body, NUMBER_TENSORS, fields, max_lists=limits.max_json_lists)
        given = {name: value for name, value in members.items() if value is not None}
        is_of_gradients = not GRADS.isdisjoint(given)
        found = _read(given, gradients if is_of_gradients else attention, limits)
    except RecursionError:
        raise InvalidProblem([Fault("", "lists and objects a few levels deep", "hundreds of levels")]) from None
    found.is_of_gradients = is_of_gradients
    found.faults[:0] = repeated
    found.broken |= {fault.field.partition(".")[0] for fault in repeated}
    return found


def _read(members: Mapping[str, Any], names: Names, limits: Limits) -> ReadPlan:
    found = ReadPlan()
    options = frozenset(names.options)
    for name, value in members.items():
        if name in names.tensors:
            spec = _spec(name, value, limits, found.faults)
            if spec is None:
                found.broken.add(name)
            else:
                found.specs[name] = spec
        elif name in options:
            plain = value.plain() if isinstance(value, NestedList) else value
            faults = option_faults(name, plain)
            if faults:
                found.faults += faults
                found.broken.add(name)
            else:
                found.options[name] = plain
        elif len(found.unknown) < MAX_FAULTS:
            found.unknown[name] = Shown(short(value))
    return found


def _spec(name: str, value: Any, limits: Limits, faults: list[Fault]) -> tuple[str, tuple[int, ...]] | None:
    if name == "query_offset" and isinstance(value, int) and not isinstance(value, bool):
        return "int64", (1,)
    if not isinstance(value, dict):
        faults.append(Fault(name, _FORM, short(value)))
        return None
    before = len(faults)
    strangers = (member for member in value if member not in ("dtype", "shape"))
    for member in itertools.islice(strangers, MAX_FAULTS):
        expected = "dtype and shape alone: a plan is made without data"
        faults.append(Fault(f"{name}.{short_name(member)}", expected, short(value[member])))
    dtype, shape = value.get("dtype"), value.get("shape")
    if not isinstance(dtype, str) or dtype not in STORAGE:
        faults.append(Fault(f"{name}.dtype", names_text(list(STORAGE)), "nothing" if dtype is None else short(dtype)))
    if isinstance(shape, NestedList):
        shape = shape.plain()
    if not isinstance(shape, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in shape):
        received = "nothing" if shape is None else short(shape)
        faults.append(Fault(f"{name}.shape", "a list of whole numbers", received))
    else:
        faults += shape_faults(f"{name}.shape", shape, limits)
    if len(faults) > before:
        return None
    return str(dtype), tuple(shape or ())
