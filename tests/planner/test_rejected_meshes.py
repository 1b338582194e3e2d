"""What plans state of meshes that were priced as a whole and rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_clusters import equal_hosts
from torch import nn

import fxpart
from fxpart import Cluster, Plan
from fxpart.planner.mesh_plan import SlowerThanIncumbentError
from fxpart.planner.mesh_pricer import MeshPricer

ESTIMATED = "not priced as a whole"


class Net(nn.Module):
    """Products and attention, with much to store."""

    def __init__(self, size: int = 256, count: int = 3) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(size, 3 * size) for _ in range(count))
        self.up = nn.ModuleList(nn.Linear(size, 4 * size) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(4 * size, size) for _ in range(count))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for qkv, up, down in zip(self.qkv, self.up, self.down, strict=True):
            parts = qkv(nn.functional.layer_norm(x, x.shape[-1:])).chunk(3, -1)
            x = x + nn.functional.scaled_dot_product_attention(*parts)
            x = x + down(nn.functional.gelu(up(x)))
        return nn.functional.mse_loss(x, y)


def cluster(memory: int, far: float) -> Cluster:
    return equal_hosts(2, 2, memory=memory, near=100e9, far=far)


@pytest.mark.slow
def test_meshes_that_were_priced_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best estimates are those of dp 2 with ZeRO 2, which is slower as a whole than tp 2."""
    given = {"x": torch.randn(64, 32, 256), "y": torch.randn(64, 32, 256)}
    program = fxpart.compile(
        Net(), cluster(8 << 30, 2e9), example_kwargs=given, check="off", optimizer="adamw",
        constraints={"dp": 4, "stages": 1},
    )  # fmt: skip
    price, slower = MeshPricer.price_unequal, dict[tuple[str, int], float]()

    def priced(self: MeshPricer, request: Any, *rest: Any) -> Any:
        try:
            return price(self, request, *rest)
        except SlowerThanIncumbentError as fault:
            slower[str(request.mesh), request.zero] = fault.seconds
            raise

    monkeypatch.setattr(MeshPricer, "price_unequal", priced)
    plan: Plan = program.replan(cluster(40 << 20, 0.2e9)).plan
    seconds = slower["dp=2", 2]
    row = next(each for each in plan.alternatives if each.what == "dp2 tp1 zero2")
    assert (row.step_seconds, row.why) == (
        seconds, "faster by the estimate of each block, slower priced as a whole"
    )  # fmt: skip
    assert seconds > plan.prediction.step_seconds
