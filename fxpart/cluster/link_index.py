"""Look up the link of a transfer: the most specific match of device, host or "*"."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from itertools import permutations
from typing import TYPE_CHECKING

import msgspec

from fxpart.cluster.devices import Link
from fxpart.errors import error

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster

ANY = "*"
_COMPARED = 64  # devices of a cluster up to which the links of all pairs are compared

# Pairs of specificity (2 device, 1 host, 0 "*") in descending order: by the sum, then by the less
# specific end, then by the source, so that the order is total.
_ORDER = sorted(
    ((a, b) for a in range(3) for b in range(3)), key=lambda p: (sum(p), min(p), p), reverse=True
)


class LinkIndex:
    """Index over the links of a cluster; ``links(source, target)`` takes device names."""

    def __init__(self, cluster: Cluster) -> None:
        """Index the cluster's links by their two ends."""
        self._table = {(link.source, link.target): link for link in cluster.links}
        self._devices = {device.name: device for device in cluster.devices}
        self._named = {end for pair in self._table for end in pair}
        self._classes: dict[str, Hashable] = {}

    def __call__(self, source: str, target: str) -> Link:
        """Return the most specific link from one device to another; FXP403 if there is none."""
        ends = [self._patterns(name) for name in (source, target)]
        if source == target:
            return self._self_link(source)
        for a, b in _ORDER:
            link = self._table.get((ends[0][a], ends[1][b]))
            if link is not None:
                return link
        raise error(
            "FXP403",
            where=f"{source} -> {target}",
            why="no link of the cluster matches this pair of devices",
            fix=f"add a link with source {ends[0][1]!r} and target {ends[1][1]!r}, or '*' for both",
        )

    def group(self, name: str) -> str:
        """Return the device if a link names it, else its host; equal groups have equal links."""
        return name if name in self._named else self._patterns(name)[1]

    def link_class(self, name: str) -> Hashable:
        """Return a value that is equal for devices with equal links.

        Between devices of two classes, or of one, all links within hosts are equal, and all links
        between hosts.
        """
        group = self.group(name)
        if group not in self._classes:
            self._classes[group] = self._describe(group, self._devices[name].host)
        return self._classes[group]

    @cached_property
    def _touching(self) -> dict[str, list[Link]]:
        """Return the links by each device or host that they name."""
        found: dict[str, list[Link]] = {}
        for (source, target), link in self._table.items():
            for end in sorted({source, target} - {ANY}):
                found.setdefault(end, []).append(link)
        return found

    def _describe(self, group: str, host: str) -> Hashable:
        """Return the links of a group; its own name where a link names it with another one."""
        rows = []
        for end in dict.fromkeys((group, host)):
            for link in self._touching.get(end, ()):
                if {link.source, link.target} - {ANY, group, host}:
                    return group
                source, target = (
                    ANY if x == ANY else "host" if x == host else "self"
                    for x in (link.source, link.target)
                )
                rows.append(msgspec.structs.replace(link, source=source, target=target))
        return frozenset(rows)

    def _patterns(self, name: str) -> tuple[str, str, str]:
        device = self._devices.get(name)
        if device is None:
            raise error(
                "FXP403",
                where=f"device {name!r}",
                why="the cluster has no device of this name",
                fix=f"use one of {', '.join(list(self._devices)[:8])}",
            )
        return (ANY, device.host, name)

    def _self_link(self, name: str) -> Link:
        bandwidth = self._devices[name].bandwidth
        return Link(source=name, target=name, latency=0.0, bandwidth=bandwidth, kind="self")


def has_equal_links(cluster: Cluster) -> bool:
    """Return whether any two devices have the same link, which no others share.

    Of many devices, whether all links of the cluster are equal, used or not.
    """
    if any(link.shared or link.segment for link in cluster.links):
        return False
    if len(cluster.devices) <= _COMPARED:
        return len(set(list_links(cluster))) < 2
    return len({msgspec.structs.replace(one, source="", target="") for one in cluster.links}) < 2


def list_links(cluster: Cluster) -> list[Link]:
    """Return the links between any two devices, without their ends."""
    index = LinkIndex(cluster)
    names = [device.name for device in cluster.devices]
    return [
        msgspec.structs.replace(index(a, b), source="", target="")
        for a, b in permutations(names, 2)
    ]
