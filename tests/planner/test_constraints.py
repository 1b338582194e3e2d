"""Each constraint in each mode is kept by the plan or refused by name, and never passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.api import Program
from fxpart.compiler import BLOCKS_KEY
from fxpart.errors import FxpartError
from fxpart.plan.constraint_table import CONSTRAINTS
from fxpart.plan.model import Plan
from fxpart.planner.constraint_check import check_plan
from fxpart.planner.constraints import allowed_stages
from fxpart.verification.comparison import verify

LAYERS = 6


class Layered(nn.Module):
    """A first layer, a stack of numbered ones, and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(x)


def compiled(constraints: dict[str, Any], **options: Any) -> Program:
    torch.manual_seed(0)
    batch = torch.randn(8, 8), torch.randn(8, 4)
    return fxpart.compile(
        Layered(), "local:4", example_inputs=batch, loss=nn.MSELoss(), constraints=constraints,
        **options,
    )  # fmt: skip


@cache
def base() -> Program:
    return compiled({})


MODES: dict[str, dict[str, Any]] = {
    "free": {},
    "searched mesh": {"mesh": "auto"},
    "one rank per stage": {"mesh": "none"},
    "data parallel": {"mesh": "dp=2"},
    "tensor parallel": {"mesh": "tp=2"},
    "virtual stages": {"schedule": "interleaved"},
    "virtual stages on a mesh": {"schedule": "breadth-first", "mesh": "none"},
    "split backward": {"schedule": "zb-h1", "mesh": "none"},
    "asynchronous": {"mode": "async"},
    "asynchronous on a mesh": {"mode": "async", "mesh": "dp=2"},
    "faster of both": {"mode": "auto"},
    "queues": {"mode": "queue"},
}


def block_names() -> tuple[str, ...]:
    return tuple(block.name for block in base().prepared.meta[BLOCKS_KEY])


def stage_names(plan: Plan) -> list[list[str]]:
    """The blocks of each stage of the program, read from the plan alone."""
    names = block_names()
    return [list(names[first : last + 1]) for first, last, _ in plan.program_stages]


def home(plan: Plan, block: str) -> int:
    """The stage that holds a block."""
    (found,) = {
        stage
        for first, last, stage in plan.program_stages
        for name in block_names()[first : last + 1]
        if name.startswith(block)
    }
    return found


def together(plan: Plan, one: str, other: str) -> bool:
    return any(
        any(n.startswith(one) for n in names) and any(n.startswith(other) for n in names)
        for names in stage_names(plan)
    )


def axis(plan: Plan, name: str) -> int:
    text = plan.sharding.mesh if plan.sharding is not None else ""
    sizes = {a: int(n) for a, _, n in (p.partition("=") for p in text.split(",") if p)}
    return sizes.get(name, 1)


def one_stage(plan: Plan) -> bool:
    return len(plan.stages) == 1


