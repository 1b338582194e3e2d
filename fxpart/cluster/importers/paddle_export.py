"""Export a cluster as PaddlePaddle's JSON, based on the imported document if there is one."""

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

# PaddlePaddle's name of each kind of link; other kinds are SYS within and NET between machines.
_TYPES = {"nvlink": "NVL", "pcie": "PHB", "net": "NET", "local": "LOC"}


def document_of(cluster: Cluster) -> dict[str, Any]:
    """Return a PaddlePaddle document; importing it gives the same cluster.

    Links of hosts and "*" are expanded to pairs of devices. Raises FXP407 if there are too many.
    """
    extra = {} if cluster.extra is UNSET else cluster.extra
    made = _patch(extra.get(KEY), cluster, _import_options(extra))
    if made is None:
        made = _new(cluster)
    if not _is_complete(made, cluster):
        others = {key: value for key, value in extra.items() if key != KEY}
        own = msgspec.structs.replace(cluster, extra=others or UNSET)
        made[OWN] = msgspec.to_builtins(to_builtins(own))  # Dates become texts, as in any JSON.
    return made


def _import_options(extra: dict[str, Any]) -> ImportOptions:
    """Return the options of the document's import."""
    given = extra.get(GIVEN)
    given = given if isinstance(given, dict) else {}
    memory, model = given.get("memory"), given.get("device")
    return ImportOptions(
        memory=memory if isinstance(memory, float) else None,
        device=model if isinstance(model, str) else None,
    )


def _is_complete(document: dict[str, Any], cluster: Cluster) -> bool:
    """Return whether PaddlePaddle's own keys represent the cluster completely."""
    extra = {} if cluster.extra is UNSET else cluster.extra
    if KEY not in extra:
        return False
    try:
        read = plain(document, _import_options(extra))
    except FxpartError:
        return False
    return read == msgspec.structs.replace(cluster, extra={**extra, KEY: document})


def _patch(imported: Any, cluster: Cluster, given: ImportOptions) -> dict[str, Any] | None:
    """Return the imported document with all changes; None if its devices differ."""
    try:
        old = plain(imported, given)
    except FxpartError:
        return None
    before = {d.name: d for d in old.devices}
    if {d.name: d.host for d in cluster.devices} != {n: d.host for n, d in before.items()}:
        return None
    document: dict[str, Any] = deepcopy(imported)
    ids = {_id(d): d.name for d in old.devices}
    now = {d.name: d for d in cluster.devices}
    for machine in document["machines"]:
        for entry in machine["devices"]:
            name = _name(entry, ids)
            if name is not None and before[name] != now[name]:
                _patch_device(entry, before[name], now[name])
    _patch_links(document, cluster, ids, old)
    if document != imported:
        document.pop(OWN, None)  # It describes the cluster before the change.
    return document


def _name(entry: dict[str, Any], ids: dict[int, str]) -> str | None:
    """Return the device of an entry; None if it runs no rank or its id is not valid."""
    try:
        return ids.get(identity(entry.get(ID), ID))
    except FxpartError:
        return None


def _id(item: Device) -> int:
    return -1 if item.extra is UNSET else int(item.extra[ID])


def _patch_device(entry: dict[str, Any], old: Device, new: Device) -> None:
    """Write the changed figures of a device into its entry."""
    if old.model != new.model:
        entry["model"] = new.model
    if old.memory != new.memory:
        entry["memory"] = _integral(new.memory / GIGA)
    for dtype, key in RATES.items():
        if old.flops.get(dtype) == new.flops.get(dtype):
            continue
        if dtype in new.flops:
            entry[key] = _integral(new.flops[dtype] / GIGA)
        else:
            entry.pop(key, None)


def _patch_links(
    document: dict[str, Any], cluster: Cluster, ids: dict[int, str], old: Cluster
) -> None:
    """Write changed links, remove deleted ones and add new ones."""
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
        entry["bandwidth"] = _integral(new.bandwidth / GIGA)
    if old.latency != new.latency:
        entry["latency"] = _integral(new.latency * 1e3)
    if old.kind != new.kind:
        entry["type"] = _type(new)


def _new(cluster: Cluster) -> dict[str, Any]:
    """Return a document for a cluster that was not imported from one."""
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
        "memory": _integral(item.memory / GIGA),
    }
    rates = {key: item.flops[dtype] for dtype, key in RATES.items() if dtype in item.flops}
    return entry | {key: _integral(rate / GIGA) for key, rate in rates.items()}


def _link_entry(found: Link, source: int, target: int) -> dict[str, Any]:
    return {
        "source_global_id": source,
        "target_global_id": target,
        "type": _type(found),
        "bandwidth": _integral(found.bandwidth / GIGA),
        "latency": _integral(found.latency * 1e3),
        "hop": 0,
    }


def _pairs(cluster: Cluster) -> dict[tuple[str, str], Link]:
    """Return the most specific link of each pair of devices that has one."""
    names = [device.name for device in cluster.devices]
    if len(names) * (len(names) - 1) > MAX_LINKS:
        why = f"{len(names)} devices have too many pairs, as the format needs a link for each"
        raise make_import_error("the cluster", why, "export at most 512 devices")
    links, found = LinkIndex(cluster), {}
    for source, target in permutations(names, 2):
        try:
            found[source, target] = links(source, target)
        except FxpartError:
            continue  # Missing links are missing in the document, too.
    return found


def _type(found: Link) -> str:
    kind = found.kind.upper()
    return _TYPES.get(found.kind, kind if kind in KINDS else "SYS")


def _integral(value: float) -> int | float:
    """Return a whole number without ".0", as in PaddlePaddle's files."""
    return int(value) if value == int(value) and abs(value) < 1 << 53 else value
