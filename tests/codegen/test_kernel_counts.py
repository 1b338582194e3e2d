"""Generated stages launch no more kernels per layer than the eager model, and steps rarely wait.

A layer's kernels are the difference of two models, one with a layer more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from host_waits import HostWaits
from kernel_counts import KernelCount
from model_families import FAMILIES

import fxpart
from fxpart.codegen.materialization import materialize
from fxpart.codegen.stage_loader import load_stage


@dataclass(frozen=True)
class Counts:
    """Kernels of a forward and a backward, by op."""

    forward: Counter[str]
    backward: Counter[str]

    def __sub__(self, other: Counts) -> tuple[int, int]:
        """Return by how much the totals differ."""
        return (
            self.forward.total() - other.forward.total(),
            self.backward.total() - other.backward.total(),
        )


def count(call: Callable[[], torch.Tensor]) -> Counts:
    """Count the kernels of a loss and its gradients."""
    with KernelCount() as forward:
        loss = call()
    with KernelCount() as backward:
        torch.autograd.backward([loss], [torch.ones_like(loss)])
    return Counts(forward.kernels, backward.kernels)


@cache
def program_of(family: str, layers: int) -> tuple[fxpart.Program, dict[str, Any]]:
    model, batch = FAMILIES[family].build(layers)
    made = fxpart.compile(
        model, "local:1", example_kwargs=batch, constraints={"stages": 1},
        microbatches=1, check="off",
    )  # fmt: skip
    return made, batch


def count_both(family: str, layers: int) -> tuple[Counts, Counts]:
    """Return the kernels of the eager model and of its only stage."""
    model, batch = FAMILIES[family].build(layers)
    eager = count(lambda: model(**batch).loss)
    program, batch = program_of(family, layers)
    parts = program.parts
    (stage,) = parts.spec.stages
    module = load_stage(parts.sources[0], stage)
    materialize(module, parts.spec, program.captured.state)
    inputs = [batch[value.name] for value in stage.inputs]
    at = [value.name for value in stage.outputs].index(parts.spec.loss)
    return eager, count(lambda: module(0, *inputs)[at])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_launches_no_more_kernels_than_eager(family: str) -> None:
    small, large = count_both(family, 1), count_both(family, 2)
    eager, ours = large[0] - small[0], large[1] - small[1]
    assert ours[0] <= eager[0] and ours[1] <= eager[1], (ours, eager)
    assert min(eager) > 5  # the layer is there


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_waits_for_the_device_at_most_twice(family: str) -> None:
    """Once for the loss, which each call returns, and once for the norm of the gradients."""
    program, batch = program_of(family, 2)
    trainer = program.trainer(torch.optim.AdamW, clip_norm=1.0)
    trainer.step(batch)
    waits = HostWaits([batch, *_device_tensors(trainer)])
    with waits.watch():
        trainer.step(batch)
    trainer.close()
    assert 1 <= len(waits.waits) <= 2, waits.waits


def _device_tensors(trainer: Any) -> list[torch.Tensor]:
    """Parameters, buffers and optimizer state; steps of Adam without fused kernels are on CPUs."""
    modules = [m for mesh_rank in trainer.parts.mesh_ranks for m in mesh_rank.modules.values()]
    found = [t for module in modules for t in [*module.parameters(), *module.buffers()]]
    for optimizer in trainer.optimizers.by_place.values():
        for state in optimizer.state.values():
            found += [t for name, t in state.items() if name != "step"]
    return found


def test_waits_are_seen() -> None:
    weight = torch.ones(3, requires_grad=True)
    watched = HostWaits([weight])
    with watched.watch():
        total = (weight * 2).sum()
        float(total.detach())
        total.detach().cpu()
        weight.detach().tolist()
        torch.ones(3).sum().item()  # on the host
    assert [wait.split()[0] for wait in watched.waits] == [
        "aten._local_scalar_dense.default", "cpu", "tolist",
    ]  # fmt: skip


def test_kernels_are_counted() -> None:
    x = torch.ones(4, 4)
    with KernelCount() as counted:
        x.t()[1:].detach()
        torch.empty_like(x).copy_(x.t() + 1)
        x.add_(1)
    assert counted.kernels == {"add.Tensor": 1, "copy_.default": 1, "add_.Tensor": 1}
