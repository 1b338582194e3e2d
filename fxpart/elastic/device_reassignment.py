"""Reassignment of devices in a new plan so that the fewest bytes of state move.

A slot is a mesh rank of a stage. Devices that are equal may be exchanged without changing the
plan's prediction: devices of one host, and whole hosts for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from fxpart.cluster.devices import Device
from fxpart.cluster.model import Cluster
from fxpart.elastic.state_shares import StateShare, count_common_bytes, shares_of
from fxpart.plan.model import Plan

MOST = 1024  # devices; larger plans are not reassigned
_Slots = Sequence[int]  # ranks of the new plan before the reassignment


@dataclass(frozen=True)
class DeviceReassignment:
    """A plan with reassigned devices.

    moved: bytes that devices do not store yet, as estimated by :mod:`fxpart.elastic.state_shares`.
    before: the same for the original plan. ranks: those whose device lacks some of their state.
    """

    plan: Plan
    moved: float
    before: float
    ranks: tuple[int, ...]


def reassign_devices(new: Plan, old: Plan | None) -> DeviceReassignment:
    """Return ``new`` with each slot on a device that stores as much of its state as possible.

    old: plan by which the devices, identified by name, store state; None, or a plan of another
    model: they store nothing. A new device takes a slot that no other device stores, that of the
    lost one. Costs, stages and degrees are unchanged; only ranks and devices change.
    """
    need = shares_of(new)
    if old is None or old.model.fingerprint != new.model.fingerprint or old.order != new.order:
        total = sum(share.bytes for share in need)
        return DeviceReassignment(new, total, total, tuple(range(new.world)))
    stored = {old.device(rank).name: s for rank, s in enumerate(shares_of(old))}
    before = _count_moved_bytes(need, [new.device(rank).name for rank in range(new.world)], stored)
    if len(new.cluster.devices) > MOST:
        return DeviceReassignment(new, sum(before), sum(before), _find_incomplete_ranks(before))
    names = _assign_devices(new, need, stored)
    plan = _apply_assignment(new, names)
    index = _index(new.cluster)
    order = sorted(range(new.world), key=lambda rank: index[names[rank]])
    moved = _count_moved_bytes([need[r] for r in order], [names[r] for r in order], stored)
    return DeviceReassignment(plan, sum(moved), sum(before), _find_incomplete_ranks(moved))


def _count_moved_bytes(
    need: Sequence[StateShare], names: Sequence[str], stored: Mapping[str, StateShare]
) -> list[float]:
    """Return the bytes that each rank's device lacks."""
    return [
        max(
            0.0,
            needed.bytes - (count_common_bytes(needed, stored[name]) if name in stored else 0.0),
        )
        for needed, name in zip(need, names, strict=True)
    ]


def _find_incomplete_ranks(moved: Sequence[float]) -> tuple[int, ...]:
    return tuple(rank for rank, size in enumerate(moved) if size >= 1.0)


def _assign_devices(
    new: Plan, need: Sequence[StateShare], stored: Mapping[str, StateShare]
) -> dict[int, str]:
    """Return the name of the device for each rank of the original plan."""
    cluster = new.cluster
    by_host: dict[str, list[Device]] = defaultdict(list)
    for device in cluster.devices:
        by_host[device.host].append(device)
    slots: dict[str, list[int]] = {host: [] for host in by_host}
    for rank in range(new.world):
        slots[new.device(rank).host].append(rank)
    found: dict[int, str] = {}
    for hosts in _group_equal_hosts(cluster, by_host):
        inner = {
            (a, b): _assign_within_host(new, slots[a], by_host[b], need, stored)
            for a in hosts
            for b in hosts
        }
        kept = [[inner[a, b][0] + (0.25 if a == b else 0.0) for b in hosts] for a in hosts]
        for row, column in enumerate(solve_linear_assignment(-np.asarray(kept))):
            found |= inner[hosts[row], hosts[column]][1]
    return found


def _assign_within_host(
    new: Plan,
    slots: _Slots,
    devices: Sequence[Device],
    need: Sequence[StateShare],
    stored: Mapping[str, StateShare],
) -> tuple[float, dict[int, str]]:
    """Return the bytes kept by the best assignment within one host, and the device names."""
    linked = _find_linked_devices(new.cluster)
    kept, found = 0.0, {}
    classes: dict[bytes, list[Device]] = defaultdict(list)
    for device in devices:
        classes[_make_device_key(device, linked)].append(device)
    required: dict[bytes, list[int]] = defaultdict(list)
    for rank in slots:
        required[_make_device_key(new.device(rank), linked)].append(rank)
    for kind, ranks in required.items():
        places = classes[kind]
        own = [new.device(rank).name for rank in ranks]
        # Of equal devices the plan's own: a tie break of less than a byte.
        keep = np.asarray([
            [
                (count_common_bytes(need[rank], stored[d.name]) if d.name in stored else 0.0)
                + (0.5 if d.name == name else 0.0)
                for d in places
            ]
            for rank, name in zip(ranks, own, strict=True)
        ])  # fmt: skip
        for row, column in enumerate(solve_linear_assignment(-keep)):
            found[ranks[row]] = places[column].name
            kept += float(keep[row, column])
    return kept, found


