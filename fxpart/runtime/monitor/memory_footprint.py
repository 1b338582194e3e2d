"""Memory of a rank's process during training: the baseline and the peak since.

On a CPU it is the process's resident set from Linux, on CUDA the allocator's statistics; neither
slows down a step. Live tensors can also be counted one by one, which is slow.
"""

from __future__ import annotations

import os
import resource
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpart.accelerator import get_device_module, is_accelerator, synchronize

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET = "5"  # See proc_pid_clear_refs(5): resets the peak to the current resident set.


@dataclass(frozen=True)
class MemoryPeaks:
    """Memory of one process on one device, in bytes.

    baseline: when the footprint was started. peak: the maximum since then; on CUDA that of
    allocated tensors. reserved: the maximum that CUDA's allocator reserved, elsewhere 0. live: the
    maximum of live tensors created since then, 0 if not counted. exact: False if the kernel could
    not reset an earlier, higher peak.
    """

    baseline: int
    peak: int
    reserved: int = 0
    live: int = 0
    exact: bool = True


class MemoryFootprint:
    """Memory of this process between ``start()`` and ``peaks()``; reusable.

    tensors: also count live tensors, on any device; every op then passes through Python.
    """

    def __init__(self, device: torch.device | None = None, *, tensors: bool = False) -> None:
        """device: by default the process's memory on the CPU."""
        self._device = device if device is not None and is_accelerator(device) else None
        self._live = LiveTensorCounter() if tensors else None
        self._baseline = 0
        self._exact = True

    def start(self) -> None:
        """Reset the peaks; the current memory becomes the baseline."""
        if self._device is not None:
            synchronize(self._device)
            module = get_device_module(self._device)
            module.reset_peak_memory_stats(self._device)
            self._baseline = module.memory_allocated(self._device)
        else:
            self._exact = _reset_peak()
            self._baseline = read_resident_bytes()
        if self._live is not None:
            self._live.start()

    def peaks(self) -> MemoryPeaks:
        """Return the peaks since ``start()``; measurement continues."""
        live = self._live.peak if self._live is not None else 0
        if self._device is not None:
            module = get_device_module(self._device)
            return MemoryPeaks(
                baseline=self._baseline,
                peak=module.max_memory_allocated(self._device),
                reserved=module.max_memory_reserved(self._device),
                live=live,
            )
        # Linux counts resident pages in batches: right after start() its peak may be slightly less.
        peak = max(read_peak_bytes(), self._baseline)
        return MemoryPeaks(baseline=self._baseline, peak=peak, live=live, exact=self._exact)

    def stop(self) -> None:
        """Stop counting live tensors, if enabled. Stop nested footprints in reverse order."""
        if self._live is not None:
            self._live.stop()


class LiveTensorCounter(TorchDispatchMode):
    """Counts the bytes of live storages that ops create, and their maximum.

    A storage counts once, with its full size, until it is freed. Temporary allocations within an op
    are not visible here; :mod:`fxpart.profiling.memory` measures them.
    """

    def __init__(self) -> None:
        """Start with zero bytes."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._on = False
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def start(self) -> None:
        """Reset the peak and start counting; live counted storages stay counted."""
        self.peak = self.now
        if not self._on:
            self._on = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop counting new tensors."""
        if self._on:
            self._on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and count the new storages of its results."""
        result = func(*args, **(kwargs or {}))
        old = {
            id(t.untyped_storage())
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in old:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def read_resident_bytes() -> int:
    """Return the resident bytes of this process, including shared libraries."""
    return _read_status("VmRSS") or _read_peak_usage()


def read_peak_bytes() -> int:
    """Return the peak resident bytes of this process since the last reset."""
    return _read_status("VmHWM") or _read_peak_usage()


def read_peak_memory(device: torch.device) -> int:
    """Return the peak bytes of tensors on a GPU, or resident bytes of this process for a CPU."""
    if is_accelerator(device):
        return int(get_device_module(device).max_memory_allocated(device))
    return read_peak_bytes()


def _reset_peak() -> bool:
    """Reset the kernel's peak to the current resident set; return whether it was possible."""
    try:
        _CLEAR.write_text(_RESET)
    except OSError:
        return False
    return True


def _read_status(name: str) -> int:
    """Return a field of Linux' process status in bytes, 0 if there is none."""
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(found[0]) if found else 0


def _read_peak_usage() -> int:
    """Return the peak resident set from getrusage: kibibytes, on macOS bytes."""
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
