"""Copy tensors of a batch to a device without waiting for it."""

from __future__ import annotations

import torch

from fxpart.accelerator import allocate_pinned, is_accelerator


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device.

    A copy from the CPU to a GPU goes through pinned memory of its own, so the host does not wait
    for the GPU, and the caller may overwrite the tensor. torch reuses the pinned memory when the
    GPU has read it.
    """
    if tensor.device == device:
        return tensor
    if not is_accelerator(device) or tensor.device.type != "cpu":
        return tensor.to(device)
    pinned = allocate_pinned(tensor, torch.preserve_format)
    return pinned.copy_(tensor).to(device, non_blocking=True)
