"""Construction of the optimizers and workers of a queue trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpart.program.replica_groups import ReplicaGroupGraph
from fxpart.runtime.embedding_tables import check_optimizer_support
from fxpart.runtime.executor.stage_signature import StageSignature
from fxpart.runtime.optimizer.factory import make_optimizer
from fxpart.runtime.optimizer.parameter_groups import make_local_groups
from fxpart.runtime.queues.replica_gradients import CrossGroupParameter, ReplicaParameters
from fxpart.runtime.queues.weights import QueueWeights
from fxpart.runtime.queues.worker import ClipLimits, ReplicaWorker

if TYPE_CHECKING:
    from fxpart.runtime.asynchronous.stage_optimizers import Optimizers
    from fxpart.runtime.queues.trainer import QueueTrainer
    from fxpart.runtime.state.model_state import Place


def make_worker(trainer: QueueTrainer, stage: int, layout: ReplicaGroupGraph) -> ReplicaWorker:
    """Make the worker of a replica, with its weights and messages."""
    module = trainer._mesh_ranks[0].modules[stage]
    optimizer, options, queue = trainer.optimizers[stage, 0], trainer.options, trainer.queue
    messenger, spec = trainer._messenger, trainer.spec
    bound = trainer.dealt[layout.group(stage)]
    table = StageSignature.of(
        spec, spec.stages[stage], module, layout.found(stage), False,
        options.recomputes(len(spec.stages)).get(stage, "none"),
    )  # fmt: skip
    weights = QueueWeights(module, optimizer, queue.mode, bound if table.trains else 0)
    if table.keeping.recompute is not None:
        weights.recompute(table.keeping.recompute)
    return ReplicaWorker(
        stage, layout, table, weights,
        collect_replica_parameters(trainer, stage, layout),
        bound=bound,
        clip=ClipLimits(options.clip_norm, options.clip_value),
        device=trainer._devices[trainer._ranks[stage][0]],
        post=lambda target, message, tensors: messenger.post(stage, target, message, tensors),
        tell=lambda event: messenger.tell(stage, event),
        events=trainer.events,
    )  # fmt: skip


def collect_replica_parameters(
    trainer: QueueTrainer, stage: int, layout: ReplicaGroupGraph
) -> ReplicaParameters:
    """Return the trainable parameters of a replica and which are tied to other groups."""
    mine = parameters_of(trainer, stage)
    places = {name: place for place, (name, _) in enumerate(mine)}
    ties = {
        name: CrossGroupParameter(places[name], layout.owns(stage, name))
        for names in layout.ties(stage).values()
        for name in names
    }
    return ReplicaParameters([p for _, p in mine], trainer._shards.rows, ties)


def make_optimizers(trainer: QueueTrainer, given: Any) -> Optimizers:
    """Make one optimizer per replica of this process, with the trainer's groups."""
    made: dict[Place, torch.optim.Optimizer] = {}
    for stage in trainer._mesh_ranks[0].modules:
        mine = parameters_of(trainer, stage)
        optimizer = make_optimizer(
            given,
            [p for _, p in mine],
            make_local_groups(trainer._groups, mine),
            [name for name, _ in mine],
        )
        check_optimizer_support(optimizer, trainer._state, trainer._shards.rows)
        made[stage, 0] = optimizer
    return made


def parameters_of(trainer: QueueTrainer, stage: int) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters of a replica in model order."""
    return [
        (name, tensor)
        for name, entry in trainer._state.entries.items()
        if entry.trainable and isinstance(tensor := entry.copies.get((stage, 0)), nn.Parameter)
    ]
