"""Find every fault of a cluster, not the first: its devices, links and what they name."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from msgspec import UNSET

from fxpart.errors import Problem, quoted, short

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster, Device, Link

MAX_DEVICES = 16384
MAX_LINKS = 1 << 18
MAX_MEMORY = 1 << 60
MAX_NAME = 256
MAX_COUNT = 1 << 20  # of cores, threads, ranks
ANY = "*"
KINDS = ("cpu", "gpu")


def problems(cluster: Cluster) -> tuple[Problem, ...]:
    """Every FXP402 of the cluster: devices, links, hosts, measured curves, unknown keys."""
    from fxpart.cluster import optional_field_validation

    found: list[Problem] = []
    if not cluster.devices:
        found.append(problem("the cluster", "it has no devices", "add at least one device"))
    for count, limit, what in (
        (len(cluster.devices), MAX_DEVICES, "devices"),
        (len(cluster.links), MAX_LINKS, "links"),
    ):
        if count > limit:
            found.append(problem("the cluster", f"it has {count} {what}, more than {limit}"))
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
            found.append(
                problem(
                    f"link {quoted(source, MAX_NAME)} -> {quoted(target, MAX_NAME)}",
                    why,
                    "keep one of them",
                )
            )
    found += optional_field_validation.hosts(cluster)
    found += optional_field_validation.collectives(cluster)
    found += optional_field_validation.unknown_keys("the cluster", cluster)
    return tuple(found)


def problem(where: str, why: str, fix: str = "") -> Problem:
    """An FXP402."""
    return Problem("FXP402", where, why, fix or "correct the cluster file")


def _names(cluster: Cluster) -> list[Problem]:
    """Names that are used twice, or for a device and for a host."""
    found = []
    hosts = {d.host for d in cluster.devices}
    for name, count in Counter(d.name for d in cluster.devices).items():
        if count > 1:
            why = f"{count} devices have this name"
            found.append(
                problem(f"device {quoted(name, MAX_NAME)}", why, "give each device its own name")
            )
        if name in hosts:
            why = "a host has the same name, so a link that names it is unclear"
            found.append(problem(f"device {quoted(name, MAX_NAME)}", why, "rename one of them"))
    return found


def _device(device: Device) -> list[Problem]:
    where = f"device {quoted(device.name, MAX_NAME)}"
    found = []
    for label, name in (("name", device.name), ("host", device.host)):
        found += plain_name(where, label, name)
    if device.kind not in KINDS:
        found.append(
            problem(where, f"kind {quoted(device.kind)}", f"use one of {', '.join(KINDS)}")
        )
    if not 0 < device.memory <= MAX_MEMORY:
        why = f"memory is {quoted(device.memory)} bytes"
        found.append(problem(where, why, "give the bytes that the device has, above 0"))
    if not device.flops:
        why = "flops is empty: no rate for any dtype"
        found.append(problem(where, why, "give at least flops = { float32 = 1.0e12 }"))
    for dtype, rate in device.flops.items():
        found += positive(where, f"flops of {short(dtype)}", rate)
    found += positive(where, "bandwidth", device.bandwidth)
    found += not_negative(where, "launch", device.launch)
    return found + _given(where, device)


def _given(where: str, device: Device) -> list[Problem]:
    """What is wrong with the fields of a device that may be left out."""
    from fxpart.cluster import optional_field_validation

    found = []
    if device.threads is not UNSET and not 1 <= device.threads <= MAX_COUNT:
        found.append(problem(where, f"threads is {quoted(device.threads)}", "give 1 or more"))
    if device.quota is not UNSET:
        found += positive(where, "quota", device.quota)
    if device.price is not UNSET:
        found += not_negative(where, "price", device.price)
    if device.domain is not UNSET:
        found += plain_name(where, "domain", device.domain)
    if device.measured is not UNSET:
        for what, rate in device.measured.items():
            found += positive(where, f"measured {short(what)}", rate)
    return found + optional_field_validation.unknown_keys(where, device)


def _link(link: Link, known: set[str]) -> list[Problem]:
    from fxpart.cluster import optional_field_validation

    where = f"link {quoted(link.source, MAX_NAME)} -> {quoted(link.target, MAX_NAME)}"
    found = []
    for label, name in (("source", link.source), ("target", link.target)):
        if name not in known:
            named = f"its {label} {quoted(name, MAX_NAME)}"
            why = f"{named} is neither a device nor a host of the cluster"
            found.append(problem(where, why, "name a device, a host or '*'"))
    found += positive(where, "bandwidth", link.bandwidth)
    found += not_negative(where, "latency", link.latency)
    if link.segment is not UNSET:
        found += plain_name(where, "segment", link.segment)
    if link.curve is not UNSET:
        found += optional_field_validation.points(where, "curve", link.curve)
    return found + optional_field_validation.unknown_keys(where, link)


def plain_name(where: str, label: str, name: str) -> list[Problem]:
    """What is wrong with a name that others refer to."""
    if name and name != ANY and len(name) <= MAX_NAME and name.isprintable():
        return []
    why = f"the {label} {quoted(name, MAX_NAME)} is empty, '*', too long or not printable"
    return [problem(where, why, f"give it a plain {label}")]


def positive(where: str, what: str, value: float) -> list[Problem]:
    """What is wrong with a number that has to be finite and above 0."""
    if math.isfinite(value) and value > 0:
        return []
    return [problem(where, f"{what} is {value}", "give a finite number above 0")]


def not_negative(where: str, what: str, value: float) -> list[Problem]:
    """What is wrong with a number that has to be finite and 0 or above."""
    if math.isfinite(value) and value >= 0:
        return []
    return [problem(where, f"{what} is {value}", "give a finite number, 0 or above")]
