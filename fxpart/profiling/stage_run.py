"""Run a stage as in the runtime to time it: forward, backward and optimizer step.

The generated module runs on real outputs of earlier stages, and gradients accumulate over the
microbatches of a step. Sparse gradients are merged before the update, as in the runtime, and this
is part of the update's time. Of a stage with several ranks, the first mesh rank runs; data of the
other ranks are available at once (:mod:`fxpart.profiling.collective_ops`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxpart.accelerator import is_accelerator, synchronize
from fxpart.codegen.materialization import constants_of, materialize
from fxpart.codegen.stage_loader import load_stage
from fxpart.profiling.collective_ops import IdenticalRanksCommunicator
from fxpart.program.edges import ValueEdge, find_value_edges
from fxpart.program.spec import ProgramSpec
from fxpart.rng import microbatch_key
from fxpart.runtime.embedding_tables.sparse_gradient_parts import SparseGradientCapture
from fxpart.runtime.executor.stage_microbatch import BackwardRoots, StageMicrobatch
from fxpart.runtime.executor.stage_signature import StageSignature
from fxpart.runtime.mesh.mesh_ranks import get_stage_mesh
from fxpart.runtime.optimizer.factory import make_optimizer, make_parameter_groups
from fxpart.runtime.optimizer.parameter_groups import make_local_groups
from fxpart.runtime.state.shard_layout import make_state_slicer

Values = dict[str, torch.Tensor]


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
        constants, part = constants_of(spec, state), make_state_slicer(spec, 0)
        materialize(self.module, spec, state, constants=constants, strict=False, part=part)
        vars(self.module)["mesh"] = IdenticalRanksCommunicator(get_stage_mesh(spec), 0)
        self.found = find_value_edges(spec)
        self.table = StageSignature.of(spec, spec.stages[stage], self.module, self.found, False)
        self._device = device
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self._trained = trained
        self._optimizer = _optimizer(optimizer, spec, stage, self.module)
        self._taken = SparseGradientCapture()
        self._tables = [
            self.module.get_parameter(item.attribute)
            for item in spec.stages[stage].state
            if item.sparse and item.requires_grad
        ]
        for table in self._tables:
            self._taken.watch(table)
        self._returned = [k for k in self.found if k.gradient and k.back == stage]
        self._key = microbatch_key(spec.seed, 0, 0)

    def forget(self) -> None:
        """Drop all gradients."""
        for parameter in self._trained:
            parameter.grad = None
        self._taken.reset()

    def update(self) -> None:
        """Update the parameters as the runtime does after the last backward of a step."""
        for table in self._tables:
            parts = self._taken.pending(table)
            self._taken.drop(table)
            table.grad = None if parts is None else parts.gradient(table)
        self._optimizer.step()
        for table in self._tables:
            table.grad = None  # Later sparse gradients are captured again.

    def forward(self, inputs: Values, *, train: bool) -> StageMicrobatch:
        """Run the forward of a microbatch, as the runtime does once its inputs have arrived."""
        cell = StageMicrobatch(self.table)
        for position, name in self.table.user:
            cell.inputs[position] = inputs[name]
        for name, position in self.table.positions.items():
            cell.inputs[position] = inputs[name].detach()
        cell.forward(self._key, train=train)
        return cell

    def backward(
        self, cell: StageMicrobatch, gradients: Sequence[torch.Tensor], weight: float
    ) -> None:
        """Run the backward as the runtime does. gradients: one for each returned gradient."""
        roots = BackwardRoots(self.table)
        for link, gradient in zip(self._returned, gradients, strict=True):
            roots.add(link, gradient)
        if self.table.loss is not None:
            roots.add_loss(cell.outputs[self.table.loss], weight)
        cell.backward(roots)

    def gradients(self, cell: StageMicrobatch) -> list[torch.Tensor]:
        """Return random gradients with the shapes of those that later stages return."""
        return [torch.randn_like(self._carried(link, cell)) for link in self._returned]

    def _carried(self, link: ValueEdge, cell: StageMicrobatch) -> torch.Tensor:
        if link.source == self.table.index:
            return cell.outputs[link.output]
        found: torch.Tensor = cell.inputs[self.table.positions[link.name]]
        return found

    def pass_on(self, cell: StageMicrobatch, values: Values) -> None:
        """Add the outputs that later stages use to ``values``."""
        for link in self.found:
            if link.source == self.table.index:
                values[link.name] = cell.outputs[link.output].detach()

    def now(self) -> float:
        """Return a time in seconds: the CPU time of a single thread, else the wall clock."""
        if is_accelerator(self._device):
            synchronize(self._device)
        elif torch.get_num_threads() == 1:
            return time.thread_time()
        return time.perf_counter()


def _optimizer(
    given: Any, spec: ProgramSpec, stage: int, module: nn.Module
) -> torch.optim.Optimizer:
    """Return the optimizer of a stage's parameters; several are assigned by parameter names."""
    every = [state for each in spec.stages for state in each.state if state.requires_grad]
    groups = make_parameter_groups(given, None, {state.name: state.shape for state in every})
    mine = [
        (state.name, module.get_parameter(state.attribute))
        for state in spec.stages[stage].state
        if state.requires_grad and state.kind == "parameter"
    ]
    return make_optimizer(
        given, [parameter for _, parameter in mine], make_local_groups(groups, mine)
    )
