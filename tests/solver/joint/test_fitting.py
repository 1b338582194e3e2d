"""Whether a choice fits at all: the same answer as brute force, and what is given does fit."""

from __future__ import annotations

from math import inf

import pytest
from joint_oracle import small_problems, wished_problem
from joint_problems import rich_problem, transformer
from msgspec.structs import replace

from fxpart.solver.joint.enumeration import choices, count
from fxpart.solver.joint.feasibility import find_feasible_joint_choice
from fxpart.solver.joint.objective import JointScorer, evaluate
from fxpart.solver.joint.problem import JointProblem, StagePin
from fxpart.solver.work import SolverTimeout, work_seconds


def fits(problem: JointProblem) -> bool:
    scorer = JointScorer(problem)
    return any(scorer.evaluate(choice).feasible for choice in choices(problem))


@pytest.mark.slow
def test_as_brute_force_says() -> None:
    feasible = 0
    for seed, problem in small_problems(250):
        choice = find_feasible_joint_choice(problem, inf)
        assert (choice is not None) == fits(problem), seed
        if choice is not None:
            assert evaluate(problem, choice).faults == (), seed
            feasible += 1
    assert 100 < feasible < 220


def test_pins_from_the_front_and_the_end() -> None:
    problem = transformer(6, (4, 4), hidden=256, batch=8)
    pins = (StagePin(first=0, last=2, stage=0), StagePin(first=7, last=7, stage=-1))
    choice = find_feasible_joint_choice(
        replace(problem, pins=pins, min_stages=3, max_stages=3), inf
    )
    assert choice is not None
    assert evaluate(replace(problem, pins=pins), choice).feasible
    apart = (StagePin(first=2, last=2, stage=0), StagePin(first=1, last=1, stage=1))
    assert find_feasible_joint_choice(replace(problem, pins=apart), inf) is None


@pytest.mark.slow
def test_more_than_two_pools_and_interleaving_go_to_the_solver() -> None:
    asked = 0
    for seed in range(250):
        problem = rich_problem(seed)
        beyond = len(problem.pools) > 2 or "interleaved" in problem.schedules
        if beyond and count(problem) <= 1000:
            assert (find_feasible_joint_choice(problem, inf) is not None) == fits(problem), seed
            asked += 1
    assert asked > 40


def test_no_time_is_no_answer() -> None:
    with pytest.raises(SolverTimeout):
        find_feasible_joint_choice(wished_problem(1), work_seconds() - 1)
