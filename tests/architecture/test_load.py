"""A client process of the load test is light: it starts at once, and it takes little from what it measures."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["worker", "echo"])
def test_a_process_of_the_load_test_imports_neither_torch_nor_the_service(module: str) -> None:
    program = (
        f"import sys, service.load.{module}\n"
        "print([name for name in ('torch', 'fastapi', 'pydantic', 'plotly') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
