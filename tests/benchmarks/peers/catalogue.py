"""The other servers: what each runs in, what it is asked with and how it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from tests.benchmarks.cells import JSON, NAMES, SAFETENSORS, Format, Inputs, Sizes, decode_raw, join, tensor_bytes
from tests.benchmarks.processes import KEEPS_MEMORY


class NoSuchPeer(Exception):
    """A name that no peer has."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that answers the same attention, run as ``python -m MODULE PORT FOLDER`` by its venv's Python.

    ``formats`` says how it is asked in the cells of each of our formats; it takes no part in others. The folder is its
    own and empty. ``is_optional``: runs when named and not otherwise.
    """

    name: str
    venv: str
    module: str
    formats: Mapping[str, Format]
    ready_path: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    is_optional: bool = False


def _encode_raw(inputs: Inputs) -> tuple[bytes, bytes]:
    return b"", join(inputs)


def _encode_v2(inputs: Inputs) -> tuple[bytes, bytes]:
    """The Open Inference Protocol with Triton's extension for binary tensors."""
    described = [
        {
            "name": name,
            "shape": list(tensor.shape),
            "datatype": "FP32",
            "parameters": {"binary_data_size": tensor.nbytes},
        }
        for name, tensor in zip(NAMES, inputs, strict=True)
    ]
    outputs = [{"name": "context", "parameters": {"binary_data": True}}]
    return json.dumps({"inputs": described, "outputs": outputs}).encode(), join(inputs)


def _decode_v2(body: bytes, sizes: Sizes) -> Tensor:
    data_at = len(body) - tensor_bytes(sizes)
    (output,) = json.loads(body[:data_at])["outputs"]
    return decode_raw(body[data_at:], tuple(output["shape"]))


RAW = Format("raw", "application/octet-stream", _encode_raw, decode_raw)
V2 = Format("v2", "application/octet-stream", _encode_v2, _decode_v2, path="/v2/models/attention/infer")
PEERS = (
    Peer("fastapi_raw", "fastapi", "tests.benchmarks.peers.fastapi_raw", {SAFETENSORS.name: RAW}),
    Peer(
        "fastapi_raw_malloc",
        "fastapi",
        "tests.benchmarks.peers.fastapi_raw",
        {SAFETENSORS.name: RAW},
        environment=KEEPS_MEMORY,
        is_optional=True,
    ),
    Peer("fastapi_json", "fastapi", "tests.benchmarks.peers.fastapi_json", {JSON.name: JSON}),
    Peer(
        "triton_http", "triton", "tests.benchmarks.peers.triton", {SAFETENSORS.name: V2}, ready_path="/v2/health/ready"
    ),
)


def select_peers(names: str | None) -> list[Peer]:
    """Peers by name, with commas between; ``all`` are those that are not optional.

    Raises: NoSuchPeer.
    """
    if names is None:
        return []
    if names == "all":
        return [peer for peer in PEERS if not peer.is_optional]
    asked = {name.strip() for name in names.split(",")}
    unknown = asked - {peer.name for peer in PEERS}
    if unknown:
        raise NoSuchPeer(f"no peer is called {', '.join(sorted(unknown))}: {', '.join(peer.name for peer in PEERS)}")
    return [peer for peer in PEERS if peer.name in asked]
