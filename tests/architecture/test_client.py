"""What users import stands alone: beside the service, and beside whatever its callers may not have."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.architecture.test_imports import ROOT, imported_modules

CLIENT = sorted((ROOT / "service" / "client").rglob("*.py"))
# Those that need what only some callers bring: torch, and for a capture without a service attn_core.
BRINGING = {"capture", "hugging_face", "plot"}
PURE = ("errors", "answers", "retries")


def top_level_imports(path: Path) -> set[str]:
    """What is imported as the file is, and not only when a function of it runs."""
    body = ast.parse(path.read_text()).body
    outside: list[ast.stmt] = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    return imported_modules(ast.unparse(ast.Module(outside, [])))


def needs_no_more(path: Path) -> bool:
    parts = path.relative_to(ROOT / "service" / "client").with_suffix("").parts
    return BRINGING.isdisjoint(parts)


@pytest.mark.parametrize("path", [path for path in CLIENT if needs_no_more(path)], ids=lambda path: path.stem)
def test_the_client_imports_itself_and_what_every_caller_has(path: Path) -> None:
    for name in imported_modules(path.read_text()):
        top = name.partition(".")[0]
        if top == "service":
            assert name.startswith("service.client"), name
        else:
            assert top in sys.stdlib_module_names or top in ("httpx", "numpy", "orjson", "ml_dtypes"), name
    assert "ml_dtypes" not in top_level_imports(path)


@pytest.mark.parametrize("stem", PURE)
def test_what_is_decided_needs_no_wire_and_no_clock(stem: str) -> None:
    (path,) = [path for path in CLIENT if path.stem == stem and needs_no_more(path)]
    tops = {name.partition(".")[0] for name in imported_modules(path.read_text())}
    assert tops <= {"__future__", "collections", "dataclasses", "enum", "math", "typing"}
