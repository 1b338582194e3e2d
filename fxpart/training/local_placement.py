"""The ranks and devices of a plan in this process, and its trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.accelerator import CUDA, count_accelerators, find_accelerator, get_device_module
from fxpart.codegen.stage_loader import load_stage
from fxpart.errors import error
from fxpart.plan.model import Plan
from fxpart.plan.prediction import busy_by_rank
from fxpart.plan.schedule import parse_schedule, recomputed, stage_of
from fxpart.program.spec import ProgramSpec
from fxpart.runtime import InProcess, ProcessGroupTransport, Trainer, connect, heartbeat
from fxpart.runtime.host.gpus import local_device
from fxpart.runtime.mesh.mesh_ranks import (
    MeshRank,
    Ranks,
    build_rank_table,
    get_stage_mesh,
    has_mesh_rank,
)
from fxpart.runtime.queues.fault_tolerant_transport import FaultTolerantTransport
from fxpart.runtime.trainer_options import QUEUE, TrainerOptions
from fxpart.runtime.transport.interface import Transport
from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.schedule.weight_modes import WeightMode


@dataclass(frozen=True)
class LocalPlacement:
    """The ranks and devices of a plan's stages and mesh ranks in this process.

    ranks: of each stage and mesh rank. kind: their type in torch.
    """

    plan: Plan
    ranks: Ranks
    size: int
    kind: str
    transport: ProcessGroupTransport | InProcess

    @classmethod
    def of(cls, plan: Plan, spec: ProgramSpec, timeout: float | None) -> LocalPlacement:
        """Connect the ranks."""
        size = get_stage_mesh(spec).size
        rows = [plan.stages[stage].ranks for stage in stage_of(plan)]
        ranks = build_rank_table(rows, size, [stage.ranks for stage in spec.stages])
        _check_gpus(plan)
        kind = get_device_type(plan)
        step = plan.prediction.step_seconds
        transport = connect(plan.world, device=kind, timeout=timeout, predicted=step)
        made = cls(plan, ranks, size, kind, transport)
        if kind != "cpu" and len(transport.local) == 1:
            get_device_module(kind).set_device(made.device_of(transport.local[0]))
        return made

    @property
    def mesh_ranks(self) -> list[int]:
        """The mesh ranks with a stage in this process."""
        return [mesh_rank for mesh_rank in range(self.size) if self.stages(mesh_rank)]

    def stages(self, mesh_rank: int) -> list[int]:
        """Return the stages of a mesh rank that run in this process."""
        local = self.transport.local
        return [
            stage
            for stage, row in enumerate(self.ranks)
            if row[mesh_rank] in local and has_mesh_rank(self.ranks, stage, mesh_rank)
        ]

    def device(self, stage: int, mesh_rank: int) -> torch.device:
        """Return the device of a mesh rank of a stage."""
        return self.device_of(self.ranks[stage][mesh_rank])

    def device_of(self, rank: int) -> torch.device:
        """Return the device of a local rank, as the plan names it if it names devices."""
        own = get_gpu_index(self.plan, rank) if self.kind != "cpu" and self.plan.devices else -1
        if 0 <= own < count_accelerators():
            return torch.device(self.kind, own)
        return _select_device(self.kind, rank, self.transport.local)

    def load(self, programs: Callable[[int], tuple[ProgramSpec, Sequence[str]]]) -> list[MeshRank]:
        """Return this process's mesh ranks with empty modules; programs: of each mesh rank."""
        mesh_ranks = []
        for mesh_rank in self.mesh_ranks:
            own, sources = programs(mesh_rank)
            modules = {
                stage: load_stage(sources[stage], own.stages[stage], self.device(stage, mesh_rank))
                for stage in self.stages(mesh_rank)
            }
            mesh_ranks.append(MeshRank(mesh_rank, own, modules))
        return mesh_ranks

    def trainer(
        self,
        mesh_ranks: Sequence[MeshRank],
        *,
        weight_mode: WeightMode | None,
        queue: bool = False,
        **options: Any,
    ) -> Trainer:
        """Build the trainer of this process's mesh ranks for the plan.

        weight_mode: of an asynchronous pipeline. queue: whether replicas take
        microbatches from queues.
        """
        first = mesh_ranks[0]
        if weight_mode is not None:
            options["weights"] = weight_mode
        transport: Transport = self.transport
        if queue and isinstance(self.transport, ProcessGroupTransport):
            given = {"patience": options.get("patience", TrainerOptions.patience)}
            checked = TrainerOptions.of({"microbatches": 1, "routing": QUEUE, **given})
            transport = FaultTolerantTransport(self.transport, checked.patience)
        made = Trainer(
            first.spec,
            first.modules,
            ranks=self.ranks,
            transport=transport,
            microbatches=self.plan.microbatches,
            schedule=parse_schedule(self.plan) if weight_mode is None else DEFAULT_SCHEDULE,
            recompute=options.pop("recompute", None) or recomputed(self.plan),
            offload=options.pop("offload", None) or self.plan.offload,
            devices={rank: self.device_of(rank) for rank in self.transport.local},
            mesh_ranks=mesh_ranks,
            **options,
        )
        heartbeat.report_last_event(made.events.last)
        if not first.spec.replicas:  # Replicas share the microbatches of their stage.
            plan = self.plan
            made.pace.expect(busy_by_rank(plan.prediction.ranks, plan.microbatches))
        return made


def get_gpu_index(plan: Plan, rank: int) -> int:
    """Return the index of the rank's device on its host, in the plan's cluster."""
    own = plan.device(rank)
    there = [d.name for d in plan.cluster.devices if d.host == own.host]
    return there.index(own.name)


def _check_gpus(plan: Plan) -> None:
    """Raise FXP602 if the plan's ranks are GPUs and this machine has none."""
    if has_gpu_ranks(plan) and find_accelerator() is None:
        raise error(
            "FXP602",
            where=f"a plan for {plan.cluster.name}",
            why="its ranks are GPUs, and torch finds none on this machine",
            fix='compile for this machine (cluster="local:4"), or start the program on its cluster',
        )


def get_device_type(plan: Plan) -> str:
    """Return the type in torch of the ranks' devices."""
    return (find_accelerator() or CUDA) if has_gpu_ranks(plan) else "cpu"


def has_gpu_ranks(plan: Plan) -> bool:
    """Return whether ranks of a plan are GPUs."""
    return any(plan.device(rank).kind == "gpu" for rank in range(plan.world))


def _select_device(kind: str, rank: int, local: tuple[int, ...]) -> torch.device:
    """Return the rank's device: LOCAL_RANK under torchrun, round-robin over GPUs otherwise."""
    if kind == "cpu" or len(local) == 1:
        return local_device(kind)
    return torch.device(kind, rank % count_accelerators())
