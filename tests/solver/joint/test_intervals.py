"""Tables of intervals hold what the scorer says of each stage."""

from __future__ import annotations

import pytest
from joint_problems import random_problem, rich_problem, transformer
from oracles.joint_intervals import IntervalTables

from fxpart.solver.joint.problem import JointProblem
from fxpart.solver.schedule_costs import count_stage_in_flight


def agree(problem: JointProblem) -> int:
    """Compare each entry; how many there were."""
    tables, compared, n = IntervalTables(problem), 0, len(problem.blocks)
    for index, option in enumerate(problem.options):
        for m in problem.microbatches:
            costs, work = tables.costs(index, m), tables.scorer.work(option, m)
            assert (costs is None) == (work is None)
            if costs is None or work is None:
                continue
            for first in range(n):
                for last in range(first, n):
                    for schedule in problem.schedules:
                        for to_end, stages in ((1, 1), (3, 3), (1, 3)):
                            flying = count_stage_in_flight(schedule, m, stages, stages - to_end)
                            extra = 0
                            if schedule == "async":
                                extra = tables.scorer.copied.extra(m, to_end)
                            stage = tables.scorer.stage(
                                index, work, ((first, last),), m, flying, extra
                            )
                            at = first, last
                            assert costs.seconds[at] == pytest.approx(stage.seconds, rel=1e-12)
                            assert costs.once[at] == pytest.approx(
                                stage.step_only_seconds, rel=1e-12, abs=1e-15
                            )
                            memory = costs.sizes.memory(schedule, m, to_end, stages)[at]
                            assert memory == stage.memory.total
                            compared += 1
    return compared


@pytest.mark.slow
def test_every_entry_is_the_scorers() -> None:
    assert sum(agree(random_problem(seed)) for seed in range(60)) > 5000


def test_experts_too() -> None:
    problems = [rich_problem(seed) for seed in range(60)]
    with_experts = [p for p in problems if any(x.experts is not None for x in p.layouts)]
    assert len(with_experts) > 5
    assert sum(agree(problem) for problem in with_experts) > 500


@pytest.mark.slow
def test_a_transformer_of_two_pools() -> None:
    problem = transformer(3, (4, 2), batch=8, hidden=64, vocabulary=500, memory=10**9)
    assert agree(problem) > 1000
