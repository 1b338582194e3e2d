"""Checkpoint state of asynchronous trainers beside parameters and optimizers.

Captured while no minibatch is in flight. Per parameter: the state of its stage's prediction or
correction rule, named by the rule, so that another rule does not load it. For the trainer: updates,
and the learning-rate scheduler, equal on all stages; for an asynchronous pipeline also the newest
global gradient norm, and whether the guard made it flush after every minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fxpart.runtime.trainer_kinds import is_scheduled_asynchronous
from fxpart.runtime.weight_prediction import ErrorFeedback, PipeMareCorrection, Predictor
from fxpart.runtime.weight_prediction.difference import DifferencePredictor
from fxpart.runtime.weight_prediction.shadow import ShadowPredictor

if TYPE_CHECKING:
    from fxpart.runtime.asynchronous.trainer_base import AsyncTrainerBase

TensorLoader = Callable[[torch.Tensor, str], torch.Tensor | None]  # (parameter, slot) -> tensor
ValueLoader = Callable[[torch.Tensor, str], Any]


# Names of slots in checkpoints; they must not change with the names of the classes.
_SLOT_PREFIXES: dict[type, str] = {
    PipeMareCorrection: "Correction",
    ErrorFeedback: "Feedback",
    DifferencePredictor: "Difference",
    ShadowPredictor: "Shadow",
}


def _slot_prefix(rule: object) -> str:
    """Return the first part of the names of a rule's slots in checkpoints."""
    return _SLOT_PREFIXES.get(type(rule), type(rule).__name__)


def iterate_rule_slots(trainer: AsyncTrainerBase) -> Iterator[tuple[torch.Tensor, str, Any]]:
    """Yield (parameter, slot, tensor or plain value) for each parameter."""
    for weights in trainer.weights_of().values():
        for rule in weights.rules():
            kind = _slot_prefix(rule)
            if isinstance(rule, PipeMareCorrection):
                for parameter, moved in zip(rule.parameters, rule.moved, strict=True):
                    yield parameter, f"{kind}.moved", moved
                    yield parameter, f"{kind}.longest", rule.state_dict()["longest"]
                continue
            if isinstance(rule, ErrorFeedback):
                for parameter, last in zip(rule.parameters, rule.last or (), strict=False):
                    yield parameter, f"{kind}.last", last
                continue
            state = rule.state_dict()
            for place, parameter in enumerate(rule.parameters):
                if state["stepped"] is not None:
                    yield parameter, f"{kind}.stepped", state["stepped"][place]
                if state["kept"][place] is not None:
                    yield parameter, f"{kind}.kept", state["kept"][place]
            for group, rate in enumerate(state.get("rates", ())):
                for place in rule.members[group]:
                    yield rule.parameters[place], f"{kind}.rate", rate


def restore_rule_slots(
    trainer: AsyncTrainerBase,
    load_tensor: TensorLoader,
    load_value: ValueLoader,
    updates: int,
    calls: int,
) -> None:
    """Restore the state of every rule, and continue after so many updates and calls.

    load_tensor: returns a new tensor with this rank's part of a slot. load_value: returns a plain
    value. Both return None if the checkpoint has none.
    """
    for weights in trainer.weights_of().values():
        states = [_state(rule, load_tensor, load_value) for rule in weights.rules()]
        weights.load_state_dict({"updates": updates, "rules": states})
        for rule in weights.rules():
            if isinstance(rule, Predictor):
                rule.coming.forget()
    trainer.restart(updates, calls)


def capture_trainer_state(trainer: AsyncTrainerBase) -> dict[str, Any]:
    """Return plain data of the trainer, equal on every rank."""
    scheduler = trainer.update_options.scheduler
    found: dict[str, Any] = {"stages": len(trainer.spec.stages)}
    if is_scheduled_asynchronous(trainer):
        update = next(iter(trainer._stages.updates.values()))
        found |= {"draining": trainer.always_flush, "known": update.known}
    if scheduler is not None:
        found["scheduler"] = scheduler.state_dict()
    return found


def iterate_gradient_norms(trainer: AsyncTrainerBase) -> Iterator[tuple[int, str, float]]:
    """Yield (rank, key, squared norm of the last gradients) of each stage's first mesh rank."""
    if not is_scheduled_asynchronous(trainer):
        return
    for (stage, mesh_rank), update in trainer._stages.updates.items():
        if mesh_rank == 0:
            yield trainer._state.rank(stage, mesh_rank), _square(stage), update.square


def restore_gradient_norms(trainer: AsyncTrainerBase, values: Mapping[str, Any]) -> None:
    """Restore the gradient norms of a checkpoint with as many stages, used until the first
    update.
    """
    if not is_scheduled_asynchronous(trainer):
        return
    same = values.get("trainer/stages") == len(trainer.spec.stages)
    for (stage, _), update in trainer._stages.updates.items():
        update.square = float(values.get(_square(stage), 0.0)) if same else 0.0


def _square(stage: int) -> str:
    return f"stage/{stage}/square"


def restore_trainer_state(trainer: AsyncTrainerBase, given: Mapping[str, Any]) -> None:
    """Restore plain data of the trainer; missing values stay unchanged."""
    if is_scheduled_asynchronous(trainer):
        trainer.always_flush = trainer.async_options.mode.flush or bool(given.get("draining"))
        for update in trainer._stages.updates.values():
            update.known = given.get("known")
    scheduler = trainer.update_options.scheduler
    if scheduler is not None and given.get("scheduler"):
        scheduler.load_state_dict(dict(given["scheduler"]))


def _state(
    rule: Predictor | PipeMareCorrection | ErrorFeedback,
    load_tensor: TensorLoader,
    load_value: ValueLoader,
) -> dict[str, Any]:
    """Return the state_dict of a rule."""
    kind = _slot_prefix(rule)
    if isinstance(rule, PipeMareCorrection):
        moved = [load_tensor(p, f"{kind}.moved") for p in rule.parameters]
        longest = [load_value(p, f"{kind}.longest") for p in rule.parameters]
        return {
            "moved": [
                torch.zeros_like(p.data) if tensor is None else tensor
                for p, tensor in zip(rule.parameters, moved, strict=True)
            ],
            "longest": max((value for value in longest if value is not None), default=1.0),
        }
    if isinstance(rule, ErrorFeedback):
        last = [load_tensor(p, f"{kind}.last") for p in rule.parameters]
        complete = last and all(tensor is not None for tensor in last)
        return {"last": last if complete else None}
    stepped = [load_value(p, f"{kind}.stepped") for p in rule.parameters]
    rates = [load_value(p, f"{kind}.rate") for p in rule.parameters]
    known = any(value is not None for value in stepped)
    return {
        "stepped": [value is True for value in stepped] if known else None,
        "kept": [load_tensor(p, f"{kind}.kept") for p in rule.parameters],
        "rates": [rates[members[0]] if members else None for members in rule.members],
    }
