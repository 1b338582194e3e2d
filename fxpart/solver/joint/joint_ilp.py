"""The joint problem as an integer program for CP-SAT: a second solver besides the DP.

One integer program for each microbatch count and schedule. There is a variable for each arc (a run
of blocks with an option, from :mod:`fxpart.solver.joint.tables`), and arcs form a path through the
blocks. Every block's arc bounds the longest stage and the stages after it, which is stronger than
bounds by arc, because exactly one arc covers a block. Seconds become integers by scaling and
rounding down, which only lowers the objective: CP-SAT's own bound, scaled back, is a bound on ours.
Choices are evaluated again by :func:`fxpart.solver.joint.objective.evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor, inf, isfinite
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from fxpart.schedule.spec import INTERLEAVED
from fxpart.solver.joint.arrays import JointArrays
from fxpart.solver.joint.objective import uniform_degrees
from fxpart.solver.joint.problem import JointChoice, JointProblem, count_option_devices
from fxpart.solver.joint.record import JointRecord
from fxpart.solver.joint.tables import JointTables
from fxpart.solver.progress import Progress
from fxpart.solver.schedule_costs import (
    has_pieces,
    needs_whole_depth,
    split_stage_counts,
)
from fxpart.solver.work import work_seconds

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
    if problem.stage_tensor:
        return "The CP-SAT model has no tensor degrees by stage."
    n = len(problem.blocks)
    size = n * (n + 1) // 2 * len(problem.options)
    if size > _MOST_ARCS:
        return f"The problem has {size} candidate stages; the CP-SAT model supports {_MOST_ARCS}."
    return None


def solve_cp_sat(
    problem: JointProblem,
    record: JointRecord,
    deadline: float,
    seed: int,
    progress: Callable[[Progress], None] | None = None,
) -> float:
    """Add choices to ``record`` and return a proven lower bound in seconds, infinite if none fits.

    The best known choice is hint and cutoff. deadline: a ``work_seconds()`` value. One worker, a
    fixed seed and a deterministic limit make equal runs equal unless the deadline interrupts them.
    An interrupt (SIGINT) ends the search with the current result.
    """
    tables = JointTables(JointArrays(problem))
    groups = tables.stacked.groups()
    parts = sorted(
        (min(tables.bounds.bound(m, schedule, options) for options in groups), m, s, counts)
        for m in problem.microbatches
        for s, schedule in enumerate(problem.schedules)
        for counts in split_stage_counts(schedule, m, problem.min_stages, problem.max_stages)
    )
    bounds, stopped = [cheap for cheap, *_ in parts], False
    for k, (cheap, microbatches, s, counts) in enumerate(parts):
        left = deadline - work_seconds()
        if stopped or left <= 0 or cheap >= record.seconds * (1 - _EXACT):
            continue
        program = _JointModel(tables, microbatches, problem.schedules[s], counts, record)
        found, stopped = program.solve(seed, deadline)
        bounds[k] = max(cheap, found)
        if progress is not None:
            bound = min([*bounds, record.seconds])
            progress(Progress(record.seconds, bound, deadline - work_seconds(), "cp-sat"))
    return min([*bounds, record.seconds])


@dataclass(frozen=True)
class _Arc:
    """Blocks first..last with an option: filling and load in seconds, devices, deepest entry."""

    first: int
    last: int
    option: int
    filling: float
    load: float
    devices: int
    deepest: int


def _list_arcs(
    tables: JointTables, microbatches: int, schedule: str, cutoff: float, stages: int
) -> list[_Arc]:
    """Return every candidate stage of plans of at most ``cutoff`` seconds and ``stages`` or more.

    Ordered by first block, last block and option.
    """
    found, runs = list[_Arc](), tables.runs
    of_class: dict[int, list[tuple[int, int]]] = {}
    for first, width in np.argwhere(runs.band < runs.count).tolist():
        blocks = int(runs.firsts[first]), int(runs.lasts[first + width])
        of_class.setdefault(int(runs.band[first, width]), []).append(blocks)
    for group in tables.stacked.groups():
        entries = tables.entries(microbatches, schedule, group, cutoff, stages)
        deepest = entries.deepest(tables.stacked.problem, microbatches, schedule)
        devices = entries.size[entries.group]
        columns = entries.option, entries.filling, entries.load, devices, deepest
        for cls, *numbers in zip(entries.cls.tolist(), *(x.tolist() for x in columns), strict=True):
            found += [_Arc(*blocks, *numbers) for blocks in of_class[cls]]
    return sorted(found, key=lambda arc: (arc.first, arc.last, arc.option))


class _JointModel:
    """One microbatch count under one schedule; the number of stages is a decision.

    counts: the smallest and largest one, all with one filling.
    """

    def __init__(
        self,
        tables: JointTables,
        microbatches: int,
        schedule: str,
        counts: tuple[int, int],
        best: JointRecord,
    ) -> None:
        self.problem, self.best, self.counts = tables.stacked.problem, best, counts
        self.microbatches, self.schedule = microbatches, schedule
        cutoff = best.seconds * (1 + _SLACK)
        self.arcs = _list_arcs(tables, microbatches, schedule, cutoff, counts[0])
        hinted = self._hinted()
        top = best.seconds if isfinite(best.seconds) else self._worst()
        self.scale = _STEPS / top if top > 0 else 1.0
        self.model = cp_model.CpModel()
        self.used = [self.model.new_bool_var("") for _ in self.arcs]
        n = len(self.problem.blocks)
        self.starting: list[list[int]] = [[] for _ in range(n + 1)]
        self.covering: list[list[int]] = [[] for _ in range(n)]
        for k, arc in enumerate(self.arcs):
            self.starting[arc.first].append(k)
            for block in range(arc.first, arc.last + 1):
                self.covering[block].append(k)
        self._path()
        self._constraints()
        self._measure(floor(_STEPS * (1 + _SLACK)) + 1)
        if hinted:
            self._hint(hinted)

    def solve(self, seed: int, deadline: float) -> tuple[float, bool]:
        """Run CP-SAT and store its choices; return the lower bound, and whether interrupted."""
        solver = cp_model.CpSolver()
        # OR-Tools 9.15's presolve reports some feasible models as infeasible
        # (google/or-tools#5274); without it the proofs are slower but correct.
        solver.parameters.cp_model_presolve = False
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.linearization_level = 2
        solver.parameters.max_deterministic_time = _EFFORT
        left = max(deadline - work_seconds(), 0.0)
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

    def _choice(self, used: Sequence[bool]) -> JointChoice:
        path = [arc for arc, one in zip(self.arcs, used, strict=True) if one]
        return JointChoice(
            microbatches=self.microbatches,
            schedule=self.schedule,
            starts=tuple(arc.first for arc in path),
            options=tuple(arc.option for arc in path),
        )

    def _int(self, seconds: float) -> int:
        return floor(seconds * self.scale)

    def _hinted(self) -> frozenset[int]:
        """Return the arcs of the best choice, if it has this microbatch count and schedule.

        An arc that another one replaces, at least as good on as many devices, is that other one.
        """
        choice = self.best.choice
        if choice is None or (choice.microbatches, choice.schedule) != (
            self.microbatches,
            self.schedule,
        ):
            return frozenset()
        found = set[int]()
        pieces = pairwise((*choice.starts, len(self.problem.blocks)))
        for (start, end), option in zip(pieces, choice.options, strict=True):
            devices = count_option_devices(self.problem, self.problem.options[option])
            same = [
                (arc.option != option, k)
                for k, arc in enumerate(self.arcs)
                if (arc.first, arc.last, arc.devices) == (start, end - 1, devices)
                and self.problem.options[arc.option].pool == self.problem.options[option].pool
            ]
            if same:
                found.add(min(same)[1])
        return frozenset(found)

    def _worst(self) -> float:
        """Return seconds that no choice exceeds: the longest arc of each block, and the largest
        load."""
        longest = [0.0] * len(self.problem.blocks)
        for arc in self.arcs:
            longest[arc.first] = max(longest[arc.first], arc.filling)
        return sum(longest) + max((arc.load for arc in self.arcs), default=0.0)

    def _cut(self, block: int) -> Expression:
        """Return a literal: a stage starts with the block."""
        return sum(self.used[k] for k in self.starting[block])

    def _path(self) -> None:
        """Cover each block by exactly one arc; where one ends another starts."""
        ending: list[list[int]] = [[] for _ in self.problem.blocks]
        for k, arc in enumerate(self.arcs):
            ending[arc.last].append(k)
        self.model.add_exactly_one(self.used[k] for k in self.starting[0])
        for block in range(1, len(self.problem.blocks)):
            arrive = sum(self.used[k] for k in ending[block - 1])
            self.model.add(arrive == self._cut(block))
        self.model.add_exactly_one(self.used[k] for k in ending[-1])
        for covers in self.covering:
            self.model.add_exactly_one(self.used[k] for k in covers)

    def _constraints(self) -> None:
        """Constrain stages, devices, pins, depth and uniform degrees."""
        problem, n = self.problem, len(self.problem.blocks)
        after = [
            sum(self.used[k] for k, a in enumerate(self.arcs) if a.first > b) for b in range(n)
        ]
        self.model.add(1 + after[0] >= self.counts[0])
        self.model.add(1 + after[0] <= self.counts[1])
        for p, pool in enumerate(problem.pools):
            taken = [
                arc.devices * self.used[k]
                for k, arc in enumerate(self.arcs)
                if problem.options[arc.option].pool == p
            ]
            self.model.add(sum(taken) <= pool.devices)
        for pin in problem.pins:
            for block in range(pin.first, pin.last + 1):
                if pin.stage < 0:
                    self.model.add(after[block] == -pin.stage - 1)
                else:
                    self.model.add(after[0] - after[block] == pin.stage)
        for block, covers in enumerate(self.covering):
            if any(self.arcs[k].deepest < problem.max_stages for k in covers):
                deep = sum(self.arcs[k].deepest * self.used[k] for k in covers)
                behind = after[0 if needs_whole_depth(self.schedule) else block]
                self.model.add(1 + behind <= deep)
        if problem.uniform:
            self._uniform()

    def _uniform(self) -> None:
        """Give all arcs the degrees of the arc that covers the first block."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for k, arc in enumerate(self.arcs):
            groups.setdefault(uniform_degrees(self.problem, arc.option), []).append(k)
        for _, members in sorted(groups.items()):
            inside = set(members)
            of = [sum(self.used[k] for k in covers if k in inside) for covers in self.covering]
            for one, other in pairwise(of):
                self.model.add(one == other)

    def _measure(self, cutoff: int) -> None:
        """Add the objective in seconds and its cutoff, in integer steps."""
        self.longest = self.model.new_int_var(0, cutoff, "")
        for covers in self.covering:
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
