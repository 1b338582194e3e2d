"""A cluster as PaddlePaddle's JSON: the document it came from, with what has changed since."""

from __future__ import annotations

from copy import deepcopy
from itertools import permutations
from typing import Any

import msgspec
from msgspec import UNSET

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.files import to_builtins
from fxpart.cluster.importers.paddle_document import (
    GIGA,
    GIVEN,
    ID,
    KEY,
    KINDS,
    OWN,
    RATES,
    identity,
    link_ends,
    plain,
)
from fxpart.cluster.importers.source_facts import ImportOptions, make_import_error
from fxpart.cluster.link_index import LinkIndex
from fxpart.cluster.merge import hosts_of
from fxpart.cluster.model import Cluster
from fxpart.cluster.validation import MAX_LINKS
from fxpart.errors import FxpartError

# What a kind of link is called there; another kind inside a machine is SYS, between machines NET.
_TYPES = {"nvlink": "NVL", "pcie": "PHB", "net": "NET", "local": "LOC"}


def document_of(cluster: Cluster) -> dict[str, Any]:
    """The cluster as PaddlePaddle's document; reading it gives the same cluster again.

    Links of hosts and "*" are written out for each pair of devices. Raises FXP407 where there are
    too many pairs.
    """
    extra = {} if cluster.extra is UNSET else cluster.extra
    made = _patched(extra.get(KEY), cluster, _given(extra))
    if made is None:
        made = _new(cluster)
    if not _says_all(made, cluster):
        rest = {key: value for key, value in extra.items() if key != KEY}
        own = msgspec.structs.replace(cluster, extra=rest or UNSET)
        made[OWN] = msgspec.to_builtins(to_builtins(own))  # dates become texts, as in any JSON
    return made


def _given(extra: dict[str, Any]) -> ImportOptions:
    """The options with which the kept document was read."""
    given = extra.get(GIVEN)
    given = given if isinstance(given, dict) else {}
    memory, model = given.get("memory"), given.get("device")
    return ImportOptions(
        memory=memory if isinstance(memory, float) else None,
        device=model if isinstance(model, str) else None,
    )


def _says_all(document: dict[str, Any], cluster: Cluster) -> bool:
    """Whether PaddlePaddle's own keys give the cluster again, but for the kept document."""
    extra = {} if cluster.extra is UNSET else cluster.extra
    if KEY not in extra:
        return False
    try:
        read = plain(document, _given(extra))
    except FxpartError:
        return False
    return read == msgspec.structs.replace(cluster, extra={**extra, KEY: document})


def _patched(kept: Any, cluster: Cluster, given: ImportOptions) -> dict[str, Any] | None:
    """The kept document with what has changed; None where it has other devices."""
    try:
        old = plain(kept, given)
    except FxpartError:
        return None
    before = {d.name: d for d in old.devices}
    if {d.name: d.host for d in cluster.devices} != {n: d.host for n, d in before.items()}:
        return None
    document: dict[str, Any] = deepcopy(kept)
    ids = {_id(d): d.name for d in old.devices}
    now = {d.name: d for d in cluster.devices}
    for machine in document["machines"]:
        for entry in machine["devices"]:
            name = _name(entry, ids)
            if name is not None and before[name] != now[name]:
                _patch_device(entry, before[name], now[name])
    _patch_links(document, cluster, ids, old)
    if document != kept:
        document.pop(OWN, None)  # it says what was before
    return document


def _name(entry: dict[str, Any], ids: dict[int, str]) -> str | None:
    """The device of an entry; None where it runs no rank, whatever its id is."""
    try:
        return ids.get(identity(entry.get(ID), ID))
    except FxpartError:
        return None


def _id(item: Device) -> int:
    return -1 if item.extra is UNSET else int(item.extra[ID])


def _patch_device(entry: dict[str, Any], old: Device, new: Device) -> None:
    """Write the device's figures into its entry where they are other ones."""
    if old.model != new.model:
        entry["model"] = new.model
    if old.memory != new.memory:
        entry["memory"] = _short(new.memory / GIGA)
    for dtype, key in RATES.items():
        if old.flops.get(dtype) == new.flops.get(dtype):
            continue
        if dtype in new.flops:
            entry[key] = _short(new.flops[dtype] / GIGA)
        else:
            entry.pop(key, None)


