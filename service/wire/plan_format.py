"""A problem without numbers, read from JSON: each tensor as its dtype and shape alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from attn_core.errors import MAX_FAULTS, Fault, InvalidProblem, names_text
from attn_core.outlook import without_numbers
from attn_core.problem import TensorSpec
from service.wire.arrays import STORAGE, Buffer, shape_faults
from service.wire.json_arrays import NUMBER_TENSORS
from service.wire.requests import ATTENTION, GRADIENTS, Call, DecodedRequest, Parts, ReadLimits, assemble
from service.wire.tensors import DTYPES
from service.wire.text import NestedList, Shown, read_object, short, short_name

GRADS = frozenset({"grad_context", "grad_logsumexp"})
"""Either of them makes it a question about the gradients."""
_FORM = 'a tensor without data, an object with "dtype" and "shape"'


def decode(body: Buffer, limits: ReadLimits, *, also: Sequence[Fault] = ()) -> DecodedRequest:
    """A body as a checked problem whose tensors are on torch's device ``meta``.

    Raises: Malformed when it is not JSON; InvalidProblem with every fault.
    """
    fields = frozenset((*GRADIENTS.tensors, *ATTENTION.option_names))
    try:
        members, repeated = read_object(body, NUMBER_TENSORS, fields, max_lists=limits.tensors.max_json_lists)
        given = {name: value for name, value in members.items() if value is not None}
        call = ATTENTION if GRADS.isdisjoint(given) else GRADIENTS
        parts = _read(given, call, limits)
    except RecursionError:
        raise InvalidProblem([Fault("", "lists and objects a few levels deep", "hundreds of levels")]) from None
    parts.faults = [*also, *repeated, *parts.faults]
    parts.broken |= {fault.field.partition(".")[0] for fault in repeated}
    return assemble(call, parts, limits, answer_is_json=True)


def _read(members: Mapping[str, Any], call: Call, limits: ReadLimits) -> Parts:
    parts = Parts()
    options = frozenset(call.option_names)
    for name, value in members.items():
        if name in call.tensors:
            spec = _spec(name, value, limits, parts.faults)
            if spec is None:
                parts.broken.add(name)
            else:
                parts.tensors[name] = without_numbers(spec)
        elif name in options:
            parts.options[name] = value.plain() if isinstance(value, NestedList) else value
        elif len(parts.unknown) < MAX_FAULTS:
            parts.unknown[name] = Shown(short(value))
    return parts


def _spec(name: str, value: Any, limits: ReadLimits, faults: list[Fault]) -> TensorSpec | None:
    if name == "query_offset" and isinstance(value, int) and not isinstance(value, bool):
        return TensorSpec(DTYPES["int64"], (1,))
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
        faults += shape_faults(f"{name}.shape", shape, limits.tensors)
    if len(faults) > before:
        return None
    return TensorSpec(DTYPES[str(dtype)], tuple(shape or ()))
