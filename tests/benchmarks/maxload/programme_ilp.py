"""What both integer programmes for CP-SAT share: loads, memory, scaling, hint and solving.

Times become integers by scaling and rounding down, which only lowers loads: a bound that CP-SAT
proves, scaled back, is a bound on ours. Assignments are judged again by the objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from math import ceil, floor, inf
from typing import Any

from ortools.sat.python import cp_model

from .blocks import Blocks
from .record import MaxLoadRecord
from .watch import MaxLoadWatch

_STEPS = 10**8  # integer steps that the best known load is divided into
_FINE = 10**9  # the same where there is nothing to minimise, which is easier
_SLACK = 1e-4  # the cutoff is so much above it, or rounding would cut the best itself off
_BYTES = 10**7  # integer steps of memory, where bytes are not whole
_LARGEST = 2**53  # bytes in all that are counted one by one
_ASK = 0.1  # seconds between questions whether to stop

Expression = Any  # a linear expression of CP-SAT, or an int


class Programme:
    """Blocks on places 0..K-1; a subclass says by which variables, and what else must hold."""

    def __init__(
        self,
        blocks: Blocks,
        record: MaxLoadRecord,
        watch: MaxLoadWatch,
        target: float | None = None,
    ) -> None:
        """Nothing is placed yet; ``record`` gives the cutoff and the hint.

        target: only ask whether loads of at most this are possible, with nothing to minimise.
        """
        self.blocks, self.record, self.watch, self.target = blocks, record, watch, target
        self.model = cp_model.CpModel()
        top = record.objective if target is None else target
        if top == inf:
            top = float(blocks.work.sum() + blocks.cpu.sum() + blocks.costs.sum())
        self.top = max(top, 1e-300)
        steps = _STEPS if target is None else _FINE
        self.scale = steps / self.top
        known = record.assignment
        self.hint = None if known is None else blocks.devices(known)
        self.longest: Expression = steps
        if target is None:
            least = floor(min(record.bound, self.top) * self.scale)
            self.longest = self.model.new_int_var(least, floor(steps * (1 + _SLACK)) + 1, "")

    def new(self, hint: bool) -> cp_model.IntVar:
        """A 0-1 variable with its value in the best assignment known, where there is one."""
        variable = self.model.new_bool_var("")
        if self.hint is not None:
            self.model.add_hint(variable, hint)
        return variable

    def loads(self, held: Sequence[Expression], hint: Sequence[bool], cpu: Expression) -> None:
        """Limit the load of a place: held is 1 for its blocks, cpu is 1 if it is a CPU core."""
        blocks, add = self.blocks, self.model.add
        fixed = isinstance(cpu, int)
        if not fixed or not cpu:
            cuts = [self._cut(held, hint, pins) for pins in blocks.nets]
            work = [floor(w * self.scale) for w in blocks.work]
            cost = [floor(c * self.scale) for c in blocks.costs]
            load = sum(w * x for w, x, r in zip(work, held, blocks.runs, strict=True) if w and r)
            load = load + sum(c * x for c, x in zip(cost, cuts, strict=True) if c)
            add(load <= self.longest + (sum(work) + sum(cost)) * cpu)
            for x, runs in zip(held, blocks.runs, strict=True):
                if not runs:
                    add(x <= cpu)
            if not blocks.roomy:
                size, room = self._bytes()
                load = sum(s * x for s, x in zip(size, held, strict=True) if s)
                add(load <= room + sum(size) * cpu)
        if not fixed or cpu:
            time = [floor(w * self.scale) for w in blocks.cpu]
            load = sum(w * x for w, x in zip(time, held, strict=True) if w)
            add(load <= self.longest + sum(time) * (1 - cpu))

    def _bytes(self) -> tuple[list[int], int]:
        """Sizes and memory as integers: as they are where they are whole, else rounded."""
        size, room = self.blocks.size.tolist(), self.blocks.memory
        unit = 1.0
        if sum(size) > _LARGEST or any(s != floor(s) for s in size):
            unit = _BYTES / max(room, 1e-300)
        return [floor(s * unit) for s in size], floor(room) if unit == 1.0 else ceil(room * unit)

    def _cut(
        self, held: Sequence[Expression], hint: Sequence[bool], pins: Sequence[int]
    ) -> cp_model.IntVar:
        """At least 1 if the place holds some but not all of the pins."""
        self.watch.left()
        first, *others = pins
        cut = self.new(len({hint[b] for b in pins}) == 2)
        for b in others:
            self.model.add(cut >= held[first] - held[b])
            self.model.add(cut >= held[b] - held[first])
        return cut

    def solve(self, seed: int, found: Any, effort: float = inf) -> float | None:
        """Run CP-SAT; ``found(solver callback)`` gives the device of each block.

        Improves the record and returns a lower bound, infinite if nothing is valid. With a target:
        the target if nothing valid is within it, else None. effort: CP-SAT's deterministic time.
        """
        if self.target is None:
            self.model.minimize(self.longest)
            if self.hint is not None:
                self.model.add_hint(self.longest, _STEPS)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.relative_gap_limit = 1e-7
        solver.parameters.max_time_in_seconds = self.watch.left()
        solver.parameters.max_deterministic_time = effort
        # OR-Tools 9.15's presolve calls some models infeasible that are not
        # (google/or-tools#5274); without it the proofs are right
        solver.parameters.cp_model_presolve = False
        # a watch that is asked between calls, not the signal handler of the C++ side
        solver.parameters.catch_sigint_signal = False
        if self.record.progress is not None and self.target is None:
            solver.best_bound_callback = lambda bound: self.record.prove(bound / self.scale)
        status = self._run(solver, _SolutionCallback(self, found))
        assert status != cp_model.MODEL_INVALID, self.model.validate()
        if self.target is not None:
            return self.target if status == cp_model.INFEASIBLE else None
        if status == cp_model.INFEASIBLE:
            return inf if self.record.assignment is None else self.top
        return max(0.0, float(solver.best_objective_bound)) / self.scale

    def _run(self, solver: cp_model.CpSolver, told: cp_model.CpSolverSolutionCallback) -> Any:
        """Solve in a thread of its own, so that Python hears of signals meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            status = pool.submit(solver.solve, self.model, told)
            while not wait((status,), timeout=_ASK).done:
                if self.watch.stopped():
                    solver.stop_search()
            return status.result()


class _SolutionCallback(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
    """Adds each solution to the record."""

    def __init__(self, programme: Programme, found: Any) -> None:
        super().__init__()
        self._programme, self._found = programme, found

    def on_solution_callback(self) -> None:
        programme = self._programme
        programme.record.add(programme.blocks.assignment(self._found(self)))
