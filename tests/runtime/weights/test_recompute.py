"""Stages that make their activations again, from the weights that their forward read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fxpart.rng import seeded
from fxpart.runtime.executor.recompute import StageRecomputation
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import MODES, WeightMode

AHEAD = 3


class Block(nn.Module):
    """Batch statistics, dropout and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(6)
        self.wide = nn.Linear(6, 6)

    def forward(self, key: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(rows, 6) to the same."""
        x = functional.gelu(self.wide(self.norm(x)))
        x = seeded(key, 0, functional.dropout, x, 0.3, True)
        return (torch.tanh(x @ self.wide.weight),)


def gradients(mode: str | WeightMode, recompute: Any) -> tuple[list[Any], Block]:
    """Of a stream on the first of three stages: gradients of inputs and weights."""
    module = Block()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    found_mode = MODES[mode] if isinstance(mode, str) else mode
    every = AHEAD if found_mode.base == "delayed" else 1
    weights = StageWeights(
        module, optimizer, found_mode, WeightVersionCounters((AHEAD, 2, 1), every), 0
    )
    again = StageRecomputation(module, recompute) if recompute else None
    if again is not None:
        weights.recompute(again)
    cells: dict[int, Any] = {}
    found: list[Any] = []
    for i in range(8):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(i)).requires_grad_()
        with weights.forward(i):
            out = module(i, x)[0] if again is None else again.call(module, i, x)[0]
        cells[i] = x, out
        done = i + 1 - AHEAD
        if done < 0:
            continue
        x, out = cells.pop(done)
        with weights.backward(done):
            g = torch.cos(out.detach())
            out.backward(g)
        assert x.grad is not None
        found.append([x.grad, *(p.grad.clone() for p in module.parameters())])  # type: ignore[union-attr]
        if (done + 1) % every == 0:
            weights.update()
            optimizer.zero_grad()
    if again is not None:
        assert again.times == 6
    return found, module


def same(some: list[Any], others: list[Any]) -> bool:
    """Whether all bits are equal."""
    pairs = [p for a, b in zip(some, others, strict=True) for p in zip(a, b, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


CUSTOM = {
    "looks back only": WeightMode("custom", backward="applied", look_backward="depth"),
    "looks further back": WeightMode(
        "custom", backward="applied", look_forward="staleness", look_backward="depth"
    ),
    "difference": WeightMode("custom", backward="applied", look_forward="depth", rule="difference"),
    "decaying": WeightMode("custom", look_forward="depth", rule="decaying"),
}
ALL: dict[str, WeightMode] = {**{n: m for n, m in MODES.items() if not m.flush}, **CUSTOM}


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("mode", ALL)
def test_the_forward_again(mode: str, recompute: str) -> None:
    """No bit changes, whatever weights the backward reads; statistics count once."""
    (some, one), (others, two) = gradients(ALL[mode], ""), gradients(ALL[mode], recompute)
    assert same(some, others)
    assert same([list(one.buffers())], [list(two.buffers())])
    assert int(one.norm.num_batches_tracked) == 8  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["naive", "pipemare", "spectrain"])
def test_weights_of_the_forward_are_kept_only_for_it(mode: str) -> None:
    """As many copies as a mode that stashes, while something is in flight; none after that."""
    module = Block()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    weights = StageWeights(
        module, optimizer, MODES[mode], WeightVersionCounters((AHEAD, 2, 1), 1), 0
    )
    again = StageRecomputation(module, "full")
    weights.recompute(again)
    outs: dict[int, torch.Tensor] = {}
    for i in range(8):
        with weights.forward(i):
            outs[i] = again.call(module, i, torch.ones(5, 6))[0]
        done = i + 1 - AHEAD
        if done >= 0:
            with weights.backward(done):
                outs.pop(done).sum().backward()
            weights.update()
            optimizer.zero_grad()
    assert weights.copies() <= AHEAD
    for done in sorted(outs):
        with weights.backward(done):
            outs.pop(done).sum().backward()
        weights.update()
    assert weights.copies() == 1
