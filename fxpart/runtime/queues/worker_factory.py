"""Construction of the workers of a pipeline with queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpart.errors import error
from fxpart.program.replica_groups import ReplicaGroupGraph
from fxpart.runtime.asynchronous.stage_optimizers import collect_stage_parameters
from fxpart.runtime.executor.stage_signature import StageSignature
from fxpart.runtime.queues.messenger import ReplicaMessenger
from fxpart.runtime.queues.replica_gradients import CrossGroupParameter, ReplicaParameters
from fxpart.runtime.queues.weights import QueueWeights
from fxpart.runtime.queues.worker import ClipLimits, ReplicaWorker

if TYPE_CHECKING:
    from fxpart.runtime.optimizer.trainer_optimizers import TrainerOptimizers
    from fxpart.runtime.trainer_parts import TrainerParts


def make_worker(
    parts: TrainerParts,
    optimizers: TrainerOptimizers,
    messenger: ReplicaMessenger,
    stage: int,
    layout: ReplicaGroupGraph,
    staleness: Sequence[int],
) -> ReplicaWorker:
    """Make the worker of a replica, with its weights and messages. staleness: of each group."""
    module = parts.mesh_ranks[0].modules[stage]
    optimizer, options, spec = optimizers.by_place[stage, 0], parts.options, parts.spec
    bound = staleness[layout.group(stage)]
    table = StageSignature.of(
        spec, spec.stages[stage], module, layout.found(stage), False,
        options.recomputes(len(spec.stages)).get(stage, "none"),
    )  # fmt: skip
    if table.step_state.tensors and options.microbatches > 1:
        raise error(
            "FXP109", where=f"queues and the state {', '.join(spec.step_state)}",
            why="forward passes write to this state once per step, and queues run microbatches of "
            "several steps in any order", fix="use microbatches=1, or a schedule without queues",
        )  # fmt: skip
    weights = QueueWeights(module, optimizer, options.mode, bound if table.trains else 0)
    if table.keeping.recompute is not None:
        weights.recompute(table.keeping.recompute)
    return ReplicaWorker(
        stage, parts.ranks[stage][0], layout, table, weights,
        collect_replica_parameters(parts, stage, layout),
        bound=bound,
        clip=ClipLimits(options.clip_norm, options.clip_value),
        device=parts.devices[parts.ranks[stage][0]],
        post=lambda target, message, tensors: messenger.post(stage, target, message, tensors),
        tell=lambda event: messenger.tell(stage, event),
        events=parts.events,
    )  # fmt: skip


def collect_replica_parameters(
    parts: TrainerParts, stage: int, layout: ReplicaGroupGraph
) -> ReplicaParameters:
    """Return the trainable parameters of a replica and which are tied to other groups."""
    mine = collect_stage_parameters(parts.state, owned=False)[stage, 0]
    places = {name: place for place, (name, _) in enumerate(mine)}
    ties = {
        name: CrossGroupParameter(places[name], layout.owns(stage, name))
        for names in layout.ties(stage).values()
        for name in names
    }
    return ReplicaParameters([p for _, p in mine], parts.shards.rows, ties)
