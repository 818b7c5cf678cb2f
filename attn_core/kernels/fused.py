"""The fused kernel: torch's scaled_dot_product_attention. Gives context and logsumexp.

It is only handed what it answers right: finite numbers that cannot overflow, key and value of one length and head
count, at least one key (on CPU the raw operator reads past the end, or kills the process, otherwise).
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_core.canonical import CanonicalProblem
from attn_core.cut import THREADS_FROM_FLOPS, Cut, cut_heads_first, even
from attn_core.errors import Checkpoint, never_abandoned
from attn_core.kernels.output import KernelOutput, new_output
from attn_core.numerics import EMPTY_CONTEXT, EMPTY_LOGSUMEXP, SIGNLESS_ZERO
from attn_core.placement import ALIGNMENT_BYTES
from attn_core.problem import Dims

BLOCK_FLOPS = {torch.float32: 2**31, torch.float64: 2**30}
"""What one call takes on a CPU, by the dtype of the arithmetic: 20 to 35 ms of one core."""
BLOCK_PAIRS = 2**24
"""And so many query-key pairs: in narrow heads the exponentials take longer than the products."""
LONG_ROWS = 1024
"""torch's kernel works on tiles of 32, 64 or 256 query rows, the last from 768 rows on and a tenth faster on long keys.
A block of rows may take twice the flops to have so many, which is one tile for each of four threads."""
CAUSAL_ROWS = 512
"""A block of rows up to the diagonal computes the triangle behind it too, and so shall have no more."""
ROW_MULTIPLE = 32
GPU_BLOCK_FLOPS = {torch.float16: 2**44, torch.bfloat16: 2**44}
GPU_BLOCK_FLOPS_WIDE = 2**41
MASK_BLOCK_PAIRS = 2**24
"""No mask of more pairs is made at once, on any device."""
BLOCK_ROW_MULTIPLE = 256
FEW_ROWS = 32
"""So many rows of a head, or fewer, are one task for one thread. Two things then make bits depend on company where
there are several threads: of a single task, BLAS divides the products between them; and the scratch of each but the
first begins wherever that of so many rows ends, if that is no multiple of 64 bytes."""
PACKED_FROM = 64
"""From so many queries and keys on, torch lays half numbers out for the tiles of a processor that has them."""


@functools.cache
def packs(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies numbers of this dtype by tiles."""
    name = {torch.bfloat16: "_is_amx_tile_supported", torch.float16: "_is_amx_fp16_supported"}.get(dtype)
    if name is None:
        return False
    # A torch that does not say may do it.
    return bool(getattr(torch.cpu, name, lambda: True)())


def needs_mask(problem: CanonicalProblem) -> bool:
    """Whether a mask must be made: nothing is forbidden otherwise, or only what SDPA's own ``is_causal`` forbids."""
    return not problem.forbids_nothing and not is_square_causal(problem)


def is_square_causal(problem: CanonicalProblem) -> bool:
    """Whether SDPA's own ``is_causal`` says all that is forbidden."""
    # On CPU the kernel scales its -inf too: a scale of 0 makes them NaN, one below 0 makes them +inf.
    return problem.is_square_causal and torch.tensor(problem.scale, dtype=problem.compute_dtype).item() > 0


def is_one_task(dims: Dims) -> bool:
    """Whether a single head of the problem, with threads to spare, would be a single task."""
    flops = 2 * dims.num_pairs * (dims.head_dim + dims.head_dim_v)
    return flops >= THREADS_FROM_FLOPS and dims.seq_len_q <= FEW_ROWS


def tells_company(problem: CanonicalProblem) -> bool:
    """Whether the bits of a head may depend on how many are computed beside it, on a CPU."""
    return is_one_task(problem.dims) and problem.dims.seq_len_q * problem.query.dtype.itemsize % ALIGNMENT_BYTES != 0


