"""Every acyclic graph of stages, one by one: the oracle of the others, for small problems."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from fxpart.errors import error
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.stage_graph.block_graph import BlockGraph, members
from fxpart.solver.stage_graph.objective import evaluate
from fxpart.solver.stage_graph.problem import StageGraphChoice

MOST_BLOCKS = 8


def choices(problem: PartitionProblem) -> Iterator[StageGraphChoice]:
    """All choices that keep the constraints (memory aside), in a fixed order."""
    graph, fused = BlockGraph.of(problem), set(problem.no_cut_after)
    n = len(problem.blocks)

    def stagings(most: int, stage_of: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
        b = len(stage_of)
        if b == n:
            if len({*stage_of}) == most:
                yield stage_of
            return
        least = max((stage_of[a] for a in members(graph.before[b])), default=0)
        for k in range(least, most):
            if not (b and b - 1 in fused and stage_of[b - 1] != k):
                yield from stagings(most, (*stage_of, k))

    for variant in range(len(problem.variants)):
        for schedule in problem.schedules:
            for stages in range(problem.min_stages, problem.max_stages + 1):
                for stage_of in stagings(stages):
                    yield StageGraphChoice(variant=variant, schedule=schedule, stage_of=stage_of)


def solve_brute(problem: PartitionProblem) -> tuple[float, StageGraphChoice | None]:
    """The least step time in seconds and its choice; of equally good ones the first.

    Infinity and None where nothing fits. Raises FXP109 beyond :data:`MOST_BLOCKS` blocks.
    """
    if len(problem.blocks) > MOST_BLOCKS:
        raise error(
            "FXP109",
            where="branches.brute",
            why=f"{len(problem.blocks)} blocks have too many stagings (at most {MOST_BLOCKS})",
            fix="use solve_branches",
        )
    best: StageGraphChoice | None = None
    seconds = inf
    for choice in choices(problem):
        found = evaluate(problem, choice)
        if found.feasible and found.seconds < seconds:
            best, seconds = choice, found.seconds
    return seconds, best
