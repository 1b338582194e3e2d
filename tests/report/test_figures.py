"""Every number of an explanation, recomputed: from the plan's JSON, and from the costed problem."""

from __future__ import annotations

import json
from math import fsum
from typing import Any

import joint_plans
import joint_problems
import msgspec
import pytest
import sample_plans
from figures_by_hand import recomputed
from figures_in_text import agree, check_text

from fxpart.plan.model import HostLoad, Plan
from fxpart.planner.prediction.plan_timeline import plan_timeline
from fxpart.report.explanation_builder import explanation
from fxpart.report.explanation_text import explain
from fxpart.solver.joint.objective import evaluate
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointChoice, JointProblem

SEEDS = [s for s in range(60) if joint_plans.solved(s) is not None]


def mixed() -> Plan:
    """A plan of a 40-layer model on two types of devices."""
    problem = joint_problems.transformer(40, [32, 32], hidden=4096, batch=256)
    return joint_plans.plan_of(problem, solve(problem, time_limit=5.0), turns=False)


def crowded_plan() -> Plan:
    """Six ranks that share two hosts, with seconds of the runtime's own."""
    plan = sample_plans.plan(6, 5)
    given = plan.prediction
    ranks = tuple(msgspec.structs.replace(e, overhead_seconds=0.003) for e in given.ranks)
    hosts = (
        HostLoad(ranks=(0, 1, 2, 5), slowdown=(1.0, 1.2, 1.9), transfer=0.25, full=8),
        HostLoad(ranks=(3, 4), slowdown=(1.0, 1.5)),
    )
    prediction = msgspec.structs.replace(
        given, ranks=ranks, hosts=hosts, step_seconds=given.step_seconds + 0.003
    )
    return msgspec.structs.replace(plan, prediction=prediction)


def queued_plan() -> Plan:
    """One copy that takes microbatches from a queue and has no tied weights."""
    plan = sample_plans.plan(1, 1)
    ranks = tuple(msgspec.structs.replace(e, tie_seconds=0.0) for e in plan.prediction.ranks)
    given, tie = plan.prediction, plan.prediction.ranks[0].tie_seconds
    prediction = msgspec.structs.replace(
        given,
        ranks=ranks,
        step_seconds=given.step_seconds - tie,
        simulated_seconds=given.simulated_seconds - tie,
    )
    return msgspec.structs.replace(plan, prediction=prediction, staleness=(0,))


PLANS: dict[str, Any] = {
    "sample": sample_plans.plan,
    "slow": lambda: sample_plans.plan(slow=2.0),
    "one": lambda: sample_plans.plan(1, 1),
    "many": lambda: sample_plans.plan(40, 3),
    "mixed": mixed,
    "crowded": lambda: crowded_plan(),
    "queued": lambda: queued_plan(),
    **{f"random {seed}": lambda seed=seed: joint_plans.solved(seed)[2] for seed in SEEDS[:24]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_json_from_the_plan_file(name: str) -> None:
    plan = PLANS[name]()
    found = json.loads(msgspec.json.encode(explanation(plan)))
    agree(found, recomputed(json.loads(plan.dumps())))
    assert fsum(v for k, v in found["step"]["parts"].items() if k != "stage") == pytest.approx(
        plan.prediction.step_seconds, rel=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_text_from_the_plan_file(name: str) -> None:
    plan = PLANS[name]()
    check_text(explain(plan), plan, recomputed(json.loads(plan.dumps())))


def choice_of(problem: JointProblem, plan: Plan) -> JointChoice:
    """The plan's decisions as a choice of the problem beside it."""
    options = []
    for stage in plan.stages:
        found = [
            index
            for index, option in enumerate(problem.options)
            if (problem.pools[option.pool].name, option.data, option.zero, option.recompute)
            == (stage.device, stage.data_parallel, stage.zero, stage.recompute)
            and problem.layouts[option.layout].tensor == stage.tensor_parallel
            and problem.layouts[option.layout].expert == stage.expert_parallel
        ]
        options.append(found[0])
    return JointChoice(
        microbatches=plan.microbatches, schedule=plan.schedule, options=tuple(options),
        starts=tuple(sorted(first for s in plan.stages for first, _ in s.spans)),
        virtual=plan.virtual,
    )  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_from_the_costed_problem(seed: int) -> None:
    case = joint_plans.solved(seed)
    assert case is not None
    problem, solution, plan = case
    found = evaluate(problem, choice_of(problem, plan))
    shown = explanation(plan)
    assert (
        found.feasible
        and shown.step.closed_form_seconds == found.seconds == plan.certificate.objective
    )
    for one, stage in zip(shown.by_stage, found.stages, strict=True):
        for mine, theirs in (("collective", "collective"), ("sync", "reduce"), ("tie", "tie"),
                             ("gather", "gather"), ("transfer", "transfer"), ("forward", "forward"),
                             ("backward", "backward"), ("optimizer", "optimizer")):  # fmt: skip
            assert getattr(one, f"{mine}_seconds") == getattr(stage, f"{theirs}_seconds")
        assert one.microbatch_seconds == pytest.approx(stage.seconds)
        assert one.step_only_seconds == pytest.approx(stage.step_only_seconds)
        assert one.total == stage.memory.total and one.limit == stage.memory_limit
        assert one.in_flight == stage.in_flight
    others = [c for c in solution.candidates if c != solution.choice]
    for row, other in zip(shown.rejected, others, strict=False):
        again = evaluate(problem, other)
        assert (row.closed_form_seconds or row.unfit_seconds) == again.seconds
        assert (row.closed_form_seconds is not None) == again.feasible
        assert (row.stages, row.microbatches) == (len(other.options), other.microbatches)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_schedule_in_time(seed: int) -> None:
    case = joint_plans.solved(seed)
    assert case is not None
    _, _, plan = case
    given = plan.prediction
    if given.method == "closed form":
        assert plan.schedule not in ("gpipe", "1f1b")
        assert given.simulated_seconds == given.step_seconds
        return
    timeline = plan_timeline(plan)
    last = max(span.end for span in timeline.spans if span.track == "compute")
    once = max(e.sync_seconds + e.tie_seconds + e.optimizer_seconds for e in given.ranks)
    assert given.simulated_seconds == pytest.approx(last + once, rel=1e-12)
    assert timeline.step_seconds == pytest.approx(given.simulated_seconds, rel=1e-12)
