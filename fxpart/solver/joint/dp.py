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
from typing import Any, Generic

import numpy as np

from fxpart.solver.joint.arrays import Floats, Ints, Mask
from fxpart.solver.joint.stage_tables import Choice, SearchScope, StageEntries, StageTables
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


class SearchBranch(Generic[Choice]):
    """The plans of one microbatch count, one schedule, and ``low`` to ``high`` stages."""

    def __init__(
        self, tables: StageTables[Choice], entries: StageEntries, scope: SearchScope
    ) -> None:
        """entries: the stages that may be used. The scope has at most as many stages as units."""
        self.tables, self.runs, self.entries, self.scope = tables, tables.runs, entries, scope
        self.microbatches, self.schedule = scope.microbatches, scope.schedule
        low, high = self.low, self.high = scope.low, scope.high
        alive, self.cls = np.unique(entries.cls, return_inverse=True)
        self.classes = len(alive)  # the index of "no class"
        compact = np.full(self.runs.count + 1, self.classes, dtype=np.int64)
        compact[alive] = np.arange(self.classes)
        band = compact[self.runs.band]
        used = np.flatnonzero((band < self.classes).any(axis=0))
        self.band: Ints = band[:, : int(used[-1]) + 1 if len(used) else 1]
        self.units, self.width = self.band.shape
        key = entries.group * (self.classes + 1) + self.cls
        self._cells = np.flatnonzero(np.diff(key, prepend=-1))
        self._keys = key[self._cells]
        self.groups = len(entries.size)
        self._places = [tables.list_groups(entries, stage) for stage in range(high)]
        self.exact = low == high or self._is_exact()

    def _is_exact(self) -> bool:
        """Return whether the number of stages is irrelevant for every entry."""
        if any(pin.stage > 0 for pin in self.tables.pins) or len(set(self._places[1:])) > 1:
            return False
        counts = (self.low, self.high)
        if needs_whole_depth(self.schedule):
            fewest, most = (
                count_stage_in_flight(self.schedule, self.microbatches, n, 0) for n in counts
            )
            flights = self.entries.flights
            if ((flights >= fewest) & (flights < most)).any():
                return False
        return len({get_fill_fraction(self.schedule, self.microbatches, n) for n in counts}) == 1

    @cached_property
    def admitted(self) -> list[tuple[int, ...] | None]:
        """Return the groups that the stage may have by stages to go, from 1; None: any."""
        return [None, *map(self._groups_of, range(1, self.high + 1))]

    def _groups_of(self, q: int) -> tuple[int, ...] | None:
        found = {self._places[count - q] for count in range(max(self.low, q), self.high + 1)}
        if None in found:
            return None
        return tuple(sorted({group for groups in found for group in groups or ()}))

    @cached_property
    def flying(self) -> list[int]:
        """Return the microbatches in flight in the stage by stages to go; the fewest if open."""
        whole = needs_whole_depth(self.schedule)
        return [
            count_stage_in_flight(self.schedule, self.microbatches, self.low if whole else q, 0)
            for q in range(self.high + 1)
        ]

    @cached_property
    def _pinned(self) -> list[tuple[int, Mask]]:
        """Return (stage, runs that contain the pinned blocks), as bands."""
        return [(p.stage, self.runs.holding(p.first)[:, : self.width]) for p in self.tables.pins]

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

    def choice(self, stages: StagePath) -> Choice:
        """Return a path as a choice."""
        starts = [int(self.runs.firsts[u]) for u in stages.units]
        options = [int(self.entries.option[e]) for e in stages.entries]
        return self.tables.choice(self.scope, starts, options)

    def used(self, stages: StagePath, pools: int) -> Ints:
        """Return the devices of each pool that a path uses."""
        group = self.entries.group[list(stages.entries)]
        return np.bincount(
            self.entries.pool[group], weights=self.entries.size[group], minlength=pools
        ).astype(np.int64)


class BranchCosts:
    """Fillings of a branch's entries with no load over a threshold."""

    def __init__(
        self, branch: SearchBranch[Any], threshold: float, costs: Floats | None = None
    ) -> None:
        """costs: other costs of the entries than their fillings."""
        self.branch = branch
        entries = branch.entries
        source = entries.filling if costs is None else costs
        self._values = np.where(entries.load <= threshold, source, inf)
        ranked = np.sort(entries.flights[entries.load <= threshold])
        self._levels = np.searchsorted(ranked, branch.flying, side="left").tolist()
        self._kept: dict[tuple[int, tuple[int, ...] | None], Floats] = {}

    def level(self, q: int) -> tuple[int, tuple[int, ...] | None]:
        """Return what is equal for numbers of stages to go with equal costs."""
        return self._levels[q], self.branch.admitted[q]

    def under(self, q: int, *, any_devices: bool = False) -> Floats:
        """Return minima by (group, class) for a stage with q to go; the last column is infinite.

        any_devices: in every group, whatever the stage may have.
        """
        level, groups = self.level(q)
        if any_devices:
            groups = None
        if (level, groups) not in self._kept:
            branch = self.branch
            table = np.full((branch.groups, branch.classes + 1), inf)
            cells = branch._cells
            if len(cells):
                least = self._admitted(q)
                if len(cells) < len(least):
                    least = np.minimum.reduceat(least, cells)
                table.ravel()[branch._keys] = least
            if groups is not None:
                table[np.setdiff1d(np.arange(branch.groups), groups)] = inf
            self._kept[level, groups] = table
        return self._kept[level, groups]

    def entry(self, q: int, group: int, cls: int) -> int:
        """Return the first entry of a group and class that has the minimum cost with q to go."""
        branch = self.branch
        mine = np.flatnonzero((branch.entries.group == group) & (branch.cls == cls))
        return int(mine[int(np.argmin(self._admitted(q)[mine]))])

    def _admitted(self, q: int) -> Floats:
        return np.where(self.branch.entries.flights >= self.branch.flying[q], self._values, inf)
