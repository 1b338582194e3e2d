"""Rule "decaying": all future gradients are zero, so the momentum decays; in closed form.

SGD: W - lr v (m - m^(s+1)) / (1 - m), bounded for any s. Adam, AdamW: the sum over j = 1..s of
Adam's step with m b1^j and v b2^j. Rates and weight decay are the optimizer's. The result equals
rule "shadow" without its copies, which is used for Adam with coupled weight decay and for all other
optimizers. Source: MSNAG.
"""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LRScheduler

from fxpart.runtime.weight_prediction.future_options import Options
from fxpart.runtime.weight_prediction.optimizer_steps import (
    AdamStep,
    apply_adam_steps,
    combine_linearly,
    compute_zero_gradient_factors,
    step_class,
)
from fxpart.runtime.weight_prediction.predictor import Predictor
from fxpart.runtime.weight_prediction.shadow import ShadowPredictor


def make_decaying_predictor(
    optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
) -> Predictor:
    """Make the predictor for the optimizer's class, of rule "shadow" if there is no closed form."""
    kind = step_class(optimizer)
    if kind is torch.optim.SGD:
        return DecayingSGD(optimizer, scheduler)
    if kind in (torch.optim.Adam, torch.optim.AdamW) and all(
        map(_has_closed_form, optimizer.param_groups)
    ):
        return DecayingAdam(optimizer, scheduler)
    return ShadowPredictor(optimizer, scheduler)


def _has_closed_form(group: Options) -> bool:
    decays = group["weight_decay"] and not group.get("decoupled_weight_decay")
    return not decays and not any(p.is_complex() for p in group["params"])


class DecayingSGD(Predictor):
    """Applies one factor per group to the weights and one to the momentum buffers."""

    def _predict_group(
        self, group: int, places: list[int], options: list[Options]
    ) -> list[torch.Tensor]:
        of_weight, of = compute_zero_gradient_factors(options)
        weights = self._weights(places)
        if not options[0]["momentum"]:
            return [w * of_weight for w in weights]
        buffers = self._states(places, "momentum_buffer")
        return combine_linearly(weights, buffers, of_weight, of)


class DecayingAdam(Predictor):
    """Applies one step without a gradient per update."""

    def _predict_group(
        self, group: int, places: list[int], options: list[Options]
    ) -> list[torch.Tensor]:
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
    """Return Adam's steps after ``done`` steps, with the decay of m and v in their factors."""
    moves, first, second = [], 1.0, 1.0
    for number, step in enumerate(options, 1):
        beta1, beta2 = step["betas"]
        first *= beta1
        second *= 1.0 if step["amsgrad"] else beta2  # the largest v is constant
        correction1, correction2 = (1 - beta ** (done + number) for beta in (beta1, beta2))
        # sqrt(second v) / sqrt(rest2); an infinite root if v has decayed to zero.
        root = math.sqrt(correction2 / second) if second else math.inf
        keep = 1 - step["lr"] * step["weight_decay"]
        moves.append(AdamStep(keep, step["lr"] * first / correction1, root, step["eps"]))
    return moves
