"""Where tensors lie: on the host at addresses that give equal bits, on the way to a GPU in pinned memory, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
"""Where torch begins the tensors that it allocates on the host."""


def aligned(tensor: Tensor) -> Tensor:
    """The tensor where torch itself would have put it: on a multiple of 64 bytes, copied if need be.

    BLAS picks its instructions by the address, so the same numbers elsewhere in memory could give other bits.
    """
    if tensor.device.type != "cpu" or tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone()


def place(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on ``device``. From the host to a GPU they go through pinned memory, and nothing waits for them.

    On the host they stay where they are unless their address would change the bits.
    """
    if device.type == "cpu":
        return {name: aligned(tensor.to(device)) for name, tensor in tensors.items()}
    return {
        name: (tensor if tensor.device.type != "cpu" else tensor.pin_memory()).to(device, non_blocking=True)
        for name, tensor in tensors.items()
    }


def bring_back(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Results on the device that their problem came from; from a GPU to the host by one wait for all of them."""
    if device.type != "cpu" or all(tensor.device == device for tensor in tensors.values()):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    staged = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    torch.cuda.current_stream(next(iter(tensors.values())).device).synchronize()
    return staged
