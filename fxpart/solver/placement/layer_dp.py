"""A plan under a memory limit: layers may differ, so that the memory is fully used.

At one price of memory all equal layers choose the same strategies, which leaves memory unused. Here
the graph is cut at nodes that separate it into layers. Each distinct layer gives (seconds, bytes)
options for each pair of strategies at its ends, one for each price. A dynamic program over layers
and buckets of memory selects among them. The remaining gap shrinks with the number of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from fxpart.solver.placement.elimination import Elimination, TooWideError
from fxpart.solver.placement.lagrangian import LagrangianBound, PlacementRecord
from fxpart.solver.placement.problem import PlacementArrays, PlacementEdge
from fxpart.solver.work import work_seconds

BUCKETS = 12_000  # of the memory above the minimum; the gap comes from rounding up to buckets
ENOUGH = 1e-3  # relative gap at which the search stops
RUNS = 8  # of the dynamic program, each with the memory that the previous one left unused
STATES = 6  # strategies kept at each end of a layer
PRICES = 10  # prices for which each layer is solved
LAYERS = 100  # maximum number of layers
HUBS = 6  # nodes with edges to distant layers, whose strategies are fixed
_SPREAD = (0.0, 0.25, 0.5, 0.75, 0.9, 1.1, 1.3, 2.0, 4.0, 1e6)


@dataclass(frozen=True)
class PlacementSegment:
    """Consecutive nodes between two separators, ``first`` before and ``last`` after them.

    nodes: the free ones. edges: those with their later end inside.
    """

    first: int | None
    last: int | None
    nodes: tuple[int, ...]
    edges: tuple[PlacementEdge, ...]


@dataclass(frozen=True)
class SegmentOption:
    """One way through a segment: strategies at its ends and inside, as offsets from its first node.

    start, stop: positions in the ends' lists of states.
    """

    start: int
    stop: int
    seconds: float
    bytes: float
    inside: tuple[int, ...]


def hubs_of(numbers: PlacementArrays) -> frozenset[int]:
    """Return nodes whose edges reach so far that they would be part of every cut."""
    count = len(numbers.sizes)
    last = _last(numbers)
    reach = sorted(range(count), key=lambda v: (v - last[v], v))[:HUBS]
    return frozenset(v for v in reach if last[v] - v > max(32, count // 6))


def _last(numbers: PlacementArrays) -> list[int]:
    last = list(range(len(numbers.sizes)))
    for edge in numbers.problem.edges:
        a, b = sorted((edge.source, edge.target))
        last[a] = max(last[a], b)
    return last


def segments_of(numbers: PlacementArrays, hubs: frozenset[int]) -> list[PlacementSegment]:
    """Return the graph without ``hubs`` as a sequence of segments; one if nothing separates it."""
    count, last = len(numbers.sizes), _last(numbers)
    edges: dict[int, list[PlacementEdge]] = {}
    for edge in numbers.problem.edges:
        inside = [v for v in (edge.source, edge.target) if v not in hubs]
        if inside:
            edges.setdefault(max(inside), []).append(edge)
    cuts: list[tuple[int, int]] = []
    open_: set[int] = set()
    spacing, before = max(4, count // LAYERS), -1
    for v in range(count):
        open_ = {u for u in open_ if last[u] > v}
        if v not in hubs and last[v] > v:
            open_.add(v)
        if len(open_) == 1 and v - before >= spacing and v < count - 1:
            (node,) = open_
            if not cuts or cuts[-1][1] != node:
                cuts.append((v, node))
                before = v
    found: list[PlacementSegment] = []
    start, first = 0, None
    ends: list[tuple[int, int | None]] = [*cuts, (count - 1, None)]
    for stop, last_node in ends:
        own = tuple(v for v in range(start, stop + 1) if v not in hubs)
        mine = tuple(e for v in own for e in edges.get(v, ()))
        found.append(PlacementSegment(first, last_node, own, mine))
        start, first = stop + 1, last_node
    return found


def refine(
    numbers: PlacementArrays, record: PlacementRecord, bound: LagrangianBound, deadline: float
) -> None:
    """Add to ``record`` the best choice that the dynamic program finds.

    ``record`` has the choices of the prices; without a feasible choice there is nothing to improve.
    """
    if record.choice is None or bound.price <= 0:
        return
    hubs = hubs_of(numbers)
    segments = segments_of(numbers, hubs)
    if len(segments) < 3:
        return
    near = sorted(
        record.seen,
        key=lambda c: abs(sum(map(float, _standing(numbers, c))) - numbers.problem.budget),
    )
    for held in dict.fromkeys(tuple((h, c[h]) for h in sorted(hubs)) for c in near[:3]):
        try:
            _LayerProgram(numbers, segments, dict(held), near, bound, deadline).solve(record)
            if is_gap_small(record, bound):
                return
        except (TooWideError, TimeoutError):
            return


def is_gap_small(record: PlacementRecord, bound: LagrangianBound) -> bool:
    """Return whether the gap is so small that further search is not worth the time."""
    return bound.seconds >= record.seconds * (1 - ENOUGH)


def _standing(numbers: PlacementArrays, choice: Sequence[int]) -> list[float]:
    nodes = numbers.problem.nodes
    return [float(numbers.standing[nodes[v]][s]) for v, s in enumerate(choice)]


class _LayerProgram:
    """Options of every segment, and the dynamic program over them."""

    def __init__(
        self,
        numbers: PlacementArrays,
        segments: Sequence[PlacementSegment],
        held: Mapping[int, int],
        near: Sequence[tuple[int, ...]],
        bound: LagrangianBound,
        deadline: float,
    ) -> None:
        self.numbers, self.segments, self.held = numbers, segments, held
        self.near, self.bound, self.deadline = near, bound, deadline
        prices = [bound.price, *(bound.price * s for s in _SPREAD)]
        self.prices = list(dict.fromkeys(prices))[: PRICES + 1]
        known: dict[object, list[SegmentOption]] = {}
        self.options: list[list[SegmentOption]] = []
        for segment in segments:
            states = (self.states(segment.first), self.states(segment.last))
            key = self._key(segment, states)
            if key not in known:
                known[key] = self._options(segment, *states)
            self.options.append(known[key])

    def states(self, node: int | None) -> tuple[int, ...]:
        """Return the strategies kept at a separator: those of choices near the budget."""
        if node is None:
            return (0,)
        return tuple(dict.fromkeys(choice[node] for choice in self.near))[:STATES]

    def _key(self, segment: PlacementSegment, states: tuple[tuple[int, ...], ...]) -> object:
        """Return a key that is equal for segments with equal options."""
        base, nodes = segment.nodes[0] if segment.nodes else 0, self.numbers.problem.nodes
        ends = tuple(None if v is None else v - base for v in (segment.first, segment.last))
        kinds = tuple((v - base, nodes[v]) for v in segment.nodes)
        edges = tuple(
            (e.matrix, self._end(e.source, base), self._end(e.target, base)) for e in segment.edges
        )
        return ends, kinds, edges, states

    def _end(self, node: int, base: int) -> tuple[bool, int]:
        return (True, self.held[node]) if node in self.held else (False, node - base)

    def _options(
        self, segment: PlacementSegment, starts: tuple[int, ...], stops: tuple[int, ...]
    ) -> list[SegmentOption]:
        """Return by pair of end states the options that are not dominated in seconds and bytes."""
        if work_seconds() > self.deadline:
            raise TimeoutError
        ends = [v for v in (segment.first, segment.last) if v is not None]
        every = [*segment.nodes, *([] if segment.first is None else [segment.first])]
        plan = Elimination(self.numbers, every, segment.edges, ends, self.held)
        runs = [plan.run(price) for price in self.prices]
        found = []
        for i, start in enumerate(starts):
            for j, stop in enumerate(stops):
                ways = {}
                for run in runs:
                    chosen = {} if segment.first is None else {segment.first: start}
                    if segment.last is not None:
                        chosen[segment.last] = stop
                    chosen = run.choose(chosen)
                    ways[tuple(chosen[v] for v in segment.nodes)] = chosen
                found += self._pareto(segment, i, j, ways)
        return found

    def _pareto(
        self,
        segment: PlacementSegment,
        i: int,
        j: int,
        ways: Mapping[tuple[int, ...], dict[int, int]],
    ) -> list[SegmentOption]:
        nodes, numbers = self.numbers.problem.nodes, self.numbers
        found = []
        for inside, chosen in ways.items():
            seconds = sum(float(numbers.seconds[nodes[v]][chosen[v]]) for v in segment.nodes)
            for e in segment.edges:
                ends = [self.held.get(v, chosen.get(v, -1)) for v in (e.source, e.target)]
                seconds += float(numbers.matrices[e.matrix][ends[0], ends[1]])
            size = sum(float(numbers.standing[nodes[v]][chosen[v]]) for v in segment.nodes)
            found.append(SegmentOption(i, j, seconds, size, inside))
        found.sort(key=lambda o: (o.bytes, o.seconds))
        kept: list[SegmentOption] = []
        for option in found:
            if not kept or option.seconds < kept[-1].seconds:
                kept.append(option)
        return kept

    def solve(self, record: PlacementRecord) -> None:
        """Run the dynamic program and record its choice, a few times.

        Buckets round up, so a choice leaves some memory unused, which the next run may use in
        addition. If that was too much, or points in time need more memory than was reserved, the
        search continues between the largest feasible and the smallest infeasible amount.
        """
        numbers, extra = self.numbers, 0.0
        fitted, over = 0.0, inf
        assert record.choice is not None
        reserve = max(numbers.reserve(), numbers.peak(record.choice))
        for _ in range(RUNS):
            choice = self._choose(reserve - extra)
            if choice is None:
                return
            record.add(choice, "layers")
            if is_gap_small(record, self.bound):
                return
            reserve = max(reserve, numbers.peak(choice))
            left = record.numbers.problem.budget - record.numbers.evaluate(choice).bytes
            if left >= 0:
                fitted = max(fitted, extra)
                extra = min(extra + left, (extra + over) / 2)
            else:
                over = min(over, extra)
                extra = (fitted + over) / 2

    def _choose(self, reserve: float) -> tuple[int, ...] | None:
        """Return the best choice with ``reserve`` bytes left for temporaries; None if none fits."""
        nodes = self.numbers.problem.nodes
        held = sum(float(self.numbers.standing[nodes[v]][s]) for v, s in self.held.items())
        floors = [min(o.bytes for o in options) for options in self.options]
        slack = self.numbers.problem.budget - reserve - held - sum(floors)
        if slack < 0:
            return None
        unit = slack / (BUCKETS - 1) or 1.0
        best = np.full((1, BUCKETS), 0.0)
        trail: list[NDArray[np.int32]] = []
        for segment, options, floor in zip(self.segments, self.options, floors, strict=True):
            if work_seconds() > self.deadline:
                raise TimeoutError
            best, via = _advance(best, len(self.states(segment.last)), options, floor, unit)
            trail.append(via)
        if not np.isfinite(best[0, -1]):
            return None
        return self._back(trail, floors, unit)

    def _back(
        self, trail: list[NDArray[np.int32]], floors: list[float], unit: float
    ) -> tuple[int, ...]:
        choice = [0] * len(self.numbers.sizes)
        for node, strategy in self.held.items():
            choice[node] = strategy
        state, bucket = 0, BUCKETS - 1
        for at in range(len(self.segments) - 1, -1, -1):
            option = self.options[at][trail[at][state, bucket]]
            for v, strategy in zip(self.segments[at].nodes, option.inside, strict=True):
                choice[v] = strategy
            bucket -= _units(option.bytes - floors[at], unit)
            state = option.start
        return tuple(choice)


def _units(size: float, unit: float) -> int:
    """Return the buckets of ``size`` bytes above the floor: rounded up, which is safe."""
    return ceil(size / unit)


def _advance(
    best: NDArray[np.float64],
    states: int,
    options: Sequence[SegmentOption],
    floor: float,
    unit: float,
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Advance one segment: the minimum seconds by end state and buckets used, and the option."""
    new = np.full((states, BUCKETS), np.inf)
    via = np.full((states, BUCKETS), -1, dtype=np.int32)
    for index, option in enumerate(options):
        used = _units(option.bytes - floor, unit)
        if used >= BUCKETS:
            continue
        reached = best[option.start, : BUCKETS - used] + option.seconds
        better = reached < new[option.stop, used:]
        new[option.stop, used:][better] = reached[better]
        via[option.stop, used:][better] = index
    return new, via
