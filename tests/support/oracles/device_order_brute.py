"""Every order of devices, one by one: the oracle of the search for device orders."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from math import inf

from oracles.partition_brute import LIMIT, count, solve_brute

from fxpart.errors import error
from fxpart.solver.assignment.device_order import (
    DeviceLinks,
    DeviceOrderSolution,
    check_links,
    reorder_devices,
    with_stage_count,
)
from fxpart.solver.problem import PartitionProblem


def orders(problem: PartitionProblem) -> Iterator[tuple[int, ...]]:
    """Every sequence of devices that stages may take."""
    for stages in range(problem.min_stages, problem.max_stages + 1):
        yield from permutations(range(len(problem.devices)), stages)


def brute_orders(problem: PartitionProblem, links: DeviceLinks) -> DeviceOrderSolution:
    """The optimum over all orders, subsets and cuts by enumeration; the first of equal ones.

    Raises FXP109 where there are too many.
    """
    check_links(problem, links)
    best, objective = None, inf
    order: tuple[int, ...] = ()
    tried = 0
    for each in orders(problem):
        one = with_stage_count(reorder_devices(problem, links, each), len(each))
        tried += count(one)
        if tried > LIMIT:
            raise error(
                "FXP109",
                where="brute_orders",
                why=f"there are more than {LIMIT} orders and cuts",
                fix="use solve_orders",
            )
        found = solve_brute(one)
        if found.objective < objective:
            best, objective, order = found.choice, found.objective, each
    return DeviceOrderSolution(
        status="infeasible" if best is None else "optimal",
        order=order,
        choice=best,
        objective=objective,
        bound=objective,
        solver="brute",
    )
