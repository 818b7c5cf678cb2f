"""Requests as other people's clients would write them, and answers as they would read them: none of our own code."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import safetensors.torch
import torch
from torch import Tensor

JSON, SAFETENSORS = "application/json", "application/vnd.safetensors"
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "int64": torch.int64,
    "int32": torch.int32,
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_lists(tensor: Tensor) -> Any:
    """Nested lists, NaN and infinities as strings."""

    def words(node: Any) -> Any:
        if isinstance(node, list):
            return [words(child) for child in node]
        if isinstance(node, float) and not math.isfinite(node):
            return "NaN" if math.isnan(node) else "Infinity" if node > 0 else "-Infinity"
        return node

    return words((tensor.double() if tensor.is_floating_point() else tensor).tolist())


def as_object(tensor: Tensor) -> dict[str, Any]:
    """The base64 form."""
    flat = tensor.contiguous().view(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    data = base64.b64encode(raw).decode()
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data": data}


def list_body(tensors: dict[str, Tensor], options: dict[str, Any]) -> bytes:
    """A JSON body of nested lists; what has a 0 in its shape is written as base64."""
    members: dict[str, Any] = {n: as_lists(t) if t.numel() else as_object(t) for n, t in tensors.items()}
    first = next(iter(tensors.values()))
    if first.numel() and first.dtype != torch.float32:
        members["dtype"] = dtype_name(first.dtype)
    return json.dumps(members | options).encode()


def object_body(tensors: dict[str, Tensor], options: dict[str, Any]) -> bytes:
    return json.dumps({name: as_object(tensor) for name, tensor in tensors.items()} | options).encode()


def safetensors_body(tensors: dict[str, Tensor], options: dict[str, Any]) -> bytes:
    contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    return safetensors.torch.save(contiguous, {"options": json.dumps(options)})


FORMS: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], bytes], str]] = {
    "lists": (list_body, JSON),
    "base64": (object_body, JSON),
    "safetensors": (safetensors_body, SAFETENSORS),
}
"""Every form of a body, and its content type."""


def ask(
    client: httpx.Client,
    path: str,
    form: str,
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> tuple[dict[str, Tensor], Any]:
    """Outputs and info of a request that is answered; nested lists hold the first tensor's dtype, or ``dtypes``."""
    write, content_type = FORMS[form]
    answer = client.post(path, content=write(tensors, options), headers={"content-type": content_type})
    assert answer.status_code == 200, answer.text
    return read_answer(
        answer.content,
        answer.headers["content-type"],
        dtypes or {},
        otherwise=next(iter(tensors.values())).dtype,
    )


def read_answer(
    content: bytes, content_type: str, dtypes: Mapping[str, torch.dtype], *, otherwise: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], Any]:
    """Outputs and info; ``dtypes`` says what nested lists hold, and those that it does not name ``otherwise``."""
    if content_type == SAFETENSORS:
        length = int.from_bytes(content[:8], "little")
        info = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["info"])
        return safetensors.torch.load(content), info
    members = strict_json(content)
    info = members.pop("info")
    return {name: read_tensor(value, dtypes.get(name, otherwise)) for name, value in members.items()}, info


def strict_json(content: bytes) -> Any:
    """JSON that has no NaN or Infinity words in it."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"the word {word} in an answer")

    return json.loads(content, parse_constant=refuse)


def read_tensor(value: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(value, dict):
        raw, shape = base64.b64decode(value["data"], validate=True), value["shape"]
        stored = _DTYPES[value["dtype"]]
        if not raw:
            return torch.empty(shape, dtype=stored)
        return torch.frombuffer(bytearray(raw), dtype=stored).view(shape)

    def numbers(node: Any) -> Any:
        return [numbers(child) for child in node] if isinstance(node, list) else float(node)

    return torch.tensor(numbers(value), dtype=torch.float64).to(dtype)
