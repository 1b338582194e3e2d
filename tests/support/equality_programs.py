"""Models of the zoo under a schedule on real ranks, against the same program in one process."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from zoo import ZOO

import fxpart
from fxpart.api import Program
from fxpart.compat.optimizer_choice import choose
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan

MODELS = ("gpt2", "llama", "bert", "t5", "resnet50", "unet")
TOLERANCE = 1e-6  # relative, of replicas, whose sums round in another order than one process's


def build(name: str) -> Any:
    """The model, alike on every rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return ZOO[name].build()


def double(value: Any) -> Any:
    """In float64 what is a floating-point number, in whatever containers."""
    if isinstance(value, dict):
        return {key: double(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(double(each) for each in value)
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floats else value


def compiled(name: str, schedule: str, stages: int, mesh: str, *, exact: bool = False) -> Program:
    """The model cut for the schedule. exact: in float64."""
    built = build(name)
    if exact:
        built = replace(built, model=built.model.double(), batch=double(built.batch))
    mesh_ranks = 2 if mesh == "dp=2" else 1
    return fxpart.compile(
        built.model, f"local:{stages * mesh_ranks}", example_inputs=built.batch, loss=built.loss,
        batch_dims=built.batch_dims, microbatches=built.batch_size // mesh_ranks,
        constraints={
            "mesh": mesh, "stages": stages, "schedule": schedule, "granularity": "op",
            "ranks": stages * mesh_ranks,
        },
        batch_coupling=ZOO[name].coupling,
    )  # fmt: skip


def steps(program: Program) -> dict[str, Any]:
    """Two AdamW steps on the example: losses, and every tensor of the state."""
    trainer = program.trainer(choose("adamw").make, need_loss=False)
    assert program.captured.example is not None
    batch = program.captured.example()
    losses = [trainer.step(batch).item() for _ in range(2)]
    state = {name: t.double().tolist() for name, t in trainer.state_dict().items()}
    trainer.close()
    return {"losses": losses, "state": state}


def on_ranks(name: str, plan: str) -> dict[str, Any]:
    """On one rank of the pool: losses, digest, and on rank 0 the state.

    The plan is given: a search that ends with its time may find another one on each rank.
    """
    built = build(name)
    program = fxpart.compile(
        built.model, example_inputs=built.batch, loss=built.loss, batch_dims=built.batch_dims,
        plan=Plan.loads(plan),
    )  # fmt: skip
    found = steps(program)
    text = repr((found["losses"], sorted(found["state"].items())))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {**found, "digest": digest} if torch.distributed.get_rank() == 0 else {"digest": digest}


def compared(pool: Any, name: str, schedule: str, stages: int, mesh: str) -> str:
    """ "equal" or what differs: on gloo ranks, in this process, and without any partition."""
    try:
        program = compiled(name, schedule, stages, mesh)
    except FxpartError as failure:
        return failure.code
    mesh_ranks = 2 if mesh == "dp=2" else 1
    plan = program.plan.dumps()
    ranks = pool.run(on_ranks, name, plan, ranks=stages * mesh_ranks, timeout=300.0)
    if len({found["digest"] for found in ranks}) != 1:
        return "ranks differ"
    here = steps(program)
    worst = _difference(here, ranks[0])
    if worst > (TOLERANCE if mesh_ranks > 1 else 0.0):
        return f"ranks and one process differ by {worst:.1e}"
    whole = program.verify(steps=2)
    if mesh_ranks > 1 and not whole.passed:
        # Replicas sum in another order, and AdamW makes much of a gradient that is nearly 0: in
        # float64 rounding does not reach what is compared, and a fault would stay.
        whole = compiled(name, schedule, stages, mesh, exact=True).verify(steps=2)
        return "equal, as unpartitioned in float64" if whole.passed else _apart(whole)
    return "equal" if whole.passed else _apart(whole)


def _apart(found: Any) -> str:
    return f"not as unpartitioned: {found.largest:.1e}"


def _difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    worst = 0.0
    for a, b in zip(one["losses"], other["losses"], strict=True):
        worst = max(worst, abs(a - b) / max(abs(a), 1e-30) if a != b else 0.0)
    for name, value in one["state"].items():
        x, y = torch.tensor(value), torch.tensor(other["state"][name])
        if not torch.equal(x, y):
            worst = max(worst, float((x - y).norm() / x.norm().clamp_min(1e-30)))
    return worst
