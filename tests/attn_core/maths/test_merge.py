"""Two halves of the keys joined are the whole."""

from __future__ import annotations

import pytest
import torch

from attn_core.kernels import reference
from attn_core.maths import merge_partials
from tests.support.factory import make_problem, with_tensors


@pytest.mark.parametrize("split", [0, 1, 7, 15, 16])
def test_merging_two_key_ranges_matches_attending_to_all(split: int) -> None:
    problem = make_problem(seq_len_q=5, seq_len_kv=16, dtype=torch.float64)
    key, value = problem.key, problem.value
    assert key is not None and value is not None
    whole = reference.attend(problem)
    left = reference.attend(with_tensors(problem, key=key[..., :split, :], value=value[..., :split, :]))
    right = reference.attend(with_tensors(problem, key=key[..., split:, :], value=value[..., split:, :]))
    context, lse = merge_partials(left["context"], left["logsumexp"], right["context"], right["logsumexp"])
    torch.testing.assert_close(context, whole["context"])
    torch.testing.assert_close(lse, whole["logsumexp"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_half_without_a_key_cannot_change_the_other(dtype: torch.dtype) -> None:
    context, lse = torch.tensor([[1.5, -2.0]], dtype=dtype), torch.tensor([3.0], dtype=dtype)
    nothing, never = torch.zeros(1, 2, dtype=dtype), torch.full((1,), -torch.inf, dtype=dtype)
    for found in (merge_partials(context, lse, nothing, never), merge_partials(nothing, never, context, lse)):
        assert torch.equal(found[0], context) and torch.equal(found[1], lse)


def test_row_empty_on_both_sides_stays_empty() -> None:
    nothing, never = torch.zeros(3, 2), torch.full((3,), -torch.inf)
    context, lse = merge_partials(nothing, never, nothing, never)
    assert torch.equal(context, nothing) and torch.equal(lse, never)


def test_far_apart_halves_do_not_overflow() -> None:
    one, other = torch.ones(1, 2), torch.full((1, 2), 5.0)
    context, lse = merge_partials(one, torch.tensor([1000.0]), other, torch.tensor([-1000.0]))
    assert torch.equal(context, one) and lse.item() == 1000.0


def test_equal_halves_weigh_the_same() -> None:
    context, lse = merge_partials(torch.zeros(1, 1), torch.tensor([2.0]), torch.ones(1, 1), torch.tensor([2.0]))
    torch.testing.assert_close(context, torch.full((1, 1), 0.5))
    torch.testing.assert_close(lse, torch.log(2 * torch.exp(torch.tensor([2.0]))))
