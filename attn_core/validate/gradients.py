"""Whether the gradients of an attention can be computed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from attn_core.errors import Fault
from attn_core.problem import AttentionOptions, TensorSpec


def find_gradients_faults(
    specs: Mapping[str, TensorSpec],
    options: AttentionOptions,
    outputs: Sequence[str] | None,
    *,
    broken: Container[str] = (),
) -> list[Fault]:
    """Every fault of a ``GradientsProblem``; ``broken`` as in ``find_faults``.

    ``options.outputs`` says nothing; ``outputs`` are the asked gradients, None for every one that is defined.
    """
    raise NotImplementedError
