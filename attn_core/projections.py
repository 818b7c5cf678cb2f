"""The products around an attention: tokens times a matrix, forward and backward, in blocks between checkpoints.

Arithmetic is that of ``compute_dtype``; what is stored in a half type is widened block by block. Matrices are
``[width_in, width_out]`` here, however they lie: a transposed one is a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.cut import even, even_runs, runs
from attn_core.errors import Checkpoint
from attn_core.maths.gradients import infinite_part
from attn_core.numerics import compute_dtype

BLOCK_FLOPS = {torch.float32: 2**31, torch.float64: 2**30}
"""What one block takes, by the dtype of the arithmetic: 20 to 45 ms of one core."""
FEWEST_ROWS = 512
"""Before a block gets fewer rows it gets fewer columns, so that the matrix is not read over and over."""
ROW_MULTIPLE = 32
COLUMN_MULTIPLE = 64
SUM_COLUMNS = 1024
SUM_COPY = 2**20
"""A sum over rows has blocks of both sides' columns, and copies no more numbers at once."""
ROWS_AT_ONCE = 128
"""Where numbers are not finite and rows have to be told apart."""
APART_AT_ONCE = 32
"""So many rows and columns of a sum over rows."""
NUMBERS_AT_ONCE = 2**24
"""So many numbers are copied, rounded or added up between two checkpoints."""
WIDENED_AT_ONCE = 2**18
"""So many are copied in the dtype of the arithmetic to be added up."""


@dataclass(frozen=True, slots=True)
class ProductCut:
    """The most rows of tokens and columns of the matrix that one block takes."""

    rows: int
    columns: int


