"""Frozen layers and adapters: no backward, and no gradient on the way, where nothing needs one."""

from __future__ import annotations

import copy

import pytest
import torch
from hand_stages import ADAMW
from split_models import leaf
from torch import nn
from torch.nn import functional as F

import fxpart
from fxpart.program.edges import find_stage_edges
from fxpart.schedule.action import ActionKind


class Adapted(nn.Linear):
    """A frozen linear layer with a low-rank update (Hu et al. 2021)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__(width, width)
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)
        if rank:
            self.a, self.b = nn.Parameter(leaf(width, rank)), nn.Parameter(leaf(rank, width))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = super().forward(x)
        return plain + x @ self.a @ self.b if self.rank else plain


class Model(nn.Module):
    """Frozen layers, then adapters on frozen layers: LoRA in the upper half only."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Adapted(16, rank) for rank in ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 0, 2, 2), (2, 0, 0, 2), (0, 0, 0, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_adapters(ranks: tuple[int, ...], schedule: str) -> None:
    """The numbers of one process, gradients of the adapters only, transfers only where needed."""
    model = Model(ranks)
    batch = (torch.randn(8, 16), torch.randn(8, 16))
    program = fxpart.compile(
        model, "local:4", example_inputs=batch, loss=F.mse_loss, microbatches=4,
        constraints={"stages": 4, "mesh": "none", "schedule": schedule},
    )  # fmt: skip
    trainer = program.trainer(ADAMW)
    alone = copy.deepcopy(model)
    optimizer = ADAMW([p for p in alone.parameters() if p.requires_grad])
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        parts = [
            F.mse_loss(alone(x), y) / 4 for x, y in zip(*(t.chunk(4) for t in batch), strict=True)
        ]
        for part in parts:
            part.backward()
        optimizer.step()
        expected.append(sum(float(part.detach()) for part in parts))
    found = [float(trainer.step(batch)) for _ in range(2)]
    assert found == pytest.approx(expected, rel=1e-6)
    wanted = {f"layers.{i}.{n}" for i, rank in enumerate(ranks) if rank for n in "ab"}
    assert set(trainer.gradients()) == wanted
    trained = [s.index for s in program.spec.stages if any(x.requires_grad for x in s.state)]
    lowest = min(trained)
    assert ranks[0] or lowest, "the frozen layers have a stage of their own"
    back = {(e.source, e.target): e.backward for e in find_stage_edges(program.spec)}
    assert back == {(i, i + 1): i >= lowest for i in range(3)}
    (executors,) = next(iter(trainer.parts.engine._executors.values()))
    sends = [
        i.action
        for executor in executors
        for i in executor._instructions
        if i.action.kind is ActionKind.SEND_B
    ]
    assert {a.peer for a in sends} == set(range(lowest, 3))
    assert all(not executor._signatures[k].trains for executor in executors
               for k in executor._signatures if k < lowest)  # fmt: skip
