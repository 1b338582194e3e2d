"""Best order of heterogeneous devices with the best cuts: exact for few device sets, else local
search.

Exact: for each variant, schedule and number of stages the dynamic program over sets of devices,
under the same branch and bound on the longest load as for the chain. If that is too much work:
local search over orders around the chain solver. Its bound is that of a chain of ideal devices (the
fastest, the largest, over the best link), which no order beats.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import combinations
from math import inf

import msgspec

from fxpart.solver.assignment.device_order import (
    DeviceLinks,
    DeviceOrderSolution,
    check_links,
    reorder_devices,
    with_stage_count,
)
from fxpart.solver.assignment.device_order_dp import (
    DeviceClasses,
    DeviceOrderProgram,
    DeviceOrderStages,
    FixedDeviceOrder,
    Known,
)
from fxpart.solver.bounds import cheap_bound
from fxpart.solver.dp import StepTimeMinimizer
from fxpart.solver.objective import evaluate
from fxpart.solver.portfolio import solve as solve_chain
from fxpart.solver.problem import PartitionChoice, PartitionProblem
from fxpart.solver.solution import PROVEN, status_of
from fxpart.solver.tables import PartitionTables
from fxpart.solver.validate import check_problem
from fxpart.solver.work import SolverTimeout, work_seconds

WORK = 2e8  # sets * classes * units^2 * stages up to which the dynamic program runs
ROUNDS = 100  # orders that the local search tries
# dynamic program on one order: maximum number of runs, and the gap at which it stops
RUNS, NEAR = 6, 0.003


def solve_orders(
    problem: PartitionProblem,
    links: DeviceLinks,
    *,
    time_limit: float = 30.0,
    work: float = WORK,
    rounds: int = ROUNDS,
) -> DeviceOrderSolution:
    """Return the ordered devices of the stages with their cuts, and a proven bound.

    The devices' own latency and inverse bandwidth are ignored: ``links`` has them for each pair.
    Equal problems give equal results if the time limit is not reached. work: the dynamic program
    runs up to this amount. rounds: of the local search otherwise. Raises FXP206.
    """
    check_problem(problem)
    check_links(problem, links)
    deadline = work_seconds() + time_limit
    fleet = DeviceClasses(problem, links)
    best = _DeviceOrderIncumbent(problem, links, deadline)
    best.try_order(tuple(range(len(problem.devices))), best.counts)
    blocks = len(problem.blocks)
    if fleet.states * len(fleet.classes) * blocks**2 * problem.max_stages <= work:
        return best.solution(_exact(fleet, best), "dp")
    bound = _ideal_bound(problem, links, time_limit / 4)
    _search(fleet, best, bound, rounds)
    return best.solution(bound, "search")


class _DeviceOrderIncumbent:
    """The best order and cuts found."""

    def __init__(self, problem: PartitionProblem, links: DeviceLinks, deadline: float) -> None:
        self.problem, self.links, self.deadline = problem, links, deadline
        self.tables = PartitionTables(problem)
        most = min(problem.max_stages, self.tables.units)
        self.counts = range(problem.min_stages, most + 1)
        self._known: Known = {}
        self.seconds = inf
        self.order: tuple[int, ...] = ()
        self.choice: PartitionChoice | None = None

    def add(self, order: tuple[int, ...], choice: PartitionChoice) -> float:
        """Evaluate and store the solution if it is the best; return the best seconds."""
        stages = len(choice.starts)
        one = with_stage_count(reorder_devices(self.problem, self.links, order[:stages]), stages)
        found = evaluate(one, choice)
        if found.feasible and found.seconds < self.seconds * (1 - 1e-12):
            self.seconds, self.order, self.choice = found.seconds, order[:stages], choice
        return self.seconds

    def try_order(self, order: tuple[int, ...], counts: Sequence[int]) -> None:
        """Add good cuts on the first devices of this order, for these numbers of stages."""
        queue = FixedDeviceOrder(self.problem, self.links, order)
        for variant in range(len(self.problem.variants)):
            for schedule in self.problem.schedules:
                for stages in counts:
                    what = (variant, schedule, stages)
                    with contextlib.suppress(SolverTimeout):
                        self.minimizer(queue, what).minimize(RUNS, NEAR)

    def minimizer(
        self, fleet: DeviceClasses, what: tuple[int, str, int]
    ) -> StepTimeMinimizer[DeviceOrderStages]:
        """Return the branch and bound for one variant, schedule and number of stages."""
        variant, schedule, stages = what
        program = DeviceOrderProgram(
            fleet, self.tables, variant, schedule, stages, self.deadline, self._known
        )

        def found(stages: DeviceOrderStages) -> float:
            units, order = stages
            return self.add(order, self.tables.choice(variant, schedule, units))

        return StepTimeMinimizer(program, found)

    def solution(self, bound: float, solver: str) -> DeviceOrderSolution:
        """Return the best solution; ``bound``: proven."""
        return DeviceOrderSolution(
            status=status_of(self.seconds, bound),
            order=self.order,
            choice=self.choice,
            objective=self.seconds,
            bound=float(min(bound, self.seconds)),
            solver=solver,
        )


def _exact(fleet: DeviceClasses, best: _DeviceOrderIncumbent) -> float:
    """Run all branches; return the bound, which is the optimum unless the time expired."""
    problem, lower = best.problem, inf
    near = len(best.order)
    for variant in range(len(problem.variants)):
        for schedule in problem.schedules:
            cheap = cheap_bound(problem, variant, len(problem.devices), schedule)
            for stages in sorted(best.counts, key=lambda n: (abs(n - near), n)):
                minimizer = best.minimizer(fleet, (variant, schedule, stages))
                with contextlib.suppress(SolverTimeout):
                    minimizer.minimize()
                lower = min(lower, max(minimizer.lower, cheap))
    return lower


def _ideal_bound(problem: PartitionProblem, links: DeviceLinks, seconds: float) -> float:
    """Return the bound of a chain of equal devices, each with the best value of every property."""
    n = len(problem.devices)
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    used = sorted({d.type for d in problem.devices})
    latency = min((links.latency[a][b] for a, b in pairs), default=0.0)
    inverse = min((links.inverse[a][b] for a, b in pairs), default=0.0)
    ideal = msgspec.structs.replace(
        problem.devices[0], type=0, memory=max(d.memory for d in problem.devices)
    )
    later = msgspec.structs.replace(ideal, latency=latency, inverse_bandwidth=inverse)
    first = msgspec.structs.replace(ideal, latency=0.0, inverse_bandwidth=0.0)

    def least(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return (tuple(min(column) for column in zip(*(rows[k] for k in used), strict=True)),)

    variants = tuple(
        msgspec.structs.replace(
            v,
            forward=least(v.forward),
            backward=least(v.backward),
            split=v.split and msgspec.structs.replace(v.split, seconds=least(v.split.seconds)),
        )
        for v in problem.variants
    )
    relaxed = msgspec.structs.replace(
        problem,
        devices=(first, *[later] * (n - 1)),
        variants=variants,
        step=least(problem.step),
    )
    shared = min(cheap_bound(problem, v, n) for v in range(len(problem.variants)))
    return max(shared, solve_chain(relaxed, time_limit=seconds).bound)


def _search(fleet: DeviceClasses, best: _DeviceOrderIncumbent, bound: float, rounds: int) -> None:
    """Swap pairs of devices, from a few good orders, while that improves the step time."""
    problem = best.problem
    every = range(len(problem.devices))
    speed = [sum(problem.variants[0].forward[d.type]) for d in problem.devices]
    starts = (
        sorted(every, key=lambda d: (-problem.devices[d].memory, speed[d])),
        sorted(every, key=lambda d: speed[d]),
        _near(problem, best.links),
    )
    for order in starts:
        best.try_order(tuple(order), best.counts)
    kind = {d: c for c, group in enumerate(fleet.classes) for d in group}
    moved = best.choice is not None
    while moved and best.seconds * (1 - PROVEN) > bound:
        moved, known = False, best.seconds
        order = [*best.order, *(d for d in every if d not in best.order)]
        counts = [n for n in best.counts if abs(n - len(best.order)) < 2]
        for i, j in combinations(every, 2):
            if kind[order[i]] == kind[order[j]] or i >= len(best.order):
                continue
            if rounds == 0 or work_seconds() > best.deadline:
                return
            rounds -= 1
            changed = list(order)
            changed[i], changed[j] = changed[j], changed[i]
            best.try_order(tuple(changed), counts)
            if best.seconds < known:
                moved = True
                break


def _near(problem: PartitionProblem, links: DeviceLinks) -> list[int]:
    """Return the order that follows the fastest link from the first device."""
    found, left = [0], list(range(1, len(problem.devices)))
    while left:
        last = found[-1]
        found.append(min(left, key=lambda d: (links.inverse[last][d], links.latency[last][d], d)))
        left.remove(found[-1])
    return found
