"""Stages as an integer program for CP-SAT: a second solver besides the dynamic programs.

One integer program for each scope and range of stages with one filling. There is a variable for
each arc (a run of units with an option, from :mod:`fxpart.solver.joint.stage_tables`), and arcs
form a path through the units. Every unit's arc bounds the longest stage and the stages after it,
which is stronger than bounds by arc, because exactly one arc covers a unit. Seconds become integers
by scaling and
rounding down, which only lowers the objective: CP-SAT's own bound, scaled back, is a bound on ours.
Choices are evaluated again when they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import floor, inf, isfinite
from typing import Any, Generic

import numpy as np
from ortools.sat.python import cp_model

from fxpart.schedule.spec import INTERLEAVED
from fxpart.solver.joint.problem import JointProblem
from fxpart.solver.joint.stage_tables import Choice, SearchScope, StageTables
from fxpart.solver.progress import Progress
from fxpart.solver.schedule_costs import (
    has_pieces,
    is_stream,
    keeps_all,
    needs_whole_depth,
    split_stage_counts,
)
from fxpart.solver.solution import Record
from fxpart.solver.work import SolverTimeout, work_seconds

_STEPS = 10**8  # integer steps that the best known step time is divided into
# relative margin of the cutoff above the step time, so that rounding does not exclude it
_SLACK = 1e-4
_EXACT = 1e-9  # a part whose bound is this close to the best cannot improve it
_MOST_ARCS = 60_000  # blocks^2 / 2 * options of one program
_EFFORT = 120.0  # deterministic seconds for one program

Expression = Any  # a linear expression of CP-SAT, or an int


def accepts(problem: JointProblem) -> str | None:
    """Return why CP-SAT does not support this problem, or None if it does."""
    if any(map(has_pieces, problem.schedules)):
        return f"The CP-SAT model has no {INTERLEAVED} stages."
    n = len(problem.blocks)
    size = n * (n + 1) // 2 * len(problem.options)
    if size > _MOST_ARCS:
        return f"The problem has {size} candidate stages; the CP-SAT model supports {_MOST_ARCS}."
    return None


def solve_cp_sat(
    tables: StageTables[Choice],
    record: Record[Choice],
    deadline: float,
    seed: int,
    progress: Callable[[Progress], None] | None = None,
) -> float:
    """Add choices to ``record`` and return a proven lower bound in seconds, infinite if none fits.

    The best known choice is hint and cutoff. deadline: a ``work_seconds()`` value. One worker, a
    fixed seed and a deterministic limit make equal runs equal unless the deadline interrupts them.
    An interrupt (SIGINT) ends the search with the current result. Programs of too many candidate
    stages are not solved.
    """
    parts = [
        (bound, replace(scope, low=low, high=high))
        for bound, scope in sorted(tables.scopes(), key=lambda pair: pair[0])
        for low, high in split_stage_counts(
            scope.schedule, scope.microbatches, scope.low, scope.high
        )
    ]
    bounds, stopped = [cheap for cheap, _ in parts], False
    for k, (cheap, scope) in enumerate(parts):
        if stopped or work_seconds() >= deadline or cheap >= record.seconds * (1 - _EXACT):
            continue
        arcs = _list_arcs(tables, scope, record.seconds * (1 + _SLACK))
        if arcs is None:
            continue
        try:
            program = _JointModel(tables, scope, arcs, record, deadline)
        except SolverTimeout:
            break
        found, stopped = program.solve(seed)
        bounds[k] = max(cheap, found)
        if progress is not None:
            bound = min([*bounds, record.seconds])
            progress(Progress(record.seconds, bound, deadline - work_seconds(), "cp-sat"))
    return min([*bounds, record.seconds])


@dataclass(frozen=True)
class _Arc:
    """Units first..last with an option: filling and load in seconds, pool, devices, deepest entry.

    place: the only stage that may be this arc, -1 for any.
    """

    first: int
    last: int
    option: int
    place: int
    filling: float
    load: float
    pool: int
    devices: int
    deepest: int


def _list_arcs(tables: StageTables[Any], scope: SearchScope, cutoff: float) -> list[_Arc] | None:
    """Return every candidate stage of plans of at most ``cutoff`` seconds; None: too many.

    deepest: the most stages from it to the end, itself included, with which it fits; under ZB-H1
    stages of the whole pipeline. The number in flight grows with the stages to the end, up to the
    number of microbatches (without limit in an asynchronous pipeline), except under GPipe, which
    has all of them in flight. Ordered by first unit, last unit, option and place.
    """
    runs, entries = tables.runs, tables.entries(scope, cutoff)
    allowed = [tables.list_groups(entries, stage) for stage in range(scope.high)]
    places = [
        [stage for stage, groups in enumerate(allowed) if groups is None or group in groups]
        if set(allowed) != {None}
        else [-1]
        for group in range(len(entries.size))
    ]
    intervals = np.bincount(runs.band.ravel(), minlength=runs.count + 1)
    choices = np.array([len(some) for some in places], dtype=np.int64)
    if (intervals[entries.cls] * choices[entries.group]).sum() > _MOST_ARCS:
        return None
    of_class: dict[int, list[tuple[int, int]]] = {}
    for first, width in np.argwhere(np.isin(runs.band, entries.cls)).tolist():
        of_class.setdefault(int(runs.band[first, width]), []).append((first, first + width))
    deepest = entries.flights
    if not is_stream(scope.schedule):
        below = 0 if keeps_all(scope.schedule) else np.minimum(deepest, scope.high)
        deepest = np.where(deepest >= scope.microbatches, scope.high, below)
    columns = (
        entries.cls, entries.group, entries.option, entries.filling, entries.load,
        entries.pool[entries.group], entries.size[entries.group], deepest,
    )  # fmt: skip
    found = [
        _Arc(*units, option, place, *numbers)
        for cls, group, option, *numbers in zip(*(x.tolist() for x in columns), strict=True)
        for units in of_class[cls]
        for place in places[group]
    ]
    return sorted(found, key=lambda arc: (arc.first, arc.last, arc.option, arc.place))


class _JointModel(Generic[Choice]):
    """One scope, whose numbers of stages all have one filling; their number is a decision."""

    def __init__(
        self,
        tables: StageTables[Choice],
        scope: SearchScope,
        arcs: list[_Arc],
        best: Record[Choice],
        deadline: float,
    ) -> None:
        """deadline: a ``work_seconds()`` value; raises :class:`SolverTimeout` after it."""
        self.tables, self.scope, self.arcs, self.best = tables, scope, arcs, best
        self.deadline = deadline
        self.units = range(tables.runs.units)
        hinted = self._hinted()
        top = best.seconds if isfinite(best.seconds) else self._worst()
        self.scale = _STEPS / top if top > 0 else 1.0
        self.model = cp_model.CpModel()
        self.used = [self.model.new_bool_var("") for _ in self.arcs]
        self.starting: list[list[int]] = [[] for _ in self.units]
        self.covering: list[list[int]] = [[] for _ in self.units]
        for k, arc in enumerate(self.arcs):
            self._check()
            self.starting[arc.first].append(k)
            for unit in range(arc.first, arc.last + 1):
                self.covering[unit].append(k)
        self._path()
        self._constraints()
        self._measure(floor(_STEPS * (1 + _SLACK)) + 1)
        if hinted:
            self._hint(hinted)

    def solve(self, seed: int) -> tuple[float, bool]:
        """Run CP-SAT and store its choices; return the lower bound, and whether interrupted."""
        solver = cp_model.CpSolver()
        # OR-Tools 9.15's presolve reports some feasible models as infeasible
        # (google/or-tools#5274); without it the proofs are slower but correct.
        solver.parameters.cp_model_presolve = False
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.linearization_level = 2
        solver.parameters.max_deterministic_time = _EFFORT
        left = max(self.deadline - work_seconds(), 0.0)
        if isfinite(left):
            solver.parameters.max_time_in_seconds = left
        status = solver.solve(self.model)
        assert status != cp_model.MODEL_INVALID, self.model.validate()
        if status == cp_model.INFEASIBLE:  # nothing below the cutoff
            top = self.best.seconds
            return (inf if top == inf else top * (1 + _SLACK)), False
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            self.best.add(self._choice([solver.boolean_value(x) for x in self.used]))
        stopped = (
            status != cp_model.OPTIMAL
            and solver.wall_time < left
            and solver.response_proto.deterministic_time < _EFFORT
        )
        return max(0.0, float(solver.best_objective_bound)) / self.scale, stopped

    def _choice(self, used: Sequence[bool]) -> Choice:
        path = [arc for arc, one in zip(self.arcs, used, strict=True) if one]
        starts = [int(self.tables.runs.firsts[arc.first]) for arc in path]
        return self.tables.choice(self.scope, starts, [arc.option for arc in path])

    def _check(self) -> None:
        if work_seconds() > self.deadline:
            raise SolverTimeout

    def _int(self, seconds: float) -> int:
        return floor(seconds * self.scale)

    def _hinted(self) -> frozenset[int]:
        """Return the arcs of the best choice, if it is of this scope.

        An arc that another one replaces, at least as good on as many devices, is that other one.
        """
        choice = self.best.choice
        path = None if choice is None else self.tables.path(self.scope, choice)
        unit_of, found = self.tables.runs.unit_of, set[int]()
        for stage, (block, pool, devices, option) in enumerate(path or ()):
            last = len(unit_of) if path is None or stage + 1 == len(path) else path[stage + 1][0]
            place = (unit_of[block], unit_of[last - 1], pool, devices)
            same = [
                (arc.option != option, k)
                for k, arc in enumerate(self.arcs)
                if (arc.first, arc.last, arc.pool, arc.devices) == place
                and arc.place in (-1, stage)
            ]
            if same:
                found.add(min(same)[1])
        return frozenset(found)

    def _worst(self) -> float:
        """Return seconds that no choice exceeds: the longest arc of each unit, and the largest
        load."""
        longest = [0.0] * len(self.units)
        for arc in self.arcs:
            longest[arc.first] = max(longest[arc.first], arc.filling)
        return sum(longest) + max((arc.load for arc in self.arcs), default=0.0)

    def _cut(self, unit: int) -> Expression:
        """Return a literal: a stage starts with the unit."""
        return sum(self.used[k] for k in self.starting[unit])

    def _path(self) -> None:
        """Cover each unit by exactly one arc; where one ends another starts."""
        ending: list[list[int]] = [[] for _ in self.units]
        for k, arc in enumerate(self.arcs):
            ending[arc.last].append(k)
        self.model.add_exactly_one(self.used[k] for k in self.starting[0])
        for unit in self.units[1:]:
            arrive = sum(self.used[k] for k in ending[unit - 1])
            self.model.add(arrive == self._cut(unit))
        self.model.add_exactly_one(self.used[k] for k in ending[-1])
        for covers in self.covering:
            self._check()
            self.model.add_exactly_one(self.used[k] for k in covers)

    def _constraints(self) -> None:
        """Constrain stages, devices, pins, places and depth."""
        low, high = self.scope.low, self.scope.high
        after = list[Expression]()
        for unit in self.units:
            self._check()
            later = [self.used[k] for k, arc in enumerate(self.arcs) if arc.first > unit]
            after.append(cp_model.LinearExpr.sum(later))
        self.model.add(1 + after[0] >= low)
        self.model.add(1 + after[0] <= high)
        for pool, count in enumerate(self.tables.devices.tolist()):
            taken = [
                arc.devices * self.used[k] for k, arc in enumerate(self.arcs) if arc.pool == pool
            ]
            self.model.add(sum(taken) <= count)
        for pin in self.tables.pins:
            unit = int(self.tables.runs.unit_of[pin.first])  # of all its blocks
            if pin.stage < 0:
                self.model.add(after[unit] == -pin.stage - 1)
            else:
                self.model.add(after[0] - after[unit] == pin.stage)
        for unit, covers in enumerate(self.covering):
            self._check()
            if any(self.arcs[k].place >= 0 for k in covers):
                place = sum(self.arcs[k].place * self.used[k] for k in covers)
                self.model.add(after[0] - after[unit] == place)
            if any(self.arcs[k].deepest < high for k in covers):
                deep = sum(self.arcs[k].deepest * self.used[k] for k in covers)
                behind = after[0 if needs_whole_depth(self.scope.schedule) else unit]
                self.model.add(1 + behind <= deep)

    def _measure(self, cutoff: int) -> None:
        """Add the objective in seconds and its cutoff, in integer steps."""
        self.longest = self.model.new_int_var(0, cutoff, "")
        for covers in self.covering:
            self._check()
            load = sum(self._int(self.arcs[k].load) * self.used[k] for k in covers)
            self.model.add(load <= self.longest)
        total = self.longest + sum(
            self._int(arc.filling) * x for arc, x in zip(self.arcs, self.used, strict=True)
        )
        self.model.add(total <= cutoff)
        self.model.minimize(total)

    def _hint(self, hinted: frozenset[int]) -> None:
        """Add a complete assignment as hint."""
        for k, x in enumerate(self.used):
            self.model.add_hint(x, k in hinted)
        self.model.add_hint(self.longest, max(self._int(self.arcs[k].load) for k in hinted))
