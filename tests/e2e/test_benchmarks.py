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

import pytest

CELLS = ("tiny/safetensors/c1", "mixed/safetensors/c64", "tiny/json/c1")
PEERS = ["fastapi_raw", "fastapi_json", "triton_http"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator needs a C compiler")
def test_a_short_benchmark_runs_to_its_end(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["--rounds", "1", "--seconds", "0.05", "--cells", ",".join(CELLS), "--peers", "all"]
    command = [sys.executable, "-m", "tests.benchmarks.serving", *arguments, "--json", str(figures)]
    environment = {**os.environ, "PEERS_ENV": str(tmp_path / "nothing is installed here")}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    written = json.loads(figures.read_text())
    assert [cell["name"] for cell in written["cells"]] == list(CELLS)
    assert {goal["cell"] for goal in written["goals"]} < set(CELLS)
    for name in CELLS:
        assert name in ran.stdout
    assert [failure.partition(" ")[0] for failure in written["peers_left_out"]] == PEERS
