"""Each step of the backward pass against autograd of its forward step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_core.maths import gradients
from tests.support.factory import make_mask, make_tensor


def pairs(seed: int = 0, *, heads: int = 4) -> Tensor:
    return make_tensor(2, heads, 5, 7, seed=seed, dtype=torch.float64)


def of_queries(seed: int, width: int = 6) -> Tensor:
    return make_tensor(2, 4, 5, width, seed=seed, dtype=torch.float64)


def of_keys(seed: int, width: int = 6) -> Tensor:
    return make_tensor(2, 2, 7, width, seed=seed, dtype=torch.float64)


def repeated(shared: Tensor) -> Tensor:
    return shared.repeat_interleave(2, dim=1)


def test_gradients_of_the_weighted_sum_match_autograd() -> None:
    weights, value, grad = pairs(1).requires_grad_(), of_keys(2).requires_grad_(), of_queries(3)
    of_weights, of_value = torch.autograd.grad(weights @ repeated(value), (weights, value), grad)
    torch.testing.assert_close(gradients.grad_weights(grad, value.detach()), of_weights)
    torch.testing.assert_close(gradients.grad_value(weights.detach(), grad, 2), of_value)


def test_gradients_of_the_product_match_autograd() -> None:
    query, key, grad = of_queries(1).requires_grad_(), of_keys(2).requires_grad_(), pairs(3)
    scores = -0.3 * query @ repeated(key).transpose(-1, -2)
    of_query, of_key = torch.autograd.grad(scores, (query, key), grad)
    of_scores = gradients.grad_scores(grad, -0.3)
    torch.testing.assert_close(gradients.grad_query(of_scores, key.detach()), of_query)
    torch.testing.assert_close(gradients.grad_key(of_scores, query.detach(), 2), of_key)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients_of_softmax_and_logsumexp_match_autograd(with_sinks: bool) -> None:
    logits, sinks = pairs(1).requires_grad_(), make_tensor(4, seed=2, dtype=torch.float64).requires_grad_()
    grad_weights, grad_lse = pairs(3), pairs(4)[..., 0]
    columns = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(2, 4, 5, 1)], dim=-1) if with_sinks else logits
    weights = torch.softmax(columns, dim=-1)[..., :7]
    loss = (weights * grad_weights).sum() + (torch.logsumexp(columns, dim=-1) * grad_lse).sum()
    of_logits, of_sinks = torch.autograd.grad(loss, (logits, sinks), allow_unused=True)
    own = weights.detach()
    if with_sinks:
        own, sink_weights = gradients.softmax_with_sinks(logits.detach(), sinks.detach())
        torch.testing.assert_close(own, weights.detach())
    shift = gradients.row_shift(own, grad_weights, grad_lse)
    torch.testing.assert_close(gradients.grad_logits(own, grad_weights, shift), of_logits)
    if with_sinks:
        torch.testing.assert_close(gradients.grad_sinks(sink_weights, shift), of_sinks)
    by_lse = gradients.grad_logits(own, None, gradients.row_shift(own, None, grad_lse))
    torch.testing.assert_close(by_lse, own * grad_lse.unsqueeze(-1))


def test_gradient_through_the_softcap_matches_autograd() -> None:
    scaled, grad = pairs(1).requires_grad_(), pairs(2)
    (expected,) = torch.autograd.grad(1.5 * torch.tanh(scaled / 1.5), scaled, grad)
    tanh = torch.tanh(scaled.detach() / 1.5)
    torch.testing.assert_close(gradients.grad_through_softcap(grad, tanh), expected)


@pytest.mark.parametrize("shape", [(1, 1, 1, 7), (2, 1, 5, 1), (1, 4, 1, 1), (2, 4, 5, 7), (1, 1, 1, 1)])
def test_gradient_of_a_bias_is_summed_over_what_it_broadcast(shape: tuple[int, ...]) -> None:
    bias, grad = make_tensor(*shape, dtype=torch.float64).requires_grad_(), pairs(2)
    (expected,) = torch.autograd.grad(torch.zeros_like(grad) + bias, bias, grad)
    torch.testing.assert_close(gradients.grad_bias(grad, shape), expected)


def test_result_is_written_or_added_where_it_is_asked_for() -> None:
    weights, grad = pairs(1), of_queries(2)
    exact, total = gradients.grad_value(weights, grad, 2), of_keys(3)
    added = total + exact
    assert gradients.grad_value(weights, grad, 2, out=total, adds=True) is total
    torch.testing.assert_close(total, added)
    unread = torch.full_like(total, math.nan)
    torch.testing.assert_close(gradients.grad_value(weights, grad, 2, out=unread), exact)


def test_scale_of_0_leaves_nan_in_place() -> None:
    query, key = of_queries(1), of_keys(2)
    key[0, 0, 3, 1] = math.nan
    scores = gradients.scaled_scores(query, key, 0.0)
    assert scores[0, :2, :, 3].isnan().all() and scores.isnan().sum() == 10
    assert not scores.nan_to_num().any()


def test_scale_cannot_make_a_huge_factor_overflow() -> None:
    # So large that BLAS multiplies.
    query, key = make_tensor(2, 4, 17, 16, seed=1) * 1e-38, make_tensor(2, 2, 18, 16, seed=2)
    key[0, 0, 3] = 3.3e38
    scores = gradients.scaled_scores(query, key, 4.0)
    exact = 4.0 * query.double() @ repeated(key.double()).transpose(-1, -2)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-6)
    assert scores.isfinite().all()


def test_infinite_part_is_what_the_sums_of_allowed_pairs_make_of_it() -> None:
    allowed = make_mask(2, 5, 7, seed=1)
    coefficients = pairs(2)[:, 0].masked_fill(~allowed, 0.0)
    coefficients[0, 1, allowed[0, 1].nonzero()[0]] = 0.0
    factors = make_tensor(2, 7, 6, seed=3, dtype=torch.float64)
    for seed, number in enumerate((math.nan, math.inf, -math.inf)):
        factors = factors.masked_fill(make_mask(2, 7, 6, seed=seed, share=0.1), number)
    expected = torch.zeros(2, 5, 6, dtype=torch.float64)
    for n in range(2):
        for i in range(5):
            seen = allowed[n, i]
            expected[n, i] = (coefficients[n, i, seen].unsqueeze(1) * factors[n, seen]).sum(0)
    finite = torch.where(factors.isfinite(), factors, 0.0)
    part = gradients.infinite_part(coefficients, factors, allowed)
    torch.testing.assert_close(coefficients @ finite + part, expected, equal_nan=True)
    assert part.isinf().any() and part.isnan().any() and (part == 0).any()
