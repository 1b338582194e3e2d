"""CPU affinity: disjoint, equal shares of the available cores for the local ranks."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fxpart.errors import error
from fxpart.runtime.transport.interface import Transport

_SYS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, order=True)
class LogicalCpu:
    """A logical CPU: its NUMA node, its physical core in the node, and its number."""

    node: int
    physical: int
    cpu: int


def split_cores(cores: Sequence[LogicalCpu], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs of each rank, equally many; empty if there are fewer cores than ranks.

    Physical cores are assigned whole, with all their hyperthreads, if there is at least one per
    rank; adjacent by node, so that a rank rarely spans two nodes. A remainder stays unused. The
    first hyperthread of each core comes first. With fewer physical cores than ranks, logical CPUs
    are assigned.
    """
    whole: dict[tuple[int, int], list[int]] = {}
    for core in sorted(cores):
        whole.setdefault((core.node, core.physical), []).append(core.cpu)
    units = list(whole.values())
    if len(units) < ranks:
        units = [[core.cpu] for core in sorted(cores)]
    each = len(units) // ranks if ranks > 0 else 0
    if not each:
        return ()
    groups = _group_by_node(units, each, ranks, {c.cpu: c.node for c in cores})
    depth = max(map(len, units))
    return tuple(
        tuple(unit[level] for level in range(depth) for unit in group if level < len(unit))
        for group in groups
    )


def _group_by_node(
    units: list[list[int]], each: int, ranks: int, node: dict[int, int]
) -> list[list[list[int]]]:
    """Return groups of ``each`` units within nodes if there are enough, else consecutive ones."""
    by: dict[int, list[list[int]]] = {}
    for unit in units:
        by.setdefault(node[unit[0]], []).append(unit)
    inside = [
        mine[i : i + each] for mine in by.values() for i in range(0, len(mine) - each + 1, each)
    ]
    row = [units[i : i + each] for i in range(0, each * ranks, each)]
    return inside[:ranks] if len(inside) >= ranks else row


def count_physical_cores(share: Sequence[int], cores: Sequence[LogicalCpu]) -> int:
    """Return the number of physical cores of a share, which is the useful number of threads."""
    return len({(c.node, c.physical) for c in cores if c.cpu in set(share)})


def read_cpu_topology(cpus: Sequence[int], root: Path = _SYS) -> tuple[LogicalCpu, ...]:
    """Read the topology of these CPUs from /sys; without data, each is a core of its own."""
    found = []
    for cpu in cpus:
        folder = root / f"cpu{cpu}"
        siblings = _read(folder / "topology" / "thread_siblings_list")
        first = siblings.split(",")[0].split("-")[0] if siblings else ""
        nodes = sorted(p.name for p in folder.glob("node[0-9]*"))
        node = int(nodes[0].removeprefix("node")) if nodes else 0
        found.append(LogicalCpu(node, int(first) if first.isdigit() else cpu, cpu))
    return tuple(found)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True)
class CpuAffinity:
    """The affinity that was set, and the previous one. why: why nothing was pinned, else ""."""

    cpus: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    threads: int = 0
    why: str = ""

    def restore(self) -> None:
        """Restore the previous cores and threads of the process."""
        if self.before:
            _set_affinity(self.before)
            torch.set_num_threads(self.threads)


def pin_process(wanted: bool | str, local_rank: int, local_world: int) -> CpuAffinity:
    """Bind this process to its share of the cores, and set torch's threads to their number.

    wanted: True, False, or "auto": only if every rank gets at least two physical cores, because
    pinning to a single core has shown no gain. All local ranks must pass the same value. FXP109 for
    other values; if pinning is impossible, ``why`` has the reason and nothing changes.
    """
    if wanted not in (True, False, "auto"):
        why = "it is not a valid value"
        raise error("FXP109", where=f"pin={wanted!r}", why=why, fix='use True, False or "auto"')
    if wanted is False:
        return CpuAffinity(why="it was not requested")
    if not hasattr(os, "sched_setaffinity"):
        return CpuAffinity(why="this system cannot bind a process to cores")
    if local_world < 2:
        return CpuAffinity(why="one rank runs on this machine, and may use all of its cores")
    before = tuple(sorted(os.sched_getaffinity(0)))
    cores = read_cpu_topology(before)
    found = split_cores(cores, local_world)
    if not found:
        return CpuAffinity(why=f"there are {len(before)} cores for {local_world} ranks")
    mine = found[local_rank]
    count = count_physical_cores(mine, cores)
    if wanted == "auto" and min(count_physical_cores(share, cores) for share in found) < 2:
        return CpuAffinity(why="each rank has one core, and pinning gains nothing then")
    threads = torch.get_num_threads()
    _set_affinity(mine)
    torch.set_num_threads(max(1, count))
    return CpuAffinity(cpus=mine, before=before, threads=threads)


def pin_rank(wanted: bool | str, transport: Transport) -> CpuAffinity:
    """Pin this process's rank with :func:`pin_process`, among the ranks of the same host."""
    if wanted is False or len(transport.local) > 1:
        return pin_process(wanted, 0, 1)
    hosts = transport.exchange_bytes(platform.node().encode())
    me = transport.local[0]
    return pin_process(wanted, hosts[:me].count(hosts[me]), hosts.count(hosts[me]))


def _set_affinity(cpus: Sequence[int]) -> None:
    """Set the affinity of all existing threads; each was started with its own."""
    for thread in _list_threads():
        try:
            os.sched_setaffinity(thread, cpus)
        except ProcessLookupError:  # It has ended in the meantime.
            continue


def _list_threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [0]
