"""Plans with hybrid sharding: constraints, choice by the planner, prices, files and texts."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from golden_plans import Layers
from host_clusters import equal_hosts
from hybrid_programs import HYBRID, compiled
from stage_runs import prepared
from torch import nn

import fxpart
from fxpart import Cluster, FxpartError, Plan, Program
from fxpart.capture import capture
from fxpart.costs import CostModel
from fxpart.elastic.state_shares import shares_of
from fxpart.interop.engines import ENGINES
from fxpart.interop.engines.plan_degrees import find_degrees
from fxpart.pricing.joint import joint_problem
from fxpart.pricing.joint_space import SearchSpace
from fxpart.pricing.non_op_costs import NonOpCosts
from fxpart.report.explanation_text import explain
from fxpart.report.sharding import headline
from fxpart.solver.joint.objective import Degrees, degrees, evaluate
from fxpart.solver.joint.problem import JointChoice, JointProblem

NEAR, FAR, ROWS = 16e9, 2e9, 16384
# The model has 537 MB with gradients and AdamW's state, and a device of 480 MiB 463 MB for tensors.
MEMORY = 480 << 20


class Loss(nn.Module):
    """Ten layers, and their squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers(2048)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def hosts(count: int = 2, each: int = 2, *, shared: bool = False) -> Cluster:
    return equal_hosts(count, each, memory=MEMORY, near=NEAR, far=FAR, shared=shared)


@cache
def captured() -> Program:
    """The model, captured once."""
    batch = {"x": torch.randn(ROWS, 64), "y": torch.randn(ROWS, 16)}
    return fxpart.compile(
        Loss(), hosts(), example_kwargs=batch, check="off", optimizer="adamw",
        constraints={"mesh": "dp=4", "stages": 1, "zero": 3},
    )  # fmt: skip


def planned(cluster: Cluster | None = None, **constraints: Any) -> Plan:
    """The planner's choice under the constraints."""
    return captured().replan(cluster or hosts(), constraints=constraints).plan


def problem(cluster: Cluster, **options: Any) -> JointProblem:
    """The costs of blocks for all degrees, in one microbatch."""
    found = capture(Loss(), (torch.randn(ROWS, 64), torch.randn(ROWS, 16)), batch_size=ROWS)
    space = SearchSpace(tensor=(1,), data=(4, 8), uniform=True, max_stages=1, **options)
    return joint_problem(
        prepared(found), found, cluster, batch_size=ROWS, microbatches=1, space=space
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{"stages": 1, "tp": 1}, pytest.param({}, marks=pytest.mark.long)]
)
def test_chosen_where_links_between_hosts_are_slow(given: dict[str, Any]) -> None:
    """Sharding over all ranks takes longer, and without sharding the model does not fit."""
    chosen = planned(**given)
    assert chosen.sharding is not None and chosen.sharding.mesh == "dp=2,dp_shard=2"
    assert [(s.data_parallel, s.shard_degree, s.zero) for s in chosen.stages] == [(4, 2, 2)]
    assert chosen.sharding.zero_axis == "dp_shard" and not chosen.runnable
    others = planned(**given, forbid="shard_degree")
    assert all(stage.shard_degree == 0 for stage in others.stages)
    assert others.prediction.step_seconds > 1.04 * chosen.prediction.step_seconds
    with pytest.raises(FxpartError, match="FXP204"):
        planned(dp=4, stages=1, zero=0)


@pytest.mark.slow
def test_parameters_stay_on_their_host() -> None:
    """ZeRO 3 over all ranks gathers over slow links in every microbatch."""
    given = {"dp": 4, "stages": 1, "zero": 3}
    chosen, whole = planned(**given), planned(**given, shard_degree=0)
    assert chosen.stages[0].shard_degree == 2 and whole.stages[0].shard_degree == 0
    assert whole.prediction.step_seconds > 1.2 * chosen.prediction.step_seconds
    weights = [plan.prediction.ranks[0].memory.weights for plan in (chosen, whole)]
    assert weights[0] == pytest.approx(2 * weights[1], rel=0.01)


