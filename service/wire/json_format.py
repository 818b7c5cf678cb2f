"""JSON both ways: nested lists or base64 objects in, shortest digits or base64 out.

Text and flat arrays are the matter of ``json_arrays``; here they become checked problems, and results become them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from attn_core.errors import Fault
from attn_core.problem import LayerParameters, TensorSpec
from service.wire import json_arrays
from service.wire.arrays import Buffer, FlatTensor
from service.wire.json_arrays import Encoding, ReadBody
from service.wire.requests import (
    Call,
    DecodedRequest,
    NamedCall,
    Parts,
    ReadLimits,
    assemble,
    assemble_parameters,
)
from service.wire.tensors import DTYPES, flat_of, tensor_of

MEDIA_TYPE = "application/json"


def decode(
    body: Buffer,
    call: Call | NamedCall,
    limits: ReadLimits,
    *,
    answer_is_json: bool = True,
    also: Sequence[Fault] = (),
    stored: LayerParameters | None = None,
) -> DecodedRequest:
    """A JSON body as a checked problem. Faults found before it was read stand ``also`` in a refusal.

    Raises: Malformed when it is not JSON; InvalidProblem with every fault.
    """
    read = json_arrays.read(body, call.names, limits.tensors)
    return build(read, call, limits, answer_is_json=answer_is_json, also=also, stored=stored)


def build(
    read: ReadBody,
    call: Call | NamedCall,
    limits: ReadLimits,
    *,
    answer_is_json: bool = True,
    also: Sequence[Fault] = (),
    stored: LayerParameters | None = None,
) -> DecodedRequest:
    """A body that was taken apart, here or elsewhere, as a checked problem. Raises: InvalidProblem with every fault."""
    return assemble(call, parts_of(read, also), limits, answer_is_json=answer_is_json, stored=stored)


def build_parameters(read: ReadBody, also: Sequence[Fault] = ()) -> LayerParameters:
    """A body that was taken apart by the names of ``LAYER_PARAMETERS``, as a layer. Raises: InvalidProblem."""
    return assemble_parameters(parts_of(read, also))


def parts_of(read: ReadBody, also: Sequence[Fault] = ()) -> Parts:
    """With tensors of torch, which share the memory of what was read."""
    return Parts(
        tensors={name: tensor_of(flat) for name, flat in read.tensors.items()},
        specs={name: TensorSpec(DTYPES[dtype], shape) for name, (dtype, shape) in read.declared.items()},
        options=read.options,
        unknown=read.unknown,
        faults=[*also, *read.faults],
        broken=read.broken,
        lists=read.lists,
        first_came_as_list=read.first_came_as_list,
    )


def flat_outputs(outputs: Mapping[str, Tensor]) -> dict[str, FlatTensor]:
    """The outputs of a result, ready to be written."""
    return {name: flat_of(tensor) for name, tensor in outputs.items()}


def encode(outputs: Mapping[str, Tensor], info: Mapping[str, Any], encoding: Encoding) -> list[bytes | memoryview]:
    """An answer as pieces to be sent one after the other: every output in the asked form, and ``info``."""
    return json_arrays.write(flat_outputs(outputs), info, encoding)


def text_bytes(tensor_bytes: int, itemsize: int, encoding: Encoding) -> int:
    """About how long the text of so many bytes of tensors will be, rather too long than too short."""
    if encoding == "base64":
        return 256 + tensor_bytes * 4 // 3
    return 256 + tensor_bytes // itemsize * (26 if itemsize == 8 else 16)
