"""The other servers: what each runs in, what it is asked with and how it answers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.cells import GRPC, JSON, SAFETENSORS, V2, Format, Inputs, decode_raw, grpc_of, join, v2_of
from tests.benchmarks.peers.install import python_of
from tests.benchmarks.processes import KEEPS_MEMORY, Server, running


class NoSuchPeer(Exception):
    """A name that no peer has."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that answers the same attention, run as ``python -m MODULE PORT FOLDER ARGUMENTS`` by its venv's Python,
    or by the one that runs this.

    ``formats`` says how it is asked in the cells of each of our formats; it takes no part in others. The folder is its
    own and empty. ``is_optional``: runs when named and not otherwise.
    """

    name: str
    venv: str | None
    module: str
    formats: Mapping[str, Format]
    arguments: tuple[str, ...] = ()
    ready_path: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    is_optional: bool = False


def _encode_raw(inputs: Inputs) -> tuple[bytes, bytes]:
    return b"", join(inputs)


RAW = Format("raw", "application/octet-stream", _encode_raw, decode_raw)
TRITON_MODEL = "attention"
TRITON_V2 = v2_of(TRITON_MODEL, "triton_v2")
TRITON_GRPC = grpc_of(TRITON_MODEL, "triton_grpc")
GRPCAIO_RAW = Peer("grpcaio_raw", None, "tests.benchmarks.peers.grpcaio_raw", {GRPC.name: GRPC})
"""Runs in every cell of gRPC, as the echo does in all: what Python's gRPC can reach."""
TRITON_HTTP_PEER = Peer(
    "triton_http",
    "triton",
    "tests.benchmarks.peers.triton",
    {SAFETENSORS.name: TRITON_V2, V2.name: TRITON_V2},
    arguments=("http",),
    ready_path="/v2/health/ready",
)
# It listens once its models are loaded.
TRITON_GRPC_PEER = Peer(
    "triton_grpc", "triton", "tests.benchmarks.peers.triton", {GRPC.name: TRITON_GRPC}, arguments=("grpc",)
)
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
    TRITON_HTTP_PEER,
    TRITON_GRPC_PEER,
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


@contextlib.contextmanager
def running_peer(peer: Peer, port: int, folder: Path) -> Iterator[Server]:
    """A peer that is ready. Raises: NotInstalled, ServerFailed."""
    own_folder = folder / peer.name
    own_folder.mkdir()
    with running(
        peer.name,
        ["-m", peer.module, str(port), str(own_folder), *peer.arguments],
        port=port,
        folder=folder,
        environment=peer.environment,
        ready_path=peer.ready_path,
        exit_codes=None,
        python=Path(sys.executable) if peer.venv is None else python_of(peer.venv),
    ) as server:
        yield server
