"""Promise 4: every kernel within twice the error of the plain formula in its dtype, or one unit in the last place."""

from __future__ import annotations

import pytest
import torch

from tests.support.accuracy import MASKS, OUTPUTS_OF, hard_problems, worst_ratio
from tests.support.factory import DTYPES

GRID = {
    1: MASKS,
    2: ("lower_right",),
    7: MASKS,
    16: ("mask and bias",),
    17: MASKS,
    64: ("nothing", "causal alibi"),
    # Sums of so many equal numbers are off as far as each of them.
    257: ("sinks",),
}
"""Lengths and their masks; ``python -m tests.benchmarks.accuracy`` goes over many more."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", OUTPUTS_OF)
def test_worst_error_of_a_kernel_is_within_the_promise(kernel: str, dtype: torch.dtype) -> None:
    for seq_len, masks in GRID.items():
        for name, problem in hard_problems(kernel, dtype, seq_len, masks):
            ratio, output = worst_ratio(problem)
            assert ratio <= 1.0, (name, output, ratio)
