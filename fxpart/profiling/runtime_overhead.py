"""Measure the overhead of the runtime: time of a trainer's step beyond its stage.

A program of one multiplication is trained by the real trainer with few and with many microbatches,
and the same work is timed without a trainer. The difference is the overhead, per microbatch and per
step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpart.accelerator import synchronize
from fxpart.program.edges import find_value_edges
from fxpart.program.spec import InputSpec, ProgramSpec, StageSpec, StateSpec, ValueSpec
from fxpart.runtime import InProcess, Trainer
from fxpart.runtime.executor.stage_microbatch import BackwardRoots, StageMicrobatch
from fxpart.runtime.executor.stage_signature import StageSignature

_MANY = 8  # microbatches
_STEPS = 30


@dataclass(frozen=True)
class RuntimeOverhead:
    """Overhead in seconds: per forward or backward action, and per step."""

    action: float
    step: float


class _TinyStage(nn.Module):
    """A minimal stage module: the loss is the mean of x * w."""

    INDEX = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.weight = nn.Parameter(torch.ones(4, device=device))

    def forward(self, key: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((x * self.weight).mean(),)


def _program() -> ProgramSpec:
    stage = StageSpec(
        index=0,
        inputs=(ValueSpec(name="x", dtype="float32", shape=("s0", 4)),),
        sources=(-1,),
        outputs=(ValueSpec(name="loss", dtype="float32", shape=(), requires_grad=True),),
        targets=((),),
        state=(
            StateSpec(
                attribute="weight",
                name="weight",
                shape=(4,),
                dtype="float32",
                kind="parameter",
                requires_grad=True,
                owner=0,
            ),
        ),
    )
    return ProgramSpec(
        inputs=(InputSpec(name="x", path=("x",), dtype="float32", shape=("s0", 4), batch_dim=0),),
        constants=(),
        symbols={"s0": ("x", 0)},
        stages=(stage,),
        loss="loss",
        outputs=(),
        ties={},
        parameters=("weight",),
    )


def overhead(device: torch.device) -> RuntimeOverhead:
    """Measure the overhead on a device, by one rank in this process: medians of 30 steps."""
    spec = _program()
    batch = {"x": torch.ones(_MANY, 4, device=device)}
    step = {count: _step(spec, batch, count, device) for count in (1, _MANY)}
    work = _cell(spec, batch["x"][:1], device)
    each = (step[_MANY] - step[1]) / (_MANY - 1) - work
    action = max(0.0, each / 2)
    return RuntimeOverhead(action, max(0.0, step[1] - work - 2 * action - _update(device)))


def _step(spec: ProgramSpec, batch: dict[str, Any], count: int, device: torch.device) -> float:
    """Return the median seconds of a trainer's step with ``count`` microbatches."""
    trainer = Trainer(
        spec,
        {0: _TinyStage(device)},
        ranks=[0],
        transport=InProcess(1),
        microbatches=count,
        optimizer=torch.optim.SGD,
        devices={0: device},
    )
    try:
        return _median(lambda: trainer.step(batch), device)
    finally:
        trainer.close()


def _cell(spec: ProgramSpec, x: torch.Tensor, device: torch.device) -> float:
    """Return the median seconds of the same forward and backward without a trainer."""
    table = StageSignature.of(
        spec, spec.stages[0], _TinyStage(device), find_value_edges(spec), False
    )

    def run() -> None:
        cell, roots = StageMicrobatch(table), BackwardRoots(table)
        cell.inputs[0] = x
        cell.forward(0, train=True)
        roots.add_loss(cell.outputs[0], 1.0)
        cell.backward(roots)

    return _median(run, device)


def _update(device: torch.device) -> float:
    """Return the median seconds of the update of one small parameter."""
    module = _TinyStage(device)
    module.weight.grad = torch.ones_like(module.weight)
    return _median(torch.optim.SGD(module.parameters()).step, device)


def _median(run: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(_STEPS + 5):
        start = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[5:])
