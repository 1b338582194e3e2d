"""Groups of devices: with a mesh, a stage runs on as many devices as the mesh has ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

import msgspec

from fxpart.cluster.link_index import ANY, LinkIndex

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device, Link
    from fxpart.cluster.model import Cluster
    from fxpart.sharding import Mesh


def group_devices(cluster: Cluster, group_size: int) -> Cluster:
    """Return the cluster with one device per group of ``group_size`` consecutive devices.

    A group computes like its slowest member and has the smallest memory among them; two groups are
    linked like the worst pair of their devices, while all ranks of the group send. Devices that
    fill no group are left out. With groups of one the cluster is returned unchanged. Raises FXP403
    where two devices have no link.
    """
    if group_size == 1:
        return cluster
    links = LinkIndex(cluster)
    groups = _groups(cluster, group_size)
    devices = tuple(map(slowest_device, groups))
    alone = not any(link.shared or link.segment for link in cluster.links)
    if alone and all(
        links.group(device.name) == group[0].host for group in groups for device in group
    ):
        # Each group is on one host and no link names a device, so all pairs are equal.
        return msgspec.structs.replace(cluster, devices=devices)
    if len(groups) > 1 and _are_alike(links, groups):
        link = _worst(links, groups[0], groups[1])
        pairs = [msgspec.structs.replace(link, source=ANY, target=ANY)]
        return msgspec.structs.replace(cluster, devices=devices, links=tuple(pairs))
    known: dict[tuple[object, ...], Link] = {}
    kinds = [tuple(sorted({links.group(device.name) for device in group})) for group in groups]
    pairs = []
    for (a, one), (b, other) in product(enumerate(groups), repeat=2):
        if a != b:
            key = (kinds[a], kinds[b])
            if key not in known:
                known[key] = _worst(links, one, other)
            pair = {"source": devices[a].name, "target": devices[b].name}
            pairs.append(msgspec.structs.replace(known[key], **pair))
    return msgspec.structs.replace(cluster, devices=devices, links=tuple(pairs))


def _are_alike(links: LinkIndex, groups: Sequence[Sequence[Device]]) -> bool:
    """Return whether the links between any two groups are equal: on equal hosts of their own."""
    seen: set[str] = set()
    kinds = set()
    for group in groups:
        hosts = Counter(device.host for device in group)
        if not seen.isdisjoint(hosts):
            return False
        seen.update(hosts)
        inside: dict[str, Counter[Hashable]] = {host: Counter() for host in hosts}
        for device in group:
            inside[device.host][links.link_class(device.name)] += 1
        rows = Counter(frozenset(counts.items()) for counts in inside.values())
        kinds.add(frozenset(rows.items()))
    return len(kinds) == 1


class Rings:
    """The rings of links that collectives use, in any group of devices of a cluster."""

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        """Index the links. mesh: the ranks of every group."""
        self._links = LinkIndex(cluster)
        self._mesh = mesh
        self._groups = _groups(cluster, mesh.size)
        self._alone = not any(link.shared or link.segment for link in cluster.links)
        self._known: dict[tuple[str, ...], tuple[Link, ...]] = {}

    def __call__(self, *axes: str) -> tuple[Link, ...]:
        """Return the slowest ring over these axes together, of all groups and mesh coordinates.

        A ring goes from each rank to the next and from the last to the first, so it has as many
        links as ranks; a single rank has none. All rings of a group are used at once: links of one
        segment, or of a host's shared network card, have their part of its bandwidth.
        """
        if axes not in self._known:
            found = self._rings(axes) if self._alone else self._contended_rings(axes)
            self._known[axes] = max(found, key=_slowness, default=())
        return self._known[axes]

    def _rings(self, axes: tuple[str, ...]) -> Iterator[tuple[Link, ...]]:
        rings = {self._ring(mesh_rank, axes) for mesh_rank in range(self._mesh.size)}
        seen = set()
        for group in self._groups:
            for ring in sorted(rings) if len(next(iter(rings))) > 1 else ():
                pairs = list(zip(ring, (*ring[1:], ring[0]), strict=True))
                ends = tuple(self._links.group(group[a].name) for a, _ in pairs)
                if ends not in seen:
                    seen.add(ends)
                    yield tuple(self._links(group[a].name, group[b].name) for a, b in pairs)

    def _contended_rings(self, axes: tuple[str, ...]) -> Iterator[tuple[Link, ...]]:
        """Yield every ring, with the bandwidths while all rings of its group are used."""
        rings = sorted({self._ring(mesh_rank, axes) for mesh_rank in range(self._mesh.size)})
        for group in self._groups:
            used = [
                [
                    self._use(group[a], group[b])
                    for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)
                ]
                for ring in (rings if len(rings[0]) > 1 else ())
            ]
            counts = Counter(resource for ring in used for _, resource in ring if resource)
            for ring in used:
                yield tuple(
                    divide_bandwidth(link, counts.get(resource, 1)) for link, resource in ring
                )

    def _use(self, source: Device, target: Device) -> tuple[Link, tuple[str, ...]]:
        """Return the link between two devices, and what it shares with others."""
        link = self._links(source.name, target.name)
        return link, shared_resource(link, source)

    def _ring(self, mesh_rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the mesh ranks that differ from this one on the axes only, ascending."""
        coordinate, free = (
            self._mesh.coordinate(mesh_rank),
            {self._mesh.index(axis) for axis in axes},
        )
        ranges = [
            range(n) if i in free else (coordinate[i],) for i, n in enumerate(self._mesh.shape)
        ]
        return tuple(self._mesh.mesh_rank(place) for place in product(*ranges))


