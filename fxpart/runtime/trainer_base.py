"""Construction of a trainer, and its description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fxpart.plan.throughput import RowFigures
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.batch.batch_requirements import BatchRequirements
from fxpart.runtime.call_agreement import CallAgreement
from fxpart.runtime.entry_point import EntryPoints
from fxpart.runtime.executor.torch_compile import StageCompilation
from fxpart.runtime.host.cpu_affinity import CpuAffinity
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.runtime.optimizer.parameter_groups import Groups
from fxpart.runtime.optimizer.trainer_optimizers import TrainerOptimizers
from fxpart.runtime.pipeline import Pipeline
from fxpart.runtime.torch_modes import TorchModes
from fxpart.runtime.trainer_options import Kind, TrainerOptions
from fxpart.runtime.trainer_parts import TrainerParts
from fxpart.runtime.transport.interface import Transport


class TrainerBase(EntryPoints):
    """The objects that make up a trainer.

    parts: the program, its state and its engine. optimizers: those that update the weights.
    optimizer: represents this process's optimizers for schedulers and users
    (:class:`~fxpart.runtime.optimizer.facade.OptimizerFacade`). agreement: compares each call
    between the ranks. pipeline: runs the minibatches. ambient: torch modes under which the program
    was compiled. row_figures: returns what a row of a batch costs by the plan.
    """

    pipeline: Pipeline
    row_figures: Callable[[], RowFigures] | None = None

    def __init__(
        self,
        spec: ProgramSpec,
        modules: Mapping[int, nn.Module],
        *,
        ranks: Sequence[int | Sequence[int]],
        transport: Transport,
        optimizer: Any = None,
        groups: Groups | None = None,
        devices: Mapping[int, torch.device] | None = None,
        unused: Mapping[str, torch.Tensor] | None = None,
        mesh_ranks: Sequence[MeshRank] | None = None,
        **options: Any,
    ) -> None:
        """Build the trainer's parts and its optimizers.

        modules: the stage modules of this process, by stage; ignored if ``mesh_ranks`` is given.
        mesh_ranks: this process's mesh ranks of a sharded program, whose ``spec`` is that of any
        mesh rank. ranks: the rank of each stage, or of each stage and mesh rank; an int denotes
        consecutive ranks.

        optimizer: see :func:`~fxpart.runtime.optimizer.factory.make_optimizer`; None to compute
        only gradients. groups: parameter groups by name, see
        :func:`~fxpart.runtime.optimizer.parameter_groups.assign_groups`. devices: per local rank,
        by default those of its parameters. unused: state that no stage needs, for ``state_dict``.
        options: the fields of :class:`~fxpart.runtime.trainer_options.TrainerOptions`.

        Raises FXP501 on every rank if the arguments differ between ranks.
        """
        self.ambient = TorchModes()
        self.parts = TrainerParts(
            spec, modules, ranks=ranks, transport=transport, optimizer=optimizer, options=options,
            devices=devices, unused=unused, mesh_ranks=mesh_ranks,
        )  # fmt: skip
        self.optimizers = TrainerOptimizers(self.parts, optimizer, groups)
        self.optimizer, self.average = self.optimizers.facade, self.optimizers.average
        self.agreement = CallAgreement(self.parts, self.optimizers)
        self.spec = spec
        self.events, self.pace, self.request = (
            self.parts.events, self.parts.pace, self.parts.request
        )  # fmt: skip

    @property
    def options(self) -> TrainerOptions:
        """The given options."""
        return self.parts.options

    @property
    def calls(self) -> int:
        """Number of calls of ``step``; it selects the random numbers of the next one."""
        return self.parts.calls

    @calls.setter
    def calls(self, calls: int) -> None:
        self.parts.calls = calls

    @property
    def kind(self) -> Kind:
        """How the minibatches run."""
        return self.parts.options.kind

    @property
    def is_asynchronous(self) -> bool:
        """Whether stages update on their own."""
        return self.parts.is_asynchronous

    @property
    def repeats(self) -> bool:
        """Whether repeated training is bitwise identical, if the device's operations are.

        Queues assign microbatches differently every time.
        """
        return self.kind != "queue"

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a batch."""
        return self.parts.options.microbatches

    @property
    def seed(self) -> int:
        """The seed of random ops."""
        return self.parts.seed

    @property
    def rank(self) -> int:
        """This process's rank; 0 if one process runs all ranks."""
        return self.parts.transport.local[0]

    @property
    def transport(self) -> Transport:
        """The transport between the ranks."""
        return self.parts.transport

    @cached_property
    def needs(self) -> BatchRequirements:
        """Requirements of each batch in this process: names, rows, and a DataLoader's sampler."""
        return BatchRequirements.of(
            self.parts.mesh_ranks, self.parts.source.feed.needed, self.microbatches
        )

    @property
    def compiled(self) -> StageCompilation | None:
        """The result of torch.compile on this process's stages so far; None if not enabled."""
        return None if self.parts.compiler is None else self.parts.compiler.found()

    @property
    def pinned(self) -> CpuAffinity:
        """The cores of this process, or why it is not pinned."""
        return self.parts.pinned

    @property
    def local_device(self) -> torch.device:
        """The device of this process's first rank."""
        return self.parts.first_device

    def settle(self) -> None:
        """Finish minibatches in flight, before the whole model is read; collective."""
        self.pipeline.settle()
        self.agreement.apply_user_changes()

    def close(self) -> None:
        """Release the transport's resources; the trainer cannot be used afterwards."""
        if self.optimizer is not None:
            self.optimizer.closed = True
        self.parts.close()
        self.closed = True
