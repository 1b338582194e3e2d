"""Which device takes which seat of a new plan, so that the fewest bytes of state move.

A seat is a lane of a stage. Devices that are alike may be exchanged without changing what the plan
is predicted to cost: those of one host, and whole hosts for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from fxpart.cluster.model import Cluster, Device
from fxpart.elastic.linear_assignment import solve_linear_assignment
from fxpart.elastic.state_shares import StateShare, count_common_bytes, shares_of
from fxpart.plan.model import Plan

MOST = 1024  # devices; above, plans are taken as they are
_Seats = Sequence[int]  # ranks of the new plan before they are seated


@dataclass(frozen=True)
class DeviceReassignment:
    """A plan with its devices chosen anew.

    moved: bytes that devices of the plan do not hold yet, as estimated by :mod:`.shares`; before:
    the same of the plan as it was given. ranks: those whose device lacks any of their state.
    """

    plan: Plan
    moved: float
    before: float
    ranks: tuple[int, ...]


def reassign_devices(new: Plan, old: Plan | None) -> DeviceReassignment:
    """``new`` with each seat on a device that holds as much of its state as can be.

    old: by which the devices hold what they hold, by their names; None, or a plan of another model,
    for nothing. A device that is new takes what no other holds: the place of the one that was lost.
    Costs, stages and degrees stay; only ranks and devices change.
    """
    need = shares_of(new)
    if old is None or old.model.fingerprint != new.model.fingerprint or old.order != new.order:
        everything = sum(share.bytes for share in need)
        return DeviceReassignment(new, everything, everything, tuple(range(new.world)))
    held = {old.device(rank).name: s for rank, s in enumerate(shares_of(old))}
    before = _moved(need, [new.device(rank).name for rank in range(new.world)], held)
    if len(new.cluster.devices) > MOST:
        return DeviceReassignment(new, sum(before), sum(before), _lacking(before))
    names = _names(new, need, held)
    plan = _renamed(new, names)
    index = _index(new.cluster)
    order = sorted(range(new.world), key=lambda rank: index[names[rank]])
    moved = _moved([need[r] for r in order], [names[r] for r in order], held)
    return DeviceReassignment(plan, sum(moved), sum(before), _lacking(moved))


def _moved(
    need: Sequence[StateShare], names: Sequence[str], held: Mapping[str, StateShare]
) -> list[float]:
    """By rank the bytes that its device lacks."""
    return [
        max(0.0, want.bytes - (count_common_bytes(want, held[name]) if name in held else 0.0))
        for want, name in zip(need, names, strict=True)
    ]


def _lacking(moved: Sequence[float]) -> tuple[int, ...]:
    return tuple(rank for rank, size in enumerate(moved) if size >= 1.0)


def _names(new: Plan, need: Sequence[StateShare], held: Mapping[str, StateShare]) -> dict[int, str]:
    """By rank of the given plan the name of the device that takes its seat."""
    cluster = new.cluster
    by_host: dict[str, list[Device]] = defaultdict(list)
    for device in cluster.devices:
        by_host[device.host].append(device)
    seats: dict[str, list[int]] = {host: [] for host in by_host}
    for rank in range(new.world):
        seats[new.device(rank).host].append(rank)
    found: dict[int, str] = {}
    for hosts in _alike_hosts(cluster, by_host):
        inner = {
            (a, b): _inside(new, seats[a], by_host[b], need, held) for a in hosts for b in hosts
        }
        kept = [[inner[a, b][0] + (0.25 if a == b else 0.0) for b in hosts] for a in hosts]
        for row, column in enumerate(solve_linear_assignment(-np.asarray(kept))):
            found |= inner[hosts[row], hosts[column]][1]
    return found


def _inside(
    new: Plan,
    seats: _Seats,
    devices: Sequence[Device],
    need: Sequence[StateShare],
    held: Mapping[str, StateShare],
) -> tuple[float, dict[int, str]]:
    """Bytes kept where these seats are on the devices of one host, and the devices' names."""
    named = _named(new.cluster)
    kept, found = 0.0, {}
    classes: dict[bytes, list[Device]] = defaultdict(list)
    for device in devices:
        classes[_kind(device, named)].append(device)
    wanted: dict[bytes, list[int]] = defaultdict(list)
    for rank in seats:
        wanted[_kind(new.device(rank), named)].append(rank)
    for kind, ranks in wanted.items():
        places = classes[kind]
        own = [new.device(rank).name for rank in ranks]
        # Of equal ones the device that the plan has already: less than a byte decides it.
        keep = np.asarray([
            [
                (count_common_bytes(need[rank], held[d.name]) if d.name in held else 0.0)
                + (0.5 if d.name == name else 0.0)
                for d in places
            ]
            for rank, name in zip(ranks, own, strict=True)
        ])  # fmt: skip
        for row, column in enumerate(solve_linear_assignment(-keep)):
            found[ranks[row]] = places[column].name
            kept += float(keep[row, column])
    return kept, found


