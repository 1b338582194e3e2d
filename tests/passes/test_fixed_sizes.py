"""Ops whose kernels take symbolic sizes as numbers keep their symbols on each rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpart

MIDDLES: dict[str, tuple[nn.Module, int]] = {
    "unfold": (nn.Unfold(2, stride=2), 128),
    "unfold and fold": (nn.Sequential(nn.Unfold(3, padding=1), nn.Fold((4, 4), 3, padding=1)), 128),
    "overlapping": (nn.Unfold(3, dilation=1), 288),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIDDLES)
def test_columns_of_replicas(name: str) -> None:
    middle, width = MIDDLES[name]
    torch.manual_seed(0)
    given = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), middle, nn.Flatten(), nn.Linear(width, 5))
    plain = copy.deepcopy(given)
    data = [(torch.randn(rows, 3, 4, 4), torch.randn(rows, 5)) for rows in (8, 12)]
    trainer = fxpart.compile(
        given, "local:4", example_inputs=data[0], loss=F.mse_loss, microbatches=2,
        constraints={"mesh": "dp=2", "stages": 2},
    ).trainer(lambda p: torch.optim.SGD(p, lr=0.01))  # fmt: skip
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(plain(x), y)
        loss.backward()
        optimizer.step()
        assert trainer.step((x, y)).item() == pytest.approx(loss.item(), rel=1e-5)
    trainer.close()
