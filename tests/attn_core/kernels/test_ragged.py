"""The ragged kernel: one form of it whatever the version of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_core.kernels.ragged import RaggedBatch, RaggedKernel
from tests.support.factory import make_tensor
from tests.support.varlen import old_varlen, varlen


def make_batch(
    lens_q: tuple[int, ...] = (5, 1, 17),
    lens_kv: tuple[int, ...] = (7, 3, 17),
    *,
    num_kv_heads: int = 4,
    head_dim: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    **options: Any,
) -> RaggedBatch:
    def ends(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).int().to(device)

    query = make_tensor(sum(lens_q), 4, head_dim, seed=1, dtype=dtype).to(device)
    key, value = (
        make_tensor(sum(lens_kv), num_kv_heads, head_dim, seed=seed, dtype=dtype).to(device) for seed in (2, 3)
    )
    return RaggedBatch(
        query=query,
        key=key,
        value=value,
        cu_seqlens_q=ends(lens_q),
        cu_seqlens_kv=ends(lens_kv),
        max_seq_len_q=max(lens_q),
        max_seq_len_kv=max(lens_kv),
        scale=0.3,
        **options,
    )


def test_setting_that_makes_it_batch_invariant_is_found_in_the_signature() -> None:
    assert RaggedKernel(varlen).has_num_splits
    assert not RaggedKernel(old_varlen).has_num_splits


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_shared_heads_are_answered_alike_by_old_and_new_torch(num_kv_heads: int) -> None:
    batch = make_batch(num_kv_heads=num_kv_heads, window_right=0, wants_logsumexp=True)
    new, old = RaggedKernel(varlen).attend(batch), RaggedKernel(old_varlen).attend(batch)
    assert torch.equal(new[0], old[0])
    assert new[1] is not None and old[1] is not None and torch.equal(new[1], old[1])


def test_empty_row_has_context_0_and_logsumexp_minus_infinity() -> None:
    batch = make_batch((5, 2), (3, 4), window_right=0, wants_logsumexp=True)
    context, lse = RaggedKernel(varlen).attend(batch)
    assert lse is not None and lse.shape == (4, 7)
    assert (lse[:, :2] == -torch.inf).all() and lse[:, 2:].isfinite().all()
    assert (context[:2] == 0).all() and not torch.signbit(context[:2]).any()


def test_torch_itself_takes_what_the_kernel_gives_it() -> None:
    kernel = RaggedKernel()
    for num_kv_heads in (4, 2):
        batch = make_batch(num_kv_heads=num_kv_heads, device="meta", window_left=3, window_right=0)
        context, lse = kernel.attend(batch)
        assert context.shape == batch.query.shape and context.device.type == "meta" and lse is None
    context, lse = kernel.attend(make_batch(device="meta", wants_logsumexp=True))
    assert lse is not None and lse.shape == (4, 23) and lse.dtype == torch.float32


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 0), (2, 1)])
def test_ragged_kernel_on_a_gpu_matches_the_formula(
    dtype: torch.dtype, num_kv_heads: int, window: tuple[int | None, int | None]
) -> None:
    lengths: dict[str, Any] = {"lens_q": (5, 1, 17, 300), "lens_kv": (3, 300, 17, 129)}
    if window == (2, 1):
        # FlashAttention opens the right side of a sequence whose queries outnumber its keys.
        lengths = {"lens_q": (5, 1, 17, 129), "lens_kv": (5, 300, 17, 300)}
    options: dict[str, Any] = {"window_left": window[0], "window_right": window[1], "wants_logsumexp": True}
    batch, exact = (
        make_batch(**lengths, **options, num_kv_heads=num_kv_heads, head_dim=64, dtype=d, device=device)
        for d, device in ((dtype, "cuda"), (dtype, "cpu"))
    )
    context, lse = RaggedKernel().attend(batch)
    expected, expected_lse = RaggedKernel(varlen).attend(exact)
    assert lse is not None and expected_lse is not None
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(context.cpu(), expected, rtol=4 * eps, atol=8 * eps)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-4, atol=1e-4)
