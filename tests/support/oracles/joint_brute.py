"""The optimum of a small joint problem by enumeration of all its choices."""

from __future__ import annotations

from math import inf

from fxpart.solver.joint.enumeration import choices, count
from fxpart.solver.joint.objective import JointScorer
from fxpart.solver.joint.problem import JointProblem, JointSolution

LIMIT = 2_000_000  # choices that may be enumerated


def solve_joint_brute(problem: JointProblem) -> JointSolution:
    """Return the optimum by enumeration; of equally good choices the first."""
    assert count(problem) <= LIMIT, f"there are {count(problem)} choices"
    scorer, best, seconds = JointScorer(problem), None, inf
    for choice in choices(problem):
        evaluation = scorer.evaluate(choice)
        if evaluation.feasible and evaluation.seconds < seconds:
            best, seconds = choice, evaluation.seconds
    return JointSolution(
        status="infeasible" if best is None else "optimal",
        choice=best,
        objective=seconds,
        bound=seconds,
        solver="brute",
        candidates=() if best is None else (best,),
    )
