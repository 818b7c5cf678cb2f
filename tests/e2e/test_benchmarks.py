"""The benchmark runs, checks the answers it measures, and writes its figures; how fast it was is no matter here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator needs a C compiler")
def test_a_short_benchmark_runs_to_its_end(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.benchmarks.serving", "--rounds", "1", "--seconds", "0.1", "--cells", "tiny"]
    ran = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "tiny" in ran.stdout
    assert json.loads(figures.read_text())
