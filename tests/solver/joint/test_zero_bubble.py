"""ZB-H1's memory: every stage holds as many microbatches as the pipeline has stages."""

from __future__ import annotations

from math import inf

import pytest
from built_schedules import BUILDERS
from joint_problems import random_problem, rich_problem, transformer
from msgspec.structs import replace
from oracles.joint_brute import solve_joint_brute

from fxpart.solver.joint.arrays import JointArrays
from fxpart.solver.joint.enumeration import count
from fxpart.solver.joint.feasibility import find_feasible_joint_choice
from fxpart.solver.joint.joint_ilp import accepts, solve_cp_sat
from fxpart.solver.joint.objective import evaluate
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointChoice, JointProblem
from fxpart.solver.joint.record import JointRecord
from fxpart.solver.joint.tables import JointTables
from fxpart.solver.schedule_costs import count_stage_in_flight


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_as_the_schedules_are_built(name: str) -> None:
    for stages in range(1, 8):
        for m in range(1, 12):
            built = BUILDERS[name].in_flight(stages, m)
            assert built == tuple(count_stage_in_flight(name, m, stages, s) for s in range(stages))


def tightened(problem: JointProblem, choice: JointChoice) -> JointProblem:
    """With too little memory, by a byte, for the choice's stage that comes nearest to it."""
    stages = evaluate(problem, choice).stages
    full = max(stages, key=lambda s: s.memory.total / s.memory_limit)
    share = (full.memory.total - 1) / full.memory_limit
    pools = tuple(replace(pool, memory=int(pool.memory * share)) for pool in problem.pools)
    return replace(problem, pools=pools)


def agree(problem: JointProblem) -> JointChoice | None:
    """The optimum by enumeration, which all others find, too."""
    best = solve_joint_brute(problem)
    found = solve(problem, solver="dp", time_limit=600)
    assert (found.status, found.choice is None) == (best.status, best.choice is None)
    assert (find_feasible_joint_choice(problem, inf) is None) == (best.choice is None)
    if best.choice is not None:
        assert found.objective == pytest.approx(best.objective, rel=1e-9)
    if accepts(problem) is None:
        record = JointRecord(problem)
        bound = solve_cp_sat(JointTables(JointArrays(problem)), record, inf, 0)
        choice = record.choice
        assert (choice is None) == (best.choice is None)
        if choice is not None:
            assert evaluate(problem, choice).seconds == pytest.approx(best.objective, rel=1e-6)
            assert bound <= best.objective * (1 + 1e-9)
    return best.choice


@pytest.mark.slow
def test_all_solvers_agree_where_memory_is_short() -> None:
    """Each optimum is made too large for its memory, a few times; often 1F1B's would still fit."""
    binding = deep = 0
    for seed in range(24):
        problem = (random_problem if seed % 2 else rich_problem)(seed)
        problem = replace(problem, schedules=("zb-h1",))
        if count(problem) > 3000:
            continue
        for _ in range(3):
            choice = agree(problem)
            if choice is None:
                break
            deep += len(choice.options) > 2
            problem = tightened(problem, choice)
            as_before = replace(problem, schedules=("zb-h1", "1f1b"))
            binding += evaluate(as_before, replace(choice, schedule="1f1b")).feasible
    assert binding >= 3 and deep >= 3


@pytest.mark.slow
def test_numbers_of_stages_are_told_apart() -> None:
    """A transformer whose memory allows 1F1B more stages than ZB-H1: each solver's own answer."""
    problem = transformer(6, (6,), hidden=256, batch=12, vocabulary=1000)
    options = tuple(o for o in problem.options if o.data == 1 and o.recompute == "none")[:2]
    problem = replace(
        problem, options=options, schedules=("zb-h1",), microbatches=(12,), max_stages=6
    )
    seen = set()
    for _ in range(6):
        choice = agree(problem)
        if choice is None:
            break
        seen.add(len(choice.options))
        problem = tightened(problem, choice)
    assert len(seen) > 1
