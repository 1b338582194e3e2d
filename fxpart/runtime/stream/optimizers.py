"""One optimizer for each stage of this process, over the parameters that the stage owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpart.runtime.groups import Group, own
from fxpart.runtime.held import Held
from fxpart.runtime.loader import guarded
from fxpart.runtime.optimizer import make_optimizer
from fxpart.runtime.optimizer_facade import check_scheduler
from fxpart.runtime.optimizer_state import gather_optimizer, plan_load, together
from fxpart.runtime.rows import check_gradients
from fxpart.runtime.state import ModelState, Place
from fxpart.runtime.transport import Transport
from fxpart.runtime.update_options import UpdateOptions

if TYPE_CHECKING:
    from fxpart.runtime.queued.weights import QueueWeights
    from fxpart.runtime.stream.facade import StagesFacade
    from fxpart.runtime.weights import StageWeights

Optimizers = Mapping[Place, torch.optim.Optimizer]


def owned(state: ModelState) -> dict[Place, list[tuple[str, nn.Parameter]]]:
    """The trainable parameters that each stage and lane of this process owns, in model order."""
    found: dict[Place, list[tuple[str, nn.Parameter]]] = {
        (stage, lane.index): [] for lane in state.lanes for stage in sorted(lane.modules)
    }
    for name, entry in state.entries.items():
        for (stage, lane), tensor in entry.copies.items():
            if entry.trainable and stage == entry.spec.owner and isinstance(tensor, nn.Parameter):
                found[stage, lane].append((name, tensor))
    return found


def make_all(given: Any, state: ModelState, groups: Sequence[Group]) -> Optimizers:
    """An optimizer for each; raises FXP109 as :func:`~fxpart.runtime.optimizer.make_optimizer`."""
    return {
        place: make_optimizer(
            given, [p for _, p in mine], own(groups, mine), [name for name, _ in mine]
        )
        for place, mine in owned(state).items()
    }


def check_all(made: Optimizers, state: ModelState, held: Held) -> None:
    """FXP109 where one of them does not take its gradients."""
    for each in made.values():
        check_gradients(each, state, held.rows)


def record_options(
    transport: Transport,
    source: StagesFacade,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
    followers: Iterable[StageWeights | QueueWeights],
) -> UpdateOptions:
    """Have stages update with the options that ``source`` had when a minibatch was submitted.

    make_scheduler: of a learning rate, by ``source``; what it raises is raised on every rank.
    """

    def make() -> UpdateOptions:
        made = UpdateOptions(source, make_scheduler)
        if made.scheduler is not None:
            check_scheduler(made.scheduler, source)
        return made

    made = guarded(transport, "the scheduler", make)
    for each in followers:
        each.follow(made)
    return made


def gather(
    state: ModelState, held: Held, optimizers: Optimizers, *, first_only: bool
) -> dict[str, Any]:
    """Their state by original names: see :func:`~fxpart.runtime.optimizer_state`."""
    return gather_optimizer(state, held, together(optimizers), first_only=first_only)


def plan_loads(
    state: ModelState,
    held: Held,
    optimizers: Optimizers,
    given: Mapping[str, Any],
    groups: Sequence[Group],
) -> list[Callable[[], None]]:
    """What puts gathered state back into each; FXP110 before it."""
    return [plan_load(state, held, each, given, groups) for each in optimizers.values()]
