"""The best order of unequal devices with the best cuts: exact for few sets of devices, else search.

Exact: for each variant, schedule and number of stages the dynamic programme over sets of devices,
under the same branch and bound on the longest load as the chain's. Where that is too much work:
local search over orders around the chain's own solver, and the bound of a chain of ideal devices
(the fastest, the largest, over the best link), which no order beats.
"""

from __future__ import annotations

import time
from itertools import combinations
from math import inf
from typing import Any, cast

import msgspec

from fxpart.solver.bounds import cheap_bound
from fxpart.solver.dp import Minimiser
from fxpart.solver.joint.problem import Status
from fxpart.solver.layers import OutOfTime
from fxpart.solver.objective import evaluate
from fxpart.solver.portfolio import CLOSE, PROVEN
from fxpart.solver.portfolio import solve as solve_chain
from fxpart.solver.problem import Choice, PartitionProblem
from fxpart.solver.tables import Tables
from fxpart.solver.topology.order_layers import Fleet, OrderLayers
from fxpart.solver.topology.orders import (
    DeviceLinks,
    OrderSolution,
    check_links,
    exactly,
    ordered,
)
from fxpart.solver.validate import check_problem

WORK = 2e8  # sets * classes * units^2 * stages up to which the dynamic programme is run
ROUNDS = 100  # orders that the local search tries


def solve_orders(
    problem: PartitionProblem,
    links: DeviceLinks,
    *,
    time_limit: float = 30.0,
    work: float = WORK,
    rounds: int = ROUNDS,
) -> OrderSolution:
    """The devices of the stages in order with their cuts, and a proven bound.

    The devices' own latency and inverse bandwidth are not looked at: ``links`` has them for each
    pair. Equal problems give equal answers while the time limit is not reached. work: above it
    nothing is proved by the dynamic programme; rounds: of the local search then. Raises FXP206.
    """
    check_problem(problem)
    check_links(problem, links)
    if problem.once:  # every stage takes it, so the longest does
        bare = solve_orders(
            without_once(problem), links, time_limit=time_limit, work=work, rounds=rounds
        )
        more = {"objective": bare.objective + problem.once, "bound": bare.bound + problem.once}
        return msgspec.structs.replace(bare, **more)
    deadline = time.monotonic() + time_limit
    fleet = Fleet(problem, links)
    best = _Best(problem, links)
    best.try_chain(tuple(range(len(problem.devices))), time_limit / 4)
    blocks = len(problem.blocks)
    if fleet.states * len(fleet.classes) * blocks**2 * problem.max_stages <= work:
        return best.solution(_exact(fleet, best, deadline), "dp")
    bound = _ideal_bound(problem, links, time_limit / 4)
    _search(fleet, best, bound, rounds, deadline)
    return best.solution(bound, "search")


def without_once(problem: PartitionProblem) -> PartitionProblem:
    """The same problem without the seconds that every stage takes once a step."""
    return msgspec.structs.replace(problem, once=0.0)


class _Best:
    """The best order and cuts seen."""

    def __init__(self, problem: PartitionProblem, links: DeviceLinks) -> None:
        self.problem, self.links = problem, links
        self.seconds = inf
        self.order: tuple[int, ...] = ()
        self.choice: Choice | None = None

    def add(self, order: tuple[int, ...], choice: Choice) -> float:
        """Score and keep it if it is the best; the seconds to beat."""
        stages = len(choice.starts)
        one = exactly(ordered(self.problem, self.links, order[:stages]), stages)
        found = evaluate(one, choice)
        if found.feasible and found.seconds < self.seconds * (1 - 1e-12):
            self.seconds, self.order, self.choice = found.seconds, order[:stages], choice
        return self.seconds

    def try_chain(self, order: tuple[int, ...], seconds: float) -> float:
        """The best cuts on this order, or a part of it from the first device on."""
        one = ordered(self.problem, self.links, order)
        found = solve_chain(one, time_limit=max(0.0, seconds))
        for choice in found.candidates:
            self.add(order, choice)
        return found.objective

    def solution(self, bound: float, solver: str) -> OrderSolution:
        """What was found; ``bound``: proven."""
        status: Status
        if self.choice is None:
            status = "infeasible" if bound == inf else "unknown"
        elif bound >= self.seconds * (1 - PROVEN):
            status = "optimal"
        else:
            status = "within gap" if bound >= self.seconds * (1 - CLOSE) else "best found"
        return OrderSolution(
            status=status,
            order=self.order,
            choice=self.choice,
            objective=self.seconds,
            bound=float(min(bound, self.seconds)),
            solver=solver,
        )


