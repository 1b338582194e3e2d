"""The dynamic programme, CP-SAT and enumeration on the same random problems; bounds below them."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from oracles.partition_brute import choices, solve_brute
from partition_problems import random_problem, transformer, with_zero_bubble

from fxpart.solver.bounds import cheap_bound, cheap_bounds
from fxpart.solver.objective import evaluate
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import PartitionProblem, Solution

ROUNDING = 1e-9


def check(problem: PartitionProblem) -> Solution:
    """All three solvers on one problem; returns what enumeration finds."""
    best = solve_brute(problem)
    for solver, tolerance in (("dp", ROUNDING), ("cp-sat", 1e-6)):
        found = solve(problem, solver=solver, time_limit=60)
        if best.choice is None:
            assert (found.status, found.choice) == ("infeasible", None)
            continue
        assert found.status == "optimal", solver
        assert found.choice is not None
        assert found.objective == evaluate(problem, found.choice).seconds
        assert evaluate(problem, found.choice).feasible
        assert found.objective == pytest.approx(best.objective, rel=tolerance, abs=0.0)
        assert found.bound <= best.objective * (1 + 1e-12)
    for v in range(len(problem.variants)):
        assert cheap_bound(problem, v) <= _least(problem, v) * (1 + 1e-12)
    return best


def _least(problem: PartitionProblem, variant: int) -> float:
    """The least step time of one variant, memory or not."""
    times = (evaluate(problem, c).seconds for c in choices(problem) if c.variant == variant)
    return min(times, default=inf)


@pytest.mark.slow
def test_forty_random_problems() -> None:
    best = [check(with_zero_bubble(random_problem(seed), seed)) for seed in range(40)]
    assert sum(b.choice is None for b in best) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("start", range(40, 540, 100))
def test_five_hundred_random_problems(start: int) -> None:
    best = [
        check(with_zero_bubble(random_problem(seed), seed)) for seed in range(start, start + 100)
    ]
    assert sum(b.choice is None for b in best) >= 2
    assert len({len(b.choice.starts) for b in best if b.choice is not None}) == 4


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(min_value=10_000, max_value=2**40), st.integers(min_value=4, max_value=10))
def test_dp_is_optimal_on_any_problem(seed: int, largest: int) -> None:
    problem = random_problem(seed, largest)
    best, found = solve_brute(problem), solve(problem, time_limit=60)
    assert (best.choice is None) == (found.choice is None)
    if best.choice is not None:
        assert found.objective == pytest.approx(best.objective, rel=ROUNDING, abs=0.0)
        assert found.bound <= best.objective * (1 + 1e-12)


@pytest.mark.slow
def test_many_unequal_devices_split_the_range_of_stages() -> None:
    """Up to seven stages on devices no two of which are alike, against enumeration."""
    for seed in range(10):
        small = random_problem(seed, 4)
        problem = transformer(
            layers=4, hidden=256, devices=7, host=2, kinds=3, noise=0.5, batch=8, sizes=(1, 2)
        )
        devices = tuple(
            replace(
                d,
                memory=10**9 + 10**7 * ((seed * 7 + k * 5) % 11),
                latency=d.latency * (1 + (seed + k) % 5),
            )
            for k, d in enumerate(problem.devices)
        )
        no_cut = tuple(b + 2 for b in small.no_cut_after)
        problem = replace(problem, devices=devices, no_cut_after=no_cut)
        best, found = solve_brute(problem), solve(problem, time_limit=60)
        assert found.status in ("optimal", "infeasible")
        assert found.objective == pytest.approx(best.objective, rel=ROUNDING)


def test_dp_equals_cp_sat_where_enumeration_cannot_follow() -> None:
    problem = transformer(
        layers=8, hidden=1024, devices=4, host=2, noise=0.3, batch=16, sizes=(1, 4), memory=2**32
    )
    found, other = solve(problem), solve(problem, solver="cp-sat", time_limit=60)
    assert (found.status, other.status) == ("optimal", "optimal")
    assert found.objective == pytest.approx(other.objective, rel=1e-6)
    assert other.bound <= found.objective


def test_both_cheap_bounds_are_met_where_they_can_be() -> None:
    """Equal blocks on equal devices without transfers: work over speed is the optimum."""
    problem = transformer(layers=6, hidden=64, devices=4)
    n, one = 8, problem.variants[0]
    free = tuple(replace(d, latency=0.0, inverse_bandwidth=0.0) for d in problem.devices)
    equal = replace(one, microbatches=5, forward=((1.0,) * n,), backward=((2.0,) * n,))
    equal = replace(equal, activation=(0,) * n, workspace=(0,) * n, value_bytes=())
    problem = replace(
        problem,
        blocks=problem.blocks[:n],
        devices=free,
        values=(),
        weights=(),
        variants=(equal,),
        step=((0.0,) * n,),
    )
    assert solve(problem).objective == 3.0 * n + 4 * 6.0
    assert cheap_bounds(problem, 0) == {"work over speed": 48.0, "largest unit": 36.0}
    whole = replace(problem, no_cut_after=tuple(range(n)))
    assert solve(whole).objective == cheap_bounds(whole, 0)["largest unit"] == 3.0 * n * 5
