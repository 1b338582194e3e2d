"""Device assignment as a quadratic assignment problem for CP-SAT: few units, proven bound.

x[i,p]: unit i is in domain p. The seconds of a message take one of few levels (by the classes of
the two domains), so they are a sum of increments, each with a literal that x[i,p] and x[j,q] imply.
Of equivalent domains at most as many are offered as there are units, and the first of them are the
fullest. Seconds are scaled to integers and rounded down, so the bound is valid.
"""

from __future__ import annotations

from itertools import pairwise
from math import floor, inf
from typing import Any

import numpy as np

from fxpart.solver.assignment.objective import AssignmentScorer, ConcurrentMessages
from fxpart.solver.assignment.problem import AssignmentProblem, DeviceAssignment
from fxpart.solver.assignment.units import (
    expand_unit_assignment,
    has_whole_replicas,
    list_assignment_units,
    list_equivalent_domains,
)

MOST = 16  # largest number of units for which the model is solved
SCALE = 1e8  # scaled value of the best known step time
WORK = 12.0  # units of CP-SAT's deterministic time, about seconds


class AssignmentModel:
    """The model of one problem."""

    def __init__(self, scorer: AssignmentScorer, whole: bool, most: float) -> None:
        """Build the variables.

        whole: replicas stay whole. most: seconds of the best known assignment; infinite: search for
        any feasible packing.
        """
        from ortools.sat.python import cp_model

        self.topology, self._scorer = scorer.topology, scorer
        self.atoms = list_assignment_units(self.topology, whole=whole)
        self._model = cp_model.CpModel()
        self._scale = SCALE / most if most < inf else 1.0
        self._limit = int(SCALE * (1 + 1e-4)) + 1
        self._alike = [group[: len(self.atoms)] for group in list_equivalent_domains(self.topology)]
        self.places = sorted(p for group in self._alike for p in group)
        self._of = np.array([i for i, a in enumerate(self.atoms) for _ in range(a.count)])
        self.x: list[dict[int, Any]] = []
        self._add_assignment()
        if most < inf:
            self._cost()

    def _add_assignment(self) -> None:
        """Put each unit into one domain with devices of its pool; no domain exceeds its devices."""
        model, places = self._model, self.topology.places
        for i, atom in enumerate(self.atoms):
            open_ = [p for p in self.places if places[p].devices[atom.pool] >= atom.count]
            self.x.append({p: model.new_bool_var(f"x{i},{p}") for p in open_})
            model.add_exactly_one(self.x[i].values())
        for p in self.places:
            for pool, devices in enumerate(places[p].devices):
                held = [(a.count, x[p]) for a, x in zip(self.atoms, self.x, strict=True)
                        if a.pool == pool and p in x]  # fmt: skip
                if sum(count for count, _ in held) > devices:
                    model.add(sum(count * x for count, x in held) <= devices)
        for group in self._alike:
            loads = [sum(a.count * x[p] for a, x in zip(self.atoms, self.x, strict=True) if p in x)
                     for p in group]  # fmt: skip
            for fuller, other in pairwise(loads):
                model.add(fuller >= other)

    def _cost(self) -> None:
        """Minimize fill * sum t + max((m - fill) * t + beta), with every term rounded down."""
        topology, model = self.topology, self._model
        rest = topology.microbatches - topology.fill
        fixed = sum(group.seconds for group in topology.groups)
        total: list[Any] = [floor(self._scale * topology.fill * fixed)]
        loads: list[list[Any]] = [
            [floor(self._scale * (rest * g.seconds + g.once))] for g in topology.groups
        ]
        cards: dict[tuple[int, int], list[Any]] = {}
        for move in self._scorer.moves:
            pairs = self._pairs(move)
            levels = self._levels(move, pairs)
            crossing = self._crossing(pairs)
            if not move.step:
                total.append(self._seconds(move, topology.fill, levels, crossing))
            weight = 1.0 if move.step else rest
            loads[move.stage].append(self._seconds(move, weight, levels, crossing))
            for key, (uplink, count) in crossing.items():
                each = floor(self._scale * weight * move.share * uplink)
                cards.setdefault(key, []).append(each * count)
        longest = model.new_int_var(0, self._limit, "longest")
        for load in (*loads, *cards.values()):
            model.add(longest >= sum(load))
        self._objective = sum(total) + longest
        model.add(self._objective <= self._limit)
        model.minimize(self._objective)

    def _pairs(self, move: ConcurrentMessages) -> dict[tuple[int, int], int]:
        """Return the pairs of units that communicate, with the number of pairs of mesh ranks."""
        found: dict[tuple[int, int], int] = {}
        ends = (self._of[move.source].tolist(), self._of[move.target].tolist())
        for pair in zip(*ends, strict=True):
            found[pair] = found.get(pair, 0) + 1
        return found

    def _levels(
        self, move: ConcurrentMessages, pairs: dict[tuple[int, int], int]
    ) -> list[tuple[float, Any]]:
        """Return (additional seconds, literal) by ascending level; the first literal is 1."""
        model = self._model
        ends = [(p, q) for p in self.places for q in self.places]
        source, target = (np.array(x, dtype=np.int64) for x in zip(*ends, strict=True))
        seconds = dict(zip(ends, self._scorer.wire(move, source, target).tolist(), strict=True))
        # i and j are different mesh ranks of one domain, or of one unit
        asked: dict[float, list[list[Any]]] = {}
        for i, j in pairs:
            if i == j:
                for p, x in self.x[i].items():
                    asked.setdefault(seconds[p, p], []).append([x.negated()])
                continue
            for p, x in self.x[i].items():
                for q, y in self.x[j].items():
                    asked.setdefault(seconds[p, q], []).append([x.negated(), y.negated()])
        values = sorted(asked)
        found: list[tuple[float, Any]] = [(values[0], 1)]
        for low, high in pairwise(values):
            literal = model.new_bool_var("level")
            if len(found) > 1:
                model.add_implication(literal, found[-1][1])
            for clause in asked[high]:
                model.add_bool_or([*clause, literal])
            found.append((high - low, literal))
        return found

    def _crossing(
        self, pairs: dict[tuple[int, int], int]
    ) -> dict[tuple[int, int], tuple[float, Any]]:
        """Return, by direction (0 out, 1 in) and host with a shared adapter, seconds per byte and
        pairs."""
        found: dict[tuple[int, int], tuple[float, Any]] = {}
        topology = self.topology
        hosts = dict.fromkeys(topology.places[p].host for p in self.places)
        for host in (h for h in hosts if topology.uplinks[h] > 0):
            here = [p for p in self.places if topology.places[p].host == host]
            inside = [sum(x[p] for p in here if p in x) for x in self.x]
            for way in (0, 1):
                counts = []
                for pair, many in pairs.items():
                    if pair[0] != pair[1]:
                        cross = self._model.new_bool_var("cross")
                        self._model.add(cross >= inside[pair[way]] - inside[pair[1 - way]])
                        counts.append(many * cross)
                if counts:
                    found[way, host] = (topology.uplinks[host], sum(counts))
        return found

    def _seconds(
        self,
        move: ConcurrentMessages,
        weight: float,
        levels: list[tuple[float, Any]],
        crossing: dict[tuple[int, int], tuple[float, Any]],
    ) -> Any:
        """Return the scaled seconds of the message times ``weight``: at least its link and adapter
        time."""
        scale = self._scale * weight
        wire = sum(floor(scale * more) * literal for more, literal in levels)
        if not crossing:
            return wire
        seconds = self._model.new_int_var(0, self._limit, "seconds")
        self._model.add(seconds >= wire)
        for uplink, count in crossing.values():
            self._model.add(seconds >= floor(scale * move.share * uplink) * count)
        return seconds

    def hint(self, assignment: DeviceAssignment) -> None:
        """Add a hint from a device assignment, moved to the domains that are offered."""
        at = [place for mesh_ranks in assignment for place in mesh_ranks]
        for i, place in enumerate(self._offered([at[a.first] for a in self.atoms])):
            for p, x in self.x[i].items():
                self._model.add_hint(x, p == place)

    def _offered(self, places: list[int]) -> list[int]:
        """Renumber equivalent domains so that the first are the fullest."""
        load: dict[int, int] = {}
        for atom, place in zip(self.atoms, places, strict=True):
            load[place] = load.get(place, 0) + atom.count
        name: dict[int, int] = {}
        for group in list_equivalent_domains(self.topology):
            used = sorted((p for p in group if p in load), key=lambda p: (-load[p], p))
            name.update(zip(used, group, strict=False))
        return [name[p] for p in places]

    def solve(self, seed: int, work: float) -> tuple[list[int], float]:
        """Return the domain of each unit (or None), and the bound in seconds."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = work
        status = solver.solve(self._model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return [], 0.0
        found = [next(p for p, v in x.items() if solver.value(v)) for x in self.x]
        return found, max(0.0, solver.best_objective_bound) / self._scale


def solve_assignment(
    topology: AssignmentProblem, assignment: DeviceAssignment, *, seed: int = 0, work: float = WORK
) -> tuple[DeviceAssignment, float, float] | None:
    """Return an assignment no worse than ``assignment``, its seconds and a bound, or None.

    Replicas that are whole in ``assignment`` stay whole; at most :data:`MOST` units.
    """
    whole = has_whole_replicas(topology, assignment)
    scorer = AssignmentScorer(topology)
    best = scorer.evaluate(assignment).seconds
    if len(list_assignment_units(topology, whole=whole)) > MOST or best <= 0:
        return None
    model = AssignmentModel(scorer, whole, best)
    model.hint(assignment)
    places, bound = model.solve(seed, work)
    if not places:
        return None
    found = expand_unit_assignment(topology, model.atoms, places)
    seconds = scorer.evaluate(found).seconds
    if seconds >= best:
        found, seconds = assignment, best
    return found, seconds, min(seconds, bound)


def pack_whole(
    topology: AssignmentProblem, *, seed: int = 0, work: float = WORK
) -> DeviceAssignment | None:
    """Return an assignment in which every replica is whole; None if none is found."""
    model = AssignmentModel(AssignmentScorer(topology), whole=True, most=inf)
    places, _ = model.solve(seed, work)
    return expand_unit_assignment(topology, model.atoms, places) if places else None
