"""KServe's client in a process of its own: its generated messages have the names that tritonclient's have, and only one
of them can be in a process. Run as ``python -m tests.contract.kserve_calls URL GRPC_ADDRESS FOLDER``.

Tensors come in ``inputs.safetensors``; what each call gave goes to ``calls.json``, numbers to ``NAME.safetensors``.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import kserve
import safetensors.numpy
from kserve import InferInput, InferRequest, InferResponse
from kserve.inference_client import RESTConfig


class Calls:
    """Each call by its name, and what became of it: a value, or status and text of the error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors = safetensors.numpy.load_file(folder / "inputs.safetensors")
        self.found: dict[str, Any] = {}

    def request(
        self, model: str, *, binary: bool = True, names: tuple[str, ...] = ("query", "key", "value")
    ) -> InferRequest:
        inputs = []
        for name in names:
            given = InferInput(name, list(self._tensors[name].shape), "FP32")
            given.set_data_from_numpy(self._tensors[name], binary_data=binary)
            inputs.append(given)
        return InferRequest(model_name=model, infer_inputs=inputs, request_id="k")

    async def note(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            result = await call()
        except httpx.HTTPStatusError as error:
            self.found[name] = {"status": error.response.status_code, "text": str(error)}
        except grpc.RpcError as error:
            self.found[name] = {"status": error.code().name, "text": error.details()}
        else:
            self.found[name] = self._written(name, result)

    def _written(self, name: str, result: Any) -> Any:
        if not isinstance(result, InferResponse):
            return result
        outputs = {output.name: output.as_numpy() for output in result.outputs}
        safetensors.numpy.save_file(outputs, self._folder / f"{name}.safetensors")
        return {"id": result.id, "model_name": result.model_name}


async def main(url: str, address: str, folder: Path) -> None:
    """Every call, over both doors."""
    calls = Calls(folder)
    rest, rpc = kserve.InferenceRESTClient(RESTConfig(protocol="v2")), kserve.InferenceGRPCClient(address)
    await calls.note("rest_live", lambda: rest.is_server_live(url))
    await calls.note("rest_ready", lambda: rest.is_server_ready(url))
    await calls.note("rest_model_ready", lambda: rest.is_model_ready(url, "sdpa"))
    await calls.note("rest_unknown_ready", lambda: rest.is_model_ready(url, "nothing"))
    await calls.note("rpc_live", rpc.is_server_live)
    await calls.note("rpc_ready", rpc.is_server_ready)
    await calls.note("rpc_model_ready", lambda: rpc.is_model_ready("sdpa"))
    await calls.note("rpc_unknown_ready", lambda: rpc.is_model_ready("nothing"))
    for form, binary in (("binary", True), ("numbers", False)):
        request = calls.request("sdpa", binary=binary)
        await calls.note(f"rest_{form}", functools.partial(rest.infer, url, request, model_name="sdpa"))
        await calls.note(f"rpc_{form}", functools.partial(rpc.infer, request))
    for fault, request in (
        ("missing_inputs", calls.request("sdpa", names=("query",))),
        ("unknown_model", calls.request("nothing")),
    ):
        await calls.note(f"rest_{fault}", functools.partial(rest.infer, url, request, model_name=request.model_name))
        await calls.note(f"rpc_{fault}", functools.partial(rpc.infer, request))
    await rest.close()
    await rpc.close()
    (folder / "calls.json").write_text(json.dumps(calls.found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
