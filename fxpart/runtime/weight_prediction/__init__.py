"""Weight prediction: weights some updates ahead, for asynchronous pipelines instead of stale ones.

One rule per file; :func:`make_predictor` makes one for an optimizer. Also PipeMare's alternative
(:class:`PipeMareCorrection`, :func:`discounted_lr`), feedback of the error of late updates
(:class:`ErrorFeedback`), and an optimizer for delayed gradients (:class:`SpikeCompensatedSGD`). See
docs/asynchronous_training.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler

from fxpart.errors import error
from fxpart.runtime.weight_prediction.difference import DifferencePredictor
from fxpart.runtime.weight_prediction.error_feedback import ErrorFeedback
from fxpart.runtime.weight_prediction.linear import make_linear_predictor
from fxpart.runtime.weight_prediction.momentum_decay import make_decaying_predictor
from fxpart.runtime.weight_prediction.pipemare import PipeMareCorrection, discounted_lr
from fxpart.runtime.weight_prediction.predictor import Predictor
from fxpart.runtime.weight_prediction.shadow import ShadowPredictor
from fxpart.runtime.weight_prediction.spike_compensation import SpikeCompensatedSGD

__all__ = [
    "RULES", "ErrorFeedback", "PipeMareCorrection", "Predictor", "SpikeCompensatedSGD",
    "discounted_lr", "make_predictor",
]  # fmt: skip

Make = Callable[[torch.optim.Optimizer, LRScheduler | None], Predictor]

# The same rules as fxpart.schedule.weight_modes.RULES, in the same order (tested).
RULES: Mapping[str, Make] = {
    "linear": make_linear_predictor,
    "decaying": make_decaying_predictor,
    "difference": DifferencePredictor,
    "shadow": ShadowPredictor,
}


def make_predictor(
    rule: str, optimizer: torch.optim.Optimizer, *, scheduler: LRScheduler | None = None
) -> Predictor:
    """Make a predictor of the optimizer's parameters.

    rule: "linear", along the direction of the last step; "decaying", with zero future gradients, in
    closed form; "difference", extrapolating the last change; "shadow", like "decaying" with steps
    of the optimizer itself on a clone. For optimizers with an unknown step, "linear" is
    "difference" and "decaying" is "shadow". scheduler: of the learning rate, stepped once after
    each optimizer step; future rates are read from a copy of it. Raises FXP109 for an unknown rule,
    or a scheduler or optimizer that cannot be copied.
    """
    if rule not in RULES:
        raise error(
            "FXP109",
            where=f"rule={rule!r}",
            why="this prediction rule is unknown",
            fix=f"use {' or '.join(RULES)}",
        )
    return RULES[rule](optimizer, scheduler)
