"""Measure the memory of computations and processes, by the allocator and by Linux."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fxpart.accelerator import get_device_module, is_accelerator, synchronize
from fxpart.profiling.processes import run_on_processes
from fxpart.runtime.monitor.memory_footprint import MemoryFootprint, read_resident_bytes

_MEMORY = "[memory]"


@dataclass(frozen=True)
class Allocations:
    """Bytes that a computation allocates from torch's allocator.

    peak: maximum above the state before. left: allocated bytes at the end.
    """

    peak: int
    left: int


def allocations(run: Callable[[], object], device: torch.device | None = None) -> Allocations:
    """Measure the allocations of ``run()`` on a device (by default the CPU), including workspaces.

    The CPU allocator is recorded by torch's profiler; memory that libraries take from the system
    directly (packed matrices of a BLAS) is not included. Call ``run`` once before to exclude
    one-time allocations. Its result is dropped before ``left`` is measured.
    """
    if device is not None and is_accelerator(device):
        return _measure_on_accelerator(run, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [
        (event.start_ns(), event.nbytes())
        for event in found.profiler.kineto_results.events()
        if event.name() == _MEMORY
    ]
    now = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        now += size
        peak = max(peak, now)
    return Allocations(peak, now)


def _measure_on_accelerator(run: Callable[[], object], device: torch.device) -> Allocations:
    """Measure by the statistics of the accelerator's allocator."""
    footprint = MemoryFootprint(device)
    footprint.start()
    run()
    synchronize(device)
    peaks = footprint.peaks()
    left = get_device_module(device).memory_allocated(device) - peaks.baseline
    return Allocations(peaks.peak - peaks.baseline, left)


@dataclass(frozen=True)
class ProcessMemoryGrowth:
    """Memory of a training process beyond its tensors.

    baseline: bytes after all tensors are freed: interpreter, libraries, and code loaded by the
    model's ops. overhead: further bytes at the peak, relative to the bytes of tensors:
    fragmentation of the heap, and memory that libraries take without the allocator.
    """

    baseline: int
    overhead: float


def growth(
    train: Callable[[], object], counted: Callable[[], object] | None = None
) -> ProcessMemoryGrowth:
    """Measure the memory growth of this process by its resident set (Linux).

    The process must not have had more tensors before than those of the model. train: builds a
    model, trains it, and frees it. counted: a shorter training with the same peak of tensors, whose
    allocations are recorded; by default ``train``.
    """
    release_free_memory()
    footprint = MemoryFootprint()
    footprint.start()
    train()
    peak = footprint.peaks().peak
    release_free_memory()
    left = read_resident_bytes()
    # Last, as the profiler itself leaves memory allocated.
    needed = allocations(counted or train).peak
    return ProcessMemoryGrowth(left, max(0.0, (peak - left) / needed - 1) if needed else 0.0)


def release_free_memory() -> None:
    """Return free memory to the system if the C library supports it (glibc's malloc_trim)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def baseline(ranks: int = 1, timeout: float = 120.0) -> int:
    """Return the bytes of a rank's process with torch and a process group, but without a model.

    This is the maximum over ``ranks`` new processes on this host.
    """
    target = f"{__name__}:bare"
    return max(int(row["resident"]) for row in run_on_processes(ranks, target, {}, timeout))


def bare(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Run on a process for :func:`baseline`: return its bytes after a first collective."""
    import torch.distributed as dist

    import fxpart.runtime  # noqa: F401  Loaded by every rank.

    del rank, world, payload
    dist.all_reduce(torch.zeros(1))
    warm()
    return {"resident": read_resident_bytes()}


def warm() -> None:
    """Train a tiny network once, so that code of libraries is loaded from disk."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.GELU(), torch.nn.Flatten(),
        torch.nn.Linear(16 * 36, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters())
    with torch.random.fork_rng(devices=[]):
        loss = torch.nn.functional.cross_entropy(
            net(torch.rand(4, 3, 8, 8)), torch.zeros(4, dtype=torch.long)
        )
    loss.backward()
    optimizer.step()