def _group_equal_hosts(
    cluster: Cluster, by_host: Mapping[str, Sequence[Device]]
) -> list[list[str]]:
    """Group hosts that may be exchanged."""
    linked = _find_linked_devices(cluster)
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for host, devices in by_host.items():
        kinds = tuple(sorted(_make_device_key(device, linked) for device in devices))
        groups[_make_host_key(cluster, host), kinds].append(host)
    return list(groups.values())


def _make_host_key(cluster: Cluster, host: str) -> tuple[object, ...]:
    """Return what distinguishes a host: its specification and its links.

    A link between two hosts makes both different from all others.
    """
    own = [
        msgspec.json.encode(msgspec.structs.replace(link, source="", target=""))
        for link in cluster.links
        if link.source == link.target == host
    ]
    has_external_link = any(
        host in (n.source, n.target) and n.source != n.target for n in cluster.links
    )
    entries = [] if cluster.hosts is msgspec.UNSET else cluster.hosts
    facts = [
        msgspec.json.encode(msgspec.structs.replace(h, name="", address=""))
        for h in entries
        if h.name == host
    ]
    return (tuple(sorted(own)), tuple(facts), host if has_external_link else "")


def _find_linked_devices(cluster: Cluster) -> frozenset[str]:
    """Return the names of devices with links of their own, which equal no other device."""
    ends = {end for link in cluster.links for end in (link.source, link.target)}
    return frozenset(d.name for d in cluster.devices if d.name in ends)


def _make_device_key(device: Device, linked: frozenset[str]) -> bytes:
    """Return a key that is equal for equal devices, on any host."""
    name = device.name if device.name in linked else ""
    return msgspec.json.encode(msgspec.structs.replace(device, name=name, host="", source=""))


def _index(cluster: Cluster) -> dict[str, int]:
    return {device.name: index for index, device in enumerate(cluster.devices)}


def _apply_assignment(plan: Plan, names: Mapping[int, str]) -> Plan:
    """Return the plan with rank r's slot on the device ``names[r]``; ranks follow the devices'
    order.
    """
    index = _index(plan.cluster)
    devices = {rank: index[name] for rank, name in names.items()}
    order = sorted(devices, key=lambda rank: devices[rank])
    new_rank = {rank: place for place, rank in enumerate(order)}
    used = tuple(devices[rank] for rank in order)
    if all(new_rank[rank] == rank for rank in new_rank) and used == (
        plan.devices or tuple(range(plan.world))
    ):
        return plan
    replace = msgspec.structs.replace
    prediction = plan.prediction
    return replace(
        plan,
        stages=tuple(replace(s, ranks=tuple(new_rank[r] for r in s.ranks)) for s in plan.stages),
        prediction=replace(
            prediction,
            ranks=tuple(
                replace(row, ranks=tuple(new_rank[r] for r in row.ranks))
                for row in prediction.ranks
            ),
            hosts=tuple(
                replace(h, ranks=tuple(sorted(new_rank[r] for r in h.ranks)))
                for h in prediction.hosts
            ),
        ),
        devices=() if used == tuple(range(plan.world)) else used,
    )


def solve_linear_assignment(cost: NDArray[np.float64]) -> list[int]:
    """Return the column of each row, such that the sum of costs is minimal.

    cost: [rows, columns], finite, with at least as many columns as rows. Shortest augmenting paths
    (Jonker and Volgenant, "A shortest augmenting path algorithm for dense and sparse linear
    assignment problems", 1987): O(rows^2 columns), with the inner loop in NumPy.
    """
    rows, columns = cost.shape
    assert rows <= columns, "there are fewer columns than rows"
    row_price = np.zeros(rows)
    column_price = np.zeros(columns)
    row_of = np.full(columns, -1, dtype=np.int64)
    for row in range(rows):
        distance = np.full(columns, np.inf)
        predecessor = np.full(columns, -1, dtype=np.int64)
        done = np.zeros(columns, dtype=bool)
        current, path_cost, column = row, 0.0, -1
        visited = []
        while True:
            length = path_cost + cost[current] - row_price[current] - column_price
            shorter = ~done & (length < distance)
            distance[shorter], predecessor[shorter] = length[shorter], column
            column = int(np.argmin(np.where(done, np.inf, distance)))
            path_cost = float(distance[column])
            done[column] = True
            visited.append(column)
            if row_of[column] < 0:
                break
            current = int(row_of[column])
        row_price[row] += path_cost
        for scanned in visited[:-1]:
            row_price[row_of[scanned]] += path_cost - distance[scanned]
            column_price[scanned] -= path_cost - distance[scanned]
        while column >= 0:
            previous = int(predecessor[column])
            row_of[column] = row if previous < 0 else row_of[previous]
            column = previous
    found = [-1] * rows
    for place, owner in enumerate(row_of):
        if owner >= 0:
            found[int(owner)] = place
    return found
