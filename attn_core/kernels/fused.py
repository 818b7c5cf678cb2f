"""The fused kernel: torch's scaled_dot_product_attention. Gives context and logsumexp.

It is only handed what it answers right: finite numbers that cannot overflow, key and value of one length and head
count, at least one key (on CPU the raw operator reads past the end, or kills the process, otherwise).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_core.canonical import CanonicalProblem
from attn_core.kernels.output import KernelOutput
from attn_core.numerics import EMPTY_CONTEXT, EMPTY_LOGSUMEXP, SIGNLESS_ZERO

MASK_BLOCK_PAIRS = 2**24
"""A mask of more pairs is made for blocks of query rows, each answered by a call of its own."""
BLOCK_ROW_MULTIPLE = 256


def needs_mask(problem: CanonicalProblem) -> bool:
    """Whether a mask must be made: nothing is forbidden otherwise, or only what SDPA's own ``is_causal`` forbids."""
    return not problem.forbids_nothing and not is_square_causal(problem)


def is_square_causal(problem: CanonicalProblem) -> bool:
    """Whether SDPA's own ``is_causal`` says all that is forbidden."""
    # On CPU the kernel scales its -inf too: a scale of 0 makes them NaN, one below 0 makes them +inf.
    scale = torch.tensor(problem.scale, dtype=problem.compute_dtype).item()
    return problem.is_square_causal and scale > 0


def mask_block_rows(problem: CanonicalProblem) -> int:
    """How many query rows one call takes; all of them unless a large mask must be made. Shape alone decides."""
    dims = problem.dims
    if not needs_mask(problem):
        return dims.seq_len_q
    heads = dims.num_heads if any(m is not None and m.shape[1] > 1 for m in _pair_masks(problem)) else 1
    per_row = max(1, dims.batch * heads * dims.seq_len_kv)
    if dims.seq_len_q * per_row <= MASK_BLOCK_PAIRS:
        return dims.seq_len_q
    multiples = max(1, MASK_BLOCK_PAIRS // per_row // BLOCK_ROW_MULTIPLE)
    return min(dims.seq_len_q, multiples * BLOCK_ROW_MULTIPLE)


def is_cut(problem: CanonicalProblem) -> bool:
    """Whether the problem is answered by more than one call."""
    return mask_block_rows(problem) < problem.dims.seq_len_q


def plain(query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool, shares_heads: bool) -> Tensor:
    """context of one call without a mask, of tensors ``[batch, heads, tokens, width]`` without hazards."""
    context = F.scaled_dot_product_attention(
        query, key, value, dropout_p=0.0, is_causal=is_causal, scale=scale, enable_gqa=shares_heads
    )
    return context.add_(SIGNLESS_ZERO) if is_causal else context


def _pair_masks(problem: CanonicalProblem) -> tuple[Tensor | None, ...]:
    return problem.allow_mask, problem.block_mask, problem.bias


def attend(problem: CanonicalProblem) -> KernelOutput:
    """context and, where asked, logsumexp of a problem without hazards."""
    query, key, value = (_unit_stride(t) for t in (problem.query, problem.key, problem.value))
    wants_lse = "logsumexp" in problem.outputs
    if not needs_mask(problem):
        context, lse = _call(problem, query, key, value, None, is_causal=is_square_causal(problem), wants_lse=wants_lse)
        if is_square_causal(problem):
            context.add_(SIGNLESS_ZERO)
        return KernelOutput(outputs=_asked(problem, context, lse))
    contexts, lses, empties = [], [], []
    every, size = problem.all_rows(), mask_block_rows(problem)
    for start in range(0, every.numel(), size):
        rows = every[start : start + size]
        allowed = problem.allowed(rows)
        assert allowed is not None
        shape = (problem.dims.batch, problem.dims.num_heads, rows.numel())
        empty = (~allowed.any(dim=-1)).expand(shape)
        mask = allowed.expand(*allowed.shape[:3], problem.dims.seq_len_kv)
        if problem.bias is not None or wants_lse:
            mask = _as_number(problem, mask, rows)
        context, lse = _call(
            problem, query[:, :, start : start + rows.numel()], key, value, mask, is_causal=False, wants_lse=wants_lse
        )
        context.add_(SIGNLESS_ZERO)
        contexts.append(context.masked_fill_(empty.unsqueeze(-1), EMPTY_CONTEXT))
        if lse is not None:
            lses.append(lse.masked_fill(empty, EMPTY_LOGSUMEXP))
        empties.append(empty)
    return KernelOutput(
        outputs=_asked(problem, _joined(contexts), _joined(lses) if lses else None),
        empty=torch.cat(empties, dim=-1),
    )


def _call(
    problem: CanonicalProblem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    if wants_lse:
        # The public call does not return it. This operator checks nothing, so all of it was checked before.
        context, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=problem.scale
        )
        return context, lse
    context = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=0.0,
        is_causal=is_causal,
        scale=problem.scale,
        enable_gqa=problem.dims.group_size > 1,
    )
    return context, None


def _as_number(problem: CanonicalProblem, allowed: Tensor, rows: Tensor) -> Tensor:
    """The mask as SDPA adds it, in the dtype of the query: the bias at allowed pairs, -inf at the others."""
    dtype = problem.query.dtype
    if problem.bias is None:
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)
    bias = problem.bias if problem.bias.shape[-2] == 1 else problem.bias[..., rows, :]
    return bias.to(dtype).masked_fill(~allowed, -math.inf)


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _asked(problem: CanonicalProblem, context: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
    found = {"context": context, "logsumexp": lse}
    return {name: tensor for name in problem.outputs if (tensor := found[name]) is not None}
