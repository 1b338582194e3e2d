"""The last choice by simulated steps: constructed answers, whole stages, a model with a profile."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from fxpart.costmodels.profile_store import (
    Calibration,
    ContentionProfile,
    Profile,
    StageMeasurement,
    TimeQuartiles,
)
from fxpart.costmodels.roofline import Roofline
from msgspec.structs import replace
from oracles.partition_brute import choices
from partition_problems import random_problem

import fxpart
from fxpart.cluster.devices import Device
from fxpart.cluster.model import Cluster
from fxpart.codegen.generated_program import make_schedule
from fxpart.costs import DeviceKnowledge
from fxpart.plan.model import Certificate, Plan
from fxpart.planner.refinement import (
    FIRST,
    EvaluatedCandidate,
    RefinedEvaluation,
    certify_plan,
    keys_of,
    refine_evaluation,
    rerank,
    widen_solution,
)
from fxpart.pricing.non_op_costs import NonOpCosts
from fxpart.profiling.session import get_measurement_environment
from fxpart.program.edges import find_stage_edges
from fxpart.schedule.host_contention import HostContention
from fxpart.schedule.simulate import simulate
from fxpart.solver.objective import evaluate
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import (
    DeviceLimit,
    PartitionChoice,
    PartitionProblem,
    Solution,
    Variant,
    Weight,
)


def solved(seed: int) -> tuple[PartitionProblem, Solution] | None:
    problem = random_problem(seed)
    found = solve(problem)
    return None if len(found.candidates) < 3 else (problem, found)


def looked(seconds: float, evaluation: Any) -> EvaluatedCandidate:
    plan = SimpleNamespace(prediction=SimpleNamespace(expected_seconds=seconds))
    return EvaluatedCandidate(cast(Plan, plan), RefinedEvaluation(evaluation))


@pytest.mark.slow
def test_the_shortest_simulated_step_wins_whatever_the_closed_form_says() -> None:
    r, tried = random.Random(1), 0
    for seed in range(60):
        given = solved(seed)
        if given is None:
            continue
        problem, solution = given
        seconds = {choice: r.random() for choice in solution.candidates}
        found = rerank(problem, solution, lambda c, e, s=seconds: looked(s[c], e))
        best = min(seconds, key=lambda c: seconds[c])
        assert found.solution.choice == best == found.solution.candidates[0]
        assert found.solution.objective == evaluate(problem, best).seconds
        assert found.solution.bound == solution.bound <= found.solution.objective
        if best != solution.choice:
            tight = found.solution.bound >= found.solution.objective * (1 - 1e-6)
            assert (found.solution.status == "optimal") == tight
        tried += 1
    assert tried > 10


@pytest.mark.slow
def test_the_best_of_every_number_of_stages_is_compared() -> None:
    """Also where the closed form prefers the most stages; no kind of answer stands there twice."""
    tried = 0
    for seed in range(60):
        given = solved(seed)
        if given is None or given[0].min_stages == given[0].max_stages:
            continue
        problem, solution = given
        found = widen_solution(problem, solution, lambda busy: busy)
        kinds = [(len(c.starts), c.variant, c.schedule) for c in found.candidates]
        assert found.candidates[0] == found.choice == solution.choice
        assert len(set(kinds)) == len(kinds) and found.bound == solution.bound
        for stages in range(problem.min_stages, problem.max_stages + 1):
            alone = msgspec.structs.replace(problem, min_stages=stages, max_stages=stages)
            best = solve(alone)
            mine = [c for c in found.candidates if len(c.starts) == stages]
            assert bool(mine) == (best.choice is not None)
            kept = {(c.variant, c.schedule) for c in (*best.candidates, *solution.candidates)
                    if len(c.starts) == stages}  # fmt: skip
            each = 16 // (problem.max_stages - problem.min_stages + 1)
            assert len(mine) >= min(len(kept), each)
        tried += 1
    assert tried > 10


def test_of_equally_fast_answers_the_solvers_own_stays() -> None:
    problem, solution = next(found for s in range(60) if (found := solved(s)) is not None)
    found = rerank(problem, solution, lambda choice, e: looked(1.0, e))
    assert found.solution.choice == solution.choice
    assert found.solution.status == solution.status
    assert f"{len(found.found)} candidates" in found.describe()


def test_the_certificate_is_honest_about_the_gap() -> None:
    problem, solution = next(found for s in range(60) if (found := solved(s)) is not None)
    worst = solution.candidates[-1]
    found = rerank(problem, solution, lambda c, e: looked(0.0 if c == worst else 1.0, e))
    stub = Certificate(
        status="optimal", objective=0.0, lower_bound=0.0, gap=0.0, solver="dp", over=""
    )
    made = certify_plan(stub, found.solution)
    objective = evaluate(problem, worst).seconds
    assert made.objective == objective
    assert made.gap == pytest.approx((objective - solution.bound) / objective)


class Known(Roofline):
    """A measured model with some stages; everything takes half as long again when all compute."""

    def __init__(self, stages: dict[str, StageMeasurement]) -> None:
        super().__init__()
        object.__setattr__(self, "stages", stages)

    def knowledge(self, device: Device) -> DeviceKnowledge:
        curve = ContentionProfile(slowdown=(1.0, 1.5))
        return DeviceKnowledge(slowdown=1.5, contention=curve, stages=self.stages_of(device))

    def stages_of(self, device: Device) -> dict[str, StageMeasurement]:
        return self.stages


def once(seconds: float) -> TimeQuartiles:
    return TimeQuartiles(seconds, seconds, seconds, 5)


def stage_timing(forward: float, backward: float, optimizer: float) -> StageMeasurement:
    return StageMeasurement(
        forward=once(forward), backward=once(backward), optimizer=once(optimizer), rows=1
    )


def test_whole_stages_replace_sums_of_ops() -> None:
    for seed in range(80):
        problem = random_problem(seed)
        two = [c for c in choices(problem) if len(c.starts) == 2 and evaluate(problem, c).feasible]
        if two:
            break
    choice = two[0]
    count = problem.variants[choice.variant].microbatches
    before = evaluate(problem, choice)
    model = Known({"b": stage_timing(2.0, 5.0, 0.5), "b" + FIRST: stage_timing(2.0, 3.0, 0.5)})
    devices = [[device] for device in Cluster.local(2).devices]
    after = refine_evaluation(before, problem, choice, ["a", "b"], model, devices)
    assert after.whole == (1,)
    assert after.evaluation.stages[0] == before.stages[0]
    stage = after.evaluation.stages[1]
    share = 1 / count
    assert stage.forward_seconds == pytest.approx(1.5 * 2 + problem.action)
    assert stage.backward_seconds == pytest.approx(
        1.5 * (share * 3 + (1 - share) * 5) + problem.action
    )
    assert stage.optimizer_seconds == pytest.approx(0.75 + problem.once)
    assert stage.transfer_seconds == before.stages[1].transfer_seconds
    rows = after.evaluation.stages
    longest = max((count - 1) * s.seconds + s.step_only_seconds for s in rows)
    assert after.evaluation.seconds == pytest.approx(sum(s.seconds for s in rows) + longest)
    assert refine_evaluation(before, problem, choice, ["x", "y"], model, devices).whole == ()


class Unlike(Known):
    """Under a quota stages take so many times as long; nothing is known of another host."""

    def stages_of(self, device: Device) -> dict[str, StageMeasurement]:
        if device.host == "elsewhere":
            return {}
        times = 1.0 if device.share == 1 else 3.0
        return {
            key: stage_timing(
                *(times * t.seconds for t in (found.forward, found.backward, found.optimizer))
            )
            for key, found in self.stages.items()
        }


def test_of_a_stage_of_several_ranks_the_slowest_counts() -> None:
    """And what they exchange stays, as the update does: that may be of pieces."""
    variant = Variant(
        microbatch_size=1, microbatches=2, forward=((9.0,),), backward=((9.0,),), activation=(0,),
        workspace=(0,), value_bytes=(), collective=(0.5,),
    )  # fmt: skip
    device = DeviceLimit(name="x", type=0, memory=2**40, latency=0.0, inverse_bandwidth=0.0)
    problem = PartitionProblem(
        blocks=("all",), devices=(device,), values=(), weights=(), variants=(variant,),
        step=((4.0,),), max_stages=1,
    )  # fmt: skip
    choice = PartitionChoice(variant=0, schedule="1f1b", starts=(0,))
    a, b = Cluster.local(2).devices
    before = evaluate(problem, choice)
    timing = stage_timing(2.0, 5.0, 0.5)
    model = Unlike({"a": timing, "a" + FIRST: timing})
    held = replace(b, quota=0.5)
    for devices, times in (([a, b], 1.0), ([a, held], 3.0), ([held, a], 3.0)):
        found = refine_evaluation(before, problem, choice, ["a"], model, [devices])
        (stage,) = found.evaluation.stages
        assert found.whole == (0,)
        assert stage.forward_seconds == pytest.approx(1.5 * 2 * times + 0.25)
        assert stage.backward_seconds == pytest.approx(1.5 * 5 * times + 0.25)
        assert (stage.optimizer_seconds, stage.collective_seconds) == (4.0, 0.5)
    gone = replace(b, host="elsewhere")
    assert refine_evaluation(before, problem, choice, ["a"], model, [[a, gone]]).whole == ()


def test_an_update_that_was_timed_is_scaled_by_rows() -> None:
    """It was of two microbatches; how a plan merges its own is part of their backwards."""
    weights = (Weight(name="t", blocks=(0,), weight=2**44, gradient=2**30, optimizer=2**44,
                      sparse=True),)  # fmt: skip
    # Passes over rows: sorting 16, merging those of two microbatches 7, and four times reading and
    # writing weights and state, and reading the sum.
    whole, timed = 16 + 4 * 5, 16 + 7 + 4 * 5
    for m in (1, 2, 8):
        variant = Variant(
            microbatch_size=1, microbatches=m, forward=((1.0,),), backward=((1.0,),),
            activation=(0,), workspace=(0,), value_bytes=(),
        )  # fmt: skip
        device = DeviceLimit(name="x", type=0, memory=2**40, latency=0.0, inverse_bandwidth=0.0)
        problem = PartitionProblem(
            blocks=("tables",), devices=(device,), values=(), weights=weights, variants=(variant,),
            step=((0.0,),), max_stages=1,
        )  # fmt: skip
        choice = PartitionChoice(variant=0, schedule="1f1b", starts=(0,))
        devices = Cluster.local(1).devices
        model = Known({"a": stage_timing(2.0, 5.0, 0.5), "a" + FIRST: stage_timing(2.0, 5.0, 0.5)})
        before = evaluate(problem, choice)
        (found,) = refine_evaluation(
            before, problem, choice, ["a"], model, [devices]
        ).evaluation.stages  # fmt: skip
        own = NonOpCosts.of(model, devices[0])
        scaled = whole / timed * m / 2
        assert found.optimizer_seconds == pytest.approx(1.5 * 0.5 * scaled, rel=1e-3)
        assert found.backward_seconds == pytest.approx(1.5 * 5 + own.merging(weights, m))
        assert (own.merging(weights, m) > 0) == (m > 1)


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def compiled(cost_model: str | Path, **constraints: Any) -> fxpart.Program:
    torch.manual_seed(0)
    return fxpart.compile(
        Blocks(),
        "local:2",
        example_inputs=(torch.randn(8, 16), torch.randn(8, 16)),
        loss=torch.nn.functional.mse_loss,
        cost_model=cost_model,
        constraints={"mesh": "none", **constraints},
    )


@pytest.mark.slow
def test_a_profile_decides_and_compiling_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    """One stage is measured to be slow as a whole; then two stages are taken, and the reverse."""
    path = tmp_path / "model.profile"
    plain = compiled("roofline", stages=2)
    cluster = plain.plan.cluster
    before = torch.get_num_threads()
    torch.set_num_threads(int(cast(int, cluster.devices[0].threads)))
    place = get_measurement_environment(cluster.devices[0].model)
    torch.set_num_threads(before)
    info = plain.plan.model.fingerprint
    with Profile(path, create=True) as profile:
        profile.put("calibrations", place, {info: Calibration(factors={"matmul forward": 1.0})})
        profile.put("crowding", place, {info: ContentionProfile(slowdown=(1.0, 1.0))})
    first = compiled(path)
    assert first.plan.dumps() == compiled(path).plan.dumps()
    assert "simulated step" in first.plan.provenance["choice"]
    for slow in (1, 2):
        with Profile(path) as profile:
            for stages in (1, 2):
                profile.put("stages", place, whole(compiled(path, stages=stages), stages == slow))
        chosen = compiled(path).plan
        assert len(chosen.stages) == 3 - slow
        assert "every stage measured whole" in chosen.provenance["choice"]
        assert Plan.loads(chosen.dumps()) == chosen


def whole(program: fxpart.Program, slow: bool) -> dict[str, StageMeasurement]:
    """Timings of a program's stages at every size: 5 s of a stage, or next to nothing."""
    found = {}
    for rows in range(1, 9):
        keys = keys_of(program.captured, program.spec, program.sources, rows, "adamw")
        each = 5.0 if slow else 1e-8 * rows
        for key in keys:
            found[key] = found[key + FIRST] = stage_timing(each, each, 0.0)
    return found


@pytest.mark.slow
def test_the_simulation_is_that_of_the_schedule(tmp_path: Path) -> None:
    """What the plan says is the step of its own stages, with its own hosts."""
    path = tmp_path / "model.profile"
    program = compiled("roofline", stages=2)
    plan = program.plan
    schedule = make_schedule(program.spec, plan.schedule, plan.microbatches)
    forward = [row.forward_seconds for row in plan.prediction.ranks]
    backward = [row.backward_seconds for row in plan.prediction.ranks]
    alone = simulate(schedule, find_stage_edges(program.spec), forward, backward).step_seconds
    contention = HostContention((0, 0), ((1.0, 2.0),))
    crowded = simulate(
        schedule, find_stage_edges(program.spec), forward, backward, contention=contention
    ).step_seconds
    assert crowded <= alone * (1 + 1e-9)  # seconds are for both busy: alone they take half
    assert not path.exists()


def test_choices_are_hashable() -> None:
    one = PartitionChoice(variant=0, schedule="1f1b", starts=(0, 2))
    assert {one: 1}[replace(one)] == 1
