"""Models of the zoo on every schedule there is: the numbers of one process, as elsewhere."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from built_schedules import BUILDERS
from torch import nn
from zoo import ZOO

import fxpart
from fxpart.api import Program
from fxpart.codegen.materialization import materialize
from fxpart.codegen.stage_loader import load_stage
from fxpart.compat.optimizer_choice import choose
from fxpart.runtime import InProcess, Trainer
from fxpart.verification.comparison import PartitionedRun, compare

TRAINING = [name for name, b in BUILDERS.items() if name != "forward" and b.flushes]
MODES = ("none", "full", "selective")
EVERYWHERE = ("mlp", "frozen", "gpt2", "unet")


@cache
def program(name: str) -> Program:
    """The model on four stages, or as many as it has blocks."""
    entry = ZOO[name]
    if not entry.available:
        pytest.skip(f"{name} needs {entry.needs}")
    torch.manual_seed(0)
    built = entry.build()
    whole = fxpart.compile(
        built.model, "local:4", example_inputs=built.batch, loss=built.loss,
        batch_dims=built.batch_dims, microbatches=built.batch_size,
        constraints={"stages": 1, "mesh": "none"}, batch_coupling=entry.coupling,
    )  # fmt: skip
    count = min(4, whole.plan.model.blocks)
    constraints: dict[str, int | float | str | bool] = {"stages": count, "mesh": "none"}
    return whole.replan("local:4", microbatches=built.batch_size, constraints=constraints)


def modules(found: Program) -> dict[int, nn.Module]:
    made = {}
    for stage, source in zip(found.spec.stages, found.sources, strict=True):
        made[stage.index] = load_stage(source, stage)
        materialize(made[stage.index], found.spec, found.captured.state)
    return made


def check(name: str, schedule: str, recompute: str = "none") -> None:
    """Two steps on two ranks, or for a V where it can be one."""
    found = program(name)
    stages = len(found.spec.stages)
    ranks = [k % 2 for k in range(stages)]
    if schedule == "zb-v":
        if stages % 2:
            pytest.skip("a V needs two stages a rank")
        ranks = [min(k, stages - 1 - k) for k in range(stages)]
    trainer = Trainer(
        found.spec, modules(found), ranks=ranks, transport=InProcess(max(ranks) + 1),
        microbatches=found.plan.microbatches, schedule=schedule, recompute=recompute,
        optimizer=choose("adamw").make,
    )  # fmt: skip
    assert found.captured.example is not None
    batch = found.captured.example()
    losses, gradients = [], []
    for _ in range(2):
        losses.append(trainer.backward(batch))
        gradients.append(trainer.gradients())
        trainer.update()
    seen = PartitionedRun(losses, gradients, trainer.state_dict())
    result = compare(found, choose("adamw").make, batch, seen)
    assert result.passed, result


@pytest.mark.slow
@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_every_schedule(name: str, schedule: str) -> None:
    check(name, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in EVERYWHERE])
def test_whole_zoo(name: str) -> None:
    """Each model on one of the schedules, with one way to recompute; all pairs occur."""
    turn = list(ZOO).index(name)
    check(name, TRAINING[turn % len(TRAINING)], MODES[turn // 2 % len(MODES)])
