"""Pools of equal devices, and the worst links within and between their hosts.

Devices of one host that no link names have equal links, and so have hosts that only links of the
same kind name: two of each such class represent all, so that thousands of hosts need few lookups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from fxpart.cluster.link_index import LinkIndex
from fxpart.cluster.model import Cluster
from fxpart.pricing.device_groups import divide_bandwidth, shared_resource
from fxpart.pricing.device_limits import get_usable_bytes, group_by_kind, transfer_line
from fxpart.pricing.joint_space import host_size
from fxpart.pricing.stage_parallelism import packing
from fxpart.solver.joint.problem import LinearCost, Pool

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device, Link
    from fxpart.costs import CostModel

BUCKET = 25 << 20  # bytes of a bucket of a collective over data replicas


@dataclass(frozen=True)
class DevicePool:
    """Devices of one type. near, far: the worst link within one of its hosts, and between two."""

    pool: Pool
    sample: Device
    near: Link | None
    far: Link | None


@dataclass
class ReplicaCollectiveTimes:
    """Times of collectives over the replicas of a stage, linear in bytes.

    copying: seconds per byte that packing buckets reads or writes.
    """

    model: CostModel
    copying: float = 0.0
    _known: dict[tuple[str, str, tuple[Link, ...]], LinearCost] = field(default_factory=dict)
    _rings: dict[tuple[int, int, int, int], tuple[Link, ...]] = field(default_factory=dict)

    def ring(
        self, pool: DevicePool, count: int, stride: int, parallel: int = 1
    ) -> tuple[Link, ...]:
        """Return the ring of ``count`` ranks with ``stride`` devices between them.

        It has as many links as ranks. Ranks fill one host after another; on several hosts, as many
        links as hosts are between hosts. parallel: rings that leave each host at once, which divide
        the bandwidth of a shared link between hosts.
        """
        near, far = pool.near or pool.far, pool.far or pool.near
        if count == 1 or near is None or far is None:
            return ()
        key = (id(pool), count, stride, parallel)
        if key not in self._rings:
            each = max(1, pool.pool.host // stride)
            hosts = -(-count // each)
            crossing = hosts if hosts > 1 else 0
            if shared_resource(far, pool.sample):
                far = divide_bandwidth(far, parallel)
            self._rings[key] = (far,) * crossing + (near,) * (count - crossing)
        return self._rings[key]

    def line(self, source: str, target: str, ring: tuple[Link, ...]) -> LinearCost:
        """Return the time of a change of placement over the ring, in bytes of the whole tensor.

        Each bucket of 25 MiB pays the latency: it is in the slope, and once more in the constant,
        so that the line is above the sum over buckets by at most one latency.
        """
        if not ring:
            return LinearCost()
        key = (source, target, ring)
        if key not in self._known:
            start = self.model.reshard(source, target, 0.0, ring).seconds
            bucket = self.model.reshard(source, target, float(BUCKET), ring).seconds
            slope = bucket / BUCKET + packing(source, target) * self.copying
            self._known[key] = LinearCost(latency=start, inverse=slope)
        return self._known[key]


def device_pools(cluster: Cluster, model: CostModel) -> tuple[DevicePool, ...]:
    """Return the cluster's devices by type and memory, in the order of their first device.

    A pool's ``transfer`` is the worst latency and the worst bandwidth of any link from a device of
    the cluster into one of it. Raises FXP403 where two devices have no link.
    """
    samples, types = group_by_kind(cluster)
    members: defaultdict[tuple[int, int], list[Device]] = defaultdict(list)
    for device, kind in zip(cluster.devices, types, strict=True):
        members[kind, device.memory].append(device)
    keys = list(members)
    found = _collect_links(cluster, keys, types)
    result = []
    for index, devices in enumerate(members.values()):
        own = Cluster(name="", devices=tuple(devices), links=())
        line = _transfer(model, found.into[index])
        near, far = _slowest(found.near[index]), _slowest(found.far[index])
        result.append(
            DevicePool(
                Pool(
                    name=_name(keys, index, samples),
                    devices=len(devices),
                    memory=min(get_usable_bytes(device, model) for device in devices),
                    host=_count_equal_links(own, near, far),
                    transfer=line,
                ),
                devices[0],
                near,
                far,
            )
        )
    return tuple(result)


def _count_equal_links(pool: Cluster, near: Link | None, far: Link | None) -> int:
    """Return how many of the pool's devices are joined by equal links.

    That is the number of devices of a host, or all where links between hosts are as fast as those
    within one, or where each host has one device.
    """
    links = [link for link in (near, far) if link is not None]
    speeds = {(link.latency, link.bandwidth, link.curve) for link in links}
    if len(speeds) == 1 and not any(link.shared or link.segment for link in links):
        return len(pool.devices)
    return host_size(pool)


@dataclass
class _DevicePoolLinks:
    """By pool the links into it and back, those within one of its hosts, and between its hosts."""

    into: dict[int, list[tuple[Link, Link]]] = field(default_factory=lambda: defaultdict(list))
    near: dict[int, list[Link]] = field(default_factory=lambda: defaultdict(list))
    far: dict[int, list[Link]] = field(default_factory=lambda: defaultdict(list))


def _collect_links(
    cluster: Cluster, keys: list[tuple[int, int]], types: Sequence[int]
) -> _DevicePoolLinks:
    links = LinkIndex(cluster)
    pool_of = {
        device.name: keys.index((kind, device.memory))
        for device, kind in zip(cluster.devices, types, strict=True)
    }
    chosen = _representatives(cluster, links, pool_of)
    found = _DevicePoolLinks()
    pairs = [pair for pair in product(chosen, repeat=2) if pair[0] is not pair[1]]
    table = {(a.name, b.name): links(a.name, b.name) for a, b in pairs}
    for source, target in pairs:
        link, index = table[source.name, target.name], pool_of[target.name]
        found.into[index].append((link, table[target.name, source.name]))
        if pool_of[source.name] == index:
            (found.near if source.host == target.host else found.far)[index].append(link)
    return found


def _representatives(
    cluster: Cluster, links: LinkIndex, pool_of: dict[str, int]
) -> tuple[Device, ...]:
    """Return two devices of two groups of each class of groups with equal links."""
    units: defaultdict[tuple[str, int], list[Device]] = defaultdict(list)
    for device in cluster.devices:
        unit = units[links.group(device.name), pool_of[device.name]]
        if len(unit) < 2:
            unit.append(device)
    classes: defaultdict[object, list[list[Device]]] = defaultdict(list)
    for (group, pool), devices in units.items():
        kind = links.link_class(devices[0].name)
        host = devices[0].host if group != devices[0].host else ""
        same = classes[pool, host, len(devices), kind]
        if len(same) < 2:
            same.append(devices)
    return tuple(d for groups in classes.values() for devices in groups for d in devices)


def _name(keys: list[tuple[int, int]], index: int, samples: Sequence[Device]) -> str:
    """Return the model; with the memory or a number where that is ambiguous."""
    kind, memory = keys[index]
    names = [samples[k].model or samples[k].kind for k, _ in keys]
    if names.count(names[index]) == 1:
        return names[index]
    sizes = [(names[i], m) for i, (_, m) in enumerate(keys)]
    name = f"{names[index]} {memory / 2**30:.0f} GiB"
    return name if sizes.count((names[index], memory)) == 1 else f"{name} #{kind}"


def _transfer(model: CostModel, pairs: Iterable[tuple[Link, Link]]) -> LinearCost:
    """Return the worst latency and the worst time per byte; zero where there are no links.

    pairs: the links there and back, of which the mean counts (as in
    :func:`fxpart.pricing.device_limits.line`).
    """
    latency = inverse = 0.0
    for pair in dict.fromkeys(pairs):
        one, other = (transfer_line(model, link) for link in pair)
        latency = max(latency, (one[0] + other[0]) / 2)
        inverse = max(inverse, (one[1] + other[1]) / 2)
    return LinearCost(latency=latency, inverse=inverse)


def _slowest(links: Sequence[Link]) -> Link | None:
    return max(links, key=lambda link: (1 / link.bandwidth, link.latency), default=None)
