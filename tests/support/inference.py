"""Requests of the Open Inference Protocol as anybody's client would write them, and answers as it would read them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import torch
from torch import Tensor

LENGTH = "Inference-Header-Content-Length"
DATATYPES = {
    torch.float32: "FP32",
    torch.float64: "FP64",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.int64: "INT64",
}
DTYPES = {name: dtype for dtype, name in DATATYPES.items()}


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def said(name: str, tensor: Tensor, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(tensor.shape), "datatype": DATATYPES[tensor.dtype], **more}


def json_body(tensors: dict[str, Tensor], **members: Any) -> bytes:
    inputs = [said(name, tensor, data=tensor.reshape(-1).tolist()) for name, tensor in tensors.items()]
    return json.dumps({"inputs": inputs, **members}).encode()


def binary_body(tensors: dict[str, Tensor], **members: Any) -> tuple[bytes, dict[str, str]]:
    """The body, and the header that goes with it."""
    data = [raw(tensor) for tensor in tensors.values()]
    inputs = [
        said(name, tensor, parameters={"binary_data_size": len(part)})
        for (name, tensor), part in zip(tensors.items(), data, strict=True)
    ]
    text = json.dumps({"inputs": inputs, **members}).encode()
    return text + b"".join(data), {LENGTH: str(len(text))}


def read_answer(answer: httpx.Response) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON part, and the outputs as tensors."""
    assert answer.status_code == 200, answer.text
    content = answer.content
    length = int(answer.headers[LENGTH]) if LENGTH in answer.headers else len(content)
    is_binary = LENGTH in answer.headers
    assert answer.headers["content-type"] == ("application/octet-stream" if is_binary else "application/json")
    members = json.loads(content[:length])
    outputs = {}
    for output in members["outputs"]:
        dtype = DTYPES[output["datatype"]]
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            flat = torch.tensor(output["data"], dtype=dtype)
        else:
            part, length = content[length : length + size], length + size
            flat = torch.frombuffer(bytearray(part), dtype=dtype) if part else torch.empty(0, dtype=dtype)
        outputs[output["name"]] = flat.view(output["shape"])
    assert length == len(content)
    return members, outputs
