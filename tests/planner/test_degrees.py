"""Degrees chosen by the planner: against every mesh given by hand, under wishes, anywhere."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fxpart.costmodels.profile_store import (
    ContentionProfile,
    MeasurementEnvironment,
    Profile,
    TimeQuartiles,
    chip,
)
from msgspec.structs import replace
from torch import nn

import fxpart
import fxpart.planner.search
from fxpart import Cluster, Device, FxpartError, Link, Program
from fxpart.planner import degrees
from fxpart.planner.request import PlanRequest, with_mesh
from fxpart.planner.whatif import WhatIfChange, choice_of, solve_whatif
from fxpart.solver.joint.objective import evaluate
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointProblem, JointSolution

GIGA = 10**9


class Residual(nn.Module):
    """Eight residual layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.head(x)
        return out


def cluster(*speeds: float, latency: float = 1e-6, bandwidth: float = 1e10) -> Cluster:
    """Devices of one host; speed 1 computes 10 GFLOP/s, so that layers take about 2 ms."""
    return Cluster(
        name="made",
        devices=tuple(
            Device(
                name=f"cpu:{i}", kind="cpu", model=f"speed{speed:g}", host="here",
                memory=4 * GIGA, flops={"float32": speed * 1e10}, bandwidth=speed * 2e10,
            )
            for i, speed in enumerate(speeds)
        ),
        links=(Link(source="*", target="*", latency=latency, bandwidth=bandwidth),),
    )  # fmt: skip


@cache
def program() -> Program:
    """The model captured once, planned for one device."""
    torch.manual_seed(0)
    x, y = torch.randn(48, 64), torch.randint(0, 10, (48,))
    return fxpart.compile(
        Residual(), cluster(1.0), example_inputs=(x, y), loss=nn.functional.cross_entropy
    )


def planned(where: Cluster, **constraints: int | str) -> Program:
    return program().replan(where, constraints=constraints)


