"""Triton with its Python backend: the tritonserver binary that nvidia-pytriton ships, without pytriton's proxy.

Run as ``python -m tests.benchmarks.peers.triton PORT FOLDER http|grpc``; the folder gets the backend and the model.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

MODEL = Path(__file__).with_name("triton_model.py")
MODEL_NAME = "attention"
CONFIGURATION = """\
name: "attention"
backend: "python"
max_batch_size: 16
input [
  { name: "query" data_type: TYPE_FP32 dims: [ -1, -1, -1 ] },
  { name: "key" data_type: TYPE_FP32 dims: [ -1, -1, -1 ] },
  { name: "value" data_type: TYPE_FP32 dims: [ -1, -1, -1 ] }
]
output [ { name: "context" data_type: TYPE_FP32 dims: [ -1, -1, -1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
dynamic_batching { max_queue_delay_microseconds: 0 }
"""


def main(port: int, folder: Path, protocol: str) -> None:
    """Becomes tritonserver."""
    (other,) = {"http", "grpc"} - {protocol}
    spec = find_spec("pytriton")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    triton = package / "tritonserver"
    model = folder / "models" / MODEL_NAME
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIGURATION)
    shutil.copy(MODEL, model / "1" / "model.py")
    # The backend looks for the Python it runs models in beside itself, and its wheel holds one for each version.
    backend = folder / "backends" / "python"
    shutil.copytree(triton / "backends" / "python", backend)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(triton / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
    libraries = [str(package.parent / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
        # The backend's Python takes the first one on the path for its own home, and with it this venv's packages.
        "PATH": ":".join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    arguments = {
        "model-repository": folder / "models",
        "backend-directory": backend.parent,
        f"{protocol}-address": "127.0.0.1",
        f"{protocol}-port": port,
        f"allow-{other}": "false",
        "allow-metrics": "false",
        "log-info": "false",
        "exit-timeout-secs": 5,
    }
    os.execve(
        triton / "bin" / "tritonserver",
        ["tritonserver", "--disable-auto-complete-config", *(f"--{name}={value}" for name, value in arguments.items())],
        environment,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
