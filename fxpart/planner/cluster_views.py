"""Views of a cluster as equal devices: meshes over unequal devices or links are proposed from them.

The joint problem has pools of equal devices, and a stage uses devices of one pool with equal links.
A mesh of a fast and a slow device, or a tensor degree across hosts, is none of its options. In a
view, some of the devices are as slow as the slowest of them and form one pool; in one view links
are equal, too. Every mesh of a view exists on the cluster, where it is priced exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fxpart.cluster.devices import Device
from fxpart.cluster.link_index import ANY, has_equal_links, list_links
from fxpart.cluster.model import Cluster
from fxpart.pricing.device_groups import slowest_device
from fxpart.pricing.joint_space import SMALL
from fxpart.pricing.topology import pools_of

_LARGEST = 64  # devices up to which a cluster has views
_AMPLE = 1 << 60  # bytes of memory that are no limit
_POOLS = 4  # pools up to which the fastest of them have views of their own


@dataclass(frozen=True)
class UniformView:
    """Some devices of a cluster as one pool of equal devices.

    devices: their indices in the cluster.
    """

    cluster: Cluster
    devices: tuple[int, ...]

    def order(self, own: tuple[int, ...] | None, count: int) -> tuple[int, ...]:
        """Return all ``count`` devices of the cluster: those of the view, then the others.

        own: the order of the view's devices, None for that of the cluster.
        """
        first = self.devices if own is None else tuple(self.devices[place] for place in own)
        used = set(first)
        return (*first, *(d for d in range(count) if d not in used))


def list_uniform_views(cluster: Cluster) -> tuple[UniformView, ...]:
    """Return the views: of several pools the fastest two, three and so on; and with equal links.

    None where all devices and links are equal, and on large clusters.
    """
    count = len(cluster.devices)
    if count < 2 or count > _LARGEST:
        return ()
    members: defaultdict[int, list[int]] = defaultdict(list)
    for index, pool in enumerate(pools_of(cluster)):
        members[pool].append(index)
    fastest = sorted(members.values(), key=lambda own: _speed(cluster.devices[own[0]]))
    sizes = range(2 if len(fastest) <= _POOLS else len(fastest), len(fastest) + 1)
    found = [
        _make_view(cluster, sorted(d for own in fastest[:size] for d in own))
        for size in (sizes if len(fastest) > 1 else ())
    ]
    if count <= SMALL and not has_equal_links(cluster):
        found.append(_with_equal_links(_make_view(cluster, range(count))))
    return tuple(found)


def _speed(device: Device) -> tuple[float, ...]:
    """Return a key by which faster devices, of equal ones those with more memory, come first."""
    return (-max(device.flops.values()), -device.bandwidth, -device.memory)


def _make_view(cluster: Cluster, devices: Sequence[int]) -> UniformView:
    part = cluster.part(devices)
    slow = slowest_device(part.devices)
    equal = tuple(
        msgspec.structs.replace(slow, name=device.name, host=device.host) for device in part.devices
    )
    return UniformView(msgspec.structs.replace(part, devices=equal), tuple(devices))


def _with_equal_links(view: UniformView) -> UniformView:
    """Return the view with all links as slow as the slowest, as on one host."""
    cluster = view.cluster
    links = list_links(cluster)
    link = msgspec.structs.replace(
        max(links, key=lambda link: 1 / link.bandwidth),
        source=ANY,
        target=ANY,
        latency=max(each.latency for each in links),
        shared=msgspec.UNSET,
        segment=msgspec.UNSET,
    )
    devices = tuple(msgspec.structs.replace(device, host="") for device in cluster.devices)
    made = msgspec.structs.replace(cluster, devices=devices, links=(link,), hosts=msgspec.UNSET)
    return UniformView(made, view.devices)


def make_ideal_cluster(cluster: Cluster, *, ample: bool = False) -> Cluster:
    """Return the cluster with all devices and links as good as the best of each of their rates.

    ample: with more memory than any plan needs.
    """
    best = min(cluster.devices, key=_speed)
    names = {name for device in cluster.devices for name in device.flops}
    fields = {
        "flops": {n: max(d.flops.get(n, 0.0) for d in cluster.devices) for n in sorted(names)},
        "bandwidth": max(device.bandwidth for device in cluster.devices),
        "memory": _AMPLE if ample else max(device.memory for device in cluster.devices),
        "launch": min(device.launch for device in cluster.devices),
    }
    links = list_links(cluster)
    link = msgspec.structs.replace(
        links[0],
        source=ANY,
        target=ANY,
        latency=min(each.latency for each in links),
        bandwidth=max(each.bandwidth for each in links),
        shared=msgspec.UNSET,
        segment=msgspec.UNSET,
        curve=msgspec.UNSET,
    )
    devices = tuple(
        msgspec.structs.replace(best, name=device.name, host="", **fields)
        for device in cluster.devices
    )
    return msgspec.structs.replace(cluster, devices=devices, links=(link,), hosts=msgspec.UNSET)


def has_curves(cluster: Cluster) -> bool:
    """Return whether a link or a collective has measured times beside latency and bandwidth."""
    return bool(cluster.collectives) or any(link.curve for link in cluster.links)