def _patch_links(
    document: dict[str, Any], cluster: Cluster, ids: dict[int, str], old: Cluster
) -> None:
    """Write the links' figures where they are other ones; drop those that are gone, add new."""
    numbers = {name: key for key, name in ids.items()}
    before = {(x.source, x.target): x for x in old.links}
    now = {(x.source, x.target): x for x in cluster.links}
    if any(end not in numbers for pair in now for end in pair):
        now = _pairs(cluster)
    for machine in document["machines"]:
        kept = []
        for entry in machine.get("links") or []:
            ends = link_ends(entry, "links")
            pair = (ids.get(ends[0], ""), ids.get(ends[1], ""))
            if pair in before and ends[0] != ends[1]:
                if pair not in now:
                    continue
                if now[pair] != before[pair]:
                    _patch_link(entry, before[pair], now[pair])
            kept.append(entry)
        if "links" in machine:
            machine["links"] = kept
    hosts = {d.name: d.host for d in cluster.devices}
    by_host = {
        hosts[name]: machine
        for machine in document["machines"]
        for entry in machine["devices"]
        if (name := _name(entry, ids)) is not None
    }
    for pair in now:
        if pair not in before:
            entry = _link_entry(now[pair], numbers[pair[0]], numbers[pair[1]])
            by_host[hosts[pair[0]]].setdefault("links", []).append(entry)


def _patch_link(entry: dict[str, Any], old: Link, new: Link) -> None:
    if old.bandwidth != new.bandwidth:
        entry["bandwidth"] = _short(new.bandwidth / GIGA)
    if old.latency != new.latency:
        entry["latency"] = _short(new.latency * 1e3)
    if old.kind != new.kind:
        entry["type"] = _type(new)


def _new(cluster: Cluster) -> dict[str, Any]:
    """A document for a cluster that did not come from one."""
    addresses = {} if cluster.hosts is UNSET else {h.name: h.address for h in cluster.hosts}
    numbers = {d.name: i for i, d in enumerate(cluster.devices)}
    pairs = _pairs(cluster)
    machines: list[dict[str, Any]] = []
    of: dict[str, dict[str, Any]] = {}
    for host in hosts_of(cluster):
        own = [d for d in cluster.devices if d.host == host]
        of[host] = {"hostname": host, "addr": addresses.get(host, ""), "port": "", "links": []}
        of[host]["devices"] = [_device_entry(d, numbers[d.name], i) for i, d in enumerate(own)]
        machines.append(of[host])
    hosts = {d.name: d.host for d in cluster.devices}
    for (source, target), found in pairs.items():
        entry = _link_entry(found, numbers[source], numbers[target])
        of[hosts[source]]["links"].append(entry)
    return {"machines": machines}


def _device_entry(item: Device, number: int, index: int) -> dict[str, Any]:
    entry = {
        ID: number,
        "local_id": index,
        "type": item.kind.upper(),
        "model": item.model,
        "memory": _short(item.memory / GIGA),
    }
    rates = {key: item.flops[dtype] for dtype, key in RATES.items() if dtype in item.flops}
    return entry | {key: _short(rate / GIGA) for key, rate in rates.items()}


def _link_entry(found: Link, source: int, target: int) -> dict[str, Any]:
    return {
        "source_global_id": source,
        "target_global_id": target,
        "type": _type(found),
        "bandwidth": _short(found.bandwidth / GIGA),
        "latency": _short(found.latency * 1e3),
        "hop": 0,
    }


def _pairs(cluster: Cluster) -> dict[tuple[str, str], Link]:
    """The link of each pair of devices that has one, as the closest match says."""
    names = [device.name for device in cluster.devices]
    if len(names) * (len(names) - 1) > MAX_LINKS:
        why = f"{len(names)} devices make too many pairs: the format has a link for each"
        raise make_import_error("the cluster", why, "export a part of it, at most 512 devices")
    links, found = LinkIndex(cluster), {}
    for source, target in permutations(names, 2):
        try:
            found[source, target] = links(source, target)
        except FxpartError:
            continue  # a link that is missing here is missing there
    return found


def _type(found: Link) -> str:
    kind = found.kind.upper()
    return _TYPES.get(found.kind, kind if kind in KINDS else "SYS")


def _short(value: float) -> int | float:
    """A number without ".0", as people write it there."""
    return int(value) if value == int(value) and abs(value) < 1 << 53 else value
