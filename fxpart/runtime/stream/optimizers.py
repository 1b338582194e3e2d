"""One optimizer for each stage of this process, over the parameters that the stage owns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpart.compat import step_of
from fxpart.errors import error
from fxpart.runtime.groups import Group, own
from fxpart.runtime.held import Held
from fxpart.runtime.loader import guarded
from fxpart.runtime.optimizer import check_elementwise, make_optimizer
from fxpart.runtime.optimizer_state import gather_optimizer, plan_load
from fxpart.runtime.rows import check_gradients
from fxpart.runtime.state import ModelState, Place
from fxpart.runtime.transport import Transport
from fxpart.runtime.update_options import UpdateOptions

if TYPE_CHECKING:
    from fxpart.runtime.queued.weights import QueueWeights
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
    """An optimizer for each; raises FXP109 as :func:`~fxpart.runtime.optimizer.make_optimizer`.

    FXP115 for an instance that a new one of its class would not repeat.
    """
    check_instance(given, state)
    return {
        place: make_optimizer(given, [p for _, p in mine], own(groups, mine))
        for place, mine in owned(state).items()
    }


def check_instance(given: Any, state: ModelState) -> None:
    """FXP115 for an optimizer instance with state, or with other parameters than are trained.

    Each stage gets a new optimizer of the instance's class and options.
    """
    if not isinstance(given, torch.optim.Optimizer):
        return
    mine = sorted(tuple(p.shape) for group in given.param_groups for p in group["params"])
    trained = sorted(tuple(shape) for shape in state.trainable().values())
    why = ""
    if given.state:
        why = "it has state of earlier steps, which the stages' own optimizers would not have"
    elif mine != trained:
        why = "its parameters are not all that are trained, and every stage trains its own"
    if why:
        raise error(
            "FXP115", where=f"optimizer {type(given).__name__}", why=why,
            fix="give a torch.optim class or a function(params) -> optimizer; load its state with "
            "trainer.load_optimizer_state_dict; freeze what is not trained before compiling",
        )  # fmt: skip


def check_closure(optimizer: torch.optim.Optimizer) -> None:
    """FXP115 for an optimizer whose step evaluates the loss itself, such as LBFGS."""
    step = inspect.signature(step_of(type(optimizer))).parameters.get("closure")
    if step is not None and step.default is step.empty:
        raise error(
            "FXP115", where=f"optimizer {type(optimizer).__name__}",
            why="its step needs a closure that computes the loss again",
            fix="an optimizer whose step() needs no argument",
        )  # fmt: skip


def check_all(made: Optimizers, state: ModelState, held: Held, groups: Sequence[Group]) -> None:
    """FXP109 where one does not take parts of parameters, or its gradients; FXP115 for closures."""
    for each in made.values():
        check_closure(each)
        check_elementwise(each, held.cut(), groups)
        check_gradients(each, state, held.rows)


def record_options(
    transport: Transport,
    source: torch.optim.Optimizer,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
    followers: Iterable[StageWeights | QueueWeights],
) -> UpdateOptions:
    """Have stages update with the options that ``source`` had when a minibatch was submitted.

    make_scheduler: of a learning rate, by ``source``; what it raises is raised on every rank.
    """
    made = guarded(transport, "the scheduler", lambda: UpdateOptions(source, make_scheduler))
    for each in followers:
        each.follow(made)
    return made


def gather(
    state: ModelState, held: Held, optimizers: Optimizers, *, first_only: bool
) -> dict[str, Any]:
    """Their state by original names: see :func:`~fxpart.runtime.optimizer_state`."""
    return gather_optimizer(state, held, _together(optimizers), first_only=first_only)


def plan_loads(
    state: ModelState,
    held: Held,
    optimizers: Optimizers,
    given: Mapping[str, Any],
    groups: Sequence[Group],
) -> list[Callable[[], None]]:
    """What puts gathered state back into each; FXP110 before it."""
    return [plan_load(state, held, each, given, groups) for each in optimizers.values()]


def _together(optimizers: Optimizers) -> Any:
    """One view of all: the same groups with everybody's parameters, and all state."""
    first, *others = optimizers.values()
    groups = [dict(group) for group in first.param_groups]
    for index, group in enumerate(groups):
        group["params"] = list(group["params"])
        for other in others:
            group["params"] += other.param_groups[index]["params"]
    state: dict[torch.Tensor, Any] = {}
    for each in optimizers.values():
        state |= each.state
    return SimpleNamespace(param_groups=groups, state=state, state_dict=first.state_dict)
