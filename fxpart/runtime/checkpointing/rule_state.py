"""State of prediction and correction rules in checkpoints, beside parameters and optimizers.

Captured while no minibatch is in flight. Per parameter: the state of its stage's rule, named by the
rule, so that another rule does not load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fxpart.runtime.weight_prediction import ErrorFeedback, PipeMareCorrection, Predictor
from fxpart.runtime.weight_prediction.difference import DifferencePredictor
from fxpart.runtime.weight_prediction.shadow import ShadowPredictor

if TYPE_CHECKING:
    from fxpart.runtime.pipeline import Pipeline

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


def iterate_rule_slots(pipeline: Pipeline) -> Iterator[tuple[torch.Tensor, str, Any]]:
    """Yield (parameter, slot, tensor or plain value) for each parameter."""
    for weights in pipeline.weights.values():
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
    pipeline: Pipeline,
    load_tensor: TensorLoader,
    load_value: ValueLoader,
    updates: int,
) -> None:
    """Restore the state of every rule after so many updates.

    load_tensor: returns a new tensor with this rank's part of a slot. load_value: returns a plain
    value. Both return None if the checkpoint has none.
    """
    for weights in pipeline.weights.values():
        states = [_state(rule, load_tensor, load_value) for rule in weights.rules()]
        weights.load_state_dict({"updates": updates, "rules": states})
        for rule in weights.rules():
            if isinstance(rule, Predictor):
                rule.coming.forget()


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
