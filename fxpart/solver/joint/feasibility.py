"""Feasibility: whether any choice fits, regardless of its time. Used by explanations and remedies.

A suffix DP: the minimum devices of the last pool for units i.. in q stages, by the used devices of
the first pool. Times are not compared, so it takes a fraction of the time of a solution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd, inf

import msgspec
import numpy as np

from fxpart.solver.joint.arrays import Ints, JointArrays, Mask
from fxpart.solver.joint.memory_bounds import compute_min_state_bytes
from fxpart.solver.joint.problem import JointChoice, JointProblem, count_stage_devices
from fxpart.solver.joint.tables import JointTables
from fxpart.solver.schedule_costs import has_pieces, needs_whole_depth
from fxpart.solver.suffix_dp import SolverTimeout
from fxpart.solver.work import work_seconds

_NONE = 2**40  # more devices than any pool has
_CHUNK = 2_000_000  # entries of a temporary array


def find_feasible_joint_choice(problem: JointProblem, deadline: float) -> JointChoice | None:
    """Return any choice that satisfies all constraints and fits the memory, or None.

    deadline: a ``work_seconds()`` value; raises :class:`SolverTimeout` after it.
    """
    if compute_min_state_bytes(problem) > sum(pool.devices * pool.memory for pool in problem.pools):
        return None
    tables, open_ones = JointTables(JointArrays(problem)), set[str]()
    for m in sorted(problem.microbatches, reverse=True):  # small microbatches fit best
        for schedule in problem.schedules:
            for group in tables.stacked.groups() if not has_pieces(schedule) else ():
                fit = _FeasibilityProgram(tables, m, schedule, group, deadline)
                if not fit.possible():
                    continue
                if len(problem.pools) > 2:
                    open_ones.add(schedule)
                elif (choice := fit.choice()) is not None:
                    return choice
    left = tuple(s for s in problem.schedules if s in open_ones or has_pieces(s))
    if not left:
        return None
    return _solved(msgspec.structs.replace(problem, schedules=left), deadline)


def _solved(problem: JointProblem, deadline: float) -> JointChoice | None:
    """Return a feasible choice from the joint solver, for features that the DP does not model."""
    from fxpart.solver.joint.portfolio import solve  # circular: it may need explanations itself

    left = deadline - work_seconds()
    if left <= 0:
        raise SolverTimeout
    found = solve(problem, time_limit=left)
    if found.status == "unknown":
        raise SolverTimeout
    return found.choice


@dataclass(frozen=True)
class _IntervalDepths:
    """Stages on a number of devices of a pool: maximum depth of each interval, and its option.

    Arrays [first unit, last unit].
    """

    pool: int
    devices: int
    depth: Ints
    option: Ints


class _FeasibilityProgram:
    """One microbatch count and schedule with a group of options."""

    def __init__(
        self,
        tables: JointTables,
        microbatches: int,
        schedule: str,
        group: Ints,
        deadline: float,
    ) -> None:
        self.tables, self.runs, self.problem = tables, tables.runs, tables.stacked.problem
        self.microbatches, self.schedule, self.deadline = microbatches, schedule, deadline
        self.last = len(self.problem.pools) - 1
        self.ways = self._ways(group)
        first = [w.devices for w in self.ways if w.pool < self.last]
        self.unit = reduce(gcd, first, 0) or 1
        self.apart, self.room = False, 0  # whether the first pool is counted, in units

    def possible(self) -> bool:
        """Return whether anything fits if all devices were of one pool.

        Quickly decides most cases.
        """
        self.apart, self.room = False, 0
        return self._any() is not None

    def choice(self) -> JointChoice | None:
        """Return a choice that fits, with the fewest stages, or None; for one pool or two."""
        if self.last:
            self.apart, self.room = True, self.problem.pools[0].devices // self.unit
        return self._any()

    def _any(self) -> JointChoice | None:
        """Return a choice.

        Its devices are of the right pools only if they are counted separately.
        """
        problem = self.problem
        most = min(problem.max_stages, self.runs.units)
        apart = any(pin.stage >= 0 for pin in problem.pins)
        for some in self._counts(range(problem.min_stages, most + 1), apart):
            found = self._within(some, some.start if apart else None)
            if found is not None:
                return found
        return None

    def _counts(self, every: range, apart: bool) -> Iterator[range]:
        """Return numbers of stages that can be searched together, with equal depth limits.

        apart: each separately, as required by pins from the front.
        """
        if apart:
            yield from (range(stages, stages + 1) for stages in every)
            return
        low = every.start
        if needs_whole_depth(self.schedule):
            depths = {int(d) for way in self.ways for d in np.unique(way.depth)}
            for depth in sorted(depths & set(every)):
                yield range(low, depth + 1)
                low = depth + 1
        if low < every.stop:
            yield range(low, every.stop)

    def _deep(self, allowed: range, to_end: int) -> int:
        """Return the required depth of a stage: its own, or that of the whole pipeline."""
        return allowed.start if needs_whole_depth(self.schedule) else to_end

    def _ways(self, group: Ints) -> list[_IntervalDepths]:
        """Return by pool and number of devices the deepest of the options; of equal ones the
        fastest."""
        self._check()
        fewest, runs = self.problem.min_stages, self.runs
        entries = self.tables.entries(self.microbatches, self.schedule, group, inf, fewest)
        deepest, found = entries.deepest(self.problem, self.microbatches, self.schedule), []
        for k, (pool, devices) in enumerate(zip(entries.pool, entries.size, strict=True)):
            mine = np.flatnonzero(entries.group == k)[::-1]
            mine = mine[np.argsort(deepest[mine], kind="stable")]  # the last one of each class wins
            tables = np.zeros((2, runs.count + 1), np.int64)
            tables[:, entries.cls[mine]] = deepest[mine], entries.option[mine]
            found.append(_IntervalDepths(int(pool), int(devices), *map(runs.spread, tables)))
        return [way for way in found if way.depth.any()]

    def _within(self, allowed: range, stages: int | None) -> JointChoice | None:
        """Return a choice with a number of stages among ``allowed``, as required by pins from the
        front."""
        n = self.runs.units
        need = np.full((n + 1, self.room + 1), _NONE)  # [unit, devices of the first pool]
        need[n] = 0
        steps = [need]
        counted = self.problem.pools[-1:] if self.apart else self.problem.pools
        there = sum(pool.devices for pool in counted)
        for to_end in range(1, allowed.stop):
            self._check()
            deep = self._deep(allowed, to_end)
            ways = self._allowed(to_end)
            steps.append(self._grown(steps[-1], self._pinned(to_end, stages), deep, ways))
            if to_end in allowed and steps[-1][0].min() <= there:
                return self._traced(steps, stages, allowed)
        return None

    def _takes(self, way: _IntervalDepths) -> tuple[int, int]:
        """Return the units of the first pool, and devices of the other pools."""
        if self.apart and way.pool < self.last:
            return way.devices // self.unit, 0
        return 0, way.devices

    def _pinned(self, to_end: int, stages: int | None) -> Mask:
        """Return intervals that satisfy the pins as the stage so far from the end."""
        n = self.runs.units
        mask = np.ones((n, n), bool)
        first, last = np.arange(n)[:, None], np.arange(n)[None, :]
        for pin in self.problem.pins:  # whose blocks are one unit
            place = -pin.stage if stages is None or pin.stage < 0 else stages - pin.stage
            unit = self.runs.unit_of[pin.first]
            inside = (first <= unit) & (unit <= last)
            mask &= inside if place == to_end else ~inside
        return mask

    def _allowed(self, to_end: int) -> list[_IntervalDepths]:
        """Return the ways of the stage so far from the end."""
        wanted = count_stage_devices(self.problem, to_end)
        return [way for way in self.ways if wanted in (0, way.devices)]

    def _grown(self, after: Ints, pinned: Mask, deep: int, ways: Sequence[_IntervalDepths]) -> Ints:
        """Return the devices needed with one more stage in front."""
        n, width = self.runs.units, after.shape[1]
        need = np.full_like(after, _NONE)
        rows = max(1, _CHUNK // (n * width))
        for way in ways:
            mask = pinned & (way.depth >= deep)
            shift, add = self._takes(way)
            for low in range(0, n, rows):
                part = mask[low : low + rows]
                if not part.any() or shift >= width:
                    continue
                table = np.where(part[:, :, None], after[None, 1:, : width - shift], _NONE)
                least = np.minimum(table.min(axis=1) + add, _NONE)
                into = need[low : min(low + rows, n), shift:]
                np.minimum(into, least, out=into)
        return need

    def _traced(self, steps: list[Ints], stages: int | None, allowed: range) -> JointChoice:
        """Return the stages after the last step's need of all units."""
        first, room = 0, int(steps[-1][0].argmin())
        starts, options = list[int](), list[int]()
        for to_end in range(len(steps) - 1, 0, -1):
            starts.append(int(self.runs.firsts[first]))
            first, room, option = next(
                self._behind(
                    steps[to_end - 1],
                    int(steps[to_end][first, room]),
                    (first, room),
                    self._pinned(to_end, stages)[first],
                    self._deep(allowed, to_end),
                    self._allowed(to_end),
                )
            )
            options.append(option)
        return JointChoice(
            microbatches=self.microbatches,
            schedule=self.schedule,
            starts=tuple(starts),
            options=tuple(options),
        )

    def _behind(
        self,
        after: Ints,
        wanted: int,
        place: tuple[int, int],
        pinned: Mask,
        deep: int,
        ways: Sequence[_IntervalDepths],
    ) -> Iterator[tuple[int, int, int]]:
        """Return (next unit, devices left, option) that yields the need at (unit, devices)."""
        first, room = place
        for way in ways:
            shift, add = self._takes(way)
            if shift > room:
                continue
            good = pinned & (way.depth[first] >= deep)
            for last in np.flatnonzero(good & (after[1:, room - shift] + add == wanted)).tolist():
                yield last + 1, room - shift, int(way.option[first, last])

    def _check(self) -> None:
        if work_seconds() > self.deadline:
            raise SolverTimeout
