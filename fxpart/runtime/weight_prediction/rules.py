"""The table of rules, and what makes a predictor of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler

from fxpart.errors import error
from fxpart.runtime.weight_prediction.difference import DifferencePredictor
from fxpart.runtime.weight_prediction.linear import make_linear_predictor
from fxpart.runtime.weight_prediction.momentum_decay import make_decaying_predictor
from fxpart.runtime.weight_prediction.predictor import Predictor
from fxpart.runtime.weight_prediction.shadow import ShadowPredictor

Make = Callable[[torch.optim.Optimizer, LRScheduler | None], Predictor]

# Those of fxpart.schedule.weight_modes.RULES, in the same order: a test holds them equal.
RULES: Mapping[str, Make] = {
    "linear": make_linear_predictor,
    "decaying": make_decaying_predictor,
    "difference": DifferencePredictor,
    "shadow": ShadowPredictor,
}


def make_predictor(
    rule: str, optimizer: torch.optim.Optimizer, *, scheduler: LRScheduler | None = None
) -> Predictor:
    """What looks ahead by the rule over the optimizer's parameters.

    rule: "linear", along the direction of the last step; "decaying", as if all coming gradients
    were zero, in closed form; "difference", on as the weights last moved; "shadow", as "decaying"
    by steps of the optimizer itself on a clone. For optimizers whose step they do not know the
    first is "difference", the second "shadow". scheduler: of the optimizer's learning rate,
    stepped once after each of its steps; the coming rates are read from a copy of it. Raises FXP109
    for an unknown rule, or a scheduler or optimizer that cannot be copied.
    """
    if rule not in RULES:
        raise error(
            "FXP109",
            where=f"rule={rule!r}",
            why="there is no prediction rule of that name",
            fix=f"one of {', '.join(RULES)}",
        )
    return RULES[rule](optimizer, scheduler)
