"""KServe's InferenceClient: health, inference and errors over both doors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch

from tests.contract.test_tritonclient import assert_same_bits, natively, operands
from tests.support.server import RunningServer

TENSORS = operands(1, 2, 5, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, server: RunningServer) -> Path:
    """Where the calls have left what they were answered."""
    path = tmp_path_factory.mktemp("kserve")
    safetensors.torch.save_file(TENSORS, path / "inputs.safetensors")
    address = f"127.0.0.1:{server.grpc_port}"
    command = [sys.executable, "-m", "tests.contract.kserve_calls", server.url, address, str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    calls: dict[str, Any] = json.loads((folder / "calls.json").read_text())
    return calls


@pytest.mark.parametrize("door", ["rest", "rpc"])
def test_health_is_told(found: dict[str, Any], door: str) -> None:
    assert found[f"{door}_live"] is True
    assert found[f"{door}_ready"] is True
    assert found[f"{door}_model_ready"] is True
    assert found[f"{door}_unknown_ready"] is False


@pytest.mark.parametrize("call", ["rest_binary", "rest_numbers", "rpc_binary", "rpc_numbers"])
def test_inference_gives_the_bits_of_the_native_door(
    found: dict[str, Any], folder: Path, client: httpx.Client, call: str
) -> None:
    assert found[call] == {"id": "k", "model_name": "sdpa"}
    expected, _ = natively(client, TENSORS)
    assert_same_bits(safetensors.torch.load_file(folder / f"{call}.safetensors"), expected)


@pytest.mark.parametrize(
    ("call", "status", "fragment"),
    [
        ("rest_missing_inputs", 400, "key"),
        ("rest_unknown_model", 404, "nothing"),
        ("rpc_missing_inputs", "INVALID_ARGUMENT", "key"),
        ("rpc_unknown_model", "NOT_FOUND", "nothing"),
    ],
)
def test_errors_are_read(found: dict[str, Any], call: str, status: int | str, fragment: str) -> None:
    assert found[call]["status"] == status
    assert fragment in found[call]["text"]
