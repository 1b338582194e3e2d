"""Placements made one replica after another, each beside what it exchanges most with.

A replica (its tensor shards) is put whole into one place wherever some place has room. Of places
that differ in nothing only the first is tried, so that thousands of hosts cost as much as a few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from fxpart.solver.assignment.objective import AssignmentScorer, pair_ranks
from fxpart.solver.assignment.problem import AssignmentProblem, LinearCost, Seats


class ReplicaPacker:
    """Fills places. ``seats[stage][lane]`` is -1 until it is known."""

    def __init__(self, topology: AssignmentProblem) -> None:
        """All devices free; for each lane of a stage, whom it meets in which flow."""
        self.topology = topology
        self.free = [list(place.devices) for place in topology.places]
        self.seats = [[-1] * group.lanes for group in topology.groups]
        self._alike: dict[tuple[int, ...], list[int]] = {}
        for place in range(len(topology.places)):
            self._offer(place)
        self._flows: list[list[tuple[int, list[list[int]], float, float]]] = [
            [] for _ in topology.groups
        ]
        for flow in topology.flows:
            times = (1 if flow.step else topology.microbatches) * (2 if flow.back else 1)
            cost = (flow.messages * times, flow.size * times)
            a, b = (topology.groups[x].lanes for x in (flow.source, flow.target))
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
        """Seat one replica; False where no place has room for all of it, unless ``cut``."""
        group = self.topology.groups[stage]
        first = replica * group.tensor
        lanes = range(first, first + group.tensor)
        friends = self._friends(stage, lanes)
        place = self._best(group.pool, group.tensor, friends)
        if place >= 0:
            self._take(stage, lanes, place)
            return True
        if not cut:
            return False
        left = list(lanes)
        while left:  # the most in one place, the rest as near as can be
            room = max(self.free[p][group.pool] for p in self._open(group.pool, 1))
            many = min(room, len(left))
            place = self._best(group.pool, many, friends)
            self._take(stage, left[:many], place)
            friends.append((place, group.exchange.messages + 1.0, group.exchange.size + 1.0))
            left = left[many:]
        return True

    def _friends(self, stage: int, lanes: range) -> list[tuple[int, float, float]]:
        """Seated places that these lanes exchange with: (place, messages, bytes) of a step."""
        found: dict[tuple[int, int], tuple[float, float]] = {}
        for index, (other, meet, messages, size) in enumerate(self._flows[stage]):
            for place in {self.seats[other][j]: None for lane in lanes for j in meet[lane]}:
                if place >= 0:
                    found[index, place] = (messages, size)
        before = lanes[0] - 1
        ring = self.topology.groups[stage].reduce
        if before >= 0 and self.seats[stage][before] >= 0:
            found[-1, self.seats[stage][before]] = (ring.messages, ring.size)
        return [(place, *cost) for (_, place), cost in found.items()]

    def _best(self, pool: int, devices: int, friends: Sequence[tuple[int, float, float]]) -> int:
        """The place with room that is nearest to the friends, then the fullest, then the first."""
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
        """Places with room, one of each that differ in nothing."""
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

    def _take(self, stage: int, lanes: Sequence[int], place: int) -> None:
        for lane in lanes:
            self.seats[stage][lane] = place
        self.free[place][self.topology.groups[stage].pool] -= len(lanes)
        self._offer(place)


def pack(
    topology: AssignmentProblem, order: Sequence[tuple[int, int]], *, cut: bool
) -> Seats | None:
    """Seat replicas (stage, replica) in this order; None where one does not fit whole.

    cut: put what fits nowhere whole into several places. The devices suffice.
    """
    packer = ReplicaPacker(topology)
    for stage, replica in order:
        if not packer.put(stage, replica, cut=cut):
            return None
    return tuple(tuple(lanes) for lanes in packer.seats)


def replicas(
    topology: AssignmentProblem, stages: Iterable[int] | None = None
) -> list[tuple[int, int]]:
    """All (stage, replica), stage by stage in the given order."""
    every = range(len(topology.groups)) if stages is None else stages
    return [(s, r) for s in every for r in range(topology.groups[s].data)]


def by_width(
    topology: AssignmentProblem, order: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The same with the widest first: first fit decreasing leaves the fewest cut."""
    return sorted(order, key=lambda item: -topology.groups[item[0]].tensor)


def has_enough_devices(topology: AssignmentProblem) -> bool:
    """Whether every pool has as many devices as its stages take."""
    pools = max((len(p.devices) for p in topology.places), default=0)
    there = [sum(p.devices[k] for p in topology.places) for k in range(pools)]
    for group in topology.groups:
        if group.pool >= pools:
            return False
        there[group.pool] -= group.lanes
    return min(there, default=0) >= 0


def by_replica(topology: AssignmentProblem) -> list[tuple[int, int]]:
    """The first replica of every stage, then the second: each replica's pipeline lies together."""
    groups = topology.groups
    return sorted(replicas(topology), key=lambda item: (item[1] / groups[item[0]].data, item[0]))


def build_initial_assignment(topology: AssignmentProblem) -> Seats | None:
    """The best of a few first placements, those in which no replica is cut before others."""
    if not has_enough_devices(topology):
        return None
    plain = replicas(topology)
    tried = [plain, by_replica(topology)]
    tried = [*tried, *(by_width(topology, order) for order in tried)]
    different = [order for k, order in enumerate(tried) if order not in tried[:k]]
    found = [pack(topology, order, cut=False) for order in different]
    whole = [seats for seats in found if seats is not None]
    if not whole:
        return pack(topology, by_width(topology, plain), cut=True)
    scorer = AssignmentScorer(topology)
    return min(whole, key=lambda seats: scorer.evaluate(seats).seconds)
