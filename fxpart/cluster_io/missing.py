"""What a cluster does not say: pairs without a link, and facts that were never measured."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING

from msgspec import UNSET

from fxpart.cluster_io.lookup import Links
from fxpart.errors import FxpartError, Problem

if TYPE_CHECKING:
    from fxpart.cluster import Cluster


def missing_links(cluster: Cluster) -> tuple[Problem, ...]:
    """An FXP403 for each pair without a link; one for all devices that no link tells apart."""
    links = Links(cluster)
    groups: dict[str, list[str]] = {}
    for device in cluster.devices:
        groups.setdefault(links.group(device.name), []).append(device.name)
    found: list[Problem] = []
    for one, other in product(groups.values(), repeat=2):
        target = next((name for name in other if name != one[0]), None)
        if target is None:
            continue
        try:
            links(one[0], target)
        except FxpartError as fault:
            found += fault.problems
    return tuple(found)


def missing_facts(cluster: Cluster) -> tuple[str, ...]:
    """What would make predictions better, in words; () where nothing is missing."""
    found = []
    known = {} if cluster.hosts is UNSET else {host.name: host for host in cluster.hosts}
    busy = Counter(device.host for device in cluster.devices if device.kind == "cpu")
    cores = [name for name in busy if not (name in known and known[name].cores)]
    if cores:
        found.append(f"how many cores {_named(cores)} has")
    alone = [n for n, count in busy.items() if count > 1 and not (n in known and known[n].slowdown)]
    if alone:
        found.append(f"how the ranks of {_named(alone)} slow each other down")
    if any(device.measured is UNSET for device in cluster.devices):
        count = sum(device.measured is UNSET for device in cluster.devices)
        found.append(f"measured rates of {count} of {len(cluster.devices)} devices")
    if without := len(missing_links(cluster)):
        found.append(f"how devices reach each other: {without} links are missing")
    if len(cluster.devices) > 1:
        count = sum(link.curve is UNSET for link in cluster.links)
        if count:
            found.append(f"measured times of {count} of {len(cluster.links)} links")
        if cluster.collectives is UNSET or not cluster.collectives:
            found.append("measured times of collectives")
    return tuple(found)


def _named(hosts: list[str]) -> str:
    return f"host {hosts[0]!r}" + (f" and {len(hosts) - 1} more" if len(hosts) > 1 else "")
