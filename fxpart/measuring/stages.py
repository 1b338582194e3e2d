"""Whole stages, timed as the runtime runs them: forward, backward, the optimizer's step.

A stage's emitted module runs in the runtime's own cell on values that the stages before it really
made; gradients start at zero and add up as over the microbatches of a step. Sparse ones are kept as
they came and put together before the update, as the runtime does it, and count as part of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpart.codegen.load import load_stage
from fxpart.codegen.materialise import constants_of, materialise
from fxpart.profile import TIMED
from fxpart.program import ProgramSpec
from fxpart.rng import microbatch_key
from fxpart.runtime.cell import Cell, Roots
from fxpart.runtime.groups import own
from fxpart.runtime.links import Link, links
from fxpart.runtime.optimizer import groups_of, make_optimizer
from fxpart.runtime.rows.taken import Taken
from fxpart.runtime.stage import StageTable

if TYPE_CHECKING:
    pass

Values = dict[str, torch.Tensor]
_WARM = 1  # steps that are not counted
_MOST = 15  # steps that are, in a turn
LEAST_STEPS = 3  # in the first turn
LEAST = TIMED * (_WARM + LEAST_STEPS)  # microbatches that a stage runs at least


@dataclass(frozen=True)
class Samples:
    """Seconds of a stage, one entry a step: of the first microbatch, of later ones, of the update.

    A first microbatch's backward makes the gradients, a later one's adds to them.
    """

    forward: tuple[float, ...]
    first: tuple[float, ...]
    later: tuple[float, ...]
    optimizer: tuple[float, ...]


class StageRun:
    """One stage of a program, ready to run microbatches on this device."""

    def __init__(
        self,
        spec: ProgramSpec,
        stage: int,
        source: str,
        state: Mapping[str, torch.Tensor],
        optimizer: Any,
        device: torch.device,
    ) -> None:
        """state: the model's tensors by name, copied. optimizer: as for a trainer."""
        self.module: nn.Module = load_stage(source, spec.stages[stage], device)
        materialise(self.module, spec, state, constants=constants_of(spec, state), strict=False)
        self.found = links(spec)
        self.table = StageTable.of(spec, spec.stages[stage], self.module, self.found, False)
        self._device = device
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self._trained = trained
        self._optimizer = _optimizer(optimizer, spec, stage, self.module)
        self._taken = Taken()
        self._tables = [
            self.module.get_parameter(held.attribute)
            for held in spec.stages[stage].state
            if held.sparse and held.requires_grad
        ]
        for table in self._tables:
            self._taken.watch(table)
        self._returned = [k for k in self.found if k.gradient and k.back == stage]
        self._key = microbatch_key(spec.seed, 0, 0)

    def _update(self) -> None:
        for table in self._tables:
            parts = self._taken.pending(table)
            self._taken.drop(table)
            table.grad = None if parts is None else parts.gradient(table)
        self._optimizer.step()

    def forward(self, inputs: Values, *, train: bool) -> Cell:
        """One microbatch: what the runtime does for an F, once its values have arrived."""
        cell = Cell(self.table)
        for position, name in self.table.user:
            cell.inputs[position] = inputs[name]
        for name, position in self.table.positions.items():
            cell.inputs[position] = inputs[name].detach()
        cell.forward(self._key, train=train)
        return cell

    def backward(self, cell: Cell, gradients: Sequence[torch.Tensor], weight: float) -> None:
        """What the runtime does for a B. gradients: one for each link that brings one back."""
        roots = Roots(self.table)
        for link, gradient in zip(self._returned, gradients, strict=True):
            roots.add(link, gradient)
        if self.table.loss is not None:
            roots.add_loss(cell.outputs[self.table.loss], weight)
        cell.backward(roots)

    def gradients(self, cell: Cell) -> list[torch.Tensor]:
        """Something like what comes back over each link: of its value's shape."""
        return [torch.randn_like(self._carried(link, cell)) for link in self._returned]

    def _carried(self, link: Link, cell: Cell) -> torch.Tensor:
        if link.source == self.table.index:
            return cell.outputs[link.output]
        found: torch.Tensor = cell.inputs[self.table.positions[link.name]]
        return found

    def samples(self, inputs: Values, seconds: float, least: int = LEAST_STEPS) -> Samples:
        """Steps of two microbatches until ``seconds`` are over, ``least`` at least."""
        rows: list[tuple[float, float, float, float]] = []
        end = time.perf_counter() + seconds
        gradients: list[torch.Tensor] | None = None
        for step in range(_WARM + _MOST):
            if step >= _WARM + least and time.perf_counter() > end:
                break
            gradients = self._step(inputs, gradients, rows)
        kept = rows[_WARM:]
        forward = tuple(row[0] for row in kept)
        first, later, optimizer = (tuple(row[i] for row in kept) for i in (1, 2, 3))
        return Samples(forward, first, later, optimizer)

    def _step(
        self,
        inputs: Values,
        gradients: list[torch.Tensor] | None,
        rows: list[tuple[float, float, float, float]],
    ) -> list[torch.Tensor]:
        """Two microbatches and an update from gradients of zero; the gradients that it used."""
        for parameter in self._trained:
            parameter.grad = None
        times = [self._now()]
        for _ in range(TIMED):
            cell = self.forward(inputs, train=True)
            times.append(self._now())
            if gradients is None:
                gradients = self.gradients(cell)
                times[-1] = self._now()
            if self.table.trains:
                self.backward(cell, gradients, 0.5)
            del cell
            times.append(self._now())
        self._update()
        times.append(self._now())
        ahead, first, again, later, update = (b - a for a, b in pairwise(times))
        rows.append(((ahead + again) / 2, first, later, update))
        assert gradients is not None
        return gradients

    def _now(self) -> float:
        """Of one thread its own seconds, which other processes do not lengthen."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif torch.get_num_threads() == 1:
            return time.thread_time()
        return time.perf_counter()


def _optimizer(
    given: Any, spec: ProgramSpec, stage: int, module: nn.Module
) -> torch.optim.Optimizer:
    """What updates a stage's parameters; several optimizers get theirs by the model's names."""
    every = [state for each in spec.stages for state in each.state if state.requires_grad]
    groups = groups_of(given, None, {state.name: state.shape for state in every})
    mine = [
        (state.name, module.get_parameter(state.attribute))
        for state in spec.stages[stage].state
        if state.requires_grad and state.kind == "parameter"
    ]
    return make_optimizer(given, [parameter for _, parameter in mine], own(groups, mine))
