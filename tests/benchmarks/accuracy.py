"""The table of promise 4: ``python -m tests.benchmarks.accuracy``.

The worst error of each kernel in each dtype over the allowed one, which is twice the error of the plain formula in that
dtype or one unit in the last place; and where that was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tests.support.accuracy import MASKS, OUTPUTS_OF, hard_problems, worst_ratio
from tests.support.factory import DTYPES

LENGTHS = "1,2,7,16,17,64,257,1024"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default=LENGTHS, help="T = S; the last ones take most of the time")
    lengths = [int(length) for length in parser.parse_args(arguments).lengths.split(",")]
    print(f"{'kernel':<8} {'dtype':<9} {'cases':>5} {'error/allowed':>13}  where")
    for kernel in OUTPUTS_OF:
        for dtype in DTYPES:
            number, worst, where = 0, 0.0, ""
            for seq_len in lengths:
                for name, problem in hard_problems(kernel, dtype, seq_len, MASKS):
                    number += 1
                    ratio, output = worst_ratio(problem)
                    if ratio > worst:
                        worst, where = ratio, f"{output}: {name}"
            print(f"{kernel:<8} {str(dtype).removeprefix('torch.'):<9} {number:>5} {worst:>13.3f}  {where}", flush=True)


if __name__ == "__main__":
    main()
