"""Tensors of ranks that sum gradients: predicted, and followed allocation by allocation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import fxpart
from fxpart.codegen.generated_program import write_program
from fxpart.compat.optimizer_choice import choose
from fxpart.profiling.memory import allocations
from fxpart.profiling.processes import run_on_processes
from fxpart.profiling.trial_worker import draw_weight, load_batch, save_batch
from fxpart.runtime.transport import process_group_transport
from fxpart.training.trainer_factory import load_trainer

WIDTH, LAYERS = 512, 8
ONE = 4 * WIDTH * WIDTH  # bytes of a layer's weight


class Layers(nn.Module):
    """Wide layers on few rows: nearly all of its memory is weights and what belongs to them."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss is the mean square."""
        return {"loss": self.layers(x).square().mean()}


def weighed(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """The most that a rank's tensors take at once, from loading to the third step.

    As on two hosts: within one, shared memory that no allocator knows has the packed gradients.
    """
    del rank, world
    process_group_transport.connect_memory = lambda *_, **__: None  # type: ignore[assignment]
    folder = Path(payload["folder"])

    def train() -> None:
        trainer = load_trainer(folder / "program", choose("adamw").make, weights=draw_weight)
        batch = load_batch(folder)
        for _ in range(3):
            trainer.step(batch)
        trainer.close()

    return {"peak": allocations(train).peak}


@pytest.mark.slow
def test_packed_gradients_are_there_twice(tmp_path: Path) -> None:
    batch = torch.randn(8, WIDTH)
    host = fxpart.Cluster.local(2)
    first, second = host.devices
    two = msgspec.structs.replace(
        host,
        devices=(first, msgspec.structs.replace(second, host="another")),
        links=(msgspec.structs.replace(host.links[0], source="*", target="*"),),
    )
    program = fxpart.compile(
        Layers(), two, example_inputs=(batch,), microbatches=1, optimizer="adamw",
        constraints={"mesh": "dp=2", "stages": 1},
    )  # fmt: skip
    write_program(program.plan, program.parts, tmp_path / "program")
    save_batch((batch,), tmp_path)
    (entry,) = program.plan.prediction.ranks
    assert entry.memory.sums == (LAYERS - 1) * ONE, "one travels first and alone"
    rows = run_on_processes(2, f"{__name__}:weighed", {"folder": str(tmp_path)}, 120.0)
    for row in rows:
        assert row["peak"] > entry.memory.total - entry.memory.sums
        assert entry.memory.total == pytest.approx(row["peak"], rel=0.03)
        assert entry.peak == pytest.approx(row["peak"], rel=0.03)
