"""A chain of stage modules, driven in asynchronous 1F1B order in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fxpart.runtime.weights import StageWeights
from fxpart.schedule.versions import WeightVersionCounters, count_chain_warmup
from fxpart.schedule.weight_modes import WeightMode, weight_mode

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]


class Stage:
    """One stage of a chain: module, optimizer and weights, and what is between F and B."""

    def __init__(self, module: nn.Module, make: MakeOptimizer, weights: dict[str, Any]) -> None:
        self.module = module
        self.optimizer = make(list(module.parameters()))
        self.weights = StageWeights(module, self.optimizer, **weights)
        self.cells: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


class Chain:
    """Stages k = 0, 1, ... each of which runs K - k forwards before its first backward.

    every: microbatches to an update. losses: of each microbatch.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mode: str | WeightMode,
        every: int,
        make: MakeOptimizer,
        loss: Loss,
        **options: Any,
    ) -> None:
        self.mode = weight_mode(mode)
        self.versions = WeightVersionCounters(count_chain_warmup(len(modules)), every)
        self.loss = loss
        self.stages = [
            Stage(m, make, {"mode": self.mode, "versions": self.versions, "stage": k, **options})
            for k, m in enumerate(modules)
        ]
        self.losses: dict[int, torch.Tensor] = {}

    def run(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """All minibatches and then all that is outstanding; flush: after each minibatch."""
        every, first = self.versions.every, 0
        if self.mode.flush:
            for batch in batches:
                self._stream([batch], first)
                first += every
                for stage in self.stages:
                    stage.weights.restart(stage.weights.updates)
        else:
            self._stream(batches, first)

    def _stream(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], first: int) -> None:
        every = self.versions.every
        pieces = [
            (x, y, len(x) / len(batch[0]))
            for batch in batches
            for x, y in zip(batch[0].tensor_split(every), batch[1].tensor_split(every), strict=True)
        ]
        waiting = [list(order(k, self.versions, len(pieces))) for k in range(len(self.stages))]
        given: dict[tuple[int, int], torch.Tensor] = {}
        back: dict[tuple[int, int], torch.Tensor] = {}
        while any(waiting):
            moved = False
            for k, stage in enumerate(self.stages):
                while waiting[k]:
                    kind, i = waiting[k][0]
                    if kind == "F":
                        if k and (k, i) not in given:
                            break
                        x = given.pop((k, i)) if k else pieces[i][0]
                        self._forward(k, stage, i, x, pieces[i][1], given, first)
                    else:
                        if k + 1 < len(self.stages) and (k, i) not in back:
                            break
                        self._backward(k, stage, i, pieces[i][2], back)
                        if (i + 1) % every == 0:
                            stage.weights.update()
                            stage.optimizer.zero_grad()
                    waiting[k].pop(0)
                    moved = True
            assert moved, "no stage can go on"

    def _forward(
        self, k: int, stage: Stage, i: int, x: torch.Tensor, y: torch.Tensor, given: Any, first: int
    ) -> None:
        if k:
            x = x.detach().requires_grad_()
        with stage.weights.forward(i):
            out = stage.module(x)
        if k + 1 == len(self.stages):
            out = self.loss(out, y)
            self.losses[first + i] = out.detach()
        else:
            given[k + 1, i] = out.detach()
        stage.cells[i] = x, out

    def _backward(self, k: int, stage: Stage, i: int, share: float, back: Any) -> None:
        x, out = stage.cells.pop(i)
        gradient = torch.full_like(out, share) if k + 1 == len(self.stages) else back.pop((k, i))
        with stage.weights.backward(i):
            torch.autograd.backward([out], [gradient])
        if k:
            assert x.grad is not None
            back[k - 1, i] = x.grad


def order(stage: int, versions: WeightVersionCounters, count: int) -> Iterator[tuple[str, int]]:
    """Forwards and backwards of one stage for so many microbatches."""
    ahead = min(versions.ahead[stage], count)
    yield from (("F", i) for i in range(ahead))
    for i in range(count):
        yield "B", i
        if i + ahead < count:
            yield "F", i + ahead
