"""The golden traces: written by their oracle, and followed by the emulator to 1e-12."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from benchmarks.stalebench import traces
from torch import nn

from fxpart.emulator import Emulator
from fxpart.schedule.weight_modes import MODES

SETTINGS = list(traces.list_settings())
MADE: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01, betas=(0.99, 0.999)),
}


class Chain(nn.Sequential):
    """The stages of the traces."""

    def __init__(self, stages: int) -> None:
        super().__init__(*[nn.Sequential(nn.Linear(1, 1), nn.Tanh()) for _ in range(stages)])
        self.double()
        with torch.no_grad():
            for k, (linear, _) in enumerate(self):
                linear.weight.fill_(0.9 + 0.05 * k)
                linear.bias.fill_(0.1 - 0.02 * k)


def half_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean() / 2


@cache
def emulator(stages: int) -> Emulator:
    example = (torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64))
    return Emulator(
        Chain(stages), stages=stages, microbatches=2, loss=half_square,
        example_inputs=example,
    )  # fmt: skip


def batches(a: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    samples = [range(u * a + 1, u * a + a + 1) for u in range(traces.UPDATES)]
    return [
        (
            torch.tensor([[math.sin(t)] for t in mine], dtype=torch.float64),
            torch.tensor([[math.cos(2 * t) / 2] for t in mine], dtype=torch.float64),
        )
        for mine in samples
    ]


def test_the_file_is_the_oracles() -> None:
    kept = json.loads(traces.FILE.read_text("utf-8"))
    assert list(kept) == ["/".join(map(str, each)) for each in SETTINGS]
    for each in SETTINGS:
        found = traces.trace(*each)
        old = kept["/".join(map(str, each))]
        assert found["losses"] == pytest.approx(old["losses"], rel=1e-13)
        weights = zip(found["weights"], old["weights"], strict=True)  # type: ignore[call-overload]
        assert all(mine == pytest.approx(theirs, rel=1e-13) for mine, theirs in weights)


@pytest.fixture
def doubles() -> Iterator[None]:
    """torch's default; NAdam keeps its product of momenta in it."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("mode", traces.MODES)
def test_the_emulator_follows(mode: str, stages: int) -> None:
    kept = json.loads(traces.FILE.read_text("utf-8"))
    for own, count, a, optimizer in SETTINGS:
        if (own, count) != (mode, stages):
            continue
        known = kept[f"{mode}/{stages}/{a}/{optimizer}"]
        options = {"total_updates": traces.UPDATES} if mode == "pipemare" else {}
        base, _, rule = mode.partition("+")
        weights = replace(MODES[base], rule=rule or MODES[base].rule)  # type: ignore[arg-type]
        run = emulator(stages).run(
            batches(a), weights, MADE[optimizer], traces.UPDATES, microbatches=a, **options
        )
        assert run.losses == pytest.approx(known["losses"], rel=1e-12, abs=1e-14)
        expected = torch.tensor(known["weights"], dtype=torch.float64)
        found = [
            [run.state_dict[f"{k}.0.{n}"].item() for n in ("weight", "bias")] for k in range(stages)
        ]
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64), expected, rtol=1e-12, atol=1e-13
        )
