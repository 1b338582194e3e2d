"""What ranks run to see whether they began with the same weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import fxpart
from fxpart.errors import FxpartError


def begin(seeded: bool, mesh: str, tied: bool) -> list[tuple[str, str, str]]:
    """Make a model and its trainer on two ranks; the problems that were raised."""
    rank = dist.get_rank()
    torch.manual_seed(0 if seeded else rank)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    if tied:
        model[2].weight = model[0].weight
    program = fxpart.compile(
        model, "local:2", example_inputs=(torch.zeros(4, 8), torch.zeros(4, 8)), microbatches=1,
        loss=nn.functional.mse_loss,
        constraints={"mesh": mesh, "stages": 2} if mesh == "none" else {"mesh": mesh},
    )  # fmt: skip
    try:
        program.trainer("sgd")
    except FxpartError as failure:
        return [(p.code, p.where, p.why) for p in failure.problems]
    return []
