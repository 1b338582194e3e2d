"""Dynamic program over series and parallel parts: branches may get stages of their own.

A graph consists of a run of single blocks and of parallel parts between them whose branches are
independent (as in GraphPipe, Jeon et al. 2024). Under a limit on every stage's seconds, stages are
cut from the end: a stage is an interval of the run. A parallel part is either cut branch by branch,
where stages add up and path and depth are the largest, or as a run itself. It is a heuristic: a
stage contains pieces of two branches only if they are adjacent in the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from fxpart.solver.stage_graph.block_graph import members
from fxpart.solver.stage_graph.tables import StageGraphTables
from fxpart.solver.work import work_seconds

# Trial limits on a stage's seconds, relative to the minimum possible one.
_LIMITS = (*(1 + i / 48 for i in range(25)), 1.6, 1.8, 2.0)


@dataclass(frozen=True)
class _SeriesParallelBlocks:
    """Blocks in a row, and its parallel parts as (first, end, branches)."""

    blocks: tuple[int, ...]
    parallel: tuple[tuple[int, int, tuple[_SeriesParallelBlocks, ...]], ...]


# (stages, depth) -> seconds of the longest path, and the stages as sets of blocks
_States = dict[tuple[int, int], tuple[float, tuple[int, ...]]]


def series_parallel(tables: StageGraphTables, deadline: float) -> Iterator[list[int]]:
    """Yield stages in topological order, the best for each feasible limit.

    deadline: a ``work_seconds()`` value, after which no further limit is tried.
    """
    n = len(tables.graph.before)
    part = _decompose(tables, (1 << n) - 1)
    most = tables.problem.max_stages
    single = [tables.parts(1 << b, 0).seconds for b in range(n)]
    least = max(max(single), sum(single) / most)
    for limit in _LIMITS:
        if work_seconds() > deadline:
            return
        found = _Cutter(tables, least * limit).cut(part, 0)
        fitting = [(path, key) for key, (path, _) in found.items() if key[0] <= most]
        if fitting:
            stages = tables.sorted(found[min(fitting)[1]][1])
            if stages is not None:
                yield stages


def _decompose(tables: StageGraphTables, whole: int) -> _SeriesParallelBlocks:
    """Return a convex set of blocks as a run with parallel parts."""
    graph = tables.graph
    between = list(members(whole))
    joints = [
        b for b in between if not whole & ~(graph.ancestors[b] | graph.descendants[b] | 1 << b)
    ]
    blocks: list[int] = []
    parallel: list[tuple[int, int, tuple[_SeriesParallelBlocks, ...]]] = []
    left = whole
    for joint in [*joints, None]:
        here = left if joint is None else left & graph.ancestors[joint]
        branches = _components(tables, here)
        start = len(blocks)
        if len(branches) > 1:
            parts = tuple(_decompose(tables, branch) for branch in branches)
            for part in parts:
                blocks += part.blocks
            parallel.append((start, len(blocks), parts))
        elif here:
            inner = _decompose(tables, here) if here != whole else None
            blocks += members(here) if inner is None else inner.blocks
            if inner is not None:
                parallel += [(start + a, start + b, p) for a, b, p in inner.parallel]
        if joint is not None:
            blocks.append(joint)
            left &= ~(here | 1 << joint)
    return _SeriesParallelBlocks(tuple(blocks), tuple(parallel))


def _components(tables: StageGraphTables, blocks: int) -> list[int]:
    """Return the connected components of a set of blocks, by their first block."""
    found = []
    while blocks:
        reach, front = 0, blocks & -blocks
        while front:
            reach |= front
            near = 0
            for b in members(front):
                near |= tables.graph.before[b] | tables.graph.after[b]
            front = near & blocks & ~reach
        found.append(reach)
        blocks &= ~reach
    return found


class _Cutter:
    """Stages of at most ``limit`` seconds that fit their memory."""

    def __init__(self, tables: StageGraphTables, limit: float) -> None:
        self.tables, self.limit = tables, limit * (1 + 1e-9)
        self.most = tables.problem.max_stages
        self.memory = max(d.memory for d in tables.problem.devices)
        # the first device has no incoming transfers
        self.device = min(1, len(tables.problem.devices) - 1)
        self._known: dict[tuple[int, int], _States] = {}

    def cut(self, part: _SeriesParallelBlocks, depth: int) -> _States:
        """Return all useful ways to cut a part that ``depth`` stages follow."""
        key = (sum(1 << b for b in part.blocks), depth)
        if key not in self._known:
            self._known[key] = self._cut(part, depth)
        return self._known[key]

    def _cut(self, part: _SeriesParallelBlocks, depth: int) -> _States:
        n = len(part.blocks)
        after: list[_States] = [{} for _ in range(n + 1)]
        after[n] = {(0, depth): (0.0, ())}
        ends = {end: (first, branches) for first, end, branches in part.parallel}
        for end in range(n, 0, -1):
            states = after[end] = _undominated(after[end])
            if end in ends:
                first, branches = ends[end]
                self._jump(states, branches, after[first])
            blocks = 0
            for first in range(end - 1, -1, -1):
                blocks |= 1 << part.blocks[first]
                cost = self.tables.parts(blocks, self.device)
                if cost.seconds > self.limit and first < end - 1:
                    break
                for (stages, deep), (path, sets) in states.items():
                    need = cost.needed(self.tables.flying(deep + 1))
                    if stages < self.most and need <= self.memory:
                        _keep(
                            after[first],
                            (stages + 1, deep + 1),
                            path + cost.seconds,
                            (blocks, *sets),
                        )
        return _undominated(after[0])

    def _jump(
        self, states: _States, branches: tuple[_SeriesParallelBlocks, ...], into: _States
    ) -> None:
        """Cut each branch into stages of its own, in parallel."""
        for (stages, deep), (path, sets) in states.items():
            sums: _States = {(0, deep): (0.0, ())}
            for branch in branches:
                wider: _States = {}
                for (a, d), (p, x) in sums.items():
                    for (b, e), (q, y) in self.cut(branch, deep).items():
                        if a + b + stages <= self.most:
                            _keep(wider, (a + b, max(d, e)), max(p, q), (*x, *y))
                sums = _undominated(wider)
            for (a, d), (p, x) in sums.items():
                _keep(into, (stages + a, d), path + p, (*x, *sets))


def _keep(states: _States, key: tuple[int, int], path: float, sets: tuple[int, ...]) -> None:
    if path < states.get(key, (inf, ()))[0]:
        states[key] = (path, sets)


def _undominated(states: _States) -> _States:
    """Return the states without dominated ones (in stages, depth and path)."""
    kept: _States = {}
    for key in sorted(states):
        path = states[key][0]
        if not any(k[0] <= key[0] and k[1] <= key[1] and p <= path for k, (p, _) in kept.items()):
            kept[key] = states[key]
    return kept
