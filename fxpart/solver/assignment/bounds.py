"""Lower bound on the step time of any device assignment: every message over the best link.

The tensor shards of a replica that fit in no domain must communicate between domains. Otherwise
either every replica is whole in a domain, and then two replicas share a domain only if both fit in
it; or some replica is split, and its collectives cross domains. The cheaper alternative counts.

If replicas are to stay whole: stages connected by flows that cross no domains have their first
replicas in one domain. So the capacity of the domains implies a minimum number of such sets, and a
minimum number of flows that cross.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum, inf

from fxpart.solver.assignment.problem import AssignmentProblem, RingCollective, StageFlow


@dataclass(frozen=True)
class _PoolLinks:
    """Links of two pools: the link classes of domains with both pools, and their capacity."""

    topology: AssignmentProblem
    kinds: tuple[tuple[int, ...], ...]  # classes by pool
    many: frozenset[int]  # classes of more than one place
    room: dict[tuple[int, int], int]  # most devices of either pool in a place that has both

    @classmethod
    def of(cls, topology: AssignmentProblem) -> _PoolLinks:
        count = [0] * len(topology.inside)
        pools = range(max(len(p.devices) for p in topology.places))
        kinds: list[dict[int, None]] = [{} for _ in pools]
        room: dict[tuple[int, int], int] = {}
        shapes = {(p.kind, p.devices): None for p in topology.places}
        for place in topology.places:
            count[place.kind] += 1
        for kind, devices in shapes:
            for a in pools:
                if devices[a]:
                    kinds[a][kind] = None
                for b in pools:
                    if devices[a] and devices[b]:
                        both = devices[a] if a == b else devices[a] + devices[b]
                        room[a, b] = max(room.get((a, b), 0), both)
        many = frozenset(k for k, n in enumerate(count) if n > 1)
        return cls(topology, tuple(tuple(sorted(k)) for k in kinds), many, room)

    def best(self, pools: tuple[int, int], ring: RingCollective, *, apart: bool) -> float:
        """Return the minimum seconds of a message between two pools; ``apart``: in different
        domains."""
        if ring.size <= 0:
            return 0.0
        found = inf
        for a in self.kinds[pools[0]]:
            for b in self.kinds[pools[1]]:
                if a != b or a in self.many:
                    line = self.topology.between[a][b]
                    found = min(found, ring.messages * line.latency + ring.size * line.inverse)
            if not apart and a in self.kinds[pools[1]]:
                line = self.topology.inside[a]
                found = min(found, ring.messages * line.latency + ring.size * line.inverse)
        return found if found < inf else 0.0

    def fits(self, pools: tuple[int, int], devices: int) -> bool:
        """Return whether some domain has so many devices of the two pools together."""
        return self.room.get(pools, 0) >= devices


def lower_bound(topology: AssignmentProblem, *, whole: bool = False) -> float:
    """Return a lower bound in seconds; ``whole``: only for assignments with every replica whole."""
    links = _PoolLinks.of(topology)
    groups = range(len(topology.groups))
    rest = topology.microbatches - topology.fill
    cut = [inf if whole else _cut(links, s) for s in groups]
    times, once = [g.seconds for g in topology.groups], [g.once for g in topology.groups]
    items: list[_SplitPenalty] = []
    for s, group in enumerate(topology.groups):
        own = (group.pool, group.pool)
        fits = links.fits(own, group.tensor)
        times[s] += links.best(own, group.exchange, apart=not fits) if group.tensor > 1 else 0.0
        if group.data > 1:
            far = not links.fits(own, group.data)
            once[s] += (least := links.best(own, group.reduce, apart=far))
            if fits and not links.fits(own, group.mesh_ranks):
                more = links.best(own, group.reduce, apart=True) - least
                items.append(_SplitPenalty(s, (s,), more, step=True))
    for flow in topology.flows:
        least = _flow(links, flow, apart=False)
        (once if flow.step else times)[flow.target] += least
        if not _fit_together(links, flow):
            more = max(0.0, _flow(links, flow, apart=True) - least)
            items.append(_SplitPenalty(flow.target, (flow.source, flow.target), more, flow.step))
    loads = [rest * t + b for t, b in zip(times, once, strict=True)]
    longest = max(loads)
    for s in groups:
        mine = [item for item in items if item.stage == s]
        more = fsum(item.seconds * (1 if item.step else rest) for item in mine)
        ways = {c: None for item in mine for c in item.unless}
        escapes = (loads[c] + rest * cut[c] for c in ways)
        longest = max(longest, min((loads[s] + more, *escapes)))
    total = fsum(times)
    bound = topology.fill * (total + _extra(items, cut)) + longest
    if whole:
        more, most = _crossing(links, loads)
        bound = max(bound, topology.fill * (total + more) + max(longest, most))
    return bound


@dataclass(frozen=True)
class _SplitPenalty:
    """Seconds that ``stage`` pays beyond the minimum, unless a replica of these stages is split."""

    stage: int
    unless: tuple[int, ...]
    seconds: float
    step: bool


def _extra(items: list[_SplitPenalty], cut: list[float]) -> float:
    """Return the minimum that the items of a microbatch add to the sum over stages.

    Each stage is either charged with its items or split; splitting costs ``cut`` once. Any charge
    of the items such that no stage is charged more than its splitting costs is a bound (the dual of
    a vertex cover).
    """
    left, total = list(cut), []
    for item in items:
        if not item.step:
            charge = min(item.seconds, *(left[c] for c in item.unless))
            total.append(charge)
            for c in item.unless:
                left[c] -= charge
    return fsum(total)


def _crossing(links: _PoolLinks, loads: list[float]) -> tuple[float, float]:
    """Return the additions of flows that must cross domains to the sum over stages and to the load.

    loads: of each stage without flows. Replicas are whole.
    """
    topology = links.topology
    rest = topology.microbatches - topology.fill
    joined = [f for f in topology.flows if not f.step and f.size > 0]
    forced: list[float] = []
    free: list[float] = []
    longest = []
    for flow in joined:
        near, far = (_flow(links, flow, apart=apart) for apart in (False, True))
        more = max(0.0, far - near)
        (free if _fit_together(links, flow) else forced).append(more)
        longest.append(loads[flow.target] + rest * more)
    stages = len(topology.groups)
    # If there are more sets than stages, no replica can be whole, and this bound does not apply.
    count = min(_sets(topology), stages) - _components(stages, joined)
    others = sorted(free)[: max(0, count - len(forced))]
    return fsum((*forced, *others)), sorted(longest)[count - 1] if count > 0 else 0.0


def _sets(topology: AssignmentProblem) -> int:
    """Return the minimum number of sets of stages if the first replicas of a set share a domain."""
    pools = range(len(topology.places[0].devices))
    width = [0 for _ in pools]
    for group in topology.groups:
        width[group.pool] += group.tensor
    most = [max(place.devices[k] for place in topology.places) for k in pools]
    largest = max(sum(place.devices) for place in topology.places)
    by_pool = (-(-w // m) for w, m in zip(width, most, strict=True) if m)
    return max(-(-sum(width) // largest), *by_pool)


def _components(stages: int, flows: list[StageFlow]) -> int:
    """Return the number of connected components of the stages under the flows."""
    part = list(range(stages))
    for flow in flows:
        a, b = part[flow.source], part[flow.target]
        part = [a if p == b else p for p in part]
    return len(dict.fromkeys(part))


def _fit_together(links: _PoolLinks, flow: StageFlow) -> bool:
    """Return whether a domain can contain a whole replica of both stages."""
    source, target = (links.topology.groups[x] for x in (flow.source, flow.target))
    return links.fits((source.pool, target.pool), source.tensor + target.tensor)


def _cut(links: _PoolLinks, stage: int) -> float:
    """Return the seconds per microbatch of splitting a replica; infinite if it cannot be split."""
    group = links.topology.groups[stage]
    own = (group.pool, group.pool)
    if group.tensor == 1:
        return inf
    if not links.fits(own, group.tensor):
        return 0.0
    near, far = (links.best(own, group.exchange, apart=apart) for apart in (False, True))
    return far - near


def _flow(links: _PoolLinks, flow: StageFlow, *, apart: bool) -> float:
    """Return the minimum seconds of a flow; ``apart``: with its mesh ranks in two domains."""
    source, target = (links.topology.groups[x] for x in (flow.source, flow.target))
    pools = (source.pool, target.pool)
    far = apart or not links.fits(pools, 2)
    ring = RingCollective(size=flow.size, messages=flow.messages)
    there = links.best(pools, ring, apart=far)
    return there + (links.best(pools[::-1], ring, apart=far) if flow.back else 0.0)
