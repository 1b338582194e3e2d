"""The parts of a stream's trainer: weight versions, updates and runners of its own stages."""

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
    spec: ProgramSpec, ranks: Ranks, options: TrainerOptions, stream: AsyncOptions
) -> None:
    """FXP109 for what cannot be trained as a stream."""
    problems = []
    sharding = spec.sharding
    firsts = [row[0] for row in ranks]
    if len(set(firsts)) < len(firsts):
        problems.append(("several stages on a rank", "one stage a rank"))
    if spec.replicas:
        problems.append(("copies of stages that take turns", 'mesh="dp=2"'))
    if sharding is not None and sharding.zero:
        problems.append(("an optimizer that is sharded over lanes (ZeRO)", "zero=0"))
    cut = sharding is not None and any("S(" in s.placements for s in sharding.state.values())
    if cut and (options.clip_norm is not None or options.log_grad_norm):
        problems.append(("norms of parameters that are cut over lanes", "clip_value"))
    if options.compile_stages:
        problems.append(("compiled stages, whose weights change", "compile_stages=False"))
    if problems:
        where = f"weights={stream.mode.name}"
        raise FxpartError(
            Problem("FXP109", where, f"an asynchronous trainer with {why}", fix)
            for why, fix in problems
        )


def build(trainer: AsyncTrainer) -> tuple[dict[Place, StageWeights], AsyncStageGroup]:
    """Of every stage of this process."""
    options, stream, state = trainer.options, trainer.stream, trainer._state
    mine = collect_owned_parameters(state)
    total = sum(
        math.prod(entry.pieces.shape) for entry in state.entries.values() if entry.trainable
    )
    weights: dict[Place, StageWeights] = {}
    updates: dict[Place, StageUpdater] = {}
    for lane in trainer._mesh_ranks:
        for stage, module in sorted(lane.modules.items()):
            place = stage, lane.index
            optimizer = trainer.optimizers[place]
            weights[place] = StageWeights(
                module, optimizer, stream.mode, trainer.versions, stage,
                total_updates=stream.total_updates, guard=stream.guard,
            )  # fmt: skip
            if stream.watch:
                weights[place].watch(stream.watch)
            part = sum(parameter.numel() for _, parameter in mine[place])
            clipping = StageClipOptions(
                options.clip_norm, stream.clip, options.clip_value, part / max(total, 1)
            )
            updates[place] = StageUpdater(
                MeshRank(lane.index, lane.spec, {stage: module}), trainer._shards, weights[place],
                [p for _, p in mine[place]], clipping, norms=options.log_grad_norm,
            )  # fmt: skip
    stages = AsyncStageGroup(
        trainer._mesh_ranks, trainer._ranks, trainer._transport, trainer._devices, trainer._layout,
        trainer.versions, weights=weights, updates=updates, meshes=trainer._meshes,
        crew=trainer._threads, recompute=options.recomputes(len(trainer.spec.stages)),
        events=trainer.events,
    )  # fmt: skip
    return weights, stages
