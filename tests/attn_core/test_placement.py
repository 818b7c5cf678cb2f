"""Where tensors lie: the same numbers give the same bits at any address."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_core import AttentionOptions, AttentionProblem, Engine, WeightedSumProblem
from attn_core.placement import ALIGNMENT_BYTES, aligned, bring_back, place

WIDTHS = [1, 3, 9, 13, 16, 64]


def at_offset(tensor: Tensor, offset: int) -> Tensor:
    """The same numbers ``offset`` bytes behind an address that torch would choose."""
    room = np.empty(tensor.nbytes + 2 * ALIGNMENT_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES + offset
    placed = torch.from_numpy(room[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
    placed.copy_(tensor)
    assert placed.data_ptr() % ALIGNMENT_BYTES == offset
    return placed


@pytest.mark.parametrize("path", ["fused", "manual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_address_cannot_change_a_bit(path: str, dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    operands = [torch.randn(3, 5, 11, width, generator=generator).to(dtype) for _ in range(3)]
    engine, options = Engine(), AttentionOptions(path=path)
    contexts = []
    for offset in (0, 8, 16, 32, 56):
        query, key, value = (at_offset(tensor, offset) for tensor in operands)
        result = engine.attend(AttentionProblem(query=query, key=key, value=value, options=options))
        contexts.append(result.outputs["context"])
    assert all(torch.equal(context, contexts[0]) for context in contexts)


def test_address_cannot_change_a_weighted_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    weights, value = torch.rand(5, 7, 11, generator=generator), torch.randn(5, 11, 13, generator=generator)
    sums = [
        Engine().attend(WeightedSumProblem(at_offset(weights, offset), at_offset(value, 64 - offset)))
        for offset in (8, 16, 32)
    ]
    assert all(torch.equal(result.outputs["context"], sums[0].outputs["context"]) for result in sums)


def test_what_lies_well_is_not_copied() -> None:
    tensor = torch.ones(4, 4)
    assert aligned(tensor) is tensor
    moved = at_offset(tensor, 8)
    assert aligned(moved).data_ptr() % ALIGNMENT_BYTES == 0
    host = torch.device("cpu")
    assert place({"query": tensor}, host)["query"] is tensor
    assert bring_back({"context": tensor}, host)["context"] is tensor


@pytest.mark.cuda
def test_results_come_back_to_where_the_problem_was() -> None:
    for device in ("cpu", "cuda"):
        query = torch.ones(1, 1, 2, 8, device=device)
        result = Engine(device="cuda").attend(AttentionProblem(query=query))
        assert result.outputs["context"].device.type == device
