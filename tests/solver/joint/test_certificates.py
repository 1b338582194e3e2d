"""Certificates of joint problems, recomputed from their JSON by formulas of the tests' own."""

from __future__ import annotations

import json
from math import inf

import pytest
from certificate_checker import count_choices, find_optimum, fits, is_allowed, recompute
from joint_oracle import wished_problem
from joint_problems import random_problem, rich_problem
from msgspec import json as codec
from msgspec.structs import replace

from fxpart.schedule.weight_modes import STASH
from fxpart.solver.archive import encode
from fxpart.solver.joint.objective import evaluate
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointProblem

MOST = 6000  # choices that are enumerated
MAKERS = (random_problem, wished_problem, rich_problem)


def check(problem: JointProblem) -> bool:
    """Compare the solution and its certificate with own formulas; return whether one fits."""
    raw = json.loads(encode(problem))
    found, best = solve(problem, time_limit=600), find_optimum(raw)
    assert found.bound <= best * (1 + 1e-9)
    assert (found.choice is None) == (best == inf)
    if found.choice is None:
        return False
    choice = json.loads(codec.encode(found.choice))
    again = recompute(raw, choice)
    assert again is not None and is_allowed(raw, choice) and fits(raw, choice, again[1])
    assert found.objective == pytest.approx(again[0], rel=1e-12)
    assert again[1] == [s.memory.total for s in evaluate(problem, found.choice).stages]
    assert found.status != "optimal" or found.objective == pytest.approx(best, rel=2e-6)
    return True


def check_seeds(seeds: range) -> None:
    """Check one problem of each kind for each seed, if it is small."""
    fitting = []
    for seed in seeds:
        for make in MAKERS:
            problem = replace(make(seed), weights=STASH)
            if count_choices(json.loads(encode(problem))) <= MOST:
                fitting.append(check(problem))
    assert 0.3 * len(fitting) < sum(fitting) < 0.95 * len(fitting)


@pytest.mark.slow
def test_certificates_of_small_problems() -> None:
    check_seeds(range(12))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("start", range(1000, 1600, 100))
def test_a_thousand_certificates(start: int) -> None:
    """Three kinds of problems, of which about three in five are small enough."""
    check_seeds(range(start, start + 100))
