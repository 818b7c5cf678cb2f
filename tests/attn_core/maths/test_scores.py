"""From query and key to logits, in the order of the contract."""

from __future__ import annotations

import math

import pytest
import torch

from attn_core.maths import (
    alibi_distances,
    key_positions,
    logits_from_scores,
    query_positions,
    score_matrix,
    softcap_scores,
)
from tests.support.factory import make_mask, make_tensor


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_query_head_reads_the_key_head_of_its_group(num_kv_heads: int) -> None:
    query, key = make_tensor(2, 6, 3, 4, dtype=torch.float64), make_tensor(2, num_kv_heads, 5, 4, dtype=torch.float64)
    scores = score_matrix(query, key)
    for h in range(6):
        expected = query[:, h] @ key[:, h // (6 // num_kv_heads)].transpose(-1, -2)
        torch.testing.assert_close(scores[:, h], expected)


def test_softcap_bounds_and_keeps_small_numbers() -> None:
    scaled = torch.tensor([-1e30, -0.001, 0.0, 0.001, 1e30, math.inf])
    capped = softcap_scores(scaled, 2.0)
    torch.testing.assert_close(capped, torch.tensor([-2.0, -0.001, 0.0, 0.001, 2.0, 2.0]))


def test_alibi_measures_from_the_place_of_the_query() -> None:
    slopes = torch.tensor([0.5, 2.0])
    found = alibi_distances(slopes, query_positions(torch.arange(2), torch.tensor([0, 3])), key_positions(4))
    assert found.shape == (2, 2, 2, 4) and found.dtype == slopes.dtype
    for b, offset in enumerate((0, 3)):
        for h in range(2):
            for i in range(2):
                assert found[b, h, i].tolist() == [slopes[h].item() * abs(i + offset - j) for j in range(4)]


def test_steps_follow_in_their_order() -> None:
    scores, bias = make_tensor(1, 2, 3, 4), make_tensor(1, 1, 3, 4, seed=1)
    alibi, allowed = make_tensor(1, 2, 3, 4, seed=2).abs(), make_mask(1, 1, 3, 4, seed=3)
    found = logits_from_scores(scores, scale=0.3, softcap=1.5, alibi=alibi, bias=bias, allowed=allowed)
    expected = 1.5 * torch.tanh(0.3 * scores / 1.5) - alibi + bias
    torch.testing.assert_close(found, expected.masked_fill(~allowed, -math.inf))


def test_what_stands_at_a_forbidden_pair_cannot_matter() -> None:
    scores = torch.tensor([[[[math.nan, math.inf, -math.inf, 1.0]]]])
    allowed = torch.tensor([False, False, False, True]).view(1, 1, 1, 4)
    logits = logits_from_scores(scores, scale=2.0, softcap=None, allowed=allowed)
    assert logits.flatten().tolist() == [-math.inf, -math.inf, -math.inf, 2.0]


def test_scores_given_are_left_as_they_were() -> None:
    scores = make_tensor(1, 1, 2, 3)
    before = scores.clone()
    logits_from_scores(scores, scale=2.0, softcap=1.0, bias=make_tensor(1, 1, 2, 3), allowed=make_mask(1, 1, 2, 3))
    assert torch.equal(scores, before)
