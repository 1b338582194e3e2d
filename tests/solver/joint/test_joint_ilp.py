"""CP-SAT on the joint problem: the optimum, a bound that is one, and the same every time."""

from __future__ import annotations

import random
from math import inf

import pytest
from joint_oracle import small_problems
from joint_problems import random_problem, transformer
from msgspec.structs import replace
from oracles.joint_brute import solve_joint_brute

from fxpart.solver.joint.arrays import JointArrays
from fxpart.solver.joint.joint_ilp import accepts
from fxpart.solver.joint.joint_ilp import solve_cp_sat as solve_program
from fxpart.solver.joint.objective import evaluate
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointChoice, JointProblem, StagePin
from fxpart.solver.joint.record import JointRecord
from fxpart.solver.joint.tables import JointTables
from fxpart.solver.work import work_seconds


def solve_cp_sat(
    problem: JointProblem, incumbent: JointChoice | None, deadline: float, seed: int
) -> tuple[JointChoice | None, float]:
    """The best choice and the bound."""
    record = JointRecord(problem)
    if incumbent is not None:
        record.add(incumbent)
    bound = solve_program(JointTables(JointArrays(problem)), record, deadline, seed)
    return record.choice, bound


def medium(layers: int, devices: tuple[int, ...], options: int, memory: int = 40) -> JointProblem:
    """A transformer with every n-th option of its first 160; memory in GB."""
    problem = transformer(layers, devices, hidden=4096, batch=64, memory=memory * 10**9)
    step = max(len(problem.options) // options, 1)
    return replace(
        problem,
        options=problem.options[::step][:options],
        microbatches=(8, 16),
        max_stages=min(problem.max_stages, sum(devices)),
    )


@pytest.mark.slow
def test_the_optimum_of_small_problems() -> None:
    fit = 0
    for seed, problem in small_problems(150):
        best = solve_joint_brute(problem).objective
        choice, bound = solve_cp_sat(problem, incumbent=None, deadline=inf, seed=0)
        if best == inf:
            assert (choice, bound) == (None, inf), seed
            continue
        assert choice is not None, seed
        found = evaluate(problem, choice)
        assert found.feasible, (seed, found.faults)
        assert found.seconds == pytest.approx(best, rel=1e-7), seed
        assert best * (1 - 1e-6) <= bound <= best, seed
        fit += 1
    assert 60 < fit < 140


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_agrees_with_the_dynamic_programme_beyond_brute_force(seed: int) -> None:
    """On transformers with random options, memory, schedules and wishes."""
    rng = random.Random(seed)
    problem = transformer(
        rng.randint(8, 14), rng.choice(((8,), (6,), (4, 4), (5, 2))), hidden=4096, batch=48,
        memory=rng.choice((25, 40, 60)) * 10**9,
    )  # fmt: skip
    options = sorted(rng.sample(range(len(problem.options)), 14))
    n = len(problem.blocks)
    problem = replace(
        problem,
        options=tuple(problem.options[o] for o in options),
        microbatches=tuple(rng.sample((4, 8, 12, 16), 2)),
        schedules=rng.choice((("1f1b",), ("gpipe", "zb-h1"), ("async",), ("1f1b", "zb-h1"))),
        max_stages=rng.randint(2, 8),
        no_cut_after=tuple(sorted(rng.sample(range(n - 1), 2))),
        pins=(StagePin(first=n - 1, last=n - 1, stage=rng.choice((1, -1))),)
        if seed % 3 == 0
        else (),
        uniform=seed % 4 == 1,
    )
    found = solve(problem, solver="dp", time_limit=60)
    choice, bound = solve_cp_sat(problem, incumbent=None, deadline=inf, seed=0)
    assert choice is not None
    seconds = evaluate(problem, choice).seconds
    assert bound >= seconds * (1 - 1e-6)
    assert found.bound <= seconds * (1 + 1e-9)
    assert bound <= found.objective
    assert seconds <= found.objective * (1 + 1e-9)
    assert found.objective <= seconds * 1.01


@pytest.mark.slow
def test_an_incumbent_changes_nothing_but_the_way_there() -> None:
    problem = medium(10, (8,), 12)
    first, bound = solve_cp_sat(problem, incumbent=None, deadline=inf, seed=0)
    assert first is not None
    again, same = solve_cp_sat(problem, incumbent=first, deadline=inf, seed=0)
    best = evaluate(problem, first).seconds
    assert again is not None
    assert evaluate(problem, again).seconds == pytest.approx(best, rel=1e-7)
    assert same == pytest.approx(bound, rel=1e-6)
    worse = JointChoice(
        microbatches=first.microbatches,
        schedule=first.schedule,
        starts=(0,),
        options=(first.options[0],),
    )
    assert solve_cp_sat(problem, incumbent=worse, deadline=inf, seed=0)[1] <= best


def test_equal_runs_are_equal() -> None:
    problem = medium(8, (4, 2), 8)
    runs = [solve_cp_sat(problem, incumbent=None, deadline=inf, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0][0] is not None


def test_no_time_gives_the_incumbent_and_a_bound() -> None:
    problem = medium(10, (8,), 12)
    best, _ = solve_cp_sat(problem, incumbent=None, deadline=inf, seed=0)
    assert best is not None
    choice, bound = solve_cp_sat(problem, incumbent=best, deadline=work_seconds() - 1, seed=0)
    assert choice == best
    assert 0 < bound <= evaluate(problem, best).seconds


def test_what_is_not_modelled_is_said() -> None:
    problem = random_problem(0)
    assert accepts(problem) is None
    reason = accepts(replace(problem, schedules=("1f1b", "interleaved")))
    assert reason is not None
    assert "interleaved" in reason
    reason = accepts(transformer(96, (1024,)))
    assert reason is not None
    assert "60000" in reason


@pytest.mark.slow
def test_forty_blocks_and_twenty_options() -> None:
    problem = medium(38, (8, 8), 20)
    assert accepts(problem) is None
    known = solve(problem, solver="dp", time_limit=60).choice
    choice, bound = solve_cp_sat(problem, incumbent=known, deadline=inf, seed=0)
    assert choice is not None
    assert bound >= evaluate(problem, choice).seconds * (1 - 1e-6)
