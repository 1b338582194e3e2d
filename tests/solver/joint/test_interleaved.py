"""Interleaved pipelines of problems in which most options have no costs, against enumeration."""

from __future__ import annotations

import random

import pytest
from joint_problems import random_problem
from msgspec.structs import replace
from oracles.joint_brute import solve_joint_brute

from fxpart.schedule.spec import INTERLEAVED
from fxpart.solver.joint.enumeration import count
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointProblem

MOST = 30_000  # choices that are enumerated


def sparse(seed: int) -> JointProblem:
    """Return a random problem of interleaved schedules, without most of the options' costs."""
    rng = random.Random(seed)
    problem = replace(random_problem(seed), schedules=(INTERLEAVED,), virtual=(2,))
    kept = [work for work in problem.works if rng.random() < 0.5]
    return replace(problem, works=tuple(kept or problem.works[:1]))


def test_a_plan_is_found_wherever_there_is_one() -> None:
    solved = 0
    for seed in range(60):
        problem = sparse(seed)
        if count(problem) > MOST:
            continue
        wanted, found = solve_joint_brute(problem), solve(problem, time_limit=20)
        assert (found.choice is None) == (wanted.choice is None), seed
        assert found.bound <= wanted.objective * (1 + 1e-9), seed
        if found.status == "optimal":
            assert found.objective == pytest.approx(wanted.objective, rel=1e-9), seed
        solved += wanted.choice is not None
    assert solved >= 5
