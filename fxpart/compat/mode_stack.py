"""Active torch modes of the calling thread, which have no public accessor."""

from __future__ import annotations

from typing import Any

import torch


def has_modes() -> bool:
    """Return whether any function mode, dispatch mode or saved-tensor hook is active.

    Uses ``torch._C._len_torch_function_stack``, ``_len_torch_dispatch_stack`` and
    ``torch._C._autograd._top_saved_tensors_default_hooks``; what cannot be read counts as inactive.
    """
    return bool(
        _number("_len_torch_function_stack")
        or _number("_len_torch_dispatch_stack")
        or has_saved_tensor_hooks()
    )


def active_modes() -> list[Any]:
    """Return the active function modes and dispatch modes, outermost first.

    Uses ``torch._C._get_function_stack_at`` and ``_get_dispatch_stack_at``.
    """
    found: list[Any] = []
    for kind in ("function", "dispatch"):
        at = getattr(torch._C, f"_get_{kind}_stack_at", None)
        if at is not None:
            found += [at(place) for place in range(_number(f"_len_torch_{kind}_stack"))]
    return found


def has_saved_tensor_hooks() -> bool:
    """Return whether saved tensors go through hooks of the caller."""
    autograd = getattr(torch._C, "_autograd", None)
    top = getattr(autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def default_device_of(mode: Any) -> torch.device | None:
    """Return the device of a ``torch.device`` or ``set_default_device`` context, else None.

    Uses ``torch.utils._device.DeviceContext``.
    """
    from torch.utils import _device

    kind = getattr(_device, "DeviceContext", None)
    if kind is None or not isinstance(mode, kind):
        return None
    return torch.device(mode.device)


def _number(name: str) -> int:
    read = getattr(torch._C, name, None)
    return 0 if read is None else int(read())
