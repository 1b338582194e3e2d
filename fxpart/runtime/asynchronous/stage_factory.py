"""Construction of the stages of an asynchronous trainer: weights, updaters and executors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fxpart.errors import FxpartError, Problem
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.asynchronous.options import AsyncOptions
from fxpart.runtime.asynchronous.stage_group import AsyncStageGroup
from fxpart.runtime.asynchronous.stage_optimizers import collect_owned_parameters
from fxpart.runtime.asynchronous.stage_updater import StageClipOptions, StageUpdater
from fxpart.runtime.mesh.mesh_ranks import MeshRank, Ranks
from fxpart.runtime.state.model_state import Place
from fxpart.runtime.trainer_options import TrainerOptions
from fxpart.runtime.weights import StageWeights

if TYPE_CHECKING:
    from fxpart.runtime.asynchronous.trainer import AsyncTrainer


def check_program(
    spec: ProgramSpec, ranks: Ranks, options: TrainerOptions, async_options: AsyncOptions
) -> None:
    """Raise FXP109 for programs that cannot be trained asynchronously."""
    problems = []
    sharding = spec.sharding
    first_ranks = [row[0] for row in ranks]
    if len(set(first_ranks)) < len(first_ranks):
        problems.append(("several stages per rank", "use one stage per rank"))
    if spec.replicas:
        problems.append(("replicated stages with round-robin routing", 'use mesh="dp=2"'))
    if sharding is not None and sharding.zero:
        problems.append(("a sharded optimizer (ZeRO)", "use zero=0"))
    cut = sharding is not None and any("S(" in s.placements for s in sharding.state.values())
    if cut and (options.clip_norm is not None or options.log_grad_norm):
        problems.append(("gradient norms of sharded parameters", "use clip_value="))
    if options.compile_stages:
        problems.append(("compiled stages", "use compile_stages=False"))
    if options.cuda_graphs:
        problems.append(("CUDA graphs", "use cuda_graphs=False"))
    if options.ema is not None:
        problems.append(("a moving average of the weights", "omit ema="))
    if problems:
        where = f"weights={async_options.mode.name}"
        raise FxpartError(
            Problem("FXP109", where, f"an asynchronous trainer does not support {why}", fix)
            for why, fix in problems
        )


def build_stages(trainer: AsyncTrainer) -> tuple[dict[Place, StageWeights], AsyncStageGroup]:
    """Build the weights and the executor of every stage of this process."""
    options, async_options, state = trainer.options, trainer.async_options, trainer._state
    mine = collect_owned_parameters(state)
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
                module, optimizer, async_options.mode, trainer.versions, stage,
                total_updates=async_options.total_updates, guard=async_options.guard,
            )  # fmt: skip
            if async_options.watch:
                weights[place].watch(async_options.watch)
            part = sum(parameter.numel() for _, parameter in mine[place])
            clipping = StageClipOptions(
                options.clip_norm, async_options.clip, options.clip_value, part / max(total, 1)
            )
            updates[place] = StageUpdater(
                MeshRank(mesh_rank.index, mesh_rank.spec, {stage: module}),
                trainer._shards, weights[place],
                [p for _, p in mine[place]], clipping, norms=options.log_grad_norm,
            )  # fmt: skip
    stages = AsyncStageGroup(
        trainer._mesh_ranks, trainer._ranks, trainer._transport, trainer._devices, trainer._layout,
        trainer.versions, weights=weights, updates=updates, local=trainer._local,
        recompute=options.recomputes(len(trainer.spec.stages)),
        events=trainer.events,
    )  # fmt: skip
    return weights, stages
