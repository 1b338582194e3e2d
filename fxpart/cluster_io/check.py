"""Find every fault of a cluster, not the first."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from fxpart.errors import Problem

if TYPE_CHECKING:
    from fxpart.cluster import Cluster, Device, Link

MAX_DEVICES = 16384
MAX_LINKS = 1 << 18
MAX_MEMORY = 1 << 60
MAX_NAME = 256
ANY = "*"
KINDS = ("cpu", "gpu")


def problems(cluster: Cluster) -> tuple[Problem, ...]:
    """Every FXP402 of the cluster: devices, links and what they name."""
    found: list[Problem] = []
    if not cluster.devices:
        found.append(_problem("the cluster", "it has no devices", "add at least one device"))
    for count, limit, what in (
        (len(cluster.devices), MAX_DEVICES, "devices"),
        (len(cluster.links), MAX_LINKS, "links"),
    ):
        if count > limit:
            found.append(_problem("the cluster", f"it has {count} {what}, more than {limit}"))
    if found:
        return tuple(found)
    found += _names(cluster)
    for device in cluster.devices:
        found += _device(device)
    known = {ANY} | {d.name for d in cluster.devices} | {d.host for d in cluster.devices}
    for link in cluster.links:
        found += _link(link, known)
    for (source, target), count in Counter((x.source, x.target) for x in cluster.links).items():
        if count > 1:
            why = f"it stands there {count} times, so it is unclear which one holds"
            found.append(_problem(f"link {source!r} -> {target!r}", why, "keep one of them"))
    return tuple(found)


def _problem(where: str, why: str, fix: str = "") -> Problem:
    return Problem("FXP402", where, why, fix or "correct the cluster file")


def _names(cluster: Cluster) -> list[Problem]:
    """Names that are used twice, or for a device and for a host."""
    found = []
    hosts = {d.host for d in cluster.devices}
    for name, count in Counter(d.name for d in cluster.devices).items():
        if count > 1:
            why = f"{count} devices have this name"
            found.append(_problem(f"device {name!r}", why, "give each device its own name"))
        if name in hosts:
            why = "a host has the same name, so a link that names it is unclear"
            found.append(_problem(f"device {name!r}", why, "rename one of them"))
    return found


def _device(device: Device) -> list[Problem]:
    where = f"device {device.name[:MAX_NAME]!r}"
    found = []
    for label, name in (("name", device.name), ("host", device.host)):
        if not name or name == ANY or len(name) > MAX_NAME or not name.isprintable():
            why = f"the {label} {name[:MAX_NAME]!r} is empty, '*', too long or not printable"
            found.append(_problem(where, why, f"give it a plain {label}"))
    if device.kind not in KINDS:
        found.append(_problem(where, f"kind {device.kind!r}", f"use one of {', '.join(KINDS)}"))
    if not 0 < device.memory <= MAX_MEMORY:
        why = f"memory is {device.memory} bytes"
        found.append(_problem(where, why, "give the bytes that the device has, above 0"))
    if not device.flops:
        why = "flops is empty: no rate for any dtype"
        found.append(_problem(where, why, "give at least flops = { float32 = 1.0e12 }"))
    for dtype, rate in device.flops.items():
        found += _positive(where, f"flops of {dtype}", rate)
    found += _positive(where, "bandwidth", device.bandwidth)
    found += _not_negative(where, "launch", device.launch)
    return found


def _link(link: Link, known: set[str]) -> list[Problem]:
    where = f"link {link.source[:MAX_NAME]!r} -> {link.target[:MAX_NAME]!r}"
    found = []
    for label, name in (("source", link.source), ("target", link.target)):
        if name not in known:
            why = f"its {label} {name[:MAX_NAME]!r} is neither a device nor a host of the cluster"
            found.append(_problem(where, why, "name a device, a host or '*'"))
    found += _positive(where, "bandwidth", link.bandwidth)
    found += _not_negative(where, "latency", link.latency)
    return found


def _positive(where: str, what: str, value: float) -> list[Problem]:
    if math.isfinite(value) and value > 0:
        return []
    return [_problem(where, f"{what} is {value}", "give a finite number above 0")]


def _not_negative(where: str, what: str, value: float) -> list[Problem]:
    if math.isfinite(value) and value >= 0:
        return []
    return [_problem(where, f"{what} is {value}", "give a finite number, 0 or above")]
