"""What a container's quota leaves of the cores: control groups of Linux, both versions.

A group's processes may together compute for so many microseconds of each period (sched-bwc.rst and
cgroup-v2.rst of the Linux kernel's documentation); every group above it limits them as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS = Path("/proc/self/cgroup")
_MOUNTS = Path("/sys/fs/cgroup")


def quota(groups: Path = _GROUPS, mounts: Path = _MOUNTS) -> float | None:
    """Cores that this process may use on average; None where nothing limits it.

    groups: the process's, as the kernel lists them; mounts: where control groups are mounted.
    """
    try:
        lines = groups.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = [cores for line in lines for cores in _limits(line, mounts)]
    return min(found, default=None)


def _limits(line: str, mounts: Path) -> Iterator[float]:
    """Of the line's group and those above it, such as ``4:cpu,cpuacct:/docker/1f`` or ``0::/a``.

    Within a container the listed path may be the host's, and what is mounted the group itself: then
    only the mount's own files are there.
    """
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    above = ["/".join(parts[:count]) for count in range(len(parts) + 1)]
    if number == "0" and not controllers:
        files = [mounts / sub / group for sub in ("", "unified") for group in above]
        yield from (cores for folder in files if (cores := _new(folder)))
    elif "cpu" in controllers.split(","):
        files = [mounts / sub / group for sub in {controllers, "cpu"} for group in above]
        yield from (cores for folder in files if (cores := _old(folder)))


def _new(folder: Path) -> float | None:
    """Version 2's ``cpu.max``: microseconds, or "max", of a period."""
    words = _words(folder / "cpu.max")
    return _ratio(*words) if len(words) == 2 else None


def _old(folder: Path) -> float | None:
    """Version 1's ``cpu.cfs_quota_us``, -1 where there is none, of ``cpu.cfs_period_us``."""
    words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
    return _ratio(*words) if len(words) == 2 else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []


def _ratio(allowed: str, period: str) -> float | None:
    """Cores; None for "max", -1, and what is no number."""
    if not (allowed.isdecimal() and period.isdecimal() and int(allowed) and int(period)):
        return None
    return int(allowed) / int(period)
