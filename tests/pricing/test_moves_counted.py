"""What is priced inside stages is what lanes start: collectives counted while a step runs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
import fxpart.price
from fxpart.pricing.sharing import Move, moves

_NAMES = {
    ("partial", "replicate"): "all_reduce",
    ("shard(0)", "replicate"): "all_gather",
    ("partial", "shard(0)"): "reduce_scatter",
    ("shard(0)", "shard(1)"): "all_to_all",
}


class Clicks(nn.Module):
    """Tables that are read in bags: their offsets are numbers that every lane takes its part of."""

    def __init__(self, tables: int = 3) -> None:
        super().__init__()
        made = (nn.EmbeddingBag(30, 8, mode="sum", sparse=True) for _ in range(tables))
        self.tables = nn.ModuleList(made)
        self.top = nn.Linear(8 * tables, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        bags = [table(ids[:, k : k + 1]) for k, table in enumerate(self.tables)]
        found: torch.Tensor = self.top(torch.cat(bags, 1))[:, 0]
        return found


def clicks() -> tuple[nn.Module, Any, Any]:
    example = (torch.randint(0, 30, (8, 3)), torch.rand(8).round())
    return Clicks(), example, nn.functional.binary_cross_entropy_with_logits


def layers() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Dropout(0.1))
    return model, (torch.randn(8, 8), torch.randn(8, 8)), nn.functional.mse_loss


# The first product's outputs are cut, and so the second's inputs: sums there, forward and backward.
CUT = json.dumps({"annotations": {"0.weight": "tp:S(0)", "0.bias": "tp:S(0)"}})


@pytest.mark.parametrize(
    ("made", "mesh"), [(clicks, "dp=2"), (layers, "dp=2"), (layers, "tp=2"), (layers, "dp=2,tp=2")]
)
def test_collectives_that_are_priced_are_those_that_start(
    made: Any, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By kind, of a microbatch's forward and backward. Sums of a step are not among them."""
    priced: list[Move] = []

    def told(*args: Any) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
        found = moves(*args)
        priced.extend((*found[0], *found[1]))
        return found

    monkeypatch.setattr(fxpart.price, "moves", told)
    torch.manual_seed(0)
    model, example, loss = made()
    wishes = {"mesh": mesh, "stages": 1} | ({"annotations": CUT} if "tp" in mesh else {})
    program = fxpart.compile(
        model, f"local:{4 if ',' in mesh else 2}", example_inputs=example, loss=loss,
        microbatches=2, optimizer="adagrad", constraints=wishes,
    )  # fmt: skip
    wanted = Counter(_NAMES[move.source, move.target] for move in priced)
    trainer = program.trainer()
    trainer.step(example)
    with trainer.record() as recorder:
        trainer.step(example)
    trainer.close()
    spans = list(recorder.recording.of("collective"))
    for rank in range(program.plan.world):
        found = Counter(span.name for span in spans if span.rank == rank)
        # of two microbatches, and of each its start and the wait for its end
        assert found == {name: 4 * count for name, count in wanted.items()}
    assert wanted["all_reduce"] == {"dp=2": 1, "tp=2": 2, "dp=2,tp=2": 3}[mesh]
