"""Solve the placement problem where inputs follow the ops that shard their dims.

An op may shard a dim whose size is only known at run time. The runtime ensures that such a size is
divisible if the input that it is read from is sharded along it (:meth:`.PlacementMapping.
shard_inputs`). The problem itself does not have this condition, which would connect inputs with all
ops. It is branched on instead: along an axis the dims of a symbol are sharded nowhere, or the
inputs are sharded too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

import msgspec

from fxpart.pricing.placement_mapping import PlacementMapping, Rows
from fxpart.solver.placement.portfolio import CLOSE, PlacementSolution, evaluate, solve_placement
from fxpart.solver.placement.problem import keep_strategies
from fxpart.solver.solution import PROVEN, status_of
from fxpart.solver.work import work_seconds

_PARTS = 16  # restricted problems that are solved at most


@dataclass
class _RowSearch:
    """The search over decisions. best: what satisfies the condition and fits the budget."""

    built: PlacementMapping
    deadline: float
    solver: str
    best: PlacementSolution | None = None
    queue: list[tuple[float, int, Mapping[Rows, bool], PlacementSolution]] = field(
        default_factory=list
    )
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def seconds(self) -> float:
        """Return the seconds of the best choice; infinity if there is none."""
        return inf if self.best is None else self.best.seconds

    def add(self, decided: Mapping[Rows, bool]) -> PlacementSolution | None:
        """Solve the problem with these decisions; None if they leave an op without a strategy."""
        left = self.built.forbid(decided)
        if left is None:
            return None
        answer = solve_placement(
            keep_strategies(self.built.problem, left),
            time_limit=max(0.0, self.deadline - work_seconds()), solver=self.solver,
        )  # fmt: skip
        if answer.choice is not None:
            rows = enumerate(answer.choice)
            whole = tuple(left[v][at] if v in left else at for v, at in rows)
            answer = msgspec.structs.replace(answer, choice=whole)
            heapq.heappush(self.queue, (answer.bound, next(self.numbers), decided, answer))
        return answer

    def run(self) -> float:
        """Branch until nothing better is possible; return the bound of what is left."""
        closed, parts = inf, 0
        while self.queue:
            bound, _, decided, answer = heapq.heappop(self.queue)
            if bound >= self.seconds * (1 - PROVEN):
                return min(closed, bound)
            assert answer.choice is not None, "only such answers are queued"
            rows = self._record(answer, decided)
            if rows is None or parts >= _PARTS:
                closed = min(closed, bound)
                continue
            for wanted in (True, False):
                parts += 1
                self.add({**decided, rows: wanted})
        return closed

    def _record(self, answer: PlacementSolution, decided: Mapping[Rows, bool]) -> Rows | None:
        """Record the choice with sharded inputs; return the open decision that changed it."""
        choice: Sequence[int] | None = answer.choice
        assert choice is not None, "only such answers are queued"
        fixed = self.built.shard_inputs(choice)
        evaluation = evaluate(self.built.problem, fixed)
        if evaluation.feasible and evaluation.seconds < self.seconds:
            self.best = msgspec.structs.replace(
                answer, choice=fixed, seconds=evaluation.seconds, bytes=evaluation.bytes
            )
        if fixed == tuple(choice):
            return None
        return next(
            (rows for rows in self.built.list_sharded_rows(choice) if rows not in decided), None
        )


def solve_rows(
    built: PlacementMapping, *, time_limit: float = 30.0, solver: str = "auto"
) -> PlacementSolution:
    """Return the best choice in which inputs follow the ops that shard their dims.

    Parameters, status and bound are those of :func:`.portfolio.solve_placement`.
    """
    search = _RowSearch(built, work_seconds() + time_limit, solver)
    relaxed = search.add({})
    assert relaxed is not None, "every node has a strategy"
    bound = search.run()
    if search.best is None:
        known = msgspec.structs.replace(relaxed, choice=None, seconds=inf, bytes=inf)
        return msgspec.structs.replace(
            known, status="infeasible" if bound == inf else "unknown", bound=bound
        )
    proven = min(bound, search.best.seconds)
    return msgspec.structs.replace(
        search.best, bound=proven, status=status_of(search.best.seconds, proven, CLOSE)
    )
