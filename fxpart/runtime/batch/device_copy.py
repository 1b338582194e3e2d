"""Copy tensors of a batch to a device without waiting for it."""

from __future__ import annotations

import torch


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device.

    A copy from the CPU to a GPU goes through pinned memory of its own, so the host does not wait
    for the GPU, and the caller may overwrite the tensor. torch reuses the pinned memory when the
    GPU has read it.
    """
    if tensor.device == device:
        return tensor
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    pinned = torch.empty_like(tensor, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)
