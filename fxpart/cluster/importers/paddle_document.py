"""Convert PaddlePaddle's cluster JSON into a cluster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from msgspec import UNSET

from fxpart.cluster.devices import Device, Host, Link
from fxpart.cluster.gpu_detection import match_model
from fxpart.cluster.importers.source_facts import (
    ImportOptions,
    make_import_error,
    number,
    scaled,
)
from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import device_data
from fxpart.errors import FxpartError, quoted

GIGA = 1e9
RATES = {"float32": "sp_gflops", "float64": "dp_gflops", "float16": "hp_gflops"}
ACCELERATORS = ("GPU", "XPU", "DCU")
KINDS = {
    "NVL": "nvlink", "NVB": "nvlink", "PIX": "pcie", "PIB": "pcie", "PHB": "pcie", "SYS": "pcie",
    "LOC": "local", "NET": "net",
}  # fmt: skip
KEY = "paddle"
OWN = "fxpart"
# The import options, stored in the cluster so that the document can be parsed again.
GIVEN = "paddle_given"
ID = "global_id"


def plain(document: Any, facts: ImportOptions | None = None) -> Cluster:
    """Return the cluster that PaddlePaddle's own keys describe, without validation."""
    facts = facts or ImportOptions()
    machines = _list(_dict(document, "the document"), "machines", "")
    self_bandwidths = _self_bandwidths(machines)
    names: dict[int, str] = {}
    devices: list[tuple[int, Device]] = []
    hosts: dict[str, Host] = {}
    ranked = _rank_types(machines)
    for i, machine in enumerate(machines):
        where = f"machines[{i}]"
        host = hostname(machine, where)
        if host in hosts:
            raise make_import_error(
                f"{where}.hostname", f"two machines have the name {quoted(host)}"
            )
        address = machine.get("addr")
        port = {"port": machine["port"]} if "port" in machine else UNSET
        hosts[host] = Host(
            name=host, address=address if isinstance(address, str) else "", source=KEY, extra=port
        )
        places = _places(machine, where, ranked)
        local = Counter(local_id(entry, place) for place, entry in places)
        for place, entry in places:
            key = identity(entry.get(ID), f"{place}.{ID}")
            if key in names:
                raise make_import_error(f"{place}.{ID}", f"two devices have the id {key}")
            index = local_id(entry, place)
            short = f"{index}" if local[index] == 1 else f"{index}-{key}"
            names[key] = f"{host}/{entry['type'].lower()}:{short}"
            own = self_bandwidths.get(key)
            devices.append((key, _device(entry, names[key], host, place, own, facts)))
    used = {made.host for _, made in devices}
    given = {"memory": facts.memory, "device": facts.device}
    given = {key: value for key, value in given.items() if value is not None}
    return Cluster(
        name=KEY,
        devices=tuple(made for _, made in sorted(devices, key=lambda pair: pair[0])),
        links=tuple(_links(document, machines, names)),
        hosts=tuple(host for host in hosts.values() if host.name in used),
        extra={KEY: document, **({GIVEN: given} if given else {})},
    )


