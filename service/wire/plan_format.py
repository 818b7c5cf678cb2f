"""A problem without numbers, of what ``plan_text`` has taken apart."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core.errors import Fault
from attn_core.problem import TensorSpec
from service.wire import plan_text
from service.wire.arrays import Buffer
from service.wire.plan_text import ReadPlan
from service.wire.requests import ATTENTION, GRADIENTS, DecodedRequest, Parts, ReadLimits, assemble
from service.wire.tensors import DTYPES

CALLS = (ATTENTION.names, GRADIENTS.names)
"""What ``plan_text.read`` is to be told."""


def decode(body: Buffer, limits: ReadLimits, *, also: Sequence[Fault] = ()) -> DecodedRequest:
    """A body as a checked problem whose tensors are on torch's device ``meta``.

    Raises: Malformed when it is not JSON; InvalidProblem with every fault.
    """
    return build(plan_text.read(body, CALLS, limits.tensors), limits, also=also)


def build(read: ReadPlan, limits: ReadLimits, *, also: Sequence[Fault] = ()) -> DecodedRequest:
    """The same of a body that was taken apart elsewhere. Raises: InvalidProblem with every fault."""
    parts = Parts(
        tensors={name: TensorSpec(DTYPES[dtype], shape).hollow() for name, (dtype, shape) in read.specs.items()},
        options=read.options,
        unknown=read.unknown,
        faults=[*also, *read.faults],
        broken=read.broken,
    )
    return assemble(GRADIENTS if read.is_of_gradients else ATTENTION, parts, limits, answer_is_json=True)
