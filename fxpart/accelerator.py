"""The accelerator of this process: its device type in torch, and what torch offers for it.

torch.cuda serves NVIDIA and AMD GPUs; other accelerators have a module with the same functions,
which ``torch.get_device_module`` returns.
"""

from __future__ import annotations

from typing import Any

import torch

CUDA = "cuda"
_UNSUPPORTED = ("cpu", "mps")  # torch.mps has no memory statistics and no functions per device.


def find_accelerator() -> str | None:
    """Return the device type of this process's accelerator, None if torch finds none."""
    if torch.cuda.is_available():
        return CUDA
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in _UNSUPPORTED else found.type


def count_accelerators() -> int:
    """Return the number of devices of the accelerator that this process sees."""
    found = find_accelerator()
    return 0 if found is None else int(get_device_module(found).device_count())


def get_device_module(device: torch.device | str) -> Any:
    """Return torch's module for an accelerator: ``torch.cuda`` and the like."""
    return torch.get_device_module(torch.device(device))


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes asynchronously, in memory of its own."""
    return device.type not in ("cpu", "meta")


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work; a CPU has nothing pending."""
    if is_accelerator(device):
        get_device_module(device).synchronize(device)


def allocate_pinned(like: torch.Tensor, form: torch.memory_format) -> torch.Tensor:
    """Return an empty CPU tensor of this shape and dtype that accelerators copy directly."""
    return torch.empty_like(like, device="cpu", memory_format=form, pin_memory=True)
