"""Training of many runs at once with the weight versions of asynchronous 1F1B, without fxpart.

Microbatches are taken one after another: a forward reads the version that `methods.reads` names, a
backward pass may read another, and every stage's weights are kept for as many updates as needed.
Runs of one task, optimizer and number of stages are rows of the same matrices, whatever their
methods, learning rates and seeds, so that small models cost a fraction of one run after another.
Tests compare the weights and losses with the golden traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from benchmarks.stalebench.methods import METHODS, reads
from benchmarks.stalebench.models import Layer
from benchmarks.stalebench.optimizers import OPTIMIZERS, Optimizer
from benchmarks.stalebench.traces import DECAY, DELAYED, Read
from torch import Tensor

Batch = tuple[Tensor, Tensor]


class Run(NamedTuple):
    """One run of a cell."""

    method: str
    rate: float
    seed: int


class Span(NamedTuple):
    """Weights that read alike: rows of runs, columns of parameters."""

    rows: slice
    columns: slice
    read: Read
    rule: str


@dataclass
class Trainer:
    """Runs that are trained together.

    layers: of the model. optimizer: its name, and make: what it is made with. runs: sorted by
    method, with equally many microbatches. loss: of outputs and targets, for each run. schedule:
    the factor of the learning rate by update, from 0. steps: updates of a run. clip: the norm of
    all gradients, of which each stage may have its share; 0: no limit.
    """

    layers: Sequence[Layer]
    stages: int
    runs: Sequence[Run]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: str
    steps: int
    schedule: Callable[[int], float] = lambda update: 1.0
    clip: float = 0.0
    dtype: torch.dtype = torch.float32
    make: Callable[..., Optimizer] | None = None
    losses: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.microbatches,) = {METHODS[run.method].microbatches for run in self.runs}
        self.methods = [
            (name, slice(rows[0], rows[-1] + 1))
            for name, group in groupby(range(len(self.runs)), lambda i: self.runs[i].method)
            for rows in [list(group)]
        ]
        self.shapes, bounds, size = [], [0], 0
        for index, layer in enumerate(self.layers):
            for shape, _ in layer.shapes:
                self.shapes.append((size, shape))
                size += math.prod(shape)
            following = (index + 1) * self.stages // len(self.layers)
            if following > index * self.stages // len(self.layers):
                bounds.append(size)
        self.columns = [slice(a, b) for a, b in pairwise(bounds)]
        self.newest = torch.empty(len(self.runs), size, dtype=self.dtype)
        self.rates = torch.tensor([[run.rate] for run in self.runs], dtype=self.dtype)
        self._initialize()
        self.working = self.newest.clone()
        self.parameters = self.view(self.working)
        self.depth = 1 + max(
            (t - 1) // self.microbatches - read.version
            for name, _ in self.methods
            for t in range(1, 4 * self.stages * self.microbatches)
            for read in reads(name, self.stages, t)
        )
        self.depth += any(METHODS[name].rule == "difference" for name, _ in self.methods) + 1
        self.versions: list[Tensor] = [self.newest.clone()]
        self.directions: list[Tensor | None] = [None]
        self.rule = (self.make or OPTIMIZERS[self.optimizer])(self.newest, self.shapes)
        self.moved: dict[str, Tensor] = {}

    def _initialize(self) -> None:
        for row, run in enumerate(self.runs):
            generator = torch.Generator().manual_seed(run.seed)
            first = 0
            for layer in self.layers:
                for shape, deviation in layer.shapes:
                    size = math.prod(shape)
                    drawn = torch.randn(size, generator=generator, dtype=self.dtype) * deviation
                    self.newest[row, first : first + size] = drawn if deviation >= 0 else 1.0
                    first += size

    def view(self, weights: Tensor) -> list[list[Tensor]]:
        """Return the parameters of each layer, which share the memory of these weights."""
        data, found, places = weights.data, [], iter(self.shapes)
        for layer in self.layers:
            mine = []
            for shape, _ in layer.shapes:
                first, _ = next(places)
                part = data[:, first : first + math.prod(shape)].unflatten(1, shape)
                mine.append(part.detach().requires_grad_())
            found.append(mine)
        return found

    def outputs(self, parameters: list[list[Tensor]], inputs: Tensor) -> Tensor:
        """Return what the model computes."""
        x = inputs
        for layer, mine in zip(self.layers, parameters, strict=True):
            x = layer.run(mine, x)
        return x

    # -- one update -------------------------------------------------------------------------------

    def step(self, microbatches: Sequence[Batch]) -> None:
        """Train on a minibatch: inputs and targets (runs, rows, ..) of each microbatch."""
        update, total, loss = len(self.losses), None, 0.0
        for index, (inputs, targets) in enumerate(microbatches):
            t = update * self.microbatches + index + 1
            spans = list(self._list_spans(t))
            self._read_forward(spans, update)
            each = self.loss(self.outputs(self.parameters, inputs), targets)
            self._read_backward(spans, update)
            every = [p for mine in self.parameters for p in mine]
            found = torch.autograd.grad(each.sum() / self.microbatches, every)
            gradient = torch.cat([g.flatten(1) for g in found], 1)
            total = gradient if total is None else total + gradient
            loss = loss + each.detach() / self.microbatches
        assert total is not None and isinstance(loss, Tensor)
        self.losses.append(loss)
        if self.clip:
            self._clip(total)
        self._update(total, update)

    def _list_spans(self, t: int) -> Iterator[Span]:
        for name, rows in self.methods:
            every = reads(name, self.stages, t)
            for read, group in groupby(range(self.stages), every.__getitem__):
                stages = list(group)
                columns = slice(self.columns[stages[0]].start, self.columns[stages[-1]].stop)
                yield Span(rows, columns, read, METHODS[name].rule)

    def _read_forward(self, spans: Sequence[Span], update: int) -> None:
        for span in spans:
            self.working[span.rows, span.columns] = self._predict(
                span, span.read.version, span.read.ahead, update
            )

    def _read_backward(self, spans: Sequence[Span], update: int) -> None:
        for span in spans:
            place = span.rows, span.columns
            if span.read.after == "now":
                self.working[place] = self._predict(span, update, span.read.back, update)
            elif span.read.after == "corrected":
                corrected = self.newest[place]
                if span.read.gap and "pipemare" in self.moved:
                    corrected = corrected - span.read.gap * self.moved["pipemare"][:, span.columns]
                self.working[place] = corrected

    def _predict(self, span: Span, version: int, ahead: int, update: int) -> Tensor:
        """Return the weights so many updates after a version."""
        place, back = (span.rows, span.columns), update - version
        weights = self.versions[-1 - back][place]
        if not ahead or not version:
            return weights
        direction = self.directions[-1 - back]
        if span.rule == "difference" or direction is None:
            return weights + ahead * (weights - self.versions[-2 - back][place])
        coming = sum(self._factor(u) for u in range(version, version + ahead))
        rate = self.rates[span.rows] * coming
        if self.rule.decay:
            weights = weights * (1 - rate * self.rule.decay)
        return weights - rate * direction[place]

    def _factor(self, update: int) -> float:
        return self.schedule(min(update, self.steps - 1))

    def _clip(self, gradient: Tensor) -> None:
        for columns in self.columns:
            part = gradient[:, columns]
            most = self.clip * math.sqrt(part.shape[1] / gradient.shape[1])
            part *= (most / (part.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)

    def _update(self, gradient: Tensor, update: int) -> None:
        before, rates = self.newest.clone(), self.rates * self._factor(update)
        gaps = [-(-(self.stages - 1 - k) // self.microbatches) for k in range(self.stages)]
        mare = [rows for name, rows in self.methods if METHODS[name].mode == "pipemare"]
        for rows in mare:  # T1: divided by a power of the staleness that falls from 1 to 0.
            rates = rates.expand_as(gradient).clone() if rates.shape[1] == 1 else rates
            power = 1.0 - min(update / self.steps, 1.0)
            for columns, gap in zip(self.columns, gaps, strict=True):
                rates[rows, columns] /= max(gap, 1) ** power
        self.rule.step(self.newest, gradient, rates)
        for rows in mare:  # T2: the mean movement of an update.
            move = self.newest[rows] - before[rows]
            past = self.moved.setdefault("pipemare", torch.zeros_like(move))
            for columns, gap in zip(self.columns, gaps, strict=True):
                gamma = DECAY ** (1 / gap) if gap else 0.0
                past[:, columns] = gamma * past[:, columns] + (1 - gamma) * move[:, columns]
        for name, rows in self.methods:
            if METHODS[name].mode == DELAYED[1]:  # The error of each late update is added.
                moved = before[rows] - self.newest[rows]
                if name in self.moved:
                    self.newest[rows] += self.moved[name] - moved
                self.moved[name] = moved
        self.versions = [*self.versions[-self.depth + 1 :], self.newest.clone()]
        self.directions = [*self.directions[-self.depth + 1 :], self.rule.direction]