def cut(problem: CanonicalProblem, *, device_type: str | None = None) -> Cut:
    """How much of the problem one call answers. Shape, dtype, options and the kind of device decide."""
    dims, dtype = problem.dims, problem.query.dtype
    per_pair = max(1, 2 * (dims.head_dim + dims.head_dim_v))
    if (device_type or problem.device.type) == "cpu":
        most = BLOCK_FLOPS[problem.compute_dtype] // per_pair
        pairs, long_pairs = min(most, BLOCK_PAIRS), min(2 * most, BLOCK_PAIRS)
    else:
        pairs = long_pairs = GPU_BLOCK_FLOPS.get(dtype, GPU_BLOCK_FLOPS_WIDE) // per_pair
    if dims.num_pairs <= min(pairs, MASK_BLOCK_PAIRS):
        return Cut(dims.batch, dims.num_heads, dims.seq_len_q)
    one_head, is_causal = dims.seq_len_q * dims.seq_len_kv, is_square_causal(problem)
    if is_causal:
        # While its rows are together, torch leaves out what lies behind the diagonal, and threads share whole heads.
        one_head //= 2
        found = cut_heads_first(dims, 2 * (pairs if 2 * one_head <= pairs else long_pairs))
        found = replace(found, heads=_power_of_two(found.heads, unit=dims.group_size))
    else:
        found = cut_heads_first(dims, pairs)
    rows = dims.seq_len_q
    if one_head > pairs:
        rows = _most_rows(rows, dims.seq_len_kv, pairs, long_pairs)
        rows, found = (min(rows, CAUSAL_ROWS), replace(found, heads=1)) if is_causal else (rows, found)
    if needs_mask(problem):
        items, heads = problem.masks_apart
        per_row = max(1, (found.items if items else 1) * (found.heads if heads else 1) * dims.seq_len_kv)
        rows = min(rows, _most_rows(dims.seq_len_q, per_row, MASK_BLOCK_PAIRS, MASK_BLOCK_PAIRS))
    return replace(found, rows=rows)