def cut_product(num_rows: int, width_in: int, width_out: int, dtype: torch.dtype) -> ProductCut:
    """How a product ``[num_rows, width_in] @ [width_in, width_out]`` of numbers stored as ``dtype`` is cut."""
    most = BLOCK_FLOPS[compute_dtype(dtype)] // (2 * max(1, width_in))
    columns = even(
        width_out,
        _at_least(COLUMN_MULTIPLE, most // max(1, min(num_rows, FEWEST_ROWS))),
        multiple=COLUMN_MULTIPLE,
    )
    return ProductCut(even(num_rows, _at_least(ROW_MULTIPLE, most // columns), multiple=ROW_MULTIPLE), columns)


@dataclass(frozen=True, slots=True)
class SumCut:
    """The most rows, and columns of tokens and of their gradient, that one block of a sum over rows takes."""

    rows: int
    width: int
    columns: int


def cut_sum(num_rows: int, width_in: int, width_out: int, dtype: torch.dtype) -> SumCut:
    """How ``[num_rows, width_in]^T @ [num_rows, width_out]`` of tokens stored as ``dtype`` is cut."""
    width, columns = (even(axis, SUM_COLUMNS, multiple=COLUMN_MULTIPLE) for axis in (width_in, width_out))
    most = min(BLOCK_FLOPS[compute_dtype(dtype)] // (2 * width * columns), SUM_COPY // width)
    return SumCut(even(num_rows, _at_least(ROW_MULTIPLE, most), multiple=ROW_MULTIPLE), width, columns)


def _at_least(multiple: int, most: int) -> int:
    return max(multiple, most // multiple * multiple)


def project(
    tokens: Tensor, matrix: Tensor, bias: Tensor | None, checkpoint: Checkpoint, *, dtype: torch.dtype | None = None
) -> Tensor:
    """tokens @ matrix + bias, ``[rows, width_out]``, rounded once to ``dtype`` (None: the dtype of the arithmetic).

    A row depends on its own token alone, so a token that is not finite spoils no other.
    """
    num_rows, (width_in, width_out) = tokens.shape[0], matrix.shape
    arithmetic = compute_dtype(tokens.dtype)
    found = torch.empty(num_rows, width_out, dtype=dtype or arithmetic, device=tokens.device)
    size = cut_product(num_rows, width_in, width_out, tokens.dtype)
    for columns in even_runs(width_out, size.columns, multiple=COLUMN_MULTIPLE):
        own = matrix[:, columns].to(arithmetic)
        shift = None if bias is None else bias[columns].to(arithmetic)
        for rows in even_runs(num_rows, size.rows, multiple=ROW_MULTIPLE):
            checkpoint()
            target = found[rows, columns]
            block = target if found.dtype == arithmetic else torch.empty_like(target, dtype=arithmetic)
            torch.mm(tokens[rows].to(arithmetic), own, out=block)
            if shift is not None:
                block.add_(shift)
            if block is not target:
                target.copy_(block)
            del block
        del own
    return found


def add_product(total: Tensor, gradient: Tensor, matrix: Tensor, checkpoint: Checkpoint) -> None:
    """Add gradient @ matrix to ``total`` ``[rows, width_out]``, both in the dtype of the arithmetic.

    A row of ``gradient`` that is 0 throughout adds 0, whatever the matrix holds; on a GPU finding out what it holds
    waits for the stream.
    """
    num_rows, (width_in, width_out) = gradient.shape[0], matrix.shape
    size = cut_product(num_rows, width_in, width_out, gradient.dtype)
    for columns in even_runs(width_out, size.columns, multiple=COLUMN_MULTIPLE):
        checkpoint()
        own = matrix[:, columns].to(gradient.dtype)
        is_finite = _is_finite(own)
        for rows in even_runs(num_rows, size.rows, multiple=ROW_MULTIPLE):
            checkpoint()
            if is_finite:
                total[rows, columns].addmm_(gradient[rows], own)
                continue
            for few in runs(rows.stop - rows.start, ROWS_AT_ONCE):
                block = gradient[rows][few]
                dead = (block == 0).all(dim=1, keepdim=True)
                total[rows, columns][few] += (block @ own).masked_fill_(dead, 0.0)
        del own


def sum_of_products(
    tokens: Tensor,
    gradient: Tensor,
    checkpoint: Checkpoint,
    *,
    num_heads: int,
    live_rows: Callable[[slice], Tensor],
    is_transposed: bool,
) -> Tensor:
    """tokens^T @ gradient, the gradient of a matrix: ``[width_in, width_out]`` or that transposed, contiguous.

    ``gradient`` ``[rows, width_out]`` belongs to ``num_heads`` heads and has the dtype of the arithmetic, as the result
    has. ``live_rows`` tells of some rows which take part in which head, bool ``[rows, num_heads]``: where one does not,
    its gradient is 0, and what its token holds changes nothing, NaN too. It is asked where a token is not finite; on a
    GPU finding that out waits for the stream.
    """
    (num_rows, width_in), width_out = tokens.shape, gradient.shape[1]
    shape = (width_out, width_in) if is_transposed else (width_in, width_out)
    found = torch.zeros(shape, dtype=gradient.dtype, device=tokens.device)
    total = found.t() if is_transposed else found
    size = cut_sum(num_rows, width_in, width_out, tokens.dtype)
    for rows in even_runs(num_rows, size.rows, multiple=ROW_MULTIPLE):
        for part in even_runs(width_in, size.width, multiple=COLUMN_MULTIPLE):
            checkpoint()
            # A copy also where none is needed, so that not even a bit tells what is kept out of it.
            block = tokens[rows, part].to(gradient.dtype, copy=True)
            if not _is_finite(block):
                live = live_rows(rows)
                block.masked_fill_(~live.any(dim=1, keepdim=True), 0.0)
                _add_infinite_part(total[part], block, gradient[rows], live, checkpoint, num_heads=num_heads)
                block.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            for columns in even_runs(width_out, size.columns, multiple=COLUMN_MULTIPLE):
                checkpoint()
                total[part, columns].addmm_(block.t(), gradient[rows, columns])
            del block
    return found


def _add_infinite_part(
    total: Tensor, tokens: Tensor, gradient: Tensor, live: Tensor, checkpoint: Checkpoint, *, num_heads: int
) -> None:
    """What tokens that are not finite add to tokens^T @ gradient in the heads in which their rows are live."""
    width = gradient.shape[1] // num_heads
    for rows in runs(tokens.shape[0], APART_AT_ONCE):
        few = tokens[rows]
        if torch.isfinite(few).all():
            continue
        for head in range(num_heads):
            checkpoint()
            takes_part = live[rows, head].expand(1, APART_AT_ONCE, -1)
            for own in runs(width, APART_AT_ONCE):
                columns = slice(head * width + own.start, head * width + own.stop)
                coefficients = gradient[rows, columns].t().unsqueeze(0)
                allowed = takes_part[:, : own.stop - own.start]
                total[:, columns] += infinite_part(coefficients, few.unsqueeze(0), allowed)[0].t()


def rows_with_gradient(gradient: Tensor, num_heads: int) -> Tensor:
    """Which rows ``[rows, num_heads * width]`` are not 0 throughout a head: bool ``[rows, num_heads]``."""
    return (gradient.reshape(gradient.shape[0], num_heads, gradient.shape[1] // num_heads) != 0).any(dim=2)


def sum_of_rows(gradient: Tensor, checkpoint: Checkpoint) -> Tensor:
    """The sum over rows, the gradient of a projection's bias: ``[width]`` in the dtype of the arithmetic."""
    num_rows, width = gradient.shape
    total = torch.zeros(width, dtype=compute_dtype(gradient.dtype), device=gradient.device)
    for rows in runs(num_rows, _rows_summed(width, gradient.dtype)):
        checkpoint()
        total += gradient[rows].sum(dim=0, dtype=total.dtype)
    return total


def _rows_summed(width: int, dtype: torch.dtype) -> int:
    """How many rows are added up at once. torch copies numbers that are summed in another dtype."""
    return max(1, (NUMBERS_AT_ONCE if compute_dtype(dtype) == dtype else WIDENED_AT_ONCE) // width)


def rounded(tensor: Tensor, dtype: torch.dtype, checkpoint: Checkpoint) -> Tensor:
    """The tensor in another dtype, or itself."""
    if tensor.dtype == dtype:
        return tensor
    found = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    for run in runs(tensor.numel(), NUMBERS_AT_ONCE):
        checkpoint()
        found.view(-1)[run] = tensor.view(-1)[run]
    return found


def _is_finite(block: Tensor) -> bool:
    """Whether all numbers are finite, told by one sum; False too where that overflows."""
    return math.isfinite(block.sum().item())


def project_scratch(
    shape: tuple[int, int, int], *, tokens: torch.dtype, matrix: torch.dtype, result: torch.dtype
) -> int:
    """Bytes that ``project`` takes besides its result, for ``shape`` (rows, width_in, width_out) and these dtypes."""
    num_rows, width_in, width_out = shape
    arithmetic = compute_dtype(tokens)
    size = cut_product(num_rows, width_in, width_out, tokens)
    numbers = size.columns * (width_in + 1) if matrix != arithmetic else 0
    numbers += size.rows * width_in if tokens != arithmetic else 0
    numbers += size.rows * size.columns if result != arithmetic else 0
    return numbers * arithmetic.itemsize


def add_scratch(shape: tuple[int, int, int], *, matrix: torch.dtype) -> int:
    """Bytes that ``add_product`` takes besides."""
    num_rows, width_in, width_out = shape
    arithmetic = compute_dtype(matrix)
    size = cut_product(num_rows, width_in, width_out, matrix)
    widened = width_in * size.columns if matrix != arithmetic else 0
    few = min(size.rows, ROWS_AT_ONCE) * (width_in + size.columns)
    return (widened + few) * arithmetic.itemsize


def sum_scratch(shape: tuple[int, int, int], *, tokens: torch.dtype) -> int:
    """Bytes that ``sum_of_products`` takes besides its result, for tokens of a dtype."""
    size, wide = cut_sum(*shape, tokens), compute_dtype(tokens).itemsize
    # Of tokens that are not finite: marks and counts of some rows, and of some columns what they add.
    apart = min(size.rows, APART_AT_ONCE) * (wide + 4) + APART_AT_ONCE * (3 * wide + 4)
    return size.width * (size.rows * wide + apart)


def row_sum_scratch(num_rows: int, width: int, dtype: torch.dtype) -> int:
    """Bytes that ``sum_of_rows`` takes besides its result, for numbers stored as ``dtype``."""
    arithmetic = compute_dtype(dtype)
    copied = 0 if arithmetic == dtype else min(num_rows, _rows_summed(width, dtype))
    # The sum of some rows, before it is added.
    return (copied + 1) * width * arithmetic.itemsize
