"""The problem of replicated stages, from the costs of stages on each kind of device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fxpart.cluster.link_index import LinkIndex
from fxpart.pricing.device_limits import group_by_kind, line, named
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.replicated_chain.problem import DeviceKind, ReplicatedChainProblem

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.costs import CostModel

Line = tuple[float, float]


def make_replicated_problem(
    problem: PartitionProblem, cluster: Cluster, model: CostModel, ranks: int | None = None
) -> tuple[ReplicatedChainProblem, tuple[tuple[int, ...], ...]]:
    """Return the problem, and by kind its devices as indices of the cluster.

    problem: priced on this cluster in its own order, whose devices are groups of devices where a
    replica is a mesh (:func:`fxpart.pricing.device_groups.group_devices`). Devices are of one kind
    if costs, usable memory and the worst link into them are equal. ranks: of the whole program, in
    these devices.
    """
    worst = _worst_links(cluster, model)
    found: dict[tuple[int, int, Line], list[int]] = {}
    for index, limit in enumerate(problem.devices):
        found.setdefault((limit.type, limit.memory, worst[index]), []).append(index)
    made = tuple(
        DeviceKind(
            name=named(cluster.devices[devices[0]]),
            type=type_,
            devices=len(devices),
            memory=memory,
            latency=latency,
            inverse_bandwidth=inverse,
        )
        for (type_, memory, (latency, inverse)), devices in found.items()
    )
    most = min(len(problem.blocks), len(problem.devices), problem.max_stages)
    base = msgspec.structs.replace(problem, max_stages=max(most, problem.min_stages))
    return ReplicatedChainProblem(base=base, kinds=made, ranks=ranks or 0), tuple(
        map(tuple, found.values())
    )


def list_replica_devices(cluster: Cluster, size: int) -> tuple[tuple[int, ...], ...]:
    """Return groups of ``size`` devices of one host and kind, on which a replica may be.

    Indices of the cluster's devices, in its order; devices that fill no group are left out.
    """
    members: dict[tuple[str, int, int], list[int]] = {}
    for index, (type_, device) in enumerate(
        zip(group_by_kind(cluster)[1], cluster.devices, strict=True)
    ):
        members.setdefault((device.host, type_, device.memory), []).append(index)
    found = (
        tuple(devices[first : first + size])
        for devices in members.values()
        for first in range(0, len(devices) - size + 1, size)
    )
    return tuple(sorted(found))


def is_heterogeneous(cluster: Cluster) -> bool:
    """Return whether the cluster has devices of different costs or memory."""
    types = group_by_kind(cluster)[1]
    return len({(t, d.memory) for t, d in zip(types, cluster.devices, strict=True)}) > 1


def _worst_links(cluster: Cluster, model: CostModel) -> list[Line]:
    """Return the worst link into each device: seconds, and seconds per byte."""
    links = LinkIndex(cluster)
    members: dict[str, list[str]] = {}
    for device in cluster.devices:
        members.setdefault(links.group(device.name), []).append(device.name)
    known: dict[tuple[str, str], Line] = {}
    found = []
    for device in cluster.devices:
        group = links.group(device.name)
        worst = (0.0, 0.0)
        for other, names in members.items():
            source = next((name for name in names if name != device.name), None)
            if source is None:
                continue
            if (other, group) not in known:
                known[other, group] = line(model, links, source, device.name)
            start, each = known[other, group]
            worst = (max(worst[0], start), max(worst[1], each))
        found.append(worst)
    return found
