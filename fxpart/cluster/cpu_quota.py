"""CPU quota of a container, read from Linux control groups of version 1 or 2.

A control group limits the CPU time of its processes per period (sched-bwc.rst and cgroup-v2.rst of
the Linux kernel documentation). The limits of all parent groups apply as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS = Path("/proc/self/cgroup")
_MOUNTS = Path("/sys/fs/cgroup")


def quota(groups: Path = _GROUPS, mounts: Path = _MOUNTS) -> float | None:
    """Return the number of cores that this process may use on average, None without a limit.

    groups: the kernel's list of the process's groups. mounts: mount point of control groups.
    """
    try:
        lines = groups.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = [cores for line in lines for cores in _limits(line, mounts)]
    return min(found, default=None)


def _limits(line: str, mounts: Path) -> Iterator[float]:
    """Yield the limits of a listed group and its parents, in cores.

    line: such as ``4:cpu,cpuacct:/docker/1f`` or ``0::/a``. In a container, the listed path may be
    the host's while only the group itself is mounted, so missing files are skipped.
    """
    number, _, remainder = line.partition(":")
    controllers, _, path = remainder.partition(":")
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    above = ["/".join(parts[:count]) for count in range(len(parts) + 1)]
    if number == "0" and not controllers:
        files = [mounts / sub / group for sub in ("", "unified") for group in above]
        yield from (cores for folder in files if (cores := _new(folder)))
    elif "cpu" in controllers.split(","):
        files = [mounts / sub / group for sub in {controllers, "cpu"} for group in above]
        yield from (cores for folder in files if (cores := _old(folder)))


def _new(folder: Path) -> float | None:
    """Return the limit of version 2: ``cpu.max`` has microseconds (or "max") and the period."""
    words = _words(folder / "cpu.max")
    return _ratio(*words) if len(words) == 2 else None


def _old(folder: Path) -> float | None:
    """Return the limit of version 1: ``cpu.cfs_quota_us`` (-1: none) per ``cpu.cfs_period_us``."""
    words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
    return _ratio(*words) if len(words) == 2 else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []


def _ratio(allowed: str, period: str) -> float | None:
    """Return the quotient as cores; None for "max", -1 and invalid numbers."""
    if not (allowed.isdecimal() and period.isdecimal() and int(allowed) and int(period)):
        return None
    return int(allowed) / int(period)
