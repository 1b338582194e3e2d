"""The entrance: time limits, statuses, candidates, equal answers, and large problems."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import pairwise
from math import inf
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from partition_problems import random_problem, transformer

from fxpart.errors import FxpartError
from fxpart.solver.objective import evaluate
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import PartitionProblem


def llama(**changes: object) -> PartitionProblem:
    """Llama-70B's shape: 243 blocks on 128 devices of 80 GiB, uneven costs."""
    options: dict[str, object] = {"layers": 80, "hidden": 8192, "devices": 128, "pieces": 3}
    options |= {"vocabulary": 32000, "sequence": 4096, "noise": 0.3}
    return transformer(**{**options, **changes})  # type: ignore[arg-type]


def gpt3(**changes: object) -> PartitionProblem:
    """GPT-3 175B's shape: 195 blocks on 128 devices of 80 GiB."""
    options: dict[str, object] = {"layers": 96, "hidden": 12288, "devices": 128}
    return transformer(**{**options, **changes})  # type: ignore[arg-type]


def test_equal_stages_take_the_time_of_the_textbook() -> None:
    """S equal stages, m microbatches, nothing else: (m + S - 1) t."""
    problem = transformer(layers=2, hidden=64, devices=4, host=4)
    free = tuple(replace(d, latency=0.0, inverse_bandwidth=0.0) for d in problem.devices)
    one = replace(
        problem.variants[0],
        microbatches=8,
        forward=((1.0,) * 7,),
        backward=((2.0,) * 7,),
        activation=(0,) * 7,
        workspace=(0,) * 7,
    )
    assert len(problem.blocks) == 7
    problem = replace(
        problem,
        devices=(*free, *free[1:]),
        variants=(one,),
        step=((0.0,) * 7,),
        min_stages=7,
        max_stages=7,
    )
    assert solve(problem).objective == pytest.approx((8 + 7 - 1) * 3.0)


def test_candidates_are_the_choice_and_the_best_of_other_kinds() -> None:
    problem = transformer(
        layers=6, hidden=1024, devices=8, host=4, noise=0.2, batch=16, sizes=(1, 2, 4)
    )
    solution = solve(problem)
    assert solution.candidates[0] == solution.choice
    assert len(solution.candidates) == 6
    kinds = {
        (len(c.starts), problem.variants[c.variant].microbatches, c.schedule)
        for c in solution.candidates
    }
    assert len(kinds) == 6
    seconds = [evaluate(problem, c).seconds for c in solution.candidates]
    assert all(a <= b for a, b in pairwise(seconds))
    # each is close to the best of its kind, as a solver for that kind alone finds it
    for choice, time_found in zip(solution.candidates[1:], seconds[1:], strict=True):
        stages = len(choice.starts)
        alone = replace(
            problem,
            variants=(problem.variants[choice.variant],),
            schedules=(choice.schedule,),
            min_stages=stages,
            max_stages=stages,
        )
        assert time_found == pytest.approx(solve(alone).objective, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["dp", "cp-sat"])
def test_the_same_bytes_twice(solver: str) -> None:
    for seed in range(8):
        problem = random_problem(seed)
        answers = [solve(problem, solver=solver, seed=3) for _ in range(2)]
        first, second = (msgspec.json.encode(a, order="sorted") for a in answers)
        assert first == second


@pytest.mark.slow
def test_the_same_bytes_in_another_process() -> None:
    """Hash seeds order sets differently in each process; answers must not notice."""
    code = (
        "import sys, msgspec; from partition_problems import random_problem, transformer;"
        "from fxpart.solver.portfolio import solve;"
        "problems = [*map(random_problem, range(30)), transformer(layers=12, hidden=1024,"
        " devices=8, host=2, kinds=2, noise=0.1, batch=32)];"
        "sys.stdout.write(repr([msgspec.json.encode(solve(p)) for p in problems]))"
    )
    root = Path(__file__).parents[2]
    paths = os.pathsep.join((str(root), str(root / "tests" / "support")))
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": paths},
            check=True,
            capture_output=True,
        ).stdout
        for seed in (1, 2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) > 1000


@pytest.mark.slow
def test_torch_and_or_tools_stay_out() -> None:
    code = (
        "import sys; from fxpart.solver.portfolio import solve;"
        "from partition_problems import random_problem; solve(random_problem(1));"
        "sys.exit(sum(m in sys.modules for m in ('torch', 'ortools')))"
    )
    root = Path(__file__).parents[2]
    paths = os.pathsep.join((str(root), str(root / "tests" / "support")))
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, check=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["dp", "cp-sat"])
@pytest.mark.parametrize("limit", [0.0, 0.5, 2.0])
def test_the_time_limit_holds(solver: str, limit: float) -> None:
    problem = llama(kinds=2)
    if solver == "cp-sat":
        solve(random_problem(0), solver=solver)  # OR-Tools takes a second to import
    begin = time.monotonic()
    solution = solve(problem, solver=solver, time_limit=limit)
    assert time.monotonic() - begin < limit + 5.0  # indexing the problem is not interrupted
    assert 0 < solution.bound <= solution.objective
    if solution.choice is None:
        assert (solution.status, solution.objective) == ("unknown", inf)
    else:
        assert evaluate(problem, solution.choice).feasible


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "seconds"),
    [
        pytest.param(gpt3(), 20, id="gpt3"),
        pytest.param(gpt3(noise=0.3), 20, id="gpt3-uneven"),
        pytest.param(llama(), 20, id="llama"),
        pytest.param(llama(kinds=2), 60, id="llama-two-types"),
    ],
)
def test_large_problems_are_proven_optimal(problem: PartitionProblem, seconds: float) -> None:
    """Seconds of CPU are ten times what an idle machine takes."""
    begin = time.process_time()
    solution = solve(problem, time_limit=600)
    assert time.process_time() - begin < seconds
    assert solution.status == "optimal"
    assert solution.choice is not None
    assert evaluate(problem, solution.choice).feasible
    assert solution.objective * (1 - 2e-9) <= solution.bound <= solution.objective


def test_more_stages_at_least_than_at_most_is_infeasible() -> None:
    problem = replace(random_problem(3), min_stages=9)
    for solver in ("dp", "cp-sat"):
        assert solve(problem, solver=solver).status == "infeasible"


@pytest.mark.parametrize("options", [{"solver": "simplex"}, {"time_limit": -1.0}])
def test_wrong_arguments(options: dict[str, object]) -> None:
    with pytest.raises(FxpartError) as caught:
        solve(random_problem(0), **options)  # type: ignore[arg-type]
    assert caught.value.code == "FXP109"
