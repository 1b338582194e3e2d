"""Stages of plans, timed by themselves: they are what plans look up, whoever runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from queued_programs import plan as copies
from zoo import ZOO

import fxpart
from fxpart.cluster.model import Cluster
from fxpart.codegen.stage_key import FIRST
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.planner.prepared_model import PlanningArguments, PreparedModel, prepare_model
from fxpart.planner.refinement import keys_of as looked_up
from fxpart.profiling.plan_stages import check_places, work_of
from fxpart.profiling.stage_benchmark import (
    StageBenchmark,
    StageBenchmarkInput,
    keys_of,
    microbatches,
)
from fxpart.profiling.trial_selection import describe_plan

CPU = torch.device("cpu")


def asked(name: str, **constraints: Any) -> tuple[PreparedModel, fxpart.Program]:
    built = ZOO[name].build()
    given = "example_kwargs" if isinstance(built.batch, dict) else "example_inputs"
    program = fxpart.compile(
        built.model, "local:4", loss=built.loss, batch_dims=built.batch_dims,
        constraints=constraints, **{given: built.batch},
    )  # fmt: skip
    batch = (None, built.batch) if isinstance(built.batch, dict) else (built.batch, None)
    own = {k: v for k, v in constraints.items() if k == "granularity"}
    front = prepare_model(
        built.model, "local:4", None, batch,
        PlanningArguments(None, None, "adamw", "roofline", own, 0),
        {"loss": built.loss, "batch_dims": built.batch_dims},
    )  # fmt: skip
    return front, program


def timed_keys(work: StageBenchmarkInput, front: PreparedModel) -> list[str]:
    sizes = microbatches(front.captured, work.spec, work.microbatches)[1]
    return keys_of(work, sizes, "adamw")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        ("mlp", {"mesh": "none", "stages": 3}),
        ("mlp", {"mesh": "none", "granularity": "op", "stages": 2}),
        ("mlp", {"mesh": "dp=2", "stages": 2}),
        ("gpt2", {"mesh": "dp=4", "stages": 1}),
        ("gpt2", {"mesh": "tp=2", "stages": 2}),
        ("gpt2", {"mesh": "dp=2,tp=2", "stages": 1, "zero": 1}),
        ("gpt2", {"mesh": "dp=4", "zero": 3, "stages": 1}),
        ("recommender", {"mesh": "dp=2", "stages": 1}),
        ("unet", {"mesh": "dp=2", "stages": 2}),
    ],
)
def test_every_stage_of_a_plan_is_what_plans_look_up(name: str, constraints: Any) -> None:
    front, program = asked(name, **constraints)
    plan = program.plan
    work = work_of(front, plan, plan.device(0))
    assert work is not None and work.stages.timed == list(range(len(program.sources)))
    every = microbatches(program.captured, program.spec, plan.microbatches)
    dims = [item.batch_dim for item in program.spec.inputs]
    rows = next(t.shape[d] for t, d in zip(every[0][0].values(), dims, strict=False) if d == 0)
    wanted = looked_up(program.captured, program.spec, program.sources, rows, "adamw")
    assert timed_keys(work.stages, front) == wanted
    bench = StageBenchmark(front.captured, "adamw", "adamw", CPU)
    assert set(bench.turn(work.stages, (), seconds=0.0)) == set(wanted)
    found = bench.timings()
    assert set(found) == {key + end for key in wanted for end in ("", FIRST)}
    for entry in found.values():
        assert entry.forward.seconds > 0 and entry.parts == {}
        assert entry.rows == -(-plan.batch_size // plan.microbatches)


def clicks_front(given: Plan, batch_size: int | None = None) -> PreparedModel:
    from queued_batches import adagrad, batch
    from queued_programs import model

    return prepare_model(
        model(), given.cluster, None, (batch(), None),
        PlanningArguments(batch_size, None, adagrad, "roofline", {"granularity": "op"}, 0),
        {"loss": torch.nn.functional.cross_entropy, "batch_dims": None},
    )  # fmt: skip


def on_unlike(given: Plan) -> Plan:
    """The same, its last device with half a core."""
    *others, last = given.cluster.devices
    devices = (*others, replace(last, quota=0.5))
    return replace(given, cluster=replace(given.cluster, devices=devices))


@pytest.mark.slow
def test_only_what_is_on_such_devices() -> None:
    """Copies on several kinds are of each; a stage that is on another kind alone is not timed."""
    given = on_unlike(copies((2, 1)))
    front = clicks_front(given)
    whole, held = given.cluster.devices[0], given.cluster.devices[-1]
    other = replace(whole, model="h100-sxm", quota=UNSET)
    for device, mine in ((whole, [0]), (held, [1])):
        work = work_of(front, given, device)
        assert work is not None and work.stages.timed == mine
        assert len(work.stages.sources) == 2 and len(work.blocks) == 2
        bench = StageBenchmark(front.captured, "adagrad", "adagrad", CPU)
        assert len(bench.turn(work.stages, (), seconds=0.0)) == 1
    assert work_of(front, given, other) is None
    check_places([given], [other, held])
    with pytest.raises(FxpartError, match="FXP305") as caught:
        check_places([given], [other])
    assert "h100-sxm" in caught.value.problems[0].why
    assert describe_plan(given).startswith("2 stages with 2 + 1 replicas, ")
    given = on_unlike(copies((1, 2)))
    timed = [work_of(clicks_front(given), given, d) for d in (whole, held)]
    assert [w and w.stages.timed for w in timed] == [[0, 1], [1]]


@pytest.mark.slow
def test_plans_for_others_are_refused() -> None:
    given = copies((2, 1))
    front = clicks_front(given)
    other = replace(given, model=replace(given.model, fingerprint="0" * 64))
    more = replace(given, batch_size=24)
    for plan, code in ((other, "FXP304"), (more, "FXP105")):
        with pytest.raises(FxpartError) as caught:
            work_of(front, plan, Cluster.local(1).devices[0])
        assert caught.value.problems[0].code == code
