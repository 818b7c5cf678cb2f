"""tritonclient's system shared memory, registered by one door and used by the other."""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.utils.shared_memory as shm
from torch import Tensor

from tests.contract.test_tritonclient import assert_same_bits, operands
from tests.contract.triton import KINDS, Client, InferenceServerException, client_of, status_of, tensor_of
from tests.support.server import RunningServer, running_server


@pytest.fixture(scope="module")
def sharing() -> Iterator[RunningServer]:
    with running_server(ATTN_SHARED_MEMORY="true") as running:
        yield running


@pytest.fixture(scope="module", params=KINDS)
def client(request: pytest.FixtureRequest, sharing: RunningServer) -> Iterator[Client]:
    with client_of(request.param, port=sharing.port, grpc_port=sharing.grpc_port) as connected:
        yield connected


@contextlib.contextmanager
def region(num_bytes: int) -> Iterator[tuple[str, str, Any]]:
    """A name for the server, the key, and tritonclient's handle of a region that is gone afterwards."""
    name = f"attn-test-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region(name, f"/{name}", num_bytes)
    try:
        yield name, f"/{name}", handle
    finally:
        shm.destroy_shared_memory_region(handle)


@contextlib.contextmanager
def registered(client: Client, tensors: dict[str, Tensor], result_bytes: int) -> Iterator[tuple[str, Any, int]]:
    """The tensors end to end in a registered region, then room for a result: name, handle, where the room begins."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    with region(total + result_bytes) as (name, key, handle):
        shm.set_shared_memory_region(handle, [tensor.numpy() for tensor in tensors.values()])
        client.call("register_system_shared_memory", name, key, total + result_bytes)
        try:
            yield name, handle, total
        finally:
            client.call("unregister_system_shared_memory", name)


def inputs_in(client: Client, name: str, tensors: dict[str, Tensor]) -> list[Any]:
    inputs, offset = [], 0
    for tensor_name, tensor in tensors.items():
        given = client.module.InferInput(tensor_name, list(tensor.shape), "FP32")
        given.set_shared_memory(name, tensor.nbytes, offset)
        offset += tensor.nbytes
        inputs.append(given)
    return inputs


def test_it_is_announced(client: Client) -> None:
    assert "system_shared_memory" in client.as_json("get_server_metadata")["extensions"]


@pytest.mark.parametrize("shape", [(1, 2, 16, 32), (1, 1, 3, 5)])
def test_inputs_and_outputs_lie_in_it(client: Client, shape: tuple[int, ...]) -> None:
    tensors = operands(*shape)
    expected = client.infer("sdpa", tensors, ["context"]).outputs["context"]
    size = math.prod(shape) * 4
    with registered(client, tensors, size) as (name, handle, room):
        output = client.module.InferRequestedOutput("context")
        output.set_shared_memory(name, size, room)
        result = client.call("infer", "sdpa", inputs_in(client, name, tensors), outputs=[output])
        (entry,) = result.get_response().outputs if client.is_grpc else result.get_response()["outputs"]
        assert list(entry.shape if client.is_grpc else entry["shape"]) == list(shape)
        assert client.is_grpc or set(entry) == {"name", "datatype", "shape"}
        found = shm.get_contents_as_numpy(handle, np.float32, list(shape), room)
        assert_same_bits({"context": tensor_of(found)}, {"context": expected})


def test_inputs_in_it_and_inline_are_mixed(client: Client) -> None:
    tensors = operands(1, 2, 4, 16)
    expected = client.infer("sdpa", tensors, ["context"]).outputs
    with registered(client, {"key": tensors["key"]}, 0) as (name, _, _):
        (key,) = inputs_in(client, name, {"key": tensors["key"]})
        query, value = client.inputs({"query": tensors["query"], "value": tensors["value"]})
        result = client.call("infer", "sdpa", [query, key, value], outputs=client.asked(["context"]))
        assert_same_bits(client.answer(result).outputs, expected)


def test_a_region_of_one_door_is_one_of_the_other(sharing: RunningServer) -> None:
    tensors = operands(1, 2, 4, 16)
    where: dict[str, Any] = {"port": sharing.port, "grpc_port": sharing.grpc_port}
    with client_of("http", **where) as http, client_of("grpc", **where) as grpc:
        expected = http.infer("sdpa", tensors, ["context"]).outputs
        with registered(http, tensors, 0) as (name, _, _):
            result = grpc.call("infer", "sdpa", inputs_in(grpc, name, tensors))
            assert_same_bits(grpc.answer(result).outputs, expected)
            (listed,) = http.call("get_system_shared_memory_status")
            assert listed["name"] == name and listed["key"] == f"/{name}" and listed["offset"] == 0
            regions = grpc.as_json("get_system_shared_memory_status", name)["regions"]
            assert int(regions[name]["byte_size"]) == listed["byte_size"]
        assert http.call("get_system_shared_memory_status") == []


def test_faults_are_told_and_nothing_is_written_past_the_end(client: Client) -> None:
    tensors = operands(1, 1, 4, 16)
    size = 4 * 16 * 4
    invalid, not_found, taken = (
        ("INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS") if client.is_grpc else ("400", "404", "400")
    )

    def refused(*arguments: Any, **options: Any) -> str:
        with pytest.raises(InferenceServerException) as error:
            client.call(*arguments, **options)
        return status_of(error.value)

    with registered(client, tensors, size) as (name, handle, room):
        assert refused("register_system_shared_memory", name, f"/{name}", 64) == taken
        assert refused("register_system_shared_memory", "other", f"/{name}", room + size + 1) == invalid
        assert refused("register_system_shared_memory", "other", f"/{name}", 8, offset=2**62) == invalid
        assert refused("register_system_shared_memory", "other", "/no-such-object", 64) == invalid
        assert refused("register_system_shared_memory", "other", "/../etc/passwd", 64) == invalid
        assert refused("get_system_shared_memory_status", "other") == not_found
        output = client.module.InferRequestedOutput("context")
        output.set_shared_memory(name, size - 4, room)
        guard = torch.full((size // 4,), 7.0)
        shm.set_shared_memory_region(handle, [guard.numpy()], offset=room)
        assert refused("infer", "sdpa", inputs_in(client, name, tensors), outputs=[output]) == invalid
        assert torch.equal(tensor_of(shm.get_contents_as_numpy(handle, np.float32, [size // 4], room)), guard)
        output.set_shared_memory(name, size, room + 8)
        assert refused("infer", "sdpa", inputs_in(client, name, tensors), outputs=[output]) == invalid
        outside = inputs_in(client, name, tensors)
        outside[0].set_shared_memory(name, size, 2**62)
        assert refused("infer", "sdpa", outside) == invalid
        wrong_size = inputs_in(client, name, tensors)
        wrong_size[0].set_shared_memory(name, size - 4, 0)
        assert refused("infer", "sdpa", wrong_size) == invalid
        unknown = inputs_in(client, "nowhere", tensors)
        assert refused("infer", "sdpa", unknown) == not_found
    client.call("unregister_system_shared_memory", "never-there")
    client.call("unregister_system_shared_memory")


def test_a_region_that_its_owner_cut_short_is_refused_and_the_server_lives(client: Client) -> None:
    tensors = operands(1, 4, 64, 64)
    total = sum(tensor.nbytes for tensor in tensors.values())
    with region(total) as (name, key, handle):
        shm.set_shared_memory_region(handle, [tensor.numpy() for tensor in tensors.values()])
        client.call("register_system_shared_memory", name, key, total)
        with open(f"/dev/shm{key}", "r+b") as file:
            file.truncate(4096)
        with pytest.raises(InferenceServerException) as refused:
            client.call("infer", "sdpa", inputs_in(client, name, tensors))
        assert status_of(refused.value) == ("INVALID_ARGUMENT" if client.is_grpc else "400")
        with open(f"/dev/shm{key}", "r+b") as file:
            file.truncate(total)
        client.call("unregister_system_shared_memory", name)
    assert client.call("is_server_ready")


def test_two_outputs_into_one_place_are_refused(client: Client) -> None:
    tensors = operands(1, 1, 4, 16)
    with registered(client, tensors, 1024) as (name, _, room):
        outputs = [client.module.InferRequestedOutput(output) for output in ("context", "weights")]
        for offset, output in zip((room, room + 64), outputs, strict=True):
            output.set_shared_memory(name, 256, offset)
        with pytest.raises(InferenceServerException) as refused:
            client.call("infer", "attention", inputs_in(client, name, tensors), outputs=outputs)
        assert status_of(refused.value) == ("INVALID_ARGUMENT" if client.is_grpc else "400")
        assert "weights" in refused.value.message() and "context" in refused.value.message()
