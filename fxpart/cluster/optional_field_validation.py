"""Faults of what a cluster may leave out: hosts, measured curves, keys that are not known."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from fxpart.cluster.validation import (
    MAX_COUNT,
    MAX_DEVICES,
    MAX_NAME,
    not_negative,
    plain_name,
    positive,
    problem,
)
from fxpart.errors import Problem, quoted

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster, CollectiveCurve, Host

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
# More ranks at work never make each faster: what falls by more than this was measured badly.
NOISE = 0.02
MAX_POINTS = 4096
MAX_DEPTH = 64


def hosts(cluster: Cluster) -> list[Problem]:
    """What is wrong with the hosts: names, cores, slowdown."""
    if cluster.hosts is UNSET:
        return []
    found = []
    used = {device.host for device in cluster.devices}
    for name, count in Counter(host.name for host in cluster.hosts).items():
        if count > 1:
            why = f"it stands there {count} times, so it is unclear which one holds"
            found.append(problem(f"host {quoted(name, MAX_NAME)}", why, "keep one of them"))
    for host in cluster.hosts:
        where = f"host {quoted(host.name, MAX_NAME)}"
        if host.name not in used:
            why = "no device is on a host of this name"
            found.append(problem(where, why, "name it as the devices' `host` does"))
        found += _host(where, host)
    return found


def _host(where: str, host: Host) -> list[Problem]:
    found = plain_name(where, "name", host.name)
    if not 0 <= host.cores <= MAX_COUNT:
        found.append(
            problem(where, f"cores is {quoted(host.cores)}", "give 1 or more, 0 if not known")
        )
    if len(host.slowdown) > MAX_DEVICES:
        found.append(problem(where, f"slowdown has {len(host.slowdown)} entries"))
    for count, factor in enumerate(host.slowdown, 1):
        if not (math.isfinite(factor) and factor >= 1):
            why = f"slowdown of {count} ranks at work is {factor}"
            found.append(problem(where, why, "give finite factors, 1 or above"))
    for count, (less, more) in enumerate(pairwise(host.slowdown), 2):
        if more < less * (1 - NOISE):
            why = f"slowdown of {count} ranks at work, {more}, is below that of fewer, {less}"
            found.append(problem(where, why, "measure again on an idle host"))
    return found + unknown_keys(where, host)


def collectives(cluster: Cluster) -> list[Problem]:
    """What is wrong with the measured collectives."""
    if cluster.collectives is UNSET:
        return []
    found = []
    keys = Counter((curve.operation, curve.ranks, curve.hosts) for curve in cluster.collectives)
    for (operation, ranks, machines), count in keys.items():
        if count > 1:
            where = f"collective {quoted(operation)} over {quoted(ranks)} ranks"
            where += f" on {quoted(machines)} hosts"
            why = f"it stands there {count} times, so it is unclear which one holds"
            found.append(problem(where, why, "keep one of them"))
    for curve in cluster.collectives:
        found += _curve(curve)
    return found


def _curve(curve: CollectiveCurve) -> list[Problem]:
    where = f"collective {quoted(curve.operation)} over {quoted(curve.ranks)} ranks"
    found = []
    if curve.operation not in OPERATIONS:
        why = f"operation {quoted(curve.operation)}"
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
    """What is wrong with measured (bytes, seconds): both above 0, bytes rising."""
    if not 0 < len(curve) <= MAX_POINTS:
        why = f"{what} has {len(curve)} entries"
        return [problem(where, why, f"give [bytes, seconds] between 1 and {MAX_POINTS} times")]
    found = []
    for size, seconds in curve:
        found += positive(where, f"{what}: a size", size)
        found += positive(where, f"{what}: the time of {size} bytes", seconds)
    for (less, _), (more, _) in pairwise(curve):
        if more <= less:
            why = f"{what}: {more} bytes stand after {less}"
            found.append(problem(where, why, "give each size once, bytes rising"))
    return found


def unknown_keys(where: str, item: msgspec.Struct) -> list[Problem]:
    """What is wrong with the keys that fxpart does not know: only what a file can hold is kept."""
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
        found.append(problem(where, "extra is empty", "leave it out"))
    if why := next(_unkept(extra, 0), ""):
        found.append(problem(where, f"extra holds {why}", "keep text, finite numbers, lists"))
    return found


def _unkept(value: Any, depth: int) -> Iterator[str]:
    """What in a value could not be written to a file and read again."""
    if depth > MAX_DEPTH:
        yield f"more than {MAX_DEPTH} levels"
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _unkept(key, depth + 1)
            yield from _unkept(entry, depth + 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _unkept(entry, depth + 1)
    elif isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            yield "text that is no Unicode"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield f"the number {value}"
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            yield "an integer of more than 64 bits"
    elif value is not None and not isinstance(value, datetime.date | datetime.time):
        yield f"a {type(value).__name__}"
