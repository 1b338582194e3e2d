"""Autocast: which ops it converts, and gradient modes inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def may_convert(operation: Any, device: str) -> bool:
    """Return whether autocast may convert operands of the op, or convert inside it.

    It may if the op has an autocast kernel or is composite. Uses
    ``torch._C._dispatch_has_kernel_for_dispatch_key``; returns True if unknown.
    """
    known = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    schema = getattr(operation, "_schema", None)
    if known is None or schema is None:
        return True
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    try:
        return any(
            known(name, key) for key in (f"Autocast{device.upper()}", "CompositeImplicitAutograd")
        )
    except RuntimeError:  # a device type without its own dispatch key
        return True


@contextmanager
def enable_autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Enable autocast of a device type, without a cache, also if torch finds no such device.

    ``torch.autocast`` disables itself without the device; its policy also applies to fake tensors.
    Uses the setters that ``torch.autocast`` calls.
    """
    enabled, before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, before)


@contextmanager
def keep_gpu_autocast() -> Iterator[None]:
    """Make ``torch.autocast("cuda")`` enter its region on a machine without a GPU.

    Patches the two functions by which it disables or rejects itself:
    ``torch.cuda.amp.common.amp_definitely_not_available`` and ``torch.cuda.is_bf16_supported``.
    """
    common: Any = getattr(torch.cuda.amp, "common", None)
    name = "amp_definitely_not_available"
    if torch.cuda.is_available() or not hasattr(common, name):
        yield
        return
    missing, supported = getattr(common, name), torch.cuda.is_bf16_supported
    setattr(common, name, lambda: False)
    torch.cuda.is_bf16_supported = lambda *given: True
    try:
        yield
    finally:
        setattr(common, name, missing)
        torch.cuda.is_bf16_supported = supported


@contextmanager
def grad_modes_kept() -> Iterator[None]:
    """Make torch.export keep ``torch.no_grad`` inside ``torch.autocast``.

    Its pass splits the graph where the gradient mode changes, starts each part with the surrounding
    autocast, and then identifies a part only by its first node, so the gradient mode is lost.
    Patches the private ``_is_set_grad_enabled_sub_mod`` of
    ``torch._export.passes.replace_set_grad_with_hop_pass`` to look past that node; does nothing if
    it is missing.
    """
    try:
        from torch._export.passes import replace_set_grad_with_hop_pass as changing
    except ImportError:
        yield
        return
    original = getattr(changing, "_is_set_grad_enabled_sub_mod", None)
    if original is None:
        yield
        return

    def known(node: Any, omit_if_same_with_ambient: bool = False) -> Any:
        if node.op != "call_module":
            return False
        inside = getattr(node.graph.owning_module, str(node.target)).graph.nodes
        ours = (torch.amp.autocast_mode._enter_autocast,)
        first = next((n for n in inside if n.op != "placeholder" and n.target not in ours), None)
        if first is None or first.target is not torch._C._set_grad_enabled:
            return False
        return first.args[0] != torch.is_grad_enabled() if omit_if_same_with_ambient else True

    changing._is_set_grad_enabled_sub_mod = known
    try:
        yield
    finally:
        changing._is_set_grad_enabled_sub_mod = original