PENALTY = json.dumps({
    "optimizer": "adamw", "batch_size": 8, "target_loss": 0.5,
    "measured": [{"weights": "naive", "stages": 4, "microbatches": 1, "relative_steps": 1.2}],
})  # fmt: skip
# By constraint: what a plan that keeps it looks like.
KEPT: list[tuple[str, Any, Callable[[Plan], bool]]] = [
    ("stages", 2, lambda p: len(p.stages) == 2),
    ("pp", 2, lambda p: len(p.stages) == 2),
    ("pp", "2,3", lambda p: len(p.stages) in (2, 3)),
    ("forbid", "pp=1", lambda p: len(p.stages) > 1),
    ("forbid", "pp", one_stage),
    ("dp", 2, lambda p: axis(p, "dp") == 2),
    ("data", 2, lambda p: axis(p, "dp") == 2),
    ("tp", 2, lambda p: axis(p, "tp") == 2),
    ("tensor", 2, lambda p: axis(p, "tp") == 2),
    ("ep", 2, lambda p: axis(p, "ep") == 2),
    ("cp", 2, lambda p: axis(p, "cp") == 2),
    ("context", 2, lambda p: axis(p, "cp") == 2),
    ("expert", 2, lambda p: axis(p, "ep") == 2),
    ("forbid", "dp", lambda p: axis(p, "dp") == 1),
    ("forbid", "tp", lambda p: axis(p, "tp") == 1),
    ("zero", 2, lambda p: axis(p, "dp") == axis(p, "tp") == 1 or p.stages[0].zero == 2),
    ("forbid", "zero", lambda p: p.stages[0].zero == 0),
    ("shard_degree", 2, lambda p: {stage.shard_degree for stage in p.stages} == {2}),
    ("shard_degree", 0, lambda p: {stage.shard_degree for stage in p.stages} == {0}),
    ("forbid", "shard_degree", lambda p: {stage.shard_degree for stage in p.stages} == {0}),
    ("microbatches", 4, lambda p: p.microbatches == 4),
    ("m", 2, lambda p: p.microbatches == 2),
    ("forbid", "microbatches=2", lambda p: p.microbatches != 2),
    ("virtual", 2, lambda p: p.virtual == 2),
    ("virtual", 3, lambda p: p.virtual == 3),
    ("schedule", "gpipe", lambda p: p.schedule in ("gpipe", "async")),
    ("forbid", "schedule=1f1b", lambda p: p.schedule != "1f1b"),
    ("recompute", "full", lambda p: all(s.recompute == "full" for s in p.stages)),
    ("recompute", "none", lambda p: all(s.recompute == "none" for s in p.stages)),
    ("ranks", 2, lambda p: p.world == 2),
    ("ranks", 4, lambda p: p.world == 4),
    ("stage", "first=0;last=1", lambda p: (home(p, "first"), home(p, "last")) == (0, 1)),
    ("stage", "layers.0-2=0;layers.3=1", lambda p: not together(p, "layers.2", "layers.3")),
    ("stage", "last=-1", lambda p: home(p, "last") == len(p.stages) - 1),
    ("stage", "nosuch=0", lambda p: False),
    ("stage", "first=7", lambda p: False),
    ("layout", "Ettt|tttL", lambda p: [len(n) for n in stage_names(p)] == [4, 4]),
    ("layout", "Ett|tt|ttL", lambda p: [len(n) for n in stage_names(p)] == [3, 2, 3]),
    ("layout", "Ett|ttL", lambda p: False),
    ("forbid", "cut=layers.2", lambda p: together(p, "layers.2", "layers.3")),
    ("forbid", "cut=nosuch", lambda p: False),
    ("copies", "none", lambda p: not p.replicas),
    ("copies", "always", lambda p: p.schedule != "async" and p.sharding is None),
    ("weights", "stash", lambda p: one_stage(p) or p.weights == "stash" or p.schedule != "async"),
    ("staleness_penalty", PENALTY, lambda p: len(p.modes) > 1 and p.modes[0].weights == p.weights),
    ("staleness", "1", lambda p: set(p.staleness) == {1}),
    ("transfer_dtype", "bfloat16", lambda p: p.transfer_dtype == "bfloat16"),
    ("precision", "bf16", lambda p: p.precision == "bf16"),
    ("offload", "both", lambda p: p.offload == "both" and p.prediction.ranks[0].host > 0),
    ("granularity", "op", lambda p: False),  # the model was captured in blocks
    ("placements", "annotated", lambda p: p.constraints["mesh"] != "none"),
    # the model couples no rows: there is nothing to accept, and every plan keeps it
    ("batch_coupling", "per-microbatch", lambda p: True),
    ("zero_axis", "tp", lambda p: "tp" in p.constraints["mesh"]),
    ("annotations", "[annotations]\n", lambda p: p.constraints["mesh"] != "none"),
    ("solver", "cp-sat", lambda p: p.schedule != "async"),
    ("time_limit", 2.0, lambda p: True),
]


