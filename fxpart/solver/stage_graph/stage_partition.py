"""Stages of a plan: the best chain, or a stage graph if that is faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from fxpart.solver.objective import PartitionEvaluation
from fxpart.solver.objective import evaluate as evaluate_chain
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import (
    PartitionChoice,
    PartitionProblem,
    Solution,
    without_recompute,
)
from fxpart.solver.schedule_costs import has_graph_form
from fxpart.solver.solution import status_of
from fxpart.solver.stage_graph.block_graph import regroup
from fxpart.solver.stage_graph.objective import evaluate
from fxpart.solver.stage_graph.portfolio import solve_branches
from fxpart.solver.stage_graph.problem import StageGraphSolution
from fxpart.solver.work import work_seconds


@dataclass(frozen=True)
class StagePartition:
    """Contiguous stages of a problem, whose blocks may be in another order than the model's.

    problem: with blocks in the order of the stages; solution: its choice, bound and status. order:
    block i of ``problem`` is the model's block order[i]; empty if that is its own order.
    evaluation: of the choice, by the solved objective; None without a choice. over: description of
    the choices that the bound covers; "" for a chain. chain: the problem in its own order, and its
    best chain, if the stages are a graph.
    """

    problem: PartitionProblem
    solution: Solution
    order: tuple[int, ...] = ()
    evaluation: PartitionEvaluation | None = None
    over: str = ""
    chain: tuple[PartitionProblem, Solution] | None = None


def choose_stage_partition(
    problem: PartitionProblem, chain: Solution, *, time_limit: float = 30.0, seed: int = 0
) -> StagePartition:
    """Return ``chain``, the solution over chains, or the best stage graph if that is faster.

    If no chain fits, a graph still may. time_limit: seconds for the search of a graph; models
    without branches need none. Errors: see :func:`solve_branches`.
    """
    found = None
    if "none" in problem.recompute:  # stages of a graph store their activations
        plain = without_recompute(problem)
        start = None if chain.choice is None else chain.choice
        if start is not None and not evaluate_chain(plain, start).feasible:
            start = None
        found = solve_branches(plain, start, time_limit=time_limit, seed=seed)
    if found is None or found.objective >= chain.objective:
        known = None if chain.choice is None else evaluate_chain(problem, chain.choice)
        return StagePartition(problem, chain, evaluation=known)
    names = tuple(filter(has_graph_form, problem.schedules))
    graph = msgspec.structs.replace(problem, schedules=names)
    moved, solution = in_order(graph, found)
    own = found.order == tuple(range(len(found.order)))
    return StagePartition(
        graph if own else moved,
        solution,
        order=() if own else found.order,
        evaluation=evaluate(problem, found.choice),
        over=found.over,
        chain=(problem, chain),
    )


def iterate_stage_counts(
    made: StagePartition, *, time_limit: float, seed: int = 0
) -> Iterator[StagePartition]:
    """Yield the best stage graph of every number of stages and microbatches, within the time limit.

    made: the best of all, a graph; its bound stays the proven one, and it comes first.
    """
    yield made
    assert made.chain is not None and made.solution.choice is not None, "a graph"
    problem, had = made.chain[0], made.solution.choice
    end = work_seconds() + time_limit
    for count in range(problem.min_stages, problem.max_stages + 1):
        for number, variant in enumerate(problem.variants):
            left = end - work_seconds()
            if left <= 0:
                return
            if (count, number) == (len(had.starts), had.variant):
                continue
            one = msgspec.structs.replace(
                problem, min_stages=count, max_stages=count, variants=(variant,)
            )
            found = choose_stage_partition(
                one, solve(one, time_limit=left, seed=seed), time_limit=left, seed=seed
            )
            if found.over and found.solution.choice is not None:
                yield _again(made, found, number)


def _again(made: StagePartition, found: StagePartition, variant: int) -> StagePartition:
    """Return a graph of one kind as a choice of the whole problem, with its proven bound."""
    assert made.chain is not None and found.solution.choice is not None, "graphs"
    problem = made.chain[0]
    choice = msgspec.structs.replace(found.solution.choice, variant=variant)
    objective, bound = found.solution.objective, made.solution.bound
    solution = msgspec.structs.replace(
        made.solution,
        status=status_of(objective, bound),
        choice=choice,
        objective=objective,
        candidates=(choice,),
    )
    moved = regroup(problem, [(b,) for b in found.order]) if found.order else problem
    return replace(found, problem=moved, solution=solution, over=made.over, chain=made.chain)


def in_order(
    problem: PartitionProblem, found: StageGraphSolution
) -> tuple[PartitionProblem, Solution]:
    """Return the problem with its blocks in the choice's order, and the choice as contiguous
    stages.

    Plans and reports require contiguous stages: block i of the new problem is block
    ``found.order[i]`` of the old. The seconds remain those of stage graphs.
    """
    choice = PartitionChoice(
        variant=found.choice.variant, schedule=found.choice.schedule, starts=found.starts
    )
    solution = Solution(
        status=found.status,
        choice=choice,
        objective=found.objective,
        bound=found.bound,
        solver=found.solver,
        candidates=(choice,),
    )
    return regroup(problem, [(b,) for b in found.order]), solution
