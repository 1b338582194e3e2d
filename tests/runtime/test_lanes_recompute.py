"""Stages of several ranks: split backwards and recomputation keep the collectives in step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpart


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def trained(schedule: str, recompute: str, **constraints: Any) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(4)))
    batch = (torch.randn(8, 16), torch.randn(8, 16))
    given: dict[str, Any] = {"example_inputs": batch, "loss": F.mse_loss}
    chosen = {"stages": 2, "schedule": schedule, **constraints}
    program = fxpart.compile(model, "local:4", microbatches=4, constraints=chosen, **given)
    if recompute != "none":
        stages = (msgspec.structs.replace(s, recompute=recompute) for s in program.plan.stages)
        plan = msgspec.structs.replace(program.plan, stages=tuple(stages))
        program = fxpart.compile(model, "local:4", plan=plan, **given)
    trainer = program.trainer(torch.optim.AdamW)
    losses = [float(trainer.step(batch)) for _ in range(2)]
    state = trainer.state_dict()
    trainer.close()
    return losses, state


@pytest.mark.slow
@pytest.mark.parametrize(
    "shared", [{"mesh": "tp=2"}, {"mesh": "dp=2", "zero": 3}], ids=["tp", "zero3"]
)
def test_bits_of_whole_backwards_that_keep_all(shared: dict[str, Any]) -> None:
    losses, state = trained("1f1b", "none", **shared)
    for schedule, mode in (("zb-h1", "none"), ("1f1b", "full"), ("zb-h1", "selective")):
        found, other = trained(schedule, mode, **shared)
        assert found == losses, (schedule, mode)
        assert all(torch.equal(state[n], t) for n, t in other.items()), (schedule, mode)
