"""One optimizer per stage of this process, over the parameters that the stage owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpart.compat.multi_optimizer import MultiOptimizer
from fxpart.optim import MatrixOptimizer
from fxpart.runtime.batch.batch_iterator import call_user_function
from fxpart.runtime.embedding_tables import check_optimizer_support
from fxpart.runtime.optimizer.facade import check_scheduler
from fxpart.runtime.optimizer.factory import make_optimizer
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.optimizer.parameter_groups import ParameterGroup, make_local_groups
from fxpart.runtime.optimizer.update_options import UpdateOptions
from fxpart.runtime.state.model_state import ModelState, Place
from fxpart.runtime.transport.interface import Transport
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import WeightMode

if TYPE_CHECKING:
    from fxpart.runtime.asynchronous.optimizer_facade import StageOptimizerFacade
    from fxpart.runtime.queues.weights import QueueWeights
    from fxpart.runtime.weights import StageWeights

Optimizers = Mapping[Place, torch.optim.Optimizer]


def collect_stage_parameters(
    state: ModelState, *, owned: bool
) -> dict[Place, list[tuple[str, nn.Parameter]]]:
    """Return the trainable parameters of each stage and mesh rank here, in model order.

    owned: only those that the stage owns, if stages share them.
    """
    found: dict[Place, list[tuple[str, nn.Parameter]]] = {
        (stage, mesh_rank.index): []
        for mesh_rank in state.mesh_ranks
        for stage in sorted(mesh_rank.modules)
    }
    for name, entry in state.entries.items():
        for (stage, mesh_rank), tensor in entry.copies.items():
            mine = stage == entry.spec.owner or not owned
            if entry.trainable and mine and isinstance(tensor, nn.Parameter):
                found[stage, mesh_rank].append((name, tensor))
    return found


def make_stage_optimizers(
    given: Any,
    state: ModelState,
    groups: Sequence[ParameterGroup],
    shards: OptimizerShards,
    *,
    owned: bool,
) -> Optimizers:
    """Make one optimizer per stage.

    FXP109 as :func:`~fxpart.runtime.optimizer.factory.make_optimizer`, and for one that does not
    support the gradients of its stage. owned: see :func:`collect_stage_parameters`.
    """
    made = {
        place: make_optimizer(
            given, [p for _, p in mine], make_local_groups(groups, mine), [name for name, _ in mine]
        )
        for place, mine in collect_stage_parameters(state, owned=owned).items()
    }
    for each in made.values():
        check_optimizer_support(each, state, shards.rows)
    return made


def set_stage_delays(
    optimizer: torch.optim.Optimizer,
    stage: int,
    mode: WeightMode,
    versions: WeightVersionCounters,
) -> None:
    """Pass the updates that the stages miss at most to an optimizer that depends on them."""
    delays = []
    for each in range(len(versions.ahead)):
        reads = [versions.read(mode, each, microbatch) for microbatch in versions.period()]
        delays.append(max(read.backward - read.version for read in reads))
    for one in optimizer.each if isinstance(optimizer, MultiOptimizer) else (optimizer,):
        if isinstance(one, MatrixOptimizer):
            one.set_delays(stage, delays)


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
