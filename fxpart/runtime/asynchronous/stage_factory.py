"""Construction of the stages of an asynchronous trainer: weights, updaters and executors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph
from fxpart.runtime.asynchronous.stage_group import AsyncStageGroup
from fxpart.runtime.asynchronous.stage_optimizers import collect_stage_parameters
from fxpart.runtime.asynchronous.stage_updater import StageClipOptions, StageUpdater
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.runtime.state.model_state import Place
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.versions import WeightVersionCounters

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer


def build_stages(
    trainer: Trainer, layout: AsyncStageGraph, versions: WeightVersionCounters
) -> tuple[dict[Place, StageWeights], AsyncStageGroup]:
    """Build the weights and the executor of every stage of this process."""
    options, state = trainer.options, trainer._state
    mine = collect_stage_parameters(state, owned=True)
    total = sum(
        math.prod(entry.pieces.shape) for entry in state.entries.values() if entry.trainable
    )
    weights: dict[Place, StageWeights] = {}
    updates: dict[Place, StageUpdater] = {}
    for mesh_rank in trainer._mesh_ranks:
        for stage, module in sorted(mesh_rank.modules.items()):
            place = stage, mesh_rank.index
            optimizer = trainer.optimizers[place]
            weights[place] = StageWeights(
                module, optimizer, options.mode, versions, stage,
                total_updates=options.total_updates, guard=options.guard,
            )  # fmt: skip
            if options.watch:
                weights[place].watch(options.watch)
            part = sum(parameter.numel() for _, parameter in mine[place])
            clipping = StageClipOptions(
                options.clip_norm, options.clip, options.clip_value, part / max(total, 1)
            )
            updates[place] = StageUpdater(
                MeshRank(mesh_rank.index, mesh_rank.spec, {stage: module}),
                trainer._shards, weights[place],
                [p for _, p in mine[place]], clipping, norms=options.log_grad_norm,
            )  # fmt: skip
    stages = AsyncStageGroup(
        trainer._mesh_ranks, trainer._ranks, trainer._transport, trainer._devices, layout,
        versions, weights=weights, updates=updates, local=trainer._local,
        recompute=options.recomputes(len(trainer.spec.stages)),
        events=trainer.events,
    )  # fmt: skip
    return weights, stages
