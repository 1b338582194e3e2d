"""Find missing links, missing measurements and misspelled keys of a cluster."""

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
    """Return an FXP403 for each pair of devices without a link, at most ``MOST``.

    Devices that no link names individually are one group, and one pair per group is reported.
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
    """Return texts that name the missing facts which would improve predictions."""
    found = []
    known = {} if cluster.hosts is UNSET else {host.name: host for host in cluster.hosts}
    busy = Counter(device.host for device in cluster.devices if device.kind == "cpu")
    cores = [name for name in busy if not (name in known and known[name].cores)]
    if cores:
        found.append(f"the number of cores of {_named(cores)}")
    alone = [n for n, count in busy.items() if count > 1 and not (n in known and known[n].slowdown)]
    if alone:
        found.append(f"the slowdown of ranks that compute at the same time on {_named(alone)}")
    if any(device.measured is UNSET for device in cluster.devices):
        count = sum(device.measured is UNSET for device in cluster.devices)
        found.append(f"measured rates of {count} of {len(cluster.devices)} devices")
    if without := len(missing_links(cluster)):
        many = f"{without} links" if without < MOST else "many links"
        found.append(f"{many} between devices")
    if len(cluster.devices) > 1:
        count = sum(link.curve is UNSET for link in cluster.links)
        if count:
            found.append(f"measured times of {count} of {len(cluster.links)} links")
        if cluster.collectives is UNSET or not cluster.collectives:
            found.append("measured times of collectives")
    return tuple(found)


def find_misspelled_keys(cluster: Cluster) -> tuple[str, ...]:
    """Return messages for unknown keys, which have no effect, that resemble known keys."""
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
                    message = f"key {key!r} of {where} has no effect; did you mean {close[0]!r}?"
                    found.setdefault(message)
    return tuple(found)


def _named(hosts: list[str]) -> str:
    return f"host {hosts[0]!r}" + (f" and {len(hosts) - 1} more" if len(hosts) > 1 else "")
