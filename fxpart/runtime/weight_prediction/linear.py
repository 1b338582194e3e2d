"""Rule "linear": continue in the direction of the last step, W - (lr_1 + ... + lr_s) d.

Source: SpecTrain (arXiv 1809.02839) for SGD with momentum, XPipe (1911.04610) and PipeOptim
(2312.00839) for Adam. XPipe prints Adam's bias correction without its exponent, which doubles the
step at the tenth update. d is the direction of the optimizer's actual step:

* SGD with momentum: the momentum buffer. Without momentum the gradient, and with Nesterov gradient
  and buffer; the optimizer does not store these, so the rule stores a tensor per parameter.
* Adam, AdamW: m' / (sqrt(v') + eps), bias-corrected (amsgrad: the largest v), from the state;
  decoupled weight decay d also shrinks W by (lr_1 + ... + lr_s) d.
* NAdam: its combination of gradient and m', over the same root; stored, as Nesterov's.
* Other optimizers, subclasses that change the step, and complex parameters with the last three: the
  difference of the weights before and after the step (rule "difference").

With a constant gradient the prediction is exact for SGD without momentum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.optim.lr_scheduler import LRScheduler

from fxpart.compat import foreach_add_, foreach_copy_, foreach_mul_, get_write_count
from fxpart.runtime.weight_prediction.difference import DifferencePredictor
from fxpart.runtime.weight_prediction.future_options import Options
from fxpart.runtime.weight_prediction.optimizer_steps import (
    AdamStep,
    apply_adam_steps,
    combine_linearly,
    compute_nadam_direction,
    step_class,
)
from fxpart.runtime.weight_prediction.predictor import Predictor


def make_linear_predictor(
    optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
) -> Predictor:
    """Make the predictor for the optimizer's class, of rule "difference" if its step is unknown."""
    kind = step_class(optimizer)
    if kind is torch.optim.SGD:
        return LinearSGD(optimizer, scheduler)
    real = not any(p.is_complex() for group in optimizer.param_groups for p in group["params"])
    if kind in (torch.optim.Adam, torch.optim.AdamW) and real:
        return LinearAdam(optimizer, scheduler)
    if kind is torch.optim.NAdam and real:
        return LinearNAdam(optimizer, scheduler)
    return DifferencePredictor(optimizer, scheduler)


class LastGradientPredictor(Predictor):
    """Stores a tensor per parameter, computed from the gradients of the last step.

    After an update that was skipped because of non-finite gradients there is nothing to
    extrapolate: the parameters are predicted unchanged until the next update.
    """

    def before_update(self) -> None:
        """Record the write count of each parameter."""
        super().before_update()
        self._writes = [get_write_count(p) for p in self.parameters]

    def after_update(self) -> None:
        """Drop the gradients of parameters that were not written."""
        super().after_update()
        for place, p in enumerate(self.parameters):
            if get_write_count(p) == self._writes[place]:
                self.kept[place] = None

    def keep_gradients(self, group: int) -> None:
        """Store a group's gradients as its optimizer uses them, right before the step.

        They are negated to maximize, and include weight decay that is not decoupled.
        """
        places = [place for place in self.members[group] if self.moves(place)]
        stored: list[int] = []
        for place in places:
            kept, gradient = self.kept[place], self._gradient(place)
            if kept is None or gradient.is_sparse or kept.is_sparse:
                self.kept[place] = gradient.clone()
            else:
                stored.append(place)
        options = self.optimizer.param_groups[group]
        with torch.no_grad():
            foreach_copy_(self._stored(stored), [self._gradient(place) for place in stored])
            if options["maximize"]:
                foreach_mul_(self._stored(places), [-1.0] * len(places))
            if options["weight_decay"] and not options.get("decoupled_weight_decay"):
                decay = float(options["weight_decay"])
                foreach_add_(self._stored(places), self._weights(places), alpha=decay)

    def with_gradient(self, group: int) -> list[int]:
        """Return the indices of a group's parameters with stored gradients."""
        return [p for p in self.members[group] if self.moves(p) and self.kept[p] is not None]

    def _stored(self, places: list[int]) -> list[torch.Tensor]:
        """Return the stored tensors of the parameters at these indices."""
        found = [self.kept[place] for place in places]
        assert all(tensor is not None for tensor in found)
        return found  # type: ignore[return-value]

    def _gradient(self, place: int) -> torch.Tensor:
        gradient = self.parameters[place].grad
        assert gradient is not None
        return gradient.detach()


