"""The one form kernels read: nothing copied that need not be, and empty rows told from the rules alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from attn_core import AttentionProblem
from attn_core.canonical import canonicalize, to_callers_form
from attn_core.kernels import reference
from tests.support.factory import in_layout, make_problem, make_tensor
from tests.support.strategies import problems


@settings(max_examples=300)
@given(problems(outputs=("weights",)))
def test_empty_rows_are_those_without_an_allowed_pair(problem: AttentionProblem) -> None:
    logits = reference.attend(problem)["logits"]
    canonical = canonicalize(problem)
    dims = canonical.dims
    expected = (logits == -torch.inf).all(-1)
    if problem.query_lengths is not None:
        expected &= torch.arange(dims.seq_len_q) < problem.query_lengths.view(-1, 1, 1)
    assert torch.equal(canonical.empty_rows(), expected)


@settings(max_examples=200)
@given(problems(outputs=("weights",)))
def test_allowed_pairs_are_those_of_the_reference(problem: AttentionProblem) -> None:
    logits = reference.attend(problem)["logits"]
    canonical = canonicalize(problem)
    allowed = canonical.allowed(canonical.all_rows())
    assert (allowed is None) == canonical.forbids_nothing
    if allowed is None:
        assert not (logits == -torch.inf).any()
    else:
        assert torch.equal(allowed.expand(logits.shape), logits != -torch.inf)


@pytest.mark.parametrize("rank", [4, 3, 2])
def test_operands_in_the_form_of_the_kernels_are_not_copied(rank: int) -> None:
    problem = make_problem(rank=rank)
    canonical = canonicalize(problem)
    assert canonical.query.data_ptr() == problem.query.data_ptr()
    assert canonical.query.ndim == 4


@pytest.mark.parametrize("layout", ["bthd", "btd"])
def test_operands_in_another_layout_are_views(layout: str) -> None:
    problem = make_problem(layout=layout)  # type: ignore[arg-type]
    canonical = canonicalize(problem)
    assert canonical.query.data_ptr() == problem.query.data_ptr()
    assert canonical.query.shape == (2, 4, 5, 8)


def test_self_attention_reads_one_tensor_three_times() -> None:
    canonical = canonicalize(make_problem(self_attention=True))
    assert canonical.key is canonical.query and canonical.value is canonical.query


@pytest.mark.parametrize("layout", ["bhtd", "bthd", "btd"])
def test_context_goes_back_to_the_layout_of_the_caller(layout: str) -> None:
    problem = make_problem(layout=layout)  # type: ignore[arg-type]
    context = make_tensor(2, 4, 5, 8)
    assert torch.equal(to_callers_form("context", context, problem), in_layout(context, layout))
    assert torch.equal(to_callers_form("weights", context, problem), context)


@pytest.mark.parametrize(("seq_len_q", "seq_len_kv", "causal"), [(1, 9, False), (4, 9, True), (9, 4, True)])
def test_decoding_at_the_end_of_the_keys_needs_no_mask(seq_len_q: int, seq_len_kv: int, causal: bool) -> None:
    canonical = canonicalize(make_problem(seq_len_q=seq_len_q, seq_len_kv=seq_len_kv, causal="lower_right"))
    assert canonical.causal is causal
    assert canonical.forbids_nothing is not causal
