"""Weights times values, with NaN and infinity let through or kept behind the mask."""

from __future__ import annotations

import math

import pytest
import torch

from attn_core.maths import weighted_context, weighted_context_of_allowed
from tests.support.factory import make_mask, make_tensor


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_weights_are_multiplied_with_the_value_head_of_their_group(num_kv_heads: int) -> None:
    weights = make_tensor(2, 6, 3, 5, dtype=torch.float64)
    value = make_tensor(2, num_kv_heads, 5, 4, seed=1, dtype=torch.float64)
    context = weighted_context(weights, value)
    for h in range(6):
        torch.testing.assert_close(context[:, h], weights[:, h] @ value[:, h // (6 // num_kv_heads)])


def test_plain_product_lets_nan_through_a_weight_of_zero() -> None:
    context = weighted_context(torch.tensor([[[[0.0, 1.0]]]]), torch.tensor([[[[math.nan], [1.0]]]]))
    assert context.isnan().all()


@pytest.mark.parametrize("allowed", [None, make_mask(2, 1, 3, 5), make_mask(5)[None, None, None]])
def test_finite_value_gives_the_bits_of_the_plain_product(allowed: torch.Tensor | None) -> None:
    weights, value = make_tensor(2, 4, 3, 5).softmax(-1), make_tensor(2, 2, 5, 4, seed=1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    assert torch.equal(weighted_context_of_allowed(weights, value, allowed), weighted_context(weights, value))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_forbidden_value_cannot_change_the_context(poison: float) -> None:
    allowed = torch.tensor([True, False, True]).view(1, 1, 1, 3)
    weights = torch.tensor([[[[0.25, 0.0, 0.75]]]])
    value = torch.tensor([[[[1.0, 2.0], [poison, poison], [3.0, 4.0]]]])
    plain = weighted_context(weights, value.nan_to_num(0.0, 0.0, 0.0))
    assert torch.equal(weighted_context_of_allowed(weights, value, allowed), plain)


@pytest.mark.parametrize(
    ("weights", "value", "expected"),
    [
        ([0.5, 0.5], [math.inf, 1.0], math.inf),
        ([0.5, 0.5], [1.0, -math.inf], -math.inf),
        ([0.5, 0.5], [math.inf, -math.inf], math.nan),
        ([0.0, 1.0], [math.inf, 1.0], math.nan),
        ([0.0, 1.0], [math.nan, 1.0], math.nan),
        ([math.nan, math.nan], [1.0, 2.0], math.nan),
        ([math.nan, math.nan], [math.inf, 2.0], math.nan),
    ],
)
def test_attended_value_is_summed_by_the_rules_of_the_sum(
    weights: list[float], value: list[float], expected: float
) -> None:
    found = weighted_context_of_allowed(torch.tensor([[[weights]]]), torch.tensor(value).view(1, 1, 2, 1), None)
    torch.testing.assert_close(found.flatten(), torch.tensor([expected]), equal_nan=True)


def test_masks_and_weights_given_are_left_as_they_were() -> None:
    weights, allowed = make_tensor(1, 1, 2, 3).abs(), make_mask(1, 1, 2, 3)
    value = torch.tensor([1.0, math.inf, 2.0]).view(1, 1, 3, 1)
    before = weights.clone(), allowed.clone()
    weighted_context_of_allowed(weights, value, allowed)
    assert torch.equal(weights, before[0]) and torch.equal(allowed, before[1])