@pytest.mark.slow
def test_not_chosen_where_all_links_are_equal() -> None:
    """On one host nothing is gained, so that no option of the planner has it."""
    plan = planned(hosts(1, 4), dp=4, stages=1, tp=1)
    assert [(s.zero, s.shard_degree) for s in plan.stages] == [(2, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_costs_of_options_are_closed_forms(shared: bool) -> None:
    """Of ring collectives of n ranks: (n - 1) / n of the bytes, and twice that for an all-reduce.

    With one network card for the four ranks of a host, each has a quarter of its bandwidth.
    """
    found = problem(hosts(2, 4, shared=shared))
    model: CostModel = fxpart.costmodels.find("auto", hosts())
    copying = NonOpCosts.of(model, hosts().devices[0]).copying
    far = FAR / 4 if shared else FAR
    for index, option in enumerate(found.options):
        one = degrees(found, index)
        if one.tensor > 1 or one.context > 1 or not option.shard_degree:
            continue
        assert one == Degrees(8, 1, 1, option.zero, option.recompute, 1, 4)
        gather = 3 / 4 / NEAR + 2 * copying
        between = 2 * (1 / 2) / far + 2 * copying
        assert option.gather.inverse == pytest.approx(gather, rel=1e-3)
        assert option.reduce.inverse == pytest.approx(gather + between / 4, rel=1e-3)
        choice = JointChoice(microbatches=1, schedule="1f1b", starts=(0,), options=(index,))
        (stage,) = evaluate(found, choice).stages
        state = found.layouts[option.layout].dense
        weight, moments = (
            sum(row[kind] for kind in found.kinds) for row in (state.weight, state.optimizer)
        )
        assert stage.memory.optimizer == -(-moments // 4)
        assert stage.memory.weights == (-(-weight // 4) if option.zero == 3 else weight)
        seconds = gather * weight
        assert stage.gather_seconds == pytest.approx(2 * seconds * (option.zero == 3), rel=1e-3)
    assert {(o.data, o.shard_degree) for o in found.options if o.shard_degree} == {(8, 4)}
    more = problem(hosts(2, 4, shared=shared), shard_degree=(2, 3))
    assert {(o.data, o.shard_degree) for o in more.options if o.shard_degree} == {
        (4, 2), (8, 2), (8, 4)
    }  # fmt: skip


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"mesh": "dp=4", "zero": 1, "shard_degree": 3}, "no divisor", "use 2,"),
    ({"mesh": "dp=4", "zero": 1, "shard_degree": 4}, "no divisor", "use 2,"),
    ({"mesh": "dp=4", "shard_degree": 2}, "without ZeRO", "zero=1, 2 or 3"),
    ({"mesh": "dp=4", "zero": 1, "shard_degree": "2,4"}, "several shard degrees", "use 2,"),
    ({"mesh": "tp=4", "zero": 1, "shard_degree": 2}, "no divisor", "remove"),
    (
        {"mesh": "dp=4,tp=1", "zero": 1, "zero_axis": "tp", "shard_degree": 2},
        "another axis",
        "zero_axis",
    ),
    ({"mesh": "dp=2,dp_shard=2", "zero": 1, "shard_degree": 4}, "another size", "use 2,"),
    ({"mesh": "dp=2,dp_shard=2", "zero": 1, "dp": 2}, "each stage has dp=4", "remove"),
    ({"shard_degree": 3}, "at least two groups of 3", "use 2,"),
    ({"shard_degree": -1}, "not a whole number", "shard_degree=2"),
    ({"mesh": "dp=2,cp=2", "zero": 3, "zero_axis": "dp,cp"}, "over one axis", "zero=2"),
    ({"mesh": "dp=2,cp=2", "zero": 1, "zero_axis": "dp,tp"}, "has the axes dp, cp", "one of them"),
    ({"zero_degree": 2}, "no constraint of this name", "shard_degree"),
]


@pytest.mark.parametrize(("given", "why", "fix"), WRONG)
def test_wrong_constraints_are_explained(given: dict[str, Any], why: str, fix: str) -> None:
    with pytest.raises(FxpartError) as caught:
        compiled(**given)
    (problem,) = caught.value.problems
    assert problem.code == "FXP109" and why in problem.why and fix in problem.fix


@pytest.mark.slow
def test_contradictions_are_refused() -> None:
    """Without ZeRO there is no choice left, and neither in an asynchronous pipeline."""
    for given in ({"zero": 0}, {"mode": "async"}):
        with pytest.raises(FxpartError, match="FXP202.*\n.*\n.* the other constraints, "):
            compiled(**given, shard_degree=2)


@pytest.mark.slow
def test_the_mesh_may_name_both_axes() -> None:
    """The constraint and the mesh with both axes are the same plan."""
    one = compiled(**HYBRID, zero=2).plan
    other = compiled(mesh="dp=2,dp_shard=2", stages=1, zero=2).plan
    assert msgspec.structs.replace(one, constraints={}) == msgspec.structs.replace(
        other, constraints={}
    )
    for axis in ("dp", "dp_shard"):  # of the request, and of the plan
        same = compiled(**HYBRID, zero=2, zero_axis=axis).plan
        assert (same.stages, same.sharding) == (one.stages, one.sharding)
    open_mesh = compiled(dp=4, stages=1, zero=2, shard_degree=2).plan
    assert open_mesh.stages == one.stages and open_mesh.sharding == one.sharding


def test_files_and_texts() -> None:
    plan = compiled(**HYBRID, zero=3).plan
    assert Plan.loads(plan.dumps()) == plan
    assert json.loads(plan.dumps())["stages"][0]["shard_degree"] == 2
    assert "shard_degree" not in compiled(mesh="dp=4", stages=1, zero=3).plan.dumps().replace(
        '"shard_degree": 2', ""
    )
    assert "shard_degree" in Plan.schema()["$defs"]["Stage"]["properties"]
    assert "dp4 zero3 shard2" in repr(plan)
    assert headline(plan).endswith("ZeRO 3 over dp_shard (parameters, 2 replicas)")
    assert "dp4 zero3 shard2" in explain(plan)
    assert (find_degrees(plan).shards, find_degrees(plan).shard_replicas) == (2, 2)
    shares = [share.parameters for share in shares_of(plan)]
    assert shares == [(0.0, 0.5), (0.5, 1.0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "lost"), [(1, ("deepspeed",)), (3, ("deepspeed", "megatron"))])
def test_configurations_of_engines(zero: int, lost: tuple[str, ...]) -> None:
    """Engines with hybrid sharding get both degrees; the others are said to lose it."""
    found = find_degrees(compiled(**HYBRID, zero=zero).plan)
    made = {name: spec.write(found) for name, spec in ENGINES.items()}
    texts = {name: "\n".join(one.files.values()) for name, one in made.items()}
    assert "data_parallel_replicate_degree = 2\n" in texts["torchtitan"]
    assert "data_parallel_shard_degree = 2\n" in texts["torchtitan"]
    assert "dp_replicate_size: 2\n" in texts["accelerate"]
    assert "dp_shard_size: 2\n" in texts["accelerate"]
    instances = re.search(r"--num-distributed-optimizer-instances\s+(\d+)", texts["megatron"])
    assert (instances is not None and instances[1] == "2") == (zero == 1)
    named = [name for name, one in made.items() if "Hybrid sharding over 2 of 4" in str(one.lost)]
    assert tuple(sorted(named)) == lost


@pytest.mark.slow
def test_too_many_options_lose_hybrid_sharding_first() -> None:
    """Data degrees are removed as without it."""
    every = problem(hosts(2, 4)).options
    plain = [option for option in every if not option.shard_degree]
    assert len(every) > len(plain)
    kept = problem(hosts(2, 4), most_options=len(every) - 1).options
    assert list(kept) == plain


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shard_degree": 3}, "is no divisor of data parallelism 4"),
        ({"shard_degree": 4}, "is no divisor of data parallelism 4"),
        ({"shard_degree": 2, "zero": 0}, "but the ZeRO level is 0"),
        ({"shard_degree": 2, "expert_parallel": 2}, "has no shard degree"),
    ],
)
def test_wrong_plans_are_found(changes: dict[str, Any], words: str) -> None:
    plan = compiled(**HYBRID, zero=3).plan
    stage = msgspec.structs.replace(plan.stages[0], **changes)
    found = msgspec.structs.replace(plan, stages=(stage,)).problems()
    assert any(words in problem.why for problem in found), found


def test_the_degree_is_that_of_the_axis() -> None:
    plan = compiled(mesh="dp=4", stages=1, zero=3).plan
    stage = msgspec.structs.replace(plan.stages[0], shard_degree=2)
    (found,) = msgspec.structs.replace(plan, stages=(stage,)).problems()
    assert "sharding.zero_axis has 4 ranks" in found.why


def test_an_axis_that_shards_products_is_not_data_parallel() -> None:
    """Then the shards are over all data-parallel ranks, and the plan is valid."""
    given = json.dumps({"annotations": {"up.weight": "dp_shard:S(0)", "up.bias": "dp_shard:S(0)"}})
    plan = compiled(**HYBRID, zero=1, annotations=given).plan
    (stage,) = plan.stages
    assert (stage.data_parallel, stage.tensor_parallel, stage.shard_degree) == (2, 2, 0)
    assert plan.problems() == ()
