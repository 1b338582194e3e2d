"""Describe this host as a cluster: torchrun's ranks, GPUs from nvidia-smi, or CPU ranks."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from fxpart import environment
from fxpart.cluster.cpu_quota import quota
from fxpart.cluster.devices import Device, Host, Link
from fxpart.cluster.presets import device_data, grid, models, unknown
from fxpart.cluster.validation import MAX_DEVICES

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster

# float32 FLOP per core and cycle by instruction set: two fused multiply-add units with vectors of
# 16, 8 or 4 elements, and two FLOP per element.
_FLOP_PER_CYCLE = (("avx512f", 64), ("avx2", 32), ("", 16))
_CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def detect(kind: type[Cluster]) -> Cluster:
    """Return torchrun's ranks if it started this process, else this host's GPUs, else its cores."""
    launch = environment.read_launch()
    gpus = nvidia_models()
    if launch is None:
        return grid(kind, 1, len(gpus), gpus[0]) if _uniform(gpus) else local(kind, cores())
    world, here = launch.world, launch.local_world
    if _uniform(gpus) and here <= len(gpus) and world % here == 0:
        return grid(kind, world // here, here, gpus[0])
    return local(kind, world)


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


def nvidia_models() -> list[str]:
    """Return the models of this host's NVIDIA GPUs; [] if there are none or one is unknown."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    names = [match_model(line) for line in done.stdout.splitlines() if line.strip()]
    return [name for name in names if name] if all(names) else []


def match_model(product: str) -> str | None:
    """Return the device model with the most ``products`` words that occur in a product name."""
    words = product.lower().replace("-", " ").split()
    best: tuple[int, str] | None = None
    for model in models():
        for required in device_data(model).get("products", ()):
            terms = required.lower().split()
            if all(term in words for term in terms) and (best is None or len(terms) > best[0]):
                best = (len(terms), model)
    return best[1] if best else None


def _uniform(gpus: list[str]) -> bool:
    return bool(gpus) and len(set(gpus)) == 1