def _exact(fleet: Fleet, best: _Best, deadline: float) -> float:
    """Runs through everything; the bound, which is the optimum if there was time."""
    problem, lower = best.problem, inf
    tables = Tables(problem)
    near = len(best.order)
    counts = range(problem.min_stages, min(problem.max_stages, tables.units) + 1)
    for variant in range(len(problem.variants)):
        cheap = cheap_bound(problem, variant, len(problem.devices))
        for schedule in problem.schedules:
            for stages in sorted(counts, key=lambda n: (abs(n - near), n)):
                try:
                    proven = _one(fleet, best, tables, (variant, schedule, stages), deadline)
                except OutOfTime:
                    proven = 0.0
                lower = min(lower, max(proven, cheap))
    return lower


def _one(
    fleet: Fleet, best: _Best, tables: Tables, what: tuple[int, str, int], deadline: float
) -> float:
    """The proven bound for one variant, schedule and number of stages."""
    variant, schedule, stages = what
    layers = OrderLayers(fleet, tables, variant, schedule, stages, deadline)

    def found(units: list[int]) -> float:
        return best.add(layers.order, tables.choice(variant, schedule, units))

    minimiser = Minimiser(cast(Any, layers), found)
    try:
        return minimiser.minimise()
    except OutOfTime:
        return minimiser.lower


def _ideal_bound(problem: PartitionProblem, links: DeviceLinks, seconds: float) -> float:
    """A chain of equal devices, each as good in every respect as the best: none is better."""
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
        msgspec.structs.replace(v, forward=least(v.forward), backward=least(v.backward))
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


def _search(fleet: Fleet, best: _Best, bound: float, rounds: int, deadline: float) -> None:
    """Swaps of two devices, from a few good orders, while they help."""
    problem = best.problem
    every = range(len(problem.devices))
    speed = [sum(problem.variants[0].forward[d.type]) for d in problem.devices]
    starts = (
        sorted(every, key=lambda d: (-problem.devices[d].memory, speed[d])),
        sorted(every, key=lambda d: speed[d]),
        _near(problem, best.links),
    )
    for order in starts:
        best.try_chain(tuple(order), deadline - time.monotonic())
    kind = {d: c for c, group in enumerate(fleet.classes) for d in group}
    moved = best.choice is not None
    while moved and best.seconds * (1 - PROVEN) > bound:
        moved, known = False, best.seconds
        order = [*best.order, *(d for d in every if d not in best.order)]
        for i, j in combinations(every, 2):
            if kind[order[i]] == kind[order[j]] or i >= len(best.order):
                continue
            if rounds == 0 or time.monotonic() > deadline:
                return
            rounds -= 1
            changed = list(order)
            changed[i], changed[j] = changed[j], changed[i]
            best.try_chain(tuple(changed), deadline - time.monotonic())
            if best.seconds < known:
                moved = True
                break


def _near(problem: PartitionProblem, links: DeviceLinks) -> list[int]:
    """From the first device always on over the fastest link."""
    found, left = [0], list(range(1, len(problem.devices)))
    while left:
        last = found[-1]
        found.append(min(left, key=lambda d: (links.inverse[last][d], links.latency[last][d], d)))
        left.remove(found[-1])
    return found
