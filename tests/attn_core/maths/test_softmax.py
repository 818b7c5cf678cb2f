"""Softmax with its rules, its logarithm and its entropy."""

from __future__ import annotations

import math

import pytest
import torch

from attn_core.maths import masked_softmax, row_entropy, row_logsumexp
from tests.support.factory import make_mask, make_tensor


def test_weights_of_a_row_add_up_to_one() -> None:
    weights = masked_softmax(make_tensor(2, 3, 4, 5, dtype=torch.float64, std=30.0))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 4, dtype=torch.float64))


def test_weights_are_exp_of_logits_less_logsumexp() -> None:
    allowed = make_mask(2, 3, 4, 5, share=0.8)
    logits = make_tensor(2, 3, 4, 5, dtype=torch.float64).masked_fill(~allowed, -math.inf)
    sinks = make_tensor(3, seed=1, dtype=torch.float64)
    empty = ~allowed.any(-1)
    for own in (None, sinks):
        lse = row_logsumexp(logits, empty, own)
        expected = torch.exp(logits - lse.unsqueeze(-1)).masked_fill(~allowed, 0.0)
        torch.testing.assert_close(masked_softmax(logits, allowed, own), expected)


def test_sink_is_one_more_column_that_is_left_out() -> None:
    logits, sinks = make_tensor(2, 3, 4, 5, dtype=torch.float64), torch.tensor([0.3, -1.0, 90.0], dtype=torch.float64)
    column = sinks.view(1, 3, 1, 1).expand(2, 3, 4, 1)
    wide = torch.cat([logits, column], dim=-1)
    torch.testing.assert_close(masked_softmax(logits, None, sinks), torch.softmax(wide, -1)[..., :-1])
    torch.testing.assert_close(row_logsumexp(logits, None, sinks), torch.logsumexp(wide, -1))


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5])])
def test_empty_row_weighs_nothing(sinks: torch.Tensor | None) -> None:
    logits = torch.full((1, 1, 1, 3), -math.inf)
    allowed = torch.zeros(1, 1, 1, 3, dtype=torch.bool)
    assert masked_softmax(logits, allowed, sinks).eq(0).all()
    lse = row_logsumexp(logits, torch.ones(1, 1, 1, dtype=torch.bool), sinks)
    assert lse.item() == (-math.inf if sinks is None else 0.5)


@pytest.mark.parametrize("row", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_row_without_a_softmax_is_nan_at_its_allowed_pairs(row: list[float]) -> None:
    logits = torch.tensor([[[[*row, -math.inf], [0.0, 0.0, -math.inf]]]])
    allowed = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    weights = masked_softmax(logits, allowed)
    assert weights[0, 0, 0, :2].isnan().all() and weights[0, 0, 0, 2] == 0
    assert weights[0, 0, 1].tolist() == [0.5, 0.5, 0.0]
    lse = row_logsumexp(logits, torch.zeros(1, 1, 2, dtype=torch.bool))
    assert lse[0, 0, 0].isnan() and lse[0, 0, 1].isfinite()


def test_entropy_of_equal_weights_is_the_logarithm_of_their_number() -> None:
    weights = torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0], [0.0] * 4], dtype=torch.float64)
    expected = torch.tensor([math.log(4), 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(row_entropy(weights), expected)