QUICK = ("one rank per stage", "data parallel", "queues")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=() if m in QUICK else (pytest.mark.slow,)) for m in MODES]
)
def test_each_constraint_is_kept_or_refused(mode: str) -> None:
    """Beside each mode, of a model that was captured once."""
    passed_over, kept = [], 0
    for key, value, is_kept in KEPT:
        if key in MODES[mode]:
            continue
        constraints = {**MODES[mode], key: value}
        try:
            plan = base().replan("local:4", constraints=constraints).plan
        except FxpartError as fault:
            assert fault.code < "FXP9", (constraints, fault)
            assert fault.problems[0].fix or fault.problems[0].why, constraints
            continue
        kept += 1
        if not is_kept(plan):
            passed_over.append(constraints)
    assert not passed_over
    assert kept > 8


def test_every_constraint_is_in_the_table() -> None:
    """One that is forgotten fails here; the mode and the mesh are the columns."""
    assert {key for key, *_ in KEPT} | {"mesh", "mode"} == {*CONSTRAINTS}


@pytest.mark.slow
@pytest.mark.parametrize(
    "constraints",
    [
        {"mesh": "none", "stages": 3, "stage": "first=0;layers.0=1;last=2"},
        {"mesh": "dp=2", "stages": 2, "stage": "layers.4=0;layers.5=1"},
        {"mode": "async", "mesh": "none", "stages": 2, "layout": "Et|tttttL"},
        {"mode": "queue", "stages": 2, "stage": "layers.0=1"},
        {"mesh": "none", "stages": 2, "forbid": "cut=layers.0-4"},
        {"schedule": "zb-h1", "mesh": "none", "layout": "E|ttt|tttL"},
    ],
)
def test_cuts_beside_a_mesh_are_where_they_were_requested(constraints: dict[str, Any]) -> None:
    """Of compile as well; and the program trains."""
    program = compiled(constraints, optimizer="sgd")
    plan, names = program.plan, stage_names(program.plan)
    check_plan(plan, constraints, block_names())
    if "layout" in constraints:
        counts = [part.count("t") for part in constraints["layout"].split("|")]
        assert [sum(n.startswith("layers") for n in part) for part in names] == counts
    for text in str(constraints.get("stage", "")).split(";"):
        block, _, stage = text.partition("=")
        assert not stage or home(plan, block) == int(stage)
    made = program.trainer()
    made.step((torch.randn(8, 8), torch.randn(8, 4)))
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constraints", "code"),
    [
        ({"stages": 3}, "FXP305"),
        ({"microbatches": 8}, "FXP305"),
        ({"stage": "last=0"}, "FXP305"),
        ({"schedule": "gpipe"}, "FXP305"),
        ({"granularity": "op"}, "FXP305"),
        ({"stage": "nosuch=0"}, "FXP109"),
    ],
)
def test_constraints_beside_an_applied_plan(constraints: dict[str, Any], code: str) -> None:
    """A plan that is given keeps them, or they are refused."""
    plan = base().replan("local:4", constraints={"mesh": "none", "stages": 2}, microbatches=2).plan
    with pytest.raises(FxpartError, match=code):
        compiled(constraints, plan=plan)
    assert compiled({"stages": 2, "stage": "last=1", "mesh": "none"}, plan=plan).plan is plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "constraints",
    [
        {"mode": "async", "virtual": 2},
        {"mode": "queue", "virtual": 2},
        {"virtual": 2},
        {"virtual": 3, "schedule": "zb-h1"},
        {"mode": "async", "schedule": "async", "virtual": "2,4"},
    ],
)
def test_virtual_stages_need_a_schedule_that_has_them(constraints: dict[str, Any]) -> None:
    with pytest.raises(FxpartError, match="FXP109") as caught:
        base().replan("local:2", constraints=constraints)
    assert "interleaved" in caught.value.problems[0].fix


@pytest.mark.slow
def test_virtual_stages_of_the_wrong_number_are_refused() -> None:
    """ZB-V has two of them, and a graph of cuts may have too few for three."""
    with pytest.raises(FxpartError, match="FXP202"):
        base().replan("local:2", constraints={"schedule": "zb-v", "virtual": 3, "stages": 2})


