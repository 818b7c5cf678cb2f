"""The model that Triton's Python backend runs: SDPA; requests of one call are joined along the batch.

Triton calls it with requests of one shape only, as many as waited.
"""

from __future__ import annotations

from typing import Any

import torch
import triton_python_backend_utils as backend  # type: ignore[import-not-found]  # inside Triton only
from torch.nn.functional import scaled_dot_product_attention

NAMES = ("query", "key", "value")


class TritonPythonModel:
    """The name and the methods are Triton's."""

    def initialize(self, arguments: dict[str, str]) -> None:
        torch.set_num_threads(1)

    def execute(self, requests: list[Any]) -> list[Any]:
        columns = ([_tensor(request, name) for request in requests] for name in NAMES)
        query, key, value = (alike[0] if len(alike) == 1 else torch.cat(alike) for alike in columns)
        context = scaled_dot_product_attention(query, key, value).contiguous().numpy()
        answers, begin = [], 0
        for request in requests:
            end = begin + backend.get_input_tensor_by_name(request, NAMES[0]).as_numpy().shape[0]
            answers.append(backend.InferenceResponse([backend.Tensor("context", context[begin:end])]))
            begin = end
        return answers


def _tensor(request: Any, name: str) -> torch.Tensor:
    return torch.from_numpy(backend.get_input_tensor_by_name(request, name).as_numpy())
