"""Bags of one index each, whose offsets' step is left out in the graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import fxpart


class Model(nn.Module):
    """Two tables, one index of each for a row."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum", sparse=True) for _ in "ab")
        self.out = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n, 2] to [n]."""
        found = [table(ids[:, k : k + 1]) for k, table in enumerate(self.tables)]
        return self.out(found[0] * found[1]).squeeze(1)


@pytest.mark.slow
def test_they_are_cut_over_replicas() -> None:
    torch.manual_seed(0)
    model, ids, wanted = Model(), torch.randint(0, 20, (8, 2)), torch.rand(8)
    loss = functional.mse_loss(model(ids), wanted).item()
    program = fxpart.compile(
        model, "local:2", example_inputs=(ids, wanted), loss=functional.mse_loss,
        optimizer="adagrad", constraints={"mesh": "dp=2", "stages": 1},
    )  # fmt: skip
    trainer = program.trainer()
    torch.testing.assert_close(trainer.step((ids, wanted)).item(), loss)
    trainer.close()
    assert program.plan.stages[0].data_parallel == 2
