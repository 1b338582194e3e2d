"""The objective over graphs of stages: the chain's where stages form a chain, less elsewhere."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from branch_problems import branches_and_trunk, random_branches
from oracles.partition_brute import choices as chains
from oracles.stage_graph_brute import choices
from partition_problems import random_problem, transformer

from fxpart.errors import FxpartError
from fxpart.solver.objective import evaluate as evaluate_chain
from fxpart.solver.problem import BlockValue, PartitionProblem
from fxpart.solver.stage_graph.block_graph import BlockGraph, regroup
from fxpart.solver.stage_graph.objective import convert_chain_choice, evaluate
from fxpart.solver.stage_graph.problem import StageGraphChoice
from fxpart.solver.stage_graph.tables import StageGraphTables


def linked(problem: PartitionProblem) -> PartitionProblem:
    """The problem with a small value from each block to the next, so that stages form a chain."""
    n = len(problem.blocks)
    values = [BlockValue(producer=b, consumers=(b + 1,), gradient=True) for b in range(n - 1)]
    return msgspec.structs.replace(
        problem,
        values=(*problem.values, *values),
        variants=tuple(
            msgspec.structs.replace(v, value_bytes=(*v.value_bytes, *(1,) * (n - 1)))
            for v in problem.variants
        ),
    )


@pytest.mark.parametrize("seed", range(60))
def test_equals_the_chains_objective_on_chains(seed: int) -> None:
    problem = linked(random_problem(seed))
    for choice in chains(problem):
        assert evaluate(problem, convert_chain_choice(problem, choice)) == evaluate_chain(
            problem, choice
        )


def test_equals_the_chains_objective_on_a_transformer() -> None:
    problem = transformer(layers=12, hidden=768, devices=8)
    for variant in range(len(problem.variants)):
        starts = (0, 3, 7, 11, 12, 20, 22, 24)
        for choice in chains(problem):
            chosen = msgspec.structs.replace(choice, variant=variant, starts=starts)
            branched = evaluate(problem, convert_chain_choice(problem, chosen))
            assert branched == evaluate_chain(problem, chosen)
            break


@pytest.mark.parametrize("seed", range(60))
def test_a_chain_on_branches_costs_no_more_than_its_own_objective(seed: int) -> None:
    problem = random_branches(seed)
    for choice in chains(problem):
        chain = evaluate_chain(problem, choice)
        found = evaluate(problem, convert_chain_choice(problem, choice))
        assert found.seconds <= chain.seconds * (1 + 1e-12)
        assert found.feasible or not chain.feasible


def test_two_branches_side_by_side() -> None:
    """Two branches of one block each and a trunk: path 2, loads 1, depths 2, 2, 1."""
    problem = branches_and_trunk(2, 1, 1, stages=3, microbatches=5)
    found = evaluate(problem, StageGraphChoice(variant=0, schedule="1f1b", stage_of=(0, 1, 2)))
    assert found.seconds == 2 + 4
    assert [s.in_flight for s in found.stages] == [2, 2, 1]
    piped = evaluate(problem, StageGraphChoice(variant=0, schedule="gpipe", stage_of=(0, 1, 2)))
    assert piped.seconds == found.seconds
    assert [s.in_flight for s in piped.stages] == [5, 5, 5]


@pytest.mark.parametrize("seed", range(40))
def test_tables_agree_with_the_objective(seed: int) -> None:
    problem = random_branches(seed)
    graph = BlockGraph.of(problem)
    free = msgspec.structs.replace(problem, no_cut_after=())
    known: dict[tuple[int, str], StageGraphTables] = {}
    for count, choice in enumerate(choices(free)):
        if count % 7:
            continue
        tables = known.setdefault(
            (choice.variant, choice.schedule),
            StageGraphTables(problem, choice.variant, choice.schedule, graph),
        )
        stages = [0] * choice.stages
        for block, k in enumerate(choice.stage_of):
            stages[k] |= 1 << block
        over, seconds = tables.judge(stages)
        found = evaluate(problem, choice)
        assert seconds == pytest.approx(found.seconds, rel=1e-12)
        assert (over > 0) == any(s.needed > s.memory_limit for s in found.stages)
        assert tables.choice(stages) == choice
        again = tables.sorted(stages)
        assert again is not None and sorted(again) == sorted(stages)


@pytest.mark.parametrize("seed", range(40))
def test_merged_blocks_cost_what_their_blocks_cost(seed: int) -> None:
    """Groups, and the same problem in another order, are judged alike."""
    problem = msgspec.structs.replace(random_branches(seed), no_cut_after=())
    for count, choice in enumerate(choices(problem)):
        if count % 11:
            continue
        whole = [[b for b in choice.order if choice.stage_of[b] == k] for k in range(choice.stages)]
        merged = regroup(problem, whole)
        same = StageGraphChoice(
            variant=choice.variant,
            schedule=choice.schedule,
            stage_of=tuple(range(choice.stages)),
        )
        found, wanted = evaluate(merged, same), evaluate(problem, choice)
        assert found.seconds == pytest.approx(wanted.seconds, rel=1e-12)
        for a, b in zip(found.stages, wanted.stages, strict=True):
            assert a.memory == b.memory


def test_order_and_starts_say_the_same_as_the_stages() -> None:
    choice = StageGraphChoice(variant=0, schedule="1f1b", stage_of=(1, 0, 1, 2, 0))
    assert choice.order == (1, 4, 0, 2, 3)
    assert choice.starts == (0, 2, 4)
    for k, (a, z) in enumerate(pairwise((*choice.starts, 5))):
        assert {choice.stage_of[b] for b in choice.order[a:z]} == {k}


@pytest.mark.parametrize(
    "stage_of", [(0, 0), (0, 2, 2), (1, 0, 1), (0, 1, 0), (0, 1, 2, 3)], ids=str
)
def test_a_choice_of_another_problem_is_refused(stage_of: tuple[int, ...]) -> None:
    """Too few blocks, a gap, values that flow back, more stages than devices."""
    problem = branches_and_trunk(1, 2, 1, stages=2, microbatches=2)
    with pytest.raises(FxpartError) as caught:
        evaluate(problem, StageGraphChoice(variant=0, schedule="1f1b", stage_of=stage_of))
    assert caught.value.problems[0].code == "FXP109"


def test_faults_are_told() -> None:
    problem = msgspec.structs.replace(
        branches_and_trunk(2, 1, 1, stages=3, microbatches=4, memory=1),
        no_cut_after=(0,),
        min_stages=2,
        max_stages=2,
        schedules=("gpipe",),
    )
    found = evaluate(problem, StageGraphChoice(variant=0, schedule="1f1b", stage_of=(0, 1, 2)))
    assert len(found.faults) == 3 + 2  # stages, schedule, the cut; two stages of depth 2
