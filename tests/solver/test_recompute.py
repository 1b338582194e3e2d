"""Recomputation in the partition problem: tables, search and certificate against enumeration."""

from __future__ import annotations

from itertools import product
from math import fsum, inf

import numpy as np
import pytest
from msgspec.structs import replace
from oracles.partition_brute import choices, solve_brute
from partition_problems import (
    filling,
    random_problem,
    transformer,
    with_random_recompute,
    with_zero_bubble,
)

from fxpart.solver.infeasible import explain_infeasible
from fxpart.solver.objective import PartitionScorer, StageCost, evaluate
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import PartitionProblem, without_recompute
from fxpart.solver.schedule_costs import count_stage_in_flight
from fxpart.solver.tables import PartitionTables

SEEDS = range(250)


def problem_of(seed: int) -> PartitionProblem:
    return with_random_recompute(with_zero_bubble(random_problem(seed, largest=6), seed), seed)


def enumerate_modes(problem: PartitionProblem) -> float:
    """Return the minimum step time over every choice and every mode of each stage."""
    scorers = [PartitionScorer(replace(problem, recompute=(mode,))) for mode in problem.recompute]
    best = inf
    for choice in choices(problem):
        variant, count = problem.variants[choice.variant], len(choice.starts)
        m, ends = variant.microbatches, (*choice.starts[1:], len(problem.blocks))
        rows: list[list[StageCost]] = []
        for k, (first, end) in enumerate(zip(choice.starts, ends, strict=True)):
            flying = count_stage_in_flight(choice.schedule, m, count, k)
            each = [
                scorer.stage(variant, k, first, end - 1, flying, split=choice.schedule == "zb-h1")
                for scorer in scorers
            ]
            rows.append([stage for stage in each if stage.needed <= stage.memory_limit])
        for stages in product(*rows):
            fill = filling(choice.schedule, m, count)
            longest = max((m - fill) * s.seconds + s.step_only_seconds for s in stages)
            best = min(best, fill * fsum(s.seconds for s in stages) + longest)
    return best


@pytest.mark.slow
def test_the_search_equals_enumeration_of_all_modes() -> None:
    used = set()
    for seed in SEEDS:
        problem = problem_of(seed)
        best = enumerate_modes(problem)
        found = solve(problem, time_limit=20)
        assert found.status == ("infeasible" if best == inf else "optimal"), seed
        assert found.objective == pytest.approx(best, rel=1e-9), seed
        assert found.bound <= best * (1 + 1e-12), seed
        assert solve_brute(problem).objective == pytest.approx(best, rel=1e-9)
        if found.choice is not None:
            used |= {stage.recompute for stage in evaluate(problem, found.choice).stages}
    assert used == {"none", "selective", "full"}


@pytest.mark.slow
def test_more_modes_are_never_slower() -> None:
    faster = 0
    for seed in SEEDS:
        problem = replace(problem_of(seed), recompute=("none", "selective", "full"))
        every, none = (solve(p).objective for p in (problem, without_recompute(problem)))
        assert every <= none * (1 + 1e-9)
        faster += every < none
    assert faster > 5


def test_tables_have_the_fastest_mode_that_fits() -> None:
    for seed in range(60):
        problem = problem_of(seed)
        tables, scorer = PartitionTables(problem), PartitionScorer(problem)
        for v, one in enumerate(problem.variants):
            table = tables.variant(v).stage(len(problem.devices) - 1)
            for flying in (1, 2, 4):
                modes = [np.where(t.flights < flying, inf, t.seconds) for t in table.modes]
                found = np.min(modes, axis=0)
                for i, w in np.ndindex(found.shape):
                    if i + w >= tables.units:
                        assert found[i, w] == inf
                        continue
                    first, last = int(tables.firsts[i]), int(tables.lasts[i + w])
                    stage = scorer.stage(one, len(problem.devices) - 1, first, last, flying)
                    fits = stage.needed <= stage.memory_limit
                    assert found[i, w] == pytest.approx(stage.seconds if fits else inf, rel=1e-12)


def test_bytes_and_seconds_of_a_stage_that_recomputes() -> None:
    problem = problem_of(3)
    full = replace(problem, recompute=("full",), values=problem.values)
    scorer, plain = PartitionScorer(full), PartitionScorer(without_recompute(problem))
    variant = problem.variants[0]
    (mode,) = [one for one in variant.recompute if one.mode == "full"]
    last = len(problem.blocks) - 1
    found, stored = (one.stage(variant, 0, 0, last, 2) for one in (scorer, plain))
    assert found.recompute == "full"
    assert found.memory.activations == 2 * sum(mode.activation) + max(mode.workspace)
    again = sum(mode.seconds[problem.devices[0].type])
    assert found.backward_seconds == pytest.approx(stored.backward_seconds + again)
    assert found.collective_seconds == pytest.approx(
        stored.collective_seconds + sum(mode.collective)
    )
    # sent values are among the activations
    sent = [v for v in problem.values if v.producer == 0 and not v.saved]
    first, before = (one.stage(variant, 0, 0, 0, 2) for one in (scorer, plain))
    bytes_ = [
        size * value.widened
        for size, value in zip(variant.value_bytes, problem.values, strict=True)
        if value in sent
    ]
    assert before.memory.transfers - first.memory.transfers == 2 * sum(bytes_)


def test_a_large_model_that_fits_only_with_recomputation() -> None:
    """Without recomputation nothing fits; with it, only the stages that must recompute do."""
    problem = transformer(layers=24, hidden=1024, devices=4, host=4, batch=64, sizes=(4, 8))
    variants = tuple(
        replace(
            one,
            recompute=(
                replace(
                    with_random_recompute(problem, 0).variants[0].recompute[1],
                    seconds=one.forward,
                    activation=tuple(size // 20 for size in one.activation),
                    workspace=tuple(
                        a + w for a, w in zip(one.activation, one.workspace, strict=True)
                    ),
                    collective=(),
                ),
            ),
        )
        for one in problem.variants
    )
    problem = replace(problem, variants=variants, recompute=("none", "full"))
    free = solve(problem)
    assert free.choice is not None
    assert {s.recompute for s in evaluate(problem, free.choice).stages} == {"none"}
    needed = max(s.needed for s in evaluate(problem, free.choice).stages)
    tight = replace(
        problem,
        devices=tuple(replace(d, memory=int(0.7 * needed)) for d in problem.devices),
    )
    found = solve(tight)
    assert found.status == "optimal" and found.choice is not None
    modes = [s.recompute for s in evaluate(tight, found.choice).stages]
    assert "full" in modes
    assert found.objective < solve(replace(tight, recompute=("full",))).objective
    plain = solve(without_recompute(tight))
    assert plain.objective > found.objective


@pytest.mark.slow
def test_cp_sat_finds_the_same_optimum() -> None:
    for seed in SEEDS[:40]:
        problem = problem_of(seed)
        found, other = solve(problem), solve(problem, solver="cp-sat", time_limit=60)
        assert other.status == found.status, seed
        assert other.objective == pytest.approx(found.objective, rel=1e-6), seed
        assert other.bound <= found.objective * (1 + 1e-9)


@pytest.mark.slow
def test_an_infeasible_problem_is_explained_by_the_smallest_mode() -> None:
    explained = 0
    for seed in SEEDS:
        problem = replace(problem_of(seed), recompute=("none", "selective", "full"))
        if solve(problem).choice is None and next(choices(problem), None) is not None:
            (why,) = explain_infeasible(problem)
            assert why.code == "FXP204"
            explained += 1
    assert explained > 5
