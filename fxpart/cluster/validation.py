"""Validation of clusters, which reports all problems and not only the first."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from fxpart.errors import Problem, quoted, short

if TYPE_CHECKING:
    from fxpart.cluster.devices import CollectiveCurve, Device, Host, Link
    from fxpart.cluster.model import Cluster

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
# More computing ranks never make each rank faster, so a larger decrease is a measurement error.
NOISE = 0.02
MAX_POINTS = 4096
MAX_DEPTH = 64

MAX_DEVICES = 131072
MAX_LINKS = 1 << 18
MAX_MEMORY = 1 << 60
MAX_NAME = 256
MAX_COUNT = 1 << 20  # Cores, threads or ranks.
ANY = "*"
KINDS = ("cpu", "gpu")


def problems(cluster: Cluster) -> tuple[Problem, ...]:
    """Return all FXP402 problems: devices, links, hosts, measured curves and unknown keys."""
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
            why = f"it is defined {count} times"
            found.append(
                problem(
                    f"link {quoted(source, MAX_NAME)} -> {quoted(target, MAX_NAME)}",
                    why,
                    "keep one of them",
                )
            )
    found += hosts(cluster)
    found += collectives(cluster)
    found += unknown_keys("the cluster", cluster)
    return tuple(found)


def problem(where: str, why: str, fix: str = "") -> Problem:
    """Return an FXP402 problem."""
    return Problem("FXP402", where, why, fix or "correct the cluster file")


def _names(cluster: Cluster) -> list[Problem]:
    """Check for names used by several devices, or by a device and a host."""
    found = []
    hosts = {d.host for d in cluster.devices}
    for name, count in Counter(d.name for d in cluster.devices).items():
        if count > 1:
            why = f"{count} devices have this name"
            found.append(
                problem(f"device {quoted(name, MAX_NAME)}", why, "give each device its own name")
            )
        if name in hosts:
            why = "a host has the same name, so links to it are ambiguous"
            found.append(problem(f"device {quoted(name, MAX_NAME)}", why, "rename one of them"))
    return found


def _device(device: Device) -> list[Problem]:
    where = f"device {quoted(device.name, MAX_NAME)}"
    found = []
    for label, name in (("name", device.name), ("host", device.host)):
        found += plain_name(where, label, name)
    if device.kind not in KINDS:
        found.append(
            problem(where, f"unknown kind {quoted(device.kind)}", f"use one of {', '.join(KINDS)}")
        )
    if not 0 < device.memory <= MAX_MEMORY:
        why = f"memory is {quoted(device.memory)} bytes"
        found.append(problem(where, why, "give the memory of the device in bytes, above 0"))
    if not device.flops:
        why = "flops is empty, so there is no rate for any dtype"
        found.append(problem(where, why, "give at least flops = { float32 = 1.0e12 }"))
    for dtype, rate in device.flops.items():
        found += positive(where, f"flops of {short(dtype)}", rate)
    found += positive(where, "bandwidth", device.bandwidth)
    found += not_negative(where, "launch", device.launch)
    return found + _optional_fields(where, device)


def _optional_fields(where: str, device: Device) -> list[Problem]:
    """Check the optional fields of a device."""
    found = []
    if device.threads is not UNSET and not 1 <= device.threads <= MAX_COUNT:
        found.append(problem(where, f"threads is {quoted(device.threads)}", "give 1 or more"))
    if device.quota is not UNSET:
        found += positive(where, "quota", device.quota)
    if device.price is not UNSET:
        found += not_negative(where, "price", device.price)
    if device.domain is not UNSET:
        found += plain_name(where, "domain", device.domain)
    if device.host_bandwidth is not UNSET:
        found += positive(where, "host_bandwidth", device.host_bandwidth)
    if device.measured is not UNSET:
        for what, rate in device.measured.items():
            found += positive(where, f"measured {short(what)}", rate)
    return found + unknown_keys(where, device)


def _link(link: Link, known: set[str]) -> list[Problem]:
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
        found += points(where, "curve", link.curve)
    return found + unknown_keys(where, link)


def plain_name(where: str, label: str, name: str) -> list[Problem]:
    """Check a name that links or devices refer to."""
    if name and name != ANY and len(name) <= MAX_NAME and name.isprintable():
        return []
    why = f"the {label} {quoted(name, MAX_NAME)} is empty, '*', too long or not printable"
    return [problem(where, why, f"give it a plain {label}")]


def positive(where: str, what: str, value: float) -> list[Problem]:
    """Check that a number is finite and above 0."""
    if math.isfinite(value) and value > 0:
        return []
    return [problem(where, f"{what} is {value}", "give a finite number above 0")]


def not_negative(where: str, what: str, value: float) -> list[Problem]:
    """Check that a number is finite and not negative."""
    if math.isfinite(value) and value >= 0:
        return []
    return [problem(where, f"{what} is {value}", "give a finite number, 0 or above")]


def hosts(cluster: Cluster) -> list[Problem]:
    """Check the hosts: names, cores, memory and slowdown."""
    if cluster.hosts is UNSET:
        return []
    found = []
    used = {device.host for device in cluster.devices}
    for name, count in Counter(host.name for host in cluster.hosts).items():
        if count > 1:
            why = f"it is defined {count} times"
            found.append(problem(f"host {quoted(name, MAX_NAME)}", why, "keep one of them"))
    for host in cluster.hosts:
        where = f"host {quoted(host.name, MAX_NAME)}"
        if host.name not in used:
            why = "no device has this host"
            found.append(problem(where, why, "use the name in the devices' `host`"))
        found += _host(where, host)
    return found


def _host(where: str, host: Host) -> list[Problem]:
    found = plain_name(where, "name", host.name)
    if not 0 <= host.cores <= MAX_COUNT:
        found.append(
            problem(where, f"cores is {quoted(host.cores)}", "give 1 or more, 0 if not known")
        )
    if host.memory is not UNSET and not 0 < host.memory <= MAX_MEMORY:
        found.append(
            problem(where, f"memory is {quoted(host.memory)} bytes", "give bytes, above 0")
        )
    if len(host.slowdown) > MAX_DEVICES:
        found.append(problem(where, f"slowdown has {len(host.slowdown)} entries"))
    for count, factor in enumerate(host.slowdown, 1):
        if not (math.isfinite(factor) and factor >= 1):
            why = f"slowdown of {count} computing ranks is {factor}"
            found.append(problem(where, why, "give finite factors of 1 or more"))
    for count, (less, more) in enumerate(pairwise(host.slowdown), 2):
        if more < less * (1 - NOISE):
            why = (
                f"slowdown of {count} computing ranks, {more}, is below that of fewer ranks, {less}"
            )
            found.append(problem(where, why, "measure again on an idle host"))
    return found + unknown_keys(where, host)


def collectives(cluster: Cluster) -> list[Problem]:
    """Check the measured collectives."""
    if cluster.collectives is UNSET:
        return []
    found = []
    keys = Counter((curve.operation, curve.ranks, curve.hosts) for curve in cluster.collectives)
    for (operation, ranks, machines), count in keys.items():
        if count > 1:
            where = f"collective {quoted(operation)} over {quoted(ranks)} ranks"
            where += f" on {quoted(machines)} hosts"
            why = f"it is defined {count} times"
            found.append(problem(where, why, "keep one of them"))
    for curve in cluster.collectives:
        found += _curve(curve)
    return found


def _curve(curve: CollectiveCurve) -> list[Problem]:
    where = f"collective {quoted(curve.operation)} over {quoted(curve.ranks)} ranks"
    found = []
    if curve.operation not in OPERATIONS:
        why = f"unknown operation {quoted(curve.operation)}"
        found.append(problem(where, why, f"use one of {', '.join(OPERATIONS)}"))
    if not 2 <= curve.ranks <= MAX_COUNT:
        found.append(problem(where, f"ranks is {quoted(curve.ranks)}", "give 2 or more"))
    if not 1 <= curve.hosts <= max(1, curve.ranks):
        why = f"hosts is {quoted(curve.hosts)}"
        found.append(problem(where, why, "give 1 or more, and no more than ranks"))
    found += points(where, "points", curve.points)
    found += not_negative(where, "latency", curve.latency)
    found += not_negative(where, "inverse_bandwidth", curve.inverse_bandwidth)
    found += not_negative(where, "residual", curve.residual)
    return found + unknown_keys(where, curve)


def points(where: str, what: str, curve: Sequence[tuple[float, float]]) -> list[Problem]:
    """Check measured (bytes, seconds): both must be above 0, and bytes ascending."""
    if not 0 < len(curve) <= MAX_POINTS:
        why = f"{what} has {len(curve)} entries"
        return [problem(where, why, f"give between 1 and {MAX_POINTS} pairs [bytes, seconds]")]
    found = []
    for size, seconds in curve:
        found += positive(where, f"{what}: a size", size)
        found += positive(where, f"{what}: the time of {size} bytes", seconds)
    for (less, _), (more, _) in pairwise(curve):
        if more <= less:
            why = f"{what}: {more} bytes follow {less}"
            found.append(problem(where, why, "give each size once, in ascending order"))
    return found


def unknown_keys(where: str, item: msgspec.Struct) -> list[Problem]:
    """Check that unknown keys have values that can be written to a file."""
    extra: Any = getattr(item, "extra", UNSET)
    if extra is UNSET:
        return []
    known = set(item.__struct_fields__) - {"extra"}
    found = [
        problem(where, f"extra has the key {quoted(key)}, which is a field", "set the field")
        for key in extra
        if key in known
    ]
    if not extra:
        found.append(problem(where, "extra is empty", "remove it"))
    if why := next(_unstorable(extra, 0), ""):
        found.append(
            problem(where, f"extra contains {why}", "use only text, finite numbers and lists")
        )
    return found


def _unstorable(value: Any, depth: int) -> Iterator[str]:
    """Yield descriptions of values that cannot be written to a file and read again."""
    if depth > MAX_DEPTH:
        yield f"more than {MAX_DEPTH} levels"
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _unstorable(key, depth + 1)
            yield from _unstorable(entry, depth + 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _unstorable(entry, depth + 1)
    elif isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            yield "text that is not valid Unicode"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield f"the number {value}"
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            yield "an integer of more than 64 bits"
    elif value is not None and not isinstance(value, datetime.date | datetime.time):
        yield f"a {type(value).__name__}"
