"""tritonclient where keys are set: with one in its headers everything works, without it nothing but health."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.test_tritonclient import operands
from tests.contract.triton import KINDS, Client, InferenceServerException, client_of, status_of
from tests.support.server import RunningServer, running_server

KEY = "a-key"
SENT = [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}]


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    with running_server(ATTN_API_KEYS=KEY) as running:
        yield running


@pytest.fixture(scope="module", params=KINDS)
def client(request: pytest.FixtureRequest, locked: RunningServer) -> Iterator[Client]:
    with client_of(request.param, port=locked.port, grpc_port=locked.grpc_port) as connected:
        yield connected


@pytest.mark.parametrize("headers", SENT)
def test_with_a_key_everything_is_served(client: Client, headers: dict[str, str]) -> None:
    # tritonclient writes into the headers that it is given.
    headers = dict(headers)
    for _ in range(2):
        answer = client.infer("sdpa", operands(1, 1, 4, 16), ["context"], headers=headers)
        assert answer.outputs["context"].shape == (1, 1, 4, 16)
    assert client.as_json("get_server_metadata", headers=headers)["name"] == "attn"


@pytest.mark.parametrize("headers", [None, {"authorization": "Bearer another"}, {"x-api-key": ""}])
def test_without_one_nothing_but_health(client: Client, headers: dict[str, str] | None) -> None:
    headers = headers and dict(headers)
    assert client.call("is_server_live", headers=headers)
    assert client.call("is_server_ready", headers=headers)
    for call in (
        lambda: client.infer("sdpa", operands(1, 1, 4, 16), ["context"], headers=headers),
        lambda: client.as_json("get_server_metadata", headers=headers),
        lambda: client.as_json("get_inference_statistics", headers=headers),
    ):
        with pytest.raises(InferenceServerException) as refused:
            call()
        assert status_of(refused.value) == ("UNAUTHENTICATED" if client.is_grpc else "401")
        assert KEY not in refused.value.message()
