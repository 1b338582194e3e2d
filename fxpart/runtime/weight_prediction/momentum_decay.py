"""Rule "decaying": as if all coming gradients were zero, so that the momentum decays; closed forms.

SGD: W - lr v (m - m^(s+1)) / (1 - m), bounded for any s. Adam, AdamW: the sum over j = 1..s of
Adam's step with m b1^j and v b2^j. The rates, and decay of weights on the way, are the optimizer's:
the same as rule "shadow" without its copies. Adam with decay in its gradients, and all
other optimizers, go through "shadow". Source: the notes on weight versions, rule 3 (MSNAG's).
"""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LRScheduler

from fxpart.runtime.weight_prediction.adam_steps import AdamStep, apply_adam_steps
from fxpart.runtime.weight_prediction.future_options import Options
from fxpart.runtime.weight_prediction.predictor import Predictor
from fxpart.runtime.weight_prediction.sgd_steps import (
    combine_linearly,
    compute_zero_gradient_factors,
)
from fxpart.runtime.weight_prediction.shadow import ShadowPredictor
from fxpart.runtime.weight_prediction.step_class import step_class


def make_decaying_predictor(
    optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
) -> Predictor:
    """The rule for this optimizer's class; through rule "shadow" where there is no closed form."""
    kind = step_class(optimizer)
    if kind is torch.optim.SGD:
        return DecayingSGD(optimizer, scheduler)
    if kind in (torch.optim.Adam, torch.optim.AdamW) and all(map(_closed, optimizer.param_groups)):
        return DecayingAdam(optimizer, scheduler)
    return ShadowPredictor(optimizer, scheduler)


def _closed(group: Options) -> bool:
    decays = group["weight_decay"] and not group.get("decoupled_weight_decay")
    return not decays and not any(p.is_complex() for p in group["params"])


class DecayingSGD(Predictor):
    """Two numbers for each group: of the weights, and of the momentum buffers."""

    def _ahead(self, group: int, places: list[int], options: list[Options]) -> list[torch.Tensor]:
        of_weight, of = compute_zero_gradient_factors(options)
        weights = self._weights(places)
        if not options[0]["momentum"]:
            return [w * of_weight for w in weights]
        buffers = self._states(places, "momentum_buffer")
        return combine_linearly(weights, buffers, of_weight, of)


class DecayingAdam(Predictor):
    """As many steps as updates, each without a gradient."""

    def _ahead(self, group: int, places: list[int], options: list[Options]) -> list[torch.Tensor]:
        steps = [float(step) for step in self._states(places, "step")]
        table = {step: _moves(step, options) for step in set(steps)}
        seconds = "max_exp_avg_sq" if options[0]["amsgrad"] else "exp_avg_sq"
        return apply_adam_steps(
            self._weights(places),
            self._states(places, "exp_avg"),
            self._states(places, seconds),
            [table[step] for step in steps],
        )


def _moves(done: float, options: list[Options]) -> list[AdamStep]:
    """Adam's steps after ``done`` of them; what decays of m and v is in their factors."""
    moves, first, second = [], 1.0, 1.0
    for number, step in enumerate(options, 1):
        beta1, beta2 = step["betas"]
        first *= beta1
        second *= 1.0 if step["amsgrad"] else beta2  # the largest v stays
        rest1, rest2 = (1 - beta ** (done + number) for beta in (beta1, beta2))
        # sqrt(second v) / sqrt(rest2): infinitely large a root where nothing of v is left.
        root = math.sqrt(rest2 / second) if second else math.inf
        keep = 1 - step["lr"] * step["weight_decay"]
        moves.append(AdamStep(keep, step["lr"] * first / rest1, root, step["eps"]))
    return moves
