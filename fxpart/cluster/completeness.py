"""What a cluster does not say: missing links, facts never measured, keys that say nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import product
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from fxpart.cluster.link_index import ANY, LinkIndex
from fxpart.errors import FxpartError, Problem

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster

MOST = 64


def missing_links(cluster: Cluster) -> tuple[Problem, ...]:
    """An FXP403 for each pair without a link, one for all devices that no link tells apart.

    The first ``MOST`` of them: of many hosts without links between them nobody reads every pair.
    """
    if any(link.source == ANY == link.target for link in cluster.links):
        return ()
    links = LinkIndex(cluster)
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
        if len(found) >= MOST:
            break
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
        many = f"{without} links" if without < MOST else "many links"
        found.append(f"how devices reach each other: {many} are missing")
    if len(cluster.devices) > 1:
        count = sum(link.curve is UNSET for link in cluster.links)
        if count:
            found.append(f"measured times of {count} of {len(cluster.links)} links")
        if cluster.collectives is UNSET or not cluster.collectives:
            found.append("measured times of collectives")
    return tuple(found)


def find_misspelled_keys(cluster: Cluster) -> tuple[str, ...]:
    """Unknown keys that look like known ones: they are kept, and have no effect. In words."""
    parts: list[tuple[str, Iterable[Any]]]
    parts = [("the cluster", [cluster]), ("devices", cluster.devices), ("links", cluster.links)]
    parts += [("hosts", () if cluster.hosts is UNSET else cluster.hosts)]
    parts += [("collectives", () if cluster.collectives is UNSET else cluster.collectives)]
    found: dict[str, None] = {}
    for where, items in parts:
        for item in items:
            known = [name for name in item.__struct_fields__ if name != "extra"]
            for key in () if item.extra is UNSET else item.extra:
                if close := get_close_matches(key.lower(), known, n=1, cutoff=0.8):
                    words = f"{key!r} of {where} has no effect: {close[0]!r} is the key"
                    found.setdefault(words)
    return tuple(found)


def _named(hosts: list[str]) -> str:
    return f"host {hosts[0]!r}" + (f" and {len(hosts) - 1} more" if len(hosts) > 1 else "")
