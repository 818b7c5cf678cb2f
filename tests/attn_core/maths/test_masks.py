"""Which query may attend which key, pair by pair."""

from __future__ import annotations

import pytest
import torch

from attn_core.maths import (
    allowed_pairs,
    causal_mask,
    combine_masks,
    key_positions,
    length_mask,
    query_positions,
    window_mask,
)
from attn_core.maths.masks import rows_of
from tests.support.factory import make_mask


@pytest.mark.parametrize("offset", [-6, -1, 0, 2, 9])
def test_causal_key_is_seen_up_to_the_place_of_the_query(offset: int) -> None:
    mask = causal_mask(query_positions(torch.arange(4), offset), key_positions(6))
    assert mask.shape == (1, 1, 4, 6)
    for i in range(4):
        assert mask[0, 0, i].tolist() == [j <= i + offset for j in range(6)]


def test_offset_of_each_item_moves_its_own_diagonal() -> None:
    mask = causal_mask(query_positions(torch.arange(3), torch.tensor([0, 2])), key_positions(5))
    assert mask.shape == (2, 1, 3, 5)
    assert mask.sum(-1).tolist() == [[[1, 2, 3]], [[3, 4, 5]]]


@pytest.mark.parametrize("left", [None, 0, 1, 2**70])
@pytest.mark.parametrize("right", [None, 0, 2, 2**70])
@pytest.mark.parametrize("offset", [-3, 0, 4, -(2**53), 2**53])
def test_window_keeps_so_many_keys_on_each_side(left: int | None, right: int | None, offset: int) -> None:
    mask = window_mask(query_positions(torch.arange(3), offset), key_positions(6), left, right)
    if left is None and right is None:
        assert mask is None
        return
    assert mask is not None
    for i in range(3):
        place = i + offset
        expected = [(left is None or place - left <= j) and (right is None or j <= place + right) for j in range(6)]
        assert mask[0, 0, i].tolist() == expected


def test_length_hides_what_lies_at_and_after_it() -> None:
    mask = length_mask(torch.tensor([0, 2, 3]), key_positions(3))
    assert mask[:, 0, 0].tolist() == [[False] * 3, [True, True, False], [True] * 3]


def test_masks_combine_to_what_both_allow() -> None:
    first, second = make_mask(1, 1, 3, 4), make_mask(1, 1, 1, 4, seed=1)
    assert combine_masks(None, None) is None
    assert combine_masks(first, None) is first and combine_masks(None, second) is second
    both = combine_masks(first, second)
    assert both is not None and torch.equal(both, first & second)


def test_nothing_given_forbids_nothing() -> None:
    assert allowed_pairs(rows=torch.arange(3), seq_len_kv=4) is None


def test_pair_must_be_allowed_by_every_rule() -> None:
    allow, block = make_mask(2, 1, 3, 4), make_mask(1, 2, 1, 4, seed=1)
    bias = torch.zeros(1, 1, 3, 4)
    bias[0, 0, 1, 2] = -torch.inf
    bias[0, 0, 2, 0] = torch.finfo(torch.float32).min
    rows = torch.arange(3)
    lengths, queries = torch.tensor([4, 2]), torch.tensor([3, 1])
    mask = allowed_pairs(
        rows=rows,
        seq_len_kv=4,
        query_offset=1,
        causal=True,
        window_left=1,
        key_lengths=lengths,
        query_lengths=queries,
        allow_mask=allow,
        block_mask=block,
        bias=bias,
    )
    assert mask is not None and mask.dtype == torch.bool
    for b in range(2):
        for h in range(2):
            for i in range(3):
                for j in range(4):
                    expected = (
                        i <= j <= i + 1
                        and j < lengths[b]
                        and i < queries[b]
                        and allow[b, 0, i, j]
                        and not block[0, h, 0, j]
                        and bias[0, 0, i, j] != -torch.inf
                    )
                    assert mask[b, h, i, j] == expected


def test_listed_rows_are_answered_as_among_all() -> None:
    allow = make_mask(1, 1, 6, 5)
    lengths = torch.tensor([4])

    def of(rows: torch.Tensor) -> torch.Tensor:
        mask = allowed_pairs(
            rows=rows,
            seq_len_kv=5,
            causal=True,
            query_lengths=lengths,
            allow_mask=rows_of(allow, rows),
        )
        assert mask is not None
        return mask

    rows = torch.tensor([5, 0, 3])
    assert torch.equal(of(rows), of(torch.arange(6))[:, :, rows])


def test_one_row_for_all_is_not_cut() -> None:
    shared = make_mask(1, 1, 1, 5)
    assert rows_of(shared, torch.tensor([3])) is shared
    assert rows_of(None, torch.tensor([3])) is None
