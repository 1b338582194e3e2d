"""Describe this host as a cluster: torchrun's ranks, GPUs from their driver, or CPU ranks."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from fxpart import environment
from fxpart.cluster.cpu_quota import quota
from fxpart.cluster.devices import Device, Host, Link
from fxpart.cluster.gpu_detection import find_gpus
from fxpart.cluster.presets import device_data, host_of_models, unknown
from fxpart.cluster.validation import MAX_DEVICES
from fxpart.errors import error

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster

# float32 FLOP per core and cycle by instruction set: two fused multiply-add units with vectors of
# 16, 8 or 4 elements, and two FLOP per element.
_FLOP_PER_CYCLE = (("avx512f", 64), ("avx2", 32), ("", 16))
_CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def detect(kind: type[Cluster]) -> Cluster:
    """Return torchrun's ranks if it started this process, else this host's GPUs, else its cores."""
    launch = environment.read_launch()
    gpus = find_gpus()
    if launch is None:
        return host_of_models(kind, gpus) if gpus else local(kind, cores())
    world, here = launch.world, launch.local_world
    check_ranks(here, gpus)
    if gpus and world % here == 0:
        return host_of_models(kind, gpus[:here], world // here)
    return local(kind, world)


def check_ranks(ranks: int, gpus: list[str]) -> None:
    """Raise FXP602 if the ranks of a host with GPUs are more than the GPUs that they may use."""
    if gpus and ranks > len(gpus):
        raise error(
            "FXP602",
            where=f"LOCAL_WORLD_SIZE={ranks}",
            why=f"this host has {len(gpus)} visible GPUs, and two ranks cannot share one under "
            "NCCL",
            fix=f"start {len(gpus)} ranks on this host, set CUDA_VISIBLE_DEVICES to more GPUs, or "
            f"use local:{ranks} to plan for the CPU",
        )


def local(kind: type[Cluster], ranks: int) -> Cluster:
    """Return this host as ``ranks`` CPU devices with even shares of its cores and memory.

    A rank has one thread per core, at least one. In a container that may use less than one core,
    the quota of each device is its share of that.

    FLOP/s = cores x FLOP per cycle (instruction set) x clock x efficiency / ranks, from the data
    file "cpu"; the clock is nominal, so that the same host gives the same cluster every time.
    """
    if not 1 <= ranks <= MAX_DEVICES:
        raise unknown(f"local:{ranks}", f"{ranks} ranks is not between 1 and {MAX_DEVICES}")
    data = device_data("cpu")
    allowed, cycle = computing(), flop_per_cycle()
    host = allowed * cycle * data["clock"] * data["efficiency"]
    bandwidth = min(allowed * data["core_bandwidth"], data["socket_bandwidth"])
    source = (
        f"estimate: {allowed:g} cores x {cycle} FLOP/cycle x {data['clock'] / 1e9:g} GHz x "
        f"{data['efficiency']:g}, shared by {ranks} ranks"
    )
    devices = tuple(
        Device(
            name=f"local/cpu:{rank}",
            kind="cpu",
            model="cpu",
            host="local",
            memory=memory() // ranks,
            flops={dtype: host * factor / ranks for dtype, factor in data["ratio"].items()},
            bandwidth=bandwidth / ranks,
            launch=data["launch"],
            source=source,
            threads=max(1, int(allowed) // ranks),
            quota=allowed / ranks if allowed < 1 else UNSET,
        )
        for rank in range(ranks)
    )
    link = data["link"]
    links = [
        Link(
            source="local",
            target="local",
            latency=link["latency"],
            bandwidth=link["bandwidth"],
            kind=link["kind"],
            origin=link["source"],
        )
    ]
    here = Host(name="local", cores=cores(), source="the cores that this process may use")
    return kind(name=f"local:{ranks}", devices=devices, links=tuple(links), hosts=(here,))


def cores() -> int:
    """Return the number of cores that this process may use, rounded up."""
    return math.ceil(computing())


def computing() -> float:
    """Return the average number of cores of this process, by affinity and container quota."""
    affinity: Any = getattr(os, "sched_getaffinity", None)  # not on macOS
    there = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(there, quota() or there)


def memory() -> int:
    """Return this host's memory in bytes, or its container's limit if that is lower."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CGROUP:
        try:
            found.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # No such group, or "max" for no limit.
    return min(size for size in found if size > 0)


def flop_per_cycle() -> int:
    """Return the float32 FLOP per core and cycle, by this host's instruction sets."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = {"avx2"} if platform.machine() in ("x86_64", "AMD64") else set()
    return next(flop for name, flop in _FLOP_PER_CYCLE if not name or name in flags)
