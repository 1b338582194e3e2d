"""Schedule search: the best of builders, list scheduling, local search and CP-SAT, with a bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from fxpart.errors import FxpartError, error
from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.order.bounds import JobWindows, lower_bound, windows
from fxpart.solver.order.descent import improve_orders
from fxpart.solver.order.jobs import Jobs, Orders
from fxpart.solver.order.list_scheduler import ListScheduler, list_in_flight_caps, rules
from fxpart.solver.order.problem import ScheduleProblem, ScheduleSearchResult
from fxpart.solver.work import work_seconds

_SAME = 1e-6  # relative gap below which there is nothing to gain
_TRIES = 1500  # orders that local searches evaluate
_STARTS = 3  # local searches, each from one of the best orders


@dataclass(frozen=True)
class _Candidate:
    """Orders with whole or split backwards, their seconds, and their source."""

    seconds: float
    orders: Orders
    solver: str


def search_schedule(
    problem: ScheduleProblem, *, time_limit: float = 2.0, effort: float = 1.0, seed: int = 0
) -> ScheduleSearchResult:
    """Return the best schedule found, with a bound; never worse than a builder's.

    Builders' schedules that fit and lists by several rules are improved by swaps on the critical
    path; CP-SAT then searches a better one, or proves that there is none. Backwards are whole, or
    all of them split if the problem has seconds of halves; both are tried if splitting costs time.
    time_limit: seconds on this machine. effort: limit on CP-SAT's deterministic seconds; unless
    time_limit interrupts it, equal arguments give equal schedules on every machine. Raises FXP109
    for inconsistent numbers, FXP901 for edges that are not a stage graph, and FXP204 if a rank has
    no memory for one microbatch of each of its stages.
    """
    problem.check()
    _check_memory(problem)
    deadline = work_seconds() + time_limit
    ways = _ways(problem)
    parts = [
        _BackwardSplitSearch(Jobs(problem, split=split), seed).search(
            deadline=work_seconds() + (deadline - work_seconds()) / (len(ways) - index),
            effort=effort / len(ways),
        )
        for index, split in enumerate(ways)
    ]
    best = min(parts, key=lambda part: part.best.seconds)
    named = min(parts, key=lambda part: part.builder_seconds)
    bound = min(best.best.seconds, *(part.bound for part in parts))
    proven = bound >= best.best.seconds * (1 - _SAME)
    return ScheduleSearchResult(
        schedule=best.jobs.schedule(best.best.orders),
        seconds=best.best.seconds,
        bound=bound,
        status="optimal" if proven else "feasible",
        solver=best.best.solver,
        seed=seed,
        builder=named.builder,
        builder_seconds=named.builder_seconds,
    )


def _ways(problem: ScheduleProblem) -> tuple[bool, ...]:
    """Return whether to split backwards. Splitting without cost is never worse."""
    if problem.halves is None:
        return (False,)
    pairs = zip(problem.halves, problem.backward, strict=True)
    free = all(first + second <= whole * (1 + 1e-9) for (first, second), whole in pairs)
    return (True,) if free else (False, True)


def _check_memory(problem: ScheduleProblem) -> None:
    for rank in range(problem.ranks):
        limit = problem.limit(rank)
        mine = [k for k, r in enumerate(problem.stage_rank) if r == rank]
        whole = sum(problem.get_activation(k) for k in mine)
        if limit is not None and whole > limit:
            raise error(
                "FXP204",
                where=f"rank {rank}, stages {', '.join(map(str, mine))}",
                why=f"One microbatch needs {whole} there; the limit is {limit}.",
                fix="Use smaller microbatches, recomputation, or fewer stages on the rank.",
            )


class _BackwardSplitSearch:
    """The search with backwards whole, or split."""

    def __init__(self, jobs: Jobs, seed: int) -> None:
        self.jobs, self.seed = jobs, seed
        self.windows: JobWindows = windows(jobs)
        self.bound = lower_bound(jobs, self.windows)
        self.builder, self.builder_seconds = "", inf
        self.best = _Candidate(inf, [], "")

    def search(self, *, deadline: float, effort: float) -> _BackwardSplitSearch:
        """Find the best candidate and the bound."""
        known = sorted(self._candidates(deadline), key=lambda c: c.seconds)
        self.best = known[0]
        for start in self._starts(known):
            if self._is_proven():
                break
            orders, seconds = improve_orders(
                self.jobs, start.orders, self.bound, tries=_TRIES // _STARTS,
                deadline=deadline, seed=self.seed,
            )  # fmt: skip
            self._take(_Candidate(seconds, orders, "list"))
        if not self._is_proven() and deadline > work_seconds():
            self._prove(deadline, effort)
        return self

    def _prove(self, deadline: float, effort: float) -> None:
        """Let CP-SAT search a better order, or a better bound."""
        from fxpart.solver.order.order_ilp import accepts, solve_cp_sat  # loads OR-Tools

        known = self.jobs.timed(self.best.orders)
        if known is not None and accepts(self.jobs) is None:
            answer = solve_cp_sat(
                self.jobs, self.windows, known, self.bound,
                deadline=deadline, effort=effort, seed=self.seed,
            )  # fmt: skip
            if answer.orders is not None and self.jobs.fits(answer.orders):
                timed = self.jobs.timed(answer.orders)
                if timed is not None:
                    self._take(_Candidate(timed.seconds, answer.orders, "cp-sat"))
            self.bound = max(self.bound, min(answer.bound, self.best.seconds))

    def _is_proven(self) -> bool:
        return self.bound >= self.best.seconds * (1 - _SAME)

    def _take(self, candidate: _Candidate) -> None:
        if candidate.seconds < self.best.seconds * (1 - 1e-12):
            self.best = candidate

    def _candidates(self, deadline: float) -> Iterator[_Candidate]:
        """Yield the builders' orders that fit, and lists by each rule and cap; at least one."""
        for name, orders in self._built():
            timed = self.jobs.timed(orders)
            if timed is not None and self.jobs.fits(orders):
                if timed.seconds < self.builder_seconds:
                    self.builder, self.builder_seconds = name, timed.seconds
                yield _Candidate(timed.seconds, orders, name)
        caps = (None, *list_in_flight_caps(self.jobs))
        several = [(cap, rule) for cap in caps for rule in rules(self.jobs, self.windows.tail)]
        for index, (cap, rule) in enumerate(several):
            if index and work_seconds() > deadline:
                return
            orders = ListScheduler(self.jobs, cap).run(rule)
            timed = self.jobs.timed(orders)
            assert timed is not None, "list scheduling yields a valid order"
            yield _Candidate(timed.seconds, orders, "list")

    def _built(self) -> Iterator[tuple[str, Orders]]:
        problem = self.jobs.problem
        for name, builder in SCHEDULES.items():
            if builder.build is None or not (builder.trains and builder.flushes):
                continue  # not an order of one training step
            if builder.splits_backward and problem.halves is None:
                continue
            try:
                built = builder(
                    problem.stage_rank, problem.microbatches, problem.edges,
                    forward=problem.forward, backward=problem.backward,
                )  # fmt: skip
            except FxpartError:
                continue  # does not support these ranks
            orders = self.jobs.orders(built)
            if sum(map(len, orders)) == len(self.jobs.action):
                yield name, orders

    def _starts(self, known: list[_Candidate]) -> list[_Candidate]:
        """Return the best distinct orders, as starts of local searches."""
        found: list[_Candidate] = []
        for candidate in known:
            if all(candidate.orders != other.orders for other in found):
                found.append(candidate)
            if len(found) == _STARTS:
                break
        return found
