"""Bytes that computations and processes really take: the allocator's own account, and Linux'."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fxpart.profiling.processes import run_on_processes
from fxpart.runtime.monitor.memory_footprint import MemoryFootprint, read_resident_bytes

_MEMORY = "[memory]"


@dataclass(frozen=True)
class Allocations:
    """Bytes that a computation takes from torch's allocator.

    peak: the most that it held at once, above what there was before. left: what is still held.
    """

    peak: int
    left: int


def allocations(run: Callable[[], object], device: torch.device | None = None) -> Allocations:
    """What ``run()`` allocates and frees on a device (by default the CPU), workspaces of ops too.

    The CPU's allocator is followed through torch's profiler, event by event; what libraries take
    from the system without it (packed matrices of a BLAS) is not seen. Run it once before, so that
    nothing is made for the first time. What ``run`` returns is dropped before ``left`` is read.
    """
    if device is not None and device.type == "cuda":
        return _cuda(run, device)
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


def _cuda(run: Callable[[], object], device: torch.device) -> Allocations:
    """By the allocator's statistics."""
    footprint = MemoryFootprint(device)
    footprint.start()
    run()
    torch.cuda.synchronize(device)
    peaks = footprint.peaks()
    left = torch.cuda.memory_allocated(device) - peaks.baseline
    return Allocations(peaks.peak - peaks.baseline, left)


@dataclass(frozen=True)
class ProcessMemoryGrowth:
    """What a process that trains takes beside its tensors.

    baseline: bytes that are left when all of them are gone: the interpreter, libraries, and the
    code that the model's ops have made the system read. overhead: the share of the tensors' bytes
    by which it is larger at its peak than both together: an allocator keeps what was freed, in
    pieces that do not fit what comes next, and libraries take memory without it.
    """

    baseline: int
    overhead: float


def growth(
    train: Callable[[], object], counted: Callable[[], object] | None = None
) -> ProcessMemoryGrowth:
    """Measured on this process. train: makes a model, trains it, and leaves nothing of it behind.

    On Linux by the resident set; before, the process must not have had more tensors than the
    model's own. counted: a shorter training of which tensors take as much at once, whose
    allocations are followed; by default the same again.
    """
    release_free_memory()
    footprint = MemoryFootprint()
    footprint.start()
    train()
    peak = footprint.peaks().peak
    release_free_memory()
    left = read_resident_bytes()
    # Last: the profiler itself leaves much behind.
    needed = allocations(counted or train).peak
    return ProcessMemoryGrowth(left, max(0.0, (peak - left) / needed - 1) if needed else 0.0)


def release_free_memory() -> None:
    """Return what is free to the system, where the C library can (glibc's malloc_trim)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def baseline(ranks: int = 1, timeout: float = 120.0) -> int:
    """Bytes of a rank's process before it holds a model: torch and the process group are there.

    The largest of ``ranks`` fresh processes of this host.
    """
    target = f"{__name__}:bare"
    return max(int(row["resident"]) for row in run_on_processes(ranks, target, {}, timeout))


def bare(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """What a fresh process takes; run by :func:`baseline`. It has made a collective before."""
    import torch.distributed as dist

    import fxpart.runtime  # noqa: F401  a rank has it

    del rank, world, payload
    dist.all_reduce(torch.zeros(1))
    warm()
    return {"resident": read_resident_bytes()}


def warm() -> None:
    """Train a tiny network once: the libraries' code is read from disk when it is first used."""
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
