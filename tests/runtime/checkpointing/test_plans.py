"""Compiled programs: a checkpoint goes from plan to plan of the planner's own, and back."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_trainers import everything, held, moved
from torch import nn

import fxpart


class Small(nn.Module):
    """An embedding that the head shares, a frozen layer, batch statistics, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("never_used", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.drop(self.norm(x)) + first)


CUT = '{"annotations": {"layers.*.weight": "tp:S(0)"}}'
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "pipeline 4": ("local:4", {"mesh": "none", "stages": 4}),
    "pipeline 2": ("local:2", {"mesh": "none", "stages": 2}),
    "dp 2": ("local:2", {"mesh": "dp=2", "stages": 1}),
    "pipeline 2 x dp 2, zero 1": ("local:4", {"mesh": "dp=2", "stages": 2, "zero": 1}),
    "tp 2": ("local:2", {"mesh": "tp=2", "stages": 1, "annotations": CUT}),
    "zero 2": ("local:2", {"mesh": "dp=2", "stages": 1, "zero": 2}),
    "zero 3": ("local:2", {"mesh": "dp=2", "stages": 1, "zero": 3}),
    "one": ("local:1", {"mesh": "none", "stages": 1}),
}  # fmt: skip


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 12, (12,), generator=generator) for _ in range(2))  # type: ignore[return-value]


@cache
def program(plan: str) -> fxpart.api.Program:
    if plan != "one":
        cluster, constraints = PLANS[plan]
        return program("one").replan(cluster, microbatches=2, constraints=constraints)
    torch.manual_seed(0)
    return fxpart.compile(
        Small(), "local:1", example_inputs=batch(), loss=nn.functional.cross_entropy,
        microbatches=2, constraints={**PLANS["one"][1], "granularity": "op"},
        batch_coupling="per-microbatch",
    )  # fmt: skip


def trainer(plan: str, **options: Any) -> Any:
    return program(plan).trainer(torch.optim.AdamW, **options)


@pytest.mark.slow
def test_from_plan_to_plan(tmp_path: Path) -> None:
    """Each plan loads what the one before has saved, bit by bit, and goes on as it would."""
    made = trainer("one")
    for number, plan in enumerate([*PLANS, "pipeline 4"]):
        for seed in range(2):
            made.step(batch(10 * number + seed))
        saved = made.save_checkpoint(tmp_path / str(number))
        state = everything(made)
        assert held(saved) == state
        assert "model/never_used" in state
        new, compared, again = trainer(plan), trainer(plan), trainer(plan)
        new.step(batch(99))
        new.load_checkpoint(saved)
        assert everything(new) == state, plan
        moved(made, compared)
        assert new.step(batch(77)) == compared.step(batch(77))
        assert everything(new) == everything(compared), plan
        # And by the same plan: as if it had not been stopped.
        new.save_checkpoint(tmp_path / f"{number} more")
        again.load_checkpoint(tmp_path / f"{number} more")
        assert again.step(batch(78)) == new.step(batch(78))
        assert everything(again) == everything(new), plan
        made = new


@pytest.mark.slow
def test_what_a_checkpoint_says_of_its_plan(tmp_path: Path) -> None:
    from fxpart.checkpoint.reader import Checkpoint

    made = trainer("pipeline 2")
    found = Checkpoint.open(made.save_checkpoint(tmp_path / "a"))
    assert found.plan() == program("pipeline 2").plan.dumps()
    assert found.manifest.fingerprint == program("one").plan.model.fingerprint
    assert (found.manifest.weights, found.manifest.world) == ("flush", 2)


@pytest.mark.slow
def test_a_plan_run_as_a_stream(tmp_path: Path) -> None:
    """Weights of a mode, saved and loaded by a plan on as many and on fewer stages."""
    old = trainer("pipeline 4", weight_mode="pipemare", total_updates=30)
    assert old.is_asynchronous
    for seed in range(6):
        old.step(batch(seed))
    saved = old.save_checkpoint(tmp_path)
    old.pop_losses()
    again = trainer("pipeline 4", weight_mode="pipemare", total_updates=30)
    again.load_checkpoint(saved)
    for made in (old, again):
        for seed in range(6, 10):
            made.step(batch(seed))
        made.drain()
    assert everything(again) == everything(old)
    plain = trainer("tp 2")
    plain.load_checkpoint(saved)
    assert everything(plain) == held(saved)
