"""Heads are columns: split, merged, grouped and taken apart without mixing any."""

from __future__ import annotations

import pytest
import torch

from attn_core.maths import group_heads, merge_heads, split_heads, ungroup_heads
from tests.support.factory import make_tensor


@pytest.mark.parametrize("num_heads", [1, 2, 6])
@pytest.mark.parametrize("shape", [(2, 5, 12), (1, 1, 12), (0, 5, 12), (2, 0, 12)])
def test_merging_undoes_splitting(shape: tuple[int, ...], num_heads: int) -> None:
    packed = make_tensor(*shape)
    split = split_heads(packed, num_heads)
    assert split.shape == (shape[0], num_heads, shape[1], 12 // num_heads)
    assert torch.equal(merge_heads(split), packed)


def test_head_owns_its_run_of_columns() -> None:
    packed = make_tensor(2, 5, 12)
    split = split_heads(packed, 3)
    for head in range(3):
        assert torch.equal(split[:, head], packed[:, :, head * 4 : (head + 1) * 4])


def test_splitting_copies_nothing() -> None:
    packed = make_tensor(2, 5, 12)
    assert split_heads(packed, 3).data_ptr() == packed.data_ptr()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("batch", [2, 0])
def test_ungrouping_undoes_grouping(batch: int, num_kv_heads: int) -> None:
    per_head = make_tensor(batch, 6, 5, 4)
    grouped = group_heads(per_head, num_kv_heads)
    assert grouped.shape == (batch, num_kv_heads, 6 // num_kv_heads * 5, 4)
    assert torch.equal(ungroup_heads(grouped, 6), per_head)


def test_query_heads_of_one_group_stand_below_each_other() -> None:
    per_head = make_tensor(2, 6, 5, 4)
    grouped = group_heads(per_head, 2)
    assert torch.equal(grouped[:, 1], per_head[:, 3:].flatten(1, 2))