def test_cuts_on_other_axes_are_refused() -> None:
    constraints = {"mesh": "x=2", "stages": 2, "stage": "first=0"}
    with pytest.raises(FxpartError, match="FXP109") as caught:
        base().replan("local:4", constraints=constraints)
    assert "axis x" in caught.value.problems[0].why


def test_numbers_of_stages() -> None:
    assert allowed_stages({}, 4) == (1, 2, 3, 4)
    assert allowed_stages({"pp": "2,4,8"}, 4) == (2, 4)
    assert allowed_stages({"stages": 3, "forbid": "pp=3"}, 4) == ()
    assert allowed_stages({"forbid": "pp"}, 4) == (1,)


@pytest.mark.slow
def test_a_plan_that_breaks_constraints_is_named() -> None:
    """The check by itself, of a plan that was made without them."""
    names = block_names()
    plan = base().replan("local:4", constraints={"stages": 2}).plan
    check_plan(plan, {"stages": 2, "stage": "first=0"}, names)
    wrong = {"dp": 2, "stage": "first=1", "ranks": 3, "mode": "queue", "forbid": "schedule=1f1b"}
    with pytest.raises(FxpartError, match="FXP202") as caught:
        check_plan(plan, wrong, names)
    assert len(caught.value.problems) == len(wrong)


def hardest(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().sum(-1).max()


@pytest.mark.parametrize("counts", [2, "2,4"])
def test_a_fixed_number_of_microbatches_of_coupled_rows(counts: int | str) -> None:
    """The constraint is refused for the same reason as the argument."""
    given = (torch.zeros(8, 8), torch.zeros(8, 4))
    make = partial(fxpart.compile, Layered(), "local:2", example_inputs=given, loss=hardest)
    with pytest.raises(FxpartError, match="FXP114") as caught:
        make(constraints={"mesh": "none", "microbatches": counts})
    assert "max combines rows" in caught.value.problems[0].why
    with pytest.raises(FxpartError, match="FXP114"):
        make(constraints={"mesh": "none", "forbid": "microbatches=1"})
    assert make(constraints={"mesh": "none", "microbatches": "1,2"}).plan.microbatches == 1


class Nearest(Layered):
    """Distances between all rows; torch captures them for one number of rows only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out + torch.cdist(out, out).mean()


@pytest.mark.parametrize("decision", ["dp", "tp", "cp", "shard_degree"])
def test_degrees_of_a_fixed_batch(decision: str) -> None:
    """They are not searched; a whole mesh can be fixed, as the error says."""
    given = (torch.randn(8, 8), torch.zeros(8, 4))
    make = partial(fxpart.compile, Nearest(), "local:4", example_inputs=given, loss=nn.MSELoss())
    constraints = {"zero": 2} if decision == "shard_degree" else {}
    with pytest.raises(FxpartError, match="FXP202.*\n.*\n.*a fixed batch") as caught:
        make(constraints={decision: 2, **constraints})
    assert (
        f'mesh="{"dp=2,dp_shard" if constraints else decision}=2"' in caught.value.problems[0].fix
    )
    if decision == "dp":
        assert verify(make(constraints={"mesh": "dp=2", "stages": 1}), steps=2).passed


def test_a_constraint_that_earlier_ones_contradict_names_them() -> None:
    given = (torch.zeros(8, 8), torch.zeros(8, 4))
    for constraints, why in (
        ({"dp": 1, "forbid": "zero=0"}, "fix dp=1 left zero 0"),
        ({"tp": 3}, "the other constraints, the model and the devices allow tp 1 or 2"),
    ):
        with pytest.raises(FxpartError, match="FXP202") as caught:
            fxpart.compile(
                Layered(), "local:2", example_inputs=given, loss=nn.functional.mse_loss,
                constraints=constraints,
            )  # fmt: skip
        assert why in caught.value.problems[0].why
