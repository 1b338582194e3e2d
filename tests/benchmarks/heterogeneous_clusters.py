"""Clusters of ranks of this host that quotas make unlike. Imported by heterogeneous_measured.py."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster

_RICH = 4 << 30  # bytes of a device whose memory is no matter
_LATENCY = 3e-4  # seconds between namespaces
_PART = 0.5  # of what the whole model needs, in the device with the least memory


@dataclass(frozen=True)
class Kinds:
    """A cluster. quotas: of its devices, in cores; scarce: devices with half the others' memory.

    hosts: each device's, where there are two; megabits: a second of the link between them.
    """

    quotas: tuple[float, ...]
    scarce: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    megabits: float = 0.0


CLUSTERS = {
    "a fast one, a slow one": Kinds((0.9, 0.45)),
    "two fast ones, a slow one": Kinds((0.64, 0.64, 0.32)),
    "a fast one, two slow ones": Kinds((0.9, 0.3, 0.3)),
    "a fast one with half the memory, two slow ones": Kinds((0.8, 0.4, 0.4), (0,)),
    "two fast ones, a slow link, two slow ones": Kinds(
        (0.6, 0.6, 0.3, 0.3), hosts=(0, 0, 1, 1), megabits=200.0
    ),
}

# Of heterogeneous_tables.py: the fast rank stands for an accelerator, the others for hosts.
TABLE_CLUSTERS = {
    "a fast one without memory for the tables, two slow ones": Kinds((0.5, 0.15, 0.15), (0,)),
    "a fast one, two slow ones, memory for the tables in each": Kinds((0.5, 0.15, 0.15)),
}


def cluster_of(name: str, kinds: Kinds, base: Cluster, need: Any) -> Cluster:
    """Devices with quotas of a core of this host. need: of a process with the whole model."""
    from msgspec import UNSET
    from msgspec.structs import replace

    from fxpart.cluster.devices import Link
    from fxpart.cluster.host_detection import cores
    from fxpart.cluster.model import Cluster

    one = Cluster.local(cores()).devices[0]
    scarce = round((need.process + _PART * (need.tensors + need.allocator)) / 0.97)
    devices = [
        replace(
            one, name=f"local/cpu:{k}", quota=quota, threads=1, bandwidth=one.bandwidth * quota,
            flops={kind: rate * quota for kind, rate in one.flops.items()},
            memory=(scarce if k in kinds.scarce else 2 * scarce) if kinds.scarce else _RICH,
        )
        for k, quota in enumerate(kinds.quotas)
    ]  # fmt: skip
    if not kinds.hosts:
        return between_held(replace(base, name=name, devices=tuple(devices))).validate()
    apart = [
        replace(d, name=f"host{h}/cpu:{k}", host=f"host{h}")
        for k, (d, h) in enumerate(zip(devices, kinds.hosts, strict=True))
    ]
    host_of = {device.name: device.host for device in apart}
    made = between_held(replace(base, name=name, devices=tuple(apart)))
    inside = [link for link in made.links if host_of[link.source] == host_of[link.target]]
    rate = kinds.megabits * 1e6 / 8
    between = Link(
        source="*", target="*", latency=_LATENCY, bandwidth=rate, kind="net", shared=True
    )
    return replace(made, links=(*inside, between), hosts=UNSET).validate()


def between_held(cluster: Cluster) -> Cluster:
    """Links of one host, and collectives, at the pace of the slower end: processors copy there."""
    from msgspec import UNSET
    from msgspec.structs import replace

    (link,) = cluster.links
    found = []
    for a, b in permutations(cluster.devices, 2):
        pace = min(a.share, b.share)
        curve = UNSET if link.curve is UNSET else tuple((n, s / pace) for n, s in link.curve)
        held = {"latency": link.latency / pace, "bandwidth": link.bandwidth * pace, "curve": curve}
        found.append(replace(link, source=a.name, target=b.name, **held))
    slowest = min(device.share for device in cluster.devices)
    curves = () if cluster.collectives is UNSET else cluster.collectives
    sums = tuple(
        replace(
            c, points=tuple((n, s / slowest) for n, s in c.points), latency=c.latency / slowest,
            inverse_bandwidth=c.inverse_bandwidth / slowest,
        )
        for c in curves
    )  # fmt: skip
    return replace(cluster, links=tuple(found), collectives=sums or UNSET)


def nominal(device: Any, kinds: Kinds) -> float:
    """The quota that is set for a device, in cores."""
    return kinds.quotas[int(device.name.rpartition(":")[2])]


def kinds_of(cluster: Cluster) -> list[Cluster]:
    """The devices of each kind as clusters of their own; of their host nothing else is known."""
    from msgspec import UNSET
    from msgspec.structs import replace

    members: dict[tuple[object, int], list[int]] = {}
    for place, device in enumerate(cluster.devices):
        members.setdefault((device.quota, device.memory), []).append(place)
    return [replace(cluster.part(places), hosts=UNSET).validate() for places in members.values()]