def _power_of_two(number: int, *, unit: int) -> int:
    """The largest power of two up to ``number``, in ``unit``s where it is one or more of them."""
    unit = unit if number >= unit else 1
    return int(unit * 2 ** (number // unit).bit_length() // 2)


def _most_rows(seq_len_q: int, per_row: int, pairs: int, long_pairs: int) -> int:
    """How many rows of ``per_row`` pairs a block has: ``pairs`` at most, ``long_pairs`` where these are few rows."""
    if seq_len_q * per_row <= pairs:
        return seq_len_q
    most = pairs // per_row
    if most < LONG_ROWS:
        most = min(LONG_ROWS, long_pairs // per_row)
    multiple = BLOCK_ROW_MULTIPLE if most >= BLOCK_ROW_MULTIPLE else ROW_MULTIPLE
    return even(seq_len_q, max(1, most // multiple) * multiple, multiple=multiple)


def is_cut(problem: CanonicalProblem) -> bool:
    """Whether the problem is answered by more than one call."""
    return not cut(problem).leaves_whole(problem.dims)


def is_band(problem: CanonicalProblem) -> bool:
    """Whether the distance of query and key alone says what is forbidden."""
    return not problem.is_ragged and not problem.has_pair_masks and not problem.forbids_nothing


def plain(query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool, shares_heads: bool) -> Tensor:
    """context of one call without a mask, of tensors ``[batch, heads, tokens, width]`` without hazards."""
    context = F.scaled_dot_product_attention(
        query, key, value, dropout_p=0.0, is_causal=is_causal, scale=scale, enable_gqa=shares_heads
    )
    return context.add_(SIGNLESS_ZERO) if is_causal else context


def attend(
    problem: CanonicalProblem, checkpoint: Checkpoint = never_abandoned, *, like: CanonicalProblem | None = None
) -> KernelOutput:
    """context and, where asked, logsumexp of a problem without hazards.

    A part of a problem gets the bits that it has in the whole where it is cut ``like`` that.
    """
    dims = problem.dims
    problem = with_unit_strides(problem)
    size = cut(problem)
    if like is not None:
        size = replace(size, rows=cut(like).rows)
    if size.leaves_whole(dims):
        mask, empty = _mask(problem)
        if mask is not None:
            checkpoint()
        outputs = _asked(problem, *_call(problem, mask, empty))
        whole = None if empty is None else empty.expand(dims.batch, dims.num_heads, dims.seq_len_q)
        return KernelOutput(outputs=outputs, empty=whole)
    outputs = {name: new_output(problem, name) for name in problem.outputs}
    marks = None
    if needs_mask(problem):
        marks = torch.empty(dims.batch, dims.num_heads, dims.seq_len_q, dtype=torch.bool, device=problem.device)
    by_item, by_head = problem.masks_apart
    made: tuple[object, ...] | None = None
    mask = empty = None
    for items, heads, rows in size.blocks(dims, row_multiple=ROW_MULTIPLE):
        checkpoint()
        part = problem.part(items, heads, rows)
        if is_band(part) and size.rows < dims.seq_len_q and problem.device.type == "cpu":
            empty = part.empty_rows()
            context, lse = _call_band(part, empty)
        else:
            own = (rows.start, items.start if by_item else None, heads.start if by_head else None)
            if own != made:
                # The old mask goes before a new one comes.
                mask = empty = None
                mask, empty = _mask(part)
                made = own
                checkpoint()
            context, lse = _call(part, mask, empty)
        for name, found in _asked(problem, context, lse).items():
            outputs[name][items, heads, rows] = found
        # The old answer goes before a new one comes.
        del context, lse, found
        if marks is not None:
            assert empty is not None
            marks[items, heads, rows] = empty
    return KernelOutput(outputs=outputs, empty=marks)


def _mask(problem: CanonicalProblem) -> tuple[Tensor | None, Tensor | None]:
    """The mask for SDPA, and which rows it leaves empty, both to be spread; neither where SDPA needs none."""
    if not needs_mask(problem):
        return None, None
    allowed = problem.allowed(problem.all_rows())
    assert allowed is not None
    empty = ~allowed.any(dim=-1)
    mask = allowed.expand(*allowed.shape[:3], problem.dims.seq_len_kv)
    if problem.bias is not None or "logsumexp" in problem.outputs:
        mask = _as_number(problem, mask)
    return mask, empty


def _call(problem: CanonicalProblem, mask: Tensor | None, empty: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """context and, where asked, logsumexp by one call."""
    is_causal = mask is None and is_square_causal(problem)
    lse = None
    if "logsumexp" in problem.outputs:
        # The public call does not return it. This operator checks nothing, so all of it was checked before.
        context, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            problem.query, problem.key, problem.value, 0.0, is_causal, attn_mask=mask, scale=problem.scale
        )
    else:
        context = F.scaled_dot_product_attention(
            problem.query,
            problem.key,
            problem.value,
            attn_mask=mask,
            dropout_p=0.0,
            is_causal=is_causal,
            scale=problem.scale,
            enable_gqa=problem.dims.group_size > 1,
        )
    if is_causal or mask is not None:
        context.add_(SIGNLESS_ZERO)
    if empty is not None:
        context.masked_fill_(empty.unsqueeze(-1), EMPTY_CONTEXT)
        lse = None if lse is None else lse.masked_fill(empty, EMPTY_LOGSUMEXP)
    return context, lse


def _call_band(problem: CanonicalProblem, empty: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same for a band of allowed keys beside the diagonal: only its keys are read, and its mask takes no memory.

    With the rows from last to first, row i' and key j of the mask hold number i' + j of one vector::

        row 2   0 0 0 0       vector  0 0 0 0 x x
        row 1   0 0 0 x
        row 0   0 0 x x
    """
    dims, offset, device = problem.dims, problem.query_offset, problem.device
    assert isinstance(offset, int)
    widest = dims.seq_len_q + dims.seq_len_kv + abs(offset)
    left = widest if problem.window_left is None else min(problem.window_left, widest)
    right = widest if problem.window_right is None else min(problem.window_right, widest)
    right = 0 if problem.causal else right
    first = min(max(0, offset - left), dims.seq_len_kv - 1)
    end = max(first + 1, min(dims.seq_len_kv, offset + dims.seq_len_q + right))
    distances = torch.arange(dims.seq_len_q + end - first - 1, device=device) + (first - dims.seq_len_q + 1 - offset)
    vector = torch.zeros(distances.shape, dtype=problem.query.dtype, device=device)
    vector.masked_fill_((distances < -left) | (distances > right), -math.inf)
    turned = replace(
        problem,
        query=problem.query.flip(2),
        key=problem.key[:, :, first:end],
        value=problem.value[:, :, first:end],
        dims=replace(dims, seq_len_kv=end - first),
    )
    mask = vector.as_strided((1, 1, dims.seq_len_q, end - first), (0, 0, 1, 1))
    context, lse = _call(turned, mask, empty.flip(2))
    return context.flip(2), None if lse is None else lse.flip(2)


def _as_number(problem: CanonicalProblem, allowed: Tensor) -> Tensor:
    """The mask as SDPA adds it, in the dtype of the query: the bias at allowed pairs, -inf at the others."""
    dtype = problem.query.dtype
    if problem.bias is None:
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)
    bias = problem.bias.to(dtype)
    if bias is not problem.bias and bias.shape == allowed.shape:
        return bias.masked_fill_(~allowed, -math.inf)
    return bias.masked_fill(~allowed, -math.inf)


def with_unit_strides(problem: CanonicalProblem) -> CanonicalProblem:
    """The problem with each vector of query, key and value in one piece of memory."""
    operands = {"query": problem.query, "key": problem.key, "value": problem.value}
    strided = {name: tensor.contiguous() for name, tensor in operands.items() if tensor.stride(-1) != 1}
    return replace(problem, **strided) if strided else problem  # type: ignore[arg-type]


def _asked(problem: CanonicalProblem, context: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
    found = {"context": context, "logsumexp": lse}
    return {name: tensor for name in problem.outputs if (tensor := found[name]) is not None}
