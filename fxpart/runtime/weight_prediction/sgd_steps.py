"""SGD steps some updates ahead: always ``a W + b x``, with two factors per group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpart.compat import foreach_add, foreach_add_, foreach_mul
from fxpart.runtime.weight_prediction.future_options import Options


def combine_linearly(
    weights: Sequence[torch.Tensor], others: Sequence[torch.Tensor], of_weight: float, of: float
) -> list[torch.Tensor]:
    """Return ``of_weight * weights + of * others`` as new tensors, without other allocations."""
    if of_weight == 1.0:
        return foreach_add(weights, others, alpha=of)
    made = foreach_mul(weights, [of_weight] * len(weights))
    foreach_add_(made, others, alpha=of)
    return made


def compute_zero_gradient_factors(options: Sequence[Options]) -> tuple[float, float]:
    """Return the factors of W and of the momentum buffer v after SGD steps with zero gradients.

    One step is linear in both: g = d W (weight decay d), v <- m v + (1 - dampening) g, and W <- W -
    lr v, or W - lr (g + m v) with Nesterov. Without decay the factors are 1 and -lr (m - m^(s+1)) /
    (1 - m) after s steps.
    """
    weight, velocity = (1.0, 0.0), (0.0, 1.0)  # each as factors of the current W and v
    for step in options:
        lr, m, decay = step["lr"], step["momentum"], step["weight_decay"]
        gradient = (decay * weight[0], decay * weight[1])
        if not m:
            move = gradient
        else:
            undamped = 1 - step["dampening"]
            velocity = (
                m * velocity[0] + undamped * gradient[0],
                m * velocity[1] + undamped * gradient[1],
            )
            move = velocity
            if step["nesterov"]:
                move = (gradient[0] + m * velocity[0], gradient[1] + m * velocity[1])
        weight = (weight[0] - lr * move[0], weight[1] - lr * move[1])
    return weight
