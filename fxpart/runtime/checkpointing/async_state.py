"""What trainers that do not drain between steps have beside parameters and optimizers.

Taken once nothing is in flight. Per parameter what its stage's prediction or correction keeps,
named by the rule that keeps it: another rule does not take it. Of the whole: updates, and the
learning-rate scheduler, equal on all stages; of a stream also the newest global norm, and whether
the guard made it drain for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fxpart.runtime.asynchronous.trainer import AsyncTrainer
from fxpart.runtime.asynchronous.trainer_base import AsyncTrainerBase
from fxpart.runtime.weight_prediction import PipeMareCorrection, Predictor
from fxpart.runtime.weight_prediction.difference import DifferencePredictor
from fxpart.runtime.weight_prediction.shadow import ShadowPredictor

Kept = Callable[[torch.Tensor, str], torch.Tensor | None]  # parameter, slot
Told = Callable[[torch.Tensor, str], Any]


# The names of slots in checkpoints, which stay when a class is renamed.
_SLOT_PREFIXES: dict[type, str] = {
    PipeMareCorrection: "Correction",
    DifferencePredictor: "Difference",
    ShadowPredictor: "Shadow",
}


def _slot_prefix(rule: object) -> str:
    """Return the first part of the names of a rule's slots in checkpoints."""
    return _SLOT_PREFIXES.get(type(rule), type(rule).__name__)


def iterate_rule_slots(trainer: AsyncTrainerBase) -> Iterator[tuple[torch.Tensor, str, Any]]:
    """Each parameter's (parameter, slot, tensor or plain value)."""
    for weights in trainer.weights_of().values():
        for rule in weights.rules():
            kind = _slot_prefix(rule)
            if isinstance(rule, PipeMareCorrection):
                for parameter, moved in zip(rule.parameters, rule.moved, strict=True):
                    yield parameter, f"{kind}.moved", moved
                    yield parameter, f"{kind}.longest", rule.state_dict()["longest"]
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
    trainer: AsyncTrainerBase, kept: Kept, told: Told, updates: int, calls: int
) -> None:
    """Give every rule what was kept for it and go on after so many updates and calls.

    kept: a new tensor, the parameter's part. told: the plain value. None where there is none.
    """
    for weights in trainer.weights_of().values():
        states = [_state(rule, kept, told) for rule in weights.rules()]
        weights.load_state_dict({"updates": updates, "rules": states})
        for rule in weights.rules():
            if isinstance(rule, Predictor):
                rule.coming.forget()
    trainer.restart(updates, calls)


def capture_trainer_state(trainer: AsyncTrainerBase) -> dict[str, Any]:
    """Plain data of the whole trainer, equal on every rank."""
    scheduler = trainer.update_options.scheduler
    found: dict[str, Any] = {"stages": len(trainer.spec.stages)}
    if isinstance(trainer, AsyncTrainer):
        update = next(iter(trainer._stages.updates.values()))
        found |= {"draining": trainer.draining, "known": update.known}
    if scheduler is not None:
        found["scheduler"] = scheduler.state_dict()
    return found


def iterate_gradient_norms(trainer: AsyncTrainerBase) -> Iterator[tuple[int, str, float]]:
    """Each stage's (rank, key, squared norm of its last gradients), of a stream's first lane."""
    if not isinstance(trainer, AsyncTrainer):
        return
    for (stage, lane), update in trainer._stages.updates.items():
        if lane == 0:
            yield trainer._state.rank(stage, lane), _square(stage), update.square


def restore_gradient_norms(trainer: AsyncTrainerBase, values: Mapping[str, Any]) -> None:
    """The same of a checkpoint of as many stages: until its first update a stage still tells it."""
    if not isinstance(trainer, AsyncTrainer):
        return
    same = values.get("trainer/stages") == len(trainer.spec.stages)
    for (stage, _), update in trainer._stages.updates.items():
        update.square = float(values.get(_square(stage), 0.0)) if same else 0.0


def _square(stage: int) -> str:
    return f"stage/{stage}/square"


def restore_trainer_state(trainer: AsyncTrainerBase, given: Mapping[str, Any]) -> None:
    """Take it in again; what is not there stays as the trainer was made."""
    if isinstance(trainer, AsyncTrainer):
        trainer.draining = trainer.async_options.mode.flush or bool(given.get("draining"))
        for update in trainer._stages.updates.values():
            update.known = given.get("known")
    scheduler = trainer.update_options.scheduler
    if scheduler is not None and given.get("scheduler"):
        scheduler.load_state_dict(dict(given["scheduler"]))


def _state(rule: Predictor | PipeMareCorrection, kept: Kept, told: Told) -> dict[str, Any]:
    """What the rule's own state_dict gives."""
    kind = _slot_prefix(rule)
    if isinstance(rule, PipeMareCorrection):
        moved = [kept(p, f"{kind}.moved") for p in rule.parameters]
        longest = [told(p, f"{kind}.longest") for p in rule.parameters]
        return {
            "moved": [
                torch.zeros_like(p.data) if one is None else one
                for p, one in zip(rule.parameters, moved, strict=True)
            ],
            "longest": max((each for each in longest if each is not None), default=1.0),
        }
    stepped = [told(p, f"{kind}.stepped") for p in rule.parameters]
    rates = [told(p, f"{kind}.rate") for p in rule.parameters]
    known = any(each is not None for each in stepped)
    return {
        "stepped": [each is True for each in stepped] if known else None,
        "kept": [kept(p, f"{kind}.kept") for p in rule.parameters],
        "rates": [rates[members[0]] if members else None for members in rule.members],
    }