def entries(machines: list[Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (location, machine, entry) of every device of a document."""
    for i, machine in enumerate(machines):
        for j, entry in enumerate(
            _list(_dict(machine, f"machines[{i}]"), "devices", f"machines[{i}]")
        ):
            place = f"machines[{i}].devices[{j}]"
            yield place, machine, _dict(entry, place)


def _rank_types(machines: list[Any]) -> tuple[str, ...]:
    """Return the device types that run ranks: accelerators if there are any, else CPUs."""
    types = {str(entry.get("type")) for _, _, entry in entries(machines)}
    return ACCELERATORS if types & set(ACCELERATORS) else ("CPU",)


def _places(
    machine: dict[str, Any], where: str, ranked: tuple[str, ...]
) -> list[tuple[str, dict[str, Any]]]:
    """Return (location, entry) of a machine's devices that run ranks."""
    listed = _list(machine, "devices", where)
    return [
        (f"{where}.devices[{j}]", entry)
        for j, entry in enumerate(listed)
        if entry.get("type") in ranked
    ]


def _device(
    entry: dict[str, Any], name: str, host: str, where: str, own: float | None, facts: ImportOptions
) -> Device:
    """Return a device. own: bytes/s of its link to itself, None without such a link."""
    flops = {
        dtype: scaled(entry[key], GIGA, f"{where}.{key}")
        for dtype, key in RATES.items()
        if key in entry
    }
    if not flops:
        raise make_import_error(where, "sp_gflops, dp_gflops and hp_gflops are all missing")
    if "memory" not in entry:
        raise make_import_error(f"{where}.memory", "it is missing")
    model = str(entry.get("model") or "unknown")
    bandwidth = own or facts.memory
    source = "its link to itself" if own else "as given"
    if bandwidth is None:
        known = facts.device or match_model(model)
        if known is None:
            why = "the format has no memory bandwidth, and fxpart has no data for the device "
            why += quoted(model)
            raise make_import_error(where, why, "pass --memory-gbs GB/s or --device MODEL")
        data = device_data(known)
        bandwidth, source = data["bandwidth"], f"{data['name']}, {data['source']} ({data['date']})"
    return Device(
        name=name,
        kind="cpu" if entry["type"] == "CPU" else "gpu",
        model=model,
        host=host,
        memory=round(scaled(entry["memory"], GIGA, f"{where}.memory")),
        flops=flops,
        bandwidth=bandwidth,
        source=f"{KEY}; memory bandwidth: {source}",
        extra={ID: identity(entry[ID], f"{where}.{ID}")},
    )


def _self_bandwidths(machines: list[Any]) -> dict[int, float]:
    """Return bytes/s of the links of devices to themselves, by id."""
    return {
        link_ends(entry, where)[0]: scaled(entry["bandwidth"], GIGA, f"{where}.bandwidth")
        for where, entry in link_entries(machines)
        if len(set(link_ends(entry, where))) == 1 and "bandwidth" in entry
    }


def _links(document: dict[str, Any], machines: list[Any], names: dict[int, str]) -> list[Link]:
    """Return the links between devices that run ranks; the last of a pair wins, as in Paddle."""
    table: dict[tuple[int, int], Link] = {}
    for where, entry in link_entries(machines):
        ends = link_ends(entry, where)
        if ends[0] in names and ends[1] in names and ends[0] != ends[1]:
            table[ends] = _link(entry, names[ends[0]], names[ends[1]], where, document)
    return list(table.values())


def link_entries(machines: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, entry) of every link of a document."""
    for i, machine in enumerate(machines):
        for j, entry in enumerate(_list(machine, "links", f"machines[{i}]", optional=True)):
            place = f"machines[{i}].links[{j}]"
            yield place, _dict(entry, place)


def link_ends(entry: dict[str, Any], where: str) -> tuple[int, int]:
    """Return the ids of a link's two devices."""
    return (
        identity(entry.get("source_global_id"), f"{where}.source_global_id"),
        identity(entry.get("target_global_id"), f"{where}.target_global_id"),
    )


def _link(
    entry: dict[str, Any], source: str, target: str, where: str, document: dict[str, Any]
) -> Link:
    """Return a link; a missing latency is computed from ``alpha_latency`` if present."""
    if "bandwidth" not in entry:
        raise make_import_error(f"{where}.bandwidth", "it is missing")
    kind = KINDS.get(str(entry.get("type")), str(entry.get("type") or "").lower())
    origin = KEY
    if entry.get("latency") is not None:
        latency = number(entry["latency"], f"{where}.latency") / 1e3
    else:
        hops = number(entry.get("hop") or 0, f"{where}.hop")
        found = _alpha(document.get("alpha_latency"), kind, hops)
        latency = found or 0.0
        origin += "; latency from its alpha_latency" if found else "; no latency in the document"
    return Link(
        source=source,
        target=target,
        latency=latency,
        bandwidth=scaled(entry["bandwidth"], GIGA, f"{where}.bandwidth"),
        kind=kind,
        origin=origin,
    )


def _alpha(table: Any, kind: str, hops: float) -> float | None:
    """Return a link's latency in seconds: base + (intra | inter + hops * switch), in µs."""
    try:
        hop = table["inter"]["ring"] if kind == "net" else table["intra"]["ring"]
        parts = [number(x, "alpha_latency") for x in (table["base"]["ring"], hop)]
        if kind == "net" and hops:
            parts.append(hops * number(table["switch"], "alpha_latency.switch"))
    except (KeyError, TypeError, FxpartError):
        return None
    return sum(parts) / 1e6


def hostname(machine: dict[str, Any], where: str) -> str:
    """Return a machine's name, else its address; FXP407 if it has neither."""
    found = machine.get("hostname") or machine.get("addr")
    if not isinstance(found, str):
        raise make_import_error(f"{where}.hostname", "it is missing or not a text")
    return found


def local_id(entry: dict[str, Any], where: str) -> int:
    """Return the number of a device on its machine."""
    return identity(entry.get("local_id", entry.get(ID)), f"{where}.local_id")


def identity(value: Any, where: str) -> int:
    """Return an id, given as an integer or as its text."""
    if (isinstance(value, str) and not re.fullmatch(r"[0-9]{1,15}", value)) or value is None:
        raise make_import_error(where, f"{quoted(value)} is not an id")
    found = number(value, where)
    if found != int(found) or not 0 <= found < 1 << 53:
        raise make_import_error(where, f"{quoted(value)} is not an id")
    return int(found)


def _dict(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise make_import_error(where, "it is not an object")
    return value


def _list(value: dict[str, Any], key: str, where: str, *, optional: bool = False) -> list[Any]:
    found = value.get(key, [] if optional else None)
    place = f"{where}.{key}".lstrip(".")
    if not isinstance(found, list):
        raise make_import_error(place, "it is missing" if found is None else "it is not a list")
    for i, entry in enumerate(found):
        _dict(entry, f"{place}[{i}]")
    return found
