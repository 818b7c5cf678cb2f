"""The benchmark runs, checks the answers it measures, and writes its figures; how fast it was is no matter here.

Peers are not installed for it, and it goes on without them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CELLS = ("tiny/safetensors/c1", "mixed/safetensors/c64", "tiny/json/c1", "tiny/v2/c1")
GRPC_CELL = "tiny/grpc/c32"
NO_GRPC_GENERATOR = "bench: the load generator of gRPC needs "
"""What it ends with where no cell is left but those of gRPC, and nothing here builds their load."""
PEERS = ["fastapi_raw", "fastapi_json", "triton_http", "triton_grpc"]
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator needs a C compiler")


@needs_compiler
def test_a_short_benchmark_runs_to_its_end(tmp_path: Path) -> None:
    asked = [*CELLS, GRPC_CELL]
    # Nothing is called like this compiler: the cell of gRPC is left out, as on a machine that cannot build its load.
    ran, written = _bench(tmp_path, "--cells", ",".join(asked), "--peers", "all", CXX="no-compiler-is-called-this")
    assert [cell["name"] for cell in written["cells"]] == list(CELLS)
    assert {goal["cell"] for goal in written["goals"]} < set(CELLS)
    for name in CELLS:
        assert name in ran.stdout
    left_out_cells, *left_out_peers = written["left_out"]
    assert "cells of gRPC are left out" in left_out_cells
    assert "no-compiler-is-called-this" in left_out_cells
    assert [failure.partition(" ")[0] for failure in left_out_peers] == PEERS


@needs_compiler
def test_grpc_is_measured_beside_a_bare_server(tmp_path: Path) -> None:
    _, written = _bench(tmp_path, "--cells", GRPC_CELL)
    (cell,) = written["cells"]
    assert cell["name"] == GRPC_CELL
    assert cell["requests_over_peers"].keys() == {"grpcaio_raw"}
    assert [goal["what"] for goal in written["goals"]] == ["requests/s / grpcaio_raw"]
    assert written["left_out"] == []


def _bench(
    folder: Path, *arguments: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    figures = folder / "figures.json"
    command = [sys.executable, "-m", "tests.benchmarks.serving", "--rounds", "1", "--seconds", "0.05", *arguments]
    environment = {**os.environ, "PEERS_ENV": str(folder / "nothing is installed here"), **environment}
    ran = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True, env=environment)
    if ran.stderr.startswith(NO_GRPC_GENERATOR):
        pytest.skip(ran.stderr)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran, json.loads(figures.read_text())
