"""Make the device assignment problem of a cluster, and map its solution to devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import msgspec

from fxpart.cluster.link_index import LinkIndex
from fxpart.errors import error
from fxpart.pricing.device_limits import group_by_kind
from fxpart.solver.assignment.objective import evaluate
from fxpart.solver.assignment.portfolio import solve_device_assignment
from fxpart.solver.assignment.problem import (
    AssignmentProblem,
    AssignmentStage,
    DeviceAssignment,
    InterconnectDomain,
    RingCollective,
    StageFlow,
)
from fxpart.solver.assignment.units import has_whole_replicas
from fxpart.solver.joint.problem import LinearCost
from fxpart.solver.solution import Status

if TYPE_CHECKING:
    from fxpart.cluster.devices import Link
    from fxpart.cluster.model import Cluster


@dataclass(frozen=True)
class Traffic:
    """The communication of stages.

    See :class:`~fxpart.solver.assignment.problem.AssignmentProblem`. By stage: seconds per
    microbatch and per step that do not depend on the placement, collectives of tensor shards per
    microbatch, collectives of replicas per step. All of these may be empty: then only flows count.
    """

    flows: tuple[StageFlow, ...] = ()
    seconds: tuple[float, ...] = ()
    once: tuple[float, ...] = ()
    exchange: tuple[RingCollective, ...] = ()
    reduce: tuple[RingCollective, ...] = ()
    microbatches: int = 1
    fill: float = 1.0


@dataclass(frozen=True)
class StageDevicePlacement:
    """Devices (indices into the cluster's) by stage and mesh rank; step time and its bound.

    straddling: number of replicas whose tensor shards are on several hosts.
    """

    ranks: tuple[tuple[int, ...], ...]
    seconds: float
    bound: float
    status: Status
    straddling: int = 0


def place_stages(
    cluster: Cluster,
    widths: Sequence[tuple[int, int, int]],
    traffic: Traffic,
    *,
    pools: Sequence[int] | None = None,
) -> StageDevicePlacement:
    """Assign devices to each stage. widths: (pool, data, tensor) of each stage.

    pools: the pool of each device of the cluster, by default its kind (:func:`pools_of`). The
    cluster's order is kept where it is as good: stage after stage from the first device on. Raises
    FXP204 where a pool has too few devices, FXP403 where two devices have no link.
    """
    topology, members = topology_of(cluster, widths, traffic, pools=pools)
    found = solve_device_assignment(topology)
    if not found.assignment:
        need = [0] * (1 + max(pool for pool, _, _ in widths))
        for pool, data, tensor in widths:
            need[pool] += data * tensor
        raise error(
            "FXP204",
            where=f"stages on {cluster.name}",
            why=f"the stages need {need} devices of the cluster's pools, which have too few",
            fix="use fewer or narrower stages, or more devices",
        )
    straight = _in_order(topology, members)
    plain, best = evaluate(topology, straight), evaluate(topology, found.assignment)
    cut = (has_whole_replicas(topology, found.assignment), has_whole_replicas(topology, straight))
    if plain.seconds <= best.seconds * (1 + 1e-12) and cut != (True, False):
        found, best = msgspec.structs.replace(found, assignment=straight), plain
    remaining = [[iter(m) for m in by_pool] for by_pool in members]
    ranks = tuple(
        tuple(next(remaining[place][pool]) for place in places)
        for (pool, _, _), places in zip(widths, found.assignment, strict=True)
    )
    return StageDevicePlacement(
        ranks=ranks,
        seconds=found.seconds,
        bound=found.bound,
        status=found.status,
        straddling=sum(p.straddling for p in best.stages),
    )


def _in_order(
    topology: AssignmentProblem, members: Sequence[Sequence[Sequence[int]]]
) -> DeviceAssignment:
    """Return the placement with the devices of each pool in order, stage after stage."""
    pools = range(len(topology.places[0].devices))
    place_of = [
        iter([place for _, place in sorted((d, k) for k, m in enumerate(members) for d in m[pool])])
        for pool in pools
    ]
    return tuple(
        tuple(next(place_of[g.pool]) for _ in range(g.mesh_ranks)) for g in topology.groups
    )


def pools_of(cluster: Cluster) -> tuple[int, ...]:
    """Return the pool of each device: equal costs and equal memory, numbered by first device."""
    _, kinds = group_by_kind(cluster)
    found: dict[tuple[int, int], int] = {}
    keys = zip(kinds, (device.memory for device in cluster.devices), strict=True)
    return tuple(found.setdefault(key, len(found)) for key in keys)


def topology_of(
    cluster: Cluster,
    widths: Sequence[tuple[int, int, int]],
    traffic: Traffic,
    *,
    pools: Sequence[int] | None = None,
) -> tuple[AssignmentProblem, list[list[list[int]]]]:
    """Return the problem, and the devices of each of its places by pool, ascending."""
    pool_of = pools_of(cluster) if pools is None else pools
    links = LinkIndex(cluster)
    count = 1 + max((*pool_of, *(pool for pool, _, _ in widths)))
    place: dict[str, int] = {}
    members: list[list[list[int]]] = []
    hosts: dict[str, int] = {}
    for index, device in enumerate(cluster.devices):
        name = links.group(device.name)
        if name not in place:
            place[name] = len(members)
            members.append([[] for _ in range(count)])
        hosts.setdefault(device.host, len(hosts))
        members[place[name]][pool_of[index]].append(index)
    firsts = [min(m[0] for m in by_pool if m) for by_pool in members]
    table = _Classes(cluster, links, firsts)
    topology = AssignmentProblem(
        groups=_groups(widths, traffic),
        flows=traffic.flows,
        places=tuple(
            InterconnectDomain(
                host=hosts[cluster.devices[first].host],
                kind=kind,
                devices=tuple(len(m) for m in by_pool),
            )
            for first, kind, by_pool in zip(firsts, table.kinds, members, strict=True)
        ),
        inside=table.inside(members),
        between=table.between(),
        uplinks=table.uplinks([hosts[cluster.devices[first].host] for first in firsts], len(hosts)),
        microbatches=traffic.microbatches,
        fill=traffic.fill,
    )
    return topology, members


def _groups(
    widths: Sequence[tuple[int, int, int]], traffic: Traffic
) -> tuple[AssignmentStage, ...]:
    found = []
    for s, (pool, data, tensor) in enumerate(widths):
        group = AssignmentStage(
            pool=pool,
            data=data,
            tensor=tensor,
            seconds=traffic.seconds[s] if traffic.seconds else 0.0,
            once=traffic.once[s] if traffic.once else 0.0,
            exchange=traffic.exchange[s] if traffic.exchange else RingCollective(),
            reduce=traffic.reduce[s] if traffic.reduce else RingCollective(),
        )
        found.append(group)
    return tuple(found)


class _Classes:
    """Kinds of places with equal links, and the links between kinds."""

    def __init__(self, cluster: Cluster, links: LinkIndex, firsts: Sequence[int]) -> None:
        """firsts: the first device of each place."""
        self._cluster, self._links, self._firsts = cluster, links, firsts
        named: dict[str, list[tuple[str, str, float, float, bool]]] = {}
        for link in cluster.links:
            for end in dict.fromkeys((link.source, link.target)):
                shared = bool(link.shared)
                line = (link.source, link.target, link.latency, link.bandwidth, shared)
                named.setdefault(end, []).append(line)
        singled = {d.host for d in cluster.devices if links.group(d.name) == d.name}
        known: dict[tuple[object, ...], int] = {}
        self.kinds: list[int] = []
        self._places: list[list[int]] = []
        for place, first in enumerate(firsts):
            device = cluster.devices[first]
            own = links.group(device.name)
            # places of one host whose devices are named individually are equal to each other
            hidden = own if own not in singled else ""
            signature = [
                tuple("" if end == hidden else end for end in line[:2]) + line[2:]
                for name in dict.fromkeys((own, device.host))
                for line in named.get(name, ())
            ]
            key = (own == device.host, *sorted(signature, key=repr))
            if device.host in singled:
                key = (*key, device.host)
            kind = known.setdefault(key, len(known))
            self.kinds.append(kind)
            if kind == len(self._places):
                self._places.append([])
            if len(self._places[kind]) < 2:
                self._places[kind].append(place)

    def inside(self, members: Sequence[Sequence[Sequence[int]]]) -> tuple[LinearCost, ...]:
        """Return the link of two devices of one place; zero where every place is one device."""
        lines = [LinearCost()] * len(self._places)
        found: set[int] = set()
        for place, kind in enumerate(self.kinds):
            devices = sorted(d for by_pool in members[place] for d in by_pool)
            if kind not in found and len(devices) > 1:
                found.add(kind)
                lines[kind] = self._line(devices[0], devices[1])
        return tuple(lines)

    def between(self) -> tuple[tuple[LinearCost, ...], ...]:
        """Return the link from a place of one kind to another of the same or another kind."""
        every = range(len(self._places))
        return tuple(tuple(self._pair(a, b) for b in every) for a in every)

    def uplinks(self, hosts: Sequence[int], count: int) -> tuple[float, ...]:
        """Return the seconds per byte of each host's network card; 0 where none is shared.

        A card is the fastest shared link from or to the host. hosts: of each place.
        """
        cards: dict[int, float] = {}
        for a in range(len(self._places)):
            for b in range(len(self._places)):
                ends = self._ends(a, b)
                if ends is None or hosts[ends[0]] == hosts[ends[1]]:
                    continue
                link = self._link(*(self._firsts[place] for place in ends))
                if link.shared:
                    for kind in (a, b):
                        cards[kind] = min(cards.get(kind, inf), 1 / link.bandwidth)
        found = [inf] * count
        for host, kind in zip(hosts, self.kinds, strict=True):
            found[host] = min(found[host], cards.get(kind, inf))
        return tuple(0.0 if card == inf else card for card in found)

    def _ends(self, a: int, b: int) -> tuple[int, int] | None:
        """Return two places of these kinds; None where there is only one."""
        if a == b and len(self._places[a]) < 2:
            return None
        return self._places[a][0], self._places[b][1 if a == b else 0]

    def _pair(self, a: int, b: int) -> LinearCost:
        ends = self._ends(a, b)
        return (
            LinearCost() if ends is None else self._line(*(self._firsts[place] for place in ends))
        )

    def _link(self, a: int, b: int) -> Link:
        devices = self._cluster.devices
        return self._links(devices[a].name, devices[b].name)

    def _line(self, a: int, b: int) -> LinearCost:
        """Return the mean of both directions: hidden states go one way, gradients return."""
        links = (self._link(a, b), self._link(b, a))
        return LinearCost(
            latency=sum(link.latency for link in links) / 2,
            inverse=sum(1 / link.bandwidth for link in links) / 2,
        )
