"""Stages that make their activations again, from the weights that their backward reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from fxpart.rng import seeded
from fxpart.runtime.recompute import Recompute
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.versions import Versions
from fxpart.schedule.weight_modes import MODES

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


def gradients(mode: str, recompute: Any, *, oracle: bool = False) -> tuple[list[Any], Block]:
    """Of a stream on the first of three stages: results, gradients of inputs and weights.

    oracle: of a forward that runs with the weights of the backward instead.
    """
    module = Block()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    weights = StageWeights(module, optimizer, MODES[mode], Versions((AHEAD, 2, 1), 1), 0)
    again = Recompute(module, recompute) if recompute else None
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
            if oracle:
                held = {
                    n: t.detach().clone().requires_grad_() for n, t in module.named_parameters()
                }
                other = x.detach().requires_grad_()
                buffers = {n: b.clone() for n, b in module.named_buffers()}
                made = functional_call(module, {**held, **buffers}, (done, other))[0]
                found.append(torch.autograd.grad([made], [other, *held.values()], [g]))
            out.backward(g)
        if not oracle:
            assert x.grad is not None
            found.append([x.grad, *(p.grad.clone() for p in module.parameters())])  # type: ignore[union-attr]
        weights.update()
        optimizer.zero_grad()
    if again is not None:
        assert again.times == 6
    return found, module


def same(some: list[Any], others: list[Any]) -> bool:
    """Whether all bits are equal."""
    pairs = [p for a, b in zip(some, others, strict=True) for p in zip(a, b, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("mode", ["stash", "vertical", "spectrain-v2", "xpipe"])
def test_the_forward_again(mode: str, recompute: str) -> None:
    """Where the backward reads the forward's weights no bit changes; statistics count once."""
    (some, one), (others, two) = gradients(mode, ""), gradients(mode, recompute)
    assert same(some, others)
    assert same([list(one.buffers())], [list(two.buffers())])
    assert int(one.norm.num_batches_tracked) == 8  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["naive", "spectrain", "pipemare"])
def test_the_backward_s_own_forward(mode: str) -> None:
    """Otherwise the gradients are those of the weights that the backward reads, whole."""
    (found, one), (expected, _) = gradients(mode, "full"), gradients(mode, "full", oracle=True)
    assert same(found, expected)
    mixed, plain = gradients(mode, "")
    assert same(mixed[:1], found[:1]) and not same(mixed[1:], found[1:])
    assert int(one.norm.num_batches_tracked) == 8  # type: ignore[arg-type]
    assert int(plain.norm.num_batches_tracked) == 8  # type: ignore[arg-type]
