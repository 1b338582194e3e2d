"""Read and write PaddlePaddle's rank mapping: the device of each rank, by machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from fxpart.cluster.importers.paddle_document import ID, KEY, entries, hostname, identity
from fxpart.cluster.importers.source_facts import make_import_error, parse_json
from fxpart.cluster.model import Cluster
from fxpart.errors import quoted


def mapping_of(cluster: Cluster, ranks: Sequence[str]) -> list[dict[str, Any]]:
    """Return the mapping of ranks 0, 1, ... to devices, given by name.

    Local ids, addresses and ports are those of the imported document. Without one, they are the
    index of the device on its host, the host's address, and "".
    """
    machines: dict[str, dict[str, Any]] = {}
    local, ports = _local(cluster), _ports(cluster)
    addresses = {} if cluster.hosts is UNSET else {h.name: h.address for h in cluster.hosts}
    hosts = {device.name: device.host for device in cluster.devices}
    for rank, name in enumerate(ranks):
        host = hosts[name]
        machine = machines.setdefault(
            host,
            {"hostname": host, "addr": addresses.get(host, ""), "port": ports.get(host, ""),
             "ranks": {}},
        )  # fmt: skip
        machine["ranks"][str(rank)] = [local[name]]
    return list(machines.values())


def reorder_devices(cluster: Cluster, text: str) -> Cluster:
    """Reorder the devices of a cluster by the ranks of a mapping; devices without a rank come last.

    Raises FXP407 if a rank is missing or occurs twice, or if a device is unknown or has two ranks.
    """
    machines = parse_json(text)
    if not isinstance(machines, list):
        raise make_import_error("the mapping", "it is not a list of machines")
    devices = {(d.host, _local(cluster)[d.name]): d for d in cluster.devices}
    found: dict[int, str] = {}
    for i, machine in enumerate(machines):
        where = f"[{i}]"
        if not isinstance(machine, dict) or not isinstance(machine.get("ranks"), dict):
            raise make_import_error(where, "it is not an object with ranks")
        host = hostname(machine, where)
        for rank, ids in machine["ranks"].items():
            place = f"{where}.ranks.{rank[:20]}"
            number = identity(rank, place)
            if not isinstance(ids, list) or len(ids) != 1:
                raise make_import_error(
                    place, "a rank must have exactly one device", 'for example "0": [1]'
                )
            key = (host, identity(ids[0], place))
            if key not in devices:
                raise make_import_error(place, f"host {quoted(host)} has no device {key[1]}")
            if number in found or devices[key].name in found.values():
                raise make_import_error(place, "the rank or its device occurs twice")
            found[number] = devices[key].name
    if sorted(found) != list(range(len(found))) or not found:
        raise make_import_error("the mapping", f"the ranks are {sorted(found)[:8]}, not 0, 1, ...")
    order = {found[rank]: rank for rank in found}
    new = sorted(cluster.devices, key=lambda d: order.get(d.name, len(order)))
    return msgspec.structs.replace(cluster, devices=tuple(new))


def _local(cluster: Cluster) -> dict[str, int]:
    """Return each device's number on its host."""
    found: dict[str, int] = {}
    count: dict[str, int] = {}
    kept = _document(cluster)
    ids = {}
    if kept is not None:
        ids = {
            identity(entry.get(ID), place): identity(entry.get("local_id", entry.get(ID)), place)
            for place, _, entry in entries(kept["machines"])
        }
    for device in cluster.devices:
        place = count.get(device.host, 0)
        count[device.host] = place + 1
        own = None if device.extra is UNSET else device.extra.get(ID)
        found[device.name] = ids.get(own, place) if isinstance(own, int) else place
    return found


def _ports(cluster: Cluster) -> dict[str, Any]:
    """Return each host's port from the imported document."""
    hosts = () if cluster.hosts is UNSET else cluster.hosts
    return {h.name: h.extra["port"] for h in hosts if h.extra is not UNSET and "port" in h.extra}


def _document(cluster: Cluster) -> dict[str, Any] | None:
    kept = None if cluster.extra is UNSET else cluster.extra.get(KEY)
    return kept if isinstance(kept, dict) and isinstance(kept.get("machines"), list) else None
