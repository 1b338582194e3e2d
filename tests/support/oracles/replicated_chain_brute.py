"""Every choice of groups, one by one: the oracle of the dynamic programme, for small problems."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from math import inf

from fxpart.solver.replicated_chain.objective import ReplicatedChainScorer
from fxpart.solver.replicated_chain.problem import (
    ReplicatedChainChoice,
    ReplicatedChainProblem,
    ReplicatedChainSolution,
)


def choices(problem: ReplicatedChainProblem) -> Iterator[ReplicatedChainChoice]:
    """All choices that keep the constraints (memory aside), in a fixed order."""
    base = problem.base
    fused = set(base.no_cut_after)
    cuts = [b + 1 for b in range(len(base.blocks) - 1) if b not in fused]
    mixes = [m for m in product(*(range(k.devices + 1) for k in problem.kinds)) if any(m)]
    for variant, schedule in product(range(len(base.variants)), base.schedules):
        for groups in range(base.min_stages, base.max_stages + 1):
            for inner in combinations(cuts, groups - 1):
                for counts in product(mixes, repeat=groups):
                    used = [sum(column) for column in zip(*counts, strict=True)]
                    if all(n <= k.devices for n, k in zip(used, problem.kinds, strict=True)):
                        yield ReplicatedChainChoice(
                            variant=variant, schedule=schedule, starts=(0, *inner), counts=counts
                        )


def solve_replicated_chain_brute(problem: ReplicatedChainProblem) -> ReplicatedChainSolution:
    """The optimum by enumeration; of equally good choices the first."""
    scorer, best, seconds = ReplicatedChainScorer(problem), None, inf
    for choice in choices(problem):
        evaluation = scorer.evaluate(choice)
        if evaluation.feasible and evaluation.seconds < seconds:
            best, seconds = choice, evaluation.seconds
    return ReplicatedChainSolution(
        status="infeasible" if best is None else "optimal",
        choice=best,
        objective=seconds,
        bound=seconds,
        solver="brute",
        candidates=() if best is None else (best,),
    )
