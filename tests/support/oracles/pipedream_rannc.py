"""The dynamic programmes of PipeDream and RaNNC, on our costs.

Both cut a chain so that the slowest stage is fast, with replicas, without tensor parallelism, and
both take the options of tensor degree 1 here. Neither counts filling and draining the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import msgspec
import numpy as np
import numpy.typing as npt
from oracles.joint_intervals import Floats, IntervalCosts, IntervalTables, Mask

from fxpart.solver.joint.problem import JointChoice, JointProblem
from fxpart.solver.schedule_costs import has_pieces, needs_whole_depth

_Ints = npt.NDArray[np.int64]
_Group = dict[int, int]  # data degree -> option
_MANY = 2**40  # devices that no pool has
MODES = ("none", "selective", "full")


class _BestFeasibleChoice:
    """The best choice that fits."""

    def __init__(self, tables: IntervalTables) -> None:
        self.scorer = tables.scorer
        self.choice: JointChoice | None = None
        self.seconds = inf

    def add(self, choice: JointChoice) -> bool:
        """Keep it if it is the best so far; whether it fits."""
        found = self.scorer.evaluate(choice)
        if found.feasible and found.seconds < self.seconds:
            self.choice, self.seconds = choice, found.seconds
        return found.feasible


def pipedream(problem: JointProblem) -> JointChoice | None:
    """PipeDream's recursion, for each pool, recompute mode and microbatch count.

    A(j, d), the slowest stage of blocks up to j on d devices, is the least max(A(i, d - r),
    m t + beta of i+1..j on r replicas): neither memory nor filling is looked at. Then what fits.
    """
    tables = IntervalTables(problem)
    kept = _BestFeasibleChoice(tables)
    for pool, place in enumerate(problem.pools):
        groups = [g for mode in MODES for g in _replicas(problem, pool, mode)]
        cells = sorted(
            (_least(tables, group, m, place.devices), k, m)
            for k, group in enumerate(groups)
            for m in problem.microbatches
        )
        for bound, k, m in cells:
            found = None
            if bound < kept.seconds:
                found = _slowest(tables, groups[k], m, place.devices)
            if found is None:
                continue
            for schedule in _known(problem):
                kept.add(msgspec.structs.replace(found, schedule=schedule))
    return kept.choice


def _least(tables: IntervalTables, group: _Group, microbatches: int, devices: int) -> float:
    """Seconds that no split goes below: its work spread over all devices."""
    best = np.full(len(tables.kinds), inf)
    for data, option in group.items():
        work = tables.scorer.work(tables.problem.options[option], microbatches)
        if work is not None:
            seconds = np.array(work.forward) + np.array(work.backward)
            best = np.minimum(best, data * seconds[tables.kinds])
    return max(microbatches - 1, 0) * float(best.sum()) / devices if best[0] < inf else inf


def _known(problem: JointProblem) -> list[str]:
    return [schedule for schedule in problem.schedules if not has_pieces(schedule)]


def _replicas(problem: JointProblem, pool: int, mode: str) -> Iterator[_Group]:
    """Options of tensor degree 1 without ZeRO, by data degree, for each layout."""
    for index, layout in enumerate(problem.layouts):
        group: _Group = {}
        for k, option in enumerate(problem.options):
            place = (option.pool, option.layout, option.recompute, option.zero)
            if layout.tensor == 1 and place == (pool, index, mode, 0):
                group.setdefault(option.data, k)
        if group:
            yield group


def _slowest(
    tables: IntervalTables, group: _Group, microbatches: int, devices: int
) -> JointChoice | None:
    """The split of least slowest stage, or None where there is none."""
    problem, n = tables.problem, len(tables.problem.blocks)
    costs = {r: tables.costs(option, microbatches) for r, option in sorted(group.items())}
    load = {
        r: np.where(tables.allowed, c.load(microbatches, 0.0), inf)
        for r, c in costs.items()
        if c is not None and r <= devices
    }
    best = np.full((n + 1, devices + 1), inf)  # [blocks before, devices]
    best[0] = 0.0
    first = np.zeros((n + 1, devices + 1), np.int64)
    width = first.copy()
    for j in range(n):
        for r, table in load.items():
            slow = np.maximum(best[: j + 1, : devices + 1 - r], table[: j + 1, j, None])
            i = slow.argmin(axis=0)
            least = slow[i, np.arange(devices + 1 - r)]
            better = np.flatnonzero(least < best[j + 1, r:])
            best[j + 1, r + better] = least[better]
            first[j + 1, r + better] = i[better]
            width[j + 1, r + better] = r
    if not np.isfinite(best[n]).any():
        return None
    j, left, starts, options = n, int(best[n].argmin()), list[int](), list[int]()
    while j:
        i, r = int(first[j, left]), int(width[j, left])
        starts.append(i)
        options.append(group[r])
        j, left = i, left - r
    return JointChoice(
        microbatches=microbatches,
        schedule=problem.schedules[0],
        starts=tuple(reversed(starts)),
        options=tuple(reversed(options)),
    )


def rannc(problem: JointProblem) -> JointChoice | None:
    """RaNNC's search: ever larger groups of hosts, each replicated over the rest of the pool.

    In a group it takes the least number of stages with which a split fits, and of its microbatch
    counts the best. A split minimises m (slowest forward + slowest backward) + slowest
    synchronisation. Activations are recomputed wherever there are several microbatches.
    """
    tables = IntervalTables(problem)
    kept = _BestFeasibleChoice(tables)
    for pool in range(len(problem.pools)):
        for schedule in _known(problem):
            _search(tables, pool, schedule, kept)
    return kept.choice


def _search(tables: IntervalTables, pool: int, schedule: str, kept: _BestFeasibleChoice) -> None:
    """The first group of hosts and number of stages that has a split that fits."""
    problem = tables.problem
    there = problem.pools[pool]
    on_host = min(there.host, there.devices)
    hosts = there.devices // on_host
    for used in (u for u in range(1, hosts + 1) if hosts % u == 0):
        runs = [
            _Balance(tables, group, m, schedule, (pool, on_host * used, hosts // used))
            for m in problem.microbatches
            for group in _recomputed(problem, pool, m)
        ]
        fewest = [run.fewest() for run in runs]
        for stages in sorted({f for f in fewest if f is not None}):
            fits = False
            for run, least in zip(runs, fewest, strict=True):
                if least is not None and least <= stages:
                    choice = run.grown(stages)
                    fits |= choice is not None and kept.add(choice)
            if fits:
                return


def _recomputed(problem: JointProblem, pool: int, microbatches: int) -> Iterator[_Group]:
    """Groups with recompute where there are several microbatches, without where there is one."""
    modes = ("full", "selective", "none") if microbatches > 1 else ("none", "selective", "full")
    for mode in modes:
        groups = list(_replicas(problem, pool, mode))
        if groups:
            yield from groups
            return


class _Balance:
    """Splits of all suffixes into one stage more at each :meth:`grow`, over (block, devices)."""

    def __init__(
        self,
        tables: IntervalTables,
        group: _Group,
        microbatches: int,
        schedule: str,
        place: tuple[int, int, int],
    ) -> None:
        """place: the pool, devices of a group of hosts, and how often the group is replicated."""
        pool, self.devices, replicas = place
        self.tables, self.m, self.schedule = tables, microbatches, schedule
        self.memory = tables.problem.pools[pool].memory
        self.costs: list[tuple[int, int, IntervalCosts]] = []
        for data, option in sorted(group.items()):
            found = tables.costs(option, microbatches)
            if found is not None and data % replicas == 0 and data // replicas <= self.devices:
                self.costs.append((data // replicas, option, found))
        self._begin()

    def _begin(self) -> None:
        """No stage yet."""
        n = len(self.tables.problem.blocks)
        self.parts = np.full((3, n + 1, self.devices + 1), inf)  # forward, backward, once
        self.parts[:, n, 0] = 0.0
        self.steps: list[tuple[_Ints, _Ints]] = []  # by stages: index of costs, next block

    def fewest(self) -> int | None:
        """The least number of stages, among those allowed, in which all blocks fit."""
        problem, n = self.tables.problem, len(self.tables.problem.blocks)
        every = range(problem.min_stages, min(self.devices, n, problem.max_stages) + 1)
        if not needs_whole_depth(self.schedule):
            return self._fewest(every)
        each = (self._fewest(range(stages, stages + 1)) for stages in every)
        return next((stages for stages in each if stages is not None), None)

    def _fewest(self, allowed: range) -> int | None:
        """The least of these numbers of stages; of one number where stages fit by the whole."""
        n = len(self.tables.problem.blocks)
        need = np.full(n + 1, _MANY)  # devices
        need[n] = 0
        for to_end in range(1, allowed.stop):
            after, need = need, np.full(n + 1, _MANY)
            for taken, _, costs in self.costs:
                fits = self._fits(costs, to_end, allowed.stop - 1)
                table = np.where(fits, after[None, 1:], _MANY)
                need[:n] = np.minimum(need[:n], table.min(axis=1) + taken)
            if need[0] <= self.devices and to_end in allowed:
                return to_end
        return None

    def _fits(self, costs: IntervalCosts, to_end: int, stages: int) -> Mask:
        memory = costs.sizes.memory(self.schedule, self.m, to_end, stages)
        return self.tables.allowed & (memory <= self.memory)

    def grow(self, stages: int) -> None:
        """One stage more before the others, of a pipeline of so many."""
        to_end, n = len(self.steps) + 1, len(self.tables.problem.blocks)
        after, self.parts = self.parts, np.full_like(self.parts, inf)
        total = np.full((n + 1, self.devices + 1), inf)
        option, following = (np.zeros(total.shape, np.int64) for _ in range(2))
        for k, (taken, _, costs) in enumerate(self.costs):
            allowed = self._fits(costs, to_end, stages)
            stage = np.stack(
                [
                    self.m * costs.forward,
                    self.m * (costs.seconds - costs.forward),
                    costs.once,
                ]
            )
            room = self.devices + 1 - taken
            for i in range(n):
                ends = np.flatnonzero(allowed[i])
                if not ends.size:
                    continue
                slowest = np.maximum(stage[:, i, ends, None], after[:, ends + 1, :room])
                sums: Floats = slowest.sum(axis=0)
                pick = sums.argmin(axis=0)
                least = sums[pick, np.arange(room)]
                better = np.flatnonzero(least < total[i, taken:])
                total[i, taken + better] = least[better]
                self.parts[:, i, taken + better] = slowest[:, pick[better], better]
                option[i, taken + better] = k
                following[i, taken + better] = ends[pick[better]] + 1
        self.steps.append((option, following))

    def grown(self, stages: int) -> JointChoice | None:
        """The best split of all blocks into so many stages, no fewer than at the last call."""
        if needs_whole_depth(self.schedule):  # what fewer stages hold says nothing of this many
            self._begin()
        while len(self.steps) < stages:
            self.grow(stages)
        whole = self.parts[:, 0].sum(axis=0)
        if not np.isfinite(whole).any():
            return None
        block, left, starts, options = 0, int(whole.argmin()), list[int](), list[int]()
        for option, following in reversed(self.steps):
            taken, index, _ = self.costs[int(option[block, left])]
            starts.append(block)
            options.append(index)
            block, left = int(following[block, left]), left - taken
        return JointChoice(
            microbatches=self.m,
            schedule=self.schedule,
            starts=tuple(starts),
            options=tuple(options),
        )
