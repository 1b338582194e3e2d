"""Exact cuts for asynchronous 1F1B: minimize the longest stage by dynamic programming.

The cost of a stage depends only on its blocks, its device and the number of stages. With least(k,
b) the minimum of the longest stage of stages k, ... with blocks b, ...

    least(k, b) = min over ends e of max(cost(k, b, e), least(k + 1, e + 1))

for each number of stages and microbatch size (Bokhari 1988, "Partitioning problems in parallel,
pipelined, and distributed computing", for one threshold of all). Sums are NumPy bands of
:mod:`fxpart.solver.tables`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum, inf

import numpy as np

from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.schedule.versions import count_chain_warmup
from fxpart.solver.asynchronous.objective import AsyncPipelineScorer
from fxpart.solver.asynchronous.problem import AsyncPipelineProblem
from fxpart.solver.asynchronous.weight_mode_requirements import (
    compute_weight_mode_requirements,
    explain_unsupported_weight_mode,
)
from fxpart.solver.problem import PartitionChoice, Solution
from fxpart.solver.solution import ALTERNATIVES, certify
from fxpart.solver.tables import (
    Floats,
    Ints,
    PartitionTables,
    list_touching_rectangles,
)
from fxpart.solver.validate import check_problem
from fxpart.solver.work import work_seconds


def solve_async_pipeline(given: AsyncPipelineProblem, *, time_limit: float = 30.0) -> Solution:
    """Return the choice with the shortest time per minibatch, times its factor, and the bound.

    Choices carry the schedule name "1f1b", the order of each stage. time_limit: seconds; numbers of
    stages that were not searched by then are bounded by their work. Status "infeasible" if nothing
    fits. Raises FXP206 for an invalid problem.
    """
    check_problem(given.problem)
    return _AsyncPipelineSearch(given, work_seconds() + time_limit).solve()


@dataclass(order=True)
class _AsyncSubproblem:
    """Choices of one microbatch size and number of stages; ``bound`` is a lower bound."""

    bound: float
    variant: int
    stages: int


class _AsyncPipelineSearch:
    """Tables of one problem."""

    def __init__(self, given: AsyncPipelineProblem, deadline: float) -> None:
        self.given, self.deadline = given, deadline
        problem = given.problem
        self.tables, self.scorer = PartitionTables(problem), AsyncPipelineScorer(given)
        n = len(problem.blocks)
        self._copied = self.tables.sums(
            (rectangle, w.weight)
            for w in problem.weights
            if w.gradient
            for rectangle in list_touching_rectangles(w.blocks, -1, n)
        )
        self._passes = [self.tables.additive(np.array(row)) for row in given.passes]
        span = np.arange(self.tables.units)
        self._after = np.minimum(span[:, None] + span[None, :] + 1, self.tables.units)

    def solve(self) -> Solution:
        """Return the solution."""
        found: list[tuple[float, PartitionChoice]] = []
        left = inf
        for kind in sorted(self._kinds()):
            if found and work_seconds() > self.deadline:
                left = min(left, kind.bound)
                continue
            starts = self._best(kind)
            if starts is None:
                continue
            choice = self.tables.choice(kind.variant, DEFAULT_SCHEDULE, starts)
            evaluation = self.scorer.evaluate(choice)
            assert evaluation.feasible, evaluation.faults
            factor = self.given.get_factor(kind.variant, kind.stages)
            found.append((evaluation.seconds * factor, choice))
        found.sort(key=lambda pair: (pair[0], len(pair[1].starts), pair[1].variant))
        best = found[0][0] if found else inf
        return certify([choice for _, choice in found[: 1 + ALTERNATIVES]], best, left, "dp")

    def _kinds(self) -> Iterator[_AsyncSubproblem]:
        """Return the subproblems that the weight mode permits, with bounds by their work."""
        problem = self.given.problem
        for variant, costs in enumerate(problem.variants):
            m = costs.microbatches
            rows = zip(costs.forward, costs.backward, problem.step, strict=True)
            each = [[m * (f + b) + s for f, b, s in zip(*row, strict=True)] for row in rows]
            work = fsum(min(block) for block in zip(*each, strict=True))
            own = 2 * m * problem.action + problem.once
            for stages in range(problem.min_stages, min(problem.max_stages, self.tables.units) + 1):
                factor = self.given.get_factor(variant, stages)
                if factor < inf and not explain_unsupported_weight_mode(
                    self.given.weights, count_chain_warmup(stages), m
                ):
                    least = (work / stages + own) * (1 - 1e-12)
                    yield _AsyncSubproblem(least * factor, variant, stages)

    def _best(self, kind: _AsyncSubproblem) -> list[int] | None:
        """Return the first units of the stages of the best choice; None if nothing fits."""
        units, count = self.tables.units, kind.stages
        below: Floats = np.full(units + 1, inf)
        below[units] = 0.0
        ends: list[Ints] = []
        for k in reversed(range(count)):
            longest = np.maximum(self._stage(kind, k), below[self._after])
            widths = longest.argmin(axis=1)
            ends.append(widths)
            below = np.append(longest[np.arange(units), widths], inf)
        if below[0] == inf:
            return None
        starts, at = [], 0
        for widths in reversed(ends):
            starts.append(at)
            at += int(widths[at]) + 1
        return starts

    def _stage(self, kind: _AsyncSubproblem, k: int) -> Floats:
        """Return the seconds of every interval as stage k, infinite if it does not fit."""
        problem, tables = self.given.problem, self.tables
        variant, device = tables.variant(kind.variant), problem.devices[k]
        m = variant.variant.microbatches
        asked = compute_weight_mode_requirements(
            self.given.weights, count_chain_warmup(kind.stages), m, k
        )
        table = variant.stage(k)
        busy = table.load + table.seconds
        busy = busy + asked.passes * self._passes[device.type]
        bytes_ = variant.standing + (kind.stages - k) * variant.per_flight
        flowing = tables.updating + (kind.stages - k - 1) * variant.per_flight
        bytes_ = np.maximum(bytes_, flowing) + asked.copies * self._copied
        return np.where(tables.valid & (bytes_ <= device.memory), busy, inf)
