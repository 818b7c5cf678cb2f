"""The products around an attention: blocks of bounded work whose bits follow from the shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_core.errors import never_abandoned
from attn_core.projections import (
    BLOCK_FLOPS,
    COLUMN_MULTIPLE,
    ROW_MULTIPLE,
    SUM_COPY,
    add_product,
    cut_product,
    cut_sum,
    project,
    rounded,
    row_sum_scratch,
    rows_with_gradient,
    sum_of_products,
    sum_of_rows,
)
from tests.support.factory import DTYPES, make_tensor
from tests.support.memory import peak_bytes_of

SHAPES = [
    (1, 1, 1),
    (7, 33, 19),
    (2048, 768, 768),
    (64, 16384, 16384),
    (10**6, 64, 64),
    (512, 10**5, 64),
    (5000, 3, 9000),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_block_takes_more_than_its_share(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_rows, width_in, width_out = shape
    most = BLOCK_FLOPS[torch.float64 if dtype == torch.float64 else torch.float32]
    size = cut_product(*shape, dtype)
    smallest = 2 * min(num_rows, ROW_MULTIPLE) * width_in * min(width_out, COLUMN_MULTIPLE)
    assert 2 * size.rows * width_in * size.columns <= max(most, smallest) * 1.07
    whole = cut_sum(*shape, dtype)
    assert 2 * whole.rows * whole.width * whole.columns <= most * 1.07
    assert whole.rows * whole.width <= SUM_COPY * 1.07


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 2), (1, 1, 1), (7, 33, 19), (600, 1500, 3000)])
def test_products_in_blocks_are_the_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_rows, width_in, width_out = shape
    tokens = make_tensor(num_rows, width_in, dtype=dtype)
    matrix = make_tensor(width_in, width_out, seed=1, dtype=dtype, std=width_in**-0.5)
    bias = make_tensor(width_out, seed=2, dtype=dtype)
    exact = tokens.double() @ matrix.double() + bias.double()
    found = project(tokens, matrix, bias, never_abandoned)
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if dtype != torch.float64 else {"rtol": 1e-13, "atol": 1e-13}
    assert found.dtype == arithmetic
    torch.testing.assert_close(found.double(), exact, **near)
    turned = project(tokens, matrix.t().contiguous().t(), bias, never_abandoned)
    torch.testing.assert_close(turned.double(), exact, **near)
    stored = project(tokens, matrix, bias, never_abandoned, dtype=dtype)
    assert torch.equal(stored, found.to(dtype))
    gradient = make_tensor(num_rows, width_in, seed=3, dtype=arithmetic)
    total = found.clone()
    add_product(total, gradient, matrix, never_abandoned)
    torch.testing.assert_close(total.double(), exact + gradient.double() @ matrix.double(), **near)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 2), (1, 1, 4), (7, 33, 18), (3000, 1100, 1200)])
def test_sums_in_blocks_are_the_sums(shape: tuple[int, int, int], dtype: torch.dtype, is_transposed: bool) -> None:
    num_rows, width_in, width_out = shape
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    tokens = make_tensor(num_rows, width_in, dtype=dtype)
    gradient = make_tensor(num_rows, width_out, seed=1, dtype=arithmetic)

    def every_row(rows: slice) -> torch.Tensor:
        raise AssertionError("all numbers are finite")

    found = sum_of_products(
        tokens, gradient, never_abandoned, num_heads=2, live_rows=every_row, is_transposed=is_transposed
    )
    assert found.is_contiguous() and found.dtype == arithmetic
    exact = tokens.double().t() @ gradient.double()
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3} if dtype != torch.float64 else {"rtol": 1e-12, "atol": 1e-11}
    torch.testing.assert_close(found.double(), exact.t() if is_transposed else exact, **near)
    torch.testing.assert_close(
        sum_of_rows(gradient.to(dtype), never_abandoned).double(), gradient.to(dtype).double().sum(0), **near
    )


@pytest.mark.parametrize("shape", [(3, 2**20), (2000, 1024)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_rows_takes_no_more_than_is_counted(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gradient = make_tensor(*shape, dtype=dtype)
    found = sum_of_rows(gradient, never_abandoned)
    torch.testing.assert_close(found.double(), gradient.double().sum(0), rtol=1e-4, atol=1e-3)
    taken = peak_bytes_of(lambda: sum_of_rows(gradient, never_abandoned)) - found.nbytes
    assert taken <= row_sum_scratch(*shape, dtype)


@pytest.mark.parametrize("num_rows", [5, 300, 2100])
def test_tokens_that_take_no_part_are_never_read(num_rows: int) -> None:
    tokens, gradient = make_tensor(num_rows, 40), make_tensor(num_rows, 6, seed=1)
    gradient[1] = 0.0
    gradient[2, :3] = 0.0
    spoiled = tokens.clone()
    spoiled[1], spoiled[2] = torch.nan, torch.inf

    def total(of: torch.Tensor) -> torch.Tensor:
        return sum_of_products(
            of,
            gradient,
            never_abandoned,
            num_heads=2,
            live_rows=lambda rows: rows_with_gradient(gradient[rows], 2),
            is_transposed=False,
        )

    clean, found = total(tokens), total(spoiled)
    torch.testing.assert_close(found[:, :3], clean[:, :3], rtol=1e-5, atol=1e-4)
    assert not found[:, 3:].isfinite().any()


def test_row_of_zeros_adds_zeros_whatever_the_matrix_holds() -> None:
    gradient = make_tensor(300, 4)
    gradient[7] = 0.0
    total = torch.ones(300, 3)
    add_product(total, gradient, torch.full((4, 3), torch.inf), never_abandoned)
    assert torch.equal(total[7], torch.ones(3)) and not total[8:].isfinite().any()


def test_rounding_to_the_same_dtype_is_no_copy() -> None:
    tensor = make_tensor(3, 4)
    assert rounded(tensor, torch.float32, never_abandoned) is tensor
    assert torch.equal(rounded(tensor, torch.float16, never_abandoned), tensor.half())
