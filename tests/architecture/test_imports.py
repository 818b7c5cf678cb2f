"""The core is pure torch: it imports torch, itself and the standard library, and of that nothing that waits."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = sorted((ROOT / "attn_core").rglob("*.py"))
WAITING = {"asyncio", "threading", "socket", "time", "logging", "os", "subprocess", "multiprocessing", "concurrent"}


def imported_modules(source: str) -> set[str]:
    """The full names of the modules that a source text imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_imports_torch_and_the_standard_library_alone(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imported_modules(path.read_text())}
    foreign = {top for top in tops if top not in ("torch", "attn_core") and top not in sys.stdlib_module_names}
    assert foreign == set()
    assert not tops & WAITING


@pytest.mark.parametrize("path", sorted((ROOT / "attn_core" / "kernels").glob("*.py")), ids=lambda path: path.name)
def test_kernel_imports_no_other_kernel(path: Path) -> None:
    kernels = {"fused", "manual", "reference"}
    if path.stem not in kernels:
        return
    others = {f"attn_core.kernels.{name}" for name in kernels - {path.stem}}
    assert not imported_modules(path.read_text()) & others


def test_reference_shares_no_code_with_the_maths_it_judges() -> None:
    names = imported_modules((ROOT / "attn_core" / "kernels" / "reference.py").read_text())
    assert not [name for name in names if name.startswith(("attn_core.maths", "attn_core.canonical"))]


def test_maths_imports_nothing_above_it() -> None:
    for path in (ROOT / "attn_core" / "maths").glob("*.py"):
        for name in imported_modules(path.read_text()):
            known = (
                "__future__",
                "collections.abc",
                "functools",
                "math",
                "torch",
                "attn_core.cut",
                "attn_core.numerics",
            )
            assert name in known or name.startswith("attn_core.maths"), (path.name, name)


def test_every_folder_of_tests_is_a_package() -> None:
    folders = [p for p in (ROOT / "tests").rglob("*") if p.is_dir() and p.name != "__pycache__"]
    hidden = {p for p in folders if any(part.startswith((".", "__pycache__")) for part in p.parts)}
    # What benchmarks leave behind is no part of the tests.
    missing = [p for p in folders if not (p / "__init__.py").exists() and "benchmarks" not in p.parts]
    assert not set(missing) - hidden
