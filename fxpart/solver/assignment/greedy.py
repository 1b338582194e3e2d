"""Greedy device assignment: place each replica next to its communication partners.

A replica (its tensor shards) is placed whole in one domain if any domain has room. Of equivalent
domains only the first is tried, so that thousands of hosts cost as much as a few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from fxpart.solver.assignment.objective import AssignmentScorer, pair_ranks
from fxpart.solver.assignment.problem import AssignmentProblem, DeviceAssignment, LinearCost


class ReplicaPacker:
    """Fills domains. ``assignment[stage][mesh_rank]`` is -1 until it is assigned."""

    def __init__(self, topology: AssignmentProblem) -> None:
        """Start with all devices free, and list the flows and partners of each mesh rank."""
        self.topology = topology
        self.free = [list(place.devices) for place in topology.places]
        self.assignment = [[-1] * group.mesh_ranks for group in topology.groups]
        self._alike: dict[tuple[int, ...], list[int]] = {}
        for place in range(len(topology.places)):
            self._offer(place)
        self._flows: list[list[tuple[int, list[list[int]], float, float]]] = [
            [] for _ in topology.groups
        ]
        for flow in topology.flows:
            times = (1 if flow.step else topology.microbatches) * (2 if flow.back else 1)
            cost = (flow.messages * times, flow.size * times)
            a, b = (topology.groups[x].mesh_ranks for x in (flow.source, flow.target))
            meet: tuple[list[list[int]], list[list[int]]] = (
                [[] for _ in range(a)],
                [[] for _ in range(b)],
            )
            for i, j in zip(*(x.tolist() for x in pair_ranks(a, b)), strict=True):
                meet[0][i].append(j)
                meet[1][j].append(i)
            self._flows[flow.source].append((flow.target, meet[0], *cost))
            self._flows[flow.target].append((flow.source, meet[1], *cost))

    def put(self, stage: int, replica: int, *, cut: bool = False) -> bool:
        """Assign one replica; return False if no domain has room for all of it, unless ``cut``."""
        group = self.topology.groups[stage]
        first = replica * group.tensor
        mesh_ranks = range(first, first + group.tensor)
        friends = self._friends(stage, mesh_ranks)
        place = self._best(group.pool, group.tensor, friends)
        if place >= 0:
            self._take(stage, mesh_ranks, place)
            return True
        if not cut:
            return False
        left = list(mesh_ranks)
        while left:  # as many as possible in one domain, the remaining ones as near as possible
            room = max(self.free[p][group.pool] for p in self._open(group.pool, 1))
            many = min(room, len(left))
            place = self._best(group.pool, many, friends)
            self._take(stage, left[:many], place)
            friends.append((place, group.exchange.messages + 1.0, group.exchange.size + 1.0))
            left = left[many:]
        return True

    def _friends(self, stage: int, mesh_ranks: range) -> list[tuple[int, float, float]]:
        """Return assigned domains of communication partners: (domain, messages, bytes) per step."""
        found: dict[tuple[int, int], tuple[float, float]] = {}
        for index, (other, meet, messages, size) in enumerate(self._flows[stage]):
            for place in {
                self.assignment[other][j]: None for mesh_rank in mesh_ranks for j in meet[mesh_rank]
            }:
                if place >= 0:
                    found[index, place] = (messages, size)
        before = mesh_ranks[0] - 1
        ring = self.topology.groups[stage].reduce
        if before >= 0 and self.assignment[stage][before] >= 0:
            found[-1, self.assignment[stage][before]] = (ring.messages, ring.size)
        return [(place, *cost) for (_, place), cost in found.items()]

    def _best(self, pool: int, devices: int, friends: Sequence[tuple[int, float, float]]) -> int:
        """Return the domain with room that is nearest to the partners, then the fullest, then the
        first."""
        best, found = (0.0, 0, 0), -1
        near = (place for place, _, _ in friends if self.free[place][pool] >= devices)
        for place in dict.fromkeys((*near, *self._open(pool, devices))):
            cost = 0.0
            for other, messages, size in friends:
                line = self._line(place, other)
                cost += messages * line.latency + size * line.inverse
            key = (cost, sum(self.free[place]), place)
            if found < 0 or key < best:
                best, found = key, place
        return found

    def _line(self, a: int, b: int) -> LinearCost:
        kinds = (self.topology.places[a].kind, self.topology.places[b].kind)
        return (
            self.topology.inside[kinds[0]] if a == b else self.topology.between[kinds[0]][kinds[1]]
        )

    def _open(self, pool: int, devices: int) -> Iterable[int]:
        """Return domains with room, one of each equivalence class."""
        for key, heap in self._alike.items():
            if key[1 + pool] < devices:
                continue
            while heap and (self.topology.places[heap[0]].kind, *self.free[heap[0]]) != key:
                heappop(heap)
            if heap:
                yield heap[0]

    def _offer(self, place: int) -> None:
        key = (self.topology.places[place].kind, *self.free[place])
        heappush(self._alike.setdefault(key, []), place)

    def _take(self, stage: int, mesh_ranks: Sequence[int], place: int) -> None:
        for mesh_rank in mesh_ranks:
            self.assignment[stage][mesh_rank] = place
        self.free[place][self.topology.groups[stage].pool] -= len(mesh_ranks)
        self._offer(place)


def pack(
    topology: AssignmentProblem, order: Sequence[tuple[int, int]], *, cut: bool
) -> DeviceAssignment | None:
    """Assign replicas (stage, replica) in this order; return None if one does not fit whole.

    cut: split a replica that fits in no domain. The devices must suffice.
    """
    packer = ReplicaPacker(topology)
    for stage, replica in order:
        if not packer.put(stage, replica, cut=cut):
            return None
    return tuple(tuple(mesh_ranks) for mesh_ranks in packer.assignment)


def replicas(
    topology: AssignmentProblem, stages: Iterable[int] | None = None
) -> list[tuple[int, int]]:
    """Return all (stage, replica), stage by stage in the given order."""
    every = range(len(topology.groups)) if stages is None else stages
    return [(s, r) for s in every for r in range(topology.groups[s].data)]


def by_width(
    topology: AssignmentProblem, order: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return them with the widest first: first fit decreasing splits the fewest."""
    return sorted(order, key=lambda item: -topology.groups[item[0]].tensor)


