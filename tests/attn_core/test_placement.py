"""Where tensors lie: the same numbers give the same bits at any address."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_core import AttentionOptions, AttentionProblem, Engine, WeightedSumProblem
from attn_core.placement import ALIGNMENT_BYTES, MIN_PINNED_BYTES, BufferPool, Staging, aligned, bring_back, place

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


class Point:
    """A point on a stream that is passed when the test says so."""

    def __init__(self) -> None:
        self.is_past = False

    def query(self) -> bool:
        return self.is_past

    def synchronize(self) -> None:
        raise AssertionError("nothing waits")


def ordinary_pool(max_bytes: int) -> BufferPool:
    return BufferPool(max_bytes=max_bytes, allocate=lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))


def lent(pool: BufferPool, num_bytes: int) -> Tensor:
    buffer = pool.lend(num_bytes)
    pool.check_integrity()
    assert buffer is not None and buffer.numel() >= num_bytes
    return buffer


def test_buffer_that_came_back_is_lent_again() -> None:
    pool = ordinary_pool(8 * MIN_PINNED_BYTES)
    first = lent(pool, 1)
    pool.take_back(first, None)
    assert lent(pool, MIN_PINNED_BYTES) is first
    assert pool.held_bytes == MIN_PINNED_BYTES


def test_buffer_still_in_use_by_a_copy_is_not_lent() -> None:
    pool, point = ordinary_pool(8 * MIN_PINNED_BYTES), Point()
    first = lent(pool, 1)
    pool.take_back(first, point)
    second = lent(pool, 1)
    assert second is not first
    point.is_past = True
    assert lent(pool, 1) is first


def test_pool_never_holds_more_than_it_may() -> None:
    pool = ordinary_pool(4 * MIN_PINNED_BYTES)
    assert pool.lend(5 * MIN_PINNED_BYTES) is None
    large, small = lent(pool, 2 * MIN_PINNED_BYTES), lent(pool, MIN_PINNED_BYTES)
    assert lent(pool, 1).numel() == MIN_PINNED_BYTES
    assert pool.lend(1) is None
    pool.take_back(large, None)
    # A larger one serves where there is no room for one that fits.
    assert lent(pool, 1) is large
    pool.take_back(small, None)
    assert pool.lend(2 * MIN_PINNED_BYTES) is None
    assert pool.held_bytes == 4 * MIN_PINNED_BYTES


def test_buffer_made_in_inference_mode_may_be_written_outside() -> None:
    pool = ordinary_pool(MIN_PINNED_BYTES)
    with torch.inference_mode():
        buffer = lent(pool, 4)
    buffer[:4].fill_(1)


def test_staging_on_the_host_moves_nothing() -> None:
    staging = Staging(torch.device("cpu"))
    tensor = staging.empty((2, 3), torch.bfloat16)
    assert staging.send([tensor])[0] is tensor
    with staging.fetch([tensor]) as (same,):
        assert same is tensor
    staging.forget()
    assert staging.pool.held_bytes == 0


@pytest.mark.cuda
def test_staging_brings_numbers_to_a_gpu_and_back_in_memory_that_is_used_again() -> None:
    staging = Staging(torch.device("cuda"))
    for pool in (staging.pool, BufferPool(max_bytes=0)):
        staging.pool = pool
        arrivals = []
        for number in range(20):
            host = staging.empty((300, 7), torch.float32).fill_(number)
            assert host.is_pinned() == (pool.max_bytes > 0)
            (there,) = staging.send([host])
            arrivals.append(staging.fetch([there * 2, there + 1]))
        for number, arrival in enumerate(arrivals):
            with arrival as (twice, next_one):
                assert (twice == 2 * number).all() and (next_one == number + 1).all()
        pool.check_integrity()
    host = staging.empty((4,), torch.float32)
    staging.forget()
    staging.pool.check_integrity()
    assert host.numel() == 4
