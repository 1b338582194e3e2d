"""How much memory a rank's process needs while it trains: what it had before, and the peak since.

On a CPU the process's resident set as Linux keeps it, on CUDA the allocator's statistics; both cost
nothing while the steps run. Counting the live tensors one by one is possible beside it, and slow.
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

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET = "5"  # see proc_pid_clear_refs(5): the peak becomes what is resident now


@dataclass(frozen=True)
class MemoryPeaks:
    """Bytes of one process on one device.

    baseline: when the footprint was started. peak: the most since then; on CUDA of what tensors
    hold. reserved: the most that CUDA's allocator took from the device, elsewhere 0. live: the most
    that tensors made since then held at once, 0 where they were not counted. exact: whether peak is
    that since the start; otherwise the kernel would not forget an earlier, higher one.
    """

    baseline: int
    peak: int
    reserved: int = 0
    live: int = 0
    exact: bool = True


class MemoryFootprint:
    """Memory of this process between ``start()`` and ``peaks()``, as often as wanted.

    tensors: count the live tensors too, on any device: every op then passes through Python.
    """

    def __init__(self, device: torch.device | None = None, *, tensors: bool = False) -> None:
        """Of a device; by default the process's memory on the CPU."""
        self._device = device if device is not None and device.type == "cuda" else None
        self._live = LiveTensorCounter() if tensors else None
        self._baseline = 0
        self._exact = True

    def start(self) -> None:
        """Forget earlier peaks; what is held now is the baseline."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._baseline = torch.cuda.memory_allocated(self._device)
        else:
            self._exact = _forget_peak()
            self._baseline = read_resident_bytes()
        if self._live is not None:
            self._live.start()

    def peaks(self) -> MemoryPeaks:
        """The peaks since ``start()``; counting goes on."""
        live = self._live.peak if self._live is not None else 0
        if self._device is not None:
            return MemoryPeaks(
                baseline=self._baseline,
                peak=torch.cuda.max_memory_allocated(self._device),
                reserved=torch.cuda.max_memory_reserved(self._device),
                live=live,
            )
        # Linux counts resident pages in batches: just after start() its peak may be a little less.
        peak = max(read_peak_bytes(), self._baseline)
        return MemoryPeaks(baseline=self._baseline, peak=peak, live=live, exact=self._exact)

    def stop(self) -> None:
        """End the count of live tensors, if any. Of several footprints the last one first."""
        if self._live is not None:
            self._live.stop()


class LiveTensorCounter(TorchDispatchMode):
    """Counts the bytes of storages that ops make while it is on, and the most there were at once.

    Storages are counted once, whole, and until they are freed. What an op allocates and frees
    inside itself is not seen: :mod:`fxpart.profiling.memory` sees that.
    """

    def __init__(self) -> None:
        """Nothing counted yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._on = False
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def start(self) -> None:
        """Count from here; what lives already stays counted as it was."""
        self.peak = self.now
        if not self._on:
            self._on = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Count no new tensors."""
        if self._on:
            self._on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and count the storages of its results that are new."""
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
    """Bytes of this process that are in memory now, with those it shares (libraries)."""
    return _status("VmRSS") or _usage()


def read_peak_bytes() -> int:
    """The most bytes of this process that were in memory at once, since the last reset."""
    return _status("VmHWM") or _usage()


def _forget_peak() -> bool:
    """Set the kernel's peak to what is resident now; whether it could be."""
    try:
        _CLEAR.write_text(_RESET)
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    """A line of Linux' status of this process in bytes, 0 where there is none."""
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(found[0]) if found else 0


def _usage() -> int:
    """The process's highest resident set, as POSIX tells it: kibibytes, on macOS bytes."""
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
