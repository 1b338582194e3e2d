"""One optimizer per stage of this process, over the parameters that the stage owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpart.runtime.batch.batch_iterator import call_user_function
from fxpart.runtime.embedding_tables import check_optimizer_support
from fxpart.runtime.optimizer.facade import check_scheduler
from fxpart.runtime.optimizer.factory import make_optimizer
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.optimizer.optimizer_state import (
    gather_optimizer_state,
    merge_optimizers,
    plan_state_load,
)
from fxpart.runtime.optimizer.parameter_groups import ParameterGroup, make_local_groups
from fxpart.runtime.optimizer.update_options import UpdateOptions
from fxpart.runtime.state.model_state import ModelState, Place
from fxpart.runtime.transport.interface import Transport

if TYPE_CHECKING:
    from fxpart.runtime.asynchronous.optimizer_facade import StageOptimizerFacade
    from fxpart.runtime.queues.weights import QueueWeights
    from fxpart.runtime.weights import StageWeights

Optimizers = Mapping[Place, torch.optim.Optimizer]


def collect_owned_parameters(state: ModelState) -> dict[Place, list[tuple[str, nn.Parameter]]]:
    """Return the trainable parameters owned by each stage and mesh rank here, in model order."""
    found: dict[Place, list[tuple[str, nn.Parameter]]] = {
        (stage, mesh_rank.index): []
        for mesh_rank in state.mesh_ranks
        for stage in sorted(mesh_rank.modules)
    }
    for name, entry in state.entries.items():
        for (stage, mesh_rank), tensor in entry.copies.items():
            if entry.trainable and stage == entry.spec.owner and isinstance(tensor, nn.Parameter):
                found[stage, mesh_rank].append((name, tensor))
    return found


def make_stage_optimizers(
    given: Any, state: ModelState, groups: Sequence[ParameterGroup]
) -> Optimizers:
    """Make one optimizer per stage; FXP109 as
    :func:`~fxpart.runtime.optimizer.factory.make_optimizer`.
    """
    return {
        place: make_optimizer(
            given, [p for _, p in mine], make_local_groups(groups, mine), [name for name, _ in mine]
        )
        for place, mine in collect_owned_parameters(state).items()
    }


def check_stage_optimizers(made: Optimizers, state: ModelState, shards: OptimizerShards) -> None:
    """Raise FXP109 for an optimizer that does not support the gradients of its stage."""
    for each in made.values():
        check_optimizer_support(each, state, shards.rows)


def record_options(
    transport: Transport,
    source: StageOptimizerFacade,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
    stage_weights: Iterable[StageWeights | QueueWeights],
) -> UpdateOptions:
    """Record the options of ``source`` per submitted minibatch, for the updates of the stages.

    make_scheduler: makes a learning-rate scheduler for ``source``; its exceptions are raised on
    every rank.
    """

    def make() -> UpdateOptions:
        made = UpdateOptions(source, make_scheduler)
        if made.scheduler is not None:
            check_scheduler(made.scheduler, source)
        return made

    made = call_user_function(transport, "the scheduler", make)
    for each in stage_weights:
        each.follow(made)
    return made


def gather_stage_optimizer_state(
    state: ModelState, shards: OptimizerShards, optimizers: Optimizers, *, first_only: bool
) -> dict[str, Any]:
    """Gather the optimizer state by original parameter names.

    See :mod:`~fxpart.runtime.optimizer.optimizer_state`.
    """
    return gather_optimizer_state(
        state, shards, merge_optimizers(optimizers), first_only=first_only
    )


def plan_loads(
    state: ModelState,
    shards: OptimizerShards,
    optimizers: Optimizers,
    given: Mapping[str, Any],
    groups: Sequence[ParameterGroup],
) -> list[Callable[[], None]]:
    """Return functions that load gathered state into each optimizer; FXP110 if it does not fit."""
    return [plan_state_load(state, shards, each, given, groups) for each in optimizers.values()]
