"""The candidate stages of a chain on devices in a fixed order, and the search of the best cuts.

An option of a stage is a device and a mode of recomputation. Devices with equal costs, memory and
links are one group; the first stage has a group of its own, because it receives nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from fxpart.solver.bounds import cheap_bound
from fxpart.solver.joint.arrays import Floats
from fxpart.solver.joint.dp import BranchCosts, SearchBranch
from fxpart.solver.joint.multipliers import find_totals
from fxpart.solver.joint.search import JointSearch
from fxpart.solver.joint.stage_tables import SearchScope, StageEntries, StageTables
from fxpart.solver.objective import PartitionScorer
from fxpart.solver.problem import PartitionChoice, PartitionProblem
from fxpart.solver.schedule_costs import get_fill_fraction, splits_backward
from fxpart.solver.solution import Record
from fxpart.solver.tables import PartitionTables
from fxpart.solver.work import work_seconds

_REFINED = 10  # alternatives that are refined; the best of them are reported
_REFINED_GAP = 1e-3  # gap of the refinement


class PartitionRecord(Record[PartitionChoice]):
    """The best choices found: one for each number of stages, microbatches and schedule."""

    def __init__(self, problem: PartitionProblem) -> None:
        """Start without a choice."""
        super().__init__(PartitionScorer(problem).evaluate)
        self.problem = problem

    def sort(self, choice: PartitionChoice) -> tuple[int, int, str]:
        """Return the properties that distinguish kinds: stages, microbatches, schedule."""
        m = self.problem.variants[choice.variant].microbatches
        return len(choice.starts), m, choice.schedule


class PartitionStages(StageTables[PartitionChoice]):
    """The entries of a partition problem; the options of a scope are those of one variant."""

    runs: PartitionTables

    def __init__(self, problem: PartitionProblem) -> None:
        """Sum the costs that do not depend on the variant."""
        self.problem, self.runs = problem, PartitionTables(problem)
        self.devices = np.array([len(problem.devices)], dtype=np.int64)
        later = self.runs.kinds[1:]
        self._groups = [0, *sorted(set(later))]  # the first device of each
        self._of = [0, *(self._groups.index(kind, 1) for kind in later)]
        self._each = len(self._groups) * max(1, len(problem.recompute))  # options of a variant

    def scopes(self) -> list[tuple[float, SearchScope]]:
        """Return the scopes by variant and schedule."""
        problem = self.problem
        low, high = problem.min_stages, min(problem.max_stages, self.runs.units)
        return [
            (
                cheap_bound(problem, v, high, schedule),
                SearchScope(
                    one.microbatches,
                    schedule,
                    np.arange(v * self._each, (v + 1) * self._each),
                    low,
                    high,
                ),
            )
            for v, one in enumerate(problem.variants)
            for schedule in problem.schedules
            if low <= high
        ]

    def list_groups(self, entries: StageEntries, stage: int) -> tuple[int, ...] | None:
        """Return the group of the stage's device; None if all after the first are of one."""
        return None if len(self._groups) < 3 else (self._of[stage],)

    def choice(
        self, scope: SearchScope, starts: Sequence[int], options: Sequence[int]
    ) -> PartitionChoice:
        """Return the choice; the modes of recomputation follow from it."""
        variant = int(scope.options[0]) // self._each
        return PartitionChoice(variant=variant, schedule=scope.schedule, starts=tuple(starts))

    def path(
        self, scope: SearchScope, choice: PartitionChoice
    ) -> list[tuple[int, int, int, int]] | None:
        """Return the first block of each stage, on one device of the only pool."""
        if (choice.variant, choice.schedule) != (scope.options[0] // self._each, scope.schedule):
            return None
        return [(start, 0, 1, -1) for start in choice.starts]

    def entries(self, scope: SearchScope, best: float) -> StageEntries:
        """Return the candidate stages of plans that take at most ``best`` seconds."""
        fill = get_fill_fraction(scope.schedule, scope.microbatches, scope.low)
        split = splits_backward(scope.schedule)
        costs = self.runs.variant(int(scope.options[0]) // self._each, split=split)
        columns = []
        used = {0, *self._of[: scope.high]}
        left = self._remaining(scope)
        for group in sorted(used):
            rows = slice(0, 1) if group == 0 else slice(1, None)
            modes = costs.stage(self._groups[group], fill).modes
            for mode, table in enumerate(modes):
                least = table.load[rows] + table.seconds[rows] + left[rows]
                first, width = np.nonzero((least <= best * (1 + 1e-9)) & (table.flights[rows] >= 1))
                first += rows.start
                option = scope.options[group * len(modes) + mode]
                columns.append((
                    np.full(len(first), option),
                    self.runs.band[first, width],
                    np.full(len(first), group),
                    table.seconds[first, width],
                    table.load[first, width],
                    table.flights[first, width],
                ))  # fmt: skip
        size = np.ones(len(self._groups), dtype=np.int64)
        return StageEntries.sort(columns, size - 1, size)

    def sharper(self, entries: StageEntries, scope: SearchScope, best: float) -> StageEntries:
        """Filter entries once a faster plan is known."""
        left = self._remaining(scope).ravel()[entries.cls]
        return entries.keep(entries.load + entries.filling + left <= best * (1 + 1e-9))

    def _remaining(self, scope: SearchScope) -> Floats:
        """Return the least filling of the blocks outside each interval."""
        one = self.problem.variants[int(scope.options[0]) // self._each]
        fill = get_fill_fraction(scope.schedule, scope.microbatches, scope.low)
        kinds = sorted({device.type for device in self.problem.devices[: scope.high]})
        least = fill * np.min([np.add(one.forward[k], one.backward[k]) for k in kinds], axis=0)
        return float(least.sum()) - self.runs.additive(least)


class _KindIncumbent:
    """The minimum step time among the choices of one kind; ``record`` stores them."""

    def __init__(self, record: PartitionRecord) -> None:
        self._record, self.seconds = record, inf

    def add(self, choice: PartitionChoice) -> float:
        """Record a choice; return its seconds, or infinity."""
        seconds = self._record.add(choice)
        self.seconds = min(self.seconds, seconds)
        return seconds


def search(tables: PartitionStages, record: PartitionRecord, deadline: float) -> float:
    """Record the best choice and good ones of other kinds; return the proven bound in seconds."""
    search = JointSearch(tables, record, deadline)
    if search.prove():
        _refine(tables, record, deadline)
    return search.bound


def _refine(tables: PartitionStages, record: PartitionRecord, deadline: float) -> None:
    """Refine the promising choices of other kinds, while time is left."""
    ranked: list[tuple[float, int, SearchScope]] = []
    for bound, root in sorted(tables.scopes(), key=lambda pair: pair[0]):
        ranked.sort(key=lambda one: one[:2])
        if len(ranked) >= _REFINED and ranked[_REFINED - 1][0] <= bound:
            break
        if work_seconds() > deadline:
            return
        branch = SearchBranch(tables, tables.entries(root, inf), root)
        loads = BranchCosts(branch, inf, branch.entries.load)
        totals = zip(
            find_totals(branch, BranchCosts(branch, inf)),
            find_totals(branch, loads, np.maximum),
            strict=True,
        )
        ranked += [
            (filling + load, len(ranked) + count, replace(root, low=count, high=count))
            for count, (filling, load) in enumerate(totals)
            if count >= root.low and filling + load < inf
        ]
    for least, _, scope in sorted(ranked, key=lambda one: one[:2])[:_REFINED]:
        own = _KindIncumbent(record)
        JointSearch(tables, own, deadline, scopes=[(least, scope)], gap=_REFINED_GAP).prove()
