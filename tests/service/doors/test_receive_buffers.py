"""Memory that bodies are received into: aligned, reused, bounded, and nobody's twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_core.placement import ALIGNMENT_BYTES
from attn_core.prepared import prepare
from service.doors.receive_buffers import MIN_BUFFER_BYTES, ReceiveBuffer, ReceiveBuffers
from service.wire.arrays import Limits
from service.wire.plain_recipes import PlainRecipe, PlainRecipes
from service.wire.requests import ATTENTION, ReadLimits
from service.wire.safetensors_format import decode
from tests.support.bodies import safetensors_body
from tests.support.roads import tensors_of

MB = 2**20


@pytest.mark.parametrize("size", [1, 63, 64, 65, 65536, 10**6])
def test_a_buffer_begins_where_torch_would_put_it(size: int) -> None:
    for _ in range(5):
        buffer = ReceiveBuffer(size)
        assert buffer.memory.ctypes.data % ALIGNMENT_BYTES == 0
        assert len(buffer.view) == buffer.size == size
        assert not buffer.view.readonly


def recipe_of(tokens: int, dtype: torch.dtype) -> tuple[PlainRecipe, bytes, dict[str, torch.Tensor]]:
    """What is known about a header, the data behind it, and the tensors that these are."""
    tensors = tensors_of(tokens, 64, dtype=dtype)
    body = memoryview(bytearray(64 + len(safetensors_body(tensors, {}))))
    raw = safetensors_body(tensors, {})
    length = int.from_bytes(raw[:8], "little")
    # Data on a multiple of 64, as the door puts them.
    whole = torch.frombuffer(body, dtype=torch.uint8)
    start = -(whole.data_ptr() + 8 + length) % ALIGNMENT_BYTES
    body[start : start + len(raw)] = raw
    decoded = decode(body[start : start + len(raw)], ATTENTION, ReadLimits(tensors=Limits(), max_timeout_s=60))
    recipes = PlainRecipes(device="cpu")
    recipes.remember(raw[8 : 8 + length], decoded, prepare(decoded.problem, device_type="cpu"))
    recipe = recipes.get(raw[8 : 8 + length])
    assert recipe is not None
    return recipe, raw[8 + length :], tensors


def test_views_are_those_of_the_recipe_and_of_the_place_asked_for() -> None:
    buffer = ReceiveBuffer(MB)
    recipes = [recipe_of(tokens, dtype) for tokens in (3, 5) for dtype in (torch.float32, torch.float16)]
    # Each place and recipe in turn, so that what is remembered is never what is asked for; then twice the same.
    for data_at in (0, 64, 640, 64 * 1000, 64, 64):
        for recipe, data, tensors in (*recipes, recipes[-1]):
            buffer.view[data_at : data_at + len(data)] = data
            numbers, *views = buffer.views(recipe, data_at)
            assert sum(part.numel() for part in numbers) == recipe.num_elements
            for view, tensor in zip(views, tensors.values(), strict=True):
                assert torch.equal(view, tensor)
                assert view.data_ptr() % ALIGNMENT_BYTES == 0


def test_views_see_what_comes_later() -> None:
    buffer = ReceiveBuffer(MB)
    recipe, data, _ = recipe_of(3, torch.float32)
    buffer.view[64 : 64 + len(data)] = bytes(len(data))
    numbers, *_ = buffer.views(recipe, 64)
    assert not torch.cat(numbers).any()
    buffer.view[64 : 64 + len(data)] = data
    again, *_ = buffer.views(recipe, 64)
    assert torch.equal(torch.cat(again), torch.frombuffer(bytearray(data), dtype=torch.float32))


@pytest.mark.parametrize(
    "num_bytes", [0, 1, 1000, MIN_BUFFER_BYTES, MIN_BUFFER_BYTES + 1, MB - 1, MB, MB + 1, 7 * MB + 3]
)
def test_a_lease_is_long_enough_and_not_much_longer(num_bytes: int) -> None:
    size = ReceiveBuffers(max_free_bytes=0).lease(num_bytes).size
    assert size >= num_bytes
    assert size <= max(MIN_BUFFER_BYTES, 1.25 * num_bytes + MIN_BUFFER_BYTES)
    assert size <= 1.25 * num_bytes or num_bytes < 4 * MIN_BUFFER_BYTES


def test_like_lengths_share_a_buffer() -> None:
    buffers = ReceiveBuffers(max_free_bytes=64 * MB)
    first = buffers.lease(1_000_000)
    buffers.give_back(first)
    assert buffers.lease(990_000) is first
    assert buffers.lease(1_000_000) is not first
    assert buffers.leased == 2


def test_what_nobody_leases_is_bounded_and_the_latest_sizes_stay() -> None:
    buffers = ReceiveBuffers(max_free_bytes=4 * MB)
    sizes = [MB, 2 * MB, MB, 512 * 1024]
    leased = [buffers.lease(size) for size in sizes]
    for buffer in leased:
        buffers.give_back(buffer)
        assert buffers.free_bytes <= buffers.max_free_bytes
    # The 2 MB had not been asked for for the longest time.
    assert buffers.free_bytes == 2 * MB + 512 * 1024
    assert {id(buffers.lease(MB)), id(buffers.lease(MB))} == {id(leased[0]), id(leased[2])}
    assert buffers.lease(512 * 1024) is leased[3]
    assert buffers.free_bytes == 0


def test_a_buffer_larger_than_the_bound_is_not_kept() -> None:
    buffers = ReceiveBuffers(max_free_bytes=MB)
    buffers.give_back(buffers.lease(8 * MB))
    assert (buffers.free_bytes, buffers.leased) == (0, 0)


def test_a_lost_buffer_is_no_longer_leased_and_never_comes_back() -> None:
    buffers = ReceiveBuffers(max_free_bytes=MB)
    lost = buffers.lease(1000)
    buffers.lose()
    assert buffers.leased == 0
    assert buffers.lease(1000) is not lost


@given(st.lists(st.tuples(st.sampled_from(["lease", "give back", "lose"]), st.integers(0, 3 * MB)), max_size=60))
def test_nobody_has_what_another_has(steps: list[tuple[str, int]]) -> None:
    buffers = ReceiveBuffers(max_free_bytes=4 * MB)
    held: list[ReceiveBuffer] = []
    for step, number in steps:
        if step == "lease":
            buffer = buffers.lease(number)
            assert buffer.size >= number
            assert all(buffer is not other for other in held)
            held.append(buffer)
        elif held:
            buffer = held.pop(number % len(held))
            if step == "lose":
                buffers.lose()
            else:
                buffers.give_back(buffer)
        assert buffers.leased == len(held)
        assert 0 <= buffers.free_bytes <= buffers.max_free_bytes