MESHES = ["none", "dp=2", "dp=4", "dp=2,tp=2", "tp=2", "tp=4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("latency", "bandwidth"), [(1e-6, 1e10), (1e-3, 1e10), (1e-6, 1e7), (3e-2, 1e8)]
)
def test_no_mesh_given_by_hand_is_faster(latency: float, bandwidth: float) -> None:
    where = cluster(1, 1, 1, 1, latency=latency, bandwidth=bandwidth)
    chosen = planned(where).plan
    by_hand = {m: program().replan(where, constraints={"mesh": m}).plan for m in MESHES}
    best = min(by_hand, key=lambda m: by_hand[m].prediction.step_seconds)
    least = by_hand[best].prediction.step_seconds
    assert chosen.prediction.step_seconds <= least * 1.02, (chosen.mesh, best)
    assert chosen.degrees is not None and chosen.degrees.lower_bound <= least * 1.02


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"pace": float}, {"levels": True}, {}])
def test_far_meshes_are_solved_where_exact_prices_may_prefer_them(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ranks slow each other down, or tables are exchanged; else only what is near."""
    made = program().replan(cluster(1, 1, 1, 1))
    found: dict[int, JointSolution] = {}

    def record(problem: JointProblem, **given: Any) -> JointSolution:
        found[id(problem)] = solution = solve(problem, **given)
        return solution

    monkeypatch.setattr(degrees, "solve", record)
    given = degrees.build_joint_problem(made.prepared, made.captured, made.request, None)
    chosen = degrees.choose_degrees(*given, made.request, **options)
    assert all(one.status == "optimal" for one in found.values()) == bool(options)
    best = chosen.solution.objective
    assert all(one.bound >= min(one.objective, 1.5 * best) * 0.99 for one in found.values())


@pytest.mark.slow
def test_slow_links_bring_a_pipeline_and_fast_ones_replicas() -> None:
    """Replicas sum every gradient, a pipeline sends rows: the planner sees the difference."""
    fast = planned(cluster(1, 1, 1, 1), tp=1).plan
    slow = planned(cluster(1, 1, 1, 1, bandwidth=1e7), tp=1).plan
    assert fast.mesh.get("dp", 1) > 1
    assert slow.mesh["pipeline"] > 1 and slow.mesh.get("dp", 1) < 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wishes", "stages", "ranks"),
    [
        ({"dp": 1, "tp": 1, "stages": 3}, 3, 3),
        ({"dp": 2, "tp": 1, "stages": 2}, 2, 4),
        ({"forbid": "dp;tp", "ranks": 4}, 4, 4),
        ({"dp": "2,4", "ranks": 4, "tp": 1}, None, 4),
        ({"layout": "tt|ttt|tttL"}, 3, None),
        ({"zero": 1, "dp": 2, "stages": 2}, 2, 4),
        ({"zero": 3, "dp": 4, "tp": 1}, 1, 4),
    ],
)
def test_wishes_are_kept(
    wishes: dict[str, int | str], stages: int | None, ranks: int | None
) -> None:
    plan = planned(cluster(1, 1, 1, 1), **wishes).plan
    assert stages in (None, len(plan.stages)) and ranks in (None, plan.world)
    for key, axis in (("dp", "dp"), ("tp", "tp")):
        if key in wishes:
            assert str(plan.mesh.get(axis, 1)) in str(wishes[key]).split(",")
    if "zero" in wishes:
        assert plan.sharding is not None and plan.sharding.zero == wishes["zero"]
    if "layout" in wishes:
        assert [stage.first for stage in plan.stages] == [0, 3, 6]  # layer 0 has two blocks


@pytest.mark.slow
def test_blocks_are_put_on_their_stage() -> None:
    plan = planned(cluster(1, 1, 1), stage="layers.0-5=0", stages=3).plan
    names = program().costed().blocks
    last = max(i for i, name in enumerate(names) if name.startswith("layers.5"))
    assert plan.stages[0].last >= last and len(plan.stages) == 3


@pytest.mark.slow
def test_fast_devices_are_taken_wherever_they_stand() -> None:
    plan = planned(cluster(0.2, 1, 0.2, 1), dp=1, tp=1, stages=2).plan
    assert plan.devices == (1, 3)
    assert [plan.device(stage.ranks[0]).name for stage in plan.stages] == ["cpu:1", "cpu:3"]


@pytest.mark.slow
def test_a_slow_device_gets_less_and_the_numbers_stay() -> None:
    made = planned(cluster(0.5, 1, 1), dp=1, tp=1, stages=3)
    sizes = {
        made.plan.device(stage.ranks[0]).model: stage.last - stage.first + 1
        for stage in made.plan.stages
    }
    assert sizes["speed0.5"] < sizes["speed1"]
    assert sorted(rank for stage in made.plan.stages for rank in stage.ranks) == [0, 1, 2]
    assert made.verify(steps=2).passed


@pytest.mark.slow
@pytest.mark.parametrize("constraint", ["tp=5", "dp=5"])
def test_what_cannot_be_is_one_clear_error(constraint: str) -> None:
    key, _, value = constraint.partition("=")
    with pytest.raises(FxpartError, match="FXP202") as caught:
        planned(cluster(1, 1, 1, 1), **{key: int(value)})
    assert constraint in str(caught.value)


def test_more_ranks_than_anything_takes() -> None:
    with pytest.raises(FxpartError) as caught:
        planned(cluster(1, 1), ranks=64)
    assert caught.value.code in ("FXP202", "FXP204")


@pytest.mark.slow
def test_what_if_asks_the_problem_that_the_plan_came_from() -> None:
    made = planned(cluster(1, 1, 1, 1), dp=1, tp=1, stages=4)
    problem = made.costed()
    choice = choice_of(problem, made.plan)
    assert evaluate(problem, choice).seconds == pytest.approx(made.plan.prediction.step_seconds)
    found = solve_whatif(problem, made.plan, WhatIfChange(without=(1,)))
    assert found.kept is not None and not found.kept.feasible
    assert found.after is not None and len(found.solution.choice.starts) <= 3  # type: ignore[union-attr]
    same = solve_whatif(problem, made.plan, WhatIfChange())
    assert same.kept == same.before


def test_a_given_mesh_has_no_proof_of_its_degrees() -> None:
    plan = program().replan(cluster(1, 1), constraints={"mesh": "none"}).plan
    assert plan.degrees is None
    assert replace(plan, degrees=None) == plan


def test_more_microbatches_than_rows_of_a_replica_are_refused() -> None:
    """A mesh by hand: each of two replicas has half of the batch, and that in too many pieces."""
    with pytest.raises(FxpartError) as caught:
        program().replan(cluster(1.0, 1.0), microbatches=48, constraints={"mesh": "dp=2"})
    assert caught.value.code == "FXP105" and "microbatches" in caught.value.problems[0].fix


@pytest.mark.slow
def test_on_few_cores_no_mesh_given_by_hand_is_expected_to_be_faster(tmp_path: Path) -> None:
    """Formulas take all ranks to compute all the time, and plans with few busy ones are faster."""
    local = Cluster.local(4)
    devices = tuple(replace(device, threads=1) for device in local.devices)
    where = replace(local, devices=devices)
    path = tmp_path / "crowded.profile"
    here = MeasurementEnvironment(
        device="cpu", chip=chip(), threads=1, torch=str(torch.__version__)
    )
    with Profile(path, create=True) as profile:
        profile.put("ops", here, {"none": TimeQuartiles(1.0, 1.0, 1.0, 3)})
        profile.put("crowding", here, {"": ContentionProfile(slowdown=(1.0, 1.0, 3.0, 4.5))})
    # A row at a time keeps no four stages busy; four replicas are, and crawl.
    x, y = torch.randn(4, 256, 64), torch.randn(4, 256, 10)
    made = fxpart.compile(
        Residual(), where, example_inputs=(x, y), loss=nn.functional.mse_loss, cost_model=path,
        constraints={"tp": 1, "dp": "1,4"},
    )  # fmt: skip
    by_hand = {}
    for mesh, lanes in (("none", 1), ("dp=4", 4)):
        for stages in range(1, 4 // lanes + 1):
            wish = {"mesh": mesh, "stages": stages}
            other = made.replan(where, constraints=wish, cost_model=path).plan
            by_hand[mesh, stages] = other.prediction.expected_seconds
    assert made.plan.prediction.expected_seconds <= 1.02 * min(by_hand.values()), by_hand
    assert min(by_hand.values()) < by_hand["dp=4", 1] / 1.5


@pytest.mark.slow
@pytest.mark.parametrize(("sparse", "small"), [(True, False), (False, False), (False, True)])
def test_small_graphs_and_tables_are_tried_with_zero_and_without(
    sparse: bool, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ZeRO costs is known exactly only; of large dense models one level is enough."""
    monkeypatch.setattr(fxpart.planner.mesh_proposals, "SMALL_GRAPH", 400 if small else 0)
    tried: list[tuple[str, bool]] = []

    def record(request: PlanRequest, mesh: str, zero: int, **given: Any) -> PlanRequest:
        tried.append((mesh, zero > 0))
        return with_mesh(request, mesh, zero, **given)

    monkeypatch.setattr(fxpart.planner.search, "with_mesh", record)
    monkeypatch.setattr(fxpart.planner.search, "_closed", lambda made: math.inf)
    tables = nn.Sequential(nn.EmbeddingBag(5000, 64, mode="sum", sparse=sparse), nn.Linear(64, 1))
    batch = torch.randint(5000, (64, 4)), torch.rand(64, 1)
    fxpart.compile(
        tables, "local:2", example_inputs=batch, loss=nn.functional.mse_loss, optimizer="adagrad",
        constraints={"stages": 1},
    )  # fmt: skip
    levels = sorted(zero for mesh, zero in tried if mesh == "dp=2")
    assert levels == ([False, True] if sparse or small else levels[:1]) and levels
    assert len(set(tried)) == len(tried)
