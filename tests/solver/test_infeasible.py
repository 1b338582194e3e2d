"""Explanations of infeasible problems: what they name is true, what they offer works."""

from __future__ import annotations

import re
from math import inf

import pytest
from msgspec.structs import replace
from oracles.partition_brute import choices, solve_brute
from partition_problems import random_problem, transformer

from fxpart.solver.infeasible import explain_infeasible
from fxpart.solver.objective import PartitionScorer, evaluate
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.remedies import (
    enough_stages,
    extra_memory,
    extrapolate_smaller_microbatches,
    with_memory,
    with_stages,
)


def infeasible(count: int) -> list[PartitionProblem]:
    """Random problems that no plan fits, though some split keeps all constraints but memory."""
    found, seed = list[PartitionProblem](), 0
    while len(found) < count:
        problem = random_problem(seed)
        if solve_brute(problem).choice is None and next(choices(problem), None) is not None:
            found.append(problem)
        seed += 1
    return found


def least_lacking(problem: PartitionProblem) -> int:
    """The bytes that each device lacks, at the split where the worst device lacks least."""
    scorer = PartitionScorer(problem)
    return min(
        max(s.needed - s.memory_limit for s in scorer.evaluate(c).stages) for c in choices(problem)
    )


@pytest.mark.slow
def test_the_memory_offered_is_the_least_that_is_enough() -> None:
    for problem in infeasible(15):
        more, choice = extra_memory(problem, inf)
        step = max(max(d.memory for d in problem.devices) // 1000, 1)
        assert evaluate(with_memory(problem, more), choice).feasible
        assert least_lacking(problem) <= more <= least_lacking(problem) + step


@pytest.mark.slow
def test_the_stages_offered_are_the_fewest_that_are_enough() -> None:
    offered = 0
    for problem in infeasible(15):
        stages = enough_stages(problem, inf)
        pieces = 1 + sum(b not in problem.no_cut_after for b in range(len(problem.blocks) - 1))
        for count in range(problem.max_stages + 1, pieces + 1):
            enough = solve_brute(with_stages(problem, count)).choice is not None
            assert enough == (stages is not None and count >= stages)
        offered += stages is not None
    assert offered > 1


def test_the_message_names_the_stage_the_parts_and_the_changes() -> None:
    problem = transformer(
        layers=6, hidden=512, devices=4, vocabulary=999, batch=8, sizes=(4,), memory=3 * 10**8
    )
    (found,) = explain_infeasible(problem, time_limit=60)
    assert found.code == "FXP204"
    _, choice = extra_memory(problem, inf)
    stages = evaluate(problem, choice).stages
    worst = max(stages, key=lambda s: s.memory.total)
    assert problem.devices[worst.device].name in found.where
    assert f"stage {worst.device} of {len(stages)}" in found.where
    assert f"{worst.memory.total / 2**20:.2f} MiB needed, 286.10 MiB available" in found.where
    assert "activations" in found.why
    assert "optimizer" in found.why
    first, *rest = found.fix.split("; or ")
    assert first.endswith("of memory on each device")
    assert any("microbatches of" in text for text in rest)


def test_what_the_optimizer_needs_for_a_moment_is_named() -> None:
    """Activations are gone by then, so that they are no cause."""
    problem = transformer(
        layers=6, hidden=512, devices=4, vocabulary=999, batch=8, sizes=(1,), memory=3 * 10**8
    )
    weights = tuple(replace(w, temporary=3 * 10**8) for w in problem.weights)
    (found,) = explain_infeasible(replace(problem, weights=weights), time_limit=60)
    assert found.code == "FXP204" and "the optimizer's temporaries 286.10 MiB" in found.why
    assert "activations" not in found.why
    lacking = re.match(r"([\d.]+) MiB", found.fix)
    assert lacking is not None and float(lacking[1]) > 286


def test_one_change_at_a_time_before_both() -> None:
    """Neither more devices nor smaller microbatches help alone here: both are offered together."""
    problem = transformer(layers=12, hidden=4096, devices=2, batch=64, sizes=(8, 16), memory=2**33)
    pieces = len(problem.blocks)
    assert solve_fits(with_stages(problem, pieces)) is False
    assert not any(
        solve_fits(replace(problem, variants=(v,)))
        for v in extrapolate_smaller_microbatches(problem)
    )
    (found,) = explain_infeasible(problem, time_limit=60)
    _, both = found.fix.split("; or ")
    count, size = int(both.split()[0]), int(both.split(" of ")[1].split()[0])
    variant = next(
        v for v in extrapolate_smaller_microbatches(problem) if v.microbatch_size == size
    )
    enough = replace(with_stages(problem, count), variants=(variant,))
    assert solve_fits(enough)
    assert not solve_fits(replace(with_stages(problem, count - 1), variants=(variant,)))


def solve_fits(problem: PartitionProblem) -> bool:
    return solve(problem, time_limit=60).choice is not None


def test_the_other_schedule_is_offered_where_it_helps() -> None:
    problem = transformer(layers=4, hidden=512, devices=4, batch=16, sizes=(1,), memory=2**29)
    problem = replace(problem, schedules=("gpipe",))
    assert not solve_fits(problem)
    assert solve_fits(replace(problem, schedules=("1f1b",)))
    (found,) = explain_infeasible(problem, time_limit=60)
    assert "the schedule 1f1b" in found.fix


def test_too_few_pieces() -> None:
    problem = transformer(layers=1, hidden=64, devices=4)
    problem = replace(problem, no_cut_after=(0, 1, 3), min_stages=3, max_stages=4)
    (found,) = explain_infeasible(problem)
    assert found.code == "FXP201"
    assert "2 pieces" in found.why
    assert "Request 2 stages or fewer" in found.fix


def test_a_problem_with_a_plan_wants_time_only() -> None:
    (found,) = explain_infeasible(random_problem(0))
    assert found.code == "FXP205"
    (found,) = explain_infeasible(transformer(layers=96, hidden=12288, devices=8), time_limit=0.0)
    assert found.code == "FXP205"


@pytest.mark.slow
def test_large_problems_are_explained_in_time() -> None:
    (found,) = explain_infeasible(transformer(layers=96, hidden=12288, devices=8))
    assert found.code == "FXP204"
    assert "7 more stages do not fit either" in found.where
    assert "devices like the last" in found.fix


def test_smaller_microbatches_lie_on_the_line() -> None:
    problem = transformer(layers=2, hidden=64, devices=2, batch=64, sizes=(8, 16))
    sizes = [(v.microbatch_size, v.microbatches) for v in extrapolate_smaller_microbatches(problem)]
    assert sizes == [(4, 16), (2, 32), (1, 64)]
    known = transformer(layers=2, hidden=64, devices=2, batch=64, sizes=(4, 2, 1)).variants
    for guess, true in zip(extrapolate_smaller_microbatches(problem), known, strict=True):
        assert guess.activation == true.activation
        assert guess.value_bytes == true.value_bytes
        assert guess.forward[0] == pytest.approx(true.forward[0])
    alone = replace(problem, variants=problem.variants[:1])
    assert [v.activation for v in extrapolate_smaller_microbatches(alone)] == [
        v.activation for v in extrapolate_smaller_microbatches(problem)
    ]
