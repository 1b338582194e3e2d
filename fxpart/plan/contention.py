"""CPU contention between a plan's ranks that share a host."""

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
    """The measured contention of a host.

    See :class:`fxpart.costmodels.profile_store.ContentionProfile`.
    """

    @property
    def slowdown(self) -> tuple[float, ...]:
        """Factors on computation time while 1, 2, ... ranks compute; () if unknown."""

    @property
    def transfer(self) -> float:
        """Number of computing ranks that a transfer counts as."""

    @property
    def wake(self) -> tuple[float, ...]:
        """Delay of a transfer in seconds while 1, 2, ... ranks compute."""

    @property
    def uneven(self) -> CpuLoadImbalance | None:
        """Measured imbalance of CPU cores; None: there is none, or it is not known."""


def find_host_loads(
    cluster: Cluster,
    devices: Sequence[int],
    contention: Callable[[str], ContentionMeasurement] | None = None,
) -> tuple[HostLoad, ...]:
    """Return the hosts with contention between a plan's ranks on these devices, rank 0's first.

    contention: returns the measurement of a host, where the plan's costs are measured; nothing else
    is then assumed. Without it the cluster's hosts are used: their measured curve, or max(1, k
    threads / cores) for k ranks. Ranks under CPU quotas slow each other down as measured, each as
    often as its quota lets it compute; they do not wait for a core.
    """
    known = {} if cluster.hosts is UNSET else {host.name: host for host in cluster.hosts}
    if contention is None and not known:
        return ()
    ranks: dict[str, list[int]] = {}
    for rank, index in enumerate(devices):
        ranks.setdefault(cluster.devices[index].host, []).append(rank)
    devices_by_host: dict[str, list[Device]] = {}
    for device in cluster.devices:
        devices_by_host.setdefault(device.host, []).append(device)
    found = []
    for name, mine in ranks.items():
        on_host = devices_by_host[name]
        load = HostLoad(ranks=tuple(mine), slowdown=(), full=len(on_host))
        if any(device.share < 1 for device in on_host):
            if contention is None:
                continue
            shares = tuple(cluster.devices[devices[rank]].share for rank in mine)
            every = [device.share for device in on_host]
            curve = cap_slowdown_by_quota(contention(name).slowdown, every)
            load = replace(load, slowdown=curve, full=sum(every), shares=shares)
        elif contention is None:
            load = replace(load, slowdown=_curve(known.get(name), on_host))
        else:
            measured = contention(name)
            load = replace(
                load, slowdown=measured.slowdown, transfer=measured.transfer, wake=measured.wake,
                uneven=measured.uneven,
            )  # fmt: skip
        found += [load] if has_contention(load) else []
    return tuple(found)


def complete_host_loads(
    hosts: Sequence[HostLoad], cluster: Cluster, devices: Sequence[int]
) -> tuple[HostLoad, ...]:
    """Return the hosts, with all of the cluster's devices there for an unspecified ``full``.

    The costs are for that load, whether or not the plan uses all devices.
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
    """Return the factor on a rank's seconds while only the plan's ranks of its host compute."""
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
    """Return the factor on seconds while ``busy`` ranks compute, of all on one host.

    1 for several hosts, or where contention is not known.
    """
    if len(hosts) != 1 or not hosts[0].full:
        return 1.0
    return compute_mean_slowdown(hosts[0], busy) / get_assumed_slowdown(hosts[0])


def compute_mean_slowdown(load: HostLoad, busy: float) -> float:
    """Return the average slowdown of computation while ``busy`` of the ranks compute."""
    share = _mean(load)
    return interpolate_slowdown(
        load.slowdown, count_concurrent_ranks(max(1.0, busy) * share, share)
    )


def get_assumed_slowdown(load: HostLoad) -> float:
    """Return the slowdown that the plan's costs assume, with all ranks computing."""
    return interpolate_slowdown(
        load.slowdown, count_concurrent_ranks(count_loaded_ranks(load), _mean(load))
    )


def _mean(load: HostLoad) -> float:
    return sum(load.shares) / len(load.shares) if load.shares else 1.0


def has_contention(load: HostLoad) -> bool:
    """Return whether computation or transfers on the host depend on its other ranks."""
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
