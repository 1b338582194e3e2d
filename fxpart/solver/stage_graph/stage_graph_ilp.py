"""Stage graphs as an integer program for CP-SAT, with depth as a variable of each stage.

x[b, p] puts block b on stage p; stages are numbered so that values flow upwards. dep[p, q] holds if
any value flows from p to q, and then tail_p >= t_p + tail_q and depth_p >= depth_q + 1. Memory is
constrained by literals of depth. The objective is the longest load plus the longest tail. Seconds
are scaled and rounded down, which only lowers the objective: CP-SAT's bound, scaled back, bounds
ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import Any

from ortools.sat.python import cp_model

from fxpart.solver.objective import count_tied_reduction_messages, get_tied_reduction_link
from fxpart.solver.schedule_costs import keeps_all
from fxpart.solver.stage_graph.block_graph import members
from fxpart.solver.stage_graph.tables import StageGraphTables
from fxpart.solver.work import work_seconds

_STEPS = 10**8  # integer steps that the best known step time is divided into
_EQUAL = 1e-12  # relative to a step: tolerance of multiples of the smallest cost
_ROUNDING = 1e-10  # relative; of sums in whole steps
# relative margin of the cutoff above the step time, so that rounding does not exclude it
_SLACK = 1e-4

Expression = Any  # a linear expression of CP-SAT, or an int


@dataclass(frozen=True)
class DepthModelResult:
    """Better stages, if found; a proven lower bound in seconds; deterministic time used."""

    stages: list[int] | None
    bound: float
    effort: float


def solve_depth_model(
    tables: StageGraphTables,
    stages: Sequence[int] | None,
    *,
    best: float,
    seconds: float,
    effort: float,
    seed: int,
) -> DepthModelResult:
    """Search and prove for this variant and schedule.

    stages: the best known feasible ones, in topological order, as the hint. best: cutoff in
    seconds, infinite if nothing is known; if nothing is below it, the bound is slightly above it.
    effort: CP-SAT's deterministic time, which ends equal runs equally; seconds: the time limit,
    which may interrupt them earlier. One worker, a fixed seed.
    """
    end = work_seconds() + seconds
    if stages is None:
        stages = [(1 << len(tables.problem.blocks)) - 1]
    model = _DepthModel(tables, stages, best)
    return model.solve(end - work_seconds(), effort, seed)


class _DepthModel:
    """One variant under one schedule."""

    def __init__(self, tables: StageGraphTables, stages: Sequence[int], best: float) -> None:
        self.tables, self.problem, self.one = tables, tables.problem, tables.variant
        self.hint = {b: p for p, blocks in enumerate(stages) for b in members(blocks)}
        self.known = list(stages) + [0] * (self.problem.max_stages - len(stages))
        self.count, self.n = self.problem.max_stages, len(self.problem.blocks)
        self.best = best
        self.top = best if best < inf else self._worst()
        quantum = self._quantum()
        self.exact = quantum > 0
        self.scale = 1 / quantum if self.exact else _STEPS / self.top if self.top > 0 else 1.0
        self.cutoff = floor(self.top * self.scale * (1 + _SLACK)) + 1
        self.model = cp_model.CpModel()
        self._place()
        self._flow()
        self._measure()
        self._fit()

    def solve(self, seconds: float, effort: float, seed: int) -> DepthModelResult:
        """Run CP-SAT."""
        solver = cp_model.CpSolver()
        # OR-Tools 9.15's presolve reports some feasible models as infeasible
        # (google/or-tools#5274); see fxpart.solver.joint.joint_ilp.
        solver.parameters.cp_model_presolve = False
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_time_in_seconds = max(seconds, 0.01)
        solver.parameters.max_deterministic_time = effort
        status = solver.solve(self.model)
        used = float(solver.response_proto.deterministic_time)
        assert status != cp_model.MODEL_INVALID, self.model.validate()
        if status == cp_model.INFEASIBLE:  # nothing below the cutoff, so nothing better
            return DepthModelResult(None, self.best * (1 + _SLACK), used)
        bound = max(0.0, float(solver.best_objective_bound)) / self.scale
        bound *= 1 - _ROUNDING
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return DepthModelResult(None, bound, used)
        found = [
            sum(1 << b for b in range(self.n) if solver.boolean_value(self.x[b][p]))
            for p in range(self.count)
        ]
        return DepthModelResult([blocks for blocks in found if blocks], bound, used)

    def _new(self, hint: bool) -> cp_model.IntVar:
        variable = self.model.new_bool_var("")
        self.model.add_hint(variable, hint)
        return variable

    def _int(self, seconds: float) -> int:
        steps = seconds * self.scale
        return round(steps) if self.exact else floor(steps)

    def _worst(self) -> float:
        """Return seconds that no choice exceeds: all on the slowest device, every value sent."""
        problem, one, m = self.problem, self.one, self.tables.m
        rows = range(len(problem.step))
        work = sum(max(one.forward[k][b] + one.backward[k][b] for k in rows) for b in range(self.n))
        step = sum(max(problem.step[k][b] for k in rows) for b in range(self.n))
        latency = max(d.latency for d in problem.devices)
        inverse = max(d.inverse_bandwidth for d in problem.devices)
        sent = 2 * self.count * sum(latency + size * inverse for size in one.value_bytes)
        tied = self.count * sum(latency + w.gradient * inverse for w in problem.weights)
        own = 2 * self.count * problem.action
        return (
            m * (work + sent + own) + step + problem.once + count_tied_reduction_messages(m) * tied
        )

    def _quantum(self) -> float:
        """Return the largest seconds of which all costs are whole multiples, 0 if that is too fine.

        Equal blocks have one; in such steps CP-SAT knows which objectives are possible at all.
        """
        one, problem = self.one, self.problem
        costs = [c for rows in (one.forward, one.backward, problem.step) for r in rows for c in r]
        costs += [problem.once, 2 * problem.action]
        for device in problem.devices:
            pairs = zip(one.value_bytes, problem.values, strict=True)
            sent = [size for size, value in pairs if value.sent]
            costs += [device.latency, *(s * device.inverse_bandwidth for s in sent)]
            costs += [w.gradient * device.inverse_bandwidth for w in problem.weights]
        least = min((c for c in costs if c > 0), default=0.0)
        if not least or self.top > least * _STEPS:
            return 0.0
        return least if all(abs(c / least - round(c / least)) < _EQUAL for c in costs) else 0.0

    def _place(self) -> None:
        """Put each block on one stage, none before its dependencies.

        Use stages from the first on.
        """
        model, stages, hint = self.model, range(self.count), self.hint
        self.x = [[self._new(hint[b] == p) for p in stages] for b in range(self.n)]
        upto = [[self._new(hint[b] <= p) for p in stages] for b in range(self.n)]
        self.upto = upto
        for b in range(self.n):
            model.add_exactly_one(self.x[b])
            model.add(upto[b][0] == self.x[b][0])
            model.add(upto[b][-1] == 1)
            for p in stages[1:]:
                model.add(upto[b][p] - upto[b][p - 1] == self.x[b][p])
            for a in members(self.tables.graph.before[b]):
                for p in stages:
                    model.add_implication(upto[b][p], upto[a][p])
        self.used = [self._new(bool(self.known[p])) for p in stages]
        for p in stages:
            model.add_bool_or([~self.used[p], *(self.x[b][p] for b in range(self.n))])
            for b in range(self.n):
                model.add_implication(self.x[b][p], self.used[p])
            if p:
                model.add_implication(self.used[p], self.used[p - 1])
            if p < self.problem.min_stages:
                model.add(self.used[p] == 1)

    def _flow(self) -> None:
        """Define dep[p, q]: a value flows from p to q."""
        later = self.tables.later(self.known)
        edges = [(a, b) for a in range(self.n) for b in members(self.tables.graph.after[a])]
        self.dep: dict[tuple[int, int], cp_model.IntVar] = {}
        for p in range(self.count):
            for q in range(p + 1, self.count):
                dep = self.dep[p, q] = self._new(q in later[p])
                for a, b in edges:
                    self.model.add_bool_or([~self.x[a][p], ~self.x[b][q], dep])

    def _any(self, blocks: Iterable[int], stage: int) -> Expression:
        """Return a literal: the stage has any of the blocks."""
        listed = list(blocks)
        if len(listed) == 1:
            return self.x[listed[0]][stage]
        held = self._new(any(self.hint[b] == stage for b in listed))
        for b in listed:
            self.model.add_implication(self.x[b][stage], held)
        return held

    def _received(self, index: int, stage: int) -> Expression:
        """Return a literal: the stage uses a value of another one."""
        value = self.problem.values[index]
        made = self.hint[value.producer] == stage
        got = self._new(not made and any(self.hint[b] == stage for b in value.consumers))
        for b in value.consumers:
            self.model.add_bool_or([~self.x[b][stage], self.x[value.producer][stage], got])
        return got

    def _sent(self, index: int, stage: int) -> Expression:
        """Return a literal: the stage makes an unsaved value that another one uses."""
        value = self.problem.values[index]
        if value.saved:
            return 0
        away = any(self.hint[b] != stage for b in value.consumers)
        sent = self._new(self.hint[value.producer] == stage and away)
        for b in value.consumers:
            self.model.add_bool_or([~self.x[value.producer][stage], self.x[b][stage], sent])
        return sent

    def _split(self, index: int, stage: int) -> Expression:
        """Return a literal: the stage has some but not all of the weight's blocks."""
        weight = self.problem.weights[index]
        if not weight.gradient or len(weight.blocks) == 1:
            return 0
        split = self._new(len({self.hint[b] == stage for b in weight.blocks}) == 2)
        around = zip(weight.blocks, (*weight.blocks[1:], weight.blocks[0]), strict=True)
        for a, b in around:
            self.model.add_bool_or([~self.x[a][stage], self.x[b][stage], split])
        return split

    def _measure(self) -> None:
        """Add seconds: loads, tails, their maxima, and the cutoff."""
        model, one, cutoff = self.model, self.one, self.cutoff
        longest = model.new_int_var(0, cutoff, "")
        path = model.new_int_var(0, cutoff, "")
        model.add_hint(longest, cutoff)
        tails = [model.new_int_var(0, cutoff, "") for _ in range(self.count)]
        self.got: list[list[Expression]] = []
        rough = self._rough_tails()
        for p, device in enumerate(self.problem.devices[: self.count]):
            got = [self._received(v, p) for v in range(len(self.problem.values))]
            self.got.append(got)
            rows = zip(one.forward[device.type], one.backward[device.type], strict=True)
            costs = [(f + b, self.x[i][p]) for i, (f, b) in enumerate(rows)]
            for value, size, held in zip(self.problem.values, one.value_bytes, got, strict=True):
                once = device.latency + size * device.inverse_bandwidth
                costs.append((value.trips * once, held))
            if self.problem.action:
                costs.append((2 * self.problem.action, self._any(range(self.n), p)))
            load = [self._int((self.tables.m - 1) * c) * held for c, held in costs]
            load += self._once(p)
            model.add(sum(load) <= longest)
            seconds = sum(self._int(c) * held for c, held in costs)
            model.add(tails[p] >= seconds)
            model.add(tails[p] <= path)
            for q in range(p + 1, self.count):
                model.add(tails[p] >= seconds + tails[q]).only_enforce_if(self.dep[p, q])
            for b in range(self.n):
                model.add(tails[p] >= self._int(rough[b])).only_enforce_if(self.x[b][p])
        model.add(path >= max(map(self._int, rough)))
        model.add(longest + path <= cutoff)
        model.minimize(longest + path)

    def _rough_tails(self) -> list[float]:
        """Return per block the seconds of the longest path of blocks from it, on the fastest
        devices."""
        kinds = {d.type for d in self.problem.devices[: self.count]}
        tail = [min(self.one.forward[k][b] + self.one.backward[k][b] for k in kinds)
                for b in range(self.n)]  # fmt: skip
        for b in reversed(range(self.n)):
            later = members(self.tables.graph.after[b])
            tail[b] += max((tail[c] for c in later), default=0.0)
        return [t * (1 - 1e-12) for t in tail]

    def _once(self, stage: int) -> list[Expression]:
        """Return the per-step seconds of a stage."""
        kind = self.problem.devices[stage].type
        latency, inverse = get_tied_reduction_link(self.problem, stage)
        steps = self.problem.step[kind]
        terms: list[Expression] = [self._int(steps[b]) * self.x[b][stage] for b in range(self.n)]
        # of an unused stage too, where it does not determine the maximum
        terms.append(self._int(self.problem.once))
        messages = count_tied_reduction_messages(self.tables.m)
        return terms + [
            self._int(messages * (latency + w.gradient * inverse)) * self._split(i, stage)
            for i, w in enumerate(self.problem.weights)
        ]

    def _fit(self) -> None:
        """Limit each stage's bytes, exactly, with the microbatches in flight at its depth."""
        one, problem = self.one, self.problem
        state = sum(w.weight + w.gradient + w.optimizer for w in problem.weights)
        pairs = zip(one.value_bytes, problem.values, strict=True)
        kept = [size * value.widened for size, value in pairs]
        each = sum(one.activation) + 2 * sum(kept)
        most = max(self.tables.flying(self.count), 1)
        least = min(d.memory for d in problem.devices[: self.count])
        temporary = max((w.temporary for w in problem.weights), default=0)
        if state + max(max(one.workspace) + most * each, temporary) <= least:
            return  # every choice fits
        deep = self._deep(most)
        for p, device in enumerate(problem.devices[: self.count]):
            state = self._state(p)
            for size, block in {(w.temporary, b) for w in problem.weights for b in w.blocks}:
                self.model.add(state + size * self.x[block][p] <= device.memory)
            need = state + self._work(p)
            one_more: list[Expression] = [one.activation[b] * self.x[b][p] for b in range(self.n)]
            for v, size in enumerate(kept):
                one_more += [size * self.got[p][v], size * self._sent(v, p)]
            if keeps_all(self.tables.schedule):
                self.model.add(need + self.tables.m * sum(one_more) <= device.memory)
                continue
            for depth, literal in enumerate(deep[p], start=1):
                full = need + self.tables.flying(depth) * sum(one_more) <= device.memory
                held = self.model.add(full)
                if depth > 1:
                    held.only_enforce_if(literal)

    def _state(self, stage: int) -> Expression:
        """Return bytes of weights, gradients and optimizer state on a stage."""
        terms: list[Expression] = [
            (w.weight + w.gradient + w.optimizer) * self._any(w.blocks, stage)
            for w in self.problem.weights
        ]
        return sum(terms)

    def _work(self, stage: int) -> Expression:
        """Return the largest workspace of a stage's blocks, in bytes."""
        one = self.one
        work = self.model.new_int_var(0, max(one.workspace), "")
        inside = (one.workspace[b] for b in range(self.n) if self.hint[b] == stage)
        self.model.add_hint(work, max(inside, default=0))
        for b in range(self.n):
            self.model.add(work >= one.workspace[b] * self.x[b][stage])
        return work

    def _deep(self, most: int) -> list[list[cp_model.IntVar]]:
        """Return per stage literals: its depth is at least 1, 2, ... (up to ``most``)."""
        deep: list[list[cp_model.IntVar]] = []
        later = self.tables.later(self.known)
        known = [1] * self.count
        for p in reversed(range(self.count)):
            known[p] = 1 + max((known[q] for q in later[p]), default=0)
        for p in range(self.count):
            levels = range(1, min(most, self.count - p) + 1)
            deep.append([self._new(d <= known[p]) for d in levels])
            self.model.add(deep[p][0] == 1)
            for lower, upper in zip(deep[p], deep[p][1:], strict=False):
                self.model.add_implication(upper, lower)
        for (p, q), dep in self.dep.items():
            for d, literal in enumerate(deep[q]):
                if d + 1 < len(deep[p]):
                    self.model.add_bool_or([~dep, ~literal, deep[p][d + 1]])
        return deep
