"""The partition problem as an integer program for CP-SAT: a second solver that shares no tables.

Variables are cumulative (solver_notes, B.3): y[b, p] = 1 if block b is on stage p or an earlier
one. They are monotone in both indices, so propagation is strong and there is no symmetry. Seconds
become integers by scaling and rounding down, which only lowers the objective: CP-SAT's own bound,
scaled back, is a bound on ours. Choices are evaluated again by
:func:`fxpart.solver.objective.evaluate`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import floor, inf
from typing import Any

import msgspec
from ortools.sat.python import cp_model

from fxpart.solver.bounds import cheap_bound
from fxpart.solver.dp import EXACT
from fxpart.solver.objective import (
    count_tied_reduction_messages,
    get_tied_reduction_link,
)
from fxpart.solver.problem import BlockValue, PartitionChoice, PartitionProblem, Weight
from fxpart.solver.schedule_costs import (
    count_stage_in_flight,
    get_fill_fraction,
    split_stage_counts,
    splits_backward,
)
from fxpart.solver.search import PartitionRecord
from fxpart.solver.suffix_dp import SolverTimeout
from fxpart.solver.work import work_seconds

_STEPS = 10**8  # integer steps that the best known step time is divided into
# relative margin of the cutoff above the step time, so that rounding does not exclude it
_SLACK = 1e-4

Expression = Any  # a linear expression of CP-SAT, or an int


def solve_cp_sat(
    problem: PartitionProblem, record: PartitionRecord, deadline: float, seed: int
) -> float:
    """Add choices to ``record`` and return a proven lower bound in seconds, infinite if none fits.

    One integer program for each variant, schedule, and range of stages with one filling, the most
    promising first; the best known choice is the hint and the cutoff. deadline: a
    ``work_seconds()`` value. One worker and a fixed seed make equal runs equal unless the
    deadline interrupts them.
    """
    parts = sorted(
        (cheap_bound(problem, v, schedule=name), v, s, counts)
        for v, one in enumerate(problem.variants)
        for s, name in enumerate(problem.schedules)
        for counts in split_stage_counts(
            name, one.microbatches, problem.min_stages, problem.max_stages
        )
    )
    bound = inf
    for cheap, variant, s, (low, high) in parts:
        if cheap >= record.seconds * (1 - EXACT):
            bound = min(bound, cheap)
            continue
        try:
            part = msgspec.structs.replace(problem, min_stages=low, max_stages=high)
            program = _PartitionModel(part, variant, problem.schedules[s], record, deadline)
            bound = min(bound, max(cheap, program.solve(seed)))
        except SolverTimeout:
            bound = min(bound, cheap)
    return bound


class _PartitionModel:
    """One variant under one schedule; the number of stages is a decision."""

    def __init__(
        self,
        problem: PartitionProblem,
        variant: int,
        schedule: str,
        record: PartitionRecord,
        deadline: float,
    ) -> None:
        self.problem, self.schedule = problem, schedule
        self.record, self.deadline = record, deadline
        self.index, self.variant = variant, problem.variants[variant]
        self.stages, self.blocks = problem.max_stages, range(len(problem.blocks))
        self.model = cp_model.CpModel()
        self.hint = self._hinted()
        top = record.seconds if record.seconds < inf else self._worst()
        self.scale = _STEPS / top if top > 0 else 1.0
        self.upto: list[list[cp_model.IntVar]] = []
        self._place()
        self._measure(floor(_STEPS * (1 + _SLACK)) + 1)
        self._fit()

    def solve(self, seed: int) -> float:
        """Run CP-SAT, record its solutions, and return the lower bound in seconds."""
        solver = cp_model.CpSolver()
        # OR-Tools 9.15's presolve reports some feasible models as infeasible
        # (google/or-tools#5274); without it the proofs are slower but correct.
        solver.parameters.cp_model_presolve = False
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_time_in_seconds = self._left()
        status = solver.solve(self.model)
        assert status != cp_model.MODEL_INVALID, self.model.validate()
        if status == cp_model.INFEASIBLE:  # nothing below the cutoff
            top = self.record.seconds
            return inf if top == inf else top * (1 + _SLACK)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            stage_of = [
                sum(not solver.boolean_value(y) for y in row) for row in self.upto
            ]  # y counts the stages from its own on
            starts = tuple(b for b in self.blocks if b == 0 or stage_of[b] != stage_of[b - 1])
            self.record.add(
                PartitionChoice(variant=self.index, schedule=self.schedule, starts=starts)
            )
        return max(0.0, float(solver.best_objective_bound)) / self.scale

    def _int(self, seconds: float) -> int:
        return floor(seconds * self.scale)

    def _left(self) -> float:
        """Return the seconds until the deadline; raise :class:`SolverTimeout` after it."""
        left = self.deadline - work_seconds()
        if left <= 0:
            raise SolverTimeout
        return left

    def _hinted(self) -> list[int]:
        """Return the stage of each block in the best known choice, or an even split."""
        choice, n = self.record.choice, len(self.blocks)
        if choice is None:
            return [b * self.stages // n for b in self.blocks]
        return [min(bisect_right(choice.starts, b), self.stages) - 1 for b in self.blocks]

    def _worst(self) -> float:
        """Return seconds that no choice exceeds: all on the slowest device, every value sent."""
        problem, one = self.problem, self.variant
        rows = range(len(problem.step))
        work = sum(max(one.forward[k][b] + one.backward[k][b] for k in rows) for b in self.blocks)
        step = sum(max(problem.step[k][b] for k in rows) for b in self.blocks)
        latency = max(d.latency for d in problem.devices)
        inverse = max(d.inverse_bandwidth for d in problem.devices)
        sent = 2 * self.stages * sum(latency + size * inverse for size in one.value_bytes)
        tied = self.stages * sum(latency + w.gradient * inverse for w in problem.weights)
        m = one.microbatches
        own = 2 * self.stages * problem.action
        return m * (work + sent + own) + step + count_tied_reduction_messages(m) * tied

    def _new(self, hint: bool) -> cp_model.IntVar:
        variable = self.model.new_bool_var("")
        self.model.add_hint(variable, hint)
        return variable

    def _y(self, block: int, stage: int) -> Expression:
        """Return a literal: the block is on the stage or an earlier one."""
        if stage < 0:
            return 0
        return 1 if stage >= self.stages - 1 else self.upto[block][stage]

    def _x(self, block: int, stage: int) -> Expression:
        """Return a literal: the block is on the stage."""
        return self._y(block, stage) - self._y(block, stage - 1)

    def _place(self) -> None:
        """Make stages contiguous, with none empty before the last; uncut blocks share their
        variables."""
        add, problem, last = self.model.add, self.problem, len(self.blocks) - 1
        fused = set(problem.no_cut_after)
        for b in self.blocks:
            self._left()
            if b and b - 1 in fused:
                self.upto.append(self.upto[-1])
                continue
            self.upto.append([self._new(self.hint[b] <= p) for p in range(self.stages - 1)])
            for p in range(self.stages - 1):
                if p:
                    self.model.add_implication(self.upto[b][p - 1], self.upto[b][p])
                if b:
                    self.model.add_implication(self.upto[b][p], self.upto[b - 1][p])
                else:
                    add(self.upto[b][p] == 1)
        for p in range(1, self.stages):
            self._left()
            # a block after the last of p - 1 is on p
            add(sum(self._x(b, p) for b in self.blocks) + self._y(last, p - 1) >= 1)
        if problem.min_stages > 1:
            add(self._y(last, problem.min_stages - 2) == 0)

    def _together(self, blocks: Sequence[int]) -> bool:
        """Return whether no cut divides the blocks."""
        return all(self.upto[b] is self.upto[blocks[0]] for b in blocks)

    def _any(self, blocks: Sequence[int], stage: int) -> Expression:
        """Return a literal that is at least 1 if the stage has any of the blocks; costs push it
        down."""
        held = self._new(any(self.hint[b] == stage for b in blocks))
        for b in blocks:
            self.model.add(held >= self._x(b, stage))
        return held

    def _sent(self, value: BlockValue, stage: int) -> Expression:
        """Return a literal: the stage makes an unsaved value that a later stage uses."""
        first, last = value.producer, value.consumers[-1]
        if value.saved or stage == self.stages - 1 or self.upto[first] is self.upto[last]:
            return 0
        sent = self._new(self.hint[first] == stage < self.hint[last])
        self.model.add(sent >= self._x(first, stage) - self._y(last, stage))
        return sent

    def _received(self, value: BlockValue, stage: int) -> Expression:
        """Return a literal: the stage uses a value of an earlier stage."""
        if stage == 0:
            return 0
        late = self.hint[value.producer] < stage
        got = self._new(late and any(self.hint[b] == stage for b in value.consumers))
        for b in value.consumers:
            self.model.add(got >= self._y(value.producer, stage - 1) + self._x(b, stage) - 1)
        return got

    def _split(self, weight: Weight, stage: int) -> Expression:
        """Return a literal: the stage has some but not all of the weight's blocks."""
        first, last = weight.blocks[0], weight.blocks[-1]
        if not weight.gradient or self._together(weight.blocks):
            return 0
        held = {self.hint[b] == stage for b in weight.blocks}
        split = self._new(held == {True, False})
        for b in weight.blocks:
            self.model.add(split >= self._x(b, stage) - self._x(first, stage))
            self.model.add(split >= self._x(b, stage) - self._x(last, stage))
        return split

    def _measure(self, cutoff: int) -> None:
        """Add the objective in seconds and its cutoff, in integer steps."""
        problem, one = self.problem, self.variant
        longest = self.model.new_int_var(0, cutoff, "")
        fill = get_fill_fraction(self.schedule, one.microbatches, problem.min_stages)
        split = splits_backward(self.schedule)
        total: list[Expression] = [longest]
        self.received: list[list[Expression]] = []
        for p, device in enumerate(problem.devices[: self.stages]):
            self._left()
            got = [self._received(v, p) for v in problem.values]
            self.received.append(got)
            costs = [
                (one.forward[device.type][b] + one.backward[device.type][b], self._x(b, p))
                for b in self.blocks
            ]
            for value, size, held in zip(problem.values, one.value_bytes, got, strict=True):
                once = device.latency + size * device.inverse_bandwidth
                costs.append((value.trips * once, held))
            used = 1 - self._y(len(self.blocks) - 1, p - 1)
            if split and one.split is not None:
                costs += [(one.split.seconds[device.type][b], self._x(b, p)) for b in self.blocks]
            costs.append(((3 if split else 2) * problem.action, used))
            latency, inverse = get_tied_reduction_link(problem, p)
            fixed = [(problem.step[device.type][b], self._x(b, p)) for b in self.blocks]
            messages = count_tied_reduction_messages(one.microbatches)
            fixed += [
                (messages * (latency + w.gradient * inverse), self._split(w, p))
                for w in problem.weights
            ]
            total += [self._int(fill * c) * held for c, held in costs]
            load = [self._int((one.microbatches - fill) * c) * held for c, held in costs]
            load += [self._int(c) * held for c, held in fixed]
            self.model.add(sum(load) <= longest)
        self.model.add(sum(total) <= cutoff)
        self.model.minimize(sum(total))

    def _fit(self) -> None:
        """Limit each stage's bytes, exactly: with its number of microbatches in flight.

        Also during the update of any of its weights, without microbatches in flight.
        """
        problem, one, last = self.problem, self.variant, len(self.blocks) - 1
        own, shared = [0] * len(self.blocks), list[tuple[int, Weight]]()
        for weight in problem.weights:
            size = weight.weight + weight.gradient + weight.optimizer
            if self._together(weight.blocks):
                own[weight.blocks[0]] += size
            else:
                shared.append((size, weight))
        for p, device in enumerate(problem.devices[: self.stages]):
            standing: list[Expression] = [own[b] * self._x(b, p) for b in self.blocks]
            standing += [size * self._any(w.blocks, p) for size, w in shared]
            for size, block in {(w.temporary, b) for w in problem.weights for b in w.blocks}:
                if size:
                    self.model.add(sum(standing) + size * self._x(block, p) <= device.memory)
            work = self.model.new_int_var(0, max(one.workspace), "")
            self.model.add_hint(
                work, max((one.workspace[b] for b in self.blocks if self.hint[b] == p), default=0)
            )
            for b in self.blocks:
                self.model.add(work >= one.workspace[b] * self._x(b, p))
            split = one.split if splits_backward(self.schedule) else None
            least = [0] * len(self.blocks) if split is None else split.kept
            each = [max(one.activation[b], least[b]) * self._x(b, p) for b in self.blocks]
            pairs = zip(one.value_bytes, problem.values, strict=True)
            kept = [size * value.widened for size, value in pairs]
            each += [s * h for s, h in zip(kept, self.received[p], strict=True)]
            each += [
                size * self._sent(value, p)
                for size, value in zip(kept, problem.values, strict=True)
            ]
            done = 0
            for stages in range(p + 1, self.stages + 1):
                flying = count_stage_in_flight(self.schedule, one.microbatches, stages, p)
                if flying == done:
                    continue
                self._left()
                done = flying
                full = sum(standing) + work + flying * sum(each) <= device.memory
                fits = self.model.add(full)
                if stages > p + 1:  # the number in flight grows with the number of stages
                    fits.only_enforce_if(~self.upto[last][stages - 2])
