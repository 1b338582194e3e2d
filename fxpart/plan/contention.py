"""Which of a plan's ranks share a host, and how they slow each other down."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import UNSET
from msgspec.structs import replace

from fxpart.cluster.devices import CpuLoadImbalance, Device, Host
from fxpart.cluster.model import Cluster
from fxpart.plan.prediction import HostLoad
from fxpart.schedule.host_contention import (
    cap_slowdown_by_quota,
    count_concurrent_ranks,
    count_loaded_ranks,
    estimate_slowdown_from_cores,
    interpolate_slowdown,
)


class ContentionMeasurement(Protocol):
    """How ranks of a host slow each other down, as measured (:class:`fxpart.profile.Crowding`)."""

    @property
    def slowdown(self) -> tuple[float, ...]:
        """How many times longer computations take while 1, 2, ... ranks compute; () if unknown."""

    @property
    def transfer(self) -> float:
        """How many computing ranks a transfer counts as."""

    @property
    def wake(self) -> tuple[float, ...]:
        """Seconds by which a transfer ends later while 1, 2, ... ranks compute."""

    @property
    def uneven(self) -> CpuLoadImbalance | None:
        """How long cores are not all used; None: they always are, or it is not known."""


def find_host_loads(
    cluster: Cluster,
    devices: Sequence[int],
    contention: Callable[[str], ContentionMeasurement] | None = None,
) -> tuple[HostLoad, ...]:
    """The hosts of a plan whose ranks run on these devices (rank 0's is the first), if crowded.

    contention: by host, what was measured (``ContentionMeasurement.contention``), where the seconds
    of the plan come from measurements; nothing else is then assumed. Without it the cluster's hosts
    say it: their measured curve, or else max(1, k threads / cores) for k ranks. Ranks under quotas
    slow each other down as far as that was measured, each as often as its quota lets it compute;
    nobody waits for a core.
    """
    known = {} if cluster.hosts is UNSET else {host.name: host for host in cluster.hosts}
    if contention is None and not known:
        return ()
    ranks: dict[str, list[int]] = {}
    for rank, index in enumerate(devices):
        ranks.setdefault(cluster.devices[index].host, []).append(rank)
    there: dict[str, list[Device]] = {}
    for device in cluster.devices:
        there.setdefault(device.host, []).append(device)
    found = []
    for name, mine in ranks.items():
        all_of = there[name]
        load = HostLoad(ranks=tuple(mine), slowdown=(), full=len(all_of))
        if any(device.share < 1 for device in all_of):
            if contention is None:
                continue
            shares = tuple(cluster.devices[devices[rank]].share for rank in mine)
            every = [device.share for device in all_of]
            curve = cap_slowdown_by_quota(contention(name).slowdown, every)
            load = replace(load, slowdown=curve, full=sum(every), shares=shares)
        elif contention is None:
            load = replace(load, slowdown=_curve(known.get(name), all_of))
        else:
            seen = contention(name)
            load = replace(
                load, slowdown=seen.slowdown, transfer=seen.transfer, wake=seen.wake,
                uneven=seen.uneven,
            )  # fmt: skip
        found += [load] if has_contention(load) else []
    return tuple(found)


def complete_host_loads(
    hosts: Sequence[HostLoad], cluster: Cluster, devices: Sequence[int]
) -> tuple[HostLoad, ...]:
    """Hosts as given, with ``full`` where it was left open: all of the cluster's devices there.

    That is what costs are for, whether the plan uses all of them or not.
    """
    count: dict[str, int] = {}
    for device in cluster.devices:
        count[device.host] = count.get(device.host, 0) + 1
    return tuple(
        replace(load, full=load.full or count[cluster.devices[devices[load.ranks[0]]].host])
        for load in hosts
        if has_contention(load)
    )


def pace(hosts: Sequence[HostLoad], rank: int) -> float:
    """What a rank's seconds are worth while the plan's ranks of its host compute, and no others."""
    for load in hosts:
        if rank in load.ranks and load.full:
            share = load.shares[load.ranks.index(rank)] if load.shares else 1.0
            mine = sum(load.shares) if load.shares else len(load.ranks)
            curve = load.slowdown
            return interpolate_slowdown(
                curve, count_concurrent_ranks(mine, share)
            ) / interpolate_slowdown(curve, count_concurrent_ranks(load.full, share))
    return 1.0


def compute_pace(hosts: Sequence[HostLoad], busy: float) -> float:
    """What seconds are worth while only so many ranks compute, of all on one host.

    1 where the hosts are several, or how their ranks slow each other down is not known.
    """
    if len(hosts) != 1 or not hosts[0].full:
        return 1.0
    return compute_mean_slowdown(hosts[0], busy) / get_assumed_slowdown(hosts[0])


def compute_mean_slowdown(load: HostLoad, busy: float) -> float:
    """How many times longer computations take while so many of the ranks compute, on average."""
    share = _mean(load)
    return interpolate_slowdown(
        load.slowdown, count_concurrent_ranks(max(1.0, busy) * share, share)
    )


def get_assumed_slowdown(load: HostLoad) -> float:
    """The same while all compute for which the plan's seconds are."""
    return interpolate_slowdown(
        load.slowdown, count_concurrent_ranks(count_loaded_ranks(load), _mean(load))
    )


def _mean(load: HostLoad) -> float:
    return sum(load.shares) / len(load.shares) if load.shares else 1.0


def has_contention(load: HostLoad) -> bool:
    """Whether anything about the host's ranks depends on what else runs there."""
    if not load.slowdown or not load.ranks:
        return False
    most = math.ceil(max(load.full + bool(load.shares), len(load.ranks)))
    busy = any(interpolate_slowdown(load.slowdown, k) != 1 for k in range(1, most + 1))
    return busy or ((load.transfer > 0 or any(load.wake)) and len(load.ranks) > 1)


def _curve(host: Host | None, devices: Sequence[Device]) -> tuple[float, ...]:
    if host is None:
        return ()
    if host.slowdown:
        return host.slowdown
    threads = [d.threads if d.threads is not UNSET else 1 for d in devices if d.kind == "cpu"]
    return estimate_slowdown_from_cores(len(devices), max(threads), host.cores) if threads else ()
