"""Placements of inputs: they are sharded where the rows of their readers are."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from sharded_graphs import propagated
from torch import nn

from fxpart.capture import capture
from fxpart.cluster.model import Cluster, Device, Link
from fxpart.compiler import PassManager
from fxpart.pricing.placement_rows import solve_rows
from fxpart.pricing.placements import build
from fxpart.solver.placement.portfolio import solve_placement
from fxpart.solver.placement.problem import PlacementArrays


class Classifier(nn.Module):
    """A layer and a loss with targets: both inputs have the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x), y)


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [1e6, 1e7, 1e11])
def test_inputs_follow_sharded_rows_in_the_best_choice(bandwidth: float) -> None:
    """Equal to the best of all choices in which inputs are sharded where rows are."""
    batch = (torch.randn(4, 6), torch.arange(4))
    captured = capture(Classifier(), batch, batch_size=4)
    graph = PassManager(all_passes()).run(PREPARE, captured.graph)
    device = Device(
        name="d0",
        kind="gpu",
        model="slow",
        host="h0",
        memory=1 << 30,
        flops={"float32": 1e8},
        bandwidth=1e8,
    )
    cluster = Cluster(
        name="slow",
        devices=tuple(msgspec.structs.replace(device, name=f"d{i}") for i in range(2)),
        links=(Link(source="*", target="*", latency=0.0, bandwidth=bandwidth),),
    )
    built = build(propagated(graph, "tp=2", {}), captured, cluster, budget=1e12)
    numbers = PlacementArrays(built.problem)
    every = itertools.product(*(range(n) for n in numbers.sizes))
    best = min(
        numbers.evaluate(choice).seconds for choice in every if built.shard_inputs(choice) == choice
    )
    found = solve_rows(built)
    assert found.status == "optimal" and found.choice is not None
    assert built.shard_inputs(found.choice) == found.choice
    assert found.seconds == pytest.approx(best, rel=1e-6)
    assert found.bound <= best * (1 + 1e-9)
    relaxed = solve_placement(built.problem).choice
    assert relaxed is not None
    later = numbers.evaluate(built.shard_inputs(relaxed)).seconds
    assert later > 1.2 * best if bandwidth == 1e7 else later >= best