class LinearSGD(LastGradientPredictor):
    """Continues along the momentum buffer, or the stored gradients (no momentum, Nesterov)."""

    def before_update(self) -> None:
        """Store the gradients of the groups that need them."""
        super().before_update()
        for number, group in enumerate(self.optimizer.param_groups):
            if _needs_gradients(group):
                self.keep_gradients(number)

    def after_update(self) -> None:
        """Add the updated momentum buffer to Nesterov's gradients."""
        super().after_update()
        for number, group in enumerate(self.optimizer.param_groups):
            if group["nesterov"]:
                places = self.with_gradient(number)
                buffers = self._states(places, "momentum_buffer")
                with torch.no_grad():
                    foreach_add_(self._stored(places), buffers, alpha=float(group["momentum"]))

    def _predict_group(
        self, group: int, places: list[int], options: list[Options]
    ) -> list[torch.Tensor]:
        weights = self._weights(places)
        if not _needs_gradients(options[0]):
            buffers = self._states(places, "momentum_buffer")
            return combine_linearly(weights, buffers, 1.0, -rate(options))
        directions = [self.kept[place] for place in places]
        return step_along(weights, directions, 1.0, -rate(options))


def _needs_gradients(group: Options) -> bool:
    return bool(group["nesterov"] or not group["momentum"])


class LinearNAdam(LastGradientPredictor):
    """Continues along NAdam's direction, stored from the last step."""

    def before_update(self) -> None:
        """Store the gradients."""
        super().before_update()
        for number in range(len(self.members)):
            self.keep_gradients(number)

    def after_update(self) -> None:
        """Convert the gradients to NAdam's direction, as torch.optim.NAdam computes it."""
        super().after_update()
        for number, group in enumerate(self.optimizer.param_groups):
            places = self.with_gradient(number)
            steps = [float(step) for step in self._states(places, "step")]
            products = [float(product) for product in self._states(places, "mu_product")]
            beta1, beta2 = (float(beta) for beta in group["betas"])
            factors = []
            for step, product in zip(steps, products, strict=True):
                mu, next_mu = (
                    beta1 * (1 - 0.5 * 0.96 ** (n * group["momentum_decay"]))
                    for n in (step, step + 1)
                )
                factors.append(
                    ((1 - mu) / (1 - product), next_mu / (1 - product * next_mu), 1 - beta2**step)
                )
            firsts, seconds = self._states(places, "exp_avg"), self._states(places, "exp_avg_sq")
            with torch.no_grad():
                compute_nadam_direction(
                    self._stored(places), firsts, seconds, factors, float(group["eps"])
                )

    def _predict_group(
        self, group: int, places: list[int], options: list[Options]
    ) -> list[torch.Tensor]:
        weights, directions = self._weights(places), [self.kept[place] for place in places]
        return step_along(weights, directions, 1 - shrink(options), -rate(options))


class LinearAdam(Predictor):
    """Continues along m' / (sqrt(v') + eps), from the optimizer's state."""

    def _predict_group(
        self, group: int, places: list[int], options: list[Options]
    ) -> list[torch.Tensor]:
        beta1, beta2 = options[0]["betas"]
        keep, by = 1 - shrink(options), rate(options)
        moves = []
        for step in self._states(places, "step"):
            now = float(step)
            root = math.sqrt(1 - beta2**now)
            moves.append([AdamStep(keep, by / (1 - beta1**now), root, options[0]["eps"])])
        seconds = "max_exp_avg_sq" if options[0]["amsgrad"] else "exp_avg_sq"
        firsts = self._states(places, "exp_avg")
        return apply_adam_steps(self._weights(places), firsts, self._states(places, seconds), moves)


def rate(options: Sequence[Options]) -> float:
    """Return the sum of the future learning rates."""
    return float(sum(step["lr"] for step in options))


def shrink(options: Sequence[Options]) -> float:
    """Return the fraction by which decoupled weight decay shrinks the weights."""
    return float(
        sum(
            step["lr"] * step["weight_decay"] if step.get("decoupled_weight_decay") else 0.0
            for step in options
        )
    )


def step_along(
    weights: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor | None],
    of_weight: float,
    of: float,
) -> list[torch.Tensor]:
    """Return ``of_weight * weights + of * directions`` as new tensors; copies without a
    direction.
    """
    known = [(w, d) for w, d in zip(weights, directions, strict=True) if d is not None]
    moved = iter(combine_linearly([w for w, _ in known], [d for _, d in known], of_weight, of))
    return [
        w.clone() if d is None else next(moved) for w, d in zip(weights, directions, strict=True)
    ]
