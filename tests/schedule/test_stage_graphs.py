"""1F1B on parallel branches: safe, no more in flight than the depth, and as fast as predicted."""

from __future__ import annotations

import pytest
from branch_problems import branches_and_trunk
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import stage_graphs

from fxpart.schedule.action import StageEdge
from fxpart.schedule.builders import one_f_one_b
from fxpart.schedule.dependence import chain, depths
from fxpart.schedule.in_flight import count_in_flight
from fxpart.schedule.lower import lower
from fxpart.schedule.make import make
from fxpart.schedule.simulate import simulate
from fxpart.schedule.verify import verify
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.stage_graph.objective import evaluate, stage_edges
from fxpart.solver.stage_graph.portfolio import solve_branches
from fxpart.solver.stage_graph.problem import StageGraphChoice


def edges_of(problem: PartitionProblem, choice: StageGraphChoice) -> tuple[StageEdge, ...]:
    """The choice's stage graph."""
    later = stage_edges(problem, choice.stage_of)
    return tuple(StageEdge(p, q) for p, found in enumerate(later) for q in sorted(found))


def simulated(problem: PartitionProblem, choice: StageGraphChoice) -> float:
    """Seconds of the schedule that runs the choice; its in-flight counts are those evaluated."""
    found = evaluate(problem, choice)
    edges = edges_of(problem, choice)
    m = problem.variants[choice.variant].microbatches
    schedule = make(choice.schedule, range(choice.stages), m, edges)
    assert count_in_flight(schedule) == tuple(stage.in_flight for stage in found.stages)
    forward = [stage.forward_seconds for stage in found.stages]
    backward = [stage.backward_seconds for stage in found.stages]
    return simulate(schedule, edges, forward, backward).step_seconds


@pytest.mark.slow
@given(st.data(), st.integers(1, 8), st.integers(1, 9))
def test_any_stage_graph_is_safe_and_keeps_its_depth_in_flight(
    data: st.DataObject, stages: int, microbatches: int
) -> None:
    edges = data.draw(stage_graphs(stages))
    deep = depths(stages, edges)
    built = one_f_one_b(stages, microbatches, edges)
    lowered = lower(built, edges)
    verify(lowered, edges, memory=[min(microbatches, depth) for depth in deep])
    assert count_in_flight(lowered) == tuple(min(microbatches, depth) for depth in deep)


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_a_chain_given_as_a_graph_is_scheduled_as_ever(stages: int, microbatches: int) -> None:
    plain = one_f_one_b(stages, microbatches)
    assert one_f_one_b(stages, microbatches, chain(stages)) == plain
    skips = [StageEdge(a, b) for a in range(stages) for b in range(a + 1, stages)]
    assert one_f_one_b(stages, microbatches, skips) == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatches", "memory", "wanted"),
    [(4, 10**9, 14), (8, 10**9, 22), (64, 10**9, 134), (8, 8, 22), (64, 8, 134)],
)
def test_four_branches_take_what_was_predicted(
    microbatches: int, memory: int, wanted: float
) -> None:
    """Solver notes, section E: the objective is met exactly, and memory is what 8 bytes hold."""
    problem = branches_and_trunk(
        4, 4, 4, stages=10, microbatches=microbatches, memory=memory, backward=2 / 3
    )
    found = solve_branches(problem)
    assert found is not None and found.objective == pytest.approx(wanted)
    assert simulated(problem, found.choice) == pytest.approx(wanted)


@pytest.mark.slow
def test_eight_branches_take_what_was_predicted() -> None:
    """138 with stages that hold pieces of two branches (four such pairs, then the trunk)."""
    stage_of = [0] * 32
    for pair in range(4):
        one, other = 6 * pair, 6 * pair + 3
        for block, stage in ((one, 0), (one + 1, 0), (other, 1), (other + 1, 1)):
            stage_of[block] = 3 * pair + stage
        stage_of[one + 2] = stage_of[other + 2] = 3 * pair + 2
    for i in range(8):
        stage_of[24 + i] = 12 + i // 2
    problem = branches_and_trunk(8, 3, 8, stages=16, microbatches=64, backward=2 / 3)
    choice = StageGraphChoice(variant=0, schedule="1f1b", stage_of=tuple(stage_of))
    assert evaluate(problem, choice).seconds == pytest.approx(138)
    assert simulated(problem, choice) == pytest.approx(138)


@pytest.mark.slow
@given(st.data())
def test_balanced_stages_take_what_was_predicted(data: st.DataObject) -> None:
    """Any branches of whole stages into a trunk of stages, all of one length, branches unequal."""
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    trunk, m = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    edges, ends, count = [], [], 0
    for length in lengths:
        edges += [StageEdge(k, k + 1) for k in range(count, count + length - 1)]
        count += length
        ends.append(count - 1)
    edges += [StageEdge(end, count) for end in ends]
    edges += [StageEdge(k, k + 1) for k in range(count, count + trunk - 1)]
    schedule = make("1f1b", range(count + trunk), m, edges)
    step = simulate(schedule, edges, [1.0] * (count + trunk), [2.0] * (count + trunk)).step_seconds
    assert step == 3 * (max(lengths) + trunk + m - 1)
