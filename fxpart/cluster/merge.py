"""Merge links, devices and measured curves into a cluster."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from fxpart.cluster.importers.source_facts import ImportOptions, make_import_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fxpart.cluster.devices import CollectiveCurve, Device, Link
    from fxpart.cluster.model import Cluster


def hosts_of(cluster: Cluster) -> list[str]:
    """Return the names of the devices' hosts, in rank order."""
    return list(dict.fromkeys(device.host for device in cluster.devices))


def select_hosts(cluster: Cluster, facts: ImportOptions) -> list[str]:
    """Return the hosts that a description of one host applies to: ``facts.hosts``, or the only one.

    Raises FXP407 for an unknown host, and if the cluster has several hosts and none is named.
    """
    every = hosts_of(cluster)
    for name in facts.hosts:
        if name not in every:
            raise make_import_error(
                f"--host {name}", "the cluster has no such host", f"use one of {every[:8]}"
            )
    if facts.hosts:
        return list(facts.hosts)
    if len(every) > 1:
        why = f"the text describes one host, but the cluster has {len(every)}"
        raise make_import_error(
            "--host", why, f"name each host that it applies to: --host {every[0]}"
        )
    return every


def collapse(host: str, links: Sequence[Link], names: Sequence[str]) -> list[Link]:
    """Return a single link of the host to itself if all pairs of ``names`` have equal links."""
    kinds = {_without_ends(link) for link in links}
    pairs = {(link.source, link.target) for link in links}
    if len(kinds) != 1 or pairs != set(permutations(names, 2)):
        return list(links)
    return [msgspec.structs.replace(links[0], source=host, target=host)]


def replace_host_links(cluster: Cluster, host: str, links: Iterable[Link]) -> Cluster:
    """Replace the links between the devices of one host."""
    inside = {host} | {device.name for device in cluster.devices if device.host == host}
    kept = [x for x in cluster.links if not (x.source in inside and x.target in inside)]
    return msgspec.structs.replace(cluster, links=(*kept, *links))


def merge_links(cluster: Cluster, links: Iterable[Link]) -> Cluster:
    """Add links, each replacing the one with the same ends."""
    table = {(link.source, link.target): link for link in cluster.links}
    table |= {(link.source, link.target): link for link in links}
    return msgspec.structs.replace(cluster, links=tuple(table.values()))


def merge_curves(cluster: Cluster, curves: Iterable[CollectiveCurve]) -> Cluster:
    """Add curves, each replacing the one with the same operation and group."""
    old = () if cluster.collectives is UNSET else cluster.collectives
    table = {(curve.operation, curve.ranks, curve.hosts): curve for curve in old}
    table |= {(curve.operation, curve.ranks, curve.hosts): curve for curve in curves}
    return msgspec.structs.replace(cluster, collectives=tuple(table.values()))


def replace_devices(cluster: Cluster, devices: Iterable[Device]) -> Cluster:
    """Replace the devices of the same names."""
    table = {device.name: device for device in devices}
    kept = tuple(table.get(device.name, device) for device in cluster.devices)
    return msgspec.structs.replace(cluster, devices=kept)


def _without_ends(link: Link) -> Link:
    return msgspec.structs.replace(link, source="*", target="*", extra=UNSET)