def has_enough_devices(topology: AssignmentProblem) -> bool:
    """Return whether every pool has enough devices for its stages."""
    pools = max((len(p.devices) for p in topology.places), default=0)
    there = [sum(p.devices[k] for p in topology.places) for k in range(pools)]
    for group in topology.groups:
        if group.pool >= pools:
            return False
        there[group.pool] -= group.mesh_ranks
    return min(there, default=0) >= 0


def by_replica(topology: AssignmentProblem) -> list[tuple[int, int]]:
    """Return first replica of every stage, then the second, so that pipelines are contiguous."""
    groups = topology.groups
    return sorted(replicas(topology), key=lambda item: (item[1] / groups[item[0]].data, item[0]))


def build_initial_assignment(topology: AssignmentProblem) -> DeviceAssignment | None:
    """Return the best of a few initial assignments; those without split replicas come first."""
    if not has_enough_devices(topology):
        return None
    plain = replicas(topology)
    tried = [plain, by_replica(topology)]
    tried = [*tried, *(by_width(topology, order) for order in tried)]
    different = [order for k, order in enumerate(tried) if order not in tried[:k]]
    found = [pack(topology, order, cut=False) for order in different]
    whole = [assignment for assignment in found if assignment is not None]
    if not whole:
        return pack(topology, by_width(topology, plain), cut=True)
    scorer = AssignmentScorer(topology)
    return min(whole, key=lambda assignment: scorer.evaluate(assignment).seconds)
