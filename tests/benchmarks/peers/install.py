"""Venvs of the peers, so that what they need stays away from what the service needs: ``python -m ...peers.install``.

Each has its own packages; torch, which is large, is lent from the venv that runs this. A venv that cannot be made is
named, and the bench then goes without its peers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import torch

from tests.benchmarks.processes import ROOT

CONSTRAINTS = "constraints.txt"
"""Of the service, where a peer shares packages with it."""
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "fastapi": ("fastapi", "pydantic", "uvicorn", "uvloop", "httptools", "numpy", "-c", CONSTRAINTS),
    "triton": ("nvidia-pytriton==0.7.0",),
    # Newer wheels need glibc 2.38. What its Python client needs is of no use here.
    "perf_analyzer": ("tritonclient==2.51.0", "nvidia-cuda-runtime-cu12==12.9.79", "--no-deps"),
}
DEFAULT_FOLDER = Path.home() / ".cache" / "attn-bench"
_SHOWN_CHARACTERS = 600
_LENT = Path(torch.__file__).parents[1]


class NotInstalled(Exception):
    """A venv that is not there, and why."""


def python_of(name: str) -> Path:
    """The Python of a venv of peers. Raises: NotInstalled."""
    folder = _folder(name)
    if not _is_whole(name, folder):
        raise NotInstalled(f"{folder} has no peers: make bench-peers installs them, or says why not")
    return folder / "bin" / "python"


def install(name: str) -> None:
    """Make a venv, unless it is there as it must be. Raises: NotInstalled."""
    folder = _folder(name)
    if _is_whole(name, folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    # pip also warns on stderr when all is well.
    installed = subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--prefer-binary", *REQUIREMENTS[name]],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if installed.returncode:
        raise NotInstalled(installed.stderr[-_SHOWN_CHARACTERS:])
    # Written once pip is done, or pip would take our packages for its own and install nothing.
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "lent_torch.pth").write_text(f"{_LENT}\n")
    _mark(folder).write_text(_recipe(name))


def _folder(name: str) -> Path:
    return Path(os.environ.get("PEERS_ENV", DEFAULT_FOLDER)) / name


def _mark(folder: Path) -> Path:
    return folder / "installed.txt"


def _recipe(name: str) -> str:
    requirements = REQUIREMENTS[name]
    constraints = [(ROOT / CONSTRAINTS).read_text()] if CONSTRAINTS in requirements else []
    return "\n".join([*requirements, *constraints, sys.version, str(_LENT)])


def _is_whole(name: str, folder: Path) -> bool:
    mark = _mark(folder)
    return mark.exists() and mark.read_text() == _recipe(name)


def main() -> None:
    for name in REQUIREMENTS:
        try:
            install(name)
        except (NotInstalled, OSError, subprocess.CalledProcessError) as error:
            print(f"peers in {name} are left out, their packages could not be installed: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