def _alike_hosts(cluster: Cluster, by_host: Mapping[str, Sequence[Device]]) -> list[list[str]]:
    """Hosts by what they are: those that may take each other's seats stand together."""
    named = _named(cluster)
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for host, devices in by_host.items():
        kinds = tuple(sorted(_kind(device, named) for device in devices))
        groups[_host_kind(cluster, host), kinds].append(host)
    return list(groups.values())


def _host_kind(cluster: Cluster, host: str) -> tuple[object, ...]:
    """What distinguishes a host: its figures and the links that name it.

    A link between two hosts makes both different from all others.
    """
    own = [
        msgspec.json.encode(msgspec.structs.replace(link, source="", target=""))
        for link in cluster.links
        if link.source == link.target == host
    ]
    apart = any(host in (n.source, n.target) and n.source != n.target for n in cluster.links)
    entries = [] if cluster.hosts is msgspec.UNSET else cluster.hosts
    facts = [
        msgspec.json.encode(msgspec.structs.replace(h, name="", address=""))
        for h in entries
        if h.name == host
    ]
    return (tuple(sorted(own)), tuple(facts), host if apart else "")


def _named(cluster: Cluster) -> frozenset[str]:
    """Names of devices that links speak of, which are therefore like no other."""
    ends = {end for link in cluster.links for end in (link.source, link.target)}
    return frozenset(d.name for d in cluster.devices if d.name in ends)


def _kind(device: Device, named: frozenset[str]) -> bytes:
    """Equal for devices that are alike, wherever they are."""
    name = device.name if device.name in named else ""
    return msgspec.json.encode(msgspec.structs.replace(device, name=name, host="", source=""))


def _index(cluster: Cluster) -> dict[str, int]:
    return {device.name: index for index, device in enumerate(cluster.devices)}


def _renamed(plan: Plan, names: Mapping[int, str]) -> Plan:
    """The plan with rank r's seat on the device ``names[r]``; ranks follow the devices' order."""
    index = _index(plan.cluster)
    devices = {rank: index[name] for rank, name in names.items()}
    order = sorted(devices, key=lambda rank: devices[rank])
    to = {rank: place for place, rank in enumerate(order)}
    used = tuple(devices[rank] for rank in order)
    if all(to[rank] == rank for rank in to) and used == (plan.devices or tuple(range(plan.world))):
        return plan
    replace = msgspec.structs.replace
    prediction = plan.prediction
    return replace(
        plan,
        stages=tuple(replace(s, ranks=tuple(to[r] for r in s.ranks)) for s in plan.stages),
        prediction=replace(
            prediction,
            ranks=tuple(
                replace(row, ranks=tuple(to[r] for r in row.ranks)) for row in prediction.ranks
            ),
            hosts=tuple(
                replace(h, ranks=tuple(sorted(to[r] for r in h.ranks))) for h in prediction.hosts
            ),
        ),
        devices=() if used == tuple(range(plan.world)) else used,
    )