def _groups(cluster: Cluster, group_size: int) -> list[tuple[Device, ...]]:
    whole = len(cluster.devices) // group_size
    return [tuple(cluster.devices[g * group_size : (g + 1) * group_size]) for g in range(whole)]


def slowest_device(group: Sequence[Device]) -> Device:
    """Return a device as slow in every respect as the slowest of the group."""
    return msgspec.structs.replace(
        group[0],
        memory=min(device.memory for device in group),
        flops=_least([device.flops for device in group]),
        bandwidth=min(device.bandwidth for device in group),
        launch=max(device.launch for device in group),
        quota=min(group, key=lambda device: device.share).quota,
        measured=_least([d.measured for d in group if d.measured is not msgspec.UNSET])
        if all(device.measured is not msgspec.UNSET for device in group)
        else msgspec.UNSET,
    )


def _least(rates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the lowest value of each rate that all devices have."""
    names = sorted(set.intersection(*(set(each) for each in rates)))
    return {name: min(each[name] for each in rates) for name in names}


def shared_resource(link: Link, source: Device) -> tuple[str, ...]:
    """Return the name of the bandwidth that a link shares with others; empty where it has its own.

    Links of one segment share it in both directions. A shared link between hosts has its part of
    what the host's network card sends.
    """
    if link.segment:
        return ("segment", str(link.segment))
    return ("card", source.host) if link.shared and link.kind == "net" else ()


def divide_bandwidth(link: Link, count: int) -> Link:
    """Return the link with its part of a bandwidth that ``count`` transfers share."""
    if count == 1:
        return link
    curve = link.curve and tuple((size, seconds * count) for size, seconds in link.curve)
    return msgspec.structs.replace(link, bandwidth=link.bandwidth / count, curve=curve)


def _worst(links: LinkIndex, sources: Sequence[Device], targets: Sequence[Device]) -> Link:
    """Return a link with the worst latency and bandwidth of any pair, while all ranks send."""
    pairs = list(_list_pairs(links, sources, targets))
    # Each rank of the source sends to one of the target, so one in len(targets) pairs is in use.
    counts: Counter[tuple[str, ...]] = Counter()
    for link, source, hosts, number in pairs:
        resource = shared_resource(link, source)
        # a card is that of one of the equal hosts, a segment of all
        counts[resource] += number // hosts if resource[:1] == ("card",) else number
    found = []
    for link, source, _, _ in pairs:
        resource = shared_resource(link, source)
        uses = -(-counts[resource] // len(targets)) if resource else 1
        found.append(divide_bandwidth(link, uses))
    slowest = max(found, key=lambda link: _slowness((link,)))
    return msgspec.structs.replace(
        slowest,
        latency=max(link.latency for link in found),
        bandwidth=min(link.bandwidth for link in found),
    )


@dataclass
class _HostKind:
    """Equal hosts: their number, and by class of links the devices of up to two of them."""

    number: int = 0
    hosts: list[dict[Hashable, tuple[list[Device], list[Device]]]] = field(default_factory=list)


def _list_pairs(
    links: LinkIndex, sources: Sequence[Device], targets: Sequence[Device]
) -> Iterator[tuple[Link, Device, int, int]]:
    """Yield different links between two groups.

    Each with a source device, the number of hosts that are equal to that device's, and the number
    of pairs of devices with such a link.
    """
    by_host: dict[str, dict[Hashable, tuple[list[Device], list[Device]]]] = {}
    for side, devices in enumerate((sources, targets)):
        for device in devices:
            inside = by_host.setdefault(device.host, {})
            inside.setdefault(links.link_class(device.name), ([], []))[side].append(device)
    kinds: dict[object, _HostKind] = {}
    for inside in by_host.values():
        key = frozenset((kind, len(a), len(b)) for kind, (a, b) in inside.items())
        one = kinds.setdefault(key, _HostKind())
        one.number += 1
        if len(one.hosts) < 2:
            one.hosts.append(inside)
    for one, other in product(kinds.values(), repeat=2):
        cases = []
        if one is other:
            cases.append((one.hosts[0], one.hosts[0], one.number))
        apart = one.number * (other.number - (one is other))
        if apart:
            cases.append((one.hosts[0], other.hosts[-1], apart))
        for here, there, times in cases:
            for (mine, _), (_, theirs) in product(here.values(), there.values()):
                if mine and theirs:
                    link = links(mine[0].name, theirs[0].name)
                    yield link, mine[0], one.number, times * len(mine) * len(theirs)


def _slowness(ring: tuple[Link, ...]) -> tuple[float, float]:
    return max(1 / link.bandwidth for link in ring), sum(link.latency for link in ring)
