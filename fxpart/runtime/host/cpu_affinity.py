"""Each local rank on cores of its own: disjoint, equal shares of those this process may use."""

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
    """A logical CPU: its NUMA node, its physical core there, and its number."""

    node: int
    physical: int
    cpu: int


def split_cores(cores: Sequence[LogicalCpu], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Which CPUs each rank gets, as many each; fewer cores than ranks give no shares at all.

    Physical cores are dealt out whole, with all their hyperthreads, while there are enough for one
    each; neighbours by node, so that a rank seldom spans two. What does not divide is left over. A
    rank gets its cores' first hyperthreads first. With fewer physical cores than ranks, logical
    CPUs are dealt out.
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
    groups = _by_node(units, each, ranks, {c.cpu: c.node for c in cores})
    depth = max(map(len, units))
    return tuple(
        tuple(unit[level] for level in range(depth) for unit in group if level < len(unit))
        for group in groups
    )


def _by_node(
    units: list[list[int]], each: int, ranks: int, node: dict[int, int]
) -> list[list[list[int]]]:
    """Groups of ``each`` units within nodes where that makes enough of them, else in a row."""
    by: dict[int, list[list[int]]] = {}
    for unit in units:
        by.setdefault(node[unit[0]], []).append(unit)
    inside = [
        mine[i : i + each] for mine in by.values() for i in range(0, len(mine) - each + 1, each)
    ]
    row = [units[i : i + each] for i in range(0, each * ranks, each)]
    return inside[:ranks] if len(inside) >= ranks else row


def count_physical_cores(share: Sequence[int], cores: Sequence[LogicalCpu]) -> int:
    """How many physical cores a share has: as many threads as are worth computing with."""
    return len({(c.node, c.physical) for c in cores if c.cpu in set(share)})


def read_cpu_topology(cpus: Sequence[int], root: Path = _SYS) -> tuple[LogicalCpu, ...]:
    """What /sys says of these CPUs; each a core of its own where it says nothing."""
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
    """What was set, and what to put back. why: why nothing was pinned, "" where it was."""

    cpus: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    threads: int = 0
    why: str = ""

    def restore(self) -> None:
        """The cores and threads that the process had."""
        if self.before:
            _set_affinity(self.before)
            torch.set_num_threads(self.threads)


def pin_process(wanted: bool | str, local_rank: int, local_world: int) -> CpuAffinity:
    """Bind this process to its share of the cores, and torch's threads to their number.

    wanted: True, False, or "auto": only where every rank gets two physical cores or more, since on
    one core each nothing was gained. All local ranks must be given the same. FXP109 for other
    values; where it cannot be done, ``why`` says so and nothing changes.
    """
    if wanted not in (True, False, "auto"):
        raise error("FXP109", where=f"pin={wanted!r}", why="not known", fix='True, False or "auto"')
    if wanted is False:
        return CpuAffinity(why="not asked for")
    if not hasattr(os, "sched_setaffinity"):
        return CpuAffinity(why="this system cannot bind a process to cores")
    if local_world < 2:
        return CpuAffinity(why="one rank runs on this machine, and may use all of its cores")
    before = tuple(sorted(os.sched_getaffinity(0)))
    cores = read_cpu_topology(before)
    found = split_cores(cores, local_world)
    if not found:
        return CpuAffinity(why=f"{len(before)} cores for {local_world} ranks")
    mine = found[local_rank]
    count = count_physical_cores(mine, cores)
    if wanted == "auto" and min(count_physical_cores(share, cores) for share in found) < 2:
        return CpuAffinity(why="each rank has one core, where pinning gains nothing")
    threads = torch.get_num_threads()
    _set_affinity(mine)
    torch.set_num_threads(max(1, count))
    return CpuAffinity(cpus=mine, before=before, threads=threads)


def pin_rank(wanted: bool | str, transport: Transport) -> CpuAffinity:
    """:func:`pin_process` for the rank of this process, among those that say they are on the same
    host.
    """
    if wanted is False or len(transport.local) > 1:
        return pin_process(wanted, 0, 1)
    hosts = transport.exchange_bytes(platform.node().encode())
    me = transport.local[0]
    return pin_process(wanted, hosts[:me].count(hosts[me]), hosts.count(hosts[me]))


def _set_affinity(cpus: Sequence[int]) -> None:
    """All threads of the process: those that are there keep the cores they were started on."""
    for thread in _threads():
        try:
            os.sched_setaffinity(thread, cpus)
        except ProcessLookupError:  # it has ended in between
            continue


def _threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [0]
