"""Whole stages, timed as the runtime runs them: forward, backward, the optimizer's step.

A stage's emitted module runs in the runtime's own cell on values that the stages before it really
made; gradients start at zero and add up as over the microbatches of a step. Sparse ones are kept as
they came and put together before the update, as the runtime does it, and count as part of it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpart.codegen.alike import FIRST, stage_key
from fxpart.codegen.load import load_stage
from fxpart.codegen.materialise import constants_of, materialise
from fxpart.measuring.outliers import timing
from fxpart.profile import TIMED, StageTiming
from fxpart.program import ProgramSpec
from fxpart.rng import microbatch_key
from fxpart.runtime.batch import Reader
from fxpart.runtime.cell import Cell, Roots
from fxpart.runtime.groups import own
from fxpart.runtime.links import Link, links
from fxpart.runtime.optimizer import groups_of, make_optimizer
from fxpart.runtime.rows.taken import Taken
from fxpart.runtime.shapes import Sizes
from fxpart.runtime.stage import StageTable

if TYPE_CHECKING:
    from fxpart.capture import Captured

Values = dict[str, torch.Tensor]
_WARM = 1  # steps that are not counted
_LEAST, _MOST = 3, 15  # steps that are
LEAST = 2 * (_WARM + _LEAST)  # microbatches that a stage runs at least


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

    def samples(self, inputs: Values, seconds: float) -> Samples:
        """Steps of two microbatches until ``seconds`` are over, three at least."""
        rows: list[tuple[float, float, float, float]] = []
        end = time.perf_counter() + seconds
        gradients: list[torch.Tensor] | None = None
        for step in range(_WARM + _MOST):
            if step >= _WARM + _LEAST and time.perf_counter() > end:
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


@dataclass(frozen=True)
class StageWork:
    """The stages of one program to time at one microbatch size. label: of the plan, for people."""

    spec: ProgramSpec
    sources: tuple[str, ...]
    microbatches: int
    labels: tuple[str, ...]


def microbatch(captured: Captured, spec: ProgramSpec, count: int) -> tuple[Values, Sizes, int]:
    """The first (largest) of ``count`` microbatches of the example batch: tensors, sizes, rows."""
    assert captured.example is not None, "a captured model has an example"
    cut = Reader(spec).read(captured.example(), count)
    return dict(cut.inputs[0]), cut.sizes[0], cut.rows[0]


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


def keys_of(work: StageWork, sizes: Sizes, optimizer: str) -> list[str]:
    """The key of each stage."""
    return [
        stage_key(source, work.spec, index, sizes, optimizer)
        for index, source in enumerate(work.sources)
    ]


def time_stages(
    work: StageWork,
    captured: Captured,
    optimizer: Any,
    name: str,
    known: Container[str],
    device: torch.device,
    *,
    seconds: float = 1.0,
    left: Callable[[], float] = lambda: 1e9,
    parts: Callable[[int, int, bool], dict[str, float]] | None = None,
) -> dict[str, StageTiming]:
    """Timings of a program's stages by key, two for each: a first microbatch and later ones.

    Stages whose key is in ``known`` or was timed just before are not timed again. name: the
    optimizer's. seconds: for each stage. left: seconds that are left for all. parts(stage, rows,
    later): what :class:`StageTiming` keeps of predictions.
    """
    values, sizes, rows = microbatch(captured, work.spec, work.microbatches)
    values = {n: t.to(device) for n, t in values.items()}
    keys = keys_of(work, sizes, name)
    found: dict[str, StageTiming] = {}
    wanted = [k for k, key in enumerate(keys) if key not in known]
    for index in range(max(wanted, default=-1) + 1):
        if left() <= 0:
            break
        run = StageRun(work.spec, index, work.sources[index], captured.state, optimizer, device)
        if keys[index] not in known and keys[index] not in found:
            made = run.samples(values, seconds)
            for later in (False, True):
                found[keys[index] + ("" if later else FIRST)] = StageTiming(
                    forward=timing(made.forward),
                    backward=timing(made.later if later else made.first),
                    optimizer=timing(made.optimizer),
                    rows=rows,
                    label=work.labels[index],
                    parts={} if parts is None else parts(index, rows, later),
                )
        _pass_on(run, values)
        del run
        gc.collect()
    return found


def _pass_on(run: StageRun, values: Values) -> None:
    """Run the stage once and keep what later stages use."""
    cell = run.forward(values, train=False)
    for link in run.found:
        if link.source == run.table.index:
            values[link.name] = cell.outputs[link.output].detach()
