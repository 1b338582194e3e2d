"""The order of computations as a constraint program for CP-SAT.

A computation is an interval of fixed length on its rank, and intervals of a rank do not overlap. A
transfer is a delay, or an interval on its link. Microbatches are interchangeable, so each stage
runs them in order: that breaks the symmetry, and the verifier requires it. A rank's memory is an
interval from each forward to the end of its backward, with a bounded sum; if the rank has one
stage, precedences of microbatches express it exactly. Seconds become integers, exactly if they are
multiples of a common unit, otherwise rounded down, which only shortens a step: CP-SAT's bound,
scaled back, is a bound on ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ortools.sat.python import cp_model

from fxpart.solver.order.bounds import JobWindows
from fxpart.solver.order.jobs import Jobs, JobTimes, Orders, has_single_stage, list_predecessors
from fxpart.solver.work import work_seconds

MOST_JOBS = 600  # computations in one program
_STEPS = 10**9  # integer steps that the best known step is divided into, without a common unit
_MOST_STEPS = 10**9  # maximum number of steps with a common unit


def accepts(jobs: Jobs) -> str | None:
    """Return why CP-SAT does not support this problem, or None if it does."""
    count = len(jobs.action)
    if count > MOST_JOBS:
        return f"There are {count} computations; the CP-SAT model supports {MOST_JOBS}."
    return None


@dataclass(frozen=True)
class OrderModelResult:
    """Result: better orders if any, and the bound in seconds."""

    orders: Orders | None
    bound: float


def solve_cp_sat(
    jobs: Jobs,
    found: JobWindows,
    best: JobTimes,
    bound: float,
    *,
    deadline: float,
    effort: float,
    seed: int,
) -> OrderModelResult:
    """Return orders that end before the best known, if there are any, and the proven bound.

    found: heads and tails. best: known orders, also the hint. bound: known already. deadline: a
    ``work_seconds()`` value. effort: limit on CP-SAT's deterministic seconds. One worker and a
    fixed seed: equal runs are equal unless the deadline interrupts them.
    """
    left = deadline - work_seconds()
    if left <= 0:
        return OrderModelResult(None, bound)
    program = _OrderModel(jobs, found, best.seconds, bound)
    program.hint(best)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    # A linear relaxation gives no bound for disjunctive resources, and costs the most time.
    solver.parameters.linearization_level = 0
    solver.parameters.max_time_in_seconds = left
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(program.model)
    if status == cp_model.INFEASIBLE:
        return OrderModelResult(None, best.seconds)  # no order ends before it
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return OrderModelResult(None, max(bound, solver.best_objective_bound / program.scale))
    reached = max(bound, solver.best_objective_bound / program.scale)
    return OrderModelResult(program.orders(solver), min(reached, best.seconds))


class _OrderModel:
    """The variables and constraints."""

    def __init__(self, jobs: Jobs, found: JobWindows, best: float, bound: float) -> None:
        self.jobs, self.found = jobs, found
        self.model = cp_model.CpModel()
        self.scale = _scale(jobs, best)
        # Strictly better, in ticks: an order of so many ticks takes at least as many seconds.
        self.horizon = max(0, math.ceil(best * self.scale - 1e-6) - 1)
        self.ticks = [self._ticks(s) for s in jobs.seconds]
        self.exact = self._is_exact()
        self.end = self.model.new_int_var(
            min(self.horizon, self._ticks(bound)), self.horizon, "step"
        )
        self.start: list[cp_model.IntVar] = []
        self.intervals: list[cp_model.IntervalVar] = []
        self._place()
        self._order()
        if jobs.problem.links:
            self._link()
        self._hold()
        self.model.minimize(self.end)

    def _ticks(self, seconds: float) -> int:
        return math.floor(seconds * self.scale + 1e-6)

    def _place(self) -> None:
        """Add an interval for each job within its head and tail; none overlap on a rank."""
        for job, ticks in enumerate(self.ticks):
            head, tail = (self._ticks(x[job]) for x in (self.found.head, self.found.tail))
            # Rounded down job by job, a path may be some ticks shorter than its sum.
            room = len(self.ticks)
            low, high = max(0, head - room), self.horizon - ticks - max(0, tail - room)
            if self.exact:
                low, high = head, self.horizon - ticks - tail
            start = self.model.new_int_var(min(low, high), max(low, high), f"s{job}")
            if low > high:
                self.model.add_bool_or([])  # the horizon is too short: there is no better order
            self.start.append(start)
            self.intervals.append(self.model.new_fixed_size_interval_var(start, ticks, f"i{job}"))
            self.model.add(self.end >= start + ticks + (tail if self.exact else 0))
        for rank in range(self.jobs.problem.ranks):
            self.model.add_no_overlap(
                [i for j, i in enumerate(self.intervals) if self.jobs.rank[j] == rank]
            )

    def _is_exact(self) -> bool:
        return all(
            abs(t - s * self.scale) < 1e-6
            for t, s in zip(self.ticks, self.jobs.seconds, strict=True)
        )

    def _order(self) -> None:
        """Add the precedences, with free links."""
        for job, each in enumerate(list_predecessors(self.jobs)):
            for cause, seconds in each:
                gap = self.ticks[cause] + self._ticks(seconds)
                self.model.add(self.start[job] >= self.start[cause] + gap)

    def _link(self) -> None:
        """Allow one transfer at a time on each link."""
        links: dict[tuple[int, int], list[cp_model.IntervalVar]] = {}
        for job, sends in enumerate(self.jobs.sends):
            for target, seconds, link in sends:
                ticks = self._ticks(seconds)
                if link is None or not ticks:
                    continue
                begin = self.model.new_int_var(0, self.horizon, f"t{job}.{target}")
                self.model.add(begin >= self.start[job] + self.ticks[job])
                self.model.add(self.start[target] >= begin + ticks)
                name = f"l{job}.{target}"
                interval = self.model.new_fixed_size_interval_var(begin, ticks, name)
                links.setdefault(link, []).append(interval)
        for intervals in links.values():
            self.model.add_no_overlap(intervals)

    def _hold(self) -> None:
        """Limit the memory of ranks with several stages; `list_predecessors` covers one stage."""
        problem = self.jobs.problem
        for rank in range(problem.ranks):
            limit = problem.limit(rank)
            if limit is None or has_single_stage(problem, rank):
                continue
            spans, demands = [], []
            for first, last in self.jobs.ends_hold.items():
                if self.jobs.rank[first] != rank:
                    continue
                size = self.model.new_int_var(0, self.horizon, f"z{first}")
                over = self.start[last] + self.ticks[last]
                begin = self.start[first]
                spans.append(self.model.new_interval_var(begin, size, over, f"h{first}"))
                demands.append(problem.get_activation(self.jobs.action[first].stage))
            self.model.add_cumulative(spans, demands, limit)

    def hint(self, best: JobTimes) -> None:
        """Hint at the known orders; they end just too late to be a solution themselves."""
        for start, seconds in zip(self.start, best.start, strict=True):
            self.model.add_hint(start, self._ticks(seconds))

    def orders(self, solver: cp_model.CpSolver) -> Orders:
        """Return by rank the jobs by start; jobs without duration precede others of equal start."""
        found: Orders = [[] for _ in range(self.jobs.problem.ranks)]
        for job in range(len(self.start)):
            found[self.jobs.rank[job]].append(job)
        for mine in found:
            mine.sort(key=lambda j: (solver.value(self.start[j]), self.ticks[j], j))
        return found


def _scale(jobs: Jobs, best: float) -> float:
    """Return ticks per second: exact if all seconds are multiples of a unit that is not tiny."""
    times = {
        *jobs.seconds,
        *(s for sends in jobs.sends for _, s, link in sends if link is not None),
    }
    unit = _unit(sorted(times))
    if unit is not None and best * unit <= _MOST_STEPS:
        return float(unit)
    return _STEPS / best if best > 0 else 1.0


def _unit(times: Sequence[float]) -> int | None:
    """Return how many of their common unit are in a second, None if there is none."""
    found = 1
    for seconds in times:
        fraction = Fraction(seconds).limit_denominator(10_000)
        if abs(float(fraction) - seconds) > 1e-12 * max(1.0, seconds):
            return None
        found = math.lcm(found, fraction.denominator)
        if found > _MOST_STEPS:
            return None
    return found
