"""A cluster as text: devices, hosts, links and collectives; equal ones share a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET

from fxpart.report.table import shortened, table
from fxpart.units import percent, plural, seconds, size

if TYPE_CHECKING:
    from fxpart.cluster.devices import CollectiveCurve, Device, Host, Link
    from fxpart.cluster.model import Cluster

_WIDE = 48


def format_cluster(cluster: Cluster, missing: Sequence[str]) -> list[str]:
    """Return the lines. missing: facts that the cluster does not have."""
    hosts = len({device.host for device in cluster.devices})
    head = f"{cluster.name}: {plural(len(cluster.devices), 'device')} on {plural(hosts, 'host')}"
    lines = [f"{head}, hash {cluster.hash[:12]}"]
    lines += _part("Devices (measured / nominal)", *_devices(cluster.devices))
    if cluster.hosts is not UNSET:
        lines += _part("Hosts", *_hosts(cluster.hosts))
    if cluster.links:
        lines += _part("Links (measured / nominal)", *_links(cluster.links))
    if cluster.collectives is not UNSET and cluster.collectives:
        lines += _part("Collectives (measured)", *_curves(cluster.collectives))
    if missing:
        lines += ["", "Unknown", *(f"  {fact}" for fact in missing)]
    return lines


def _part(title: str, heads: tuple[str, ...], align: str, rows: list[list[str]]) -> list[str]:
    return ["", title, *(f"  {line}" for line in table(heads, align, rows))]


def _devices(devices: Iterable[Device]) -> tuple[tuple[str, ...], str, list[list[str]]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for device in devices:
        rates = {} if device.measured is UNSET else device.measured
        main = "float32" if "float32" in device.flops else next(iter(device.flops))
        key = (
            device.model,
            "" if device.threads is UNSET else str(device.threads),
            "" if device.quota is UNSET else f"{device.quota:g}",
            size(device.memory),
            f"{_rate(rates.get(main), 'FLOP/s')} / {_rate(device.flops[main], 'FLOP/s')} {main}",
            f"{_rate(rates.get('bandwidth'), 'B/s')} / {_rate(device.bandwidth, 'B/s')}",
            "" if device.price is UNSET else f"{device.price:g}",
            "" if device.domain is UNSET else device.domain,
            shortened(device.source, _WIDE),
        )
        groups.setdefault(key, []).append(device.name)
    rows = [[_names(names), str(len(names)), *key] for key, names in groups.items()]
    heads = ("devices", "n", "model", "threads", "quota", "memory", "rate", "bandwidth", "price")
    return _without_empty((*heads, "domain", "source"), "<><>>>>>><<", rows)


def _hosts(hosts: Iterable[Host]) -> tuple[tuple[str, ...], str, list[list[str]]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for host in hosts:
        slow = " ".join(f"{factor:.2f}" for factor in host.slowdown) or "not measured"
        key = (
            str(host.cores or "not known"),
            shortened(slow, _WIDE),
            host.address,
            shortened(host.source, _WIDE),
        )
        groups.setdefault(key, []).append(host.name)
    rows = [[_names(names), *key] for key, names in groups.items()]
    heads = ("hosts", "cores", "slowdown of 1, 2, ... ranks", "address", "source")
    return _without_empty(heads, "<><<<", rows)


def _links(links: Iterable[Link]) -> tuple[tuple[str, ...], str, list[list[str]]]:
    groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for link in links:
        best = None
        if link.curve is not UNSET and link.curve:
            best = max(bytes_ / time for bytes_, time in link.curve)
        key = (
            link.kind,
            seconds(link.latency),
            f"{_rate(best, 'B/s')} / {_rate(link.bandwidth, 'B/s')}",
            "shared" if link.shared is True else "",
            "" if link.segment is UNSET else link.segment,
            shortened(link.origin, _WIDE),
        )
        groups.setdefault(key, []).append((link.source, link.target))
    rows = [[_pairs(pairs), str(len(pairs)), *key] for key, pairs in groups.items()]
    heads = ("links", "n", "kind", "latency", "bandwidth", "", "segment", "origin")
    return _without_empty(heads, "<><>><<<", rows)


def _curves(curves: Iterable[CollectiveCurve]) -> tuple[tuple[str, ...], str, list[list[str]]]:
    rows = [
        [
            curve.operation,
            str(curve.ranks),
            str(curve.hosts),
            f"{size(round(curve.points[0][0]))} - {size(round(curve.points[-1][0]))}",
            seconds(curve.latency),
            _rate(1 / curve.inverse_bandwidth if curve.inverse_bandwidth else None, "B/s"),
            percent(curve.residual),
            shortened(curve.source, _WIDE),
        ]
        for curve in curves
    ]
    heads = ("operation", "ranks", "hosts", "bytes", "latency", "bandwidth", "residual", "source")
    return _without_empty(heads, "<>>>>>><", rows)


def _without_empty(
    heads: tuple[str, ...], align: str, rows: list[list[str]]
) -> tuple[tuple[str, ...], str, list[list[str]]]:
    """Return the table without empty columns."""
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    return (
        tuple(heads[i] for i in kept),
        "".join(align[i] for i in kept),
        [[row[i] for i in kept] for row in rows],
    )


def _rate(value: float | None, unit: str) -> str:
    """Return a rate as "312 TFLOP/s", "-" where it is not known."""
    if value is None:
        return "-"
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else shortened(f"{names[0]} … {names[-1]}", _WIDE)


def _pairs(pairs: list[tuple[str, str]]) -> str:
    """Return the ends of equal links."""
    first, last = pairs[0], pairs[-1]
    if pairs == [("*", "*")]:
        return "all others"
    if all(source == target for source, target in pairs):
        return f"within {_names([source for source, _ in pairs])}"
    words = [f"{source} -> {target}" for source, target in (first, last)]
    return words[0] if len(pairs) == 1 else shortened(f"{words[0]} … {words[1]}", _WIDE)
