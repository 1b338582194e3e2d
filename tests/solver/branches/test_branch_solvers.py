"""Solvers of graphs of stages agree with enumeration, and find what is known of branches."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from branch_problems import branches_and_trunk, random_branches
from oracles.stage_graph_brute import solve_brute

from fxpart.errors import FxpartError
from fxpart.solver.objective import evaluate as evaluate_chain
from fxpart.solver.portfolio import solve
from fxpart.solver.stage_graph.block_graph import BlockGraph, regroup
from fxpart.solver.stage_graph.coarsen import coarsen_blocks
from fxpart.solver.stage_graph.objective import convert_chain_choice, evaluate
from fxpart.solver.stage_graph.portfolio import accepts, branch_bound, solve_branches
from fxpart.solver.stage_graph.search import improve
from fxpart.solver.stage_graph.series_parallel import series_parallel
from fxpart.solver.stage_graph.stage_graph_ilp import solve_depth_model
from fxpart.solver.stage_graph.stage_partition import (
    choose_stage_partition,
    in_order,
    iterate_stage_counts,
)
from fxpart.solver.stage_graph.tables import StageGraphTables
from fxpart.solver.stage_graph.topological_orders import list_topological_orders
from fxpart.solver.work import work_seconds

BRANCHING = [s for s in range(520) if accepts(random_branches(s)) is None]


def later(seconds: float = 60.0) -> float:
    return work_seconds() + seconds


def test_there_are_many_random_cases() -> None:
    assert len(BRANCHING) >= 160


@pytest.mark.slow
@pytest.mark.parametrize("tens", range((len(BRANCHING) + 9) // 10))
def test_the_best_of_all(tens: int) -> None:
    """The objective is the least of all choices, and the bound is not above it."""
    for seed in BRANCHING[tens * 10 : tens * 10 + 10]:
        problem = random_branches(seed)
        least, _ = solve_brute(problem)
        found = solve_branches(problem)
        if least == inf:
            assert found is None, seed
            continue
        assert found is not None, seed
        assert found.objective == pytest.approx(least, rel=1e-6), seed
        assert least * (1 - 1e-5) <= found.bound <= least, seed
        assert evaluate(problem, found.choice).seconds == found.objective, seed
        assert evaluate(problem, found.choice).feasible, seed
        assert found.status == "optimal", seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", BRANCHING[:60])
def test_no_bound_is_above_the_optimum(seed: int) -> None:
    problem = random_branches(seed)
    graph = BlockGraph.of(problem)
    for variant in range(len(problem.variants)):
        one = msgspec.structs.replace(problem, variants=(problem.variants[variant],))
        least, _ = solve_brute(one)
        assert branch_bound(one, 0, graph) <= least


@pytest.mark.slow
def test_every_kind_has_its_best_graph() -> None:
    """Each number of stages and microbatches is its own search; what is proven stays of all."""
    tried = 0
    for seed in BRANCHING[:80]:
        problem = random_branches(seed)
        made = choose_stage_partition(problem, solve(problem))
        if not made.over:
            continue
        first, *rest = iterate_stage_counts(made, time_limit=60.0)
        assert first is made
        assert made.solution.choice is not None
        seen = {(len(made.solution.choice.starts), made.solution.choice.variant)}
        for one in rest:
            choice, evaluation = one.solution.choice, one.evaluation
            assert choice is not None and evaluation is not None and evaluation.feasible
            count = len(choice.starts)
            assert (count, choice.variant) not in seen
            seen.add((count, choice.variant))
            assert (one.solution.bound, one.over) == (made.solution.bound, made.over)
            assert one.solution.objective == evaluation.seconds >= made.solution.objective
            alone = msgspec.structs.replace(
                problem, min_stages=count, max_stages=count,
                variants=(problem.variants[choice.variant],),
            )  # fmt: skip
            assert evaluation.seconds == pytest.approx(solve_brute(alone)[0], rel=1e-6)
            assert sorted(one.problem.blocks) == sorted(problem.blocks)
            assert len(one.problem.variants) == len(problem.variants)
            tried += 1
    assert tried > 20


@pytest.mark.slow
def test_kinds_end_with_the_time() -> None:
    made = next(
        one
        for s in BRANCHING
        if (one := choose_stage_partition(p := random_branches(s), solve(p))).over
    )  # fmt: skip
    assert list(iterate_stage_counts(made, time_limit=0.0)) == [made]


@pytest.mark.slow
@pytest.mark.parametrize("seed", BRANCHING[:30])
def test_cp_sat_without_a_hint(seed: int) -> None:
    problem = msgspec.structs.replace(random_branches(seed), no_cut_after=())
    schedule = problem.schedules[0]
    one = msgspec.structs.replace(problem, variants=problem.variants[:1], schedules=(schedule,))
    least, _ = solve_brute(one)
    tables = StageGraphTables(one, 0, schedule, BlockGraph.of(one))
    found = solve_depth_model(tables, None, best=inf, seconds=60, effort=60, seed=0)
    if least == inf:
        assert found.stages is None and found.bound == inf
    else:
        assert found.stages is not None
        over, seconds = tables.judge(found.stages)
        assert over == 0 and seconds == pytest.approx(least, rel=1e-6)
        assert found.bound <= least


@pytest.mark.slow
@pytest.mark.parametrize("seed", BRANCHING[:40])
def test_heuristics_make_stages(seed: int) -> None:
    """Series-parallel parts and small moves give acyclic stages of all blocks, never better."""
    problem = msgspec.structs.replace(random_branches(seed), no_cut_after=(), min_stages=1)
    schedule = problem.schedules[0]
    one = msgspec.structs.replace(problem, variants=problem.variants[:1], schedules=(schedule,))
    least, _ = solve_brute(one)
    tables = StageGraphTables(one, 0, schedule, BlockGraph.of(one))
    whole = [(1 << len(one.blocks)) - 1]
    for stages in [*series_parallel(tables, later()), whole]:
        start = tables.judge(stages)
        better = improve(tables, stages, moves=200, seed=0, deadline=later())
        for made in (stages, better):
            found = evaluate(one, tables.choice(made))
            assert not found.feasible or found.seconds >= least * (1 - 1e-9)
            if not start[0]:
                assert tables.judge(better) <= start


WORKED = [  # microbatches, memory, chain, branches: solver notes, section E
    (4, 10**9, 26, 14),
    (8, 10**9, 34, 22),
    (64, 10**9, 146, 134),
    (8, 8, 62, 22),
    (64, 8, 524, 134),
]


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "memory", "chain", "wanted"), WORKED)
def test_four_branches_and_a_trunk(
    microbatches: int, memory: int, chain: float, wanted: float
) -> None:
    problem = branches_and_trunk(4, 4, 4, stages=10, microbatches=microbatches, memory=memory)
    sequential = solve(problem)
    assert sequential.objective == chain
    found = solve_branches(problem, sequential.choice)
    assert found is not None
    assert (found.objective, found.status) == (wanted, "optimal")


@pytest.mark.slow
def test_eight_branches_and_a_trunk() -> None:
    """Stages that hold pieces of two branches: only CP-SAT finds 138, and proves it."""
    problem = branches_and_trunk(8, 3, 8, stages=16, microbatches=64)
    sequential = solve(problem)
    assert sequential.objective == 158
    found = solve_branches(problem, sequential.choice, time_limit=300)
    assert found is not None
    assert (found.objective, found.status) == (138, "optimal")


def test_a_pure_chain_is_left_alone() -> None:
    problem = branches_and_trunk(1, 5, 5, stages=4, microbatches=8)
    assert accepts(problem) == "no two blocks could run in parallel"
    assert solve_branches(problem, solve(problem).choice) is None
    alone = branches_and_trunk(2, 1, 1, stages=1, microbatches=8)
    assert accepts(alone) == "there is only one stage"


def test_no_gain_is_none() -> None:
    """Two tiny branches that one stage holds best: the chain is as good."""
    problem = msgspec.structs.replace(
        branches_and_trunk(2, 1, 1, stages=2, microbatches=1), min_stages=1
    )
    chain = solve(problem)
    assert accepts(problem) is None
    found = solve_branches(problem, chain.choice)
    assert chain.objective == 3 and (found is None or found.objective < 3)
    heavy = msgspec.structs.replace(
        problem,
        devices=tuple(msgspec.structs.replace(d, latency=9.0 if i else 0.0)
                      for i, d in enumerate(problem.devices)),
    )  # fmt: skip
    assert solve_branches(heavy, solve(heavy).choice) is None


def test_branches_fit_where_no_chain_does() -> None:
    """A chain of five stages keeps four microbatches in flight on the first; branches two."""
    problem = msgspec.structs.replace(
        branches_and_trunk(4, 1, 1, stages=5, microbatches=8, memory=2), min_stages=5
    )
    assert solve(problem).choice is None
    found = solve_branches(problem)
    assert found is not None and found.objective == 9


@pytest.mark.slow
def test_many_blocks_are_merged_first() -> None:
    problem = branches_and_trunk(4, 20, 20, stages=10, microbatches=8)
    groups = coarsen_blocks(problem, 32)
    assert len(groups) == 32
    assert sorted(b for group in groups for b in group) == list(range(100))
    small = regroup(problem, groups)
    assert all(v.producer < min(v.consumers) for v in small.values)
    names = [{problem.blocks[b].split(".")[0] for b in group} for group in groups]
    assert all(len(name) == 1 for name in names), "no group mixes branches"
    found = solve_branches(problem, solve(problem).choice, time_limit=3)
    assert found is not None
    assert found.objective < solve(problem).objective
    assert found.bound <= found.objective


def test_a_wide_fan_is_merged_too() -> None:
    problem = branches_and_trunk(50, 1, 2, stages=4, microbatches=8)
    groups = coarsen_blocks(problem, 32)
    assert len(groups) == 32
    small = regroup(problem, groups)
    assert all(v.producer < min(v.consumers) for v in small.values)


def test_orders_are_topological_and_differ() -> None:
    problem = branches_and_trunk(3, 2, 2, stages=4, microbatches=8)
    (one,) = problem.variants
    seconds = ((1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 1.0, 1.0),)
    problem = msgspec.structs.replace(
        problem, variants=(msgspec.structs.replace(one, forward=seconds),)
    )
    graph = BlockGraph.of(problem)
    found = list_topological_orders(problem, graph)
    assert found[0] == tuple(range(8)) and len(found) == len(set(found)) >= 3
    for order in found:
        place = {b: i for i, b in enumerate(order)}
        assert sorted(order) == list(range(8))
        assert all(place[v.producer] < place[c] for v in problem.values for c in v.consumers)


def test_equal_problems_give_equal_answers() -> None:
    problem = branches_and_trunk(3, 3, 2, stages=5, microbatches=6, memory=9)
    assert solve_branches(problem) == solve_branches(problem)


@pytest.mark.slow
def test_a_choice_as_contiguous_stages() -> None:
    """In the order of its stages: the same stages, seconds a microbatch and bytes."""
    problem = branches_and_trunk(4, 4, 4, stages=10, microbatches=8, memory=8)
    found = solve_branches(problem)
    assert found is not None
    moved, solution = in_order(problem, found)
    assert [problem.blocks[b] for b in found.order] == list(moved.blocks)
    assert solution.choice is not None and solution.objective == found.objective
    same = evaluate(moved, convert_chain_choice(moved, solution.choice))
    assert same == evaluate(problem, found.choice)


@pytest.mark.slow
def test_plans_are_made_of_the_better_one() -> None:
    """A chain where nothing branches; graphs of stages in their order; nothing if nothing fits."""
    line = branches_and_trunk(1, 5, 5, stages=4, microbatches=8)
    chain = solve(line)
    assert chain.choice is not None
    made = choose_stage_partition(line, chain)
    assert (made.problem, made.solution, made.order) == (line, chain, ())
    assert made.evaluation == evaluate_chain(line, chain.choice)
    problem = branches_and_trunk(4, 4, 4, stages=10, microbatches=8, memory=8)
    found = solve_branches(problem, solve(problem).choice)
    assert found is not None
    made = choose_stage_partition(problem, solve(problem))
    assert made.evaluation == evaluate(problem, found.choice)
    assert made.solution.objective == made.evaluation.seconds == 22
    order = made.order or tuple(range(20))
    assert order == found.order and made.over == found.over
    assert list(made.problem.blocks) == [problem.blocks[b] for b in order]
    tight = branches_and_trunk(4, 4, 4, stages=10, microbatches=8, memory=1)
    none = choose_stage_partition(tight, solve(tight))
    assert none.solution.choice is None and none.evaluation is None


def test_arguments_are_checked() -> None:
    problem = branches_and_trunk(2, 1, 1, stages=2, microbatches=1)
    with pytest.raises(FxpartError) as caught:
        solve_branches(problem, time_limit=-1)
    assert caught.value.problems[0].code == "FXP109"
    broken = msgspec.structs.replace(problem, step=())
    with pytest.raises(FxpartError) as caught:
        solve_branches(broken)
    assert caught.value.problems[0].code == "FXP206"
