"""Gradients of single layers, by hand, where forward and backward read different weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mixed_weights import CASES, Weights, built

from fxpart.runtime.weights import StageWeights
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import MODES, WeightMode

LR, MOMENTUM, AHEAD = 0.05, 0.9, 3
MIXED = (
    *(
        MODES[name]
        for name in MODES
        if not MODES[name].flush and name not in ("2bw", "2bw-ef", "nadam-stash")
    ),
    WeightMode("both", backward="applied", look_forward="depth", look_backward="depth"),
)


class Every:
    """Every version that a stage's weights have had, with the direction of its optimizer."""

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer, gap: int) -> None:
        self.module, self.optimizer, self.gap = module, optimizer, gap
        self.weights: list[Weights] = []
        self.directions: list[Weights] = []
        self.moved: list[Weights] = []
        self.add()

    def add(self) -> None:
        """After an update."""
        named = dict(self.module.named_parameters())
        state = self.optimizer.state
        now = {n: p.detach().clone() for n, p in named.items()}
        zero = {n: torch.zeros_like(p) for n, p in now.items()}
        moved = zero
        if self.weights:
            gamma = math.exp(-2) ** (1 / max(self.gap, 1))
            old, before = self.weights[-1], self.moved[-1]
            moved = {n: gamma * before[n] + (1 - gamma) * (now[n] - old[n]) for n in now}
        self.weights.append(now)
        self.moved.append(moved)
        self.directions.append(
            {
                n: state[p]["momentum_buffer"].clone() if state[p] else zero[n]
                for n, p in named.items()
            }
        )

    def ahead(self, version: int, look: int) -> Weights:
        """Rule 1 for SGD: W - s lr v."""
        w, v = self.weights[version], self.directions[version]
        return {n: w[n] - look * LR * v[n] for n in w}

    def corrected(self, version: int, staleness: int) -> Weights:
        """W - s delta."""
        w, moved = self.weights[version], self.moved[version]
        return {n: w[n] - staleness * moved[n] for n in w}


@pytest.mark.parametrize("mode", MIXED, ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", CASES)
def test_by_hand(name: str, mode: WeightMode) -> None:
    """The second of three stages, of which each microbatch waits for one or two updates."""
    case, module = CASES[name], built(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
    versions, stage = WeightVersionCounters((AHEAD + 1, AHEAD, 1), 1), 1
    weights = StageWeights(module, optimizer, mode, versions, stage)
    every = Every(module, optimizer, versions.gap(stage))
    cells: dict[int, Any] = {}
    for i in range(9):
        read = versions.read(mode, stage, i)
        x = case.draw()
        if x.is_floating_point():
            x.requires_grad_()
        with weights.forward(i):
            out = module(x)
        cells[i] = x, out, every.ahead(read.version, read.look_forward)
        done = i + 1 - AHEAD
        if done < 0:
            continue
        x, out, front = cells.pop(done)
        read = versions.read(mode, stage, done)
        back = {
            "forward": front,
            "applied": every.ahead(read.backward, read.look_backward),
            "corrected": every.corrected(read.backward, read.staleness),
        }[mode.backward]
        g = torch.randn_like(out)
        with weights.backward(done):
            out.backward(g)
        expected, into, gradients = case.hand(front, back, x.detach(), g)
        torch.testing.assert_close(out.detach(), expected)
        if into is not None:
            torch.testing.assert_close(x.grad, into)
        for key, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[key], msg=f"{key} of {done}")
        weights.update()
        every.add()
        optimizer.zero_grad()
