"""Others' rules on the same costs: each is what its source says, and the planner is never worse."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from joint_problems import random_problem, transformer
from msgspec.structs import replace
from oracles.joint_baselines import (
    BASELINES,
    data_parallel,
    equal_parts,
    even,
    megatron,
)
from oracles.pipedream_rannc import pipedream, rannc

from fxpart.solver.joint.enumeration import choices, count
from fxpart.solver.joint.objective import JointScorer, degrees, evaluate
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointChoice, JointProblem, count_option_devices


def widths(problem: JointProblem, choice: JointChoice) -> list[int]:
    """Blocks of each stage."""
    return np.diff([*choice.starts, len(problem.blocks)]).tolist()


def compare(problem: JointProblem, seconds: float) -> list[str]:
    """Check every rule's choice against the planner's step time; the names of those with one."""
    found = []
    for baseline in BASELINES:
        choice = baseline.rule(problem)
        if choice is not None:
            evaluation = evaluate(problem, choice)
            assert evaluation.feasible, baseline.name
            assert seconds <= evaluation.seconds * (1 + 1e-9), baseline.name
            found.append(baseline.name)
    return found


@pytest.mark.slow
def test_the_planner_is_never_worse_on_random_problems() -> None:
    found = list[str]()
    for seed in range(200):
        problem = random_problem(seed)
        found += compare(problem, solve(problem, time_limit=60).objective)
    assert all(found.count(baseline.name) > 50 for baseline in BASELINES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "devices", "memory"), [(12, (8,), 40), (30, (6,), 80), (24, (8, 8), 40)]
)
def test_the_planner_is_never_worse_on_transformers(
    layers: int, devices: tuple[int, ...], memory: int
) -> None:
    problem = transformer(layers, devices, hidden=4096, batch=64, memory=memory * 10**9)
    assert len(compare(problem, solve(problem, time_limit=60).objective)) >= 3


def test_equal_parts() -> None:
    assert equal_parts(0, 10, 4) == (0, 3, 6, 8)
    assert equal_parts(1, 31, 4) == (1, 9, 17, 24)
    assert equal_parts(0, 3, 4) is None


def test_even_is_the_best_of_all_even_splits() -> None:
    """Against brute force over choices of one option whose stages differ by a block at most."""
    looked = 0
    for seed in range(80):
        problem = random_problem(seed)
        if count(problem) > 4000 or len(problem.pools) > 1:
            continue
        n, best = len(problem.blocks), inf
        for choice in choices(problem):
            if choice.starts == equal_parts(0, n, len(choice.options)):
                if len(set(choice.options)) == 1:
                    found = evaluate(problem, choice)
                    best = min(best, found.seconds if found.feasible else inf)
        mine = even(problem)
        assert (evaluate(problem, mine).seconds if mine else inf) == pytest.approx(best)
        looked += 1
    assert looked > 20


def test_pipedream_has_the_least_slowest_stage() -> None:
    """Against brute force over tensor degree 1 without ZeRO, memory and filling ignored."""
    looked = 0
    for seed in range(120):
        problem = random_problem(seed)
        problem = replace(
            problem,
            pools=tuple(replace(p, memory=10**9) for p in problem.pools[:1]),
            options=tuple(
                o
                for o in problem.options
                if o.pool == 0 and o.recompute == "none" and not o.zero
                and problem.layouts[o.layout].tensor == 1
            ),
            microbatches=problem.microbatches[:1],
            schedules=("async",), weights="stash",  # whose objective is the slowest stage
            max_stages=len(problem.blocks),
            uniform=False,
        )  # fmt: skip
        if not problem.options or count(problem) > 4000:
            continue
        scorer = JointScorer(problem)
        found = [scorer.evaluate(choice) for choice in choices(problem)]
        best = min((f.seconds for f in found if f.feasible), default=inf)
        mine = pipedream(problem)
        assert (evaluate(problem, mine).seconds if mine else inf) == pytest.approx(best), seed
        looked += best < inf
    assert looked > 15


def test_rannc_takes_the_fewest_stages_that_fit() -> None:
    """A model too large for one device of a host of 4, at tensor degree 1: two stages suffice."""
    problem = transformer(8, (4,), hidden=2048, batch=16, host=4, vocabulary=1000)
    state = 8 * 24 * 2048**2 * 4  # weights, gradients, and optimizer state twice as large
    problem = replace(
        problem, pools=tuple(replace(p, memory=int(state * 0.75)) for p in problem.pools)
    )
    choice = rannc(problem)
    assert choice is not None
    assert evaluate(problem, choice).feasible
    assert len(choice.options) == 2
    for index in choice.options:
        option = problem.options[index]
        assert (problem.layouts[option.layout].tensor, option.zero) == (1, 0)
        assert option.recompute == ("full" if choice.microbatches > 1 else "none")
    assert sum(count_option_devices(problem, problem.options[i]) for i in choice.options) <= 4


def test_megatron_splits_layers_evenly_with_tensor_degree_eight() -> None:
    problem = transformer(24, (64,), hidden=8192, batch=64, memory=20 * 10**9)
    choice = megatron(problem)
    assert choice is not None
    stages = len(choice.options)
    assert stages > 1
    assert widths(problem, choice) == [
        24 // stages + (k < 24 % stages) + (k == 0) + (k == stages - 1) for k in range(stages)
    ]
    (shape,) = {degrees(problem, o) for o in choice.options}
    assert shape[1] == 8
    assert shape[3] == min(1, shape[0] - 1)


def test_data_parallel_is_one_stage() -> None:
    problem = transformer(4, (4,), hidden=512, batch=16)
    choice = data_parallel(problem)
    assert choice is not None
    assert choice.starts == (0,)
    assert problem.layouts[problem.options[choice.options[0]].layout].tensor == 1
    assert data_parallel(transformer(96, (8,), hidden=12288, batch=16)) is None
