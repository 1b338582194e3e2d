"""Random models x random valid splits, trained by the runtime: plan, schedule, numbers."""

from __future__ import annotations

from typing import Any

import pytest
from fxpart.passes import all_passes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import RandomModel, Step, random_models, random_starts
from stage_runs import captured_of, prepared

from fxpart.api import Program
from fxpart.capture.captured_model import CapturedModel
from fxpart.capture.fingerprint import fingerprint
from fxpart.cluster.model import Cluster
from fxpart.codegen.generated_program import StagedGraph
from fxpart.codegen.module_emitter import emit
from fxpart.codegen.stage_split import split
from fxpart.compiler import BLOCKS_KEY, NO_CUT_KEY, PassManager
from fxpart.plan.model import Plan, PlanInput, PlanModel
from fxpart.planner.plan_builder import make_plan
from fxpart.planner.request import make_request
from fxpart.pricing.partition import price
from fxpart.program.edges import find_stage_edges, is_gradient_order_exact
from fxpart.runtime.gradients.tied_parameters import is_tied_gradient_order_exact
from fxpart.schedule.make import make
from fxpart.schedule.verify import check
from fxpart.solver.objective import evaluate
from fxpart.solver.problem import PartitionChoice, Solution
from fxpart.verification.comparison import verify

FEW = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(FEW, max_examples=40)


def programmed(data: Any, model: RandomModel) -> Program:
    """The model cut at random valid places, under a random schedule, with its plan."""

    def choose(blocks: int, closed: Any) -> tuple[list[int], str, int]:
        starts = data.draw(random_starts(blocks, closed))
        return starts, data.draw(st.sampled_from(["1f1b", "gpipe"])), data.draw(st.integers(1, 4))

    return cut_at(model, choose)


def cut_at(model: RandomModel, choose: Any) -> Program:
    """The model under the starts, schedule and microbatches that ``choose`` gives."""
    captured = captured_of(model.build(), model.batch(), batch_size=4, batch_dims={"mask": None})
    graph = prepared(captured)
    starts, schedule, microbatches = choose(len(graph.meta[BLOCKS_KEY]), graph.meta[NO_CUT_KEY])
    cluster = Cluster.local(len(starts))
    problem, provenance = price(
        graph, captured, cluster, batch_size=4, microbatches=microbatches,
        schedules=("1f1b", "gpipe"), max_stages=len(starts),
    )  # fmt: skip
    choice = PartitionChoice(variant=0, schedule=schedule, starts=tuple(starts))
    cost = evaluate(problem, choice).seconds
    solution = Solution(
        status="best found", choice=choice, objective=cost, bound=0.0, solver="random"
    )
    listed = ",".join(map(str, starts))
    assigned = PassManager(all_passes()).run(f'assign{{starts="{listed}"}}', graph)
    spec, stages = split(assigned, captured, 5)
    plan = make_plan(
        info(captured, graph), cluster, spec,
        make(schedule, range(len(starts)), microbatches, find_stage_edges(spec)),
        problem, solution,
        batch_size=4, optimizer="adamw", provenance=provenance, constraints={},
    )  # fmt: skip
    sources = tuple(emit(stage) for stage in stages)
    request = make_request(cluster, None, "auto", {}, 5)
    whole = StagedGraph(captured, graph, tuple(starts), (), 1)
    return Program(plan, spec, sources, captured, graph, whole, request)


def info(captured: CapturedModel, graph: Any) -> PlanModel:
    return PlanModel(
        name="random", fingerprint=fingerprint(graph), capture=captured.method,
        batch="symbolic" if captured.symbolic else "fixed",
        nodes=len(graph.graph.nodes), blocks=len(graph.meta[BLOCKS_KEY]),
        parameters=0, parameter_bytes=0,
        inputs=tuple(
            PlanInput(name=i.name, dtype=i.dtype, shape=i.shape, batch_dim=i.batch_dim)
            for i in captured.inputs
        ),
    )  # fmt: skip


def hold(program: Program) -> None:
    """The plan is valid and round-trips, the schedule is safe, the numbers are one process's."""
    plan = program.plan
    assert plan.problems() == ()
    assert Plan.loads(plan.dumps()) == plan
    assert check(program.schedule(), find_stage_edges(program.spec)) == ()
    found = verify(program, steps=2)
    assert found.passed, found
    assert found.exact == (
        is_gradient_order_exact(program.spec) and is_tied_gradient_order_exact(program.spec)
    )


@pytest.mark.slow
@FEW
@given(random_models(longest=6), st.data())
def test_random_programs(model: RandomModel, data: Any) -> None:
    hold(programmed(data, model))


@pytest.mark.slow
def test_owner_of_a_tie_without_gradients_of_its_own() -> None:
    """Found by search: no path from the owner's stage to the loss, so it has no backward."""
    steps = (
        Step("add", 1, 1), Step("tied", 2, 0), Step("batch_norm", 3, 3), Step("relu", 2, 2),
        Step("mul", 5, 0),
    )  # fmt: skip
    model = RandomModel(steps, outputs=(4,), exact=False, seed=489)
    program = cut_at(model, lambda blocks, closed: ([0, 1], "1f1b", 2))
    assert not any(value.requires_grad for value in program.spec.stages[0].outputs)
    assert program.spec.ties == {"layers.step1.weight": (0, 1)}
    hold(program)


@pytest.mark.slow
@MANY
@given(random_models(), st.data())
def test_more_random_programs(model: RandomModel, data: Any) -> None:
    hold(programmed(data, model))


@pytest.mark.slow
@settings(FEW, max_examples=8)
@given(random_models(exact=True), st.data())
def test_exact_models_are_equal_in_any_order(model: RandomModel, data: Any) -> None:
    """Where sums do not round, every program has to agree in the first step, chained or not."""
    check_first_step(programmed(data, model))


@pytest.mark.slow
@settings(FEW, max_examples=20)
@given(random_models(exact=True), st.data())
def test_more_exact_models(model: RandomModel, data: Any) -> None:
    check_first_step(programmed(data, model))


def check_first_step(program: Program) -> None:
    """Assert that every gradient of the first step is that of one process in every bit."""
    found = verify(program, steps=1)
    assert all(row.gradient == 0.0 for row in found.differences), found
