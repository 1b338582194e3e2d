"""Suffix dynamic programs over (stages to go, unit): the common part of both solvers.

State (q, i): q stages are still to come and begin with unit i. Counting from the end makes the
memory of 1F1B exact, because the stage with q to go (itself included) has min(m, q) microbatches in
flight. Under ZB-H1 each stage has as many as there are stages, and with few microbatches the
filling depends on that number, too. A branch is exact if the number of its stages is irrelevant for
every entry; otherwise it assumes the fewest, which is a relaxation. A *threshold* on the load of
every stage turns T = sum filling + max load into a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from fxpart.solver.joint.arrays import Floats, Ints, Mask
from fxpart.solver.joint.block_runs import BlockRuns
from fxpart.solver.joint.problem import JointChoice, count_stage_devices
from fxpart.solver.joint.tables import StageEntries
from fxpart.solver.schedule_costs import (
    count_stage_in_flight,
    get_fill_fraction,
    needs_whole_depth,
)


@dataclass(frozen=True)
class StagePath:
    """A path through the program: first unit and entry of each stage, front to back."""

    units: tuple[int, ...]
    entries: tuple[int, ...]


class SearchBranch:
    """The plans of one microbatch count, one schedule, and ``low`` to ``high`` stages."""

    def __init__(
        self,
        runs: BlockRuns,
        entries: StageEntries,
        microbatches: int,
        schedule: str,
        low: int,
        high: int,
    ) -> None:
        """entries: the stages that may be used. high: at most number of units, and of devices."""
        self.runs, self.entries = runs, entries
        self.microbatches, self.schedule = microbatches, schedule
        self.low, self.high = low, high
        alive, self.cls = np.unique(entries.cls, return_inverse=True)
        self.classes = len(alive)  # the index of "no class"
        compact = np.full(runs.count + 1, self.classes, dtype=np.int64)
        compact[alive] = np.arange(self.classes)
        band = compact[runs.band]
        used = np.flatnonzero((band < self.classes).any(axis=0))
        self.band: Ints = band[:, : int(used[-1]) + 1 if len(used) else 1]
        self.units, self.width = self.band.shape
        key = entries.group * (self.classes + 1) + self.cls
        self._cells = np.flatnonzero(np.diff(key, prepend=-1))
        self.groups = len(entries.size)
        pins = runs.problem.pins
        self.exact = low == high or all(pin.stage <= 0 for pin in pins)
        if needs_whole_depth(schedule):
            fewest, most = (
                count_stage_in_flight(schedule, microbatches, count, 0) for count in (low, high)
            )
            between = (entries.flights >= fewest) & (entries.flights < most)
            self.exact = self.exact and not between.any()
        fills = {get_fill_fraction(schedule, microbatches, count) for count in (low, high)}
        self.exact = self.exact and len(fills) == 1

    def flying(self, q: int) -> int:
        """Return the microbatches in flight in the stage with q to go.

        The fewest if that is open.
        """
        stages = self.low if needs_whole_depth(self.schedule) else q
        return count_stage_in_flight(self.schedule, self.microbatches, stages, 0)

    @cached_property
    def _pinned(self) -> list[tuple[int, Mask]]:
        """Return (stage, runs that contain the pinned blocks), as bands."""
        pins = self.runs.problem.pins
        return [(p.stage, self.runs.holding(p.first)[:, : self.width]) for p in pins]

    def allowed(self, q: int) -> Mask | None:
        """Return the runs that pins allow with q to go.

        None: all. Unknown stages are allowed any.
        """
        if not self._pinned:
            return None
        allowed = np.ones((self.units, self.width), dtype=bool)
        for stage, holding in self._pinned:
            if stage < 0 or (stage > 0 and self.low == self.high):
                if q != (-stage if stage < 0 else self.low - stage):
                    allowed &= ~holding
            elif stage == 0:
                allowed[1:] &= ~holding[1:]
        return allowed

    def choice(self, stages: StagePath) -> JointChoice:
        """Return a path as a choice."""
        return JointChoice(
            microbatches=self.microbatches,
            schedule=self.schedule,
            starts=tuple(int(self.runs.firsts[u]) for u in stages.units),
            options=tuple(int(self.entries.option[e]) for e in stages.entries),
        )

    def used(self, stages: StagePath, pools: int) -> Ints:
        """Return the devices of each pool that a path uses."""
        group = self.entries.group[list(stages.entries)]
        return np.bincount(
            self.entries.pool[group], weights=self.entries.size[group], minlength=pools
        ).astype(np.int64)


class BranchCosts:
    """Fillings (or loads) of a branch's entries with no load over a threshold."""

    def __init__(self, branch: SearchBranch, threshold: float, *, longest: bool = False) -> None:
        """longest: loads instead of fillings."""
        self.branch = branch
        entries = branch.entries
        source = entries.load if longest else entries.filling
        self._values = np.where(entries.load <= threshold, source, inf)
        self._ranked = np.sort(entries.flights[entries.load <= threshold])
        self._kept: dict[tuple[int, int], Floats] = {}

    def level(self, q: int) -> tuple[int, int]:
        """Return what is equal for numbers of stages to go with equal costs."""
        level = int(np.searchsorted(self._ranked, self.branch.flying(q), side="left"))
        return level, count_stage_devices(self.branch.runs.problem, q)

    def under(self, q: int, *, any_devices: bool = False) -> Floats:
        """Return minima by (group, class) for a stage with q to go; the last column is infinite.

        any_devices: also where the problem gives the tensor degree of the stage.
        """
        level, devices = self.level(q)
        if any_devices:
            devices = 0
        if (level, devices) not in self._kept:
            branch = self.branch
            table = np.full((branch.groups, branch.classes + 1), inf)
            cells = branch._cells
            if len(cells):
                least = np.minimum.reduceat(self._admitted(q), cells)
                table[branch.entries.group[cells], branch.cls[cells]] = least
            if devices:
                table[branch.entries.size != devices] = inf
            self._kept[level, devices] = table
        return self._kept[level, devices]

    def entry(self, q: int, group: int, cls: int) -> int:
        """Return the first entry of a group and class that has the minimum cost with q to go."""
        branch = self.branch
        mine = np.flatnonzero((branch.entries.group == group) & (branch.cls == cls))
        return int(mine[int(np.argmin(self._admitted(q)[mine]))])

    def _admitted(self, q: int) -> Floats:
        return np.where(self.branch.entries.flights >= self.branch.flying(q), self._values, inf)
